"""Models of a real node that take turns on all of its cores, and engines that stop or die within their turn."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.completions import complete, streaming
from tests.support.node_process import (
    DEADLINE_S,
    MAX_MODEL_LEN,
    NodeProcess,
    remove,
    short_temporary_directory,
    small_models,
    wait_for,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def node(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    models = [
        {**model, "threads": len(os.sched_getaffinity(0)), "compute": compute}
        for model, compute in zip(
            small_models(checkpoint, "flood", "other"), ({"weight": 1}, {"weight": 3, "max_share": "80%"}), strict=True
        )
    ]
    config = {"node": {"port": 0, "restart": {"limit": 20, "backoff": "50ms"}}, "models": models}
    with NodeProcess(config, tmp_path_factory.mktemp("shares"), short_temporary_directory()) as node:
        yield node
    remove(node.temporary)


def figures(node: NodeProcess, name: str) -> dict[str, float]:
    """Return a metric by model."""
    text = httpx.get(f"{node.url}/metrics", timeout=DEADLINE_S).text
    return {
        sample.labels["model_name"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_requests_are_answered_beside_a_flood_and_it_shows(node: NodeProcess) -> None:
    length = MAX_MODEL_LEN - 100
    with streaming(node, "flood", length) as flood, streaming(node, "other", length) as other:
        assert complete(node, "other").status_code == 200
        assert complete(node, "flood").status_code == 200
        wait_for("somebody to wait", lambda: sum(figures(node, "swiftkv:turn_wait_seconds_total").values()) > 0)
        for stream in (flood, other):
            next(stream.events)

    def both_have_computed() -> bool:
        """Each engine tells its figures now and then."""
        taken = figures(node, "swiftkv:core_seconds_total")
        return set(taken) == {"flood", "other"} and min(taken.values()) > 0

    wait_for("the core seconds of both", both_have_computed)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_an_engine_that_stops_or_dies_in_a_flood_holds_nobody_up(node: NodeProcess, number: signal.Signals) -> None:
    engine = node.engines()["flood"]
    with streaming(node, "other", MAX_MODEL_LEN - 100) as other, streaming(node, "flood", MAX_MODEL_LEN - 100):
        engine.send_signal(number)
        for _ in range(50):
            next(other.events)
        assert complete(node, "other").status_code == 200
        if number == signal.SIGSTOP:
            engine.send_signal(signal.SIGCONT)
    dead = engine.pid if number == signal.SIGKILL else None

    def serves() -> bool:
        """It is called ready for a moment after its end, until that is noticed."""
        view = node.engine_views()["flood"]
        return bool(view["state"] == "ready" and view["pid"] != dead)

    wait_for("the flooded engine to serve", serves)
    assert complete(node, "flood").status_code == 200
