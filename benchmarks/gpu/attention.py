"""Time attention on the GPU beside what the GPU can do: `python benchmarks/gpu/attention.py --out attention.json`.

decode: bytes of keys and values read per second, over the bandwidth of a device-to-device copy (bytes read and bytes
written). prefill: multiplications and additions per second, without the masked half, over the rate of a bf16 matrix
product of 8192 x 8192 x 8192. Both ceilings are measured in the same run. Figures are medians of GPU time; each call
uses another layer than the one before, so that nothing of it is left in L2.

`--tune` times other tilings, too, but tests/gpu checks only the default ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from swiftkv.kernels import triton_attention
from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.device_limits import limits_of
from swiftkv.kernels.triton_schedule import Tiling, decode_tiling, prefill_tiling

DECODE = [(1, 4096), (1, 32_768), (1, 131_072), (1, 1 << 20), (8, 4096), (32, 4096), (64, 8192), (256, 4096)]
PREFILL = [(2048, 0), (4096, 0), (8192, 0), (16_384, 0), (32_768, 0), (2048, 6144), (2048, 30_720), (8192, 24_576)]
PREFILL += [(64, 32_704), (128, 32_640), (512, 32_256)]  # short prompts after long histories, whose keys are split
TUNED_DECODE = [(1, 131_072), (32, 4096), (64, 8192)]
TUNED_PREFILL = [(8192, 0), (2048, 30_720)]
POOL_BYTES = 12 << 30


def gpu_times_s(call: Callable[[int], object], budget_s: float, max_calls: int = 100) -> list[float]:
    """Return the seconds of single calls, by CUDA events. The calls queue in the stream, so that no launch is timed."""
    for i in range(2):
        call(i)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call(2)
    end.record()
    torch.cuda.synchronize()
    count = max(5, min(max_calls, int(budget_s * 1e3 / max(start.elapsed_time(end), 1e-3))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda._sleep(int(2e9 * 2e-4 * count))  # the host runs ahead: 200 us a call
    for i, (begin, done) in enumerate(events):
        begin.record()
        call(i)
        done.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(done) / 1e3 for begin, done in events]


def ceilings() -> tuple[float, float]:
    """Return a copy's bytes per second, read plus written, and a bf16 matrix product's operations per second."""
    source = torch.randint(256, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = statistics.median(gpu_times_s(lambda _: target.copy_(source), 0.3))
    a, b = (torch.randn((8192, 8192), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    c = torch.empty_like(a)
    product_s = statistics.median(gpu_times_s(lambda _: torch.matmul(a, b, out=c), 0.5))
    return 2 * source.numel() / copy_s, 2 * 8192**3 / product_s


def measure(
    spec: AttentionSpec,
    pool: torch.Tensor,
    lengths: list[tuple[int, int]],
    budget_s: float,
    tilings: tuple[Tiling, Tiling] | None = None,
) -> float:
    """Return the median seconds of attention of sequences (tokens in the cache, new tokens), blocks in random order."""
    counts = [-(-(cached + new) // spec.block_size) for cached, new in lengths]
    layer_bytes = spec.layer_block_elements * 2
    num_layers = max(1, min(16, pool.numel() // (layer_bytes * sum(counts))))
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)) * num_layers
    new_tokens = [new for _, new in lengths]
    batch = triton_attention.prepare_batch(
        spec,
        torch.cat([torch.arange(cached, cached + new, dtype=torch.int32) for cached, new in lengths]),
        torch.tensor([0, *new_tokens]).cumsum(0).int(),
        torch.tensor([cached + new for cached, new in lengths], dtype=torch.int32),
        blocks.int(),
        torch.tensor([0, *counts]).cumsum(0).int(),
        tilings=tilings,
    )
    qkv = torch.randn((sum(new_tokens), sum(spec.qkv_sizes)), device="cuda").bfloat16()
    return statistics.median(
        gpu_times_s(lambda i: triton_attention.attention(qkv, spec, batch, pool, i % num_layers), budget_s)
    )


def kv_bytes(spec: AttentionSpec, batch: int, context: int) -> int:
    tokens = min(context, spec.window) if spec.window else context
    return batch * tokens * sum(spec.qkv_sizes[1:]) * 2


def operations(spec: AttentionSpec, new: int, cached: int) -> int:
    """Return 2 * (head_dim + v_head_dim) operations for every visible pair of query and key, of every head."""
    seen = sum(min(position + 1, spec.window or position + 1) for position in range(cached, cached + new))
    return 2 * (spec.head_dim + spec.value_head_dim) * spec.num_heads * seen


def other_tilings(kind: str, spec: AttentionSpec) -> Iterator[Tiling]:
    if kind == "decode":
        rows = decode_tiling(spec, limits_of(torch.device("cuda"))).rows
        for keys, num_stages in ((64, 2), (64, 3), (64, 4), (64, 5), (32, 5), (128, 2), (128, 3)):
            yield Tiling(rows, keys, 4, num_stages)
        yield Tiling(rows, 64, 2, 3)
        return
    for keys, num_stages, max_registers in (
        (128, 2, None),
        (128, 3, None),
        (64, 2, None),
        (64, 3, None),
        (64, 4, None),
        (128, 4, None),
        (64, 2, 128),
        (32, 3, 128),
    ):
        yield Tiling(128, keys, 8, num_stages, fits_blocks(spec, keys), max_registers)
    yield Tiling(64, 64, 4, 2, fits_blocks(spec, 64))
    yield Tiling(64, 64, 4, 3, fits_blocks(spec, 64))
    yield Tiling(256, 64, 16, 2, fits_blocks(spec, 64), 128)


def fits_blocks(spec: AttentionSpec, keys: int) -> bool:
    """Return whether the tensor memory accelerator, if there is one, can fetch tiles of so many keys."""
    return spec.block_size % keys == 0 and limits_of(torch.device("cuda")).has_tensor_memory_accelerator


def tune(spec: AttentionSpec, pool: torch.Tensor, bandwidth: float, rate: float, budget_s: float) -> list[Any]:
    rows = []
    limits = limits_of(torch.device("cuda"))
    prefill, decode = prefill_tiling(spec, limits), decode_tiling(spec, limits)
    for kind, shapes in (("decode", TUNED_DECODE), ("prefill", TUNED_PREFILL)):
        for tiling in other_tilings(kind, spec):
            tilings = (prefill, tiling) if kind == "decode" else (tiling, decode)
            fractions = []
            for first, second in shapes:
                try:
                    if kind == "decode":
                        seconds = measure(spec, pool, [(second - 1, 1)] * first, budget_s, tilings)
                        fractions.append(kv_bytes(spec, first, second) / seconds / bandwidth)
                    else:
                        seconds = measure(spec, pool, [(second, first)], budget_s, tilings)
                        fractions.append(operations(spec, first, second) / seconds / rate)
                except (triton.OutOfResources, triton.CompilationError, RuntimeError) as error:
                    print(f"{kind} {tiling}: {str(error).splitlines()[0][:100]}")
                    break
            print(
                f"b{spec.block_size:<4} {kind:<8}{tiling!s:<95}{'  '.join(f'{f:6.1%}' for f in fractions)}", flush=True
            )
            rows.append({"block_size": spec.block_size, "kind": kind, "tiling": str(tiling), "fractions": fractions})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write every figure here, as JSON")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--v-head-dim", type=int, help="head_dim of values, if it is not that of keys")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--seconds", type=float, default=0.2, help="seconds of GPU time for each figure")
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()

    device = torch.cuda.get_device_name()
    bandwidth, rate = ceilings()
    print(f"{device}: copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s", flush=True)
    pool = torch.empty(POOL_BYTES, dtype=torch.uint8, device="cuda")
    pool.view(torch.bfloat16).normal_()
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {"device": device, "copy_bytes_per_s": bandwidth, "matrix_flop_per_s": rate, "rows": rows}

    def save() -> None:
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    def report(block_size: int, case: str, seconds: float, achieved: str, fraction: float) -> None:
        print(f"b{block_size:<4} {case:<26}{seconds * 1e6:10.1f} us {achieved:>14} {fraction:7.1%}", flush=True)
        rows.append({"block_size": block_size, "case": case, "s": seconds, "fraction": fraction})
        save()

    for block_size in arguments.block_sizes:
        head_dim = arguments.head_dim
        spec = AttentionSpec(
            arguments.heads,
            arguments.kv_heads,
            head_dim,
            block_size,
            head_dim**-0.5,
            arguments.window,
            v_head_dim=arguments.v_head_dim,
        )
        for batch, context in DECODE:
            if kv_bytes(spec, batch, context) <= POOL_BYTES:
                seconds = measure(spec, pool, [(context - 1, 1)] * batch, arguments.seconds)
                achieved = kv_bytes(spec, batch, context) / seconds
                report(
                    block_size,
                    f"decode {batch} x {context}",
                    seconds,
                    f"{achieved / 1e9:.0f} GB/s",
                    achieved / bandwidth,
                )
        for new, cached in PREFILL:
            seconds = measure(spec, pool, [(cached, new)], arguments.seconds)
            achieved = operations(spec, new, cached) / seconds
            report(
                block_size, f"prefill {new} after {cached}", seconds, f"{achieved / 1e12:.0f} TFLOP/s", achieved / rate
            )
        if arguments.tune:
            results.setdefault("tuning", []).extend(tune(spec, pool, bandwidth, rate, arguments.seconds / 2))
            save()


if __name__ == "__main__":
    main()
