"""Rows under the field names of other trainers: plain dicts and lists, so that no trainer need be installed.

A row is one branch (`agentrt.rollout.batch`). Where a trainer has a prompt and a response, the response starts with the
first sampled id and holds everything after it: later turns, and with mask 0 the tool results between them. Names as of:
verl 0.9, slime and Miles of mid 2026, prime-rl and SkyRL of mid 2026, TRL 1.16, Tinker 0.38.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from agentrt.core.records import EpisodeRecord, StopReason
from agentrt.rollout.batch import Row
from agentrt.rollout.group import Group


def to_verl(group: Group) -> list[dict[str, Any]]:
    """Keyword arguments of verl's `AgentLoopOutput`. The advantage is verl's to compute, from `reward_score` and `uid`."""
    return [
        {
            "prompt_ids": row.token_ids[: row.prompt_length].tolist(),
            "response_ids": row.token_ids[row.prompt_length :].tolist(),
            "response_mask": row.mask[row.prompt_length :].tolist(),
            "response_logprobs": row.logprobs[row.prompt_length :].tolist(),
            "reward_score": episode.reward,
            "num_turns": len(episode.messages),
            "metrics": {
                "generate_sequences": _generation_seconds(episode), "tool_calls": episode.timing.get("tools", 0.0),
                "compute_score": episode.timing.get("scoring", 0.0),
            },
            "extra_fields": {
                "uid": row.task_id, "min_global_steps": _oldest(row), "max_global_steps": max(row.versions),
            },
        }
        for row, episode in _with_episodes(group)
    ]  # fmt: skip


def to_slime(group: Group, group_index: int = 0) -> list[dict[str, Any]]:
    """Fields of slime's and Miles' `Sample`: ids whole, the rest over the response. `status` as its value."""
    return [
        {
            "group_index": group_index,
            "index": group_index * group.record.members + row.member,
            "tokens": row.token_ids.tolist(),
            "response_length": len(row.token_ids) - row.prompt_length,
            "reward": episode.reward,
            "loss_mask": row.mask[row.prompt_length :].tolist(),
            "rollout_log_probs": row.logprobs[row.prompt_length :].tolist(),
            "weight_versions": [str(version) for version in _runs(row.versions)],
            "status": "truncated" if episode.truncated else "completed",
        }
        for row, episode in _with_episodes(group)
    ]


def to_prime_rl(group: Group, env_name: str, temperature: float = 1.0) -> list[dict[str, Any]]:
    """Fields of prime-rl's `TrainingSample`, each as long as `token_ids`."""
    return [
        {
            "token_ids": row.token_ids.tolist(),
            "mask": [bit == 1 for bit in row.mask],
            "logprobs": row.logprobs.tolist(),
            "temperatures": [temperature] * len(row.token_ids),
            "env_name": env_name,
            "advantage": row.advantage,
            "reward": episode.reward,
        }
        for row, episode in _with_episodes(group)
    ]


def to_skyrl(groups: Sequence[Group]) -> dict[str, Any]:
    """SkyRL's `GeneratorOutput`: a list for each field, an entry for each row."""
    rows = [pair for group in groups for pair in _with_episodes(group)]
    return {
        "prompt_token_ids": [row.token_ids[: row.prompt_length].tolist() for row, _ in rows],
        "response_ids": [row.token_ids[row.prompt_length :].tolist() for row, _ in rows],
        "rewards": [episode.reward for _, episode in rows],
        "loss_masks": [row.mask[row.prompt_length :].tolist() for row, _ in rows],
        "stop_reasons": ["stop" if episode.stop_reason is StopReason.COMPLETED else "length" for _, episode in rows],
        "rollout_metrics": None,
        "rollout_logprobs": [row.logprobs[row.prompt_length :].tolist() for row, _ in rows],
    }


def to_trl(group: Group, group_id: int = 0) -> list[dict[str, Any]]:
    """Fields of the `RolloutSample` of TRL's asynchronous GRPO trainer."""
    return [
        {
            "prompt": _before_the_answer(episode.messages),
            "completion": episode.messages[len(_before_the_answer(episode.messages)) :],
            "input_ids": np.array(row.token_ids, dtype=np.int64),
            "completion_mask": np.array(row.mask, dtype=np.int64),
            "old_log_probs": np.array(row.logprobs, dtype=np.float32),
            "advantage": row.advantage,
            "model_version": _oldest(row),
            "group_id": group_id,
            "metrics": {"reward": episode.reward, **episode.metrics},
        }
        for row, episode in _with_episodes(group)
    ]


def to_tinker(group: Group) -> list[dict[str, Any]]:
    """For each row the ids of `ModelInput.from_ints` and the `loss_fn_inputs` of a Tinker `Datum`: position t predicts t+1."""
    return [
        {
            "model_input": row.token_ids[:-1].tolist(),
            "loss_fn_inputs": {
                "target_tokens": row.token_ids[1:].tolist(),
                "logprobs": row.logprobs[1:].tolist(),
                "advantages": [(row.advantage or 0.0) * bit for bit in row.mask[1:]],
            },
        }
        for row, _ in _with_episodes(group)
    ]


def _with_episodes(group: Group) -> list[tuple[Row, EpisodeRecord]]:
    by_member = {episode.member: episode for episode in group.episodes}
    return [(row, by_member[row.member]) for row in group.rows()]


def _oldest(row: Row) -> int:
    return min(version for version in row.versions if version >= 0)


def _runs(versions: Sequence[int]) -> list[int]:
    """The versions that sampled, in order, each once for a run of tokens."""
    sampled = [version for version in versions if version >= 0]
    return sampled[:1] + [after for before, after in pairwise(sampled) if before != after]


def _before_the_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:first]


def _generation_seconds(episode: EpisodeRecord) -> float:
    return float(episode.timing.get("prefill", 0.0) + episode.timing.get("decode", 0.0))
