"""An engine says what transformers says: the same greedy tokens, however the step loop cuts up the work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from swiftkv.engine.runner import ModelRunner
from swiftkv.models.registry import read_config
from tests.engine.engine_process import Answer
from tests.engine.engine_thread import EngineThread
from tests.support.checkpoints import ARCHITECTURES, SHAPE, make_checkpoint

NUM_TOKENS = 128
ROUNDING = 1e-5  # of a log-probability: tokens that are closer may change places
ONE_SEQUENCE_BLOCKS = 20  # of max_model_len 320

# The budget of 64 tokens makes prompts of 70 and more come in chunks, or alone if they may not be cut.
MODES: dict[str, dict[str, object]] = {
    "chunked": {"max_num_batched_tokens": 64},
    "whole prompts": {"max_num_batched_tokens": 64, "enable_chunked_prefill": False},
    "without cache": {"max_num_batched_tokens": 100, "enable_prefix_caching": False},
    "preempted": {"max_num_batched_tokens": 256, "num_blocks": ONE_SEQUENCE_BLOCKS + 20},
    "ahead": {"max_num_batched_tokens": 64, "async_scheduling": True},
    "preempted ahead": {
        "max_num_batched_tokens": 256,
        "num_blocks": ONE_SEQUENCE_BLOCKS + 20,
        "async_scheduling": True,
    },
}


WINDOWS_ONLY = "mistral with windows only"
HYBRIDS: dict[str, dict[str, object]] = {
    "qwen3 with a window layer": {
        "arch": "qwen3",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 40,
        "use_sliding_window": True,
    },
    WINDOWS_ONLY: {"arch": "mistral", "sliding_window": 33},
}
MODELS: dict[str, dict[str, object]] = {arch: {"arch": arch} for arch in ARCHITECTURES} | HYBRIDS
DENSE = ("qwen3", "qwen2", "llama", "mistral")
SERVINGS = [
    *product(("qwen3", "qwen3 with a window layer"), MODES),
    *product([name for name in MODELS if name not in ("qwen3", *HYBRIDS)], ["preempted ahead"]),
    *product([WINDOWS_ONLY], ["chunked", "ahead"]),  # never preempted: a few blocks are enough for all of its windows
]
MORE_SERVINGS = sorted({*product(DENSE, MODES), *product(ARCHITECTURES, ["chunked"])} - {*SERVINGS})


def mixed_prompts() -> list[list[int]]:
    """16 prompts of 5 lengths, most of which begin like others; two are equal."""
    generator = np.random.default_rng(0)
    preambles = [generator.integers(3, SHAPE["vocab_size"], n).tolist() for n in (150, 48, 33)]
    lengths = [170, 170, 170, 170, 100, 100, 100, 100, 70, 70, 70, 70, 17, 17, 17, 1]
    prompts = []
    for i, length in enumerate(lengths):
        preamble = preambles[i % 3][: length - 1 - i % 5]
        prompts.append(preamble + generator.integers(3, SHAPE["vocab_size"], length - len(preamble)).tolist())
    return [*prompts[:-1], prompts[0]]


def greedy(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Return the tokens that transformers generates; prompts of equal length go through it together."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        by_length[len(prompt)].append(i)
    answers: list[list[int]] = [[]] * len(prompts)
    for length, indices in by_length.items():
        batch = torch.tensor([prompts[i] for i in indices])
        tokens = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        for i, row in zip(indices, tokens[:, length:].tolist(), strict=True):
            answers[i] = row
    return answers


def engine_of(checkpoint: Path, mode: str, dtype: str = "float32") -> EngineThread[ModelRunner]:
    options = dict(MODES[mode])
    num_blocks = int(str(options.pop("num_blocks", 16 * ONE_SEQUENCE_BLOCKS)))
    groups = read_config(checkpoint).kv_groups(16, dtype)
    if mode.startswith("preempted") and len(groups) > 1:
        num_blocks = ONE_SEQUENCE_BLOCKS + 2  # windows take few blocks, so a hybrid has more room in the same bytes
    return EngineThread(
        checkpoint,
        ModelRunner,
        dtype=dtype,
        kv_bytes=num_blocks * sum(group.block_bytes for group in groups),
        max_model_len=16 * ONE_SEQUENCE_BLOCKS,
        max_num_seqs=16,
        **options,
    )


@dataclass(frozen=True)
class Oracle:
    checkpoint: Path
    model: PreTrainedModel
    tokens: list[list[int]]  # of mixed_prompts()


@dataclass(frozen=True)
class Serving:
    oracle: Oracle
    mode: str
    engine: EngineThread[ModelRunner]


@pytest.fixture(scope="module")
def oracle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    @cache
    def make(name: str) -> Oracle:
        checkpoint = tmp_path_factory.mktemp(name.replace(" ", "-"))
        model = make_checkpoint(checkpoint, **MODELS[name])
        return Oracle(checkpoint, model, greedy(model, mixed_prompts()))

    return make


@pytest.fixture(
    scope="module",
    params=[*SERVINGS, *(pytest.param(serving, marks=pytest.mark.slow) for serving in MORE_SERVINGS)],
    ids=" ".join,
)
def serving(oracle_of: Callable[[str], Oracle], request: pytest.FixtureRequest) -> Iterator[Serving]:
    name, mode = request.param
    oracle = oracle_of(name)
    engine = engine_of(oracle.checkpoint, mode)
    with engine.running():
        yield Serving(oracle, mode, engine)


def test_greedy_tokens_are_those_of_transformers(serving: Serving) -> None:
    engine, expected, prompts = serving.engine, serving.oracle.tokens, mixed_prompts()
    alone = engine.generate(prompts[4:5], max_tokens=NUM_TOKENS)
    mixed = engine.generate(prompts, max_tokens=NUM_TOKENS)
    again = engine.generate(prompts[:1], max_tokens=NUM_TOKENS)
    assert [answer.token_ids for answer in (*alone, *mixed, *again)] == [expected[4], *expected, expected[0]]
    stats = engine.wait_for_rest()
    assert (stats.num_preemptions_total > 0) == serving.mode.startswith("preempted")
    assert (stats.prefix_hit_tokens_total > 0) == (serving.mode != "without cache")
    assert stats.num_used_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


def test_prompt_logprobs_are_those_of_transformers(serving: Serving) -> None:
    """The prompts are in the cache by now, if there is one."""
    prompts = mixed_prompts()[:6]
    answers = serving.engine.generate(prompts, max_tokens=4, prompt_logprobs=3, logprobs=3)
    for prompt, answer in zip(prompts, answers, strict=True):
        sequence = torch.tensor([prompt + answer.token_ids])
        with torch.inference_mode():
            expected = torch.log_softmax(serving.oracle.model(sequence).logits[0].double(), -1)
        assert answer.prompt_logprobs is not None
        entries = answer.prompt_logprobs + answer.logprobs
        assert len(entries) == sequence.shape[1] - 1
        for position, entry in enumerate(entries):
            row = expected[position]
            token = int(sequence[0, position + 1])
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
            certainly, perhaps = ((row > row[token] + sign * ROUNDING).sum() for sign in (1, -1))
            assert certainly < entry.rank <= perhaps
            assert entry.top_ids == row.topk(3).indices.tolist()
            assert entry.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)


def test_bfloat16_is_the_same_to_the_bit_in_every_mode(tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = tmp_path_factory.mktemp("bfloat16")
    make_checkpoint(checkpoint, "qwen3", dtype=torch.bfloat16)
    prompts = mixed_prompts()
    answers: dict[str, list[Answer]] = {}
    for mode in MODES:
        engine = engine_of(checkpoint, mode, "bfloat16")
        with engine.running():
            answers[mode] = [
                *engine.generate(prompts[:1], max_tokens=64, logprobs=2),
                *engine.generate(prompts, max_tokens=64, logprobs=2),
            ]
    reference = answers.pop("without cache")
    for mode, others in answers.items():
        for answer, other in zip(reference, others, strict=True):
            assert answer.token_ids == other.token_ids, mode
            assert answer.logprobs == other.logprobs, mode
