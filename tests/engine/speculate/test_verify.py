"""Verifiers: their exact law by adding up every way, the acceptance cases C33 to C35, and the figures of C34."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from ways import Way, law_of

from agentrt.core.spec import SamplingParams
from agentrt.core.tokens import Tokens
from agentrt.engine.sampler import laws_of
from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.draft import Draft, Floats
from agentrt.engine.speculate.verify import Chance, KeyedChance, block, coupled, rejection, residual
from agentrt.testing.toy import hashed_logits
from agentrt_kernels.sample.reference import probabilities

VOCAB, LENGTH, DRAFTED, STOP = 5, 3, 2, 4
PROMPT = (3, 1, 1)
Context = tuple[int, ...]

PROCESSORS = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0),
    "greedy with a penalty": SamplingParams(temperature=0, repetition_penalty=1.1),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(top_k=2),
    "top_p": SamplingParams(top_p=0.8),
    "top_k then top_p": SamplingParams(top_k=4, top_p=0.7),
    "min_p": SamplingParams(min_p=0.2),
    "repetition penalty": SamplingParams(repetition_penalty=1.7),
    "presence and frequency penalty": SamplingParams(presence_penalty=0.7, frequency_penalty=0.5),
    "bias": SamplingParams(logit_bias={0: 2.0, 2: -1e9}),
    "min_tokens": SamplingParams(min_tokens=2, stop_token_ids=(STOP,)),
    "stop": SamplingParams(stop_token_ids=(STOP,)),
    "all": SamplingParams(
        temperature=0.9, top_k=4, top_p=0.9, min_p=0.05, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
        logit_bias={1: 0.5}, min_tokens=1, stop_token_ids=(STOP,),
    ),
}  # fmt: skip


@cache
def target(name: str, said: Context) -> Floats:
    """p after a prompt and what was said, from the engine's own law over its own sequence."""
    tokens = Tokens()
    tokens.observe(PROMPT)
    sequence = Sequence(tokens=tokens, params=PROCESSORS[name], max_tokens=LENGTH)
    for token_id in said:
        sequence.commit(token_id, 0.0, 0, b"")
    rule = laws_of([sequence], VOCAB).rules[0]
    logits_V = np.asarray(hashed_logits(VOCAB, 1.5)([*PROMPT, *said]), dtype=np.float32)
    return probabilities(logits_V, rule, VOCAB)


@cache
def drafter(said: Context) -> Floats:
    """q of a draft model that knows no more than the last id; it cuts its least likely id."""
    q_V = np.exp(hashed_logits(VOCAB)([99, *said[-1:]])).astype(np.float64)
    q_V[np.argmin(q_V)] = 0.0
    return q_V / q_V.sum()


def drawn(said: Context, chance: Chance) -> Draft:
    ids: Context = ()
    for _ in range(DRAFTED):
        ids += (chance.draws(drafter(said + ids)),)
    return Draft(ids, tuple(drafter(said + ids[:depth]) for depth in range(DRAFTED)))


def most_likely(said: Context, chance: Chance) -> Draft:
    """A draft model's first choices: chosen, not drawn, so q is one-hot."""
    ids: Context = ()
    for _ in range(DRAFTED):
        ids += (int(np.argmax(drafter(said + ids))),)
    return Draft(ids)


def repeated(said: Context, chance: Chance) -> Draft:
    """What n-grams and old rollouts give: fixed ids, one of them an end id."""
    return Draft((STOP if len(said) % 2 else 1, 1))


def disagreeing(said: Context, chance: Chance) -> Draft:
    """A tree of chosen ids: texts that go on differently, an end id and one id twice among them; best first, so that
    branches lie across one another."""
    first, second, *_ = np.argsort(-drafter(said)).tolist()
    return Draft((first, STOP, 1, second, 2, first, 0), parents=(-1, -1, 0, -1, 3, 3, 2))


def drawn_twice(said: Context, chance: Chance) -> Draft:
    """A tree of drawn ids: each id has two that follow it, drawn independently."""
    parents = (-1, -1, 0, 0)
    ids: Context = ()
    q: tuple[Floats, ...] = ()
    for parent in parents:
        q += (drafter((*said, ids[parent]) if parent >= 0 else said),)
        ids += (chance.draws(q[-1]),)
    return Draft(ids, q, parents=parents)


Proposers = dict[str, Callable[[Context, Chance], Draft]]
PROPOSERS: Proposers = {"drawn": drawn, "most likely": most_likely, "repeated": repeated}
TREES: Proposers = {"disagreeing": disagreeing, "drawn twice": drawn_twice}


def before(draft: Draft, row: int) -> Context:
    """The drafted ids that a row's law sees."""
    return tuple(draft.ids[place] for place in draft.path(row))


def verified(verifier: str, draft: Draft, law: Callable[[int], Floats], chance: Chance) -> list[int]:
    if verifier == "coupled":
        return coupled(draft, lambda row: chance.draws(law(row)))
    return {"rejection": rejection, "block": block}[verifier](draft, law, chance)


def committed(name: str, said: Context, ids: list[int]) -> Context:
    """What a sequence keeps: nothing beyond an end id or the length."""
    for token_id in ids:
        if len(said) < LENGTH and not (said and said[-1] in PROCESSORS[name].stop_token_ids):
            said += (token_id,)
    return said


def is_ended(name: str, said: Context) -> bool:
    return len(said) == LENGTH or bool(said and said[-1] in PROCESSORS[name].stop_token_ids)


def followed(name: str, round_of: Callable[[Context], dict[Context, float]]) -> dict[Context, float]:
    """The law of whole texts, when `round_of` gives the law of what a round makes of a text."""
    texts, running = {}, {(): 1.0}  # type: dict[Context, float], dict[Context, float]
    while running:
        said, weight = running.popitem()
        for after, probability in round_of(said).items():
            into = texts if is_ended(name, after) else running
            into[after] = into.get(after, 0.0) + weight * probability
    return texts


def plain_round(name: str, said: Context) -> dict[Context, float]:
    return {(*said, token_id): float(p) for token_id, p in enumerate(target(name, said)) if p > 0}


def speculative_round(name: str, verifier: str, proposer: str, said: Context) -> dict[Context, float]:
    def play(way: Way) -> Context:
        draft = (PROPOSERS | TREES)[proposer](said, way)
        ids = verified(verifier, draft, lambda row: target(name, said + before(draft, row)), way)
        return committed(name, said, ids)

    return law_of(play)


def distance(one: dict[Context, float], other: dict[Context, float]) -> float:
    return max(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in one.keys() | other.keys())


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("verifier", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_law_of_a_text_is_that_of_plain_sampling(name: str, verifier: str, proposer: str) -> None:
    """Rows 8, 10, 12, 40: every verifier, processor and proposer, to 1e-12."""
    check_law(name, verifier, proposer)


@pytest.mark.parametrize("proposer", TREES)
@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_law_of_a_text_is_that_of_plain_sampling_under_trees(name: str, verifier: str, proposer: str) -> None:
    """Row 11: every processor and proposer, to 1e-12."""
    check_law(name, verifier, proposer)


def check_law(name: str, verifier: str, proposer: str) -> None:
    expected = followed(name, lambda said: plain_round(name, said))
    found = followed(name, lambda said: speculative_round(name, verifier, proposer, said))
    assert sum(expected.values()) == pytest.approx(1, abs=1e-12)
    assert distance(found, expected) < 1e-12


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_a_recorded_q_that_was_not_sampled_from_is_found(verifier: str) -> None:
    """Row 10 and C34: the enumeration has the power to see it: q before its cut, and the soft q of a chosen id."""

    def wrong(said: Context, chance: Chance) -> Draft:
        draft = drawn(said, chance)
        return draft._replace(q=tuple(0.9 * q_V + 0.1 / VOCAB for q_V in draft.q))

    def soft(said: Context, chance: Chance) -> Draft:
        ids = most_likely(said, chance).ids
        return Draft(ids, tuple(drafter(said + ids[:depth]) for depth in range(DRAFTED)))

    expected = followed("plain", lambda said: plain_round("plain", said))
    for name, proposer in (("wrong", wrong), ("soft", soft)):
        PROPOSERS[name] = proposer
        try:
            found = followed("plain", lambda said: speculative_round("plain", verifier, name, said))  # noqa: B023
        finally:
            del PROPOSERS[name]
        assert distance(found, expected) > 1e-3


def first_ids(p: list[float], q: list[float] | None, draws: int) -> tuple[list[float], float]:
    """Shares of the first committed id over many verifications, and the share of drafts that were accepted."""
    p_V, counts, accepted = np.array(p), np.zeros(len(p)), 0
    chance, proposing = KeyedChance(0, "verify"), KeyedChance(0, "draft")
    for _ in range(draws):
        draft = Draft((0,)) if q is None else Draft((proposing.draws(np.array(q)),), (np.array(q),))
        ids = rejection(draft, lambda depth: p_V, chance)
        counts[ids[0]] += 1
        accepted += len(ids) == 2
    return (counts / draws).tolist(), accepted / draws


@pytest.mark.parametrize(
    ("p", "q", "accept", "rest"),
    [
        ([0.3, 0.5, 0.2], None, 0.3, [0, 0.714286, 0.285714]),
        ([0.3, 0.5, 0.2], [0.6, 0.3, 0.1], 0.7, [0, 0.666667, 0.333333]),
        ([0.5, 0.5, 0.0, 0.0], [0.571429, 0.428571, 0, 0], 0.928571, [0, 1, 0, 0]),
    ],
)
def test_c34_accepted_ids_follow_the_target(
    p: list[float], q: list[float] | None, accept: float, rest: list[float]
) -> None:
    """C34 a, b, c: the residuals, and the shares of 20,000 draws (the case's 200,000 would do no more than the exact law)."""
    draft = Draft((0,), () if q is None else (np.array(q),))
    left_V = residual(np.array(p), draft.q_at(0, len(p)))
    assert (left_V / left_V.sum()).tolist() == pytest.approx(rest, abs=1e-5)
    shares, accepted = first_ids(p, q, 20_000)
    assert shares == pytest.approx(p, abs=0.015)
    assert accepted == pytest.approx(accept, abs=0.015)


def test_c34_acceptance_of_each_id() -> None:
    """C34 b: min(1, p/q) is [0.5, 1, 1]; c with q after its own cut [0.875, 1], and with the raw q the law is wrong."""

    def law(p: list[float], q: list[float], sampled_from: list[float]) -> dict[int, float]:
        def play(way: Way) -> int:
            proposed = way.draws(np.array(sampled_from))
            return rejection(Draft((proposed,), (np.array(q),)), lambda depth: np.array(p), way)[0]

        return law_of(play)

    p, cut = [0.5, 0.5, 0.0, 0.0], [4 / 7, 3 / 7, 0.0, 0.0]
    assert law(p, cut, cut) == pytest.approx({0: 0.5, 1: 0.5})
    assert law(p, [0.4, 0.3, 0.2, 0.1], cut) == pytest.approx({0: 4 / 7, 1: 3 / 7})
    acceptance = [min(1, a / b) for a, b in zip([0.3, 0.5, 0.2], [0.6, 0.3, 0.1], strict=True)]
    assert acceptance == [0.5, 1, 1]


def test_the_figure_four_drafted_and_the_third_rejected() -> None:
    """The article's figure: two accepted, the correction from the residual, the fourth is not carried over."""
    asked = []

    def law(depth: int) -> Floats:
        asked.append(depth)
        return np.array([[0.1, 0.8, 0.1], [0.9, 0.05, 0.05], [0.0, 0.6, 0.4]][depth])

    ids = rejection(Draft((1, 0, 0, 2)), law, Certain())
    assert asked == [0, 1, 2]
    assert ids == [1, 0, 1]


class Certain:
    """Accepts whatever has a probability, and draws the likeliest."""

    def accepts(self, p: float, q: float) -> bool:
        return p > 0

    def draws(self, weights_V: Floats) -> int:
        return int(np.argmax(weights_V))


def test_a_coin_at_its_ends() -> None:
    """Pitfall 3, row 7: a uniform of 0 does not accept p = 0, and p = q is always accepted."""
    chance = KeyedChance(0)
    assert not any(chance.accepts(0.0, 0.5) for _ in range(1000))
    assert all(chance.accepts(0.25, 0.25) for _ in range(1000))


def test_block_verification_accepts_no_less() -> None:
    """Sun et al.: the expected number of accepted ids is at least that of rejection."""

    def accepted(verifier: str) -> float:
        def play(way: Way) -> int:
            draft = drawn((), way)
            return len(verified(verifier, draft, lambda row: target("plain", before(draft, row)), way)) - 1

        return sum(count * weight for count, weight in law_of(play).items())

    assert accepted("block") >= accepted("rejection") - 1e-12
    assert accepted("rejection") > accepted("coupled")
