"""`RemoteEngine` over a real vLLM on the CPU. Opt-in: `AGENTRT_VLLM=path/to/vllm's/python pytest tests/peers`.

Needs `agentrt pull smollm2-135m`. Starting vLLM takes minutes, so all checks share one server.
"""

import math
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest

from agentrt.core.errors import UsageError
from agentrt.core.models import find_model
from agentrt.core.spec import SamplingParams
from agentrt.core.tokenizer import Tokenizer
from agentrt.engine.remote.engine import RemoteEngine
from agentrt.env.chat.choose import renderer_for
from agentrt.env.chat.message import Message

PYTHON = os.environ.get("AGENTRT_VLLM", "")
START_SECONDS = 900.0
BLOCK = 128
"""Ids in a block of vLLM's cache on a CPU; it shares whole blocks only."""

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON, reason="AGENTRT_VLLM is not set"),
]


@pytest.fixture
def anyio_backend() -> str:
    """One event loop is enough here: each turn takes seconds."""
    return "asyncio"


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return find_model("smollm2-135m")
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "smollm2-135m",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager",
        "--max-num-seqs", "8", "--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details",
    ]  # fmt: skip
    ours = ("OMP_", "GOMP_", "KMP_", "MKL_", "NUMBA_", "PYTHONPATH")  # our engine's choices are not a peer's
    own = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    variables = own | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=variables) as server:
        try:
            _wait(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _wait(health: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    import time

    for _ in range(int(START_SECONDS)):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(health).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    pytest.fail(f"vLLM did not start: {log.read_text()[-3000:]}")


async def test_two_turns_of_exact_ids(url: str, folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    chat = renderer_for(folder, tokenizer)
    params = SamplingParams(temperature=0.7, top_p=0.9, stop_token_ids=chat.stop_token_ids)
    async with RemoteEngine([url], tokenizer) as engine:
        print("\n" + engine.lines[0])
        assert engine.info.logprobs_of == "sampled_distribution"
        assert engine.servers[0].belief.room % BLOCK == 0, "its metrics say how many blocks it has"
        with engine.session(seed=1) as session:
            question = "Name three colours, and say why you like each of them. " + "Think of the sea and the sky. " * 30
            prompt = chat.prompt([Message("user", question)])
            first = await session.sample(prompt, params, max_tokens=40)
            ended = first.token_ids[-1] in chat.stop_token_ids
            joining = chat.join([Message("user", "And a fourth?")], ended=ended)
            second = await session.sample(joining, params, max_tokens=20)
            expected = [*prompt, *first.token_ids, *joining, *second.token_ids]
            assert session.tokens.token_ids.tolist() == expected
            print(
                [tokenizer.decode(one.token_ids) for one in (first, second)], first.cached_tokens, second.cached_tokens
            )
        assert second.cached_tokens >= BLOCK, "the prefix cache was not used"
        assert all(math.isfinite(value) and value <= 0 for value in session.tokens.logprobs)
        with engine.session(seed=1) as again:
            assert (await again.sample(prompt, params, max_tokens=40)).token_ids == first.token_ids


async def test_a_turn_that_is_left_ends_on_the_server(url: str, folder: Path) -> None:
    async with RemoteEngine([url], Tokenizer.load(folder)) as engine, httpx.AsyncClient() as http:
        with engine.session() as session:
            with anyio.move_on_after(1.0):
                await session.sample([1, 2, 3], SamplingParams(), max_tokens=900)
            assert 3 <= len(session.tokens) < 900
        await anyio.sleep(1.0)
        lines = (await http.get(f"{url}/metrics")).text.splitlines()
        [running] = [float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running")]
        assert running == 0
