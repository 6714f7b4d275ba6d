"""The files and batches of one node: their storage and their runner."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from swiftkv.config import Config
from swiftkv.model_config import ModelConfig
from swiftkv.server.batches.room import Room
from swiftkv.server.batches.runner import BatchRunner
from swiftkv.server.batches.storage import Storage, StorageLimits
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.server.models import ModelTable


class BatchService:
    """Storage and runner together. `run` it until it is cancelled, then `close` it."""

    @classmethod
    async def open(cls, directory: Path, config: Config, models: ModelTable, metrics: GatewayMetrics) -> BatchService:
        """Begin to serve `models`, which may change. Raises `ConfigError` if the directory cannot be read."""
        settings = config.node.batches
        limits = StorageLimits(
            max_file_bytes=settings.max_file,
            max_storage_bytes=settings.max_storage,
            max_line_bytes=config.node.max_body,
            max_requests=settings.max_requests,
        )
        rooms = {model.name: Room.of(model.max_num_seqs, settings.max_in_flight) for model in config.models}
        storage = await Storage.open(directory, limits)
        return cls(storage, BatchRunner(storage, models, rooms, metrics), rooms, settings.max_in_flight)

    def __init__(
        self, storage: Storage, runner: BatchRunner, rooms: dict[str, Room], max_in_flight: int | None
    ) -> None:
        self.storage = storage
        self._rooms = rooms
        self._max_in_flight = max_in_flight
        self._runner = runner

    def add(self, model: ModelConfig) -> None:
        """Note the size of a model that is about to serve. A removed model's stays until the name is used again."""
        self._rooms[model.name] = Room.of(model.max_num_seqs, self._max_in_flight)

    async def run(self) -> NoReturn:
        """Work on batches until cancelled. Unfinished lines run again when the node is next started."""
        await self._runner.run()

    async def close(self) -> None:
        """Close the storage; `run` must have ended."""
        await self.storage.close()
