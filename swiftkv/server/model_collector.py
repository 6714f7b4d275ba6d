"""Collects metrics from the last report of each model."""

from __future__ import annotations

from typing import Generic, TypeVar

from prometheus_client.registry import Collector

T = TypeVar("T")


class ModelCollector(Collector, Generic[T]):
    """Keeps the last report of each model."""

    def __init__(self) -> None:
        self._by_model: dict[str, T] = {}

    def observe(self, model: str, known: T | None) -> None:
        """Keep the report of a model; with `None` the one before stays."""
        if known is not None:
            self._by_model[model] = known

    def forget(self, model: str) -> None:
        """Drop the report of a model."""
        self._by_model.pop(model, None)
