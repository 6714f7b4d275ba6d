"""Prompt log-probabilities are those of a request alone, whatever becomes of the steps that compute them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
import zmq
from msgspec.structs import replace

from swiftkv._core import StepPlan
from swiftkv.engine.messages import EngineConfig
from swiftkv.engine.runner import ModelRunner
from swiftkv.lease.messages import Accept, Detached, LinkGeometry, Offer
from swiftkv.lease.process import Identity, start_ticks
from swiftkv.models.registry import read_config
from swiftkv.transport.fence import Fence
from tests.engine.engine_process import TIMEOUT_S, Answer, EngineProcess
from tests.engine.engine_thread import EngineThread
from tests.lease.lending_process import Admin, held
from tests.support.checkpoints import make_checkpoint
from tests.support.lender import Lender
from tests.support.lender_by_hand import LenderByHand, borrowing_over

BLOCK_SIZE = 16
NUM_BLOCKS = 8
NUM_EXTENTS = 64
CHUNK = 48
PROMPT = [3 + i * i % 311 for i in range(200)]  # longer than the pool; its last chunk is the fifth
ASKED = {"max_tokens": 6, "logprobs": 2, "prompt_logprobs": 2}
GARBAGE = 0x3E  # 0.186 in float32: nothing that a check for finite logits would notice

Fate = Literal["the lender dies", "copies fail"]
When = Literal["in a chunk", "in the last chunk"]


@dataclass(frozen=True)
class Checkpoint:
    directory: Path
    block_bytes: int
    alone: Answer  # with all the memory that it needs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "llama")
    (group,) = read_config(directory).kv_groups(BLOCK_SIZE, "float32")
    with EngineProcess(directory, max_num_batched_tokens=CHUNK) as engine:
        [alone] = engine.generate([PROMPT], **ASKED)
    return Checkpoint(directory, group.block_bytes, alone)


class UnluckyRunner(ModelRunner):
    """While one of its steps computes, the lender that the step reads from is lost. What it read by then is garbage."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.lender: Lender | None = None  # from now on it may be lost
        self.fate: Fate = "the lender dies"
        self.when: When = "in a chunk"
        self.lost: list[StepPlan] = []
        self._is_ending = False

    def forward(self, plan: StepPlan) -> torch.Tensor:
        if self.lender is None or not plan.num_stream_buffers or not len(plan.copies(0, "load")):
            return super().forward(plan)
        if (self.when == "in the last chunk") != (len(plan.logits_rows) == 1):
            return super().forward(plan)
        self.lost.append(plan)
        lender, self.lender = self.lender, None
        lender.pools[0].fill_(GARBAGE)
        if self.fate == "copies fail":
            assert self.transport is not None
            self.transport.detach(0)
        hidden = super().forward(plan)
        lender.kill()
        self._is_ending = True
        return hidden

    def fence(self) -> Fence:
        """Return a fence, which is slower to end the step than the system is to tell of a death."""
        is_ending, self._is_ending = self._is_ending, False
        return SlowFence(self._config) if is_ending else super().fence()


class SlowFence(Fence):
    """A fence that waits until nothing is borrowed any more."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.lending is not None
        self._address = config.lending.leases_address

    def wait(self) -> None:
        with closing(Admin(self._address)) as admin:
            admin.wait_for(lambda state: held(state) == [0])


@pytest.mark.parametrize(
    ("fate", "when", "is_ahead"),
    [
        ("the lender dies", "in a chunk", True),
        ("the lender dies", "in the last chunk", False),
        ("copies fail", "in a chunk", False),
        ("copies fail", "in the last chunk", True),
    ],
)
def test_a_step_that_does_not_count_leaves_nothing(
    fate: Fate, when: When, is_ahead: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    link = LinkGeometry(0, 0, 1, 1, checkpoint.block_bytes, NUM_EXTENTS, 0, 1)
    lending = replace(borrowing_over(link, tmp_path), stream_buffers=1, max_wait_s=TIMEOUT_S)
    address = lending.lenders[0].leases_address
    engine = EngineThread(
        checkpoint.directory,
        UnluckyRunner,
        kv_bytes=NUM_BLOCKS * checkpoint.block_bytes,
        block_size=BLOCK_SIZE,
        max_model_len=2 * NUM_BLOCKS * BLOCK_SIZE,
        max_num_batched_tokens=CHUNK,
        async_scheduling=is_ahead,
        lending=lending,
    )
    runner = engine.runner
    runner.fate, runner.when = fate, when
    num_bytes = -(-NUM_EXTENTS * checkpoint.block_bytes // 4096) * 4096
    with (
        engine.running(),
        zmq.Context() as context,
        closing(LenderByHand(address, context)) as lender,
    ):
        paths = [tmp_path / "first", tmp_path / "second"]
        with Lender(paths if fate == "copies fail" else paths[:1], num_bytes, serve=False) as process:
            lend(lender, process, paths[0])
            runner.lender = process
            request = engine.add(PROMPT, **ASKED)
            if fate == "copies fail":
                lender.receive(Detached)
                lend(lender, process, paths[1], epoch=2)
                [answer] = engine.wait([request])
            else:
                process.process.wait(TIMEOUT_S)
                with Lender(paths[1:], num_bytes, serve=False) as following:
                    lend(lender, following, paths[1])
                    [answer] = engine.wait([request])
    assert len(runner.lost) == 1
    assert len(runner.lost[0].token_ids) > 1
    assert answer.error is None
    assert answer.token_ids == checkpoint.alone.token_ids
    assert answer.logprobs == checkpoint.alone.logprobs
    assert answer.prompt_logprobs == checkpoint.alone.prompt_logprobs


def lend(lender: LenderByHand, process: Lender, path: Path, epoch: int = 1) -> None:
    pid = process.process.pid
    lender.be_attached(Identity("a", pid, pid, start_ticks(pid)), path)
    lender.say(Offer, [*range(NUM_EXTENTS)], [epoch] * NUM_EXTENTS)
    lender.receive(Accept)


def test_a_prompt_that_is_preempted_half_way(checkpoint: Checkpoint) -> None:
    """Eight requests that decode leave it few tokens of each step, and take its blocks before it is done."""
    decoding = 8
    with EngineProcess(
        checkpoint.directory,
        kv_bytes=30 * checkpoint.block_bytes,
        block_size=BLOCK_SIZE,
        max_model_len=2 * NUM_BLOCKS * BLOCK_SIZE,
        max_num_batched_tokens=decoding + 4,
        async_scheduling=True,
    ) as engine:
        with engine.at_once():
            others = [engine.add([3 + i], max_tokens=2 * BLOCK_SIZE + 8) for i in range(decoding)]
            request = engine.add(PROMPT, **ASKED)
        answer = engine.wait([*others, request])[-1]
        stats = engine.wait_for_rest()
    assert stats.num_preemptions_total > 0
    assert stats.prompt_tokens_total > len(PROMPT) + decoding  # some of it was computed twice
    assert answer == checkpoint.alone
