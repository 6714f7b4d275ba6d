"""The dense decoder against transformers on the same random checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PreTrainedModel

from swiftkv.errors import ConfigError
from swiftkv.kernels.dispatch import cpu_ops
from swiftkv.kernels.ops import AnyOps
from swiftkv.models.decoder import Decoder
from swiftkv.models.files import check_tensors
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import DECODERS, read_config
from swiftkv.models.weights import RankSlices
from tests.support.checkpoints import SHAPE, load_oracle, make_checkpoint, rewrite_config, to_old_style
from tests.support.paged import PagedRunner

ORIGINAL = 32  # positions before scaling: the longest prompt is three times that
LENGTHS = (1, 16, 37, 100)
CHUNKS = ((1000,), (7, 1, 40, 16, 3), (64, *(1,) * 30))  # whole prompts, a mixture, mostly single tokens as in decode


def rope(rope_type: str, **values: Any) -> dict[str, Any]:
    parameters = {"rope_type": rope_type, "rope_theta": 1000.0, "factor": 4.0} | values
    return {"rope_parameters": parameters, "max_position_embeddings": 128}


def yarn(**values: Any) -> dict[str, Any]:
    return rope("yarn", original_max_position_embeddings=ORIGINAL, **values)


MINISTRAL = {"model_type": "ministral3"}
LLAMA3 = rope("llama3", original_max_position_embeddings=ORIGINAL, low_freq_factor=1.0, high_freq_factor=4.0)

CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"arch": "qwen3"},
    "qwen3-tied": {"arch": "qwen3", "tie_word_embeddings": True},
    "qwen3-bias": {"arch": "qwen3", "attention_bias": True},
    "qwen3-mha": {"arch": "qwen3", "num_key_value_heads": 4, "head_dim": 16},
    "qwen3-yarn": {"arch": "qwen3"} | yarn(),
    "qwen2": {"arch": "qwen2"},
    "qwen2-tied": {"arch": "qwen2", "tie_word_embeddings": True},
    "qwen2-mha": {"arch": "qwen2", "num_key_value_heads": 4},
    "qwen2-yarn": {"arch": "qwen2"} | yarn(),
    "llama": {"arch": "llama"},
    "llama-tied": {"arch": "llama", "tie_word_embeddings": True},
    "llama-bias": {"arch": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-mha": {"arch": "llama", "num_key_value_heads": 4},
    "llama-mqa": {"arch": "llama", "num_key_value_heads": 1, "head_dim": 64},
    "llama-theta": {"arch": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "llama-linear": {"arch": "llama"} | rope("linear") | {"max_position_embeddings": ORIGINAL},
    "llama-dynamic": {"arch": "llama"} | rope("dynamic"),  # below max_position_embeddings; above has its own test
    "llama-llama3": {"arch": "llama"} | LLAMA3,
    "llama-yarn": {"arch": "llama"} | yarn(),
    "llama-yarn-attention-factor": {"arch": "llama"} | yarn(attention_factor=1.4, beta_fast=16.0, beta_slow=2.0),
    "llama-yarn-mscale": {"arch": "llama"} | yarn(mscale=1.2, mscale_all_dim=0.6),
    "llama-yarn-untruncated": {"arch": "llama"} | yarn(truncate=False),
    "mistral": {"arch": "mistral"},
    "mistral-window": {"arch": "mistral", "sliding_window": 20, "num_key_value_heads": 4},
    "qwen3-windows": {
        "arch": "qwen3",
        "num_hidden_layers": 4,
        "max_window_layers": 2,
        "sliding_window": 33,
        "use_sliding_window": True,
    },
    "mimo": {"arch": "mimo"},
    "mimo-groups": {
        "arch": "mimo",
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
    },
    "gpt_oss": {"arch": "gpt_oss"},
    "gpt_oss-limit": {"arch": "gpt_oss", "swiglu_limit": 0.5, "num_hidden_layers": 3},
    "gemma2": {"arch": "gemma2", "num_hidden_layers": 3},
    "gemma2-bias": {"arch": "gemma2", "attention_bias": True, "attn_logit_softcapping": 5.0},
    "gemma3": {"arch": "gemma3", "num_hidden_layers": 3},
    "gemma3-cap": {"arch": "gemma3", "final_logit_softcapping": 4.0},
    "gemma3-windows": {"arch": "gemma3", "num_hidden_layers": 3, "sliding_window_pattern": 3, "sliding_window": 17},
    "qwen2-windows": {"arch": "qwen2", "max_window_layers": 1, "sliding_window": 17, "use_sliding_window": True},
    "qwen3_moe": {"arch": "qwen3_moe"},
    "qwen3_moe-raw": {"arch": "qwen3_moe", "norm_topk_prob": False, "attention_bias": True},
    "qwen3_moe-sparse": {"arch": "qwen3_moe", "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen3_moe-window": {"arch": "qwen3_moe", "use_sliding_window": True, "sliding_window": 24},
    "mixtral": {"arch": "mixtral"},
    "mixtral-theta": {"arch": "mixtral", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make the checkpoint of a case at its first use: (directory, oracle)."""

    @cache
    def make(case: str) -> tuple[Path, PreTrainedModel]:
        directory = tmp_path_factory.mktemp(case)
        return directory, make_checkpoint(directory, **CASES[case])

    return make


def load(directory: Path, ops: AnyOps, dtype: torch.dtype = torch.float32, max_model_len: int = 128) -> Decoder:
    config = read_config(directory)
    return load_decoder(config, MappedWeights(directory), dtype, "cpu", max_model_len, ops=ops)


def make_prompts(vocab_size: int = 320) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(1)
    return {f"prompt{length}": torch.randint(vocab_size, (length,), generator=generator).tolist() for length in LENGTHS}


@torch.inference_mode()
def oracle_logits(model: PreTrainedModel, prompts: Mapping[str, list[int]]) -> dict[str, Tensor]:
    return {name: model(torch.tensor([prompt])).logits[0].float() for name, prompt in prompts.items()}


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float = 1e-4) -> None:
    assert actual.keys() == expected.keys()
    for name, logits in expected.items():
        torch.testing.assert_close(actual[name], logits, atol=atol, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_at_every_position(case: str, ops: AnyOps, checkpoint: Any) -> None:
    directory, model = checkpoint(case)
    decoder, prompts = load(directory, ops), make_prompts()
    expected = oracle_logits(model, prompts)
    assert all(logits.std() > 0.3 for logits in expected.values()), "logits too flat to tell anything"
    for chunks in CHUNKS:
        assert_same(PagedRunner(decoder).run(prompts, chunks), expected)


@pytest.mark.parametrize("case", [case for case in CASES if "-" in case and case.split("-")[1] not in ("tied", "mha")])
def test_the_older_spelling_of_config_json_means_the_same(case: str, checkpoint: Any, tmp_path: Path) -> None:
    directory, _ = checkpoint(case)
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    to_old_style(tmp_path)
    assert read_config(tmp_path) == read_config(directory)


def test_dynamic_rope_beyond_its_positions_equals_transformers_token_by_token(ops: AnyOps, tmp_path: Path) -> None:
    model = make_checkpoint(
        tmp_path, "llama", max_position_embeddings=ORIGINAL, rope_parameters=rope("dynamic")["rope_parameters"]
    )
    prompt = make_prompts()["prompt100"]
    expected, cache = [], None
    with torch.inference_mode():
        for token in prompt:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            expected.append(out.logits[0])
    decoder = load(tmp_path, ops)
    for chunks in CHUNKS:
        logits = PagedRunner(decoder).run({"prompt": prompt}, chunks)
        assert_same(logits, {"prompt": torch.cat(expected)})


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_checkpoints(tied: bool, ops: AnyOps, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3", max_shard_size="100KB", tie_word_embeddings=tied)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompts = make_prompts()
    logits = PagedRunner(load(tmp_path, ops)).run(prompts, (1000,))
    assert_same(logits, oracle_logits(model, prompts))


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16])
def test_a_half_precision_checkpoint_served_in_float32(saved: torch.dtype, ops: AnyOps, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", dtype=saved)
    model, prompts = load_oracle(tmp_path), make_prompts()
    logits = PagedRunner(load(tmp_path, ops)).run(prompts, (16,))
    assert_same(logits, oracle_logits(model, prompts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["qwen3", "qwen2", "llama-bias", "mistral"])
def test_half_precision_is_about_as_exact_as_transformers_is(
    case: str, dtype: torch.dtype, ops: AnyOps, checkpoint: Any, tmp_path: Path
) -> None:
    """Both err from the float32 model on the same rounded weights; ours may not err much more."""
    half = make_checkpoint(tmp_path, dtype=dtype, **CASES[case])
    prompts = make_prompts()
    theirs = oracle_logits(half, prompts)
    exact = oracle_logits(load_oracle(tmp_path), prompts)
    ours = PagedRunner(load(tmp_path, ops, dtype)).run(prompts, (1000,))
    for name, logits in exact.items():
        assert (ours[name] - logits).std() < 1.5 * (theirs[name] - logits).std()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral"])
def test_half_precision_with_experts_is_about_as_exact_for_most_tokens(
    case: str, dtype: torch.dtype, ops: AnyOps, tmp_path: Path
) -> None:
    """Where two experts are nearly equal, rounding may choose another one: a token's whole error then."""
    half = make_checkpoint(tmp_path, dtype=dtype, **CASES[case])
    prompts = make_prompts()
    exact = oracle_logits(load_oracle(tmp_path), prompts)
    errors = [
        torch.cat([(logits[name] - exact[name]).std(-1) for name in prompts])
        for logits in (PagedRunner(load(tmp_path, ops, dtype)).run(prompts, (1000,)), oracle_logits(half, prompts))
    ]
    assert errors[0].median() < 1.5 * errors[1].median()


@pytest.mark.usefixtures("needs_cpu_ops")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["qwen3", "llama-bias", "qwen3_moe-raw", "mixtral"])
def test_cpu_logits_do_not_depend_on_chunks_batch_or_blocks(case: str, dtype: torch.dtype, checkpoint: Any) -> None:
    """They are equal to the bit; this makes the prefix cache, chunking and preemption invisible."""
    decoder, prompts = load(checkpoint(case)[0], cpu_ops(), dtype), make_prompts()
    expected = PagedRunner(decoder).run(prompts, (1000,))
    for seed, chunks in enumerate(CHUNKS[1:], start=1):
        assert_same(PagedRunner(decoder, seed=seed).run(prompts, chunks), expected, atol=0)
    decoder.ops.set_num_threads(3)
    assert_same(PagedRunner(decoder).run(prompts, (1000,)), expected, atol=0)
    decoder.ops.set_num_threads(1)
    for key, prompt in prompts.items():
        assert_same(PagedRunner(decoder, seed=3).run({key: prompt}, (24,)), {key: expected[key]}, atol=0)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
@pytest.mark.parametrize("case", ["qwen3-yarn"])
def test_older_instruction_sets_are_as_exact(isa: str, case: str, checkpoint: Any, tmp_path: Path) -> None:
    """In a process of its own: the extension chooses once."""
    directory, model = checkpoint(case)
    prompts = make_prompts()
    subprocess.run(
        [sys.executable, "-m", "tests.support.paged", str(directory), str(tmp_path / "logits")],
        input=json.dumps({"prompts": prompts, "chunks": CHUNKS, "dtypes": ["float32", "bfloat16"]}),
        env=os.environ | {"SWIFTKV_CPU_ISA": isa},
        text=True,
        check=True,
    )
    actual, expected = load_file(tmp_path / "logits"), oracle_logits(model, prompts)
    for name, (dtype, atol) in itertools.product(prompts, (("float32", 1e-4), ("bfloat16", 0.3))):
        whole, *cut = (actual[f"{dtype}/{name}/{i}"] for i in range(len(CHUNKS)))
        torch.testing.assert_close(whole, expected[name], atol=atol, rtol=0)
        assert all(torch.equal(whole, same) for same in cut)


def test_layers_may_share_one_layer_block(ops: AnyOps, checkpoint: Any) -> None:
    """Negative entries: where every layer in turn uses the same place, a whole prompt in one step still fits."""
    directory, model = checkpoint("qwen3")
    decoder, prompts = load(directory, ops), make_prompts()
    runner = PagedRunner(decoder, shared_layers=True)
    assert_same(runner.run(prompts, (1000,)), oracle_logits(model, prompts))


@pytest.mark.parametrize("save_original_format", [True, False], ids=["as published", "as modules"])
def test_the_text_model_of_mistral_3(ops: AnyOps, tmp_path: Path, save_original_format: bool) -> None:
    """Mistral Small 3.1 and 3.2 see images, too; their head is not tied, and lies beside the text model."""
    text = {key: value for key, value in SHAPE.items() if "token_id" not in key} | {"model_type": "mistral"}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Mistral3ForConditionalGeneration(
            Mistral3Config(
                text_config=text, vision_config=vision | {"model_type": "pixtral"}, tie_word_embeddings=False
            )
        ).eval()
    model.save_pretrained(tmp_path, save_original_format=save_original_format)
    config = read_config(tmp_path)
    check_tensors(tmp_path, DECODERS[config.architecture].weights(config, RankSlices.of(config, 0, 1)))
    prompt = torch.randint(11, 320, (60,), generator=torch.Generator().manual_seed(1))  # 10 stands for an image
    with torch.inference_mode():
        expected = model(prompt[None]).logits[0]
    logits = PagedRunner(load(tmp_path, ops)).run({"prompt": prompt.tolist()}, (7, 1, 40))["prompt"]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    rewrite_config(tmp_path, text_config=json.loads((tmp_path / "config.json").read_text())["text_config"] | MINISTRAL)
    with pytest.raises(ConfigError, match=r"text_config\.model_type: 'ministral3'"):
        read_config(tmp_path)
