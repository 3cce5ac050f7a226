"""Rotary positions: what a config says of them, and the angles as tables by position.

A table, and not a cosine at each step: a library may compute an element by vector or by scalar code according to
where it stands, and a position's angle must not depend on that.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

Positive = Annotated[float, msgspec.Meta(gt=0)]
Length = Annotated[int, msgspec.Meta(gt=0)]


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Llama 3's stretch of slow rotary frequencies."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Length

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be above low_freq_factor")


class LinearScaling(msgspec.Struct, frozen=True, kw_only=True):
    """All frequencies divided by one factor."""

    factor: Positive


class YarnScaling(msgspec.Struct, frozen=True, kw_only=True):
    """YaRN (arXiv 2309.00071): slow frequencies divided by the factor, and attention sharpened."""

    factor: Positive
    original_max_position_embeddings: Length
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """Of the angles' sines and cosines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.sharpness(self.mscale) / self.sharpness(self.mscale_all_dim)
        return self.sharpness(1.0)

    def sharpness(self, mscale: float) -> float:
        """What grows with the logarithm of the factor."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


class Rope(msgspec.Struct, frozen=True):
    """The rotary positions of a layer. A layer without any (NoPE) has no `Rope`."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | YarnScaling | None = None


def parse_rope(parameters: Mapping[str, Any], theta: float) -> Rope:
    """The `Rope` of a config's parameters; `theta` is the base where they have none. `ValueError` if we lack the kind."""
    theta = float(parameters.get("rope_theta") or theta)
    if not 1 < theta < math.inf:
        raise ValueError(f"rope_theta must be above 1, not {theta}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, msgspec.convert(parameters, LinearScaling))
    if kind == "llama3":
        return Rope(theta, msgspec.convert(parameters, Llama3Scaling))
    if kind == "yarn":
        return Rope(theta, msgspec.convert(parameters, YarnScaling))
    raise ValueError(f"the rope type {kind!r} is not supported; known are 'default', 'linear', 'llama3' and 'yarn'")


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """Parameters of which `parse_rope` makes this `Rope`."""
    kinds = {LinearScaling: "linear", Llama3Scaling: "llama3", YarnScaling: "yarn"}
    scaling = (
        {} if rope.scaling is None else {"rope_type": kinds[type(rope.scaling)], **msgspec.to_builtins(rope.scaling)}
    )
    return {"rope_type": "default", "rope_theta": rope.theta, **scaling}


def rope_tables(rope: Rope | None, head_dim: int, context_length: int) -> tuple[Tensor, Tensor]:
    """`cos_TR` and `sin_TR` for every position of the context and the first half of a head's dimensions.

    Without `rope` every angle is 0, which leaves queries and keys as they are.
    """
    frequencies_R = torch.zeros(head_dim // 2) if rope is None else _frequencies(rope, head_dim)
    angles_TR = torch.arange(context_length, dtype=torch.float32).unsqueeze(1) * frequencies_R
    magnitude = rope.scaling.magnitude if rope is not None and isinstance(rope.scaling, YarnScaling) else 1.0
    return angles_TR.cos() * magnitude, angles_TR.sin() * magnitude


def _frequencies(rope: Rope, head_dim: int) -> Tensor:
    exponents_R = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies_R = 1.0 / rope.theta**exponents_R
    match rope.scaling:
        case LinearScaling(factor=factor):
            return frequencies_R / factor
        case Llama3Scaling() as scaling:
            return _stretch(frequencies_R, scaling)
        case YarnScaling() as scaling:
            return _ramp(frequencies_R, rope.theta, head_dim, scaling)
        case _:
            return frequencies_R


def _stretch(frequencies_R: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow frequencies divided by the factor, fast ones kept, a ramp between."""
    turns_R = scaling.original_max_position_embeddings * frequencies_R / (2 * math.pi)
    kept_R = (turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_R = kept_R.clamp(0.0, 1.0)
    return frequencies_R * (kept_R + (1.0 - kept_R) / scaling.factor)


def _ramp(frequencies_R: Tensor, theta: float, head_dim: int, scaling: YarnScaling) -> Tensor:
    """Frequencies kept up to the dimension that turns `beta_fast` times, divided from that of `beta_slow` on."""

    def dimension(turns: float) -> float:
        wavelengths = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    divided_R = ((torch.arange(len(frequencies_R), dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies_R / scaling.factor * divided_R + frequencies_R * (1.0 - divided_R)
