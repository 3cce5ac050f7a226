"""The code environment: stable tasks, right functions that score, and cheaters that get nothing, in the real sandbox."""

from functools import partial

import anyio
import msgspec
import pytest
from splits import take

from agentrt import Task
from agentrt.core.errors import UsageError
from agentrt.core.records import EpisodeRecord
from agentrt.rollout.play import run_episode
from agentrt.sandbox.permits import Permits
from agentrt.sandbox.sandbox import Sandbox
from agentrt.testing import ScriptedEngine, called, said, stage
from agentrt_envs.code import CHECKER, HOSTILE, PROBLEMS, Code, canonical, is_right, last_block, task

DOUBLE = Task("t", task("eval", 0).messages, {"name": "double", "cases": [[1], [2], [-3]], "expected": [2, 4, -6]})
RIGHT = "def double(x):\n    return 2 * x"


def score(answer: str, item: Task = DOUBLE, *before: list[int]) -> EpisodeRecord:
    """The record of an episode that ends with `answer`, in the sandbox of this machine."""

    async def main() -> EpisodeRecord:
        setup = stage(Code(), ScriptedEngine([*before, said(answer)]))
        setup.sandboxes = partial(Sandbox, Permits(2))
        return await run_episode(setup, item)

    return anyio.run(main)


@pytest.mark.anyio
@pytest.mark.parametrize(("split", "size"), [("eval", 256), ("adversarial", 2 * len(HOSTILE)), ("train", 300)])
async def test_tasks_depend_on_split_and_index_only(split: str, size: int) -> None:
    tasks = await take(Code(), split, 300)
    assert len(tasks) == size >= 20
    assert tasks == [task(split, index) for index in range(size)]
    assert {item.data["name"] for item in tasks} == {problem.name for problem in PROBLEMS} or split == "adversarial"
    assert all(len(item.data["cases"]) == len(item.data["expected"]) == 8 for item in tasks)


@pytest.mark.anyio
async def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(UsageError, match="code has no split 'dev'"):
        await take(Code(), "dev", 1)


def test_expected_values_are_json_and_not_all_the_same() -> None:
    for item in (task("eval", index) for index in range(64)):
        assert canonical(msgspec.json.decode(msgspec.json.encode(item.data["expected"]))) == canonical(
            item.data["expected"]
        )
    kinds = [len({canonical(value) for value in task("eval", index).data["expected"]}) for index in range(64)]
    assert sum(kind == 1 for kind in kinds) <= 3


def test_a_right_function_scores_and_its_episode_ran_at_a_level() -> None:
    tried = said(called("python", '{"code": "2 * 3"}'))
    record = score(f"Here it is.\n```python\n{RIGHT}\n```", DOUBLE, tried)
    assert (record.status, record.reward, record.calls[0].result) == ("ok", 1.0, "6\n")
    assert record.calls[0].isolation.startswith("L")


WRONG = {
    "no block": RIGHT,
    "wrong": "def double(x): return x + 1",
    "float": "def double(x): return 2.0 * x",
    "no such function": "def triple(x): return 3 * x",
    "syntax": "def double(x) return 2 * x",
    "always equal": "class E:\n def __eq__(self, o): return True\ndef double(x): return E()",
    "an int that lies": "class I(int):\n def __eq__(self, o): return True\n def __repr__(self): return '2'\n"
    "def double(x): return I(7)",
    "exit early": "import sys\nprint('PASSED')\nsys.exit(0)",
    "exit at once": "import os\nprint('{\"result\": true}', flush=True)\nos._exit(0)",
    "pass marker": "def double(x):\n    print('all tests passed')\n    raise SystemExit(0)",
    "a reply of its own": 'import os\nos.write(3, b\'{"result": "PASSED"}\\n\')\nos._exit(0)',
    "two replies": 'import os\nos.write(3, b\'{"result": [{"value": 2}]}\\n\')\n' + RIGHT.replace("2", "3"),
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"result\": [true, true, true]}'\n"
    "def double(x): return 0",
    "patched grader": "import sys\nmain = sys.modules['__main__']\n"
    "main._outcome = lambda f, a: {'value': True}\ndef double(x): return 0",
    "the tests": "def double(x):\n    import os\n    return [open(f).read() for f in os.listdir('.')]",
    "the reference": "from agentrt_envs.code import PROBLEMS\ndef double(x): return PROBLEMS",
    "the parent": "import os\ndef double(x): return open(f'/proc/{os.getppid()}/environ').read()",
    "endless": "def double(x):\n    while True: pass",
    "fork bomb": "import os\nwhile True: os.fork()",
    "kill": "import os\nos.kill(0, 9)",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_cheater_gets_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = msgspec.structs.replace(CHECKER.terms.limits, wall_seconds=1.5, cpu_seconds=1.0)
    terms = msgspec.structs.replace(CHECKER.terms, limits=quick)
    monkeypatch.setattr("agentrt_envs.code.CHECKER", msgspec.structs.replace(CHECKER, terms=terms))
    answer = WRONG[name] if name == "no block" else f"```python\n{WRONG[name]}\n```"
    record = score(answer)
    assert (record.status, record.reward, record.reward_reason) == ("ok", 0.0, None), record.error


def test_the_last_block_counts() -> None:
    assert last_block("```python\na\n```\ntext\n```\nb\n```") == "b\n"
    assert last_block("no block") is None


def test_values_are_compared_by_type_too() -> None:
    assert is_right('[{"value":1},{"value":true}]', [1, True])
    assert not any(
        is_right(text, [1, True]) for text in ("", "[]", "[" * 100_000, '[{"value":true},{"value":1}]', '[{"value":1}]')
    )


def test_references_agree_with_plain_examples() -> None:
    by_name = {problem.name: problem.solve for problem in PROBLEMS}
    assert by_name["add_multiples"](3, [3, 4, -6]) == -3
    assert by_name["shift_left"](2, [1, 2, 3]) == [3, 1, 2]
    assert by_name["running_max"](2, [3, 1, 0, 2]) == [3, 3, 3, 2]
    assert by_name["chunks"](2, [1, 2, 3]) == [[1, 2], [3]]
    assert by_name["far_pairs"](2, [1, 4, 2]) == 1
    assert by_name["long_words"](3, "the boat sails") == ["boat", "sails"]
    assert by_name["turn_words"](2, "the red boat") == "the der boat"
    assert by_name["encode_runs"](2, "aabccc") == [["a", 2], ["c", 3]]
    assert by_name["most_common"](2, "bbaac") == ["a", "b"]
    assert (by_name["is_balanced"](2, "([])"), by_name["is_balanced"](2, "([)]")) == (True, False)
