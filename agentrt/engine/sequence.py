"""A sequence: one request while the engine serves it."""

from collections import Counter
from dataclasses import dataclass, field

from agentrt.core.protocol import FinishReason, Grammar, KVUsage
from agentrt.core.spec import SamplingParams
from agentrt.core.tokens import Floats, IntArray, Tokens
from agentrt.engine.kv.lease import Lease, Rank
from agentrt.engine.speculate.draft import NO_DRAFT, Draft
from agentrt.engine.stopping import StopStrings


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """`tokens` is the session's own list: the engine appends what it samples, and nobody else does meanwhile."""

    tokens: Tokens
    params: SamplingParams
    max_tokens: int = 0
    """Ids to sample at most; 0 for a request that scores."""
    seed: int = 0
    """Keys the noise of this turn; the position in the sequence is the counter."""
    group: str = ""
    grammar: Grammar | None = None
    lease: Lease = field(init=False)
    """Given by `EngineCore.submit`."""
    num_scored: int = 0
    """The last ids of `tokens` are scored, this many; nothing is sampled then."""
    context_tokens: int = field(init=False)
    """Ids before the first that this request samples or scores."""
    num_noted: int = 0
    """Ids of the turn that are part of its history: all that were sampled, or those whose rows were read for a score."""
    scores: Floats = field(default_factory=Floats)
    raw_logprobs: Floats = field(default_factory=Floats)
    kept_logmass: Floats = field(default_factory=Floats)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    """How often each id came in this turn, for the presence and frequency penalties."""
    seen: set[int] = field(default_factory=set)
    """Every id of context and turn, for the repetition penalty; kept only if there is one."""
    draft: Draft = NO_DRAFT
    """What the next step verifies."""
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    """Ids of drafts that were verified, and those of them that stood."""
    _supposed: list[tuple[int, bool]] = field(default_factory=list)
    """Drafted ids that are part of the history for now, and whether they were seen before."""
    stop_strings: StopStrings = field(init=False)
    cached_tokens: int = -1
    """Ids whose KV was there when the request first ran; -1 before."""
    oldest_kv: int | None = None
    """The oldest policy version whose KV a sampled id may have attended; None before the first."""
    preemptions: int = 0
    kv: KVUsage = field(default_factory=KVUsage)
    """What its KV has cost, from the end of the session's request before to the end of this one."""
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    error: str = ""
    """Why the engine gave this request up; it is finished then."""
    rank: Rank = (0.0,)
    """The lower is served first and preempted last. A turn after a tool call keeps the place of the turn before it."""
    arrived: float = 0.0
    started: float | None = None
    first_token: float | None = None
    ended: float = 0.0
    """Seconds of the engine's clock, like the three before it; None for what has not happened."""

    def __post_init__(self) -> None:
        self.context_tokens = len(self.tokens) - self.num_scored
        self.stop_strings = StopStrings(self.params.stop)
        self._see_context()

    @property
    def num_sampled(self) -> int:
        return 0 if self.num_scored else len(self.tokens.token_ids) - self.context_tokens

    @property
    def known(self) -> int:
        """Ids whose KV this request needs: all, but for the last of a request that scores."""
        return len(self.tokens.token_ids) - (1 if self.num_scored else 0)

    @property
    def matchable(self) -> int:
        """Ids whose KV may come from the prefix cache: the row before the first id to sample or score is computed."""
        return (self.context_tokens if self.num_scored else len(self.tokens)) - 1

    @property
    def num_uncomputed(self) -> int:
        """Ids whose KV is missing: 1 while it decodes, more in its prefill."""
        return self.known - self.lease.computed

    @property
    def is_decoding(self) -> bool:
        """True if all that is missing is the KV of the id sampled last."""
        length = len(self.tokens.token_ids)
        return not self.num_scored and length > self.context_tokens and length - self.lease.computed == 1

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or bool(self.error)

    def commit(self, token_id: int, logprob: float, version: int, text: bytes) -> None:
        """Append a sampled id, of which `text` is the bytes, and see whether the turn ends with it."""
        self.tokens.commit(token_id, logprob, version)
        self._note(token_id)
        matched = token_id if token_id in self.params.stop_token_ids else self.stop_strings.feed(text)
        if matched is not None:
            self.finish_reason, self.matched_stop = "stop", matched
        elif self.num_sampled >= self.max_tokens:
            self.finish_reason = "length"

    @property
    def turn_ids(self) -> IntArray:
        """The ids of the turn that are part of its history."""
        ids = self.tokens.token_ids[self.context_tokens : self.context_tokens + self.num_noted]
        ids.extend(token_id for token_id, _ in self._supposed)
        return ids

    @property
    def has_memory(self) -> bool:
        """True if the law of an id depends on the ids of the turn before it, by other ways than the logits."""
        params = self.params
        return (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
            or bool(params.bad_words) or self.num_noted < params.min_tokens or self.grammar is not None
        )  # fmt: skip

    def suppose(self, token_id: int) -> None:
        """Make a drafted id part of the history, until `retract`."""
        self._supposed.append((token_id, token_id in self.seen))
        self._note(token_id)

    def retract(self) -> None:
        """Take all supposed ids out of the history again."""
        while self._supposed:
            token_id, was_seen = self._supposed.pop()
            self.num_noted -= 1
            self.counts[token_id] -= 1
            if not self.counts[token_id]:
                del self.counts[token_id]
            if not was_seen:
                self.seen.discard(token_id)

    def forbidden_ids(self) -> set[int]:
        """Ids that `bad_words` and `min_tokens` do not allow next."""
        forbidden = set[int]()
        if self.num_noted < self.params.min_tokens:
            forbidden.update(self.params.stop_token_ids)
        if self.params.bad_words:
            turn_ids = tuple(self.turn_ids)
            forbidden.update(word[-1] for word in self.params.bad_words if _ends_with(turn_ids, word[:-1]))
        return forbidden

    def next_scored(self) -> int:
        """The id that is scored next; from now on it is part of the history."""
        token_id = self.tokens.token_ids[self.context_tokens + self.num_noted]
        self._note(token_id)
        return token_id

    def score(self, logprob: float) -> None:
        """Take the logprob of the first id that has none."""
        self.scores.append(logprob)
        if len(self.scores) == self.num_scored:
            self.finish_reason = "length"

    def score_anew(self) -> None:
        """Forget the scores so far: they are of another policy than those to come."""
        self.scores, self.num_noted = Floats(), 0
        self.counts.clear()
        self.seen.clear()
        self._see_context()

    def _see_context(self) -> None:
        if self.params.repetition_penalty != 1:
            self.seen.update(self.tokens.token_ids[: self.context_tokens])

    def _note(self, token_id: int) -> None:
        self.num_noted += 1
        self.counts[token_id] += 1
        if self.params.repetition_penalty != 1:
            self.seen.add(token_id)


def _ends_with(ids: tuple[int, ...], end: tuple[int, ...]) -> bool:
    return len(end) <= len(ids) and ids[len(ids) - len(end) :] == end
