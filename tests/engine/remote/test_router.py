"""The router's choices, where the arithmetic says."""

from agentrt.engine.remote.router import Belief, Candidate, Rates, Request, Who, choose, cost

RATES = Rates(prefill=1_000, decode=1_000, most_decode=50)
LONG = Request(tokens=10_000, expected=50)


def a(queued: float, **more: object) -> Candidate:
    return Candidate("a", held=9_000, queued=queued, rates=RATES)._replace(**more)


B = Candidate("b", held=0, rates=RATES)


def test_the_choice_flips_where_the_queue_costs_as_much_as_the_prefix() -> None:
    """A holds 9,000 of 10,000 ids and has a queue, B is idle: at 1,000 ids/s the prefix is worth 9 s."""
    assert cost(LONG, a(queued=0)) == 1.0 + 1.0
    assert cost(LONG, B) == 10.0 + 1.0
    assert choose(LONG, [a(queued=8_000), B]) == "a"
    assert choose(LONG, [a(queued=10_000), B]) == "b"
    flip = next(queued for queued in range(0, 20_000, 10) if cost(LONG, a(queued)) > cost(LONG, B))
    assert flip == 9_010


def test_a_conversation_moves_only_for_a_fifth_of_the_cost_of_staying() -> None:
    assert choose(LONG, [a(queued=11_000), B], sticky="a") == "a"  # 13 s against 11
    assert choose(LONG, [a(queued=12_000), B], sticky="a") == "b"  # 14 s against 11
    assert choose(LONG, [a(queued=12_000), B], sticky="gone") == "b"


def test_versions_and_closed_servers_are_constraints() -> None:
    new = LONG._replace(oldest_version=3)
    assert choose(new, [a(0, version=2), B._replace(version=3)]) == "b"
    assert choose(new, [a(0, version=2), B]) is None
    assert choose(LONG, [a(0, is_open=False), B]) == "b"
    assert choose(LONG, []) is None


def test_a_request_pays_for_those_that_wait_for_it() -> None:
    """B is idle now and used half of the time: 10 s of prompts there hold up those of the next 20 s, 2 a second."""
    used = B._replace(arrivals=2.0, busy=0.5, conversations=100)
    assert cost(LONG, used) == 10.0 * (1 + 2.0 * 10.0 / 0.5) + 1.0
    assert cost(LONG, used._replace(conversations=3)) == 10.0 * (1 + 3) + 1.0, "no more than there are"
    busy = a(queued=12_000, arrivals=2.0, busy=0.5, conversations=100)
    assert choose(LONG, [busy, B], sticky="a") == "b"
    assert choose(LONG, [busy, used], sticky="a") == "a", "to compute it all again costs the others more than it gains"


def test_a_turn_slows_those_beside_it_once_they_share_the_rate() -> None:
    """20 turns of 50 ids/s use up 1,000: the one that comes next takes from each of them."""
    assert cost(LONG, B._replace(running=19)) == 10.0 + 1.0
    assert cost(LONG, B._replace(running=20)) == 10.0 + 50 / (1_000 / 21) + 20 * 50 / 1_000


def test_pushing_out_others_and_restoring_count() -> None:
    """What is pushed out of those that come back is computed again, but no more than the conversation takes."""
    full = Candidate("full", held=0, room=4_000, rates=RATES)
    assert choose(LONG._replace(growth=500), [full, B]) == "b"
    assert cost(LONG._replace(growth=500), full) == 11.0 + 6.5
    assert cost(LONG, full._replace(room=-3_000)) == 11.0 + 10.0
    assert cost(LONG, a(0, restore_seconds=0.5)) == 2.5


def test_a_conversation_without_room_waits_and_one_whose_kv_is_there_does_not() -> None:
    full = a(0, room=4_000, conversations=3)
    assert choose(LONG, [full, B._replace(room=0, conversations=1)]) is None
    assert choose(LONG, [full, B._replace(room=0, conversations=0)]) == "b", "alone it may take all of a server"
    assert choose(LONG, [full, B._replace(room=10_000, conversations=1)]) == "b"
    assert choose(LONG, [full], sticky="a") == "a"
    assert choose(LONG, [full._replace(held=4_000)], sticky="a") is None, "its KV was pushed out, so it needs room too"


def test_ties_are_broken_by_the_request() -> None:
    servers = [Candidate(name, held=0, rates=RATES) for name in "xyz"]
    assert [choose(LONG._replace(tie=tie), servers) for tie in range(4)] == ["x", "y", "z", "x"]


def test_a_group_stays_together_for_its_prefix_and_splits_when_the_queue_is_longer() -> None:
    assert set(places_of_members(LONG, RATES)) == {"x"}, "the prefix is worth more than the load"
    placed = places_of_members(Request(tokens=100, expected=1_000), Rates(1_000, 50, 50))
    assert [placed.count(name) for name in "xy"] == [4, 4], "computing a short prompt twice is cheaper than waiting"


def places_of_members(request: Request, rates: Rates) -> list[str | None]:
    """Where eight members of a group go that ask at one moment, each after those before it."""
    beliefs, placed = {name: Belief(rates=rates) for name in "xy"}, list[str | None]()
    for member in range(8):
        who = Who(f"member {member}", "group", request.tokens)
        placed.append(choose(request, [one.candidate(name, who, request.tokens, 0.0) for name, one in beliefs.items()]))
        beliefs[placed[-1] or ""].begin(who, request.tokens, 0.0)
    return placed


def test_beliefs_are_corrected() -> None:
    belief = Belief()
    visits = {}
    for key, tokens in (("old", 500), ("s1", 1_000), ("s2", 2_000)):
        visits[key] = belief.begin(Who(key), tokens, now=0.0)
        assert visits[key] == (Who(key), 0, tokens)
        belief.end(visits[key], cached=0, tokens=tokens, now=1.0)
    assert (belief.running, belief.expect(Who("s1"), 5_000), belief.expect(Who("s2"), 600)) == (0, 1_000, 600)
    again = belief.begin(Who("s2"), 2_100, now=2.0)
    assert again == (Who("s2"), 2_000, 100)
    belief.end(again, cached=1_920, tokens=2_200, now=3.0)
    assert belief.expect(Who("old"), 5_000) == 500, "all but the last block was there, so nothing was pushed out"
    belief.end(belief.begin(Who("s1"), 1_200, now=4.0), cached=400, tokens=1_200, now=5.0)
    assert belief.expect(Who("s1"), 5_000) == 1_200
    assert belief.expect(Who("old"), 5_000) == 0, "what was used before it was pushed out with it"
    belief.flush()
    assert (belief.expect(Who("s1"), 5_000), belief.used) == (0, 0)


def test_a_server_that_says_its_room_is_believed_to_push_out_what_was_used_longest_ago() -> None:
    belief = Belief(room=2_500)
    for key in ("a", "b", "c"):
        belief.end(belief.begin(Who(key), 1_000, now=0.0), cached=0, tokens=1_000, now=0.0)
    assert [belief.expect(Who(key), 1_000) for key in "abc"] == [0, 1_000, 1_000]
    assert belief.used == 2_000


def test_a_group_has_its_prompt_once_and_without_it_the_rest_is_of_no_use() -> None:
    one, two = Who("one", "group", 800), Who("two", "group", 800)
    belief = Belief(room=2_000)
    visit = belief.begin(one, 800, now=1.0)
    assert belief.expect(two, 900) == 800, "who is queued behind finds it computed"
    belief.began(visit)
    belief.end(visit, cached=0, tokens=1_000, now=2.0)
    belief.begin(two, 800, now=2.0)
    assert (belief.expect(one, 1_200), belief.used, belief.queued) == (1_000, 1_000, 0)
    seen = belief.candidate("x", two, 900, now=3.0)
    assert (seen.room, seen.conversations) == (0.8 * 2_000 - 200, 1)
    assert belief.candidate("x", Who("other"), 900, now=3.0).room == 0.8 * 2_000 - 1_000
    belief.forget("group")
    assert belief.expect(one, 1_200) == 0


def test_rates_are_of_the_last_seconds_and_room_is_kept_for_those_that_come_back() -> None:
    belief, who = Belief(rates=RATES, room=10_000), Who("s")
    for now in range(200):
        belief.end(belief.begin(who, 500, now=float(now)), cached=500, tokens=0, now=float(now))
    seen = belief.candidate("x", Who("t"), 100, now=200.0)
    assert 0.9 < seen.arrivals < 1.1
    assert 0.45 < seen.busy < 0.55
    belief.end(belief.begin(who, 3_000, now=200.0), cached=0, tokens=3_000, now=201.0)
    assert belief.candidate("x", Who("t"), 100, now=260.0).room == 5_000
    assert belief.candidate("x", who, 100, now=260.0).conversations == 0, "it does not count itself"
    away = belief.candidate("x", Who("t"), 100, now=262.0)
    assert (away.room, away.conversations) == (8_000, 0)
    assert away.arrivals < 0.003
    belief.begin(who, 3_000, now=300.0)
    assert belief.candidate("x", Who("t"), 100, now=9_000.0).room == 5_000, "a turn that runs is there, however long"
    belief.leave("s")
    assert belief.candidate("x", Who("t"), 100, now=300.0).room == 8_000
