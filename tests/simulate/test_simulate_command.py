"""`swiftkv simulate`: what the command line, a file and traces make of a node."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftkv.config import load_config
from swiftkv.engine.messages import STEP_TIME_TERMS
from swiftkv.errors import ConfigError
from swiftkv.planning.node import plan_node
from swiftkv.simulate.command import Options, simulate_node, traces_by_model
from tests.support.checkpoints import make_checkpoint

FILE = """
models:
  - {{name: chat, path: chat, role: master, threads: 1, max_model_len: 512, kv_cache: {{memory: 320KiB}} {compute}}}
  - {{name: code, path: chat, role: worker, threads: 1, max_model_len: 512, kv_cache: {{memory: 2MiB}},
     lending: {{budget: 75%}} {compute}}}
"""
TOKEN_S = 1e-3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where two models, their step times and two traces are."""
    path = tmp_path_factory.mktemp("simulated")
    make_checkpoint(path / "chat", "llama")
    times = dict(zip(STEP_TIME_TERMS, (TOKEN_S, 0.0, 0.0, 0.0, 1e-5, 1e-3), strict=True))
    (path / "times.json").write_text(json.dumps({"chat": times, "code": times}))
    rng = np.random.default_rng(0)
    for name, first in (("chat", 0), ("code", 1000)):
        lines = [
            {
                "timestamp": 400 * i,
                "input_length": int(rng.integers(250, 400)),
                "output_length": 4,
                "hash_ids": [first + i % 4],  # one of four prompts: two do not fit the master's pool together
            }
            for i in range(40)
        ]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options(directory: Path, *names: str) -> Options:
    traces = tuple(f"{name}={directory / name}.jsonl" for name in names)
    return Options(traces=traces, step_time=str(directory / "times.json"), cores=2)


def simulated(directory: Path, chosen: Options, compute: str = "", **overrides: object) -> dict[str, Any]:
    file = directory / "node.yaml"
    file.write_text(FILE.format(compute=compute))
    config = load_config(file, **overrides)
    return simulate_node(config, tuple(plan_node(config, need_weights=False)), [], chosen)


def test_models_with_a_trace_each_run_together(directory: Path) -> None:
    found = simulated(directory, options(directory, "chat", "code"))
    assert {name: of["requests"] for name, of in found.items()} == {"chat": 40, "code": 40}
    assert found["chat"]["borrowed_hit_rate"] > 0
    assert found["code"]["lent_bytes"]["max"] == found["chat"]["borrowed_bytes"]["max"] > 0
    without = simulated(directory, options(directory, "chat", "code"), lending=False)
    assert found["chat"]["hit_rate"] > without["chat"]["hit_rate"] + 0.1
    assert "lent_bytes" not in without["code"]


def test_a_model_without_a_trace_lends(directory: Path) -> None:
    found = simulated(directory, options(directory, "chat"))
    assert found["chat"]["borrowed_hit_rate"] > 0
    assert "requests" not in found["code"]
    assert found["code"]["lent_bytes"]["mean"] > 0


def test_alone_is_together_with_nobody(directory: Path) -> None:
    """A model whose neighbours have no requests, and lend nothing, does what it does alone."""
    alone = replace(options(directory), traces=(str(directory / "chat.jsonl"),))
    by_itself = simulated(directory, alone, lending=False)["chat"]
    together = simulated(directory, options(directory, "chat"), lending=False)["chat"]
    assert {key: together[key] for key in by_itself} == by_itself


def test_traces_may_begin_at_any_time(directory: Path, tmp_path: Path) -> None:
    """In 1970, for example; the models' clock starts with the first request of all."""
    expected = simulated(directory, options(directory, "chat", "code"))
    traces = []
    for name in ("chat", "code"):
        lines = [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
        later = [json.dumps({**line, "timestamp": line["timestamp"] + 1_700_000_000_000}) for line in lines]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(later))
        traces.append(f"{name}={tmp_path / name}.jsonl")
    found = simulated(directory, replace(options(directory), traces=tuple(traces)))
    assert found["chat"]["steps"] == expected["chat"]["steps"]
    assert found["chat"]["ttft_s"]["mean"] == pytest.approx(expected["chat"]["ttft_s"]["mean"], rel=1e-3)


def test_shares_of_the_file_are_kept(directory: Path) -> None:
    one_core = replace(options(directory, "chat", "code"), cores=1, rate=4.0)
    found = simulated(directory, one_core, compute=", compute: {max_share: 50%}", lending=False)
    assert found["chat"]["turn_wait_s"] > 0
    assert simulated(directory, replace(one_core, cores=2), lending=False)["chat"]["turn_wait_s"] == 0


def test_a_copy_rate_replaces_what_the_step_times_know(directory: Path) -> None:
    chosen = options(directory, "chat", "code")
    fast, slow = (
        simulated(directory, replace(chosen, copied_bytes_per_s=rate))["chat"]["core_s"] for rate in (1 << 40, 1 << 20)
    )
    assert fast < slow


def test_clients_are_behind_a_gateway_where_one_was_measured(directory: Path, tmp_path: Path) -> None:
    chosen = options(directory, "chat")
    times = json.loads((directory / "times.json").read_text())
    times["chat"] |= {"gateway_request": 0.25, "gateway_first_token": 0.5}
    (tmp_path / "times.json").write_text(json.dumps(times))
    near = simulated(directory, chosen)["chat"]
    far = simulated(directory, replace(chosen, step_time=str(tmp_path / "times.json")))["chat"]
    for key in ("ttft_s", "e2e_s"):
        assert far[key]["mean"] == pytest.approx(near[key]["mean"] + 0.75)
    assert far["tpot_s"] == pytest.approx(near["tpot_s"])


def test_a_plot_has_two_panels_for_each_model(directory: Path, tmp_path: Path) -> None:
    mpl = pytest.importorskip("matplotlib", reason="pip install 'swiftkv[bench]'")
    with mpl.rc_context({"svg.fonttype": "none"}):  # text stays text
        simulated(directory, replace(options(directory, "chat", "code"), plot=tmp_path / "node.svg"))
    drawn = (tmp_path / "node.svg").read_text()
    assert drawn.count('id="axes_') == 4
    assert all(f">{text}<" in drawn for text in ("chat", "code", "lent", "borrowed", "MiB", "seconds"))


@pytest.mark.parametrize(
    ("file", "mistake"), [("node.bad", "cannot write a '.bad' file"), ("missing/node.png", "missing")]
)
def test_a_plot_that_cannot_be_written_is_a_mistake(directory: Path, tmp_path: Path, file: str, mistake: str) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'swiftkv[bench]'")
    with pytest.raises(ConfigError, match=f"^--plot: .*{mistake}"):
        simulated(directory, replace(options(directory, "chat"), plot=tmp_path / file))


def test_step_times_that_cannot_be_saved_are_a_mistake(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--save-step-time: .*missing/times\.json cannot be written"):
        simulated(directory, replace(options(directory, "chat"), save_step_time=tmp_path / "missing" / "times.json"))


def test_a_pool_of_more_blocks_than_can_be_counted_is_refused(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(f"models: [{{name: chat, path: {directory / 'chat'}, kv_cache: {{memory: 1EiB}}}}]")
    config = load_config(file)
    alone = replace(options(directory), traces=(str(directory / "chat.jsonl"),))
    with pytest.raises(ConfigError, match=r"models\[0\]\.kv_cache\.memory: 1EiB is .* blocks, and at most"):
        simulate_node(config, tuple(plan_node(config, need_weights=False)), [], alone)


def test_a_plot_without_matplotlib_is_refused_before_anything_is_simulated(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    chosen = replace(options(directory, "chat"), plot=tmp_path / "node.svg", save_step_time=tmp_path / "times.json")
    with pytest.raises(ConfigError, match=r"--plot: needs matplotlib: pip install 'swiftkv\[bench\]'"):
        simulated(directory, chosen)
    assert list(tmp_path.iterdir()) == []


def test_a_plot_of_models_alone_is_refused(directory: Path, tmp_path: Path) -> None:
    alone = replace(options(directory), traces=(str(directory / "chat.jsonl"),), plot=tmp_path / "node.svg")
    with pytest.raises(ConfigError, match="--plot: only with --trace NAME=FILE"):
        simulated(directory, alone)


@pytest.mark.parametrize(
    ("traces", "mistake"),
    [
        (("a.jsonl", "b.jsonl"), "write one FILE, or NAME=FILE"),
        (("chat=a.jsonl", "b.jsonl"), "write one FILE, or NAME=FILE"),
        (("chat=a.jsonl", "chat=b.jsonl"), "write one FILE, or NAME=FILE"),
        (("chad=a.jsonl",), "no model 'chad'; the file has: chat, code"),
    ],
)
def test_traces_that_mean_nothing_are_mistakes(traces: tuple[str, ...], mistake: str) -> None:
    with pytest.raises(ConfigError, match=mistake):
        traces_by_model(traces, ["chat", "code"])


def test_one_file_is_for_all() -> None:
    assert traces_by_model(("a.jsonl",), ["chat"]) is None
    assert traces_by_model(("chat=a.jsonl",), ["chat"]) == {"chat": Path("a.jsonl")}
