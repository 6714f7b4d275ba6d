"""What a configuration comes to, from `config.json` files alone: nothing is started, no weight is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swiftkv.cache.geometry import DTYPE_BYTES, KVGroup, blocks_in_pool, pool_bytes_for_tokens
from swiftkv.config import Config, ModelConfig, format_size
from swiftkv.errors import CheckpointError, ConfigError
from swiftkv.hub import locate_checkpoint
from swiftkv.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model's sizes. Bytes are exact; `pool_bytes` is what is mapped, at most what the YAML allows."""

    name: str
    role: str
    checkpoint: Path
    architecture: str
    dtype: str
    groups: tuple[KVGroup, ...]
    weight_bytes: int
    num_blocks: int  # of each group
    max_model_len: int
    max_context_len: int  # that the model was made for
    vocab_size: int

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


def plan_node(config: Config, need_weights: bool) -> tuple[ModelPlan, ...]:
    """Size every model of `config`, in its order.

    `need_weights`: the checkpoints must be complete, as for serving. Raises `ConfigError`, one line per mistake.
    """
    plans = []
    mistakes = []
    for i, model in enumerate(config.models):
        try:
            plans.append(_plan_model(model, config.directory, need_weights))
        except ConfigError as error:
            mistakes.append(f"models[{i}].{error}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return tuple(plans)


def _plan_model(model: ModelConfig, directory: Path, need_weights: bool) -> ModelPlan:
    """Raises `ConfigError` that begins with the key below the model."""
    try:
        checkpoint = locate_checkpoint(model.path, directory, need_weights)
        decoder = DecoderConfig.from_pretrained(checkpoint)
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"path: {error}") from None
    groups = decoder.kv_groups(model.kv_cache.block_size, model.dtype)
    num_blocks = blocks_in_pool(model.kv_cache.memory, groups)
    return ModelPlan(
        name=model.name,
        role=model.role,
        checkpoint=checkpoint,
        architecture=decoder.architecture,
        dtype=model.dtype,
        groups=groups,
        weight_bytes=_num_parameters(decoder) * DTYPE_BYTES[model.dtype],
        num_blocks=num_blocks,
        max_model_len=_max_model_len(model, decoder, groups, num_blocks),
        max_context_len=decoder.max_context_len,
        vocab_size=decoder.vocab_size,
    )


def _max_model_len(model: ModelConfig, decoder: DecoderConfig, groups: tuple[KVGroup, ...], num_blocks: int) -> int:
    positions = decoder.max_context_len
    asked = model.max_model_len
    if asked is not None:
        decoder.check_max_model_len(asked)
    pool_tokens = num_blocks * model.kv_cache.block_size
    if num_blocks == 0 or (asked is not None and asked > pool_tokens):
        wanted = asked or model.kv_cache.block_size
        needed = pool_bytes_for_tokens(wanted, groups)
        raise ConfigError(
            f"kv_cache.memory: {format_size(model.kv_cache.memory)} holds {pool_tokens} tokens, one sequence of "
            f"{wanted} needs {needed} bytes ({format_size(needed)}); raise it or lower max_model_len"
        )
    return asked or min(positions, pool_tokens)


def _num_parameters(decoder: DecoderConfig) -> int:
    """Matrices only: norms and biases are under a thousandth of them."""
    hidden = decoder.hidden_size
    attention = 2 * hidden * decoder.head_dim * (decoder.num_heads + decoder.num_kv_heads)
    mlp = 3 * hidden * decoder.intermediate_size
    embeddings = decoder.vocab_size * hidden * (1 if decoder.tie_word_embeddings else 2)
    return decoder.num_layers * (attention + mlp) + embeddings


def plan_as_dict(plan: ModelPlan) -> dict[str, Any]:
    """The plan for machines: numbers in bytes, tokens and blocks."""
    groups = [
        {**asdict(group), "layer_block_bytes": group.layer_block_bytes, "block_bytes": group.block_bytes}
        for group in plan.groups
    ]
    return {
        "name": plan.name,
        "role": plan.role,
        "checkpoint": str(plan.checkpoint),
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
    }
