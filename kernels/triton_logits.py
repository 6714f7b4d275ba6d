"""The logits of a vocabulary in runs of 64 tokens, and edges among them, found without a sort.

One pass over the logits keeps the maximum and the sum of every run. The runs with the largest maxima hold all tokens
above some logit, so questions about the largest logits usually read only these runs again. An edge is the logit from
which upwards there are a given number of tokens, or tokens of a given weight. It is found by quartering the range of
the logits' bits, which have the same order as the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

RUN_TOKENS = 64
"""The number of tokens that share a maximum and a sum."""

LOWEST_KEY = tl.constexpr(-2139095041)
"""The key of minus infinity."""

_STATISTICS_TILE = 64


def run_statistics(logits: Tensor, temperature: Tensor | None, slots: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return each run's largest logit and its sum of weights, float32 `[R, runs]` each."""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    num_rows, vocab_size = logits.shape
    num_runs = triton.cdiv(vocab_size, RUN_TOKENS)
    maxima, sums = torch.empty((2, num_rows, num_runs), dtype=torch.float32, device=logits.device)
    _statistics[(num_rows, triton.cdiv(num_runs, _STATISTICS_TILE))](
        logits,
        logits.stride(0),
        slots,
        temperature,
        maxima,
        sums,
        vocab_size,
        num_runs,
        TILE=_STATISTICS_TILE,
        RUN=RUN_TOKENS,
        num_warps=4,
    )
    return maxima, sums


@triton.jit
def key_of(x: tl.tensor) -> tl.tensor:
    """Return an int32 that orders as the float32 does, NaN apart."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def logit_of(key: tl.tensor) -> tl.tensor:
    """Return the float32 that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def inverse(temperature: tl.tensor) -> tl.tensor:
    return tl.where(temperature == 0, 1.0, 1.0 / temperature)


@triton.jit
def load_runs(
    logits: tl.tensor, runs: tl.tensor, mask: tl.tensor, vocab_size: tl.tensor, RUN: tl.constexpr
) -> tl.tensor:
    """Return the logits [runs, RUN] of some runs, their token ids, and a mask of the ids that are tokens."""
    tokens = runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
    mask = mask[:, None] & (tokens < vocab_size)
    return tl.load(logits + tokens, mask=mask, other=float("-inf")), tokens, mask


# Arguments that may begin at any row of a larger tensor are not specialised on 16-byte alignment, which gains nothing.
@triton.jit(do_not_specialize_on_alignment=["slots", "maxima", "sums"])
def _statistics(
    logits: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,  # None, as temperatures: at 1
    temperatures: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    vocab_size: tl.tensor,
    num_runs: tl.tensor,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    runs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = runs < num_runs
    x, _, _ = load_runs(logits + row * stride, runs, mask, vocab_size, RUN)
    x = tl.where(x == x, x, float("inf"))  # NaN becomes infinity, so that the maximum shows it
    largest = tl.max(x, axis=1)
    scale = 1.0
    if slots is not None:
        scale = inverse(tl.load(temperatures + tl.load(slots + row)))
    weights = tl.exp((x - largest[:, None]) * scale)
    total = tl.where(largest == float("-inf"), 0.0, tl.sum(weights, axis=1))
    tl.store(maxima + row * num_runs + runs, largest, mask=mask)
    tl.store(sums + row * num_runs + runs, total, mask=mask)


@triton.jit
def list_largest_runs(
    maxima: tl.tensor,  # [ALL_RUNS]
    listed: tl.tensor,  # [num_runs], written
    num_runs: tl.tensor,
    ALL_RUNS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """List, in order, the runs with all tokens from some key on, at most TILE; return their number and the key."""
    runs = tl.arange(0, ALL_RUNS)
    exists = runs < num_runs
    keys = tl.where(exists, key_of(maxima), LOWEST_KEY)
    bound = tl.full((), LOWEST_KEY, tl.int64)
    if num_runs > TILE:
        low = tl.min(tl.where(exists, keys, 0x7FFFFFFF)).to(tl.int64)  # too many from here on
        bound = tl.max(keys).to(tl.int64) + 1
        found = 0
        while (bound - low > 1) & (found < TILE // 2):
            middle = (low + bound) // 2
            count = tl.sum((exists & (keys >= middle.to(tl.int32))).to(tl.int32))
            is_too_many = count > TILE
            low = tl.where(is_too_many, middle, low)
            bound = tl.where(is_too_many, bound, middle)
            found = tl.where(is_too_many, found, count)
    is_listed = exists & (keys >= bound)
    tl.store(listed + tl.cumsum(is_listed.to(tl.int32), 0) - 1, runs, mask=is_listed)
    tl.debug_barrier()
    return tl.sum(is_listed.to(tl.int32)), bound


@triton.jit
def list_all_runs(listed: tl.tensor, num_runs: tl.tensor, ALL_RUNS: tl.constexpr) -> None:
    tl.debug_barrier()  # all threads have read the old content
    runs = tl.arange(0, ALL_RUNS)
    tl.store(listed + runs, runs, mask=runs < num_runs)
    tl.debug_barrier()


@triton.jit
def _count_tokens(
    logits: tl.tensor,
    listed: tl.tensor,
    num_listed: tl.tensor,
    start: tl.tensor,
    vocab_size: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    min_weight: tl.tensor,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
) -> tl.tensor:
    """Return the keys [TILE, RUN] of listed runs from `start` on, and what each counts: 1, its weight, or 0 if none."""
    index = start + tl.arange(0, TILE)
    runs = tl.load(listed + index, mask=index < num_listed, other=0)
    x, _, mask = load_runs(logits, runs, index < num_listed, vocab_size, RUN)
    value = mask.to(tl.float32)
    if BY_WEIGHT:
        value = tl.exp((x - largest) * scale)
        value = tl.where(value >= min_weight, value, 0.0)
    return key_of(x), value


@triton.jit
def measure(
    logits: tl.tensor,
    listed: tl.tensor,
    num_listed: tl.tensor,
    vocab_size: tl.tensor,
    key: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    min_weight: tl.tensor,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
) -> tl.tensor:
    """Count the tokens of the listed runs at `key` or above, or weigh those of `min_weight` or more."""
    total = tl.zeros((), tl.float64)
    for start in range(0, num_listed, TILE):
        keys, value = _count_tokens(
            logits, listed, num_listed, start, vocab_size, largest, scale, min_weight, TILE, RUN, BY_WEIGHT
        )
        total += tl.sum(tl.where(keys >= key, value, 0.0)).to(tl.float64)
    return total


@triton.jit
def find_edge(
    logits: tl.tensor,
    listed: tl.tensor,
    num_listed: tl.tensor,
    vocab_size: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    target: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    min_weight: tl.tensor,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
) -> tl.tensor:
    """Return the largest key in [low, high) from which on `measure` gives at least `target`, or low; int64."""
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first, second, third = low + step, low + 2 * step, low + 3 * step
        from_first, from_second, from_third = target * 0, target * 0, target * 0
        for start in range(0, num_listed, TILE):
            keys, value = _count_tokens(
                logits, listed, num_listed, start, vocab_size, largest, scale, min_weight, TILE, RUN, BY_WEIGHT
            )
            from_first += tl.sum(tl.where(keys >= first.to(tl.int32), value, 0.0)).to(tl.float64)
            from_second += tl.sum(tl.where(keys >= second.to(tl.int32), value, 0.0)).to(tl.float64)
            from_third += tl.sum(tl.where(keys >= third.to(tl.int32), value, 0.0)).to(tl.float64)
        end = high
        high = tl.where(from_first >= target, second, first)
        high = tl.where(from_second >= target, third, high)
        high = tl.minimum(tl.where(from_third >= target, end, high), end)
        low = tl.where(from_first >= target, first, low)
        low = tl.where(from_second >= target, second, low)
        low = tl.where(from_third >= target, third, low)
    return low
