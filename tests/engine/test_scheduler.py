"""`plan_step` is pure: what it decides is a function of the numbers it is given."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrt.engine import scheduler
from agentrt.engine.forecast import NO_GROWTHS, Forecast, Growth, Lengths, Returns, growths_of
from agentrt.engine.scheduler import NOBODY, Capacity, Chunk, Crew, Demand, Line, Plan, Returning


def demand(index: int, known: int, computed: int = 0, **more: object) -> Demand:
    pages = more.pop("pages", -(-computed // 4))
    return Demand(index, known, computed, pages, more.pop("growth", 8), **more)  # type: ignore[arg-type]


def plan_step(
    running: list[Demand], waiting: list[Demand], room: Capacity, returning: list[Returning] | None = None,
    crew: Crew = NOBODY,
) -> Plan:  # fmt: skip
    """With the line made of a list."""
    line = Line([demand.pages > 0 for demand in waiting], waiting.__getitem__)
    return scheduler.plan_step(running, line, room, returning or [], crew)


def capacity(rows: int = 32, sequences: int = 8, pages: int = 100) -> Capacity:
    return Capacity(rows, sequences, pages, page_size=4)


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    running = [demand(0, 40, 8), demand(1, 13, 12)]
    assert plan_step(running, [demand(0, 20)], capacity(rows=16)) == Plan([Chunk(1, 1), Chunk(0, 15)], [])


def test_a_waiting_prompt_gets_the_rows_that_running_ones_leave() -> None:
    plan = plan_step([demand(0, 12, 8)], [demand(0, 20), demand(1, 20)], capacity(rows=16))
    assert plan == Plan([Chunk(0, 4)], [Chunk(0, 12)])


def test_arrival_order_holds_also_for_a_prompt_that_does_not_fit() -> None:
    plan = plan_step([], [demand(0, 400), demand(1, 4)], capacity(rows=500, pages=50))
    assert plan == Plan([], [], lacking=52)


def test_drafts_make_way_for_decodes() -> None:
    """Two with 3 drafted ids each: 8 rows and a page for each; what lacks one of these decodes without drafts."""
    two = Crew(rows=2, keys=14, pages=4, drafted=6, draft_pages=2)
    assert plan_step([], [], capacity(pages=2), crew=two) == Plan([], [])
    for less in (capacity(pages=1), capacity(rows=7, pages=2)):
        assert plan_step([], [], less, crew=two) == Plan([], [], has_drafts=False)


def test_decodes_that_lack_pages_void_the_plan() -> None:
    running = [demand(0, 9, 8), demand(1, 9, 8), demand(2, 10, 9, pages=3)]
    assert plan_step(running, [], capacity(pages=1)) == Plan([], [], lacking=1, is_stuck=True)
    assert plan_step(running, [], capacity(pages=2)).running == [Chunk(0, 1), Chunk(1, 1), Chunk(2, 1)]


def test_a_running_prompt_without_a_page_is_stuck() -> None:
    assert plan_step([demand(0, 12, 8)], [], capacity(pages=0)) == Plan([], [], lacking=1, is_stuck=True)


def test_a_prompt_is_admitted_with_room_for_its_growth() -> None:
    waiting = [demand(0, 8, growth=16)]
    assert plan_step([], waiting, capacity(pages=5)).lacking == 1
    assert plan_step([], waiting, capacity(pages=6)).admitted == [Chunk(0, 8)]


def test_pages_that_others_free_in_time_are_room() -> None:
    soon_over = [demand(0, 32, 31, growth=1)]
    assert plan_step(soon_over, [demand(0, 8, growth=16)], capacity(pages=4)).admitted == [Chunk(0, 8)]
    long_lived = [demand(0, 32, 31, growth=16)]
    assert plan_step(long_lived, [demand(0, 8, growth=16)], capacity(pages=4)).lacking == 6


def test_a_step_is_budgeted_by_cost_so_late_chunks_are_shorter() -> None:
    """A key costs a hundredth of a row: 100 rows of budget are 73 rows from position 0, and 9 from position 1,000."""
    priced = Capacity(rows=100, sequences=8, pages=1000, page_size=4, cost_per_key=0.01)
    assert plan_step([], [demand(0, 500)], priced).admitted == [Chunk(0, 73)]
    assert plan_step([demand(0, 1500, 1000)], [], priced).running == [Chunk(0, 9)]
    assert priced.cost(0, 73) <= 100 < priced.cost(0, 74)
    assert priced.cost(1000, 9) <= 100 < priced.cost(1000, 10)


def test_decodes_run_whatever_they_cost_and_a_prompt_never_stands_still() -> None:
    priced = Capacity(rows=8, sequences=8, pages=1000, page_size=4, cost_per_key=1.0)
    running = [demand(0, 400, 399), demand(1, 600, 599), demand(2, 300, 100)]
    assert plan_step(running, [], priced).running == [Chunk(0, 1), Chunk(1, 1), Chunk(2, 1)]


def test_a_prompt_that_gets_next_to_nothing_of_a_step_has_its_forecast() -> None:
    """It is taken to need up to 10^17 steps. The decode grows from 3 pages to 5 in 8 steps; the newcomer has 5 by then."""
    running, newcomer = [demand(0, 9, 8, pages=3)], [demand(0, 20)]
    for rows in (2.0, 1 + 2**-30, 1 + 2**-52):
        plan = plan_step(running, newcomer, capacity(pages=8)._replace(rows=rows))
        assert plan == Plan([Chunk(0, 1)], [Chunk(0, 1)])
    assert plan_step(running, newcomer, capacity(pages=6)._replace(rows=1 + 2**-52)).lacking == 1


def test_the_articles_figure() -> None:
    """Pages of 10, capacity 12, 7 ids a time unit. At time 2, A has ended; D's prompt of 10 takes one unit, until 3."""
    b, c, d = Growth(28, 14), Growth(28, 28), Growth(10, 21, delay=7)
    assert Forecast(NO_GROWTHS, [Growth(10, 14), Growth(14, 28)], [], 10).peak_with(Growth(14, 42)) == 2 * 5
    assert Forecast(growths_of([b]), [c], [], 10).peak_with(d) == 12
    assert Forecast(growths_of([Growth(38, 4), Growth(38, 18)]), [], [], 10).peak_with(Growth(13, 18)) == 12


def test_the_articles_figure_page_by_page() -> None:
    def in_use(*known: int) -> int:
        return sum(capacity()._replace(page_size=10).pages_for(ids) for ids in known)

    def decoding(index: int, known: int, growth: int) -> Demand:
        return Demand(index, known, known - 1, -(-(known - 1) // 10), growth)

    assert in_use(17, 21, 21) == 8
    assert in_use(13, 38, 38) == 10
    assert in_use(17, 42, 42) == 12
    assert in_use(27, 52) == 9
    running, waiting = [decoding(0, 28, 14), decoding(1, 28, 28)], [Demand(0, 10, 0, 0, 21)]
    room = Capacity(rows=4, sequences=4, pages=12 - 6, page_size=10)
    assert plan_step(running, waiting, room).admitted == [Chunk(0, 2)]
    assert plan_step(running, waiting, room._replace(pages=11 - 6)).lacking == 1


def test_siblings_wait_for_the_first_members_prompt() -> None:
    waiting = [demand(0, 20, group="g"), demand(1, 20, group="g"), demand(2, 4, group="h")]
    assert plan_step([], waiting, capacity(rows=64)).admitted == [Chunk(0, 20), Chunk(2, 4)]
    running = [demand(0, 20, 16, group="g")]
    assert plan_step(running, waiting[:1], capacity(rows=64)).admitted == []
    assert plan_step([demand(0, 21, 20, group="g")], waiting[:2], capacity(rows=64)).admitted == [Chunk(0, 20)]


def test_no_more_sequences_than_allowed() -> None:
    waiting = [demand(index, 2) for index in range(5)]
    assert len(plan_step([demand(0, 5, 4)], waiting, capacity(sequences=3)).admitted) == 2


def demands(
    run: list[tuple[int, int, int]], wait: list[tuple[int, int, int]]
) -> tuple[list[Demand], list[Demand]]:  # fmt: skip
    """Those that run, of known and computed ids and growth, and those that wait, with nothing computed."""
    running = [demand(i, known, min(done, known - 1), growth=growth) for i, (known, done, growth) in enumerate(run)]
    return running, [demand(i, known, growth=growth) for i, (known, _, growth) in enumerate(wait)]


DEMANDS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 39), st.integers(1, 20)), max_size=6)


@given(DEMANDS, DEMANDS, st.integers(8, 40), st.integers(0, 40))
def test_a_plan_never_takes_more_than_there_is(
    run: list[tuple[int, int, int]], wait: list[tuple[int, int, int]], rows: int, pages: int
) -> None:
    running, waiting = demands(run, wait)
    plan = plan_step(running, waiting, capacity(rows=rows, pages=pages))
    chunks = [(running[i], n) for i, n in plan.running] + [(waiting[i], n) for i, n in plan.admitted]
    assert sum(count for _, count in chunks) <= rows
    assert sum(max(0, -(-(d.computed + n) // 4) - d.pages) for d, n in chunks) <= pages
    assert all(1 <= count <= d.missing for d, count in chunks)
    if not plan.is_stuck:
        assert {i for i, d in enumerate(running) if d.missing == 1} <= {i for i, _ in plan.running}
    if running and plan.is_stuck:
        assert plan.lacking > 0


@given(DEMANDS, DEMANDS, st.integers(8, 40), st.integers(0, 40))
def test_a_crew_is_planned_as_its_members_are(
    run: list[tuple[int, int, int]], wait: list[tuple[int, int, int]], rows: int, pages: int
) -> None:
    running, waiting = demands(run, wait)
    decodes = [one for one in running if one.missing == 1]
    others = [one for one in running if one.missing > 1]
    priced = capacity(rows=rows, pages=pages)._replace(cost_per_key=0.125)
    apart = plan_step(running, waiting, priced)
    together = plan_step(others, waiting, priced, crew=crew(decodes))
    if not apart.is_stuck:
        apart = apart._replace(running=[chunk for chunk in apart.running if running[chunk.slot].missing > 1])
    assert together == apart


def crew(decodes: list[Demand]) -> Crew:
    growing = sum(one.computed == 4 * one.pages for one in decodes)
    held, keys = sum(one.pages for one in decodes), sum(one.computed for one in decodes)
    return Crew(
        len(decodes), keys, held, growing, growths=lambda: growths_of(Growth(one.known, one.growth) for one in decodes)
    )


GROWTHS = st.lists(st.builds(Growth, st.integers(1, 60), st.integers(0, 40), st.integers(0, 9)), max_size=6)


@given(
    GROWTHS, GROWTHS, st.builds(Growth, st.integers(1, 60), st.integers(0, 40), st.integers(0, 9)), st.integers(1, 8)
)
def test_the_forecast_is_what_a_simulation_finds(
    running: list[Growth], returning: list[Growth], newcomer: Growth, page_size: int
) -> None:
    returning.sort(key=lambda one: one.delay)
    end = newcomer.delay + newcomer.steps
    back = [one._replace(steps=min(one.steps, end - one.delay)) for one in returning if one.delay < end]
    growths = [*running, *back, newcomer]
    simulated = [
        sum(
            -(-(one.tokens + min(max(step - one.delay, 0), one.steps)) // page_size)
            for one in growths if step <= one.delay + one.steps
        ) for step in range(max(one.delay + one.steps for one in growths) + 1)
    ]  # fmt: skip
    forecast = Forecast(growths_of(running[1:]), running[:1], returning, page_size)
    assert forecast.back_before(newcomer) == len(back)
    assert forecast.peak_with(newcomer) == max(simulated)


def needed_at_once(growths: list[Growth]) -> int:
    """The most pages of 4 at one time, found step by step."""
    return max(
        sum(-(-(one.tokens + min(max(step - one.delay, 0), one.steps)) // 4)
            for one in growths if step <= one.delay + one.steps)
        for step in range(max(one.delay + one.steps for one in growths) + 1)
    )  # fmt: skip


def admitted_plainly(running: list[Demand], waiting: list[Demand], room: Capacity) -> tuple[list[Chunk], int]:
    """What the line gets beside decodes, and what the first left out lacks: each demand is looked at anew."""
    rows, pages = room.rows - len(running), room.pages - sum(one.computed == 4 * one.pages for one in running)
    together, admitted, lacking = list(running), list[Chunk](), 0
    for one in waiting:
        if rows <= 0 or len(together) >= room.sequences:
            break
        growths = [Growth(it.known, it.growth, -(-(it.missing - 1) // int(rows))) for it in (*together, one)]
        lacks = needed_at_once(growths) - sum(it.pages for it in (*together, one)) - room.pages
        if lacking and not one.pages:
            continue
        if lacks > 0:
            lacking = lacking or lacks
            continue
        if not (count := min(one.missing, int(rows), 4 * (one.pages + pages) - one.computed)):
            break
        rows, pages = rows - count, pages - max(0, -(-(one.computed + count) // 4) - one.pages)
        admitted.append(Chunk(one.slot, count))
        together.append(one)
    return admitted, lacking


@given(DEMANDS, DEMANDS, st.integers(8, 40), st.integers(6, 40), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_a_line_that_is_looked_at_when_needed_is_served_as_one_that_is_looked_at_anew(
    run: list[tuple[int, int, int]], wait: list[tuple[int, int, int]], rows: int, pages: int, computed: list[int]
) -> None:
    running = [demand(slot, known + 1, known, growth=growth) for slot, (known, _, growth) in enumerate(run)]
    waiting = [
        demand(slot, known + done, done * (known + done - 1) // 3, growth=growth)
        for slot, ((known, _, growth), done) in enumerate(zip(wait, computed, strict=False))
    ]
    room, looked_at = capacity(rows=rows, pages=pages), list[int]()

    def look(place: int) -> Demand:
        looked_at.append(place)
        return waiting[place]

    plan = scheduler.plan_step(running, Line([one.pages > 0 for one in waiting], look), room)
    assert (plan.admitted, plan.lacking) == admitted_plainly(running, waiting, room)
    refused = next((place for place in looked_at if waiting[place].slot not in dict(plan.admitted)), len(waiting))
    assert all(place <= refused or waiting[place].pages for place in looked_at)


def test_lengths_are_learned_from_the_turns_that_ended() -> None:
    lengths = Lengths()
    assert lengths.left(5, 100) == 95
    for length in range(1, 101):
        lengths.add(length)
    assert lengths.left(0, 512) == 90
    assert lengths.left(50, 512) == 45
    assert lengths.left(0, 20) == 20
    assert lengths.left(100, 512) == 412
    for _ in range(600):
        lengths.add(7)
    assert lengths.left(0, 512) == 7


TURNS = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 90), st.integers(0, 4)), max_size=5)


@given(st.lists(st.integers(1, 60), max_size=80), TURNS)
def test_what_is_left_of_many_turns_is_what_is_left_of_each(
    ended: list[int], turns: list[tuple[int, int, int]]
) -> None:
    """Of those preempted three times it is what they may still have. Seven steps are counted apart."""
    lengths = Lengths()
    for length in ended:
        lengths.add(length)
    counts_4N = np.zeros((4, 8), np.int64)
    for column, (sampled, most, preemptions) in enumerate(turns):
        counts_4N[:, column] = 100 + sampled - 7, sampled - 7, most, preemptions
    assert lengths.growths(counts_4N, len(turns), 7, 3).tolist() == [
        [100 + sampled, lengths.left(sampled, most) if preemptions < 3 else max(most - sampled, 0), 0]
        for sampled, most, preemptions in turns
    ]


def test_returns_are_learned_from_those_that_came_back() -> None:
    """The middle one of the waits that are longer than this one is already; of the new ids, nine tenths of all."""
    returns = Returns()
    for steps in range(1, 32):
        returns.add(steps, 100 + steps)
    assert (returns.steps(0), returns.tokens) == (None, None), "too few"
    returns.add(32, 132)
    assert [returns.steps(waited) for waited in (0, 20, 31)] == [16, 6, 1]
    assert returns.steps(32) is None, "away longer than any was"
    assert returns.tokens == 128


def test_conversations_that_return_in_time_are_part_of_the_forecast() -> None:
    """Beside 2 pages that become 4 in 8 steps, a newcomer takes 6 in 17. One that is back in 5 holds 3 and takes 8 by 15."""
    running, newcomer = [demand(0, 8, 7, growth=8)], [demand(0, 8, growth=16)]
    back = [Returning(Growth(20, 10, delay=5), 3)]
    assert plan_step(running, newcomer, capacity(pages=6)) == Plan([Chunk(0, 1)], [Chunk(0, 8)])
    assert plan_step(running, newcomer, capacity(pages=8), back) == Plan([Chunk(0, 1)], [], lacking=1, num_expected=1)
    assert plan_step(running, newcomer, capacity(pages=9), back) == Plan([Chunk(0, 1)], [Chunk(0, 8)])
    assert plan_step([], newcomer, capacity(pages=6), back) == Plan([], [Chunk(0, 8)])


def test_what_happens_after_a_newcomers_end_is_no_reason_to_keep_it_waiting() -> None:
    """Back in 17 steps, when the newcomer ends, it does not count; back in 16, it counts with the one id it gains till then."""
    running, newcomer = [demand(0, 8, 7, growth=8)], [demand(0, 8, growth=16)]
    late, soon = Returning(Growth(20, 99, delay=17), 3), Returning(Growth(20, 99, delay=16), 3)
    assert plan_step(running, newcomer, capacity(pages=6), [late]).admitted == [Chunk(0, 8)]
    assert plan_step(running, newcomer, capacity(pages=6), [soon, late]) == Plan(
        [Chunk(0, 1)], [], lacking=2, num_expected=1
    )


def test_one_that_has_its_pages_is_not_held_up_by_one_that_lacks_them() -> None:
    """The first two lack 22 pages each; the third has three, and needs no more than three others as it grows."""
    running, first = [demand(3, 13, 12)], demand(0, 80)
    plan = plan_step(running, [first, demand(1, 80), demand(2, 13, 12)], capacity(pages=8))
    assert plan.admitted == [Chunk(2, 1)]
    assert plan.lacking == plan_step(running, [first], capacity(pages=8)).lacking == 17
