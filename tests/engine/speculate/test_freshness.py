"""A stale draft is noticed and said, refreshed with the policy, and only when that pays."""

from pathlib import Path
from typing import Any

import pytest
from heads import make_core, random_weights, target, write_draft, write_head
from test_drafter import drafter_of, drain, prompt, said, submit

from agentrt.core.errors import WeightsError
from agentrt.engine.model.decoder import expected_shapes
from agentrt.engine.speculate.freshness import ENOUGH, Freshness, Stale, balance
from agentrt.engine.step import EngineCore
from agentrt.engine.update import Update


def note(freshness: Freshness, accepted: int, times: int = ENOUGH) -> list[Stale]:
    return [stale for _ in range(times) if (stale := freshness.note(accepted))]


def test_a_draft_that_stands_less_often_after_an_update_is_stale_and_said_once() -> None:
    freshness = Freshness()
    assert note(freshness, 2) == []
    freshness.renewed(is_refreshed=False)
    assert note(freshness, 1, ENOUGH - 1) == []
    assert note(freshness, 1, 3) == [Stale(2.0, 1.0)]
    freshness.renewed(is_refreshed=False)  # the policy moves on and the draft does not: still measured against its own
    assert note(freshness, 1) == [Stale(2.0, 1.0)]
    freshness.renewed(is_refreshed=True)
    assert note(freshness, 1) == []
    freshness.renewed(is_refreshed=False)
    assert note(freshness, 1) == []


def test_row_30_a_draft_that_is_accepted_as_before_is_not_stale() -> None:
    freshness = Freshness()
    note(freshness, 2)
    freshness.renewed(is_refreshed=False)
    assert note(freshness, 2) == []
    assert freshness.accepted_length == 2


def test_refreshing_pays_when_what_is_lost_outweighs_it() -> None:
    """10,000 ids, 2.0 accepted then and 1.0 now: 10,000 / 2 - 10,000 / 3 steps of 10 ms."""
    found = balance(2.0, 1.0, 10_000, 0.01, 10.0)
    assert found.lost_seconds == pytest.approx(16.667, abs=1e-3)
    assert found.is_due
    assert not balance(2.0, 1.0, 5_000, 0.01, 10.0).is_due
    assert balance(1.0, 2.0, 10_000, 0.01, 0.5).lost_seconds == 0


def update(core: EngineCore, version: int, weights: dict[str, Any]) -> None:
    core.begin_update(Update(version=version, mode="recompute", install=core.stage(weights)))


def test_row_31_policy_and_draft_are_updated_together_and_neither_is_taken_for_the_other(tmp_path: Path) -> None:
    """`draft.*` goes to the draft alone, at the same step; then the engine is as one that began with both."""
    core = make_core(write_draft(tmp_path / "old", "eagle3"))
    drain_one(core)
    policy = random_weights(expected_shapes(target().decoder.config), 5)
    head = write_head(tmp_path / "new", "eagle3", seed=1) | random_weights(drafter_of(core).model.shapes, 9)
    floats = {f"draft.{name}": tensor for name, tensor in head.items() if tensor.is_floating_point()}
    update(core, 1, policy | floats)
    drain(core)
    found = submit(core, prompt(4), seed=4)
    drain(core)
    from safetensors.torch import save_file

    save_file(head, tmp_path / "new" / "model.safetensors")
    other = make_core(tmp_path / "new", target(5))
    expected = submit(other, prompt(4), seed=4)
    drain(other)
    assert said(found) == said(expected)
    assert (found.drafted, found.accepted) == (expected.drafted, expected.accepted)


def drain_one(core: EngineCore) -> None:
    submit(core, prompt(4), seed=4)
    drain(core)


def test_draft_weights_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    core = make_core(write_draft(tmp_path, "mtp"))
    policy = random_weights(expected_shapes(target().decoder.config), 5)
    with pytest.raises(WeightsError, match="is missing from the new weights"):
        core.stage(policy | {"draft.eh_proj.weight": policy["model.norm.weight"]})
    assert drafter_of(core).model.target is core.runner.decoder  # type: ignore[attr-defined]
    assert core.version == 0
    with pytest.raises(WeightsError, match=r"hold draft.fc.weight, and this engine has no draft model"):
        make_core(None).stage(policy | {"draft.fc.weight": policy["model.norm.weight"]})


def test_row_30_a_no_op_update_does_not_cost_acceptance(tmp_path: Path) -> None:
    """The same weights again, with the draft and without: what is drafted and accepted afterwards is the same."""
    counts = []
    weights = random_weights(expected_shapes(target().decoder.config), 0)
    for version in (0, 1, 2):
        core = make_core(write_draft(tmp_path / str(version), "mtp"))
        for number in range(version):
            update(core, number + 1, weights)
            drain(core)
        sequence = submit(core, prompt(6), seed=6, max_tokens=40)
        drain(core)
        counts.append((sequence.drafted, sequence.accepted, said(sequence)))
    assert counts[0] == counts[1] == counts[2]
