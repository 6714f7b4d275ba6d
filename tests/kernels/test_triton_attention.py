"""Triton's attention in its interpreter against torch in float64, over pools full of NaN.

The interpreter multiplies no bfloat16 matrices: `tests/gpu` has those.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from swiftkv._core import NO_BLOCK
from swiftkv.kernels import triton_attention
from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.device_limits import A100, H100, L4, RTX_5090, DeviceLimits
from swiftkv.kernels.triton_layout import layer_blocks
from swiftkv.kernels.triton_schedule import Tiling, decode_tiling, prefill_tiling, shared_bytes
from tests.support.attention_steps import NUM_LAYERS, Step, make_step, relative_error

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}
SMALL_TILES = (Tiling(rows=32, keys=16, num_warps=4, num_stages=2), Tiling(rows=16, keys=16, num_warps=4, num_stages=2))


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # torch.empty is full of NaN
    yield
    torch.use_deterministic_algorithms(False)


def make_spec(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    window: int = 0,
    cap: float = 0,
    v_head_dim: int | None = None,
) -> AttentionSpec:
    return AttentionSpec(num_heads, num_kv_heads, head_dim, block_size, head_dim**-0.5, window, cap, v_head_dim)


def random_lengths(seed: int, longest: int) -> list[tuple[int, int]]:
    """Single tokens, chunks after a cached part, whole prompts, in any order."""
    rng = random.Random(seed)
    lengths = [(0, 1), (16, 1), (rng.randint(1, longest), 1), (63, 64), (0, rng.randint(2, longest))]
    lengths += [(rng.randint(1, longest), rng.randint(2, longest // 2)), (longest, 2)]
    rng.shuffle(lengths)
    return lengths


def check(step: Step, dtype: torch.dtype, tilings: tuple[Tiling, Tiling] | None = None) -> None:
    actual = step.run(step.prepare(tilings=tilings))
    assert actual.dtype == dtype
    assert relative_error(actual, step.expected()) < TOLERANCE[dtype]


CASES = (
    make_spec(),
    make_spec(num_heads=2, head_dim=80, block_size=32),
    make_spec(num_heads=3, num_kv_heads=1, head_dim=96, window=40, cap=5.0),
    make_spec(num_heads=2, num_kv_heads=1, head_dim=128, block_size=48, cap=20.0),
    make_spec(num_heads=8, num_kv_heads=1, head_dim=192, block_size=64, window=100),
    make_spec(num_heads=7, num_kv_heads=1, head_dim=64, window=1),
    make_spec(num_heads=2, num_kv_heads=1, head_dim=256, block_size=128, window=130),
    make_spec(num_heads=20, num_kv_heads=1, head_dim=64, block_size=128),
    make_spec(num_heads=4, num_kv_heads=1, head_dim=192, v_head_dim=128, block_size=64),
    make_spec(num_heads=2, num_kv_heads=1, head_dim=192, v_head_dim=128, window=128),
    make_spec(num_heads=6, num_kv_heads=2, head_dim=48, v_head_dim=80, block_size=32, cap=5.0),
)


@pytest.mark.parametrize(
    "spec", CASES, ids=lambda s: f"{s.num_heads}x{s.num_kv_heads}x{s.head_dim}v{s.value_head_dim}w{s.window}"
)
def test_mixed_batch_equals_float64(spec: AttentionSpec) -> None:
    lengths = random_lengths(seed=spec.head_dim, longest=140)
    step = make_step(spec, lengths, torch.float32, seed=spec.head_dim, sinks=True)
    check(step, torch.float32)


@pytest.mark.parametrize("block_size", [16, 128])
def test_half_precision_equals_float64(block_size: int) -> None:
    spec = make_spec(head_dim=128, block_size=block_size, window=90)
    check(make_step(spec, random_lengths(3, 130), torch.float16, sinks=True), torch.float16)


@pytest.mark.parametrize(("seed", "v_head_dim"), [*((seed, None) for seed in range(6)), (7, 96), (8, 24)])
def test_any_lengths_windows_and_tiles(seed: int, v_head_dim: int | None) -> None:
    """Tiles far smaller than on a GPU: windows and prompts then begin and end in every part of one."""
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 2])
    spec = make_spec(
        num_heads=num_kv_heads * rng.choice([1, 3, 4, 7]),
        num_kv_heads=num_kv_heads,
        head_dim=64,
        block_size=rng.choice([16, 32, 48]),
        window=rng.choice([0, rng.randint(1, 60)]),
        cap=rng.choice([0.0, 10.0]),
        v_head_dim=v_head_dim,
    )
    lengths = [(rng.randint(0, 90), rng.choice([1, rng.randint(1, 40)])) for _ in range(8)]
    prefill = replace(SMALL_TILES[0], by_rectangles=rng.choice([True, False]) and v_head_dim is None)
    step = make_step(spec, lengths, torch.float32, seed=seed, layer=rng.randrange(3), sinks=rng.choice([True, False]))
    check(step, torch.float32, (prefill, SMALL_TILES[1]))


@pytest.mark.parametrize(("window", "v_head_dim"), [(0, None), (700, 40)])
def test_long_sequence_is_split_and_combined(window: int, v_head_dim: int | None) -> None:
    spec = make_spec(num_heads=2, num_kv_heads=1, window=window, v_head_dim=v_head_dim)
    step = make_step(spec, [(5000, 1), (40, 1), (2100, 1)], torch.float32, sinks=True)
    assert step.prepare().max_splits > 3
    check(step, torch.float32)


@pytest.mark.parametrize(("window", "v_head_dim"), [(0, None), (150, 40)])
def test_the_keys_of_short_prompts_after_long_histories_are_split_and_merged(
    window: int, v_head_dim: int | None
) -> None:
    spec = make_spec(num_heads=6, num_kv_heads=2, window=window, cap=20.0, v_head_dim=v_head_dim)
    step = make_step(spec, [(400, 10), (40, 1), (200, 20), (0, 9)], torch.float32, sinks=True)
    batch = step.prepare(tilings=SMALL_TILES)
    assert len(batch.merges) == 3
    assert batch.num_parts >= 2 * len(batch.merges)
    check(step, torch.float32, SMALL_TILES)


@pytest.mark.parametrize("window", [0, 3000])
@pytest.mark.parametrize("lengths", [[(32_000, 100)], [(9000, 17), (0, 900), (5000, 40)], [(0, 30_000)], [(70, 9)]])
def test_parts_have_every_key_once_and_fill_the_gpu(lengths: list[tuple[int, int]], window: int) -> None:
    spec = make_spec(num_heads=32, num_kv_heads=8, head_dim=128, block_size=128, window=window)
    batch = schedule_of(spec, lengths)
    rows, keys = batch.prefill.rows, batch.prefill.keys
    tiles = sorted(map(tuple, batch.tiles.tolist()), key=lambda tile: (tile[0], tile[1], tile[6]))
    parts = {place: [tile for tile in tiles if tile[:2] == place] for place in dict.fromkeys(t[:2] for t in tiles)}
    for (sequence, first_row), of_tile in parts.items():
        cached, new = lengths[sequence]
        last = min((first_row + rows - 1) // 4, new - 1)
        assert of_tile[0][6] == (max(0, cached + first_row // 4 - window + 1) // keys if window else 0)
        assert all(a[7] == b[6] for a, b in pairwise(of_tile))
        assert of_tile[-1][7] == -(-(cached + last + 1) // keys)
        assert [tile[8] for tile in of_tile] == (
            [-1] if len(of_tile) == 1 else [*range(of_tile[0][8], of_tile[-1][8] + 1)]
        )
    merged = {tuple(merge[:3]): merge[3:] for merge in batch.merges.tolist()}
    assert merged == {
        (p[0][1], p[0][2], p[0][5]): [p[0][8], p[-1][8] + 1] for p in parts.values() if len(p) > 1
    }  # fmt: skip
    longest = max(tile[7] - tile[6] for tile in tiles)
    programs, at_once = len(tiles) * spec.num_kv_heads, 132
    assert programs <= 2 * at_once or not merged
    assert programs > at_once or longest < 8  # the least that is worth two parts


def test_chunks_give_what_the_whole_prompt_gives() -> None:
    spec = make_spec(window=50)
    whole = make_step(spec, [(0, 150)], torch.float32)
    out = whole.run(whole.prepare())
    for begin, end in pairwise([0, 1, 2, 16, 17, 64, 149, 150]):
        part = replace(
            whole,
            qkv=whole.qkv[begin:end],
            positions=whole.positions[begin:end],
            query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
        )
        assert relative_error(part.run(part.prepare()), out[begin:end].double()) < 1e-5


def test_where_a_block_lies_changes_no_bit() -> None:
    """Borrowed blocks pass through staging of one layer, and the kernels compute with them as with whole blocks."""
    spec = make_spec(window=90)
    step = make_step(spec, [(1500, 1), (150, 1), (60, 40), (0, 33)], torch.float16)
    expected = step.run(step.prepare())
    kv = layer_blocks(step.pool, spec, torch.float16)
    moved, entries = torch.full_like(kv, torch.nan), step.block_table.clone()
    free = torch.randperm(len(kv) // NUM_LAYERS, generator=torch.Generator().manual_seed(1)).tolist()
    for i, entry in enumerate(entries.tolist()):
        if entry != NO_BLOCK:
            place = free.pop() * NUM_LAYERS
            entries[i] = place if entry < 0 else ~place
            moved[place + (step.layer if entry < 0 else 0)] = kv[~entry if entry < 0 else entry + step.layer]
    elsewhere = replace(step, pool=moved.flatten().view(torch.uint8), block_table=entries)
    assert torch.equal(elsewhere.run(elsewhere.prepare()), expected)


def test_a_neighbour_full_of_nan_changes_nothing() -> None:
    spec = make_spec()
    step = make_step(spec, [(80, 1), (50, 40), (60, 1), (30, 30)], torch.float32)
    expected = step.expected()
    bad = step.qkv.clone()
    bad[1:41] = torch.nan
    bad[41] = torch.nan
    actual = replace(step, qkv=bad).run(step.prepare())
    assert actual[1:42].isnan().all()
    good = [0, *range(42, 72)]
    assert relative_error(actual[good], expected[good]) < 1e-5


@pytest.mark.parametrize("window", [0, 100])
def test_buffers_of_a_graph_serve_any_smaller_step(window: int) -> None:
    """One schedule of fixed size, as a CUDA graph has it, filled again and again; absent rows are zeros."""
    spec = make_spec(window=window)
    buffers = triton_attention.decode_buffers(spec, num_seqs=5, num_entries=300, device="cpu")
    for seed, cached in enumerate([[700, 0, 30], [1, 2, 3, 4, 5], [2500], []]):
        step = make_step(spec, [(length, 1) for length in cached] or [(0, 1)], torch.float32, seed=seed)
        used = len(cached)
        step = replace(
            step,
            qkv=torch.nn.functional.pad(step.qkv[:used], (0, 0, 0, 5 - used)),
            positions=step.positions[:used],
            query_starts=step.query_starts[: used + 1],
            context_lens=step.context_lens[:used],
            table_starts=step.table_starts[: used + 1],
        )
        batch = step.prepare(into=buffers)
        out = step.run(batch)
        assert batch is buffers
        assert not out[used:].any()
        assert (batch.token_entries[used:] == NO_BLOCK).all()
        assert batch.positions.tolist() == [*cached, *[0] * (5 - used)]
        if used:
            assert relative_error(out[:used], step.expected()[:used]) < 1e-5


def schedule_of(spec: AttentionSpec, lengths: list[tuple[int, int]]) -> triton_attention.AttentionBatch:
    """Return the schedule of sequences of so many cached and new tokens, in blocks one after the other."""
    counts = [-(-(cached + new) // spec.block_size) for cached, new in lengths]
    return triton_attention.prepare_batch(
        spec,
        torch.cat([torch.arange(cached, cached + new, dtype=torch.int32) for cached, new in lengths]),
        torch.tensor([0, *(new for _, new in lengths)]).cumsum(0).int(),
        torch.tensor([cached + new for cached, new in lengths], dtype=torch.int32),
        torch.arange(sum(counts), dtype=torch.int32),
        torch.tensor([0, *counts]).cumsum(0).int(),
        device="cpu",
    )


def test_schedule_does_every_row_and_key_once() -> None:
    spec = make_spec(num_heads=6, window=0)
    lengths = [(10_000, 1), (0, 300), (7, 1), (64_000, 1), (5, 43)]
    batch = schedule_of(spec, lengths)

    tiles = sorted(map(tuple, batch.tiles[:, :2].tolist()))
    rows = batch.prefill.rows
    assert tiles == [(s, row) for s in (1, 4) for row in range(0, lengths[s][1] * 3, rows)]
    for s in (0, 2, 3):
        first, end = batch.split_starts[s : s + 2].tolist()
        parts = batch.splits[first:end].tolist()
        assert {part[0] for part in parts} == {s}
        assert parts[0][1] == 0
        assert all(a[2] == b[1] for a, b in pairwise(parts))
        assert parts[-1][2] == -(-(lengths[s][0] + 1) // batch.decode.keys)
    assert batch.split_starts[[1, 2]].diff() == batch.split_starts[[4, 5]].diff() == 0
    longest = batch.splits[:, 2] - batch.splits[:, 1]
    assert longest.max() <= 2 * longest.sum() / len(batch.splits)


@pytest.mark.parametrize("limits", [A100, L4, H100, RTX_5090], ids=lambda limits: f"sm_{limits.capability}")
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"), [*((dim, None) for dim in (16, 64, 80, 128, 192, 256)), (192, 128), (64, 256)]
)
def test_tiles_fit_the_gpu(head_dim: int, v_head_dim: int | None, block_size: int, limits: DeviceLimits) -> None:
    for group in (1, 7, 64, 128):
        spec = make_spec(group, 1, head_dim, block_size, v_head_dim=v_head_dim)
        prefill, decode = prefill_tiling(spec, limits), decode_tiling(spec, limits)
        assert shared_bytes(spec, prefill, limits) <= limits.shared_bytes
        assert shared_bytes(spec, decode, limits) <= limits.shared_bytes
        assert not prefill.by_rectangles or (block_size % prefill.keys == 0 and limits.capability >= 90)
        assert not (prefill.by_rectangles and v_head_dim)


@pytest.mark.parametrize("limits", [A100, H100], ids=lambda limits: f"sm_{limits.capability}")
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_naming_the_size_of_values_that_they_have_anyway_changes_no_tile(head_dim: int, limits: DeviceLimits) -> None:
    for block_size in (16, 128):
        spec = make_spec(32, 8, head_dim, block_size)
        named = replace(spec, v_head_dim=head_dim)
        assert prefill_tiling(named, limits) == prefill_tiling(spec, limits)
        assert decode_tiling(named, limits) == decode_tiling(spec, limits)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(288, 128), (128, 272)])
def test_heads_that_there_is_no_tile_for_are_refused_by_their_size(head_dim: int, v_head_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"heads of {head_dim} and values of {v_head_dim}: up to 256"):
        prefill_tiling(make_spec(4, 1, head_dim, 16, v_head_dim=v_head_dim))


# Compiled for a GPU that need not be there, where triton is imported before its interpreter is switched on.
COMPILE = """
from dataclasses import replace

from benchmarks.gpu.compile_report import attend
from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.triton_schedule import decode_tiling, prefill_tiling
from tests.support.offline_gpu import compile_instead_of_launching

def compiled(name, kernel):
    assembly = kernel.asm["ptx"]
    units = ("wgmma.mma_async.", "mma.sync.", "cp.async.bulk.tensor.", "cp.async.cg.")
    used = [unit for unit in units if f" {unit}" in assembly or f"\\t{unit}" in assembly]
    print(name, spec.head_dim, spec.block_size, *used)

compile_instead_of_launching(compiled)
plain = AttentionSpec(32, 8, 128, 16, 0.1, window=30_000, soft_cap=30.0)
mimo = AttentionSpec(64, 4, 192, 64, 192**-0.5, v_head_dim=128)
cases = [(replace(plain, block_size=128), 0, 16), (plain, 40_000, 16), (plain, 40_000, 1)]
for spec, cached, new in [*cases, (mimo, 40_000, 16), (mimo, 40_000, 1)]:
    attend(spec, cached, new, (prefill_tiling(spec), decode_tiling(spec)))
"""


def test_compiles_to_the_units_that_are_meant() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "prefill_kernel 128 128 wgmma.mma_async. cp.async.bulk.tensor.",
        "prefill_kernel 128 16 wgmma.mma_async. cp.async.cg.",
        "merge_kernel 128 16",
        "decode_kernel 128 16 mma.sync. cp.async.cg.",
        "combine_kernel 128 16",
        "prefill_kernel 192 64 wgmma.mma_async. cp.async.cg.",
        "merge_kernel 192 64",
        "decode_kernel 192 64 mma.sync. cp.async.cg.",
        "combine_kernel 192 64",
    ]
