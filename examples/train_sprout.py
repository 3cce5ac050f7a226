"""Train sprout, the very small chat model that ships with agentrt, from nothing.

    python examples/train_sprout.py                       # tokenizer, 1,220 steps, weights into agentrt/models/sprout
    python examples/train_sprout.py --steps 40 -o /tmp/s  # a short try elsewhere
    python examples/train_sprout.py --eval                # reward of the shipped weights at temperature 1

An expert that knows each environment's answer plays episodes; the model imitates the expert's turns and nothing else.
The episodes are rendered by the runtime's own chat format, so what the model learns to continue is, id by id, what it
meets in a run. Everything follows from the seed; a stopped run goes on from its last checkpoint. To teach another
environment, add a `Course`.
"""

import argparse
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.message import Message, ToolCall
from agentrt.env.chat.sprout import Sprout
from agentrt.env.task import Task
from agentrt.env.tool import Tool
from agentrt_envs import calculator, lookup
from agentrt_envs.answer import grade
from agentrt_tools.calculator import CalculatorError, evaluate
from agentrt_tools.search import SearchError, best, words_of

SHIPPED = Path(__file__).parents[1] / "agentrt" / "models" / "sprout"
CONTROLS = (
    "<|sprout|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
VOCAB_SIZE = 512
MAX_TOKEN_CHARACTERS = 24
TEXT_REPEATS = 300
BATCH = 48
SLIPS = 0.08
"""Of the calculator's operations in the last phase: the expert then writes some digit in place of the operand."""
CHECKPOINT_STEPS = 25
MAX_EPISODE_TOKENS = 320


class Lesson(NamedTuple):
    """An episode as the expert plays it: the task, then each assistant turn with the messages that answer it."""

    task: Task
    turns: list[tuple[Message, list[Message]]]


class Course(NamedTuple):
    """What sprout learns of one environment, and how it is examined."""

    tools: Sequence[Tool]
    lesson: Callable[[random.Random], Lesson]
    exam: Callable[[int], Task]
    """Task k of the eval split."""
    call: Callable[[ToolCall, Task], str]
    """A tool's result as the runtime puts it into the tool message."""


def calculator_lesson(rng: random.Random, slips: float = 0.0) -> Lesson:
    """One calculator call for each operation, then the answer. A share `slips` of the operations has another operand."""
    drawn = calculator.problem(rng)
    task = calculator.make_task("lesson", drawn)
    value, turns = str(drawn.start), []
    for expression in drawn.expressions:
        if slips and rng.random() < slips:
            expression = re.sub("[0-9]", str(rng.randint(2, calculator.MAX_OPERAND)), expression)
        call = ToolCall("calculator", {"expression": expression.format(x=value)})
        value = calculator_call(call, task)
        turns.append(called(call, value))
    return Lesson(task, [*turns, (Message("assistant", f"Answer: {value}"), [])])


def calculator_call(call: ToolCall, task: Task) -> str:
    try:
        return call.error or evaluate(str(call.arguments.get("expression")))
    except CalculatorError as error:
        return f"error: {error}"


def lookup_lesson(rng: random.Random) -> Lesson:
    """One search for each person on the path, then the town of the last one.

    The expert first quotes the entry, then acts on the name it said: which relation comes next is one decision, the name
    beside it another. Without the quote, this model never learned the second.
    """
    drawn = lookup.riddle(rng)
    task = lookup.make_task("lesson", drawn)
    turns = []
    for relation, name in zip(("", *drawn.relations), drawn.path, strict=True):
        call = ToolCall("search", {"query": name})
        turns.append(called(call, lookup_call(call, task), f"{relation} {name}" if relation else ""))
    return Lesson(task, [*turns, (Message("assistant", f"town {drawn.town}\nAnswer: {drawn.town}"), [])])


def lookup_call(call: ToolCall, task: Task) -> str:
    passages = task.files[lookup.DOCUMENTS].splitlines()
    query = call.arguments.get("query")
    if call.error or not isinstance(query, str) or not words_of(query):
        return call.error or "error: query is missing or has no word"
    try:
        return "\n".join(best(query, passages, 1)) or "nothing found"
    except SearchError as error:
        return f"error: {error}"


def called(call: ToolCall, result: str, thought: str = "") -> tuple[Message, list[Message]]:
    return Message("assistant", thought, calls=(call,)), [Message("tool", result, name=call.name)]


COURSES = {
    "calculator": Course(
        calculator.Calculator.tools, calculator_lesson, lambda index: calculator.task("eval", index), calculator_call
    ),
    "lookup": Course(lookup.Lookup.tools, lookup_lesson, lambda index: lookup.task("eval", index), lookup_call),
}


# --- tokenizer -------------------------------------------------------------------------------------------------------


def byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    """A byte-level BPE in which each digit is a token of its own; other tokens may span words, so episodes are short."""
    tokenizer = tokenizers.Tokenizer(model)
    digits = pre_tokenizers.Digits(individual_digits=True)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(seed: int) -> str:
    """The definition (`tokenizer.json`) of a tokenizer for what the lessons say."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = byte_level(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    plain.add_special_tokens(list(CONTROLS))
    bytewise = Tokenizer(plain.to_str())
    between_controls = re.compile("|".join(map(re.escape, CONTROLS)))
    counts = Counter[str]()
    for name, course in COURSES.items():
        for index in range(1000):
            ids, _ = encode(course, course.lesson(random.Random(f"{seed}:tokenizer:{name}:{index}")), bytewise)
            counts.update(between_controls.split(bytewise.decode(ids)))
    # A text that every lesson repeats counts so often and no more, or it would take all merges.
    texts = [text for text, count in counts.items() for _ in range(min(count, TEXT_REPEATS))]
    trained = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROLS),
        initial_alphabet=alphabet,
        max_token_length=MAX_TOKEN_CHARACTERS,
        show_progress=False,
        special_tokens=[],
    )
    trained.train_from_iterator(texts, trainer)
    trained.add_special_tokens(list(CONTROLS))
    return trained.to_str(pretty=True)


def encode(course: Course, lesson: Lesson, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """The ids of a lesson, and which of them the expert said."""
    chat = Sprout(tokenizer)
    ids = chat.prompt(lesson.task.messages, course.tools)
    said = [False] * len(ids)
    for turn, answer in lesson.turns:
        spoken = chat.turn(turn)
        heard = chat.join(answer, ended=True) if answer else []
        ids += spoken + heard
        said += [True] * len(spoken) + [False] * len(heard)
    return ids, said


# --- model -----------------------------------------------------------------------------------------------------------


def new_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            initializer_range=0.06,  # about 1 / sqrt(width); with the usual 0.02, copying a number is learned far later
            bos_token_id=None,
            eos_token_id=tokenizer.special["<|im_end|>"],
            pad_token_id=tokenizer.special["<|sprout|>"],
        )
    )


def lesson_loss(model: LlamaForCausalLM, course: Course, rngs: list[random.Random], tokenizer: Tokenizer) -> Tensor:
    """Mean negative logprob of what the expert said."""
    rows = [encode(course, course.lesson(rng), tokenizer) for rng in rngs]
    width = max(len(ids) for ids, _ in rows)
    ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    said_BT = torch.tensor([said + [False] * (width - len(said)) for _, said in rows])
    logits_BTV = model(ids_BT[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits_BTV[said_BT[:, 1:]], ids_BT[:, 1:][said_BT[:, 1:]])


class Phase(NamedTuple):
    """A stretch of training."""

    steps: int
    rates: tuple[float, float]
    """The learning rate goes from the first to the second in a line."""
    courses: Sequence[Course]
    """What the steps teach, in turn."""

    def rate(self, step: int) -> float:
        first, last = self.rates
        return first + (last - first) * (step + 1) / self.steps


CALCULATOR, LOOKUP = COURSES["calculator"], COURSES["lookup"]
SLIPPING = CALCULATOR._replace(lesson=partial(calculator_lesson, slips=SLIPS))
PHASES = (
    Phase(20, (0.0, 2.5e-3), [CALCULATOR, LOOKUP]),
    Phase(350, (2.5e-3, 1.3e-3), [CALCULATOR, LOOKUP]),
    Phase(370, (1.3e-3, 1.2e-4), [CALCULATOR, LOOKUP, CALCULATOR]),
    Phase(20, (0.0, 1e-3), [SLIPPING, LOOKUP, SLIPPING]),
    Phase(460, (1e-3, 5e-5), [SLIPPING, LOOKUP, SLIPPING]),
)
"""The calculator is harder and gets more steps. An expert who slips leaves the policy something to learn by itself: it
knows what is right, and does it as often as it was shown."""


def phase_at(step: int) -> tuple[Phase, int]:
    """The phase of a step, and which of the phase's steps it is."""
    for phase in PHASES:
        if step < phase.steps:
            return phase, step
        step -= phase.steps
    raise ValueError(f"the phases end {step + 1} steps earlier")


def train(folder: Path, work: Path, steps: int, seed: int) -> None:
    """Train to `steps`, going on from the checkpoint in `work` if there is one, and write the model to `folder`."""
    work.mkdir(parents=True, exist_ok=True)
    definition = train_tokenizer(seed)
    tokenizer = Tokenizer(definition)
    torch.manual_seed(seed)
    model = new_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    first = restore(work / "checkpoint.pt", model, optimizer)
    print(f"{sum(map(torch.numel, model.parameters())):,} parameters, {tokenizer.vocab_size} ids, from step {first}")
    started = time.monotonic()
    for step in range(first, steps):
        phase, at = phase_at(step)
        rngs = [random.Random(f"{seed}:{step}:{row}") for row in range(BATCH)]
        optimizer.param_groups[0]["lr"] = phase.rate(at)
        loss = lesson_loss(model, phase.courses[at % len(phase.courses)], rngs, tokenizer)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 5 == 0 or step + 1 == steps:
            minutes = (time.monotonic() - started) / 60
            left = minutes / (step + 1 - first) * (steps - step - 1)
            progress = f"loss {loss.item():.4f}  {minutes:.1f} min, {left:.1f} min left"
            print(f"step {step + 1}/{steps}  {progress}", flush=True)
        if (step + 1) % CHECKPOINT_STEPS == 0:
            save(work / "checkpoint.pt", model, optimizer, step + 1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(definition, encoding="utf-8")
    model.to(torch.float16).save_pretrained(folder)


def save(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, step: int) -> None:
    draft = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, draft)
    draft.replace(path)


def restore(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint if there is one; the number of steps done."""
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


# --- examination -----------------------------------------------------------------------------------------------------


class Candidate:
    """One episode in the examination: ids still to be fed, and the turn being sampled."""

    def __init__(self, course: Course, chat: Sprout, task: Task) -> None:
        self.course, self.chat, self.task = course, chat, task
        self.fed = chat.prompt(task.messages, course.tools)
        self.turn = list[int]()
        self.reward: float | None = None

    def hear(self, token_id: int) -> None:
        """Take a sampled id; at the end of a turn run its calls, or grade it."""
        self.turn.append(token_id)
        self.fed.append(token_id)
        if token_id not in self.chat.stop_token_ids:
            return
        turn = self.chat.parse(self.turn, "stop")
        if not turn.calls:
            self.reward = grade(turn.content, self.task.data["answer"])
            return
        results = [Message("tool", self.course.call(call, self.task), name=call.name) for call in turn.calls]
        self.fed += self.chat.join(results, ended=True)
        self.turn = []


@torch.inference_mode()
def examine(folder: Path, name: str, episodes: int, seed: int) -> float:
    """Mean reward of the model in `folder` at temperature 1 on the first `episodes` eval tasks.

    All rows go forward one id at a time, given or sampled, so they share a position and need no padding.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer.load(folder)
    chat, course = Sprout(tokenizer), COURSES[name]
    rows = [Candidate(course, chat, course.exam(index)) for index in range(episodes)]
    shared = takewhile(lambda column: len(set(column)) == 1, zip(*(row.fed for row in rows), strict=False))
    prefix = [column[0] for column in shared]
    cache = DynamicCache(config=model.config)
    model(torch.tensor([prefix] * episodes), past_key_values=cache)
    pad = tokenizer.special["<|sprout|>"]
    for at in range(len(prefix), MAX_EPISODE_TOKENS + len(prefix)):
        ids_B1 = torch.tensor([[row.fed[at] if at < len(row.fed) else pad] for row in rows])
        logits_BV = model(ids_B1, None, None, cache).logits[:, -1]
        sampled_B = torch.multinomial(logits_BV.softmax(-1), 1)[:, 0]
        for row, token_id in zip(rows, sampled_B.tolist(), strict=True):
            if row.reward is None and at + 1 == len(row.fed):
                row.hear(token_id)
        if all(row.reward is not None for row in rows):
            break
    return sum(row.reward or 0.0 for row in rows) / episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=SHIPPED, help="model folder (default: the shipped one)")
    parser.add_argument("--work", type=Path, default=Path("outputs/train_sprout"), help="folder of the checkpoint")
    whole = sum(phase.steps for phase in PHASES)
    parser.add_argument("--steps", type=int, default=whole, choices=range(whole + 1), metavar="N", help="stop after N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eval", action="store_true", help="only measure the model in the output folder")
    parser.add_argument("--episodes", type=int, default=256, help="episodes to measure on")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not options.eval:
        train(options.output, options.work, options.steps, options.seed)
    for name in COURSES:
        reward = examine(options.output, name, options.episodes, options.seed)
        print(f"{name}: mean reward {reward:.3f} over {options.episodes} eval episodes at temperature 1")


if __name__ == "__main__":
    main()
