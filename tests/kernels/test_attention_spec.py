"""Every kind of kernels obeys an `AttentionSpec` and the arguments of attention."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.dispatch import cpu_ops, reference_ops, select_ops
from swiftkv.kernels.ops import AnyOps

NUM_TOKENS = 40
PLAIN = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, scale=0.3)
SPECS = [
    PLAIN,
    replace(PLAIN, window=9),
    replace(PLAIN, soft_cap=1.5),
    replace(PLAIN, window=9, soft_cap=1.5),
    replace(PLAIN, v_head_dim=32),
    replace(PLAIN, window=9, soft_cap=1.5, v_head_dim=80),
]


def ops_of(kind: str) -> AnyOps:
    if kind == "cpu":
        return cpu_ops()
    if kind == "reference":
        return reference_ops()
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here: set TRITON_INTERPRET=1 to interpret")
    return select_ops("cuda:0")


def expected(qkv: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """Attention of one whole prompt in float64, every field of the spec in its own line."""
    dim, v_dim = spec.head_dim, spec.v_head_dim or spec.head_dim
    q, k, v = qkv.double().split([4 * dim, 2 * dim, 2 * v_dim], dim=1)
    q = q.view(NUM_TOKENS, 4, dim)
    k, v = k.view(NUM_TOKENS, 2, dim).repeat_interleave(2, 1), v.view(NUM_TOKENS, 2, v_dim).repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    distance = torch.arange(NUM_TOKENS)[:, None] - torch.arange(NUM_TOKENS)
    visible = (distance >= 0) & (distance < (spec.window or NUM_TOKENS))
    exponents = scores.masked_fill(~visible, -torch.inf).exp()
    total = exponents.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks.double().exp()[:, None, None])
    weights = exponents / total
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def attend(ops: AnyOps, spec: AttentionSpec, qkv: Tensor, sinks: Tensor | None) -> Tensor:
    positions = torch.arange(NUM_TOKENS, dtype=torch.int32)
    starts, lengths = torch.tensor([0, NUM_TOKENS], dtype=torch.int32), positions[-1:] + 1
    table, table_starts = torch.tensor([2, 0, 1], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    batch = ops.prepare_batch(spec, positions, starts, lengths, table, table_starts, device="cpu")
    pool = torch.zeros(3 * spec.layer_block_elements * 4, dtype=torch.uint8)
    unturned = torch.cat([torch.ones(NUM_TOKENS, spec.head_dim // 2), torch.zeros(NUM_TOKENS, spec.head_dim // 2)], 1)
    qkv = qkv.clone()
    ops.rope_write_kv(qkv, unturned, None, None, 1e-6, spec, batch, pool, 0)
    return ops.attention(qkv, spec, batch, pool, 0, sinks)


@pytest.mark.parametrize("kind", ["cpu", "reference", "triton"])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda spec: f"window {spec.window} cap {spec.soft_cap} values of {spec.value_head_dim}"
)
def test_a_spec_is_obeyed(spec: AttentionSpec, has_sinks: bool, kind: str) -> None:
    ops = ops_of(kind)
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(NUM_TOKENS, sum(spec.qkv_sizes), generator=generator)
    sinks = torch.randn(spec.num_heads, generator=generator) if has_sinks else None
    torch.testing.assert_close(attend(ops, spec, qkv, sinks).double(), expected(qkv, spec, sinks), rtol=1e-5, atol=1e-5)
