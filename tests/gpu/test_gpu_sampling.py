"""Sampling as compiled for the device, at real vocabularies: against a sort in float64 and numbers made by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftkv.kernels.triton_logprobs import token_logprobs
from swiftkv.kernels.triton_penalties import count_tokens, edit_logits, forbid_tokens, penalise
from swiftkv.kernels.triton_sampling import SlotParams, sample
from tests.support.sampling import Filters, kept_probabilities, slot_params, uniform

pytestmark = pytest.mark.gpu

ROUNDING = 2e-5  # the relative error of a sum of float32 weights, and so of a token's share of [0, 1)
VOCABULARIES = [1000, 32_000, 151_936, 262_144]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def random_filters(rng: random.Random) -> Filters:
    return Filters(
        temperature=rng.choice([0.3, 0.7, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 20, 50, 500, 900]),
        top_p=rng.choice([1.0, 0.95, 0.9, 0.3, 1e-6]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.6]),
    )


def random_logits(num_rows: int, vocab_size: int, seed: int) -> Tensor:
    """From nearly equal to far apart, with forbidden tokens and equals."""
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn((num_rows, vocab_size), generator=generator, device="cuda")
    logits *= torch.tensor([0.05, 1.0, 3.0, 8.0], device="cuda").repeat(num_rows)[:num_rows, None]
    logits[::5, ::7] = -math.inf
    logits[::3] = logits[::3].mul(8).round().div(8)
    return logits


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_token_is_where_the_uniform_number_falls_in_the_kept_distribution(vocab_size: int) -> None:
    rng, num_rows = random.Random(vocab_size), 96
    filters = [random_filters(rng) for _ in range(num_rows)]
    seeds, positions = [rng.getrandbits(64) for _ in filters], [rng.getrandbits(31) for _ in filters]
    logits = random_logits(num_rows, vocab_size, seed=1)
    params = slot_params(filters, seeds, vocab_size, "cuda")
    draw = sample(logits, params, torch.arange(num_rows, dtype=torch.int32, device="cuda"), int32(positions))
    assert not draw.is_broken.any()
    off_edge = 0
    for row, token in enumerate(draw.token_ids.tolist()):
        p = kept_probabilities(logits[row], filters[row])
        end, number = float(p.cumsum(0)[token]), uniform(seeds[row], positions[row])
        assert end - float(p[token]) - ROUNDING <= number <= end + ROUNDING, (row, filters[row])
        off_edge += float(p[token]) == 0
    assert off_edge <= 1  # a sum that rounds the other way at the edge of a nucleus


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_row_is_the_same_in_every_batch(vocab_size: int) -> None:
    rng, num_rows = random.Random(0), 256
    filters = [random_filters(rng) for _ in range(num_rows)]
    params = slot_params(filters, [rng.getrandbits(64) for _ in filters], vocab_size, "cuda")
    logits, slots = random_logits(num_rows, vocab_size, seed=2), torch.randperm(num_rows, device="cuda").int()
    positions = torch.randint(2**20, (num_rows,), device="cuda").int()
    together = sample(logits, params, slots, positions).token_ids
    for rows in (slice(0, 1), slice(7, 40), slice(255, 256)):
        assert torch.equal(sample(logits[rows], params, slots[rows], positions[rows]).token_ids, together[rows])
    assert torch.equal(sample(logits, params, slots, positions).token_ids, together)


def test_greedy_and_broken_rows() -> None:
    logits = random_logits(8, 151_936, seed=3)
    logits[1, [70_000, 5, 151_935]] = 1e4
    logits[2, 151_935], logits[3, 17], logits[4] = math.nan, math.inf, -math.inf
    for filters in (Filters(temperature=0.0), Filters(top_k=9, top_p=0.9), Filters(top_p=0.5), Filters(min_p=0.1)):
        params = slot_params([filters], [5], 151_936, "cuda")
        draw = sample(logits, params, int32([0] * 8), int32([1] * 8))
        assert draw.is_broken.tolist() == [False, False, True, True, True, False, False, False]
        if filters.temperature == 0:
            expected = [int((row == row.max()).int().argmax()) for row in logits]
            assert [draw.token_ids[i].item() for i in (0, 1, 5, 6, 7)] == [expected[i] for i in (0, 1, 5, 6, 7)]


@pytest.mark.parametrize("num_top", [0, 1, 20, 100])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_logprobs(vocab_size: int, num_top: int) -> None:
    logits = random_logits(16, vocab_size, seed=4)
    logits[::5] = 2 * torch.randn_like(logits[::5])  # forbidden tokens are not the model's
    token_ids = torch.randint(vocab_size, (16,), device="cuda").int()
    found = token_logprobs(logits, token_ids, num_top)
    expected = torch.log_softmax(logits.double(), 1)
    chosen = expected.gather(1, token_ids.long()[:, None])
    torch.testing.assert_close(found.logprobs, chosen.squeeze(1).float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(found.ranks, (expected > chosen).sum(1).int() + 1)
    order = expected.sort(dim=1, descending=True, stable=True)
    assert torch.equal(found.top_ids, order.indices[:, :num_top].int())
    torch.testing.assert_close(found.top_logprobs, order.values[:, :num_top].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [*VOCABULARIES, 151_669])
def test_masks(vocab_size: int) -> None:
    logits, rows = random_logits(5, vocab_size, seed=5), [3, 1]
    is_allowed = torch.rand((2, -(-vocab_size // 32) * 32), generator=torch.Generator().manual_seed(0)) < 0.5
    bits = torch.from_numpy(np.packbits(is_allowed.numpy(), axis=1, bitorder="little").view(np.int32)).cuda()
    expected = logits.clone()
    expected[rows] = logits[rows].masked_fill(~is_allowed[:, :vocab_size].cuda(), -math.inf)
    forbid_tokens(logits, int32(rows), bits)
    assert torch.equal(logits, expected)


def test_edits_and_penalties() -> None:
    vocab_size, generator = 151_936, torch.Generator("cuda").manual_seed(0)
    logits = torch.randn((3, vocab_size), generator=generator, device="cuda")
    counts = torch.randint(-8, 4, (4, vocab_size), generator=generator, device="cuda").clamp(min=0).int()
    in_prompt = torch.rand((4, vocab_size), generator=generator, device="cuda") < 0.1
    params, slots = SlotParams.empty(4, vocab_size, "cuda"), int32([3, 0, 1])
    params.is_penalised[:2], params.presence[0], params.frequency[0], params.repetition[1] = True, 0.5, -0.25, 1.3
    expected = logits.clone()
    expected[1, 9] += 4.0
    expected[2, 151_935] = -math.inf
    for row, slot in ((1, 0), (2, 1)):
        seen = counts[slot] > 0
        x = expected[row]
        x = torch.where(
            seen | in_prompt[slot], torch.where(x > 0, x / params.repetition[slot], x * params.repetition[slot]), x
        )
        expected[row] = x - params.frequency[slot] * counts[slot] - params.presence[slot] * seen
    biases = torch.tensor([4.0, 1.0], device="cuda")
    edit_logits(logits, int32([1, 2]), int32([9, 151_935]), biases, int32([0, 12]), int32([3, 3, 11]))
    penalise(logits, params, slots, counts, in_prompt)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    before = counts.clone()
    count_tokens(counts, params, slots, int32([7, 8, 151_935]))
    before[0, 8] += 1
    before[1, 151_935] += 1
    assert torch.equal(counts, before)


def test_nothing_waits_for_the_device_and_a_graph_can_capture_it() -> None:
    vocab_size, num_rows = 32_000, 8
    params = slot_params([Filters(top_k=40, top_p=0.9)] * num_rows, list(range(num_rows)), vocab_size, "cuda")
    logits = random_logits(num_rows, vocab_size, seed=5)
    slots, positions = int32(list(range(num_rows))), int32([0] * num_rows)
    token_logprobs(logits, sample(logits, params, slots, positions).token_ids, 5)  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):  # refuses whatever waits
        token_ids = sample(logits, params, slots, positions).token_ids
        found = token_logprobs(logits, token_ids, 5)
    for position in range(3):
        logits.copy_(random_logits(num_rows, vocab_size, seed=position))
        positions.fill_(position)
        graph.replay()
        assert torch.equal(token_ids, sample(logits, params, slots, positions).token_ids)
        assert torch.equal(found.top_ids, token_logprobs(logits, token_ids, 5).top_ids)
