"""Draws tokens from logits, for the whole batch at once.

A request's parameters are written once, when it takes a slot, to tensors that have a row per slot; a step only
gathers. The stages, in vLLM's order and meaning, are: raw log-probabilities; masks of grammars; min_tokens, logit_bias
and penalties; temperature; min_p, top_k and top_p; the draw. A row's outcome depends on that row alone, and the draw on
(seed, position) alone, so a request's tokens do not depend on the other requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from swiftkv.arithmetic import ceil_div
from swiftkv.engine.logit_edits import LogitEdits
from swiftkv.engine.logprobs import token_logprobs
from swiftkv.engine.messages import TokenLogprobs
from swiftkv.engine.request import Request
from swiftkv.engine.token_counts import TokenCounts
from swiftkv.engine.token_sampler import (
    FinishedSample,
    LogitRows,
    PendingSample,
    Sampled,
    TokenSampler,
    split_repeated,
    temperature_of,
    top_k_of,
)

_DRAWN, _FILTERED, _EDITED, _PENALISED, _LOGPROBS = 1, 2, 4, 8, 16
_BLOCK = 512  # tokens whose weights are added up before a draw looks at single ones
_SORTED_CANDIDATES = 2048  # the most that are sorted to find the edge of a nucleus
_MAX_HALVINGS = 12
_SLICE_BYTES = 1 << 20  # logits of one slice of rows, which stay in the processor's cache


def open_sampler(kernels: str, vocab_size: int, last_token_ids: torch.Tensor) -> TokenSampler:
    """Return the sampler for a kind of kernels (`Ops.name`), with a slot for every element of `last_token_ids`."""
    if kernels == "triton":
        from swiftkv.engine.device_sampler import DeviceSampler

        return DeviceSampler(vocab_size, last_token_ids)
    return Sampler(vocab_size, last_token_ids)


class Sampler:
    """A `TokenSampler` in plain torch."""

    def __init__(self, vocab_size: int, last_token_ids: torch.Tensor) -> None:
        max_num_seqs, device = len(last_token_ids), last_token_ids.device
        self._vocab_size = vocab_size
        self._device = device
        self._last_token_ids = last_token_ids
        self._rows_per_slice = max(1, _SLICE_BYTES // (4 * vocab_size))
        self._flags = np.zeros(max_num_seqs, np.uint8)
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._logprob_counts = np.zeros(max_num_seqs, np.int32)
        self._edits: dict[int, LogitEdits] = {}  # by slot
        self._temperature = torch.ones(max_num_seqs, device=device)
        self._min_p = [0.0] * max_num_seqs
        self._top_k = [vocab_size] * max_num_seqs
        self._top_p = [1.0] * max_num_seqs
        self._presence = torch.zeros(max_num_seqs, 1, device=device)
        self._frequency = torch.zeros(max_num_seqs, 1, device=device)
        self._repetition = torch.ones(max_num_seqs, 1, device=device)
        self._counts = TokenCounts(max_num_seqs, vocab_size, device)

    def seat(self, slot: int, request: Request) -> None:
        params = request.sampling
        temperature, top_k = temperature_of(params), top_k_of(params, self._vocab_size)
        self._flags[slot] = (
            _DRAWN * (temperature > 0)
            | _FILTERED * (top_k < self._vocab_size or params.top_p < 1 or params.min_p > 0)
            | _LOGPROBS * (params.logprobs is not None)
        )
        self._seeds[slot] = request.seed
        self._logprob_counts[slot] = params.logprobs or 0
        self._temperature[slot] = temperature or 1.0
        self._min_p[slot] = params.min_p
        self._top_k[slot] = top_k
        self._top_p[slot] = params.top_p
        self._edits.pop(slot, None)
        if (edits := LogitEdits.of(request)) is not None:
            self._flags[slot] |= _EDITED
            self._edits[slot] = edits
        self._flags[slot] |= _PENALISED * self._counts.seat(slot, request)
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self._repetition[slot] = params.repetition_penalty

    def park(self, slot: int, request: Request) -> None:
        self._counts.park(slot, request.request_id)

    def release(self, request_id: int) -> None:
        self._counts.release(request_id)

    def sample(self, rows: LogitRows) -> PendingSample:
        sampled = self._sample(rows)
        slots = torch.from_numpy(rows.slots).to(self._device, torch.int64)
        self._last_token_ids.index_copy_(0, slots, torch.from_numpy(sampled.token_ids).to(self._device))
        return FinishedSample(sampled)

    def _sample(self, rows: LogitRows) -> Sampled:
        if not np.any(self._flags[rows.slots]):
            if rows.masks is not None:
                rows.masks.forbid(rows.logits)
            token_ids, largest = _largest(rows.logits)
            return Sampled(token_ids, {}, ~np.isfinite(largest))
        token_ids = np.empty(len(rows.slots), np.int32)
        broken = np.empty(len(rows.slots), np.bool_)
        logprobs: dict[int, TokenLogprobs] = {}
        for part in self._slices(rows.slots):
            some = self._sample_slice(rows.part(part))
            token_ids[part], broken[part] = some.token_ids, some.broken
            logprobs.update((part.start + row, entry) for row, entry in some.logprobs.items())
        return Sampled(token_ids, logprobs, broken)

    def _slices(self, slots: npt.NDArray[np.int32]) -> Iterator[slice]:
        for part in split_repeated(slots, (self._flags[slots] & _PENALISED) > 0):
            for begin in range(part.start, part.stop, self._rows_per_slice):
                yield slice(begin, min(part.stop, begin + self._rows_per_slice))

    def retract(self, slots: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32]) -> None:
        self._counts.retract(slots, token_ids)

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: npt.NDArray[np.int32], top_counts: Sequence[int]
    ) -> list[TokenLogprobs]:
        return token_logprobs(logits, token_ids, top_counts)

    def _sample_slice(self, rows: LogitRows) -> Sampled:
        """Sample as `sample` does, for so few rows that intermediate results stay in the processor's cache."""
        logits, slots, positions = rows.logits, rows.slots, rows.positions
        flags = self._flags[slots]
        edited, penalised, drawn, asked = (
            np.flatnonzero(flags & flag) for flag in (_EDITED, _PENALISED, _DRAWN, _LOGPROBS)
        )
        raw_logits = logits[asked]  # a copy
        if rows.masks is not None:
            rows.masks.forbid(logits)
        if len(edited):
            self._edit(logits, edited, slots, positions)
        if len(penalised):
            logits[penalised] = self._penalised(logits[penalised], slots[penalised])
        token_ids, largest = _largest(logits)
        broken = ~np.isfinite(largest)
        drawn = drawn[~broken[drawn]]
        if len(drawn):
            token_ids[drawn] = self._draw(logits[drawn], largest[drawn], slots[drawn], positions[drawn])
        if len(penalised):
            self._counts.outputs[slots[penalised], token_ids[penalised]] += 1  # a slot has at most one row here
        if not len(asked):
            return Sampled(token_ids, {}, broken)
        entries = token_logprobs(raw_logits, token_ids[asked], self._logprob_counts[slots[asked]].tolist())
        return Sampled(token_ids, dict(zip(asked.tolist(), entries, strict=True)), broken)

    def _edit(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.intp],
        slots: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
    ) -> None:
        for row in rows.tolist():
            edits = self._edits[int(slots[row])]
            token_ids = torch.from_numpy(edits.token_ids).to(self._device, torch.int64)
            is_early = torch.from_numpy(positions[row] < edits.min_positions).to(self._device)
            biased = logits[row, token_ids] + torch.from_numpy(edits.biases).to(self._device)
            logits[row, token_ids] = biased.masked_fill(is_early, -math.inf)

    def _penalised(self, logits: torch.Tensor, slots: npt.NDArray[np.int32]) -> torch.Tensor:
        row_slots = torch.from_numpy(slots).to(self._device, torch.int64)
        counts = self._counts.outputs[row_slots]
        seen = counts > 0
        repetition = self._repetition[row_slots]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        penalised = torch.where(seen | self._counts.in_prompt[row_slots], repeated, logits)
        return penalised - self._frequency[row_slots] * counts - self._presence[row_slots] * seen

    def _draw(
        self,
        logits: torch.Tensor,
        largest: npt.NDArray[np.float32],
        slots: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int32]:
        """Draw a token for each of a few rows [R, vocab] by its uniform number; `largest [R]` logits are finite."""
        row_slots = torch.from_numpy(slots).to(self._device, torch.int64)
        num_blocks = ceil_div(self._vocab_size, _BLOCK)
        weights = logits.new_full((len(logits), num_blocks * _BLOCK), -math.inf)
        torch.sub(logits, torch.from_numpy(largest).to(self._device).unsqueeze(1), out=weights[:, : self._vocab_size])
        weights.div_(self._temperature[row_slots].unsqueeze(1)).exp_()  # the likeliest token weighs 1
        if np.any(self._flags[slots] & _FILTERED):
            self._filter(weights, logits, slots)
        uniform = torch.from_numpy(uniforms(self._seeds[slots], positions)).to(self._device)
        return _to_numpy(_invert_distribution(weights.view(-1, num_blocks, _BLOCK), uniform))

    def _filter(self, weights: torch.Tensor, logits: torch.Tensor, slots: npt.NDArray[np.int32]) -> None:
        """Zero the weights that min_p, then top_k, then top_p leave out. Equal ones stay or go together."""
        for row, slot in enumerate(slots.tolist()):
            row_weights = weights[row]
            min_p, top_k, top_p = self._min_p[slot], self._top_k[slot], self._top_p[slot]
            if min_p > 0:
                row_weights.masked_fill_(row_weights < min_p, 0.0)
            if top_k < self._vocab_size:  # by logits: at a high temperature different ones have equal weights
                edge = logits[row].topk(top_k).values[-1]
                row_weights[: self._vocab_size].masked_fill_(logits[row] < edge, 0.0)
            if top_p < 1:
                row_weights.masked_fill_(row_weights < _nucleus_edge(row_weights, top_p), 0.0)


def _nucleus_edge(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the least weight among the likeliest tokens that together have `top_p` of all `weights [N]`, at most 1."""
    total = float(weights.sum())
    # All tokens below `low` together weigh less than (1 - top_p) of the total, so none of them is in the nucleus.
    low, high = (1 - top_p) * total / len(weights), 1.0
    candidates = weights[weights >= low]
    wanted = top_p * total
    for _ in range(_MAX_HALVINGS):  # sorting all of a flat distribution would cost ten times as much
        if len(candidates) <= _SORTED_CANDIDATES:
            break
        pivot = math.sqrt(low * high)
        is_heavy = candidates >= pivot
        heavy = candidates[is_heavy]
        mass = float(heavy.sum())
        if mass >= wanted or len(heavy) == len(candidates):
            candidates, low = heavy, pivot
        else:
            candidates, high, wanted = candidates[~is_heavy], pivot, wanted - mass
    candidates = candidates.sort(descending=True).values
    last = int(torch.searchsorted(candidates.cumsum(0, dtype=torch.float64), wanted))
    return candidates[min(last, len(candidates) - 1)]


def _invert_distribution(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the token [R] where the sum of `weights [R, blocks, _BLOCK]` so far passes the fraction `uniform [R]`.

    First the block is found, then the token in it.
    """
    sums = weights.sum(-1).cumsum(-1, dtype=torch.float64)  # [R, blocks]
    target = (uniform * sums[:, -1]).unsqueeze(1)
    block = _first_above(sums, target)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    rows = torch.arange(len(weights), device=weights.device)
    inside = weights[rows, block.squeeze(1)].cumsum(-1, dtype=torch.float64)  # [R, _BLOCK]
    return (block * _BLOCK + _first_above(inside, target - before)).squeeze(1)


def _first_above(sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the index [R, 1] of the first of the rising `sums [R, N]` above `target [R, 1]`, at most the last."""
    index = torch.searchsorted(sums, target, right=True)
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.minimum(index, last)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, position): SplitMix64 twice, so that neighbours show no pattern."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    mixed = _mix64(_mix64(seeds + golden) + positions.astype(np.uint64) * golden)
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix64(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _largest(logits: torch.Tensor) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return the token and the value of each row's largest logit: NaN or an infinity if there is one anywhere.

    numpy finds the largest of 151,936 in a tenth of torch's time (14 µs instead of 141).
    """
    rows = logits.numpy(force=True)
    token_ids = rows.argmax(-1)
    return token_ids.astype(np.int32), rows[np.arange(len(rows)), token_ids]


def _to_numpy(token_ids: torch.Tensor) -> npt.NDArray[np.int32]:
    array: npt.NDArray[np.int32] = token_ids.to("cpu", torch.int32).numpy()
    return array
