"""Speculative decoding on this CPU, on against off, in pairs in one run: the same ids, and the time they take.

    python bench/speculate_cpu.py [--rounds 11] [--only "siblings, sprout"] [--draft FOLDER]

- quote: SmolLM2-135M answers by quoting the tool result that it just got, as it did in the turn before; greedy, and at
  T = 0.4 (at T = 1 this model quotes little). 1, 2 and 4 live requests. The prompt's prefill is part of the time.
- siblings: sprout, groups of 8 on calculator tasks at T = 1, whole episodes with their tool calls; the tool costs nothing here.
- free: text that follows nothing said before, at T = 1; 1, 8 and 32 live requests. What the gate is for.

Each piece of work runs on two engines over the same weights, one with `engine.speculate=auto` and one with `off`, in turns of
`SLICE` seconds of each: so what the machine does meanwhile hits both. Which of them goes first alternates. Both sample the same
ids, and the script stops if they do not. After each piece the two change places: what speculates moves to the other engine, for
memory that an engine got makes it a per cent or two slower or faster as long as it lives (with a draft model they stay, for it
is made for one engine). A round is as many pieces as take the plain engine `--seconds`. Rounds are of engines
that have run for a while: the first pieces, `--warm-up` seconds of them, are a figure of their own, in which a gate learns what
its drafts are worth. `--pairs` times both engines are made anew, now one first and now the other, for a gate may
learn something else. A line gives the median
of off/on over the rounds of all pairs with a 95 % bootstrap interval, by the wall's time and by this process's CPU time (engine
threads and the models' own; nothing else runs in it), the median of each pair, that of the warm-ups, and proposed and accepted
length. With `--same` both engines are `off`: what the machine makes of nothing.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from agentrt.core import seeds
from agentrt.core.errors import UsageError
from agentrt.core.models import find_model
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokenizer import Tokenizer
from agentrt.core.tokens import Tokens
from agentrt.engine.model.loader import LoadedModel, load_model
from agentrt.engine.runner import ModelRunner
from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.drafter import Drafter
from agentrt.engine.speculate.load import load_draft
from agentrt.engine.step import EngineCore
from agentrt.env.chat.choose import renderer_for
from agentrt.env.chat.message import Message
from agentrt.env.chat.renderer import Family
from agentrt.env.tool import Tool
from agentrt_envs import calculator
from agentrt_tools.calculator import evaluate

Work = Callable[[EngineCore, int], Generator[None, None, list[list[int]]]]
"""Runs piece n on an engine, a step at a time; the ids of each conversation."""
SLICE = 0.02
"""Seconds that an engine works before the other has its turn."""


class Loaded(NamedTuple):
    """A model and what goes with it."""

    model: LoadedModel
    tokenizer: Tokenizer
    renderer: Family


@cache
def loaded(name: str) -> Loaded:
    """A model by name; read once."""
    folder = find_model(name)
    tokenizer = Tokenizer.load(folder)
    return Loaded(load_model(folder), tokenizer, renderer_for(folder, tokenizer))


CLOCK: list[Callable[[], float]] = [time.perf_counter]
"""The last one is taken by the engines, whose gates weigh step times."""


def engine(name: str, speculate: str, draft: str = "", **more: Any) -> EngineCore:
    """An engine's core over a model, with a draft head if it is to speculate; `more` are keys of `EngineSpec`."""
    model, tokenizer, _ = loaded(name)
    spec = EngineSpec(kv_tokens=16_384, speculate="auto" if speculate == "on" else "off", **more)
    runner, vocab_size = ModelRunner(model.decoder, spec), min(tokenizer.vocab_size, model.decoder.vocab_size)
    drafter = None
    if draft and speculate == "on":
        drafter = Drafter(load_draft(find_model(draft), model), runner, spec, vocab_size)
    return EngineCore(
        runner, spec, vocab_size=vocab_size, bytes_of=tokenizer.bytes_of, clock=CLOCK[-1], drafter=drafter
    )


class Conversation:
    """One session of a core, without a service."""

    def __init__(self, core: EngineCore, seed: int, group: str) -> None:
        self.core, self.seed, self.group = core, seed, group
        self.tokens, self.lease, self.turns = Tokens(), core.open(), 0

    def submit(self, observed: list[int], params: SamplingParams, max_tokens: int) -> Sequence:
        """Queue a turn."""
        self.tokens.observe(observed)
        seed = seeds.derive(self.seed, "turn", self.turns)
        sequence = Sequence(tokens=self.tokens, params=params, max_tokens=max_tokens, seed=seed, group=self.group)
        self.turns += 1
        self.core.submit(sequence, self.lease)
        return sequence


def stepping(core: EngineCore) -> Iterator[list[Sequence]]:
    """Steps until all is done; the sequences that ended with each."""
    while not core.is_idle:
        yield core.step()


def drain(core: EngineCore) -> None:
    for _ in stepping(core):
        pass


WORDS = (
    "river", "stone", "market", "harbour", "winter", "letter", "engine", "garden", "silver", "window",
    "captain", "bridge", "forest", "candle", "mirror", "island", "yellow", "paper", "thunder", "basket",
)  # fmt: skip


NAMES = ("Anna Berg", "Tom Hale", "Maria Lopez", "Peter Novak", "Julia Stone", "Mark Weber", "Elena Rossi", "David Kim")
TOWNS = ("Oakfield", "Northport", "Lakewood", "Ashford", "Riverton", "Stonebridge", "Maplewood", "Brookside")
JOBS = ("teacher", "doctor", "baker", "farmer", "writer", "pilot", "painter", "lawyer")
FACTS = (
    "{name} lives in {town} and works as a {job}.", "The old library of {town} was opened in {year}.",
    "Every {day}, {name} takes the train to {town}.", "In {year}, {name} became a {job} in {town}.",
    "The market of {town} is open every {day}.", "{name} has been a {job} since {year}.",
)  # fmt: skip


def result(rng: random.Random) -> str:
    """What a search gave: five plain sentences about people and towns, none of them said before."""
    return " ".join(
        fact.format(
            name=rng.choice(NAMES), town=rng.choice(TOWNS), job=rng.choice(JOBS), year=rng.randint(1850, 2020),
            day=rng.choice(("Monday", "Tuesday", "Friday", "Sunday")),
        ) for fact in rng.sample(FACTS, 5)
    )  # fmt: skip


def quote(live: int, temperature: float) -> Work:
    """A search gave a text, and the answer quotes it, as the answer before did: the second turn of a conversation."""
    _, _, renderer = loaded("smollm2-135m")
    params = SamplingParams(temperature=temperature, stop_token_ids=tuple(renderer.stop_token_ids))

    def asked(found: str) -> Message:
        return Message(
            "user", f"The search tool found this text:\n\n{found}\n\nRepeat the text exactly, word for word."
        )

    def work(core: EngineCore, round_: int) -> Generator[None, None, list[list[int]]]:
        conversations = []
        for index in range(live):
            seed = 1000 * round_ + index
            before, now = result(random.Random(-seed - 1)), result(random.Random(seed))
            messages = [asked(before), Message("assistant", before), asked(now)]
            conversation = Conversation(core, seed, "")
            conversation.submit(renderer.prompt(messages, ()), params, 96)
            conversations.append(conversation)
        for _ in stepping(core):
            yield
        return [closed(conversation) for conversation in conversations]

    return work


def free(name: str, live: int) -> Work:
    """Text about nothing that was said."""
    _, _, renderer = loaded(name)
    params = SamplingParams()  # nothing stops it

    def work(core: EngineCore, round_: int) -> Generator[None, None, list[list[int]]]:
        conversations = []
        for index in range(live):
            about = random.Random(1000 * round_ + index).sample(WORDS, 3)
            conversation = Conversation(core, 1000 * round_ + index, "")
            asked = Message("user", f"Write a story about {about[0]}, {about[1]} and {about[2]}.")
            conversation.submit(renderer.prompt([asked], ()), params, 64)
            conversations.append(conversation)
        for _ in stepping(core):
            yield
        return [closed(conversation) for conversation in conversations]

    return work


def siblings(name: str, groups: int, tasks: list[tuple[Message, ...]], tools: tuple[Tool, ...]) -> Work:
    """Groups of 8 on calculator tasks: turns, calls, results, until an answer or 4 turns."""
    _, _, renderer = loaded(name)
    params = SamplingParams(stop_token_ids=tuple(renderer.stop_token_ids))

    def work(core: EngineCore, round_: int) -> Generator[None, None, list[list[int]]]:
        conversations, running = [], {}
        for group in range(groups):
            task = tasks[(round_ * groups + group) % len(tasks)]
            for member in range(8):
                conversation = Conversation(core, seeds.derive(round_, group, member), f"{round_} {group}")
                running[conversation.submit(renderer.prompt(task, tools), params, 64)] = conversation
                conversations.append(conversation)
        for ended in stepping(core):
            for sequence in ended:
                conversation = running.pop(sequence)
                observed = answered(renderer, sequence, tools)
                if observed and conversation.turns < 4:
                    running[conversation.submit(observed, params, 64)] = conversation
            yield
        return [closed(conversation) for conversation in conversations]

    return work


def answered(renderer: Family, sequence: Sequence, tools: tuple[Tool, ...]) -> list[int]:
    """The ids of the results of a turn's calls; empty if it called nothing."""
    ids = sequence.tokens.token_ids[sequence.context_tokens :]
    assert sequence.finish_reason is not None
    turn = renderer.parse(ids, sequence.finish_reason, tools)
    results = [
        Message("tool", calculated(call.arguments), name=call.name, call_id=call.id) for call in turn.message.calls
    ]
    if not results or sequence.finish_reason != "stop":
        return []
    return renderer.join(results, ended=True, end_id=ids[-1])


def calculated(arguments: object) -> str:
    try:
        return evaluate(str(dict(arguments)["expression"]))  # type: ignore[call-overload]
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        return str(error)


def closed(conversation: Conversation) -> list[int]:
    conversation.core.close(conversation.lease)
    return conversation.tokens.token_ids.tolist()


class Spent(NamedTuple):
    """Seconds of an engine."""

    wall: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls) -> "Spent":
        return cls(time.perf_counter(), time.process_time())

    def plus(self, other: "Spent", sign: int = 1) -> "Spent":
        return Spent(self.wall + sign * other.wall, self.cpu + sign * other.cpu)


class Counts(NamedTuple):
    """Of an engine."""

    steps: int
    sampled: int
    verifications: int
    drafted: int
    accepted: int

    def plus(self, other: "Counts", sign: int = 1) -> "Counts":
        return Counts(*(mine + sign * its for mine, its in zip(self, other, strict=True)))

    @classmethod
    def of(cls, core: EngineCore) -> "Counts":
        found = core.statistics(0)
        return cls(found.steps, found.tokens_sampled, found.verifications, found.tokens_drafted, found.tokens_accepted)


class Pair:
    """Two engines, and the pieces of work that both have done."""

    def __init__(self, name: str, model: str, work: Work, draft: str, *, same: bool, number: int) -> None:
        self.name, self.work, self.pieces, self.slices = name, work, 0, 0
        speculate = {"on": "off" if same else "on", "off": "off"}
        order = sorted(speculate, reverse=number % 2 == 0)  # who is made first gets other memory
        self.cores = {which: engine(model, speculate[which], draft) for which in order}
        self.counts = dict.fromkeys(self.cores, Counts(0, 0, 0, 0, 0))
        self.changes = not draft

    def run(self, least: float) -> dict[str, Spent]:
        """Pieces until the plain engine has worked so many seconds; what both took."""
        spent = dict.fromkeys(self.cores, Spent())
        while spent["off"].wall < least:
            texts: dict[str, list[list[int]]] = {}
            before = {which: Counts.of(core) for which, core in self.cores.items()}
            going = {which: self.work(core, self.pieces) for which, core in self.cores.items()}
            while going:
                self.slices += 1
                for which in sorted(going, reverse=self.slices % 2 == 0):
                    started = Spent.now()
                    ended = self._slice(going[which])
                    spent[which] = spent[which].plus(Spent.now()).plus(started, -1)
                    if ended is not None:
                        texts[which] = ended
                        del going[which]
            assert texts["on"] == texts["off"], f"{self.name}: other ids with speculation"
            for which, core in self.cores.items():
                self.counts[which] = self.counts[which].plus(Counts.of(core)).plus(before[which], -1)
            self.pieces += 1
            if self.changes:
                self._change()
        return spent

    def _change(self) -> None:
        """What speculates moves to the other engine."""
        on, off = self.cores["on"], self.cores["off"]
        on.speculator, off.speculator = off.speculator, on.speculator
        self.cores = {"on": off, "off": on}

    @staticmethod
    def _slice(going: Generator[None, None, list[list[int]]]) -> list[list[int]] | None:
        """Go on for a while; the texts if that is all."""
        until = time.perf_counter() + SLICE
        try:
            while time.perf_counter() < until:
                next(going)
        except StopIteration as end:
            texts: list[list[int]] = end.value
            return texts
        return None


class Measured(NamedTuple):
    """Of one pair."""

    warming: float
    """Off over on, of the warm-up."""
    wall: list[float]
    """Off over on, of each round."""
    cpu: list[float]
    off: Counts
    on: Counts
    seconds: float
    """Of the plain engine."""


def measure(pair: Pair, rounds: int, seconds: float, warm_up: float) -> Measured:
    """The first piece compiles and is not counted."""
    pair.run(1e-9)
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    spent = pair.run(warm_up)
    warming = spent["off"].wall / spent["on"].wall
    before = dict(pair.counts)
    found = [pair.run(seconds) for _ in range(rounds)]
    counts = {which: pair.counts[which].plus(before[which], -1) for which in before}
    wall, cpu = ([one["off"][part] / one["on"][part] for one in found] for part in range(2))
    return Measured(warming, wall, cpu, counts["off"], counts["on"], sum(one["off"].wall for one in found))


def line(name: str, pairs: list[Measured]) -> str:
    """What is said of one kind of work."""
    wall = [ratio for pair in pairs for ratio in pair.wall]
    cpu = [ratio for pair in pairs for ratio in pair.cpu]
    verified = max(sum(pair.on.verifications for pair in pairs), 1)
    medians = " ".join(f"{statistics.median(pair.wall):.3f}" for pair in pairs)
    return (
        f"{name:<34} {said(wall)}   cpu {said(cpu)}   pairs {medians}   "
        f"warm-up {statistics.median(pair.warming for pair in pairs):.2f}   "
        f"proposed {sum(pair.on.drafted for pair in pairs) / verified:.2f}  "
        f"accepted {sum(pair.on.accepted for pair in pairs) / verified:.2f}  "
        f"({sum(pair.on.accepted for pair in pairs) / sum(pair.on.sampled for pair in pairs):.1%} of ids)   "
        f"steps {sum(pair.on.steps for pair in pairs)} of {sum(pair.off.steps for pair in pairs)}   "
        f"off {sum(pair.off.sampled for pair in pairs) / sum(pair.seconds for pair in pairs):.0f} tokens/s"
    )


def said(ratios: list[float]) -> str:
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40]


def mixes() -> Iterator[tuple[str, str, Work]]:
    """Name, model and work of each line."""
    prompts = [tuple(calculator.task("train", index).messages) for index in range(64)]
    for name in ("sprout", "smollm2-135m"):
        yield f"siblings, {name}, a group of 8", name, siblings(name, 1, prompts, calculator.Calculator.tools)
    for live in (1, 2, 4):
        for temperature in (0.0, 0.4):
            yield f"quote, T = {temperature:g}, {live} live", "smollm2-135m", quote(live, temperature)
    for name in ("sprout", "smollm2-135m"):
        for live in (1, 8, 32):
            yield f"free, {name}, {live} live", name, free(name, live)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of each pair of engines")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.6, help="of the plain engine, in a round")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds of the plain engine before the first round")
    parser.add_argument("--same", action="store_true", help="no speculation on either side")
    parser.add_argument("--only", default="", help="lines whose name has this in it")
    parser.add_argument(
        "--cpu-time", action="store_true", help="gates weigh CPU time, where others use the machine: an indication"
    )
    parser.add_argument("--draft", default="", help="a draft head for the models of these lines, by name or folder")
    options = parser.parse_args()
    if options.cpu_time:
        CLOCK.append(time.process_time)
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "dtype": "float32"}))
    for name, model, work in mixes():
        if options.only in name:
            pairs = [
                measure(
                    Pair(name, model, work, options.draft, same=options.same, number=number),
                    options.rounds, options.seconds, options.warm_up,
                )
                for number in range(options.pairs)
            ]  # fmt: skip
            print(line(name, pairs), flush=True)


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        raise SystemExit(str(error)) from error
