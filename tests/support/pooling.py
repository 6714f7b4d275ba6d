"""Tiny checkpoints like Qwen3-Embedding and Qwen3-Reranker, and their use as the model cards describe it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.support.checkpoints import make_checkpoint, make_tokenizer

_TOKENIZER_TOKENS = 300  # of the model's 320; the rest is for added tokens
END_OF_TEXT = "<pad>"


def make_embedding_checkpoint(directory: Path, **shape: Any) -> PreTrainedModel:
    """Write one like Qwen3-Embedding: without its head, with a tokenizer that adds an end token to each text."""
    model = make_checkpoint(directory, "qwen3", tie_word_embeddings=False, **shape)
    weights = load_file(directory / "model.safetensors")
    stack = {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")}
    save_file(stack, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer = make_tokenizer(_TOKENIZER_TOKENS)
    end = (END_OF_TEXT, tokenizer.convert_tokens_to_ids(END_OF_TEXT))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {END_OF_TEXT}", special_tokens=[end])
    tokenizer.save_pretrained(directory)
    write_modules(directory, "Transformer", "Pooling", "Normalize")
    write_pooling(directory, "lasttoken")
    write_settings(directory, {"query": "Instruct: find\nQuery:", "document": ""})
    return model


def make_reranker_checkpoint(directory: Path, **shape: Any) -> PreTrainedModel:
    """Write one like Qwen3-Reranker, whose tokenizer knows yes and no."""
    model = make_checkpoint(directory, "qwen3", tie_word_embeddings=True, **shape)
    make_reranker_tokenizer().save_pretrained(directory)
    return model


def make_reranker_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(_TOKENIZER_TOKENS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["yes", "no"])
    return tokenizer


def write_modules(directory: Path, *names: str, package: str = "sentence_transformers.models") -> None:
    paths = [f"{index}_{name}" if index else "" for index, name in enumerate(names)]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"{package}.{name}"}
        for index, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))


def write_pooling(directory: Path, mode: str) -> None:
    write_module(directory, "1_Pooling", {"word_embedding_dimension": 64, f"pooling_mode_{mode}": True})


def write_module(directory: Path, path: str, config: dict[str, Any]) -> None:
    (directory / path).mkdir(exist_ok=True)
    (directory / path / "config.json").write_text(json.dumps(config))


def write_settings(directory: Path, prompts: dict[str, str], default: str | None = None) -> None:
    settings = {"prompts": prompts, "default_prompt_name": default, "similarity_fn_name": "cosine"}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))


@torch.inference_mode()
def hidden_state(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """Return transformers' hidden state of the last token, after the final norm."""
    hidden: torch.Tensor = model.model(torch.tensor([prompt])).last_hidden_state
    return hidden[0, -1]


def embedding(model: PreTrainedModel, prompt: list[int], dimensions: int | None = None) -> torch.Tensor:
    """Return the embedding as the model card defines it: the last token's hidden state, cut, with norm 1."""
    return torch.nn.functional.normalize(hidden_state(model, prompt)[:dimensions], dim=0)


CARD_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
CARD_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
CARD_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def card_prompt(
    tokenizer: PreTrainedTokenizerFast, query: str, document: str, instruction: str = CARD_INSTRUCTION
) -> list[int]:
    """Return the tokens of a pair as the card of Qwen3-Reranker makes them."""
    prefix, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in (CARD_PREFIX, CARD_SUFFIX))
    pair = tokenizer(f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}")["input_ids"]
    return [*prefix, *pair, *suffix]


@torch.inference_mode()
def card_score(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: list[int]) -> float:
    """Return the score as the card defines it: the probability of yes, where the model may say yes or no."""
    logits = model(torch.tensor([prompt])).logits[0, -1]
    no, yes = (tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes"))
    return torch.log_softmax(torch.stack([logits[no], logits[yes]]), 0)[1].exp().item()
