"""The classes that run the architectures of Hugging Face's `config.json`. A model is one file and its lines here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from swiftkv.cache.geometry import DTYPE_BYTES
from swiftkv.errors import ConfigError
from swiftkv.kernels.attention_spec import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, is_head_dim
from swiftkv.models.config import DecoderConfig
from swiftkv.models.decoder import Decoder
from swiftkv.models.dense import DenseDecoder
from swiftkv.models.files import saved_bytes
from swiftkv.models.gemma import GemmaDecoder
from swiftkv.models.gpt_oss import GptOssDecoder
from swiftkv.models.hf_config import read_architectures
from swiftkv.models.mimo import MimoDecoder
from swiftkv.models.moe import MoeDecoder
from swiftkv.models.weights import RankSlices, num_parameters
from swiftkv.policies import Task

DECODERS: dict[str, type[Decoder]] = {
    "Qwen3ForCausalLM": DenseDecoder,
    "Qwen2ForCausalLM": DenseDecoder,
    "LlamaForCausalLM": DenseDecoder,
    "MistralForCausalLM": DenseDecoder,
    "Mistral3ForConditionalGeneration": DenseDecoder,
    "Qwen3MoeForCausalLM": MoeDecoder,
    "MixtralForCausalLM": MoeDecoder,
    "Gemma2ForCausalLM": GemmaDecoder,
    "Gemma3ForCausalLM": GemmaDecoder,
    "Gemma3ForConditionalGeneration": GemmaDecoder,
    "MiMoV2FlashForCausalLM": MimoDecoder,
    "MiMoV2ForCausalLM": MimoDecoder,
    "GptOssForCausalLM": GptOssDecoder,
}


def read_config(directory: Path, task: Task = "generate") -> DecoderConfig:
    """Read `config.json` (and the end tokens of `generation_config.json`), as any version of transformers writes them.

    A model whose `task` is to embed has no head.

    Raises `ConfigError` naming the key, or the architectures that are supported; `CheckpointError` if there is no
    readable `config.json`.
    """
    file = directory / "config.json"
    names = read_architectures(file)  # first: other architectures have other keys
    name = next((name for name in names if name in DECODERS), None)
    if name is None:
        found = ", ".join(names) or "none"
        raise ConfigError(f"{file}: architectures: {found}: not supported; supported are {', '.join(DECODERS)}")
    config = DECODERS[name].read_config(name, directory)
    for kind in config.attention:
        for key, dim in (("head_dim", kind.head_dim), ("v_head_dim", kind.value_head_dim)):
            if not is_head_dim(dim):
                raise ConfigError(
                    f"{file}: {key}: {dim} is not supported, multiples of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM} are"
                )
    return replace(config, has_head=task != "embed")


def weight_bytes(config: DecoderConfig, num_ranks: int, dtype: str, codes_in: Path | None = None) -> int:
    """Return the bytes of a rank's weights in `dtype`, a key of `DTYPE_BYTES`; `config` is the whole model's.

    With `codes_in`, weights that are quantized in the files there are counted as quantized. Raises `CheckpointError` if
    these files cannot be read.
    """
    weights = DECODERS[config.architecture].weights(config, RankSlices.of(config, 0, num_ranks))
    unpacked_bytes = num_parameters(weights) * DTYPE_BYTES[dtype]
    if codes_in is None or not any(codes_in.glob("*.safetensors")):
        return unpacked_bytes
    return unpacked_bytes - saved_bytes(codes_in, weights, config.qweights, DTYPE_BYTES[dtype])
