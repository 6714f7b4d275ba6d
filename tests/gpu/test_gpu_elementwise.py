"""The memory-bound kernels as compiled for the device, against float64 and torch's own rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swiftkv.kernels import triton_elementwise as elementwise
from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.triton_layout import layer_blocks
from tests.support.attention_oracle import keys_and_values
from tests.support.elementwise import (
    EPS,
    MAX_LEN,
    NUM_LAYERS,
    Step,
    cos_sin_table,
    exact_norm,
    make_step,
    split_heads,
    turned,
)

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def assert_close(got: Tensor, expected: Tensor, slack: float = 2.0) -> None:
    assert got.dtype == expected.dtype
    tolerance = slack * ROUNDING[got.dtype]
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (7, 1000), (33, 4096), (300, 5120), (3, 16_384)])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = draw(rows, width, dtype=dtype), draw(width, dtype=dtype, seed=1)
    # A quotient that lies between two numbers may be rounded up or down, before it is multiplied.
    assert_close(elementwise.rms_norm(x, weight, EPS), exact_norm(x, weight), slack=3)
    alone = elementwise.rms_norm(x[-1:].clone(), weight, EPS)
    assert torch.equal(alone[0], elementwise.rms_norm(x, weight, EPS)[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 1000), (2000, 12_288)])
def test_gated(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = 4 * draw(rows, 2 * width, dtype=dtype)
    gate_up[0, 0] = -1e4
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(elementwise.gated(gate_up), (gate * gate.sigmoid() * up).to(dtype))


SHAPES = [  # heads, kv heads, head_dim, v_head_dim, rotary_dim, block_size
    (32, 8, 128, 128, 128, 64),
    (14, 2, 64, 64, 64, 16),
    (8, 8, 80, 80, 80, 16),
    (8, 2, 80, 80, 32, 32),
    (32, 32, 96, 96, 96, 16),
    (6, 1, 192, 192, 192, 64),
    (8, 4, 256, 256, 64, 16),
    (1, 1, 256, 256, 256, 128),
    (64, 4, 192, 128, 64, 64),
    (2, 3, 96, 56, 96, 16),
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
    layer, num_blocks = 1, 60
    step = make_step(block_size, [(130, 0), (77, 76), (MAX_LEN, 100), (1, 0)], num_blocks, seed=head_dim)
    step = Step(*(getattr(step, field).cuda() for field in Step.__dataclass_fields__))
    num_tokens = len(step.positions)
    qkv = draw(num_tokens, sum(spec.qkv_sizes), dtype=dtype)
    norms = [draw(head_dim, dtype=dtype, seed=i) if is_normed else None for i in range(2)]
    cos_sin = cos_sin_table(rotary_dim).cuda()
    nbytes = num_blocks * NUM_LAYERS * spec.layer_block_elements * dtype.itemsize
    pool = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device="cuda")  # NaN
    q, k, v = split_heads(qkv.clone(), spec)

    elementwise.rope_write_kv(qkv, cos_sin, norms[0], norms[1], EPS, spec, step, pool, layer)

    got_q, got_k, got_v = split_heads(qkv, spec)
    slack = 4 if is_normed else 2
    assert_close(got_q, turned(q, norms[0], cos_sin, step.positions), slack)
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)
    blocks = layer_blocks(pool, spec, dtype)
    key_blocks, value_blocks = keys_and_values(blocks, spec)
    index = torch.where(step.token_entries < 0, ~step.token_entries, step.token_entries + layer).long()
    slots = (step.positions % block_size).long()
    assert_close(key_blocks[index, :, slots], turned(k, norms[1], cos_sin, step.positions), slack)
    assert torch.equal(value_blocks[index, :, slots], v)
    assert int((~blocks.isnan()).sum()) == k.numel() + v.numel()


def test_a_pool_of_more_than_2_31_elements() -> None:
    spec, dtype = AttentionSpec(1, 8, 128, 64, 1.0), torch.bfloat16
    block_elements = 2 * 8 * 64 * 128
    num_layer_blocks = 2**31 // block_elements + 2
    pool = torch.zeros(num_layer_blocks * block_elements * 2, dtype=torch.uint8, device="cuda")
    step = make_step(64, [(3, 0)], 2, seed=0)
    step = Step(*(getattr(step, field).cuda() for field in Step.__dataclass_fields__))
    step.token_entries.fill_(~(num_layer_blocks - 1))
    qkv = draw(3, 17 * 128, dtype=dtype)
    elementwise.rope_write_kv(qkv, cos_sin_table(128).cuda(), None, None, EPS, spec, step, pool, 5)
    written = pool[-block_elements * 2 :].view(dtype).view(2, 8, 64, 128)[1, :, :3]
    assert torch.equal(written.transpose(0, 1), qkv.view(3, 17, 128)[:, 9:])
