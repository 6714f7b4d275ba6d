"""What a configuration comes to, from `config.json` files alone: nothing is started, no weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from swiftkv.cache.geometry import (
    DTYPE_BYTES,
    Extent,
    KVGroup,
    blocks_in_pool,
    extent_between,
    pool_bytes_for_tokens,
    split_pool,
)
from swiftkv.config import Config, ModelConfig, format_size
from swiftkv.errors import CheckpointError, ConfigError
from swiftkv.hub import Checkpoint, locate_checkpoint
from swiftkv.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model's sizes. Bytes are exact; `pool_bytes` is what is mapped, at most what the YAML allows.

    Bytes are of one rank, as are `groups`: each has as many blocks of its own heads.
    """

    name: str
    role: str
    checkpoint: Checkpoint
    architecture: str
    dtype: str
    groups: tuple[KVGroup, ...]
    weight_bytes: int
    num_blocks: int  # of each group
    max_model_len: int
    max_context_len: int  # that the model was made for
    vocab_size: int
    budget_bytes: int | None  # the most that it lends at first; None: it cannot lend
    tensor_parallel_size: int = 1  # ranks
    device: str = "cpu"
    device_part: Fraction | None = None  # of the device, for the whole engine: `num_blocks` is 0, known once it runs

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def block_size(self) -> int:
        return self.groups[0].block_size

    @property
    def block_bytes(self) -> int:
        return sum(group.block_bytes for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence that the pool and the model allow."""
        return min(self.pool_tokens, self.max_context_len)

    @property
    def budget_part(self) -> Fraction:
        """`budget_bytes` as a part of the pool, 0 to 1."""
        return Fraction(self.budget_bytes or 0, self.pool_bytes)


@dataclass(frozen=True, slots=True)
class LendingPair:
    """What one KV group of a worker lends to one of a master: whole extents, as many as its share of the budget allows.

    `share` is the part of the worker's budget that this pair gets: every master gets as much, and in it every group
    as much as its blocks are of a token's bytes.
    """

    master: ModelPlan
    master_group: int  # index into `master.groups`
    worker: ModelPlan
    worker_group: int
    share: Fraction
    extent: Extent
    num_extents: int

    @property
    def max_extents(self) -> int:
        """Extents that it has at a budget of the worker's whole pool."""
        return self.extent.count_within(self.worker.pool_bytes * self.share)

    @property
    def pool_extents(self) -> int:
        """Extents that the worker's group consists of, whatever the budget: any of them may be lent."""
        return self.worker.num_blocks // self.extent.meu_w

    @property
    def can_lend(self) -> bool:
        """Whether a budget, now or later, may move an extent from this worker to this master."""
        return self.worker.budget_bytes is not None and self.pool_extents > 0

    @property
    def lent_blocks(self) -> int:
        """Blocks of the worker."""
        return self.num_extents * self.extent.meu_w

    @property
    def lent_bytes(self) -> int:
        return self.num_extents * self.extent.num_bytes

    @property
    def borrowed_blocks(self) -> int:
        """`K_i`: blocks of the master (Eq. 2, rounded down to extents)."""
        return self.num_extents * self.extent.meu_m

    @property
    def tokens_per_extent(self) -> int:
        """Tokens of the master that one extent holds."""
        return self.extent.meu_m * self.master.block_size


@dataclass(frozen=True, slots=True)
class MasterRoom:
    """How a master's pool is divided while it borrows from `pairs`, and what fits then.

    With one layer-stream buffer: where two fit, the scheduler takes two, which shortens no context.
    """

    master: ModelPlan
    pairs: tuple[LendingPair, ...]

    def borrowed_blocks(self, group: int) -> int:
        """`K_i` of all lenders together."""
        return sum(pair.borrowed_blocks for pair in self.pairs if pair.master_group == group)

    def split(self, group: int) -> tuple[int, int]:
        """`(N_LSC, N_RC)` of one of the master's KV groups (Eqs. 4 and 5)."""
        num_layers = self.master.groups[group].num_layers
        return split_pool(self.master.num_blocks * num_layers, [self.borrowed_blocks(group)], num_layers)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the longest sequence that the memory allows."""
        return self.master.block_size * min(sum(self.split(group)) for group in range(len(self.master.groups)))

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence that memory and model allow."""
        return min(self.sequence_tokens, self.master.max_context_len)

    @property
    def cached_tokens(self) -> int:
        """Tokens of all sequences together; more than `sequence_tokens` where the layer-stream cache is the limit."""
        groups = range(len(self.master.groups))
        return self.master.block_size * min(self.split(group)[1] + self.borrowed_blocks(group) for group in groups)

    @property
    def lent_bytes(self) -> int:
        return sum(pair.lent_bytes for pair in self.pairs)

    def beside(self, *workers: ModelPlan) -> MasterRoom:
        """As if nobody else lent."""
        return replace(self, pairs=tuple(pair for pair in self.pairs if pair.worker in workers))

    def sequence_tokens_after(self, pair: LendingPair, extents: int) -> int | None:
        """`sequence_tokens` if `pair` lent `extents` more (or fewer); None if it cannot."""
        num_extents = pair.num_extents + extents
        if not 0 <= num_extents <= pair.max_extents:
            return None
        changed = replace(pair, num_extents=num_extents)
        return replace(self, pairs=tuple(changed if p is pair else p for p in self.pairs)).sequence_tokens


def plan_lending(plans: Sequence[ModelPlan]) -> tuple[MasterRoom, ...]:
    """Every master of a node beside every worker in the same kind of memory, the host's or GPUs'.

    A worker's budget is divided evenly among these masters. Pools of a size that is not known yet lend and borrow
    nothing.
    """
    planned = [plan for plan in plans if plan.num_blocks]
    rooms = []
    for master in planned:
        beside = [plan for plan in planned if plan.on_gpu == master.on_gpu]
        workers = [plan for plan in beside if plan.role == "worker"]
        if master.role == "master" and workers:
            num_masters = sum(plan.role == "master" for plan in beside)
            pairs = tuple(pair for worker in workers for pair in _pairs(master, worker, num_masters))
            rooms.append(MasterRoom(master, pairs))
    return tuple(rooms)


def _pairs(master: ModelPlan, worker: ModelPlan, num_masters: int) -> list[LendingPair]:
    pairs = []
    for i, lender in enumerate(worker.groups):
        for j, borrower in enumerate(master.groups):
            extent = extent_between(lender.block_bytes, borrower.block_bytes)
            share = _part(worker, i) * _part(master, j) / num_masters
            num_extents = extent.count_within((worker.budget_bytes or 0) * share)
            pairs.append(LendingPair(master, j, worker, i, share, extent, num_extents))
    return pairs


def _part(plan: ModelPlan, group: int) -> Fraction:
    """The part of a model's KV bytes that one of its KV groups has: a token needs a slot in each."""
    return Fraction(plan.groups[group].block_bytes, plan.block_bytes)


def plan_node(config: Config, need_weights: bool) -> tuple[ModelPlan, ...]:
    """Size every model of `config`, in its order.

    `need_weights`: the checkpoints must be complete, as for serving. Raises `ConfigError`, one line per mistake.
    """
    plans: list[ModelPlan] = []
    mistakes = []
    for i, model in enumerate(config.models):
        try:
            plans.append(_plan_model(model, config, need_weights))
        except ConfigError as error:
            mistakes.append(f"models[{i}].{error}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    rooms = {room.master.name: room for room in plan_lending(plans)}
    for i, model in enumerate(config.models):
        try:
            plans[i] = _with_max_model_len(plans[i], model, rooms.get(model.name) or MasterRoom(plans[i], ()))
        except ConfigError as error:
            mistakes.append(f"models[{i}].{error}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return tuple(plans)


def _plan_model(model: ModelConfig, config: Config, need_weights: bool) -> ModelPlan:
    """The model by itself. Raises `ConfigError` that begins with the key below the model."""
    try:
        checkpoint = locate_checkpoint(model.path, config.directory, need_weights, model.revision)
        decoder = DecoderConfig.from_pretrained(checkpoint.directory)
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"path: {error}") from None
    num_ranks = model.tensor_parallel_size
    groups = decoder.of_rank(num_ranks).kv_groups(model.kv_cache.block_size, model.dtype)
    memory = model.kv_cache.memory
    num_blocks = blocks_in_pool(memory, groups) if isinstance(memory, int) else 0
    if model.max_model_len is not None:
        decoder.check_max_model_len(model.max_model_len)
    if isinstance(memory, int) and num_blocks == 0:
        raise _pool_too_small(model, memory, groups, 0)
    plan = ModelPlan(
        name=model.name,
        role=model.role,
        checkpoint=checkpoint,
        architecture=decoder.architecture,
        dtype=model.dtype,
        groups=groups,
        weight_bytes=_num_parameters(decoder, num_ranks) * DTYPE_BYTES[model.dtype],
        num_blocks=num_blocks,
        max_model_len=model.max_model_len or decoder.max_context_len,
        max_context_len=decoder.max_context_len,
        vocab_size=decoder.vocab_size,
        budget_bytes=None,
        tensor_parallel_size=num_ranks,
        device=model.device,
        device_part=None if isinstance(memory, int) else memory,
    )
    if model.lending is None or not config.node.lending.enabled:
        return plan
    # What YAML allows may be more than the pool by less than a block.
    budget_bytes = min(model.lending.budget.bytes_of(plan.pool_bytes), plan.pool_bytes)
    return replace(plan, budget_bytes=budget_bytes)


def _with_max_model_len(plan: ModelPlan, model: ModelConfig, room: MasterRoom) -> ModelPlan:
    """`plan` with what fits in its pool and in what the configured budgets promise it; see `_plan_model`."""
    asked, memory = model.max_model_len, model.kv_cache.memory
    if not isinstance(memory, int):  # the engine finds out
        return plan
    if asked is None or asked <= room.sequence_tokens:
        return replace(plan, max_model_len=asked or room.longest_context)
    if not room.lent_bytes:
        raise _pool_too_small(model, memory, plan.groups, plan.pool_tokens)
    lenders = ", ".join(dict.fromkeys(pair.worker.name for pair in room.pairs if pair.num_extents))
    raise ConfigError(
        f"max_model_len: {asked} is more than the {room.sequence_tokens} tokens that fit: kv_cache.memory holds "
        f"{plan.pool_tokens}, what {lenders} may lend brings the rest; lower it, or raise kv_cache.memory or a "
        "worker's lending.budget"
    )


def _pool_too_small(model: ModelConfig, memory: int, groups: Sequence[KVGroup], pool_tokens: int) -> ConfigError:
    wanted = model.max_model_len or model.kv_cache.block_size
    needed = pool_bytes_for_tokens(wanted, groups)
    return ConfigError(
        f"kv_cache.memory: {format_size(memory)} holds {pool_tokens} tokens, one sequence of "
        f"{wanted} needs {needed} bytes ({format_size(needed)}); raise it or lower max_model_len"
    )


def _num_parameters(decoder: DecoderConfig, num_ranks: int) -> int:
    """Of one rank. Matrices only: norms and biases are under a thousandth of them."""
    part, hidden = decoder.of_rank(num_ranks), decoder.hidden_size
    attention = 2 * hidden * part.head_dim * (part.num_heads + part.num_kv_heads)
    mlp = 3 * hidden * part.intermediate_size
    embedding = decoder.vocab_size * hidden  # on every rank
    is_head_too = decoder.tie_word_embeddings and num_ranks == 1
    lm_head = 0 if is_head_too else -(-decoder.vocab_size // num_ranks) * hidden
    return decoder.num_layers * (attention + mlp) + embedding + lm_head


def plan_as_dict(plan: ModelPlan) -> dict[str, Any]:
    """The plan for machines: numbers in bytes, tokens and blocks."""
    groups = [
        {**asdict(group), "layer_block_bytes": group.layer_block_bytes, "block_bytes": group.block_bytes}
        for group in plan.groups
    ]
    return {
        "name": plan.name,
        "role": plan.role,
        "device": plan.device,
        "device_part": None if plan.device_part is None else float(plan.device_part),
        "checkpoint": str(plan.checkpoint.directory),
        "tensor_parallel_size": plan.tensor_parallel_size,
        "architecture": plan.architecture,
        "dtype": plan.dtype,
        "weight_bytes": plan.weight_bytes,
        "kv_groups": groups,
        "block_size": plan.block_size,
        "num_blocks": plan.num_blocks,
        "block_bytes": plan.block_bytes,
        "bytes_per_token": plan.bytes_per_token,
        "pool_bytes": plan.pool_bytes,
        "pool_tokens": plan.pool_tokens,
        "longest_context": plan.longest_context,
        "max_model_len": plan.max_model_len,
        "max_context_len": plan.max_context_len,
        "lending_budget_bytes": plan.budget_bytes,
    }


def lending_as_dict(rooms: Sequence[MasterRoom]) -> dict[str, Any]:
    """What each master can borrow, for machines: numbers in bytes, tokens, blocks and extents."""
    return {
        "masters": [
            {
                "master": room.master.name,
                "without_lending": _room_as_dict(room.beside()),
                "with_lending": _room_as_dict(room),
                "pairs": [_pair_as_dict(room, pair) for pair in room.pairs],
            }
            for room in rooms
        ],
    }


def _room_as_dict(room: MasterRoom) -> dict[str, Any]:
    groups = []
    for i, group in enumerate(room.master.groups):
        n_lsc, n_rc = room.split(i)
        k_master = room.master.num_blocks * group.num_layers
        groups.append({"k_master": k_master, "sum_k_i": room.borrowed_blocks(i), "n_lsc": n_lsc, "n_rc": n_rc})
    return {
        "kv_groups": groups,
        "sequence_tokens": room.sequence_tokens,
        "longest_context": room.longest_context,
        "cached_tokens": room.cached_tokens,
    }


def _pair_as_dict(room: MasterRoom, pair: LendingPair) -> dict[str, Any]:
    extent = pair.extent
    return {
        "worker": pair.worker.name,
        "master_group": pair.master_group,
        "worker_group": pair.worker_group,
        "master_block_bytes": extent.borrower_block_bytes,
        "worker_block_bytes": extent.lender_block_bytes,
        "extent_bytes": extent.num_bytes,
        "extent_is_lcm": extent.is_lcm,
        "extent_wasted_bytes": extent.wasted_bytes,
        "meu_m": extent.meu_m,
        "meu_w": extent.meu_w,
        "budget_bytes": pair.worker.budget_bytes,
        "share": float(pair.share),
        "num_extents": pair.num_extents,
        "max_extents": pair.max_extents,
        "pool_extents": pair.pool_extents,
        "lent_bytes": pair.lent_bytes,
        "lent_blocks": pair.lent_blocks,
        "k_i": pair.borrowed_blocks,
        "this_worker_alone": _room_as_dict(room.beside(pair.worker)),
        "tokens_per_extent": pair.tokens_per_extent,
        "sequence_tokens_one_extent_less": room.sequence_tokens_after(pair, -1),
        "sequence_tokens_one_extent_more": room.sequence_tokens_after(pair, 1),
    }
