"""Weights that come by HTTP: what samples afterwards is what a fresh engine samples, and nothing is lost meanwhile."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from standing import BYTES, ROOM, standing
from torch import Tensor

from agentrt.core.errors import WeightsError
from agentrt.core.models import find_model
from agentrt.core.protocol import BroadcastWeights, Completion, Engine, UpdateMode
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.local import local_engine
from agentrt.engine.remote.engine import RemoteEngine
from agentrt.engine.remote.spawn import spawned
from agentrt.engine.service import EngineService
from agentrt.serve.app import ANY_SESSION, Served
from agentrt.serve.endpoint import Endpoint
from agentrt.serve.recording import Recordings
from agentrt.serve.server import listening, serving
from agentrt.serve.updates import Updates

pytestmark = pytest.mark.anyio
SPROUT = find_model("sprout")
TOKENIZER = Tokenizer.load(SPROUT)
PROMPT = list(range(40, 104))


@pytest.fixture(scope="module")
def changed() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor.float() + 0.01 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(SPROUT / "model.safetensors").items()
    }


@pytest.fixture(scope="module")
def root(changed: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, of which `step-1` is one."""
    path = tmp_path_factory.mktemp("checkpoints").resolve()
    shutil.copytree(SPROUT, path / "step-1")
    save_file(changed, path / "step-1" / "model.safetensors", metadata={"format": "pt"})
    return path


def sprout(folder: Path = SPROUT) -> EngineService:
    return local_engine(folder, TOKENIZER, EngineSpec(kv_tokens=8192))


@asynccontextmanager
async def taking(engine: Engine, root: Path, keys: dict[str, str] | None = None) -> AsyncIterator[str]:
    """The URL of a server that takes weights from a folder."""
    endpoint = Endpoint(engine, BYTES, model="sprout", room=ROOM)
    with (
        Recordings(engine, BYTES, lambda record: None, seed=0, max_sessions=10) as recordings,
        listening("127.0.0.1", 0) as sock,
    ):
        served = Served(endpoint, recordings, keys or {}, Updates(engine, root))
        async with serving(served.app(), sock):
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"


async def turn(engine: Engine, seed: int = 1) -> Completion:
    with engine.session(seed=seed) as session:
        return await session.sample(PROMPT, SamplingParams(temperature=0.9), max_tokens=12)


def close(one: Completion, other: Completion) -> None:
    assert one.token_ids == other.token_ids
    assert one.raw_logprobs.tolist() == pytest.approx(other.raw_logprobs.tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", ["folder", "tensors"])
async def test_row_38_after_an_update_it_is_as_a_fresh_engine(
    kind: str, changed: dict[str, Tensor], root: Path
) -> None:
    """Row 1 over HTTP: also where the whole prompt was cached before."""
    async with sprout(root / "step-1") as fresh:
        expected = await turn(fresh)
    async with sprout() as engine, taking(engine, root) as url, RemoteEngine([url], TOKENIZER) as remote:
        assert "updates: weights" in remote.lines[0]
        before = [await turn(remote), await turn(remote)]
        assert before[1].cached_tokens == 48
        report = await remote.update_weights(1, root / "step-1" if kind == "folder" else changed)
        assert (report.version, report.mode) == (1, "recompute")
        after = await turn(remote)
        assert after.cached_tokens == 0
        assert set(after.versions) == {1}
        close(after, expected)
        assert before[0].raw_logprobs != after.raw_logprobs
        assert remote.statistics().version == engine.statistics().version == 1
    engine.core.check()


@pytest.mark.parametrize("mode", ["recompute", "keep", "drain", "abort_resume"])
async def test_row_38_updates_one_after_the_other_lose_no_request(mode: UpdateMode, changed: dict[str, Tensor]) -> None:
    """Row 28 over HTTP: more requests than there is room for, so that some wait, and sixty updates without a pause."""
    done = dict[int, Completion]()
    async with (
        local_engine(SPROUT, TOKENIZER, EngineSpec(kv_tokens=512, max_batch=4)) as engine,
        taking(engine, Path("/")) as url,
        RemoteEngine([url], TOKENIZER) as remote,
    ):

        async def one(seed: int) -> None:
            done[seed] = await turn(remote, seed)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for seed in range(24):
                    group.start_soon(one, seed)
                for version in range(1, 61):
                    await remote.update_weights(version, changed, mode)
    assert len(done) == 24
    assert all(len(each.token_ids) == 12 or each.finish_reason == "stop" for each in done.values())
    engine.core.check()


async def test_a_server_that_takes_none_says_how() -> None:
    async with sprout() as engine, standing(engine) as up, RemoteEngine([up.url], TOKENIZER) as remote:
        with pytest.raises(WeightsError, match="agentrt serve --weights FOLDER"):
            await remote.update_weights(1, {})
        assert await answer(up.url, {"version": 1, "folder": "x"}) == (
            404, "this server takes no weights; start it with --weights FOLDER",
        )  # fmt: skip


async def answer(url: str, body: Any, key: str = "") -> tuple[int, str]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{url}/weights", json=body, headers=headers)
    return reply.status_code, reply.json()["error"]["message"]


async def test_what_cannot_be_taken_changes_nothing(root: Path, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (root / "link").symlink_to(tmp_path)
    try:
        async with sprout() as engine, taking(engine, root) as url:
            before = await turn(engine)
            outside = f"the folder is outside of {root}, from which alone weights come"
            assert await answer(url, {"version": 1, "folder": "../other"}) == (400, outside)
            assert await answer(url, {"version": 1, "folder": str(tmp_path)}) == (400, outside)
            assert await answer(url, {"version": 1, "folder": "link"}) == (400, outside)
            assert await answer(url, {"version": 1}) == (400, "give one of folder, memory and device_memory")
            status, words = await answer(url, {"version": 1, "folder": "nothing"})
            nothing = f"{root / 'nothing'} has no safetensors; give the folder that the weights are in"
            assert (status, words) == (400, nothing)
            status, words = await answer(url, {"version": 1, "folder": "step-1", "mod": "keep"})
            assert status == 400
            assert "mod" in words
            status, _ = await answer(url, {"version": 1, "memory": {"name": "none", "tensors": {}}})
            assert status == 400
            assert engine.statistics().version == 0
            close(await turn(engine), before)
            async with RemoteEngine([url], TOKENIZER) as remote:
                with pytest.raises(WeightsError, match=r"1 of 1 servers keep their weights: .* has no safetensors"):
                    await remote.update_weights(1, root / "nothing")
                with pytest.raises(WeightsError, match="not a broadcast"):
                    await remote.update_weights(1, BroadcastWeights())
    finally:
        (root / "link").unlink()


async def test_a_key_for_one_session_gives_no_weights(root: Path) -> None:
    async with sprout() as engine, taking(engine, root, {"all": ANY_SESSION, "one": "s1"}) as url:
        body = {"version": 1, "folder": "step-1"}
        assert await answer(url, body) == (401, "the API key is missing or wrong")
        assert (await answer(url, body, "one"))[0] == 403
        async with httpx.AsyncClient() as client:
            reply = await client.post(f"{url}/weights", json=body, headers={"authorization": "Bearer all"})
        assert reply.json()["version"] == engine.statistics().version == 1


async def test_engines_in_processes_of_their_own_take_tensors_of_the_trainer(
    changed: dict[str, Tensor], root: Path
) -> None:
    async with sprout(root / "step-1") as fresh:
        expected = await turn(fresh)
    with spawned("sprout", EngineSpec(engines=2, kv_tokens=4096), "key") as urls:
        async with RemoteEngine(urls, TOKENIZER, api_key="key") as remote:
            await remote.update_weights(1, changed)
            assert [server.version for server in remote.servers] == [1, 1]
            for server in remote.servers:
                only = RemoteEngine([server.url], TOKENIZER, api_key="key")
                async with only:
                    after = await turn(only)  # which ends with a turn's end: the server has sprout's own renderer
                assert after.token_ids == expected.token_ids[: len(after.token_ids)]
                assert after.raw_logprobs.tolist() == pytest.approx(
                    expected.raw_logprobs.tolist()[: len(after.token_ids)], abs=1e-5
                )
