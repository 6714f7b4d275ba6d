"""Backends written for SGLang's published `HiCacheStorage` interface, which need no SGLang to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class DirectoryStorage:
    """Keeps a file for each key, as SGLang's own file backend does. Never overwrites."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        rank = f"{storage_config.tp_rank}_{storage_config.tp_size}"
        self.suffix = f"_{storage_config.model_name}_{rank}.bin"
        self.directory = Path(kwargs["directory"])
        self.directory.mkdir(exist_ok=True)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        if len(data) != target_location.numel() * target_location.element_size():
            raise OSError(f"Short read for {key}")
        target_location.copy_(torch.frombuffer(bytearray(data), dtype=target_location.dtype))
        return target_location  # type: ignore[no-any-return]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        if not self.exists(key):
            self._path(key).write_bytes(value.contiguous().view(torch.uint8).numpy().tobytes())
        return True

    def exists(self, key: str) -> bool:
        return self._path(key).exists()

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{self.suffix}"


class PositionalStorage(DirectoryStorage):
    """Takes a second argument with a default, as the classes that SGLang itself makes."""

    def __init__(self, storage_config: Any, file_path: str = "unset") -> None:
        super().__init__(storage_config, {"directory": storage_config.extra_config["directory"]})
        assert file_path == "unset"


class ZeroCopyOnly(DirectoryStorage):
    """Leaves the calls for single keys empty, as some of SGLang's backends do."""

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        pass

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return True
