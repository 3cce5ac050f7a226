"""One episode, from its task to its record.

    open sandbox ─► open main session ─► environment.rollout ─► close sessions ─► score ─► close sandbox ─► record
                                         │ limit, end, error

Whatever ends the rollout ends it here. A limit or the environment's word raises `EpisodeEnd`, which no `except
Exception` of the environment holds up; an exception of the environment, the engine or the sandbox becomes the record's
`error`, the one place where that happens (of whatever class: what one episode runs does not end the others; only a
`SystemExit` in a task that the environment started ends asyncio's loop); cancellation from outside passes. What was
sampled is in the record in every case.
"""

import math
import traceback
from contextlib import ExitStack

import anyio
import msgspec
import structlog
from structlog.contextvars import bound_contextvars

from agentrt.core import clock, seeds
from agentrt.core.errors import (
    EngineFailure,
    EnvironmentFailure,
    EpisodeError,
    SandboxFailure,
    attributed_to,
    is_failure,
)
from agentrt.core.records import MAIN, EpisodeRecord, Failure, StopReason, text_of
from agentrt.env.rubric import Scores, to_outcome
from agentrt.env.task import Task
from agentrt.rollout.calls import ToolRunner
from agentrt.rollout.episode import Episode, EpisodeEnd
from agentrt.rollout.group import Peers
from agentrt.rollout.setup import Setup

EPISODE_FAILED = "episode_failed"
"""Why an episode that ended with an error has no reward."""

log = structlog.get_logger(__name__)


class Finished:
    """An episode that has ended, its scores so far, and what went wrong if something did."""

    __slots__ = ("attempt", "episode", "failure", "member", "scores")

    def __init__(self, episode: Episode, member: int, attempt: int, failure: Failure | None, scores: Scores) -> None:
        self.episode, self.member, self.attempt = episode, member, attempt
        self.failure, self.scores = failure, scores

    def record(self) -> EpisodeRecord:
        """The record of this attempt, with what the scores hold now."""
        episode, scores, timing = self.episode, self.scores, self.episode.timing
        reason = episode.stop_reason or StopReason.ERROR
        failed = self.failure is not None
        outcomes = {name: to_outcome(value) for name, value in (episode.metrics | scores.metrics).items()}
        metrics = {text_of(name): outcome.score for name, outcome in outcomes.items() if outcome.score is not None}
        return EpisodeRecord(
            task_id=episode.task.id,
            member=self.member,
            attempt=self.attempt,
            seed=episode.seed,
            status="error" if failed else "ok",
            error=self.failure,
            stop_reason=reason,
            truncated=reason.is_truncated,
            reward=None if failed else scores.reward,
            reward_reason=EPISODE_FAILED if failed else scores.reason,
            rewards=scores.rewards,
            metrics=episode.counts() | metrics,
            branches=episode.branches(),
            messages=[msgspec.to_builtins(message) for message in episode.main.messages] if episode.agents else [],
            calls=list(episode.calls),
            timing={
                "queue": timing.queue, "prefill": timing.prefill, "decode": timing.decode, "tools": timing.tools,
                "scoring": timing.scoring, "total": timing.total,
            },
            kv=episode.kv.record(),
            logprobs_of=episode.setup.engine.info.logprobs_of,
            quantized=episode.setup.engine.info.quantized,
        )  # fmt: skip


async def run_episode(setup: Setup, task: Task, *, member: int = 0, attempt: int = 0) -> EpisodeRecord:
    """Run one episode and score it (group rewards apart). Its failure is in the record; cancellation passes."""
    return (await play(setup, task, member=member, attempt=attempt)).record()


async def play(setup: Setup, task: Task, *, member: int, attempt: int, peers: Peers | None = None) -> Finished:
    """As `run_episode`, before it is made into a record: group rewards may still be added to its scores."""
    started = clock.now()
    seed = seeds.derive(setup.seed, task.id, member, attempt)
    runner = setup.sandboxes()
    episode, scores = Episode(setup, task, member, seed, runner, peers), Scores()
    with bound_contextvars(task=task.id, member=member), ExitStack() as stack:
        setup.running.add(episode)
        stack.callback(setup.running.discard, episode)
        failure = _enter(stack, runner, task)
        if failure is None:
            with episode:
                failure = await _roll_out(episode)
                await episode.end_what_is_under_way()
            failure = failure or _unsound(episode)
        if failure is None:
            episode.enter("waiting")
            async with setup.scoring:
                episode.enter("scoring")
                scoring = clock.now()
                scores = await setup.rubric.score(episode, setup.limits.score_seconds)
                episode.timing.scoring = clock.now() - scoring
            episode.add_given_reward(scores)
        if failure is not None:
            episode.stop_reason = StopReason.ERROR
            log.info("episode_failed", boundary=failure.boundary, type=failure.type, message=failure.message)
    episode.timing.total = clock.now() - started
    return Finished(episode, member, attempt, failure, scores)


def _enter(stack: ExitStack, runner: ToolRunner, task: Task) -> Failure | None:
    try:
        with attributed_to(SandboxFailure, "the sandbox cannot be opened"):
            stack.enter_context(runner)
            if task.files:
                runner.put(task.files)
    except SandboxFailure as error:
        return failure_of(error)
    return None


async def _roll_out(episode: Episode) -> Failure | None:
    """Let the environment play the episode to its end. What it raises is the value; outside cancellation passes."""
    seconds = episode.setup.limits.wall_seconds
    wall = anyio.CancelScope(deadline=math.inf if seconds is None else clock.now() + seconds)
    try:
        with wall:
            try:
                await _program(episode)
            except BaseException as error:
                if wall.cancel_called:
                    stack = "".join(traceback.format_tb(error.__traceback__))
                    log.warning("episode_deadline", seconds=seconds, stuck_at=stack)
                raise
    except EpisodeEnd:
        pass
    except BaseException as error:  # the one place where an episode's failure becomes a value
        rest = error.split(EpisodeEnd)[1] if isinstance(error, BaseExceptionGroup) else error
        if rest is not None and not is_failure(rest):
            raise
        if rest is not None:
            return failure_of(rest)
    if wall.cancelled_caught:
        episode.stop_reason = episode.stop_reason or StopReason.WALL_TIME
    return None


def _unsound(episode: Episode) -> Failure | None:
    """Why nobody can train on what was sampled, whatever the environment makes of it."""
    if all(math.isfinite(sum(branch.logprobs)) for branch in episode.branches()):
        return None
    return failure_of(EngineFailure("the engine gave a sampled token a logprob that is not finite"))


async def _program(episode: Episode) -> None:
    task = episode.task
    main = episode.agent(MAIN, *task.messages)
    await episode.setup.environment.rollout(task, main)
    if episode.stop_reason is None:
        cut_by = main.last_turn.cut_by if main.last_turn is not None else None
        episode.stop_reason = cut_by or StopReason.COMPLETED


def failure_of(error: BaseException) -> Failure:
    """Whose failure it was and what was raised; of a group its first, with the traceback of all."""
    stack = "".join(traceback.format_exception(error))
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    boundary = error.boundary if isinstance(error, EpisodeError) else EnvironmentFailure.boundary
    return Failure(boundary=boundary, type=type(error).__name__, message=text_of(error), traceback=text_of(stack))
