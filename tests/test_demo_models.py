"""The models that come with the project say what they were trained to say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import starlette
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
LARGEST_BYTES = 12_000_000


def load(name: str) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(CHECKPOINTS / name)


def test_they_are_small_and_differ_in_every_dimension_that_matters() -> None:
    configs = [AutoConfig.from_pretrained(CHECKPOINTS / name) for name in ("chat", "code")]
    assert [config.architectures for config in configs] == [["Qwen3ForCausalLM"], ["LlamaForCausalLM"]]
    for key in ("num_hidden_layers", "num_attention_heads", "head_dim"):
        assert getattr(configs[0], key) != getattr(configs[1], key)
    assert all(config.max_position_embeddings == 8192 for config in configs)
    for name in ("chat", "code"):
        assert sum(path.stat().st_size for path in (CHECKPOINTS / name).iterdir()) < LARGEST_BYTES


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("Hello!", "I am the swiftkv demo model"),
        ("What is swiftkv?", "serves several language models from one machine"),
        ("What does os.path.join do?", "Join two or more pathname components"),
        ("Explain json.dumps.", "Serialize ``obj`` to a JSON formatted ``str``."),
    ],
)
def test_chat_answers(asked: str, answer: str) -> None:
    model, tokenizer = load("chat")
    messages = [{"role": "user", "content": asked}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**ids, max_new_tokens=48, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert answer in tokenizer.decode(generated, skip_special_tokens=True)
    assert generated[-1] == tokenizer.eos_token_id


def test_code_model_finds_code_likely() -> None:
    """Code it never saw: less than half the nats a token of a model that knows nothing."""
    model, tokenizer = load("code")
    text = Path(starlette.__file__).with_name("datastructures.py").read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :1024]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss < math.log(len(tokenizer)) / 2
