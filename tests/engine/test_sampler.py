"""The sampler against a naive one that does one row at a time, and against the distribution it should draw from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftkv.engine.logprobs import token_logprobs
from swiftkv.engine.messages import AddRequest, SamplingParams
from swiftkv.engine.request import Request
from swiftkv.engine.sampler import Sampler, uniforms
from swiftkv.engine.token_sampler import LogitRows

VOCAB = 97
EOS = 5


def make_request(request_id: int, prompt: list[int], **params: object) -> Request:
    sampling = SamplingParams(**{"max_tokens": 100, **params})  # type: ignore[arg-type]
    message = AddRequest(request_id, np.array(prompt, np.int32).tobytes(), sampling)
    return Request.from_message(message, VOCAB, 10_000, (EOS,))


def kept_probabilities(logits: torch.Tensor, request: Request, outputs: list[int]) -> torch.Tensor:
    """Return the distribution that the sampler should draw from: vLLM's stages for one row, in float64."""
    params = request.sampling
    x = logits.double().clone()
    if len(outputs) < params.min_tokens:
        for token in {EOS, *params.stop_token_ids}:  # with `ignore_eos`, too
            x[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in range(VOCAB):
        if token in outputs or token in request.prompt:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * outputs.count(token)
        x[token] -= params.presence_penalty * (token in outputs)
    if params.temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(), VOCAB).double()
    p = torch.softmax(x / params.temperature, 0)
    p[p < params.min_p * p.max()] = 0
    order = p.argsort(descending=True)
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = p[order].cumsum(0) - p[order]
    p[order[before >= params.top_p]] = 0
    return p / p.sum()


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, -1, 1, 3, 40, 1000]),
        "top_p": st.sampled_from([1.0, 0.9, 0.35, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.5, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "min_tokens": st.sampled_from([0, 2]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([[], [8, 9]]),
        "logit_bias": st.sampled_from([None, {3: 4.0, EOS: 6.0}, {7: -100.0}]),
        "seed": st.integers(0, 2**63),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 2**31))
def test_rows_follow_the_naive_sampler(all_params: list[dict[str, object]], logits_seed: int) -> None:
    generator = torch.Generator().manual_seed(logits_seed)
    requests = [make_request(i, [1, 2, 3, 2], **params) for i, params in enumerate(all_params)]
    slots = np.array([2 * i + 1 for i in range(len(requests))], np.int32)
    sampler = Sampler(VOCAB, torch.zeros(16, dtype=torch.int32))
    for slot, request in zip(slots.tolist(), requests, strict=True):
        sampler.seat(slot, request)
    outputs: list[list[int]] = [[] for _ in requests]
    for _ in range(4):
        logits = 3 * torch.randn(len(requests), VOCAB, generator=generator)
        expected = [kept_probabilities(*row) for row in zip(logits, requests, outputs, strict=True)]
        positions = np.array([4 + len(tokens) for tokens in outputs], np.int32)
        drawn = uniforms(np.array([r.seed for r in requests], np.uint64), positions)
        token_ids = sampler.sample(LogitRows(logits.clone(), slots, positions)).result().token_ids
        for row, token in enumerate(token_ids.tolist()):
            p = expected[row]
            assert p[token] > 0
            if requests[row].sampling.temperature > 0:
                end = float(p.cumsum(0)[token])
                assert end - float(p[token]) - 1e-5 <= drawn[row] <= end + 1e-5
            outputs[row].append(token)


def test_a_request_draws_the_same_alone_and_in_a_batch() -> None:
    request = make_request(1, [1, 2], temperature=0.8, top_p=0.9, seed=7)
    others = [make_request(10 + i, [3], temperature=0.5 + i, top_k=i, seed=i) for i in range(6)]
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(0))
    alone, batch = (Sampler(VOCAB, torch.zeros(8, dtype=torch.int32)) for _ in range(2))
    alone.seat(0, request)
    for slot, other in enumerate([*others, request]):
        batch.seat(slot, other)
    for position in range(2, 60):
        positions = np.full(7, position, np.int32)
        in_batch = batch.sample(LogitRows(logits.clone(), np.arange(7, dtype=np.int32), positions)).result()
        by_itself = alone.sample(LogitRows(logits[6:].clone(), np.zeros(1, np.int32), positions[:1])).result()
        assert by_itself.token_ids[0] == in_batch.token_ids[6]


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_frequencies_are_those_of_the_distribution(top_p: float) -> None:
    """A chi-squared test at fixed seeds: 20,000 positions of one request."""
    request = make_request(1, [0], temperature=1.3, top_p=top_p, seed=42)
    sampler = Sampler(VOCAB, torch.zeros(1, dtype=torch.int32))
    sampler.seat(0, request)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    p = kept_probabilities(logits[0], request, []).numpy()
    num_draws, rows = 20_000, 500
    counts = np.zeros(VOCAB)
    for begin in range(0, num_draws, rows):
        positions = np.arange(begin, begin + rows, dtype=np.int32)
        sampled = sampler.sample(LogitRows(logits.repeat(rows, 1), np.zeros(rows, np.int32), positions)).result()
        counts += np.bincount(sampled.token_ids, minlength=VOCAB)
    assert counts[p == 0].sum() == 0
    kept = p > 0
    chi_squared = float((((counts - num_draws * p) ** 2)[kept] / (num_draws * p[kept])).sum())
    freedom = int(kept.sum()) - 1
    assert abs(chi_squared - freedom) < 4 * math.sqrt(2 * freedom)


def test_uniforms_are_uniform_over_seeds_and_positions() -> None:
    over_positions = uniforms(np.full(50_000, 3, np.uint64), np.arange(50_000, dtype=np.int32))
    over_seeds = uniforms(np.arange(50_000, dtype=np.uint64), np.full(50_000, 9, np.int32))
    for values in (over_positions, over_seeds):
        assert values.min() >= 0
        assert values.max() < 1
        assert np.abs(np.histogram(values, 50)[0] - 1000).max() < 150
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(over_positions, over_seeds)[0, 1]) < 0.02


@pytest.mark.parametrize("spread", [1e-3, 1.0, 20.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_the_nucleus_of_a_large_vocabulary_is_the_sorted_one(spread: float, top_p: float) -> None:
    vocab = 5000
    message = AddRequest(1, np.zeros(1, np.int32).tobytes(), SamplingParams(10, top_p=top_p, seed=1))
    sampler = Sampler(vocab, torch.zeros(1, dtype=torch.int32))
    sampler.seat(0, Request.from_message(message, vocab, 100, ()))
    logits = spread * torch.randn(vocab, generator=torch.Generator().manual_seed(5))
    positions = np.arange(400, dtype=np.int32)
    tokens = sampler.sample(LogitRows(logits.repeat(400, 1), np.zeros(400, np.int32), positions)).result().token_ids
    p = torch.softmax(logits.double(), 0)
    order = p.argsort(descending=True)
    size = int((p[order].cumsum(0) < top_p).sum()) + 1
    nucleus = torch.zeros(vocab, dtype=torch.float64)
    nucleus[order[:size]] = p[order[:size]]
    cumulative = (nucleus / nucleus.sum()).cumsum(0)
    expected = torch.searchsorted(cumulative, torch.from_numpy(uniforms(np.full(400, 1, np.uint64), positions)))
    assert (torch.from_numpy(tokens) == expected).float().mean() > 0.98  # the rest: rounding at the boundaries
    assert set(tokens.tolist()) <= set(order[: size + 1].tolist())


def test_counts_survive_preemption_and_another_request_in_the_slot() -> None:
    request = make_request(1, [0], temperature=0.0, presence_penalty=2.0)
    sampler = Sampler(VOCAB, torch.zeros(4, dtype=torch.int32))
    sampler.seat(0, request)
    logits = torch.zeros(1, VOCAB)
    logits[0, 10], logits[0, 20], logits[0, 30] = 3.0, 2.0, 1.5
    slot = np.zeros(1, np.int32)
    position = np.ones(1, np.int32)
    assert sampler.sample(LogitRows(logits.clone(), slot, position)).result().token_ids.tolist() == [10]
    assert sampler.sample(LogitRows(logits.clone(), slot, position)).result().token_ids.tolist() == [20]
    sampler.park(0, request)
    sampler.seat(0, make_request(2, [0], temperature=0.0, repetition_penalty=1.5))
    assert sampler.sample(LogitRows(logits.clone(), slot, position)).result().token_ids.tolist() == [10]
    sampler.seat(3, request)
    assert sampler.sample(LogitRows(logits.clone(), slot + 3, position)).result().token_ids.tolist() == [30]


def test_logprobs_are_of_the_raw_distribution() -> None:
    request = make_request(1, [0], temperature=0.0, logprobs=3, logit_bias={50: 100.0})
    plain = make_request(2, [0], temperature=0.0)
    sampler = Sampler(VOCAB, torch.zeros(2, dtype=torch.int32))
    sampler.seat(0, request)
    sampler.seat(1, plain)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    raw = torch.log_softmax(logits[0], 0)
    sampled = sampler.sample(LogitRows(logits, np.arange(2, dtype=np.int32), np.ones(2, np.int32))).result()
    assert list(sampled.logprobs) == [0]
    entry = sampled.logprobs[0]
    assert sampled.token_ids[0] == 50
    assert entry.logprob == pytest.approx(float(raw[50]))
    assert entry.rank == int((raw > raw[50]).sum()) + 1
    assert entry.top_ids == raw.topk(3).indices.tolist()
    assert entry.top_logprobs == pytest.approx(raw.topk(3).values.tolist())


@pytest.mark.parametrize("count", [0, 1, 2, 5, 20])
def test_equally_likely_tokens_stand_in_the_order_of_their_ids(count: int) -> None:
    """A greedy token is then the first of the likeliest, as on a GPU."""
    logits = torch.randint(5, (40, VOCAB), generator=torch.Generator().manual_seed(count)).float()
    logits[:4] = 1.25
    logits[5, 40:] = logits[6, 50] = -math.inf
    logits[7, :2], logits[8] = math.nan, math.nan
    logits[9] = -5.0
    logits[9, [80, 70, 30]] = torch.tensor([10.0, 1e-3 + 1e-9, 1e-3])  # the last two are equal as log-probabilities
    greedy = np.argmax(logits.numpy(), 1).astype(np.int32)
    found = token_logprobs(logits, greedy, [count] * len(logits))
    order = logits.argsort(descending=True, stable=True)
    assert {len(entry.top_ids) for entry in found} == {count}
    for row in range(len(logits)):
        if row not in (7, 8):
            assert (found[row].rank, found[row].top_ids) == (1, order[row, :count].tolist())
            assert found[row].top_ids[:1] == [greedy[row]][:count]


def test_top_k_tells_logits_apart_that_a_high_temperature_makes_equally_likely() -> None:
    request = make_request(1, [0], temperature=100.0, top_k=1, seed=1)
    sampler = Sampler(VOCAB, torch.zeros(1, dtype=torch.int32))
    sampler.seat(0, request)
    logits = 10 + 1e-6 * torch.arange(VOCAB).float()
    positions = np.arange(20, dtype=np.int32)
    sampled = sampler.sample(LogitRows(logits.repeat(20, 1), np.zeros(20, np.int32), positions)).result()
    assert logits[sampled.token_ids].tolist() == [float(logits.max())] * 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_token_are_told_and_leave_the_others_alone(temperature: float) -> None:
    params = {"temperature": temperature, "top_p": 0.9, "logprobs": 1, "seed": 1}
    sampler = Sampler(VOCAB, torch.zeros(6, dtype=torch.int32))
    for slot in range(4):
        sampler.seat(slot, make_request(slot, [0], **params))
    sampler.seat(4, make_request(4, [0], **params, min_tokens=1, stop_token_ids=list(range(VOCAB))))
    sampler.seat(5, make_request(5, [0], **params, repetition_penalty=1e-40))
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    logits = row.repeat(6, 1)
    logits[0, 7], logits[2, 7] = math.nan, math.inf
    logits[5, 0] = 1.0  # the prompt's token, which the penalty then makes infinite
    slots, positions = np.arange(6, dtype=np.int32), np.ones(6, np.int32)
    sampled = sampler.sample(LogitRows(logits.clone(), slots, positions)).result()
    assert sampled.broken.tolist() == [True, False, True, False, True, True]
    alone = sampler.sample(LogitRows(logits[1:2].clone(), slots[1:2], positions[:1])).result()
    assert sampled.token_ids[1] == sampled.token_ids[3] == alone.token_ids[0]


def test_greedy_rows_that_are_no_numbers_are_told() -> None:
    sampler = Sampler(VOCAB, torch.zeros(2, dtype=torch.int32))
    for slot in range(2):
        sampler.seat(slot, make_request(slot, [0], temperature=0.0))
    logits = torch.zeros(2, VOCAB)
    logits[1, 3] = math.nan
    sampled = sampler.sample(LogitRows(logits, np.arange(2, dtype=np.int32), np.ones(2, np.int32))).result()
    assert sampled.broken.tolist() == [False, True]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": 2**31},
        {"min_tokens": 101},
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": -2},
        {"min_p": 1.5},
        {"presence_penalty": math.inf},
        {"frequency_penalty": -1e300},
        {"repetition_penalty": 0.0},
        {"temperature": 1e39},
        {"logit_bias": {VOCAB: 1.0}},
        {"logit_bias": {3: 1e39}},
        {"stop_token_ids": [-1]},
        {"logprobs": -1},
        {"prompt_logprobs": 10**9},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make_request(1, [1], **wrong)


def test_prompt_logprobs_beyond_what_a_message_holds_are_refused() -> None:
    message = AddRequest(1, np.zeros(1 << 20, np.int32).tobytes(), SamplingParams(10, prompt_logprobs=4))
    with pytest.raises(ValueError, match="prompt_logprobs for 1048576 tokens"):
        Request.from_message(message, VOCAB, 1 << 21, ())
