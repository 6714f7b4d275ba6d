"""Finds a model's files: in a local directory, or by a hub id, which is fetched into the hub's own cache."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from swiftkv.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CONFIG_FILES = ["config.json"]
_TOKENIZER_FILES = ["tokenizer.json", "tokenizer.model", "vocab.json"]
_ALL_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's files, and their public name, which reveals nothing about this machine's directories."""

    directory: Path
    public_name: str


def locate_checkpoint(path: str, directory: Path, need_weights: bool, revision: str | None = None) -> Checkpoint:
    """Return the directory with the model's files.

    A relative `path` starts at `directory` (where the YAML file lies), or otherwise at the working directory. If it is
    in neither and looks like a hub id, it is fetched: `config.json` alone, or everything if `need_weights`, at
    `revision` (a branch, a tag or a commit) or otherwise the newest.
    Raises `CheckpointError` that names what is missing or cannot be read.
    """
    try:
        return _locate(path, directory, need_weights, revision)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename} cannot be read: {error.strerror}; name a directory that this user can read"
        ) from None


def _locate(path: str, directory: Path, need_weights: bool, revision: str | None) -> Checkpoint:
    starts = [directory]
    with contextlib.suppress(FileNotFoundError):  # a node goes on without the directory in which it was started
        starts = list(dict.fromkeys([directory, Path.cwd()]))
    found = next((place for start in starts if (place := start / os.path.expanduser(path)).is_dir()), None)
    if found is not None:
        if revision is not None:
            raise CheckpointError(f"{found} is a directory, and only models of the hub have revisions; drop revision")
        public_name = found.resolve().name
    else:
        if (place := Path(os.path.expanduser(path))).is_absolute():
            raise CheckpointError(f"there is no directory {place}")
        if not _is_hub_id(path, starts):
            raise CheckpointError(f"{path!r} is neither a directory in {' or '.join(map(str, starts))} nor a hub id")
        found = _fetch(path, revision, _ALL_FILES if need_weights else _CONFIG_FILES)
        public_name = path
    if not (found / "config.json").is_file():
        raise CheckpointError(f"{found} has no config.json; name a directory in Hugging Face format")
    if need_weights and not any(found.glob("*.safetensors")):
        raise CheckpointError(f"{found} has no *.safetensors; save the weights in that format")
    if need_weights and not any((found / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(f"{found} has no tokenizer.json; save the tokenizer next to the weights")
    return Checkpoint(found.absolute(), public_name)


def _is_hub_id(path: str, starts: list[Path]) -> bool:
    """Return whether `path` is a hub id; `checkpoints/chta` is a misspelt path if a directory `checkpoints` exists."""
    return bool(_HUB_ID.fullmatch(path)) and not any((start / path).parent.is_dir() for start in starts)


def _fetch(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        which = f"{hub_id!r}" if revision is None else f"{hub_id!r} at revision {revision!r}"
        raise CheckpointError(
            f"{which} is not a directory here, and cannot be fetched from the hub: {reason}"
        ) from None
