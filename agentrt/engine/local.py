"""An engine in this process, from a model folder."""

from pathlib import Path

import torch

from agentrt.core.errors import UsageError
from agentrt.core.models import find_model
from agentrt.core.protocol import EngineInfo
from agentrt.core.spec import EngineSpec
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.kv.group import Pages, fitted
from agentrt.engine.model.causal import CausalModel
from agentrt.engine.model.config import ModelConfig, NotDecodedError, load_config
from agentrt.engine.model.decoder import OpsName
from agentrt.engine.model.foreign import Foreign, load_foreign
from agentrt.engine.model.loader import LoadedModel, load_model
from agentrt.engine.model.quantized import FULL, Precision
from agentrt.engine.runner import ModelRunner
from agentrt.engine.service import EngineService
from agentrt.engine.speculate.drafter import Drafter, DraftModel
from agentrt.engine.speculate.load import load_draft
from agentrt.engine.step import EngineCore
from agentrt_kernels.quantized.reference import SCALE_SIZE

STAGED_COPIES = 2
"""Of the weights, while new ones are staged: as they came, and as the decoder has them."""


def local_engine(folder: Path, tokenizer: Tokenizer, spec: EngineSpec) -> EngineService:
    """The engine over the model in `folder`; its caller enters and leaves it. `UsageError` if it cannot be loaded.

    Ids of the output layer that the tokenizer does not know are masked before sampling.
    """
    loaded = _loaded(folder, spec)
    draft = _draft(loaded, spec) if spec.draft and spec.speculate != "off" else None
    spec = sized(spec, loaded.decoder, draft)
    runner = _runner(loaded.decoder, spec)
    drafter = Drafter(draft, runner, spec, _vocab_size(tokenizer, loaded.decoder)) if draft else None
    return _service(folder, tokenizer, loaded, runner, spec, drafter)


def reference_engine(folder: Path, tokenizer: Tokenizer, kv_tokens: int) -> EngineService:
    """An engine to judge others by: the operations by their definition, on the CPU, all in float32.

    It neither speculates nor has a host tier. `kv_tokens` is the room for KV, in whole pages; else as `local_engine`.
    """
    spec = EngineSpec(kv_tokens=kv_tokens, host_tokens=0)
    loaded = _loaded(folder, spec, "reference")
    return _service(folder, tokenizer, loaded, ModelRunner(loaded.decoder, spec), spec)


def _service(
    folder: Path, tokenizer: Tokenizer, loaded: LoadedModel | Foreign, runner: ModelRunner, spec: EngineSpec,
    drafter: Drafter | None = None,
) -> EngineService:  # fmt: skip
    decoder, vocab_size = loaded.decoder, _vocab_size(tokenizer, loaded.decoder)
    core = EngineCore(runner, spec, vocab_size=vocab_size, bytes_of=tokenizer.bytes_of, drafter=drafter)
    info = EngineInfo(
        model=folder.name, model_hash=loaded.model_hash, vocab_size=vocab_size, context_length=decoder.context_length,
        quantized=decoder.precision.rounded, kv_tokens=spec.pool_tokens,
    )  # fmt: skip
    return EngineService(core, info)


def _vocab_size(tokenizer: Tokenizer, decoder: CausalModel) -> int:
    return min(tokenizer.vocab_size, decoder.vocab_size)


def _runner(decoder: CausalModel, spec: EngineSpec) -> ModelRunner:
    if decoder.device.type != "cuda":
        if spec.attention != "auto":
            raise UsageError(f"engine.attention={spec.attention} needs a GPU (engine.device=cuda); leave it out")
        return ModelRunner(decoder, spec)
    from agentrt.engine.cuda_runner import CudaRunner  # Triton, which a machine without a GPU need not have

    return CudaRunner(decoder, spec)


def sized(spec: EngineSpec, decoder: CausalModel, draft: DraftModel | None) -> EngineSpec:
    """The spec with as many tokens as a GPU has room for, if it is on one. `UsageError` if it wants more."""
    if decoder.device.type != "cuda":
        return spec
    models = [
        Pages(
            model.windows,
            [layout.page_stride * decoder.dtype.itemsize for layout in model.page_layouts(spec.page_size)],
        )
        for model in (decoder, draft)
        if model is not None
    ]
    torch.cuda.empty_cache()  # what was needed to load the weights
    free_bytes = torch.cuda.mem_get_info(decoder.device)[0]
    return fitted(spec, models, free_bytes, STAGED_COPIES * decoder.num_parameters * decoder.dtype.itemsize)


def _loaded(folder: Path, spec: EngineSpec, ops: OpsName | None = None) -> LoadedModel | Foreign:
    """The model by our decoder, or, if that does not know it, by transformers' module."""
    device, precision = _checked_device(spec.device), Precision(spec.weights, spec.kv)
    try:
        config = load_config(folder)
    except NotDecodedError as error:
        if precision != FULL:
            raise UsageError(f"engine.weights and engine.kv must be auto: {error}") from error
        return load_foreign(folder, device, str(error), ops)
    return load_model(folder, device, ops, _checked_precision(folder.name, config, precision, spec))


def _draft(loaded: LoadedModel | Foreign, spec: EngineSpec) -> DraftModel:
    if isinstance(loaded, LoadedModel):
        return load_draft(find_model(spec.draft), loaded)
    raise UsageError("engine.draft needs a model that our own decoder runs; leave it out: drafts from text go with any")


def _checked_precision(name: str, config: ModelConfig, chosen: Precision, spec: EngineSpec) -> Precision:
    """What is asked for, if the device and the model of this name can."""
    if chosen != FULL and torch.device(spec.device).type != "cpu":
        raise UsageError(
            f"engine.weights and engine.kv are for the CPU; leave them out for engine.device {spec.device!r}"
        )
    if chosen.has_int8 and (config.sparse or config.latent):
        raise UsageError(f"engine.weights and engine.kv: {name} has experts or latent attention, which int8 is not for")
    if chosen.kv == "int8" and spec.page_size * config.num_kv_heads * config.head_dim % SCALE_SIZE:
        raise UsageError(f"engine.kv=int8 needs an engine.page_size that is a multiple of {SCALE_SIZE} for {name}")
    return chosen


def _checked_device(name: str) -> str:
    """`name` if torch can use it, else a `UsageError`."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"engine.device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return name
