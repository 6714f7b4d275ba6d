"""Time a layer with many experts on the CPU, beside a dense product of equal work, and one token beside memory:

    python benchmarks/experts.py                              # bfloat16, 512 experts, top 10, hidden 2,048, inner 512
    python benchmarks/experts.py --dtype float32 --rounds 9 --threads 1

All variants run in turn, round by round, so that a drift of the machine affects all alike. Figures are medians of the
rounds, ratios are medians of the ratios within a round; the last lines are rows for benchmarks/results/step.md. With
one thread, processor time is measured, which other programs disturb less. `products` sends sorted rows through the
experts' linear layers, expert by expert, and does nothing else; `dense` is the same work with the weights of one
expert. The time of everything but products is that of experts of a small inner size, less their products. The experts
take 3.2 GB in bfloat16 and 6.4 GB in float32, all other weights a fifth of that.

A virtual machine may be slow to read memory that was not read for a quarter of a minute: the first read of such
weights, dense or of experts, took three times as long. A server at work reads all its experts all the time, so one
token goes through all of them before the first measurement, as for the dense rows; --only one leaves many tokens out.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftkv import _cpu
from swiftkv.kernels import cpu
from swiftkv.kernels.cpu_tensors import native_activation
from swiftkv.kernels.experts import SILU, Choices, ExpertLayer, ExpertWeights, Router
from swiftkv.kernels.weight_codes import unpacked

DISTINCT = 96  # the number of experts in `products`: more than caches hold
THIN = 32

Clock = Callable[[], float]


@dataclass(frozen=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    inner: int
    tokens: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def expert_elements(self) -> int:
        return 3 * self.hidden * self.inner

    @property
    def gigaflop(self) -> float:
        return 2e-9 * self.rows * self.expert_elements

    @property
    def token_gigabytes(self) -> float:
        """The size of the weights that one token needs, in GB."""
        return 1e-9 * self.top_k * self.expert_elements * torch.empty((), dtype=self.dtype).element_size()


class Layer:
    """One layer with random weights, and inputs for it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.expert = ExpertWeights(
            self.weight(shape.inner, shape.hidden),
            self.weight(shape.inner, shape.hidden),
            self.weight(shape.hidden, shape.inner),
        )
        self.experts = cpu.pack_experts(ExpertLayer(shape.experts, SILU, (self.expert for _ in range(shape.experts))))
        self.gate = cpu.pack_linear([self.weight(shape.experts, shape.hidden)])
        self.router = Router(shape.experts, shape.top_k, "softmax", renormalise=True)
        self.norm = torch.ones(shape.hidden, dtype=shape.dtype)
        self.hidden = torch.randn(shape.tokens, shape.hidden).to(shape.dtype)
        self.residual = torch.zeros_like(self.hidden)
        self.turn = 0

    def weight(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns).mul_(columns**-0.5).to(self.shape.dtype)

    def thin(self) -> cpu.PackedExperts:
        """Return experts of a smaller inner size, for which sorting, gathering and adding up take as long."""
        gate, up, down = self.expert.gate[:THIN], self.expert.up[:THIN], unpacked(self.expert.down)[:, :THIN]
        thin = ExpertWeights(gate, up, down)
        return cpu.pack_experts(ExpertLayer(self.shape.experts, SILU, (thin for _ in range(self.shape.experts))))

    def normalise(self) -> None:
        cpu.rms_norm(self.hidden, self.norm, 1e-6)

    def add_experts(self, choices: Choices, experts: cpu.PackedExperts) -> None:
        cpu.add_experts(self.hidden, choices, experts, self.residual)

    def one_token(self) -> None:
        """Compute one token with other experts than the last time, so that no cache holds them."""
        first = self.turn * self.shape.top_k % (self.shape.experts - self.shape.top_k)
        self.turn += 1
        chosen = torch.arange(first, first + self.shape.top_k, dtype=torch.int32)[None]
        choices = Choices(chosen, torch.full((1, self.shape.top_k), 0.1))
        cpu.add_experts(self.hidden[:1], choices, self.experts, self.residual[:1])


class Products:
    """The linear layers of experts, and nothing else."""

    def __init__(self, layer: Layer) -> None:
        shape, expert = layer.shape, layer.expert
        self.gate_up = [cpu.pack_linear([expert.gate, expert.up], interleave=True) for _ in range(DISTINCT)]
        self.down = [cpu.pack_linear([expert.down]) for _ in range(DISTINCT)]
        self.rows = layer.hidden.repeat(shape.top_k, 1)
        self.outputs = torch.empty_like(self.rows)
        self.turn = 0

    def run(self, counts: list[int]) -> None:
        begin = 0
        for count in counts:
            self._multiply(self.turn % DISTINCT, begin, count)
            begin += count
            self.turn += 1

    def _multiply(self, index: int, begin: int, count: int) -> None:
        rows, outputs = (x[begin : begin + count] for x in (self.rows, self.outputs))
        _cpu.gated_mlp(
            self.gate_up[index],
            self.down[index],
            rows.data_ptr(),
            count,
            0,
            _cpu.NormWeight.SAME_DTYPE,
            0.0,
            native_activation(SILU),
            _cpu.Epilogue.STORE,
            outputs.data_ptr(),
        )


def measure(runs: dict[str, Callable[[], object]], clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each run in each round, after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            time.sleep(0.005)  # until waiting threads stop spinning
            start = clock()
            run()
            if number > 0:
                seconds[name].append(clock() - start)
    return seconds


def ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def many_tokens(layer: Layer, clock: Clock, rounds: int) -> list[str]:
    shape, products = layer.shape, Products(layer)
    spread = torch.arange(shape.rows, dtype=torch.int32).view(shape.tokens, shape.top_k) % shape.experts
    evenly = Choices(spread, torch.full(spread.shape, 1 / shape.top_k))
    counts = [shape.rows // shape.experts] * shape.experts
    logits, thin = cpu.logits(layer.hidden, layer.gate), layer.thin()
    runs: dict[str, Callable[[], object]] = {
        "experts": lambda: layer.add_experts(evenly, layer.experts),
        "products": lambda: products.run(counts),
        "dense": lambda: products.run([shape.rows]),
        "thin experts": lambda: layer.add_experts(evenly, thin),
        "norm": layer.normalise,
        "gate": lambda: cpu.logits(layer.hidden, layer.gate),
        "choice": lambda: cpu.route(logits, layer.router),
    }
    seconds = measure(runs, clock, rounds)
    for name, times in seconds.items():
        print(f"{name:14s} {statistics.median(times) * 1e3:9.2f} ms  best {min(times) * 1e3:9.2f}")
    each = list(zip(*(seconds[name] for name in runs), strict=True))
    thin_share = THIN / shape.inner
    rest = [thin - thin_share * experts + norm + choice for experts, _, _, thin, norm, _, choice in each]
    gates = [gate for *_, gate, _ in each]
    layers = [experts + norm + gate + choice for experts, _, _, _, norm, gate, choice in each]
    gigaflops = shape.gigaflop / statistics.median(seconds["experts"])
    what = f"{shape.experts} experts, top {shape.top_k}, {shape.tokens:,} tokens, {str(shape.dtype).split('.')[1]}"
    return [
        f"| {what}: all but products | `experts.py` | {ratio(rest, layers):.1%} of the layer; the gate's product "
        f"{ratio(gates, layers):.1%} more | <= 5 % |",
        f"| experts beside one dense product of equal work | | {gigaflops:.0f} GFLOP/s, "
        f"x {ratio(seconds['dense'], seconds['experts']):.2f}; their products alone "
        f"x {ratio(seconds['dense'], seconds['products']):.2f} | >= 0.8 |",
    ]


def one_token(layer: Layer, clock: Clock, rounds: int) -> list[str]:
    shape = layer.shape
    dense = [cpu.pack_linear([layer.weight(shape.top_k * 3 * shape.inner, shape.hidden)]) for _ in range(8)]
    row, memory = layer.hidden[:1], torch.ones(8, int(shape.token_gigabytes * 1e9) // 4)
    turns = itertools.count()
    for _ in range(shape.experts // shape.top_k):
        layer.one_token()
    seconds = measure(
        {
            "experts": layer.one_token,
            "dense": lambda: cpu.linear(row, dense[next(turns) % 8]),
            "read": lambda: memory[next(turns) % 8].sum(),
        },
        clock,
        rounds,
    )
    gigabytes = dict.fromkeys(seconds, shape.token_gigabytes)
    rates = {name: [gigabytes[name] / second for second in times] for name, times in seconds.items()}
    for name, rate in rates.items():
        print(f"one token, {name:14s} {statistics.median(rate):6.1f} GB/s  best {max(rate):6.1f}")
    fastest = max(("dense", "read"), key=lambda name: statistics.median(rates[name]))
    return [
        f"| decode of one token, {shape.token_gigabytes * 1e3:.0f} MB of experts | | "
        f"{statistics.median(rates['experts']):.1f} GB/s, x {ratio(rates['experts'], rates[fastest]):.2f} of memory "
        f"({fastest}) | >= 0.8 |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("experts", 512), ("top-k", 10), ("hidden", 2048), ("inner", 512), ("tokens", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=["many", "one"], help="measure only steps of many tokens, or of one")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cpu.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = Shape(args.experts, args.top_k, args.hidden, args.inner, args.tokens, getattr(torch, args.dtype))
    with torch.inference_mode():
        layer = Layer(shape)
        print(f"{_cpu.isa()}, {args.threads} threads, {layer.experts.nbytes / 1e9:.2f} GB of experts")
        clock = time.thread_time if args.threads == 1 else time.perf_counter
        rows = many_tokens(layer, clock, args.rounds) if args.only != "one" else []
        rows += one_token(layer, clock, 5 * args.rounds) if args.only != "many" else []
    print("\n" + "\n".join(rows))


if __name__ == "__main__":
    main()
