"""Linear layers, and those of quantized weights, beside oneDNN's prepacked ones, over the weights of a whole model.

    python benchmarks/linear.py                      # bfloat16, a 28-layer model of hidden size 1024, 2 threads
    python benchmarks/linear.py --rows 1 512 --dtype float32 --threads 1

The two run in turn, pass by pass, so that a drift of the machine affects both. Prints the best and the median pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from swiftkv import _cpu
from swiftkv.kernels import cpu
from swiftkv.kernels.weight_codes import FP8, INT8, CodedMatrix, Coding

HIDDEN, INTERMEDIATE, QKV, ATTENTION, VOCAB = 1024, 3072, 4096, 2048, 32000
LAYER_SHAPES = ((QKV, HIDDEN), (HIDDEN, ATTENTION), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))

CODINGS = {"4 bits": Coding("four_bits", tuple(float(i - 8) for i in range(16))), "int8": INT8, "FP8": FP8}


def model_weights(layers: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = [shape for _ in range(layers) for shape in LAYER_SHAPES] + [(VOCAB, HIDDEN)]
    return [torch.randn(shape).mul_(shape[1] ** -0.5).to(dtype) for shape in shapes]


def time_in_turn(passes: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for repeat in range(repeats + 1):
        for name, run in passes.items():
            time.sleep(0.02)  # until the other's waiting threads stop spinning
            start = time.perf_counter()
            run()
            if repeat > 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def coded(weight: Tensor, coding: Coding) -> CodedMatrix:
    """Return a matrix of random codes of the same shape, in groups of 128 as most checkpoints have them."""
    rows, columns = weight.shape
    factors = torch.rand(rows, columns // 128) * columns**-0.5
    codes = torch.randint(0, 1 << coding.bits, weight.shape, dtype=torch.uint8)
    return CodedMatrix(codes, coding, factors, None, weight.dtype)


@cache
def onednn_packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has a kernel of this dtype for this CPU."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(64, 64, dtype=dtype), 1)
    except RuntimeError as error:
        print(f"oneDNN is left out: {str(error).splitlines()[0]}")
        return False
    return True


def compare(
    rows: int,
    weights: list[Tensor],
    packed: dict[str, list[cpu.PackedLinear]],
    repeats: int,
) -> None:
    dtype = weights[0].dtype
    inputs = {k: torch.randn(rows, k).to(dtype) for k in {w.shape[1] for w in weights}}
    theirs = []
    if onednn_packs(dtype):
        theirs = [torch.ops.mkldnn._reorder_linear_weight(w, rows) for w in weights]
    ks = [w.shape[1] for w in weights]

    def ours(layers: list[cpu.PackedLinear]) -> None:
        for k, w in zip(ks, layers, strict=True):
            cpu.linear(inputs[k], w)

    def onednn() -> None:
        for k, w in zip(ks, theirs, strict=True):
            torch.ops.mkldnn._linear_pointwise(inputs[k], w, None, "none", [], "")

    passes: dict[str, Callable[[], None]] = {name: partial(ours, layers) for name, layers in packed.items()}
    if theirs:
        passes["oneDNN"] = onednn
    elements = sum(w.numel() for w in weights)
    with torch.inference_mode():
        for name, seconds in time_in_turn(passes, repeats).items():
            best, median = min(seconds), statistics.median(seconds)
            num_bytes = sum(w.nbytes for w in packed.get(name, packed["swiftkv"]))
            gigabytes, gigaflop = num_bytes / 1e9, 2 * rows * elements / 1e9
            print(
                f"rows {rows:5d}  {name:8s} best {best * 1e3:9.2f} ms {gigabytes / best:6.1f} GB/s "
                f"{gigaflop / best:7.1f} GFLOP/s   median {median * 1e3:9.2f} ms",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64, 512, 2048])
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cpu.set_num_threads(args.threads)
    weights = model_weights(args.layers, getattr(torch, args.dtype))
    packed = {"swiftkv": [cpu.pack_linear([w]) for w in weights]}
    if cpu.keeps_codes(weights[0].dtype):
        packed |= {name: [cpu.pack_linear([coded(w, coding)]) for w in weights] for name, coding in CODINGS.items()}
    print(f"{_cpu.isa()}, {args.threads} threads, {sum(w.nbytes for w in packed['swiftkv']) / 1e9:.2f} GB packed")
    for rows in args.rows:
        # A prefill needs logits for its last row only: the vocabulary's layer comes last and is left out.
        count = len(weights) if rows <= 64 else len(weights) - 1
        layers = {name: of_all[:count] for name, of_all in packed.items()}
        compare(rows, weights[:count], layers, args.repeats if rows <= 64 else 3)


if __name__ == "__main__":
    main()
