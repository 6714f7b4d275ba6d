"""Loads decoders from Hugging Face directories. Files are mapped: a tensor is read from disk when it is used."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.nn.functional as F
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from swiftkv.arithmetic import ceil_div
from swiftkv.errors import CheckpointError, FilesChangedError
from swiftkv.kernels.dispatch import select_ops
from swiftkv.kernels.experts import ExpertLayer, ExpertWeights, GatedActivation, PackedExperts
from swiftkv.kernels.ops import AnyOps, PackedLinear
from swiftkv.kernels.weight_codes import CodedMatrix
from swiftkv.models.config import DecoderConfig, RopeConfig
from swiftkv.models.decoder import Decoder
from swiftkv.models.files import NameLayout, weight_files
from swiftkv.models.parallel import ALONE, Communicator, Ranks
from swiftkv.models.quantization import OWN_FILES, QWeights, Stored, find_quantized, possible_names
from swiftkv.models.registry import DECODERS
from swiftkv.models.rope import cos_sin_table
from swiftkv.models.unpacking import QuantizedMatrix, quantized_matrix
from swiftkv.models.weights import ExpertModules, PackedPart, RankSlices, ShardedRows, Weight
from swiftkv.progress import PROGRESS

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_DIGESTED_BYTES = 16 << 20  # at a time

Description = Mapping[str, bytes]


def read_description(directory: Path) -> Description:
    """Return the files that say what a checkpoint's weights mean, by name. Raises `CheckpointError`."""
    try:
        return {
            name: (directory / name).read_bytes()
            for name in ("config.json", *OWN_FILES)
            if (directory / name).is_file()
        }
    except OSError as error:
        raise CheckpointError(f"{directory}: {error}") from None


class MappedWeights:
    """The tensors of a checkpoint, one file or sharded, by name: views of the mapped files, in their dtype."""

    def __init__(self, directory: Path, description: Description | None = None) -> None:
        """`description` is what the model's configuration was read from, by `read_description`.

        Raises `CheckpointError` if a file is missing or is not safetensors, or if files were replaced meanwhile.
        """
        self.directory = directory
        self._files: dict[Path, Any] = {}
        self._opened: list[tuple[BinaryIO, tuple[int, int]]] = []  # each file, with its mark when it was mapped
        self._file_of: dict[str, Path] = {}
        for file in weight_files(directory):
            try:
                opened = file.open("rb")
                self._opened.append((opened, _mark(opened)))
                self._files[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: {error}") from None
            self._file_of.update(dict.fromkeys(self._files[file].keys(), file))
        self._layout = NameLayout(self._file_of)
        self._fingerprint: str | None = None
        self._description = read_description(directory)
        try:
            replaced = any(_is_other(opened, Path(opened.name)) for opened, _ in self._opened)
        except OSError as error:
            raise CheckpointError(f"{directory}: {error}") from None
        if replaced or (description is not None and self._description != description):
            raise CheckpointError(f"{directory}: files were replaced while they were read; start the model again")

    def identity(self) -> int:
        """Return 63 bits that are equal in two processes if both have mapped the same files, and otherwise differ."""
        digest = xxhash.xxh3_64(repr(sorted(self._description.items())).encode())
        for opened, mark in self._opened:
            status = os.fstat(opened.fileno())
            digest.update(repr((status.st_dev, status.st_ino, mark)).encode())
        return digest.intdigest() >> 1

    def fingerprint(self) -> str:
        """Return a hexadecimal digest of the configuration and of every byte of the weights, but of no path.

        It covers the files that are mapped, even if others have replaced them since. The first call reads all of them,
        which takes long. Call it in any thread.

        Raises `FilesChangedError` if a mapped file was written to, `OSError` if one cannot be read.
        """
        if self._fingerprint is None:
            digest = xxhash.xxh3_128()
            for name, content in self._description.items():
                digest.update(f"{name}\0{len(content)}\0".encode() + content)
            for file, (opened, (num_bytes, _)) in zip(self._files, self._opened, strict=True):
                digest.update(f"{file.name}\0{num_bytes}\0".encode())
                for begin in range(0, num_bytes, _DIGESTED_BYTES):
                    digest.update(os.pread(opened.fileno(), _DIGESTED_BYTES, begin))
            self._fingerprint = digest.hexdigest()
        self.check_unchanged()
        return self._fingerprint

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return tensor `name`, read-only. Raises `CheckpointError` if it is missing, or of another shape or kind."""
        return self._get(name, shape, _DTYPES)

    def quantized(
        self, name: str, shape: tuple[int, ...], num_shards: int, qweights: QWeights | None
    ) -> QuantizedMatrix | None:
        """Return a weight as it is stored; `None` if it is not quantized. Raises as `find_quantized` does."""
        found = find_quantized(name, shape, num_shards, self._stored_of, qweights)
        return None if found is None else quantized_matrix(found, self._tensor)

    def _stored_of(self, name: str) -> Stored | None:
        stored = self._layout.stored(name)
        if (file := self._file_of.get(stored)) is None:
            return None
        header = self._files[file].get_slice(stored)
        return Stored(header.get_dtype(), tuple(header.get_shape()))

    def _get(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        file = self._file_of.get(self._layout.stored(name))
        if file is None:
            raise CheckpointError(f"{self.directory}: tensor {name} is in no *.safetensors file")
        tensor = self._tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{file}: tensor {name} has shape {tuple(tensor.shape)}, but config.json makes it {shape}"
            )
        if tensor.dtype not in dtypes:
            raise CheckpointError(f"{file}: tensor {name} is {tensor.dtype}; supported: {', '.join(map(str, dtypes))}")
        return tensor

    def _tensor(self, name: str) -> Tensor:
        stored = self._layout.stored(name)
        tensor: Tensor = self._files[self._file_of[stored]].get_tensor(stored)
        return tensor

    def has(self, name: str) -> bool:
        return self._layout.stored(name) in self._file_of

    def get_bytes(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor as bytes, for number formats that torch does not know. Raises as `get` does."""
        return self._get(name, shape, (torch.uint8,))

    def check_unchanged(self) -> None:
        """Raise `FilesChangedError` if a mapped file was written to. A file that was replaced is still mapped."""
        for opened, mark in self._opened:
            if _mark(opened) != mark:
                raise FilesChangedError(
                    f"{opened.name} was overwritten while the model used it; put new files in place by renaming them"
                )

    def forget_all(self) -> None:
        """Do as `forget` does for every tensor."""
        for name in self._file_of:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Stop counting the bytes of tensor `name` as this process's; they are read from the file if used again."""
        tensor = self._tensor(name)
        begin = ceil_div(tensor.data_ptr(), mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if length > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _is_other(opened: BinaryIO, file: Path) -> bool:
    """Return whether a path no longer leads to the file that was opened there."""
    return not os.path.samestat(os.fstat(opened.fileno()), file.stat())


def _mark(opened: BinaryIO) -> tuple[int, int]:
    """Return a mark that changes when the file is written to."""
    status = os.fstat(opened.fileno())
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Packer:
    """Turns the weights that a decoder declares into the form that its kernels read, on their device."""

    weights: Mapping[str, Weight]
    files: MappedWeights
    ops: AnyOps
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    norm_offset: float | None  # see `DecoderConfig`
    qweights: QWeights | None = None  # see `DecoderConfig`

    def linear(self, *modules: str, interleave: bool = False) -> PackedLinear:
        """Pack modules of the checkpoint, with their declared biases, as one linear layer."""
        names = [f"{module}.weight" for module in modules]
        packed: PackedLinear = self.ops.pack_linear(
            [self.matrix(name) for name in names],
            [self.tensor(f"{module}.bias") if f"{module}.bias" in self.weights else None for module in modules],
            interleave,
        )
        self._forget(names)
        return packed

    def head(self, module: str, embedding: Tensor) -> PackedLinear:
        """Pack the head. A tied head shares the embedding's memory, unless kernels read another layout."""
        name = f"{module}.weight"
        is_tied = self._stored_name(name) == self._stored_name("model.embed_tokens.weight")
        if not is_tied or self.weights[name].part_shape != tuple(embedding.shape):
            return self.linear(module)
        packed: PackedLinear = self.ops.pack_linear([embedding])
        self._forget([name])
        return packed

    def experts(self, modules: Sequence[ExpertModules], activation: GatedActivation) -> PackedExperts:
        """Pack the experts of one layer, one after the other."""
        return self.packed_experts(len(modules), activation, self._each(modules))

    def packed_experts(
        self, num_experts: int, activation: GatedActivation, weights: Iterable[ExpertWeights]
    ) -> PackedExperts:
        """Pack the experts of one layer as `weights` yields them."""
        packed: PackedExperts = self.ops.pack_experts(ExpertLayer(num_experts, activation, weights))
        return packed

    def _each(self, modules: Sequence[ExpertModules]) -> Iterator[ExpertWeights]:
        for expert in modules:
            names = [f"{module}.weight" for module in (expert.gate, expert.up, expert.down)]
            gate, up, down = map(self.matrix, names)
            yield ExpertWeights(gate, up, down)
            self._forget(names)

    def matrix(self, name: str) -> Tensor | CodedMatrix:
        """Return this rank's part of a matrix. A quantized matrix stays quantized if the kernels keep its codes."""
        weight, quantized = self.weights[name], self._quantized(name)
        if quantized is not None and self.ops.keeps_codes(self.dtype):
            here = quantized.coded(_columns(weight), self.dtype)
            if here is not None and here.shape == weight.part_shape:
                PROGRESS.loads(here.nbytes)
                return here
        return self._in_dtype(name, quantized)

    def tensor(self, name: str) -> Tensor:
        """Return this rank's part of a tensor: a view of the mapped file if dtype and device are the same."""
        return self._in_dtype(name, self._quantized(name))

    def _in_dtype(self, name: str, quantized: QuantizedMatrix | None) -> Tensor:
        here = self._stored(name, quantized).to(device=self.device, dtype=self.dtype)
        missing = self.weights[name].part_shape[0] - len(here)
        return F.pad(here, (0, 0, 0, missing)) if missing else here

    def _stored_name(self, name: str) -> str:
        return self.weights[name].stored_as or name

    def _stored(self, name: str, quantized: QuantizedMatrix | None) -> Tensor:
        weight = self.weights[name]
        if quantized is None:
            packed = self._packed(weight)
            whole = self.files.get(*self._source(weight, name))
            stored = (whole if packed is None else packed.of(whole))[weight.part]
        else:
            stored = quantized.unpack(_columns(weight), self.dtype)
        PROGRESS.loads(stored.numel() * self.dtype.itemsize)
        return stored

    def _quantized(self, name: str) -> QuantizedMatrix | None:
        """Return this rank's rows of a weight, on the model's device, and no other; `None` if it is not quantized."""
        weight = self.weights[name]
        packed = self._packed(weight)
        num_shards = 1 if packed is None else packed.num_shards
        matrix = self.files.quantized(*self._source(weight, name), num_shards, self.qweights)
        if matrix is None:
            return None
        return matrix.with_rows(
            lambda rows: (rows if packed is None else packed.of(rows))[weight.part[:1]].to(self.device)
        )

    def _source(self, weight: Weight, name: str) -> tuple[str, tuple[int, ...]]:
        """Return name and shape of the tensor that a weight is stored in."""
        packed = self._packed(weight)
        return (self._stored_name(name), weight.shape) if packed is None else (packed.name, packed.shape)

    def _packed(self, weight: Weight) -> PackedPart | ShardedRows | None:
        """Return the place of a weight inside another tensor, if the checkpoint stores it there."""
        packed = weight.packed
        return packed if packed is not None and any(map(self.files.has, possible_names(packed.name))) else None

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            packed = self._packed(self.weights[name])
            for stored in possible_names(self._stored_name(name) if packed is None else packed.name):
                if self.files.has(stored):
                    self.files.forget(stored)

    def vector(self, name: str) -> Tensor:
        """Return a copy of a tensor: a view would keep the file mapped."""
        return self.tensor(name).clone()

    def float32(self, name: str) -> Tensor:
        """Return a copy of a tensor in float32, not rounded to the model's dtype."""
        return self._stored(name, self._quantized(name)).to(device=self.device, dtype=torch.float32, copy=True)

    def norm(self, name: str) -> Tensor:
        """Return a copy of the factors of a norm: its weights, plus `norm_offset` if there is one."""
        return self.vector(name) if self.norm_offset is None else self.float32(name) + self.norm_offset

    def rounded(self, number: float) -> float:
        """Return a number as the model's dtype stores it."""
        return torch.tensor(number, dtype=self.dtype).item()

    def cos_sin(self, rope: RopeConfig, head_dim: int) -> Tensor:
        """Return the rotary table of `cos_sin_table` for every position that the model serves."""
        return cos_sin_table(rope, head_dim, self.max_model_len).to(self.device)


def _columns(weight: Weight) -> slice:
    return weight.part[1] if len(weight.part) > 1 else slice(None)


def load_decoder(
    config: DecoderConfig,
    files: MappedWeights,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int,
    block_size: int = 16,
    ops: AnyOps | None = None,
    communicator: Communicator = ALONE,
) -> Decoder:
    """Load a model, or this rank's part of one. At its peak this takes little more memory than the packed weights.

    Raises `CheckpointError` for a tensor that is missing or of the wrong shape, `ConfigError` if `max_model_len` is
    more than the model has positions.
    """
    config.check_max_model_len(max_model_len)
    kind, device = DECODERS[config.architecture], torch.device(device)
    weights = kind.weights(config, RankSlices.of(config, communicator.rank, communicator.size))
    ops = select_ops(device) if ops is None else ops
    part = config.of_rank(communicator.size)
    return kind(
        part,
        part.kv_groups(block_size, str(dtype).removeprefix("torch.")),
        Packer(weights, files, ops, dtype, device, max_model_len, config.norm_offset, config.qweights),
        Ranks(ops, communicator, config.vocab_size),
    )
