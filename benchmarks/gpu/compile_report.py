"""Report registers, spills and shared memory of every compiled kernel, without needing the GPUs.

Compiles each kernel in every kind of configuration that a model can need, and prints registers, spills, shared memory
and how many programs run on a multiprocessor at once. Exits with 1 if a loop spills or a kernel does not fit. `ptxas`
and `cuobjdump` come with triton.

PYTHONPATH=. TRITON_CACHE_DIR=.triton python benchmarks/gpu/compile_report.py [--targets 80 90] [--only prefill]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from swiftkv.kernels import triton_attention, triton_schedule
from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.device_limits import A100, H100, L4, RTX_5090, DeviceLimits
from swiftkv.kernels.experts import SILU, Choices, ExpertLayer, ExpertWeights, GatedActivation
from swiftkv.kernels.reference_experts import pack_experts
from swiftkv.kernels.triton_copy import move_blocks
from swiftkv.kernels.triton_elementwise import gated, rms_norm, rope_write_kv
from swiftkv.kernels.triton_experts import add_experts
from swiftkv.kernels.triton_logprobs import TOP_TILES, token_logprobs
from swiftkv.kernels.triton_penalties import count_tokens, edit_logits, forbid_tokens, penalise
from swiftkv.kernels.triton_sampling import SlotParams, sample
from swiftkv.kernels.triton_schedule import Tiling, decode_tiling, prefill_tiling
from tests.support.offline_gpu import compile_instead_of_launching

GPUS = {gpu.capability: gpu for gpu in (A100, L4, H100, RTX_5090)}
REGISTERS_PER_SM = 65_536
MAX_THREADS_PER_SM = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}
VOCABULARY = 151_936
HEADS = ((32, 8, 64), (32, 8, 128), (16, 4, 256))
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel as compiled: bytes, except where a name says otherwise."""

    target: int
    name: str
    case: str
    num_warps: int
    registers: int
    stack: int
    spills_in_loops: int  # instructions
    shared: int
    programs_per_sm: int

    def __str__(self) -> str:
        return (
            f"| sm_{self.target} | {self.name} | {self.case} | {self.num_warps} | {self.registers} | {self.stack} | "
            f"{self.spills_in_loops} | {self.shared:,} | {self.programs_per_sm} |"
        )


HEADER = (
    "| GPU | kernel | case | warps | registers | stack, bytes | spills in loops | shared memory, bytes | "
    "programs per SM |\n| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def row_of(gpu: DeviceLimits, name: str, case: str, kernel: Any) -> Row:
    """Return the row of a compiled kernel, read from its binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = _output("cuobjdump", "--dump-resource-usage", cubin.name)
        code = _output("cuobjdump", "--dump-sass", cubin.name)
    registers, stack = (int(re.findall(rf"{word}:(\d+)", usage)[-1]) for word in ("REG", "STACK"))
    shared, num_warps = int(kernel.metadata.shared), int(kernel.metadata.num_warps)
    by_registers = REGISTERS_PER_SM // (num_warps * 32 * -(-registers // 8) * 8)
    by_threads = MAX_THREADS_PER_SM[gpu.capability] // (num_warps * 32)
    by_shared = gpu.shared_bytes_per_sm // (shared + 1024)
    fits = shared <= gpu.shared_bytes
    programs = min(by_registers, by_threads, by_shared, 32) if fits else 0
    return Row(gpu.capability, name, case, num_warps, registers, stack, spills_in_loops(code), shared, programs)


def spills_in_loops(code: str) -> int:
    """Count the accesses to local memory between a label and a jump back to it."""
    jumps, spills = [], []
    for match in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code):
        address, instruction = int(match[1], 16), match[2]
        if re.search(r"\b(LDL|STL)\b", instruction):
            spills.append(address)
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        if target is not None and int(target[1], 16) < address:
            jumps.append((int(target[1], 16), address))
    return sum(any(begin <= spill <= end for begin, end in jumps) for spill in spills)


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], check=True, capture_output=True, text=True).stdout


def attention_cases(gpu: DeviceLimits) -> Iterator[tuple[str, Callable[[], object]]]:
    for num_heads, num_kv_heads, head_dim in HEADS:
        for block_size in (16, 64, 128):
            spec = AttentionSpec(num_heads, num_kv_heads, head_dim, block_size, head_dim**-0.5)
            yield from _attention(f"d{head_dim} b{block_size}", spec, gpu)
    gpt_oss = AttentionSpec(64, 8, 64, 16, 0.125, window=128, soft_cap=30.0)
    yield from _attention("d64 b16 w128 cap", gpt_oss, gpu)
    yield from _attention("d128 b16, 64 heads each", AttentionSpec(64, 1, 128, 16, 0.1), gpu)
    for block_size in (16, 64):
        mimo = AttentionSpec(64, 4, 192, block_size, 192**-0.5, v_head_dim=128)
        yield from _attention(f"d192, values 128, b{block_size}", mimo, gpu)
    mimo_window = AttentionSpec(64, 8, 192, 16, 192**-0.5, window=128, v_head_dim=128)
    yield from _attention("d192, values 128, b16 w128", mimo_window, gpu)


def _attention(
    case: str, spec: AttentionSpec, gpu: DeviceLimits, tilings: tuple[Tiling, Tiling] | None = None
) -> Iterator[tuple[str, Callable[[], object]]]:
    tilings = tilings or (prefill_tiling(spec, gpu), decode_tiling(spec, gpu))
    for kind, cached, new in (("prefill", 40_000, 16), ("decode", 40_000, 1)):
        tiling = tilings[new == 1]
        text = f"{case}: {tiling.rows} x {tiling.keys}, {tiling.num_stages} stages"
        text += ", rectangles" if tiling.by_rectangles else ""
        yield f"{kind} {text}", partial(attend, spec, cached, new, tilings)


def attend(spec: AttentionSpec, cached: int, new: int, tilings: tuple[Tiling, Tiling]) -> object:
    """Attend from one sequence, with sinks, over a pool of one layer block."""
    num_blocks = -(-(cached + new) // spec.block_size)
    batch = triton_schedule.prepare_batch(
        spec,
        torch.arange(cached, cached + new, dtype=torch.int32),
        torch.tensor([0, new], dtype=torch.int32),
        torch.tensor([cached + new], dtype=torch.int32),
        torch.full((num_blocks,), ~0, dtype=torch.int32),
        torch.tensor([0, num_blocks], dtype=torch.int32),
        device="cpu",
        tilings=tilings,
    )
    pool = torch.zeros(spec.layer_block_elements * 2, dtype=torch.uint8)
    qkv, sinks = torch.zeros(new, sum(spec.qkv_sizes), dtype=torch.bfloat16), torch.zeros(spec.num_heads)
    return triton_attention.attention(qkv, spec, batch, pool, 0, sinks)


def other_cases(gpu: DeviceLimits) -> Iterator[tuple[str, Callable[[], object]]]:
    x, gate_up = torch.zeros(4, 4096, dtype=torch.bfloat16), torch.zeros(4, 24_576, dtype=torch.bfloat16)
    yield "width 4,096", lambda: rms_norm(x, x[0], 1e-6)
    yield "width 12,288", lambda: gated(gate_up)
    spec = AttentionSpec(32, 8, 128, 16, 0.1)
    zeros = torch.zeros(4, dtype=torch.int32)
    positions = torch.zeros(1, dtype=torch.int32)
    batch: Any = triton_schedule.prepare_batch(
        spec, positions, torch.tensor([0, 1]).int(), positions + 1, positions, torch.tensor([0, 1]).int(), device="cpu"
    )
    qkv, norm = torch.zeros(1, 48 * 128, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.bfloat16)
    pool = torch.zeros(1 << 16, dtype=torch.uint8)
    yield (
        "32 heads of 128, norms",
        lambda: rope_write_kv(qkv, torch.zeros(8, 128), norm, norm, 1e-6, spec, batch, pool, 0),
    )
    logits, params = torch.zeros(4, VOCABULARY), SlotParams.empty(4, VOCABULARY, "cpu")
    counts = torch.zeros(4, VOCABULARY, dtype=torch.int32)
    yield "vocabulary 151,936", lambda: sample(logits, params, zeros, zeros)
    for num_top in TOP_TILES:
        yield f"vocabulary 151,936, top {num_top}", partial(token_logprobs, logits, zeros, num_top)
    yield "", lambda: forbid_tokens(logits, zeros, torch.zeros(4, VOCABULARY // 32, dtype=torch.int32))
    yield "", lambda: penalise(logits, params, zeros, counts, counts.bool())
    yield "", lambda: count_tokens(counts, params, zeros, zeros)
    yield "", lambda: edit_logits(logits, zeros, zeros, zeros.float(), zeros, zeros)
    lists = torch.tensor([2, 1, 0, 0, 0], dtype=torch.int64)
    for width in (32 << 10, 24 << 10):
        yield f"{width >> 10} KiB", partial(move_blocks, pool, lists, 0, 1, width, 0, True, 8)
    gpt_oss = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
    yield "experts of 2,048 x 768", lambda: multiply_by_expert(2048, 768, SILU, has_bias=False)
    yield "experts of 2,880 x 2,880, biases", lambda: multiply_by_expert(2880, 2880, gpt_oss, has_bias=True)


def multiply_by_expert(hidden_size: int, inner_size: int, activation: GatedActivation, has_bias: bool) -> None:
    """Multiply one token by one expert."""
    x, inner = torch.zeros(1, hidden_size, dtype=torch.bfloat16), torch.zeros(inner_size, dtype=torch.bfloat16)
    up, down = inner[:, None].expand(-1, hidden_size), inner.expand(hidden_size, -1)
    biases = (inner, inner, x[0]) if has_bias else (None, None, None)
    experts = pack_experts(ExpertLayer(1, activation, [ExpertWeights(up, up, down, *biases)]))
    add_experts(x, Choices(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1)), experts, x.clone())


def report(gpu: DeviceLimits, cases: Iterator[tuple[str, Callable[[], object]]], only: str) -> list[Row]:
    rows: dict[str, Row] = {}
    case = ""

    def compiled(name: str, kernel: Any) -> None:
        row = row_of(gpu, name.strip("_").removesuffix("_kernel"), case, kernel)
        if only in row.name and f"{row.name} {row.case}" not in rows:
            rows[f"{row.name} {row.case}"] = row
            print(row, flush=True)

    compile_instead_of_launching(compiled, gpu.capability)
    for case, launch in cases:
        try:
            launch()
        except OutOfResources as error:
            print(f"sm_{gpu.capability} {case}: {error}", flush=True)
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, nargs="+", default=[80, 90], choices=sorted(GPUS))
    parser.add_argument("--only", default="", help="compile only kernels with this in their names")
    parser.add_argument("--case", default="", help="compile only cases with this in their names")
    arguments = parser.parse_args()
    print(HEADER)
    rows = []
    for target in arguments.targets:
        gpu = GPUS[target]
        cases = [*attention_cases(gpu), *other_cases(gpu)]
        rows += report(gpu, iter(case for case in cases if arguments.case in case[0]), arguments.only)
    bad = [row for row in rows if row.spills_in_loops or not row.programs_per_sm]
    print(f"\n{len(rows)} kernels; {len(bad)} spill in a loop or do not fit", *bad, sep="\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
