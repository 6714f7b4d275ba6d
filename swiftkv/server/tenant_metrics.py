"""The metrics of tenants: what each has used of each model. Labels are the names in the node's file, and no others.

They have a registry of their own, because they reveal who the node's customers are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram

if TYPE_CHECKING:
    from swiftkv.server.finished import FinishedRequest

_LABELS = ("model_name", "tenant")


class TenantMetrics:
    """Counts the sequences of tenants as they end; sequences without a tenant are ignored."""

    def __init__(self, first_token_s: tuple[float, ...]) -> None:
        """`first_token_s` are the bounds of the histogram's buckets."""
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "swiftkv:tenant_requests", "Requests of a tenant that ended", (*_LABELS, "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self._tokens = Counter(
            "swiftkv:tenant_tokens", "Tokens of prompts and answers of a tenant's requests that ended",
            (*_LABELS, "kind"), registry=self.registry,
        )  # fmt: skip
        self._first_token = Histogram(
            "swiftkv:tenant_time_to_first_token_seconds", "From arrival to the first token, of requests that ended",
            _LABELS, buckets=first_token_s, registry=self.registry,
        )  # fmt: skip

    def observe(self, model: str, request: FinishedRequest) -> None:
        tenant = request.tenant
        if tenant is None:
            return
        self._requests.labels(model, tenant, request.reason).inc()
        if request.queue_s is not None:
            self._tokens.labels(model, tenant, "computed").inc(request.prompt_tokens - request.cached_tokens)
            self._tokens.labels(model, tenant, "cached").inc(request.cached_tokens)
        self._tokens.labels(model, tenant, "generated").inc(request.generation_tokens)
        if request.first_token_s is not None:
            self._first_token.labels(model, tenant).observe(request.first_token_s)

    def forget(self, model: str) -> None:
        """Show nothing more of a model that was removed."""
        for metric in (self._requests, self._tokens, self._first_token):
            metric.remove_by_labels({"model_name": model})
