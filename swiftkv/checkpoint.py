"""Model directories in Hugging Face format, made here: a trained tokenizer, a chat template, random weights.

Serving or testing a model needs one that a machine without a network can have. `make` writes a random-weight model of
any supported architecture; its parts (`train_tokenizer`, `save`) also serve the training of the demo models in
`checkpoints/`.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from swiftkv.errors import CheckpointError

Architecture = Literal[
    "qwen3", "qwen2", "llama", "mistral", "gemma2", "gemma3_text", "qwen3_moe", "mixtral", "gpt_oss", "mimo_v2_flash"
]
Size = Literal["tiny", "small"]

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Qwen's pre-tokenizer: contractions, words with a leading space, single digits, punctuation, white space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Shapes by size; `small` is Qwen3-0.6B's with a smaller vocabulary, which is what the benchmarks compare on.
_SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "max_position_embeddings": 8192,
    },
    "small": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
    },
}
# The differences of each architecture's published models, apart from their shape.
_HABITS: dict[str, dict[str, Any]] = {
    "qwen3": {"rope_theta": 1e6, "tie_word_embeddings": True, "use_sliding_window": False},
    "qwen2": {"rope_theta": 1e6, "tie_word_embeddings": True, "use_sliding_window": False},
    "llama": {"rope_theta": 5e5, "tie_word_embeddings": False},
    "mistral": {"rope_theta": 1e6, "tie_word_embeddings": False, "sliding_window": None},
    "gemma2": {"tie_word_embeddings": True, "sliding_window": 512, "query_pre_attn_scalar": 32},
    "gemma3_text": {"tie_word_embeddings": True, "sliding_window": 512, "query_pre_attn_scalar": 32},
    "gpt_oss": {"tie_word_embeddings": False, "sliding_window": 128},
    "mimo_v2_flash": {"tie_word_embeddings": False, "sliding_window": 129, "v_head_dim": 16},
    "qwen3_moe": {"rope_theta": 1e6, "tie_word_embeddings": False, "norm_topk_prob": True},
    "mixtral": {"rope_theta": 1e6, "tie_word_embeddings": False, "sliding_window": None},
}
# The experts of each size together are a few times its MLP; those of one token are about as large.
_EXPERTS: dict[tuple[str, str], dict[str, int]] = {
    ("qwen3_moe", "tiny"): {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64},
    ("qwen3_moe", "small"): {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 384},
    ("gpt_oss", "tiny"): {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128},
    ("gpt_oss", "small"): {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 768},
    ("mimo_v2_flash", "tiny"): {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64},
    ("mimo_v2_flash", "small"): {"n_routed_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 384},
    ("mixtral", "tiny"): {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128},
    ("mixtral", "small"): {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 1536},
}
_VOCAB_SIZES = {"tiny": 2048, "small": 32000}
# More text does not change a small vocabulary, it only takes longer.
_TOKENIZER_CORPUS_BYTES = {"tiny": 1 << 20, "small": 64 << 20}


def standard_library_files(*, with_tests: bool = False) -> list[Path]:
    """Return the Python standard library's source files, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__", "lib2to3", "idlelib", "turtledemo", "ensurepip"}
    if not with_tests:
        skipped |= {"test", "tests"}
    return sorted(path for path in root.rglob("*.py") if skipped.isdisjoint(path.relative_to(root).parts))


def read_texts(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the texts of those `paths` that are UTF-8."""
    for path in paths:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer (`PreTrainedTokenizerFast`) with ChatML's special tokens and template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save(model: Any, tokenizer: Any, directory: Path, **generation: Any) -> None:
    """Write model and tokenizer to `directory` so that readers older than transformers 5 can read them, too.

    `generation` goes into generation_config.json beside the end-of-sequence ids.
    """
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id, **generation
    )
    model.save_pretrained(directory)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(directory)
    rope = getattr(model.config, "rope_parameters", None) or {}
    older: dict[str, Any] = {"torch_dtype": str(model.dtype).removeprefix("torch.")}
    if "rope_theta" in rope:
        older["rope_theta"] = rope["rope_theta"]
    _update_json(directory / "config.json", older)
    mode = (directory / "config.json").stat().st_mode
    for weights in directory.glob("*.safetensors"):
        weights.chmod(mode)  # safetensors writes files that only their owner may read
    _update_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def make(arch: Architecture, size: Size, directory: Path | str, seed: int = 0) -> Path:
    """Write a bfloat16 random-weight model of `arch` with a tokenizer trained on the standard library.

    Args:
        arch: the architecture; its defaults apart from the shape are the published models'.
        size: `tiny` (3 layers, 0.6 M parameters, for tests) or `small` (28 layers, 0.47 B, for benchmarks).
        directory: empty, or made if it does not exist.
        seed: of the weights.

    Raises:
        CheckpointError: an unknown `arch` or `size`, or a directory that holds something or cannot be made or
            written to.
    """
    if arch not in get_args(Architecture):
        raise CheckpointError(f"arch: {arch!r} is not one of {', '.join(get_args(Architecture))}")
    if size not in get_args(Size):
        raise CheckpointError(f"size: {size!r} is not one of {', '.join(get_args(Size))}")
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"directory: {directory} cannot be made: {error.strerror}; name another") from None
    if any(directory.iterdir()):
        raise CheckpointError(f"directory: {directory} is not empty; name a new or empty one")

    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = train_tokenizer(
        _limited(read_texts(standard_library_files()), _TOKENIZER_CORPUS_BYTES[size]), _VOCAB_SIZES[size]
    )
    config = _config(arch, size, tokenizer)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(torch.bfloat16)
    try:
        save(model, tokenizer, directory)
    except Exception as error:  # safetensors and tokenizers have their own for a full disk
        raise CheckpointError(f"directory: {directory} cannot be written to: {error}; name another") from error
    return directory


def _config(arch: Architecture, size: Size, tokenizer: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        arch,
        **(_SHAPES[size] | _EXPERTS.get((arch, size), {})),
        **_HABITS[arch],
        vocab_size=len(tokenizer),
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )


def _limited(texts: Iterable[str], limit_bytes: int) -> Iterator[str]:
    taken = 0
    for text in texts:
        if taken >= limit_bytes:
            return
        taken += len(text)
        yield text


def _update_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}, indent=2) + "\n")
