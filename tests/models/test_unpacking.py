"""Weights of 8, 4 and 2 bits: each is the model that its numbers, less their zeros and times their factors, make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swiftkv.kernels.dispatch import cpu_ops
from swiftkv.kernels.ops import AnyOps
from swiftkv.kernels.weight_codes import CodedMatrix
from swiftkv.kernels.weight_codes import unpacked as unpacked_matrix
from swiftkv.models.loader import MappedWeights, Packer
from swiftkv.models.quantization import QWeights
from swiftkv.models.registry import DECODERS, read_config, weight_bytes
from swiftkv.models.weights import RankSlices
from tests.support.checkpoints import make_checkpoint, rewrite_config
from tests.support.quantized import (
    WEIGHTS,
    Store,
    as_awq,
    as_gptq,
    as_gptq_v2,
    as_int8,
    as_packed,
    logits_of,
    pack,
    quantize,
    store_projections,
    storing,
)

SHAPE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
AUTO_ROUND: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}
PACKED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
}
INT8: dict[str, Any] = PACKED | {
    "format": "int-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}},
}


def random_matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))


def unpacked(directory: Path, tensors: dict[str, Tensor], shape: tuple[int, int], qweights: QWeights | None) -> Tensor:
    """Return the matrix `w.weight` that some tensors hold, in bfloat16."""
    save_file(tensors, directory / WEIGHTS)
    matrix = MappedWeights(directory).quantized("w.weight", shape, 1, qweights)
    assert matrix is not None
    return matrix.unpack(slice(None), torch.bfloat16)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(
    ("store", "qweights", "bits"),
    [
        *((store, form, bits) for store, form in ((as_gptq, "gptq"), (as_gptq_v2, "gptq_v2")) for bits in (2, 4, 8)),
        *((as_packed, None, bits) for bits in (2, 4, 8)),
        (as_int8, None, 4),
        (as_int8, None, 8),
        (as_awq, "awq", 4),
    ],
)
def test_each_format_unpacks_to_its_numbers(
    store: Store, qweights: QWeights | None, bits: int, shuffled: bool, symmetric: bool, tmp_path: Path
) -> None:
    if store is as_awq and shuffled:
        pytest.skip("AWQ has its groups in order")
    matrix = quantize(random_matrix(160, 192), bits, 32, symmetric=symmetric, shuffled=shuffled)
    loaded = unpacked(tmp_path, store("w.weight", matrix), (160, 192), qweights)
    assert torch.equal(loaded, matrix.weights().to(torch.bfloat16))


@pytest.mark.parametrize("shape", [(24, 13), (9, 40)])
def test_sizes_that_no_word_divides(shape: tuple[int, int], tmp_path: Path) -> None:
    matrix = quantize(random_matrix(*shape), 4, shape[1], symmetric=False)
    for store in (as_packed, as_int8):
        assert torch.equal(
            unpacked(tmp_path, store("w.weight", matrix), shape, None), matrix.weights().to(torch.bfloat16)
        )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_of_zero_borrow_from_the_next_in_the_first_format_of_gptq(bits: int, tmp_path: Path) -> None:
    """GPTQModel writes it so: it subtracts one from all zeros of a word at once, and adds them at once."""
    matrix = quantize(random_matrix(64, 64), bits, 32, symmetric=False)
    matrix = matrix._replace(zeros=matrix.zeros * (torch.arange(64) % 3 > 0).long().unsqueeze(-1))
    tensors, wanted = as_gptq_v2("w.weight", matrix), matrix.weights().to(torch.bfloat16)
    assert torch.equal(unpacked(tmp_path, tensors, (64, 64), "gptq_v2"), wanted)
    tensors["w.qzeros"] -= pack(torch.ones(1, 32 // bits, dtype=torch.int64), bits)
    assert torch.equal(unpacked(tmp_path, tensors, (64, 64), "gptq"), wanted)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (64,), (64, 1)])
def test_one_factor_for_all_or_for_each_row(shape: tuple[int, ...], tmp_path: Path) -> None:
    numbers = torch.randint(-128, 128, (64, 96), dtype=torch.int8)
    scale = torch.rand(shape)
    tensors = {"w.weight": numbers, "w.weight_scale": scale}
    wanted = (numbers.double() * scale.double().reshape(-1, 1)).float().to(torch.bfloat16)
    assert torch.equal(unpacked(tmp_path, tensors, (64, 96), None), wanted)
    packed = {"w.weight_packed": pack(numbers.long() + 128, 8), "w.weight_scale": scale}
    assert torch.equal(unpacked(tmp_path, packed, (64, 96), None), wanted)


def test_an_order_that_was_never_set_is_that_of_the_columns(tmp_path: Path) -> None:
    matrix = quantize(random_matrix(64, 96), 4, 32, symmetric=True)
    tensors = as_packed("w.weight", matrix) | {"w.weight_g_idx": torch.full((96,), -1, dtype=torch.int32)}
    assert torch.equal(unpacked(tmp_path, tensors, (64, 96), None), matrix.weights().to(torch.bfloat16))


def without_order(store: Any) -> Any:
    """Store as AutoRound does: the groups of columns follow each other, and `g_idx` is left out."""

    def stored(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, plain = store(name, weight)
        return {name: tensor for name, tensor in tensors.items() if not name.endswith("g_idx")}, plain

    return stored


def mixed(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Store a matrix as a rule of GPTQModel's `dynamic` for its layer says: 8 bits, smaller groups, or not at all."""
    if "layers.0" in name:
        return ({name: weight}, weight) if "down_proj" in name else storing(as_gptq, 8, 32)(name, weight)
    return storing(as_gptq)(name, weight)


@pytest.mark.parametrize(
    ("arch", "store", "quantization"),
    [
        ("qwen3", storing(as_gptq), GPTQ),
        ("llama", storing(as_gptq_v2, shuffled=True, symmetric=False), GPTQ | {"checkpoint_format": "gptq_v2"}),
        ("mistral", mixed, GPTQ),
        ("qwen2", storing(as_awq, symmetric=False), AWQ),
        ("qwen3_moe", storing(as_awq, symmetric=False), AWQ),
        ("llama", without_order(storing(as_gptq, symmetric=False)), AUTO_ROUND),
        ("qwen3", storing(as_awq, symmetric=False), AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}),
        ("gemma3", storing(as_packed, symmetric=False), PACKED),
        ("qwen3_moe", storing(as_packed, shuffled=True), PACKED),
        ("mimo", storing(as_int8, bits=8, group_size=10**9), INT8),
    ],
)
def test_a_quantized_checkpoint_is_the_one_that_it_unpacks_to(
    arch: str, store: Any, quantization: dict[str, Any], ops: AnyOps, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, arch, **SHAPE)
    store_projections(tmp_path, store)
    rewrite_config(tmp_path, quantization_config=quantization)
    assert torch.equal(logits_of(tmp_path, ops), logits_of(tmp_path / "plain", ops))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("arch", "store", "quantization", "stays"),
    [
        ("qwen3", storing(as_gptq), GPTQ, "all"),
        (
            "llama",
            storing(as_gptq_v2, bits=2, symmetric=False),
            GPTQ | {"checkpoint_format": "gptq_v2", "bits": 2},
            "all",
        ),
        ("llama", storing(as_gptq_v2, shuffled=True), GPTQ | {"checkpoint_format": "gptq_v2"}, "none"),
        ("mistral", mixed, GPTQ, "some"),
        ("qwen3_moe", storing(as_awq, symmetric=False), AWQ, "some"),
        ("gemma3", storing(as_packed, group_size=10**9, symmetric=False), PACKED, "all"),
        ("llama", storing(as_packed, group_size=16), PACKED, "none"),
        ("llama", storing(as_packed, bits=8), PACKED, "all"),
        ("gemma3", storing(as_packed, bits=8, symmetric=False), PACKED, "all"),
        ("qwen3", storing(as_gptq, bits=8, symmetric=False), GPTQ | {"bits": 8}, "all"),
        ("qwen3_moe", storing(as_int8, bits=8), INT8, "some"),
        ("llama", storing(as_int8, bits=8, symmetric=False), INT8, "all"),
    ],
)
def test_codes_stay_so_on_the_cpu(
    arch: str, store: Any, quantization: dict[str, Any], stays: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The logits are those of the unpacked checkpoint, and each rank's part of each matrix is what it unpacks to."""
    make_checkpoint(tmp_path, arch, **SHAPE)
    store_projections(tmp_path, store)
    rewrite_config(tmp_path, quantization_config=quantization)
    ops = cpu_ops()
    assert torch.equal(logits_of(tmp_path, ops, dtype), logits_of(tmp_path / "plain", ops, dtype))
    config = read_config(tmp_path)
    for rank, num_ranks in ((0, 1), (1, 2)):
        weights = DECODERS[config.architecture].weights(config, RankSlices.of(config, rank, num_ranks))
        files = MappedWeights(tmp_path)
        packer = Packer(weights, files, ops, dtype, torch.device("cpu"), 128, None, config.qweights)
        projections = [name for name in weights if name.endswith("_proj.weight")]
        matrices = {name: packer.matrix(name) for name in projections}
        kept = sum(isinstance(matrix, CodedMatrix) for matrix in matrices.values())
        if num_ranks == 1:
            assert ("none" if kept == 0 else "all" if kept == len(projections) else "some") == stays
        for name, matrix in matrices.items():
            assert torch.equal(unpacked_matrix(matrix), packer.tensor(name))


def test_a_head_and_an_embedding_may_be_quantized(ops: AnyOps, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", **SHAPE)
    tensors = load_file(tmp_path / WEIGHTS)
    plain = dict(tensors)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        stored, plain[name] = storing(as_packed, symmetric=False)(name, tensors.pop(name))
        tensors |= stored
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    rewrite_config(tmp_path, quantization_config=PACKED)
    logits = logits_of(tmp_path, ops)
    save_file(plain, tmp_path / WEIGHTS, {"format": "pt"})
    assert torch.equal(logits, logits_of(tmp_path, ops))


@pytest.mark.parametrize(
    ("store", "quantization"),
    [
        (storing(as_gptq), GPTQ),
        (storing(as_gptq, shuffled=True), GPTQ | {"desc_act": True}),
        (storing(as_awq, symmetric=False), AWQ),
        (storing(as_packed, symmetric=False), PACKED),
        (storing(as_int8, bits=8, shuffled=True), INT8),
    ],
)
def test_a_rank_has_its_part_which_ends_within_a_group(
    store: Any, quantization: dict[str, Any], ops: AnyOps, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "qwen3", **SHAPE)
    store_projections(tmp_path, store)
    rewrite_config(tmp_path, quantization_config=quantization)
    config = read_config(tmp_path)
    for rank in (0, 1):
        weights = DECODERS[config.architecture].weights(config, RankSlices.of(config, rank, 2))
        parts = [
            Packer(weights, files, ops, torch.float32, torch.device("cpu"), 128, None, config.qweights)
            for files in (MappedWeights(tmp_path), MappedWeights(tmp_path / "plain"))
        ]
        for name in weights:
            assert torch.equal(*(packer.tensor(name) for packer in parts))


@pytest.mark.parametrize(
    ("store", "quantization"), [(as_awq, AWQ), (as_gptq, GPTQ), (as_packed, PACKED), (as_int8, INT8)]
)
def test_fused_projections_of_mimo(store: Store, quantization: dict[str, Any], ops: AnyOps, tmp_path: Path) -> None:
    """Every shard has its queries, keys and values below those of the one before."""
    make_checkpoint(tmp_path, "mimo", num_key_value_heads=2, **SHAPE)
    tensors = load_file(tmp_path / WEIGHTS)
    plain = dict(tensors)
    for layer in range(3):
        attention = f"model.layers.{layer}.self_attn"
        names = [f"{attention}.{kind}_proj.weight" for kind in "qkv"]
        shards = list(zip(*(tensors.pop(name).chunk(2) for name in names), strict=True))
        fused = quantize(torch.cat([part for shard in shards for part in shard]), 4, 64, symmetric=True)
        tensors |= store(f"{attention}.qkv_proj.weight", fused)
        of_shards = [
            shard.split([len(part) for part in shards[0]]) for shard in fused.weights().float().chunk(len(shards))
        ]
        plain |= {name: torch.cat(rows) for name, rows in zip(names, zip(*of_shards, strict=True), strict=True)}
    save_file(plain, tmp_path / WEIGHTS, {"format": "pt"})
    wanted = logits_of(tmp_path, ops)
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    rewrite_config(
        tmp_path,
        architectures=["MiMoV2ForCausalLM"],
        attention_projection_layout="fused_qkv",
        fused_qkv_shards=2,
        quantization_config=quantization,
    )
    assert torch.equal(logits_of(tmp_path, ops), wanted)


@pytest.mark.parametrize(
    ("arch", "store", "quantization"),
    [
        ("llama", storing(as_gptq, symmetric=False), GPTQ),
        ("qwen3_moe", storing(as_awq, symmetric=False), AWQ),
        ("mistral", mixed, GPTQ),
        ("llama", storing(as_packed), PACKED),
        ("llama", storing(as_packed, bits=8), PACKED),
        ("qwen3_moe", storing(as_int8, bits=8, symmetric=False), INT8),
    ],
)
def test_weights_as_codes_are_counted_as_they_are_kept(
    arch: str, store: Any, quantization: dict[str, Any], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, arch, **SHAPE)
    store_projections(tmp_path, store)
    rewrite_config(tmp_path, quantization_config=quantization)
    config = read_config(tmp_path)
    for rank, num_ranks in ((0, 1), (1, 2)):
        weights = DECODERS[config.architecture].weights(config, RankSlices.of(config, rank, num_ranks))
        files = MappedWeights(tmp_path)
        packer = Packer(weights, files, cpu_ops(), torch.bfloat16, torch.device("cpu"), 128, None, config.qweights)
        names = {name for name, weight in weights.items() if len(weight.shape) == 2}
        matrices = [packer.matrix(name) for name in names]
        kept = sum(matrix.nbytes for matrix in matrices)
        equal_zeros = sum(m.factors.numel() for m in matrices if isinstance(m, CodedMatrix) and m.zeros is None)
        counted = weight_bytes(config, num_ranks, "bfloat16", tmp_path)
        assert kept <= counted <= kept + equal_zeros  # they are stored, but not kept
        assert weight_bytes(config, num_ranks, "bfloat16") > kept
