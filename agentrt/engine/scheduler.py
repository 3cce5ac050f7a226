"""What the next step computes: a pure function of what is running, what waits and how many pages can be had.

Decodes come first and never wait for a prompt. What is left of the step's cost goes to prompt chunks, those begun before those
that wait, oldest first. Every kind is the same thing here: a sequence has `known` ids, `computed` of them have their KV, and
the step computes some of the difference; where it computes the last known id, it samples the next.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import ceil, sqrt
from typing import NamedTuple

from agentrt.engine.forecast import NO_GROWTHS, Forecast, Growth, Int64Array


class Demand(NamedTuple):
    """What the scheduler knows of one sequence; `slot` is its place in the list, and names it in the plan."""

    slot: int
    known: int
    computed: int
    pages: int
    """Pages in its table."""
    growth: int
    """Ids it is expected to sample still."""
    group: str = ""
    is_loading: bool = False
    """Its `computed` ids have their pages, but the copies to them are still under way: it computes nothing yet."""

    @property
    def missing(self) -> int:
        return self.known - self.computed


class Crew(NamedTuple):
    """Sequences that decode, taken together: each computes the id it sampled last, in every step."""

    rows: int = 0
    keys: int = 0
    """That their rows attend."""
    pages: int = 0
    """In their tables."""
    growing: int = 0
    """Of them need a further page for it."""
    drafted: int = 0
    """Rows of their drafts, beside theirs."""
    draft_pages: int = 0
    """Further pages that those need."""
    growths: Callable[[], Int64Array] = lambda: NO_GROWTHS
    """What will become of them, a row for each. Asked only for the sake of those who wait."""


NOBODY = Crew()


class Returning(NamedTuple):
    """A conversation whose tool runs: what will become of it once it is back, and the pages that it holds meanwhile."""

    growth: Growth
    pages: int


class Line:
    """Those who wait, in order of rank. What one demands is worked out when it is looked at, which most never are."""

    def __init__(self, have_pages: Sequence[bool], demand: Callable[[int], Demand]) -> None:
        self._have_pages, self._demand = have_pages, demand
        self.is_held_up = False
        """Only those that have pages go on."""

    def __iter__(self) -> Iterator[Demand]:
        for place, has_pages in enumerate(self._have_pages):
            if has_pages or not self.is_held_up:
                yield self._demand(place)


class Capacity(NamedTuple):
    """What a step has to give."""

    rows: float
    """What it may cost, in rows that attend nothing; no fewer than `sequences`. A row costs more the more keys it sees."""
    sequences: int
    """Sequences that run at most."""
    pages: int
    """Pages that are free or evictable."""
    page_size: int
    cost_per_key: float = 0.0
    """What a row costs more for each key it attends, in rows. Measured (`engine.runner`)."""

    def cost(self, start: int, length: int) -> float:
        """Of the rows at positions `start` up to `start + length`."""
        return length * (1 + self.cost_per_key * (start + length / 2))

    def affordable(self, start: int) -> int:
        """How many rows from position `start` on cost no more than what is left: `cost` solved for the length."""
        if not self.cost_per_key:
            return int(self.rows)
        linear = 1 + self.cost_per_key * start
        return int((sqrt(linear * linear + 2 * self.cost_per_key * max(self.rows, 0)) - linear) / self.cost_per_key)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def pages_at_end(self, growth: Growth) -> int:
        return self.pages_for(growth.tokens + growth.steps)


class Chunk(NamedTuple):
    """Compute the next `length` ids of one sequence."""

    slot: int
    length: int


class Plan(NamedTuple):
    """The next step: first the chunks of sequences that run, then those of sequences it admits."""

    running: list[Chunk]
    admitted: list[Chunk]
    lacking: int = 0
    """Pages that the next in line lacks. Revoke idle leases, if there are any, and plan again."""
    is_stuck: bool = False
    """Those that run lack pages themselves: if nothing is idle, preempt one of them and plan again."""
    num_expected: int = 0
    """The first of `returning`, this many, are room that the next in line lacks: not to be revoked for it."""
    has_drafts: bool = True
    """There is room for the crew's drafts."""


def plan_step(
    running: Sequence[Demand], line: Line, capacity: Capacity, returning: Sequence[Returning] = (),
    crew: Crew = NOBODY,
) -> Plan:  # fmt: skip
    """The chunks of the next step, beside those of the crew: they run as well, unless the plan is stuck.

    `running` is in order of rank, as the line is, and admission keeps it.

    `returning` is in order of return. Those that come back before a newcomer would end are part of its forecast, as if they
    ran, unless nothing runs beside it: no request waits for a tool alone.
    """
    ready = [demand for demand in running if not demand.is_loading]
    decodes = [demand for demand in ready if demand.known - demand.computed == 1]
    rows, pages = _after(crew, decodes, capacity)
    if crew.drafted and min(pages, rows) < 0:  # drafts make way first
        plan = plan_step(running, line, capacity, returning, crew._replace(drafted=0, draft_pages=0))
        return plan._replace(has_drafts=False)
    if pages < 0:
        return Plan([], [], lacking=-pages, is_stuck=True)
    left = capacity._replace(rows=max(rows, 1), pages=pages)
    chunks = [Chunk(demand.slot, 1) for demand in decodes]
    for demand in ready:
        if demand.missing > 1 and (count := _chunk(demand, left)):
            left = _less(left, demand, count)
            chunks.append(Chunk(demand.slot, count))
    admitted, lacking, num_expected = _admit(running, line, left, capacity, returning, crew)
    if ready and not (chunks or admitted or crew.rows):
        return Plan([], [], lacking=1, is_stuck=True)
    return Plan(chunks, admitted, lacking, num_expected=num_expected)


def _after(crew: Crew, decodes: Sequence[Demand], capacity: Capacity) -> tuple[float, int]:
    """The rows and pages that these leave, below 0 where they need more than there is."""
    rows = crew.rows + crew.drafted
    keys = crew.keys * rows / max(crew.rows, 1)  # a drafted row sees what the others see, on average
    left = capacity.rows - (rows + capacity.cost_per_key * (keys + rows / 2))
    pages = capacity.pages - crew.growing - crew.draft_pages
    for demand in decodes:
        left -= capacity.cost(demand.computed, 1)
        pages -= _pages_more(demand, 1, capacity)
    return left, pages


def _admit(
    running: Sequence[Demand],
    line: Line,
    left: Capacity,
    capacity: Capacity,
    returning: Sequence[Returning],
    crew: Crew,
) -> tuple[list[Chunk], int, int]:
    """Waiting sequences that fit beside what runs, now and by forecast, and what the first left out lacks and must respect.

    One that does not fit stops the line, so that nobody overtakes it for ever; but for those that have their pages, which it
    would not get. A new sequence of a group whose prompt is being computed waits for it: it will find that prompt in the
    prefix cache.
    """
    admitted: list[Chunk] = []
    refused: tuple[int, int] | None = None
    together = list(running)
    forecast: _Forecast | None = None
    crew_S3: Int64Array | None = None
    in_prefill = {demand.group for demand in running if demand.missing > 1}
    for demand in line:
        if left.rows <= 0 or crew.rows + len(together) >= left.sequences:
            break
        if demand.group and demand.group in in_prefill and demand.computed == 0:
            continue
        crew_S3 = crew.growths() if crew_S3 is None else crew_S3
        forecast = forecast or _Forecast(crew, crew_S3, together, returning, left.rows, capacity)
        lacking, num_expected = forecast.lacking(demand)
        if lacking > 0:
            refused, line.is_held_up = refused or (lacking, num_expected), True
            continue
        count = _chunk(demand, left)
        if not count:
            break
        left = _less(left, demand, count)
        admitted.append(Chunk(demand.slot, count))
        together.append(demand)
        forecast = None
        in_prefill.add(demand.group)
    return admitted, *(refused or (0, 0))


def _growth(demand: Demand, rows: float) -> Growth:
    """What will become of a sequence that runs. A prompt takes steps by its length."""
    return Growth(demand.known, demand.growth, ceil((demand.missing - 1) / rows))


class _Forecast:
    """What a newcomer would lack beside those that run and those that will be back, unless nobody runs, before it ends."""

    def __init__(
        self, crew: Crew, crew_S3: Int64Array, running: Sequence[Demand], returning: Sequence[Returning], rows: float,
        capacity: Capacity,
    ) -> None:  # fmt: skip
        returning = returning if running or crew.rows else ()
        others = [_growth(demand, rows) for demand in running]
        self._forecast = Forecast(crew_S3, others, [one.growth for one in returning], capacity.page_size)
        held = crew.pages + sum(one.pages for one in running)
        self._held = list(accumulate((one.pages for one in returning), initial=held))
        self._at_most = self._forecast.at_most - self._held[-1]
        self._rows, self._capacity = rows, capacity

    def lacking(self, newcomer: Demand) -> tuple[int, int]:
        """The most pages that will be needed at one time beyond those held and those to be had, and how many return."""
        growth, capacity = _growth(newcomer, self._rows), self._capacity
        if self._at_most + capacity.pages_at_end(growth) - newcomer.pages <= capacity.pages:  # whoever ends when
            return 0, 0
        back = self._forecast.back_before(growth)
        return self._forecast.peak_with(growth) - newcomer.pages - self._held[back] - capacity.pages, back


def _pages_more(demand: Demand, count: int, capacity: Capacity) -> int:
    """Pages to add to a sequence's table so that `count` more ids can be computed."""
    return max(0, -(-(demand.computed + count) // capacity.page_size) - demand.pages)


def _chunk(demand: Demand, left: Capacity) -> int:
    """As much of a prompt as the cost and pages left allow, and a row at least if there is any cost left."""
    room = (demand.pages + left.pages) * left.page_size - demand.computed
    affordable = max(left.affordable(demand.computed), 1) if left.rows > 0 else 0
    return max(0, min(demand.missing, affordable, room))


def _less(left: Capacity, demand: Demand, count: int) -> Capacity:
    rows = left.rows - left.cost(demand.computed, count)
    return left._replace(rows=rows, pages=left.pages - _pages_more(demand, count, left))
