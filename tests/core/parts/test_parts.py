"""Run the C++ tests beside this file, which test the parts of the scheduler one by one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from core_build import checked_build

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(1800)  # the first test compiles the core
NAMES = [name for file in sorted(HERE.glob("*.cpp")) for name in re.findall(r"^TEST\((\w+)\)", file.read_text(), re.M)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = checked_build()
    objects = [*build.core_objects(), *build.joined_objects(HERE.glob("*.cpp"))]
    return build.link(objects, tmp_path_factory.mktemp("parts") / "parts")


@pytest.mark.parametrize("name", NAMES)
def test_part(name: str, program: Path) -> None:
    done = subprocess.run([program, name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
