"""A model whose layers differ in attention: every KV group has its own region, block table, window and batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swiftkv.cache.geometry import KVGroup
from swiftkv.errors import ConfigError
from swiftkv.kernels.ops import AnyOps
from swiftkv.models.batch import ModelInput
from swiftkv.models.config import AttentionKind, RopeConfig
from swiftkv.models.decoder import attention_spec, kv_places
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import read_config
from tests.support.checkpoints import make_checkpoint
from tests.support.paged import int32

BLOCK_SIZE, WINDOW = 16, 20
FULL_LAYERS, WINDOWED_LAYERS = (1, 4), (0, 2, 3)
LENGTHS = (7, 50, 3, 1, 1)  # of the chunks of one prompt


def test_logits_equal_transformers_where_some_layers_have_a_window(ops: AnyOps, tmp_path: Path) -> None:
    types = ["sliding_attention" if layer in WINDOWED_LAYERS else "full_attention" for layer in range(5)]
    model = make_checkpoint(
        tmp_path, "qwen3", num_hidden_layers=5, layer_types=types, sliding_window=WINDOW, use_sliding_window=True
    )
    config = read_config(tmp_path)
    assert [group.layers for group in config.kv_groups(BLOCK_SIZE, "float32")] == [FULL_LAYERS, WINDOWED_LAYERS]
    decoder = load_decoder(config, MappedWeights(tmp_path), torch.float32, "cpu", 128, BLOCK_SIZE, ops)
    prompt = torch.randint(320, (sum(LENGTHS),), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        expected = model(prompt[None]).logits[0]
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    # All bits set is NaN: a kernel that reads what nobody wrote, or another group's KV, shows it.
    regions = [torch.full((9 * group.block_bytes,), 0xFF, dtype=torch.uint8) for group in decoder.kv_groups]
    blocks = [torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:num_blocks] for seed in (1, 2)]
    tables = [of * group.num_layers for of, group in zip(blocks, decoder.kv_groups, strict=True)]
    begin = 0
    for length in LENGTHS:
        end = begin + length
        used = -(-end // BLOCK_SIZE)
        batch = ModelInput(
            token_ids=prompt[begin:end].int(),
            positions=torch.arange(begin, end, dtype=torch.int32),
            query_starts=int32([0, length]),
            context_lens=int32([end]),
            stream_tables=(tuple(table[:used].int() for table in tables),),
            table_starts=(int32([0, used]),) * 2,
        )
        logits = decoder.logits(decoder.forward(batch, regions))
        torch.testing.assert_close(logits, expected[begin:end], atol=1e-4, rtol=0)
        begin = end


def kind_of(group: KVGroup) -> AttentionKind:
    rope = RopeConfig("default", 1e4, 512, 512)
    return AttentionKind(group.layers, 4, group.num_kv_heads, group.head_dim, rope)


def test_every_layer_has_its_place() -> None:
    config_groups = (KVGroup((1, 4), 2, 16, "float32", 16), KVGroup((0, 2, 3), 2, 16, "float32", 16))
    specs = [attention_spec(group, kind_of(group)) for group in config_groups]
    places = kv_places(config_groups, specs)
    assert [(place.layer, place.group, place.index) for place in places] == [
        (0, 1, 0), (1, 0, 0), (2, 1, 1), (3, 1, 2), (4, 0, 1),
    ]  # fmt: skip


def test_what_no_kernel_reads_is_refused_by_name() -> None:
    group = KVGroup((0, 2), 2, 16, "float32", 16)
    with pytest.raises(ConfigError, match=r"layers \(0, 2\): recurrent state"):
        attention_spec(replace(group, kind="recurrent"), kind_of(group))
