"""Times paged attention on the CPU: `python benchmarks/attention.py --threads 2`. Best and median of the calls.

decode: bytes of keys and values read per second. prefill: multiplications and additions per second, without the masked
half. Each call uses another layer than the one before, so that nothing of it is left in the caches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from swiftkv import _cpu
from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.pool import Pool
from swiftkv.kernels import cpu_attention
from swiftkv.kernels.attention_spec import AttentionSpec

NUM_LAYERS = 28
SPEC = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, block_size=16, scale=128**-0.5)
# (new tokens, tokens in the KV) of each sequence.
DECODE = [[(1, 2048)], [(1, 8192)], [(1, 2048)] * 8, [(1, 256)] * 8]
PREFILL = [[(512, 512)], [(64, 2048)], [(2048, 2048)]]


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_batch(sequences: list[tuple[int, int]]) -> cpu_attention.AttentionBatch:
    positions: list[int] = []
    query_starts, table_starts = [0], [0]
    for num_new, context_len in sequences:
        positions += range(context_len - num_new, context_len)
        query_starts.append(query_starts[-1] + num_new)
        table_starts.append(table_starts[-1] + -(-context_len // SPEC.block_size))
    entries = [block * NUM_LAYERS for block in range(table_starts[-1])]
    context_lens = [context_len for _, context_len in sequences]
    return cpu_attention.prepare_batch(
        SPEC, int32(positions), int32(query_starts), int32(context_lens), int32(entries), int32(table_starts)
    )


def make_pool(sequences: list[tuple[int, int]], dtype: torch.dtype) -> torch.Tensor:
    num_blocks = sum(-(-context_len // SPEC.block_size) for _, context_len in sequences)
    name = str(dtype).removeprefix("torch.")
    group = KVGroup(tuple(range(NUM_LAYERS)), SPEC.num_kv_heads, SPEC.head_dim, name, SPEC.block_size)
    pool = Pool([(group, num_blocks)])
    pool.fill_ahead().join()
    pool.tensor.view(dtype).fill_(0.01)
    return pool.tensor


def times_s(call: Callable[[int], object], seconds: float) -> tuple[float, float]:
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for layer in range(NUM_LAYERS):
            begin = time.perf_counter()
            call(layer)
            times.append(time.perf_counter() - begin)
    times.sort()
    return times[0], times[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--seconds", type=float, default=3, help="how long each line is measured")
    args = parser.parse_args()
    dtype: torch.dtype = getattr(torch, args.dtype)
    _cpu.set_num_threads(args.threads)
    print(f"{_cpu.isa()}, {args.dtype}, {args.threads} threads, 16 heads on 8 KV heads of 128")

    cos_sin, norm = torch.rand(8192, SPEC.head_dim), torch.ones(SPEC.head_dim, dtype=dtype)
    for sequences in DECODE + PREFILL:
        batch, pool = make_batch(sequences), make_pool(sequences, dtype)
        width = (SPEC.num_heads + 2 * SPEC.num_kv_heads) * SPEC.head_dim
        qkv = torch.randn(sum(num_new for num_new, _ in sequences), width).to(dtype)

        def attend(
            layer: int, qkv: torch.Tensor = qkv, batch: cpu_attention.AttentionBatch = batch, pool: torch.Tensor = pool
        ) -> None:
            cpu_attention.attention(qkv, SPEC, batch, pool, layer)

        def rope_write(
            layer: int, qkv: torch.Tensor = qkv, batch: cpu_attention.AttentionBatch = batch, pool: torch.Tensor = pool
        ) -> None:
            cpu_attention.rope_write_kv(qkv, cos_sin, norm, norm, 1e-6, SPEC, batch, pool, layer)

        best, median = times_s(attend, args.seconds)
        num_new, context_len = sequences[0]
        if num_new == 1:
            amount = len(sequences) * context_len * 2 * SPEC.num_kv_heads * SPEC.head_dim * dtype.itemsize
            unit = "GB/s"
        else:
            keys_seen = sum(range(context_len - num_new + 1, context_len + 1))
            amount, unit = 4 * SPEC.num_heads * SPEC.head_dim * keys_seen, "GFLOP/s"
        name = f"{len(sequences)} x {num_new} new of {context_len}"
        rates = f"{amount / best / 1e9:6.1f} {unit} (median {amount / median / 1e9:.1f})"
        rope_best, _ = times_s(rope_write, args.seconds / 3)
        print(f"{name:24} {best * 1e3:8.3f} ms/layer {rates:32} rope and KV write {rope_best * 1e3:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
