"""Kernels that wait, against the same kernels called one after the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from swiftkv.kernels import cpu
from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.experts import SILU, ExpertLayer, ExpertWeights, Router
from swiftkv.kernels.ops import PackedMlp

TOKENS, HIDDEN, INNER, VOCAB, EPS = 5, 64, 96, 50, 1e-6
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, block_size=16, scale=0.25)
ROUTER = Router(num_experts=4, top_k=2, score="softmax")


pytestmark = pytest.mark.usefixtures("two_threads")


def weights(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs).mul_(inputs**-0.5)


class Layer:
    """A layer that calls every kernel."""

    def __init__(self) -> None:
        self.ids = torch.arange(TOKENS, dtype=torch.int32)
        self.table, self.norm = torch.randn(VOCAB, HIDDEN), torch.rand(HIDDEN)
        self.qkv = cpu.pack_linear([weights(sum(SPEC.qkv_sizes), HIDDEN)])
        self.out = cpu.pack_linear([weights(HIDDEN, SPEC.out_size)])
        gate_up = cpu.pack_linear([weights(INNER, HIDDEN), weights(INNER, HIDDEN)], interleave=True)
        self.mlp = PackedMlp(self.norm, EPS, gate_up, cpu.pack_linear([weights(HIDDEN, INNER)]))
        self.gate = cpu.pack_linear([weights(ROUTER.num_experts, HIDDEN)])
        experts = (
            ExpertWeights(weights(INNER, HIDDEN), weights(INNER, HIDDEN), weights(HIDDEN, INNER))
            for _ in range(ROUTER.num_experts)
        )
        self.experts = cpu.pack_experts(ExpertLayer(ROUTER.num_experts, SILU, experts))
        self.cos_sin = torch.rand(TOKENS, SPEC.head_dim)
        self.sinks = torch.randn(SPEC.num_heads).double()  # the kernel takes float32, so this is copied
        self.pool = torch.zeros(4 * SPEC.block_size * sum(SPEC.qkv_sizes[1:]), dtype=torch.uint8)

    def run(self) -> list[Tensor]:
        """Return what all kernels give; every other result is dropped at once."""
        self.pool.zero_()
        span = torch.tensor([0, TOKENS], dtype=torch.int32)
        table, table_starts = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
        batch = self.batch = cpu.prepare_batch(SPEC, self.ids, span, span[1:].clone(), table, table_starts)
        hidden = cpu.embed(self.ids, self.table)
        qkv = cpu.norm_linear(hidden, self.norm, EPS, self.qkv)
        cpu.rope_write_kv(qkv, self.cos_sin, None, None, EPS, SPEC, batch, self.pool, 0)
        attended = cpu.attention(qkv, SPEC, batch, self.pool, 0, self.sinks)
        del qkv
        cpu.linear_residual(attended, self.out, hidden)
        del attended
        more = cpu.gated_mlp(cpu.linear(hidden, IDENTITY), self.mlp)
        cpu.add_gated_mlp(hidden, self.mlp)
        cpu.rms_norm_residual(more, self.norm, EPS, hidden)
        normed = cpu.rms_norm(hidden, self.norm, EPS)
        choices = cpu.route(cpu.logits(normed, self.gate), ROUTER)
        cpu.add_experts(normed, choices, self.experts, hidden)
        return [hidden, more, choices.experts, choices.weights, self.pool]


IDENTITY = cpu.pack_linear([torch.eye(HIDDEN)])


def scribble() -> None:
    """Fill memory that was freed."""
    for _ in range(200):
        torch.full((TOKENS, sum(SPEC.qkv_sizes)), torch.nan)


def test_kernels_that_wait_give_the_same_bits() -> None:
    layer = Layer()
    expected = [tensor.clone() for tensor in layer.run()]
    with cpu.deferred():
        waiting = layer.run()
        scribble()
    for got, wanted in zip(waiting, expected, strict=True):
        assert torch.equal(got, wanted)


def test_nothing_runs_before_the_end() -> None:
    layer, hidden = Layer(), torch.ones(TOKENS, HIDDEN)
    with cpu.deferred():
        cpu.add_gated_mlp(hidden, layer.mlp)
        assert torch.equal(hidden, torch.ones_like(hidden))
    assert not torch.equal(hidden, torch.ones_like(hidden))


@cpu.deferred()
def embed_and_add(layer: Layer, ids: Tensor, hidden: Tensor) -> None:
    cpu.embed(ids, layer.table)
    cpu.add_gated_mlp(hidden, layer.mlp)


@cpu.deferred()
def add_and_multiply(layer: Layer, hidden: Tensor, x: Tensor) -> None:
    cpu.add_gated_mlp(hidden, layer.mlp)
    cpu.linear(x, layer.out)


def test_an_error_of_a_kernel_comes_at_the_end_and_later_kernels_do_not_run() -> None:
    layer, hidden = Layer(), torch.ones(TOKENS, HIDDEN)
    with pytest.raises(IndexError, match="outside the vocabulary"):
        embed_and_add(layer, torch.tensor([VOCAB], dtype=torch.int32), hidden)
    assert torch.equal(hidden, torch.ones_like(hidden))
    cpu.add_gated_mlp(hidden, layer.mlp)  # no kernel waits any more
    assert not torch.equal(hidden, torch.ones_like(hidden))


def test_an_error_among_the_calls_drops_all_of_them() -> None:
    layer, hidden = Layer(), torch.ones(TOKENS, HIDDEN)
    with pytest.raises(ValueError, match="x: got"):
        add_and_multiply(layer, hidden, hidden.bfloat16())
    with cpu.deferred():
        pass
    assert torch.equal(hidden, torch.ones_like(hidden))


def test_kernels_that_wait_cannot_be_deferred_once_more() -> None:
    layer, hidden = Layer(), torch.ones(TOKENS, HIDDEN)
    with cpu.deferred():
        cpu.add_gated_mlp(hidden, layer.mlp)
        with pytest.raises(RuntimeError, match="wait already"), cpu.deferred():
            pass
    assert not torch.equal(hidden, torch.ones_like(hidden))


def test_other_threads_do_not_wait() -> None:
    layer, hidden = Layer(), torch.ones(TOKENS, HIDDEN)
    with ThreadPoolExecutor(1) as other, cpu.deferred():
        other.submit(cpu.add_gated_mlp, hidden, layer.mlp).result()
        assert not torch.equal(hidden, torch.ones_like(hidden))
