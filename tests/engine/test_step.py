"""The engine's core over the toy model: whatever happens to its pages, a request gives the same ids and logprob bits."""

from functools import partial
from typing import Any

import driving
import numpy as np
import pytest
from driving import drain, output

from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokens import Tokens
from agentrt.engine.kv.evict import evict
from agentrt.engine.kv.lease import State
from agentrt.engine.kv.priced import Priced
from agentrt.engine.sequence import Sequence
from agentrt.engine.step import EngineCore
from agentrt.testing.toy import Logits, ToyRunner, hashed_logits

VOCAB = 100
WARM = SamplingParams(temperature=0.8)


def make_core(
    logits: Logits | None = None, *, pages: int = 64, page_size: int = 4, rows: int = 512, batch: int = 64
) -> EngineCore:
    runner = ToyRunner(logits or hashed_logits(VOCAB), num_pages=pages, page_size=page_size)
    spec = EngineSpec(page_size=page_size, kv_tokens=pages * page_size, step_tokens=rows, max_batch=batch)
    return EngineCore(runner, spec, vocab_size=VOCAB, bytes_of=lambda token_id: b"%c" % (97 + token_id % 26))


submit = partial(driving.submit, params=WARM, max_tokens=16)


def alone(prompt: list[int], **more: Any) -> tuple[list[int], list[float]]:
    core = make_core()
    sequence = submit(core, prompt, **more)
    drain(core)
    return output(sequence)


def test_c29_neighbours_do_not_matter() -> None:
    """C29, request A: alone, beside others, at another place in the batch: the same ids and bits."""
    prompt, expected = list(range(10)), alone(list(range(10)), seed=42)
    assert len(expected[0]) == 16
    for position in (0, 1, 3):
        core = make_core()
        others = [submit(core, [50 + i] * (i + 1), seed=900 + i) for i in range(position)]
        sequence = submit(core, prompt, seed=42)
        submit(core, [7, 7], seed=5)
        drain(core)
        assert output(sequence) == expected
        assert all(len(output(other)[0]) == 16 for other in others)


def test_c29_preempted_half_way() -> None:
    """Turns were short so far, so both are let in: the younger is preempted and recomputed."""
    prompts = [list(range(10)), list(range(20, 32))]
    expected = [alone(prompt, seed=seed) for seed, prompt in enumerate(prompts)]
    core = make_core(pages=10)
    for _ in range(40):
        core._lengths.add(1)
    sequences = [submit(core, prompt, seed=seed) for seed, prompt in enumerate(prompts)]
    drain(core)
    assert core.statistics(0).preemptions >= 1
    assert sequences[1].preemptions >= 1
    assert [output(sequence) for sequence in sequences] == expected


@pytest.mark.parametrize("rows", [1, 3, 7, 16, 64])
def test_chunked_prompts_change_nothing(rows: int) -> None:
    prompt = [(3 * i) % VOCAB for i in range(45)]
    expected = alone(prompt, seed=3)
    core = make_core(rows=rows, batch=1)
    sequence = submit(core, prompt, seed=3)
    drain(core)
    assert output(sequence) == expected
    assert max(core.runner.rows) <= rows  # type: ignore[attr-defined]


def test_seeds_make_the_difference() -> None:
    """C29, B and C: equal seeds give equal output, different ones do not."""
    prompt = [1, 2, 3]
    assert alone(prompt, seed=7) == alone(prompt, seed=7)
    assert len({tuple(alone(prompt, seed=seed)[0]) for seed in range(3)}) == 3


def test_a_turn_continues_without_computing_again_what_was_said() -> None:
    core = make_core()
    lease, tokens = core.open(), Tokens()
    first = submit(core, list(range(10)), lease=lease, tokens=tokens)
    drain(core)
    context = len(tokens)
    second = submit(core, [1, 2, 3], lease=lease, tokens=tokens, params=SamplingParams(temperature=0.3))
    drain(core)
    assert first.cached_tokens == 0
    assert second.cached_tokens == context - 1
    assert second.context_tokens == context + 3
    assert core.runner.prefixes[-1] == tokens.token_ids[:-1].tolist()  # type: ignore[attr-defined]


def test_siblings_wait_for_the_first_and_share_its_prompt() -> None:
    core, prompt = make_core(), list(range(40))
    members = [submit(core, prompt, seed=member, group="g") for member in range(4)]
    drain(core)
    assert [member.cached_tokens for member in members] == [0, 36, 36, 36]
    assert core.statistics(0).tokens_prefilled == 40 + 3 * 4
    assert [output(member) for member in members] == [alone(prompt, seed=member) for member in range(4)]


@pytest.mark.parametrize("length", [40, 3], ids=["pages", "no whole page"])
def test_siblings_that_find_the_prompt_start_together(length: int) -> None:
    core, prompt = make_core(), list(range(length))
    members = [submit(core, prompt, seed=member, group="g") for member in range(4)]
    while length == 40 and members[0].num_sampled == 0:
        core.step()
        assert core.running == members[:1], "they wait for the first one's prompt"
    core.step()
    assert core.running == members
    drain(core)
    assert [output(member) for member in members] == [alone(prompt, seed=member) for member in range(4)]


@pytest.mark.parametrize("moment", ["queued", "chunked", "decoding", "finished"])
def test_c39_queued_chunked_decoding(moment: str) -> None:
    """C39 without host copies: 8 requests on a shared prefix of 100 ids, one aborted in each state."""
    core = make_core(pages=64, page_size=16, rows=40, batch=4)
    prefix = [i % VOCAB for i in range(100)]
    sequences = [submit(core, [*prefix, member], seed=member, max_tokens=6) for member in range(8)]

    def reached(sequence: Sequence) -> bool:
        return {
            "queued": sequence in core.waiting,
            "chunked": sequence in core.running and sequence.num_sampled == 0 and sequence.lease.computed > 0,
            "decoding": sequence.num_sampled > 2 and not sequence.is_finished,
            "finished": sequence.is_finished,
        }[moment]

    aborted: list[Sequence] = []

    def abort_one(step: int) -> None:
        found = next((sequence for sequence in sequences[:6] if reached(sequence)), None)
        if found and not aborted:
            core.abort(found)
            aborted.append(found)
        pool = core.cache.pool
        in_use = {page for lease in core.cache._leases for page in lease.pages}
        assert pool.num_free + pool.num_evictable + len(in_use) == 64

    drain(core, abort_one)
    assert len(aborted) == 1
    assert aborted[0].finish_reason == ("length" if moment == "finished" else "abort")
    assert [len(output(sequence)[0]) for sequence in sequences[6:]] == [6, 6]
    for sequence in sequences:
        core.close(sequence.lease)
    core.check()
    evict(core.cache.tree, 64)
    assert core.cache.pool.num_free == 64
    assert not any(core.cache.pool.refs)


def test_a_forked_session_goes_on_from_the_same_ids() -> None:
    core = make_core()
    parent, tokens = core.open(), Tokens()
    submit(core, list(range(10)), lease=parent, tokens=tokens)
    drain(core)
    copy = tokens.copy()
    child = core.fork(parent, len(copy))
    one = submit(core, [5], seed=1, lease=child, tokens=copy)
    two = submit(core, [5], seed=2, lease=parent, tokens=tokens)
    drain(core)
    assert one.cached_tokens == two.cached_tokens == 25
    assert output(one)[0] != output(two)[0]
    everything = list(range(10)), tokens.token_ids[10:26].tolist()
    assert output(one) == alone([*everything[0], *everything[1], 5], seed=1)


@pytest.mark.parametrize("length", [3, 4, 8])
def test_a_request_that_says_nothing_new_samples_from_the_last_id(length: int) -> None:
    """Also if that id has its KV: after a turn of which no id could be sampled, and in a fork of what has gone on since."""

    def allows_nothing(ids: object) -> tuple[int, ...]:
        return ()

    core, prompt, tokens = make_core(), list(range(length)), Tokens()
    failed = submit(core, prompt, tokens=tokens, grammar=allows_nothing)
    drain(core)
    assert "the grammar allows no id after 0 ids" in failed.error
    parent = submit(core, prompt, max_tokens=3)
    drain(core)
    again = submit(core, [], tokens=tokens, lease=failed.lease, seed=3)
    child = submit(core, [], tokens=copy_of(prompt), lease=core.fork(parent.lease, length), seed=3)
    scored = submit(
        core, [7, 8], tokens=copy_of(prompt), lease=core.fork(parent.lease, length), num_scored=2, max_tokens=0
    )
    drain(core)
    assert output(again) == output(child) == alone(prompt, seed=3)
    expected = submit(make := make_core(), [*prompt, 7, 8], num_scored=2, max_tokens=0)
    drain(make)
    assert scored.scores == expected.scores


def copy_of(ids: list[int]) -> Tokens:
    tokens = Tokens()
    tokens.observe(ids)
    return tokens


def test_nan_logits_end_one_request_only() -> None:
    def logits(prefix: list[int]) -> np.ndarray:
        row = hashed_logits(VOCAB)(prefix)
        return np.full_like(row, np.nan) if prefix[0] == 13 and len(prefix) > 5 else row

    core = make_core(logits)  # type: ignore[arg-type]
    bad, good = submit(core, [13, 1, 2]), submit(core, [1, 2, 3])
    drain(core)
    assert "NaN" in bad.error
    assert bad.num_sampled == 3
    assert output(good) == alone([1, 2, 3])


def test_end_ids_lengths_and_stop_strings() -> None:
    one_hot = [0.0] * VOCAB

    def logits(prefix: list[int]) -> list[float]:
        return [100.0 if token_id == len(prefix) else value for token_id, value in enumerate(one_hot)]

    core = make_core(logits)  # type: ignore[arg-type]
    ended = submit(core, [0, 0], params=SamplingParams(stop_token_ids=(5,)))
    held = submit(core, [0, 0], params=SamplingParams(stop_token_ids=(5,), min_tokens=6), max_tokens=8)
    length = submit(core, [0, 0], max_tokens=3)
    string = submit(core, [0, 0], params=SamplingParams(stop=("fgh", "ef")))
    drain(core)
    assert (output(ended)[0], ended.finish_reason, ended.matched_stop) == ([2, 3, 4, 5], "stop", 5)
    assert held.finish_reason == "length"
    assert 5 not in output(held)[0]
    assert (output(length)[0], length.finish_reason) == ([2, 3, 4], "length")
    assert (output(string)[0], string.matched_stop) == ([2, 3, 4, 5], "ef")


def test_ids_the_tokenizer_does_not_know_are_never_sampled() -> None:
    """C30 in small: the output layer has 120 rows, the tokenizer 100 ids; the largest logit is beyond."""
    core = make_core(lambda prefix: [*([0.0] * 110), 50.0, *([0.0] * 9)])
    sequence = submit(core, [1])
    drain(core)
    assert max(output(sequence)[0]) < VOCAB
    assert output(sequence)[1] == pytest.approx([-np.log(VOCAB)] * 16)


def scripted(ids: list[int], texts: dict[int, bytes], stop: str) -> Sequence:
    """What a model that would give `ids` gives with a stop string, over a vocabulary whose ids read as `texts`."""
    vocab = max(ids) + 1

    def logits(prefix: list[int]) -> np.ndarray:
        row = np.zeros(vocab, dtype=np.float32)
        row[ids[min(len(prefix) - 1, len(ids) - 1)]] = 100.0
        return row

    runner = ToyRunner(logits, num_pages=16, page_size=4)  # type: ignore[arg-type]
    core = EngineCore(runner, EngineSpec(page_size=4, kv_tokens=64), vocab_size=vocab, bytes_of=texts.__getitem__)
    sequence = submit(core, [0], params=SamplingParams(stop=(stop,)))
    drain(core)
    return sequence


def test_c28_a_stop_string_that_spans_tokens() -> None:
    """C28a, Qwen ids: `Action: search\\nObservation: fake` stopped at `Observation:`."""
    ids = [2512, 25, 2711, 198, 37763, 367, 25, 12418]
    texts = {
        2512: b"Action", 25: b":", 2711: b" search", 198: b"\n", 37763: b"Observ", 367: b"ation", 12418: b" fake"
    }  # fmt: skip
    sequence = scripted(ids, texts, "Observation:")
    assert output(sequence)[0] == ids[:7]
    assert len(output(sequence)[1]) == 7
    assert (sequence.finish_reason, sequence.matched_stop) == ("stop", "Observation:")
    assert sequence.lease.computed == 7


def test_c28_a_stop_string_that_ends_inside_a_token() -> None:
    """C28b: three backticks, of which the last begins id 3989; that id stays."""
    texts = {4730: b"ls", 198: b"\n", 13874: b"``", 3989: b"`\n", 17453: b"Done"}
    sequence = scripted([4730, 198, 13874, 3989, 17453], texts, "```")
    assert output(sequence)[0] == [4730, 198, 13874, 3989]
    assert (sequence.finish_reason, sequence.matched_stop) == ("stop", "```")


def returning_core() -> tuple[EngineCore, Sequence, Sequence]:
    """Twelve pages of 4: a conversation of 16 ids is away with its tool, and a request that needs 4 pages in the end runs."""
    core = make_core(pages=12, batch=4)
    for _ in range(32):
        core._lengths.add(4)
        core._conversations._returns.add(4, 4)
    away = submit(core, list(range(12)), seed=1, max_tokens=4)
    drain(core)
    core.pause(away.lease, "tool")
    running = submit(core, list(range(30, 38)), seed=2, max_tokens=8)
    core.step()
    return core, away, running


def test_a_conversation_that_will_return_has_room_and_precedence() -> None:
    """A newcomer of 20 ids would fit what is free, not with what the tool's conversation needs at its return."""
    core, away, running = returning_core()
    newcomer = submit(core, list(range(50, 66)), seed=3, max_tokens=4)
    core.step()
    assert (core.waiting, core.running) == ([newcomer], [running])
    assert len(away.lease.pages) == 4
    back = submit(core, [7, 7, 7], seed=4, max_tokens=4, lease=away.lease, tokens=away.tokens)
    assert core.waiting == [back, newcomer]
    assert back.rank == (away.arrived,)
    assert away.arrived < running.arrived < newcomer.arrived < back.arrived
    drain(core)
    assert back.cached_tokens == 15
    assert output(newcomer) == alone(list(range(50, 66)), seed=3, max_tokens=4)
    assert core.statistics(0).preemptions == 0


def test_where_return_has_its_price_a_newcomer_gets_the_pages_of_one_that_will_return() -> None:
    """As before, but the policy is `Priced`, to which computing 15 ids again costs nothing that was measured yet."""
    core, away, running = returning_core()
    core.cache.policy = Priced()
    newcomer = submit(core, list(range(50, 66)), seed=3, max_tokens=4)
    core.step()
    assert core.running == [running, newcomer]
    assert away.lease.state is State.DROPPED
    drain(core)
    assert output(newcomer) == alone(list(range(50, 66)), seed=3, max_tokens=4)


def test_a_request_waits_for_no_tool_alone() -> None:
    core, away, running = returning_core()
    core.abort(running)
    newcomer = submit(core, list(range(50, 80)), seed=3, max_tokens=4)
    core.step()
    assert core.running == [newcomer]
    assert len(away.lease.pages) == 0, "revoked: what it had is in the prefix cache, as far as there is room"


def test_a_tool_that_takes_longer_than_any_did_is_not_waited_for() -> None:
    core, away, _running = returning_core()
    for _ in range(5):
        core.step()
    newcomer = submit(core, list(range(50, 66)), seed=3, max_tokens=4)
    core.step()
    assert newcomer in core.running
    assert away.lease not in core._conversations.returning(core.statistics(0).steps, core._lengths)


def test_c39_in_debug_mode_pages_are_counted_at_idle() -> None:
    core = make_core(pages=16)
    core.spec = EngineSpec(page_size=4, kv_tokens=64, debug=True)
    lost = core.cache.pool.take(1)
    submit(core, [1, 2, 3], max_tokens=2)
    core.step()
    with pytest.raises(AssertionError, match="has 1 references, 0 holders"):
        core.step()
    core.cache.pool.release(lost)
    core.check()
