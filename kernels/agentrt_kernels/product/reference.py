"""The product of activations with a weight: the definition."""

from torch import Tensor


def product(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """`x_NI @ weight_OI.T`."""
    return x_NI @ weight_OI.T
