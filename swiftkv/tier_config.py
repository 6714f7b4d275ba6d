"""The `tiers` section of the YAML file: where KV that leaves the pool is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from swiftkv.config_fields import DURATION, SIZE, Duration, Section, Size, read_off
from swiftkv.policies import PrefetchPolicy, WritePolicy
from swiftkv.storage_options import parse_storage

DEFAULT_QUEUE_BYTES = 64 << 20


class StorageConfig(Section):
    """Storage below the pool. Keys that are not named here are the backend's: `storage_options` has them."""

    model_config = ConfigDict(extra="allow")

    write_policy: WritePolicy = Field(
        "write_through", description="write_through, write_through_selective or write_back"
    )
    prefetch_policy: PrefetchPolicy = Field("timeout", description="timeout, best_effort or wait_complete")
    prefetch_threshold: Annotated[int, Field(ge=1)] = Field(256, description="a number of tokens, at least 1")
    prefetch_timeout_base: Duration = Field(1.0, description=DURATION)
    prefetch_timeout_per_ki_token: Duration = Field(0.25, description=DURATION)
    queue: Size = Field(DEFAULT_QUEUE_BYTES, description=SIZE)

    @property
    def backend(self) -> dict[str, Any]:
        """The options of the backend, as the file has them."""
        return dict(self.model_extra or {})


class HostConfig(Section):
    """Host memory below the pool, which engines with equal weights share: the bytes that each rank brings."""

    size: Size | None = Field(None, description=SIZE)
    ratio: Annotated[float, Field(gt=0.0, le=1e6, strict=False)] | None = Field(
        None, description="the size as a multiple of the pool's, such as 2.0"
    )

    @model_validator(mode="after")
    def _check_amount(self) -> HostConfig:
        if (self.size is None) == (self.ratio is None):
            raise ValueError("either of the two")
        return self

    def bytes_for(self, pool_bytes: int | None) -> int:
        """Return the bytes that a rank with a pool of `pool_bytes` brings; `None`: known only once it has started."""
        if self.size is not None:
            return self.size
        assert self.ratio is not None
        assert pool_bytes is not None
        return int(self.ratio * pool_bytes)


class TiersConfig(Section):
    """The places below the pool of a model."""

    host: Annotated[HostConfig | None, BeforeValidator(read_off)] = Field(
        None, description="off, or a mapping with either size or ratio, such as {ratio: 2.0} or {size: 8GiB}"
    )
    storage: Annotated[StorageConfig | None, BeforeValidator(read_off)] = Field(
        None, description="off, or a mapping such as {backend: file, path: kv, size: 20GiB}"
    )


def check_backends(sections: Mapping[str, TiersConfig | None], file: Path) -> None:
    """Check the options of every backend, by the section that it stands in. Raises `ConfigError`."""
    for where, tiers in sections.items():
        if tiers is not None and tiers.storage is not None:
            parse_storage(tiers.storage.backend, f"{where}.tiers.storage", file.resolve().parent)
