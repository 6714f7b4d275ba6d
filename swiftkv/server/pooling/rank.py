"""Scores of pairs of texts, and documents ranked by them.

A model that scores is asked about each pair. With a model that embeds, the score is the cosine of the angle between the
two embeddings, as in vLLM.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from swiftkv.server.errors import ApiError
from swiftkv.server.models import ModelHandle
from swiftkv.server.pooling.bodies import RerankBody, ScoreBody, ScoringBody, Sides
from swiftkv.server.pooling.embed import HIDDEN_STATE, pooled_truncation, recipe_of, text_prompts
from swiftkv.server.pooling.objects import PooledUsage, RankedDocument, RankedText, Ranking, Score, ScoreList
from swiftkv.server.pooling.pool import pool, unit_length
from swiftkv.server.pooling.template import ScoreTemplate
from swiftkv.server.price import check_pooled, check_text_lengths
from swiftkv.server.request_log import RequestRecord
from swiftkv.server.sampling import prompt_bytes

Scores = npt.NDArray[np.float64]


async def score(model: ModelHandle, body: ScoreBody, num_bytes: int, record: RequestRecord) -> bytes:
    """Return the answer to a request for scores, as JSON.

    Raises:
        ApiError: 400 for a field that does not fit the model; else as `pool`.
    """
    scores, usage = await _scores(model, body.sides(), body, num_bytes, record)
    data = [Score(index, value) for index, value in enumerate(scores.tolist())]
    return msgspec.json.encode(ScoreList(f"score-{record.request_id}", int(time.time()), model.name, data, usage))


async def rerank(model: ModelHandle, body: RerankBody, num_bytes: int, record: RequestRecord) -> bytes:
    """Return a request's documents in order of their scores, as JSON. Raises as `score` does."""
    sides = body.sides()
    scores, usage = await _scores(model, sides, body, num_bytes, record)
    best = np.argsort(-scores, kind="stable")[: body.top_n or None].tolist()
    shows = body.return_documents is not False
    texts = sides[1].texts
    results = [
        RankedDocument(index, float(scores[index]), RankedText(texts[index]) if shows else UNSET) for index in best
    ]
    return msgspec.json.encode(Ranking(f"score-{record.request_id}", model.name, results, usage))


async def _scores(
    model: ModelHandle, sides: Sides, body: ScoringBody, num_bytes: int, record: RequestRecord
) -> tuple[Scores, PooledUsage]:
    template = model.pooling
    if not isinstance(template, ScoreTemplate):
        return await _cosines(model, sides, body, num_bytes, record)
    prompts = await model.in_threads(lambda: _asked(model, template, sides, body), num_bytes)
    pooled = await pool(model, prompts, template.pooling, body, record)
    yes, no = pooled.rows.astype(np.float64).T
    return np.exp(-np.logaddexp(0.0, no - yes)), pooled.usage(model, body)  # the softmax over the two logits, at yes


def _pairs(sides: Sides) -> list[tuple[str, str]]:
    left, right = (side.texts for side in sides)
    return list(zip(left * len(right) if len(left) == 1 else left, right, strict=True))


def _asked(model: ModelHandle, template: ScoreTemplate, sides: Sides, body: ScoringBody) -> list[bytes]:
    left, right = sides
    pairs, cut = _pairs(sides), pooled_truncation(model, body)
    # The longer text is the one to blame for a pair that is too long.
    longer = [left if len(query) > len(document) else right for query, document in pairs]
    for (query, document), side in zip(pairs, longer, strict=True):
        model.tokenizer.refuse_hopeless(len(query) + len(document), model.max_model_len, side.field, cut)
    prompts = [template.encode(*pair, instruction=body.instruction, cut=cut) for pair in pairs]
    num_tokens = {side.field: [0] * len(side.texts) for side in sides}
    for row, (prompt, side) in enumerate(zip(prompts, longer, strict=True)):
        lengths = num_tokens[side.field]
        place = row % len(lengths)  # a single text is in every pair
        lengths[place] = max(lengths[place], len(prompt))
    for field, lengths in num_tokens.items():
        check_text_lengths(field, lengths, model.max_model_len)
    check_pooled(right.field, [len(prompt) for prompt in prompts], 1)
    return [prompt_bytes(model, prompt, right.field) for prompt in prompts]


async def _cosines(
    model: ModelHandle, sides: Sides, body: ScoringBody, num_bytes: int, record: RequestRecord
) -> tuple[Scores, PooledUsage]:
    if body.instruction is not None:
        message = f"field 'instruction' is for models that score, but '{model.name}' embeds; write it into the texts"
        raise ApiError(400, message, param="instruction")
    prompts = await model.in_threads(lambda: _embedded(model, sides, body), num_bytes)
    pooled = await pool(model, list(prompts.values()), HIDDEN_STATE, body, record)
    rows = unit_length(pooled.rows).astype(np.float64)
    row_of = {text: row for row, text in enumerate(prompts)}
    left, right = (rows[[row_of[text] for text in texts]] for texts in zip(*_pairs(sides), strict=True))
    return (left * right).sum(axis=-1), pooled.usage(model, body)


def _embedded(model: ModelHandle, sides: Sides, body: ScoringBody) -> dict[str, bytes]:
    """Return the prompt of each text. A text that occurs several times is computed once."""
    _, right = sides
    cut = pooled_truncation(model, body)
    num_tokens: dict[str, int] = {}
    prompts: dict[str, bytes] = {}
    for side in sides:
        new = [text for text in dict.fromkeys(side.texts) if text not in prompts]
        token_ids = text_prompts(model, new, side.field, cut=cut)
        num_tokens |= {text: len(ids) for text, ids in zip(new, token_ids, strict=True)}
        check_text_lengths(side.field, [num_tokens[text] for text in side.texts], model.max_model_len)
        prompts |= {text: prompt_bytes(model, ids, side.field) for text, ids in zip(new, token_ids, strict=True)}
    check_pooled(right.field, list(num_tokens.values()), recipe_of(model).width)
    return prompts
