"""Recorded sessions: exact ids over several requests, branches where the client's history forks, rewards, keys."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from openai import AuthenticationError, NotFoundError, PermissionDeniedError
from standing import BYTES, standing

from agentrt.core.errors import RecordError
from agentrt.core.records import EpisodeRecord, joined
from agentrt.core.spec import SamplingParams
from agentrt.env.chat.message import Message
from agentrt.serve.recording import Recordings
from agentrt.testing.engine import ScriptedEngine

pytestmark = pytest.mark.anyio
END = BYTES.tokenizer.special["<|im_end|>"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def counting(ids: Sequence[int]) -> list[int]:
    """Says how many ids came before, in letters of which the tokenizer would make other ids."""
    return [*f"<think>\nn\n</think>\n\n{len(ids)}".encode(), END]


async def test_a_session_keeps_the_sampled_ids_and_appends_what_is_new() -> None:
    engine = ScriptedEngine(counting)
    async with standing(engine) as up:
        client = up.session("s1")
        first = await client.chat.completions.create(model="any", messages=[user("a")])
        said = {"role": "assistant", "content": first.choices[0].message.content}
        second = await client.chat.completions.create(model="any", messages=[user("a"), said, user("b")])
        async with httpx.AsyncClient(base_url=up.url) as http:
            await http.post("/sessions/s1/reward", json={"reward": 0.5})
            refused = await http.post("/sessions/s1/reward", json={"reward": 1e39})
            assert (refused.status_code, refused.json()["error"]["message"]) == (400, "reward: non_finite_reward")
            ended = await http.delete("/sessions/s1")
            assert (await http.get("/sessions/s1")).status_code == 404
    [record] = up.records
    assert ended.status_code == 200
    [branch] = record.branches
    prompt = BYTES.prompt([Message("user", "a")])
    turn = counting(prompt)
    join = BYTES.join([Message("user", "b")], ended=True)
    context = [*prompt, *turn, *join]
    assert branch.token_ids.tolist() == [*context, *counting(context)]
    assert branch.mask.tolist()[: len(context)] == [0] * len(prompt) + [1] * len(turn) + [0] * len(join)
    assert second.usage is not None
    assert second.usage.prompt_tokens == len(context)
    assert [(one.start, one.end) for one in branch.turns] == [
        (len(prompt), len(prompt) + len(turn)), (len(context), len(branch.token_ids)),
    ]  # fmt: skip
    assert (record.task_id, record.reward, [message["role"] for message in record.messages]) == (
        "s1", 0.5, ["user", "assistant", "user", "assistant"],
    )  # fmt: skip
    assert engine.pauses == ["client", "client"]
    assert engine.num_sessions == 0


async def conversed(*histories: list[dict[str, Any]]) -> EpisodeRecord:
    async with standing(ScriptedEngine(counting)) as up:
        for history in histories:
            await up.client.chat.completions.create(
                model="m",
                messages=history,
                extra_headers={"X-Session-ID": "s"},  # type: ignore[arg-type]
            )
    return up.records[0]


SAID = {"role": "assistant", "content": str(len(BYTES.prompt([Message("user", "a")])))}


async def test_histories_that_fork_share_ids_and_rewritten_ones_have_their_own() -> None:
    record = await conversed(
        [user("a")],
        [user("a"), SAID, user("b")],
        [user("a"), SAID, user("c")],  # the same beginning, another question
        [user("a")],  # once more
        [user("a"), {"role": "assistant", "content": "no"}, user("c")],  # what was sampled is rewritten
        [{"role": "system", "content": "x"}, user("a")],  # an agent of its own
    )
    main, other, again, rewritten, own = record.branches
    assert [branch.name for branch in record.branches] == ["main", "branch-1", "branch-2", "branch-3", "branch-4"]
    first_end, first_start = main.turns[0].end, main.turns[0].start
    assert other.fork is not None
    assert (other.fork.branch, other.fork.at) == ("main", first_end)
    assert again.fork is not None
    assert (again.fork.branch, again.fork.at) == ("main", first_start)
    assert (rewritten.fork, own.fork, own.rewrite) == (None, None, None)
    assert rewritten.rewrite is not None
    assert rewritten.rewrite.reason == "message 1 (assistant) has another content"
    whole = joined(record, other)
    assert whole.mask.tolist()[:first_end] == main.mask.tolist()[:first_end], "the shared turn is still a sampled one"
    assert whole.mask[-1] == 1
    assert len(again.token_ids) == again.mask.count(1) == first_end - first_start


async def test_requests_side_by_side_in_one_session_are_branches() -> None:
    import anyio

    async with standing(ScriptedEngine(counting)) as up:
        client = up.session("s")

        async def ask() -> None:
            await client.chat.completions.create(model="m", messages=[user("a")], n=2)  # type: ignore[list-item]

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            group.start_soon(ask)
    record = up.records[0]
    assert len(record.branches) == 4
    assert len({tuple(joined(record, branch).token_ids) for branch in record.branches}) == 1


async def test_completions_in_ids_go_on_a_branch_that_they_begin_with() -> None:
    async with standing(ScriptedEngine(counting)) as up:
        client = up.session("s")
        extra = {"return_token_ids": True}
        first = await client.completions.create(model="m", prompt=[97, 98], max_tokens=50, extra_body=extra)
        ids = (first.choices[0].model_extra or {})["token_ids"]
        again = await client.completions.create(model="m", prompt=[97, 98, *ids, 99], max_tokens=4, extra_body=extra)
    [branch] = up.records[0].branches
    sampled = (again.choices[0].model_extra or {})["token_ids"]
    assert branch.token_ids.tolist() == [97, 98, *ids, 99, *sampled]
    assert again.choices[0].finish_reason == "length"
    about = (again.choices[0].model_extra or {})["agentrt"]
    assert about["versions"] == [0] * 4
    assert about["logprobs"] == [-0.5] * 4
    assert about["context_tokens"] == len(ids) + 3


async def test_keys_open_what_they_are_for() -> None:
    keys = {"all": "", "mine": "s1"}
    async with standing(ScriptedEngine(counting), keys=keys, key="wrong") as up:
        ask: dict[str, Any] = {"model": "m", "messages": [user("a")]}
        with pytest.raises(AuthenticationError):
            await up.client.chat.completions.create(**ask)
        await up.client.with_options(api_key="all").chat.completions.create(**ask)
        mine = up.client.with_options(api_key="mine")
        await mine.chat.completions.create(**ask)
        with pytest.raises(PermissionDeniedError):
            await up.session("s2").with_options(api_key="mine").chat.completions.create(**ask)
        with pytest.raises(NotFoundError, match="no model 'other'"):
            await up.client.with_options(api_key="all").chat.completions.create(**ask | {"model": "other"})
    assert [record.task_id for record in up.records] == ["s1"], "a key of a session records in it"


async def test_a_session_that_cannot_be_written_keeps_no_other_from_it() -> None:
    """A full disk at the end of the server: the first error is raised, the rest is written, and all KV is given back."""
    engine, ended = ScriptedEngine(counting), list[str]()

    def write(record: EpisodeRecord) -> None:
        if record.task_id == "b":
            raise RecordError("no space")
        ended.append(record.task_id)

    recordings = Recordings(engine, BYTES, write, seed=0, max_sessions=9)
    for name in "abc":
        with recordings.using(name) as conversation:
            async with conversation.ids([1, 2], 1) as (turn,):
                turn.keep(await turn.sample(SamplingParams(stop_token_ids=(END,)), 99, lambda: None), None)
    assert engine.num_sessions == 3
    with pytest.raises(RecordError, match="no space"):
        recordings.__exit__(None, None, None)
    assert (ended, engine.num_sessions) == (["a", "c"], 0)
