"""The model, its pool, and what a step of the scheduler looks like to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from swiftkv._core import GroupSpec, StepPlan
from swiftkv.cache.geometry import (
    KVGroup,
    blocks_for_tokens,
    blocks_in_pool,
    pool_bytes_for_tokens,
    split_pool,
)
from swiftkv.cache.pool import Pool
from swiftkv.engine.messages import EngineConfig
from swiftkv.errors import ConfigError
from swiftkv.master.layer_stream import LayerStream
from swiftkv.models.batch import ModelInput, upload
from swiftkv.models.config import DecoderConfig
from swiftkv.models.dense import DenseDecoder
from swiftkv.models.loader import MappedWeights
from swiftkv.transport.base import Transport


class ModelRunner:
    """Owns the weights and the pool; to be called in inference mode.

    Raises `ConfigError` or `CheckpointError` when they cannot be had.
    """

    def __init__(self, config: EngineConfig) -> None:
        path = Path(config.path)
        model_config = DecoderConfig.from_pretrained(path)
        groups = model_config.kv_groups(config.block_size, config.dtype)
        _check_room(config, groups)
        self.vocab_size = model_config.vocab_size
        self.eos_token_ids = model_config.eos_token_ids
        self.device = torch.device(config.device)
        self.num_blocks = blocks_in_pool(config.kv_bytes, groups)
        self.pool = Pool([(group, self.num_blocks) for group in groups], config.name)
        self.group_specs = [
            GroupSpec(g.num_layers, self.num_blocks, g.window, g.layer_block_bytes, region.base_offset_bytes)
            for g, region in zip(groups, self.pool.regions, strict=True)
        ]
        self.layer_stream: LayerStream | None = None
        self._groups = groups
        self._model = DenseDecoder(
            model_config,
            MappedWeights(path),
            getattr(torch, config.dtype),
            self.device,
            config.max_model_len,
            config.block_size,
        )
        self.kernels = self._model.ops.name
        self._model.ops.set_num_threads(config.threads)
        self.pool.prefault()

    def stream_through(self, transport: Transport) -> None:
        """From now on plans may name blocks that lie in peers' pools, reached through `transport`."""
        self.layer_stream = LayerStream(transport, self._groups)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Hidden states [T, hidden] of the step's tokens; their KV is where the plan wants it afterwards.

        Raises `TransferError` if a copy failed: nothing of the step counts, and nothing is in flight.
        """
        batch = ModelInput.from_plan(plan)
        if self.device.type == "cuda":
            batch = replace(batch, token_ids=upload(plan.token_ids, self.device))
        if self.layer_stream is None:
            return self._model.forward(batch, self.pool.tensor)
        if not len(plan.token_ids):
            self.layer_stream.run_copies_only(plan)
            return torch.empty(0, 0, device=self.device)
        with self.layer_stream.step(plan) as stream:
            return self._model.forward(batch, self.pool.tensor, stream)

    def logits(self, hidden: torch.Tensor, rows: npt.NDArray[np.int32] | slice) -> torch.Tensor:
        """float32 [R, vocab] of the given rows of `hidden`."""
        if isinstance(rows, slice):
            return self._model.logits(hidden[rows])
        if not len(rows):
            return torch.empty(0, self.vocab_size, device=self.device)
        if len(rows) < len(hidden):  # else it is all of them, in order
            hidden = hidden.index_select(0, upload(rows, self.device))
        return self._model.logits(hidden)


def _check_room(config: EngineConfig, groups: Sequence[KVGroup]) -> None:
    """One sequence of `max_model_len` must fit in the pool and in all that lenders have, whatever they lend now.

    Raises `ConfigError`.
    """
    num_blocks = blocks_in_pool(config.kv_bytes, groups)
    links = [link for peer in (config.lending.lenders if config.lending else []) for link in peer.links]
    for i, group in enumerate(groups):
        borrowed = [link.num_extents * link.meu_m for link in links if link.borrower_group == i]
        room = sum(split_pool(num_blocks * group.num_layers, borrowed, group.num_layers))
        if room < blocks_for_tokens(config.max_model_len, config.block_size):
            raise ConfigError(
                f"kv_cache.memory: one sequence of max_model_len {config.max_model_len} needs "
                f"{pool_bytes_for_tokens(config.max_model_len, groups)} bytes, not {config.kv_bytes}"
                + (", and all that could be lent to it is not enough" if links else "")
            )
