"""Text as it is shown: whole characters, nothing of a stop string, nothing of the prompt (C28, C58; rows 33 and 34)."""

import codecs
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.core.detokenizer import Detokenizer
from agentrt.engine.stopping import StopStrings

QWEN = {
    2512: b"Action", 25: b":", 2711: b" search", 198: b"\n", 37763: b"Observ", 367: b"ation", 12418: b" fake",
    4730: b"ls", 13874: b"``", 3989: b"`\n", 13048: b"Hi", 11162: b" \xf0\x9f", 103: b"\xaa", 123: b"\xbf", 0: b"!",
}  # fmt: skip


def test_c28_nothing_of_a_possible_stop_string_is_shown() -> None:
    """C28a: `Observation:` is ruled out for `Observatory` only, and never shown where it came."""
    stream = Detokenizer(QWEN.__getitem__, ["Observation:"])
    assert [stream.feed([one]) for one in (2512, 25, 2711, 198, 37763, 367, 25)] == [
        "Action", ":", " search", "\n", "", "", ""
    ]  # fmt: skip
    assert stream.finish("Observation:") == ""
    stream = Detokenizer(QWEN.__getitem__, ["Observation:"])
    assert [stream.feed([one]) for one in (37763, 367, 198, 37763)] == ["", "", "Observation\n", ""]
    assert stream.finish() == "Observ"


@pytest.mark.parametrize(("include_stop", "text"), [(False, "ls\n"), (True, "ls\n```")])
def test_c28_a_stop_string_that_ends_inside_a_token(include_stop: bool, text: str) -> None:
    """C28b: the text ends before the first backtick, or after the third and before the newline."""
    stream = Detokenizer(QWEN.__getitem__, ["```"])
    shown = "".join(stream.feed([one]) for one in (4730, 198, 13874, 3989))
    assert shown == "ls\n"
    assert shown + stream.finish("```", include_stop=include_stop) == text


def test_c28_several_ids_of_one_step_are_as_one_after_the_other() -> None:
    stream = Detokenizer(QWEN.__getitem__, ["Observation:"])
    assert stream.feed([2512, 25, 2711, 198, 37763, 367, 25]) + stream.finish("Observation:") == "Action: search\n"


def test_c58_a_character_is_shown_with_its_last_byte() -> None:
    stream = Detokenizer(QWEN.__getitem__)
    assert [stream.feed([one]) for one in (13048, 11162, 103, 123, 0)] == ["Hi", " ", "", "\U0001fabf", "!"]
    assert stream.finish() == ""


def test_row_33_a_prompt_that_ends_inside_a_character_leaks_nothing() -> None:
    """The prompt ended with ` \\xf0\\x9f`: the turn's own bytes are no character, and the prompt's are not shown."""
    stream = Detokenizer(QWEN.__getitem__)
    assert stream.feed([103, 123, 0]) == "\ufffd\ufffd!"


def test_end_ids_have_no_text_and_a_cut_character_is_marked() -> None:
    stream = Detokenizer(QWEN.__getitem__, skip={198})
    assert stream.feed([13048, 198, 11162, 198]) == "Hi "
    assert stream.finish(198) == "\ufffd"


TEXTS = st.one_of(st.text("aé🪿\u0301`x", max_size=12).map(str.encode), st.binary(max_size=8))
STOPS = st.lists(st.text("aé🪿`x", min_size=1, max_size=4), max_size=3)


@given(TEXTS, st.lists(st.integers(1, 5), max_size=12), STOPS, st.booleans())
def test_row_34_any_bytes_in_any_pieces(text: bytes, sizes: list[int], stops: list[str], include: bool) -> None:
    """Against the whole at once: what is shown is a beginning of the final text, and the final text is cut at the stop."""
    cuts = [0, *[min(sum(sizes[: n + 1]), len(text)) for n in range(len(sizes))], len(text)]
    pieces = {index: text[start:end] for index, (start, end) in enumerate(pairwise(cuts))}
    stream, search = Detokenizer(pieces.__getitem__, stops), StopStrings(tuple(stops))
    sampled, shown, matched = b"", "", None
    for index, piece in pieces.items():
        sampled += piece
        shown += stream.feed([index])
        if (matched := search.feed(piece)) is not None:
            break
    kept = sampled
    if matched is not None:
        kept = sampled[: sampled.index(matched.encode()) + (len(matched.encode()) if include else 0)]
    assert shown + stream.finish(matched, include_stop=include) == kept.decode("utf-8", "replace")
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(sampled)
    assert whole.startswith(shown), "a character was shown before it was whole"
