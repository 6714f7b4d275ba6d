"""Linear layers, RMSNorm and embedding on the CPU against torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swiftkv import _cpu
from swiftkv.kernels import cpu
from swiftkv.kernels.experts import GELU_TANH, SILU, GatedActivation
from swiftkv.kernels.ops import PackedMlp
from tests.support.instruction_sets import MODEL_OF_TILES, PYTEST, in_subprocess

ISAS = ("avx2", "avx512", "avx512_bf16", "amx")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6
# Rows, outputs, inputs: one row to several chunks of rows; sizes that fill no panel, no vector, no pair.
SHAPES = (
    (1, 64, 32),
    (2, 1, 1),
    (3, 80, 33),
    (7, 100, 65),
    (33, 200, 130),
    (97, 64, 257),
    (110, 70, 2500),
    (200, 330, 512),
)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


pytestmark = pytest.mark.usefixtures("two_threads")


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def draw_weight(n: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, k).mul_(k**-0.5).to(dtype)


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Float64, but rounded to the dtype where the kernel rounds."""
    wide = x.double()
    normal = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return (normal.double() * weight.double()).to(x.dtype).double()


def poison_scratch(k: int, dtype: torch.dtype) -> None:
    """Leave NaN in whatever memory the kernels keep between calls."""
    nan = torch.full((300, k), torch.nan, dtype=dtype)
    cpu.norm_linear(nan, nan[0].clone(), EPS, cpu.pack_linear([draw_weight(8, k, dtype)]))


def assert_close(got: Tensor, exact: Tensor, dtype: torch.dtype, slack: float = 1.5, terms: int = 1) -> None:
    """Within `slack` roundings to the dtype, and four standard deviations of a float32 sum of `terms` terms."""
    tolerance = slack * ROUNDING[dtype] + 4 * terms**0.5 * 2**-24
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_linear_with_bias(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    poison_scratch(k + 5, dtype)
    x, weight, bias = draw(rows, k, dtype=dtype), draw_weight(n, k, dtype), draw(n, dtype=dtype)
    packed = cpu.pack_linear([weight], [bias])
    exact = x.double() @ weight.double().T + bias.double()
    assert (packed.out_features, packed.in_features) == (n, k)
    assert_close(cpu.linear(x, packed), exact, dtype, terms=k)
    scores = cpu.logits(x, packed)
    assert scores.dtype == torch.float32
    assert_close(scores, exact, torch.float32, terms=k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_norm_then_linear(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    poison_scratch(k + 5, dtype)
    x, norm_weight, weight = draw(rows, k, dtype=dtype), draw(k, dtype=dtype), draw_weight(n, k, dtype)
    exact = exact_norm(x, norm_weight) @ weight.double().T
    # A norm that rounds the other way moves the sum by about one rounding of a typical term.
    assert_close(cpu.norm_linear(x, norm_weight, EPS, cpu.pack_linear([weight])), exact, dtype, slack=4, terms=k)


ACTIVATIONS: dict[str, tuple[GatedActivation, Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (SILU, lambda gate, up: F.silu(gate) * up),
    "gelu": (GELU_TANH, lambda gate, up: F.gelu(gate, approximate="tanh") * up),
    "limited": (
        GatedActivation(alpha=1.702, limit=1.0, up_offset=1.0),
        lambda gate, up: (up.clamp(-1, 1) + 1) * gate.clamp(max=1) * torch.sigmoid(1.702 * gate.clamp(max=1)),
    ),
}


def activated(
    x: Tensor, norm_weight: Tensor, eps: float, gate_up: cpu.PackedLinear, activation: GatedActivation = SILU
) -> Tensor:
    """Return what a gated MLP computes between its layers: the second one returns its inputs here."""
    same = cpu.pack_linear([torch.eye(gate_up.out_features // 2, dtype=x.dtype)])
    return cpu.gated_mlp(x, PackedMlp(norm_weight, eps, gate_up, same, activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_activation_of_gate_and_up(rows: int, n: int, k: int, dtype: torch.dtype, activation: str) -> None:
    poison_scratch(k + 5, dtype)
    x, norm_weight = draw(rows, k, dtype=dtype), draw(k, dtype=dtype)
    gate, up = draw_weight(n, k, dtype), draw_weight(n, k, dtype)
    gate_bias, up_bias = draw(n, dtype=dtype), draw(n, dtype=dtype)
    packed = cpu.pack_linear([gate, up], [gate_bias, up_bias], interleave=True)
    normal = exact_norm(x, norm_weight)
    g = normal @ gate.double().T + gate_bias.double()
    u = normal @ up.double().T + up_bias.double()
    assert packed.out_features == 2 * n
    ours, theirs = ACTIVATIONS[activation]
    assert_close(activated(x, norm_weight, EPS, packed, ours), theirs(g, u), dtype, slack=8, terms=k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_a_gated_mlp_is_its_two_layers(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, norm_weight = draw(rows, k, dtype=dtype), draw(k, dtype=dtype)
    gate_up = cpu.pack_linear([draw_weight(n, k, dtype), draw_weight(n, k, dtype)], interleave=True)
    down = cpu.pack_linear([draw_weight(k, n, dtype)], [draw(k, dtype=dtype)])
    mlp = PackedMlp(norm_weight, EPS, gate_up, down)
    between = activated(x, norm_weight, EPS, gate_up)
    assert torch.equal(cpu.gated_mlp(x, mlp), cpu.linear(between, down))
    expected = x.clone()
    cpu.linear_residual(between, down, expected)
    cpu.add_gated_mlp(x, mlp)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_residual_is_rounded_once_after_the_sum(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, residual = draw(rows, k, dtype=dtype), draw_weight(n, k, dtype), draw(rows, n, dtype=dtype)
    packed = cpu.pack_linear([weight])
    expected = (cpu.logits(x, packed) + residual.float()).to(dtype)
    cpu.linear_residual(x, packed, residual)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_weights_are_one_layer(dtype: torch.dtype) -> None:
    parts, biases = (
        [draw_weight(n, 48, dtype) for n in (96, 5, 40)],
        [draw(96, dtype=dtype), None, draw(40, dtype=dtype)],
    )
    x = draw(9, 48, dtype=dtype)
    together = cpu.linear(x, cpu.pack_linear(parts, biases))
    apart = [cpu.linear(x, cpu.pack_linear([w], [b])) for w, b in zip(parts, biases, strict=True)]
    assert torch.equal(together, torch.cat(apart, dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 7, 16, 100, 1024])
def test_rms_norm(k: int, dtype: torch.dtype) -> None:
    x, weight = draw(70, k, dtype=dtype) * 3, draw(k, dtype=dtype)
    assert_close(cpu.rms_norm(x, weight, EPS), exact_norm(x, weight), dtype, slack=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 100, 2048])
def test_a_norm_that_is_added_is_rounded_before(k: int, dtype: torch.dtype) -> None:
    x, residual = draw(70, k, dtype=dtype) * 3, draw(70, k, dtype=dtype)
    for weight in (draw(k, dtype=dtype), 1 + draw(k, dtype=torch.float32)):
        expected = residual + cpu.rms_norm(x, weight, EPS)
        cpu.rms_norm_residual(x, weight, EPS, residual)
        assert torch.equal(residual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_with_a_float32_weight_is_rounded_once(dtype: torch.dtype) -> None:
    x, weight = draw(70, 100, dtype=dtype) * 3, 1 + draw(100, dtype=torch.float32)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * weight.double()
    got = cpu.rms_norm(x, weight, EPS)
    assert (got != exact.to(dtype)).float().mean() < 0.01  # the sum of squares may round the other way
    linear = cpu.pack_linear([draw_weight(30, 100, dtype)])
    assert torch.equal(cpu.norm_linear(x, weight, EPS, linear), cpu.linear(got, linear))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [96, 257, 2100])
def test_a_row_is_the_same_in_every_batch_and_for_every_number_of_threads(k: int, dtype: torch.dtype) -> None:
    rows, n = 230, 200 if k < 1000 else 40
    x, norm_weight = draw(rows, k, dtype=dtype), draw(k, dtype=dtype)
    packed = cpu.pack_linear([draw_weight(n, k, dtype)], [draw(n, dtype=dtype)])
    gate_up = cpu.pack_linear([draw_weight(n, k, dtype), draw_weight(n, k, dtype)], interleave=True)
    residual = draw(rows, n, dtype=dtype)

    def run(begin: int, end: int) -> list[Tensor]:
        part, added = x[begin:end].clone(), residual[begin:end].clone()
        cpu.linear_residual(part, packed, added)
        return [
            cpu.linear(part, packed),
            cpu.norm_linear(part, norm_weight, EPS, packed),
            activated(part, norm_weight, EPS, gate_up),
            cpu.logits(part, packed),
            added,
        ]

    cpu.set_num_threads(1)
    alone = [torch.cat(pieces) for pieces in zip(*(run(i, i + 1) for i in range(rows)), strict=True)]
    for threads in (1, 2, 3):
        cpu.set_num_threads(threads)
        for count in (2, 5, 6, 7, 12, 13, 31, 32, 33, 48, 95, 96, 97, rows):
            for got, expected in zip(run(0, count), alone, strict=True):
                assert torch.equal(got, expected[:count]), (threads, count)
        for got, expected in zip(run(50, 187), alone, strict=True):
            assert torch.equal(got, expected[50:187]), threads


@pytest.mark.parametrize("n", [2048, 2064, 2080, 2049])  # whole lines, half a panel, whole panels but odd, no lines
def test_large_results_are_those_of_few_rows(n: int) -> None:
    """Results of megabytes are written past the caches where they are whole lines; small ones never are."""
    rows, k = 1100, 64
    x, norm_weight = draw(rows, k, dtype=torch.bfloat16), draw(k, dtype=torch.bfloat16)
    packed = cpu.pack_linear([draw_weight(n, k, torch.bfloat16)])
    gate_up = cpu.pack_linear([draw_weight(n, k, torch.bfloat16) for _ in range(2)], interleave=True)

    def run(part: Tensor) -> list[Tensor]:
        return [
            cpu.norm_linear(part, norm_weight, EPS, packed),
            activated(part, norm_weight, EPS, gate_up),
            cpu.logits(part, packed),
        ]

    few = [torch.cat(parts) for parts in zip(*(run(part) for part in x.split(100)), strict=True)]
    for threads in (1, 2):
        cpu.set_num_threads(threads)
        for got, expected in zip(run(x), few, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    x, packed = draw(40, 65, dtype=dtype), cpu.pack_linear([draw_weight(70, 65, dtype)])
    clean = cpu.linear(x, packed)
    x[17, 64] = torch.nan
    dirty = cpu.linear(x, packed)
    assert dirty[17].isnan().all()
    others = torch.arange(40) != 17
    assert torch.equal(dirty[others], clean[others])


def test_silu_of_large_gates() -> None:
    gates = torch.tensor([-1e30, -1e4, -90.0, -88.0, -20.0, 0.0, 20.0, 88.0, 90.0, 1e4, 1e30])
    packed = cpu.pack_linear([gates[:, None], torch.ones(11, 1)], interleave=True)
    got = activated(torch.ones(1, 1), torch.ones(1), 0.0, packed)[0]
    assert_close(got, torch.nn.functional.silu(gates.double()), torch.float32)


def test_no_rows() -> None:
    packed = cpu.pack_linear([torch.ones(3, 4)])
    assert cpu.linear(torch.empty(0, 4), packed).shape == (0, 3)
    assert cpu.rms_norm(torch.empty(0, 4), torch.ones(4), EPS).shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(dtype: torch.dtype) -> None:
    table, ids = draw(300, 33, dtype=dtype), torch.randint(0, 300, (70,), dtype=torch.int32)
    assert torch.equal(cpu.embed(ids, table), table[ids.long()])


@pytest.mark.parametrize("bad", [-1, 300])
def test_embed_refuses_ids_outside_the_table(bad: int) -> None:
    with pytest.raises(IndexError, match="outside the vocabulary of 300"):
        cpu.embed(torch.tensor([5, bad], dtype=torch.int32), torch.zeros(300, 4))


def test_callers_in_several_threads() -> None:
    packed, inputs = cpu.pack_linear([draw_weight(200, 96, torch.bfloat16)]), draw(8, 50, 96, dtype=torch.bfloat16)
    norm_weight = draw(96, dtype=torch.bfloat16)
    run = partial(cpu.norm_linear, norm_weight=norm_weight, eps=EPS, w=packed)
    expected = [run(x) for x in inputs]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(20):
            assert all(map(torch.equal, callers.map(run, inputs), expected))


def test_wrong_arguments_are_refused() -> None:
    packed, x = cpu.pack_linear([torch.ones(3, 4)]), torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"x: got torch.float64 .* need contiguous torch.float32 \(2, 4\)"):
        cpu.linear(x.double(), packed)
    with pytest.raises(ValueError, match="contiguous=False"):
        cpu.linear(torch.ones(4, 2).T, packed)
    with pytest.raises(ValueError, match=r"norm_weight: .* need contiguous torch.float32 \(4,\)"):
        cpu.norm_linear(x, torch.ones(5), EPS, packed)
    with pytest.raises(ValueError, match=r"out: .* need contiguous torch.float32 \(2, 3\)"):
        cpu.linear_residual(x, packed, torch.ones(2, 4))
    with pytest.raises(ValueError, match="use float32, bfloat16 or float16"):
        cpu.pack_linear([torch.ones(3, 4, dtype=torch.int8)])
    with pytest.raises(ValueError, match="one dtype and one in_features"):
        cpu.pack_linear([torch.ones(3, 4), torch.ones(3, 5)])
    with pytest.raises(ValueError, match="2 weights and 1 biases"):
        cpu.pack_linear([torch.ones(3, 4), torch.ones(3, 4)], [None])
    with pytest.raises(ValueError, match="gate and up"):
        cpu.pack_linear([torch.ones(3, 4), torch.ones(2, 4)], interleave=True)
    with pytest.raises(ValueError, match="at least 1"):
        cpu.set_num_threads(0)


@pytest.mark.timeout(900)  # all of this file, with two threads that may have to share one core with others
@pytest.mark.parametrize("isa", [*ISAS[: ISAS.index(_cpu.isa())], pytest.param("amx_emulated", marks=MODEL_OF_TILES)])
def test_other_instruction_sets(isa: str) -> None:
    """All of the above on what an older CPU would run, and on a software model of the tiles that few CPUs have."""
    done = in_subprocess(isa, *PYTEST, "-k", "not instruction_set", __file__)
    assert done.returncode == 0, done.stdout + done.stderr


def test_instruction_set_is_what_the_variable_says() -> None:
    show = ("-c", "from swiftkv import _cpu; print(_cpu.isa())")
    assert in_subprocess("avx2", *show).stdout.strip() == "avx2"
    assert "use avx2, avx512, avx512_bf16 or amx" in in_subprocess("sse2", *show).stderr
