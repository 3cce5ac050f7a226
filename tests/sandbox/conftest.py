"""Each level of isolation, forced: a test of the sandbox runs at every level that this machine has.

Also lets the tests of this folder import its helpers, `attacks` and `supported`.
"""

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentrt.core.errors import SandboxFailure
from agentrt.sandbox.launcher import Launcher, make_place
from agentrt.sandbox.level import Level
from agentrt.sandbox.probe import strongest
from agentrt.sandbox.zygote import Place

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def place() -> Place:
    return make_place()


@pytest.fixture(scope="session", params=[Level.L3, Level.L2], ids=["L3", "L2"])
def launcher(request: pytest.FixtureRequest, place: Place) -> Iterator[Launcher]:
    """At one level. One that this machine does not have is skipped, and says why; one that it has must work."""
    from supported import is_supported  # here, because the line above lets it be found

    try:
        made = strongest(place, (request.param,))
    except SandboxFailure as error:
        if is_supported(request.param):
            raise
        pytest.skip(str(error))
    with closing(made):
        yield made
