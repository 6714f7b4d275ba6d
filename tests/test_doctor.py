"""`swiftkv doctor` on machines that are not right, as far as the kernel's files say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from swiftkv.cli import app
from swiftkv.doctor import examine, shared_memory

HUGE = "sys/kernel/mm/transparent_hugepage"


def advice(root: Path) -> dict[str, str]:
    return {finding.about: finding.advice for finding in examine(root)}


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text + "\n")


def test_this_machine() -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor"])
    assert result.exit_code == 0
    for about in ("kernel", "instruction set", "cores", "memory", "huge pages", "open files", "TMPDIR", "/dev/shm"):
        assert about in result.stdout


@pytest.mark.parametrize(
    ("about", "file", "text", "says"),
    [
        ("cores", "sys/fs/cgroup/cpu.max", "50000 100000", "write `threads: 1` for each model"),
        ("memory", "sys/fs/cgroup/memory.max", "1073741824", "must fit"),
        ("huge pages of weights", f"{HUGE}/enabled", "always madvise [never]", "echo madvise > /sys"),
    ],
)
def test_what_is_wrong_comes_with_advice(tmp_path: Path, about: str, file: str, text: str, says: str) -> None:
    assert advice(tmp_path)[about] == ""
    write(tmp_path, file, text)
    assert says in advice(tmp_path)[about]


def test_pools_need_the_administrator_only_if_engines_cannot_make_huge_pages(tmp_path: Path) -> None:
    write(tmp_path, f"{HUGE}/shmem_enabled", "always within_size advise [never]")
    for makes_huge_pages in (False, True):
        found = {finding.about: finding for finding in examine(tmp_path, makes_huge_pages)}["huge pages of pools"]
        assert ("echo advise > /sys" in found.advice) == (not makes_huge_pages)
        assert found.found.startswith("never")


def test_what_is_right_does_not(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000")
    write(tmp_path, "sys/fs/cgroup/memory.max", "max")
    write(tmp_path, f"{HUGE}/enabled", "always [madvise] never")
    write(tmp_path, "proc/sys/kernel/numa_balancing", "1")
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    found = advice(tmp_path)
    assert {found[about] for about in ("cores", "memory", "huge pages of weights", "memory nodes")} == {""}
    (tmp_path / "sys/devices/system/node/node1").mkdir()
    assert "numa_balancing" in advice(tmp_path)["memory nodes"]


def test_shared_memory_is_for_several_gpus(tmp_path: Path) -> None:
    assert "--shm-size" in shared_memory(tmp_path / "none", num_gpus=2).advice
    assert shared_memory(tmp_path / "none", num_gpus=1).advice == ""
    assert shared_memory(Path("/proc"), num_gpus=2).found == "0B"
