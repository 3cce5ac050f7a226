"""From options to a spec: what a command fills in, and what it refuses to go on with."""

from pathlib import Path

import pytest
import tomli_w

from agentrt.cli.launch import named_by
from agentrt.cli.spec import build_spec, chosen_spec
from agentrt.core.errors import UsageError
from agentrt.core.spec import to_toml
from agentrt.rollout.sink import RunFolder


def test_each_command_has_its_defaults_and_options_win() -> None:
    rolled, evaluated = (build_spec(purpose, None, {"environment": "x"}, []) for purpose in ("run", "eval"))
    assert (rolled.purpose, rolled.split, rolled.groups, rolled.group_size) == ("run", "train", 4, 4)
    assert (evaluated.purpose, evaluated.split, evaluated.groups, evaluated.group_size) == ("eval", "eval", 32, 4)
    given = build_spec("eval", None, {"environment": "x", "split": "adversarial", "groups": None}, ["groups=7"])
    assert (given.split, given.groups) == ("adversarial", 7)


def test_a_file_wins_over_defaults_and_loses_to_options(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('environment = "x"\ngroups = 5\nseed = 3\n[limits]\nmax_turns = 2\n')
    spec = build_spec("eval", tmp_path / "run.toml", {"seed": 9}, ["limits.max_turn_tokens=8"])
    assert (spec.groups, spec.seed, spec.limits.max_turns, spec.limits.max_turn_tokens) == (5, 9, 2, 8)


def test_what_a_dry_run_prints_is_a_file_of_that_spec(tmp_path: Path) -> None:
    spec = build_spec("run", None, {"environment": "x"}, ["limits.max_turns=unbounded", "limits.max_tool_calls=3"])
    assert (spec.limits.max_turns, spec.limits.max_tool_calls, spec.limits.turn_seconds) == (None, 3, None)
    (tmp_path / "spec.toml").write_text(tomli_w.dumps(to_toml(spec)))
    assert build_spec("run", tmp_path / "spec.toml", {}, []) == spec


def test_the_file_of_a_run_gives_its_spec(tmp_path: Path) -> None:
    spec = build_spec("run", None, {"environment": "x"}, ["seed=5"])
    RunFolder.create(tmp_path / "out", spec, {"agentrt": "0"})
    assert build_spec("run", tmp_path / "out" / "run.toml", {}, []) == spec
    assert build_spec("eval", tmp_path / "out" / "run.toml", {"split": "eval"}, []).purpose == "eval"


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("limits.max_turns=abc", "the run's spec: limits.max_turns: Expected `int | unbounded`, got `str`"),
        ("limits.max_turn_tokens=unbounded", "the run's spec: limits.max_turn_tokens: Expected `int`, got `unbounded`"),
        ("sampling.top_p=2", "the run's spec: sampling.top_p must be in (0, 1], not 2.0; 1 means off"),
        ("engine.kv_policy=lur", "the run's spec: engine.kv_policy: there is no 'lur'; did you mean 'lru'?"),
        ("engine.kv_tokens=much", "the run's spec: engine.kv_tokens: there is no 'much'; known are auto, int"),
        ("limits.max_turns=0", "the run's spec: limits.max_turns must be above 0, not 0"),
        ("groups=0", "the run's spec: groups must be above 0, not 0"),
    ],
)
def test_a_wrong_value_is_named_once(assignment: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        build_spec("run", None, {"environment": "x"}, [assignment])
    assert str(refused.value) == words


@pytest.mark.parametrize(("made", "asked"), [("run", "eval"), ("eval", "run")])
def test_an_evaluation_and_a_run_are_never_mixed(made: str, asked: str, tmp_path: Path) -> None:
    spec = build_spec(made, None, {"environment": "x"}, [])  # type: ignore[arg-type]
    RunFolder.create(tmp_path / "out", spec, {})
    with pytest.raises(UsageError, match=f"was made by `agentrt {made}`; resume it with that"):
        chosen_spec(asked, None, {}, [], tmp_path / "out", None)  # type: ignore[arg-type]
    assert chosen_spec(made, None, {}, [], tmp_path / "out", None) == spec  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ("calculator", "calculator"), ("reasoning_gym:chain_sum", "reasoning_gym-chain_sum"), ("a/my_env.py", "my_env"),
        ("a/my_env.py:Mine", "my_env-Mine"), ("pkg.module:Name", "pkg.module-Name"),
    ],
)  # fmt: skip
def test_folders_are_named_by_the_environment(environment: str, name: str) -> None:
    path = named_by(environment, "eval-")
    assert path.parent == Path("outputs")
    assert path.name.startswith(f"eval-{name}-2")
