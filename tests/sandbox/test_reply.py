"""What a tool says on its reply descriptor, taken apart: whatever it says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.sandbox.reply import NOT_A_REPLY, Progress, Reply, Said

RESULT = b'{"result": 1}\n'


def said(*lines: bytes, cap: int = 1000) -> tuple[Said | None, list[Progress]]:
    heard: list[Progress] = []
    reply = Reply(cap, heard.append)
    for line in lines:
        reply.feed(line)
    return reply.said(), heard


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        (b'{"progress": 0.4, "eta_s": 3}', Progress(0.4, 3.0)),
        (b' { "eta_s": 0 }', Progress(None, 0.0)),
        (b'{"progress": 1, "note": "more"}', Progress(1.0, None)),
    ],
)
def test_progress(line: bytes, progress: Progress) -> None:
    assert said(line + b"\n", RESULT) == (Said("ok", "1"), [progress])


@pytest.mark.parametrize(
    "value",
    ["NaN", "Infinity", "-1", "-1e-9", "1.5", "1e400", '"0.5"', "[]", "{}", "true", "1e", "'", "9" * 400, "\\u0000"],
)
def test_hostile_progress_is_dropped_and_the_result_stands(value: str) -> None:
    assert said(f'{{"progress": {value}}}\n'.encode(), RESULT) == (Said("ok", "1"), [])
    if value != "1.5":
        assert said(f'{{"eta_s": {value}}}\n'.encode(), RESULT) == (Said("ok", "1"), [])


def test_what_is_nested_too_deeply_is_no_reply() -> None:
    nest = b"[" * 100_000 + b"]" * 100_000
    assert said(b'{"result": ' + nest + b"}\n", cap=1_000_000) == (Said("tool_error", NOT_A_REPLY), [])
    assert said(b'{"progress": ' + nest + b"}\n", RESULT, cap=1_000_000) == (Said("ok", "1"), [])


def test_a_flood_of_progress_holds_no_memory() -> None:
    heard: list[Progress] = []
    reply = Reply(1000, heard.append)
    for _ in range(1000):
        reply.feed(b'{"progress": 0.5}\n' * 10 + b'{"progress": 0.5')
        reply.feed(b"}\n")
    assert len(heard) == 2_000
    assert not reply.has_line
    reply.feed(RESULT)
    assert reply.said() == Said("ok", "1")


def test_of_progress_that_comes_at_once_the_last_is_heard() -> None:
    lines = b'{"progress": 0.1}\n{"progress": 0.2}\n' + RESULT + b'{"progress": 0.3}\n{"pro'
    assert said(lines, b'gress": 0.4}\n') == (Said("ok", "1"), [Progress(0.3), Progress(0.4)])


def test_a_flood_of_lines_is_no_reply_and_leaves_nothing_for_the_next() -> None:
    reply = Reply(1000)
    for _ in range(10):
        reply.feed(b"a\n \n\n" * 10_000)
    assert reply.said() == Said("tool_error", NOT_A_REPLY)
    assert reply.said() is None
    reply.feed(RESULT)
    assert reply.said() == Said("ok", "1")


@given(st.lists(st.binary(max_size=40)))
def test_anything_is_an_answer_or_an_error_or_nothing(chunks: list[bytes]) -> None:
    found, heard = said(*chunks, cap=30)
    assert found is None or isinstance(found.text, str) or found.text is None
    assert all(each.progress is None or 0 <= each.progress <= 1 for each in heard)
