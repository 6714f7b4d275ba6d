"""Time the parts of a step on the CPU, each beside what the machine could do.

A step has Qwen3-0.6B's shape and runs layer after layer, as in a model: linear layers (with norms and activations),
attention, and the rest (rotation and KV write, embedding). A part that multiplies is compared with the rate of a
product whose operands stay in the caches, a part that reads with the rate at which torch sums a large tensor; both are
measured between the steps.

    python benchmarks/roofline.py                            # wall time, two threads
    python benchmarks/roofline.py --threads 1 --processor-time   # on a machine that others share
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import attention as attention_benchmark
import torch

from swiftkv import _cpu
from swiftkv.kernels import cpu, cpu_attention
from swiftkv.kernels.ops import PackedMlp

LAYERS, HIDDEN, MLP, VOCAB, EPS = attention_benchmark.NUM_LAYERS, 1024, 3072, 32000, 1e-6
SPEC = attention_benchmark.SPEC
STEPS = {
    "prefill 512": [(512, 512)],
    "prefill 2,048": [(2048, 2048)],
    "64 after 1,984": [(64, 2048)],
    "decode 1 x 2,048": [(1, 2048)],
    "decode 8 x 2,048": [(1, 2048)] * 8,
}


@dataclass(frozen=True, slots=True)
class Model:
    """The packed weights of every layer; the norms are all ones."""

    qkv: list[cpu.PackedLinear]
    out: list[cpu.PackedLinear]
    gate_up: list[cpu.PackedLinear]
    down: list[cpu.PackedLinear]
    logits: cpu.PackedLinear
    table: torch.Tensor  # [VOCAB, HIDDEN]
    norm: torch.Tensor  # [HIDDEN]
    head_norm: torch.Tensor  # [head_dim]
    cos_sin: torch.Tensor  # float32 [positions, head_dim]

    @classmethod
    def random(cls) -> Model:
        def pack(*shapes: tuple[int, int], interleave: bool = False) -> list[cpu.PackedLinear]:
            def weights() -> list[torch.Tensor]:
                return [torch.randn(shape).mul_(shape[1] ** -0.5).bfloat16() for shape in shapes]

            return [cpu.pack_linear(weights(), interleave=interleave) for _ in range(LAYERS)]

        return cls(
            qkv=pack((sum(SPEC.qkv_sizes), HIDDEN)),
            out=pack((HIDDEN, SPEC.out_size)),
            gate_up=pack((MLP, HIDDEN), (MLP, HIDDEN), interleave=True),
            down=pack((HIDDEN, MLP)),
            logits=cpu.pack_linear([torch.randn(VOCAB, HIDDEN).bfloat16()]),
            table=torch.randn(VOCAB, HIDDEN).bfloat16(),
            norm=torch.ones(HIDDEN).bfloat16(),
            head_norm=torch.ones(SPEC.head_dim).bfloat16(),
            cos_sin=torch.rand(8192, SPEC.head_dim),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of one step; each sequence is (new tokens, tokens in the KV)."""

    sequences: list[tuple[int, int]]
    ids: torch.Tensor  # int32 [tokens]
    batch: cpu_attention.AttentionBatch
    pool: torch.Tensor

    @classmethod
    def of(cls, sequences: list[tuple[int, int]]) -> Step:
        ids = torch.arange(sum(new for new, _ in sequences), dtype=torch.int32)
        pool = attention_benchmark.make_pool(sequences, torch.bfloat16)
        return cls(sequences, ids, attention_benchmark.make_batch(sequences), pool)


class Stopwatch:
    """The seconds that each part of a step took."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds = dict.fromkeys(("linear", "attention", "rest"), 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = self.clock()
        yield
        self.seconds[name] += self.clock() - begin


def run_step(model: Model, step: Step, watch: Stopwatch) -> None:
    with watch.part("rest"):
        x = cpu.embed(step.ids, model.table)
    for layer in range(LAYERS):
        with watch.part("linear"):
            qkv = cpu.norm_linear(x, model.norm, EPS, model.qkv[layer])
        with watch.part("rest"):
            cpu_attention.rope_write_kv(
                qkv, model.cos_sin, model.head_norm, model.head_norm, EPS, SPEC, step.batch, step.pool, layer
            )
        with watch.part("attention"):
            attended = cpu_attention.attention(qkv, SPEC, step.batch, step.pool, layer)
        with watch.part("linear"):
            cpu.linear_residual(attended, model.out[layer], x)
            cpu.add_gated_mlp(x, PackedMlp(model.norm, EPS, model.gate_up[layer], model.down[layer]))
    with watch.part("linear"):
        cpu.logits(cpu.rms_norm(x[-len(step.sequences) :], model.norm, EPS), model.logits)


def work(model: Model, step: Step, part: str) -> tuple[float, float]:
    """Return the least floating-point operations and bytes that a part of the step needs."""
    weights = [*model.qkv, *model.out, *model.gate_up, *model.down]
    num_tokens, num_seqs = len(step.ids), len(step.sequences)
    if part == "linear":
        elements = sum(w.out_features * w.in_features for w in weights)
        last = model.logits.out_features * model.logits.in_features
        return 2.0 * (num_tokens * elements + num_seqs * last), sum(w.nbytes for w in weights) + model.logits.nbytes
    row = sum(SPEC.qkv_sizes)
    if part == "rest":
        return 0.0, 2.0 * LAYERS * num_tokens * (2 * (row - SPEC.qkv_sizes[2]) + 2 * SPEC.qkv_sizes[2])
    seen = sum(sum(range(length - new + 1, length + 1)) for new, length in step.sequences)
    kv = sum(length for _, length in step.sequences) * SPEC.num_kv_heads * (SPEC.head_dim + SPEC.value_head_dim)
    return 2.0 * LAYERS * seen * SPEC.num_heads * (SPEC.head_dim + SPEC.value_head_dim), 2.0 * LAYERS * kv


def best(call: Callable[[], object], clock: Callable[[], float], repeats: int = 20) -> float:
    times = []
    for _ in range(repeats):
        begin = clock()
        call()
        times.append(clock() - begin)
    return min(times)


def product_rate(clock: Callable[[], float]) -> float:
    """Return operations per second of a product whose operands stay in the second-level caches."""
    rows, inputs, outputs = 192 * torch.get_num_threads(), 512, 1024
    weights = cpu.pack_linear([torch.randn(outputs, inputs).bfloat16()])
    x = torch.randn(rows, inputs).bfloat16()
    return 2 * rows * inputs * outputs / best(lambda: cpu.linear(x, weights), clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure processor time, with one thread, on a machine that others share",
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.processor_time and args.threads != 1:
        parser.error("--processor-time needs --threads 1: waiting threads take processor time, too")
    clock = time.process_time if args.processor_time else time.perf_counter
    cpu.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    model, steps = Model.random(), {name: Step.of(sequences) for name, sequences in STEPS.items()}
    large = torch.ones(1 << 26)
    seconds: dict[tuple[str, str], list[float]] = {}
    rates, bandwidths = [], []
    for _ in range(args.rounds + 1):
        rates.append(product_rate(clock))
        bandwidths.append(large.nbytes / best(large.sum, clock, 5))
        for name, step in steps.items():
            watch = Stopwatch(clock)
            run_step(model, step, watch)
            for part, took in watch.seconds.items():
                seconds.setdefault((name, part), []).append(took)
    rate, bandwidth = max(rates), statistics.median(bandwidths)  # a machine reads faster for moments
    print(
        f"{_cpu.isa()}, {args.threads} threads; products {rate / 1e9:.0f} GFLOP/s, reading {bandwidth / 1e9:.1f} GB/s\n"
    )
    print("| step | part | ms | of the step | rate | limit | of the limit |")
    print("| --- | --- | ---: | ---: | ---: | --- | ---: |")
    for name, step in steps.items():
        medians = {part: statistics.median(seconds[name, part][1:]) for part in watch.seconds}
        for part, took in medians.items():
            operations, nbytes = work(model, step, part)
            computes = operations / rate > nbytes / bandwidth
            reached = f"{operations / took / 1e9:.0f} GFLOP/s" if computes else f"{nbytes / took / 1e9:.1f} GB/s"
            limit = max(operations / rate, nbytes / bandwidth)
            print(
                f"| {name} | {part} | {took * 1e3:.1f} | {took / sum(medians.values()):.0%} | {reached} "
                f"| {'products' if computes else 'reading'} | {limit / took:.0%} |"
            )


if __name__ == "__main__":
    main()
