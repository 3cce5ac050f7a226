"""Exporters: the names that trainers use, read by TRL's and verl's own code."""

import ast
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "env" / "chat")]

import oracles
from test_batch import GROUP

from agentrt.rollout.trainers import to_prime_rl, to_skyrl, to_slime, to_tinker, to_trl, to_verl


def definitions(path: Path, *names: str, **given: Any) -> dict[str, Any]:
    """These classes and functions of a source file, run by themselves: the packages they live in are heavy to import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    assert len(tree.body) == len(names), f"{path} has changed"
    scope = {"Any": Any, "__name__": path.stem, **given}
    exec(compile(tree, str(path), "exec"), scope)
    return scope


def test_verls_own_class_takes_it() -> None:
    from typing import Optional

    pydantic = oracles.library("pydantic")
    path = oracles.folder() / "verl/verl/experimental/agent_loop/agent_loop.py"
    scope = definitions(
        path, "AgentLoopMetrics", "AgentLoopOutput", BaseModel=pydantic.BaseModel, Optional=Optional, np=np
    )
    outputs = [scope["AgentLoopOutput"](**fields) for fields in to_verl(GROUP)]
    assert [one.prompt_ids for one in outputs] == [[10], [10, 11, 10], [10, 11, 12]]
    assert [one.response_ids for one in outputs] == [[11, 12], [11], [13, 14, 15]]
    assert [one.response_mask for one in outputs] == [[1, 1], [1], [1, 0, 1]]
    assert [one.response_logprobs for one in outputs] == [[-0.5, -0.5], [-0.5], [-0.5, 0.0, -0.5]]
    assert [one.reward_score for one in outputs] == [1.0, 1.0, 0.0]
    assert [one.extra_fields["min_global_steps"] for one in outputs] == [2, 3, 1]
    assert {one.metrics.num_preempted for one in outputs} == {-1}


def test_trls_own_rollout_sample_and_packing_take_it() -> None:
    from dataclasses import dataclass

    import torch

    folder = oracles.folder() / "trl/trl/experimental/async_grpo"
    scope = definitions(
        folder / "async_rollout_worker.py", "RolloutSample", dataclass=dataclass, np=np, Messages=list[dict[str, Any]]
    )
    samples = [scope["RolloutSample"](**fields) for fields in to_trl(GROUP, group_id=7)]
    assert [one.model_version for one in samples] == [2, 3, 1]
    assert samples[0].prompt == [{"role": "user", "content": "q"}]
    assert samples[0].completion == [{"role": "assistant", "content": "a"}]
    tree = definitions(folder / "packing.py", "TreeRow", torch=torch)["TreeRow"]()
    for one in samples:
        tree.add(
            {
                name: getattr(one, name)
                for name in ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id")
            }
        )
    packed = tree.pack()
    assert packed["advantages"].tolist() == [1.0, 1.0, 1.0, -1.0, -1.0]
    assert packed["old_log_probs"].tolist() == [-0.5] * 5
    assert packed["segment_id"].tolist() == [0, 0, 1, 2, 2]


def test_tinkers_datum_predicts_the_next_token() -> None:
    first, _, wrong = to_tinker(GROUP)
    assert first == {
        "model_input": [10, 11],
        "loss_fn_inputs": {"target_tokens": [11, 12], "logprobs": [-0.5, -0.5], "advantages": [1.0, 1.0]},
    }
    assert wrong["loss_fn_inputs"]["advantages"] == [0.0, 0.0, -1.0, 0.0, -1.0]


def test_slime_and_miles_have_the_response_apart_and_the_versions_as_runs() -> None:
    first, second, third = to_slime(GROUP, group_index=2)
    assert third == {
        "group_index": 2, "index": 7, "tokens": [10, 11, 12, 13, 14, 15], "response_length": 3, "reward": 0.0,
        "loss_mask": [1, 0, 1], "rollout_log_probs": [-0.5, 0.0, -0.5], "weight_versions": ["1"], "status": "completed",
    }  # fmt: skip
    assert first["index"] == second["index"] == 6
    for one in (first, second, third):
        assert len(one["loss_mask"]) == len(one["rollout_log_probs"]) == one["response_length"]


def test_prime_rls_arrays_are_whole() -> None:
    for sample in to_prime_rl(GROUP, "calculator", temperature=0.7):
        lengths = {len(sample[name]) for name in ("token_ids", "mask", "logprobs", "temperatures")}
        assert len(lengths) == 1
        assert set(sample["temperatures"]) == {0.7}
        assert sample["env_name"] == "calculator"
    assert [sample["advantage"] for sample in to_prime_rl(GROUP, "c")] == [1.0, 1.0, -1.0]


def test_skyrls_output_is_lists_of_one_length() -> None:
    output = to_skyrl([GROUP, GROUP])
    assert {len(values) for values in output.values() if values is not None} == {6}
    assert output["response_ids"][2] == [13, 14, 15]
    assert output["loss_masks"][2] == [1, 0, 1]
    assert output["stop_reasons"] == ["stop"] * 6


@pytest.mark.parametrize("export", [to_verl, to_slime, to_tinker])
def test_what_leaves_is_plain(export: Any) -> None:
    assert msgspec.json.decode(msgspec.json.encode(export(GROUP)))
