"""Tiny checkpoints with random weights, made by transformers, which is also the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

ARCHITECTURES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mimo": (MiMoV2FlashConfig, MiMoV2FlashForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURE_SHAPE = {
    "qwen2": {"head_dim": ...},  # its config class does not have this key
    "mistral": {"sliding_window": None},
    "mimo": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 48,
        "v_head_dim": 32,
        "sliding_window": 21,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
    },
    "gpt_oss": {"sliding_window": 21, "num_local_experts": 6, "num_experts_per_tok": 3, "tie_word_embeddings": False},
    "gemma2": {"sliding_window": 40, "tie_word_embeddings": True, "query_pre_attn_scalar": 48},
    "gemma3": {"sliding_window": 40, "sliding_window_pattern": 2, "tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_checkpoint(
    directory: Path,
    arch: str = "qwen3",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tokenizer: bool = False,
    max_shard_size: str = "5GB",
    **shape: Any,
) -> PreTrainedModel:
    """Write a model of `arch` (a key of `ARCHITECTURES`) to `directory` and return it, for use as the oracle.

    `shape` are keys of transformers' config class; those of `SHAPE` have defaults, `...` leaves one out. Every weight
    is random, biases and norms included, and large enough that logits differ between tokens. `tokenizer` adds a
    byte-level BPE one with a chat template.
    """
    config_class, model_class = ARCHITECTURES[arch]
    values = SHAPE | ARCHITECTURE_SHAPE.get(arch, {}) | shape
    values = {key: value for key, value in values.items() if value is not ...}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**values))
        for name, weight in model.named_parameters():
            _randomize(name, weight)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                _randomize(name, buffer)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer:
        make_tokenizer(int(values["vocab_size"])).save_pretrained(directory)
    return load_oracle(directory, dtype)


def load_oracle(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return transformers' own model of a checkpoint; in float32 it is exact, whatever the file's dtype."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of 263 tokens (the bytes and seven special ones) to `vocab_size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def rewrite_config(directory: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of `config.json` in place."""
    file = directory / "config.json"
    values = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if key not in remove}), encoding="utf-8")


def to_old_style(directory: Path) -> None:
    """Spell the rope parameters in `config.json` as transformers did before version 5."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    rope = config["rope_parameters"]
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    theta, rope_type = rope.pop("rope_theta"), rope.pop("rope_type")
    scaling = None if rope_type == "default" else {"type": rope_type, **rope}
    rewrite_config(directory, remove=("rope_parameters", "layer_types"), rope_theta=theta, rope_scaling=scaling)
    if local is not None:
        key = "swa_rope_theta" if config["model_type"] == "mimo_v2_flash" else "rope_local_base_freq"
        rewrite_config(directory, **{key: local["rope_theta"]})


@torch.no_grad()
def _randomize(name: str, weight: torch.Tensor) -> None:
    if name.endswith("norm.weight"):
        weight.normal_(1.0, 0.2)
    elif name.endswith("bias"):
        weight.normal_(0.0, 0.3)
    elif "embed_tokens" in name:
        weight.normal_(0.0, 0.2)
    else:
        weight.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)
