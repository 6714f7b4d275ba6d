"""The answers about the node itself: its engines, lending, pools, and what all models do at the moment.

A field that is `None` is written as `null`: it is not known, or there is none.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from swiftkv.lease.messages import GroupBlocks
from swiftkv.server.errors import ErrorResponse


class Health(Struct):
    status: Literal["ok"] = "ok"


class Loading(Struct):
    """The weights that an engine has loaded, of all that it needs."""

    loaded_bytes: int
    total_bytes: int
    left_s: float | None
    """Seconds that the rest is expected to take; null: nothing can be said yet."""
    gives_way: bool
    """Whether loading gives way to the work of other models, which have requests."""


class EngineView(Struct):
    state: str
    why: str | None
    """The reason for the state; null for an engine that is ready."""
    since_s: float
    """Seconds since the engine entered the state."""
    in_flight: int
    """Sequences that wait or run."""
    progress_age_s: float | None
    """Seconds since its step loop last showed progress; null: there is no process."""
    restarts: int
    """Number of restarts since the node came up."""
    pid: int | None
    storage: Literal["ok", "degraded"] | None = None
    """The state of the storage tier, which is degraded while it is left alone; null: there is none."""
    storage_backend: str | None = None
    """The backend of the storage tier, as `tiers.storage.backend` names it; null: there is none."""
    loading: Loading | None = None
    """The progress of an engine that loads its weights; null for any other."""


class Readiness(Struct):
    status: Literal["ready"]
    models: dict[str, str]
    """Engine states by model."""
    engines: dict[str, EngineView]


class NotReady(ErrorResponse):
    models: dict[str, str]
    engines: dict[str, EngineView]


class Version(Struct):
    version: str


class LinkView(Struct):
    """One KV group of a lender paired with one of a borrower, as one of the two sees it."""

    lender: str
    lender_group: int
    borrower: str
    borrower_group: int
    peer_state: str
    heard_s_ago: float | None
    """Seconds since the last message of the peer; null: it is not there."""
    extent_bytes: int
    meu_w: int
    meu_m: int
    num_extents: int
    extents: dict[str, int]
    """Number of extents by state."""
    lent_bytes: int
    no_offer_s: float | None
    """Seconds for which the lender will offer nothing, because its own requests needed blocks; null: it may offer."""


class ModelLending(Struct):
    """A model's part in lending. `error` says why its coordinator is silent; the fields it would fill are null."""

    model: str
    role: str
    state: str
    error: str | None
    pool_bytes: int
    budget_bytes: int | None
    lent_bytes: int | None
    borrowed_bytes: int | None
    borrowed_blocks: dict[str, int] | None
    """Number of the model's blocks in borrowed memory, by state: free, used, cached, in_flight."""
    recalls: dict[str, int] | None
    """Number of recalls since the engine started, by reason."""
    groups: list[GroupBlocks] | None
    """The blocks of its pool by state, for each of its KV groups."""
    lends: list[LinkView]
    borrows: list[LinkView]


class LendingOverview(Struct):
    enabled: bool
    transport: str
    models: list[ModelLending]


class ModelFiles(Struct):
    model: str
    names: list[str]
    """All names that clients may ask for the model by; its own is the first."""
    directory: str
    """The directory of its files on the node's machine."""


class ModelFilesList(Struct):
    models: list[ModelFiles]


class ModelStart(Struct):
    """A model that is started because somebody asked; `state` is that of its engine."""

    model: str
    state: str


class ModelChange(Struct):
    """A model that was put to sleep, woken, added or removed; `state` is that of its engine now, or `removed`."""

    model: str
    state: str
    took_s: float


class ModelStorage(Struct):
    """The storage that is attached to a model; all fields but the first are null where there is none."""

    model: str
    backend: str | None = None
    state: Literal["ok", "degraded"] | None = None
    """The state of the storage; null also where the engine has not reported it yet."""
    write_policy: str | None = None
    prefetch_policy: str | None = None


class StorageOverview(Struct):
    models: list[ModelStorage]


class StorageChange(Struct):
    """Storage that was attached or detached; `backend` is the one that is attached now."""

    model: str
    backend: str | None
    took_s: float


class Sleeping(Struct):
    """vLLM's answer to the question whether a model sleeps."""

    is_sleeping: bool


class BudgetChange(Struct):
    """The outcome of a change: `recalled_bytes` came home within `took_s` seconds, or would in a dry run."""

    model: str
    dry_run: bool
    budget_bytes: int
    lent_bytes: int
    recalled_bytes: int
    took_s: float


class ExtentView(Struct):
    """An extent; `owner` is the model that may write to it now."""

    extent: int
    state: str
    owner: str
    epoch: int


class LinkExtents(Struct):
    """Every extent of a link, in the order in which they lie in the lender's pool."""

    lender: str
    lender_group: int
    borrower: str
    borrower_group: int
    extents: list[ExtentView]


class PoolView(Struct):
    model: str
    pool_bytes: int
    budget_bytes: int | None
    groups: list[GroupBlocks]
    lends: list[LinkExtents]
    borrows: list[LinkExtents]


class Latency(Struct):
    """Waits of clients since the node came up: the difference of two views covers the time between them."""

    count: int = 0
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds


class Figures(Struct):
    """An engine's figures as it last reported them. Totals are since it started; blocks are of all KV groups."""

    running: int
    waiting: int
    blocks: dict[str, int]
    """Number of blocks by state: free, used by running requests, cached for those to come."""
    prompt_tokens_total: int
    """Prompt tokens that were computed."""
    generation_tokens_total: int
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: dict[str, int]
    """Prompt tokens that were not computed, by where their KV lay: local, peer, host, storage."""
    preemptions_total: int
    core_s_total: float | None
    """Core time that the engine has taken; null: the operating system divides the cores."""
    turn_wait_s_total: float | None
    """Time that its steps have waited while others had their turn."""


class ModelOverview(Struct):
    model: str
    max_model_len: int
    engine: EngineView
    figures: Figures | None
    """The engine's figures; null until it has reported any."""
    first_token: Latency
    """The times from a request's arrival to its first token."""
    between_tokens: Latency
    lending: ModelLending


class NodeOverview(Struct):
    version: str
    time_s: float
    """Seconds by a clock of the node's own: only the difference of two views has a meaning."""
    lending_enabled: bool
    transport: str
    models: list[ModelOverview]
