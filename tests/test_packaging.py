"""The package declares everything it imports, so that it also runs where nothing else brought it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

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
    "demo": "demo*.py",
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
