"""The log of a run."""

from pathlib import Path

import pytest
import structlog

from agentrt.core.errors import RecordError
from agentrt.report.log import logging_to


def test_events_are_lines_and_half_characters_too(tmp_path: Path) -> None:
    with logging_to(tmp_path / "logs"):
        structlog.get_logger("x").info("happened", what="half \ud800")
    (line,) = (tmp_path / "logs" / "agentrt.jsonl").read_text().splitlines()
    assert '"event": "happened"' in line
    assert '"what": "half \\ud800"' in line


def test_a_log_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    with (
        pytest.raises(RecordError, match="logs: cannot be written: File exists; make room, or choose another folder"),
        logging_to(tmp_path / "logs"),
    ):
        pass
