"""Take the package's C++ extensions, or its modules, from another directory: `pytest -p tests.support.extensions`.

Copied as `sitecustomize.py` to a directory of `PYTHONPATH`, it does this in processes that a test starts, too.

The directory is `SWIFTKV_EXTENSIONS`; modules that it lacks are imported from the installed package.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class ExtensionFinder:
    """Finds `swiftkv._x` as `_x.*.so` in a directory, and `swiftkv.a.b` as `a/b.py`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = name.rpartition(".")
        files = sorted(self._directory.glob(f"{module}.*.so")) if package == "swiftkv" else []
        if not files and package.startswith("swiftkv."):
            files = [*self._directory.glob(f"{'/'.join(name.split('.')[1:])}.py")]
        return importlib.util.spec_from_file_location(name, files[0]) if files else None


sys.meta_path.insert(0, ExtensionFinder(Path(os.environ["SWIFTKV_EXTENSIONS"])))
