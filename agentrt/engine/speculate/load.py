"""A folder becomes a draft model for a target; what does not fit is said in one sentence before anything runs."""

from pathlib import Path

import structlog
import torch
from torch import Tensor

from agentrt.core.errors import UsageError
from agentrt.engine.model.folder import read_folder
from agentrt.engine.model.loader import LoadedModel, load_model
from agentrt.engine.speculate.drafter import DraftModel
from agentrt.engine.speculate.head import DraftHead
from agentrt.engine.speculate.head_config import HeadConfig, kind_of, load_head_config
from agentrt.engine.speculate.small import SmallModel

log = structlog.get_logger(__name__)


def load_draft(folder: Path, loaded: LoadedModel) -> DraftModel:
    """The draft model in `folder`: an EAGLE-3 or MTP head, or a small model. `UsageError` if it cannot draft for this one.

    A head that says for which weights it was trained is told from one for others: that is logged, for it drafts worse.
    """
    target = loaded.decoder
    kind = kind_of(folder)
    draft: DraftModel
    if kind is None:
        decoder = load_model(folder, str(target.device)).decoder
        if decoder.vocab_size != target.vocab_size:
            raise UsageError(
                f"{folder}: vocab_size is {decoder.vocab_size} and must be {target.vocab_size} to draft for this model"
            )
        draft = SmallModel(decoder, target)
    else:
        config = load_head_config(folder, kind, target.config)
        draft = DraftHead(config, read_head(folder, config), target)
        if config.target not in ("", loaded.model_hash):
            log.warning("draft of other weights", draft=str(folder), trained_for=config.target, model=loaded.model_hash)
    if draft.context_length < target.context_length:
        raise UsageError(
            f"{folder}: its context of {draft.context_length} ids is shorter than the model's, {target.context_length}; "
            "raise max_position_embeddings in its config.json if it can more, or take another draft"
        )
    return draft


def read_head(folder: Path, config: HeadConfig) -> dict[str, Tensor]:
    """The tensors of a head, checked by name and shape; of its map, that it names ids of the target, each once."""
    wanted = config.shapes()
    is_partial = config.draft_vocab_size < config.vocab_size
    if is_partial:
        wanted["d2t"] = (config.draft_vocab_size,)
    found = read_folder(folder, wanted)
    for name, shape in wanted.items():
        if name not in found:
            raise UsageError(f"{folder}: {name} is missing; latent attention and experts in a head are not supported")
        if tuple(found[name].shape) != shape:
            raise UsageError(f"{folder}: {name} is {tuple(found[name].shape)} and by config.json {shape}")
        if found[name].is_floating_point() == (name == "d2t"):
            raise UsageError(
                f"{folder}: {name} is of {found[name].dtype}; a map is of whole numbers, a weight of floats"
            )
    if is_partial:
        ids_V = torch.arange(config.draft_vocab_size) + found["d2t"]
        if len(set(ids_V.tolist())) < len(ids_V) or not bool(((ids_V >= 0) & (ids_V < config.vocab_size)).all()):
            raise UsageError(f"{folder}: d2t must map to different ids below {config.vocab_size}")
    return found
