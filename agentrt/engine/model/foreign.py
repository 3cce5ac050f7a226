"""Models of families that we do not decode: transformers' own module, whose layers attend our pages.

Transformers lets a function stand in for attention. A layer gives it the queries, keys and values of all rows, turned by
their positions already; ours writes keys and values to the rows' pages and attends these. All else in such a module goes
row by row, so the rows of any sequences pass through it as one text. On the CPU its linear layers are packed and exact, as
our decoder's are; of its other operations no bits are promised.

What a config does not say (heads, windows, what a layer calls attention) is learned by running the module. Then it is
asked for some ids twice: as transformers runs it, and in chunks over pages. A module that keeps more than keys and values,
or attends in a way that our kernels do not, is refused by name or shows there.

Suffixes: N rows, H query heads, K KV heads, D a head's size, G cache groups, S sequences, P pages, M rows that are wanted.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agentrt.core.errors import UsageError
from agentrt.engine.model.config import group_windows, groups_of
from agentrt.engine.model.decoder import OpsName, PagedKV, Twins, load_ops, ops_for
from agentrt.engine.model.folder import read_folder
from agentrt.engine.model.linear import Linear
from agentrt.engine.model.loader import hash_weights
from agentrt.engine.model.quantized import FULL
from agentrt_kernels.pages import PageLayout

NAME = "agentrt_pages"
"""Our attention among those of transformers."""
LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Those that keep keys and values only."""
LENGTH_DEPENDENT = {"dynamic", "longrope"}
"""Rotary positions whose angles change with the length of the whole, so that cached keys would be turned by others."""
REFUSALS = (ValueError, OSError, RuntimeError)
"""How transformers says that it cannot."""
PROBE_IDS, PROBE_PAGE = 24, 4
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far a row of logits may be from transformers' own, as a part of its spread."""


class Asked(NamedTuple):
    """What a layer asks of attention."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    scale: float
    cap: float
    """Of the scores; 0 for none."""


class Foreign(NamedTuple):
    """A model and the hash of the weights in its files."""

    decoder: "ForeignModel"
    model_hash: str


class _RefusedError(Exception):
    """Why a module cannot run over pages: the end of a sentence."""


Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Asked], Tensor]
"""Layer, `q_1HND`, `k_1KND`, `v_1KND` to `out_1NHD`."""
_attend: ContextVar[Attend] = ContextVar("attend")
"""Of the forward that runs in this thread."""


def load_foreign(folder: Path, device: str, why: str, ops: OpsName | None = None) -> Foreign:
    """The model in `folder`, which our decoder refused (`why`), as transformers' module. `UsageError` if it cannot be."""
    try:
        transformers: Any = import_module("transformers")
    except ModuleNotFoundError:
        raise UsageError(f"{why}. Other models run through transformers: pip install 'agentrt[transformers]'") from None
    own_ops, dtype = ops_for(torch.device(device))
    transformers.AttentionInterface.register(NAME, _attention)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        _check(config.get_text_config())
        module, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=NAME, trust_remote_code=False, local_files_only=True,
            use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
        if missing := sorted(found["missing_keys"]):
            raise _RefusedError(f"its files lack {missing[0]}")
        model = ForeignModel(module.to(device).eval(), ops or own_ops)
        model.check()
    except (_RefusedError, *REFUSALS) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UsageError(f"{why}. Nor can it run through transformers' module: {reason}") from error
    return Foreign(model, hash_weights(read_folder(folder)))


class ForeignModel:
    """A `CausalModel`. Holds its weights and no other state, so any number of threads may call it."""

    is_capturable = False
    precision = FULL

    def __init__(self, module: Any, ops: OpsName) -> None:
        """`module` is a causal model of transformers, loaded with the attention of `NAME`, in the type of the device."""
        self._module, self._ops_name, self._ops = module, ops, load_ops(ops, "silu")
        if self.device.type == "cpu":
            _make_exact(module)
        self.context_length = _context_length(module.config.get_text_config())
        self._picks_rows = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._asked, self.vocab_size = _learned(module)
        windows = [asked.window for asked in self._asked]
        self.windows, self._groups = group_windows(windows), groups_of(windows)
        self._still = torch.ones(self.context_length, 0, device=self.device)
        """Angles of no dimensions: what comes to attention is turned already."""
        self.shapes = {name: tuple(tensor.shape) for name, tensor in _updated(module)}
        self.num_parameters = sum(tensor.numel() for _, tensor in _updated(module))

    @property
    def device(self) -> torch.device:
        device: torch.device = self._module.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._module.dtype
        return dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the pages."""
        return self.dtype

    @property
    def query_group(self) -> int:
        """Query heads that share a KV head."""
        return self._asked[0].heads // self._asked[0].kv_heads

    def page_layouts(self, page_size: int) -> tuple[PageLayout, ...]:
        """For each cache group, where KV lies in pages of `page_size` tokens."""
        firsts = [self._asked[self._groups.index(group)] for group in range(len(self.windows))]
        return tuple(
            PageLayout(page_size, self._groups.count(group), first.kv_heads, first.head_dim)
            for group, first in enumerate(firsts)
        )

    def with_weights(self, weights: Mapping[str, Tensor]) -> "ForeignModel":
        """The same model with other weights; the module is another, what it does not replace is shared."""
        held = [*self._module.parameters(), *self._module.buffers()]
        module = copy.deepcopy(self._module, {id(tensor): tensor for tensor in held})
        own = dict(_updated(module))
        module.load_state_dict(
            {name: tensor.to(own[name].dtype) for name, tensor in weights.items()}, strict=False, assign=True
        )
        module.tie_weights()
        return ForeignModel(module, self._ops_name)

    @torch.inference_mode()
    def forward(
        self, token_ids_N: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_GSP: Tensor,
        kv: Sequence[PagedKV], out_rows_M: Tensor, *plan: object, taps: dict[int, Tensor | None] | None = None,
        twins: Twins | None = None,
    ) -> Tensor:  # fmt: skip
        """As `Decoder.forward`; hidden states are not handed out."""
        assert not taps, "a draft model is refused beside a foreign one"
        tables = [tables_SP.contiguous() for tables_SP in tables_GSP]
        with _attending(_Paged(self, positions_N, table_of_N, tables, kv, twins, plan).attend):
            return self._logits(token_ids_N, positions_N, out_rows_M)

    def check(self) -> float:
        """How far chunks over pages are from the logits that transformers gives for the whole, as a part of their spread.

        Raises if that is far.
        """
        count = min(PROBE_IDS, self.context_length)
        ids_N = torch.arange(count, device=self.device) % self.vocab_size
        self._module.set_attn_implementation("eager")
        with torch.inference_mode():
            expected_NV = self._module(ids_N[None], use_cache=False).logits[0].float()
        self._module.set_attn_implementation(NAME)
        found_NV = torch.cat(list(self._in_chunks(ids_N))).float()
        spread_N = (expected_NV - expected_NV.mean(1, keepdim=True)).norm(dim=1)
        farthest: float = ((found_NV - expected_NV).norm(dim=1) / spread_N).max().item()
        if not farthest <= CLOSE[self.dtype]:
            raise _RefusedError(
                f"read in parts, its logits are {farthest:.1g} of their spread from those for the whole; "
                "it keeps more than keys and values, or attends in a way of its own"
            )
        return farthest

    def _in_chunks(self, ids_N: Tensor) -> Iterator[Tensor]:
        """The logits of a text, in three steps over pages of their own."""
        count, layouts = len(ids_N), self.page_layouts(PROBE_PAGE)
        places = -(-count // PROBE_PAGE)
        kv = [
            PagedKV(torch.zeros(places * layout.page_stride, dtype=self.dtype, device=self.device), layout)
            for layout in layouts
        ]
        tables_GSP = torch.arange(places, device=self.device).int().expand(len(layouts), 1, -1).contiguous()
        positions_N = torch.arange(count, device=self.device)
        for start, stop in pairwise(sorted({0, count // 2, count // 2 + 1, count})):
            rows = stop - start
            yield self.forward(
                ids_N[start:stop], positions_N[start:stop], torch.zeros(rows, dtype=torch.int32, device=self.device),
                tables_GSP, kv, torch.arange(rows, device=self.device),
            )  # fmt: skip

    def _attention(self, cap: float) -> Callable[..., Tensor]:
        """That of the operations; with a cap that of the definition, if they are the CPU's."""
        if not cap:
            return self._ops.paged_attention
        name = "reference" if self._ops_name == "cpu" else self._ops_name
        return partial(import_module(f"agentrt_kernels.paged_attention.{name}").paged_attention, cap=cap)

    def _logits(self, token_ids_N: Tensor, positions_N: Tensor, out_rows_M: Tensor) -> Tensor:
        inputs = {"input_ids": token_ids_N[None], "position_ids": positions_N[None], "use_cache": False}
        if self._picks_rows:
            inputs["logits_to_keep"] = out_rows_M
        logits_NV: Tensor = self._module(**inputs).logits[0]
        return logits_NV if self._picks_rows else logits_NV[out_rows_M]


class _Paged(NamedTuple):
    """The attention of one forward."""

    model: ForeignModel
    positions_N: Tensor
    table_of_N: Tensor
    tables_G: list[Tensor]
    kv: Sequence[PagedKV]
    twins: Twins | None
    plan: tuple[object, ...]

    def attend(self, layer: nn.Module, q_1HND: Tensor, k_1KND: Tensor, v_1KND: Tensor, asked: Asked) -> Tensor:
        model, index = self.model, _index_of(layer)
        group, ops = model._groups[index], model._ops
        depth = model._groups[:index].count(group)
        scaled_1HND = q_1HND * (asked.scale * asked.head_dim**0.5)  # our attention divides by the root of the size
        heads_NE = torch.cat([scaled_1HND, k_1KND, v_1KND], dim=1)[0].transpose(0, 1).flatten(1).contiguous()
        pages = (self.tables_G[group], *self.kv[group], depth)
        if self.twins is not None:
            rows_W, table_of_W = self.twins
            ops.rotary(heads_NE[rows_W], model._still, model._still, self.positions_N[rows_W], table_of_W, *pages, None)
        where = (self.positions_N, self.table_of_N, *pages)
        q_NHD = ops.rotary(heads_NE, model._still, model._still, *where, None)
        return model._attention(asked.cap)(q_NHD, *where, asked.window, *self.plan)[None]


class _Recorder(dict[int, Asked]):
    """What each layer asks, by its index; nothing is attended."""

    def __call__(self, layer: nn.Module, q_1HND: Tensor, k_1KND: Tensor, v_1KND: Tensor, asked: Asked) -> Tensor:
        if v_1KND.shape != k_1KND.shape:
            raise _RefusedError(f"a head's keys have {k_1KND.shape[-1]} numbers and its values {v_1KND.shape[-1]}")
        if asked.head_dim % 2:
            raise _RefusedError(f"a head has {asked.head_dim} numbers, which is odd")
        if _index_of(layer) in self:
            raise _RefusedError(f"layer {_index_of(layer)} attends more than once")
        self[_index_of(layer)] = asked
        return torch.zeros_like(q_1HND).transpose(1, 2)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Our attention, as transformers calls it: `out_1NHD`, and no weights."""
    for name in ("s_aux", "position_bias"):
        if others.get(name) is not None:
            raise _RefusedError(f"its attention takes {name}, which our kernels do not")
    if attention_mask is not None or not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise _RefusedError("a layer attends by a mask of its own, or what comes later, or another text")
    _, heads, _, head_dim = query.shape
    scale = head_dim**-0.5 if scaling is None else float(scaling)
    asked = Asked(heads, key.shape[1], head_dim, sliding_window or 0, scale, softcap or 0.0)
    return _attend.get()(module, query, key, value, asked), None


@contextmanager
def _attending(attend: Attend) -> Iterator[None]:
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def _learned(module: Any) -> tuple[list[Asked], int]:
    """What each layer asks, and how many ids there are logits for."""
    recorder = _Recorder()
    with _attending(recorder), torch.inference_mode():
        logits_1NV = module(torch.zeros(1, 2, dtype=torch.long, device=module.device), use_cache=False).logits
    layers = int(module.config.get_text_config().num_hidden_layers)
    if sorted(recorder) != list(range(layers)):
        raise _RefusedError(f"of its {layers} layers {len(recorder)} ask for attention by transformers' interface")
    asked = [recorder[index] for index in range(layers)]
    groups = groups_of([one.window for one in asked])
    if len({(group, one.kv_heads, one.head_dim) for group, one in zip(groups, asked, strict=True)}) > len(set(groups)):
        raise _RefusedError("layers that keep KV equally long have heads of different numbers or sizes")
    if len({one.heads // one.kv_heads for one in asked}) > 1:
        raise _RefusedError("its layers have different numbers of query heads for a KV head")
    return asked, int(logits_1NV.shape[-1])


def _check(config: Any) -> None:
    """Raise `_RefusedError` for what the config says is more than attention over what came before."""
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise _RefusedError("it attends another text (cross attention)")
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES):
        raise _RefusedError(f"it has layers of {', '.join(others)}: only keys and values can be kept in pages")
    if getattr(config, "quantization_config", None) is not None:
        raise _RefusedError("it is quantised (quantization_config)")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}
    if found := kinds & LENGTH_DEPENDENT:
        raise _RefusedError(f"its positions are of the kind {found.pop()}: keys turn anew when a text becomes long")


def _context_length(config: Any) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise _RefusedError("its config.json does not say max_position_embeddings")
    return length


def _index_of(layer: nn.Module) -> int:
    index = getattr(layer, "layer_idx", None)
    if not isinstance(index, int):
        raise _RefusedError("its layers do not know their numbers (layer_idx)")
    return index


def _make_exact(module: nn.Module) -> None:
    """Have its linear layers packed and multiplied as those of our decoder."""
    for linear in module.modules():
        if type(linear) is nn.Linear:
            linear.forward = _exact(linear)  # type: ignore[method-assign,assignment]


def _exact(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    product = Linear(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())

    def forward(x: Tensor) -> Tensor:
        return product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], linear.out_features)

    return forward


def _updated(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What an update brings: parameters, each once, and what else of a checkpoint is no whole number."""
    yield from module.named_parameters()
    kept = module.state_dict().keys()
    yield from ((name, one) for name, one in module.named_buffers() if name in kept and one.is_floating_point())
