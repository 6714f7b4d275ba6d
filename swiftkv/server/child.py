"""A separate process for work that a client can make hang or exhaust memory or stack: there it harms nothing else."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swiftkv.processes import die_with_parent, how_it_ended, kill_child, module_command
from swiftkv.server.errors import ApiError
from swiftkv.server.fair_queue import FairQueue
from swiftkv.server.tenants import Sender

_HEADER_BYTES = 4  # each message to the process and from it begins with its length
_DEADLINE_S = 20.0  # the process may have to start first, on a machine that is busy
_MAX_WAITING = 64
_MAX_WAITING_BYTES = 64 << 20
_BUSY_RETRY_S = 1.0
_INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_NICENESS = 5


class ChildEndedError(Exception):
    """The process ended during the work; the message says how."""


class Child:
    """Does one piece of work at a time; senders take turns. Use it from one event loop.

    The process starts with the first piece, and again after one that ended it.
    """

    def __init__(self, module: str, purpose: str) -> None:
        """`module` calls `serve`; `purpose` completes "too many requests wait for …"."""
        self._module = module
        self._queue = FairQueue(purpose, num_permits=1, max_waiting=_MAX_WAITING, max_bytes=_MAX_WAITING_BYTES)
        self._running: asyncio.Task[bytes] | None = None
        self._process: Process | None = None

    async def ask(self, message: bytes, sender: Sender) -> bytes:
        """Return the answer to `message`. When the caller is cancelled, work that has begun goes on; other is dropped.

        Raises:
            ApiError: 429 if too much of the sender's work waits, 503 if the machine is too busy.
            ChildEndedError: the work ended the process.
        """
        await self._queue.take(sender, len(message))
        self._running = asyncio.create_task(self._do(message))
        self._running.add_done_callback(self._ended)
        return await asyncio.shield(self._running)

    async def close(self) -> None:
        """End the process. What waits is refused."""
        self._queue.close()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._end_process()

    def _ended(self, task: asyncio.Task[bytes]) -> None:
        self._running = None
        self._queue.give_back()
        if not task.cancelled():
            task.exception()  # the caller may be gone

    async def _do(self, message: bytes) -> bytes:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return await self._exchange(message)
        except TimeoutError:  # the machine is busy: a process that hangs ends itself (`cpu_s`)
            await self._end_process()
            raise ApiError(
                503, "the machine is too busy at the moment; try again", code="busy", retry_after_s=_BUSY_RETRY_S
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError):  # uvloop's for a pipe that is closed
            process = self._process
            assert process is not None
            await self._end_process()
            assert process.returncode is not None
            raise ChildEndedError(how_it_ended(process.returncode)) from None

    async def _exchange(self, message: bytes) -> bytes:
        """Return the process's answer. Raises `IncompleteReadError` or `ConnectionError` if the process ends."""
        process = self._process
        if process is None or _has_ended(process):  # it may have been killed while it had nothing to do
            process = await self._start_process()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(len(message).to_bytes(_HEADER_BYTES, "little") + message)
        await process.stdin.drain()
        header = await process.stdout.readexactly(_HEADER_BYTES)
        return await process.stdout.readexactly(int.from_bytes(header, "little"))

    async def _start_process(self) -> Process:
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}  # without API keys
        self._process = await asyncio.create_subprocess_exec(
            *module_command(self._module), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment, cwd="/"
        )
        return self._process

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            kill_child(process)
            await process.wait()


def _has_ended(process: Process) -> bool:
    """Return whether a process has ended, if the event loop has not heard of it yet."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # a thread of the loop has just waited for it
        return True


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """The limits of the process: memory beyond what it begins with, stack, and CPU time for one piece of work."""

    memory_bytes: int
    stack_bytes: int
    cpu_s: int


def serve(begin: Callable[[], Callable[[bytes], bytes]], limits: ChildLimits) -> int:
    """Answer each message on standard input with the function that `begin` returns, until the input ends."""
    if not die_with_parent():
        return 0
    os.nice(_NICENESS)
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not pass for an answer
    answer_to = begin()
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, _mapped_bytes() + limits.memory_bytes),
        (resource.RLIMIT_STACK, limits.stack_bytes),
    ):
        _lower(kind, limit)
    while header := sys.stdin.buffer.read(_HEADER_BYTES):
        message = sys.stdin.buffer.read(int.from_bytes(header, "little"))
        _lower(resource.RLIMIT_CPU, int(sum(os.times()[:2])) + 1 + limits.cpu_s)
        answer = answer_to(message)
        _write_all(answers, len(answer).to_bytes(_HEADER_BYTES, "little") + answer)
    return 0


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _lower(kind: int, limit: int) -> None:
    """Set a soft limit, at most the hard one."""
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
