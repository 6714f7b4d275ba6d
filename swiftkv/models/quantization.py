"""Tells which quantized checkpoints can be read, and finds the factors of FP8 weights; `models/fp8.py` unpacks them.

The factors of a weight are in a tensor beside it, under one of two names. By both, programs mean what its numbers are
to be multiplied by. The factors of activations (`input_scale`) and of keys and values (`k_scale`, `v_scale`) are not
needed, since neither is rounded.

This file imports no torch, so that `swiftkv plan` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from swiftkv.arithmetic import ceil_div
from swiftkv.errors import CheckpointError, ConfigError

BLOCK = 128
"""The rows and the columns of a block that shares a factor."""
SAFETENSORS_FP8 = "F8_E4M3"
"""The name of the dtype in the headers of safetensors files."""
_SCALES = ("_scale_inv", "_scale")
_METHODS = ("fp8", "fbgemm_fp8", "modelopt", "compressed-tensors")
_COMPRESSED = ("float-quantized", "naive-quantized")  # formats of compressed-tensors


class _Weights(msgspec.Struct):
    num_bits: int | None = None
    type: str | None = None
    block_structure: list[int] | None = None


class _Group(msgspec.Struct):
    weights: _Weights = msgspec.field(default_factory=_Weights)
    format: str | None = None


class _Quantization(msgspec.Struct):
    """The keys of `quantization_config` that are about weights, in the spelling of any program."""

    quant_method: str | None = None
    quant_algo: str | None = None  # modelopt
    fmt: str = "e4m3"
    store_dtype: str | None = None  # of MiMo's experts, if they are MXFP4
    weight_block_size: list[int] | None = None
    format: str | None = None  # this and the rest: compressed-tensors
    config_groups: dict[str, _Group] = {}
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def check_config(file: Path, raw: Any) -> None:
    """Raise `ConfigError` unless `raw`, the `quantization_config` of a config file, is null or says FP8."""
    if raw is None:
        return
    try:
        why = _why_not(msgspec.convert(raw, _Quantization))
    except msgspec.ValidationError as error:
        why = str(error)
    if why is not None:
        raise ConfigError(
            f"{file}: quantization_config: {why}; FP8 weights are supported (quant_method {', '.join(_METHODS)}), and "
            "MXFP4 experts of gpt-oss; use a checkpoint in one of these, or the original weights"
        )


def is_block_wise(raw: Any) -> bool:
    """Return whether a `quantization_config` that passed `check_config` is that of blocks, as DeepSeek has them."""
    return raw is not None and (raw.get("quant_method"), raw.get("weight_block_size")) == ("fp8", [BLOCK, BLOCK])


def _why_not(quantization: _Quantization) -> str | None:
    """Return what these weights have that cannot be read; `None` for FP8."""
    if quantization.quant_method not in _METHODS:
        return f"quant_method {quantization.quant_method} is not supported"
    if quantization.quant_method == "modelopt" and quantization.quant_algo != "FP8":
        return f"quant_algo {quantization.quant_algo} is not supported"
    if quantization.quant_method == "compressed-tensors":
        return _why_not_compressed(quantization)
    for number_format in (quantization.fmt, quantization.store_dtype or "e4m3"):
        if number_format != "e4m3":
            return f"numbers in {number_format} are not supported, only e4m3 is"
    return _why_not_blocks("weight_block_size", quantization.weight_block_size)


def _why_not_compressed(quantization: _Quantization) -> str | None:
    if quantization.sparsity_config or quantization.transform_config:
        return f"{'sparsity_config' if quantization.sparsity_config else 'transform_config'} is not supported"
    groups = quantization.config_groups.values()
    formats = {quantization.format, *(group.format for group in groups)} - {None, *_COMPRESSED}
    if formats:
        return f"format {formats.pop()} is not supported, only {' and '.join(_COMPRESSED)} are"
    for weights in (group.weights for group in groups):
        if (weights.type, weights.num_bits) != ("float", 8):
            return f"weights of {weights.num_bits} bits and type {weights.type} are not supported"
        if why := _why_not_blocks("block_structure", weights.block_structure):
            return why
    return None


def _why_not_blocks(key: str, block: list[int] | None) -> str | None:
    return None if block in (None, [BLOCK, BLOCK]) else f"{key} {block} is not supported, only [{BLOCK}, {BLOCK}] is"


class Scale(NamedTuple):
    """The tensor that has the factors of a weight."""

    name: str
    shape: tuple[int, ...]


def find_scale(
    name: str, matrix: tuple[int, ...], num_shards: int, shape_of: Callable[[str], tuple[int, ...] | None]
) -> Scale:
    """Return the tensor that has the factors of the FP8 weight `name`.

    `shape_of` returns the shape of a tensor of the checkpoint, or `None` if it has none of that name. Raises
    `CheckpointError` for factors that are missing or whose shape `fp8.factors_by_row` does not take.
    """
    if len(matrix) != 2:
        raise CheckpointError(f"tensor {name} is FP8 and of shape {matrix}; only single matrices are supported as FP8")
    rows, columns = matrix
    across = ceil_div(columns, BLOCK)
    by_part = (num_shards * ceil_div(rows // num_shards, BLOCK), across)
    fitting = ((), (1,), (1, 1), (rows,), (rows, 1), (ceil_div(rows, BLOCK), across), by_part)
    for scale in (name + suffix for suffix in _SCALES):
        shape = shape_of(scale)
        if shape is None:
            continue
        if shape in fitting:
            return Scale(scale, shape)
        raise CheckpointError(
            f"tensor {scale} has shape {shape}, but the FP8 matrix of {rows} x {columns} needs one factor, one for "
            f"each row, or one for each block of {BLOCK} x {BLOCK}"
        )
    raise CheckpointError(f"tensor {name} is FP8, but its factors, {name}{_SCALES[0]}, are in no *.safetensors file")
