"""Weights of a Hugging Face directory, mapped: a tensor's bytes are read when something reads them."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from swiftkv.arithmetic import ceil_div
from swiftkv.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class MappedWeights:
    """The tensors of a checkpoint, one file or sharded, by name: views of the mapped files, in their dtype."""

    def __init__(self, directory: Path) -> None:
        """Raises `CheckpointError` if a file is missing or is not safetensors."""
        self.directory = directory
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        for file in _weight_files(directory):
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: {error}") from None
            self._file_of.update(dict.fromkeys(self._files[file].keys(), file))

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Tensor `name`, read-only. Raises `CheckpointError` if it is missing, or of another shape or kind."""
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"{self.directory}: tensor {name} is in no *.safetensors file")
        tensor: Tensor = self._files[file].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{file}: tensor {name} has shape {tuple(tensor.shape)}, config.json makes it {shape}"
            )
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"{file}: tensor {name} is {tensor.dtype}, neither of {', '.join(map(str, _DTYPES))}")
        return tensor

    def forget(self, name: str) -> None:
        """Stop counting the bytes of tensor `name` as this process's: whoever reads it again reads the file again."""
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        begin = ceil_div(tensor.data_ptr(), mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if length > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # file name by tensor name


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    files = [directory / _SINGLE]
    if index.is_file():
        try:
            names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{index}: {error}") from None
        files = [directory / Path(name).name for name in sorted(names)]  # no name leads out of the directory
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{missing[0]} is missing; its tensors are part of the model")
    return files
