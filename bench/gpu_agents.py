"""Conversations with simulated tools over the real engine on a GPU, under each KV policy, for bench/gpu_check.py."""

import time
from collections.abc import Iterator
from typing import get_args

import anyio
from gpu_model import DRY, Line, Peaks, device_runner, model_config, random_decoder

from agentrt.core.protocol import EngineInfo
from agentrt.core.seeds import derive
from agentrt.core.spec import EngineSpec, KVPolicy, SamplingParams
from agentrt.engine.model.decoder import Decoder
from agentrt.engine.service import EngineService
from agentrt.engine.step import EngineCore

CONVERSATIONS, TURNS = (3, 2) if DRY else (256, 4)
PROMPT, OBSERVED, SAMPLED = (20, 4, 3) if DRY else (512, 128, 48)
"""Ids of a prompt, of what a tool brings, and of a turn."""
NEEDED = CONVERSATIONS * (PROMPT + TURNS * (OBSERVED + SAMPLED))
TOOL_SECONDS = (0.01,) if DRY else (0.05, 0.05, 0.2, 0.2, 0.5, 2.0)
PHIS: tuple[float, ...] = (1.0, 3.0)
"""Ids that all conversations need at their end, by ids that fit the device."""
ENOUGH_SECONDS = 120.0
"""After so long no other policy is begun."""


def agents(_: Peaks) -> Iterator[Line]:
    """How long all conversations take, and what had to be computed again."""
    decoder, started = random_decoder(model_config("0.6B", toy=DRY)), time.perf_counter()
    for phi in PHIS:
        for policy in get_args(KVPolicy):
            what = f"0.6B: {CONVERSATIONS} conversations, {policy}, phi {phi:.0f}"
            if time.perf_counter() - started > ENOUGH_SECONDS:
                yield Line(what, "left out: no time")
                continue
            spec = EngineSpec(
                device=str(decoder.device), kv_tokens=int(NEEDED / phi), host_tokens=2 * NEEDED, kv_policy=policy,
                max_batch=CONVERSATIONS, step_tokens=max(4096, CONVERSATIONS),
            )  # fmt: skip
            seconds, again = anyio.run(play, decoder, spec)
            yield Line(what, f"{seconds:.1f} s, {again} ids computed again")


async def play(decoder: Decoder, spec: EngineSpec) -> tuple[float, int]:
    """All conversations at once, after as many others, for which kernels are compiled and graphs captured."""
    vocab_size = decoder.vocab_size
    core = EngineCore(device_runner(decoder, spec), spec, vocab_size=vocab_size, bytes_of=lambda _: b"")
    info = EngineInfo(
        model="random", model_hash="", vocab_size=vocab_size, context_length=decoder.config.context_length
    )
    async with EngineService(core, info) as engine:
        await converse_all(engine, CONVERSATIONS)
        before, started = engine.statistics().tokens_reprefilled, time.perf_counter()
        await converse_all(engine, 0)
        return time.perf_counter() - started, engine.statistics().tokens_reprefilled - before


async def converse_all(engine: EngineService, first: int) -> None:
    """The conversations from this number on."""
    async with anyio.create_task_group() as group:
        for which in range(first, first + CONVERSATIONS):
            group.start_soon(converse, engine, which)


async def converse(engine: EngineService, which: int) -> None:
    """One of them; what it is told and how long its tools take follow from its number."""
    with engine.session(seed=which) as session:
        ids = [derive(which, place) % 60 for place in range(PROMPT)]
        for turn in range(TURNS):
            await session.sample(ids, SamplingParams(), max_tokens=SAMPLED)
            session.pause("tool", deadline=10.0)
            await anyio.sleep(TOOL_SECONDS[derive(which, turn, 7) % len(TOOL_SECONDS)])
            session.resume()
            ids = [derive(which, turn, place) % 60 for place in range(OBSERVED)]
