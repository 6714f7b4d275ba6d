"""The package declares everything it imports and brings what it needs, so that it also runs outside of a checkout."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.support.node_process import free_ports

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def imported(file: Path) -> set[str]:
    """Return the top-level modules that `file` imports anywhere."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules.add(node.module.partition(".")[0])
    return modules - sys.stdlib_module_names - {"swiftkv"}


def normalised(requirements: list[str]) -> set[str]:
    """Return the names of the distributions that `requirements` ask for."""
    return {re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


EXTRAS = {
    "redis": "storage/redis_medium.py",
    "mooncake": "storage/mooncake_medium.py",
    "otlp": "server/otlp_spans.py",
    "bench": "simulate/plots.py",
}
"""The modules that alone may need an extra."""
MAY_BE_MISSING = {"mooncake": "mooncake", "bench": "matplotlib"}
"""Modules of extras that `make setup` does not install."""


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_every_import_is_a_declared_dependency(extra: str) -> None:
    declared = normalised(PROJECT["dependencies"] + PROJECT["optional-dependencies"].get(extra, []))
    files = {*(ROOT / "swiftkv").rglob("*.py"), *(ROOT / "kernels").glob("*.py")}
    of_extras = {name: set((ROOT / "swiftkv").glob(pattern)) for name, pattern in EXTRAS.items()}
    files = of_extras[extra] if extra else files.difference(*of_extras.values())
    distributions = packages_distributions()
    missing = MAY_BE_MISSING.get(extra)
    if missing is not None and missing not in distributions:
        pytest.skip(f"the package {missing} is not here: pip install swiftkv[{extra}]")
    for module in set().union(*map(imported, files)):
        names = {name.lower().replace("_", "-") for name in distributions[module]}
        assert names & declared, f"{module} comes with {names}: add it to the dependencies in pyproject.toml"


OTHER_PYTHONS = [f"python3.{minor}" for minor in range(11, 15) if minor != sys.version_info.minor]


def why_not(python: str, directory: Path) -> str | None:
    """Return what an interpreter lacks to build the package with it."""
    include = "import sysconfig; print(sysconfig.get_path('include'))"
    found = subprocess.run([python, "-c", include], capture_output=True, text=True) if shutil.which(python) else None
    if found is None or found.returncode != 0:  # a name may be that of a program which says how to install it
        return f"{python} is not here"
    if not Path(found.stdout.strip(), "Python.h").exists():
        return f"{python} has no headers"
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    download = [python, "-m", "pip", "download", "--quiet", "--dest", str(directory), *wanted]
    return None if subprocess.run(download, capture_output=True).returncode == 0 else f"{python} gets no {wanted}"


def build_wheel(python: str, directory: Path, *options: str) -> Path:
    """Build the package's wheel for an interpreter."""
    command = [python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(directory), *options, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [wheel] = directory.glob("*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_in_a_fresh_environment_gives_a_demo(tmp_path: Path) -> None:
    """Dependencies come from this environment, without the package itself: `.pth` files there are not read again."""
    wheel = build_wheel(sys.executable, tmp_path, "--no-build-isolation")
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False)
    [packages] = fresh.glob("lib/python*/site-packages")
    shutil.unpack_archive(wheel, packages, "zip")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    config = packages / "swiftkv/demo_files/configs/embedded.yaml"
    assert config.exists()
    for port, free in zip((8000, 8001, 8002), free_ports(3), strict=True):
        config.write_text(config.read_text().replace(f"port: {port}", f"port: {free}"))
    command = [str(fresh / "bin/python"), "-m", "swiftkv", "demo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "lending changed none of the answers" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("python", OTHER_PYTHONS)
def test_a_wheel_can_be_built_for_every_python_that_is_at_hand(python: str, tmp_path: Path) -> None:
    if reason := why_not(python, tmp_path / "requirements"):
        pytest.skip(reason)
    tag = python.removeprefix("python").replace(".", "")
    assert f"-cp{tag}-" in build_wheel(python, tmp_path).name
