"""Engines with tiers below their pool, in threads of the test's process, and the host memory that they share."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swiftkv.engine.engine import Engine
from swiftkv.engine.messages import AttachStorage, DetachStorage
from swiftkv.engine.runner import ModelRunner
from swiftkv.models.registry import read_config
from swiftkv.shared_memory import map_memory
from swiftkv.storage.host_medium import HostMedium, make_host_memory
from swiftkv.tier.messages import TierSpec
from tests.engine.engine_process import tokens, wait_until_stored
from tests.engine.engine_thread import EngineThread
from tests.support.node_process import wait_for

BLOCK = 16
HOST_BYTES = 16 << 20
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128}
TIMEOUT_S = 60.0


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(length)]


PROMPTS = [prompt(300, 1), prompt(260, 2)]
CACHED = [(len(p) - 1) // BLOCK * BLOCK for p in PROMPTS]


@contextmanager
def host_memory(checkpoint: Path, num_chunks: int | None = None) -> Iterator[int]:
    """Make host memory whose chunks are blocks of this model."""
    groups = read_config(checkpoint).kv_groups(BLOCK, "float32")
    chunk_bytes = min(group.block_bytes for group in groups if group.kind != "window")
    fd = make_host_memory(HOST_BYTES if num_chunks is None else bytes_for(num_chunks, chunk_bytes), chunk_bytes)
    yield fd
    os.close(fd)


def bytes_for(num_chunks: int, chunk_bytes: int) -> int:
    """Return the size of a memory with so many chunks."""
    num_bytes = num_chunks * chunk_bytes
    while True:
        fd = make_host_memory(num_bytes, chunk_bytes)
        found = HostMedium.of(fd).num_chunks
        os.close(fd)
        if found >= num_chunks:
            return num_bytes
        num_bytes += 4096


def spec(host_fd: int, member: int = 0, **options: Any) -> TierSpec:
    options = {"prefetch_policy": "wait_complete", "prefetch_threshold": BLOCK, **options}
    return TierSpec(None, "/", host_fd=host_fd, host_member=member, **options)


class Client(EngineThread[ModelRunner]):
    """An engine whose inner state a test sees."""

    engine: Engine

    def prepare(self, engine: Engine) -> None:
        self.engine = engine

    def host_blocks(self) -> tuple[int, int]:
        """Return how many blocks in host memory are in use and cached."""
        attended = self.engine._runner.pool.host_blocks
        assert attended is not None
        group = self.engine._scheduler.stats().groups[attended.group]
        assert not group.host_loading
        return group.host_used, group.host_cached

    def clear_cache(self) -> None:
        """Empty the prefix cache, and wait until no block is in use in host memory, and none cached."""
        self.forget_all()
        wait_for("blocks in host memory to be let go of", lambda: self.host_blocks() == (0, 0))


def change(client: Client, message: AttachStorage | DetachStorage) -> None:
    """Have storage attached or detached, and wait for it."""
    client.send(message)
    while not client.changes:
        client.take_one()
    assert client.changes.pop().why_not is None


@contextmanager
def engine(checkpoint: Path, runner: type[ModelRunner] = ModelRunner, **options: Any) -> Iterator[Client]:
    client = Client(checkpoint, runner, **{**OPTIONS, **options})
    with client.running():
        yield client


def right_answers(checkpoint: Path, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    """Return the answers of an engine without tiers."""
    with engine(checkpoint) as client:
        return tokens(client.generate(prompts, **sampling))


def fill(checkpoint: Path, host_fd: int, member: int = 0, prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
    """Have an engine write the prompts to host memory, and end."""
    with engine(checkpoint, storage=spec(host_fd, member)) as client:
        client.generate(prompts)
        wait_until_stored(client)


def spoil(host_fd: int) -> None:
    """Flip a bit in every seventh block that lies in host memory."""
    medium = HostMedium.of(host_fd, 63)
    memory = map_memory(host_fd, HOST_BYTES)
    written = [
        chunk
        for chunk in range(medium.num_chunks)
        if any(memory[medium.chunks_offset_bytes + chunk * medium.chunk_bytes :][: medium.chunk_bytes])
    ]
    for chunk in written[5::7]:
        memory[medium.chunks_offset_bytes + chunk * medium.chunk_bytes + 100] ^= 1


def pinned_chunks(host_fd: int) -> dict[int, int]:
    """Return the members that pin each pinned chunk, one bit each."""
    medium = HostMedium.of(host_fd, 63)
    by_chunk = enumerate(medium._memory.pinned_by(range(medium.num_chunks)))
    return {chunk: members for chunk, members in by_chunk if members}


def check(host_fd: int) -> None:
    HostMedium.of(host_fd, 63)._memory.check_invariants(time.monotonic() + TIMEOUT_S)
