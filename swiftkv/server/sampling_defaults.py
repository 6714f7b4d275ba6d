"""The sampling of requests without parameters: by a checkpoint's `generation_config.json`, or vLLM's defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from swiftkv.errors import CheckpointError

_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None  # the most of any answer, whatever its request asks for

    def differences(self) -> str:
        """Return the values that are not vLLM's, as a line for people; empty if there are none."""
        usual = SamplingDefaults()
        names = [field.name for field in fields(self) if getattr(self, field.name) != getattr(usual, field.name)]
        return ", ".join(f"{name} {getattr(self, name)}" for name in names)


class _File(msgspec.Struct):
    """The fields of the file that sampling uses."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None


def sampling_defaults(setting: str, checkpoint: Path, directory: Path) -> SamplingDefaults:
    """Return the defaults that `models[].generation_config` names: `auto`, `vllm`, or a path relative to `directory`.

    Raises:
        CheckpointError: the file is wrong, or is not in the directory that is named.
    """
    if setting == "vllm":
        return SamplingDefaults()
    file = (checkpoint if setting == "auto" else directory / os.path.expanduser(setting)) / _FILE
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        if setting == "auto":
            return SamplingDefaults()
        raise CheckpointError(f"generation_config: there is no {file}; write auto, vllm or another directory") from None
    except OSError as error:
        raise CheckpointError(f"generation_config: {file} cannot be read: {error.strerror}") from None
    try:
        found = msgspec.json.decode(content, type=_File)
    except msgspec.DecodeError as error:
        raise CheckpointError(
            f"generation_config: {file}: {error}; correct the file, or write vllm to ignore it"
        ) from None
    said = {name: value for name, value in msgspec.structs.asdict(found).items() if value is not None}
    return SamplingDefaults(**said)
