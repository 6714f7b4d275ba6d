"""The ceilings of this GPU, measured in each run that compares with them, and a timer.

PYTHONPATH=. python benchmarks/gpu/machine.py [--out machine.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch

COPY_BYTES = 4 << 30
PCIE_BYTES = 512 << 20
MATRIX_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Machine:
    """The ceilings of one GPU, as medians."""

    name: str
    torch: str
    copy_bytes_per_s: float  # device to device, bytes read plus bytes written
    matrix_flops_per_s: float  # bfloat16, random operands
    host_to_device_bytes_per_s: float  # pinned host memory
    device_to_host_bytes_per_s: float

    def report(self) -> str:
        return (
            f"{self.name}, torch {self.torch}: copies {self.copy_bytes_per_s / 1e12:.2f} TB/s (read + written), "
            f"bf16 matrix products {self.matrix_flops_per_s / 1e12:.0f} TFLOP/s, host to device "
            f"{self.host_to_device_bytes_per_s / 1e9:.1f} GB/s, device to host "
            f"{self.device_to_host_bytes_per_s / 1e9:.1f} GB/s"
        )


def median_seconds(run: Callable[[int], object], repeats: int = 20, warmups: int = 3) -> float:
    """Return the median seconds of `run(i)` on the current stream, by CUDA events.

    `i` counts up, so that `run` can take other inputs each time. The device is kept busy, so that the host's time for a
    launch shows only where the host cannot stay ahead.
    """
    for index in range(warmups):
        run(index)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for index, event in enumerate(events[1:]):
        run(warmups + index)
        event.record()
    torch.cuda.synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(events))) / 1e3


def measure() -> Machine:
    """Measure this machine. This takes some seconds, and 8 GiB of device memory, which it frees afterwards."""
    copy_bytes_per_s, matrix_flops_per_s = _copy_bandwidth(), _matrix_rate()
    to_device, to_host = _pcie_bandwidths()
    torch.cuda.empty_cache()
    name = torch.cuda.get_device_name()
    return Machine(name, torch.__version__, copy_bytes_per_s, matrix_flops_per_s, to_device, to_host)


def _copy_bandwidth() -> float:
    source, target = (torch.empty(COPY_BYTES // 4, dtype=torch.float32, device="cuda") for _ in range(2))
    source.normal_()
    return 2 * COPY_BYTES / median_seconds(lambda _: target.copy_(source))


def _matrix_rate() -> float:
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = torch.empty_like(a)
    return 2 * MATRIX_SIZE**3 / median_seconds(lambda _: torch.mm(a, b, out=product))


def _pcie_bandwidths() -> tuple[float, float]:
    """Return bytes per second to the device and to the host."""
    device = torch.randint(256, (PCIE_BYTES,), dtype=torch.uint8, device="cuda")
    host = device.cpu().pin_memory()
    to_device_s = median_seconds(lambda _: device.copy_(host, non_blocking=True), repeats=10)
    to_host_s = median_seconds(lambda _: host.copy_(device, non_blocking=True), repeats=10)
    return PCIE_BYTES / to_device_s, PCIE_BYTES / to_host_s


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table as Markdown."""
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for number, row in enumerate(cells):
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if number == 0:
            print("| " + " | ".join("-" * (width - 1) + ":" for width in widths) + " |")


def write_json(path: Path | None, machine: Machine, results: Sequence[dict[str, object]]) -> None:
    if path is not None:
        path.write_text(json.dumps({"machine": asdict(machine), "results": list(results)}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write every figure here, as JSON")
    arguments = parser.parse_args()
    machine = measure()
    print(machine.report())
    write_json(arguments.out, machine, [])


if __name__ == "__main__":
    main()
