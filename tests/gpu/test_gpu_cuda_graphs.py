"""Replayed steps are the steps, for every batch size and context, and memory has a bound."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from swiftkv.engine.cuda_graphs import DecodeGraphs, graph_sizes
from tests.support.decode_toy import Toy, decode_step

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
NUM_BLOCKS = 600
UNLIMITED = 1 << 40


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_replay_is_the_eager_step() -> None:
    generator = np.random.default_rng(0)
    toy, exact = Toy(NUM_BLOCKS, "cuda"), Toy(NUM_BLOCKS, "cuda")
    before = toy.pool.clone()
    graphs = DecodeGraphs(toy, DEVICE, num_entries=NUM_BLOCKS)
    graphs.capture(graph_sizes(17), UNLIMITED)
    assert graphs.sizes() == [1, 2, 4, 8, 16, 17]
    assert torch.equal(toy.pool, before)  # capturing wrote no KV
    num_seqs = [17, 1, 5, 16, 3, 9, 2, 17, 4]
    for n in num_seqs:
        step = decode_step(generator.integers(1, 512, n).tolist(), generator, NUM_BLOCKS)
        hidden = graphs.run(step)
        assert hidden is not None
        torch.testing.assert_close(hidden, exact.eager(step), atol=2e-2, rtol=2e-2)
        assert torch.equal(toy.pool, exact.pool)
    assert (graphs.hits_total, graphs.misses_total) == (len(num_seqs), 0)


def test_steps_follow_each_other_without_a_wait() -> None:
    """The next step is written while the last still runs; nothing of it may reach the last."""
    generator = np.random.default_rng(1)
    toy, exact = Toy(NUM_BLOCKS, "cuda"), Toy(NUM_BLOCKS, "cuda")
    graphs = DecodeGraphs(toy, DEVICE, num_entries=NUM_BLOCKS)
    graphs.capture([8], UNLIMITED)
    steps = [decode_step(generator.integers(1, 512, 8).tolist(), generator, NUM_BLOCKS) for _ in range(50)]
    results = []
    for step in steps:
        hidden = graphs.run(step)
        assert hidden is not None
        results.append(hidden.clone())
    for step, result in zip(steps, results, strict=True):
        torch.testing.assert_close(result, exact.eager(step), atol=2e-2, rtol=2e-2)
    assert torch.equal(toy.pool, exact.pool)


def test_what_no_graph_holds_is_run_eagerly() -> None:
    generator = np.random.default_rng(2)
    graphs = DecodeGraphs(Toy(NUM_BLOCKS, "cuda"), DEVICE, num_entries=10)
    graphs.capture([1, 2], UNLIMITED)
    assert graphs.run(decode_step([5, 6, 7], generator, NUM_BLOCKS)) is None
    assert graphs.run(decode_step([11 * 16], generator, NUM_BLOCKS)) is None
    assert (graphs.hits_total, graphs.misses_total) == (0, 2)
    assert graphs.run(decode_step([5, 10], generator, NUM_BLOCKS)) is not None


def test_memory_has_a_bound() -> None:
    generator = np.random.default_rng(3)
    graphs = DecodeGraphs(Toy(NUM_BLOCKS, "cuda"), DEVICE, num_entries=NUM_BLOCKS)
    graphs.capture([1, 2, 4], memory_limit_bytes=-1)
    assert graphs.sizes() == []
    assert graphs.run(decode_step([5], generator, NUM_BLOCKS)) is None
