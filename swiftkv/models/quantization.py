"""Tells which quantized checkpoints can be read, and which tensors hold a weight; `models/unpacking.py` unpacks them.

`config.json` only decides whether a checkpoint is accepted. It does not say how each weight is stored: some weights of
every checkpoint are not quantized, and some programs quantize each weight in its own way. That follows from the names,
dtypes and shapes of the weight's tensors. The factors of activations (`input_scale`) and of keys and values (`k_scale`,
`v_scale`) are not needed, because neither is rounded here.

This file imports no torch, so that `swiftkv plan` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from swiftkv.arithmetic import ceil_div
from swiftkv.errors import CheckpointError, ConfigError

BLOCK = 128
"""The rows and the columns of a block that shares a factor."""
_FP8, _INT8, _INT32, _INT64 = "F8_E4M3", "I8", "I32", "I64"
"""The names of dtypes in the headers of safetensors files."""
_SCALE_DTYPES = ("F32", "F16", "BF16", "F8_E8M0")
"""The dtypes that factors may have."""
_WORD = 32
"""The bits of an element that numbers are packed into."""
_BITS = (2, 4, 8)
"""The sizes that a packed number may have."""
_SCALES = ("_scale_inv", "_scale")
"""The names of the factors beside a weight. With either name, the weight's numbers are multiplied by the factors."""

OWN_FILES = ("quantize_config.json", "quant_config.json")
"""The files in which AutoGPTQ and AutoAWQ said how they quantize, before `config.json` did."""

QWeights = Literal["gptq", "gptq_v2", "awq"]
"""The formats that call a packed weight `qweight`. The first two differ in the zeros, which gptq stores less one."""
Form = Literal["numbers", "compressed", "gptq", "gptq_v2", "awq"]
"""The ways to store a quantized weight: one number in each element, or packed as one of the programs does."""


class _Weights(msgspec.Struct):
    """The weights of a group; defaults are those of compressed-tensors."""

    num_bits: int = 8
    type: str = "int"
    block_structure: list[int] | None = None


class _Group(msgspec.Struct):
    weights: _Weights | None = None
    format: str | None = None


class _Quantization(msgspec.Struct):
    """The keys of `quantization_config` that are about weights, in the spelling of any program."""

    quant_method: str | None = None
    quant_algo: str | None = None  # modelopt
    fmt: str = "e4m3"
    store_dtype: str | None = None  # of MiMo's experts, if they are MXFP4
    weight_block_size: list[int] | None = None
    format: str | None = None  # compressed-tensors, and GPTQModel's other name for checkpoint_format
    config_groups: dict[str, _Group] = {}  # this and the next two: compressed-tensors
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None
    bits: int | float | None = None  # this and the rest: gptq, awq and AutoRound
    checkpoint_format: str | None = None
    version: str | None = None
    backend: str | None = None
    pack_dtype: str | None = None
    is_marlin_format: bool | None = None
    packing_format: str | None = None  # this and the next two: AutoRound
    data_type: str = "int"
    act_bits: int = 16
    adapter: Any = None  # GPTQModel: low-rank matrices to be added to the weights
    rotation: Any = None


def check_config(place: str, raw: Any) -> None:
    """Raise `ConfigError` unless `raw`, the `quantization_config` in a place, is null or can be read."""
    if raw is None:
        return
    try:
        why = _why_not(msgspec.convert(raw, _Quantization))
    except msgspec.ValidationError as error:
        why = str(error)
    if why is not None:
        raise ConfigError(
            f"{place}: {why}; supported are FP8 weights (quant_method fp8, fbgemm_fp8, modelopt, "
            "compressed-tensors), int8 and int4 weights (compressed-tensors, gptq, awq, auto-round), and MXFP4 experts "
            "of gpt-oss; use a checkpoint in one of these, or the original weights"
        )


def qweights_of(raw: Any) -> QWeights | None:
    """Return the format of tensors called `qweight`, by a `quantization_config` that passed `check_config`."""
    if raw is None:
        return None
    quantization = msgspec.convert(raw, _Quantization)
    match quantization.quant_method:
        case "gptq":
            return "gptq_v2" if _gptq_format(quantization) == "gptq_v2" else "gptq"
        case "awq":
            return "awq"
        case "auto-round" | "intel/auto-round":
            return _AUTO_ROUND.get(_packing(quantization))
    return None


def is_block_wise(raw: Any) -> bool:
    """Return whether a `quantization_config` that passed `check_config` is that of blocks, as DeepSeek has them."""
    return raw is not None and (raw.get("quant_method"), raw.get("weight_block_size")) == ("fp8", [BLOCK, BLOCK])


def _why_not(quantization: _Quantization) -> str | None:
    """Return the property of these weights that cannot be read; `None` if all can be read."""
    match quantization.quant_method:
        case "compressed-tensors":
            return _why_not_compressed(quantization)
        case "gptq":
            return _why_not_gptq(quantization)
        case "awq":
            return _why_not_awq(quantization)
        case "auto-round" | "intel/auto-round":
            return _why_not_auto_round(quantization)
        case "modelopt" if quantization.quant_algo != "FP8":
            return f"quant_algo {quantization.quant_algo} is not supported"
        case "fp8" | "fbgemm_fp8" | "modelopt":
            return _why_not_fp8(quantization)
    return f"quant_method {quantization.quant_method} is not supported"


def _why_not_fp8(quantization: _Quantization) -> str | None:
    for number_format in (quantization.fmt, quantization.store_dtype or "e4m3"):
        if number_format != "e4m3":
            return f"numbers in {number_format} are not supported, only e4m3 is"
    return _why_not_blocks("weight_block_size", quantization.weight_block_size)


_COMPRESSED = {
    "float-quantized": (("float", 8),),
    "int-quantized": (("int", 8), ("int", 4), ("int", 2)),
    "pack-quantized": (("int", 8), ("int", 4), ("int", 2)),
    "naive-quantized": (("float", 8), ("int", 8), ("int", 4), ("int", 2)),
}
"""The formats of compressed-tensors that can be read, and the numbers that they may have."""


def _why_not_compressed(quantization: _Quantization) -> str | None:
    if quantization.sparsity_config or quantization.transform_config:
        return f"{'sparsity_config' if quantization.sparsity_config else 'transform_config'} is not supported"
    for group in quantization.config_groups.values():
        if (weights := group.weights) is None:
            continue
        form = group.format or quantization.format or "naive-quantized"
        if form not in _COMPRESSED:
            return f"format {form} is not supported, only {', '.join(_COMPRESSED)} are"
        if (weights.type, weights.num_bits) not in _COMPRESSED[form]:
            return f"{form} weights of {weights.num_bits} bits and type {weights.type} are not supported"
        if why := _why_not_blocks("block_structure", weights.block_structure):
            return why
    return None


def _why_not_blocks(key: str, block: list[int] | None) -> str | None:
    return None if block in (None, [BLOCK, BLOCK]) else f"{key} {block} is not supported, only [{BLOCK}, {BLOCK}] is"


def _gptq_format(quantization: _Quantization) -> str:
    return quantization.checkpoint_format or quantization.format or "gptq"


def _why_not_gptq(quantization: _Quantization) -> str | None:
    form = "marlin" if quantization.is_marlin_format else _gptq_format(quantization)
    if form not in ("gptq", "gptq_v2"):
        return f"checkpoint_format {form} of gptq is not supported, only gptq and gptq_v2 are"
    if quantization.bits not in _BITS:
        return f"bits {quantization.bits} of gptq are not supported, only 2, 4 and 8 are"
    return _why_not_qweights(quantization)


def _why_not_awq(quantization: _Quantization) -> str | None:
    version = (quantization.version or quantization.checkpoint_format or quantization.format or "gemm").lower()
    if version != "gemm":
        return f"version {version} of awq is not supported, only gemm is"
    if quantization.backend not in (None, "auto", "autoawq"):
        return f"backend {quantization.backend} of awq is not supported, only autoawq is"
    if quantization.bits != 4:
        return f"bits {quantization.bits} of awq are not supported, only 4 are"
    return _why_not_qweights(quantization)


_AUTO_ROUND: dict[str, QWeights] = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
"""The packings of AutoRound that can be read: they are those of two other programs."""


def _packing(quantization: _Quantization) -> str:
    """Return the packing of AutoRound. Older files have it in `backend`, with the name of a kernel behind it."""
    in_backend = quantization.backend if (quantization.backend or "").startswith("auto_round:") else None
    packing = quantization.packing_format or in_backend or "auto_round:auto_gptq"
    return ":".join(packing.split(":")[:2])


def _why_not_auto_round(quantization: _Quantization) -> str | None:
    packing = _packing(quantization)
    if packing not in _AUTO_ROUND:
        return f"packing_format {packing} of auto-round is not supported, only {', '.join(_AUTO_ROUND)} are"
    if quantization.data_type != "int" or quantization.act_bits < 16:
        return "auto-round with a data_type other than int, or quantized activations, is not supported"
    bits = _BITS if _AUTO_ROUND[packing] == "gptq" else (4,)
    if quantization.bits not in bits:
        return f"bits {quantization.bits} of {packing} are not supported, only {', '.join(map(str, bits))} are"
    return None


def _why_not_qweights(quantization: _Quantization) -> str | None:
    if quantization.pack_dtype not in (None, "int32"):
        return f"pack_dtype {quantization.pack_dtype} is not supported, only int32 is"
    if quantization.adapter or quantization.rotation:
        return f"{'adapter' if quantization.adapter else 'rotation'} is not supported"
    return None


class Stored(NamedTuple):
    """The dtype of a tensor, as safetensors spells it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


StoredOf = Callable[[str], Stored | None]
"""A function that returns what a checkpoint stores under a name; `None` if nothing."""


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """The tensors that hold one quantized matrix, by name; their shapes are right."""

    form: Form
    matrix: tuple[int, int]  # its rows and columns
    num_shards: int
    numbers: str
    scale: str
    zeros: str | None  # None: the numbers are symmetric
    group: str | None  # the group of each column; None: groups follow each other, equally long
    bits: int  # of a number


def group_columns(found: QuantizedTensors, scale_shape: tuple[int, ...]) -> int:
    """Return the number of columns that share a factor, by the shape of the factors; the last group may be shorter."""
    rows, columns = found.matrix
    if found.form not in ("numbers", "compressed"):
        return columns // scale_shape[0]
    if len(scale_shape) < 2 or scale_shape[1] == 1:
        return columns
    return columns // scale_shape[1] if scale_shape[0] == rows else BLOCK


def possible_names(name: str) -> tuple[str, str, str]:
    """Return the names that a checkpoint may have for the numbers of weight `name`: unpacked, packed, GPTQ or AWQ."""
    return name, f"{name}_packed", f"{name.removesuffix('weight')}qweight"


def find_quantized(
    name: str, shape: tuple[int, ...], num_shards: int, stored_of: StoredOf, qweights: QWeights | None
) -> QuantizedTensors | None:
    """Return the tensors that hold the weight `name`; `None` if it is not quantized, or not there.

    Raises `CheckpointError` if tensors are missing or have shapes that `models/unpacking.py` does not take.
    """
    names = possible_names(name)
    found = next(((numbers, stored) for numbers in names if (stored := stored_of(numbers)) is not None), None)
    if found is None or (found[0] == name and found[1].dtype not in (_FP8, _INT8)):
        return None
    numbers, stored = found
    if len(shape) != 2:
        raise CheckpointError(f"tensor {numbers} is quantized and of shape {shape}; only single matrices may be")
    search = _Search(numbers, (shape[0], shape[1]), num_shards, stored_of)
    if numbers == name:
        return search.unpacked(is_fp8=stored.dtype == _FP8)
    return search.packed(name) if numbers.endswith("_packed") else search.qweight(qweights)


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for the tensors of a matrix [rows, columns] whose numbers are in tensor `numbers`."""

    numbers: str
    matrix: tuple[int, int]
    num_shards: int
    stored_of: StoredOf

    def unpacked(self, *, is_fp8: bool) -> QuantizedTensors:
        """Return the tensors of a matrix with a number in each element: FP8, or compressed-tensors' int8."""
        (rows, columns), name = self.matrix, self.numbers
        self._check(name, [self.matrix], (_FP8, _INT8))
        blocks = [(parts * ceil_div(rows // parts, BLOCK), ceil_div(columns, BLOCK)) for parts in (1, self.num_shards)]
        usual = name + (_SCALES[0] if is_fp8 else _SCALES[1])
        scale = next((name + suffix for suffix in _SCALES if self.stored_of(name + suffix)), usual)
        group = None if is_fp8 else self._group(f"{name}_g_idx")
        shape = self._check(scale, [*self._scale_shapes(scale, group), *blocks], _SCALE_DTYPES)
        zeros = None if is_fp8 or self.stored_of(f"{name}_zero_point") is None else f"{name}_zero_point"
        if zeros is not None:
            self._check(zeros, [shape], (_INT8,))
        return self._found("numbers", scale, zeros, group)

    def packed(self, name: str) -> QuantizedTensors:
        """Return the tensors of a matrix as compressed-tensors packs it."""
        rows, columns = self.matrix
        bits = self._bits(lambda bits: (rows, _words(columns, bits)))
        scale, group = f"{name}_scale", self._group(f"{name}_g_idx")
        shape = self._check(scale, self._scale_shapes(scale, group), _SCALE_DTYPES)
        zeros = None if self.stored_of(f"{name}_zero_point") is None else f"{name}_zero_point"
        if zeros is not None:
            self._check(zeros, [(_words(rows, bits), *shape[1:])], (_INT32,))
        return self._found("compressed", scale, zeros, group, bits)

    def qweight(self, qweights: QWeights | None) -> QuantizedTensors:
        """Return the tensors of a matrix as GPTQ or AWQ packs it: transposed."""
        if qweights is None:
            raise CheckpointError(
                f"tensor {self.numbers} is of GPTQ or AWQ, but config.json has no quantization_config that says which; "
                f"copy it, or {' or '.join(OWN_FILES)} of older programs, from the original checkpoint"
            )
        rows, columns = self.matrix
        module = self.numbers.removesuffix("qweight")
        scale, zeros = f"{module}scales", f"{module}qzeros"
        if qweights == "awq":
            bits, group = 4, None
            self._check(self.numbers, [(columns, _words(rows, bits))], (_INT32,))
        else:
            bits = self._bits(lambda bits: (_words(columns, bits), rows))
            group = self._group(f"{module}g_idx")
        num_groups = self._num_groups(scale, 0, group)
        self._check(scale, [(num_groups, rows)], _SCALE_DTYPES)
        self._check(zeros, [(num_groups, _words(rows, bits))], (_INT32,))
        return self._found(qweights, scale, zeros, group, bits)

    def _found(self, form: Form, scale: str, zeros: str | None, group: str | None, bits: int = 8) -> QuantizedTensors:
        return QuantizedTensors(form, self.matrix, self.num_shards, self.numbers, scale, zeros, group, bits)

    def _bits(self, shape_of: Callable[[int], tuple[int, int]]) -> int:
        """Return the bits of a packed number; `shape_of` returns the shape of the numbers for each possible size."""
        shape = self._check(self.numbers, [shape_of(bits) for bits in _BITS], (_INT32,))
        return next(bits for bits in _BITS if shape_of(bits) == shape)

    def _scale_shapes(self, scale: str, group: str | None) -> list[tuple[int, ...]]:
        """Return the shapes of one factor, of one for each row, and of one for each group of a row."""
        rows, _ = self.matrix
        return [(), (1,), (1, 1), (rows,), (rows, 1), (rows, self._num_groups(scale, 1, group))]

    def _num_groups(self, scale: str, axis: int, group: str | None) -> int:
        """Return the number of groups in a row, from the shape of the factors; 1 if a row cannot have that many."""
        shape = self._stored(scale).shape
        num_groups = shape[axis] if len(shape) == 2 else 0
        return num_groups if num_groups and (group is not None or self.matrix[1] % num_groups == 0) else 1

    def _group(self, name: str) -> str | None:
        if self.stored_of(name) is None:
            return None
        self._check(name, [self.matrix[1:]], (_INT32, _INT64))
        return name

    def _check(self, name: str, shapes: list[tuple[int, ...]], dtypes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises `CheckpointError` unless it is one of `shapes`, and the dtype fits."""
        dtype, shape = self._stored(name)
        rows, columns = self.matrix
        if shape not in shapes:
            raise CheckpointError(
                f"tensor {name} has shape {shape}, but config.json makes {self.numbers} a quantized matrix of {rows} x "
                f"{columns}, for which it may be {' or '.join(map(str, dict.fromkeys(shapes)))}"
            )
        if dtype not in dtypes:
            raise CheckpointError(f"tensor {name} is {dtype}; supported: {', '.join(dtypes)}")
        return shape

    def _stored(self, name: str) -> Stored:
        stored = self.stored_of(name)
        if stored is None:
            raise CheckpointError(f"tensor {self.numbers} is quantized, but {name} is in no *.safetensors file")
        return stored


def _words(numbers: int, bits: int) -> int:
    """Return the number of words that hold `numbers` numbers of `bits` bits."""
    return ceil_div(numbers * bits, _WORD)
