"""The sizes of one model, from its `config.json` and its part of the configuration: no weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from swiftkv.arithmetic import ceil_div
from swiftkv.cache.geometry import DTYPE_BYTES, KVGroup, blocks_in_pool, pool_bytes_for_tokens
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


def plan_model(model: ModelConfig, config: Config, need_weights: bool) -> ModelPlan:
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
        raise pool_too_small(model, memory, groups, 0)
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


def pool_too_small(model: ModelConfig, memory: int, groups: Sequence[KVGroup], pool_tokens: int) -> ConfigError:
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
    lm_head = 0 if is_head_too else ceil_div(decoder.vocab_size, num_ranks) * hidden
    return decoder.num_layers * (attention + mlp) + embedding + lm_head
