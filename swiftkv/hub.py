"""Where a model's files are: a local directory, or a hub id that is fetched into the hub's own cache."""

from __future__ import annotations

import re
from pathlib import Path

from swiftkv.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CONFIG_FILES = ["config.json"]
_TOKENIZER_FILES = ["tokenizer.json", "tokenizer.model", "vocab.json"]
_ALL_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def locate_checkpoint(path: str, directory: Path, need_weights: bool) -> Path:
    """The directory with the model's files.

    A relative `path` starts at `directory` (where the YAML file lies), or else at the working directory. What is in
    neither and reads like a hub id is fetched: `config.json` alone, or everything if `need_weights`.
    Raises `CheckpointError` saying what is missing.
    """
    starts = list(dict.fromkeys([directory, Path.cwd()]))
    found = next((place for start in starts if (place := start / Path(path).expanduser()).is_dir()), None)
    if found is None:
        if not _is_hub_id(path, starts):
            raise CheckpointError(f"{path!r} is no directory in {' or '.join(map(str, starts))}, nor a hub id")
        found = _fetch(path, _ALL_FILES if need_weights else _CONFIG_FILES)
    if not (found / "config.json").is_file():
        raise CheckpointError(f"{found} has no config.json; name a directory in Hugging Face format")
    if need_weights and not any(found.glob("*.safetensors")):
        raise CheckpointError(f"{found} has no *.safetensors; save the weights in that format")
    if need_weights and not any((found / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(f"{found} has no tokenizer.json; save the tokenizer next to the weights")
    return found


def _is_hub_id(path: str, starts: list[Path]) -> bool:
    """`checkpoints/chta` is a slip of the pen where there is a directory `checkpoints`."""
    return bool(_HUB_ID.fullmatch(path)) and not any((start / path).parent.is_dir() for start in starts)


def _fetch(hub_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{hub_id!r} is no directory here, and the hub did not give it: {reason}") from None
