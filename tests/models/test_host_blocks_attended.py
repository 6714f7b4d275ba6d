"""Attention over blocks that lie in host memory gives the bits that it gives over blocks of the pool."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkv.cache.host_blocks import HostChunks
from swiftkv.cache.pool import Pool, SharedHostMemory
from swiftkv.kernels.ops import AnyOps
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import read_config
from swiftkv.shared_memory import HUGE_PAGE_BYTES, make_memory
from tests.support.checkpoints import make_checkpoint
from tests.support.paged import PagedRunner

HOST_BYTES = 64 << 20
NUM_CHUNKS = 24
CHUNKS = (40, 1, 23)
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 48},
    "mimo": {},
    "gemma3": {},
}
PROMPTS = {
    name: torch.randint(320, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for name, length in (("long", 150), ("short", 37))
}


@pytest.fixture
def host_fd() -> Iterator[int]:
    fd = make_memory("test", HOST_BYTES)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", SHAPES)
def test_blocks_in_host_memory_are_attended_as_those_of_the_pool(
    arch: str, dtype: str, ops: AnyOps, tmp_path: Path, host_fd: int
) -> None:
    make_checkpoint(tmp_path, arch, **SHAPES[arch])
    decoder = load_decoder(read_config(tmp_path), MappedWeights(tmp_path), getattr(torch, dtype), "cpu", 256, ops=ops)
    groups = decoder.kv_groups
    (full,) = (index for index, group in enumerate(groups) if group.kind != "window")
    chunks = HostChunks(HUGE_PAGE_BYTES, groups[full].block_bytes, NUM_CHUNKS)
    counts = [40 if group.kind == "window" else 3 for group in groups]
    pool = Pool(list(zip(groups, counts, strict=True)), host=SharedHostMemory(host_fd, HOST_BYTES, chunks))
    blocks = pool.host_blocks
    assert blocks is not None

    plain, beside = PagedRunner(decoder), PagedRunner(decoder)
    for index, (group, count) in enumerate(zip(groups, counts, strict=True)):
        entries = [block * group.num_layers for block in range(count)]
        if index == full:
            entries += [blocks.first + chunk * blocks.stride for chunk in range(NUM_CHUNKS)]
        beside.use(index, pool.attended_tensor(index), entries)
    expected, found = (runner.run(PROMPTS, CHUNKS) for runner in (plain, beside))
    assert pool.host_memory is not None
    assert any(pool.host_memory[HUGE_PAGE_BYTES:])
    for name in PROMPTS:
        assert torch.equal(found[name], expected[name])
