"""Time gather and scatter of layer blocks, beside a plain copy of as many bytes in the same run.

PYTHONPATH=. python benchmarks/gpu/copies.py [--out copies.json]

One layer of a peer's blocks is loaded into adjacent places of the layer-stream cache, or stored from there: `kernel`
with one launch for all runs, `direct` with one 2-D copy per run, both between pools on one GPU. Blocks have 32 layers,
and each repetition moves another layer, so nothing is found in the L2 cache. The target is 90 % of the plain copy for
`kernel`. At 16 and 64 KiB, the time of `direct` is that of its calls on the host, which take longer than the copies.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from machine import Machine, measure, median_seconds, print_table, write_json

from swiftkv.kernels.cuda_runtime import copy_2d
from swiftkv.kernels.host_copies import upload
from swiftkv.kernels.triton_copy import Int64Array, flatten_runs, move_blocks, pack_lists

NUM_LAYERS = 32
KERNEL_BYTES = 512 << 20  # bytes of one layer that a launch moves
MAX_DIRECT_RUNS = 512
WIDTHS = [width << 10 for width in (16, 32, 64, 128, 256)]
RUN_BLOCKS = [1, 8, 64]
MAX_PROGRAMS = [8, 16, 32, 64, 128]


@dataclass(frozen=True, slots=True)
class Pools:
    """Two flat pools of uint8: ours holds single layer blocks, the peer's holds whole blocks."""

    ours: torch.Tensor
    theirs: torch.Tensor


def staged_runs(width: int, run_blocks: int, num_bytes: int) -> Int64Array:
    """Return runs that are in random order on the peer's side, and one after the other on ours."""
    num_runs = num_bytes // (width * run_blocks)
    order = np.random.default_rng(0).permutation(num_runs)
    ones = np.ones(num_runs, np.int64)
    step = run_blocks * width
    return np.stack((0 * ones, order * step * NUM_LAYERS, np.arange(num_runs) * step, run_blocks * ones, ones), axis=1)


def kernel_seconds(pools: Pools, width: int, run_blocks: int, to_peer: bool, max_programs: int = 0) -> float:
    runs = staged_runs(width, run_blocks, KERNEL_BYTES)
    distance = pools.theirs.data_ptr() - pools.ours.data_ptr()
    blocks = flatten_runs(runs, width, width * NUM_LAYERS, {0: distance})
    packed = upload(pack_lists([blocks]), pools.ours.device)
    return median_seconds(
        lambda index: move_blocks(pools.ours, packed, 0, len(blocks), width, index % NUM_LAYERS, to_peer, max_programs)
    )


def direct_seconds(pools: Pools, width: int, run_blocks: int, to_peer: bool, num_bytes: int) -> float:
    runs = staged_runs(width, run_blocks, num_bytes).tolist()
    stream = torch.cuda.current_stream()

    def copy(index: int) -> None:
        for _, peer_offset, local_offset, count, _ in runs:
            theirs = (pools.theirs.data_ptr() + peer_offset + index % NUM_LAYERS * width, width * NUM_LAYERS)
            ours = (pools.ours.data_ptr() + local_offset, width)
            target, source = (theirs, ours) if to_peer else (ours, theirs)
            copy_2d(*target, *source, width, count, stream)

    return median_seconds(copy, repeats=10)


@dataclass(frozen=True, slots=True)
class Result:
    how: str
    direction: str
    width_bytes: int
    run_blocks: int
    moved_bytes: int
    seconds: float
    bytes_per_s: float  # read plus written
    of_copy: float  # the part of a plain copy's rate


def result(
    machine: Machine, how: str, width: int, run_blocks: int, to_peer: bool, moved: int, seconds: float
) -> Result:
    rate = 2 * moved / seconds
    direction = "scatter" if to_peer else "gather"
    return Result(how, direction, width, run_blocks, moved, seconds, rate, rate / machine.copy_bytes_per_s)


def measure_all(machine: Machine, pools: Pools) -> Iterator[Result]:
    for width in WIDTHS:
        for run_blocks in RUN_BLOCKS:
            direct_bytes = min(KERNEL_BYTES, MAX_DIRECT_RUNS * run_blocks * width)
            for to_peer in (False, True):
                kernel_s = kernel_seconds(pools, width, run_blocks, to_peer)
                yield result(machine, "kernel", width, run_blocks, to_peer, KERNEL_BYTES, kernel_s)
                direct_s = direct_seconds(pools, width, run_blocks, to_peer, direct_bytes)
                yield result(machine, "direct", width, run_blocks, to_peer, direct_bytes, direct_s)
    for programs in MAX_PROGRAMS:
        bounded_s = kernel_seconds(pools, 64 << 10, 8, False, programs)
        yield result(machine, f"kernel, {programs} programs", 64 << 10, 8, False, KERNEL_BYTES, bounded_s)


def print_results(results: Sequence[Result]) -> None:
    print_table(
        ["how", "direction", "layer block", "blocks in a run", "moved", "GB/s read + written", "of a copy"],
        [
            (
                r.how,
                r.direction,
                f"{r.width_bytes // 1024} KiB",
                r.run_blocks,
                f"{r.moved_bytes >> 20} MiB",
                f"{r.bytes_per_s / 1e9:.0f}",
                f"{r.of_copy:.1%}",
            )
            for r in results
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write every figure here, as JSON")
    arguments = parser.parse_args()
    machine = measure()
    print(machine.report(), flush=True)
    pools = Pools(
        torch.empty(KERNEL_BYTES, dtype=torch.uint8, device="cuda").random_(0, 256),
        torch.empty(KERNEL_BYTES * NUM_LAYERS, dtype=torch.uint8, device="cuda").random_(0, 256),
    )
    results: list[Result] = []
    try:
        results.extend(measure_all(machine, pools))
    finally:  # what was measured before a failure
        print_results(results)
        write_json(arguments.out, machine, [asdict(r) for r in results])
    print(f"\nkernel, at worst: {min(r.of_copy for r in results if r.how == 'kernel'):.1%} of a copy (target 90 %)")


if __name__ == "__main__":
    main()
