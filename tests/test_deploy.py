"""`deploy/`: what Prometheus, Grafana and systemd read is right, and asks for metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from swiftkv.engine.messages import EngineStats
from swiftkv.histogram import Histogram
from swiftkv.server.limits import NodeLimits
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.tier.messages import TierStats

DEPLOY = Path(__file__).parent.parent / "deploy"
METRIC = re.compile(r"\b(?:swiftkv|vllm):\w+")


def metric_names() -> set[str]:
    """Return the names of all series that a node has."""
    metrics = GatewayMetrics()
    metrics.watch(NodeLimits())
    durations = Histogram((0.1, 1.0))
    stats = EngineStats(
        *[0] * 12, layer_stream_load=durations, layer_stream_store=durations, layer_stream_exposed=durations,
        tier=TierStats(),
    )  # fmt: skip
    metrics.for_model("chat").observe_engine(stats)
    names = set()
    for family in metrics.registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return names


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
def test_only_metrics_that_there_are_are_asked_for(file: str) -> None:
    asked = set(METRIC.findall((DEPLOY / file).read_text()))
    assert len(asked) > 5
    assert asked <= metric_names()


def test_every_alert_says_what_is_wrong() -> None:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(names) == len(set(names))
    for rule in group["rules"]:
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("page", "warn")


def test_every_panel_asks_the_chosen_source() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == "${source}"
        assert panel["targets"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)")
def test_prometheus_takes_its_files() -> None:
    subprocess.run(["promtool", "check", "config", DEPLOY / "prometheus.yml"], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "swiftkv.service").read_text().replace("/opt/swiftkv/bin/swiftkv", "/bin/true")
    (tmp_path / "swiftkv.service").write_text(unit)
    command = ["systemd-analyze", "verify", "--man=no", tmp_path / "swiftkv.service"]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    complaints = [line for line in told.stderr.splitlines() if "swiftkv.service" in line]
    assert complaints == []
