"""The requests for embeddings and for scores: OpenAI's fields, vLLM's, and those that Jina and Cohere share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, Tag

from swiftkv.server.errors import ApiError
from swiftkv.server.fields import INT32_MAX, Body, Label, Text, Unsupported
from swiftkv.server.price import LIMITS
from swiftkv.server.protocol import PROMPT_KINDS, ModelBody, TokenIds, each_prompt
from swiftkv.server.truncation import TruncationFields

Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=LIMITS.texts)]
OneOrMany = Text | Texts
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class PooledBody(ModelBody):
    """The fields that all of these requests may have."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    return_cached_tokens_details: bool | None = Field(
        None, description="Whether `usage` says in which tiers cached tokens were found"
    )
    user: Label | None = Field(None, description="Accepted, not used")
    padding: Annotated[None, Unsupported("do_not_pad")] = None
    mm_processor_kwargs: Annotated[None, Unsupported({})] = None


Input = Annotated[
    Annotated[Text, Tag("one_text")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[TokenIds, Field(min_length=1), Tag("token_ids")]
    | Annotated[
        list[Annotated[TokenIds, Field(min_length=1)]],
        Field(fail_fast=True, min_length=1, max_length=LIMITS.texts),
        Tag("token_id_lists"),
    ],
    PROMPT_KINDS,
]


class EmbeddingBody(PooledBody, TruncationFields):
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(
        None, description="The length of an embedding, one of those that the model was trained for"
    )
    prompt_name: Label | None = Field(
        None, description="The name of one of the checkpoint's prompts, which is put before each text"
    )
    add_special_tokens: bool | None = None
    use_activation: bool | None = Field(None, description="false: embeddings are not normalized to length 1")
    embed_dtype: Annotated[None, Unsupported("float32")] = None
    endianness: Annotated[None, Unsupported("native", "little")] = None
    messages: Annotated[None, Unsupported()] = None

    @property
    def inputs(self) -> list[str | list[int]]:
        return each_prompt(self.input)


@dataclass(frozen=True, slots=True)
class Side:
    """The texts on one side of the pairs to score, and the name of the field that has them."""

    field: str
    texts: list[str]


Sides = tuple[Side, Side]
"""The sides of the pairs: one text on the left goes with each on the right, or as many go with as many."""


class ScoringBody(PooledBody, TruncationFields):
    """The fields that requests for scores have, whichever way they give their texts."""

    instruction: Text | None = Field(None, description="An instruction that replaces the checkpoint's")
    use_activation: Annotated[None, Unsupported(True)] = None


class ScoreBody(ScoringBody):
    """vLLM's `/v1/score`. One text on the left is paired with each on the right, or as many in order."""

    text_1: OneOrMany | None = None
    text_2: OneOrMany | None = Field(None, description="Required with `text_1`")
    queries: OneOrMany | None = None
    documents: OneOrMany | None = Field(None, description="With `queries`")
    items: OneOrMany | None = Field(None, description="With `queries`")
    data_1: OneOrMany | None = None
    data_2: OneOrMany | None = Field(None, description="With `data_1`")

    def sides(self) -> Sides:
        """Return both sides of the pairs to score.

        Raises:
            ApiError: 400 unless one pair of fields is given, with texts that make pairs.
        """
        given = {name for pair in _PAIRS for name in pair if getattr(self, name) is not None}
        named = next((pair for pair in _PAIRS if given == set(pair)), None)
        if named is None:
            raise ApiError(400, "give fields 'text_1' and 'text_2', or 'queries' and 'documents'", param="text_1")
        left, right = (Side(name, _listed(getattr(self, name))) for name in named)
        num_left, num_right = len(left.texts), len(right.texts)
        if num_left not in (1, num_right):
            message = (
                f"field '{left.field}' has {num_left} texts, but field '{right.field}' has {num_right}: give one text, "
                "or as many"
            )
            raise ApiError(400, message, param=left.field)
        return left, right


class DocumentText(Body):
    text: Text


Document = Text | DocumentText


class RerankBody(ScoringBody):
    """The request that clients of Jina, Cohere and vLLM send to have documents ranked."""

    query: Text
    documents: Annotated[list[Document], Field(fail_fast=True, min_length=1, max_length=LIMITS.texts)]
    top_n: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = Field(None, description="0: all")
    return_documents: bool | None = Field(None, description="false: the answer does not repeat the documents")
    max_tokens_per_doc: Annotated[None, Unsupported()] = None
    max_chunks_per_doc: Annotated[None, Unsupported()] = None
    rank_fields: Annotated[None, Unsupported(["text"])] = None

    def sides(self) -> Sides:
        """Return the query, which goes with each document."""
        texts = [document if isinstance(document, str) else document.text for document in self.documents]
        return Side("query", [self.query]), Side("documents", texts)


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)
