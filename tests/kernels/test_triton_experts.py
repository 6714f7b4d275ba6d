"""Experts in Triton's interpreter against plain torch; it multiplies no bfloat16 matrices."""

from __future__ import annotations

import pytest
import torch

from swiftkv.kernels import reference, triton_ops
from swiftkv.kernels.experts import SILU, Choices, ExpertLayer, ExpertWeights, GatedActivation
from tests.kernels.test_experts import CLAMPED, draw_choices, draw_experts

TOLERANCE = {torch.float32: 1e-5, torch.float16: 8 * 2**-11}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("activation", "biases"), [(SILU, False), (CLAMPED, True)])
@pytest.mark.parametrize(("tokens", "count", "top_k", "hidden", "inner"), [(1, 4, 2, 48, 20), (150, 3, 2, 80, 70)])
def test_experts_equal_the_reference(
    tokens: int,
    count: int,
    top_k: int,
    hidden: int,
    inner: int,
    activation: GatedActivation,
    biases: bool,
    dtype: torch.dtype,
) -> None:
    layer = ExpertLayer(count, activation, draw_experts(dtype, biases, hidden, inner, count))
    packed = triton_ops.pack_experts(layer)
    choices = draw_choices(tokens, count, top_k)
    x, residual = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, hidden).to(dtype)
    expected = residual.clone()
    reference.add_experts(x, choices, reference.pack_experts(layer), expected)
    triton_ops.add_experts(x, choices, packed, residual)
    torch.testing.assert_close(residual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(packed.tokens_per_expert, choices.experts.flatten().bincount(minlength=count))


def draw_whole(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high + 1, shape).float()


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    # Every sum is exact, for NumPy, which multiplies in the interpreter, adds in an order that depends on the height of
    # a tile on CPUs without AVX-512. Gates are large, where SiLU changes nothing.
    experts = [
        ExpertWeights(draw_whole(1, 2, 24, 32), draw_whole(-1, 1, 24, 32), draw_whole(-1, 1, 32, 24)) for _ in range(3)
    ]
    packed = triton_ops.pack_experts(ExpertLayer(3, SILU, experts))
    choices, x = draw_choices(140, 3, 2), draw_whole(1, 2, 140, 32)
    choices = Choices(choices.experts, 2 ** -draw_whole(0, 3, 140, 2))
    whole, parts = torch.zeros_like(x), torch.zeros_like(x)
    triton_ops.add_experts(x, choices, packed, whole)
    for begin, end in ((0, 0), (0, 1), (1, 40), (40, 140)):
        some = Choices(choices.experts[begin:end], choices.weights[begin:end])
        triton_ops.add_experts(x[begin:end], some, packed, parts[begin:end])
    assert torch.equal(parts, whole)
