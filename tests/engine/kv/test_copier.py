"""Copies by threads between two arenas."""

import numpy as np
import pytest

from agentrt.engine.kv.copier import HostMover, ThreadCopier
from agentrt.engine.kv.pages import PageCopies


def test_row_22_a_job_keeps_its_own_list_of_copies() -> None:
    """What the caller does to its list afterwards does not reach copies under way; jobs of one way end in their order."""
    device = [np.arange(12.0).reshape(4, 3)]
    host = [np.zeros((4, 3))]
    copier = ThreadCopier(HostMover(device, host), checks=True)
    copies = [PageCopies(0, [1, 2], [3, 0])]
    saved = copier.start("save", copies)
    copies.clear()
    again = copier.start("save", [PageCopies(0, [0], [1])])
    assert again.wait(10)
    assert saved.is_done
    assert host[0].tolist() == [[6, 7, 8], [0, 1, 2], [0, 0, 0], [3, 4, 5]]
    loaded = copier.start("load", [PageCopies(0, [3], [0])])
    assert loaded.wait(10)
    assert device[0][0].tolist() == [3, 4, 5]
    assert loaded.checksums == saved.checksums[:1]
    copier.close()


def test_a_thread_that_raises_has_failed_all_its_copies() -> None:
    copier = ThreadCopier(HostMover([np.zeros((1, 1))], [np.zeros((1, 1))]))
    event = copier.start("save", [PageCopies(0, [0, 7], [0, 0])])
    assert event.wait(10)
    assert (list(event.failed), event.checksums) == ([0, 1], ())
    copier.close()
    with pytest.raises(RuntimeError):
        copier.start("save", [])
