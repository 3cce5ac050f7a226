"""A server on a loopback socket in the test's own loop, with OpenAI's client before it."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from openai import AsyncOpenAI

from agentrt.core.protocol import Engine
from agentrt.core.records import EpisodeRecord
from agentrt.core.tokenizer import Tokenizer
from agentrt.env.chat.chatml import ChatML
from agentrt.env.chat.renderer import Family
from agentrt.serve.app import Served
from agentrt.serve.endpoint import Endpoint
from agentrt.serve.recording import Recordings
from agentrt.serve.server import listening, serving
from agentrt.testing.tokenizer import byte_tokenizer

QWEN = Path(__file__).parent.parent / "env" / "chat" / "qwen_slice.json"
BYTES = ChatML(byte_tokenizer())
ROOM = 4096


class Up(NamedTuple):
    """A server that runs."""

    url: str
    client: AsyncOpenAI
    served: Served
    records: list[EpisodeRecord]
    """Of the sessions that have ended."""

    def session(self, name: str) -> AsyncOpenAI:
        """A client whose base URL is that of a session."""
        return self.client.with_options(base_url=f"{self.url}/sessions/{name}/v1")


@asynccontextmanager
async def standing(
    engine: Engine, renderer: Family = BYTES, *, keys: Mapping[str, str] | None = None, key: str = "none"
) -> AsyncIterator[Up]:
    """A server over `engine`, which the caller has entered."""
    records: list[EpisodeRecord] = []
    endpoint = Endpoint(engine, renderer, model="m", room=ROOM)
    with (
        Recordings(engine, renderer, records.append, seed=0, max_sessions=100) as recordings,
        listening("127.0.0.1", 0) as sock,
    ):
        served = Served(endpoint, recordings, keys or {})
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with (
            serving(served.app(), sock),
            AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30) as client,
        ):
            yield Up(url, client, served, records)


@cache
def qwen() -> ChatML:
    """ChatML over a slice of Qwen's vocabulary, with the two entries more that C58 names."""
    definition = json.loads(QWEN.read_text(encoding="utf-8"))
    definition["model"]["vocab"] |= {"Hi": 13048, "ĠðŁ": 11162}
    return ChatML(Tokenizer(json.dumps(definition)))
