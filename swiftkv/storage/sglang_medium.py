"""Runs a storage backend that was written for SGLang's `HiCacheStorage`, unchanged."""

from __future__ import annotations

import inspect
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from swiftkv.errors import ConfigError
from swiftkv.storage.backend import Capabilities, Parts, Status, Usage
from swiftkv.storage.dynamic import load_class
from swiftkv.storage_options import SglangOptions

_MAX_DROPPED = 65_536
"""The most corrupt keys that are remembered; the oldest are forgotten first."""


@dataclass(frozen=True)
class StorageConfig:
    """The fields of SGLang's `HiCacheStorageConfig`, for one rank that sees flat pages of bytes.

    Ranks, layout and dtype are part of our keys, so the backend need not tell them apart.
    """

    model_name: str
    extra_config: dict[str, Any]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = True
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    logical_page_size: int | None = None


class HiCacheStorage(Protocol):
    """The calls of SGLang's interface that are used here. Keys are text, values flat tensors of bytes."""

    def exists(self, key: str) -> bool: ...
    def get(self, key: str, target_location: torch.Tensor) -> torch.Tensor | None: ...
    def set(self, key: str, value: torch.Tensor) -> bool: ...


@dataclass
class _Dropped:
    """Keys of corrupt objects: the interface has no way to remove one."""

    keys: dict[bytes, None] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, keys: Sequence[bytes]) -> None:
        with self.lock:
            self.keys.update(dict.fromkeys(keys))
            while len(self.keys) > _MAX_DROPPED:
                del self.keys[next(iter(self.keys))]

    def __contains__(self, key: bytes) -> bool:
        return key in self.keys


class SglangMedium:
    """Uses `exists`, `get` and `set`, one key at a time and one call at once, as SGLang's own threads do.

    The zero-copy calls (`batch_get_v1`, `batch_get_v2` and their like) need SGLang's host pool and are not used.
    """

    def __init__(self, options: SglangOptions) -> None:
        """Make the backend, and try it with one small object. Raises `ConfigError`."""
        self._options = options
        self._dropped = _Dropped()
        self._backend = _make_backend(options)
        self._try_out()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_durable=True, is_shared=self._options.is_shared, max_calls=1)

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Return which keys are stored, asking for each: SGLang's batch call stops at the first that is missing."""
        found = []
        for key in keys:
            if time.monotonic() > deadline_s:
                raise TimeoutError("the backend did not answer for all keys in time")
            found.append(key not in self._dropped and bool(self._backend.exists(key.hex())))
        return found

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> list[Status]:
        """Read into one tensor a key, and from there into the parts."""
        statuses = [Status.LATE] * len(keys)
        for i, (key, parts) in enumerate(zip(keys, into, strict=True)):
            if time.monotonic() > deadline_s:
                break
            statuses[i] = Status.MISSING if key in self._dropped else self._read(key.hex(), parts)
        return statuses

    def write(self, keys: Sequence[bytes], sources: Sequence[Parts], deadline_s: float) -> list[Status]:
        """Write one tensor a key. A backend that refuses one is taken to be full."""
        statuses = [Status.LATE] * len(keys)
        for i, (key, parts) in enumerate(zip(keys, sources, strict=True)):
            if time.monotonic() > deadline_s:
                break
            value = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
            statuses[i] = Status.OK if self._backend.set(key.hex(), value) else Status.MISSING
        return statuses

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remember that these are not to be read: the interface has no way to remove them."""
        self._dropped.add(keys)

    def usage(self) -> Usage | None:
        """Return None: the interface does not say."""
        return None

    def close(self) -> None:
        """Close the backend if it can be closed."""
        close = getattr(self._backend, "close", None)
        if callable(close):
            close()

    def _read(self, name: str, parts: Parts) -> Status:
        header, block = parts
        target = torch.empty(len(header) + len(block), dtype=torch.uint8)
        if not self._backend.exists(name):
            return Status.MISSING
        value = self._backend.get(name, target)
        if value is None:
            return Status.MISSING
        found = value.contiguous().view(torch.uint8).flatten().numpy().data
        if len(found) != len(header) + len(block):
            return Status.CORRUPT
        header[:] = found[: len(header)]
        block[:] = found[len(header) :]
        return Status.OK

    def _try_out(self) -> None:
        name, probe = f"swiftkv-probe-{secrets.token_hex(8)}", bytearray(secrets.token_bytes(64))
        header, block = memoryview(bytearray(32)), memoryview(bytearray(32))
        is_set = self._backend.set(name, torch.frombuffer(probe, dtype=torch.uint8))
        if not is_set or self._read(name, (header, block)) is not Status.OK or bytes(header) + bytes(block) != probe:
            raise ConfigError(
                f"class_name: get of {self._options.class_name} does not return what set stored; both must work, "
                "because swiftkv does not use the calls that need SGLang's host pool"
            )


def _make_backend(options: SglangOptions) -> HiCacheStorage:
    """Make the backend as SGLang makes dynamic ones: with its configuration, and with the options as `kwargs`.

    SGLang's own classes have another second argument, which always has a default. It is left out.
    """
    backend_class = load_class(options.module_path, options.class_name)
    arguments: list[object] = [StorageConfig(options.model_name, dict(options.extra_config))]
    second = list(inspect.signature(backend_class).parameters.values())[1:2]
    if second and (second[0].name == "kwargs" or second[0].default is inspect.Parameter.empty):
        arguments.append(dict(options.extra_config))
    try:
        backend: HiCacheStorage = backend_class(*arguments)
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"extra_config: {options.class_name} cannot be made with it: {error!r}") from error
    return backend
