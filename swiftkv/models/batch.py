"""The tokens of one engine step, as a model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]


def fill_in_sampled(token_ids: Tensor, last_token_ids: Tensor) -> Tensor:
    """Return int32 [T]: `token_ids` with `last_token_ids[slot]` wherever there is `~slot`."""
    return torch.where(token_ids < 0, last_token_ids.index_select(0, (~token_ids).clamp(min=0)), token_ids)


class StepArrays(Protocol):
    """The part of the scheduler's plan that a model needs (`_core.StepPlan` has more)."""

    @property
    def token_ids(self) -> Int32Array:
        """The ids of tokens; `~slot`, below 0, is the token that the previous step sampled for that slot."""

    @property
    def has_unknown_tokens(self) -> bool: ...
    @property
    def positions(self) -> Int32Array: ...
    @property
    def query_starts(self) -> Int32Array: ...
    @property
    def context_lens(self) -> Int32Array: ...
    @property
    def stream_tables(self) -> Sequence[Sequence[Int32Array]]: ...
    @property
    def table_starts(self) -> Sequence[Int32Array]: ...


@dataclass(frozen=True, slots=True)
class ModelInput:
    """T tokens of S sequences, prefill and decode mixed; all int32.

    Sequence `s` brings tokens `query_starts[s]` to `query_starts[s + 1]`. They are the last of its `context_lens[s]`
    tokens, whose KV is in the pool after the step. Its blocks in KV group `g`, from position 0 on, are the entries
    `table_starts[g][s]` to `table_starts[g][s + 1]` of `stream_tables[b][g]`. An entry is the layer-block index of
    layer 0, or names a staged block (`kernels/block_table.py`). If there are B tables, layer `l` of the group reads
    table `b = l % B`. The tables differ only in where borrowed blocks are staged.
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    query_starts: Tensor  # [S + 1]
    context_lens: Tensor  # [S]
    stream_tables: tuple[tuple[Tensor, ...], ...]  # per layer-stream buffer (one if nothing is streamed), per KV group
    table_starts: tuple[Tensor, ...]  # per KV group, [S + 1]

    @classmethod
    def from_plan(cls, plan: StepArrays) -> ModelInput:
        """Return views of the plan's arrays, valid as long as these are."""
        return cls(
            token_ids=torch.from_numpy(plan.token_ids),
            positions=torch.from_numpy(plan.positions),
            query_starts=torch.from_numpy(plan.query_starts),
            context_lens=torch.from_numpy(plan.context_lens),
            stream_tables=tuple(tuple(map(torch.from_numpy, tables)) for tables in plan.stream_tables),
            table_starts=tuple(map(torch.from_numpy, plan.table_starts)),
        )
