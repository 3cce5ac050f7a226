"""`sample_n`: several completions of one prompt, whose KV is computed once."""

from collections.abc import Sequence

import anyio

from agentrt.core.errors import EngineFailure
from agentrt.core.protocol import Completion, Grammar, Session
from agentrt.core.spec import SamplingParams


async def sample_n(
    session: Session,
    observed_ids: Sequence[int],
    params: SamplingParams,
    *,
    n: int,
    max_tokens: int,
    grammar: Grammar | None = None,
) -> list[Completion]:
    """`n` completions of an open session's ids and `observed_ids`; the session itself keeps its ids as they are.

    They are what the first `n` forks of a fork of the session would sample: each has a derived seed, so they differ, and a
    session with the same seed gives the same again. The first failure ends all of them and is raised; so does cancellation.
    """
    completions: dict[int, Completion] = {}
    failures: list[EngineFailure] = []

    async def sample(index: int, member: Session) -> None:
        try:
            with member:
                completions[index] = await member.sample(rest, params, max_tokens=max_tokens, grammar=grammar)
        except EngineFailure as error:
            failures.append(error)
            together.cancel_scope.cancel()

    with session.fork() as trunk:
        rest = list(observed_ids)
        if len(rest) > 1:  # computes all ids but the last, which has no KV to share before somebody samples
            await trunk.score(rest[:-1], rest[-1:], SamplingParams())
            rest = []
        async with anyio.create_task_group() as together:
            for index, member in enumerate([trunk.fork() for _ in range(n)]):
                together.start_soon(sample, index, member)
    if failures:
        raise failures[0]
    return [completions[index] for index in range(n)]
