"""A task says what is wrong with it, before an episode starts."""

import pytest

from agentrt.core.errors import EnvironmentFailure
from agentrt.env.chat.message import Message
from agentrt.env.environment import Environment
from agentrt.env.task import Task
from agentrt.rollout.order import chosen_tasks

pytestmark = pytest.mark.anyio


async def test_a_file_that_leaves_the_folder_is_the_environments_error() -> None:
    """It was an error of the sandbox in the record of every episode, as if a machine had failed."""

    class Leaving(Environment):
        async def tasks(self, split):  # type: ignore[no-untyped-def]
            yield Task("a", (), files={"data/../../etc/x": ""})

    with pytest.raises(
        EnvironmentFailure, match=r"Task\.files: 'data/../../etc/x' is no path inside the episode's folder"
    ):
        await chosen_tasks(Leaving(), "train", 1, 0)


def test_an_id_is_a_string() -> None:
    with pytest.raises(TypeError, match=r"Task\.id must be a string, not the int 3"):
        Task(3, ())  # type: ignore[arg-type]
    with pytest.raises(UnicodeEncodeError):
        Task("half \ud800", ())


def test_messages_are_there_for_every_member() -> None:
    """An iterator gave them to the first one alone."""
    with pytest.raises(TypeError, match=r"Task\.messages must be a tuple, not a generator"):
        Task("t", (Message("user", text) for text in "ab"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Task\.messages must be a tuple, not a str"):
        Task("t", "question")  # type: ignore[arg-type]
