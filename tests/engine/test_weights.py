"""New weights from every kind of source: what samples afterwards is what a fresh engine samples, or nothing has changed."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrt.core.errors import WeightsError
from agentrt.core.models import find_model
from agentrt.core.protocol import BroadcastWeights, Completion, SharedWeights, UpdateMode, WeightSource
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.kv.lease import State
from agentrt.engine.local import local_engine
from agentrt.engine.runner import ModelRunner
from agentrt.engine.service import EngineService
from agentrt.engine.weights import BUCKET_ELEMENTS, buckets, shared_weights

SPROUT = find_model("sprout")
SPEC = EngineSpec(kv_tokens=4096)
SMALL = EngineSpec(kv_tokens=128, host_tokens=4096)
"""Room for one conversation of the tests on the device, and for all on the host."""
PROMPT = list(range(40, 104))


@pytest.fixture(scope="module")
def changed() -> dict[str, Tensor]:
    """Weights of sprout after some training, as it were."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor.float() + 0.01 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(SPROUT / "model.safetensors").items()
    }


@pytest.fixture(scope="module")
def folder(changed: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(SPROUT, path)
    save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
    return path


def engine(folder: Path = SPROUT, spec: EngineSpec = SPEC) -> EngineService:
    return local_engine(folder, Tokenizer.load(SPROUT), spec)


async def turn(service: EngineService, salt: str = "") -> Completion:
    with service.session(seed=1, salt=salt) as session:
        return await session.sample(PROMPT, SamplingParams(temperature=0.9), max_tokens=12)


def close(one: Completion, other: Completion) -> None:
    assert one.token_ids == other.token_ids
    assert one.raw_logprobs.tolist() == pytest.approx(other.raw_logprobs.tolist(), abs=1e-5)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Completion:
    async def main() -> Completion:
        async with engine(folder) as fresh:
            return await turn(fresh)

    return anyio.run(main)


@pytest.mark.parametrize("kind", ["tensors", "tied", "folder", "shared"])
def test_c46_after_an_update_it_is_as_a_fresh_engine(
    kind: str, changed: dict[str, Tensor], folder: Path, expected: Completion
) -> None:
    """Rows 1 and 32 of the bug table: also where the whole prompt was cached, and when it is done twice."""

    async def main() -> None:
        async with engine() as service:
            before = [await turn(service), await turn(service)]
            assert before[1].cached_tokens == 48
            await service.update_weights(1, {name: tensor + 1 for name, tensor in changed.items()})
            if kind == "shared":
                with shared_weights(changed) as source:
                    await service.update_weights(2, source)
            else:
                await service.update_weights(2, folder if kind == "folder" else given)
            after = await turn(service)
            assert after.cached_tokens == 0
            close(after, expected)
            close(await turn(service), expected)
            assert before[0].raw_logprobs != after.raw_logprobs

    given: dict[str, Tensor] = dict(changed)
    if kind == "tied":
        given["lm_head.weight"] = given["model.embed_tokens.weight"]
    anyio.run(main)


def test_c46_a_conversation_pinned_in_its_tool_goes_on_as_on_a_fresh_engine(
    changed: dict[str, Tensor], folder: Path
) -> None:
    params = SamplingParams(temperature=0.9)

    async def main() -> None:
        spec = EngineSpec(kv_tokens=4096, kv_policy="ttl", kv_ttl_seconds=600.0)
        async with engine(spec=spec) as service, engine(folder) as fresh:
            with service.session(seed=1) as session, fresh.session(seed=1, turn=1) as other:
                await session.sample(PROMPT, params, max_tokens=12)
                session.pause("tool")
                while session.lease.state is not State.PINNED:  # noqa: ASYNC110 (the engine tells nobody)
                    await anyio.sleep(0.01)
                await service.update_weights(1, changed)
                ids = [*session.tokens.token_ids, 41]
                after = await session.sample([41], params, max_tokens=12)
                assert (after.cached_tokens, after.kv.restored_tokens, after.oldest_kv) == (0, 0, 1)
                close(after, await other.sample(ids, params, max_tokens=12))

    anyio.run(main)


@pytest.mark.parametrize("mode", ["recompute", "keep", "drain", "abort_resume"])
def test_c46_and_row_6_a_conversation_parked_on_the_host(
    mode: UpdateMode, changed: dict[str, Tensor], folder: Path
) -> None:
    """Its pages on the host are of the old policy: only mode keep restores them, and to it alone.

    The same prompt in a new session finds nothing on either tier, and what it samples is a fresh engine's.
    """
    params = SamplingParams(temperature=0.9)

    async def main() -> None:
        async with engine(spec=SMALL) as service, engine(folder) as fresh:
            with service.session(seed=1) as session, fresh.session(seed=1, turn=1) as other:
                await session.sample(PROMPT, params, max_tokens=12)
                session.pause("tool")
                with service.session(seed=2) as filler:
                    await filler.sample(PROMPT[::-1], params, max_tokens=60)
                    assert session.lease.state is State.PARKED
                    await service.update_weights(1, changed, mode)
                stranger = await turn(service)
                assert (stranger.cached_tokens, stranger.kv.restored_tokens, stranger.oldest_kv) == (0, 0, 1)
                close(stranger, await turn(fresh))
                ids = [*session.tokens.token_ids, 41]
                after = await session.sample([41], params, max_tokens=12)
                if mode == "keep":
                    assert (after.cached_tokens, after.kv.restored_tokens, after.oldest_kv) == (64, 64, 0)
                else:
                    assert (after.kv.restored_tokens, after.oldest_kv) == (0, 1)
                    close(after, await other.sample(ids, params, max_tokens=12))

    anyio.run(main)


def test_weights_in_fp16_are_rounded_anew(changed: dict[str, Tensor], folder: Path, expected: Completion) -> None:
    """A trainer's float32 under `weights = "fp16"`: updated twice, it is as an engine that loaded them so, bit by bit."""
    spec = EngineSpec(kv_tokens=4096, weights="fp16")

    async def main() -> None:
        async with engine(folder, spec) as fresh, engine(SPROUT, spec) as service:
            await service.update_weights(1, {name: tensor + 1 for name, tensor in changed.items()})
            await service.update_weights(2, changed)
            new, loaded = await turn(service), await turn(fresh)
            assert (new.token_ids, new.logprobs) == (loaded.token_ids, loaded.logprobs)
            assert new.raw_logprobs != expected.raw_logprobs  # those of the same weights in float32

    anyio.run(main)


def test_row_32_weights_in_8_bits_are_rounded_anew(changed: dict[str, Tensor], folder: Path) -> None:
    """Updated twice, an engine with int8 weights and KV is as one that has loaded the second weights, bit by bit."""
    spec = EngineSpec(kv_tokens=4096, weights="int8", kv="int8")

    async def main() -> None:
        async with engine(folder, spec) as fresh, engine(SPROUT, spec) as service:
            assert fresh.info.quantized == ("weights=int8", "kv=int8")
            old = await turn(service)
            await service.update_weights(1, {name: tensor + 1 for name, tensor in changed.items()})
            await service.update_weights(2, changed)
            new = await turn(service)
            assert (new.token_ids, new.logprobs) == ((after := await turn(fresh)).token_ids, after.logprobs)
            assert new.raw_logprobs != old.raw_logprobs

    anyio.run(main)


def test_the_trainer_may_go_on_changing_its_tensors(changed: dict[str, Tensor], expected: Completion) -> None:
    async def main() -> None:
        async with engine() as service:
            given = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in changed.items()}
            await service.update_weights(1, given)
            for tensor in given.values():
                tensor.data.zero_()
            close(await turn(service), expected)

    anyio.run(main)


SENDER = """
import sys, torch, torch.distributed as dist
from safetensors.torch import load_file
from agentrt.core.errors import WeightsError
from agentrt.engine.weights import broadcast_weights
dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=2)
for attempt in sys.argv[3:]:
    try:
        broadcast_weights(load_file(sys.argv[2]), timeout_seconds=60)
        print("sent")
    except WeightsError as error:
        print(error)
"""


@contextmanager
def trainer_that_sends(folder: Path, *attempts: str) -> Iterator[subprocess.Popen[str]]:
    """A trainer in another process, rank 0, that sends for each attempt; this process is rank 1."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", SENDER, address, str(folder / "model.safetensors"), *attempts]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        torch.distributed.init_process_group("gloo", init_method=address, rank=1, world_size=2)
        try:
            yield trainer
        finally:
            torch.distributed.destroy_process_group()
            trainer.kill()


def test_row_43_a_broadcast_changes_all_ranks_or_none(
    folder: Path, expected: Completion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time this rank fails after it has received: it keeps its version, and the sender is told. Then it works."""

    async def main() -> None:
        async with engine() as service:
            old = await turn(service)
            with monkeypatch.context() as patched:
                patched.setattr(service.core.runner, "_stage", failing)
                with pytest.raises(WeightsError, match="cannot be used: no memory"):
                    await service.update_weights(1, BroadcastWeights(source=0))
            assert service.statistics().version == 0
            close(await turn(service), old)
            await service.update_weights(1, BroadcastWeights(source=0))
            assert service.statistics().version == 1
            close(await turn(service), expected)

    def failing(weights: Any) -> Any:
        raise MemoryError("no memory")

    with trainer_that_sends(folder, "first", "second") as trainer:
        anyio.run(main)
        assert trainer.stdout is not None
        said = trainer.stdout.read().splitlines()
    assert said == ["an engine could not take the weights; all keep their version", "sent"]


def test_row_29_a_broadcast_beside_running_requests_and_one_that_never_comes(
    folder: Path, expected: Completion
) -> None:
    """Steps go on while weights are received. The second broadcast is never sent: that ends, and nothing has changed."""
    params = SamplingParams(temperature=0.9, min_tokens=300)

    async def main() -> None:
        async with engine() as service:
            running = list[Completion]()

            async def long_turn() -> None:
                with service.session(seed=2) as session:
                    running.append(await session.sample(PROMPT, params, max_tokens=300))

            async with anyio.create_task_group() as group:
                group.start_soon(long_turn)
                await service.update_weights(1, BroadcastWeights(source=0))
            assert list(dict.fromkeys(running[0].versions)) in ([0, 1], [1])
            assert len(running[0].token_ids) == 300
            with pytest.raises(WeightsError, match="did not take part"):
                await service.update_weights(2, BroadcastWeights(source=0, timeout_seconds=1.0))
            assert service.statistics().version == 1
            close(await turn(service), expected)

    with trainer_that_sends(folder, "only"):
        anyio.run(main)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda w: w.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight is torch.float32 \(3,\)"),
        (lambda w: w.update({"model.norm.weight": torch.ones(192).int()}), "is torch.int32"),
        (lambda w: w.update({"score.weight": torch.ones(3)}), "the model has no score.weight"),
        (lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1}), "lm_head.weight differs from"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change: Any, words: str, changed: dict[str, Tensor]) -> None:
    given = dict(changed)
    change(given)
    refuse(given, words)


@pytest.mark.parametrize(
    ("source", "words"), [(Path("/nowhere"), "has no safetensors"), ("sprout", "weights come as tensors by name")]
)
def test_a_source_that_is_none_is_refused(source: Any, words: str) -> None:
    refuse(source, words)


def test_a_torn_file_changes_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1000])
    refuse(tmp_path, "cannot be read")


def test_shared_memory_that_is_gone_changes_nothing(changed: dict[str, Tensor]) -> None:
    with shared_weights(changed) as source:
        pass
    refuse(source, "cannot be opened")


def test_shared_memory_is_never_read_as_objects(changed: dict[str, Tensor]) -> None:
    """To copy those would follow what lies in the memory as pointers, and end the process."""
    with shared_weights(changed) as source:
        tensors = {name: ("O", shape, start) for name, (_, shape, start) in source.tensors.items()}
        refuse(SharedWeights(source.name, tensors), "is not as described: weights are floats, not O")


def test_what_cannot_be_staged_is_refused(changed: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    refuse({name: tensor.numpy() for name, tensor in changed.items()}, "cannot be used: AttributeError")

    def full(self: ModelRunner, weights: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(ModelRunner, "_stage", full)
    refuse(changed, r"the new weights cannot be used: MemoryError\('no room'\)")


def refuse(source: WeightSource, words: str) -> None:
    async def main() -> None:
        async with engine() as service:
            old = await turn(service)
            with pytest.raises(WeightsError, match=words):
                await service.update_weights(1, source)
            close(await turn(service, salt="apart"), old)
            assert service.statistics().version == 0

    anyio.run(main)


def test_buckets_are_the_same_on_every_rank() -> None:
    shapes = {"b": (BUCKET_ELEMENTS // 2,), "a": (BUCKET_ELEMENTS // 2, 1), "d": (2 * BUCKET_ELEMENTS,), "c": (1,)}
    assert buckets(shapes) == [["a", "b"], ["c", "d"]]
    assert buckets(dict(reversed(shapes.items()))) == buckets(shapes)
    assert buckets({}) == []
