"""The shape of a model, as the file of its family reads it. Imports no torch: `swiftkv plan` is quick."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from swiftkv.cache.geometry import KVGroup
from swiftkv.errors import ConfigError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]

_MAX_RANKS = 8


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, under the names that `config.json` uses. A type reads only the fields that it has."""

    rope_type: RopeType
    theta: float
    max_position_embeddings: int
    original_max_position_embeddings: int
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, as all below
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def scaled_positions(self) -> int:
        """The number of positions that the scaling is meant for."""
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            return max(self.max_position_embeddings, int(self.original_max_position_embeddings * self.factor))
        return self.max_position_embeddings


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a model. A family that needs more of it, or has several KV groups, derives a class of its own."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    max_position_embeddings: int
    sliding_window: int | None  # None: no layer has one
    eos_token_ids: tuple[int, ...]

    @property
    def max_context_len(self) -> int:
        """The longest context that can be served: up to its length, a sliding window changes nothing."""
        return min(self.rope.scaled_positions, self.sliding_window or self.rope.scaled_positions)

    def check_max_model_len(self, max_model_len: int) -> None:
        """Raise `ConfigError` if sequences of `max_model_len` tokens are more than the model or this server can do."""
        if self.sliding_window is not None and max_model_len > self.sliding_window:
            raise ConfigError(
                f"max_model_len: {max_model_len} is more than the model's sliding_window, and sliding windows are not "
                f"supported: at most {self.sliding_window}"
            )
        if max_model_len > self.max_context_len:
            raise ConfigError(
                f"max_model_len: {max_model_len} is more than the {self.max_context_len} positions that the model has"
            )

    def kv_groups(self, block_size: int, dtype: str) -> tuple[KVGroup, ...]:
        """Return the layers by attention kind, here all in one group. `dtype` is a key of `DTYPE_BYTES`."""
        return (KVGroup(tuple(range(self.num_layers)), self.num_kv_heads, self.head_dim, dtype, block_size),)

    def of_rank(self, num_ranks: int) -> DecoderConfig:
        """Return the shape of the part that each of `num_ranks` tensor-parallel ranks has: its heads and its MLP.

        Ranks share KV heads where there are fewer of them. Raises `ConfigError` for a number that does not divide.
        """
        if not self._can_divide(num_ranks):
            possible = ", ".join(str(n) for n in range(1, _MAX_RANKS + 1) if self._can_divide(n))
            raise ConfigError(
                f"tensor_parallel_size: {num_ranks} ranks cannot divide {self.num_heads} heads, {self.num_kv_heads} KV "
                f"heads and an intermediate_size of {self.intermediate_size} evenly; possible: {possible}"
            )
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=max(1, self.num_kv_heads // num_ranks),
            intermediate_size=self.intermediate_size // num_ranks,
        )

    def _can_divide(self, num_ranks: int) -> bool:
        more, fewer = max(self.num_kv_heads, num_ranks), min(self.num_kv_heads, num_ranks)
        return self.num_heads % num_ranks == self.intermediate_size % num_ranks == more % fewer == 0
