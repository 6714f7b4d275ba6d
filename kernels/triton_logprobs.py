"""Log-probabilities of the model's raw distribution on a GPU, as `swiftkv/engine/logprobs.py` has them."""

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
    key_of,
    list_all_runs,
    list_largest_runs,
    load_runs,
    measure,
    run_statistics,
)

TOP_TILES = (0, 32, 128)
"""The numbers of top tokens for which a kernel is compiled; each serves the smaller ones, too."""

RUNS_TILE = 64
"""The number of runs that a program holds at a time: with twice as many it runs out of registers."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of tokens, and the likeliest tokens of each row, the likeliest first; equals by id."""

    logprobs: Tensor  # float32 [N]
    ranks: Tensor  # int32 [N], 1: no token is likelier
    top_ids: Tensor  # int32 [N, num_top]
    top_logprobs: Tensor  # float32 [N, num_top]


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Return the log-probabilities of `token_ids` int32 `[N]` under the model's own `logits` float32 `[N, vocab]`."""
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
    maxima, sums = run_statistics(logits, None, None)
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
        num_top,
        TOP_TILE=_top_tile(num_top),
        ALL_RUNS=triton.next_power_of_2(num_runs),
        TILE=RUNS_TILE,
        RUN=RUN_TOKENS,
        num_warps=8,
    )
    return found


def _top_tile(num_top: int) -> int:
    """Return the smallest of `TOP_TILES` that holds `num_top`, or beyond them a size that does."""
    return next((tile for tile in TOP_TILES if tile >= num_top), int(triton.next_power_of_2(num_top)))


@triton.jit(
    do_not_specialize=["num_top"],
    do_not_specialize_on_alignment=[
        "maxima", "sums", "listed", "found_ids", "found_logits",
        "token_ids", "logprobs", "ranks", "top_ids", "top_logprobs",
    ],
)  # fmt: skip
def _token_logprobs(
    logits: tl.tensor,
    stride: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    listed: tl.tensor,
    found_ids: tl.tensor,  # [N, num_top], the top tokens before they are put in order
    found_logits: tl.tensor,
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    ranks: tl.tensor,
    top_ids: tl.tensor,
    top_logprobs: tl.tensor,
    vocab_size: tl.tensor,
    num_runs: tl.tensor,
    num_top: tl.tensor,
    TOP_TILE: tl.constexpr,  # 0: no top tokens
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
        x, _, _ = load_runs(logits, runs, run_maxima > chosen, vocab_size, RUN)
        rank += tl.sum((x > chosen).to(tl.int32))
    tl.store(ranks + row, rank)

    if TOP_TILE:
        found_ids += row * num_top
        found_logits += row * num_top
        num_listed, bound = list_largest_runs(row_maxima, listed, num_runs, ALL_RUNS, TILE)
        if num_listed < num_top:
            list_all_runs(listed, num_runs, ALL_RUNS)
            num_listed = num_runs
            bound = tl.full((), LOWEST_KEY, tl.int64)
        target = num_top.to(tl.float64)
        end = key_of(largest).to(tl.int64) + 1
        edge = find_edge(
            logits, listed, num_listed, vocab_size, bound, end, target, largest, 1.0, 0.0, TILE, RUN, False
        )
        num_above = measure(logits, listed, num_listed, vocab_size, edge + 1, largest, 1.0, 0.0, TILE, RUN, False).to(
            tl.int32
        )
        num_equal = num_above  # where the next token at the edge goes
        num_above = 0
        for start in range(0, num_listed, TILE):
            index = start + tl.arange(0, TILE)
            runs = tl.load(listed + index, mask=index < num_listed, other=0)
            x, tokens, mask = load_runs(logits, runs, index < num_listed, vocab_size, RUN)
            x, tokens = tl.reshape(x, (TILE * RUN,)), tl.reshape(tokens, (TILE * RUN,))
            keys = tl.where(tl.reshape(mask, (TILE * RUN,)), key_of(x).to(tl.int64), edge - 1)
            is_above, is_equal = (keys > edge).to(tl.int32), (keys == edge).to(tl.int32)
            place = tl.where(is_above > 0, num_above + tl.cumsum(is_above, 0), num_equal + tl.cumsum(is_equal, 0))
            is_found = ((is_above + is_equal) > 0) & (place <= num_top)
            tl.store(found_ids + place - 1, tokens, mask=is_found)
            tl.store(found_logits + place - 1, x, mask=is_found)
            num_above += tl.sum(is_above)
            num_equal += tl.sum(is_equal)
        tl.debug_barrier()
        place = tl.arange(0, TOP_TILE)
        ids = tl.load(found_ids + place, mask=place < num_top, other=0)
        values = tl.load(found_logits + place, mask=place < num_top, other=float("-inf"))
        other = tl.arange(0, TOP_TILE)[None, :]
        other_ids = tl.load(found_ids + other, mask=other < num_top, other=0)
        other_values = tl.load(found_logits + other, mask=other < num_top, other=float("-inf"))
        is_before = (other_values > values[:, None]) | ((other_values == values[:, None]) & (other_ids < ids[:, None]))
        order = tl.sum((is_before & (other < num_top)).to(tl.int32), axis=1)
        tl.store(top_ids + row * num_top + order, ids, mask=place < num_top)
        tl.store(top_logprobs + row * num_top + order, values - largest - log_total, mask=place < num_top)
