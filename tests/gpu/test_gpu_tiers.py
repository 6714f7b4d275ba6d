"""Host memory and storage below a pool on a GPU: copies are ordered with the steps, and change no token."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("msgspec")  # needed to read config.json
pytest.importorskip("transformers")
pytest.importorskip("zmq")
pytest.importorskip("pydantic")
pytest.importorskip("swiftkv._core")

from swiftkv.cache.cuda_pool import CudaPool
from swiftkv.cache.geometry import KVGroup
from swiftkv.engine.messages import AttachStorage, DetachStorage
from swiftkv.storage.backend import Status
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import SealedBackend
from swiftkv.storage.host_medium import make_host_memory
from swiftkv.storage.levels import Level, Levels
from swiftkv.tier.keys import ObjectKeys
from swiftkv.tier.loader import Load, Loader, PartRead, Target
from swiftkv.tier.messages import TierSpec
from swiftkv.tier.reach import DeviceReach, Span
from swiftkv.tier.stored_blocks import BlockName, StoredBlocks
from tests.engine.engine_process import Answer, EngineClient, EngineProcess, tokens, wait_until_stored
from tests.support.checkpoints import make_checkpoint
from tests.support.storage import TIMEOUT_S, MemoryMedium, Owner

pytestmark = pytest.mark.gpu

GROUP = KVGroup((0, 1), num_kv_heads=2, head_dim=32, dtype="bfloat16", block_size=64)  # that of the tiny model
BYTES = GROUP.block_bytes
LONG_CYCLES = 1 << 31  # about a second
BLOCK = 64
PROMPTS = [[(7 * i * i + shift) % 300 + 3 for i in range(n)] for shift, n in enumerate((700, 530))]


class OnDevice:
    """A pool on the GPU, and the way to it."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.pool = CudaPool([(GROUP, num_blocks)], torch.device("cuda:0"))
        self.reach = DeviceReach([self.pool.tensor], BYTES)

    def block(self, number: int) -> torch.Tensor:
        return self.pool.tensor[number * BYTES : (number + 1) * BYTES]


def span(number: int) -> Span:
    return Span(number * BYTES, BYTES, 1)


def random_bytes(num_blocks: int) -> np.ndarray:
    return np.random.default_rng(num_blocks).integers(0, 256, (num_blocks, BYTES)).astype(np.uint8)


def test_blocks_come_up_and_go_down_with_all_their_bytes() -> None:
    here = OnDevice()
    places, content = [5, 0, 14, 6], random_bytes(4)
    for (slot,), block in zip(here.reach.landing([span(place) for place in places]), content, strict=True):
        slot[:] = block.data
    here.reach.land([span(place) for place in places[:3]])
    blocks = here.pool.tensor.view(-1, BYTES).cpu().numpy()
    assert (blocks[places[:3]] == content[:3]).all()
    assert not np.delete(blocks, places[:3], axis=0).any()
    queue = here.reach.buffer(3 * BYTES)
    assert queue.is_pinned()
    here.reach.take((queue[i * BYTES : (i + 1) * BYTES], here.block(place)) for i, place in enumerate(places[:3]))
    assert (queue.view(-1, BYTES).numpy() == content[:3]).all()


def test_a_block_lands_after_the_steps_that_were_launched_before_it_was_handed_out() -> None:
    """The loader reads at once, but copies when the step that may still write to the block is over."""
    here, owner = OnDevice(), Owner()
    keys = ObjectKeys([GROUP], "weights", "triton")
    backend = SealedBackend(GuardedMedium(MemoryMedium("gpu order"), Breaker()), keys.fingerprint)
    stored = StoredBlocks(Levels([Level("storage", backend)]), keys)
    name, content = BlockName(bytes(32), 0), random_bytes(1)
    soon_s = time.monotonic() + TIMEOUT_S
    assert stored.put([name], [[content[0].data]], soon_s) == [Status.OK]
    loader = Loader(stored, here.reach, owner.wake)
    torch.cuda._sleep(LONG_CYCLES)
    here.block(3).fill_(7)
    loader.submit(Load(1, [Target(name, 0, 3, span(3))], soon_s, here.reach.fence()))
    owner.wait_for_more(0)
    (part,) = loader.take_done()
    assert isinstance(part, PartRead)
    assert part.num_read == 1
    assert (here.block(3).cpu().numpy() == content[0]).all()
    loader.close()
    loader.join(TIMEOUT_S)


def test_copies_run_beside_a_step() -> None:
    here = OnDevice()
    queue = here.reach.buffer(BYTES)
    here.block(2).fill_(9)
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * LONG_CYCLES)
    step = torch.cuda.Event()
    step.record()
    here.reach.take([(queue, here.block(2))])
    here.reach.landing([span(4)])[0][0][:] = bytes(BYTES)
    here.reach.land([span(4)])
    is_over = step.query()
    assert not is_over, "the copies waited for a step that has nothing to do with them"
    assert queue.tolist() == [9] * BYTES


def test_graphs_are_captured_while_threads_copy() -> None:
    """An engine that wakes captures them anew, while its storage is attached."""
    here, is_over = OnDevice(), threading.Event()
    queue = here.reach.buffer(BYTES)
    counts = {"up": 0, "down": 0}
    errors: list[RuntimeError] = []

    def go_on(direction: str) -> None:
        try:
            while not is_over.is_set():
                if direction == "up":
                    here.reach.landing([span(1)])[0][0][:] = bytes([counts[direction] % 256]) * BYTES
                    here.reach.land([span(1)])
                else:
                    here.reach.take([(queue, here.block(2))])
                counts[direction] += 1
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=go_on, args=(direction,)) for direction in counts]
    for thread in threads:
        thread.start()
    try:
        numbers = torch.arange(1024, device="cuda:0")
        assert int((numbers * 2).sum()) == 1023 * 1024  # the kernels are loaded
        stream = torch.cuda.Stream()
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                doubled = numbers * 2
            graph.replay()
            assert torch.equal(doubled, torch.arange(0, 2048, 2, device="cuda:0"))
    finally:  # or the process would never end
        is_over.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert not errors
    assert all(counts.values())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpu-tiers") / "tiny"
    make_checkpoint(directory, "qwen3", dtype=torch.bfloat16, max_position_embeddings=2048)
    return directory


@pytest.fixture
def host_fd() -> Iterator[int]:
    fd = make_host_memory(64 << 20, 4096)
    yield fd
    os.close(fd)


def tier(directory: Path, host_fd: int | None = None, **options: Any) -> TierSpec:
    file = {"backend": "file", "path": str(directory / "kv"), "size": 1 << 30, "min_free": 0}
    options = {"prefetch_policy": "wait_complete", "prefetch_threshold": BLOCK, **options}
    return TierSpec(file, "/", host_fd=host_fd, **options)


@contextmanager
def engine(checkpoint: Path, storage: TierSpec | None = None, **options: Any) -> Iterator[EngineProcess]:
    options = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 256, **options}
    with EngineProcess(
        checkpoint,
        device="cuda:0",
        dtype="bfloat16",
        block_size=BLOCK,
        async_scheduling=True,
        storage=storage,
        **options,
    ) as client:
        yield client


def one_by_one(client: EngineClient) -> list[Answer]:
    """Return the answers to `PROMPTS`, each of which is alone, so that nothing rounds differently beside others."""
    return [client.generate([prompt])[0] for prompt in PROMPTS]


IN_BLOCKS = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]


def test_what_is_loaded_gives_the_tokens_of_what_was_in_the_pool(
    checkpoint: Path, tmp_path: Path, host_fd: int
) -> None:
    """First it comes from storage, which copies it into host memory, and then from there."""
    with engine(checkpoint, tier(tmp_path)) as client:
        one_by_one(client)
        in_pool = one_by_one(client)
        wait_until_stored(client)
    assert [answer.cached_tokens for answer in in_pool] == IN_BLOCKS
    for place in ("storage", "host"):
        with engine(checkpoint, tier(tmp_path, host_fd)) as client:
            loaded = one_by_one(client)
            stats = client.wait_for_rest()
        assert [answer.hit_tokens[place] for answer in loaded] == IN_BLOCKS
        assert tokens(loaded) == tokens(in_pool)
        assert stats.tier is not None
        assert not stats.tier.failures_total


def test_steps_copy_blocks_that_fill_chunks_of_host_memory(checkpoint: Path) -> None:
    """No reader copies what they copy."""
    fd = make_host_memory(64 << 20, BYTES)
    spec = TierSpec(None, "/", host_fd=fd, prefetch_policy="wait_complete", prefetch_threshold=BLOCK)
    with engine(checkpoint, spec) as client:
        one_by_one(client)
        in_pool = one_by_one(client)
        wait_until_stored(client)
    with engine(checkpoint, spec) as client:
        copied = one_by_one(client)
        stats = client.wait_for_rest()
    os.close(fd)
    assert [answer.hit_tokens["host"] for answer in copied] == IN_BLOCKS
    assert tokens(copied) == tokens(in_pool)
    assert stats.layer_stream_load is not None
    assert sum(stats.layer_stream_load.counts) == len(PROMPTS)  # each by one step
    assert stats.tier is not None
    assert stats.tier.loaded_bytes_total == sum(IN_BLOCKS) // BLOCK * BYTES
    assert not stats.tier.failures_total


def test_what_leaves_the_pool_comes_back_while_others_decode(checkpoint: Path, tmp_path: Path) -> None:
    """The pool has room for one of the prompts and a little more, and a step is always in flight."""
    with engine(checkpoint, tier(tmp_path)) as client:
        one_by_one(client)
        in_pool = one_by_one(client)
        wait_until_stored(client)
    with engine(checkpoint, tier(tmp_path), kv_bytes=18 * BYTES) as client:
        for _ in range(5):
            beside = client.add([5, 6, 7], max_tokens=100)
            found = one_by_one(client)
            assert all(len(answer.token_ids) == 16 for answer in found)
            client.wait([beside])
        loaded = one_by_one(client)
        stats = client.wait_for_rest()
    assert tokens(loaded) == tokens(in_pool)
    assert stats.tier is not None
    assert stats.tier.hit_tokens_total > sum(IN_BLOCKS)
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


def test_an_engine_that_ends_writes_back_what_it_has(checkpoint: Path, tmp_path: Path) -> None:
    with engine(checkpoint, tier(tmp_path, write_policy="write_back")) as client:
        one_by_one(client)
        in_pool = one_by_one(client)
    with engine(checkpoint, tier(tmp_path)) as client:
        loaded = one_by_one(client)
    assert [answer.cached_tokens for answer in loaded] == IN_BLOCKS
    assert tokens(loaded) == tokens(in_pool)


def test_storage_comes_and_goes(checkpoint: Path, tmp_path: Path) -> None:
    with engine(checkpoint) as client:
        one_by_one(client)
        in_pool = one_by_one(client)
        client.send(AttachStorage(1, tier(tmp_path)))
        running = client.add([5, 6, 7], max_tokens=200)
        while not client.changes:
            client.take_one()
        assert client.changes.pop().why_not is None
        client.wait([running])
        wait_until_stored(client)
        client.send(DetachStorage(2))
        while not client.changes:
            client.take_one()
        assert client.changes.pop().why_not is None
        assert tokens(one_by_one(client)) == tokens(in_pool)
    with engine(checkpoint, tier(tmp_path)) as client:
        loaded = one_by_one(client)
    assert [answer.cached_tokens for answer in loaded] == IN_BLOCKS
    assert tokens(loaded) == tokens(in_pool)
