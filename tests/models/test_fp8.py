"""Checkpoints whose weights are FP8: each is the model that its numbers times their factors make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from swiftkv.errors import CheckpointError
from swiftkv.kernels.dispatch import cpu_ops
from swiftkv.kernels.ops import AnyOps
from swiftkv.kernels.weight_codes import CodedMatrix, unpacked
from swiftkv.models.files import check_tensors
from swiftkv.models.loader import MappedWeights, Packer, load_decoder
from swiftkv.models.quantization import QuantizedTensors
from swiftkv.models.registry import DECODERS, read_config, weight_bytes
from swiftkv.models.unpacking import quantized_matrix
from swiftkv.models.weights import RankSlices
from tests.support.checkpoints import make_checkpoint, rewrite_config
from tests.support.quantized import WEIGHTS, logits_of, split_experts

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
SHAPE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320}  # neither is a multiple of 128
LARGEST = 448.0  # of e4m3

Quantized = tuple[Tensor, Tensor]  # the numbers, and their factors


def numbers_of(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def by_tensor(weight: Tensor) -> Quantized:
    scale = weight.abs().amax() / LARGEST
    return numbers_of(weight, scale), scale.reshape(())


def by_row(weight: Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / LARGEST
    return numbers_of(weight, scale), scale


def by_block(weight: Tensor) -> Quantized:
    parts, scales = [], []
    for rows in weight.split(128):
        blocks = rows.split(128, 1)
        scales.append(torch.stack([block.abs().amax() / LARGEST for block in blocks]))
        parts.append(torch.cat([numbers_of(b, s) for b, s in zip(blocks, scales[-1], strict=True)], 1))
    return torch.cat(parts), torch.stack(scales)


def stored_fp8(numbers: Tensor, num_shards: int = 1) -> QuantizedTensors:
    rows, columns = numbers.shape
    return QuantizedTensors("numbers", (rows, columns), num_shards, "numbers", "scale", None, None, 8)


def unpacked_of(numbers: Tensor, scale: Tensor, dtype: torch.dtype, num_shards: int = 1) -> Tensor:
    stored = stored_fp8(numbers, num_shards)
    return quantized_matrix(stored, {"numbers": numbers, "scale": scale}.__getitem__).unpack(slice(None), dtype)


def random_matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))


def naive(numbers: Tensor, scale: Tensor, num_shards: int = 1) -> Tensor:
    """Return every number times the factor of its row's and column's block, in float64."""
    rows, columns = (torch.arange(size) for size in numbers.shape)
    part = len(rows) // num_shards
    block = rows // part * -(-part // 128) + rows % part // 128
    return numbers.double() * scale.double()[block.unsqueeze(1), columns // 128]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (128, 256), (130, 100), (300, 129)])
def test_blocks_are_unpacked_as_transformers_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    numbers, scale = by_block(random_matrix(*shape))
    unpacked = unpacked_of(numbers, scale, dtype)
    assert torch.equal(unpacked, naive(numbers, scale).to(dtype))
    assert torch.equal(unpacked, _dequantize_fp8_weight(numbers, scale, [128, 128], torch.float32).to(dtype))


def test_blocks_of_parts_begin_with_each_part() -> None:
    parts = [by_block(random_matrix(rows, 200)) for rows in (150, 150, 150)]
    numbers, scale = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    assert len(scale) == 6  # without parts it would be 4
    assert torch.equal(unpacked_of(numbers, scale, torch.float32, num_shards=3), naive(numbers, scale, 3).float())


@pytest.mark.parametrize("scale", [by_tensor, by_row])
def test_one_factor_for_all_or_for_each_row(scale: Callable[[Tensor], Quantized]) -> None:
    numbers, factors = scale(random_matrix(256, 16384))  # as many rows as there are blocks
    wanted = (numbers.double() * factors.double().reshape(-1, 1)).float()
    for shape in {factors.shape, (factors.numel(),), (factors.numel(), 1)}:
        assert torch.equal(unpacked_of(numbers, factors.reshape(shape), torch.float32), wanted)


def test_numbers_that_are_not_finite_stay_so() -> None:
    numbers = torch.tensor([[float("nan"), 1.0]]).to(torch.float8_e4m3fn)
    assert unpacked_of(numbers, torch.ones(1, 1), torch.float32).isnan().tolist() == [[True, False]]


def to_fp8(directory: Path, quantize: Callable[[Tensor], Quantized], suffix: str) -> dict[str, Tensor]:
    """Store the projections of a checkpoint as FP8; return the checkpoint with these unpacked again."""
    tensors = load_file(directory / WEIGHTS)
    unpacked = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        numbers, scale = quantize(tensors[name])
        tensors |= {name: numbers, name + suffix: scale.to(torch.bfloat16) if suffix == "_scale" else scale}
        unpacked[name] = unpacked_of(numbers, tensors[name + suffix], torch.float32)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    return unpacked


@pytest.mark.parametrize(
    ("arch", "quantize", "suffix", "config"),
    [
        ("qwen3", by_block, "_scale_inv", BLOCKS),
        ("llama", by_tensor, "_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
        ("qwen2", by_row, "_scale", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
        ("qwen3_moe", by_block, "_scale_inv", BLOCKS),
        ("mimo", by_block, "_scale_inv", BLOCKS),
    ],
)
def test_a_checkpoint_in_fp8_is_the_one_that_it_unpacks_to(
    arch: str, quantize: Callable[[Tensor], Quantized], suffix: str, config: dict[str, Any], ops: AnyOps, tmp_path: Path
) -> None:
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for directory in (packed, plain):
        make_checkpoint(directory, arch, **SHAPE)
        save_file(split_experts(load_file(directory / WEIGHTS)), directory / WEIGHTS, {"format": "pt"})
    save_file(to_fp8(packed, quantize, suffix), plain / WEIGHTS, {"format": "pt"})
    rewrite_config(packed, quantization_config=config)
    assert torch.equal(logits_of(packed, ops), logits_of(plain, ops))


@pytest.mark.parametrize(("quantize", "suffix"), [(by_block, "_scale_inv"), (by_row, "_scale"), (by_tensor, "_scale")])
def test_fp8_stays_so_on_the_cpu_and_is_counted_so(
    quantize: Callable[[Tensor], Quantized], suffix: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "qwen3", **SHAPE)
    to_fp8(tmp_path, quantize, suffix)
    rewrite_config(tmp_path, quantization_config=BLOCKS)
    config = read_config(tmp_path)
    for rank, num_ranks in ((0, 1), (1, 2)):
        weights = DECODERS[config.architecture].weights(config, RankSlices.of(config, rank, num_ranks))
        packer = Packer(weights, MappedWeights(tmp_path), cpu_ops(), torch.bfloat16, torch.device("cpu"), 128, None)
        matrices = {name: packer.matrix(name) for name, weight in weights.items() if len(weight.shape) == 2}
        for name, matrix in matrices.items():
            assert isinstance(matrix, CodedMatrix) == name.endswith("_proj.weight")
            assert torch.equal(unpacked(matrix), packer.tensor(name))
        assert weight_bytes(config, num_ranks, "bfloat16", tmp_path) == sum(m.nbytes for m in matrices.values())


@pytest.mark.parametrize("spoilt", ["numbers", "factors"])
def test_fp8_that_kernels_do_not_take_is_unpacked(spoilt: str) -> None:
    numbers, scale = by_block(random_matrix(64, 256))
    if spoilt == "numbers":
        numbers[3, 200] = torch.nan
    else:
        scale[0, 1] = 2.0**110
    matrix = quantized_matrix(stored_fp8(numbers), {"numbers": numbers, "scale": scale}.__getitem__)
    assert matrix.coded(slice(128, 256), torch.bfloat16) is None
    assert matrix.coded(slice(0, 128), torch.bfloat16) is not None or spoilt == "factors"


def test_a_rank_has_its_part_which_ends_within_a_block(ops: AnyOps, tmp_path: Path) -> None:
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for directory in (packed, plain):
        make_checkpoint(directory, "qwen3", **SHAPE)
    save_file(to_fp8(packed, by_block, "_scale_inv"), plain / WEIGHTS, {"format": "pt"})
    rewrite_config(packed, quantization_config=BLOCKS)
    config = read_config(plain)
    assert read_config(packed) == config
    for rank in (0, 1):
        weights = DECODERS[config.architecture].weights(config, RankSlices.of(config, rank, 2))
        parts = [
            Packer(weights, MappedWeights(directory), ops, torch.float32, torch.device("cpu"), 128, None)
            for directory in (packed, plain)
        ]
        for name in weights:
            assert torch.equal(*(packer.tensor(name) for packer in parts))


def fuse_qkv(directory: Path, num_shards: int) -> dict[str, Tensor]:
    """Fuse projections as MiMo-V2.5 is published: shard by shard, each with blocks of its own.

    Return the checkpoint with these unpacked and split again.
    """
    tensors = load_file(directory / WEIGHTS)
    split = dict(tensors)
    for layer in range(3):
        attention = f"model.layers.{layer}.self_attn"
        names = [f"{attention}.{kind}_proj.weight" for kind in "qkv"]
        shards = list(zip(*(tensors.pop(name).chunk(num_shards) for name in names), strict=True))
        packed = [by_block(torch.cat(shard)) for shard in shards]
        fused = f"{attention}.qkv_proj.weight"
        tensors[fused], tensors[f"{fused}_scale_inv"] = (torch.cat(of_all) for of_all in zip(*packed, strict=True))
        unpacked = [
            unpacked_of(*of_shard, torch.float32).split([len(part) for part in shard])
            for shard, of_shard in zip(shards, packed, strict=True)
        ]
        split |= {name: torch.cat(rows) for name, rows in zip(names, zip(*unpacked, strict=True), strict=True)}
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    return split


def test_fused_projections_of_mimo_as_published(ops: AnyOps, tmp_path: Path) -> None:
    fused, split = tmp_path / "fused", tmp_path / "split"
    for directory in (fused, split):
        make_checkpoint(directory, "mimo", num_key_value_heads=2, **SHAPE)
    save_file(fuse_qkv(fused, num_shards=2), split / WEIGHTS, {"format": "pt"})
    rewrite_config(
        fused,
        architectures=["MiMoV2ForCausalLM"],
        attention_projection_layout="fused_qkv",
        quantization_config=BLOCKS,
    )
    with safe_open(fused / WEIGHTS, framework="pt") as file:
        shapes = {
            layer: file.get_slice(f"model.layers.{layer}.self_attn.qkv_proj.weight").get_shape() for layer in (0, 1)
        }
        scales = [
            file.get_slice(f"model.layers.{layer}.self_attn.qkv_proj.weight_scale_inv").get_shape() for layer in (0, 1)
        ]
    assert (shapes, scales) == ({0: [352, 192], 1: [512, 192]}, [[4, 2], [4, 2]])  # 352 rows by themselves need 3
    assert torch.equal(logits_of(fused, ops), logits_of(split, ops))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_scale_inv": None}, ["down_proj.weight is quantized", "down_proj.weight_scale_inv"]),
        ({"weight_scale_inv": torch.ones(2, 2)}, ["down_proj.weight_scale_inv has shape (2, 2)", "192 x 320"]),
        ({"weight_scale_inv": torch.ones(2, 3, dtype=torch.float64)}, ["down_proj.weight_scale_inv", "F64"]),
    ],
)
def test_factors_that_are_missing_or_do_not_fit(
    changes: dict[str, Tensor | None], words: list[str], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "qwen3", **SHAPE)
    to_fp8(tmp_path, by_block, "_scale_inv")
    rewrite_config(tmp_path, quantization_config=BLOCKS)
    tensors = load_file(tmp_path / WEIGHTS)
    for suffix, tensor in changes.items():
        name = f"model.layers.1.mlp.down_proj.{suffix}"
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    config = read_config(tmp_path)
    with pytest.raises(CheckpointError) as error:
        load_decoder(config, MappedWeights(tmp_path), torch.float32, "cpu", 128)
    assert all(word in str(error.value) for word in words)
    with pytest.raises(CheckpointError) as by_header:
        check_tensors(tmp_path, DECODERS[config.architecture].weights(config, RankSlices.of(config, 0, 1)))
    assert all(word in str(by_header.value) for word in words)
