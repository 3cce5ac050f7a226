"""What is kept of an output, and how it reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.sandbox.capture import Capture, Captured


def captured(data: bytes, cap: int, chunk: int = 4096) -> Captured:
    capture = Capture(cap)
    for start in range(0, len(data), chunk):
        capture.feed(data[start : start + chunk])
    return capture.captured()


def test_c15_invalid_utf8_is_replaced_and_counted() -> None:
    data = bytes.fromhex("63 61 66 E9 20 96 20 FF FE 20 6F 6B 0A")
    assert captured(data, 1000) == Captured("caf\ufffd \ufffd \ufffd\ufffd ok\n", False, 13, 4)


def test_c15_a_character_across_two_reads_is_one() -> None:
    data = b"a" * 65_535 + "é".encode()
    text, truncated, total_bytes, errors = captured(data, 100_000, chunk=65_536)
    assert (len(text), text[-1], truncated, total_bytes, errors) == (65_536, "é", False, 65_537, 0)


def test_a_written_replacement_character_is_no_error() -> None:
    assert captured("\ufffd".encode() + b"\xff", 1000).decode_errors == 1


@pytest.mark.parametrize("size", [9_999, 10_000])
def test_c16_up_to_the_cap_all_is_kept(size: int) -> None:
    assert captured(b"x" * size, 10_000) == Captured("x" * size, False, size, 0)


@pytest.mark.parametrize("size", [10_001, 16_384, 2_000_000])
def test_c16_above_the_cap_head_and_tail_are_kept_and_the_rest_is_counted(size: int) -> None:
    text, truncated, total_bytes, _ = captured(b"h" * (size // 2) + b"t" * (size - size // 2), 10_000)
    assert (truncated, total_bytes) == (True, size)
    assert len(text.encode()) <= 10_000
    head, marker, tail = text.partition(f"\n[... {size - 7_436 - 2_500} bytes left out ...]\n")
    assert marker
    assert (len(head), len(tail)) == (7_436, 2_500)
    assert (head[0], tail[-1]) == ("h", "t")


@given(st.text(min_size=1), st.integers(1, 50), st.integers(256, 400))
def test_c16_a_cut_splits_no_character(text: str, times: int, cap: int) -> None:
    data = (text * times).encode()
    result = captured(data, cap, chunk=7)
    assert (result.total_bytes, result.decode_errors) == (len(data), 0)
    assert len(result.text.encode()) <= cap
    assert result.truncated == (len(data) > cap)
    if not result.truncated:
        assert result.text == text * times
