"""What a request may ask of the law: bad words, grammars, the most likely ids; through the engine, over the toy model."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import driving
import numpy as np
import pytest
from driving import drain

from agentrt.core.protocol import Grammar
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.engine import sequence as engine
from agentrt.engine.step import EngineCore
from agentrt.testing.toy import Logits, ToyRunner, hashed_logits

VOCAB, END = 30, 29
PARAMS = SamplingParams(temperature=0.8, stop_token_ids=(END,))


def make_core(logits: Logits | None = None, rows: int = 512) -> EngineCore:
    runner = ToyRunner(logits or hashed_logits(VOCAB), num_pages=64, page_size=4)
    spec = EngineSpec(page_size=4, kv_tokens=256, step_tokens=rows, max_batch=min(rows, 64))
    return EngineCore(runner, spec, vocab_size=VOCAB, bytes_of=lambda token_id: b"x")


def submit(
    core: EngineCore, params: SamplingParams = PARAMS, grammar: Grammar | None = None, seed: int = 0, **more: Any
) -> engine.Sequence:
    request = {"max_tokens": 12, "params": params, "grammar": grammar, "seed": seed}
    return driving.submit(core, more.pop("prompt", [1, 2, 3]), **request | more)


def run(params: SamplingParams = PARAMS, grammar: Grammar | None = None, seed: int = 0, **more: Any) -> engine.Sequence:
    core = make_core()
    sequence = submit(core, params, grammar, seed, **more)
    drain(core)
    return sequence


def even_then_odd(sampled: Sequence[int]) -> Iterable[int]:
    """Even ids and odd ones in turn; after eight the end."""
    return [END] if len(sampled) == 8 else range(len(sampled) % 2, END, 2)


def test_a_grammar_decides_at_each_position_what_may_come() -> None:
    asked: list[list[int]] = []

    def grammar(sampled: Sequence[int]) -> Iterable[int]:
        asked.append(list(sampled))
        return even_then_odd(sampled)

    sequence = run(grammar=grammar)
    ids = list(sequence.turn_ids)
    assert [token_id % 2 for token_id in ids[:8]] == [0, 1] * 4
    assert (len(ids), ids[8], sequence.finish_reason) == (9, END, "stop")
    assert asked == [ids[:length] for length in range(9)]
    assert sequence.tokens.logprobs[-1] == 0.0, "the only id that is allowed has all of the law"


def test_a_grammar_may_give_a_mask_or_leave_all_open() -> None:
    def mask(sampled: Sequence[int]) -> Any:
        mask_V = np.zeros(VOCAB, dtype=np.bool_)
        mask_V[list(even_then_odd(sampled))] = True
        return mask_V

    assert run(grammar=mask).turn_ids == run(grammar=even_then_odd).turn_ids
    assert run(grammar=lambda sampled: None).turn_ids == run().turn_ids


def test_a_grammars_logprobs_are_those_of_the_masked_law() -> None:
    one = run(SamplingParams(top_k=2, top_logprobs=3), lambda sampled: [4, 7, 9], max_tokens=1)
    raw = np.asarray(hashed_logits(VOCAB)([1, 2, 3]), dtype=np.float64)
    ranked = sorted([4, 7, 9], key=lambda token_id: -raw[token_id])[:2]
    expected = raw[ranked] - np.log(np.exp(raw[ranked]).sum())
    assert list(one.top_logprobs[0]) == ranked
    assert list(one.top_logprobs[0].values()) == pytest.approx(expected)
    assert one.tokens.logprobs[-1] == pytest.approx(one.top_logprobs[0][one.tokens.token_ids[-1]], abs=1e-6)
    assert one.raw_logprobs[0] == pytest.approx(raw[one.tokens.token_ids[-1]] - np.log(np.exp(raw).sum()), abs=1e-6)


def raising(sampled: Sequence[int]) -> Iterable[int]:
    raise KeyError("no such state")


class Panic(BaseException):
    """As Rust's panics come."""


def panicking(sampled: Sequence[int]) -> Iterable[int]:
    raise Panic("in another language")


def test_who_steps_an_engine_may_interrupt_a_grammar() -> None:
    def interrupted(sampled: Sequence[int]) -> Iterable[int]:
        raise KeyboardInterrupt

    core = make_core()
    submit(core, SamplingParams(), interrupted)
    with pytest.raises(KeyboardInterrupt):
        drain(core)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (panicking, r"the grammar failed after 0 ids of the turn: Panic\('in another language'\)"),
        (raising, r"the grammar failed after 0 ids of the turn: KeyError\('no such state'\)"),
        (lambda sampled: [] if len(sampled) == 2 else [5], "the grammar allows no id after 2 ids of the turn"),
        (lambda sampled: [5, VOCAB], "the grammar failed after 0 ids of the turn: IndexError"),
        (lambda sampled: np.ones(7, dtype=np.bool_), r"a mask of shape \(7,\), and this model has 30 ids"),
        (lambda sampled: [5, -1], r"the grammar failed after 0 ids of the turn: IndexError\('-1 is no id'\)"),
        (lambda sampled: sys.exit(3), r"the grammar failed after 0 ids of the turn: SystemExit\(3\)"),
        (lambda sampled: "ab", "the grammar failed after 0 ids of the turn: ValueError"),
        (lambda sampled: [6], "no id may come next: logit_bias, bad_words, min_tokens and the grammar together forbid"),
    ],
)
def test_a_grammar_that_fails_fails_its_request_only(grammar: Grammar, words: str) -> None:
    core, params = make_core(), SamplingParams(temperature=0.8, bad_words=((6,),))
    bad, good = submit(core, params, grammar), submit(core, seed=1)
    drain(core)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(bad.error)
    assert good.tokens.token_ids == run(seed=1).tokens.token_ids


@pytest.mark.parametrize("rows", [1, 7, 512])
def test_a_score_under_a_law_with_history_is_what_sampling_recorded(rows: int) -> None:
    """Grammar, bad words, `min_tokens` and penalties look at the turn so far, sampled or scored, whatever the chunks."""
    params = SamplingParams(
        temperature=0.7, min_tokens=4, stop_token_ids=(END,), bad_words=((3,), (4, 5)), frequency_penalty=0.4, top_k=9
    )

    def grammar(sampled: Sequence[int]) -> Iterable[int]:
        return range(len(sampled) % 3, VOCAB)

    sampled = run(params, grammar)
    core = make_core(rows=rows)
    prompt = sampled.tokens.token_ids.tolist()
    scored = submit(core, params, grammar, prompt=prompt, num_scored=sampled.num_sampled, max_tokens=0)
    drain(core)
    assert scored.scores == pytest.approx(sampled.tokens.logprobs[3:], abs=1e-6)
    assert not scored.error


def test_bad_words_are_masked_where_they_would_be_completed() -> None:
    """A model that wants 5, 6, 7, 5, 6, 7, ...: without (6, 7) it says 5, 6 and something else; (5, 6, 8) plays no part."""

    def wants(prefix: Sequence[int]) -> list[float]:
        return [50.0 if token_id == 5 + (len(prefix) % 3) else float(token_id == 8) for token_id in range(VOCAB)]

    def said(*words: tuple[int, ...]) -> list[int]:
        core = make_core(wants)
        sequence = submit(core, SamplingParams(temperature=0.0, bad_words=words), max_tokens=6, prompt=[6, 6, 6])
        drain(core)
        return list(sequence.turn_ids)

    assert said() == [5, 6, 7, 5, 6, 7]
    assert said((6, 7), (5, 6, 8)) == [5, 6, 0, 5, 6, 0]
    assert said((5,)) == [8, 6, 7, 8, 6, 7]
    assert said((6, 5)) == [5, 6, 7, 5, 6, 7], "the prompt's last id is not of the turn"


def test_the_most_likely_ids_of_those_that_asked() -> None:
    core = make_core()
    asked, silent = submit(core, SamplingParams(top_logprobs=4), seed=3), submit(core, PARAMS, seed=1)
    many = submit(core, SamplingParams(top_p=0.5, top_logprobs=99), seed=2)
    drain(core)
    assert silent.top_logprobs == []
    assert [len(top) for top in asked.top_logprobs] == [4] * 12
    for place, top in enumerate(asked.top_logprobs):
        row = np.asarray(hashed_logits(VOCAB)(asked.tokens.token_ids[: 3 + place]), dtype=np.float64)
        order = np.argsort(-row, kind="stable")[:4]
        assert list(top) == order.tolist()
        assert list(top.values()) == pytest.approx(row[order] - np.log(np.exp(row).sum()))
    for place, top in enumerate(many.top_logprobs):
        assert sum(np.exp(list(top.values()))) == pytest.approx(1.0)
        assert many.tokens.logprobs[3 + place] == pytest.approx(top[many.tokens.token_ids[3 + place]], abs=1e-6)
