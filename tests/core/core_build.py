"""Build the core beside the package: as a program that replays histories, as a fuzzer, as a mutated extension.

An object file is kept under a hash of everything that it is made from, so that only changed files are compiled.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import nanobind

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(os.environ.get("SWIFTKV_SOURCES", ROOT / "cpp_ext"))
HARNESS = ROOT / "tests/core/fuzz"
OBJECTS = ROOT / "build/core_tests"
HARNESS_INCLUDES = f"-I{SOURCES / 'core'}"
CXX = os.environ.get("CXX", "c++")

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Build:
    """A compiler, its flags and a copy of `cpp_ext`."""

    flags: tuple[str, ...]
    compiler: str = CXX
    sources: Path = SOURCES

    def core_objects(self) -> list[Path]:
        """Compile the core without its binding."""
        units = (self.sources / "core").glob("*.cpp")
        return self.joined_objects(unit for unit in units if not unit.name.startswith("bind"))

    def joined_objects(self, units: Iterable[Path]) -> list[Path]:
        """Compile all units as one on each core: most of the time goes to headers, which are then read once."""
        all_units = sorted(units)
        num_cores = len(os.sched_getaffinity(0))
        return self.objects(_joined(all_units[first::num_cores]) for first in range(min(num_cores, len(all_units))))

    def objects(self, units: Iterable[Path]) -> list[Path]:
        """Compile what has changed, one unit on each core."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as compilers:
            return list(compilers.map(self._object, units))

    def link(self, objects: Sequence[Path], to: Path, *flags: str) -> Path:
        self._run(*map(str, objects), *flags, "-o", str(to))
        return to

    def extension(self, room: str, directory: Path) -> Path:
        """Build the Python extension of `cpp_ext/<room>` into a directory."""
        package = Path(nanobind.include_dir()).parent
        library = Build((*self.flags, f"-I{package}/ext/robin_map/include"), self.compiler)
        objects = [
            *self.objects(sorted((self.sources / room).glob("*.cpp"))),
            *library.objects([package / "src/nb_combined.cpp"]),
        ]
        return self.link(objects, directory / f"_{room}{sysconfig.get_config_var('EXT_SUFFIX')}", "-shared")

    def _object(self, unit: Path) -> Path:
        inputs = hashlib.sha256(repr((self.compiler, self.flags)).encode())
        for source in self._sources(unit):
            inputs.update(source.name.encode() + source.read_bytes())
        to = OBJECTS / f"{unit.stem}-{inputs.hexdigest()[:24]}.o"
        OBJECTS.mkdir(parents=True, exist_ok=True)
        with to.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may build the same
            if not to.exists():
                partial = to.with_suffix(".partial")
                self._run("-std=c++20", *self.flags, "-c", str(unit), "-o", str(partial))
                partial.rename(to)
        return to

    def _sources(self, unit: Path) -> list[Path]:
        """Return the unit and those of our headers that it includes, directly or not."""
        found: list[Path] = []
        todo = [unit]
        while todo:
            source = todo.pop()
            if source in found:
                continue
            found.append(source)
            for name in _INCLUDE.findall(source.read_text()):
                todo += [path for path in (source.parent / name, self.sources / "core" / name) if path.exists()][:1]
        return found

    def _run(self, *arguments: str) -> None:
        done = subprocess.run([self.compiler, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{self.compiler} {' '.join(arguments)}\n{done.stderr}")


def _joined(units: Iterable[Path]) -> Path:
    """Return a unit that includes others."""
    text = "".join(f'#include "{unit}"\n' for unit in units)
    joined = OBJECTS / f"joined-{hashlib.sha256(text.encode()).hexdigest()[:24]}.cpp"
    OBJECTS.mkdir(parents=True, exist_ok=True)
    joined.write_text(text)
    return joined


def extension_build(sources: Path = SOURCES) -> Build:
    """Return the build of shipped extensions, without the optimisations that take time to compile."""
    includes = (f"-I{nanobind.include_dir()}", f"-I{sysconfig.get_path('include')}")
    return Build(("-O1", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", *includes), sources=sources)


def checked_build(sources: Path = SOURCES) -> Build:
    """Return the build of programs that run the core with every assertion enabled."""
    return Build(("-O1", "-g1", "-D_GLIBCXX_ASSERTIONS", f"-I{sources / 'core'}"), sources=sources)


def replay_program(to: Path, sources: Path = SOURCES) -> Path:
    """Return the program that replays histories."""
    build = checked_build(sources)
    harness = build.objects(HARNESS / name for name in ("history.cpp", "simulated_engine.cpp", "replay.cpp"))
    return build.link([*build.core_objects(), *harness], to)
