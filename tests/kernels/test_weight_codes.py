"""Layers whose weights stay as codes, against the same layers unpacked: equal bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swiftkv import _cpu
from swiftkv.kernels import cpu, reference
from swiftkv.kernels.experts import SILU, Choices, ExpertLayer, ExpertWeights
from swiftkv.kernels.ops import PackedMlp
from swiftkv.kernels.weight_codes import FP8, INT8, CodedMatrix, Coding, kernel_group_size
from tests.support.instruction_sets import MODEL_OF_TILES, PYTEST, in_subprocess

ISAS = ("avx2", "avx512", "avx512_bf16", "amx")
DTYPES = (torch.bfloat16, torch.float16)
EPS = 1e-6
INTEGERS = Coding("four_bits", tuple(float(i) for i in range(16)))
CENTRED = Coding("four_bits", tuple(float(i - 8) for i in range(16)))
MXFP4 = Coding("four_bits", (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))
FORMATS = ((INTEGERS, True), (CENTRED, False), (MXFP4, False), (INT8, True), (INT8, False), (FP8, False))
"""Codings, and whether there are zeros."""
ROWS = (1, 2, 3, 5, 6, 7, 12, 13, 33, 100)


pytestmark = pytest.mark.usefixtures("two_threads")


def draw(
    n: int, k: int, group_size: int, dtype: torch.dtype, coding: Coding = INTEGERS, *, zeros: bool = True
) -> CodedMatrix:
    groups = k // group_size
    codes = torch.randint(0, 1 << coding.bits, (n, k), dtype=torch.uint8)
    if coding is FP8:
        codes -= ((codes & 127) == 127).to(torch.uint8)  # no NaN
    least, beyond = (-128, 128) if coding is INT8 else (0, 16)
    return CodedMatrix(
        codes=codes,
        coding=coding,
        factors=torch.randn(n, groups) * k**-0.5 * 2.0 ** (4 - coding.bits),  # products are rounded, up and down
        zeros=torch.randint(least, beyond, (n, groups), dtype=torch.int8) if zeros else None,
        dtype=dtype,
    )


def exact(matrix: CodedMatrix) -> Tensor:
    """Return the weights of a matrix one by one, rounded once from float64: a product of float32 has more digits."""
    rows = []
    for i, codes in enumerate(matrix.codes.tolist()):
        row = []
        for j, code in enumerate(codes):
            zero = 0 if matrix.zeros is None else int(matrix.zeros[i, j // matrix.group_size])
            factor = matrix.factors[i, j // matrix.group_size].item()
            row.append((matrix.coding.values[code] - zero) * factor)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64).float().to(matrix.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpacked_weights_are_codes_less_zeros_times_factors(dtype: torch.dtype) -> None:
    for coding, zeros in FORMATS:
        matrix = draw(5, 96, 32, dtype, coding, zeros=zeros)
        assert torch.equal(matrix.unpack(), exact(matrix))
        assert torch.equal(matrix[1::2].unpack(), exact(matrix)[1::2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(1, 32, 32), (7, 128, 128), (64, 192, 96), (65, 256, 64), (200, 1024, 128)]
)
def test_linear_is_that_of_the_unpacked_weights(n: int, k: int, group_size: int, dtype: torch.dtype) -> None:
    for coding, zeros in FORMATS:
        matrix = draw(n, k, group_size, dtype, coding, zeros=zeros)
        bias = torch.randn(n, dtype=dtype)
        packed, plain = cpu.pack_linear([matrix], [bias]), cpu.pack_linear([matrix.unpack()], [bias])
        for rows in ROWS:
            x, norm = torch.randn(rows, k, dtype=dtype), torch.randn(k, dtype=dtype)
            assert torch.equal(cpu.linear(x, packed), cpu.linear(x, plain))
            assert torch.equal(cpu.norm_linear(x, norm, EPS, packed), cpu.norm_linear(x, norm, EPS, plain))
            assert torch.equal(cpu.logits(x, packed), cpu.logits(x, plain))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("coding", "zeros"), [(INTEGERS, True), (INT8, True), (FP8, False)])
def test_gated_mlp_is_that_of_the_unpacked_weights(coding: Coding, zeros: bool, dtype: torch.dtype) -> None:
    hidden, inner = 128, 96 + 32
    shapes = ((inner, hidden, 64), (inner, hidden, 64), (hidden, inner, 32))
    parts = [draw(*shape, dtype, coding, zeros=zeros) for shape in shapes]
    norm = torch.randn(hidden, dtype=dtype)

    def mlp(
        gate: Tensor | CodedMatrix, up: Tensor | CodedMatrix, down: Tensor | CodedMatrix
    ) -> PackedMlp[cpu.PackedLinear]:
        return PackedMlp(norm, EPS, cpu.pack_linear([gate, up], interleave=True), cpu.pack_linear([down]), SILU)

    for rows in (*ROWS, 300):
        x = torch.randn(rows, hidden, dtype=dtype)
        wanted = cpu.gated_mlp(x, mlp(*(part.unpack() for part in parts)))
        assert torch.equal(cpu.gated_mlp(x, mlp(*parts)), wanted)
        added = x.clone()
        cpu.add_gated_mlp(added, mlp(*parts))
        plainly = x.clone()
        cpu.add_gated_mlp(plainly, mlp(*(part.unpack() for part in parts)))
        assert torch.equal(added, plainly)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_packed_together_stay_as_codes_if_all_are_of_one_format(dtype: torch.dtype) -> None:
    k = 128
    like = draw(48, k, 64, dtype)
    x = torch.randn(9, k, dtype=dtype)
    for other, stays in (
        (draw(20, k, 64, dtype), True),
        (draw(20, k, 32, dtype), False),
        (draw(20, k, 64, dtype, CENTRED), False),
        (draw(20, k, 64, dtype, INT8), False),
        (draw(20, k, 64, dtype, zeros=False), False),
        (draw(20, k, 64, dtype).unpack(), False),
    ):
        packed = cpu.pack_linear([like, other])
        plain = [w.unpack() if isinstance(w, CodedMatrix) else w for w in (like, other)]
        assert (packed.nbytes < cpu.pack_linear(plain).nbytes) == stays
        assert torch.equal(cpu.linear(x, packed), cpu.linear(x, cpu.pack_linear(plain)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("coding", "zeros"), [(INTEGERS, True), (FP8, False)])
def test_experts_of_which_some_are_codes(coding: Coding, zeros: bool, dtype: torch.dtype) -> None:
    hidden, inner, count = 96, 160, 5
    shapes = ((inner, hidden, 32), (inner, hidden, 32), (hidden, inner, 32))
    drawn = [[draw(*shape, dtype, coding, zeros=zeros) for shape in shapes] for _ in range(count)]
    plain = [ExpertWeights(*(w.unpack() for w in weights)) for weights in drawn]
    some = [ExpertWeights(*weights) if i % 2 else plain[i] for i, weights in enumerate(drawn)]
    for rows in (1, 4, 70):
        x = torch.randn(rows, hidden, dtype=dtype)
        choices = Choices(torch.randint(0, count, (rows, 2), dtype=torch.int32), torch.rand(rows, 2))
        results = []
        for experts in (plain, some):
            out = torch.zeros_like(x)
            cpu.add_experts(x, choices, cpu.pack_experts(ExpertLayer(count, SILU, iter(experts))), out)
            results.append(out)
        assert torch.equal(*results)
    for part in (reference.pack_experts(ExpertLayer(count, SILU, iter(experts))) for experts in (plain, some)):
        assert torch.equal(part.gate_up, torch.stack([torch.cat((w.unpack(), v.unpack())) for w, v, _ in drawn]))
        assert torch.equal(part.down, torch.stack([w.unpack() for _, _, w in drawn]))


def test_groups_that_kernels_take() -> None:
    sizes = (16, 32, 48, 64, 96, 128, 160, 256, 384, 4096)
    assert [kernel_group_size(size) for size in sizes] == [None, 32, None, 64, 32, 128, 32, 128, 128, 128]
    matrix = draw(4, 80, 16, torch.bfloat16)
    with pytest.raises(ValueError, match="32, 64, 96 or 128 inputs"):
        cpu.pack_linear([matrix])


def test_codes_take_the_bytes_that_they_say() -> None:
    for coding, zeros, wanted in (
        (INTEGERS, True, 512 + 8 * 5),
        (INT8, True, 1024 + 8 * 5),
        (FP8, False, 1024 + 8 * 4),
    ):
        matrix = draw(256, 1024, 128, torch.bfloat16, coding, zeros=zeros)
        assert cpu.pack_linear([matrix]).nbytes == matrix.nbytes == 256 * wanted


def test_codes_of_eight_bits_mean_what_torch_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(torch.tensor(INT8.values), codes.view(torch.int8).float())
    fp8 = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(torch.tensor(FP8.values).nan_to_num(), fp8.nan_to_num())
    assert torch.equal(torch.tensor(FP8.values).isnan(), fp8.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("coding", [INT8, FP8])
def test_every_code_of_eight_bits_with_factors_of_any_size(coding: Coding, dtype: torch.dtype) -> None:
    """The identity times the matrix has its weights as results."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(32, 1)
    if coding is FP8:
        codes[:, 127::128] = 0
    most = 12 if dtype == torch.bfloat16 else 1
    factors = 1.2345 * 10.0 ** torch.linspace(-most, most, 64).reshape(32, 2)
    matrix = CodedMatrix(codes, coding, factors, None, dtype)
    results = cpu.linear(torch.eye(256, dtype=dtype), cpu.pack_linear([matrix]))
    assert torch.equal(results.t(), matrix.unpack())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", [*ISAS[: ISAS.index(_cpu.isa())], pytest.param("amx_emulated", marks=MODEL_OF_TILES)])
def test_other_instruction_sets(isa: str) -> None:
    done = in_subprocess(isa, *PYTEST, "-k", "not instruction_set", __file__)
    assert done.returncode == 0, done.stdout + done.stderr
