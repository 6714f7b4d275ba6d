"""Draws tokens from logits on a GPU, without sorting a vocabulary and without waiting for the device.

The stages and their meaning are those of `swiftkv/engine/sampler.py`, which are vLLM's: raw log-probabilities; minimum
tokens, logit bias and penalties; temperature; min_p, top_k and top_p, where equal logits stay or go together; the draw.
The draw takes a number in [0, 1) that depends on (seed, position) alone, and the kept tokens in the order of their ids.
Given equal logits, the CPU's sampler and this one draw the same token, apart from rounding at the edges of filters.

One pass over the logits keeps the maximum and the sum of every run of 64 tokens. One program per row does the rest from
these, and reads few logits again: the runs with the largest maxima hold all tokens above some logit. If those suffice,
edges are searched among them, otherwise in the whole row (`kernels/triton_logits.py`). They suffice for a top_k up to
64, for a nucleus of that size, and usually for a far larger one. A row's outcome depends only on the row, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftkv.kernels.triton_logits import (
    LOWEST_KEY,
    RUN_TOKENS,
    find_edge,
    inverse,
    key_of,
    list_all_runs,
    list_largest_runs,
    load_runs,
    logit_of,
    measure,
    run_statistics,
)

RUNS_TILE = 128
"""The number of runs that a program holds at a time."""


@dataclass(frozen=True, slots=True)
class SlotParams:
    """The sampling parameters of the request in each slot, `[num_slots]`, written when it takes the slot."""

    temperature: Tensor  # float32, 0: greedy
    top_k: Tensor  # int32, vocab_size: all
    top_p: Tensor  # float64, 1: all
    min_p: Tensor  # float32, 0: all
    seeds: Tensor  # int64: the seed's 64 bits
    is_penalised: Tensor  # bool; if false, the penalties below are not read
    presence: Tensor  # float32
    frequency: Tensor  # float32
    repetition: Tensor  # float32

    @classmethod
    def empty(cls, num_slots: int, vocab_size: int, device: torch.device | str) -> SlotParams:
        """Return parameters by which every slot is greedy."""

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_slots,), value, dtype=dtype, device=device)

        return cls(
            temperature=full(0, torch.float32),
            top_k=full(vocab_size, torch.int32),
            top_p=full(1, torch.float64),
            min_p=full(0, torch.float32),
            seeds=full(0, torch.int64),
            is_penalised=full(0, torch.bool),
            presence=full(0, torch.float32),
            frequency=full(0, torch.float32),
            repetition=full(1, torch.float32),
        )


@dataclass(frozen=True, slots=True)
class Draw:
    token_ids: Tensor  # int32 [R]
    is_broken: Tensor  # bool [R] logits that are not finite, or forbid every token: the token means nothing


def sample(logits: Tensor, params: SlotParams, slots: Tensor, positions: Tensor) -> Draw:
    """Draw one token per row of `logits` float32 `[R, vocab]`, for the requests in `slots` int32 `[R]`.

    `positions` int32 `[R]` are those of the sampled tokens. Takes two launches.
    """
    num_rows, vocab_size = logits.shape
    draw = Draw(
        torch.empty(num_rows, dtype=torch.int32, device=logits.device),
        torch.empty(num_rows, dtype=torch.bool, device=logits.device),
    )
    if not num_rows:
        return draw
    maxima, sums = run_statistics(logits, params.temperature, slots)
    num_runs = maxima.shape[1]
    _sample[(num_rows,)](
        logits,
        logits.stride(0),
        maxima,
        sums,
        torch.empty((num_rows, num_runs), dtype=torch.int32, device=logits.device),
        slots,
        positions,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seeds,
        draw.token_ids,
        draw.is_broken,
        vocab_size,
        num_runs,
        ALL_RUNS=triton.next_power_of_2(num_runs),
        TILE=RUNS_TILE,
        RUN=RUN_TOKENS,
        num_warps=16,  # with half as many, Ampere's registers overflow
    )
    return draw


@triton.jit
def _first_above(weights: tl.tensor, target: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """Return where the running sum of `weights` [N] passes `target`, or ends, and the rest of `target` there.

    A place has some weight. A GPU adds in a tree, so rounding may raise the running sum where a weight is zero.
    """
    index = tl.arange(0, N)
    running = tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0, index, 0))
    first = tl.min(tl.where((running > target) & (weights > 0), index, last))
    return first, target - tl.max(tl.where(index < first, running, 0.0))


@triton.jit
def _mix64(value: tl.tensor) -> tl.tensor:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return a float64 in [0, 1) by SplitMix64, as `uniforms` of the CPU's sampler does."""
    seed = seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    mixed = _mix64(_mix64(seed) + position.to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (mixed >> 12).to(tl.float64) * (2.0**-52)


@triton.jit
def _draw(
    logits: tl.tensor,  # of the row
    maxima: tl.tensor,  # [ALL_RUNS]
    run_sums: tl.tensor,  # of the row, overwritten
    listed: tl.tensor,  # of the row, overwritten
    largest: tl.tensor,
    scale: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    uniform: tl.tensor,
    vocab_size: tl.tensor,
    num_runs: tl.tensor,
    ALL_RUNS: tl.constexpr,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
) -> tl.tensor:
    """Return the token at `uniform` of the distribution that the filters leave."""
    all_runs = tl.arange(0, ALL_RUNS)
    sums = tl.load(run_sums + all_runs, mask=all_runs < num_runs, other=0.0)
    sums = tl.where(sums == 0.0, 0.0, sums * tl.exp((maxima - largest) * scale)).to(tl.float64)
    num_listed = num_runs
    edge = tl.full((), LOWEST_KEY, tl.int64)
    is_filtered = (top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0)
    if is_filtered:
        num_listed, edge = list_largest_runs(maxima, listed, num_runs, ALL_RUNS, TILE)
        # Do the listed runs suffice? They have all tokens from `edge` on.
        if top_k < vocab_size:
            listed_tokens = measure(
                logits, listed, num_listed, vocab_size, edge, largest, scale, min_p, TILE, RUN, False
            )
            is_enough = listed_tokens >= top_k
        elif min_p > 0.0:
            is_enough = tl.exp((logit_of(edge.to(tl.int32)) - largest) * scale) < min_p
        else:
            listed_weight = measure(
                logits, listed, num_listed, vocab_size, edge, largest, scale, min_p, TILE, RUN, True
            )
            is_enough = listed_weight >= top_p * tl.sum(sums)
        if (num_listed < num_runs) & (is_enough == 0):
            list_all_runs(listed, num_runs, ALL_RUNS)
            num_listed = num_runs
            edge = tl.full((), LOWEST_KEY, tl.int64)
        end = key_of(largest).to(tl.int64) + 1
        if top_k < vocab_size:
            edge = find_edge(
                logits,
                listed,
                num_listed,
                vocab_size,
                edge,
                end,
                top_k.to(tl.float64),
                largest,
                scale,
                min_p,
                TILE,
                RUN,
                False,
            )
        if top_p < 1.0:
            total = tl.sum(sums)
            if (top_k < vocab_size) | (min_p > 0.0):
                total = measure(logits, listed, num_listed, vocab_size, edge, largest, scale, min_p, TILE, RUN, True)
            edge = find_edge(
                logits,
                listed,
                num_listed,
                vocab_size,
                edge,
                end,
                top_p * total,
                largest,
                scale,
                min_p,
                TILE,
                RUN,
                True,
            )
        tl.debug_barrier()  # the sums have been read
        for start in range(0, num_listed, TILE):
            index = start + tl.arange(0, TILE)
            runs = tl.load(listed + index, mask=index < num_listed, other=0)
            x, _, _ = load_runs(logits, runs, index < num_listed, vocab_size, RUN)
            weights = tl.exp((x - largest) * scale)
            is_kept = (key_of(x) >= edge) & (weights >= min_p)
            tl.store(run_sums + index, tl.sum(tl.where(is_kept, weights, 0.0), axis=1), mask=index < num_listed)
        tl.debug_barrier()
        sums = tl.load(run_sums + all_runs, mask=all_runs < num_listed, other=0.0).to(tl.float64)
    position, target = _first_above(sums, uniform * tl.sum(sums), ALL_RUNS)
    run = position
    if is_filtered:
        run = tl.load(listed + position)
    tokens = run * RUN + tl.arange(0, RUN)
    x = tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf"))
    weights = tl.exp((x - largest) * scale)
    weights = tl.where((key_of(x) >= edge) & (weights >= min_p), weights, 0.0)
    within, _ = _first_above(weights.to(tl.float64), target, RUN)
    return run * RUN + within


@triton.jit(do_not_specialize_on_alignment=["maxima", "sums", "listed", "slots", "positions", "token_ids", "broken"])
def _sample(
    logits: tl.tensor,
    stride: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    listed: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    token_ids: tl.tensor,
    broken: tl.tensor,
    vocab_size: tl.tensor,
    num_runs: tl.tensor,
    ALL_RUNS: tl.constexpr,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    runs = tl.arange(0, ALL_RUNS)
    row_maxima = tl.load(maxima + row * num_runs + runs, mask=runs < num_runs, other=float("-inf"))
    largest = tl.max(row_maxima)
    is_broken = (largest == float("inf")) | (largest == float("-inf"))
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    token = 0
    if is_broken == 0:
        if temperature == 0:
            run = tl.min(tl.where(row_maxima == largest, runs, ALL_RUNS))
            tokens = run * RUN + tl.arange(0, RUN)
            x = tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf"))
            token = tl.min(tl.where(x == largest, tokens, vocab_size))
        else:
            token = _draw(
                logits,
                row_maxima,
                sums + row * num_runs,
                listed + row * num_runs,
                largest,
                inverse(temperature),
                tl.load(top_ks + slot),
                tl.load(top_ps + slot),
                tl.load(min_ps + slot),
                _uniform(tl.load(seeds + slot), tl.load(positions + row)),
                vocab_size,
                num_runs,
                ALL_RUNS,
                TILE,
                RUN,
            )
    tl.store(token_ids + row, token)
    tl.store(broken + row, is_broken)
