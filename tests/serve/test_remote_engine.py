"""`RemoteEngine` over our own servers: what is sampled there is, bit for bit, what an engine in this process samples."""

import anyio
import pytest
from standing import BYTES, standing
from steady import toy_engine

from agentrt.core.protocol import Engine
from agentrt.core.spec import SamplingParams
from agentrt.engine.remote.engine import RemoteEngine

pytestmark = pytest.mark.anyio
PARAMS = SamplingParams(temperature=0.8, top_k=20, stop=("zz",))


async def conversation(engine: Engine, seed: int, into: dict[int, object]) -> None:
    """Three turns and a fork's."""
    with engine.session(seed=seed) as session:
        for turn in range(3):
            done = await session.sample([turn + 1, seed, 7], PARAMS, max_tokens=12)
        with session.fork() as fork:
            other = await fork.sample([9], PARAMS, max_tokens=12)
    tokens = fork.tokens
    into[seed] = (
        tokens.token_ids.tolist(), tokens.mask.tolist(), tokens.logprobs.tolist(), tokens.versions.tolist(),
        done.raw_logprobs.tolist(), done.kept_logmass.tolist(), done.seed, other.seed, done.finish_reason,
    )  # fmt: skip


async def test_two_servers_give_what_one_engine_here_gives() -> None:
    here: dict[int, object] = {}
    there: dict[int, object] = {}
    async with toy_engine(seconds=0) as engine:
        for seed in range(6):
            await conversation(engine, seed, here)
    async with (
        toy_engine(seconds=0) as first,
        toy_engine(seconds=0) as second,
        standing(first) as one,
        standing(second) as two,
    ):
        async with RemoteEngine([one.url, two.url], BYTES.tokenizer) as remote:
            assert (
                "agentrt, m, context 4096, logprobs of sampled_distribution, versions by the server" in remote.lines[0]
            )
            async with anyio.create_task_group() as group:
                for seed in range(6):
                    group.start_soon(conversation, remote, seed, there)
        assert min(engine.statistics().steps for engine in (first, second)) > 10, "one of them had nothing to do"
    assert there == here
    for core in (first.core, second.core):
        core.check()


async def test_a_cancelled_turn_ends_on_the_server_and_keeps_what_came() -> None:
    async with toy_engine() as engine, standing(engine) as up, RemoteEngine([up.url], BYTES.tokenizer) as remote:
        with remote.session() as session:
            with anyio.move_on_after(0.2):
                await session.sample([1, 2], SamplingParams(), max_tokens=3000)
            assert 2 < len(session.tokens) < 3000
        for _ in range(100):
            if not engine.statistics().running:
                break
            await anyio.sleep(0.01)
        assert engine.statistics().running == 0
