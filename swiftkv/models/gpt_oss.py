"""gpt-oss: window layers and full layers alternate; all have sinks and experts.

Checkpoints have one tensor for each matrix of all experts of a layer. It is transposed, and gate and up alternate. The
published checkpoints store the matrices in MXFP4, which the CPU's kernels keep in memory.

This file imports no torch, so that `swiftkv plan` answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from swiftkv.errors import ConfigError
from swiftkv.kernels.experts import ExpertWeights, GatedActivation, Router
from swiftkv.models.config import DecoderConfig, with_window
from swiftkv.models.decoder import Layer, LayeredDecoder, LayerSource
from swiftkv.models.dense import MLP_NORM, Traits, attention_part, decoder_config, decoder_weights
from swiftkv.models.hf_config import HFConfig, NotNegative, Positive, mistakes_in, read_known_keys
from swiftkv.models.moe import MoeConfig
from swiftkv.models.parts import ExpertMlp
from swiftkv.models.weights import RankSlices, Weight
from swiftkv.progress import PROGRESS

if TYPE_CHECKING:
    from torch import Tensor

    from swiftkv.kernels.weight_codes import CodedMatrix
    from swiftkv.models.loader import Packer

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_MXFP4 = "mxfp4"


class _Keys(HFConfig, kw_only=True):
    """The keys of both spellings; defaults are those of transformers."""

    head_dim: int | None = 64
    num_key_value_heads: int | None = 8
    attention_bias: bool = True
    rms_norm_eps: NotNegative = 1e-5
    rope_theta: Positive = 150000.0
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

    @staticmethod
    def read_config(architecture: str, directory: Path) -> DecoderConfig:
        file = directory / "config.json"
        raw = read_known_keys(file, _Keys)
        quantization: Any = raw.quantization_config
        if quantization is not None and quantization.get("quant_method") != _MXFP4:
            raise ConfigError(f"{file}: quantization_config: only quant_method {_MXFP4} is supported")
        if not (raw.rope_parameters or raw.rope_scaling):
            raw = msgspec.structs.replace(raw, rope_parameters=_YARN)
        raw = msgspec.structs.replace(raw, quantization_config=None)
        shape = decoder_config(architecture, directory, raw, Traits(norm_offset=0.0))
        [kind] = shape.attention
        in_turn = raw.window_layers(lambda layer: layer % 2 == 0)
        num_experts, top_k = raw.num_experts or raw.num_local_experts, raw.experts_per_token or raw.num_experts_per_tok
        with mistakes_in(file):
            router = Router(num_experts, top_k, "softmax_of_chosen")
        return shape.extended(
            MoeConfig,
            attention=with_window(replace(kind, sinks="sinks"), in_turn, raw.sliding_window),
            router=router,
            expert_size=raw.intermediate_size,
            expert_layers=kind.layers,
            activation=GatedActivation(alpha=raw.swiglu_alpha, limit=raw.swiglu_limit, up_offset=1.0),
        )

    @staticmethod
    def weights(config: DecoderConfig, part: RankSlices) -> dict[str, Weight]:
        return decoder_weights(config, part, _mlp_weights)

    @staticmethod
    def layer(source: LayerSource) -> Layer:
        return Layer(attention_part(source), _mlp_part(source))


def _mlp_weights(config: DecoderConfig, part: RankSlices, layer: int) -> dict[str, Weight]:
    assert isinstance(config, MoeConfig)
    hidden, inner, count = config.hidden_size, config.expert_size, config.router.num_experts
    prefix = f"model.layers.{layer}"
    experts, rows = f"{prefix}.mlp.experts", part.of_size(inner)
    all_experts, both = slice(0, count), slice(2 * rows.start, 2 * rows.stop)
    weights = {
        f"{prefix}.{MLP_NORM}.weight": Weight((hidden,)),
        f"{prefix}.mlp.router.weight": Weight((count, hidden)),
        f"{prefix}.mlp.router.bias": Weight((count,)),
        f"{experts}.gate_up_proj": Weight((count, hidden, 2 * inner), (all_experts, slice(0, hidden), both)),
        f"{experts}.gate_up_proj_bias": Weight((count, 2 * inner), (all_experts, both)),
        f"{experts}.down_proj": Weight((count, inner, hidden), (all_experts, rows)),
    }
    if part.rank == 0:  # the sum over all ranks has it once
        weights[f"{experts}.down_proj_bias"] = Weight((count, hidden))
    return weights


def _mlp_part(source: LayerSource) -> ExpertMlp:
    config, packer, mlp = source.config, source.packer, f"{source.prefix}.mlp"
    assert isinstance(config, MoeConfig)
    experts = _experts(packer, f"{mlp}.experts")
    return ExpertMlp(
        ranks=source.ranks,
        norm=source.norm(MLP_NORM),
        norm_eps=config.rms_norm_eps,
        gate=packer.linear(f"{mlp}.router"),
        select_bias=None,
        router=config.router,
        experts=packer.packed_experts(config.router.num_experts, config.activation, experts),
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


def _matrices(packer: Packer, name: str) -> Iterator[Tensor | CodedMatrix]:
    """Yield this rank's part of each expert's matrix [outputs, inputs], however the checkpoint stores it."""
    if not packer.files.has(f"{name}_blocks"):
        for transposed in packer.tensor(name):  # [inputs, outputs]
            yield transposed.t().contiguous()
        return
    from swiftkv.models import mxfp4

    weight = packer.weights[name]
    count, num_inputs, num_outputs = weight.shape
    groups = num_inputs // mxfp4.GROUP
    blocks = packer.files.get_bytes(f"{name}_blocks", (count, num_outputs, groups, mxfp4.GROUP // 2))
    scales = packer.files.get_bytes(f"{name}_scales", (count, num_outputs, groups))
    _, inputs, *outputs = weight.part
    rows = outputs[0] if outputs else slice(None)
    here_groups = slice(inputs.start // mxfp4.GROUP, inputs.stop // mxfp4.GROUP)
    are_whole = inputs.start % mxfp4.GROUP == inputs.stop % mxfp4.GROUP == 0
    for index in range(count):
        block, scale = blocks[index][rows].to(packer.device), scales[index][rows].to(packer.device)
        matrix: Tensor | CodedMatrix
        if are_whole and packer.ops.keeps_codes(packer.dtype):
            matrix = mxfp4.coded(block[:, here_groups], scale[:, here_groups], packer.dtype)
        else:
            matrix = mxfp4.unpack(block, scale, packer.dtype)[:, inputs].contiguous()
        PROGRESS.loads(matrix.nbytes)
        yield matrix
    for stored in ("blocks", "scales"):
        packer.files.forget(f"{name}_{stored}")
