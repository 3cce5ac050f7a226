"""Tools: found by name or path, described by a manifest, their arguments checked."""

import sys
from pathlib import Path

import pytest

from agentrt import tool
from agentrt.core.errors import UsageError
from agentrt.testing import fake_tool

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "lines": {"type": "array", "items": {"type": "integer"}}},
    "required": ["path"],
    "additionalProperties": False,
}


def program(folder: Path, manifest: str) -> Path:
    path = folder / "mine.py"
    path.write_text("")
    path.with_suffix(".toml").write_text(manifest)
    return path


def test_a_shipped_tool() -> None:
    found = tool("calculator")
    assert found.name == "calculator"
    assert found.description
    assert found.argv[0] == str(Path(sys.executable).resolve())
    assert found.argv[1:3] == ("-I", "-S")
    assert Path(found.argv[3]).name == "calculator.py"


def test_a_tool_of_ones_own(tmp_path: Path) -> None:
    path = program(tmp_path, 'name = "mine"\ndescription = "d"\n[parameters]\ntype = "object"\n')
    found = tool(path)
    assert (found.name, found.description, found.parameters) == ("mine", "d", {"type": "object"})
    assert found.argv[3] == str(path)


def test_unknown_tools_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown tool 'calculater'; did you mean 'calculator'"):
        tool("calculater")
    with pytest.raises(UsageError, match="no such file"):
        tool(tmp_path / "none.py")


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ('name = "mine"\n', "missing required field `description`"),
        ('name = "mine"\ndescription = "d"\nparameter = 1\n[parameters]\n', "did you mean 'parameters'"),
        ("name =\n", "not valid TOML"),
        (
            'name = "mine"\ndescription = "d"\n[parameters]\n[limits]\noutput_bytes = 100\n',
            "limits.output_bytes is at least 256, not 100",
        ),
    ],
)
def test_a_wrong_manifest_is_explained(tmp_path: Path, manifest: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tool(program(tmp_path, manifest))


def test_a_missing_manifest(tmp_path: Path) -> None:
    path = tmp_path / "bare.py"
    path.write_text("")
    with pytest.raises(UsageError, match=r"bare\.toml: no such file"):
        tool(path)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"path": "a", "lines": [1, 2]}, ""),
        ({}, "arguments: 'path' is a required property"),
        ({"path": 3}, "arguments.path: 3 is not of type 'string'"),
        ({"path": "a", "lines": [1, "x"]}, "arguments.lines.1: 'x' is not of type 'integer'"),
        ({"path": "a", "q": 1}, "arguments: Additional properties are not allowed ('q' was unexpected)"),
        ({"path": "a", "lines": [float("inf")]}, "arguments.lines.0 is not a finite number"),
        ({"path": float("nan")}, "arguments.path is not a finite number"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], refusal: str) -> None:
    assert fake_tool("f", SCHEMA).refusal(arguments) == refusal


@pytest.mark.parametrize("value", [10**400, 10**400 + 1, 0.3, 2, -0.1])
def test_a_multiple_of_a_tenth(value: float) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "number", "multipleOf": 0.1}}}
    assert fake_tool("f", schema).refusal({"x": value}) == ""


def test_what_is_no_multiple() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "number", "multipleOf": 2.5}}}
    refused = [fake_tool("f", schema).refusal({"x": value}) for value in (1, 0.25, 10**400 + 1, True)]
    assert refused == [
        "arguments.x: 1 is not a multiple of 2.5", "arguments.x: 0.25 is not a multiple of 2.5",
        f"arguments.x: {10**400 + 1} is not a multiple of 2.5", "arguments.x: True is not of type 'number'",
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_a_limit_is_a_number_above_0(value: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("")
    path.with_suffix(".toml").write_text(
        f'name = "mine"\ndescription = "d"\n[parameters]\ntype = "object"\n[limits]\nstart_seconds = {value}\n'
    )
    with pytest.raises(UsageError, match=f"limits.start_seconds must be a number above 0, not {value}"):
        tool(path)
