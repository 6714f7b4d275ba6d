"""The memory that a control group allows, by the kernel's files."""

from __future__ import annotations

from pathlib import Path

from swiftkv.machine_memory import allowed_memory_bytes, machine_memory_bytes


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text + "\n")


def test_without_control_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert allowed_memory_bytes(tmp_path) == machine_memory_bytes()


def test_a_container_sees_the_limit_of_its_own_group(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/memory.max", "1073741824")
    assert allowed_memory_bytes(tmp_path) == 1 << 30


def test_the_smallest_limit_above_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "1:name=systemd:/x\n0::/system.slice/node.service")
    write(tmp_path, "sys/fs/cgroup/system.slice/node.service/memory.max", "max")
    write(tmp_path, "sys/fs/cgroup/system.slice/memory.max", "2048")
    write(tmp_path, "sys/fs/cgroup/memory.max", "4096")
    assert allowed_memory_bytes(tmp_path) == 2048
