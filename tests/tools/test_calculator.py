"""The calculator as the runtime runs it: a subprocess, one line in, one line out."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentrt_tools.calculator as program


def run(line: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(Path(program.__file__))],
        input=line + "\n", capture_output=True, text=True, env=environment, timeout=30, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return json.loads(done.stdout) if done.stdout else None


def test_one_line_in_one_line_out() -> None:
    assert run('{"expression": "2 * (3 + 4)"}') == {"result": "14"}
    assert run('{"expression": "1 / 0"}') == {"error": "division by zero"}


@pytest.mark.parametrize("line", ["", "{}", "[]", "2 + 3", '{"expression": 5}'])
def test_a_wrong_call_is_answered_with_an_error(line: str) -> None:
    assert run(line) == {"error": 'expected one JSON line like {"expression": "2 + 3"}'}


def test_the_reply_goes_to_the_descriptor_that_was_named(tmp_path: Path) -> None:
    reply = os.open(tmp_path / "reply", os.O_CREAT | os.O_RDWR)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(Path(program.__file__))],
            input=b'{"expression": "5 - 8"}\n', capture_output=True, env={"AGENTRT_REPLY_FD": str(reply)},
            pass_fds=[reply], timeout=30, check=True,
        )  # fmt: skip
        assert done.stdout == b""
        assert (tmp_path / "reply").read_text() == '{"result": "-3"}\n'
    finally:
        os.close(reply)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", "7"), ("-16 * 3", "-48"), ("40 - -5", "45"), ("2 + 3 * 4", "14"), ("7 / 2", "7/2"), ("2.5 * 2", "5"),
        ("7 // 2", "3"), ("-7 // 2", "-4"), ("-7 % 3", "2"), ("-2 ** 2", "-4"), ("2 ** 3 ** 2", "512"),
        ("2 ** -1", "1/2"), ("0 ** 0", "1"), ("(-1) ** 99999999999", "-1"), ("(-1) ** 99999999998", "1"),
        ("0 ** 99999999999", "0"),
        ("0.1 + 0.2", "3/10"), ("2 ** 100", str(2**100)), (" ( 1 )\t", "1"), ("(2 / 3) ** 2", "4/9"),
    ],
)  # fmt: skip
def test_values_are_exact(expression: str, value: str) -> None:
    assert program.evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("", "the expression ends too early"),
        ("2 +", "the expression ends too early"),
        ("2 3", "unexpected '3'"),
        ("(2", "a closing parenthesis is missing"),
        ("2)", "unexpected ')'"),
        ("x + 1", "unexpected 'x'"),
        ("__import__('os')", "unexpected '_'"),
        ("*2", "unexpected '*'"),
        ("5 % 0", "division by zero"),
        ("5 // 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("4 ** 0.5", "the exponent is not an integer"),
        ("9 ** 9 ** 9", "the result is too large"),
        ("2 ** 5000", "the result is too large"),
        ("(1 / 3) ** 5000", "the result is too large"),
        ("2 ** 4000 * 2 ** 4000", "the result is too large"),
        ("(" * 200, "more than 100 levels of parentheses"),
        ("1+" * 600 + "1", "the expression is longer than 1000 characters"),
    ],
)
def test_what_is_refused(expression: str, error: str) -> None:
    with pytest.raises(program.CalculatorError) as refusal:
        program.evaluate(expression)
    assert str(refusal.value) == error


@given(st.recursive(st.integers(0, 999).map(str), lambda part: st.tuples(part, st.sampled_from("+-*"), part).map(
    lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"), max_leaves=12))  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_integer_arithmetic_is_that_of_python(expression: str) -> None:
    assert program.evaluate(expression) == str(eval(expression))


@given(st.text("0123456789.+-*/%() ", max_size=30))
@settings(max_examples=500, deadline=None)
def test_any_text_gives_a_value_or_a_refusal(expression: str) -> None:
    with suppress(program.CalculatorError):
        assert program.evaluate(expression)
