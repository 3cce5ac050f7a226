"""An engine in this process, from a model folder."""

from pathlib import Path

import torch

from agentrt.core.errors import UsageError
from agentrt.core.models import find_model
from agentrt.core.protocol import EngineInfo
from agentrt.core.spec import EngineSpec
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.kv.group import Pages, fitted
from agentrt.engine.model.config import load_config
from agentrt.engine.model.decoder import Decoder
from agentrt.engine.model.loader import LoadedModel, load_model
from agentrt.engine.model.quantized import FULL, Precision
from agentrt.engine.runner import ModelRunner
from agentrt.engine.service import EngineService
from agentrt.engine.speculate.drafter import Drafter, DraftModel
from agentrt.engine.speculate.load import load_draft
from agentrt.engine.step import EngineCore

STAGED_COPIES = 2
"""Of the weights, while new ones are staged: as they came, and as the decoder has them."""


def local_engine(folder: Path, tokenizer: Tokenizer, spec: EngineSpec) -> EngineService:
    """The engine over the model in `folder`; its caller enters and leaves it. `UsageError` if it cannot be loaded.

    Ids of the output layer that the tokenizer does not know are masked before sampling.
    """
    loaded = load_model(folder, _checked_device(spec.device), precision=_checked_precision(folder, spec))
    draft = load_draft(find_model(spec.draft), loaded) if spec.draft and spec.speculate != "off" else None
    spec = sized(spec, loaded.decoder, draft)
    runner = _runner(loaded.decoder, spec)
    drafter = Drafter(draft, runner, spec, _vocab_size(tokenizer, loaded.decoder)) if draft else None
    return _service(folder, tokenizer, loaded, runner, spec, drafter)


def reference_engine(folder: Path, tokenizer: Tokenizer, kv_tokens: int) -> EngineService:
    """An engine to judge others by: the operations by their definition, on the CPU, all in float32.

    It neither speculates nor has a host tier. `kv_tokens` is the room for KV, in whole pages; else as `local_engine`.
    """
    spec = EngineSpec(kv_tokens=kv_tokens, host_tokens=0)
    loaded = load_model(folder, ops="reference")
    return _service(folder, tokenizer, loaded, ModelRunner(loaded.decoder, spec), spec)


def _service(
    folder: Path, tokenizer: Tokenizer, loaded: LoadedModel, runner: ModelRunner, spec: EngineSpec,
    drafter: Drafter | None = None,
) -> EngineService:  # fmt: skip
    decoder, vocab_size = loaded.decoder, _vocab_size(tokenizer, loaded.decoder)
    core = EngineCore(runner, spec, vocab_size=vocab_size, bytes_of=tokenizer.bytes_of, drafter=drafter)
    info = EngineInfo(
        model=folder.name, model_hash=loaded.model_hash, vocab_size=vocab_size, context_length=decoder.context_length,
        quantized=decoder.precision.rounded, kv_tokens=spec.pool_tokens,
    )  # fmt: skip
    return EngineService(core, info)


def _vocab_size(tokenizer: Tokenizer, decoder: Decoder) -> int:
    return min(tokenizer.vocab_size, decoder.vocab_size)


def _runner(decoder: Decoder, spec: EngineSpec) -> ModelRunner:
    if decoder.device.type != "cuda":
        return ModelRunner(decoder, spec)
    from agentrt.engine.cuda_runner import CudaRunner  # Triton, which a machine without a GPU need not have

    return CudaRunner(decoder, spec)


def sized(spec: EngineSpec, decoder: Decoder, draft: DraftModel | None) -> EngineSpec:
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


def _checked_precision(folder: Path, spec: EngineSpec) -> Precision:
    """What the spec asks for, if its device and the model can."""
    chosen, config = Precision(spec.weights, spec.kv), load_config(folder)
    if chosen != FULL and torch.device(spec.device).type != "cpu":
        raise UsageError(
            f"engine.weights and engine.kv are for the CPU; leave them out for engine.device {spec.device!r}"
        )
    if chosen.has_int8 and (config.sparse or config.latent):
        raise UsageError(
            f"engine.weights and engine.kv: {folder.name} has experts or latent attention, which int8 is not for"
        )
    return chosen


def _checked_device(name: str) -> str:
    """`name` if torch can use it, else a `UsageError`."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"engine.device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return name
