"""Reads the `config.json` of a Hugging Face directory, as any version of transformers writes it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

import msgspec
from msgspec import Meta

from swiftkv.errors import CheckpointError, ConfigError
from swiftkv.models.config import RopeConfig, RopeType
from swiftkv.models.quantization import OWN_FILES
from swiftkv.units import LARGEST_COUNT

FULL, WINDOW = "full_attention", "sliding_attention"
"""The kinds of layers, in `layer_types` and in nested `rope_parameters`."""

TEXT_MODEL = "language_model."
"""The beginning of the names of the text model's tensors in a checkpoint that also sees images."""

_PARTS = ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts")
_MOST_PARTS = 1024
"""The most layers, and the most experts of a layer: each has tensors of its own, and a plan counts them all."""

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]

_Value = TypeVar("_Value")
_Keys = TypeVar("_Keys", bound=msgspec.Struct)


class _Architectures(msgspec.Struct):
    architectures: list[str] = []


class HFConfig(msgspec.Struct):
    """The keys of `config.json` that decoders share; defaults are those of transformers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: NotNegative = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: dict[str, Any] | None = None  # transformers 5
    rope_scaling: dict[str, Any] | None = None  # before it, with the next two
    rope_theta: Positive = 10000.0
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
        for key in self.__struct_fields__:
            value, most = getattr(self, key), _MOST_PARTS if key in _PARTS else LARGEST_COUNT
            if isinstance(value, int) and value > most:
                raise ValueError(f"{key}: {value} is more than {most}, the most that is supported")

    def window_layers(self, by_habit: Callable[[int], bool]) -> list[int]:
        """Return the layers with a window: by `layer_types`, or without it by the family's default."""
        if self.layer_types is None:
            return [layer for layer in range(self.num_hidden_layers) if by_habit(layer)]
        return [layer for layer, kind in enumerate(self.layer_types[: self.num_hidden_layers]) if kind == WINDOW]

    def with_rope_of(self, kind: str, otherwise: dict[str, Any] | None = None) -> Self:
        """Return the keys with the rotary parameters of one kind of layers.

        A kind without parameters of its own gets `otherwise`, or without that the model's.
        """
        parameters = (self.rope_parameters or {}).get(kind) or otherwise
        if parameters is None:
            return self
        return msgspec.structs.replace(self, rope_parameters=parameters, rope_scaling=None)


class _RopeParameters(msgspec.Struct):
    """`rope_parameters`, or the older `rope_scaling`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
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


class _Outer(msgspec.Struct):
    """The keys around `text_config` that are about the text model, too."""

    eos_token_id: int | list[int] | None = None
    quantization_config: Any = None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _Token(msgspec.Struct):
    content: str
    id: int | None = None


class _TokenizerConfig(msgspec.Struct):
    """The part of `tokenizer_config.json`, or of the older `special_tokens_map.json`, that names the end token."""

    eos_token: str | _Token | None = None
    added_tokens_decoder: dict[int, _Token] = {}


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_Token] = []


_NEEDED_ROPE_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


_HFConfig = TypeVar("_HFConfig", bound=HFConfig)


def read_architectures(file: Path) -> list[str]:
    """Return the architectures that `config.json` names. Raises as `read_json` does."""
    return read_json(file, _Architectures).architectures


def read_quantization(directory: Path, raw: Any) -> tuple[str, Any]:
    """Return the `quantization_config` of a checkpoint, after the name of the place where it is.

    `raw` is the one in `config.json`. If that has none, older programs' own files may have one.
    """
    if raw is None:
        for file in (directory / name for name in OWN_FILES if (directory / name).is_file()):
            own = read_json(file, dict[str, Any])
            method = "awq" if "w_bit" in own or "version" in own else "gptq"
            return str(file), {"quant_method": method, "bits": own.get("w_bit"), **own}
    return f"{directory / 'config.json'}: quantization_config", raw


def read_rope(file: Path, raw: HFConfig) -> RopeConfig:
    """Return the rotary embedding of `raw`, which was read from `file`, in the spelling of any transformers.

    Raises `ConfigError` naming the key.
    """
    key = "rope_scaling" if raw.rope_scaling else "rope_parameters"
    try:
        rope = msgspec.convert(raw.rope_scaling or raw.rope_parameters or {}, _RopeParameters)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {key}: {error}") from None
    rope_type: Any = rope.rope_type or rope.type or "default"
    if rope_type not in get_args(RopeType):
        raise ConfigError(f"{file}: {key}: rope_type {rope_type!r} is not one of {', '.join(get_args(RopeType))}")
    partial = rope.partial_rotary_factor if rope.partial_rotary_factor is not None else raw.partial_rotary_factor
    if not 0 < partial <= 1:
        raise ConfigError(
            f"{file}: partial_rotary_factor: {partial} is not a part of a head: it must be above 0 and at most 1"
        )
    # transformers prefers a length beside the rope parameters to one inside, too.
    original = (
        raw.original_max_position_embeddings or rope.original_max_position_embeddings or raw.max_position_embeddings
    )
    factor = rope.factor
    if rope_type == "yarn" and factor is None:
        factor = raw.max_position_embeddings / original
    if factor is not None and not 0 < factor * raw.max_position_embeddings <= LARGEST_COUNT:
        raise ConfigError(f"{file}: {key}: factor {factor} does not make a context of 1 to {LARGEST_COUNT} tokens")
    for name in _NEEDED_ROPE_KEYS.get(rope_type, ()):
        if getattr(rope, name) is None:
            raise ConfigError(f"{file}: {key}: {name} is missing; rope_type {rope_type} needs it")
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
        partial_rotary_factor=partial,
    )


def read_eos_token_ids(directory: Path, raw: HFConfig) -> tuple[int, ...]:
    """Return the tokens that end an answer, from `raw`, the tokenizer and `generation_config.json`, where these are.

    A fine-tuned model often has a new end-of-turn token in its tokenizer, and its base model's end token elsewhere.
    """
    generation = _read_if_there(directory / "generation_config.json", _GenerationConfig)
    ids: list[int] = []
    for value in (raw.eos_token_id, generation.eos_token_id, _tokenizer_eos(directory)):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    # Some configurations name tokens that the model does not have: those cannot end anything.
    return tuple(token for token in dict.fromkeys(ids) if 0 <= token < raw.vocab_size)


def _tokenizer_eos(directory: Path) -> int | None:
    """Return the end token of the tokenizer, `None` if it has none."""
    config = _read_if_there(directory / "tokenizer_config.json", _TokenizerConfig)
    named = config.eos_token or _read_if_there(directory / "special_tokens_map.json", _TokenizerConfig).eos_token
    if named is None:
        return None
    text = named if isinstance(named, str) else named.content
    found = (token_id for token_id, token in config.added_tokens_decoder.items() if token.content == text)
    if (token_id := next(found, None)) is not None:
        return token_id
    added = _read_if_there(directory / "tokenizer.json", _TokenizerFile).added_tokens
    return next((token.id for token in added if token.content == text), None)


def _read_if_there(file: Path, kind: type[_Keys]) -> _Keys:
    """Decode `file`; without one, return a `kind` of defaults. Raises as `read_json` does."""
    return read_json(file, kind) if file.is_file() else kind()


_WITHOUT_EFFECT = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
"""The keys of `config.json` that do not affect a server's results: about training, output and origin."""


def read_known_keys(file: Path, kind: type[_Keys], inside: str | None = None) -> _Keys:
    """Decode `file`, or the object that it has under the key `inside`, as `kind`, a struct of all known keys.

    Raises as `read_json` does, and `ConfigError` for a key that `kind` does not have, because it might change what the
    model computes.
    """
    values = read_json(file, dict[str, Any])
    if inside is not None:
        values = values.get(inside) or {}
    keys = {key for key, value in values.items() if value is not None}
    unknown = sorted(keys - {field.encode_name for field in msgspec.structs.fields(kind)} - _WITHOUT_EFFECT)
    if unknown:
        raise ConfigError(
            f"{file}: {unknown[0]}: this key is not known, and may change what the model computes; "
            "remove it if it does not"
        )
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from None


def with_outer_keys(file: Path, raw: _HFConfig) -> _HFConfig:
    """Return the keys of a text model, `raw`, with those around its `text_config`. Raises as `read_json` does."""
    outer = read_json(file, _Outer)
    eos_token_id = raw.eos_token_id if outer.eos_token_id is None else outer.eos_token_id
    return msgspec.structs.replace(raw, eos_token_id=eos_token_id, quantization_config=outer.quantization_config)


@contextmanager
def mistakes_in(file: Path) -> Iterator[None]:
    """Turn a `ValueError` about the content of `file` into a `ConfigError` that names the file."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None


def read_json(file: Path, kind: type[_Value]) -> _Value:
    """Decode `file`. Raises `ConfigError` for a key of another type, `CheckpointError` if it cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{file}: {error}") from None
