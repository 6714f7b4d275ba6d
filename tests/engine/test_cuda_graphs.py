"""Which graph a step takes, and that what a graph runs is the step: here without a graph, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swiftkv.engine.cuda_graphs import choose_size, graph_sizes
from tests.support.decode_toy import LAYER_BLOCK_BYTES, Toy, decode_step

NUM_BLOCKS = 40


@given(max_num_seqs=st.integers(1, 2048), max_graphs=st.integers(8, 100))
def test_sizes_are_few_and_reach_every_batch(max_num_seqs: int, max_graphs: int) -> None:
    sizes = graph_sizes(max_num_seqs, max_graphs)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_num_seqs
    assert len(sizes) <= max_graphs


def test_sizes_as_documented() -> None:
    assert graph_sizes(33) == [1, 2, 4, 8, 16, 24, 32, 33]
    assert graph_sizes(288)[-4:] == [248, 256, 272, 288]


@given(max_num_seqs=st.integers(1, 600), num_seqs=st.integers(1, 700))
def test_a_step_takes_the_smallest_that_holds_it(max_num_seqs: int, num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    expected = min((size for size in sizes if size >= num_seqs), default=None)
    assert choose_size(sizes, num_seqs) == expected


@pytest.mark.parametrize(("num_seqs", "size"), [(1, 1), (1, 4), (3, 4), (5, 8)])
def test_a_padded_step_is_the_step(num_seqs: int, size: int) -> None:
    """Twice into the same tensors, the shorter step second: nothing of the first is left, no other KV is written."""
    generator = np.random.default_rng(size)
    padded, exact = Toy(NUM_BLOCKS, "cpu"), Toy(NUM_BLOCKS, "cpu")
    inputs = padded.inputs(size, NUM_BLOCKS)
    for lengths in (generator.integers(1, 60, size), generator.integers(1, 90, num_seqs)):
        step = decode_step(lengths.tolist(), generator, NUM_BLOCKS)
        padded.fill(step, inputs)
        hidden, expected = padded.run(inputs), exact.eager(step)
        assert hidden.shape[0] == size
        torch.testing.assert_close(hidden[: len(lengths)], expected, atol=2e-2, rtol=2e-2)
        assert torch.equal(padded.pool, exact.pool)


def test_a_graph_that_was_never_filled_writes_nothing() -> None:
    """Warm-up runs before there is a step."""
    toy = Toy(NUM_BLOCKS, "cpu")
    before = toy.pool.clone()
    toy.run(toy.inputs(4, NUM_BLOCKS))
    assert torch.equal(toy.pool, before)
    assert len(before) == NUM_BLOCKS * LAYER_BLOCK_BYTES
