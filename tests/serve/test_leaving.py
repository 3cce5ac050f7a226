"""Clients that go away (C55): no ghost request, slots and pages back, and a session that goes on from what was said."""

from collections.abc import Callable
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from openai import APITimeoutError, InternalServerError
from standing import BYTES, Up, standing
from steady import toy_engine

from agentrt.core.errors import EngineFailure
from agentrt.core.protocol import EngineStatistics
from agentrt.core.records import joined
from agentrt.core.spec import SamplingParams
from agentrt.engine.batch import Batch
from agentrt.engine.service import EngineService
from agentrt.env.chat.message import Message
from agentrt.serve.choice import Choice, Delta
from agentrt.serve.conversation import Conversation
from agentrt.serve.view import TextView

pytestmark = pytest.mark.anyio
ASK: Any = [{"role": "user", "content": "go on"}]
PARAMS = SamplingParams()
LONG: dict[str, Any] = {"model": "m", "messages": ASK, "max_tokens": 3000}


async def until(is_so: Callable[[], bool], seconds: float = 1.0) -> None:
    """Wait for it, or for `seconds`."""
    for _ in range(int(seconds * 100)):
        if is_so():
            break
        await anyio.sleep(0.01)


async def quiet(engine: EngineService) -> EngineStatistics:
    """The engine's statistics once nothing runs in it and no page is held, or after a second."""

    def is_quiet() -> bool:
        now = engine.statistics()
        return not (now.running or now.waiting) and free_pages(now) == now.pages_total

    await until(is_quiet)
    return engine.statistics()


def free_pages(statistics: EngineStatistics) -> int:
    return statistics.pages_free + statistics.pages_cached


async def leave_a_stream(up: Up, name: str, chunks: int = 5, **more: Any) -> None:
    client = up.session(name)
    stream = await client.chat.completions.create(**LONG, stream=True, **more)
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == chunks:
            break
    await stream.close()


async def test_c55_a_stream_that_is_left_ends_in_the_engine() -> None:
    async with toy_engine() as engine, standing(engine) as up:
        await leave_a_stream(up, "s")
        left = await quiet(engine)
        assert (left.running, left.waiting) == (0, 0)
        assert free_pages(left) == left.pages_total
        sampled = left.tokens_sampled
        await anyio.sleep(0.1)
        assert engine.statistics().tokens_sampled == sampled, "it runs on as a ghost"
        assert sampled < 1000
        again = await up.session("s").chat.completions.create(
            **LONG | {"max_tokens": 5}, extra_body={"return_token_ids": True}
        )
    engine.core.check()
    record = up.records[0]
    main, other = record.branches
    assert [turn.finish_reason for turn in main.turns] == ["client_abort"]
    assert main.turns[0].end - main.turns[0].start == sampled
    prompt = (again.model_extra or {})["prompt_token_ids"]
    assert joined(record, other).token_ids.tolist()[: len(prompt)] == prompt == main.token_ids[: len(prompt)].tolist()
    assert [turn.finish_reason for turn in other.turns] == ["length"]
    assert [message["role"] for message in record.messages] == ["user"]


async def test_c55_without_streaming_and_with_three_samples() -> None:
    async with toy_engine() as engine, standing(engine) as up:
        with pytest.raises(APITimeoutError):
            await up.session("whole").chat.completions.create(**LONG, timeout=0.2)
        await leave_a_stream(up, "three", n=3)
        left = await quiet(engine)
        assert (left.running, left.waiting) == (0, 0)
        assert free_pages(left) == left.pages_total
        request = up.session("whole").chat.completions
        assert (await request.create(**LONG | {"max_tokens": 2})).choices[0].finish_reason == "length"
    turns = {
        record.task_id: [turn.finish_reason for one in record.branches for turn in one.turns] for record in up.records
    }
    assert turns == {"whole": ["client_abort", "length"], "three": ["client_abort"] * 3}


async def test_c55_a_close_after_the_last_chunk_is_no_abort() -> None:
    async with toy_engine() as engine, standing(engine) as up:
        stream = await up.session("s").chat.completions.create(**LONG | {"max_tokens": 3}, stream=True)
        async for chunk in stream:
            if chunk.choices[0].finish_reason:
                break
        await stream.close()
    assert [turn.finish_reason for turn in up.records[0].branches[0].turns] == ["length"]


async def test_what_was_sampled_before_its_listener_went_away_is_a_turn() -> None:
    """The engine has ended the turn, and a delta of it is still on its way to a client that reads no more."""
    async with toy_engine(seconds=0) as engine:
        with Conversation(engine, BYTES, seed=0) as conversation:
            async with conversation.chat((Message("user", "a"),), (), 1) as [turn]:
                choice = Choice(
                    0, turn, TextView(BYTES.tokenizer, (), (), keeps_stop=False), PARAMS, 9, keeps_message=True
                )

                async def never_read(delta: Delta) -> None:
                    await anyio.sleep_forever()

                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as group:
                        group.start_soon(choice.play, never_read)
                        await until(lambda: len(turn.branch.tokens) == turn.context + 9)
                        await anyio.sleep(0.05)
                        scope.cancel()
            [record] = conversation.records()
            assert [(one.end - one.start, one.finish_reason) for one in record.turns] == [(9, "length")]
            async with conversation.chat((Message("user", "a"),), (), 1) as [again]:
                assert again.prompt_ids == BYTES.prompt([Message("user", "a")])


async def test_ids_that_begin_with_a_turn_that_was_left_have_a_branch_of_their_own() -> None:
    body: dict[str, Any] = {"prompt": [65, 66], "max_tokens": 3000, "stream": True}
    async with toy_engine() as engine, standing(engine) as up, httpx.AsyncClient(base_url=up.url) as http:
        async with http.stream("POST", "/sessions/s/v1/completions", json=body) as reply:
            await anext(reply.aiter_lines())
        await quiet(engine)
        [left] = up.served.recordings.get("s").record().branches
        body = {"prompt": [*left.token_ids], "max_tokens": 2, "return_token_ids": True}
        more = (await http.post("/sessions/s/v1/completions", json=body)).json()["choices"][0]["token_ids"]
    [one, other] = up.records[0].branches
    assert [turn.finish_reason for turn in one.turns] == ["client_abort"]
    assert other.token_ids.tolist() == [*left.token_ids, *more]
    assert [(turn.start, turn.finish_reason) for turn in other.turns] == [(len(left.token_ids), "length")]


async def test_what_a_crashed_engine_is_asked_for_is_no_turn() -> None:
    """Nothing is appended then; the record that said so could not be made, nor any other of the server."""
    engine = await toy_engine().__aenter__()
    async with standing(engine) as up:
        first = up.session("first").chat.completions
        said = (await first.create(**LONG | {"max_tokens": 3})).choices[0].message.content
        engine.core.runner.run = broken  # type: ignore[method-assign]
        with pytest.raises(InternalServerError):
            await up.session("second").chat.completions.create(**LONG)
        with pytest.raises(InternalServerError):
            await first.create(**LONG | {"messages": [*ASK, {"role": "assistant", "content": said}, *ASK]})
    with pytest.raises(EngineFailure, match="no more memory"):
        await engine.__aexit__(None, None, None)
    turns = {
        record.task_id: [turn.finish_reason for one in record.branches for turn in one.turns] for record in up.records
    }
    assert turns == {"first": ["length"], "second": ["abort"]}


def broken(batch: Batch) -> NDArray[np.float32]:
    raise RuntimeError("no more memory")


async def test_200_streams_of_which_a_fifth_drops_out_leave_nothing() -> None:
    done: list[int] = []

    async def follow(http: httpx.AsyncClient, index: int) -> None:
        body = LONG | {"messages": [{"role": "user", "content": f"stream {index}"}], "max_tokens": 24, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = reply.aiter_lines()
            async for line in lines:
                if index % 5 == 0 and line.startswith("data: {"):
                    return  # leaves in the middle
        assert line == "" or line == "data: [DONE]"
        done.append(index)

    async with toy_engine(seconds=0.001, max_batch=32) as engine, standing(engine) as up:
        before = engine.statistics()
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=up.url, limits=limits, timeout=60) as http,
            anyio.create_task_group() as group,
        ):
            for index in range(200):
                group.start_soon(follow, http, index)
        left = await quiet(engine)
        await anyio.sleep(0.05)
        assert up.served.metrics.num_active == 0
        assert (left.running, left.waiting, engine.statistics().sessions) == (0, 0, before.sessions)
        assert free_pages(engine.statistics()) == before.pages_total
        assert sum(up.served.metrics.requests.values()) == 200
    engine.core.check()
    assert sorted(done) == [index for index in range(200) if index % 5]


async def test_equal_seeds_give_equal_samples() -> None:
    async with toy_engine(seconds=0) as engine, standing(engine) as up:
        ask = LONG | {"max_tokens": 8, "seed": 42, "n": 2}
        first, again = [await up.client.chat.completions.create(**ask, logprobs=True) for _ in range(2)]
        free = [await up.client.chat.completions.create(**LONG | {"max_tokens": 8}) for _ in range(3)]
    texts = [[choice.message.content for choice in reply.choices] for reply in (first, again)]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    assert first.choices[0].logprobs == again.choices[0].logprobs
    assert len({reply.choices[0].message.content for reply in free}) > 1


async def test_n_samples_compute_their_prompt_once() -> None:
    async with toy_engine(seconds=0) as engine, standing(engine) as up:
        ask: dict[str, Any] = {
            "model": "m",
            "messages": [{"role": "user", "content": "x" * 500}],
            "max_tokens": 4,
            "n": 4,
        }
        usage = (await up.client.chat.completions.create(**ask)).usage
        seen = engine.statistics()
    assert usage is not None
    assert seen.tokens_prefilled < usage.prompt_tokens + 4 * 4, "the others join at the last whole page"
    assert seen.tokens_reused > 3 * (usage.prompt_tokens - 8)
