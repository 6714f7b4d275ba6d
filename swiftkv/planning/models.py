"""The sizes of one model, from its `config.json` and its part of the configuration. No weight is read."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from fractions import Fraction

from swiftkv.cache.division import PoolDivision, divide
from swiftkv.cache.geometry import KVGroup
from swiftkv.config import Config
from swiftkv.errors import CheckpointError, ConfigError
from swiftkv.hub import Checkpoint, locate_checkpoint
from swiftkv.model_config import ModelConfig
from swiftkv.models.config import DecoderConfig
from swiftkv.models.pooling import read_embedding_recipe, read_score_recipe
from swiftkv.models.registry import read_config, weight_bytes
from swiftkv.storage.buffers import page_locked_bytes
from swiftkv.storage.host_medium import chunk_bytes_for, host_tokens
from swiftkv.storage_options import FileOptions, StorageOptions, parse_storage
from swiftkv.tier_config import DEFAULT_QUEUE_BYTES, HostConfig
from swiftkv.units import DeviceShare, PoolBytes, PoolMemory, format_size


def host_chunk_bytes(groups: Collection[KVGroup]) -> int:
    """Return the size of the chunks of host memory for the blocks of these groups, which may be of several models."""
    of_windows = [group.block_bytes for group in groups if group.kind == "window"]
    return chunk_bytes_for([group.block_bytes for group in groups if group.kind != "window"], of_windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """The figures of one model that are known before it starts. Bytes are exact. Bytes and `groups` are one rank's."""

    name: str
    role: str
    checkpoint: Checkpoint
    architecture: str
    dtype: str
    groups: tuple[KVGroup, ...]
    weight_bytes: int
    unpacked_bytes: int  # the same weights in `dtype`: more bytes, if quantized weights stay quantized in memory
    memory: PoolMemory
    max_model_len: int
    max_context_len: int  # the longest context that the model was made for
    vocab_size: int
    budget_bytes: int | None = None  # the most that it lends at first; None: it cannot lend
    tensor_parallel_size: int = 1  # ranks
    device: str = "cpu"
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    host: HostConfig | None = None  # None: there is no host memory below the pool
    storage: StorageOptions | None = None  # None: there is no storage tier
    queue_bytes: int = DEFAULT_QUEUE_BYTES  # for blocks on their way down
    max_num_seqs: int = 64
    shares_extents: bool = False  # KV groups share one pool, if their blocks have an extent in common

    @property
    def division(self) -> PoolDivision:
        return divide(
            self.groups,
            max_num_seqs=self.max_num_seqs,
            enable_chunked_prefill=self.enable_chunked_prefill,
            shares_extents=self.shares_extents,
        )

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
    def has_windows(self) -> bool:
        return any(group.kind == "window" for group in self.groups)

    @property
    def storage_bytes(self) -> int | None:
        """The most bytes that the storage tier keeps; `None` if a server decides that, or there is no such tier."""
        return self.storage.size if isinstance(self.storage, FileOptions) else None

    @property
    def storage_tokens(self) -> int | None:
        """The tokens whose KV fits in the storage tier if all groups keep all blocks; window groups keep fewer."""
        if self.storage_bytes is None:
            return None
        return self.storage_bytes // (self.tensor_parallel_size * self.bytes_per_token)

    @property
    def host_bytes(self) -> int | None:
        """The host memory below the pools of all ranks of the model together; `None` if there is none."""
        return None if self.host is None else self.tensor_parallel_size * self.host.bytes_for(self._known_pool_bytes)

    @property
    def _known_pool_bytes(self) -> int | None:
        return None

    @property
    def host_tokens(self) -> int | None:
        """The tokens whose KV fits in `host_bytes` if all groups keep all blocks; window groups keep fewer."""
        if self.host_bytes is None:
            return None
        block_bytes = [group.block_bytes for group in self.groups] * self.tensor_parallel_size
        return host_tokens(self.host_bytes, host_chunk_bytes(self.groups), block_bytes, self.block_size)

    @property
    def page_locked_bytes(self) -> int:
        """The host memory for blocks on their way between a pool on a GPU and the tiers below it."""
        if not self.on_gpu or (self.host is None and self.storage is None):
            return 0
        largest = max(group.block_bytes for group in self.groups)
        return page_locked_bytes(self.queue_bytes, self.tensor_parallel_size * largest)

    @property
    def chunk_tokens(self) -> int:
        """The most tokens of one prompt that one step computes."""
        return self.max_num_batched_tokens if self.enable_chunked_prefill else self.max_model_len

    @property
    def bytes_at_rest(self) -> tuple[int, ...]:
        """The KV, in each group, that a sequence of `max_model_len` leaves for its next turn."""
        return tuple(group.blocks_at_rest(self.max_model_len) * group.block_bytes for group in self.groups)

    @property
    def bytes_in_prefill(self) -> tuple[int, ...]:
        """The most KV, in each group, that a sequence of `max_model_len` holds while its prompt is computed."""
        return tuple(
            group.blocks_in_prefill(self.max_model_len, self.chunk_tokens) * group.block_bytes for group in self.groups
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedPlan(ModelPlan):
    """The plan of a model whose pool is configured in bytes, so that its size is known before it starts."""

    group_blocks: tuple[int, ...]  # each group's blocks; the most that it can have, if groups share extents

    @property
    def num_blocks(self) -> int:
        """The number of blocks for whole sequences."""
        return self.division.sequence_blocks(self.group_blocks)

    @property
    def group_bytes(self) -> tuple[int, ...]:
        return tuple(count * group.block_bytes for count, group in zip(self.group_blocks, self.groups, strict=True))

    @property
    def borrowing_parts(self) -> tuple[Fraction, ...]:
        """Each group's part of the memory that is lent to the model."""
        return self.division.borrowing_parts(self.group_blocks)

    @property
    def pool_bytes(self) -> int:
        """The bytes that are mapped, at most what the YAML allows."""
        return self.division.pool_bytes(self.group_blocks)

    @property
    def _known_pool_bytes(self) -> int:
        return self.pool_bytes

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def longest_context(self) -> int:
        """The tokens of the longest sequence that the pool and the model allow."""
        return min(self.pool_tokens, self.max_context_len)

    @property
    def budget_part(self) -> Fraction:
        """`budget_bytes` as a part of the pool, 0 to 1."""
        return Fraction(self.budget_bytes or 0, self.pool_bytes)


def plan_model(model: ModelConfig, config: Config, need_weights: bool) -> ModelPlan:
    """Size a model by itself. Raises `ConfigError` that begins with the key below the model."""
    checkpoint, decoder = _read_checkpoint(model, config, need_weights)
    num_ranks = model.tensor_parallel_size
    groups = decoder.of_rank(num_ranks).kv_groups(model.kv_cache.block_size, model.dtype)
    memory = model.kv_cache.memory
    interval, window = model.kv_cache.retention_interval, max(group.window for group in groups)
    if interval is not None and interval < window:
        raise ConfigError(
            f"kv_cache.retention_interval: {interval} is less than the model's window of {window} tokens: tails would "
            "overlap, which costs much time and saves nothing; write at least that, or leave it out"
        )
    if model.max_model_len is not None:
        decoder.check_max_model_len(model.max_model_len)
    storage = config.storage_of(model)
    plan = ModelPlan(
        name=model.name,
        role=model.role,
        checkpoint=checkpoint,
        architecture=decoder.architecture,
        dtype=model.dtype,
        groups=groups,
        weight_bytes=_weight_bytes(model, checkpoint, decoder),
        unpacked_bytes=weight_bytes(decoder, num_ranks, model.dtype),
        memory=memory,
        max_model_len=model.max_model_len or decoder.max_context_len,
        max_context_len=decoder.max_context_len,
        vocab_size=decoder.vocab_size,
        tensor_parallel_size=num_ranks,
        device=model.device,
        max_num_batched_tokens=model.max_num_batched_tokens,
        enable_chunked_prefill=model.enable_chunked_prefill,
        host=config.host_of(model),
        storage=(None if storage is None else parse_storage(storage.backend, "tiers.storage", config.directory)),
        queue_bytes=DEFAULT_QUEUE_BYTES if storage is None else storage.queue,
        max_num_seqs=model.max_num_seqs,
        shares_extents=True,
    )
    if isinstance(memory, DeviceShare):
        return plan
    sized = _with_pool(plan, model, memory)
    if model.lending is None or not config.node.lending.enabled:
        return sized
    # The pool is the memory that the YAML gives, less a part of a block: the budget must not be larger.
    return replace(sized, budget_bytes=min(model.lending.budget.bytes_of(sized.pool_bytes), sized.pool_bytes))


def _read_checkpoint(model: ModelConfig, config: Config, need_weights: bool) -> tuple[Checkpoint, DecoderConfig]:
    """Locate a model's files, and read its shape. Raises `ConfigError` if they are missing or do not fit its task."""
    try:
        checkpoint = locate_checkpoint(model.path, config.directory, need_weights, model.revision)
        decoder = read_config(checkpoint.directory, model.task)
        if model.task == "embed":
            read_embedding_recipe(checkpoint.directory, model.matryoshka_dimensions)
        elif model.task == "score":
            read_score_recipe(checkpoint.directory)
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"path: {error}") from None
    return checkpoint, decoder


def _weight_bytes(model: ModelConfig, checkpoint: Checkpoint, decoder: DecoderConfig) -> int:
    """Return the bytes of a rank's weights. On the CPU, quantized weights stay quantized (`Ops.keeps_codes`)."""
    if model.device == "cpu" and model.dtype != "float32":
        # Files that cannot be read are counted unpacked: the engine that loads them says what is wrong.
        with contextlib.suppress(CheckpointError):
            return weight_bytes(decoder, model.tensor_parallel_size, model.dtype, checkpoint.directory)
    return weight_bytes(decoder, model.tensor_parallel_size, model.dtype)


def _with_pool(plan: ModelPlan, model: ModelConfig, memory: PoolBytes) -> SizedPlan:
    group_blocks = plan.division.group_blocks(memory.num_bytes)
    if min(group_blocks) == 0 or plan.division.sequence_blocks(group_blocks) == 0:
        raise pool_too_small(model, plan.division, 0)
    return SizedPlan(
        **{field.name: getattr(plan, field.name) for field in fields(ModelPlan)}, group_blocks=group_blocks
    )


def pool_too_small(model: ModelConfig, division: PoolDivision, pool_tokens: int) -> ConfigError:
    """Return the error for a pool whose `pool_tokens` are too few for one sequence."""
    wanted = model.max_model_len or model.kv_cache.block_size
    needed = division.pool_bytes_for_tokens(wanted)
    return ConfigError(
        f"kv_cache.memory: {model.kv_cache.memory} holds {pool_tokens} tokens, one sequence of "
        f"{wanted} needs {needed} bytes ({format_size(needed)}); raise it or lower max_model_len"
    )
