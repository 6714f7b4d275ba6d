"""Embeddings: from a request's texts to the list of their vectors."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from swiftkv.engine.messages import Pooling
from swiftkv.models.pooling import EmbeddingRecipe
from swiftkv.server.errors import ApiError
from swiftkv.server.models import ModelHandle
from swiftkv.server.pooling.bodies import EmbeddingBody
from swiftkv.server.pooling.objects import Embedding, EmbeddingList
from swiftkv.server.pooling.pool import Pooled, pool, unit_length
from swiftkv.server.price import check_pooled, check_text_lengths
from swiftkv.server.request_log import RequestRecord
from swiftkv.server.sampling import prompt_bytes
from swiftkv.server.truncation import Truncation, TruncationFields, asked_truncation

HIDDEN_STATE = Pooling()


async def embed(model: ModelHandle, body: EmbeddingBody, num_bytes: int, record: RequestRecord) -> bytes:
    """Return the answer to a request for embeddings, as JSON.

    Raises:
        ApiError: 400 for a field that does not fit the model; else as `pool`.
    """
    recipe = recipe_of(model)
    _check_dimensions(recipe, body.dimensions)
    prompts = await model.in_threads(lambda: _prompts(model, recipe, body), num_bytes)
    pooled = await pool(model, prompts, HIDDEN_STATE, body, record)
    return await model.in_threads(lambda: _answer(model, recipe, body, pooled, record), pooled.rows.nbytes)


def recipe_of(model: ModelHandle) -> EmbeddingRecipe:
    """Return the recipe of a model whose task is to embed."""
    assert isinstance(model.pooling, EmbeddingRecipe)
    return model.pooling


def text_prompts(
    model: ModelHandle,
    texts: Sequence[str],
    field: str,
    *,
    prompt_name: str | None = None,
    add_special_tokens: bool = True,
    cut: Truncation | None = None,
) -> list[list[int]]:
    """Return the token ids of texts, each after the checkpoint's prompt of that name, or its default one.

    `cut`: how texts that are too long are cut, the prompt before them included.

    Raises:
        ApiError: 400 if there is no such prompt, or a text is far too long.
    """
    recipe, tokenizer = recipe_of(model), model.tokenizer
    name = recipe.default_prompt if prompt_name is None else prompt_name
    if name is not None and name not in recipe.prompts:
        known = ", ".join(recipe.prompts) or "none"
        message = f"field 'prompt_name': the model has no prompt {name!r}; it has: {known}"
        raise ApiError(400, message, param="prompt_name")
    before = "" if name is None else recipe.prompts[name]
    for text in texts:
        tokenizer.refuse_hopeless(len(text), model.max_model_len, field, cut)
    return [tokenizer.encode(before + text, add_special_tokens=add_special_tokens, cut=cut) for text in texts]


def pooled_truncation(model: ModelHandle, body: TruncationFields) -> Truncation | None:
    """Return the cut that the texts of a request need; `None` if they stay whole. Raises as `asked_truncation` does."""
    return asked_truncation(body, model.max_model_len, 0, usual_side="right")


def _check_dimensions(recipe: EmbeddingRecipe, dimensions: int | None) -> None:
    known = recipe.dimensions
    if dimensions is None or dimensions == recipe.width:
        return
    if dimensions < recipe.width if known == "any" else dimensions in known:
        return
    taken = f"up to {recipe.width}" if known == "any" else ", ".join(map(str, known)) or f"only {recipe.width}"
    message = (
        f"field 'dimensions': {dimensions} is not supported; this model supports {taken}. The sizes are those of its "
        "config.json or of models[].matryoshka_dimensions"
    )
    raise ApiError(400, message, param="dimensions")


def _prompts(model: ModelHandle, recipe: EmbeddingRecipe, body: EmbeddingBody) -> list[bytes]:
    cut = pooled_truncation(model, body)
    whole = [prompt for prompt in body.inputs if not isinstance(prompt, str)]
    prompts = whole if cut is None else [cut.cut(prompt) for prompt in whole]
    texts = [text for text in body.inputs if isinstance(text, str)]
    if prompts and body.prompt_name is not None:
        raise ApiError(400, "field 'prompt_name' is for texts, but the input is token ids", param="prompt_name")
    prompts += text_prompts(
        model,
        texts,
        "input",
        prompt_name=body.prompt_name,
        add_special_tokens=body.add_special_tokens is not False,
        cut=cut,
    )
    numbers_each = body.dimensions or recipe.width
    num_tokens = [len(prompt) for prompt in prompts]
    check_text_lengths("input", num_tokens, model.max_model_len)
    check_pooled("input", num_tokens, numbers_each)
    return [prompt_bytes(model, prompt, "input") for prompt in prompts]


def _answer(
    model: ModelHandle, recipe: EmbeddingRecipe, body: EmbeddingBody, pooled: Pooled, record: RequestRecord
) -> bytes:
    rows = pooled.rows[:, : body.dimensions]
    if recipe.normalize and body.use_activation is not False:
        rows = unit_length(rows)
    return msgspec.json.encode(
        EmbeddingList(
            f"embd-{record.request_id}",
            int(time.time()),
            model.name,
            [Embedding(index, _vector(row, body.encoding_format or "float")) for index, row in enumerate(rows)],
            pooled.usage(model, body),
        )
    )


def _vector(row: npt.NDArray[np.float32], form: Literal["float", "base64"]) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers
