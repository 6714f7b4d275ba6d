"""Checkpoints with quantized weights, packed number by number, as their formats are described."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swiftkv.kernels.ops import AnyOps
from swiftkv.models.files import check_tensors
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import DECODERS, read_config
from swiftkv.models.weights import RankSlices
from tests.support.paged import PagedRunner

WEIGHTS = "model.safetensors"
PROMPTS = {"prompt": torch.randint(320, (40,), generator=torch.Generator().manual_seed(3)).tolist()}


class Quantized(NamedTuple):
    """A matrix of unsigned numbers."""

    numbers: Tensor  # int64 [rows, columns]
    scale: Tensor  # float16 [rows, groups]
    zeros: Tensor  # int64 [rows, groups]
    group: Tensor  # int64 [columns]
    bits: int

    def weights(self) -> Tensor:
        """Return the matrix in float64."""
        zeros, scale = (values[:, self.group].double() for values in (self.zeros, self.scale))
        return (self.numbers - zeros) * scale


def quantize(weight: Tensor, bits: int, group_size: int, *, symmetric: bool, shuffled: bool = False) -> Quantized:
    """Quantize a matrix in groups of columns; in `shuffled` order, as activation order makes them."""
    rows, columns = weight.shape
    group = torch.arange(columns) // group_size
    if shuffled:
        group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    largest = (1 << bits) - 1
    scale, zeros = torch.empty(rows, int(group.max()) + 1), torch.empty(rows, int(group.max()) + 1)
    for index in range(scale.shape[1]):
        part = weight[:, group == index]
        if symmetric:
            scale[:, index], zeros[:, index] = part.abs().amax(1) / (largest // 2), 1 << bits - 1
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale[:, index] = (high - low) / largest
            zeros[:, index] = (-low / scale[:, index]).round().clamp(0, largest)
    scale = scale.half()
    numbers = (weight / scale.float()[:, group] + zeros[:, group]).round().clamp(0, largest)
    return Quantized(numbers.long(), scale, zeros.long(), group, bits)


def pack(numbers: Tensor, bits: int, order: Iterable[int] | None = None) -> Tensor:
    """Pack each row into int32 words, the lowest bits first; `order` has the column, in a word's, of each place.

    A negative number borrows from the next of its word.
    """
    places = list(order or range(32 // bits))
    words: list[int] = []
    for row in numbers.tolist():
        row += [0] * (-len(row) % len(places))
        words += (
            sum(row[begin + column] << place * bits for place, column in enumerate(places))
            for begin in range(0, len(row), len(places))
        )
    signed = [(word + (1 << 31)) % (1 << 32) - (1 << 31) for word in words]
    return torch.tensor(signed, dtype=torch.int32).view(len(numbers), -1)


def as_gptq(name: str, matrix: Quantized) -> dict[str, Tensor]:
    """Store a matrix as GPTQ does, in its first format: zeros less one."""
    module = name.removesuffix("weight")
    return {
        f"{module}qweight": pack(matrix.numbers, matrix.bits).t().contiguous(),
        f"{module}qzeros": pack((matrix.zeros - 1).t(), matrix.bits),
        f"{module}scales": matrix.scale.t().contiguous(),
        f"{module}g_idx": matrix.group.int(),
    }


def as_gptq_v2(name: str, matrix: Quantized) -> dict[str, Tensor]:
    qzeros = pack(matrix.zeros.t(), matrix.bits)
    return as_gptq(name, matrix) | {f"{name.removesuffix('weight')}qzeros": qzeros}


def as_awq(name: str, matrix: Quantized) -> dict[str, Tensor]:
    module, order = name.removesuffix("weight"), (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{module}qweight": pack(matrix.numbers.t(), 4, order),
        f"{module}qzeros": pack(matrix.zeros.t(), 4, order),
        f"{module}scales": matrix.scale.t().contiguous(),
    }


def as_packed(name: str, matrix: Quantized) -> dict[str, Tensor]:
    """Store a matrix as compressed-tensors does in `pack-quantized`; zeros, and groups in order, are left out."""
    tensors = {
        f"{name}_packed": pack(matrix.numbers, matrix.bits),
        f"{name}_scale": matrix.scale,
        f"{name}_shape": torch.tensor(matrix.numbers.shape),
    }
    if not (matrix.zeros == 1 << matrix.bits - 1).all():
        tensors[f"{name}_zero_point"] = pack(matrix.zeros.t(), matrix.bits).t().contiguous()
    if not torch.equal(matrix.group, matrix.group.sort().values):
        tensors[f"{name}_g_idx"] = matrix.group.int()
    return tensors


def as_int8(name: str, matrix: Quantized) -> dict[str, Tensor]:
    """Store a matrix as compressed-tensors does in `int-quantized`."""
    middle = 1 << matrix.bits - 1
    tensors = {name: (matrix.numbers - middle).to(torch.int8), f"{name}_scale": matrix.scale}
    if not (matrix.zeros == middle).all():
        tensors[f"{name}_zero_point"] = (matrix.zeros - middle).to(torch.int8)
    if not torch.equal(matrix.group, matrix.group.sort().values):
        tensors[f"{name}_g_idx"] = matrix.group.int()
    return tensors


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint with a tensor for each expert's matrix, as published ones have."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            split[name] = tensor
            continue
        prefix = name.rpartition(".")[0]
        for index, matrix in enumerate(tensor):
            names = ["gate_proj", "up_proj"] if "gate_up" in name else ["down_proj"]
            for part, of_expert in zip(names, matrix.chunk(len(names)), strict=True):
                split[f"{prefix}.{index}.{part}.weight"] = of_expert.contiguous()
    return split


Store = Callable[[str, Quantized], dict[str, Tensor]]


def store_projections(directory: Path, store: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]) -> None:
    """Store the projections of a checkpoint as `store` does; put the matrices that it means into `plain` beside it."""
    tensors = split_experts(load_file(directory / WEIGHTS))
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        stored, plain[name] = store(name, tensors.pop(name))
        tensors |= stored
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    (directory / "plain").mkdir()
    save_file(plain, directory / "plain" / WEIGHTS, {"format": "pt"})
    (directory / "plain" / "config.json").write_bytes((directory / "config.json").read_bytes())


def storing(store: Store, bits: int = 4, group_size: int = 64, **options: Any) -> Any:
    def stored(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = group_size if weight.shape[1] % group_size == 0 else weight.shape[1]
        matrix = quantize(weight, bits, size, **{"symmetric": True} | options)
        return store(name, matrix), matrix.weights().float()

    return stored


def logits_of(directory: Path, ops: AnyOps, dtype: torch.dtype = torch.float32) -> Tensor:
    config = read_config(directory)
    weights = DECODERS[config.architecture].weights(config, RankSlices.of(config, 0, 1))
    check_tensors(directory, weights, config.qweights)
    decoder = load_decoder(config, MappedWeights(directory), dtype, "cpu", 128, ops=ops)
    return PagedRunner(decoder).run(PROMPTS, (1000,))["prompt"]
