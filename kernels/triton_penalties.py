"""Edits of requests to their logits before a token is drawn, on a GPU: masks, logit bias, minimum tokens, penalties.

The meaning is that of `swiftkv/engine/sampler.py`: masks first, then edits, then penalties.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from swiftkv.kernels.triton_sampling import SlotParams

_VOCABULARY_TILE = 2048
_ROWS_TILE = 128


def forbid_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logit of every token that a mask leaves out to minus infinity, in `logits` float32 `[R, vocab]`.

    `rows` int32 `[M]`, none twice; `bits` int32 `[M, ceil(vocab / 32)]`, the lowest bit for the first token of a word.
    """
    vocab_size = logits.shape[1]
    if len(rows):
        _forbid_tokens[(len(rows), triton.cdiv(vocab_size, _VOCABULARY_TILE))](
            logits, logits.stride(0), rows, bits, bits.stride(0), vocab_size, TILE=_VOCABULARY_TILE
        )


def edit_logits(
    logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor, min_positions: Tensor, positions: Tensor
) -> None:
    """Edit `logits` float32 `[R, vocab]` in place, one logit per edit: logit bias, and stop tokens that come too early.

    `rows` int32 `[E]`, `token_ids` int32 `[E]`: no pair twice. `biases` float32 `[E]` are added. A token is forbidden
    while the row's position, `positions` int32 `[R]`, is below `min_positions` int32 `[E]` (0 for other than stop
    tokens).
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
    """Add the sampled `token_ids` int32 `[R]` of rows with penalties to `output_counts`; a slot has at most one row."""
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


@triton.jit(do_not_specialize_on_alignment=["rows", "bits"])
def _forbid_tokens(
    logits: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    bits: tl.tensor,
    words_of_row: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    mask_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + mask_row).to(tl.int64)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_token = tokens < vocab_size
    words = tl.load(bits + mask_row * words_of_row + tokens // 32, mask=is_token, other=0)
    is_forbidden = ((words >> (tokens % 32)) & 1) == 0
    forbidden = tl.full([TILE], float("-inf"), tl.float32)
    tl.store(logits + row * stride + tokens, forbidden, mask=is_token & is_forbidden)


@triton.jit(
    do_not_specialize=["num_edits"],
    do_not_specialize_on_alignment=["rows", "token_ids", "biases", "min_positions", "positions"],
)
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


@triton.jit(do_not_specialize_on_alignment=["slots"])
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


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "token_ids"])
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
