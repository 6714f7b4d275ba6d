"""gpt-oss: window layers in turn with full ones, sinks in all of them, and experts in every layer.

Checkpoints store a layer's experts as one tensor a matrix, transposed, gate and up in turn; the published ones store
the matrices in MXFP4, and they are served unpacked. This file imports no torch, so that `swiftkv plan` answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from swiftkv.cache.geometry import KVGroup
from swiftkv.errors import ConfigError
from swiftkv.kernels.experts import SILU, ExpertWeights, GatedActivation, Router
from swiftkv.models.config import DecoderConfig, with_window
from swiftkv.models.decoder import KVPlace, Layer, LayeredDecoder, LayerStack, attention_spec, kv_places
from swiftkv.models.dense import Biases, Traits, attention_part, decoder_config, decoder_weights
from swiftkv.models.hf_config import HFConfig, read_known_keys
from swiftkv.models.moe import ExpertNames, MoeConfig
from swiftkv.models.parts import ExpertMlp
from swiftkv.models.weights import RankSlices, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from swiftkv.models.loader import Packer
    from swiftkv.models.parallel import Ranks

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_MXFP4 = "mxfp4"


@dataclass(frozen=True, slots=True)
class GptOssConfig(MoeConfig):
    """The shape of a gpt-oss."""

    activation: GatedActivation = SILU


class _Keys(HFConfig, kw_only=True):
    """The keys of both spellings; defaults are those of transformers."""

    head_dim: int | None = 64
    num_key_value_heads: int | None = 8
    attention_bias: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    sliding_window: int | None = 128
    num_local_experts: int = 128
    num_experts: int | None = None
    num_experts_per_tok: int = 4
    experts_per_token: int | None = None  # the same, in the published file
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    initial_context_length: int | None = None  # also in rope_scaling


class GptOssDecoder(LayeredDecoder):
    """A `Decoder` of pre-normalised layers, each attention with sinks and a mixture of experts."""

    def __init__(self, config: DecoderConfig, groups: tuple[KVGroup, ...], packer: Packer, ranks: Ranks) -> None:
        assert isinstance(config, GptOssConfig)
        specs = tuple(map(attention_spec, groups, config.attention))
        cos_sin = [packer.cos_sin(kind.rope, kind.head_dim) for kind in config.attention]
        stack = LayerStack(
            layers=tuple(
                _layer(config, place, cos_sin[place.group], packer, ranks) for place in kv_places(groups, specs)
            ),
            embedding=packer.tensor("model.embed_tokens.weight"),
            final_norm=packer.float32("model.norm.weight"),
            norm_eps=config.rms_norm_eps,
            lm_head=packer.linear("lm_head"),
        )
        super().__init__(groups, specs, stack, ranks, packer.device)

    @staticmethod
    def read_config(architecture: str, directory: Path) -> DecoderConfig:
        file = directory / "config.json"
        raw = read_known_keys(file, _Keys)
        quantization: Any = raw.quantization_config
        if quantization is not None and quantization.get("quant_method") != _MXFP4:
            raise ConfigError(f"{file}: quantization_config: only quant_method {_MXFP4} is supported")
        if not (raw.rope_parameters or raw.rope_scaling):
            raw = msgspec.structs.replace(raw, rope_parameters=_YARN)
        traits = Traits(biases=lambda raw: Biases(raw.attention_bias, raw.attention_bias, False))
        shape = decoder_config(architecture, directory, msgspec.structs.replace(raw, quantization_config=None), traits)
        kinds = raw.layer_types or ["sliding_attention", "full_attention"] * raw.num_hidden_layers
        with_windows = [layer for layer in range(raw.num_hidden_layers) if kinds[layer] == "sliding_attention"]
        num_experts = raw.num_experts or raw.num_local_experts
        values = {field.name: getattr(shape, field.name) for field in fields(shape)}
        values["attention"] = with_window(replace(shape.attention[0], sinks="sinks"), with_windows, raw.sliding_window)
        try:
            router = Router(num_experts, raw.experts_per_token or raw.num_experts_per_tok, "softmax_of_chosen")
        except ValueError as error:
            raise ConfigError(f"{file}: {error}") from None
        return GptOssConfig(
            **values,
            router=router,
            expert_size=raw.intermediate_size,
            expert_layers=tuple(range(raw.num_hidden_layers)),
            names=ExpertNames("mlp.experts", gate="gate_up_proj", up="gate_up_proj", down="down_proj"),
            activation=GatedActivation(alpha=raw.swiglu_alpha, limit=raw.swiglu_limit, up_offset=1.0),
        )

    @staticmethod
    def weights(config: DecoderConfig, part: RankSlices) -> dict[str, Weight]:
        return decoder_weights(config, part, _mlp_weights)


def _mlp_weights(config: DecoderConfig, part: RankSlices, layer: int) -> dict[str, Weight]:
    assert isinstance(config, GptOssConfig)
    hidden, inner, count = config.hidden_size, config.expert_size, config.router.num_experts
    prefix = f"model.layers.{layer}"
    experts, rows = f"{prefix}.mlp.experts", part.of_size(inner)
    all_experts, both = slice(0, count), slice(2 * rows.start, 2 * rows.stop)
    weights = {
        f"{prefix}.post_attention_layernorm.weight": Weight((hidden,)),
        f"{prefix}.mlp.router.weight": Weight((count, hidden)),
        f"{prefix}.mlp.router.bias": Weight((count,)),
        f"{experts}.gate_up_proj": Weight((count, hidden, 2 * inner), (all_experts, slice(0, hidden), both)),
        f"{experts}.gate_up_proj_bias": Weight((count, 2 * inner), (all_experts, both)),
        f"{experts}.down_proj": Weight((count, inner, hidden), (all_experts, rows)),
    }
    if part.rank == 0:  # the sum over all ranks has it once
        weights[f"{experts}.down_proj_bias"] = Weight((count, hidden))
    return weights


def _layer(config: GptOssConfig, place: KVPlace, cos_sin: Tensor, packer: Packer, ranks: Ranks) -> Layer:
    prefix = f"model.layers.{place.layer}"
    attention = attention_part(config, place, cos_sin, packer, ranks)
    return Layer(
        replace(attention, norm=packer.float32(f"{prefix}.input_layernorm.weight")),
        ExpertMlp(
            ranks=ranks,
            norm=packer.float32(f"{prefix}.post_attention_layernorm.weight"),
            norm_eps=config.rms_norm_eps,
            gate=packer.linear(f"{prefix}.mlp.router"),
            select_bias=None,
            router=config.router,
            experts=packer.packed_experts(
                config.router.num_experts, config.activation, _experts(packer, f"{prefix}.mlp.experts")
            ),
        ),
    )


def _experts(packer: Packer, prefix: str) -> Iterator[ExpertWeights]:
    """Yield the experts of a layer, each with its matrices the usual way round."""
    gate_up, down = (_matrices(packer, f"{prefix}.{name}") for name in ("gate_up_proj", "down_proj"))
    gate_up_bias = packer.tensor(f"{prefix}.gate_up_proj_bias")  # [experts, 2 * inner]
    name = f"{prefix}.down_proj_bias"
    down_bias = packer.tensor(name) if name in packer.weights else None  # [experts, hidden]
    for index, (both, out) in enumerate(zip(gate_up, down, strict=True)):
        yield ExpertWeights(
            gate=both[::2],
            up=both[1::2],
            down=out,
            gate_bias=gate_up_bias[index, ::2],
            up_bias=gate_up_bias[index, 1::2],
            down_bias=None if down_bias is None else down_bias[index],
        )


def _matrices(packer: Packer, name: str) -> Iterator[Tensor]:
    """Yield this rank's part of each expert's matrix [outputs, inputs], however the checkpoint stores it."""
    if not packer.files.has(f"{name}_blocks"):
        for matrix in packer.tensor(name):  # [inputs, outputs]
            yield matrix.t().contiguous()
        return
    from swiftkv.models import mxfp4

    weight = packer.weights[name]
    count, num_inputs, num_outputs = weight.shape
    groups = num_inputs // mxfp4.GROUP
    blocks = packer.files.get_bytes(f"{name}_blocks", (count, num_outputs, groups, mxfp4.GROUP // 2))
    scales = packer.files.get_bytes(f"{name}_scales", (count, num_outputs, groups))
    _, inputs, *outputs = weight.part
    rows = outputs[0] if outputs else slice(None)
    for index in range(count):
        here = blocks[index][rows].to(packer.device), scales[index][rows].to(packer.device)
        yield mxfp4.unpack(*here, packer.dtype)[:, inputs].contiguous()
    for stored in ("blocks", "scales"):
        packer.files.forget(f"{name}_{stored}")
