"""The files of a checkpoint's weights, and the checks of their headers. Imports no torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from swiftkv.errors import CheckpointError
from swiftkv.kernels.weight_codes import MXFP4_GROUP, coded_bytes, kernel_group_size
from swiftkv.models.hf_config import TEXT_MODEL
from swiftkv.models.quantization import (
    QuantizedTensors,
    QWeights,
    Stored,
    find_quantized,
    group_columns,
    possible_names,
)
from swiftkv.models.weights import Weight

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OTHER_FORMS = ("*.safetensors", "*.bin", "*.gguf", "*.pth", "*.pt")
_SHOWN_FILES = 3
_LENGTH_BYTES = 8  # the length of the header, which comes before it
_FEWEST_BITS = 4  # of a code in memory
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors


_LAYOUTS = {
    # A model that was saved without its head, as embedding models are.
    "embed_tokens.weight": {"model.": ""},
    # A model that also sees images, with the names of transformers' modules since 4.52. Merged models often have them.
    # Decoders ask for the earlier names, which transformers itself writes unless it is told otherwise.
    "model.language_model.embed_tokens.weight": {
        f"{TEXT_MODEL}model.": "model.language_model.",
        f"{TEXT_MODEL}lm_head.": "lm_head.",
    },
}
"""The beginnings of names that decoders ask for, and of those stored instead, by the embedding's name there."""


class NameLayout:
    """The names under which a checkpoint stores the tensors that decoders ask for."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names` are those in the checkpoint."""
        self._begins: dict[str, str] = next((_LAYOUTS[name] for name in names if name in _LAYOUTS), {})

    def stored(self, name: str) -> str:
        for begin, instead in self._begins.items():
            if name.startswith(begin):
                return instead + name.removeprefix(begin)
        return name


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # file name by tensor name


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint. Raises `CheckpointError` if one is missing."""
    index = directory / _INDEX
    files = [directory / _SINGLE]
    if index.is_file():
        try:
            names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{index}: {error}") from None
        files = [directory / Path(name).name for name in sorted(names)]  # no name leads out of the directory
    missing = [file for file in files if not file.is_file()]
    if missing and not index.is_file():
        found = sorted(file.name for form in _OTHER_FORMS for file in directory.glob(form))
        others = f" ({', '.join(found[:_SHOWN_FILES])}{', …' if len(found) > _SHOWN_FILES else ''})" if found else ""
        raise CheckpointError(
            f"{directory}: there is neither {_SINGLE} nor {_INDEX}, and weights in other files{others} are not read; "
            "save the model in this format with transformers"
        )
    if missing:
        raise CheckpointError(f"{missing[0]} is missing; its tensors are part of the model")
    return files


def check_tensors(directory: Path, weights: Mapping[str, Weight], qweights: QWeights | None = None) -> None:
    """Raise `CheckpointError` unless the files are whole, and have the declared tensors in their shapes.

    `qweights` is that of `DecoderConfig`. Only headers are read, so that mistakes are known before a serving model
    makes room for this one.
    """
    headers = _Headers.read(directory, qweights)
    for name, weight in weights.items():
        wanted, shape, _ = headers.place(name, weight)
        stored = headers.layout.stored(wanted)
        if headers.is_mxfp4(name, weight) or headers.quantized(name, weight) is not None:
            continue
        if stored not in headers.tensors:
            raise CheckpointError(f"{directory}: tensor {wanted} is in no *.safetensors file")
        if headers.tensors[stored].shape != shape:
            raise CheckpointError(
                f"{directory}: tensor {wanted} has shape {headers.tensors[stored].shape}, but config.json makes it "
                f"{shape}"
            )


def saved_bytes(directory: Path, weights: Mapping[str, Weight], qweights: QWeights | None, element_bytes: int) -> int:
    """Return the bytes that a rank saves if quantized weights stay quantized in memory; see `check_tensors`.

    Headers do not say everything. Groups are taken to consist of consecutive columns. Zeros are counted, although zeros
    that are all equal need not be kept.
    """
    headers = _Headers.read(directory, qweights)
    saved: dict[tuple[str, tuple[int, ...]], int] = {}  # by weight: one that is used twice counts once
    for name, weight in weights.items():
        if headers.is_mxfp4(name, weight):
            *outer, rows, columns = weight.part_shape
            packed = math.prod(outer) * coded_bytes((rows, columns), _FEWEST_BITS, MXFP4_GROUP, has_zeros=False)
        elif (packed_bytes := headers.coded_bytes(name, weight)) is not None:
            packed = packed_bytes
        else:
            continue
        saved[weight.stored_as or name, weight.part_shape] = math.prod(weight.part_shape) * element_bytes - packed
    return sum(saved.values())


@dataclass(frozen=True, slots=True)
class _Headers:
    """The tensors of a checkpoint, as the headers of its files describe them."""

    tensors: Mapping[str, Stored]
    layout: NameLayout
    qweights: QWeights | None

    @classmethod
    def read(cls, directory: Path, qweights: QWeights | None) -> _Headers:
        tensors: dict[str, Stored] = {}
        for file in weight_files(directory):
            tensors |= _header(file)
        return cls(tensors, NameLayout(tensors), qweights)

    def place(self, name: str, weight: Weight) -> tuple[str, tuple[int, ...], int]:
        """Return the name, the shape and the number of shards of the tensor that holds a weight, or several weights."""
        packed = weight.packed
        if packed is not None and any(name in self.tensors for name in possible_names(packed.name)):
            return packed.name, packed.shape, packed.num_shards
        return weight.stored_as or name, weight.shape, 1

    def is_mxfp4(self, name: str, weight: Weight) -> bool:
        """Return whether a weight is stored as MXFP4, in another shape."""
        wanted, _, _ = self.place(name, weight)
        return f"{self.layout.stored(wanted)}_blocks" in self.tensors

    def quantized(self, name: str, weight: Weight) -> QuantizedTensors | None:
        wanted, shape, num_shards = self.place(name, weight)
        return find_quantized(self.layout.stored(wanted), shape, num_shards, self.tensors.get, self.qweights)

    def coded_bytes(self, name: str, weight: Weight) -> int | None:
        """Return the bytes of a rank's part of a weight as codes; `None` if it does not stay quantized."""
        found = self.quantized(name, weight)
        if found is None:
            return None
        rows, columns = weight.part_shape
        group_size = kernel_group_size(math.gcd(group_columns(found, self.tensors[found.scale].shape), columns))
        if group_size is None:
            return None
        bits = max(found.bits, _FEWEST_BITS)
        return coded_bytes((rows, columns), bits, group_size, has_zeros=found.zeros is not None)


def _header(file: Path) -> dict[str, Stored]:
    """Return dtype and shape of each tensor of one file, by name.

    Raises `CheckpointError` if the file is cut short or is not safetensors.
    """
    try:
        with file.open("rb") as stream:
            num_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            header = json.loads(stream.read(min(num_bytes, _MAX_HEADER_BYTES)))
            size = os.fstat(stream.fileno()).st_size
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        described = {name: Stored(str(entry["dtype"]), tuple(entry["shape"])) for name, entry in tensors.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not safetensors: {error}") from None
    if size != _LENGTH_BYTES + num_bytes + end:
        expected = _LENGTH_BYTES + num_bytes + end
        raise CheckpointError(f"{file}: has {size} bytes, but its header says {expected}; copy or load it again")
    return described
