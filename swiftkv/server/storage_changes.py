"""Attaches storage to a model and detaches it, for `/admin`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from pydantic import ValidationError

from swiftkv.errors import ConfigError
from swiftkv.mistakes import describe_mistakes
from swiftkv.policies import IoBackend
from swiftkv.server.engine_storage import EngineStorage
from swiftkv.server.errors import ApiError
from swiftkv.server.node_views import ModelStorage, StorageChange
from swiftkv.storage_options import parse_storage
from swiftkv.tier.messages import TierSpec, tier_spec
from swiftkv.tier_config import StorageConfig

_KEY = "storage"


class StorageChanges:
    """The storage of one model. A change holds for as long as the node runs, also for engines that are started later.

    Host memory is no part of a change: storage is attached below it, and when storage is detached, it stays.

    `remember` keeps the tiers with which the engine is started from now on, and `spec` returns them. `why_not`
    completes "model 'x': …" for a model that can have no storage; `directory` is where relative paths start.
    """

    def __init__(
        self,
        name: str,
        engine: EngineStorage,
        *,
        spec: Callable[[], TierSpec | None],
        remember: Callable[[TierSpec | None], None],
        directory: Path,
        io_backend: IoBackend,
        why_not: str | None,
    ) -> None:
        self._name = name
        self._engine = engine
        self._spec = spec
        self._remember = remember
        self._directory = directory
        self._io_backend = io_backend
        self._why_not = why_not

    def view(self) -> ModelStorage:
        """Return what is attached."""
        spec = self._spec()
        if spec is None:
            return ModelStorage(self._name)
        backend = "host" if spec.backend is None else str(spec.backend.get("backend", "file"))
        return ModelStorage(self._name, backend, self._engine.state, spec.write_policy, spec.prefetch_policy)

    async def attach(self, section: Mapping[str, object]) -> StorageChange:
        """Attach storage; `section` is as `tiers.storage`.

        Raises:
            ApiError: 400 for a mistake in the section; 409 for a model that cannot have storage or has some, and for
                storage that cannot be opened; 503 for an engine that is not there.
        """
        begun_s = time.monotonic()
        if self._why_not is not None:
            raise ApiError(409, f"model '{self._name}': {self._why_not}", param="model", code="no_storage")
        spec = self._below_host(self._parse(section))
        await self._engine.attach(spec)
        self._remember(spec)
        return StorageChange(self._name, self._engine.backend, time.monotonic() - begun_s)

    async def detach(self) -> StorageChange:
        """Detach storage, which keeps its blocks. Raises `ApiError`: 409 if there is none, 503 as `attach` does."""
        begun_s = time.monotonic()
        await self._engine.detach()
        now = self._spec()
        self._remember(None if now is None else now.host_alone())
        return StorageChange(self._name, self._engine.backend, time.monotonic() - begun_s)

    def _below_host(self, spec: TierSpec) -> TierSpec:
        """Return the spec of storage together with the host memory of the model, if it has some."""
        now = self._spec()
        if now is None:
            return spec
        return msgspec.structs.replace(spec, host_fd=now.host_fd, host_member=now.host_member)

    def _parse(self, section: Mapping[str, object]) -> TierSpec:
        try:
            storage = StorageConfig.model_validate(section)
            parse_storage(storage.backend, _KEY, self._directory)
        except ValidationError as error:
            mistakes = "\n".join(f"{_KEY}.{line}" for line in describe_mistakes(error, StorageConfig).splitlines())
            raise ApiError(400, mistakes, code="invalid_storage") from None
        except ConfigError as error:
            raise ApiError(400, str(error), code="invalid_storage") from None
        return tier_spec(storage, self._directory, self._io_backend)
