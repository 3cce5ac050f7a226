"""KV in host memory, on the toy engine: what comes back when, what makes way on a full host, and who waits for room."""

import math
from collections.abc import Iterable

import pytest
from talks import Talk, drain, make_core, park, prompt, settle, states, two_settled, unlimited

from agentrt.engine.kv.evict import evict
from agentrt.engine.kv.lease import State
from agentrt.engine.kv.pages import NONE
from agentrt.engine.kv.policy import Inside, LeaseView, PoolView
from agentrt.engine.kv.priced import Priced
from agentrt.engine.kv.radix import HOST
from agentrt.engine.step import EngineCore
from agentrt.engine.waiting import DEAF_SECONDS
from agentrt.testing.copier import FaultyCopier


def test_parked_kv_comes_back_as_soon_as_there_is_room() -> None:
    """By the word of its tool the one that ends first, before its result is there; and it makes way again at once."""
    seconds = [0.0]
    core = make_core(18, 64, clock=lambda: seconds[0])
    a, b, c = Talk(core), Talk(core), Talk(core)
    a.turn(prompt(0, 9))
    b.turn(prompt(3, 9))
    c.turn(prompt(5, 26))
    settle(core)
    assert states(a, b) == [State.PARKED, State.PARKED]
    evict(core.cache.tree, 18)
    core.progress(a.lease, 9.0)
    core.progress(b.lease, 1.0)
    loads = len(core.runner.host.copier.started["load"])  # type: ignore[attr-defined]
    core.close(c.lease)
    core.step()
    assert b.lease.state in (State.RESTORING, State.CACHED)
    settle(core)
    assert states(a, b) == [State.CACHED, State.CACHED]
    assert len(core.runner.host.copier.started["load"]) > loads  # type: ignore[attr-defined]
    c = Talk(core)
    c.turn(prompt(5, 26))
    assert states(a, b) == [State.PARKED, State.PARKED], "they had their copies still: nothing is saved again"
    for talk, start in ((a, 0), (b, 3)):
        talk.turn([1])
        assert talk.said == unlimited([prompt(start, 9), [1]])


def test_on_a_full_host_copies_of_what_the_device_has_make_way() -> None:
    """The host has six pages, and five of them hold what A, who is back, has on the device."""
    core = make_core(16, 6)
    a, b = Talk(core), Talk(core)
    a.turn(prompt(0))
    park(a)
    a.turn([1, 1])
    b.turn(prompt(3))
    park(b)
    assert states(a, b) == [State.CACHED, State.PARKED]
    b.turn([2, 2])
    a.turn([4, 4])
    assert a.said == unlimited([prompt(0), [1, 1], [4, 4]])
    assert b.said == unlimited([prompt(3), [2, 2]])


def room_on_host(core: EngineCore) -> int:
    """What a policy is told."""
    return core.cache._pool_view().host_free


def test_what_is_on_its_way_to_the_host_is_not_free_there() -> None:
    """Five whole pages of eleven ids each. A parks, B parks, A comes back: its copy is a double then, and may make way."""
    copier = FaultyCopier()
    core = make_core(32, 16, copier=copier)
    a, b = two_settled(core)
    assert room_on_host(core) == 16
    copier.is_stuck = True
    core.cache.park(a.lease)
    assert (states(a), room_on_host(core)) == ([State.PARKING], 11)
    copier.is_stuck = False
    park(b)
    core.cache.poll()
    assert (states(a, b), room_on_host(core)) == ([State.PARKED, State.PARKED], 6)
    a.turn([1, 1])
    assert room_on_host(core) == 11
    core.close(b.lease)
    assert room_on_host(core) == 16


def test_a_shared_prompt_takes_room_on_the_host_once() -> None:
    """Eight pages of prompt, and one of each member's own."""
    core = make_core(64, 64)
    talks = [Talk(core, "g") for _ in range(3)]
    for index, talk in enumerate(talks):
        talk.turn([*prompt(0, 16), index, index], 1)
    for talk, room in zip(talks, (55, 54, 53), strict=True):
        park(talk)
        assert room_on_host(core) == room


def test_a_lease_whose_copy_made_way_is_not_saved_any_more() -> None:
    """What its policy is told of it: to park it would take a copy again."""
    core = make_core(32, 6)
    a, b = Talk(core), Talk(core)
    a.turn(prompt(0))
    park(a)
    core.cache.unpause(a.lease)
    core.cache.poll()
    core.cache.poll()
    assert (states(a), a.lease.is_saved) == ([State.CACHED], True)
    b.turn(prompt(3))
    park(b)
    assert (states(a, b), a.lease.is_saved) == ([State.CACHED, State.PARKED], False)


def test_what_a_lease_has_on_the_host_makes_way_for_nobody_while_it_is_parked() -> None:
    """A and B came back from a host of 11 pages, which has five of each still, and have seven each now. A was used longer ago.

    A's two new pages take the free one and one of B's; for B's there is no place then but A's, whose copies are under way.
    """
    copier = FaultyCopier()
    core = make_core(64, 11, copier=copier)
    a, b = Talk(core), Talk(core)
    for talk, start in ((a, 0), (b, 3)):
        talk.turn(prompt(start))
        park(talk)
    a.turn([1, 1])
    b.turn([2, 2])
    copier.is_stuck = True
    core.cache.park(a.lease)
    core.cache.tier.pump(math.inf)
    core.cache.park(b.lease)
    copier.is_stuck = False
    core.cache.poll()
    assert states(a, b) == [State.PARKED, State.DROPPED]
    a.turn([4])
    b.turn([5])
    assert a.said == unlimited([prompt(0), [1, 1], [4]])
    assert b.said == unlimited([prompt(3), [2, 2], [5]])


class FirstOnly(Priced):
    """Lets in whoever comes first."""

    def inside(self, leases: Iterable[LeaseView], pool: PoolView) -> Inside:
        first = next(iter(leases)).rank
        return Inside(first, first)


def test_on_a_full_host_those_outside_make_way() -> None:
    core = make_core(32, 6)
    core.cache.policy = FirstOnly()
    a, b = Talk(core), Talk(core)
    a.turn(prompt(0))
    b.turn(prompt(3))
    park(b)
    assert not core.cache.is_inside(b.lease)
    park(a)
    assert states(a, b) == [State.PARKED, State.DROPPED]
    b.turn([2, 2])
    assert b.said == unlimited([prompt(3), [2, 2]])


def test_those_outside_wait_while_somebody_runs() -> None:
    core = make_core(32)
    core.cache.policy = FirstOnly()
    a, b = Talk(core), Talk(core)
    first = a.ask(prompt(0), 6)
    core.step()
    second = b.ask(prompt(3), 2)
    for _ in range(4):
        core.step()
    assert (first.num_sampled, second.num_sampled) == (5, 0)
    core.step()
    assert first.is_finished
    drain(core)
    assert second.num_sampled == 2, "nobody runs, so they may"


def test_a_line_of_which_nobody_is_let_in_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], []
    core = make_core(32, clock=lambda: now[0])
    core.cache.policy = FirstOnly()
    a, b = Talk(core), Talk(core)
    a.ask(prompt(0), 9)
    core.step()
    b.ask(prompt(3), 2)
    monkeypatch.setattr(core, "_line", lambda line=core._line: looks.append(line()) or looks[-1])
    for _ in range(4):
        core.step()
    assert looks == [[]]
    now[0] += 2 * DEAF_SECONDS
    core.step()
    core.step()
    assert looks == [[], []]
    drain(core)
    assert b.sequence.num_sampled == 2, "as soon as nobody else runs"


def test_siblings_share_one_copy_on_the_host() -> None:
    """Four members of a group with a prompt of 8 pages: the host has the prompt once."""
    core = make_core(64, 64)
    talks = [Talk(core, "g") for _ in range(4)]
    for talk in talks:
        talk.ask([*prompt(0, 16), 1], 1)
    drain(core)
    for index, talk in enumerate(talks):
        talk.turn([index, index, index, index], 1)
    for talk in talks:
        park(talk)
    pages = set(core.cache.tree.pages(0, HOST))
    own = [len(talk.tokens) // 2 - 8 for talk in talks]
    assert len(pages) <= 8 + sum(own)
    for index, talk in enumerate(talks):
        talk.turn([index], 1)


def test_a_prefix_stays_when_one_member_is_dropped() -> None:
    core = make_core(32)
    a, b = Talk(core), Talk(core)
    a.turn([*prompt(0, 16), 1])
    b.turn([*prompt(0, 16), 2])
    core.cache.revoke(a.lease)
    assert (a.lease.state, b.lease.computed) == (State.DROPPED, 19)
    assert a.lease.unshared == 0
    assert core.cache.resume(core.open(), b.tokens.token_ids, 17) == 16


def test_an_empty_place_goes_with_the_last_branch_below_it() -> None:
    """Two branches of which the copy of what they share failed: with them nothing is left of that node either."""
    core = make_core(64, 64)
    talks = [Talk(core), Talk(core)]
    for talk, last in zip(talks, (1, 2), strict=True):
        talk.turn([*prompt(0, 8), last, last, last, last])
        park(talk)
    for talk in talks:
        core.close(talk.lease)
    tree, host = core.cache.tree, core.cache.tier.pools[0]
    evict(tree, 64)
    above = next(node for node in tree.nodes() if node.children)
    host.uncache(above.tables[HOST][0])
    above.tables[HOST][0][:] = [NONE] * above.length
    assert evict(tree, 64, HOST) > 0
    assert list(tree.nodes()) == []
    assert host.num_free == 64
    core.check()
