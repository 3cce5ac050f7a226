"""The priced decision on hand-calculated magnitudes of Qwen3 models on one device, and the published rules beside it."""

import math
from array import array
from heapq import heappop, heappush
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.engine.kv.baselines import CacheTtl, InferCept, best_ttl
from agentrt.engine.kv.cache import KVCache
from agentrt.engine.kv.group import Group
from agentrt.engine.kv.lease import Pause, State
from agentrt.engine.kv.policy import EVERYBODY, Inside, LeaseView, PoolView
from agentrt.engine.kv.priced import NEXT_HOLD, Priced, give_up, holding_costs_more, memory_price
from agentrt.engine.kv.radix import Namespace
from agentrt.engine.kv.rates import ENOUGH_STEPS, REPEATS, Rates, StepCosts
from agentrt.engine.kv.tooltime import UNKNOWN, Foretold, Measured

KIB, GB = 1024, 1e9
QWEN3_8B = Rates(31.3e-6, 1.325e-9, 1.0, 50 * GB, 144 * KIB)
"""Recomputing costs 34 microseconds a token at 4k, 53 at 32k."""
QWEN3_06B = Rates(2.0e-6, 0.51e-9, 1.0, 50 * GB, 112 * KIB)
POOL = PoolView(16, 50_000, 0, 200_000, 200_000, waiting=1, lacking=1, rates=QWEN3_8B)
"""800,000 tokens, all in use, and room on the host."""


def lease(slot: int = 0, tokens: int = 32_768, **fields: Any) -> LeaseView:
    usual = {
        "state": State.CACHED,
        "unshared": tokens,
        "is_saved": False,
        "number": slot,
        "is_wanted": False,
        "rank": (slot,),
    }
    return LeaseView(slot, tokens=tokens, **(usual | fields))


def test_what_a_recomputed_token_and_a_copied_one_cost() -> None:
    assert QWEN3_8B.prefill(0, 4096) == pytest.approx(4096 * 34e-6, rel=0.01)
    assert QWEN3_8B.prefill(0, 32_768) == pytest.approx(32_768 * 53e-6, rel=0.01)
    assert QWEN3_8B.copying(32_768) == pytest.approx(0.0966, rel=0.001)


def test_without_pressure_memory_costs_nothing() -> None:
    assert memory_price(POOL._replace(waiting=0, lacking=0), 0) == 0.0
    assert memory_price(POOL, 0) == pytest.approx(1 / 800_000)
    assert memory_price(POOL._replace(rates=QWEN3_8B._replace(fixed_share=0.25)), 0) == pytest.approx(0.25 / 800_000)


def test_the_fewer_are_at_work_the_dearer_is_memory() -> None:
    """One more among few saves more of a step; but one that gives up all lets several in."""
    assert memory_price(POOL, 400_000) == pytest.approx(1 / 400_000)
    assert memory_price(POOL._replace(available=10_000), 400_000) == pytest.approx(1 / 240_000)
    assert memory_price(POOL, 700_000) == memory_price(POOL, 800_000) == pytest.approx(1 / 200_000)


def test_park_wins_for_a_long_context() -> None:
    """2 x 0.0966 s x (32,768 / 800,000 + 0.02), against 1.74 s of prefill."""
    way = give_up(lease(), QWEN3_8B, 1 / 800_000, has_host=True)
    assert way.kind == "park"
    assert way.seconds == pytest.approx(2 * 0.0966 * (0.04096 + 0.02), rel=0.001)


def test_a_copy_that_is_made_already_is_half_the_price() -> None:
    way = give_up(lease(is_saved=True), QWEN3_8B, 1 / 800_000, has_host=False)
    assert way.kind == "park"
    assert way.seconds == pytest.approx(0.0966 * (0.04096 + 0.02), rel=0.001)


def test_drop_wins_where_the_host_is_full() -> None:
    way = give_up(lease(tokens=4096), QWEN3_8B, 1 / 800_000, has_host=False)
    assert way.kind == "drop"
    assert way.seconds == pytest.approx(4096 * 34e-6 * (1 + 4096 / 1_600_000), rel=0.01)


def test_drop_wins_where_copies_are_slow_and_the_model_is_small() -> None:
    """0.6B, 2,000 ids: 5 ms of prefill; at 0.2 GB/s copying both ways takes 2.3 s, of which 0.0225 are lost."""
    slow = QWEN3_06B._replace(bytes_per_second=0.2 * GB)
    assert give_up(lease(tokens=2000), slow, 1 / 800_000, has_host=True).kind == "drop"
    assert give_up(lease(tokens=2000), QWEN3_06B, 1 / 800_000, has_host=True).kind == "park"


def test_drop_wins_for_what_siblings_keep() -> None:
    """Of 2,000 ids all but 16 are shared: computing those again is nothing."""
    shared = lease(tokens=2000, unshared=16)
    assert give_up(shared, QWEN3_8B._replace(bytes_per_second=0.01 * GB), 1 / 800_000, has_host=True).kind == "drop"


def test_with_prefill_unknown_what_can_be_parked_is() -> None:
    unknown = QWEN3_8B._replace(per_row=None)
    assert give_up(lease(), unknown, 1 / 800_000, has_host=True).kind == "park"
    assert give_up(lease(), unknown, 1 / 800_000, has_host=False).kind == "drop"


@pytest.mark.parametrize(("eta", "kept"), [(0.05, True), (0.1, True), (1.0, False), (10.0, False)])
def test_keep_wins_iff_the_tool_ends_before_both_copies(eta: float, kept: bool) -> None:
    """Both copies of 32k take 0.193 s, and their interference as much as 0.094 s of holding: the break-even is 0.288 s."""
    assert (Priced().make_room([lease(eta=eta, elapsed=0.1)], POOL) == []) == kept


def test_holding_by_hand() -> None:
    """Foretold in 2 s (1 to 4 s): holding it for 30 s costs its mean, 3 / ln 4 = 2.164 s."""
    assert holding_costs_more(Foretold(2.0), 10.0) == pytest.approx(3 / math.log(4) - 10)
    assert holding_costs_more(Foretold(2.0), 0.5) == pytest.approx(NEXT_HOLD)
    assert holding_costs_more(Measured(UNKNOWN, 0.0), 1.0) < NEXT_HOLD


def test_the_longest_paused_go_first_where_hazard_falls() -> None:
    leases = [lease(0, elapsed=1.0), lease(1, elapsed=60.0), lease(2, elapsed=8.0)]
    actions = Priced().make_room(leases, POOL._replace(lacking=5000))
    assert [action.slot for action in actions] == [1, 2, 0]
    assert {action.kind for action in actions} == {"park"}


def test_learned_times_decide_between_tools() -> None:
    policy = Priced()
    for _ in range(100):
        policy.on_resume(lease(tool="quick", elapsed=0.01), is_cut=False)
        policy.on_resume(lease(tool="slow", elapsed=30.0), is_cut=False)
    quick, slow = lease(0, tool="quick", elapsed=0.002), lease(1, tool="slow", elapsed=0.002)
    assert [action.slot for action in policy.make_room([quick, slow], POOL._replace(lacking=9000))] == [1]


def test_a_call_that_hangs_is_given_up_although_its_tool_is_quick() -> None:
    policy = Priced()
    for _ in range(100):
        policy.on_resume(lease(tool="quick", elapsed=0.01), is_cut=False)
    assert policy.make_room([lease(tool="quick", elapsed=20.0)], POOL)


def test_waiting_turns_last() -> None:
    leases = [lease(0, elapsed=5.0), lease(1, is_wanted=True), lease(2, is_wanted=True), lease(3, eta=0.05)]
    lacking = POOL._replace(lacking=90_000)
    assert [action.slot for action in Priced().make_room(leases, lacking)] == [0, 2, 1]
    assert [action.slot for action in Priced().make_room(leases, lacking._replace(is_stuck=True))] == [0, 3, 2, 1]


def test_a_turn_that_waits_makes_way_for_those_before_it() -> None:
    """Its KV is 2,048 pages, which nobody needs before those have come; without a host they are computed again."""
    leases = [lease(1, is_wanted=True), lease(2, is_wanted=True), lease(3, eta=0.05)]
    assert Priced().make_room(leases, POOL) == [(2, "park")]
    assert Priced().make_room(leases, POOL._replace(lacking=2049)) == [(2, "park"), (1, "park")]
    assert Priced().make_room(leases, POOL._replace(host_free=0)) == [(2, "drop")]


def test_those_outside_make_room_first() -> None:
    leases = [lease(0, elapsed=5.0), lease(1, is_wanted=True), lease(2, elapsed=0.01), lease(3, elapsed=0.01)]
    outside = POOL._replace(lacking=9000, inside=Inside((1,), (0,)))
    assert [action.slot for action in Priced().make_room(leases, outside)] == [3, 2, 0, 1]
    assert Priced().prefetch(leases, outside) == [1, 0]


def test_as_many_are_let_in_as_fill_the_pool() -> None:
    """Of 800,000 ids 95 % are 23.2 conversations of 32,768 at work, 120 % are 29.3."""
    at_work = [lease(number, context=32_768, is_running=True) for number in range(60)]
    no_host = POOL._replace(host_pages=0, host_free=0)
    assert Priced().inside(at_work, no_host) == Inside((29,), (23,))
    assert Priced().inside(at_work[:24], no_host) == Inside((math.inf,), (23,))
    assert Priced().inside(at_work[:23], no_host) == EVERYBODY


def test_more_are_let_in_where_it_costs_little_to_give_one_up() -> None:
    """Both copies of 32,768 ids cost 0.0118 s, so 0.6 x 0.010 / 0.0118 = 51 % of the pool more."""
    at_work = [lease(number, context=32_768, is_running=True) for number in range(60)]
    assert Priced().inside(at_work, POOL) == Inside((41,), (35,))
    assert Priced().inside(at_work, POOL._replace(host_free=0)) == Inside((41,), (35,)), "whatever is free on the host"


def test_a_small_host_has_little_room_for_more_than_the_pool() -> None:
    """24.4 conversations fit the pool, so 1.5 / 4.94 of it stays free: of half a pool 10 / 11.8 of 0.196 are used, 17 % more.
    Where four fit three quarters stay free."""
    at_work = [lease(number, context=32_768, is_running=True) for number in range(60)]
    assert Priced().inside(at_work, POOL._replace(host_pages=10_000)) == Inside((29,), (23,))
    assert Priced().inside(at_work, POOL._replace(host_pages=25_000)) == Inside((33,), (27,))
    few = POOL._replace(pages=8192, host_pages=6144)
    assert Priced().inside(at_work, few) == Inside((4,), (3,))


def test_whose_tool_goes_on_for_long_is_not_counted() -> None:
    away = [lease(number, context=32_768, tool="sleep", eta=100.0) for number in range(40)]
    assert Priced().inside(away, POOL) == EVERYBODY
    newcomers = [lease(number, context=0, is_wanted=True) for number in range(40)]
    assert Priced().inside(newcomers, POOL) == EVERYBODY


def test_the_last_of_a_group_stays_longer() -> None:
    """Break-even at 0.288 s of holding, twice that for the last member."""
    alone, among = lease(0, eta=0.35, members_left=1), lease(1, eta=0.35, members_left=8)
    actions = Priced().make_room([alone, among], POOL._replace(lacking=9000))
    assert [action.slot for action in actions] == [1]


def test_if_nobody_can_go_on_what_is_worth_keeping_goes_too() -> None:
    stuck = POOL._replace(is_stuck=True)
    assert [action.slot for action in Priced().make_room([lease(eta=0.05)], stuck)] == [0]


def all_priced_first(policy: Priced, leases: list[LeaseView], pool: PoolView) -> list[tuple[int, str]]:
    """Who makes room, by the plain rule: everybody is priced, and the first of all goes first."""
    price = memory_price(pool, sum(one.unshared for one in leases))
    room, heap = pool.host_free, list[tuple[tuple[int, float], int, LeaseView, str]]()
    places = {one.slot: place for place, one in enumerate(sorted(leases, key=lambda one: one.rank))}

    def push(one: LeaseView) -> None:
        has_host = one.unshared // pool.page_size <= room
        way = give_up(one if has_host else one._replace(is_saved=False), pool.rates, price, has_host=has_host)
        order = (2, -float(places[one.slot])) if one.is_wanted else (1, -policy._excess(one, way, price))
        order = (0, -float(places[one.slot])) if one.rank > pool.inside.with_kv else order
        heappush(heap, (order, one.slot, one, way.kind))

    for one in leases:
        push(one)
    gone, freed = list[tuple[int, str]](), 0
    while heap and freed < pool.lacking:
        order, slot, one, kind = heappop(heap)
        if order[0] == 1 and order[1] >= 0.0 and not pool.is_stuck:
            continue  # it is worth keeping
        pages = one.unshared // pool.page_size
        if kind == "park" and pages > room:
            push(one)
            continue
        room -= pages if kind == "park" and order[0] else 0
        gone.append((slot, kind))
        freed += pages
    return gone


LEASES = st.lists(
    st.builds(
        lambda tokens, own, elapsed, eta, is_saved, is_wanted, members: lease(
            tokens=tokens, unshared=tokens * own // 4, elapsed=elapsed, eta=eta, is_saved=is_saved, is_wanted=is_wanted,
            members_left=members,
        ),
        st.sampled_from((64, 2000, 32_768)), st.integers(0, 4), st.sampled_from((0.0, 0.2, 3.0)),
        st.sampled_from((None, 0.05, 1.0)), st.booleans(), st.booleans(), st.integers(0, 2),
    ),
    max_size=8,
)  # fmt: skip


@given(
    LEASES, st.sampled_from((0, 200, 4000)), st.integers(1, 9000), st.booleans(), st.integers(-1, 8), st.booleans(),
)  # fmt: skip
def test_pricing_only_those_whose_turn_it_is_changes_nothing(
    leases: list[LeaseView], room: int, lacking: int, is_stuck: bool, inside: int, is_known: bool
) -> None:
    leases = [one._replace(slot=slot, rank=(slot * 5 % 8,)) for slot, one in enumerate(leases)]
    rates = QWEN3_8B if is_known else QWEN3_8B._replace(per_row=None)
    pool = POOL._replace(
        host_free=room, lacking=lacking, is_stuck=is_stuck, inside=Inside((inside,), (inside,)), rates=rates
    )
    gone = [(action.slot, action.kind) for action in Priced().make_room(leases, pool)]
    assert gone == all_priced_first(Priced(), leases, pool)


def test_no_more_is_given_up_than_is_lacking() -> None:
    leases = [lease(slot, tokens=160, elapsed=60.0) for slot in range(9)]
    assert len(Priced().make_room(leases, POOL._replace(lacking=25))) == 3


def test_what_the_host_has_no_room_for_is_weighed_as_if_there_were_none() -> None:
    """32,768 ids are 2,048 pages. Beyond 0.288 s it is cheaper to park one; to compute it again costs as much as 42 s of it."""
    leases = [lease(0, eta=400.0), lease(1, eta=4.0), lease(2, eta=2.0)]
    lacking = POOL._replace(lacking=9000)
    assert Priced().make_room(leases, lacking) == [(0, "park"), (1, "park"), (2, "park")]
    assert Priced().make_room(leases, lacking._replace(host_free=2 * 2048)) == [(0, "park"), (1, "park")]
    assert Priced().make_room(leases[1:], lacking._replace(host_free=2048)) == [(1, "park")]
    assert Priced().make_room(leases, lacking._replace(host_free=0)) == [(0, "drop")]
    stuck = lacking._replace(host_free=2048, is_stuck=True)
    assert Priced().make_room(leases, stuck) == [(0, "park"), (1, "drop"), (2, "drop")]


def test_a_copy_whose_place_is_promised_to_another_does_not_count() -> None:
    """One was saved; the other goes first, and takes the room that the copy has."""
    leases = [lease(0, eta=400.0), lease(1, eta=4.0, is_saved=True)]
    assert Priced().make_room(leases, POOL._replace(lacking=9000, host_free=2048)) == [(0, "park")]


def test_waiting_turns_and_the_soonest_come_back_first() -> None:
    parked = [lease(0, elapsed=100.0), lease(1, elapsed=0.5), lease(2, eta=0.02), lease(3, is_wanted=True)]
    assert Priced().prefetch(parked, POOL) == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("seconds", "deadline", "is_cut"),
    [(19.99, 20.0, True), (20.01, 20.0, True), (15.0, 20.0, False), (500.0, None, False)],
)
def test_a_tool_that_ends_at_its_time_limit_was_cut(seconds: float, deadline: float | None, is_cut: bool) -> None:
    told = []

    class Told(Priced):
        def on_resume(self, lease: LeaseView, *, is_cut: bool) -> None:
            told.append((lease.tool, lease.elapsed, is_cut))

    now = [100.0]
    cache = KVCache([Group(8)], 2, policy=Told(), clock=lambda: now[0])
    one = cache.open(Namespace(0))
    cache.resume(one, array("i", [1, 2]), 1)
    cache.suspend(one, array("i", [1, 2]))
    cache.pause(one, Pause("tool", "", now[0], None if deadline is None else now[0] + deadline))
    now[0] += seconds
    cache.unpause(one)
    assert told == [("tool", pytest.approx(seconds), is_cut)]
    cache.pause(one, Pause("tool", "", now[0], None))
    cache.close(one)
    assert told[1] == ("tool", 0.0, True), "the episode ended before its tool"


def test_the_fit_finds_what_steps_cost() -> None:
    """seconds = 0.004 + 30e-6 rows + 1e-9 row-keys + 2e-9 decode-keys."""
    costs = StepCosts()
    for step in range(200):
        decodes, rows, start = step % 17 + 1, step % 5 * 300, step * 40
        decode_keys, row_keys = decodes * 5000, rows * (start + rows / 2)
        seconds = 0.004 + 30e-6 * (decodes + rows) + 1e-9 * row_keys + 2e-9 * decode_keys
        costs.note([(5000, 1)] * decodes + ([(start, rows)] if rows else []), seconds)
    rates = costs.rates(144 * KIB, 50 * GB)
    assert rates.per_row == pytest.approx(30e-6, rel=1e-3)
    assert rates.per_row_key == pytest.approx(1e-9, rel=1e-3)
    assert 0.0 < rates.fixed_share < 1.0


def test_nothing_is_known_of_a_few_steps() -> None:
    costs = StepCosts()
    for _ in range(ENOUGH_STEPS - 1):
        costs.note([(0, 100)], 0.01)
    assert costs.rates(1.0, 1.0).prefill(0, 100) is None


def test_of_steps_of_the_same_decodes_one_in_eight_is_counted() -> None:
    """The first, the ninth ...: 31 of 248. A prompt, or another number of decodes, is counted at once."""
    costs = StepCosts()
    for _ in range(REPEATS * (ENOUGH_STEPS - 1)):
        costs.note([(5000, 1)] * 4, 0.01)
    assert costs.rates(1.0, 1.0).per_row is None
    costs.note([(5000, 1)] * 5, 0.01)
    assert costs.rates(1.0, 1.0).per_row is not None


def test_continuums_time_to_keep() -> None:
    assert best_ttl([], math.e) == 1.0, "ln(value) before durations are known"
    assert best_ttl([], 0.5) == 0.0
    assert best_ttl([0.1, 0.1, 0.1, 9.0], 2.0) == 0.1, "3/4 x 2 - 0.1 against 1 x 2 - 9"
    assert best_ttl([0.1, 0.1, 0.1, 1.0], 8.0) == 1.0, "8 - 1 against 6 - 0.1"
    assert best_ttl([5.0], 2.0) == 0.0


def test_continuum_pins_and_lets_go() -> None:
    policy = CacheTtl()
    rates = QWEN3_8B._replace(wait=1.0)
    assert policy.on_pause(lease(number=7), rates) == "keep"
    ttl = math.log(1 + 0.0966)
    assert policy.make_room([lease(number=7, elapsed=ttl - 0.01)], POOL) == []
    assert policy.make_room([lease(number=7, elapsed=ttl + 0.01)], POOL)
    assert policy.make_room([lease(number=7, elapsed=0.0)], POOL._replace(is_stuck=True))
    assert policy.on_pause(lease(number=8), QWEN3_8B) == "cache", "no wait: nothing is worth a pin"


@pytest.mark.parametrize(("eta", "kept"), [(0.19, True), (0.2, False)])
def test_infercept_swaps_what_takes_longer_than_both_copies(eta: float, kept: bool) -> None:
    assert (InferCept().make_room([lease(eta=eta)], POOL) == []) == kept


def test_infercept_drops_the_most_wasteful_where_it_cannot_swap() -> None:
    full = POOL._replace(host_free=0, lacking=9000)
    actions = InferCept().make_room([lease(0, eta=50.0), lease(1, eta=500.0), lease(2, eta=5.0)], full)
    assert [(action.slot, action.kind) for action in actions] == [(1, "drop"), (0, "drop")]
