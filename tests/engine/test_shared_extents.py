"""Engines whose KV groups hand extents to each other answer as those do that divide their pool, or cache nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from swiftkv._core import NO_BLOCK
from swiftkv.cache.division import SharedExtents, can_share
from swiftkv.engine.messages import EngineConfig
from swiftkv.engine.ranks import ReceivedStep
from swiftkv.engine.runner import ModelRunner
from swiftkv.engine.step import EngineStep
from swiftkv.models.registry import read_config
from tests.engine.engine_process import EngineClient
from tests.engine.engine_thread import EngineThread
from tests.support.checkpoints import SHAPE, make_checkpoint

MAX_MODEL_LEN = 320
CHECKPOINTS: dict[str, dict[str, object]] = {
    "gemma3": {
        "arch": "gemma3",
        "num_hidden_layers": 5,
        "sliding_window_pattern": ...,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    },
    "gpt_oss": {"arch": "gpt_oss", "num_hidden_layers": 5},
    "mistral": {"arch": "mistral", "sliding_window": 33},  # has windows alone, and so nobody to share with
}


class PoisoningRunner(ModelRunner):
    """Notes which KV group has which extent, and leaves nothing but NaN in one that changes hands."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.pool.tensor.fill_(0xFF)
        self._division = SharedExtents(tuple(region.group for region in self.pool.regions), splits_prompts=True)
        self._extents = self.pool.tensor.view(-1, self._division.extent_bytes)
        self._owners: dict[int, int] = {}
        self.num_hand_overs = 0
        self.num_moves = 0

    def forward(self, plan: EngineStep) -> torch.Tensor:
        self.num_moves += len(plan.local_moves)
        kept = {block // self._division.blocks_per_extent(group) for group, block, _ in plan.local_moves.tolist()}
        for group, extents in enumerate(self._used_extents(plan)):
            for extent in extents:
                has_changed = self._owners.get(extent, group) != group
                self._owners[extent] = group
                self.num_hand_overs += has_changed
                if has_changed and extent not in kept:
                    self._extents[extent].fill_(0xFF)
        return super().forward(plan)

    def _used_extents(self, plan: EngineStep) -> Iterator[list[int]]:
        """Yield the extents, group by group, in which blocks of the step lie, or come to lie."""
        for group, (spec, table) in enumerate(zip(self.group_specs, plan.stream_tables[0], strict=True)):
            places = plan.local_moves[plan.local_moves[:, 0] == group, 2]
            blocks = np.concatenate([table[table != NO_BLOCK] // spec.num_layers, places])
            yield np.unique(blocks // self._division.blocks_per_extent(group)).tolist()


def turns_of_conversations(engine: EngineClient) -> list[list[int]]:
    """Return the answers in three conversations beside a crowd; prompts end beside and at the ends of blocks.

    In each round, short requests run beside a longer answer; when they end, a long prompt comes, which needs their
    memory.
    """
    generator = np.random.default_rng(5)

    def text(length: int) -> list[int]:
        return generator.integers(3, SHAPE["vocab_size"], length).tolist()

    conversations = [text(length) for length in (15, 32, 49)]
    answers = []
    for _ in range(3):
        with engine.at_once():
            crowd = [engine.add(text(length), max_tokens=20 + length % 7) for length in (1, 16, 31, 33)]
            turns = [engine.add(prompt, max_tokens=27 + 8 * i) for i, prompt in enumerate(conversations)]
            crowd += [engine.add(text(length), max_tokens=4) for length in (290, 310)]
        said = [answer.token_ids for answer in engine.wait([*turns, *crowd])]
        conversations = [[*prompt, *said[i], *text(5)] for i, prompt in enumerate(conversations)]
        answers += said
    return answers


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name)
        make_checkpoint(directory, **CHECKPOINTS[name])
        return directory

    return make


def engine_of(
    checkpoint: Path, num_blocks: int, runner: type[ModelRunner], **options: object
) -> EngineThread[ModelRunner]:
    """Return an engine whose pool has the bytes of `num_blocks` blocks of all KV groups."""
    groups = read_config(checkpoint).kv_groups(16, "float32")
    return EngineThread(
        checkpoint,
        runner,
        kv_bytes=num_blocks * sum(group.block_bytes for group in groups),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        **options,
    )


def answers_of(engine: EngineThread[ModelRunner]) -> list[list[int]]:
    with engine.running():
        answers = turns_of_conversations(engine)
        stats = engine.wait_for_rest()
    assert stats.num_used_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    return answers


@pytest.fixture(scope="module")
def expected_of(checkpoint_of: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    @cache
    def ask(name: str) -> list[list[int]]:
        return answers_of(engine_of(checkpoint_of(name), 200, ModelRunner, enable_prefix_caching=False))

    return ask


@pytest.mark.parametrize(
    ("name", "is_ahead"),
    [
        pytest.param("gemma3", False, id="gemma3 in step"),
        pytest.param("gpt_oss", True, id="gpt_oss a step ahead"),
        pytest.param("gemma3", True, id="gemma3 a step ahead", marks=pytest.mark.slow),
        pytest.param("gpt_oss", False, id="gpt_oss in step", marks=pytest.mark.slow),
    ],
)
def test_answers_do_not_depend_on_who_has_had_an_extent(
    checkpoint_of: Callable[[str], Path],
    expected_of: Callable[[str], list[list[int]]],
    name: str,
    is_ahead: bool,
) -> None:
    engine = engine_of(checkpoint_of(name), 26, PoisoningRunner, shares_extents=True, async_scheduling=is_ahead)
    assert answers_of(engine) == expected_of(name)
    assert isinstance(engine.runner, PoisoningRunner)
    assert engine.runner.num_hand_overs > 10
    assert engine.runner.num_moves > 0


@pytest.mark.parametrize("name", ["gemma3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt_oss", "mistral"))])
def test_a_fixed_division_answers_alike(
    checkpoint_of: Callable[[str], Path], expected_of: Callable[[str], list[list[int]]], name: str
) -> None:
    assert answers_of(engine_of(checkpoint_of(name), 30, ModelRunner)) == expected_of(name)


def test_windows_alone_have_nobody_to_share_with(checkpoint_of: Callable[[str], Path]) -> None:
    assert not can_share(read_config(checkpoint_of("mistral")).kv_groups(16, "float32"))
    engine = engine_of(checkpoint_of("mistral"), 30, ModelRunner, shares_extents=True)
    assert [region.base_offset_bytes for region in engine.runner.pool.regions] == [0]
    engine.close()


def test_blocks_move_in_order(checkpoint_of: Callable[[str], Path]) -> None:
    """A step without tokens moves a block twice, and another one to where the first has been."""
    engine = engine_of(checkpoint_of("gemma3"), 30, ModelRunner, shares_extents=True)
    none, starts = np.empty(0, np.int32), np.zeros(1, np.int32)
    moves = np.array([(0, 2, 5), (0, 5, 9), (0, 7, 2)], np.int32)
    blocks = engine.runner.pool.region_tensor(0)
    with torch.inference_mode():
        for block in range(len(blocks)):
            blocks[block] = block
        hidden = engine.runner.forward(ReceivedStep(none, none, starts, none, [none] * 2, [starts] * 2, moves))
    assert hidden.shape == (0, 0)
    assert blocks.flatten(1)[:, 0].tolist() == [0, 1, 7, 3, 4, 2, 6, 7, 8, 2, *range(10, len(blocks))]
    assert blocks.flatten(1).eq(blocks.flatten(1)[:, :1]).all()
    engine.close()
