"""Processes that share cores or a GPU, and are killed or stopped at any time: the others go on with what is left."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from swiftkv.engine.messages import ComputeStats, ShareSpec
from swiftkv.engine.runner import ModelRunner
from swiftkv.engine.turns import SharedTurns
from swiftkv.shares import ShareTable
from tests.engine.engine_thread import EngineThread
from tests.engine.gpu_turn_taker import OVERLAPS, STEP_NS
from tests.support.checkpoints import make_checkpoint
from tests.support.node_process import wait_for

pytest.importorskip("swiftkv._cpu")
from swiftkv._cpu import DeviceTurns

ACCOUNTS_AT, ACCOUNT_BYTES, THREADS_AT = 128, 128, 24  # in the table: see `shares.h`
PROGRAM = Path(__file__).parent / "turn_taker.py"
GPU_PROGRAM = Path(__file__).parent / "gpu_turn_taker.py"
PROMPTS = [[7 * i % 300 + 3 for i in range(begin, begin + length)] for begin, length in ((1, 90), (9, 30), (5, 200))]


class Takers:
    """Processes that run a program with accounts in one table."""

    def __init__(self, table: ShareTable, program: Path) -> None:
        self._table = table
        self._program = program
        self._counts_fd = os.memfd_create("counts")
        os.ftruncate(self._counts_fd, mmap.PAGESIZE)
        self._counts = memoryview(mmap.mmap(self._counts_fd, mmap.PAGESIZE)).cast("Q")
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, account: int, option: int) -> None:
        """`option` is the number of cores, or the weight on a GPU."""
        fds = (self._table.fd, self._counts_fd)
        command = [sys.executable, str(self._program), *map(str, fds), str(account), str(option)]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        self.processes[account] = subprocess.Popen(command, pass_fds=fds, env=environment)

    def counts(self) -> list[int]:
        return self._counts.tolist()

    def wait_until_it_computes(self, account: int, num_parts: int = 30) -> None:
        wanted = self._counts[account] + num_parts
        wait_for(f"{account} to go on", lambda: self._counts[account] >= wanted)

    def busy_threads(self, account: int) -> int:
        """Return how many of its threads compute while it does a few parts."""
        self.wait_until_it_computes(account, 2)  # what it began with other threads is done
        before = self._processor_ns(account)
        self.wait_until_it_computes(account)
        used = {thread: ns - before.get(thread, 0) for thread, ns in self._processor_ns(account).items()}
        return sum(ns > max(used.values()) / 10 for ns in used.values())

    def _processor_ns(self, account: int) -> dict[str, int]:
        tasks = Path(f"/proc/{self.processes[account].pid}/task")
        return {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()}

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        os.close(self._counts_fd)


@pytest.fixture(params=[PROGRAM, GPU_PROGRAM], ids=["cores", "gpu"])
def takers(request: pytest.FixtureRequest) -> Iterator[Takers]:
    """Two processes with equal parts of one core, or of a GPU."""
    with closing(ShareTable.create()) as table, closing(Takers(table, request.param)) as takers:
        for account in (0, 1):
            takers.start(account, 1)
        for account in (0, 1):
            takers.wait_until_it_computes(account)
        yield takers


def test_a_process_that_is_stopped_within_its_turn_or_outside_holds_nobody_up(takers: Takers) -> None:
    for number in range(10):
        stopped = number % 2
        takers.processes[stopped].send_signal(signal.SIGSTOP)
        takers.wait_until_it_computes(1 - stopped)
        takers.processes[stopped].send_signal(signal.SIGCONT)
        takers.wait_until_it_computes(stopped, 7)


def test_a_process_that_is_killed_within_its_turn_or_outside_holds_nobody_up(takers: Takers) -> None:
    for number in range(4):
        killed = number % 2
        takers.processes[killed].kill()
        takers.processes[killed].wait()
        takers.wait_until_it_computes(1 - killed)
        takers.start(killed, 1)
        takers.wait_until_it_computes(killed)


def test_all_stopped_at_once_go_on_together(takers: Takers) -> None:
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in takers.processes.values():
            process.send_signal(number)
    for account in (0, 1):
        takers.wait_until_it_computes(account)


def test_as_many_threads_compute_as_there_are_cores_for_them() -> None:
    with closing(ShareTable.create()) as table, closing(Takers(table, PROGRAM)) as takers:
        takers.start(0, 2)
        wait_for("both cores", lambda: takers.busy_threads(0) == 2)
        takers.start(1, 2)
        wait_for("a core each", lambda: (takers.busy_threads(0), takers.busy_threads(1)) == (1, 1))
        takers.processes[1].kill()
        wait_for("both cores again", lambda: takers.busy_threads(0) == 2)


def test_models_get_accounts_that_nobody_has() -> None:
    with closing(ShareTable.create()) as table:
        taken = []
        while (account := table.take_account()) is not None:
            taken.append(account)
        assert taken == list(range(63))
        table.give_back(5)
        assert (table.take_account(), table.take_account()) == (5, None)


def test_an_engine_of_several_ranks_asks_for_the_cores_of_all_of_them() -> None:
    with closing(ShareTable.create()) as table:
        share = ShareSpec("cores", table.fd, account=5, weight=1, max_share=1)
        turns = SharedTurns(share, threads=3, num_ranks=2)
        account = os.pread(table.fd, ACCOUNT_BYTES, ACCOUNTS_AT + 5 * ACCOUNT_BYTES)
        del turns  # this process has no turns any more
    assert int.from_bytes(account[THREADS_AT : THREADS_AT + 4], sys.byteorder) == 6


def test_steps_on_a_gpu_do_not_overlap_and_are_divided_by_weight() -> None:
    with closing(ShareTable.create()) as table, closing(Takers(table, GPU_PROGRAM)) as takers:
        for account, weight in enumerate((3, 1)):
            takers.start(account, weight)
        for account in (0, 1):
            takers.wait_until_it_computes(account)
        before = takers.counts()
        takers.wait_until_it_computes(1, 50)
        after = takers.counts()
        assert 2.5 < (after[0] - before[0]) / (after[1] - before[1]) < 3.5
        assert after[OVERLAPS] == 0


@pytest.mark.parametrize("is_ahead", [False, True])
def test_an_engine_launches_its_steps_in_its_turns(tmp_path: Path, is_ahead: bool) -> None:
    make_checkpoint(tmp_path / "model", "llama")
    with closing(ShareTable.create()) as table:
        share = ShareSpec("gpu", table.fd, account=0, weight=1, max_share=1)
        engine = EngineThread(tmp_path / "model", ModelRunner, share=share, async_scheduling=is_ahead)
        other = DeviceTurns(table.fd, 1, 1.0, 1.0)
        with engine.running():
            [whole, *_] = engine.generate(PROMPTS, max_tokens=20)
            sampling = {"max_tokens": 20, "stop_token_ids": [whole.token_ids[7]]}  # no plan foresees this end
            alone = engine.generate(PROMPTS, **sampling)
            assert compute_of(engine).waited_s_total == 0
            assert compute_of(engine).core_s_total > 0
            other.wait()  # it does not end its turn, so the engine is let in after a while
            assert [a.token_ids for a in engine.generate(PROMPTS, **sampling)] == [a.token_ids for a in alone]
            assert compute_of(engine).waited_s_total > 0
            is_over = threading.Event()
            with ThreadPoolExecutor(1) as thread:
                taking = thread.submit(take_turns, other, is_over)
                beside = engine.generate(PROMPTS, cache_salt="computed anew", **sampling)
                is_over.set()
                taking.result()
            assert [answer.token_ids for answer in beside] == [answer.token_ids for answer in alone]


def take_turns(turns: DeviceTurns, is_over: threading.Event) -> None:
    while not is_over.is_set():
        turns.wait()
        turns.charge(STEP_NS)
    turns.rest()


def compute_of(engine: EngineThread[ModelRunner]) -> ComputeStats:
    """Return what the engine, at rest, says of its time."""
    compute = engine.wait_for_rest().compute
    assert compute is not None
    return compute
