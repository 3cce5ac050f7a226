"""KV while tools run, on the toy engine: parked, restored, pinned, dropped, under late and failing copies.

The toy model computes its logits from the ids that it finds in the pages. So a page that was overwritten, freed too early or
restored to the wrong place changes what is sampled, and is seen by comparing with an engine that has pages for all.
"""

import itertools
import random

import pytest
from talks import VOCAB, Talk, drain, make_core, park, prompt, settle, states, two_settled, unlimited

from agentrt.core.spec import KVPolicy
from agentrt.engine.kv import cache as kv_cache
from agentrt.engine.kv.evict import evict
from agentrt.engine.kv.lease import IllegalMoveError, Lease, State
from agentrt.engine.kv.radix import HOST
from agentrt.engine.step import StallError
from agentrt.testing.copier import FaultyCopier


def test_a_parked_conversation_goes_on_with_the_same_bits() -> None:
    """A takes the pool, B needs it: A goes to the host, and back for its next turn. Nothing is computed again."""
    core = make_core(9, 16)
    a, b = two_settled(core)
    assert states(a, b) == [State.PARKED, State.CACHED]
    a.turn([1, 1])
    assert a.sequence.cached_tokens == 10, "five whole pages of eleven ids"
    assert core.runner.host.copier.started["load"], "they came from the host"  # type: ignore[attr-defined]
    assert a.said == unlimited([prompt(0), [1, 1]])
    assert core.statistics(2).tokens_reprefilled == 0


def test_without_a_host_it_is_computed_again() -> None:
    core = make_core(9)
    a, b = Talk(core), Talk(core)
    a.turn(prompt(0))
    b.turn(prompt(3))
    assert states(a, b) == [State.DROPPED, State.CACHED]
    a.turn([1, 1])
    assert a.said == unlimited([prompt(0), [1, 1]])


@pytest.mark.parametrize("policy", ["lru", "lru_drop", "ttl", "priced", "cache_ttl", "infercept"])
@pytest.mark.parametrize("host_pages", [0, 9, 64])
def test_150_rounds_are_those_of_an_unlimited_pool(policy: KVPolicy, host_pages: int) -> None:
    """Row 21's canary: five conversations over pages for two, 150 rounds in all, late copies: ids and logprob bits."""
    lag = random.Random(0)
    core = make_core(
        56, host_pages, copier=FaultyCopier(delay=lambda: lag.randrange(4), checks=True), policy=policy, ttl=0.0
    )
    talks = [Talk(core) for _ in range(5)]
    turns = [[prompt(which, 5), *([round_ % VOCAB, which] for round_ in range(29))] for which in range(5)]
    for round_ in range(30):
        for talk, observed in zip(talks, turns, strict=True):
            talk.ask(observed[round_], 1)
        drain(core)
        for talk in talks:
            core.pause(talk.lease, "tool")
    for talk, observed in zip(talks, turns, strict=True):
        assert talk.said == unlimited(observed, 1)


def test_row_18_and_23_pages_are_held_until_copies_have_ended() -> None:
    """A load that does not end: its pages of the host and of the device are free for nobody, also when its session closes."""
    copier = FaultyCopier()
    core = make_core(9, 16, copier=copier)
    a, b = two_settled(core)
    evict(core.cache.tree, 9)
    core.close(b.lease)
    copier.is_stuck = True
    a.ask([1])
    core.step()
    loading = core.cache.tier.in_copies(HOST, 0)
    assert len(loading) == 5
    core.abort(a.sequence)
    core.close(a.lease)
    core.check()
    evict(core.cache.tree, 16, HOST)
    assert core.cache.tier.pools[0].num_free == 16 - 5
    copier.is_stuck = False
    settle(core)
    evict(core.cache.tree, 16, HOST)
    evict(core.cache.tree, 16)
    assert (core.cache.tier.pools[0].num_free, core.cache.pool.num_free) == (16, 9)


def test_row_19_copies_start_between_two_steps() -> None:
    """No page is copied from or to while the model computes: copies are started when nothing computes."""
    copier = FaultyCopier()
    core = make_core(9, 16, copier=copier)
    computing, run, start = [], core.runner.run, copier.start

    def watched_run(batch):  # type: ignore[no-untyped-def]
        computing.append(1)
        logits = run(batch)
        computing.pop()
        return logits

    def watched_start(direction, copies):  # type: ignore[no-untyped-def]
        assert not computing
        return start(direction, copies)

    core.runner.run, copier.start = watched_run, watched_start  # type: ignore[method-assign]
    a, b = Talk(core), Talk(core)
    for ids in ([1], [2], [3]):
        a.turn(prompt(0, 2) + ids)
        b.turn(prompt(3, 2) + ids)
    assert copier.started["load"]


def test_row_20_a_turn_that_comes_back_while_it_is_saved() -> None:
    """The pages of a lease that is being parked are still there: it runs on, and its copies find their place."""
    copier = FaultyCopier()
    core = make_core(9, 16, copier=copier)
    a = Talk(core)
    a.turn(prompt(0, 6))
    copier.is_stuck = True
    core.cache.park(a.lease)
    core.step()
    assert states(a) == [State.PARKING]
    a.ask([2])
    core.step()
    assert states(a) == [State.RUNNING]
    copier.is_stuck = False
    drain(core)
    settle(core)
    assert a.said == unlimited([prompt(0, 6), [2]])


@pytest.mark.parametrize("direction", ["save", "load"])
def test_rows_17_a_copy_that_fails_is_never_used(direction: str) -> None:
    """Every third page that is copied this way is poisoned and says so: its KV is computed again."""
    copier = FaultyCopier(delay=1)
    copier.fails = lambda way, copy: way == direction and copy.target % 3 == 0
    core = make_core(12, 24, copier=copier)
    a, b = Talk(core), Talk(core)
    for ids in ([1], [2], [3]):
        a.turn(prompt(0, 3) + ids)
        b.turn(prompt(3, 3) + ids)
    for talk, start in ((a, 0), (b, 3)):
        assert talk.said == unlimited([prompt(start, 3) + ids for ids in ([1], [2], [3])])
    assert core.statistics(0).copies_failed > 0


def test_row_17_what_failed_to_come_back_for_a_turn_that_is_gone_is_given_up() -> None:
    """It was noted where another's step took pages, and is heard of by the next step."""
    copier = FaultyCopier()
    core = make_core(9, 16, copier=copier)
    a, _ = two_settled(core)
    core.cache.revoke(a.lease)
    evict(core.cache.tree, 9)
    copier.delay, copier.fails = 100, lambda direction, copy: direction == "load"
    a.ask([2])
    core.step()
    assert a.lease.is_running
    assert a.lease.job
    assert core.cache.tier.wait(1.0)
    core.cache._note(core.cache.tier.poll())
    core.abort(a.sequence)
    core.step()
    core.check()
    assert states(a) == [State.DROPPED]


def test_row_17_a_page_that_changed_on_the_host_is_not_restored() -> None:
    """Checksums: the host's copy of A was overwritten meanwhile."""
    copier = FaultyCopier(checks=True)
    core = make_core(9, 16, copier=copier)
    a, _ = two_settled(core)
    evict(core.cache.tree, 9)
    copier.host[0][core.cache.tree.table_of(a.lease.anchor)[1][0][0] * -1 - 2] += 1  # type: ignore[arg-type]
    a.turn([1, 1])
    assert a.said == unlimited([prompt(0), [1, 1]])
    assert core.statistics(0).copies_failed == 1


def test_a_full_host_keeps_what_is_parked_and_the_rest_is_dropped() -> None:
    core = make_core(9, 5)
    a, b, c = Talk(core), Talk(core), Talk(core)
    a.turn(prompt(0))
    b.turn(prompt(3))
    c.turn(prompt(5))
    settle(core)
    assert states(a, b, c) == [State.PARKED, State.DROPPED, State.CACHED]
    assert core.cache.tier.pools[0].num_free == 0
    for talk, start in ((a, 0), (b, 3), (c, 5)):
        talk.turn([1])
        assert talk.said == unlimited([prompt(start), [1]])


STAGES = ["queued", "prefilling", "decoding", "pinned", "parking", "parked", "restoring"]


@pytest.mark.parametrize("stage", STAGES)
def test_row_26_aborted_in_every_state_and_then_right(stage: str) -> None:
    copier = FaultyCopier()
    policy: KVPolicy = "ttl" if stage == "pinned" else "lru"
    core = make_core(16, 32, copier=copier, policy=policy, rows=8)
    a = Talk(core)
    a.turn(prompt(0, 13))
    settle(core)
    if stage in ("parked", "restoring"):
        park(a)
        evict(core.cache.tree, 16)
    if stage == "parking":
        a.turn([1, 1])
        copier.is_stuck = True
        core.cache.park(a.lease)
        core.step()
        assert states(a) == [State.PARKING]
        copier.is_stuck = False
    if stage == "pinned":
        assert states(a) == [State.PINNED]
    copier.is_stuck = stage == "restoring"
    sequence = a.ask(prompt(2, 9 if stage == "prefilling" else 2))
    for _ in range({"queued": 0, "prefilling": 1, "decoding": 2, "restoring": 1}.get(stage, 0)):
        core.step()
    core.abort(sequence)
    core.check()
    observed = [prompt(0, 13), *([[1, 1]] if stage == "parking" else [])]
    copier.is_stuck = False
    so_far = a.tokens.copy()
    a.turn([4])
    fresh = Talk(make_core(256))
    fresh.tokens, fresh.turns = so_far, a.turns - 1
    fresh.turn([4])
    assert a.said == fresh.said
    assert a.tokens.token_ids.tolist()[:13] == observed[0]
    core.close(a.lease)
    settle(core)
    evict(core.cache.tree, 32, HOST)
    evict(core.cache.tree, 16)
    assert (core.cache.pool.num_free, core.cache.tier.pools[0].num_free) == (16, 32)


def test_row_39_a_step_that_is_not_run_has_taken_no_pages() -> None:
    """While the first waits for its pages, a second has no more than its ids need."""
    core = make_core(8, 16)
    a, b = Talk(core), Talk(core)
    a.turn(prompt(0, 9))
    b.ask(prompt(3, 9))
    while core.waiting or core.running:
        core.step()
        for talk in (a, b):
            assert len(talk.lease.pages) <= core.cache.pages_for(talk.lease.computed + 1)


def test_row_44_to_close_or_to_unpin_is_no_use() -> None:
    """What was used last stays longest, whoever was closed or unpinned since."""
    core = make_core(32, policy="ttl")
    old, new = Talk(core), Talk(core)
    old.turn(prompt(0))
    new.turn(prompt(3))
    assert states(old, new) == [State.PINNED, State.PINNED]
    core.cache.revoke(new.lease)
    core.cache.revoke(old.lease)
    core.close(new.lease)
    core.close(old.lease)
    evict(core.cache.tree, 5)
    for talk, cached in ((new, 10), (old, 0)):
        lease = core.open()
        assert core.cache.resume(lease, talk.tokens.token_ids, 10) == cached


def test_c38_a_hit_on_the_host_compares_ids_and_namespaces() -> None:
    """C38 with the pages on the host: other ids, another salt, another version find nothing of them."""
    core = make_core(9, 32)
    a, b = two_settled(core)
    core.close(b.lease)
    evict(core.cache.tree, 9)
    ids = a.tokens.token_ids
    salted = core.open("salt")
    assert core.cache.resume(salted, ids, 10) == 0
    other = core.open()
    assert core.cache.resume(other, type(ids)([7, *ids[1:]]), 10) == 0
    core.version += 1
    assert core.cache.resume(core.open(), ids, 10) == 0
    core.version -= 1
    same = core.open()
    assert core.cache.resume(same, ids, 10) == 10
    assert same.job is not None, "from the host"


def test_c39_accounting_after_aborts() -> None:
    """C39: 64 pages of 16 ids, eight requests that share 100 ids, six aborted in six states, two that finish."""
    copier = FaultyCopier()
    core = make_core(64, 64, page_size=16, copier=copier, policy="ttl", rows=128)
    shared = prompt(0, 100)
    talks = [Talk(core) for _ in range(8)]
    paused, saving, loading, queued, prefilling, decoding, one, two = talks
    for index, talk in enumerate((paused, saving, loading)):
        talk.turn([*shared, *prompt(index, 60)])
    assert states(paused) == [State.PINNED]
    park(loading)
    evict(core.cache.tree, 64)
    saving.turn([1] * 40)
    copier.is_stuck = True
    core.cache.park(saving.lease)
    loading.ask([2])
    decoding.ask([*shared, 1], 8)
    for _ in range(2):
        core.step()
        core.check()
    assert states(saving, loading, decoding) == [State.PARKING, State.RUNNING, State.RUNNING]
    assert loading.lease.job is not None
    prefilling.ask([*shared, *prompt(4, 300)], 8)
    core.step()
    assert 0 < prefilling.lease.computed < 400
    queued.ask([*shared, 5], 8)
    for talk in (queued, prefilling, decoding, loading):
        core.abort(talk.sequence)
        core.check()
    for talk in (paused, saving, loading, queued, prefilling, decoding):
        core.close(talk.lease)
        core.check()
    copier.is_stuck = False
    for talk in (one, two):
        talk.ask([*shared, 6], 4)
    drain(core)
    settle(core)
    for talk in (one, two):
        core.close(talk.lease)
    core.check()
    assert core.cache.num_pinned == 0
    assert core.cache.pool.num_free + core.cache.pool.num_evictable == 64
    evict(core.cache.tree, 64, HOST)
    evict(core.cache.tree, 64)
    assert (core.cache.pool.num_free, core.cache.tier.pools[0].num_free) == (64, 64)
    assert not any(core.cache.pool.refs)


@pytest.mark.parametrize("third", [False, True], ids=["two", "three"])
@pytest.mark.parametrize("host_pages", [0, 32])
@pytest.mark.parametrize("share", [0.6, 1.0])
def test_c40_all_pinned_and_everybody_needs_one_more(
    third: bool, host_pages: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C40: 7 pages; A holds 4 and B 3, their tools return, each needs one more; C at the head of the line needs 6."""
    monkeypatch.setattr(kv_cache, "PINNED_SHARE", share)
    core = make_core(7, host_pages, policy="ttl", ttl=1e9)
    a, b, c = Talk(core), Talk(core), Talk(core)
    a.turn(prompt(0, 6), 2)
    b.turn(prompt(3, 4), 2)
    assert states(a, b) == [State.PINNED, State.PINNED if share == 1 else State.CACHED]
    assert [len(talk.lease.pages) for talk in (a, b)] == [4, 3]
    talks = [*([c] if third else []), a, b]
    for talk in talks:
        talk.ask(prompt(5, 11) if talk is c else [1], 1 if talk is c else 2)
    idle = 0
    while core.waiting or core.running:
        before = sum(len(talk.tokens) + talk.lease.computed for talk in talks)
        core.step()
        core.check()
        idle = 0 if sum(len(talk.tokens) + talk.lease.computed for talk in talks) != before else idle + 1
        assert idle <= 3, "three steps without progress"
    assert a.said == unlimited([prompt(0, 6), [1]], 2)
    assert b.said == unlimited([prompt(3, 4), [1]], 2)
    if third:
        assert c.said == unlimited([prompt(5, 11)], 1)


def test_c40_a_stall_says_who_holds_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were nobody to give anything up, it would be seen at once."""
    core = make_core(7)
    a, b = Talk(core), Talk(core)
    a.turn(prompt(0, 11), 1)
    monkeypatch.setattr(core.cache, "make_room", lambda *args, **kwargs: False)
    b.ask(prompt(3, 5))
    with pytest.raises(StallError, match=r"1 sequences wait and 0 run.*lease 3 \(cached\) 6"):
        core.step()


def test_pins_are_kept_until_nobody_can_go_on_otherwise() -> None:
    """TTL: a newcomer waits for a pin to end while others run; with nobody running it takes the pages of the latest opened."""
    now = itertools.count()
    core = make_core(10, 32, policy="ttl", ttl=1e6, clock=lambda: float(next(now)))
    a, b = Talk(core), Talk(core)
    a.turn(prompt(0, 6))
    assert states(a) == [State.PINNED]
    b.turn(prompt(3, 12))
    settle(core)
    assert states(a) == [State.PARKED], "b alone could not go on beside the pin"
    assert b.said == unlimited([prompt(3, 12)])


def test_an_expired_pin_is_revoked_for_a_newcomer() -> None:
    seconds = [0.0]
    core = make_core(12, 32, policy="ttl", ttl=2.0, clock=lambda: seconds[0])
    a, b, c = Talk(core), Talk(core), Talk(core)
    a.turn(prompt(0, 6))
    b.ask([3, 4], 12)
    core.step()
    c.ask(prompt(5, 5), 6)
    core.step()
    assert states(a, c) == [State.PINNED, State.OPEN], "b runs, so nobody is stuck"
    seconds[0] = 2.5
    core.step()
    assert a.lease.state in (State.PARKING, State.PARKED)
    drain(core)
    assert c.said == unlimited([prompt(5, 5)], 6)


def test_illegal_moves_raise() -> None:
    core = make_core(9)
    a = Talk(core)
    a.ask(prompt(0))
    core.step()
    with pytest.raises(IllegalMoveError, match="a lease that is running cannot pause"):
        core.pause(a.lease, "tool")
    with pytest.raises(IllegalMoveError, match="a lease that is running cannot become closed"):
        core.close(a.lease)
    drain(core)
    core.close(a.lease)
    with pytest.raises(IllegalMoveError, match="a lease that is closed cannot become running"):
        core.cache.resume(a.lease, a.tokens.token_ids, 4)


def test_no_two_leases_have_the_same_number() -> None:
    """Numbered anew by their first requests, in the order of these; a fork with KV keeps the number that it was made with."""
    core = make_core(64)
    a, b, late = Talk(core), Talk(core), Talk(core)
    for talk in (b, a):
        talk.turn(prompt(0))
    forks = [core.fork(a.lease, 8) for _ in range(2)]
    late.turn(prompt(1))
    leases = [b.lease, a.lease, *forks, late.lease]
    assert sorted(leases, key=lambda lease: lease.number) == leases
    assert len({lease.number for lease in leases}) == 5


def test_byte_seconds_by_hand() -> None:
    """A toy page is a byte. Ten ids in 5 pages of the device for 5 s of tool time; parked, 5 pages of the host for 7 s."""
    seconds = [0.0]
    core = make_core(64, 64, clock=lambda: seconds[0])
    a = Talk(core)
    a.turn(prompt(0))
    seconds[0] = 5.0
    park(a)
    evict(core.cache.tree, 64)
    seconds[0] = 12.0
    a.turn([1])
    kv = a.sequence.kv
    assert (kv.tool_device_byte_seconds, kv.tool_host_byte_seconds) == (25.0, 35.0)
    assert (kv.device_byte_seconds, kv.host_byte_seconds) == (25.0, 35.0)
    assert (kv.reprefilled_tokens, kv.restored_tokens, kv.wait_seconds) == (0, 10, 0.0)
    assert isinstance(a.lease, Lease)
