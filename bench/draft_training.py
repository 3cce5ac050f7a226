"""What training a draft head is worth on sprout: accepted length on held-out episodes, and the four cells.

    python bench/draft_training.py [--kind eagle3] [--steps 400] [--updates 8] [--save FOLDER]
    python bench/draft_training.py --head sprout-eagle3       # only counts: the head that ships

1. Heads learn to draft K = 3 ids from two starts: *matched*, the policy's own calculator episodes, and *general*, as many ids
   that it said to other prompts. Accepted length (drafted ids that stand per verification, the id after them not counted)
   is what the engine counts at T = 1 on tasks of the eval split, every draft verified whole.
2. The policy is updated `--updates` times on those of its episodes that were right. *Fixed* heads stay as they are;
   *refreshed* ones take a few steps with each update, from the policy's own forward pass. Then all four are counted again.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from speculate_cpu import WORDS, Conversation, answered, drain, loaded
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrt.core import seeds
from agentrt.core.models import find_model
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.engine.model.config import load_config
from agentrt.engine.model.decoder import Decoder
from agentrt.engine.model.loader import hash_weights, read_weights
from agentrt.engine.runner import ModelRunner
from agentrt.engine.speculate.drafter import Drafter
from agentrt.engine.speculate.gate import OpenGate
from agentrt.engine.speculate.head import DraftHead
from agentrt.engine.speculate.head_config import HeadConfig, load_head_config
from agentrt.engine.speculate.load import read_head
from agentrt.engine.speculate.offline import Text, batches, new_config, write_head
from agentrt.engine.speculate.train import DraftTrainer, Pass, Report, fresh_weights, policy_pass
from agentrt.engine.step import EngineCore
from agentrt.env.chat.message import Message
from agentrt.env.task import Task
from agentrt_envs import calculator
from agentrt_envs.answer import grade

MODEL, LENGTH = "sprout", 3
TRAINING, HELD_OUT, PER_UPDATE = 96, 24, 12
"""Tasks to learn from, to count on, and of each update; four episodes each."""
MEMBERS = 4
REFRESH_STEPS = 4
POLICY_RATE = 1e-4


def make_core(policy: PreTrainedModel, trainer: DraftTrainer | None = None) -> EngineCore:
    """An engine with the policy's present weights, and with a head every draft of which is verified whole."""
    _, tokenizer, _ = loaded(MODEL)
    weights = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
    decoder = Decoder(load_config(find_model(MODEL)), weights)
    spec = EngineSpec(kv_tokens=32_768, host_tokens=0, speculate="auto" if trainer else "off", draft_length=LENGTH)
    runner, vocab_size = ModelRunner(decoder, spec), min(tokenizer.vocab_size, decoder.vocab_size)
    drafter = None
    if trainer:
        drafter = Drafter(DraftHead(trainer.config, trainer.state(), decoder), runner, spec, vocab_size)
    core = EngineCore(runner, spec, vocab_size=vocab_size, bytes_of=tokenizer.bytes_of, drafter=drafter)
    if core.speculator:
        core.speculator.gate = OpenGate()
        core.speculator.trial.note = lambda plain, spent: None  # type: ignore[method-assign]
        core.speculator.memory.add = lambda *texts, **more: None  # type: ignore[method-assign]  # nothing from text
    return core


def episodes(core: EngineCore, tasks: Sequence[Task], round_: int) -> list[tuple[Task, Conversation, str]]:
    """Whole episodes at T = 1, and what each said last."""
    _, _, renderer = loaded(MODEL)
    params, running, found = SamplingParams(stop_token_ids=tuple(renderer.stop_token_ids)), {}, []
    for index, task in enumerate(tasks):
        for member in range(MEMBERS):
            conversation = Conversation(core, seeds.derive(round_, index, member), task.id)
            prompt = renderer.prompt(task.messages, calculator.Calculator.tools)
            running[conversation.submit(prompt, params, 64)] = (task, conversation)
    while not core.is_idle:
        for sequence in core.step():
            task, conversation = running.pop(sequence)
            observed = answered(renderer, sequence, calculator.Calculator.tools)
            if observed and conversation.turns < 5:
                running[conversation.submit(observed, params, 64)] = (task, conversation)
                continue
            ids = sequence.tokens.token_ids[sequence.context_tokens :]
            turn = renderer.parse(ids, "stop", calculator.Calculator.tools)
            found.append((task, conversation, turn.message.content))
            core.close(conversation.lease)
    return found


def general_texts(core: EngineCore, count: int) -> list[Text]:
    """What the policy says to prompts that have nothing to do with its tasks."""
    _, _, renderer = loaded(MODEL)
    params, conversations = SamplingParams(stop_token_ids=tuple(renderer.stop_token_ids), min_tokens=32), []
    for index in range(count):
        about = random.Random(index).sample(WORDS, 4)
        conversation = Conversation(core, index, "")
        asked = Message("user", f"Write about {about[0]} and {about[1]}, a {about[2]} and the {about[3]}.")
        conversation.submit(renderer.prompt([asked], ()), params, 64)
        conversations.append(conversation)
    drain(core)
    return [text_of(conversation) for conversation in conversations]


def text_of(conversation: Conversation) -> Text:
    return Text(conversation.tokens.token_ids, conversation.tokens.mask)


class Counted(NamedTuple):
    """On episodes of the held-out tasks."""

    accepted: float
    """Drafted ids that stand per verification."""
    seconds: float
    """Of a sequence's verification, its share of a step."""
    tokens: int


def counted(policy: PreTrainedModel, trainer: DraftTrainer, tasks: Sequence[Task]) -> Counted:
    core, started = make_core(policy, trainer), time.perf_counter()
    episodes(core, tasks, 7)
    seconds = time.perf_counter() - started
    core.check()
    found = core.statistics(0)
    return Counted(found.tokens_accepted / found.verifications, seconds / found.verifications, found.tokens_sampled)


def learn(trainer: DraftTrainer, policy: PreTrainedModel, texts: Sequence[Text], steps: int) -> Report:
    report = Report(0.0, [], [])
    for step, batch in enumerate(islice(batches(texts, random.Random(1)), steps)):
        trainer.pace(step, steps)
        report = trainer.step(read_by(policy, batch, trainer.config), LENGTH)
    return report


@torch.no_grad()
def read_by(policy: Any, texts: Sequence[Text], config: HeadConfig) -> Pass:
    """What a trainer has anyway: hidden states and logits of the policy's own forward pass."""
    lengths = [len(text.token_ids) for text in texts]
    token_ids_BT, mask_BT = torch.zeros(2, len(texts), max(lengths), dtype=torch.long)
    for row, text in enumerate(texts):  # padding follows, so causality hides it
        token_ids_BT[row, : lengths[row]] = torch.tensor(text.token_ids)
        mask_BT[row, : lengths[row]] = torch.tensor(text.mask)
    out = policy(token_ids_BT, output_hidden_states=True, use_cache=False)
    embedding, output = policy.get_input_embeddings().weight, policy.get_output_embeddings().weight
    return policy_pass(token_ids_BT, mask_BT, out.hidden_states, out.logits, embedding, output, config)


def improve(policy: PreTrainedModel, optimizer: torch.optim.Optimizer, texts: Sequence[Text]) -> None:
    """One update of the policy on episodes that were right."""
    total = sum(text.mask.count(1) for text in texts)
    for text in texts:
        ids_1T = torch.tensor([text.token_ids.tolist()])
        mask_T = torch.tensor(text.mask.tolist()[1:], dtype=torch.float32)
        losses_T = F.cross_entropy(policy(ids_1T).logits[0, :-1], ids_1T[0, 1:], reduction="none")
        torch.autograd.backward((losses_T * mask_T).sum() / total)
    optimizer.step()
    optimizer.zero_grad()


def count_head(name: str) -> None:
    """Accepted length of a trained head on held-out tasks, and that of a draft which is always right."""
    policy: Any = AutoModelForCausalLM.from_pretrained(find_model(MODEL), dtype=torch.float32)
    head, tasks = find_model(name), [calculator.task("eval", index) for index in range(HELD_OUT)]
    config = load_head_config(head, "eagle3", load_config(find_model(MODEL)))
    trainer = DraftTrainer(config, read_head(head, config))
    played = [text_of(conversation) for _, conversation, _ in episodes(make_core(policy), tasks, 7)]
    found = counted(policy, trainer, tasks)
    print(
        f"{name}, {len(played)} episodes of {HELD_OUT} held-out tasks: accepted length {found.accepted:.2f} of {LENGTH}"
    )
    print(f"a draft that is always right: {ceiling(played):.2f}, for nothing stands beyond a turn's end")


def ceiling(texts: Sequence[Text]) -> float:
    """Accepted length if every drafted id stood: a turn's first id is not drafted, nor what would follow its last."""
    verifications = accepted = 0
    for text in texts:
        for turn in bytes(text.mask.tolist()).split(b"\0"):
            left = len(turn) - 1
            while left > 0:
                verifications += 1
                accepted += min(left, LENGTH)
                left -= LENGTH + 1
    return accepted / verifications


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("eagle3", "mtp"), default="eagle3")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--head", default="", help="count this head, by name or folder, beside the ceiling, and stop")
    parser.add_argument("--save", type=Path, help="write the matched head here before any update")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    if options.head:
        count_head(options.head)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """The four cells."""
    folder = find_model(MODEL)
    policy: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target = load_config(folder)
    config = new_config(options.kind, target, hash_weights(read_weights(folder, target)), target.vocab_size)
    plain = make_core(policy)
    tasks = [calculator.task("train", index) for index in range(TRAINING)]
    held_out = [calculator.task("eval", index) for index in range(HELD_OUT)]
    matched = [text_of(conversation) for _, conversation, _ in episodes(plain, tasks, 1)]
    sampled = sum(text.mask.count(1) for text in matched)
    general = general_texts(plain, sampled // 40)
    print(json.dumps({"kind": options.kind, "matched_ids": sampled, "steps": options.steps, "taps": config.taps}))
    embedding: Tensor = policy.get_input_embeddings().weight.detach()
    trainers, before = {}, {}  # type: dict[tuple[str, str], DraftTrainer], dict[str, Counted]
    for start, texts in (("matched", matched), ("general", general)):
        started = time.perf_counter()
        trainer = DraftTrainer(config, fresh_weights(config, embedding))
        learn(trainer, policy, texts, options.steps)
        seconds, before[start] = time.perf_counter() - started, counted(policy, trainer, held_out)
        length = before[start].accepted
        print(f"{start:<8} start: {seconds:4.0f} s of training, accepted length {length:.2f} of {LENGTH}", flush=True)
        for cell in ("fixed", "refreshed"):
            trainers[start, cell] = DraftTrainer(config, trainer.state(), rate=3e-4)
    if options.save:
        write_head(options.save, config, trainers["matched", "fixed"].state())
    drift(policy, trainers, options.updates)
    print(f"after {options.updates} updates of the policy, accepted length of {LENGTH}:")
    for start in ("matched", "general"):
        fixed, refreshed = (counted(policy, trainers[start, cell], held_out) for cell in ("fixed", "refreshed"))
        print(f"{start:<8} start: fixed {fixed.accepted:.2f}   refreshed {refreshed.accepted:.2f}", flush=True)
        to_come = options.updates * PER_UPDATE * fixed.tokens // len(held_out)
        trainer = trainers[start, "refreshed"]
        is_due = trainer.is_due(
            before[start].accepted, fixed.accepted, to_come, fixed.seconds, options.updates * REFRESH_STEPS
        )
        print(f"  of {to_come} ids to come, to refresh the head {'pays' if is_due else 'does not pay'}")


def drift(policy: PreTrainedModel, trainers: dict[tuple[str, str], DraftTrainer], updates: int) -> None:
    """Update the policy, and with it the heads that are to be refreshed."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=POLICY_RATE)
    for update in range(updates):
        tasks = [calculator.task("train", 1000 + PER_UPDATE * update + index) for index in range(PER_UPDATE)]
        played = episodes(make_core(policy), tasks, 100 + update)
        right = [text_of(one) for task, one, content in played if grade(content, task.data["answer"])]
        print(f"update {update + 1}: {len(right)} of {len(played)} episodes were right", flush=True)
        improve(policy, optimizer, right)
        texts = [text_of(one) for _, one, _ in played]
        for (_, cell), trainer in trainers.items():
            for batch in islice(batches(texts, random.Random(update)), REFRESH_STEPS if cell == "refreshed" else 0):
                trainer.step(read_by(policy, batch, trainer.config), LENGTH)


if __name__ == "__main__":
    main()
