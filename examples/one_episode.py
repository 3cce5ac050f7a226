"""One episode from Python, and every token of it: who said it, and with which logprob.

python examples/one_episode.py [ENVIRONMENT] [MODEL]
"""

import sys

import anyio

from agentrt import RunSpec
from agentrt.core.models import find_model
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.local import local_engine
from agentrt.env import registry
from agentrt.env.chat.choose import renderer_for
from agentrt.rollout.order import chosen_tasks
from agentrt.rollout.play import run_episode
from agentrt.rollout.setup import Setup


async def main(*arguments: str) -> None:
    environment, model = (*arguments, *("calculator", "sprout")[len(arguments) :])
    spec = RunSpec(environment=environment, model=model, seed=3)
    folder = find_model(model)
    tokenizer = Tokenizer.load(folder)
    setup = Setup(
        environment=registry.load(environment),
        engine=local_engine(folder, tokenizer, spec.engine),
        renderer=renderer_for(folder, tokenizer),
        spec=spec,
    )
    async with setup.engine:
        [task] = await chosen_tasks(setup.environment, "eval", 1, spec.seed)
        record = await run_episode(setup, task)

    print(f"{record.task_id}: reward {record.reward}, ended by {record.stop_reason}\n")
    for message in record.messages:
        print(f"{message['role']:>9}: {message['content']}")
        for call in message.get("calls", ()):
            print(f"{'':>9}  calls {call['name']} {call['arguments']}")
    [branch] = record.branches
    print("\nsampled tokens (mask 1) and their logprobs:")
    for token_id, bit, logprob in zip(branch.token_ids, branch.mask, branch.logprobs, strict=True):
        if bit:
            print(f"{tokenizer.decode([token_id])!r:>14} {logprob:8.3f}")


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
