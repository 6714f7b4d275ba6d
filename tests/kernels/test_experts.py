"""Routers against transformers' own, and experts on the CPU against torch in float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, MiMoV2FlashConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashTopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from swiftkv.kernels import cpu, reference
from swiftkv.kernels.experts import SILU, Choices, ExpertLayer, ExpertWeights, GatedActivation, Router
from swiftkv.kernels.ops import AnyOps

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 48, 20, 12, 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ISAS = ("avx2", "avx512", "avx512_bf16", "amx_emulated")
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
CLAMPED = GatedActivation(alpha=1.702, limit=0.8, up_offset=1.0)

ROUTERS = {
    "Mixtral": Router(NUM_EXPERTS, TOP_K, "softmax", renormalise=True),
    "Qwen3-MoE": Router(NUM_EXPERTS, TOP_K, "softmax"),
    "Qwen3-MoE, renormalised": Router(NUM_EXPERTS, TOP_K, "softmax", renormalise=True),
    "gpt-oss": Router(NUM_EXPERTS, TOP_K, "softmax_of_chosen"),
    "MiMo-V2": Router(NUM_EXPERTS, TOP_K, "sigmoid", renormalise=True),
    "MiMo-V2, groups": Router(NUM_EXPERTS, TOP_K, "sigmoid", True, scale=2.5, num_groups=4, top_groups=2),
    "MiMo-V2, raw": Router(NUM_EXPERTS, TOP_K, "sigmoid", num_groups=2, top_groups=1),
}


pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture(params=[cpu, reference], ids=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> AnyOps:
    chosen: AnyOps = request.param
    return chosen


def transformers_router(name: str) -> torch.nn.Module:
    router = ROUTERS[name]
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K}
    if name == "Mixtral":
        return MixtralTopKRouter(MixtralConfig(num_local_experts=NUM_EXPERTS, **sizes))
    if name.startswith("Qwen3"):
        config = Qwen3MoeConfig(num_experts=NUM_EXPERTS, norm_topk_prob=router.renormalise, **sizes)
        return Qwen3MoeTopKRouter(config)
    if name == "gpt-oss":
        return GptOssTopKRouter(GptOssConfig(num_local_experts=NUM_EXPERTS, **sizes))
    config = MiMoV2FlashConfig(num_local_experts=NUM_EXPERTS, **sizes)
    config.norm_topk_prob, config.routed_scaling_factor = router.renormalise, router.scale
    config.n_group, config.topk_group = router.num_groups, router.top_groups
    return MiMoV2FlashTopkRouter(config)


@torch.inference_mode()
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_choose_and_weigh_as_transformers_does(name: str, ops: AnyOps) -> None:
    oracle, x = transformers_router(name), torch.randn(500, HIDDEN)
    for tensor in (*oracle.parameters(), *oracle.buffers()):
        tensor.normal_(0, 0.3)
    logits, weights, experts = oracle(x)
    bias = getattr(oracle, "e_score_correction_bias", None)
    choices = ops.route(logits.float(), ROUTERS[name], bias)
    assert (choices.experts.dtype, choices.weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(choices.experts.sort(-1).values, experts.sort(-1).values.int())
    order, expected_order = choices.experts.argsort(-1), experts.argsort(-1)
    torch.testing.assert_close(choices.weights.gather(-1, order), weights.gather(-1, expected_order).float())


def test_of_equal_scores_the_lower_expert_is_chosen(ops: AnyOps) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0], [0.0] * 6])
    for score in ("softmax", "sigmoid", "softmax_of_chosen"):
        choices = ops.route(logits, Router(6, 4, score))  # type: ignore[arg-type]
        assert choices.experts.tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]
    groups = ops.route(torch.zeros(1, 6), Router(6, 2, "sigmoid", num_groups=3, top_groups=1))
    assert groups.experts.tolist() == [[0, 1]]


def test_a_bias_decides_about_the_choice_and_not_about_the_weight(ops: AnyOps) -> None:
    bias = torch.tensor([0.0, 0.0, 9.0])
    choices = ops.route(torch.tensor([[0.0, 5.0, -5.0]]), Router(3, 1, "sigmoid"), bias)
    assert choices.experts.tolist() == [[2]]
    torch.testing.assert_close(choices.weights, torch.tensor([[-5.0]]).sigmoid())


@pytest.mark.parametrize("extreme", [torch.inf, torch.nan, 300.0])
def test_extreme_logits_choose_experts_that_exist(extreme: float, ops: AnyOps) -> None:
    """A model that computes nonsense may answer nonsense; it must not read beyond its weights."""
    logits = torch.randn(40, NUM_EXPERTS)
    logits[:, 3], logits[::2, 5] = extreme, -extreme
    for router in ROUTERS.values():
        experts = ops.route(logits, router).experts
        assert ((experts >= 0) & (experts < NUM_EXPERTS)).all()
        assert (experts.sort(-1).values.diff(dim=-1) > 0).all()


@pytest.mark.parametrize(
    ("args", "message"),
    [((4, 5), "5 of 4 experts"), ((4, 0), "0 of 4"), ((6, 2, "sigmoid", False, 1.0, 4, 1), "1 of 4 equal groups"),
     ((6, 3, "sigmoid", False, 1.0, 3, 1), "fewer than 3")],
)  # fmt: skip
def test_routers_that_cannot_be_are_refused(args: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router(*args, **({} if len(args) > 2 else {"score": "softmax"}))  # type: ignore[arg-type]


def draw_experts(
    dtype: torch.dtype, biases: bool, hidden: int = HIDDEN, inner: int = INNER, count: int = NUM_EXPERTS
) -> list[ExpertWeights]:
    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns).mul_(1.5 * columns**-0.5).to(dtype)

    def bias(rows: int) -> Tensor | None:
        return torch.randn(rows).mul_(0.3).to(dtype) if biases else None

    return [
        ExpertWeights(
            weight(inner, hidden), weight(inner, hidden), weight(hidden, inner), bias(inner), bias(inner), bias(hidden)
        )
        for _ in range(count)
    ]


def draw_choices(tokens: int, count: int = NUM_EXPERTS, top_k: int = TOP_K) -> Choices:
    """The first expert is everybody's choice, the last is nobody's."""
    scores = torch.rand(tokens, count)
    scores[:, 0], scores[:, -1] = 2.0, -1.0
    return Choices(scores.topk(top_k).indices.int(), torch.rand(tokens, top_k))


def exact(
    x: Tensor, choices: Choices, experts: list[ExpertWeights], activation: GatedActivation, residual: Tensor
) -> Tensor:
    """Float64, token by token, rounded only where an activation is stored."""
    total = residual.double()
    for token, (chosen, weights) in enumerate(zip(choices.experts.tolist(), choices.weights.tolist(), strict=True)):
        for index, weight in zip(chosen, weights, strict=True):
            expert = experts[index]
            gate = x[token].double() @ expert.gate.double().T + (0 if expert.gate_bias is None else expert.gate_bias)
            up = x[token].double() @ expert.up.double().T + (0 if expert.up_bias is None else expert.up_bias)
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
            activated = (up + activation.up_offset) * gate / (1 + torch.exp(-activation.alpha * gate))
            output = activated.to(x.dtype).double() @ expert.down.double().T
            total[token] += weight * (output + (0 if expert.down_bias is None else expert.down_bias))
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "biases"), [(SILU, False), (CLAMPED, True)])
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(1, 64, 32), (7, 33, 21), (70, 80, 20)])
def test_experts_equal_float64(
    tokens: int, hidden: int, inner: int, activation: GatedActivation, biases: bool, dtype: torch.dtype, ops: AnyOps
) -> None:
    experts, choices = draw_experts(dtype, biases, hidden, inner), draw_choices(tokens)
    x, residual = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, hidden).to(dtype)
    packed = ops.pack_experts(ExpertLayer(NUM_EXPERTS, activation, iter(experts)))
    expected = exact(x, choices, experts, activation, residual)
    ops.add_experts(x, choices, packed, residual)
    tolerance = 8 * ROUNDING[dtype]
    torch.testing.assert_close(residual.double(), expected, rtol=tolerance, atol=tolerance)
    counts = choices.experts.flatten().bincount(minlength=NUM_EXPERTS)
    assert torch.equal(packed.tokens_per_expert, counts)
    ops.add_experts(x, choices, packed, residual)
    assert torch.equal(packed.tokens_per_expert, 2 * counts)
    matrices = NUM_EXPERTS * 3 * hidden * inner * x.element_size()
    assert packed.nbytes >= matrices


@torch.inference_mode()
def test_reference_experts_equal_transformers() -> None:
    x, choices = torch.randn(30, HIDDEN), draw_choices(30)
    qwen = Qwen3MoeExperts(
        Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=NUM_EXPERTS)
    ).requires_grad_(False)
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=NUM_EXPERTS)
    config.swiglu_limit = 0.8
    gpt_oss = GptOssExperts(config).requires_grad_(False)
    for module in (qwen, gpt_oss):
        for weight in module.parameters():
            weight.normal_(0, 0.2)
    silu = [
        ExpertWeights(*gate_up.chunk(2), down) for gate_up, down in zip(qwen.gate_up_proj, qwen.down_proj, strict=True)
    ]
    clamped = [
        ExpertWeights(w[:, ::2].T, w[:, 1::2].T, down.T, bias[::2], bias[1::2], down_bias)
        for w, down, bias, down_bias in zip(
            gpt_oss.gate_up_proj, gpt_oss.down_proj, gpt_oss.gate_up_proj_bias, gpt_oss.down_proj_bias, strict=True
        )
    ]
    for oracle, experts, activation in ((qwen, silu, SILU), (gpt_oss, clamped, CLAMPED)):
        expected = oracle(x, choices.experts.long(), choices.weights)
        for ops in (reference, cpu):
            out = torch.zeros_like(x)
            ops.add_experts(x, choices, ops.pack_experts(ExpertLayer(NUM_EXPERTS, activation, experts)), out)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def check_rows_alone(dtype: torch.dtype) -> None:
    experts, choices = draw_experts(dtype, biases=True), draw_choices(400)
    x = torch.randn(400, HIDDEN).to(dtype)
    packed = cpu.pack_experts(ExpertLayer(NUM_EXPERTS, CLAMPED, experts))
    whole = torch.zeros_like(x)
    cpu.add_experts(x, choices, packed, whole)
    for begin, end in ((0, 1), (1, 4), (4, 41), (41, 170), (170, 400)):
        part = torch.zeros_like(x[begin:end])
        some = Choices(choices.experts[begin:end], choices.weights[begin:end])
        cpu.add_experts(x[begin:end], some, packed, part)
        assert torch.equal(part, whole[begin:end])
    cpu.set_num_threads(3)
    again = torch.zeros_like(x)
    cpu.add_experts(x, choices, packed, again)
    assert torch.equal(again, whole)
    exact_rows = exact(x[:20], Choices(choices.experts[:20], choices.weights[:20]), experts, CLAMPED, again[:20] * 0)
    tolerance = 8 * ROUNDING[dtype]
    torch.testing.assert_close(whole[:20].double(), exact_rows, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_its_neighbours_or_on_threads(dtype: torch.dtype) -> None:
    check_rows_alone(dtype)


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str) -> None:
    """In a process of its own: the extension chooses once."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch; from tests.kernels import test_experts as t; t.check_all()"],
        env=os.environ | {"SWIFTKV_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def check_all() -> None:
    torch.manual_seed(0)
    for dtype in DTYPES:
        check_rows_alone(dtype)
    logits = torch.randn(50, NUM_EXPERTS)
    for router in ROUTERS.values():
        got, expected = cpu.route(logits, router), reference.route(logits, router)
        assert torch.equal(got.experts, expected.experts)
        torch.testing.assert_close(got.weights, expected.weights)


def test_mistakes_are_refused() -> None:
    experts = draw_experts(torch.float32, biases=False)
    packed = cpu.pack_experts(ExpertLayer(NUM_EXPERTS, SILU, experts))
    x = torch.randn(2, HIDDEN)
    for wrong in (-1, NUM_EXPERTS):
        out = torch.zeros_like(x)
        with pytest.raises(IndexError, match=f"expert {wrong} is none of {NUM_EXPERTS}"):
            cpu.add_experts(x, Choices(torch.full((2, 1), wrong).int(), torch.ones(2, 1)), packed, out)
        assert not out.any()
    with pytest.raises(ValueError, match="x: got"):
        cpu.add_experts(x[:, :-1], draw_choices(2), packed, x)
    with pytest.raises(ValueError, match="no CPU kernel for"):
        cpu.pack_experts(ExpertLayer(NUM_EXPERTS, SILU, draw_experts(torch.float64, biases=False)))
    other = draw_experts(torch.float32, biases=False, inner=INNER + 1)[0]
    with pytest.raises(ValueError, match="an expert has another shape"):
        cpu.pack_experts(ExpertLayer(2, SILU, [experts[0], other]))


def test_no_tokens_are_no_work(ops: AnyOps) -> None:
    packed = ops.pack_experts(ExpertLayer(NUM_EXPERTS, SILU, draw_experts(torch.float32, biases=False)))
    choices = ops.route(torch.empty(0, NUM_EXPERTS), ROUTERS["MiMo-V2, groups"])
    out = torch.empty(0, HIDDEN)
    ops.add_experts(out.clone(), choices, packed, out)
    assert choices.experts.shape == (0, TOP_K)
