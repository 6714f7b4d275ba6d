"""The text that asks a model like Qwen3-Reranker for a score, as its model card has it."""

from __future__ import annotations

from dataclasses import replace

from swiftkv.engine.messages import Pooling
from swiftkv.errors import CheckpointError
from swiftkv.models.pooling import ScoreRecipe
from swiftkv.server.errors import ApiError
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.truncation import Truncation

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
        pooling: The logits that are wanted after the text: those of yes, then of no.
    """

    def __init__(self, tokenizer: Tokenizer, recipe: ScoreRecipe) -> None:
        """Raises `CheckpointError` if the tokenizer lacks a special token of the text, or yes or no."""
        self._tokenizer = tokenizer
        for mark in _MARKS:
            if tokenizer.token_id(mark) is None:
                raise CheckpointError(
                    f"task: score is for models laid out like Qwen3-Reranker, but this tokenizer has no token {mark!r}"
                )
        self.pooling = Pooling(list(recipe.token_ids or (_answer(tokenizer, "yes"), _answer(tokenizer, "no"))))
        self._instruction = recipe.instruction or _INSTRUCTION
        self._before = tokenizer.encode(_BEFORE, add_special_tokens=False)
        self._behind = tokenizer.encode(_BEHIND, add_special_tokens=False)

    def encode(
        self, query: str, document: str, instruction: str | None = None, cut: Truncation | None = None
    ) -> list[int]:
        """Return the token ids of the whole text. A cut leaves the template's own words whole: the score follows them.

        Raises:
            ApiError: 400 if the cut leaves room for those words only.
        """
        asked = f"<Instruct>: {instruction or self._instruction}\n<Query>: {query}\n<Document>: {document}"
        inner = None if cut is None else self._between(cut)
        return [*self._before, *self._tokenizer.encode_content(asked, inner), *self._behind]

    def _between(self, cut: Truncation) -> Truncation:
        """Return the cut for the text between the template's own words, so that the whole has `cut`'s length."""
        num_own = len(self._before) + len(self._behind)
        if cut.max_tokens <= num_own:
            message = (
                f"field 'truncate_prompt_tokens' is {cut.max_tokens}, but the template around query and document has "
                f"{num_own} tokens: send more, or -1"
            )
            raise ApiError(400, message, param="truncate_prompt_tokens")
        return replace(cut, max_tokens=cut.max_tokens - num_own)


def _answer(tokenizer: Tokenizer, text: str) -> int:
    token_id = tokenizer.token_id(text)
    if token_id is None:
        raise CheckpointError(f"task: score reads the logits of yes and no, but this tokenizer has no token {text!r}")
    return token_id
