"""Experts as compiled for the device: against plain torch in float64, alone and among others, in a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swiftkv.kernels import reference, triton_ops
from swiftkv.kernels.experts import SILU, Choices, ExpertLayer, ExpertWeights, GatedActivation, Router

pytestmark = pytest.mark.gpu

GPT_OSS = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
SHAPES = [  # tokens, experts, top_k, hidden_size, inner_size
    (1, 8, 2, 256, 96),
    (300, 128, 8, 2048, 768),
    (33, 32, 4, 2880, 360),
    (5000, 4, 2, 512, 1000),
]


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, device="cuda")


def draw_layer(
    num_experts: int, hidden_size: int, inner_size: int, activation: GatedActivation, dtype: torch.dtype
) -> ExpertLayer:
    """Draw experts whose outputs are about as large as their inputs; gpt-oss's have biases."""
    torch.manual_seed(num_experts)
    shapes = [(inner_size, hidden_size), (inner_size, hidden_size), (hidden_size, inner_size)]
    return ExpertLayer(
        num_experts,
        activation,
        [
            ExpertWeights(
                *[draw(*shape, scale=2 * shape[1] ** -0.5).to(dtype) for shape in shapes],
                *[draw(shape[0]).to(dtype) if activation is GPT_OSS else None for shape in shapes],
            )
            for _ in range(num_experts)
        ],
    )


def draw_choices(num_tokens: int, num_experts: int, top_k: int) -> Choices:
    router = Router(num_experts, top_k, "softmax", renormalise=True)
    return triton_ops.route(draw(num_tokens, num_experts), router)


def in_float64(layer: ExpertLayer) -> ExpertLayer:
    def widen(part: Any) -> Any:
        return None if part is None else part.double()

    wide = [
        ExpertWeights(
            *[widen(part) for part in (expert.gate, expert.up, expert.down)],
            *[widen(part) for part in (expert.gate_bias, expert.up_bias, expert.down_bias)],
        )
        for expert in layer.weights
    ]
    return ExpertLayer(layer.num_experts, layer.activation, wide)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("activation", [SILU, GPT_OSS], ids=["silu", "gpt-oss"])
@pytest.mark.parametrize(("tokens", "experts", "top_k", "hidden", "inner"), SHAPES)
def test_experts_equal_float64(
    tokens: int, experts: int, top_k: int, hidden: int, inner: int, activation: GatedActivation, dtype: torch.dtype
) -> None:
    layer = draw_layer(experts, hidden, inner, activation, dtype)
    packed, choices = triton_ops.pack_experts(layer), draw_choices(tokens, experts, top_k)
    x, residual = draw(tokens, hidden).to(dtype), draw(tokens, hidden).to(dtype)
    expected = residual.double()
    reference.add_experts(x.double(), choices, reference.pack_experts(in_float64(layer)), expected)
    triton_ops.add_experts(x, choices, packed, residual)
    error = (residual.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < 2 * ROUNDING[dtype]
    assert torch.equal(packed.tokens_per_expert, choices.experts.flatten().bincount(minlength=experts))


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    packed = triton_ops.pack_experts(draw_layer(16, 512, 384, SILU, torch.bfloat16))
    choices, x = draw_choices(400, 16, 4), draw(400, 512).bfloat16()
    whole, parts = torch.zeros_like(x), torch.zeros_like(x)
    triton_ops.add_experts(x, choices, packed, whole)
    for begin, end in ((0, 1), (1, 40), (40, 400)):
        some = Choices(choices.experts[begin:end], choices.weights[begin:end])
        triton_ops.add_experts(x[begin:end], some, packed, parts[begin:end])
    assert torch.equal(parts, whole)


def test_a_graph_holds_the_choice_and_the_products_of_experts() -> None:
    packed = triton_ops.pack_experts(draw_layer(16, 512, 384, SILU, torch.bfloat16))
    router = Router(16, 4, "softmax", renormalise=True)
    x, logits = draw(24, 512).bfloat16(), draw(24, 16)

    def step() -> Tensor:
        out = torch.zeros_like(x)
        triton_ops.add_experts(x, triton_ops.route(logits, router), packed, out)
        return out

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):  # refuses whatever waits
        captured = step()
    for _ in range(3):
        x.copy_(draw(24, 512))
        logits.copy_(draw(24, 16))
        graph.replay()
        assert torch.equal(captured, step())
