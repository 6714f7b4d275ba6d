"""The step times that engines have learnt, kept over restarts in `node.state_dir`."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import msgspec

from swiftkv._core import StepTime, blake3
from swiftkv.engine.messages import STEP_TIME_TERMS, EngineConfig
from swiftkv.transport.topology import read_topology

logger = logging.getLogger(__name__)

FILE_NAME = "step_times.json"
_MAX_BYTES = 1 << 20
_Known = dict[str, dict[str, float]]
"""Seconds of each term, by fingerprint."""


class LearntStepTimes:
    """A JSON file with the seconds of each term of a step's time, under the fingerprint of model and machine.

    Nothing else depends on it: if the file cannot be read or written, the log says so, and engines learn anew.
    """

    def __init__(self, directory: Path | None) -> None:
        """Without a directory, remember for the life of the node only."""
        self._path = None if directory is None else directory / FILE_NAME
        self._known: _Known = {} if self._path is None else _read(self._path)
        self._is_saved = True

    def of(self, fingerprint: str) -> list[float]:
        """Return the seconds of each of STEP_TIME_TERMS; empty if they are not known."""
        known = self._known.get(fingerprint)
        return [] if known is None else [known[term] for term in STEP_TIME_TERMS]

    def note(self, fingerprint: str, step_time_s: list[float]) -> None:
        """Remember what an engine has learnt; ignore an empty list."""
        if not is_sound(step_time_s):
            return
        known = dict(zip(STEP_TIME_TERMS, step_time_s, strict=True))
        if self._known.get(fingerprint) != known:
            self._known[fingerprint] = known
            self._is_saved = False

    async def save(self) -> None:
        """Write the file, if there is something new."""
        if self._path is None or self._is_saved:
            return
        self._is_saved = True  # even if it fails: the next change tries again
        content = msgspec.json.format(msgspec.json.encode(self._known), indent=1) + b"\n"
        await asyncio.to_thread(_write, self._path, content)


def is_sound(step_time_s: list[float]) -> bool:
    """Return whether these can be the seconds of a step's terms."""
    if len(step_time_s) != len(STEP_TIME_TERMS):
        return False
    try:
        StepTime.remembered(step_time_s)
    except ValueError:
        return False
    return True


def fingerprint(config: EngineConfig) -> str:
    """Return a name for everything that the time of a model's steps depends on: the model and the machine.

    The values of weights do not matter, and `config.json` tells their shapes.
    """
    parts = [
        (Path(config.path) / "config.json").read_bytes(),
        f"{config.dtype} {config.device} {config.threads} {config.tensor_parallel_size} {config.block_size}".encode(),
        _processor_name().encode() if config.device == "cpu" else _gpu_names().encode(),
    ]
    return blake3(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hex()[:32]


def _gpu_names() -> str:
    return ", ".join(gpu.name for gpu in read_topology().gpus)


def _processor_name() -> str:
    """Return the name of this machine's processors, and how many this process may use."""
    count = len(os.sched_getaffinity(0))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{count}"
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{count} x {name}"


def _write(path: Path, content: bytes) -> None:
    beside = path.with_suffix(".new")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    except OSError as error:
        logger.warning(
            "%s cannot be written, so engines will learn their step times anew after a start: %s", path, error.strerror
        )


def _read(path: Path) -> _Known:
    """Return the sound entries of a file; none, with a line in the log, if the file cannot be read."""
    try:
        with path.open("rb") as file:
            known = msgspec.json.decode(file.read(_MAX_BYTES), type=_Known)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read, so engines learn their step times anew: %s", path, error)
        return {}
    sound = {
        name: terms
        for name, terms in known.items()
        if terms.keys() == set(STEP_TIME_TERMS) and is_sound([terms[term] for term in STEP_TIME_TERMS])
    }
    if len(sound) < len(known):
        num_ignored = len(known) - len(sound)
        logger.warning(
            "%s: %d of %d entries are ignored, because their step times are impossible", path, num_ignored, len(known)
        )
    return sound
