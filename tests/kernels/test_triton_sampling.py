"""Sampling by Triton kernels, in Triton's interpreter: against a sort of all logits, and against the CPU's sampler."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swiftkv.engine.messages import AddRequest, SamplingParams
from swiftkv.engine.request import Request
from swiftkv.engine.sampler import Sampler, uniforms
from swiftkv.engine.token_sampler import LogitRows
from swiftkv.kernels import triton_logits, triton_logprobs, triton_sampling
from swiftkv.kernels.triton_logprobs import token_logprobs
from swiftkv.kernels.triton_penalties import count_tokens, edit_logits, penalise
from swiftkv.kernels.triton_sampling import SlotParams, sample
from tests.support.interpreter import add_up_in_warps
from tests.support.sampling import Filters, kept_probabilities, slot_params

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # torch.empty is full of NaN, or of the largest integer
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vocabularies then have more runs than a program lists."""
    for module in (triton_logits, triton_logprobs, triton_sampling):
        monkeypatch.setattr(module, "RUN_TOKENS", 8)
    for module in (triton_logprobs, triton_sampling):
        monkeypatch.setattr(module, "RUNS_TILE", 16)
    monkeypatch.setattr(triton_logits, "_STATISTICS_TILE", 4)


def int32(values: list[int] | np.ndarray) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32)


def assert_kept(logits: Tensor, filters: Filters) -> None:
    """Draws near both ends of what some kept tokens have of [0, 1): one token too many or too few moves them.

    Those tokens are the least likely kept one, and the one after the likeliest dropped one.
    """
    p = kept_probabilities(logits, filters)
    kept = torch.nonzero(p > 1e-4).flatten()  # tokens that the numbers below can hit
    likeliest_out = int(logits.masked_fill(p > 0, -math.inf).argmax())
    chosen = {int(token) for token in kept[p[kept].argsort()[:2]]}
    chosen.add(int(kept[torch.searchsorted(kept, likeliest_out).clamp(max=len(kept) - 1)]))
    candidates = np.arange(1 << 17, dtype=np.int32)
    drawn = uniforms(np.full(len(candidates), 9, np.uint64), candidates)
    expected, positions = [], []
    for token in sorted(chosen):
        size, end = float(p[token]), float(p.cumsum(0)[token])
        for share in (0.2, 0.8):
            nearest = int(np.abs(drawn - (end - size * share)).argmin())
            if end - size * 0.9 < drawn[nearest] < end - size * 0.1:
                expected.append(token)
                positions.append(nearest)
    assert expected
    params = slot_params([filters], [9], len(logits))
    draw = sample(logits.repeat(len(expected), 1), params, int32([0] * len(expected)), int32(positions))
    assert draw.token_ids.tolist() == expected
    assert not draw.is_broken.any()


FILTERS = [  # and how far apart the logits are: whether few tokens decide, or the whole row has to be looked at
    (Filters(temperature=0.5), 4.0),
    (Filters(top_k=1), 0.1),
    (Filters(top_k=5), 4.0),
    (Filters(top_k=100), 1.0),
    (Filters(top_p=0.5), 4.0),
    (Filters(top_p=0.97), 0.1),
    (Filters(top_p=1e-6), 1.0),
    (Filters(min_p=0.05), 4.0),
    (Filters(min_p=0.7), 0.1),
    (Filters(temperature=2.0, top_k=30, top_p=0.8), 1.0),
    (Filters(temperature=1.5, top_k=60, top_p=0.6, min_p=0.2), 0.3),
    (Filters(top_p=0.9, min_p=0.02), 1.0),
]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("filters", "spread"), FILTERS, ids=str)
def test_kept_sets_are_those_of_a_sort(filters: Filters, spread: float) -> None:
    assert_kept(spread * torch.randn(181, generator=torch.Generator().manual_seed(3)), filters)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("filters", [Filters(top_k=7), Filters(top_k=100, top_p=0.5)], ids=str)
def test_equal_logits_stay_or_go_together(filters: Filters) -> None:
    levels = torch.tensor([-math.inf, -1.0, -0.0, 0.0, 0.5, 1.0])
    logits = levels[torch.randint(6, (170,), generator=torch.Generator().manual_seed(1))]
    assert_kept(logits, filters)


@pytest.mark.parametrize("filters", [Filters(top_k=50), Filters(temperature=0.5, top_p=0.9)], ids=str)
def test_kept_sets_of_a_large_vocabulary(filters: Filters) -> None:
    assert_kept(3 * torch.randn(20_000, generator=torch.Generator().manual_seed(4)), filters)


@pytest.mark.parametrize("vocab_size", [1, 64, 4096])
def test_the_draw_is_at_the_uniform_number_of_seed_and_position(vocab_size: int) -> None:
    generator = np.random.default_rng(0)
    seeds = [0, 1, 2**63, 2**64 - 1, *generator.integers(0, 2**64, 8, np.uint64).tolist()]
    positions = generator.integers(0, 2**31, len(seeds), np.int32)
    params = slot_params([Filters()] * len(seeds), seeds, vocab_size)
    logits = torch.full((len(seeds), vocab_size), 1.25)
    draw = sample(logits, params, int32(range(len(seeds))), int32(positions))
    expected = np.floor(uniforms(np.array(seeds, np.uint64), positions) * vocab_size)
    assert draw.token_ids.tolist() == expected.astype(int).tolist()


def test_no_rounding_of_sums_draws_a_token_without_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    add_up_in_warps(monkeypatch)
    nearly_one = int32([240_228_695])
    assert uniforms(np.array([9], np.uint64), nearly_one.numpy()) > 1 - 1e-8
    logits = 12 * torch.randn(150, 40, generator=torch.Generator().manual_seed(0))  # a run has room for 64 tokens
    draw = sample(logits, slot_params([Filters()], [9], 40), int32([0] * 150), nearly_one.expand(150).contiguous())
    assert (draw.token_ids < 40).all()


@pytest.mark.usefixtures("small_tiles")
def test_a_row_is_the_same_in_every_batch() -> None:
    all_filters = [Filters(), Filters(top_k=9), Filters(temperature=2.0, top_p=0.9), Filters(min_p=0.1)]
    num_rows, generator = len(all_filters), torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(num_rows, 181, generator=generator)
    params = slot_params(all_filters, torch.randint(2**62, (num_rows,), generator=generator).tolist(), 181)
    slots, positions = torch.arange(num_rows).int(), int32(range(100, 100 + num_rows))
    together = sample(logits, params, slots, positions).token_ids
    wide = torch.full((num_rows, 500), math.nan)  # rows need not lie side by side
    wide[:, :181] = logits.flip(0)
    turned = sample(wide[:, :181], params, slots.flip(0), positions.flip(0)).token_ids
    assert torch.equal(turned.flip(0), together)
    for row in range(num_rows):
        one = slice(row, row + 1)
        assert sample(logits[one], params, slots[one], positions[one]).token_ids == together[row]


@pytest.mark.usefixtures("small_tiles")
def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    logits[1, [70, 33, 99]] = 9.0
    logits[2] = -math.inf
    logits[2, 77] = -1e30
    params = SlotParams.empty(1, 100, CPU)
    draw = sample(logits, params, int32([0] * 4), int32([1] * 4))
    assert draw.token_ids.tolist() == [int(logits[0].argmax()), 33, 77, int(logits[3].argmax())]
    assert not draw.is_broken.any()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("filters", [Filters(temperature=0.0), Filters(top_k=3, top_p=0.5)], ids=str)
def test_rows_without_a_token_are_told_and_leave_the_others_alone(filters: Filters) -> None:
    row = torch.randn(100, generator=torch.Generator().manual_seed(0))
    logits = row.repeat(5, 1)
    logits[0, 50], logits[2, 99], logits[3] = math.nan, math.inf, -math.inf
    params = slot_params([filters], [3], 100)
    draw = sample(logits, params, int32([0] * 5), int32([7] * 5))
    assert draw.is_broken.tolist() == [True, False, True, True, False]
    assert draw.token_ids[1] == draw.token_ids[4]
    assert ((draw.token_ids >= 0) & (draw.token_ids < 100)).all()


VOCAB, EOS = 97, 5
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 3, 40, 1000]),
        "top_p": st.sampled_from([1.0, 0.9, 0.35, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.5, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "min_tokens": st.sampled_from([0, 2]),
        "logit_bias": st.sampled_from([None, {3: 4.0, EOS: 6.0}, {7: -100.0}]),
        "seed": st.integers(0, 2**63),
    }
)


def make_request(request_id: int, params: dict[str, object]) -> Request:
    sampling_params = SamplingParams(**{"max_tokens": 100, **params})  # type: ignore[arg-type]
    message = AddRequest(request_id, np.array([1, 2, 3, 2], np.int32).tobytes(), sampling_params)
    return Request.from_message(message, VOCAB, 10_000, (EOS,))


class TritonSampler:
    """Sample with the kernels as the CPU's `Sampler` does."""

    def __init__(self, requests: list[Request]) -> None:
        all_params = [request.sampling for request in requests]
        filters = [Filters(p.temperature, p.top_k if p.top_k < VOCAB else 0, p.top_p, p.min_p) for p in all_params]
        self.params = slot_params(filters, [request.seed for request in requests], VOCAB)
        for slot, p in enumerate(all_params):
            penalties = p.presence_penalty, p.frequency_penalty, p.repetition_penalty
            self.params.is_penalised[slot] = penalties != (0, 0, 1)
            self.params.presence[slot], self.params.frequency[slot], self.params.repetition[slot] = penalties
        self.output_counts = torch.zeros(len(requests), VOCAB, dtype=torch.int32)
        self.in_prompt = torch.zeros(len(requests), VOCAB, dtype=torch.bool)
        edits = []
        for slot, request in enumerate(requests):
            self.in_prompt[slot, request.prompt.tolist()] = True
            bias = request.sampling.logit_bias or {}
            stop = request.stop_token_ids.tolist() if request.sampling.min_tokens else []
            min_position = len(request.prompt) + request.sampling.min_tokens
            edits += [(slot, t, bias.get(t, 0.0), min_position * (t in stop)) for t in {*bias, *stop}]
        columns = list(zip(*edits, strict=True)) if edits else [(), (), (), ()]
        self.edits = int32(columns[0]), int32(columns[1]), torch.tensor(columns[2]), int32(columns[3])

    def sample(self, logits: Tensor, positions: Tensor) -> list[int]:
        slots = torch.arange(len(logits)).int()
        edit_logits(logits, *self.edits, positions)
        penalise(logits, self.params, slots, self.output_counts, self.in_prompt)
        token_ids = sample(logits, self.params, slots, positions).token_ids
        count_tokens(self.output_counts, self.params, slots, token_ids)
        return token_ids.tolist()


@settings(max_examples=8)
@given(st.lists(PARAMS, min_size=1, max_size=3), st.integers(0, 2**31))
def test_tokens_are_those_of_the_cpu_sampler(all_params: list[dict[str, object]], logits_seed: int) -> None:
    requests = [make_request(i, params) for i, params in enumerate(all_params)]
    expected = Sampler(VOCAB, torch.zeros(len(requests), dtype=torch.int32))
    for slot, request in enumerate(requests):
        expected.seat(slot, request)
    kernels = TritonSampler(requests)
    generator = torch.Generator().manual_seed(logits_seed)
    for step in range(3):
        logits = 3 * torch.randn(len(requests), VOCAB, generator=generator)
        slots, positions = np.arange(len(requests), dtype=np.int32), np.full(len(requests), 4 + step, np.int32)
        token_ids = expected.sample(LogitRows(logits.clone(), slots, positions)).result().token_ids
        assert kernels.sample(logits.clone(), int32(positions)) == token_ids.tolist()


def test_penalties_touch_only_rows_that_have_some() -> None:
    generator = torch.Generator().manual_seed(0)
    vocab_size, slots = 5000, int32([2, 0, 1])
    logits = torch.randn(3, vocab_size, generator=generator)
    counts = torch.randint(-3, 4, (3, vocab_size), generator=generator).clamp(min=0).int()
    in_prompt = torch.rand(3, vocab_size, generator=generator) < 0.1
    params = SlotParams.empty(3, vocab_size, CPU)
    params.is_penalised[:2], params.presence[:2] = True, torch.tensor([0.5, -1.5])
    params.frequency[:2], params.repetition[:2] = torch.tensor([0.25, 0.7]), torch.tensor([1.3, 0.8])
    expected = logits.clone()
    for row, slot in ((1, 0), (2, 1)):
        x, repetition, seen = logits[row], params.repetition[slot], counts[slot] > 0
        repeated = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(seen | in_prompt[slot], repeated, x)
        expected[row] = x - params.frequency[slot] * counts[slot] - params.presence[slot] * seen
    penalise(logits, params, slots, counts, in_prompt)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits[0], expected[0])
    before = counts.clone()
    count_tokens(counts, params, slots, int32([7, 8, 9]))
    before[0, 8] += 1
    before[1, 9] += 1
    assert torch.equal(counts, before)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("num_top", [0, 5, 40, 170])
def test_logprobs_are_those_of_log_softmax(num_top: int) -> None:
    generator = torch.Generator().manual_seed(num_top)
    logits = 3 * torch.randn(4, 170, generator=generator)
    logits[1] = logits[1].round()  # many equals
    logits[2, :160] = -math.inf
    token_ids = [int(logits[0].argmax()), 17, 165, 20]
    found = token_logprobs(logits, int32(token_ids), num_top)
    expected = torch.log_softmax(logits.double(), 1)
    order = expected.sort(dim=1, descending=True, stable=True)
    for row, token in enumerate(token_ids):
        assert float(found.logprobs[row]) == pytest.approx(float(expected[row, token]), rel=1e-6, abs=1e-6)
        assert found.ranks[row] == 1 + int((expected[row] > expected[row, token]).sum())
    assert found.top_ids.tolist() == order.indices[:, :num_top].tolist()
    torch.testing.assert_close(found.top_logprobs, order.values[:, :num_top].float(), rtol=1e-6, atol=2e-6)


@pytest.mark.usefixtures("small_tiles")
def test_top_tokens_are_in_the_order_of_logits_that_round_to_equal_logprobs() -> None:
    logits = torch.full((1, 170), 0.25)
    logits[0, [90, 20, 130]] += 2**-25 * torch.tensor([3.0, 1.0, 2.0])
    found = token_logprobs(logits, int32([0]), 5)
    assert len(set(found.top_logprobs[0].tolist())) == 1
    assert found.top_ids.tolist() == [[90, 130, 20, 0, 1]]


def test_logprobs_of_a_large_vocabulary() -> None:
    logits = 3 * torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0))
    found = token_logprobs(logits, int32([3, 19_999]), 100)
    top = torch.log_softmax(logits, 1).topk(100)
    assert torch.equal(found.top_ids, top.indices.int())
    torch.testing.assert_close(found.top_logprobs, top.values, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_logprobs_of_no_numbers_come_to_an_end() -> None:
    logits = torch.randn(3, 100)
    logits[0, 3], logits[1, :], logits[2, 5] = math.nan, math.nan, math.inf
    found = token_logprobs(logits, int32([3, 4, 5]), 7)
    assert found.top_ids.shape == (3, 7)


def test_nothing_is_done_for_no_rows() -> None:
    params, none = SlotParams.empty(2, 50, CPU), int32([])
    assert sample(torch.empty(0, 50), params, none, none).token_ids.shape == (0,)
    assert token_logprobs(torch.empty(0, 50), none, 3).top_ids.shape == (0, 3)
