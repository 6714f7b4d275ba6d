"""The memory-bound Triton kernels against torch, in Triton's interpreter, with poisoned outputs and pools."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from swiftkv._core import NO_BLOCK
from swiftkv.kernels import triton_elementwise as elementwise
from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.experts import GELU_TANH, GatedActivation
from swiftkv.kernels.triton_layout import layer_blocks
from tests.support.attention_oracle import keys_and_values
from tests.support.elementwise import (
    EPS,
    NUM_LAYERS,
    Step,
    cos_sin_table,
    exact_norm,
    int32,
    make_step,
    split_heads,
    turned,
)
from tests.support.interpreter import round_to_nearest

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    round_to_nearest(monkeypatch)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # torch.empty is full of NaN
    yield
    torch.use_deterministic_algorithms(False)


def assert_close(got: Tensor, expected: Tensor, slack: float = 2.0) -> None:
    assert got.dtype == expected.dtype
    tolerance = slack * ROUNDING[got.dtype]
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 80, 257, 1024])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, weight = (3 * torch.randn(2, 3, width)).to(dtype), torch.randn(width).to(dtype)
    assert_close(elementwise.rms_norm(x, weight, EPS), exact_norm(x, weight))
    wide = 1 + torch.randn(width)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * wide.double()
    assert_close(elementwise.rms_norm(x, wide, EPS), exact.to(dtype), slack=1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 96, 1500])
def test_gated(width: int, dtype: torch.dtype) -> None:
    gate_up = (4 * torch.randn(3, 2 * width)).to(dtype)
    gate_up[0, 0], gate_up[1, 0] = -88.0, 1e4
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(elementwise.gated(gate_up), (gate * gate.sigmoid() * up).to(dtype))
    gelu = torch.nn.functional.gelu(gate, approximate="tanh")
    assert_close(elementwise.gated(gate_up, GELU_TANH), (gelu * up).to(dtype))
    limited = gate.clamp(max=7)
    swiglu = (up.clamp(-7, 7) + 1) * limited * torch.sigmoid(1.702 * limited)
    assert_close(elementwise.gated(gate_up, GatedActivation(1.702, limit=7.0, up_offset=1.0)), swiglu.to(dtype))


def test_nothing_is_done_for_no_tokens() -> None:
    empty = torch.empty(0, 64)
    assert elementwise.rms_norm(empty, torch.ones(64), EPS).shape == (0, 64)
    assert elementwise.gated(empty).shape == (0, 32)
    step = make_step(16, [], 1, seed=0)
    pool = torch.zeros(2 * 16 * 64 * 4, dtype=torch.uint8)
    spec = AttentionSpec(1, 1, 64, 16, 1.0)
    elementwise.rope_write_kv(torch.empty(0, 3 * 64), cos_sin_table(64), None, None, EPS, spec, step, pool, 0)
    assert not pool.any()


def assert_turned(got: Tensor, expected: Tensor, is_normed: bool) -> None:
    if is_normed:  # a sum in another order may round the norm the other way
        assert_close(got, expected, slack=4)
    else:
        assert torch.equal(got, expected)


SHAPES = [  # heads, kv heads, head_dim, v_head_dim, rotary_dim, block_size
    (4, 2, 64, 64, 64, 16),
    (3, 1, 80, 80, 80, 32),
    (2, 2, 80, 80, 32, 16),
    (4, 1, 96, 96, 72, 16),
    (14, 2, 128, 128, 128, 48),
    (2, 1, 192, 192, 192, 16),
    (5, 1, 256, 256, 64, 16),
    (8, 2, 192, 128, 64, 16),
    (3, 2, 80, 112, 80, 32),
    (2, 3, 96, 56, 96, 16),  # values end in the second half of what is turned
    (2, 2, 96, 32, 96, 16),  # and in the first
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "v_head_dim", "rotary_dim", "block_size"), SHAPES)
@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_are_turned_and_keys_and_values_written_and_nothing_else(
    dtype: torch.dtype,
    is_normed: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    rotary_dim: int,
    block_size: int,
) -> None:
    spec = AttentionSpec(heads, kv_heads, head_dim, block_size, 1.0, v_head_dim=v_head_dim)
    step = make_step(block_size, [(9, 0), (70, 69), (33, 30), (block_size, block_size - 1)], 24, seed=head_dim)
    layer, num_tokens = 1, len(step.positions)
    qkv = torch.randn(num_tokens, sum(spec.qkv_sizes)).to(dtype)
    norms = [torch.randn(head_dim).to(dtype) if is_normed else None for _ in range(2)]
    cos_sin = cos_sin_table(rotary_dim)
    spare_bytes = 12  # a pool need not be a whole number of layer blocks
    elements = 24 * NUM_LAYERS * spec.layer_block_elements
    pool = torch.full((elements * dtype.itemsize + spare_bytes,), 0xFF, dtype=torch.uint8)  # NaN

    q, k, v = split_heads(qkv.clone(), spec)
    elementwise.rope_write_kv(qkv, cos_sin, norms[0], norms[1], EPS, spec, step, pool, layer)

    got_q, got_k, got_v = split_heads(qkv, spec)
    assert_turned(got_q, turned(q, norms[0], cos_sin, step.positions), is_normed)
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)
    blocks = layer_blocks(pool, spec, dtype)
    key_blocks, value_blocks = keys_and_values(blocks, spec)
    index = torch.where(step.token_entries < 0, ~step.token_entries, step.token_entries + layer).long()
    slots = (step.positions % block_size).long()
    assert_turned(key_blocks[index, :, slots], turned(k, norms[1], cos_sin, step.positions), is_normed)
    assert torch.equal(value_blocks[index, :, slots], v)
    assert int((~blocks.isnan()).sum()) == k.numel() + v.numel()
    assert (pool[-spare_bytes:] == 0xFF).all()


def test_values_that_are_no_numbers_are_written_as_they_are() -> None:
    spec = AttentionSpec(1, 1, 64, 16, 1.0)
    step = make_step(16, [(3, 0)], 2, seed=0)
    qkv = torch.randn(3, 3 * 64).to(torch.bfloat16)
    qkv[:, 2 * 64 :] = math.inf
    pool = torch.zeros(2 * NUM_LAYERS * 2 * 16 * 64 * 2, dtype=torch.uint8)
    elementwise.rope_write_kv(qkv, cos_sin_table(64), None, None, EPS, spec, step, pool, 0)
    blocks = layer_blocks(pool, spec, torch.bfloat16)
    assert int(blocks.isinf().sum()) == 3 * 64
    assert not blocks.isnan().any()


def test_tokens_without_a_block_write_nothing() -> None:
    spec = AttentionSpec(2, 1, 64, 16, 1.0)
    step = make_step(16, [(20, 0)], 4, seed=0)
    none = Step(step.positions, step.query_starts, step.block_table, step.table_starts, int32([NO_BLOCK] * 20))
    qkv = torch.randn(20, 4 * 64)
    expected = turned(qkv.view(20, 4, 64)[:, :2], None, cos_sin_table(64), step.positions)
    pool = torch.full((4 * NUM_LAYERS * 2 * 16 * 64 * 4,), 0xFF, dtype=torch.uint8)
    elementwise.rope_write_kv(qkv, cos_sin_table(64), None, None, EPS, spec, none, pool, 2)
    assert torch.equal(qkv.view(20, 4, 64)[:, :2], expected)
    assert (pool == 0xFF).all()
