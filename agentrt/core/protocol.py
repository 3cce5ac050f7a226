"""All that the rest of agentrt may know of an engine.

Only structs, typed arrays and plain numbers cross this line, so an engine in another process or on another machine fits
behind it. The engine speaks token ids; text stops at the renderer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import msgspec

from agentrt.core.spec import SamplingParams
from agentrt.core.tokens import Floats, Ids, Tokens

FinishReason = Literal["stop", "length", "abort"]

Grammar = Callable[[Sequence[int]], Iterable[int] | None]
"""What a turn may say: from the ids sampled in it so far to the ids that may come next, or a numpy array of bools with an
entry for each id; None allows all. An end id must be allowed where the turn may end.

A function of its argument alone: it may be asked of any beginning, in any order, also of ids that were only drafted. It is
called in the engine's step thread, so its time is everybody's. If it raises or allows nothing, its request fails with
`EngineFailure`, and no other does.
"""


class KVUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a session's KV has cost since the completion before. What sessions share is divided among them."""

    device_byte_seconds: float = 0.0
    host_byte_seconds: float = 0.0
    tool_device_byte_seconds: float = 0.0
    """The part of it while the session was paused."""
    tool_host_byte_seconds: float = 0.0
    reprefilled_tokens: int = 0
    """Ids computed again although their KV was there once."""
    restored_tokens: int = 0
    """Ids whose KV came back from the host."""
    wait_seconds: float = 0.0
    """That the turn waited for KV to come back from the host."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What one `Session.sample` gave. The arrays are parallel, one entry for each sampled id."""

    token_ids: Ids
    logprobs: Floats
    """Under the law sampled from; at temperature 0 under the untempered one."""
    raw_logprobs: Floats = msgspec.field(default_factory=Floats)
    """Under the softmax of the model's own logits: no bias, penalty, temperature or cut."""
    kept_logmass: Floats = msgspec.field(default_factory=Floats)
    """Log of the tempered mass that min-p, top-k and top-p kept: tempered logprob = logprob + kept_logmass."""
    top_logprobs: list[dict[int, float]] = []
    """Under the same law as `logprobs`: at each sampled id the `params.top_logprobs` most likely ids, the most likely first
    (of equally likely ones the lower id). Ids that the law cut are left out, so there may be fewer. Empty if not asked for."""
    versions: Ids
    """The policy version that sampled each id."""
    oldest_kv: int | None = None
    """The oldest policy version whose KV one of them may have attended; None if nothing was sampled. The newest is always
    its own: the step that samples an id writes KV that it attends."""
    finish_reason: FinishReason
    """stop: an end id or a stop string; length: `max_tokens`; abort: the engine or the caller ended it."""
    matched_stop: int | str | None = None
    """The end id or stop string that ended it."""
    seed: int
    """The seed that keyed this turn's noise."""
    context_tokens: int
    """Ids before the first sampled one."""
    cached_tokens: int
    """How many of them had their KV already."""
    kv: KVUsage = KVUsage()
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    verifications: int = 0
    """Steps of this turn that verified a draft."""
    drafted_tokens: int = 0
    """Ids of those drafts, and how many of them stood; the id that follows those is not counted."""
    accepted_tokens: int = 0


class SessionHints(msgspec.Struct, frozen=True, kw_only=True):
    """What the runtime knows of a session and the engine may use; it never changes what is sampled."""

    group: str = ""
    """Sessions with the same group share a prompt."""
    members_left: int = 0
    """Members of the group that still run, this one included: the fewer, the sooner the group is whole. 0 is unknown."""
    deadline: float | None = None
    """In how many seconds the episode is ended at the latest."""
    oldest_version: int | None = None
    """The oldest policy version that sampled for it. Episodes that are about to be too old come first."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine serves."""

    model: str
    model_hash: str
    vocab_size: int
    """Ids at or above it are masked: they are in the output layer but not in the tokenizer."""
    context_length: int
    logprobs_of: Literal["sampled_distribution", "temperature_only", "raw"] = "sampled_distribution"
    quantized: tuple[str, ...] = ()
    """What of `weights` and `kv` it was told to round, and to what: `kv=fp16`, `weights=int8`; not known of a server."""
    kv_tokens: int = 0
    """Ids whose KV it can hold at once; 0: it is not known."""


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of counts. Token counts are totals since the engine started."""

    version: int = 0
    running: int = 0
    waiting: int = 0
    sessions: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    """Held by the prefix cache only, so evictable."""
    tokens_prefilled: int = 0
    tokens_reused: int = 0
    tokens_sampled: int = 0
    steps: int = 0
    preemptions: int = 0
    verifications: int = 0
    """Drafts that were verified; the next two are their ids, and those that stood."""
    tokens_drafted: int = 0
    tokens_accepted: int = 0
    tokens_reprefilled: int = 0
    """Prefilled although their KV was there once."""
    pages_pinned: int = 0
    """Kept for sessions whose tools run."""
    sessions_parked: int = 0
    """Whose KV is on the host only."""
    host_pages_total: int = 0
    host_pages_free: int = 0
    copies_failed: int = 0
    """Between device and host; what they were to bring is computed again."""


UpdateMode = Literal["recompute", "keep", "drain", "abort_resume"]
"""What an update of the weights does with the requests in flight and the KV of conversations:

recompute: requests stop between two steps and go on with the new weights; all KV is computed again by them.
keep: requests go on with the KV they have, and so does every open session; new sessions never see that KV.
drain: requests in flight end first; what arrives meanwhile waits. No turn has tokens of two versions.
abort_resume: requests leave the engine and enter it again at the end of the queue, with what is left of their budget.
"""


class SharedWeights(msgspec.Struct, frozen=True):
    """Weights that another process holds in shared memory; the engine copies them and keeps no hold of it."""

    name: str
    """Of the `multiprocessing.shared_memory` block."""
    tensors: dict[str, tuple[str, tuple[int, ...], int]]
    """For each tensor the numpy dtype, the shape, and the byte at which it starts."""


class DeviceTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in the GPU memory of another process, as `torch.multiprocessing` tells it.

    Stride and offset count elements, all else bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: str
    """The GPU's UUID."""
    handle: bytes
    storage_bytes: int
    storage_start: int
    counter: bytes
    counter_start: int
    event: bytes
    waits_for_event: bool


class DeviceWeights(msgspec.Struct, frozen=True):
    """Weights that another process on this machine holds on a GPU that both see; the engine copies them and keeps no hold."""

    tensors: dict[str, DeviceTensor]


class BroadcastWeights(msgspec.Struct, frozen=True):
    """Weights that rank `source` of a torch.distributed process group sends; this process is in the default group.

    Tensors come by name in sorted order, as float32.
    """

    source: int = 0
    timeout_seconds: float = 60.0


WeightSource = Mapping[str, Any] | Path | SharedWeights | DeviceWeights | BroadcastWeights
"""Where new weights come from: tensors by name in this process, a folder of safetensors, or one of the three above."""


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """How an update went."""

    version: int
    mode: UpdateMode
    read_seconds: float
    """Getting and checking the new weights, while requests run."""
    pause_seconds: float
    """From the last step before to the moment when the next one could start."""
    requests: int
    """Requests that were in flight."""
    tokens_dropped: int
    """Ids of requests in flight whose KV has to be computed again."""


class Session(Protocol):
    """One conversation: an append-only list of ids and the lease on its KV. A context manager; leaving it frees the KV.

    Calls on one session follow one another; several sessions run at once.
    """

    @property
    def tokens(self) -> Tokens:
        """Every committed id, also after a cancelled or timed-out `sample`. The caller only reads it."""

    @property
    def seed(self) -> int:
        """The seed of this branch; turn n samples with `seeds.derive(seed, "turn", n)`."""

    async def sample(
        self,
        observed_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        grammar: Grammar | None = None,
        progress: Callable[[], None] | None = None,
    ) -> Completion:
        """Append `observed_ids`, then sample up to `max_tokens` ids, of which each is allowed by `grammar`.

        `progress` is called on the event loop when `tokens` may have grown, once for any number of ids: for those who
        show a turn while it is sampled. Leaving the scope (cancellation, a deadline) aborts within one engine step; what
        was sampled until then is in `tokens`. Raises `RequestError` for a request that can never be served (nothing is
        appended then) and `EngineFailure` when the engine itself fails.
        """

    async def score(self, observed_ids: Sequence[int], scored_ids: Sequence[int], params: SamplingParams) -> Floats:
        """Append both, and return the logprob of each of `scored_ids` under the law: what sampling them would have recorded.

        An id that the law cuts has the logprob -inf. An update of the weights begins it anew, so all are of one policy; in
        mode `keep` it goes on. Raises as `sample` does.
        """

    def hint(self, hints: SessionHints) -> None:
        """From now on `hints` holds in the place of what was said before."""

    def pause(self, tool: str, arguments: str = "", deadline: float | None = None) -> None:
        """Say that a tool runs now, so that the engine may decide what becomes of the KV. `sample` ends the pause.

        `arguments` is the class of its arguments, a short word: calls of one class take about as long. `deadline` is in
        how many seconds the tool is ended at the latest. A pause within a pause takes its place.
        """

    def progress(self, eta_seconds: float) -> None:
        """Say that the tool of this pause will be done in about `eta_seconds`. Ignored outside a pause."""

    def resume(self) -> None:
        """Say that the tool's result is here and `sample` will follow at once: KV that was moved may come back meanwhile.

        Ends the pause; ignored outside one.
        """

    def fork(self) -> "Session":
        """A new session with the same ids and a seed of its own, sharing pages. The caller enters and leaves it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Engine(Protocol):
    """Sessions over one model. An async context manager; leaving it aborts what is in flight."""

    @property
    def info(self) -> EngineInfo: ...

    def session(
        self, *, seed: int | None = None, salt: str = "", hints: SessionHints = SessionHints(), turn: int = 0
    ) -> Session:
        """A new session. `salt` keeps its KV apart from that of other salts; without `seed` a fresh one is drawn.

        `turn` is the number of its first turn: of a session that goes on from one elsewhere, the turns sampled there.
        """

    def statistics(self) -> EngineStatistics: ...

    async def update_weights(self, version: int, source: WeightSource, mode: UpdateMode = "recompute") -> UpdateReport:
        """Change the policy between two steps. `version` is above the present one, below 2^31, and from then on in every
        sampled token.

        No request is lost, doubled or given a new budget; those that arrive meanwhile wait. All tensors are checked by
        name and shape before the first is written; if anything fails, `WeightsError` is raised and the old version
        serves on.
        """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
