"""`CausalModel`: what a runner needs of a model, be it our decoder or transformers' module over our pages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from agentrt.engine.model.decoder import PagedKV, Twins
from agentrt.engine.model.quantized import Precision
from agentrt_kernels.pages import PageLayout


class CausalModel(Protocol):
    """Token ids and pages in, logits out."""

    is_capturable: bool
    """A step of it can be a CUDA graph: it has the same launches whatever its rows hold."""
    precision: Precision
    num_parameters: int

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the pages."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer; the tokenizer may know fewer ids."""

    @property
    def context_length(self) -> int: ...

    @property
    def windows(self) -> tuple[int, ...]:
        """Of its cache groups; 0 keeps everything."""

    @property
    def query_group(self) -> int:
        """Query heads that share a KV head."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the weights that an update brings."""

    @property
    def with_weights(self) -> Callable[[Mapping[str, Tensor]], "CausalModel"]:
        """The same model with other weights, those of `shapes`."""

    def page_layouts(self, page_size: int) -> tuple[PageLayout, ...]:
        """For each cache group, where KV lies in pages of `page_size` tokens."""

    def forward(
        self, token_ids_N: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_GSP: Tensor,
        kv: Sequence[PagedKV], out_rows_M: Tensor, *plan: object, taps: dict[int, Tensor | None] | None = None,
        twins: Twins | None = None,
    ) -> Tensor:  # fmt: skip
        """See `Decoder.forward`."""
