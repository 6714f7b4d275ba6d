"""Which graph a step takes, and that what a graph runs is the step: here without a graph, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swiftkv.engine.cuda_graphs import DecodeGraphs, DenseDecode, choose_size, graph_sizes
from swiftkv.kernels.dispatch import select_ops
from swiftkv.models.batch import ModelInput
from swiftkv.models.config import DecoderConfig
from swiftkv.models.dense import DenseDecoder
from swiftkv.models.loader import MappedWeights
from tests.support.checkpoints import make_checkpoint
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


def test_a_dense_decoder_is_captured_as_it_is(tmp_path: Path) -> None:
    """Three of four rows are taken; the kernels' own step is what the padded one is compared with."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2, head_dim=16, hidden_size=32, intermediate_size=48)
    config, num_blocks = DecoderConfig.from_pretrained(tmp_path), 12
    ops = select_ops("cuda")
    ops = replace(ops, prepare_batch=partial(ops.prepare_batch, device="cpu"))
    decoder = DenseDecoder(config, MappedWeights(tmp_path), torch.float32, "cpu", 64, ops=ops)
    (group,) = config.kv_groups(16, "float32")
    nbytes = num_blocks * group.block_bytes
    pool = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(1)).view(torch.uint8)
    exact = pool.clone()
    step = decode_step([20, 1, 33], np.random.default_rng(1), num_blocks, num_layers=config.num_layers)
    expected = decoder.forward(ModelInput.from_plan(step), exact)
    captured = DenseDecode(decoder, pool, torch.zeros(4, dtype=torch.int32))
    inputs = captured.inputs(4, num_entries=10)
    captured.fill(step, inputs)
    torch.testing.assert_close(captured.run(inputs)[:3], expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(pool.view(torch.float32), exact.view(torch.float32), atol=2e-5, rtol=2e-5)


def test_a_graph_that_was_never_filled_writes_nothing() -> None:
    """Warm-up runs before there is a step."""
    toy = Toy(NUM_BLOCKS, "cpu")
    before = toy.pool.clone()
    toy.run(toy.inputs(4, NUM_BLOCKS))
    assert torch.equal(toy.pool, before)
    assert len(before) == NUM_BLOCKS * LAYER_BLOCK_BYTES


def test_decode_steps_that_run_eagerly_are_counted() -> None:
    generator = np.random.default_rng(3)
    graphs = DecodeGraphs(Toy(NUM_BLOCKS, "cpu"), torch.device("cpu"))
    decode = decode_step([5, 6], generator, NUM_BLOCKS)
    assert graphs.run(decode) is None  # nothing is captured
    graphs.sizes = [2]
    assert graphs.run(decode, has_copies=True) is None
    prompt = replace(decode, token_ids=np.zeros(3, np.int32), query_starts=np.array([0, 1, 3], np.int32))
    assert graphs.run(prompt) is None
    assert (graphs.hits_total, graphs.misses_total) == (0, 2)
