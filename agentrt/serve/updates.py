"""New weights for a server: POST /weights, from a folder that it can read, or from shared memory or a GPU of its machine.

{"version": 3, "folder": "step-3"}        the answer, when requests go on with them: how the update went
"""

from pathlib import Path

import msgspec

from agentrt.core.errors import WeightsError
from agentrt.core.protocol import DeviceWeights, Engine, SharedWeights, UpdateMode, UpdateReport, WeightSource
from agentrt.serve.requests import BadRequest


class Update(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body. One of `folder`, of safetensors, `memory` and `device_memory`."""

    version: int
    folder: str = ""
    memory: SharedWeights | None = None
    device_memory: DeviceWeights | None = None
    mode: UpdateMode = "recompute"


class Updates:
    """Takes weights for an engine, which it borrows, from folders in `root`."""

    def __init__(self, engine: Engine, root: Path) -> None:
        self._engine, self._root = engine, root.resolve()

    async def take(self, update: Update) -> UpdateReport:
        """As `Engine.update_weights`; `BadRequest` if they cannot be had or do not fit: then the old ones serve on."""
        try:
            return await self._engine.update_weights(update.version, self._source(update), update.mode)
        except WeightsError as error:
            raise BadRequest(str(error)) from error

    def _source(self, update: Update) -> WeightSource:
        memory = update.memory or update.device_memory
        if sum(map(bool, (update.folder, update.memory, update.device_memory))) != 1:
            raise BadRequest("give one of folder, memory and device_memory", param="folder")
        if memory is not None:
            return memory
        folder = (self._root / update.folder).resolve()
        if not folder.is_relative_to(self._root):
            raise BadRequest(f"the folder is outside of {self._root}, from which alone weights come", param="folder")
        return folder
