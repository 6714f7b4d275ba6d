"""An engine of several ranks: it says what one of one rank says, and its processes end together."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import psutil
import pytest
import torch

from swiftkv.background import FOREGROUND
from swiftkv.engine.messages import EXIT_LOAD_FAILED, EngineConfig, PromptLookup
from swiftkv.engine.rank_group import RankGroup
from swiftkv.engine.ranks import LeadingRunner, ReceivedStep, begin_serving, of_rank, pack_step, pools_of, unpack_step
from swiftkv.engine.runner import ModelRunner
from swiftkv.errors import EngineError, FilesChangedError
from swiftkv.transport.base import HostMemory
from swiftkv.transport.rendezvous import PROOF_BYTES, gloo_group, open_store
from swiftkv.units import PoolBytes
from tests.engine.engine_process import TIMEOUT_S, EngineProcess
from tests.engine.test_parity import ONE_SEQUENCE_BLOCKS, greedy, mixed_prompts
from tests.support.checkpoints import SHAPE, make_checkpoint
from tests.support.node_process import wait_for

BLOCK_BYTES = 4 * 2 * 16 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * SHAPE["num_hidden_layers"]  # float32

NUM_TOKENS = 48


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_checkpoint(directory, "qwen3")
    return directory


def start(checkpoint: Path, size: int, *, stderr: int | None = None, **options: object) -> EngineProcess:
    return EngineProcess(
        checkpoint, stderr, tensor_parallel_size=size, max_model_len=320, **{"kv_bytes": 8 << 20, **options}
    )


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[EngineProcess]:
    with start(checkpoint, 2) as engine:
        yield engine


def followers(engine: EngineProcess) -> list[psutil.Process]:
    return psutil.Process(engine.process.pid).children()


def begin(engine: EngineProcess) -> None:
    """Bring the engine into the middle of its work."""
    request_id = engine.add([3], max_tokens=300)
    while not engine.answers[request_id].token_ids:
        engine.take_one()


def assert_gone(processes: list[psutil.Process]) -> None:
    assert not psutil.wait_procs(processes, TIMEOUT_S)[1]


def ranks_directory(engine: EngineProcess) -> Path:
    return Path(engine.config.ranks_directory)


def test_tokens_and_logprobs_are_those_of_one_rank_and_of_transformers(
    checkpoint: Path, tmp_path: Path, engine: EngineProcess
) -> None:
    """In chunks, with a cache, and in a pool so small that sequences are preempted, one with the tokens of the step
    before it unknown to all ranks: a rank's heads are half of them."""
    model = make_checkpoint(tmp_path, "qwen3")
    prompts = mixed_prompts()
    small = {"max_num_batched_tokens": 100, "kv_bytes": (ONE_SEQUENCE_BLOCKS + 4) * BLOCK_BYTES // 2}
    with start(checkpoint, 2, async_scheduling=True, **small) as cramped, start(checkpoint, 1) as one:
        answers = {
            name: [*e.generate(prompts[4:5], max_tokens=NUM_TOKENS), *e.generate(prompts, max_tokens=NUM_TOKENS)]
            for name, e in (("two", engine), ("cramped", cramped))
        }
        assert cramped.wait_for_rest().num_preemptions_total > 0
        expected = greedy(model, prompts, NUM_TOKENS)
        for of_engine in answers.values():
            assert [answer.token_ids for answer in of_engine] == [expected[4], *expected]
        asked = {"max_tokens": 4, "prompt_logprobs": 2, "logprobs": 2, "temperature": 1.0, "seed": 5}
        for divided, whole in zip(
            engine.generate(prompts[:4], **asked), one.generate(prompts[:4], **asked), strict=True
        ):
            assert divided.token_ids == whole.token_ids
            assert divided.prompt_logprobs is not None
            assert whole.prompt_logprobs is not None
            pairs = zip(divided.prompt_logprobs + divided.logprobs, whole.prompt_logprobs + whole.logprobs, strict=True)
            for entry, other in pairs:
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert entry.top_ids == other.top_ids


def test_a_rank_that_is_killed_ends_the_engine_with_a_line(checkpoint: Path) -> None:
    with start(checkpoint, 4, stderr=subprocess.PIPE) as engine:
        begin(engine)
        ranks = followers(engine)
        assert len(ranks) == 3
        (victim,) = (rank for rank in ranks if rank.cmdline()[-1] == "rank 2")
        victim.send_signal(signal.SIGKILL)
        assert engine.process.wait(TIMEOUT_S) == 1
        assert_gone(ranks)
        assert engine.process.stderr is not None
        assert engine.process.stderr.read().decode().splitlines() == [
            "swiftkv: model tiny: rank 2 was killed by SIGKILL; the engine ends"
        ]


def stop(process: psutil.Process) -> None:
    process.send_signal(signal.SIGSTOP)
    wait_for("the rank to stop", lambda: process.status() == psutil.STATUS_STOPPED)


def rank_of(engine: EngineProcess, rank: int) -> psutil.Process:
    (process,) = (process for process in followers(engine) if process.cmdline()[-1] == f"rank {rank}")
    return process


@pytest.mark.parametrize(("is_busy", "size"), [(True, 4), pytest.param(False, 2, marks=pytest.mark.slow)])
def test_a_rank_that_stays_stopped_ends_the_engine_with_a_line(is_busy: bool, size: int, checkpoint: Path) -> None:
    """The same holds for a rank that is stopped while there is nothing to do, longer than any deadline."""
    with start(checkpoint, size, stderr=subprocess.PIPE, watchdog_s=24) as engine:
        ranks = followers(engine)
        if is_busy:
            begin(engine)
            stop(rank_of(engine, size - 1))
        else:
            engine.generate([[3]], max_tokens=4)
            engine.wait_for_rest()
            assert not engine.says_something(within_s=13)
            engine.generate([[3]], max_tokens=4)
            engine.wait_for_rest()
            stop(rank_of(engine, size - 1))
            engine.add([3])
        assert engine.process.wait(TIMEOUT_S) == 1
        assert_gone(ranks)
        assert engine.process.stderr is not None
        assert engine.process.stderr.read().decode().splitlines() == [
            f"swiftkv: model tiny: rank {size - 1} did not answer in time; the engine ends"
        ]


@pytest.mark.slow
def test_a_rank_0_that_was_stopped_for_too_long_ends_the_engine_with_a_line(checkpoint: Path) -> None:
    """The others have given up by then, so none of them is silent."""
    with start(checkpoint, 2, stderr=subprocess.PIPE, watchdog_s=8) as engine:
        rank_0 = psutil.Process(engine.process.pid)
        follower_fd = os.pidfd_open(rank_of(engine, 1).pid)
        begin(engine)
        stop(rank_0)
        while not select.select([follower_fd], [], [], 6)[0]:  # rank 0 was stopped between two steps: once more
            rank_0.resume()
            begin(engine)
            stop(rank_0)
        os.close(follower_fd)
        rank_0.resume()
        assert engine.process.wait(TIMEOUT_S) == 1
        assert engine.process.stderr is not None
        (line,) = engine.process.stderr.read().decode().splitlines()
        assert line.startswith("swiftkv: model tiny: a rank of this engine has ended, or does not answer: ")
        assert line.endswith(
            " (no rank is silent now: rank 0, or all ranks at once, may have been stopped for too long); "
            "the engine ends"
        )


def test_a_rank_that_is_ended_by_a_real_time_signal_has_its_line_too(checkpoint: Path) -> None:
    """These have no names."""
    with start(checkpoint, 2, stderr=subprocess.PIPE) as engine:
        begin(engine)
        rank_of(engine, 1).send_signal(signal.SIGRTMIN + 6)
        assert engine.process.wait(TIMEOUT_S) == 1
        assert engine.process.stderr is not None
        assert engine.process.stderr.read().decode().splitlines() == [
            f"swiftkv: model tiny: rank 1 was killed by real-time signal {signal.SIGRTMIN + 6}; the engine ends"
        ]


def join(path: Path, rank: int) -> RankGroup:
    """Join a group of two ranks that meet at a file."""
    return RankGroup(path, rank, 2, torch.device("cpu"))


def test_a_rank_that_is_waited_for_in_vain_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "group"
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(join, [path, path], [0, 1])
        list(threads.map(lambda group: group.begin(TIMEOUT_S), (one, two)))
        together = threads.map(lambda group: group.all_gather(torch.tensor([group.rank])).tolist(), (one, two))
        assert list(together) == [[[0], [1]]] * 2
        list(threads.map(lambda group: group.begin(0.5), (one, two)))
        with pytest.raises(EngineError, match="does not answer"):
            one.all_gather(torch.zeros(1))
        with pytest.raises(EngineError):  # a rank that comes too late notices at once
            two.all_gather(torch.zeros(1))


def test_drafts_change_no_answer_of_two_ranks(checkpoint: Path, engine: EngineProcess) -> None:
    asked: dict[str, object] = {"max_tokens": NUM_TOKENS, "logit_bias": {11: 8.0}}  # so that answers repeat themselves
    with start(checkpoint, 2, prompt_lookup=PromptLookup(7, 1, 8)) as drafting:
        answers = [e.generate(mixed_prompts(), **asked) for e in (engine, drafting)]
        assert drafting.wait_for_rest().draft_tokens_total > 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("identity", "expected"),
    [pytest.param((5, 6, 7), [HostMemory(41, 5, 6, 7)], id="host"), pytest.param((), [], id="device")],
)
def test_rank_0_knows_the_pools_of_the_others_if_they_can_be_mapped(
    identity: tuple[int, ...], expected: list[HostMemory], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(join, [tmp_path / "group"] * 2, [0, 1]))
        told, _ = threads.map(lambda group: group.begin(TIMEOUT_S, identity), groups)
    assert pools_of([41], told[1:]) == expected


def test_ranks_that_mapped_other_files_do_not_serve(checkpoint: Path, tmp_path: Path) -> None:
    """They would compute with halves of two models."""
    directory = shutil.copytree(checkpoint, tmp_path / "model")
    weights, ranks = directory / "model.safetensors", tmp_path / "ranks"
    ranks.mkdir()
    config = EngineConfig("m", str(directory), "", "", PoolBytes(1 << 20), 16, dtype="float32", watchdog_s=60)
    config = msgspec.structs.replace(config, tensor_parallel_size=2, ranks_directory=str(ranks))

    def follow() -> None:
        group = join(ranks / "group", 1)
        files = psutil.Process()
        wait_for("rank 0 to map its file", lambda: str(weights) in [file.path for file in files.open_files()])
        shutil.copyfile(weights, directory / "arriving")
        os.replace(directory / "arriving", weights)
        with contextlib.closing(ModelRunner(of_rank(config, 1), group)) as runner:
            begin_serving(runner, group, TIMEOUT_S)

    with ThreadPoolExecutor(1) as threads:
        following = threads.submit(follow)
        with pytest.raises(FilesChangedError, match="files were replaced while the ranks read them"):
            LeadingRunner(config, cast(Any, SimpleNamespace(pids=[os.getpid()])), FOREGROUND)
        following.result()


def test_a_step_without_tokens_ends_when_all_ranks_have_made_it(checkpoint: Path, tmp_path: Path) -> None:
    """It may have moved blocks. What rank 0 does next, for storage or a lender, reads those of the other ranks."""
    config = EngineConfig("m", str(checkpoint), "", "", PoolBytes(1 << 20), 16, dtype="float32")
    nothing = np.empty(0, np.int32)
    moves = np.array([[0, 1, 2]], np.int32)
    step = ReceivedStep(nothing, nothing, np.zeros(1, np.int32), nothing, [[nothing]], [np.zeros(1, np.int32)], moves)
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(join, [tmp_path / "group"] * 2, [0, 1]))
        one, two = (ModelRunner(config, group) for group in groups)
        list(threads.map(lambda runner: runner.forward(step), (one, two)))
        list(threads.map(lambda group: group.begin(0.5), groups))
        with pytest.raises(EngineError, match="does not answer"):
            one.forward(step)


def test_who_does_not_know_the_secret_is_no_rank(tmp_path: Path) -> None:
    """Any process that speaks gloo may connect to a rank's port on the loopback interface."""
    with ThreadPoolExecutor(1) as threads:
        honest = threads.submit(join, tmp_path / "group", 0)
        impostor = gloo_group(open_store(tmp_path / "group", TIMEOUT_S), 1, 2, TIMEOUT_S)
        parts = torch.zeros(2, PROOF_BYTES, dtype=torch.uint8)
        impostor.alltoall_base(torch.empty_like(parts), parts, [], []).wait()
        with pytest.raises(EngineError, match="the process that connected as rank 1 is not of this engine"):
            honest.result()


def test_sigterm_ends_all_of_them_and_leaves_nothing(engine: EngineProcess) -> None:
    begin(engine)
    ranks = followers(engine)
    assert ranks_directory(engine).stat().st_mode & 0o777 == 0o700
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(TIMEOUT_S) == 0
    assert not any(rank.is_running() for rank in ranks)
    assert not ranks_directory(engine).exists()


def test_a_model_that_cannot_be_loaded_is_told_by_every_rank_that_lives_to(checkpoint: Path) -> None:
    engine = start(checkpoint, 2, stderr=subprocess.PIPE, kv_bytes=4096)
    assert engine.process.wait(TIMEOUT_S) == EXIT_LOAD_FAILED
    assert engine.process.stderr is not None
    lines = engine.process.stderr.read().decode().splitlines()
    assert lines
    assert all(line.startswith("swiftkv: model tiny") and "kv_cache.memory" in line for line in lines)
    engine.close()


def test_a_step_arrives_as_it_was_sent() -> None:
    generator = np.random.default_rng(0)
    arrays = [generator.integers(-5, 1000, n).astype(np.int32) for n in (7, 7, 4, 3, 0, 9, 4, 1)]
    moves = generator.integers(0, 1000, (2, 3), np.int32)
    tables, runs = [arrays[4:6], arrays[5:3:-1]], generator.integers(0, 1 << 40, (3, 5))
    step = ReceivedStep(*arrays[:4], tables, arrays[6:], moves, 2, {(1, "load", 1): runs, (0, "spill", 0): runs[:1]})
    received = unpack_step(pack_step(step))
    assert received.has_copies
    assert received.num_stream_buffers == 2
    np.testing.assert_array_equal(received.copies(1, "load", 1), runs)
    np.testing.assert_array_equal(received.copies(0, "spill", 0), runs[:1])
    assert received.copies(1, "load", 0).shape == (0, 5)
    np.testing.assert_array_equal(received.stream_tables[1][0], arrays[5])
    for ours, theirs in zip(arrays, flat(received), strict=True):
        assert theirs.flags.writeable  # as torch wants it
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(moves, received.local_moves)


def flat(step: ReceivedStep) -> list[np.ndarray]:
    single = [step.token_ids, step.positions, step.query_starts, step.context_lens]
    return [*single, *step.stream_tables[0], *step.table_starts]
