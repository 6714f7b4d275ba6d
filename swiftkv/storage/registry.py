"""Opens the backend that the options name."""

from __future__ import annotations

from typing import assert_never

from swiftkv.storage.backend import Medium, StorageBackend
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import SealedBackend
from swiftkv.storage_options import (
    DynamicOptions,
    FaultOptions,
    FileOptions,
    MooncakeOptions,
    RedisOptions,
    SglangOptions,
    StorageOptions,
    inner_options,
)


def open_backend(options: StorageOptions, fingerprint: bytes) -> StorageBackend:
    """Open a medium, and put a breaker and an envelope before it.

    `fingerprint` is 16 bytes that name the weights, the KV's dtype, block size and layout.

    Raises:
        ConfigError: The medium cannot be opened with these options; the message begins with the key to change.
    """
    return SealedBackend(GuardedMedium(open_medium(options), Breaker()), fingerprint)


def open_medium(options: StorageOptions) -> Medium:
    """Open a medium, without breaker and envelope. Raises `ConfigError`."""
    match options:
        case FileOptions():
            from swiftkv.storage.file_medium import FileMedium

            return FileMedium(options)
        case RedisOptions():
            from swiftkv.storage.redis_medium import RedisMedium

            return RedisMedium(options)
        case MooncakeOptions():
            from swiftkv.storage.mooncake_medium import MooncakeMedium

            return MooncakeMedium(options)
        case DynamicOptions():
            from swiftkv.storage.dynamic import open_dynamic

            return open_dynamic(options)
        case SglangOptions():
            from swiftkv.storage.sglang_medium import SglangMedium

            return SglangMedium(options)
        case FaultOptions():
            from swiftkv.storage.fault import FaultMedium

            return FaultMedium(open_medium(inner_options(options)), options)
        case _:
            assert_never(options)
