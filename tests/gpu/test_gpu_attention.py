"""Attention on the device, at the sizes it is for, against float64: pools full of NaN, outputs full of NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swiftkv.kernels import triton_attention
from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.triton_schedule import Tiling
from tests.support.attention_steps import Step, make_step, relative_error

pytestmark = pytest.mark.gpu

BF16, F16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 2e-2, F16: 3e-3}
MIXED = [(0, 1), (5000, 1), (0, 1500), (3000, 700), (129, 1), (63, 17), (0, 2), (70_000, 1), (9000, 33)]


def make_spec(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int = 0,
    cap: float = 0,
    v_head_dim: int | None = None,
) -> AttentionSpec:
    return AttentionSpec(num_heads, num_kv_heads, head_dim, block_size, head_dim**-0.5, window, cap, v_head_dim)


def run(step: Step, tilings: tuple[Tiling, Tiling] | None = None) -> torch.Tensor:
    batch = step.prepare(tilings=tilings)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is full of NaN
    try:
        return step.run(batch)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("spec", "dtype", "sinks"),
    [
        (make_spec(32, 8, 128, 16), BF16, False),
        (make_spec(32, 8, 128, 64), BF16, True),
        (make_spec(32, 8, 128, 128, window=1000, cap=30.0), F16, True),
        (make_spec(64, 8, 64, 16, window=128), BF16, True),
        (make_spec(14, 2, 64, 128), F16, False),
        (make_spec(16, 16, 80, 16), BF16, False),
        (make_spec(8, 8, 80, 64), F16, False),
        (make_spec(32, 32, 96, 32, window=2047), BF16, False),
        (make_spec(16, 2, 192, 64, cap=50.0), BF16, False),
        (make_spec(8, 4, 256, 16, window=512, cap=50.0), BF16, False),
        (make_spec(16, 1, 256, 64), F16, True),
        (make_spec(64, 4, 192, 64, v_head_dim=128), BF16, False),
        (make_spec(64, 8, 192, 16, window=128, v_head_dim=128), BF16, True),
        (make_spec(12, 4, 48, 32, cap=30.0, v_head_dim=80), F16, True),
    ],
    ids=lambda value: (
        f"{value.num_heads}x{value.num_kv_heads}x{value.head_dim}v{value.value_head_dim}b{value.block_size}"
        if isinstance(value, AttentionSpec)
        else str(value)
    ),
)
def test_mixed_batch_equals_float64(spec: AttentionSpec, dtype: torch.dtype, sinks: bool) -> None:
    step = make_step(spec, MIXED, dtype, "cuda", seed=spec.head_dim, sinks=sinks)
    assert relative_error(run(step), step.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "tilings",
    [
        (Tiling(64, 64, 4, 3), Tiling(16, 32, 4, 5)),
        (Tiling(128, 64, 8, 2, max_registers=128), Tiling(16, 64, 2, 3)),
    ],
    ids=["small", "two programs"],
)
def test_other_tilings_equal_float64(tilings: tuple[Tiling, Tiling]) -> None:
    step = make_step(make_spec(32, 8, 128, 64), MIXED, BF16, "cuda")
    assert relative_error(run(step, tilings), step.expected()) < TOLERANCE[BF16]


def test_long_prompt_equals_float64() -> None:
    spec = make_spec(8, 2, 128, 64)
    step = make_step(spec, [(0, 16_384), (20_000, 4096)], BF16, "cuda")
    assert relative_error(run(step), step.expected()) < TOLERANCE[BF16]


@pytest.mark.parametrize("window", [0, 1000])
def test_512_sequences_equal_float64(window: int) -> None:
    lengths = [
        (int(cached), 1) for cached in torch.randint(0, 3000, (512,), generator=torch.Generator().manual_seed(1))
    ]
    step = make_step(make_spec(8, 2, 128, 16, window), lengths, BF16, "cuda")
    assert relative_error(run(step), step.expected()) < TOLERANCE[BF16]


def test_a_million_tokens_in_a_pool_of_more_than_2_to_the_31_elements() -> None:
    step = make_step(make_spec(8, 2, 256, 64), [((1 << 20) - 1, 1), (100, 40)], BF16, "cuda")
    assert step.pool.numel() // 2 > 1 << 31
    assert relative_error(run(step), step.expected()) < TOLERANCE[BF16]


@pytest.mark.parametrize("window", [0, 1000])
def test_one_captured_graph_serves_every_step(window: int) -> None:
    spec, num_seqs = make_spec(32, 8, 128, 16, window), 16
    steps = []
    for seed, cached in enumerate([[9000, 5, 0, 1200], [100] * 16, [60_000]]):
        step = make_step(spec, [(length, 1) for length in cached], BF16, "cuda", seed=seed)
        rows = num_seqs - len(cached)
        steps.append((replace(step, qkv=torch.nn.functional.pad(step.qkv, (0, 0, 0, rows))), len(cached)))
    pool = max((step.pool for step, _ in steps), key=len)
    static = replace(steps[0][0], qkv=steps[0][0].qkv.clone(), pool=torch.empty_like(pool))
    buffers = triton_attention.decode_buffers(spec, num_seqs, num_entries=10_000)
    static.run(buffers)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static.run(buffers)
    for step, used in steps:
        static.qkv.copy_(step.qkv)
        static.pool.fill_(0xFF)
        static.pool[: len(step.pool)].copy_(step.pool)
        step.prepare(into=buffers)
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out[:used], replace(step, qkv=step.qkv[:used]).expected()) < TOLERANCE[BF16]
        assert not out[used:].any()
