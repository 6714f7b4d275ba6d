"""The answers with embeddings and scores, as OpenAI, vLLM and Jina have them."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class CachedTokens(Struct):
    cached_tokens: int
    cached_tokens_details: dict[str, int] | UnsetType = UNSET
    """The cached tokens by where their KV lay, for requests that ask: local, peer, host, storage."""


class PooledUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET


class Embedding(Struct):
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32."""
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PooledUsage
    object: Literal["list"] = "list"


class Score(Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage
    object: Literal["list"] = "list"


class RankedText(Struct):
    text: str


class RankedDocument(Struct):
    index: int
    """The document's place in the request."""
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(Struct):
    """Documents, the most relevant first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PooledUsage
