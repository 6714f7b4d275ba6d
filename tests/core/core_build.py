"""Build the core beside the package: as a program that replays histories, as a fuzzer, as a mutated extension.

An object file is kept under a hash of everything that it is made from, so that only what differs is compiled.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nanobind

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "cpp_ext/core"
HARNESS = ROOT / "tests/core/fuzz"
OBJECTS = ROOT / "build/core_tests"
CXX = os.environ.get("CXX", "c++")

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Build:
    """A compiler, its flags and the directory of the core's sources."""

    flags: tuple[str, ...]
    compiler: str = CXX
    core: Path = CORE

    def core_objects(self) -> list[Path]:
        return self.objects(unit for unit in sorted(self.core.glob("*.cpp")) if unit.name != "bind.cpp")

    def objects(self, units: Iterable[Path]) -> list[Path]:
        return [self._object(unit) for unit in units]

    def link(self, objects: Sequence[Path], to: Path, *flags: str) -> Path:
        self._run(*map(str, objects), *flags, "-o", str(to))
        return to

    def extension(self, directory: Path) -> Path:
        """Build `_core` into a directory."""
        package = Path(nanobind.include_dir()).parent
        library = Build((*self.flags, f"-I{package}/ext/robin_map/include"), self.compiler, self.core)
        objects = [
            *self.core_objects(),
            *self.objects([self.core / "bind.cpp"]),
            *library.objects([package / "src/nb_combined.cpp"]),
        ]
        return self.link(objects, directory / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}", "-shared")

    def _object(self, unit: Path) -> Path:
        inputs = hashlib.sha256(repr((self.compiler, self.flags)).encode())
        for source in self._sources(unit):
            inputs.update(source.name.encode() + source.read_bytes())
        to = OBJECTS / f"{unit.stem}-{inputs.hexdigest()[:24]}.o"
        if not to.exists():
            OBJECTS.mkdir(parents=True, exist_ok=True)
            partial = to.with_suffix(f".{os.getpid()}")  # another process may build the same
            self._run("-std=c++20", *self.flags, f"-I{self.core}", "-c", str(unit), "-o", str(partial))
            partial.rename(to)
        return to

    def _sources(self, unit: Path) -> list[Path]:
        """The unit and the headers of ours that it includes, directly or not."""
        found: list[Path] = []
        todo = [unit]
        while todo:
            source = todo.pop()
            if source in found:
                continue
            found.append(source)
            for name in _INCLUDE.findall(source.read_text()):
                todo += [path for path in (source.parent / name, self.core / name) if path.exists()][:1]
        return found

    def _run(self, *arguments: str) -> None:
        done = subprocess.run([self.compiler, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{self.compiler} {' '.join(arguments)}\n{done.stderr}")


def extension_build(core: Path = CORE) -> Build:
    """The extension as it is shipped, but for the time that its compilation takes."""
    includes = (f"-I{nanobind.include_dir()}", f"-I{sysconfig.get_path('include')}")
    return Build(("-O1", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", *includes), core=core)


def replay_program(to: Path, core: Path = CORE) -> Path:
    """The program that replays histories, with every assertion."""
    build = Build(("-O1", "-g1", "-D_GLIBCXX_ASSERTIONS", f"-I{core}"), core=core)
    harness = build.objects(HARNESS / name for name in ("history.cpp", "simulated_engine.cpp", "replay.cpp"))
    return build.link([*build.core_objects(), *harness], to)
