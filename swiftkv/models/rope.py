"""Rotary position embedding: one table of cosines and sines for every position that a model may serve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import xxhash
from torch import Tensor

from swiftkv.models.config import RopeConfig, RopeType

_ROWS_AT_ONCE = 128
_DIGESTED_ROWS = 256


def cos_sin_table(rope: RopeConfig, head_dim: int, max_len: int) -> Tensor:
    """Return float32 `[max_len, rotary_dim]`: half a row of cosines, then half a row of sines, scaled by yarn's factor.

    Dimension `i` of a head is rotated together with dimension `i + rotary_dim / 2`. Dimensions from `rotary_dim` on are
    not rotated.

    `dynamic` depends on the length of the sequence when a token is computed. Here position `p` always gets the base of
    a sequence of `p + 1` tokens, at least `max_position_embeddings`, as in transformers when it goes token by token.
    So a token's result does not depend on its batch or chunk, and its KV can be cached.
    """
    # Torch computes the last rows of a thread's share differently if they do not fill its vectors. So few rows are
    # computed at a time, by one thread: then a row depends neither on the length nor on the number of threads.
    starts = range(0, max_len, _ROWS_AT_ONCE)
    return torch.cat([_rows(rope, rope.rotary_dim(head_dim), start) for start in starts])[:max_len]


def _rows(rope: RopeConfig, rotary_dim: int, start: int) -> Tensor:
    """Return `_ROWS_AT_ONCE` rows of the table, from position `start` on."""
    positions = torch.arange(start, start + _ROWS_AT_ONCE, dtype=torch.float32)
    inv_freq = _INV_FREQ[rope.rope_type](rope, rotary_dim, positions)  # [rotary_dim / 2], or [rows, rotary_dim / 2]
    angles = positions[:, None] * inv_freq
    scale = _yarn_attention_factor(rope) if rope.rope_type == "yarn" else 1.0
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(scale)


def table_digest(tables: Iterable[tuple[RopeConfig, int]]) -> str:
    """Return a hexadecimal digest of the beginning of each table, given its rotary embedding and `head_dim`.

    Torch's functions, which make the tables, differ in the last bit between versions and between processors.
    """
    digest = xxhash.xxh3_64()
    for rope, head_dim in tables:
        digest.update(cos_sin_table(rope, head_dim, _DIGESTED_ROWS).contiguous().numpy().data)
    return digest.hexdigest()


def _exponents(rotary_dim: int) -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim


def _default(rope: RopeConfig, rotary_dim: int, positions: Tensor) -> Tensor:
    return 1.0 / rope.theta ** _exponents(rotary_dim)


def _linear(rope: RopeConfig, rotary_dim: int, positions: Tensor) -> Tensor:
    return _default(rope, rotary_dim, positions) / rope.factor


def _dynamic(rope: RopeConfig, rotary_dim: int, positions: Tensor) -> Tensor:
    """Scale as NTK does: the base grows with the sequence, so that the slowest dimension is interpolated."""
    lengths = (positions + 1).clamp(min=rope.max_position_embeddings)
    growth = rope.factor * lengths / rope.max_position_embeddings - (rope.factor - 1)
    theta = rope.theta * growth ** (rotary_dim / (rotary_dim - 2))
    return 1.0 / theta[:, None] ** _exponents(rotary_dim)


def _llama3(rope: RopeConfig, rotary_dim: int, positions: Tensor) -> Tensor:
    """Interpolate slow dimensions and keep fast ones, with a ramp between."""
    inv_freq = _default(rope, rotary_dim, positions)
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)  # in the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(inv_freq / rope.factor, inv_freq, keep.clamp(0, 1))


def _yarn(rope: RopeConfig, rotary_dim: int, positions: Tensor) -> Tensor:
    """Scale like llama3, with a ramp linear in the dimension (https://arxiv.org/abs/2309.00071, section 3.2)."""

    def dimension_that_turns(times: float) -> float:
        wavelength = rope.original_max_position_embeddings / times
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    inv_freq = _default(rope, rotary_dim, positions)
    interpolate = ((torch.arange(rotary_dim // 2) - low) / (high - low)).clamp(0, 1)
    return torch.lerp(inv_freq, inv_freq / rope.factor, interpolate)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_INV_FREQ: dict[RopeType, Callable[[RopeConfig, int, Tensor], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
