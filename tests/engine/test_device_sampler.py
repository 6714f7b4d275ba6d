"""A GPU's sampler, in Triton's interpreter, beside the CPU's: the same logits give the same tokens."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swiftkv.engine.sampler import Sampler, open_sampler
from swiftkv.engine.token_masks import TokenMasks
from swiftkv.engine.token_sampler import LogitRows, TokenSampler
from tests.engine.test_sampler import EOS, VOCAB, make_request

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here")

CPU = torch.device("cpu")
PARAMS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "presence_penalty": 1.5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "min_tokens": 2, "logit_bias": {EOS: 9.0, 3: 4.0}},
    {"temperature": 0.0, "min_tokens": 2, "logit_bias": {EOS: 90.0}, "ignore_eos": False, "logprobs": 2},
    {"temperature": 0.7, "seed": 2**64 - 3},
    {"temperature": 1.2, "top_k": 5, "seed": 4, "logprobs": 0},
    {"temperature": 1.0, "top_p": 0.7, "seed": 5},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 30, "min_p": 0.02, "frequency_penalty": 0.7, "seed": 6, "logprobs": 4},
]


def logits_of(step: int) -> torch.Tensor:
    return 3 * torch.randn(len(PARAMS), VOCAB, generator=torch.Generator().manual_seed(step))


def samplers() -> list[TokenSampler]:
    return [
        open_sampler(kernels, VOCAB, torch.zeros(2 * len(PARAMS), dtype=torch.int32)) for kernels in ("cpu", "triton")
    ]


def test_both_samplers_say_the_same_through_preemption_and_retraction() -> None:
    requests = [make_request(i, [1, 2, 3, 2], **params) for i, params in enumerate(PARAMS)]
    slots = np.arange(len(PARAMS), dtype=np.int32)
    both = samplers()
    assert [isinstance(sampler, Sampler) for sampler in both] == [True, False]
    for slot, request in enumerate(requests):
        for sampler in both:
            sampler.seat(slot, request)
    for step in range(4):
        positions = np.full(len(slots), 4 + step, np.int32)
        expected, sampled = (sampler.sample(LogitRows(logits_of(step), slots, positions)).result() for sampler in both)
        assert sampled.token_ids.tolist() == expected.token_ids.tolist()
        assert not sampled.broken.any()
        assert list(sampled.logprobs) == list(expected.logprobs)
        for row, entry in expected.logprobs.items():
            other = sampled.logprobs[row]
            assert (other.rank, other.top_ids) == (entry.rank, entry.top_ids)
            assert [other.logprob, *other.top_logprobs] == pytest.approx([entry.logprob, *entry.top_logprobs], abs=1e-5)
        for sampler in both:
            if step == 1:
                sampler.retract(slots, expected.token_ids)
            if step == 2:  # out of their slots, into others, which somebody else had
                for slot, request in enumerate(requests):
                    sampler.park(slot, request)
                for slot in range(len(requests)):
                    sampler.seat(2 * len(PARAMS) - 1 - slot, make_request(100 + slot, [7], presence_penalty=0.1))
                for slot, request in enumerate(requests):
                    sampler.seat(slot + 3, request)
        slots = slots + np.int32(3) if step == 2 else slots


class HostNumbers(TorchDispatchMode):
    """Collects the operations that take a number from a tensor: where that is the host's, a device waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_number = any(isinstance(arg, torch.Tensor) and arg.ndim == 0 for arg in args[1:])
        if is_number and func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.index_put_):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_request_is_seated_without_a_wait() -> None:
    """The step before runs meanwhile."""
    _, sampler = samplers()
    with HostNumbers() as numbers:
        for slot, params in enumerate(PARAMS):
            sampler.seat(slot, make_request(slot, [1, 2, 3, 2], **params))
    assert numbers.found == []
    with HostNumbers() as numbers:
        torch.zeros(2)[0] = 1.0
    assert numbers.found == ["aten.copy_.default"]


def test_rows_of_one_slot_follow_each_other() -> None:
    """Three rows of each slot at once are three steps, and those that are retracted have not been."""
    requests = [make_request(i, [1, 2, 3, 2], **params) for i, params in enumerate(PARAMS)]
    slots = np.arange(len(PARAMS), dtype=np.int32)
    logits = torch.stack([logits_of(step) for step in range(3)], 1)  # [slot, step, vocab]
    for at_once, one_by_one in zip(samplers(), samplers(), strict=True):
        for slot, request in enumerate(requests):
            at_once.seat(slot, request)
            one_by_one.seat(slot, request)
        positions = np.tile(np.arange(4, 7, dtype=np.int32), len(slots))
        drawn = at_once.sample(LogitRows(logits.flatten(0, 1).clone(), np.repeat(slots, 3), positions)).result()
        steps = [
            one_by_one.sample(
                LogitRows(logits[:, step].clone(), slots, np.full(len(slots), 4 + step, np.int32))
            ).result()
            for step in range(3)
        ]
        assert drawn.token_ids.reshape(-1, 3).T.tolist() == [step.token_ids.tolist() for step in steps]
        assert drawn.logprobs == {
            3 * row + i: entry for i, step in enumerate(steps) for row, entry in step.logprobs.items()
        }
        for step in (2, 1):
            one_by_one.retract(slots, steps[step].token_ids)
        is_later = np.tile([False, True, True], len(slots))
        at_once.retract(np.repeat(slots, 3)[is_later], drawn.token_ids[is_later])
        again = [
            sampler.sample(LogitRows(logits[:, 2].clone(), slots, positions[1::3])).result()
            for sampler in (at_once, one_by_one)
        ]
        assert again[0].token_ids.tolist() == again[1].token_ids.tolist()


def test_rows_without_a_token_are_told() -> None:
    slots, positions = np.arange(4, dtype=np.int32), np.ones(4, np.int32)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, 7], logits[2, 8] = float("nan"), float("inf")
    for sampler in samplers():
        for slot in range(3):
            sampler.seat(slot, make_request(slot, [0], temperature=float(slot > 0)))
        sampler.seat(3, make_request(3, [0], min_tokens=1, stop_token_ids=list(range(VOCAB))))
        broken = sampler.sample(LogitRows(logits.clone(), slots, positions)).result().broken
        assert broken.tolist() == [True, False, True, True]
        assert not len(sampler.sample(LogitRows(logits[:0], slots[:0], positions[:0])).result().token_ids)


def test_both_samplers_keep_to_masks() -> None:
    """Rows without a mask get what they get without it; log-probabilities are those of all tokens."""
    slots = np.arange(len(PARAMS), dtype=np.int32)
    positions = np.full(len(PARAMS), 9, np.int32)
    requests = [make_request(i, [1, 2, 3, 2], **params) for i, params in enumerate(PARAMS)]
    allowed = np.random.default_rng(0).random((len(PARAMS), 32 * ((VOCAB + 31) // 32))) < 0.1
    allowed[:, 7] = True
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    rows = np.array([0, 1, 3, 5, 6], np.int32)
    free, masked = samplers()[0], samplers()
    for sampler in (free, *masked):
        for slot, request in enumerate(requests):
            sampler.seat(slot, request)
    logits = logits_of(5)
    without = free.sample(LogitRows(logits.clone(), slots, positions)).result()
    masks = TokenMasks(rows, bits[rows])
    both = [sampler.sample(LogitRows(logits.clone(), slots, positions, masks)).result() for sampler in masked]
    for sampled in both:
        assert not sampled.broken.any()
        for row, token in enumerate(sampled.token_ids.tolist()):
            assert allowed[row, token] if row in rows else token == without.token_ids[row]
        assert sampled.logprobs[5].logprob == pytest.approx(
            float(torch.log_softmax(logits[5], 0)[sampled.token_ids[5]]), abs=1e-4
        )
    with pytest.raises(ValueError, match="rows"):
        masks.forbid(logits[:2])
    assert both[0].token_ids.tolist() == both[1].token_ids.tolist()
    assert both[0].token_ids.tolist() != without.token_ids.tolist()
