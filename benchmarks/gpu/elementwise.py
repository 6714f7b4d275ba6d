"""Time the kernels between the matrix products, and sampling beside a sort; print a table, and write JSON:

    PYTHONPATH=. python benchmarks/gpu/elementwise.py [--out elementwise.json]

Kernels: the bytes per second that have to be read and written, over the bandwidth of a copy measured in the same run;
the shapes are Qwen3-8B's. Sampling: microseconds for a batch, over the time that a copy's bandwidth allows for reading
the logits once, and beside sorting the vocabulary with torch. Calls are captured in a graph, so that no launch from the
host is timed, and use several tensors in turn that together exceed the L2 cache, so that nothing is found there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import Machine, measure, median_seconds, print_table, write_json
from torch import Tensor

from swiftkv.kernels import triton_elementwise as elementwise
from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.triton_logprobs import token_logprobs
from swiftkv.kernels.triton_penalties import penalise
from swiftkv.kernels.triton_sampling import SlotParams, sample

HIDDEN, INTERMEDIATE, EPS = 4096, 12_288, 1e-6
SPEC = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, block_size=64, scale=1.0)
TOKENS = (1, 32, 256, 2048, 16_384)
BATCHES = (1, 32, 256)
VOCABULARIES = (32_000, 151_936)
L2_BYTES = 128 << 20
MAX_COPIES = 64


@dataclass(frozen=True, slots=True)
class Filters:
    name: str
    spread: float = 3.0  # standard deviation of the logits
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


FILTERS = (
    Filters("greedy", temperature=0.0),
    Filters("temperature"),
    Filters("top_k 50", top_k=50),
    Filters("top_p 0.9", top_p=0.9),
    Filters("top_k 50, top_p 0.9", top_k=50, top_p=0.9),
    Filters("top_p 0.9, flat logits", top_p=0.9, spread=0.5),
)


@dataclass(frozen=True, slots=True)
class Block:
    """The places of a step's tokens in the pool, one after the other."""

    positions: Tensor
    token_entries: Tensor


def graph_seconds(run: Callable[[int], object], num_copies: int) -> float:
    """Return the seconds of one `run(i)`, on average over a graph of calls for i in range(num_copies)."""
    run(0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_copies):
            run(index)
    return median_seconds(lambda _: graph.replay(), repeats=10) / num_copies


def copies_of(nbytes: int) -> int:
    """Return how many tensors of `nbytes` exceed L2 together, so that each is read from memory again."""
    return max(4, min(MAX_COPIES, L2_BYTES // nbytes + 1))


def time_kernels(machine: Machine) -> list[dict[str, object]]:
    results = []
    for num_tokens in TOKENS:
        for name, run, nbytes in kernels(num_tokens):
            seconds = graph_seconds(run, copies_of(nbytes))
            share = nbytes / seconds / machine.copy_bytes_per_s
            results.append(
                {"kernel": name, "tokens": num_tokens, "us": seconds * 1e6, "gb_per_s": nbytes / seconds / 1e9}
                | {"of_copy": share}
            )
        torch.cuda.empty_cache()
    return results


def kernels(num_tokens: int) -> list[tuple[str, Callable[[int], object], int]]:
    """Return for each kernel its name, a call that takes the number of its tensors, and the bytes that it must move."""

    def tensors(width: int, reads_and_writes: int) -> tuple[list[Tensor], int]:
        nbytes = num_tokens * width * 2 * reads_and_writes
        return [torch.randn(num_tokens, width, device="cuda").bfloat16() for _ in range(copies_of(nbytes))], nbytes

    weight = torch.randn(HIDDEN, device="cuda").bfloat16()
    x, norm_bytes = tensors(HIDDEN, 2)
    gate_up, silu_bytes = tensors(2 * INTERMEDIATE, 1)
    silu_bytes += silu_bytes // 2
    qkv, qkv_bytes = tensors((SPEC.num_heads + 2 * SPEC.num_kv_heads) * SPEC.head_dim, 2)
    qk_norm = torch.randn(SPEC.head_dim, device="cuda").bfloat16()
    cos_sin = torch.randn(max(TOKENS), SPEC.head_dim, device="cuda")
    positions = torch.arange(num_tokens, dtype=torch.int32, device="cuda")
    num_blocks = -(-num_tokens // SPEC.block_size)
    layer_bytes = 2 * SPEC.num_kv_heads * SPEC.block_size * SPEC.head_dim * 2
    pools = [torch.zeros(num_blocks * layer_bytes, dtype=torch.uint8, device="cuda") for _ in qkv]
    where = Block(positions, torch.randperm(num_blocks, device="cuda").int()[positions.long() // SPEC.block_size])
    return [
        ("rms_norm", lambda i: elementwise.rms_norm(x[i % len(x)], weight, EPS), norm_bytes),
        ("gated", lambda i: elementwise.gated(gate_up[i % len(gate_up)]), silu_bytes),
        (
            "rope_write_kv",
            lambda i: elementwise.rope_write_kv(
                qkv[i % len(qkv)], cos_sin, None, None, EPS, SPEC, where, pools[i % len(qkv)], 0
            ),
            qkv_bytes + num_tokens * SPEC.head_dim * 4,
        ),
        (
            "rope_write_kv, normed",
            lambda i: elementwise.rope_write_kv(
                qkv[i % len(qkv)], cos_sin, qk_norm, qk_norm, EPS, SPEC, where, pools[i % len(qkv)], 0
            ),
            qkv_bytes + num_tokens * SPEC.head_dim * 4,
        ),
    ]


def time_sampling(machine: Machine) -> list[dict[str, object]]:
    results = []
    for vocab_size in VOCABULARIES:
        for num_rows in BATCHES:
            nbytes = num_rows * vocab_size * 4
            noise = [torch.randn(num_rows, vocab_size, device="cuda") for _ in range(min(8, copies_of(nbytes)))]
            floor_s = nbytes / machine.copy_bytes_per_s
            for filters in FILTERS:
                seconds, torch_seconds = time_filters(filters, noise)
                results.append(row("sample: " + filters.name, num_rows, vocab_size, seconds, floor_s, torch_seconds))
            results.extend(time_logprobs_and_penalties(noise, floor_s))
            torch.cuda.empty_cache()
    return results


def row(
    name: str, num_rows: int, vocab_size: int, seconds: float, floor_s: float, torch_seconds: float
) -> dict[str, object]:
    return {
        "kernel": name,
        "batch": num_rows,
        "vocabulary": vocab_size,
        "us": seconds * 1e6,
        "of_floor": seconds / floor_s,
        "torch_us": torch_seconds * 1e6,
    }


def time_filters(filters: Filters, noise: list[Tensor]) -> tuple[float, float]:
    num_rows, vocab_size = noise[0].shape
    logits = [filters.spread * x for x in noise]
    params = SlotParams.empty(num_rows, vocab_size, "cuda")
    params.temperature.fill_(filters.temperature)
    params.top_k.fill_(filters.top_k or vocab_size)
    params.top_p.fill_(filters.top_p)
    params.seeds.random_()
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    seconds = graph_seconds(lambda i: sample(logits[i], params, slots, slots), len(logits))
    return seconds, graph_seconds(lambda i: sample_by_sorting(logits[i], filters), len(logits))


def sample_by_sorting(logits: Tensor, filters: Filters) -> Tensor:
    """Sample by sorting, as servers without kernels of their own do, and only as far as the filters require."""
    if filters.temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits / filters.temperature).softmax(-1)
    if filters.top_k or filters.top_p < 1:
        ordered, token_ids = probabilities.sort(dim=-1, descending=True)
        if filters.top_k:
            ordered[:, filters.top_k :] = 0
            ordered /= ordered.sum(-1, keepdim=True)
        if filters.top_p < 1:
            ordered[ordered.cumsum(-1) - ordered > filters.top_p] = 0
        probabilities = torch.zeros_like(ordered).scatter_(-1, token_ids, ordered)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)


def time_logprobs_and_penalties(noise: list[Tensor], floor_s: float) -> list[dict[str, object]]:
    num_rows, vocab_size = noise[0].shape
    token_ids = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    params = SlotParams.empty(num_rows, vocab_size, "cuda")
    params.is_penalised.fill_(True)
    params.presence.fill_(0.5)
    counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device="cuda")
    in_prompt = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device="cuda")
    copies = len(noise)
    logprobs_s = graph_seconds(lambda i: token_logprobs(noise[i], token_ids, 20), copies)
    torch_s = graph_seconds(lambda i: noise[i].log_softmax(-1).topk(20), copies)
    penalties_s = graph_seconds(lambda i: penalise(noise[i], params, slots, counts, in_prompt), copies)
    torch_penalties_s = graph_seconds(lambda i: noise[i].sub_(0.5 * (counts > 0)), copies)
    return [
        row("logprobs, top 20", num_rows, vocab_size, logprobs_s, floor_s, torch_s),
        row("penalties", num_rows, vocab_size, penalties_s, floor_s, torch_penalties_s),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write every figure here, as JSON")
    arguments = parser.parse_args()
    machine = measure()
    print(machine.report())
    torch.manual_seed(0)
    results = time_kernels(machine)
    write_json(arguments.out, machine, results)
    print_table(
        ["kernel", "tokens", "us", "GB/s", "of a copy"],
        [[r["kernel"], r["tokens"], f"{r['us']:.1f}", f"{r['gb_per_s']:.0f}", f"{r['of_copy']:.0%}"] for r in results],
    )
    sampled = time_sampling(machine)
    print_table(
        ["", "batch", "vocabulary", "us", "reads of the logits", "torch us"],
        [
            [r["kernel"], r["batch"], r["vocabulary"], f"{r['us']:.0f}", f"{r['of_floor']:.1f}", f"{r['torch_us']:.0f}"]
            for r in sampled
        ],
    )
    write_json(arguments.out, machine, [*results, *sampled])


if __name__ == "__main__":
    main()
