"""A model's shape, from the `config.json` of its Hugging Face directory. Imports no torch: `swiftkv plan` is quick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from swiftkv.cache.geometry import KVGroup
from swiftkv.errors import CheckpointError, ConfigError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]

_HEAD_DIM_MULTIPLE, _MAX_HEAD_DIM = 16, 256  # what the attention kernels take
_MAX_RANKS = 8

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, under the names that `config.json` uses. What a type does not use is left alone."""

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
        """Positions that the scaling is meant for."""
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            return max(self.max_position_embeddings, int(self.original_max_position_embeddings * self.factor))
        return self.max_position_embeddings


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything that the dense decoder has to know about a model."""

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
        """Raises `ConfigError` if sequences of `max_model_len` tokens are more than the model or this server can do."""
        if self.sliding_window is not None and max_model_len > self.sliding_window:
            raise ConfigError(
                f"max_model_len: {max_model_len} is more than the model's sliding_window, and sliding windows are not "
                f"supported: at most {self.sliding_window}"
            )
        if max_model_len > self.max_context_len:
            raise ConfigError(
                f"max_model_len: {max_model_len} is more than the {self.max_context_len} positions that the model has"
            )

    @classmethod
    def from_pretrained(cls, directory: Path) -> DecoderConfig:
        """Read `config.json` (and the end tokens of `generation_config.json`), in the style of any transformers.

        Raises `ConfigError` naming the key, or the architectures that are supported; `CheckpointError` if there is no
        readable `config.json`.
        """
        file = directory / "config.json"
        names = _decode(file, _Architectures).architectures  # first: other architectures have other keys
        name = next((name for name in names if name in ARCHITECTURES), None)
        if name is None:
            found = ", ".join(names) or "none"
            raise ConfigError(f"{file}: architectures: {found}; supported are {', '.join(ARCHITECTURES)}")
        raw = _decode(file, _HFConfig)
        architecture = ARCHITECTURES[name]
        if raw.hidden_act != "silu":
            raise ConfigError(f"{file}: hidden_act: {raw.hidden_act!r} is not supported, only 'silu' is")
        if raw.quantization_config is not None:
            raise ConfigError(f"{file}: quantization_config: quantized weights are not supported, use the originals")
        num_kv_heads = raw.num_key_value_heads or raw.num_attention_heads
        head_dim = raw.head_dim or architecture.head_dim or raw.hidden_size // raw.num_attention_heads
        if raw.num_attention_heads % num_kv_heads:
            raise ConfigError(
                f"{file}: num_key_value_heads: {num_kv_heads} does not divide the {raw.num_attention_heads} heads"
            )
        if head_dim % _HEAD_DIM_MULTIPLE or head_dim > _MAX_HEAD_DIM:
            raise ConfigError(
                f"{file}: head_dim: {head_dim} is not supported, multiples of {_HEAD_DIM_MULTIPLE} up to "
                f"{_MAX_HEAD_DIM} are"
            )
        biases = architecture.biases(raw)
        return cls(
            architecture=name,
            vocab_size=raw.vocab_size,
            hidden_size=raw.hidden_size,
            num_layers=raw.num_hidden_layers,
            num_heads=raw.num_attention_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=raw.intermediate_size,
            rms_norm_eps=raw.rms_norm_eps,
            tie_word_embeddings=raw.tie_word_embeddings,
            qkv_bias=biases.qkv,
            attention_out_bias=biases.attention_out,
            mlp_bias=biases.mlp,
            qk_norm=architecture.qk_norm,
            rope=_read_rope(file, raw),
            max_position_embeddings=raw.max_position_embeddings,
            sliding_window=architecture.sliding_window(raw),
            eos_token_ids=_read_eos_token_ids(directory, raw),
        )

    def kv_groups(self, block_size: int, dtype: str) -> tuple[KVGroup, ...]:
        """The layers by attention kind: a dense decoder has one group. `dtype` is a key of `DTYPE_BYTES`."""
        return (KVGroup(tuple(range(self.num_layers)), self.num_kv_heads, self.head_dim, dtype, block_size),)

    def of_rank(self, num_ranks: int) -> DecoderConfig:
        """The shape of what each of `num_ranks` tensor-parallel ranks has: its heads and its part of the MLP.

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


class _Architectures(msgspec.Struct):
    architectures: list[str] = []


class _HFConfig(msgspec.Struct):
    """The keys of `config.json` that matter; defaults are those of transformers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: dict[str, Any] | None = None  # transformers 5
    rope_scaling: dict[str, Any] | None = None  # before it, with the next two
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    original_max_position_embeddings: int | None = None
    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: Any = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for key in (*sizes, "max_position_embeddings", "num_key_value_heads", "head_dim", "sliding_window"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ValueError(f"{key}: {value} is not a positive number")


class _RopeParameters(msgspec.Struct):
    """`rope_parameters`, or the older `rope_scaling`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


@dataclass(frozen=True, slots=True)
class _Biases:
    qkv: bool
    attention_out: bool
    mlp: bool


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What the class named in `architectures` means beyond the numbers in `config.json`."""

    biases: Callable[[_HFConfig], _Biases]
    sliding_window: Callable[[_HFConfig], int | None] = lambda raw: None
    qk_norm: bool = False
    head_dim: int | None = None  # where config.json does not say; None: hidden_size / num_attention_heads


def _window_of_some_layers(raw: _HFConfig) -> int | None:
    if not raw.use_sliding_window:
        return None
    sliding = raw.max_window_layers < raw.num_hidden_layers
    if raw.layer_types is not None:
        sliding = "sliding_attention" in raw.layer_types
    return raw.sliding_window if sliding else None


ARCHITECTURES = {
    "Qwen3ForCausalLM": _Architecture(
        biases=lambda raw: _Biases(raw.attention_bias, raw.attention_bias, False),
        sliding_window=_window_of_some_layers,
        qk_norm=True,
        head_dim=128,
    ),
    "Qwen2ForCausalLM": _Architecture(
        biases=lambda raw: _Biases(True, False, False), sliding_window=_window_of_some_layers
    ),
    "LlamaForCausalLM": _Architecture(biases=lambda raw: _Biases(raw.attention_bias, raw.attention_bias, raw.mlp_bias)),
    "MistralForCausalLM": _Architecture(
        biases=lambda raw: _Biases(False, False, False), sliding_window=lambda raw: raw.sliding_window
    ),
}


_NEEDED_ROPE_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def _read_rope(file: Path, raw: _HFConfig) -> RopeConfig:
    key = "rope_scaling" if raw.rope_scaling else "rope_parameters"
    try:
        rope = msgspec.convert(raw.rope_scaling or raw.rope_parameters or {}, _RopeParameters)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {key}: {error}") from None
    rope_type: Any = rope.rope_type or rope.type or "default"
    if rope_type not in get_args(RopeType):
        raise ConfigError(f"{file}: {key}: rope_type {rope_type!r} is none of {', '.join(get_args(RopeType))}")
    partial = rope.partial_rotary_factor if rope.partial_rotary_factor is not None else raw.partial_rotary_factor
    if partial != 1.0:
        raise ConfigError(f"{file}: partial_rotary_factor: {partial} is not supported, only 1.0 is")
    # As in transformers, a length beside the rope parameters wins over the one inside.
    original = (
        raw.original_max_position_embeddings or rope.original_max_position_embeddings or raw.max_position_embeddings
    )
    factor = rope.factor
    if rope_type == "yarn" and factor is None:
        factor = raw.max_position_embeddings / original
    for name in _NEEDED_ROPE_KEYS.get(rope_type, ()):
        if getattr(rope, name) is None:
            raise ConfigError(f"{file}: {key}: {name} is missing, rope_type {rope_type} needs it")
    return RopeConfig(
        rope_type=rope_type,
        theta=raw.rope_theta if rope.rope_theta is None else rope.rope_theta,
        max_position_embeddings=raw.max_position_embeddings,
        original_max_position_embeddings=original,
        factor=1.0 if factor is None else factor,
        low_freq_factor=rope.low_freq_factor or 1.0,
        high_freq_factor=rope.high_freq_factor or 4.0,
        attention_factor=rope.attention_factor,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        mscale=rope.mscale,
        mscale_all_dim=rope.mscale_all_dim,
        truncate=rope.truncate,
    )


def _read_eos_token_ids(directory: Path, raw: _HFConfig) -> tuple[int, ...]:
    file = directory / "generation_config.json"
    generation = _decode(file, _GenerationConfig) if file.is_file() else _GenerationConfig()
    ids: list[int] = []
    for value in (raw.eos_token_id, generation.eos_token_id):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    # Some configurations name tokens that the model does not have: those cannot end anything.
    return tuple(token for token in dict.fromkeys(ids) if 0 <= token < raw.vocab_size)


def _decode(file: Path, kind: type[_Struct]) -> _Struct:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{file}: {error}") from None
