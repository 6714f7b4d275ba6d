"""Files and batches of one node: what is kept, and what runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from swiftkv.config import Config
from swiftkv.server.batches.room import Room
from swiftkv.server.batches.runner import BatchRunner
from swiftkv.server.batches.storage import Storage, StorageLimits
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.server.models import ModelHandle, ModelTable


class BatchService:
    """Storage and runner together. `run` it until `stop`, then `close` it."""

    @classmethod
    async def open(
        cls, directory: Path, config: Config, handles: Sequence[ModelHandle], metrics: GatewayMetrics
    ) -> BatchService:
        """Raises `ConfigError` if what is in the directory cannot be read."""
        settings = config.node.batches
        limits = StorageLimits(
            max_file_bytes=settings.max_file,
            max_storage_bytes=settings.max_storage,
            max_line_bytes=config.node.max_body,
            max_requests=settings.max_requests,
        )
        rooms = {model.name: Room.of(model.max_num_seqs, settings.max_in_flight) for model in config.models}
        models = ModelTable({handle.name: handle for handle in handles})
        storage = await Storage.open(directory, limits)
        return cls(storage, BatchRunner(storage, models, rooms, metrics))

    def __init__(self, storage: Storage, runner: BatchRunner) -> None:
        self.storage = storage
        self._runner = runner
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Work on batches until `stop`."""
        try:
            await self._runner.run()
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Abandon the lines that run: they run again when the node is started the next time."""
        self._runner.stop()
        await self._ended.wait()

    async def close(self) -> None:
        """Close the storage; `run` must have ended."""
        await self.storage.close()
