"""`deploy/`: what Prometheus, Grafana and systemd read is right, and asks for metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from swiftkv.engine.messages import EngineStats
from swiftkv.histogram import Histogram
from swiftkv.locks import runtime_directories
from swiftkv.server.limits import NodeLimits
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.tier.messages import TierStats

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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


@pytest.fixture(params=["cpu", "cuda"])
def container_file(request: pytest.FixtureRequest) -> list[list[str]]:
    """The instructions of a container file, in words."""
    text = (DEPLOY / f"{request.param}.Dockerfile").read_text().replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]


def test_containers_are_built_from_what_the_package_needs(container_file: list[list[str]]) -> None:
    copied = [rest for instruction, rest in container_file if instruction == "COPY" and "--from" not in rest]
    assert copied == [". ."]
    taken = _context()
    assert not {path.parts[0] for path in taken} & {".venv", ".git", "build", "checkpoints", "tests"}
    assert not [path for path in taken if path.suffix == ".so" or "__pycache__" in path.parts]
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, timeout=60)
    if tracked.returncode:
        pytest.skip("these sources are not a git checkout")
    needed = ("swiftkv/", "kernels", "cpp_ext/", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE")
    names = {name for name in tracked.stdout.decode().split("\0") if name.startswith(needed)}
    assert names == {str(path) for path in taken} & names


def _context() -> list[Path]:
    """Return the files that `.dockerignore` lets in: all but `*`, then `!name` at the root, then `**/pattern`."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*"
    names = [line[1:] for line in lines if line[0] == "!"]
    hidden = [line.removeprefix("**/") for line in lines[1:] if line[0] != "!"]
    assert all((ROOT / name).exists() for name in names)
    found = [path for name in names for path in (ROOT / name, *(ROOT / name).rglob("*"))]
    relative = [path.relative_to(ROOT) for path in found if path.is_file() or path.is_symlink()]
    return [path for path in relative if not any(fnmatch(part, each) for part in path.parts for each in hidden)]


def test_containers_run_commands_that_there_are(container_file: list[list[str]]) -> None:
    installed = {"/opt/swiftkv/bin/swiftkv"}
    assert "swiftkv" in PROJECT["scripts"]
    commands = {name: rest for name, rest in container_file if name in ("ENTRYPOINT", "CMD", "HEALTHCHECK")}
    entry, arguments = json.loads(commands["ENTRYPOINT"]), json.loads(commands["CMD"])
    options, _, check = commands["HEALTHCHECK"].partition(" CMD ")
    assert options
    for command in ([*entry, *arguments[:1], "--help"], [*json.loads(check), "--help"]):
        assert command[0] in installed
        subprocess.run([sys.executable, "-m", "swiftkv", *command[1:]], check=True, capture_output=True, timeout=60)
    extras = set(re.findall(r'"\.\[([\w,]+)\]"', " ".join(rest for _, rest in container_file))[0].split(","))
    assert extras <= PROJECT["optional-dependencies"].keys()
    users = [rest for name, rest in container_file if name == "USER"]
    assert users == ["swiftkv"]
    assert any("useradd" in rest and rest.endswith(" swiftkv") for name, rest in container_file if name == "RUN")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)")
def test_prometheus_takes_its_files() -> None:
    subprocess.run(["promtool", "check", "config", DEPLOY / "prometheus.yml"], check=True, timeout=60)


ALERTS = [
    pytest.param(
        "SwiftkvModelNotServing",
        {
            'swiftkv:engine_up{instance="a",model_name="naps"}': "0x40",
            'swiftkv:engine_state{instance="a",model_name="naps",state="asleep"}': "1x40",
            'swiftkv:engine_up{instance="a",model_name="loads"}': "0x40",
            'swiftkv:engine_state{instance="a",model_name="loads",state="asleep"}': "0x40",
        },
        ["loads"],
        id="a model that sleeps without a process wakes nobody",
    ),
    pytest.param(
        "SwiftkvModelRestarts",
        {
            'swiftkv:engine_restarts_total{instance="a",model_name="twice",reason="killed"}': "0x9 1x30",
            'swiftkv:engine_restarts_total{instance="a",model_name="twice",reason="hung"}': "0x15 1x24",
            'swiftkv:engine_restarts_total{instance="a",model_name="once",reason="killed"}': "0x9 1x30",
        },
        ["twice"],
        id="restarts of all reasons count together",
    ),
    pytest.param(
        "SwiftkvPreempts",
        {
            'vllm:num_preemptions_total{instance="a",model_name="gives way"}': "0+60x40",
            'swiftkv:requests_displaced_total{instance="a",model_name="gives way",service_tier="batch"}': "0+60x40",
            'vllm:num_preemptions_total{instance="a",model_name="is short"}': "0+60x40",
            'swiftkv:requests_displaced_total{instance="a",model_name="is short",service_tier="batch"}': "0x40",
        },
        ["is short"],
        id="who makes room for a higher tier is not short of memory",
    ),
]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)")
@pytest.mark.parametrize(("alert", "series", "models"), ALERTS)
def test_alerts_are_about_those_who_need_somebody(
    alert: str, series: dict[str, str], models: list[str], tmp_path: Path
) -> None:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    (rule,) = (rule for rule in group["rules"] if rule["alert"] == alert)
    del rule["annotations"]
    labels = [{"severity": rule["labels"]["severity"], "instance": "a", "model_name": model} for model in models]
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": "40m", "alertname": alert, "exp_alerts": [{"exp_labels": each} for each in labels]}
        ],
    }
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rule]}]}))
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": [case]}))
    told = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True, check=False, timeout=60
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_the_unit_says_where_a_user_without_a_home_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (DEPLOY / "swiftkv.service").read_text().splitlines()
    unit = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    variables = dict(pair.split("=", 1) for pair in unit["Environment"].split())
    monkeypatch.setenv("XDG_RUNTIME_DIR", variables["XDG_RUNTIME_DIR"])
    assert Path(variables["XDG_STATE_HOME"], "swiftkv") == Path("/var/lib", unit["StateDirectory"])
    assert runtime_directories()[0].parent == Path("/run", unit["RuntimeDirectory"])
    assert unit["LimitNICE"] == "+0"  # a niceness; without the sign it would be a limit that allows nothing


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "swiftkv.service").read_text().replace("/opt/swiftkv/bin/swiftkv", "/bin/true")
    (tmp_path / "swiftkv.service").write_text(unit)
    command = ["systemd-analyze", "verify", "--man=no", tmp_path / "swiftkv.service"]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    complaints = [line for line in told.stderr.splitlines() if "swiftkv.service" in line]
    assert complaints == []
