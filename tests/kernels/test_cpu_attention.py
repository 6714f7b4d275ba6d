"""Paged attention on the CPU against torch in float64, over pools full of NaN.

It is one file, for every test of it runs again in processes of other instruction sets.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from swiftkv import _core, _cpu
from swiftkv.kernels import cpu_attention
from swiftkv.kernels.attention_spec import AttentionSpec
from tests.support.instruction_sets import MODEL_OF_TILES, PYTEST, in_subprocess

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NUM_LAYERS = 3
MAX_LEN = 4096


pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # torch.empty is full of NaN
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Sequence:
    """`num_new` tokens after `num_cached` that are in the pool already."""

    qkv: torch.Tensor  # [num_cached + num_new, sum(spec.qkv_sizes)], before norm and rotation
    num_cached: int

    @property
    def context_len(self) -> int:
        return len(self.qkv)

    def cut(self, context_len: int, num_cached: int) -> Sequence:
        return Sequence(self.qkv[:context_len], num_cached)


def make_spec(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    window: int = 0,
    soft_cap: float = 0.0,
    v_head_dim: int | None = None,
) -> AttentionSpec:
    return AttentionSpec(
        num_heads, num_kv_heads, head_dim, block_size, head_dim**-0.5, window, soft_cap, v_head_dim=v_head_dim
    )


def name_of(spec: AttentionSpec) -> str:
    heads = f"{spec.num_heads}x{spec.num_kv_heads}x{spec.head_dim}"
    return f"{heads},{spec.value_head_dim}w{spec.window}c{spec.soft_cap:g}"


def read_kv(
    pool: torch.Tensor, spec: AttentionSpec, entry: int, layer: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of one block at one layer, `[block_size, num_kv_heads, dim]` each, copied."""
    index = ~entry if entry < 0 else entry + layer
    nbytes = spec.layer_block_elements * dtype.itemsize
    heads, k_dim, v_dim, tokens = spec.num_kv_heads, spec.head_dim, spec.value_head_dim, spec.block_size
    k, v = pool[index * nbytes : (index + 1) * nbytes].view(dtype).tensor_split([heads * k_dim * tokens])
    if dtype == torch.bfloat16:
        k = k.view(heads, k_dim // 2, tokens, 2).permute(2, 0, 1, 3)
        v = v.view(heads, tokens // 2, v_dim, 2).permute(1, 3, 0, 2)
    else:
        k = k.view(heads, k_dim, tokens).permute(2, 0, 1)
        v = v.view(heads, tokens, v_dim).permute(1, 0, 2)
    return k.reshape(tokens, heads, k_dim).clone(), v.reshape(tokens, heads, v_dim).clone()


def make_sequence(spec: AttentionSpec, context_len: int, num_cached: int, dtype: torch.dtype) -> Sequence:
    return Sequence((torch.randn(context_len, sum(spec.qkv_sizes)) * 1.5).to(dtype), num_cached)


def cos_sin_table(rotary_dim: int) -> torch.Tensor:
    frequencies = 1e4 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(MAX_LEN)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


@dataclass(frozen=True)
class Rope:
    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 1e-6


class Node:
    """Runs steps over a pool whose every byte starts as NaN, with blocks handed out at random."""

    def __init__(
        self,
        spec: AttentionSpec,
        rope: Rope,
        dtype: torch.dtype,
        num_blocks: int = 400,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.spec, self.rope, self.sinks = spec, rope, sinks
        num_layer_blocks = num_blocks * NUM_LAYERS
        self.pool = torch.full((num_layer_blocks * spec.layer_block_elements,), math.nan, dtype=dtype).view(torch.uint8)
        # Half of the pool for blocks of all layers, half for blocks of the one layer at hand.
        self.entries = [b * NUM_LAYERS for b in range(num_blocks // 2)]
        self.entries += [~i for i in range(num_blocks // 2 * NUM_LAYERS, num_layer_blocks)]
        random.Random(0).shuffle(self.entries)

    def new_table(self, sequence: Sequence) -> list[int]:
        return [self.entries.pop() for _ in range(-(-sequence.context_len // self.spec.block_size))]

    def without_freed(self, sequence: Sequence, table: list[int]) -> list[int]:
        """The table once the blocks that no query of the step sees are gone."""
        if not self.spec.window:
            return table
        first = max(0, sequence.num_cached - self.spec.window + 1) // self.spec.block_size
        return [_core.NO_BLOCK] * first + table[first:]

    def step(self, sequences: list[Sequence], tables: list[list[int]], layer: int = 1) -> list[torch.Tensor]:
        """The new tokens' attention, per sequence `[num_new, num_heads, v_head_dim]`."""
        spec = self.spec
        new = [s.context_len - s.num_cached for s in sequences]
        tables = [self.without_freed(s, t) for s, t in zip(sequences, tables, strict=True)]
        batch = cpu_attention.prepare_batch(
            spec,
            int32([p for s in sequences for p in range(s.num_cached, s.context_len)]),
            int32([sum(new[:i]) for i in range(len(new) + 1)]),
            int32([s.context_len for s in sequences]),
            int32([e for t in tables for e in t]),
            int32([sum(map(len, tables[:i])) for i in range(len(tables) + 1)]),
        )
        qkv = torch.cat([s.qkv[s.num_cached :] for s in sequences])
        rope = self.rope
        cpu_attention.rope_write_kv(
            qkv, rope.cos_sin, rope.q_norm, rope.k_norm, rope.eps, spec, batch, self.pool, layer
        )
        out = cpu_attention.attention(qkv, spec, batch, self.pool, layer, self.sinks)
        return list(torch.split(out.view(-1, spec.num_heads, spec.value_head_dim), new))

    def run(self, sequences: list[Sequence], layer: int = 1) -> list[torch.Tensor]:
        """Fills in what is cached, then takes the step."""
        tables = [self.new_table(s) for s in sequences]
        for sequence, table in zip(sequences, tables, strict=True):
            if sequence.num_cached:
                self.step([sequence.cut(sequence.num_cached, 0)], [table], layer)
        return self.step(sequences, tables, layer)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rotated(x: torch.Tensor, norm: torch.Tensor | None, rope: Rope) -> torch.Tensor:
    """x `[tokens, heads, head_dim]` as transformers normalises and rotates it, in x's dtype."""
    if norm is not None:
        wide = x.float()
        x = norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + rope.eps)).to(x.dtype)
    rotary_dim = rope.cos_sin.shape[1]
    cos, sin = (t.repeat(1, 2)[: len(x), None].to(x.dtype) for t in rope.cos_sin.chunk(2, dim=1))
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    low, high = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-high, low], dim=-1) * sin, rest], dim=-1)


def split_qkv(sequence: Sequence, spec: AttentionSpec, rope: Rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = torch.split(sequence.qkv, spec.qkv_sizes, dim=1)
    q, k = q.unflatten(1, (-1, spec.head_dim)), k.unflatten(1, (-1, spec.head_dim))
    return rotated(q, rope.q_norm, rope), rotated(k, rope.k_norm, rope), v.unflatten(1, (-1, spec.value_head_dim))


def expected(sequence: Sequence, spec: AttentionSpec, rope: Rope, sinks: torch.Tensor | None = None) -> torch.Tensor:
    q, k, v = (t.double() for t in split_qkv(sequence, spec, rope))
    group = spec.num_heads // spec.num_kv_heads
    scores = torch.einsum("qhd,khd->hqk", q[sequence.num_cached :], k.repeat_interleave(group, 1)) * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    distance = torch.arange(sequence.num_cached, len(k))[:, None] - torch.arange(len(k))
    visible = (distance >= 0) & (distance < (spec.window or len(k)))
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def random_sequences(spec: AttentionSpec, dtype: torch.dtype, seed: int) -> list[Sequence]:
    """Decoding, chunks after a cached part, whole prompts, in any order."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    lengths = [(1, 0), (17, 16), (64, 63), (65, 64), (rng.randint(2, 90), 0), (530, 529), (rng.randint(600, 1100), 599)]
    lengths.append((200, rng.randint(1, 199)))
    rng.shuffle(lengths)
    return [make_sequence(spec, context_len, num_cached, dtype) for context_len, num_cached in lengths]


CASES = (
    make_spec(),
    make_spec(head_dim=80, block_size=32),
    make_spec(num_heads=3, num_kv_heads=1, head_dim=96, window=40),
    make_spec(num_heads=2, head_dim=128, block_size=48),
    make_spec(num_heads=8, num_kv_heads=1, head_dim=192, window=512),
    make_spec(num_heads=7, num_kv_heads=1, head_dim=16, window=1),
    make_spec(num_heads=2, num_kv_heads=1, head_dim=256, window=600),
    make_spec(num_heads=6, head_dim=192, v_head_dim=128, window=128),
    make_spec(num_heads=16, head_dim=48, v_head_dim=112, soft_cap=2.0, block_size=32),
    make_spec(num_heads=8, head_dim=64, soft_cap=30.0, window=65, v_head_dim=16),
)


WITH_SINKS = (CASES[0], CASES[4], CASES[7], CASES[9])


def make_sinks(spec: AttentionSpec) -> torch.Tensor:
    """One sink so large that it takes nearly everything, the others among the scores."""
    sinks = torch.randn(spec.num_heads) * 3
    sinks[0] = 200.0
    return sinks


@pytest.mark.parametrize("spec", CASES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_batch_equals_float64(spec: AttentionSpec, dtype: torch.dtype) -> None:
    rope = Rope(cos_sin_table(spec.head_dim))
    sequences = random_sequences(spec, dtype, seed=spec.head_dim)
    sinks = make_sinks(spec) if spec in WITH_SINKS else None
    outputs = Node(spec, rope, dtype, sinks=sinks).run(sequences)
    for sequence, output in zip(sequences, outputs, strict=True):
        assert_close(output, expected(sequence, spec, rope, sinks), dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


INVARIANT = (  # with 3, 2, 1, 4 and 8 query heads for each KV head
    make_spec(num_heads=6),
    make_spec(num_heads=4, window=100),
    make_spec(num_heads=2, window=100, soft_cap=3.0, v_head_dim=48),
    make_spec(num_heads=4, num_kv_heads=1, head_dim=48, v_head_dim=112),
    make_spec(num_heads=8, num_kv_heads=1, head_dim=48, soft_cap=3.0),
)


@pytest.mark.parametrize("spec", INVARIANT, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_does_not_depend_on_batch_chunks_or_threads(dtype: torch.dtype, spec: AttentionSpec) -> None:
    rope = Rope(cos_sin_table(spec.head_dim))
    torch.manual_seed(1)
    sequence = make_sequence(spec, 1200, 0, dtype)
    sinks = make_sinks(spec) if spec.soft_cap else None
    (whole,) = Node(spec, rope, dtype, sinks=sinks).run([sequence])

    for threads in (1, 3, 24):  # of 24, many would wait if tasks were not made smaller
        _cpu.set_num_threads(threads)
        (again,) = Node(spec, rope, dtype, sinks=sinks).run([sequence])
        assert same_bits(again, whole)

    neighbours = random_sequences(spec, dtype, seed=2)
    mixed = Node(spec, rope, dtype, num_blocks=800, sinks=sinks).run([*neighbours[:4], sequence, *neighbours[4:]])
    assert same_bits(mixed[4], whole)

    node = Node(spec, rope, dtype, sinks=sinks)
    table = node.new_table(sequence)
    cuts = [0, 1, 16, 17, 64, 575, 576, 1024, 1025, 1190, *range(1191, 1201)]  # ends in single decoded tokens
    chunks = [node.step([sequence.cut(end, begin)], [table])[0] for begin, end in pairwise(cuts)]
    assert same_bits(torch.cat(chunks), whole)


@pytest.mark.parametrize("spec", [make_spec(), make_spec(num_heads=6, window=300)], ids=name_of)
def test_scores_beyond_the_first_by_far_equal_float64(spec: AttentionSpec) -> None:
    """Keys of a partition whose weights in bfloat16, relative to those before them, a float cannot hold."""
    dtype = torch.bfloat16
    torch.manual_seed(3)
    sequence = make_sequence(spec, 700, 0, dtype)
    q, k, _ = torch.split(sequence.qkv, spec.qkv_sizes, dim=1)
    q += 4.0
    for begin, height in ((0, -10.0), (40, 5.0), (200, 6.0), (600, 9.0)):
        k[begin:] += height
    rope = Rope(torch.cat([torch.ones(MAX_LEN, 32), torch.zeros(MAX_LEN, 32)], dim=1))  # turns nothing
    (whole,) = Node(spec, rope, dtype).run([sequence])
    assert_close(whole, expected(sequence, spec, rope), dtype)

    node = Node(spec, rope, dtype)
    table = node.new_table(sequence)
    chunks = [node.step([sequence.cut(end, begin)], [table])[0] for begin, end in pairwise([0, 41, 199, 600, 699, 700])]
    assert same_bits(torch.cat(chunks), whole)


def test_values_too_small_to_be_normal_do_not_depend_on_chunks() -> None:
    spec, dtype = make_spec(), torch.bfloat16
    torch.manual_seed(4)
    sequence = make_sequence(spec, 70, 0, dtype)
    *_, v = torch.split(sequence.qkv, spec.qkv_sizes, dim=1)
    v *= 2.0**-128
    rope = Rope(cos_sin_table(spec.head_dim))
    (whole,) = Node(spec, rope, dtype).run([sequence])

    node = Node(spec, rope, dtype)
    table = node.new_table(sequence)
    chunks = [node.step([sequence.cut(end, begin)], [table])[0] for begin, end in pairwise([0, 68, 69, 70])]
    assert same_bits(torch.cat(chunks), whole)


def test_a_neighbour_full_of_nan_changes_nothing() -> None:
    spec, dtype = make_spec(), torch.bfloat16
    rope = Rope(cos_sin_table(64))
    good = make_sequence(spec, 90, 50, dtype)
    bad = Sequence(torch.full_like(good.qkv, math.nan), 30)
    (alone,) = Node(spec, rope, dtype).run([good])
    beside_bad, nan, _ = Node(spec, rope, dtype).run([good, bad, good])
    assert same_bits(beside_bad, alone)
    assert nan.isnan().all()


@pytest.mark.parametrize("rotary_dim", [16, 20, 80])
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_rotated_keys_and_values_and_nothing_else(dtype: torch.dtype, block_size: int, rotary_dim: int) -> None:
    spec, layer = make_spec(head_dim=80, v_head_dim=48, block_size=block_size), 2
    rope = Rope(cos_sin_table(rotary_dim))
    sequence = make_sequence(spec, 53, 21, dtype)
    node = Node(spec, rope, dtype, num_blocks=20)
    table = node.new_table(sequence)
    node.step([sequence.cut(21, 0)], [table], layer)
    node.step([sequence], [table], layer)

    blocks = [read_kv(node.pool, spec, entry, layer, dtype) for entry in table]
    keys, values = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    _, k, v = split_qkv(sequence, spec, rope)
    assert same_bits(keys[:53], k)
    assert same_bits(values[:53], v)
    assert keys[53:].isnan().all()
    assert values[53:].isnan().all()
    written = k.numel() + v.numel()
    assert node.pool.view(dtype).isnan().sum() == node.pool.view(dtype).numel() - written


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_normalises_query_and_key_heads_as_transformers(dtype: torch.dtype) -> None:
    spec = make_spec(head_dim=128)
    q_norm, k_norm = ((torch.rand(128) + 0.5).to(dtype) for _ in range(2))
    rope = Rope(cos_sin_table(128), q_norm, k_norm)
    sequences = [make_sequence(spec, 40, 7, dtype), make_sequence(spec, 3, 2, dtype)]
    for sequence, output in zip(sequences, Node(spec, rope, dtype).run(sequences), strict=True):
        assert_close(output, expected(sequence, spec, rope), dtype)


def test_layout_of_a_layer_block() -> None:
    spec = make_spec(num_kv_heads=2, head_dim=32, block_size=32)
    elements = torch.arange(2 * 32 * 2 * 32, dtype=torch.int16)
    head, dim, token = 1, 13, 21
    k_base, v_base = head * 32 * 32, (2 + head) * 32 * 32
    k, v = read_kv(elements.view(torch.uint8), spec, 0, 0, torch.bfloat16)
    assert k.view(torch.int16)[token, head, dim] == k_base + (dim // 2) * 64 + token * 2 + dim % 2
    assert v.view(torch.int16)[token, head, dim] == v_base + (token // 2) * 64 + dim * 2 + token % 2
    k, v = read_kv(elements.view(torch.uint8), spec, 0, 0, torch.float16)
    assert k.view(torch.int16)[token, head, dim] == k_base + dim * 32 + token
    assert v.view(torch.int16)[token, head, dim] == v_base + token * 32 + dim


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (make_spec(head_dim=72), "head_dim"),
        (make_spec(head_dim=272), "head_dim"),
        (make_spec(v_head_dim=24), "v_head_dim"),
        (make_spec(soft_cap=-1.0), "soft_cap"),
        (make_spec(block_size=24), "block_size"),
        (make_spec(num_heads=5, num_kv_heads=2), "num_heads"),
        (make_spec(window=-1), "window"),
    ],
)
def test_shapes_that_are_not_supported(spec: AttentionSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Node(spec, Rope(cos_sin_table(16)), torch.float32).run([make_sequence(spec, 4, 0, torch.float32)])


def succeeds(isa: str, *arguments: str) -> None:
    run = in_subprocess(isa, *arguments)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("isa", "tests"),
    [
        ("avx2", "mixed or depend or writes"),
        pytest.param("avx512", "mixed or depend or writes", marks=pytest.mark.slow),
        ("avx512_bf16", "beyond or bfloat16 and (mixed or depend)"),
        pytest.param("amx_emulated", "beyond or bfloat16 and (mixed or depend) or nan or normal", marks=MODEL_OF_TILES),
    ],
)
def test_other_instruction_sets(isa: str, tests: str) -> None:
    """The tests above on what an older CPU would run, and on a software model of the tiles that few CPUs have."""
    if os.environ.get("SWIFTKV_CPU_ISA"):
        pytest.skip("this run is of one instruction set")
    if isa == _cpu.isa():
        pytest.skip("the tests above ran on it")
    succeeds(isa, *PYTEST, __file__, "-k", tests)


def save_outputs(path: str) -> None:
    """Write the bfloat16 results of every case to a file."""
    torch.use_deterministic_algorithms(True)
    outputs = []
    for spec in CASES:
        sequences = random_sequences(spec, torch.bfloat16, seed=5)
        node = Node(spec, Rope(cos_sin_table(spec.head_dim)), torch.bfloat16, sinks=make_sinks(spec))
        outputs.append(torch.cat(node.run(sequences)))
    torch.save(outputs, path)


def test_tiles_give_what_dot_products_give(tmp_path: Path) -> None:
    """Up to rounding; and where there are tiles, they give every bit that their model gives."""
    if _cpu.supported_isa() not in ("avx512_bf16", "amx") or os.environ.get("SWIFTKV_CPU_ISA"):
        pytest.skip("the model of the tiles needs AVX512-BF16")
    outputs = {}
    for isa in {"avx512_bf16", "amx_emulated", _cpu.isa()}:
        succeeds(isa, __file__, str(tmp_path / isa))
        outputs[isa] = torch.load(tmp_path / isa)
    dots, tiles = outputs["avx512_bf16"], outputs["amx_emulated"]
    torch.testing.assert_close(dots, tiles, rtol=1.6e-2, atol=1.6e-2)
    assert not all(map(same_bits, dots, tiles))
    if "amx" in outputs:
        assert all(map(same_bits, outputs["amx"], tiles))


if __name__ == "__main__":
    save_outputs(sys.argv[1])
