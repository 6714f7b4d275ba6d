"""The programs of `make demo`, on its own models: a node of its own, real clients, nothing left behind."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support.node_process import free_ports

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 240


def write_config(path: Path, *models: str, **node: object) -> Path:
    """The demo's own file, or some models of it, on ports that are free now."""
    config = yaml.safe_load((ROOT / "configs/embedded.yaml").read_text())
    config["models"] = [model for model in config["models"] if not models or model["name"] in models]
    node_port, *ports = free_ports(1 + len(config["models"]))
    config["node"] |= {"port": node_port, **node}
    for model, port in zip(config["models"], ports, strict=True):
        model["path"] = str(ROOT / "checkpoints" / model["name"])
        model["threads"] = 1
        model["endpoint"] = {"port": port}
    path.write_text(yaml.safe_dump(config))
    return path


def start_demo(config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "swiftkv", "demo", str(config)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows(table: str) -> dict[str, list[str]]:
    """Return the cells of each row by its first cell, without further lines of a cell."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    return {first: others for first, *others in cells if any(others)}


def test_a_conversation_outgrows_the_pool_of_its_model(tmp_path: Path) -> None:
    demo = start_demo(write_config(tmp_path / "node.yaml"))
    out, err = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 0, out + err
    assert "Join two or more pathname" in out
    verdict = re.search(r"(\d+) of (\d+) answers came; (\d+)% of \d+ prompt tokens", out)
    assert verdict, out
    assert verdict[1] == verdict[2]
    assert int(verdict[3]) > 40

    before, compared = out.split("chat, lending on / off")
    lent = rows(before.split("chat, lending on")[1])
    in_own, in_borrowed = ([int(re.split(r" of ", lent[turn][column])[0]) for turn in "1234567"] for column in (3, 4))
    assert in_borrowed[0] == 0
    assert in_borrowed[-1] > 0
    assert in_own == sorted(in_own)
    assert re.search(r"came back in \d+ ms, and the answer is the same", " ".join(before.split()))
    off = rows(compared)
    # Somebody else came between turns 3 and 4: only with lending there was room for both.
    on, alone = (int(figure.replace(",", "")) for figure in off["4"][1].split(" / "))
    assert on > 2 * alone
    assert [off[turn][-1] for turn in "1237"] == ["the same", "the same", "the same", "refused"]
    assert "lending changed none of the answers" in out
    assert out.count("the node has stopped") == 3


def test_a_node_that_cannot_lend_is_talked_to(tmp_path: Path) -> None:
    demo = start_demo(write_config(tmp_path / "node.yaml", "code"))
    out, err = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 0, out + err
    assert "6 of 6 answers came" in out
    assert "lending" not in out
    restarted = re.search(r"Of the (\d+) tokens of code's conversation (\d+) came from storage", " ".join(out.split()))
    assert restarted, out
    assert int(restarted[2]) > 0.8 * int(restarted[1])
    assert "the answer is the same as before the restart" in " ".join(out.split())


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_told_to_stop_it_stops_the_node(tmp_path: Path, number: signal.Signals, code: int) -> None:
    demo = start_demo(write_config(tmp_path / "node.yaml"))
    assert demo.stdout is not None
    while "up after" not in (line := demo.stdout.readline()):
        assert line or demo.poll() is None, demo.communicate()
    family = psutil.Process(demo.pid).children(recursive=True)
    assert len(family) >= 3  # the node and an engine for each model
    demo.send_signal(number)
    demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == code
    assert not psutil.wait_procs(family, timeout=TIMEOUT_S)[1]


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        demo = start_demo(write_config(tmp_path / "node.yaml", port=port))
        out, err = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 1, out
    assert f"node.port: cannot listen on 127.0.0.1:{port}" in err


@pytest.mark.parametrize(("text", "message"), [("models: []", "models"), ("node: {port: 0}\n", "models")])
def test_a_mistake_in_the_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(text)
    demo = start_demo(path)
    _, err = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 2
    assert message in err
    assert "Traceback" not in err
