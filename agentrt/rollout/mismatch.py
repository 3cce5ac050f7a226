"""How far recorded logprobs are from those of a reference that computes every trajectory from scratch.

Each turn is scored in a session of its own that shares no KV with anything, so whatever the engine did on the way to the
turn (its path) shows as a difference. Only ids of the one policy version that the reference has can be scored; the others
are counted. With r the recorded logprob of an id and t the reference's, both of one law, d = t - r clamped to ±20:

    mean, maximum     of |d|
    KL                mean of exp(d) - 1 - d: of the sampler from the reference, not below 0 (Schulman's k3)
    ratio             exp(d): what an importance weight would be, before it is cut
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from agentrt.core import seeds
from agentrt.core.errors import UsageError
from agentrt.core.protocol import Engine, EngineInfo
from agentrt.core.records import EpisodeRecord, TurnRecord, joined
from agentrt.core.spec import SamplingParams
from agentrt.core.tokens import Floats, Ids
from agentrt.rollout.importance import LOG_RATIO_CLAMP, ratio

KVPath = Literal["cold", "cached", "restored", "recomputed", "kept"]
ALL, SPECULATIVE, QUANTIZED = "all", "speculative", "quantised"
ROWS = (ALL, "cold", "cached", "restored", "recomputed", "kept", SPECULATIVE, QUANTIZED)
"""In the order they are shown; those of the last two have a `KVPath` too."""
Key = tuple[str, int, int]


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """Over the ids of one path. The formulas are in the module's docstring."""

    tokens: int
    mean: float
    maximum: float
    kl: float
    ratio_p1: float
    ratio_p50: float
    ratio_p99: float
    cut: int
    """Ids that the law cuts, by the reference's logits; each counts as a difference of 20."""


class Chosen(NamedTuple):
    """The trajectories that are scored, and what a model must have for them."""

    keys: set[Key]
    finished: int
    """How many there were to choose from."""
    longest: int
    """Ids of the longest branch."""
    top_id: int


class ScoredTurn(NamedTuple):
    """Those ids of a turn that the reference's version sampled; `recorded` and `reference` are parallel."""

    path: KVPath
    is_speculative: bool
    is_quantized: bool
    recorded: Floats
    reference: Floats
    num_other: int
    """Ids of the turn that other versions sampled."""


class Turn(NamedTuple):
    """A turn to be scored, with all its ids before and in it."""

    record: TurnRecord
    context: Ids
    token_ids: Ids
    logprobs: Floats
    versions: Ids


def choose(records: Iterable[EpisodeRecord], share: float) -> Chosen:
    """A share of the trajectories that ended well, at least one if there is any: the same ones each time."""
    found = []
    for record in records:
        if record.status == "ok" and any(branch.turns for branch in record.branches):
            longest = max((branch.fork.at if branch.fork else 0) + len(branch.token_ids) for branch in record.branches)
            top_id = max(max(branch.token_ids, default=0) for branch in record.branches)
            key = key_of(record)
            found.append((seeds.derive(0, "mismatch", *key), key, longest, top_id))
    chosen = sorted(found)[: math.ceil(share * len(found))]
    return Chosen(
        {key for _, key, *_ in chosen}, len(found), max((longest for *_, longest, _ in chosen), default=0),
        max((top_id for *_, top_id in chosen), default=0),
    )  # fmt: skip


def key_of(record: EpisodeRecord) -> Key:
    """Which attempt of which episode it is."""
    return record.task_id, record.member, record.attempt


def require_model(chosen: Chosen, info: EngineInfo, recorded_hash: str) -> None:
    """`UsageError` unless the model of `info` can have sampled what is chosen. An empty hash is one that is not known."""
    fix = "give --model the one that sampled it"
    if recorded_hash not in ("", info.model_hash):
        raise UsageError(
            f"the run was sampled by the weights {recorded_hash}, and {info.model} has others, {info.model_hash}; {fix}"
        )
    if chosen.top_id >= info.vocab_size:
        raise UsageError(f"the run holds id {chosen.top_id}, and {info.model} has ids below {info.vocab_size}; {fix}")
    if chosen.longest > info.context_length:
        raise UsageError(
            f"the run holds {chosen.longest} ids in a row, and {info.model} has a context of {info.context_length}; {fix}"
        )


def law_of(record: EpisodeRecord, params: SamplingParams) -> SamplingParams:
    """The law that the logprobs of a record are of. `params` is the one sampled from, with the end ids of the renderer."""
    if record.logprobs_of == "raw":
        return SamplingParams()
    if record.logprobs_of == "temperature_only":
        return SamplingParams(temperature=params.temperature)
    return params


def turns_of(record: EpisodeRecord) -> Iterator[Turn]:
    """The turns of all branches that sampled anything; a fork's context begins with the ids that it shares."""
    for branch in record.branches:
        tokens = joined(record, branch)
        for turn in branch.turns:
            if turn.end > turn.start:
                own = slice(turn.start, turn.end)
                yield Turn(
                    turn, Ids(tokens.token_ids[: turn.start]), Ids(tokens.token_ids[own]),
                    Floats(tokens.logprobs[own]), Ids(tokens.versions[own]),
                )  # fmt: skip


def path_of(turn: Turn, version: int) -> KVPath:
    """How the KV came to be that the ids of `version` in a turn attended; the first that is true from the bottom up."""
    record = turn.record
    # If KV was computed again, the older of a turn's versions attended its own KV and `oldest_kv` tells of that.
    oldest_of_turn = min(turn.versions) if record.reprefilled_tokens else version
    if record.oldest_kv is not None and record.oldest_kv < oldest_of_turn:
        return "kept"
    if record.reprefilled_tokens:
        return "recomputed"
    if record.restored_tokens:
        return "restored"
    return "cached" if record.cached_tokens else "cold"


async def rescore(engine: Engine, record: EpisodeRecord, params: SamplingParams, version: int) -> list[ScoredTurn]:
    """Score each turn of a record from scratch. `engine` has the weights of `version`, and is entered."""
    law, scored = law_of(record, params), []
    for number, turn in enumerate(turns_of(record)):
        own = [index for index, sampler in enumerate(turn.versions) if sampler == version]
        reference = Floats()
        if own:
            # what ended before `min_tokens` (it was cut) had no end id allowed anywhere
            fitting = msgspec.structs.replace(law, min_tokens=min(law.min_tokens, len(turn.token_ids)))
            salt = "/".join(map(str, (*key_of(record), number)))
            with engine.session(salt=salt) as session:
                reference = await session.score(turn.context, turn.token_ids, fitting)
        scored.append(
            ScoredTurn(
                path_of(turn, version), turn.record.verifications > 0, bool(record.quantized),
                Floats(turn.logprobs[index] for index in own), Floats(reference[index] for index in own),
                len(turn.versions) - len(own),
            )
        )  # fmt: skip
    return scored


def distances(turns: Iterable[ScoredTurn]) -> dict[str, Distance]:
    """The distance over all ids and by path, in the order of `ROWS`; a path that no id took is left out."""
    recorded, reference = defaultdict[str, Floats](Floats), defaultdict[str, Floats](Floats)
    for turn in turns:
        also = ((SPECULATIVE, turn.is_speculative), (QUANTIZED, turn.is_quantized))
        for row in (ALL, turn.path, *(name for name, is_so in also if is_so)):
            recorded[row].extend(turn.recorded)
            reference[row].extend(turn.reference)
    return {row: distance(recorded[row], reference[row]) for row in ROWS if recorded[row]}


def distance(recorded: Floats, reference: Floats) -> Distance:
    """Between two parallel arrays of logprobs, of which neither is empty."""
    recorded_N, reference_N = np.array(recorded, dtype=np.float64), np.array(reference, dtype=np.float64)
    difference_N = (reference_N - recorded_N).clip(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio_N = ratio(reference_N, recorded_N)
    p1, p50, p99 = np.percentile(ratio_N, [1, 50, 99])
    return Distance(
        tokens=len(recorded), mean=float(np.abs(difference_N).mean()), maximum=float(np.abs(difference_N).max()),
        kl=float((np.expm1(difference_N) - difference_N).mean()), ratio_p1=float(p1), ratio_p50=float(p50),
        ratio_p99=float(p99), cut=int(np.isneginf(reference_N).sum()),
    )  # fmt: skip


def broken_bounds(found: Mapping[str, Distance], mean: float | None, maximum: float | None) -> list[str]:
    """What is above its bound, a sentence each. Every path has to keep within it: a rare one is lost in the mean of all."""
    return [
        f"{name} |Δlogprob| of path {row} is {value:.3g}, above the bound of {bound:g}"
        for row, one in found.items()
        for name, value, bound in (("mean", one.mean, mean), ("maximum", one.maximum, maximum))
        if bound is not None and value > bound
    ]
