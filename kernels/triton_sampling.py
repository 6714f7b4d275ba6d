"""From logits to tokens on a GPU, without sorting a vocabulary and without waiting for the device.

The stages and their meaning are those of `swiftkv/engine/sampler.py` (which are vLLM's): raw log-probabilities; minimum
tokens, logit bias and penalties; temperature; min_p, top_k and top_p, where equal logits stay or go together; the draw,
at the number in [0, 1) that (seed, position) alone decides, from the kept tokens in the order of their ids. Given equal
logits the CPU's sampler and this one draw the same token, rounding at the edges apart.

One pass over the logits keeps the maximum and the sum of every run of 64 tokens. One program per row does the rest from
these, and reads few logits again: the runs with the largest maxima hold all the tokens above some logit. Where those
decide (a top_k to 64, a nucleus of that size and usually one far larger), edges are searched among them, elsewhere in
the whole row: a logit's bits order as the logit does, so an edge is found by quartering the range of the bits. A row's
outcome depends on nothing but the row, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_RUN = 64  # tokens that share a maximum and a sum
_RUNS_TILE = 128  # runs that a program holds at a time
_STATISTICS_TILE = 64
_VOCABULARY_TILE = 2048
_ROWS_TILE = 128
_LOWEST_KEY = tl.constexpr(-2139095041)  # of minus infinity


@dataclass(frozen=True, slots=True)
class SlotParams:
    """What the request in each row slot asks for; `[num_slots]`, written when it takes the slot."""

    temperature: Tensor  # float32, 0: greedy
    top_k: Tensor  # int32, vocab_size: all
    top_p: Tensor  # float64, 1: all
    min_p: Tensor  # float32, 0: all
    seeds: Tensor  # int64: the seed's 64 bits
    is_penalised: Tensor  # bool; where not, the penalties mean nothing
    presence: Tensor  # float32
    frequency: Tensor  # float32
    repetition: Tensor  # float32

    @classmethod
    def empty(cls, num_slots: int, vocab_size: int, device: torch.device | str) -> SlotParams:
        """Every slot greedy."""

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


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of tokens under the raw distribution, and its likeliest tokens, the likeliest first; equals by id."""

    logprobs: Tensor  # float32 [N]
    ranks: Tensor  # int32 [N], 1: no token is likelier
    top_ids: Tensor  # int32 [N, num_top]
    top_logprobs: Tensor  # float32 [N, num_top]


def sample(logits: Tensor, params: SlotParams, slots: Tensor, positions: Tensor) -> Draw:
    """One token per row of `logits` float32 `[R, vocab]`, for the requests in `slots` int32 `[R]`.

    `positions` int32 `[R]` are those that the sampled tokens will have. Two launches.
    """
    num_rows, vocab_size = logits.shape
    draw = Draw(
        torch.empty(num_rows, dtype=torch.int32, device=logits.device),
        torch.empty(num_rows, dtype=torch.bool, device=logits.device),
    )
    if not num_rows:
        return draw
    maxima, sums = _run_statistics(logits, params.temperature, slots)
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
        TILE=_RUNS_TILE,
        RUN=_RUN,
        num_warps=8,
    )
    return draw


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Of `token_ids` int32 `[N]` under `logits` float32 `[N, vocab]`, as the model gave them. Two launches."""
    num_rows, vocab_size = logits.shape
    num_top = min(num_top, vocab_size)
    device = logits.device
    found = Logprobs(
        torch.empty(num_rows, dtype=torch.float32, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
        torch.empty((num_rows, num_top), dtype=torch.int32, device=device),
        torch.empty((num_rows, num_top), dtype=torch.float32, device=device),
    )
    if not num_rows:
        return found
    maxima, sums = _run_statistics(logits, None, None)
    num_runs = maxima.shape[1]
    _token_logprobs[(num_rows,)](
        logits,
        logits.stride(0),
        maxima,
        sums,
        torch.empty((num_rows, num_runs), dtype=torch.int32, device=device),
        torch.empty_like(found.top_ids),
        torch.empty_like(found.top_logprobs),
        token_ids,
        found.logprobs,
        found.ranks,
        found.top_ids,
        found.top_logprobs,
        vocab_size,
        num_runs,
        NUM_TOP=num_top,
        TOP_TILE=triton.next_power_of_2(max(1, num_top)),
        ALL_RUNS=triton.next_power_of_2(num_runs),
        TILE=_RUNS_TILE,
        RUN=_RUN,
        num_warps=8,
    )
    return found


def edit_logits(
    logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor, min_positions: Tensor, positions: Tensor
) -> None:
    """Edit `logits` float32 `[R, vocab]` in place, a logit each: logit bias, and stop tokens that come too early.

    `rows` int32 `[E]`, `token_ids` int32 `[E]`: no pair twice. `biases` float32 `[E]` are added; below `min_positions`
    int32 `[E]` (0 where it is no stop token) of `positions` int32 `[R]` the token is forbidden.
    """
    if len(rows):
        grid = (triton.cdiv(len(rows), _ROWS_TILE),)
        _edit_logits[grid](
            logits,
            logits.stride(0),
            rows,
            token_ids,
            biases,
            min_positions,
            positions,
            len(rows),
            TILE=_ROWS_TILE,
        )


def penalise(logits: Tensor, params: SlotParams, slots: Tensor, output_counts: Tensor, in_prompt: Tensor) -> None:
    """Apply the penalties of the rows that have some to `logits` float32 `[R, vocab]`, in place.

    `output_counts` int32 and `in_prompt` bool, `[num_slots, vocab]`: how often a token was sampled, and whether it was
    in the prompt.
    """
    num_rows, vocab_size = logits.shape
    if num_rows:
        _penalise[(num_rows, triton.cdiv(vocab_size, _VOCABULARY_TILE))](
            logits,
            logits.stride(0),
            slots,
            output_counts,
            in_prompt,
            params.is_penalised,
            params.presence,
            params.frequency,
            params.repetition,
            vocab_size,
            TILE=_VOCABULARY_TILE,
            num_warps=8,
        )


def count_tokens(output_counts: Tensor, params: SlotParams, slots: Tensor, token_ids: Tensor) -> None:
    """Count the sampled `token_ids` int32 `[R]` of rows with penalties in `output_counts`; a slot has at most one row."""
    if len(slots):
        _count_tokens[(triton.cdiv(len(slots), _ROWS_TILE),)](
            output_counts,
            output_counts.shape[1],
            slots,
            token_ids,
            params.is_penalised,
            len(slots),
            TILE=_ROWS_TILE,
        )


def _run_statistics(logits: Tensor, temperature: Tensor | None, slots: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of every run of `_RUN` tokens: the largest logit, and the sum of weights beside it; float32 `[R, runs]`."""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    num_rows, vocab_size = logits.shape
    num_runs = triton.cdiv(vocab_size, _RUN)
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
        RUN=_RUN,
        num_warps=4,
    )
    return maxima, sums


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """int32 that orders as the float32 does, NaN apart."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _logit(key: tl.tensor) -> tl.tensor:
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(temperature: tl.tensor) -> tl.tensor:
    return tl.where(temperature == 0, 1.0, 1.0 / temperature)


@triton.jit
def _load_runs(
    logits: tl.tensor, runs: tl.tensor, mask: tl.tensor, vocab_size: tl.tensor, RUN: tl.constexpr
) -> tl.tensor:
    """The logits [runs, RUN] of some runs, their token ids, and which of these are tokens."""
    tokens = runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
    mask = mask[:, None] & (tokens < vocab_size)
    return tl.load(logits + tokens, mask=mask, other=float("-inf")), tokens, mask


@triton.jit
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
    x, _, _ = _load_runs(logits + row * stride, runs, mask, vocab_size, RUN)
    x = tl.where(x == x, x, float("inf"))  # NaN: the maximum is to show it
    largest = tl.max(x, axis=1)
    scale = 1.0
    if slots is not None:
        scale = _inverse(tl.load(temperatures + tl.load(slots + row)))
    weights = tl.exp((x - largest[:, None]) * scale)
    total = tl.where(largest == float("-inf"), 0.0, tl.sum(weights, axis=1))
    tl.store(maxima + row * num_runs + runs, largest, mask=mask)
    tl.store(sums + row * num_runs + runs, total, mask=mask)


@triton.jit
def _list_largest_runs(
    maxima: tl.tensor,  # [ALL_RUNS]
    listed: tl.tensor,  # [num_runs], written
    num_runs: tl.tensor,
    ALL_RUNS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """List, in order, the runs that have all tokens from some key on: at most TILE of them. How many, and the key."""
    runs = tl.arange(0, ALL_RUNS)
    exists = runs < num_runs
    keys = tl.where(exists, _key(maxima), _LOWEST_KEY)
    bound = tl.full((), _LOWEST_KEY, tl.int64)
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
def _list_all_runs(listed: tl.tensor, num_runs: tl.tensor, ALL_RUNS: tl.constexpr) -> None:
    tl.debug_barrier()  # everybody has read what stood there
    runs = tl.arange(0, ALL_RUNS)
    tl.store(listed + runs, runs, mask=runs < num_runs)
    tl.debug_barrier()


@triton.jit
def _measure(
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
    """How many tokens of the listed runs are at `key` or above, or what those of at least `min_weight` weigh; float64."""
    total = tl.zeros((), tl.float64)
    for start in range(0, num_listed, TILE):
        index = start + tl.arange(0, TILE)
        runs = tl.load(listed + index, mask=index < num_listed, other=0)
        x, _, mask = _load_runs(logits, runs, index < num_listed, vocab_size, RUN)
        value = mask.to(tl.float32)
        if BY_WEIGHT:
            value = tl.exp((x - largest) * scale)
            value = tl.where(value >= min_weight, value, 0.0)
        total += tl.sum(tl.where(_key(x) >= key, value, 0.0)).to(tl.float64)
    return total


@triton.jit
def _find_edge(
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
    """The largest key in [low, high) from which on there is as much as `target` (`_measure`), or low; int64."""
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first, second, third = low + step, low + 2 * step, low + 3 * step
        from_first, from_second, from_third = target * 0, target * 0, target * 0
        for start in range(0, num_listed, TILE):
            index = start + tl.arange(0, TILE)
            runs = tl.load(listed + index, mask=index < num_listed, other=0)
            x, _, mask = _load_runs(logits, runs, index < num_listed, vocab_size, RUN)
            value = mask.to(tl.float32)
            if BY_WEIGHT:
                value = tl.exp((x - largest) * scale)
                value = tl.where(value >= min_weight, value, 0.0)
            keys = _key(x)
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


@triton.jit
def _first_above(weights: tl.tensor, target: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """Where the running sum of `weights` [N] passes `target`, at most where it ends; and what is left of `target`."""
    index = tl.arange(0, N)
    running = tl.cumsum(weights, 0)
    last = tl.min(tl.where(running == tl.max(running), index, N))
    first = tl.minimum(tl.min(tl.where(running > target, index, N)), last)
    return first, target - tl.max(tl.where(index < first, running, 0.0))


@triton.jit
def _mix64(value: tl.tensor) -> tl.tensor:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """float64 in [0, 1): SplitMix64, as `uniforms` of the CPU's sampler."""
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
    """The token at `uniform` of the distribution that the filters leave."""
    all_runs = tl.arange(0, ALL_RUNS)
    sums = tl.load(run_sums + all_runs, mask=all_runs < num_runs, other=0.0)
    sums = tl.where(sums == 0.0, 0.0, sums * tl.exp((maxima - largest) * scale)).to(tl.float64)
    num_listed = num_runs
    edge = tl.full((), _LOWEST_KEY, tl.int64)
    is_filtered = (top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0)
    if is_filtered:
        num_listed, edge = _list_largest_runs(maxima, listed, num_runs, ALL_RUNS, TILE)
        # Does what is listed decide? It has all tokens from `edge` on.
        if top_k < vocab_size:
            listed_tokens = _measure(
                logits, listed, num_listed, vocab_size, edge, largest, scale, min_p, TILE, RUN, False
            )
            is_enough = listed_tokens >= top_k
        elif min_p > 0.0:
            is_enough = tl.exp((_logit(edge.to(tl.int32)) - largest) * scale) < min_p
        else:
            listed_weight = _measure(
                logits, listed, num_listed, vocab_size, edge, largest, scale, min_p, TILE, RUN, True
            )
            is_enough = listed_weight >= top_p * tl.sum(sums)
        if (num_listed < num_runs) & (is_enough == 0):
            _list_all_runs(listed, num_runs, ALL_RUNS)
            num_listed = num_runs
            edge = tl.full((), _LOWEST_KEY, tl.int64)
        end = _key(largest).to(tl.int64) + 1
        if top_k < vocab_size:
            edge = _find_edge(
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
                total = _measure(logits, listed, num_listed, vocab_size, edge, largest, scale, min_p, TILE, RUN, True)
            edge = _find_edge(
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
            x, _, _ = _load_runs(logits, runs, index < num_listed, vocab_size, RUN)
            weights = tl.exp((x - largest) * scale)
            is_kept = (_key(x) >= edge) & (weights >= min_p)
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
    weights = tl.where((_key(x) >= edge) & (weights >= min_p), weights, 0.0)
    within, _ = _first_above(weights.to(tl.float64), target, RUN)
    return run * RUN + within


@triton.jit
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
                _inverse(temperature),
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


@triton.jit
def _token_logprobs(
    logits: tl.tensor,
    stride: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    listed: tl.tensor,
    found_ids: tl.tensor,  # [N, NUM_TOP], the top tokens before they are put in order
    found_logprobs: tl.tensor,
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    ranks: tl.tensor,
    top_ids: tl.tensor,
    top_logprobs: tl.tensor,
    vocab_size: tl.tensor,
    num_runs: tl.tensor,
    NUM_TOP: tl.constexpr,
    TOP_TILE: tl.constexpr,
    ALL_RUNS: tl.constexpr,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    listed += row * num_runs
    all_runs = tl.arange(0, ALL_RUNS)
    exists = all_runs < num_runs
    row_maxima = tl.load(maxima + row * num_runs + all_runs, mask=exists, other=float("-inf"))
    row_sums = tl.load(sums + row * num_runs + all_runs, mask=exists, other=0.0)
    largest = tl.max(row_maxima)
    log_total = tl.log(tl.sum(tl.where(row_sums == 0.0, 0.0, row_sums * tl.exp(row_maxima - largest))))
    chosen = tl.load(logits + tl.load(token_ids + row))
    tl.store(logprobs + row, chosen - largest - log_total)
    rank = 1
    for start in range(0, num_runs, TILE):
        runs = start + tl.arange(0, TILE)
        run_maxima = tl.load(maxima + row * num_runs + runs, mask=runs < num_runs, other=float("-inf"))
        x, _, _ = _load_runs(logits, runs, run_maxima > chosen, vocab_size, RUN)
        rank += tl.sum((x > chosen).to(tl.int32))
    tl.store(ranks + row, rank)

    if NUM_TOP:
        found_ids += row * NUM_TOP
        found_logprobs += row * NUM_TOP
        num_listed, bound = _list_largest_runs(row_maxima, listed, num_runs, ALL_RUNS, TILE)
        if num_listed < NUM_TOP:
            _list_all_runs(listed, num_runs, ALL_RUNS)
            num_listed = num_runs
            bound = tl.full((), _LOWEST_KEY, tl.int64)
        target = tl.full((), NUM_TOP, tl.float64)
        end = _key(largest).to(tl.int64) + 1
        edge = _find_edge(
            logits, listed, num_listed, vocab_size, bound, end, target, largest, 1.0, 0.0, TILE, RUN, False
        )
        num_above = _measure(logits, listed, num_listed, vocab_size, edge + 1, largest, 1.0, 0.0, TILE, RUN, False).to(
            tl.int32
        )
        num_equal = num_above  # where the next token at the edge goes
        num_above = 0
        for start in range(0, num_listed, TILE):
            index = start + tl.arange(0, TILE)
            runs = tl.load(listed + index, mask=index < num_listed, other=0)
            x, tokens, mask = _load_runs(logits, runs, index < num_listed, vocab_size, RUN)
            x, tokens = tl.reshape(x, (TILE * RUN,)), tl.reshape(tokens, (TILE * RUN,))
            keys = tl.where(tl.reshape(mask, (TILE * RUN,)), _key(x).to(tl.int64), edge - 1)
            is_above, is_equal = (keys > edge).to(tl.int32), (keys == edge).to(tl.int32)
            place = tl.where(is_above > 0, num_above + tl.cumsum(is_above, 0), num_equal + tl.cumsum(is_equal, 0))
            is_found = ((is_above + is_equal) > 0) & (place <= NUM_TOP)
            tl.store(found_ids + place - 1, tokens, mask=is_found)
            tl.store(found_logprobs + place - 1, x - largest - log_total, mask=is_found)
            num_above += tl.sum(is_above)
            num_equal += tl.sum(is_equal)
        tl.debug_barrier()
        place = tl.arange(0, TOP_TILE)
        ids = tl.load(found_ids + place, mask=place < NUM_TOP, other=0)
        values = tl.load(found_logprobs + place, mask=place < NUM_TOP, other=float("-inf"))
        other = tl.arange(0, TOP_TILE)[None, :]
        other_ids = tl.load(found_ids + other, mask=other < NUM_TOP, other=0)
        other_values = tl.load(found_logprobs + other, mask=other < NUM_TOP, other=float("-inf"))
        is_before = (other_values > values[:, None]) | ((other_values == values[:, None]) & (other_ids < ids[:, None]))
        order = tl.sum((is_before & (other < NUM_TOP)).to(tl.int32), axis=1)
        tl.store(top_ids + row * NUM_TOP + order, ids, mask=place < NUM_TOP)
        tl.store(top_logprobs + row * NUM_TOP + order, values, mask=place < NUM_TOP)


@triton.jit(do_not_specialize=["num_edits"])
def _edit_logits(
    logits: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    token_ids: tl.tensor,
    biases: tl.tensor,
    min_positions: tl.tensor,
    positions: tl.tensor,
    num_edits: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    edit = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = edit < num_edits
    row = tl.load(rows + edit, mask=mask, other=0)
    target = logits + row.to(tl.int64) * stride + tl.load(token_ids + edit, mask=mask, other=0)
    edited = tl.load(target, mask=mask, other=0.0) + tl.load(biases + edit, mask=mask, other=0.0)
    position = tl.load(positions + row, mask=mask, other=0)
    is_early = position < tl.load(min_positions + edit, mask=mask, other=0)
    tl.store(target, tl.where(is_early, float("-inf"), edited), mask=mask)


@triton.jit
def _penalise(
    logits: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,
    output_counts: tl.tensor,
    in_prompt: tl.tensor,
    is_penalised: tl.tensor,
    presences: tl.tensor,
    frequencies: tl.tensor,
    repetitions: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if tl.load(is_penalised + slot):
        tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
        mask = tokens < vocab_size
        x = tl.load(logits + row * stride + tokens, mask=mask, other=0.0)
        count = tl.load(output_counts + slot * vocab_size + tokens, mask=mask, other=0)
        is_seen = count > 0
        is_known = is_seen | (tl.load(in_prompt + slot * vocab_size + tokens, mask=mask, other=0) != 0)
        repetition = tl.load(repetitions + slot)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(is_known, repeated, x) - tl.load(frequencies + slot) * count.to(tl.float32)
        x -= tl.load(presences + slot) * is_seen.to(tl.float32)
        tl.store(logits + row * stride + tokens, x, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _count_tokens(
    output_counts: tl.tensor,
    vocab_size: tl.tensor,
    slots: tl.tensor,
    token_ids: tl.tensor,
    is_penalised: tl.tensor,
    num_rows: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + row, mask=row < num_rows, other=0).to(tl.int64)
    mask = (row < num_rows) & (tl.load(is_penalised + slot, mask=row < num_rows, other=0) != 0)
    target = output_counts + slot * vocab_size + tl.load(token_ids + row, mask=mask, other=0)
    tl.store(target, tl.load(target, mask=mask, other=0) + 1, mask=mask)
