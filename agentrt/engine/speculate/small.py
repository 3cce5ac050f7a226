"""A small model that drafts for a large one: any decoder with the same vocabulary. It sees ids and nothing of the target."""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from agentrt.engine.model.decoder import Decoder, PagedKV, expected_shapes
from agentrt.engine.model.tensors import overwrite
from agentrt.engine.speculate.head import Step
from agentrt.engine.weights import Install
from agentrt_kernels.pages import PageLayout


class SmallModel:
    """A whole decoder behind the interface of a draft model."""

    kind = "small"
    taps: tuple[int, ...] = ()
    ids_V: Tensor | None = None

    def __init__(self, decoder: Decoder, target: Decoder) -> None:
        self.decoder, self.target = decoder, target
        self.windows, self.context_length = decoder.windows, decoder.context_length
        self.query_group = decoder.query_group
        self.shapes = expected_shapes(decoder.config)

    def stage(self, weights: Mapping[str, Tensor]) -> Install:
        """New weights of the same shapes."""
        own = {name: tensor.to(self.decoder.device, self.decoder.dtype, copy=True) for name, tensor in weights.items()}
        return partial(self._use, self.decoder.with_weights(own))

    def _use(self, decoder: Decoder) -> None:
        if decoder.device.type == "cpu":
            self.decoder = decoder
        else:
            overwrite(self.decoder, decoder)  # graphs read the memory of the weights that they were captured with

    def page_layouts(self, page_size: int) -> tuple[PageLayout, ...]:
        """As the decoder's."""
        return self.decoder.page_layouts(page_size)

    def fuse(self, taken_NF: Tensor) -> Tensor:
        raise AssertionError("it taps nothing")

    def forward(
        self, token_ids_N: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_GSP: Tensor, kv: Sequence[PagedKV],
        out_rows_M: Tensor, features_ND: Tensor | None = None, *plan: object,
    ) -> Step:  # fmt: skip
        """As `Decoder.forward`."""
        forward = self.decoder.forward
        return Step(forward(token_ids_N, positions_N, table_of_N, tables_GSP, kv, out_rows_M, *plan), None)
