"""Scores of pairs of texts, and documents ranked by them.

A model that scores is asked about each pair. With a model that embeds, the score is the cosine of the angle between the
two embeddings, as in vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from swiftkv.server.errors import ApiError
from swiftkv.server.models import ModelHandle
from swiftkv.server.pooling.bodies import RerankBody, ScoreBody, ScoringBody
from swiftkv.server.pooling.embed import HIDDEN_STATE, pooled_truncation, recipe_of, text_prompts
from swiftkv.server.pooling.objects import PooledUsage, RankedDocument, RankedText, Ranking, Score, ScoreList
from swiftkv.server.pooling.pool import pool, unit_length
from swiftkv.server.price import check_pooled
from swiftkv.server.request_log import RequestRecord
from swiftkv.server.sampling import prompt_bytes

Pairs = Sequence[tuple[str, str]]
Scores = npt.NDArray[np.float64]


async def score(model: ModelHandle, body: ScoreBody, num_bytes: int, record: RequestRecord) -> bytes:
    """Return the answer to a request for scores, as JSON.

    Raises:
        ApiError: 400 for a field that does not fit the model; else as `pool`.
    """
    scores, usage = await _scores(model, body.pairs(), body, num_bytes, record)
    data = [Score(index, value) for index, value in enumerate(scores.tolist())]
    return msgspec.json.encode(ScoreList(f"score-{record.request_id}", int(time.time()), model.name, data, usage))


async def rerank(model: ModelHandle, body: RerankBody, num_bytes: int, record: RequestRecord) -> bytes:
    """Return a request's documents in order of their scores, as JSON. Raises as `score` does."""
    texts = body.texts
    scores, usage = await _scores(model, [(body.query, text) for text in texts], body, num_bytes, record)
    best = np.argsort(-scores, kind="stable")[: body.top_n or None].tolist()
    shows = body.return_documents is not False
    results = [
        RankedDocument(index, float(scores[index]), RankedText(texts[index]) if shows else UNSET) for index in best
    ]
    return msgspec.json.encode(Ranking(f"score-{record.request_id}", model.name, results, usage))


async def _scores(
    model: ModelHandle, pairs: Pairs, body: ScoringBody, num_bytes: int, record: RequestRecord
) -> tuple[Scores, PooledUsage]:
    if model.scoring is None:
        return await _cosines(model, pairs, body, num_bytes, record)
    prompts = await model.threads.run(lambda: _asked(model, pairs, body), num_bytes)
    pooled = await pool(model, prompts, model.scoring.pooling, body, record)
    yes, no = pooled.rows.astype(np.float64).T
    return np.exp(-np.logaddexp(0.0, no - yes)), pooled.usage(model, body)  # the softmax over both, of yes


def _asked(model: ModelHandle, pairs: Pairs, body: ScoringBody) -> list[bytes]:
    assert model.scoring is not None
    cut = pooled_truncation(model, body)
    for query, document in pairs:
        model.tokenizer.refuse_hopeless(len(query) + len(document), model.max_model_len, "documents", cut)
    prompts = [model.scoring.encode(*pair, instruction=body.instruction, cut=cut) for pair in pairs]
    check_pooled("documents", [len(prompt) for prompt in prompts], 1, model.max_model_len)
    return [prompt_bytes(model, prompt, "documents") for prompt in prompts]


async def _cosines(
    model: ModelHandle, pairs: Pairs, body: ScoringBody, num_bytes: int, record: RequestRecord
) -> tuple[Scores, PooledUsage]:
    if body.instruction is not None:
        message = f"field 'instruction' is for models that score, and '{model.name}' embeds; write it into the texts"
        raise ApiError(400, message, param="instruction")
    row_of = {text: row for row, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
    prompts = await model.threads.run(lambda: _embedded(model, list(row_of), body), num_bytes)
    pooled = await pool(model, prompts, HIDDEN_STATE, body, record)
    rows = unit_length(pooled.rows).astype(np.float64)
    left, right = (rows[[row_of[pair[side]] for pair in pairs]] for side in (0, 1))
    return (left * right).sum(axis=-1), pooled.usage(model, body)


def _embedded(model: ModelHandle, texts: Sequence[str], body: ScoringBody) -> list[bytes]:
    prompts = text_prompts(model, texts, "documents", cut=pooled_truncation(model, body))
    check_pooled("documents", [len(prompt) for prompt in prompts], recipe_of(model).width, model.max_model_len)
    return [prompt_bytes(model, prompt, "documents") for prompt in prompts]
