"""Pooled requests: what an engine has for the last position of a prompt is what transformers has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from swiftkv.engine.messages import POOLED_TOKEN, EngineStats, Pooling
from swiftkv.engine.runner import ModelRunner
from swiftkv.models.pooling import ScoreRecipe
from swiftkv.server.pooling.template import ScoreTemplate
from swiftkv.server.tokenizer import Tokenizer
from tests.engine.engine_process import EngineProcess
from tests.engine.engine_thread import EngineThread
from tests.support.pooling import (
    card_prompt,
    card_score,
    hidden_state,
    make_embedding_checkpoint,
    make_reranker_checkpoint,
)

CHUNK = 48  # tokens of a step
PREAMBLE = [3 + i * i % 290 for i in range(150)]
PROMPTS = [PREAMBLE[: 20 + 13 * i] + [7 + i] * (1 + 11 * i) for i in range(8)]
NO_TOKENS = {"max_tokens": 1, "stop_token_ids": [POOLED_TOKEN]}
Engine = EngineThread[ModelRunner]


@contextmanager
def running(checkpoint: Path, task: str, **options: object) -> Iterator[Engine]:
    engine = EngineThread(checkpoint, ModelRunner, task=task, max_num_batched_tokens=CHUNK, **options)
    with engine.running():
        yield engine


def pool(
    engine: Engine, prompts: Sequence[Sequence[int]], pooling: Pooling | None = None
) -> list[npt.NDArray[np.float32]]:
    requests = [engine.add(prompt, pooling=pooling or Pooling(), **NO_TOKENS) for prompt in prompts]
    answers = engine.wait(requests)
    assert [answer.token_ids for answer in answers] == [[]] * len(prompts)
    return [np.frombuffer(answer.pooled or b"", np.float32) for answer in answers]


def assert_at_rest(stats: EngineStats) -> None:
    assert stats.num_used_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert stats.generation_tokens_total == 0


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("embedding")
    return directory, make_embedding_checkpoint(directory)


def test_hidden_states_are_those_of_transformers(embedding: tuple[Path, PreTrainedModel]) -> None:
    """Prompts are cut into chunks, run beside each other, and are found in the cache the second time."""
    checkpoint, oracle = embedding
    with running(checkpoint, "embed") as engine:
        first = pool(engine, PROMPTS)
        again = pool(engine, PROMPTS)
        stats = engine.wait_for_rest()
    for prompt, found in zip(PROMPTS, first, strict=True):
        np.testing.assert_allclose(found, hidden_state(oracle, prompt).numpy(), atol=2e-4)
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
    assert stats.prefix_hit_tokens_total > sum(map(len, PROMPTS)) // 2
    assert_at_rest(stats)


def test_prompts_that_wait_for_room_and_are_planned_ahead(embedding: tuple[Path, PreTrainedModel]) -> None:
    """The pool holds a few of them at once, and a step is planned before the one before it has ended."""
    checkpoint, oracle = embedding
    with running(checkpoint, "embed", kv_bytes=1 << 19, max_model_len=256, async_scheduling=True) as engine:
        found = pool(engine, PROMPTS * 3)
        stats = engine.wait_for_rest()
    expected = [hidden_state(oracle, prompt).numpy() for prompt in PROMPTS] * 3
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)
    assert_at_rest(stats)


def test_the_score_of_the_model_card(tmp_path: Path) -> None:
    oracle = make_reranker_checkpoint(tmp_path, max_position_embeddings=2048)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    template = ScoreTemplate(Tokenizer.from_pretrained(tmp_path), ScoreRecipe())
    pairs = [("where is it", "here it is"), ("where is it", "there is nothing " * 5), ("who", "")]
    prompts = [template.encode(query, document) for query, document in pairs]
    assert prompts == [card_prompt(reference, query, document) for query, document in pairs]
    with running(tmp_path, "score", max_model_len=2048) as engine:
        found = pool(engine, prompts, template.pooling)
        assert_at_rest(engine.wait_for_rest())
    for prompt, logits in zip(prompts, found, strict=True):
        assert torch.softmax(torch.tensor(logits), 0)[0].item() == pytest.approx(
            card_score(oracle, reference, prompt), abs=1e-4
        )


def test_requests_of_another_task_are_refused(embedding: tuple[Path, PreTrainedModel]) -> None:
    checkpoint, _ = embedding
    with running(checkpoint, "embed") as engine:
        refused = [
            engine.add([5, 6]),
            engine.add([5, 6], pooling=Pooling([3, 4]), **NO_TOKENS),
            engine.add([5, 6], pooling=Pooling(), max_tokens=2),
            engine.add([5, 6], pooling=Pooling(), prompt_logprobs=1, **NO_TOKENS),
        ]
        errors = [answer.error for answer in engine.wait(refused)]
        assert len(pool(engine, [[5, 6]])[0]) == 64
    assert [error and error.status for error in errors] == [400] * 4


@pytest.mark.slow
def test_two_ranks_embed_as_one(embedding: tuple[Path, PreTrainedModel]) -> None:
    checkpoint, oracle = embedding
    options = {"task": "embed", "tensor_parallel_size": 2, "max_num_batched_tokens": CHUNK}
    with EngineProcess(checkpoint, **options) as engine:
        requests = [engine.add(prompt, pooling=Pooling(), **NO_TOKENS) for prompt in PROMPTS]
        found = [np.frombuffer(answer.pooled or b"", np.float32) for answer in engine.wait(requests)]
    for prompt, one in zip(PROMPTS, found, strict=True):
        np.testing.assert_allclose(one, hidden_state(oracle, prompt).numpy(), atol=2e-4)
