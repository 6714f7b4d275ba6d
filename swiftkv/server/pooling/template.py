"""The text that a model like Qwen3-Reranker is asked for a score, as its model card has it."""

from __future__ import annotations

from swiftkv.engine.messages import Pooling
from swiftkv.errors import CheckpointError
from swiftkv.models.pooling import ScoreRecipe
from swiftkv.server.tokenizer import Tokenizer

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_MARKS = ("<|im_start|>", "<|im_end|>")


class ScoreTemplate:
    """Lays out a query and a document; the model then says yes or no.

    Attributes:
        pooling: The logits that are wanted behind the text: those of yes, then of no.
    """

    def __init__(self, tokenizer: Tokenizer, recipe: ScoreRecipe) -> None:
        """Raises `CheckpointError` if the tokenizer lacks what the text is made of, or yes or no."""
        self._tokenizer = tokenizer
        for mark in _MARKS:
            if tokenizer.token_id(mark) is None:
                raise CheckpointError(
                    f"task: score is for models laid out like Qwen3-Reranker, and this tokenizer has no token {mark!r}"
                )
        self.pooling = Pooling(list(recipe.token_ids or (_answer(tokenizer, "yes"), _answer(tokenizer, "no"))))
        self._instruction = recipe.instruction or _INSTRUCTION
        self._before = tokenizer.encode(_BEFORE, add_special_tokens=False)
        self._behind = tokenizer.encode(_BEHIND, add_special_tokens=False)

    def encode(self, query: str, document: str, instruction: str | None = None) -> list[int]:
        """Return the token ids of the whole text."""
        asked = f"<Instruct>: {instruction or self._instruction}\n<Query>: {query}\n<Document>: {document}"
        return [*self._before, *self._tokenizer.encode_content(asked), *self._behind]


def _answer(tokenizer: Tokenizer, text: str) -> int:
    token_id = tokenizer.token_id(text)
    if token_id is None:
        raise CheckpointError(f"task: score reads the logits of yes and no, and this tokenizer has no token {text!r}")
    return token_id
