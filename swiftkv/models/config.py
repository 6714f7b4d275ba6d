"""The shape of a model, as the file of its family reads it. Imports no torch, so that `swiftkv plan` is quick."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, TypeVar

from swiftkv.cache.geometry import KVGroup, KVKind
from swiftkv.errors import ConfigError
from swiftkv.kernels.experts import SILU, GatedActivation
from swiftkv.models.quantization import QWeights

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]

_MAX_RANKS = 8

_Config = TypeVar("_Config", bound="DecoderConfig")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, under the names that `config.json` uses. Each type reads only its own fields."""

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
    partial_rotary_factor: float = 1.0  # the part of a head that is rotated: its first dimensions

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of dimensions of a head that are rotated, from its first one on."""
        return int(head_dim * self.partial_rotary_factor)

    @property
    def scaled_positions(self) -> int:
        """The length, in tokens, of the longest sequence that the scaled embedding is meant for."""
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            return max(self.max_position_embeddings, int(self.original_max_position_embeddings * self.factor))
        return self.max_position_embeddings


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The attention of some of a model's layers. Their KV is one KV group."""

    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int  # the size of a query and of a key
    rope: RopeConfig
    window: int = 0  # tokens that a query sees, itself included; 0: all of them
    scale: float | None = None  # multiplies query · key; None: head_dim ** -0.5
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0: unchanged
    v_head_dim: int | None = None  # the size of a value; None: head_dim
    sinks: str | None = None  # the tensor of each head's score for one more key, whose value is zero; None: no such key
    value_scale: float = 1.0  # multiplies attended values; the cache has unscaled ones

    def __post_init__(self) -> None:
        assert self.layers

    @property
    def value_head_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    def kv_group(self, block_size: int, dtype: str) -> KVGroup:
        """Return the KV group of these layers. `dtype` is a key of `DTYPE_BYTES`."""
        kind: KVKind = "window" if self.window else "full"
        return KVGroup(
            self.layers, self.num_kv_heads, self.head_dim, dtype, block_size, kind, self.window, self.v_head_dim
        )


def divided(full: AttentionKind, windowed: AttentionKind, window_layers: Iterable[int]) -> tuple[AttentionKind, ...]:
    """Divide the layers of a model: `window_layers` are `windowed`, and the others are `full`."""
    chosen = frozenset(window_layers)
    others = tuple(layer for layer in full.layers if layer not in chosen)
    within = tuple(layer for layer in full.layers if layer in chosen)
    return tuple(replace(kind, layers=layers) for kind, layers in ((full, others), (windowed, within)) if layers)


def with_window(kind: AttentionKind, layers: Iterable[int], window: int | None) -> tuple[AttentionKind, ...]:
    """Divide a kind: `layers` get the window, and the others see everything.

    A window as long as any sequence changes nothing.
    """
    if not window or window >= kind.rope.scaled_positions:
        return (kind,)
    return divided(kind, replace(kind, window=window), layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a model. A family that needs more fields derives a class of its own."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    attention: tuple[AttentionKind, ...]  # every layer is of one kind; in the order of the pool's KV groups
    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    norm_offset: float | None = None  # norms multiply by offset + weight in float32; None: by the weight, in its dtype
    activation: GatedActivation = SILU  # used by MLPs and experts
    embedding_scale: float = 1.0
    has_head: bool = True  # an embedding model has none, and ends with its last norm
    prefix: str = ""  # what tensor names begin with, in checkpoints that hold other models, too
    qweights: QWeights | None = None  # the format of tensors called `qweight`; None: `config.json` names none
    logit_soft_cap: float = 0.0  # logits become logit_soft_cap * tanh(logit / logit_soft_cap); 0: unchanged

    def extended(self, kind: type[_Config], **more: Any) -> _Config:
        """Return this shape as a family's own class, with `more` fields; they replace those of the same name."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(self)} | more)

    @property
    def max_context_len(self) -> int:
        """The longest context that the model was made for, in tokens: the fewest positions of any of its layers."""
        return min(kind.rope.scaled_positions for kind in self.attention)

    def check_max_model_len(self, max_model_len: int) -> None:
        """Raise `ConfigError` if sequences of `max_model_len` tokens are longer than `max_context_len`."""
        if max_model_len > self.max_context_len:
            raise ConfigError(
                f"max_model_len: {max_model_len} is more than the {self.max_context_len} positions that the model has"
            )

    def kv_groups(self, block_size: int, dtype: str) -> tuple[KVGroup, ...]:
        """Return the layers by attention kind. `dtype` is a key of `DTYPE_BYTES`."""
        return tuple(kind.kv_group(block_size, dtype) for kind in self.attention)

    def of_rank(self, num_ranks: int) -> Self:
        """Return the shape of the part that each of `num_ranks` tensor-parallel ranks has: its heads and its MLP.

        If there are fewer KV heads than ranks, ranks share them. Raises `ConfigError` for ranks that cannot divide the
        model evenly.
        """
        if not self._can_divide(num_ranks):
            possible = ", ".join(str(n) for n in range(1, _MAX_RANKS + 1) if self._can_divide(n))
            heads = ", ".join(f"{kind.num_heads} heads, {kind.num_kv_heads} KV heads" for kind in self.attention)
            sizes = " and ".join(f"{text} of {size}" for text, size in self._inner_sizes().items())
            raise ConfigError(
                f"tensor_parallel_size: {num_ranks} ranks cannot divide {heads} and {sizes} evenly; "
                f"possible are {possible}"
            )
        return replace(
            self,
            attention=tuple(
                replace(
                    kind,
                    num_heads=kind.num_heads // num_ranks,
                    num_kv_heads=max(1, kind.num_kv_heads // num_ranks),
                )
                for kind in self.attention
            ),
            intermediate_size=self.intermediate_size // num_ranks,
        )

    def _inner_sizes(self) -> dict[str, int]:
        """Return the sizes, other than heads, that ranks divide. The keys are their names in an error message."""
        return {"an intermediate_size": self.intermediate_size}

    def _can_divide(self, num_ranks: int) -> bool:
        return all(size % num_ranks == 0 for size in self._inner_sizes().values()) and all(
            kind.num_heads % num_ranks == 0
            and max(kind.num_kv_heads, num_ranks) % min(kind.num_kv_heads, num_ranks) == 0
            for kind in self.attention
        )
