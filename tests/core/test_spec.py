"""The spec: nested deadlines, and sampling parameters out of range."""

import pytest

from agentrt import Limits, SamplingParams


@pytest.mark.parametrize("name", ["turn_seconds", "tool_seconds"])
def test_a_phase_longer_than_what_encloses_it_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"limits.{name} \(90\) is longer than limits.wall_seconds \(60\)"):
        Limits(wall_seconds=60, **{name: 90})
    Limits(wall_seconds=None, **{name: 90})
    Limits(wall_seconds=90, **{name: 90})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("logit_bias", {1: 2.0, 2: float("nan")}, "holds a number that is not finite; -inf is spelt -1e9"),
        ("logit_bias", {1: float("inf")}, "holds a number that is not finite"),
        ("top_k", 2**31, "must be positive and below"),
        ("top_k", -2, "must be positive and below"),
        ("stop", ("end", "\ud83d"), "holds half a character"),
        ("stop", ("",), "holds an empty string"),
    ],
)
def test_sampling_params_that_are_no_law(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=f"sampling.{name} {words}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
