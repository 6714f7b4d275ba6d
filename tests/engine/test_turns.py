"""Processes that share cores, and are killed or stopped at any time: the others go on, on the cores that are left."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from swiftkv.engine.messages import ShareSpec
from swiftkv.engine.turns import SharedTurns
from swiftkv.shares import ShareTable
from tests.support.node_process import wait_for

pytest.importorskip("swiftkv._cpu")

ACCOUNTS_AT, ACCOUNT_BYTES, THREADS_AT = 128, 128, 24  # in the table: see `shares.h`
PROGRAM = Path(__file__).parent / "turn_taker.py"


class Takers:
    """Processes that share cores by one table."""

    def __init__(self, table: ShareTable, num_cores: int) -> None:
        self._table = table
        self._num_cores = num_cores
        self._counts_fd = os.memfd_create("counts")
        os.ftruncate(self._counts_fd, mmap.PAGESIZE)
        self._counts = memoryview(mmap.mmap(self._counts_fd, mmap.PAGESIZE)).cast("Q")
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, account: int) -> None:
        fds = (self._table.fd, self._counts_fd)
        command = [sys.executable, str(PROGRAM), *map(str, fds), str(account), str(self._num_cores)]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        self.processes[account] = subprocess.Popen(command, pass_fds=fds, env=environment)

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


@pytest.fixture
def takers() -> Iterator[Takers]:
    with closing(ShareTable.create()) as table, closing(Takers(table, num_cores=1)) as takers:
        for account in (0, 1):
            takers.start(account)
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
        takers.start(killed)
        takers.wait_until_it_computes(killed)


def test_all_stopped_at_once_go_on_together(takers: Takers) -> None:
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in takers.processes.values():
            process.send_signal(number)
    for account in (0, 1):
        takers.wait_until_it_computes(account)


def test_as_many_threads_compute_as_there_are_cores_for_them() -> None:
    with closing(ShareTable.create()) as table, closing(Takers(table, num_cores=2)) as takers:
        takers.start(0)
        wait_for("both cores", lambda: takers.busy_threads(0) == 2)
        takers.start(1)
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
        share = ShareSpec(table.fd, account=5, weight=1, max_share=1)
        turns = SharedTurns(share, threads=3, num_ranks=2)
        account = os.pread(table.fd, ACCOUNT_BYTES, ACCOUNTS_AT + 5 * ACCOUNT_BYTES)
        del turns  # this process has no turns any more
    assert int.from_bytes(account[THREADS_AT : THREADS_AT + 4], sys.byteorder) == 6
