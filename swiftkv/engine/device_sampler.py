"""The sampler of an engine on a GPU: the stages of `engine/sampler.py`, in Triton kernels over the whole batch.

Requests' parameters lie on the device, a row per slot. A step's slots and positions go there in one asynchronous copy,
and its tokens come back in one; the next step reads them on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swiftkv.arithmetic import ceil_div
from swiftkv.engine.logit_edits import LogitEdits
from swiftkv.engine.messages import TokenLogprobs
from swiftkv.engine.request import Request
from swiftkv.engine.token_counts import TokenCounts
from swiftkv.engine.token_sampler import (
    FinishedSample,
    LogitRows,
    PendingSample,
    Sampled,
    split_repeated,
    temperature_of,
    top_k_of,
)
from swiftkv.kernels import triton_logprobs
from swiftkv.kernels.host_copies import download, upload
from swiftkv.kernels.triton_penalties import count_tokens, edit_logits, forbid_tokens, penalise
from swiftkv.kernels.triton_sampling import Draw, SlotParams, sample

_EDITED, _PENALISED, _LOGPROBS = 1, 2, 4

_Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Found:
    """Log-probabilities on their way to the host."""

    logprobs: Tensor  # float32 [N]
    ranks: Tensor  # int32 [N]
    top_ids: Tensor  # int32 [N, max(top_counts)]
    top_logprobs: Tensor  # float32 [N, max(top_counts)]
    top_counts: Sequence[int]

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor, top_counts: Sequence[int]) -> _Found:
        found = triton_logprobs.token_logprobs(logits, token_ids, max(top_counts))
        return cls(
            download(found.logprobs),
            download(found.ranks),
            download(found.top_ids),
            download(found.top_logprobs),
            top_counts,
        )

    def entries(self) -> list[TokenLogprobs]:
        """Return the entries; call only after the copies have ended."""
        parts = (self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        rows = zip(*(part.tolist() for part in parts), self.top_counts, strict=True)
        return [TokenLogprobs(logprob, rank, ids[:k], values[:k]) for logprob, rank, ids, values, k in rows]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A `PendingSample`: tokens on their way to the host."""

    drawn: Tensor  # int32 [2, R]: token ids, and whether their logits were broken
    rows: Sequence[int]  # the rows that asked for log-probabilities
    found: _Found | None

    def result(self) -> Sampled:
        entries = [] if self.found is None else self.found.entries()
        logprobs = dict(zip(self.rows, entries, strict=True))
        return Sampled(self.drawn[0].numpy(), logprobs, self.drawn[1].numpy().astype(np.bool_))


def _joined(draws: Sequence[Draw]) -> Draw:
    if len(draws) == 1:
        return draws[0]
    return Draw(torch.cat([draw.token_ids for draw in draws]), torch.cat([draw.is_broken for draw in draws]))


def _set(values: Tensor, slot: int, value: float) -> None:
    """Set a slot's value without making the host wait: an assignment would copy it from the host, after all steps."""
    values[slot].fill_(value)


class DeviceSampler:
    """A `TokenSampler` that samples the same tokens as `Sampler`, except for rounding at the edges of filters."""

    def __init__(self, vocab_size: int, last_token_ids: Tensor) -> None:
        max_num_seqs, device = len(last_token_ids), last_token_ids.device
        self._vocab_size = vocab_size
        self._device = device
        self._last_token_ids = last_token_ids
        self._params = SlotParams.empty(max_num_seqs, vocab_size, device)
        self._flags = np.zeros(max_num_seqs, np.uint8)
        self._logprob_counts = np.zeros(max_num_seqs, np.int32)
        self._edits: dict[int, LogitEdits] = {}  # by slot
        self._counts = TokenCounts(max_num_seqs, vocab_size, device)
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile every kernel that a step may launch, so that no request waits for a compilation.

        Kernels are compiled a second time for logits that do not begin at a multiple of 16 bytes, as some rows do if
        the size of the vocabulary is odd.
        """
        vocab_size, device = self._vocab_size, self._device
        counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)
        all_logits = torch.zeros(2, vocab_size, device=device)
        for logits in (all_logits, all_logits[1:]):
            zeros = torch.zeros(len(logits), dtype=torch.int32, device=device)  # slot 0 has no penalties to count for
            forbid_tokens(logits, zeros, zeros.new_zeros(len(logits), ceil_div(vocab_size, 32)))
            edit_logits(logits, zeros[:1], zeros[:1], zeros[:1].float(), zeros[:1], zeros)
            penalise(logits, self._params, zeros, counts, counts.bool())
            draw = sample(logits, self._params, zeros, zeros)
            count_tokens(counts, self._params, zeros, draw.token_ids)
            for num_top in triton_logprobs.TOP_TILES:
                triton_logprobs.token_logprobs(logits, draw.token_ids, num_top)

    def seat(self, slot: int, request: Request) -> None:
        asked, params = request.sampling, self._params
        _set(params.temperature, slot, temperature_of(asked))
        _set(params.top_k, slot, top_k_of(asked, self._vocab_size))
        _set(params.top_p, slot, asked.top_p)
        _set(params.min_p, slot, asked.min_p)
        _set(params.seeds, slot, int(np.uint64(request.seed).astype(np.int64)))
        self._logprob_counts[slot] = asked.logprobs or 0
        self._flags[slot] = _LOGPROBS * (asked.logprobs is not None)
        self._edits.pop(slot, None)
        if (edits := LogitEdits.of(request)) is not None:
            self._flags[slot] |= _EDITED
            self._edits[slot] = edits
        has_penalties = self._counts.seat(slot, request)
        _set(params.is_penalised, slot, has_penalties)
        if has_penalties:
            self._flags[slot] |= _PENALISED
            _set(params.presence, slot, asked.presence_penalty)
            _set(params.frequency, slot, asked.frequency_penalty)
            _set(params.repetition, slot, asked.repetition_penalty)

    def park(self, slot: int, request: Request) -> None:
        self._counts.park(slot, request.request_id)

    def release(self, request_id: int) -> None:
        self._counts.release(request_id)

    def sample(self, rows: LogitRows) -> PendingSample:
        logits, slots, masks = rows.logits, rows.slots, rows.masks
        if not len(slots):
            return FinishedSample(Sampled(np.empty(0, np.int32), {}, np.empty(0, np.bool_)))
        flags = self._flags[slots]
        device_slots, device_positions = upload(np.stack((slots, rows.positions)), self._device)
        asked = np.flatnonzero(flags & _LOGPROBS)
        asked_rows = upload(asked.astype(np.int32), self._device) if len(asked) else None
        raw_logits = None if asked_rows is None else logits.index_select(0, asked_rows)
        if masks is not None:
            forbid_tokens(logits, upload(masks.rows, self._device), upload(masks.bits.view(np.int32), self._device))
        if np.any(flags & _EDITED):
            self._edit(logits, slots, device_positions)
        if np.any(flags & _PENALISED):
            parts = split_repeated(slots, (flags & _PENALISED) > 0)
            draw = _joined([self._draw_penalised(logits[p], device_slots[p], device_positions[p]) for p in parts])
        else:
            draw = sample(logits, self._params, device_slots, device_positions)
        self._last_token_ids.index_copy_(0, device_slots.long(), draw.token_ids)
        drawn = download(torch.stack((draw.token_ids, draw.is_broken.int())))
        if asked_rows is None or raw_logits is None:
            return _Drawn(drawn, [], None)
        counts = self._logprob_counts[slots[asked]].tolist()
        return _Drawn(drawn, asked.tolist(), _Found.of(raw_logits, draw.token_ids.index_select(0, asked_rows), counts))

    def _draw_penalised(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Draw:
        """Draw for rows in which no slot with penalties occurs twice."""
        penalise(logits, self._params, slots, self._counts.outputs, self._counts.in_prompt)
        draw = sample(logits, self._params, slots, positions)
        count_tokens(self._counts.outputs, self._params, slots, draw.token_ids)
        return draw

    def retract(self, slots: _Int32Array, token_ids: _Int32Array) -> None:
        self._counts.retract(slots, token_ids)

    def token_logprobs(self, logits: Tensor, token_ids: _Int32Array, top_counts: Sequence[int]) -> list[TokenLogprobs]:
        found = _Found.of(logits, upload(token_ids, self._device), top_counts)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return found.entries()

    def _edit(self, logits: Tensor, slots: _Int32Array, positions: Tensor) -> None:
        rows = np.flatnonzero(self._flags[slots] & _EDITED)
        edits = [self._edits[slot] for slot in slots[rows].tolist()]
        counts = [len(edit.token_ids) for edit in edits]
        of_row, token_ids, min_positions = upload(
            np.stack(
                (
                    np.repeat(rows, counts).astype(np.int32),
                    np.concatenate([edit.token_ids for edit in edits]),
                    np.concatenate([edit.min_positions for edit in edits]),
                )
            ),
            self._device,
        )
        biases = upload(np.concatenate([edit.biases for edit in edits]), self._device)
        edit_logits(logits, of_row, token_ids, biases, min_positions, positions)
