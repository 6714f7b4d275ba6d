"""A plan as JSON objects: numbers in bytes, tokens, blocks and extents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from swiftkv.cache.division import SharedExtents
from swiftkv.config import Config
from swiftkv.planning.lending import BorrowerRoom, LendingPair
from swiftkv.planning.models import ModelPlan, SizedPlan
from swiftkv.planning.transports import describe_transports
from swiftkv.units import DeviceShare


def plan_as_dict(config: Config, plans: Sequence[ModelPlan], rooms: Sequence[BorrowerRoom]) -> dict[str, Any]:
    """Return all that is known before a node starts: sizes, lending, transports."""
    return {
        "models": [model_as_dict(plan) for plan in plans],
        "lending": lending_as_dict(rooms),
        "transports": [{"memory": memory, "choice": choice} for memory, choice in describe_transports(config, plans)],
    }


def model_as_dict(plan: ModelPlan) -> dict[str, Any]:
    """Return the sizes of one model."""
    groups = [
        {**asdict(group), "layer_block_bytes": group.layer_block_bytes, "block_bytes": group.block_bytes}
        for group in plan.groups
    ]
    return {
        "name": plan.name,
        "role": plan.role,
        "device": plan.device,
        "device_part": float(plan.memory.part) if isinstance(plan.memory, DeviceShare) else None,
        "checkpoint": str(plan.checkpoint.directory),
        "tensor_parallel_size": plan.tensor_parallel_size,
        "architecture": plan.architecture,
        "dtype": plan.dtype,
        "weight_bytes": plan.weight_bytes,
        "unpacked_weight_bytes": plan.unpacked_bytes,
        "kv_groups": groups,
        "block_size": plan.block_size,
        "num_blocks": plan.num_blocks if isinstance(plan, SizedPlan) else 0,
        "group_blocks": list(plan.group_blocks) if isinstance(plan, SizedPlan) else [],
        "shared_extent_bytes": plan.division.extent_bytes if isinstance(plan.division, SharedExtents) else None,
        "block_bytes": plan.block_bytes,
        "bytes_per_token": plan.bytes_per_token,
        "sequence_bytes_at_rest": list(plan.bytes_at_rest),
        "sequence_bytes_in_prefill": list(plan.bytes_in_prefill),
        "pool_bytes": plan.pool_bytes if isinstance(plan, SizedPlan) else 0,
        "pool_tokens": plan.pool_tokens if isinstance(plan, SizedPlan) else 0,
        "longest_context": plan.longest_context if isinstance(plan, SizedPlan) else 0,
        "max_model_len": plan.max_model_len,
        "max_context_len": plan.max_context_len,
        "lending_budget_bytes": plan.budget_bytes,
        "host_bytes": plan.host_bytes,
        "host_tokens": plan.host_tokens,
        "page_locked_bytes": plan.page_locked_bytes,
        "storage": None if plan.storage is None else plan.storage.backend,
        "storage_bytes": plan.storage_bytes,
        "storage_tokens": plan.storage_tokens,
    }


def lending_as_dict(rooms: Sequence[BorrowerRoom]) -> dict[str, Any]:
    """Return what each master can borrow."""
    return {
        "masters": [
            {
                "master": room.borrower.name,
                "without_lending": _room_as_dict(room.beside()),
                "with_lending": _room_as_dict(room),
                "pairs": [_pair_as_dict(room, pair) for pair in room.pairs],
            }
            for room in rooms
        ],
    }


def _room_as_dict(room: BorrowerRoom) -> dict[str, Any]:
    groups = []
    for i, group in enumerate(room.borrower.groups):
        n_lsc, n_rc = room.split(i)
        k_master = room.borrower.group_blocks[i] * group.num_layers
        groups.append({"k_master": k_master, "sum_k_i": room.borrowed_blocks(i), "n_lsc": n_lsc, "n_rc": n_rc})
    return {
        "kv_groups": groups,
        "sequence_tokens": room.sequence_tokens,
        "longest_context": room.longest_context,
        "cached_tokens": room.cached_tokens,
    }


def _pair_as_dict(room: BorrowerRoom, pair: LendingPair) -> dict[str, Any]:
    extent = pair.extent
    return {
        "worker": pair.lender.name,
        "master_group": pair.borrower_group,
        "worker_group": pair.lender_group,
        "master_block_bytes": extent.borrower_block_bytes,
        "worker_block_bytes": pair.lender.groups[pair.lender_group].block_bytes,
        "extent_bytes": extent.num_bytes,
        "extent_is_lcm": extent.is_lcm,
        "extent_wasted_bytes": extent.wasted_bytes,
        "meu_m": extent.meu_m,
        "meu_w": pair.meu_w,
        "budget_bytes": pair.lender.budget_bytes,
        "share": float(pair.share),
        "num_extents": pair.num_extents,
        "max_extents": pair.max_extents,
        "pool_extents": pair.pool_extents,
        "lent_bytes": pair.lent_bytes,
        "lent_blocks": pair.lent_blocks,
        "k_i": pair.borrowed_blocks,
        "this_worker_alone": _room_as_dict(room.beside(pair.lender)),
        "tokens_per_extent": pair.tokens_per_extent,
        "sequence_tokens_one_extent_less": room.sequence_tokens_after(pair, -1),
        "sequence_tokens_one_extent_more": room.sequence_tokens_after(pair, 1),
    }
