"""The spec: nested deadlines."""

import pytest

from agentrt import Limits


@pytest.mark.parametrize("name", ["turn_seconds", "tool_seconds"])
def test_a_phase_longer_than_what_encloses_it_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"limits.{name} \(90\) is longer than limits.wall_seconds \(60\)"):
        Limits(wall_seconds=60, **{name: 90})
    Limits(wall_seconds=None, **{name: 90})
    Limits(wall_seconds=90, **{name: 90})
