"""The training script of sprout: lessons are what the runtime would render, and a stopped training goes on exactly."""

import random
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.sprout import Sprout
from agentrt_envs.answer import grade

SCRIPT = Path(__file__).parents[2] / "examples" / "train_sprout.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("train_sprout", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("index", range(10))
@pytest.mark.parametrize("name", ["calculator", "lookup"])
def test_the_expert_is_right_and_its_masked_ids_are_its_turns(script: Any, name: str, index: int) -> None:
    course, tokenizer = script.COURSES[name], Tokenizer.load(script.SHIPPED)
    lesson = course.lesson(random.Random(index))
    assert grade(lesson.turns[-1][0].content, lesson.task.data["answer"]) == 1.0
    assert all(course.call(turn.calls[0], lesson.task) == answer[0].content for turn, answer in lesson.turns[:-1])
    ids, said = script.encode(course, lesson, tokenizer)
    conversation = [*lesson.task.messages, *(message for turn, answer in lesson.turns for message in (turn, *answer))]
    written = tokenizer.decode(Sprout(tokenizer).prompt(conversation, course.tools))
    assert written == tokenizer.decode(ids) + "\n<|im_start|>assistant\n"
    spoken = [token_id for token_id, is_said in zip(ids, said, strict=True) if is_said]
    assert spoken == [token_id for turn, _ in lesson.turns for token_id in Sprout(tokenizer).turn(turn)]


def test_an_expert_who_slips_writes_another_operand_and_goes_on_with_what_the_tool_said(script: Any) -> None:
    lessons = [script.calculator_lesson(random.Random(index), slips=0.5) for index in range(200)]
    right = [grade(lesson.turns[-1][0].content, lesson.task.data["answer"]) for lesson in lessons]
    assert 60 < sum(right) < 100  # an operation is right by 1 - 0.5 * 7 / 8; there are one to three of them
    course = script.COURSES["calculator"]
    for lesson in lessons:
        assert all(course.call(turn.calls[0], lesson.task) == heard[0].content for turn, heard in lesson.turns[:-1])


def test_the_rate_rises_and_falls_in_lines(script: Any) -> None:
    steps = sum(phase.steps for phase in script.PHASES)
    rates = [phase.rate(at) for phase, at in map(script.phase_at, range(steps))]
    assert [rates[step] for step in (19, 369, 739, 759, steps - 1)] == pytest.approx(
        [2.5e-3, 1.3e-3, 1.2e-4, 1e-3, 5e-5]
    )
    assert max(rates) == rates[19]
    with pytest.raises(ValueError, match="the phases end 1 steps earlier"):
        script.phase_at(steps)


def test_digits_are_tokens_of_their_own(script: Any) -> None:
    tokenizer = Tokenizer.load(script.SHIPPED)
    assert [tokenizer.decode([token_id]) for token_id in tokenizer.encode("12 345")] == ["1", "2", " ", "3", "4", "5"]
    assert len(tokenizer.special) == 7


def test_a_stopped_training_goes_on_exactly(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = (script.SHIPPED / "tokenizer.json").read_text(encoding="utf-8")
    for name, value in {"BATCH": 2, "CHECKPOINT_STEPS": 1}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "train_tokenizer", lambda seed: definition)
    script.train(tmp_path / "whole", tmp_path / "work", steps=3, seed=1)
    for steps in (1, 3):
        script.train(tmp_path / "resumed", tmp_path / "stopped", steps=steps, seed=1)
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert 0.0 <= script.examine(tmp_path / "whole", "calculator", episodes=2, seed=1) <= 1.0


def test_help_says_how_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, timeout=100, check=True
    )
    assert "python examples/train_sprout.py --eval" in done.stdout
