"""The host memory below the pools of a node: which models share it, and how much of it they may have."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from swiftkv._host import MAX_MEMBERS
from swiftkv.engine.messages import EngineConfig
from swiftkv.errors import ConfigError
from swiftkv.machine_memory import allowed_memory_bytes
from swiftkv.models.quantization import OWN_FILES
from swiftkv.planning.models import ModelPlan, SizedPlan, host_chunk_bytes
from swiftkv.storage.host_medium import HostMedium, make_host_memory
from swiftkv.units import format_size

_LARGEST_PART = 0.8
_LOCK_PATIENCE_S = 0.1


def check_memory(plans: Sequence[ModelPlan]) -> None:
    """Raise `ConfigError` if this machine's memory is not enough for models that serve together and their tiers."""
    check_fits_machine(plans)
    HostTiers().check(plans)


def check_fits_machine(plans: Sequence[ModelPlan], allowed_bytes: int | None = None) -> None:
    """Raise `ConfigError` if weights and pools of models on the CPU need more memory than the machine allows.

    Otherwise engines would be killed after they started, because memory is taken only when it is touched.
    """
    allowed_bytes = allowed_memory_bytes() if allowed_bytes is None else allowed_bytes
    on_host = _on_host(plans)
    pool_bytes = sum(plan.tensor_parallel_size * plan.pool_bytes for plan in on_host)
    weight_bytes = sum(plan.tensor_parallel_size * plan.weight_bytes for plan in on_host)
    if pool_bytes + weight_bytes > allowed_bytes:
        raise ConfigError(
            f"kv_cache.memory: {', '.join(plan.name for plan in on_host)}: pools of {format_size(pool_bytes)} and "
            f"weights of {format_size(weight_bytes)} are more than the {format_size(allowed_bytes)} that this machine "
            "or control group allows; lower kv_cache.memory, or put a model to sleep at level 2"
        )


def _on_host(plans: Sequence[ModelPlan]) -> list[SizedPlan]:
    """Return the plans of the models whose weights and pools lie in this machine's memory."""
    return [plan for plan in plans if isinstance(plan, SizedPlan) and not plan.on_gpu]


@dataclass(slots=True)
class _Memory:
    fd: int
    nbytes: int
    members: dict[str, int] = field(default_factory=dict)  # the number of each model that uses the memory

    def admit(self, name: str) -> int:
        """Return a model's number, the lowest that is free unless it has one. Raises `ConfigError` if none is."""
        if name not in self.members:
            free = set(range(MAX_MEMBERS)) - set(self.members.values())
            if not free:
                raise ConfigError(
                    f"tiers.host: {name}: {MAX_MEMBERS} models with these files share host memory, and no more can; "
                    "remove one of them, or tiers.host of this one"
                )
            self.members[name] = min(free)
        return self.members[name]

    def dismiss(self, name: str) -> None:
        """Take a model's number back, and what its engine, which has ended, left behind."""
        if len(self.members) > 1:
            self.clean_up(name)
        self.members.pop(name, None)

    def clean_up(self, name: str) -> None:
        """Take back what a model's engine, which has ended, left behind."""
        if (member := self.members.get(name)) is not None:
            with suppress(OSError):  # then the next engine with this number that uses the memory does it
                HostMedium.of(self.fd).release_member(member, time.monotonic() + _LOCK_PATIENCE_S)


class HostTiers:
    """The host memories, one for all models whose weights are the same files.

    A memory is as large as the sizes of the models that it was made for, added up; a model that is added later does not
    enlarge it.
    """

    def __init__(self) -> None:
        self._memories: dict[frozenset[tuple[int, int]], _Memory] = {}

    def check(self, plans: Sequence[ModelPlan], allowed_bytes: int | None = None) -> None:
        """Raise `ConfigError` if the tiers of `plans` want more than 80 % of the memory that weights and pools leave.

        Models on GPUs leave all of it, but lock some pages for copies between their pools and their tiers. Nothing is
        measured: engines that start together would each count the other's.
        """
        page_locked_bytes = sum(plan.page_locked_bytes for plan in plans)
        wanted_bytes = self._bytes_with(plans) + page_locked_bytes
        if not wanted_bytes:
            return
        allowed_bytes = allowed_memory_bytes() if allowed_bytes is None else allowed_bytes
        on_host = _on_host(plans)
        taken_bytes = sum(plan.tensor_parallel_size * (plan.weight_bytes + plan.pool_bytes) for plan in on_host)
        limit_bytes = max(0, int(_LARGEST_PART * (allowed_bytes - taken_bytes)))
        if wanted_bytes > limit_bytes:
            locked = f", {format_size(page_locked_bytes)} of it to copy from and to GPUs" if page_locked_bytes else ""
            raise ConfigError(
                f"tiers.host: the models ask for {format_size(wanted_bytes)} of host memory together{locked}; of the "
                f"{format_size(allowed_bytes)} that this machine or control group allows, weights and pools take "
                f"{format_size(taken_bytes)}, and 80 % of the rest is {format_size(limit_bytes)}; lower size or ratio"
            )

    def _bytes_with(self, plans: Sequence[ModelPlan]) -> int:
        """Return the size of the memories that there are, and of those that `plans` need besides."""
        made_bytes = sum(memory.nbytes for memory in self._memories.values())
        to_make = [plan for plan in self._without_memory(plans) if _files_of(plan) not in self._memories]
        return made_bytes + sum(plan.host_bytes or 0 for plan in to_make)

    def _without_memory(self, plans: Sequence[ModelPlan]) -> list[ModelPlan]:
        """Return the plans that need memory and have none yet. The files of the others may have been replaced."""
        have_some = {name for memory in self._memories.values() for name in memory.members}
        return [plan for plan in plans if plan.host_bytes and plan.name not in have_some]

    def equip(self, plan: ModelPlan, engine: EngineConfig, plans: Sequence[ModelPlan]) -> EngineConfig:
        """Return an engine's configuration with its host memory, if it has any. `plans` are those of all models.

        Raises `ConfigError` if the memory cannot be allocated, or too many models share it.
        """
        if plan.host_bytes is None:
            return engine
        assert engine.storage is not None
        weights = _files_of(plan)
        if weights not in self._memories:
            sharers = [other for other in self._without_memory(plans) if _files_of(other) == weights]
            num_bytes = sum(sharer.host_bytes or 0 for sharer in sharers)
            self._memories[weights] = _Memory(_make_memory(plan, sharers, num_bytes), num_bytes)
        memory = self._memories[weights]
        member = memory.admit(plan.name)
        storage = msgspec.structs.replace(engine.storage, host_fd=memory.fd, host_member=member)
        return msgspec.structs.replace(engine, storage=storage)

    def clean_up(self, name: str) -> None:
        """Take back what a model's engine, which has ended, left behind in its memory.

        The next engine would do so when it starts, but there may be none for long.
        """
        for memory in self._memories.values():
            memory.clean_up(name)

    def release(self, name: str) -> None:
        """Note that a model is gone; free a memory whose last model this was."""
        for weights, memory in list(self._memories.items()):
            memory.dismiss(name)
            if not memory.members:
                os.close(memory.fd)
                del self._memories[weights]


def _make_memory(plan: ModelPlan, sharers: Sequence[ModelPlan], num_bytes: int) -> int:
    chunk_bytes = host_chunk_bytes([group for sharer in sharers for group in sharer.groups])
    try:
        return make_host_memory(num_bytes, chunk_bytes)
    except ValueError:
        raise ConfigError(
            f"tiers.host: no block of {plan.name} fits into {format_size(num_bytes)}; raise size or ratio"
        ) from None
    except OSError as error:
        raise ConfigError(f"tiers.host: cannot allocate {format_size(num_bytes)}: {error.strerror}") from error


def _files_of(plan: ModelPlan) -> frozenset[tuple[int, int]]:
    """Return the identities of the files that a model is loaded from, which do not depend on their names."""
    directory: Path = plan.checkpoint.directory
    descriptions = [directory / name for name in OWN_FILES if (directory / name).is_file()]
    found = (file.stat() for file in [directory / "config.json", *descriptions, *directory.glob("*.safetensors")])
    return frozenset((status.st_dev, status.st_ino) for status in found)
