"""The answers about caches: what each holds, and why a request found no more there."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class ModelCache(Struct):
    """A model's cache, as its engine last reported it. Totals are since that engine started."""

    model: str
    blocks: dict[str, int]
    """Number of blocks in the pool by state: free, used by running requests, cached for those to come."""
    tokens: dict[str, int]
    """Tokens whose KV is in use or cached, by where it lies: local, peer, or host if it is attended there."""
    query_tokens_total: int
    """Prompt tokens of all requests that have begun."""
    hit_tokens_total: dict[str, int]
    """The prompt tokens that were not computed, by where their KV lay: local, peer, host, storage."""
    pinned_blocks: int
    """The number of blocks in use that pins keep."""
    pins: list[PinnedPrefix]


class PinnedPrefix(Struct):
    """A prefix that stays in a model's pool."""

    pin: int
    """The number to unpin it by."""
    tokens: int
    seconds_left: float
    state: Literal["kept", "lost"]
    """lost: a request that was alone in the model needed the room, or the bytes were lost with a lender."""


class CacheOverview(Struct):
    models: list[ModelCache]
    """The models whose engines have reported figures."""


class SequenceMatch(Struct):
    """One sequence of a request: what its prompt found in the cache, and why no more."""

    prompt_tokens: int
    cached_tokens: int
    reason: str
    meaning: str
    """The reason as a sentence."""
    age_s: float | None
    """Seconds from the eviction, if that is the reason, to the sequence's beginning."""


class ModelMatch(Struct):
    """The sequences that a model had of a request."""

    model: str
    sequences: list[SequenceMatch]


class RequestMatch(Struct):
    request_id: str
    model: str
    """The first model that had a request with this id."""
    sequences: list[SequenceMatch]
    others: list[ModelMatch]
    """Further models that had one: clients may give requests to several models the same id."""


class CacheCleared(Struct):
    model: str
    blocks: int
    """Cached blocks that were forgotten, of all KV groups."""


class PinChange(Struct):
    model: str
    pin: int
    state: Literal["pinned", "unpinned"]
    tokens: int | None
    """The number of tokens that were pinned."""
    seconds_left: float | None
