"""The processes of a tensor-parallel engine: rank 0 schedules, samples and talks to the gateway, the others follow it.

Only rank 0 decides. Before it calls its own part of the model, it sends the same order to each follower, over a socket
for each. So all ranks make the same calls in the same order.

The ranks live and die together: a follower ends with its standard input, which rank 0 holds open, and rank 0 watches
every follower. Within a step no rank waits for another beyond a deadline; between steps the followers wait for orders
without one. A rank that misses the deadline is found by elimination: every live follower that waits for it in vain ends
with `EXIT_GAVE_UP`, so the rank that has not ended is the silent one.

The file has more than 400 lines, so that each order of rank 0 stands beside what the followers do with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zmq

from swiftkv.background import FOREGROUND, PATIENCE_VARIABLE, Background
from swiftkv.engine.messages import EXIT_GAVE_UP, EXIT_LOAD_FAILED, EXIT_NO_ROOM, EngineConfig
from swiftkv.engine.rank_group import RankGroup
from swiftkv.engine.runner import ModelRunner
from swiftkv.engine.step import EngineStep
from swiftkv.errors import ConfigError, EngineError, FilesChangedError, TransferError
from swiftkv.master.layer_stream import CopyKind, runs_of
from swiftkv.models.batch import Int32Array
from swiftkv.processes import how_it_ended, module_command
from swiftkv.transport.base import HostMemory, Int64Array, PeerHandle
from swiftkv.transport.fence import Fence
from swiftkv.transport.shm import map_peer_memory, map_pool

_STOP_TIMEOUT_S = 5.0
_DEADLINES_PER_WATCHDOG = 2  # rank 0 names the silent rank before it is itself taken for hung
_NO_RUNS = np.empty((0, 5), np.int64)
_NOBODY_IS_SILENT = " (no rank is silent now: rank 0, or all ranks at once, may have been stopped for too long)"
_GIVE_UPS_PER_WATCHDOG = 8  # sets the time in which live followers must notice what rank 0 noticed


class StepOrder(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """Compute this step. `ModelInput` describes the arrays. All are int32 except `runs`."""

    token_ids: bytearray
    positions: bytearray
    query_starts: bytearray
    context_lens: bytearray
    stream_tables: list[list[bytearray]]  # by stream buffer and KV group
    table_starts: list[bytearray]
    local_moves: bytearray
    num_stream_buffers: int
    runs: list[tuple[int, CopyKind, int, bytearray]]  # group, kind, buffer, int64 [R, 5] as `transport.base.Runs`


class AttachOrder(msgspec.Struct, tag="attach", array_like=True, frozen=True):
    """Attach a lender's pool."""

    link: int
    pool: PeerHandle


class DetachOrder(msgspec.Struct, tag="detach", array_like=True, frozen=True):
    """Detach a lender's pool, if it is attached."""

    link: int


class LogitsOrder(msgspec.Struct, tag="logits", array_like=True, frozen=True):
    """Compute the logits of these rows of the last step's hidden states."""

    rows: bytearray  # int32


class EndOrder(msgspec.Struct, tag="end", array_like=True, frozen=True):
    """Give up: the engine ends because a rank does not answer."""


Order = StepOrder | AttachOrder | DetachOrder | LogitsOrder | EndOrder


@dataclass(frozen=True, slots=True)
class ReceivedStep:
    """The `EngineStep` of a `StepOrder`."""

    token_ids: Int32Array
    positions: Int32Array
    query_starts: Int32Array
    context_lens: Int32Array
    stream_tables: Sequence[Sequence[Int32Array]]
    table_starts: Sequence[Int32Array]
    local_moves: Int32Array  # [M, 3]
    num_stream_buffers: int = 0
    runs: Mapping[tuple[int, CopyKind, int], Int64Array] = field(default_factory=dict)  # by group, kind and buffer

    @property
    def has_unknown_tokens(self) -> bool:
        return bool((self.token_ids < 0).any())

    @property
    def has_copies(self) -> bool:
        return bool(self.runs)

    def copies(self, group: int, kind: CopyKind, buffer: int) -> Int64Array:
        return self.runs.get((group, kind, buffer), _NO_RUNS)


def pack_step(step: EngineStep) -> StepOrder:
    return StepOrder(
        _pack(step.token_ids),
        _pack(step.positions),
        _pack(step.query_starts),
        _pack(step.context_lens),
        [[_pack(table) for table in tables] for tables in step.stream_tables],
        [_pack(starts) for starts in step.table_starts],
        _pack(step.local_moves),
        step.num_stream_buffers,
        [(group, kind, buffer, _pack(runs)) for group, kind, buffer, runs in runs_of(step, len(step.table_starts))],
    )


def unpack_step(order: StepOrder) -> ReceivedStep:
    """Return the step's arrays as views of the message."""
    return ReceivedStep(
        _unpack(order.token_ids),
        _unpack(order.positions),
        _unpack(order.query_starts),
        _unpack(order.context_lens),
        [[_unpack(table) for table in tables] for tables in order.stream_tables],
        [_unpack(starts) for starts in order.table_starts],
        _unpack(order.local_moves).reshape(-1, 3),
        order.num_stream_buffers,
        {(group, kind, buffer): _unpack_runs(runs) for group, kind, buffer, runs in order.runs},
    )


@contextlib.contextmanager
def open_runner(
    config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], background: Background = FOREGROUND
) -> Iterator[ModelRunner]:
    """Yield the model, loaded by all of its ranks: this process is rank 0. The others are gone afterwards.

    Raises what `ModelRunner` raises. A rank that dies or does not answer ends this process, with a line and code 1.
    """
    if config.tensor_parallel_size == 1:
        with contextlib.closing(ModelRunner(config, background=background)) as runner:
            yield runner
        return
    followers = _Followers(config, context, background.left_s)
    try:
        with contextlib.closing(LeadingRunner(config, followers, background)) as leading:
            yield leading
    except EngineError as error:
        followers.blame(error)
    finally:
        followers.close()


class LeadingRunner(ModelRunner):
    """Rank 0's part of the model. Each call has the other ranks compute their parts, too."""

    def __init__(self, config: EngineConfig, followers: _Followers, background: Background) -> None:
        group = _join_group(config)
        super().__init__(config, group, background)
        told = begin_serving(self, group, _deadline_s(config))
        if any(each.files != told[0].files for each in told):
            raise FilesChangedError(f"{config.path}: files were replaced while the ranks read them")
        self._followers = followers
        self._other_ranks = pools_of(followers.pids, [each.pool for each in told[1:]])
        self._lender_parts: dict[int, list[torch.Tensor]] = {}  # by link: what `lender_pools` adds for the other ranks
        self._deadline_s = _deadline_s(config)

    @property
    def other_ranks(self) -> Sequence[HostMemory]:
        return self._other_ranks

    def rank_pools(self) -> list[torch.Tensor]:
        """Return the pools of all ranks, as `ModelRunner.rank_pools` does.

        They may be read between two steps. A step ends here only after the other ranks have sent their parts of its
        last layer, and they write their KV before that.
        """
        if not self.other_ranks:
            raise ConfigError("tiers: KV of other ranks on GPUs is out of reach")
        try:
            others = [map_peer_memory(memory, self.pool.nbytes) for memory in self.other_ranks]
        except TransferError as error:
            raise ConfigError(f"tiers: KV of other ranks is out of reach: {error}") from error
        return [*super().rank_pools(), *others]

    def attach_lender(self, link: int, pool: PeerHandle) -> None:
        self._followers.tell(AttachOrder(link, pool))
        super().attach_lender(link, pool)

    def _attach(self, link: int, pool: PeerHandle) -> None:
        super()._attach(link, pool)
        self._lender_parts[link] = [map_pool(part) for part in self._parts_of(link, pool)[1:]]

    def detach_lender(self, link: int) -> None:
        self._followers.tell(DetachOrder(link))
        super().detach_lender(link)
        self._lender_parts.pop(link, None)

    def lender_pools(self, link: int) -> list[npt.NDArray[np.uint8]] | None:
        own = super().lender_pools(link)
        return None if own is None else own + [part.numpy() for part in self._lender_parts[link]]

    def forward(self, plan: EngineStep) -> torch.Tensor:
        self._followers.tell(pack_step(plan))
        return super().forward(plan)

    def fence(self) -> Fence:
        """Return a fence that raises `EngineError` if a rank is missing: NCCL itself never tells the host."""
        return Fence(self.device, self._deadline_s)

    def logits(self, hidden: torch.Tensor, rows: npt.NDArray[np.int32] | slice) -> torch.Tensor:
        indices = np.arange(rows.start, rows.stop, dtype=np.int32) if isinstance(rows, slice) else rows
        self._followers.tell(LogitsOrder(_pack(indices)))
        return super().logits(hidden, indices)


class Follower:
    """Rank `config.rank` > 0: its part of the model, which follows rank 0's orders."""

    def __init__(self, config: EngineConfig, background: Background) -> None:
        """Returns when all ranks have loaded their parts. Raises what `ModelRunner` raises.

        Ends the process if another rank has gone.
        """
        self._orders: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._orders.connect(_address(config, config.rank))
        with _giving_up():
            group = _join_group(config)
            self._runner = ModelRunner(config, group, background)
            begin_serving(self._runner, group, _deadline_s(config))

    def run(self) -> None:
        """Follow rank 0's orders. The process ends with `EXIT_GAVE_UP` if another rank is gone or does not answer."""
        decoder = msgspec.msgpack.Decoder(Order)
        hidden = torch.empty(0)
        with _giving_up():
            while True:
                match decoder.decode(self._orders.recv()):
                    case StepOrder() as order:
                        with contextlib.suppress(TransferError):  # rank 0 fails as well, and gives up the step
                            hidden = self._forward(unpack_step(order))
                    case AttachOrder(link=link, pool=pool):
                        with contextlib.suppress(TransferError):  # rank 0 fails as well, and detaches the lender
                            self._runner.attach_lender(link, pool)
                    case DetachOrder(link=link):
                        self._runner.detach_lender(link)
                    case LogitsOrder(rows=rows):
                        self._runner.logits(hidden, _unpack(rows))
                    case EndOrder():
                        raise EngineError("rank 0 gave up")

    def _forward(self, step: ReceivedStep) -> torch.Tensor:
        hidden = self._runner.forward(step)
        if self._runner.layer_stream is not None and step.has_copies:
            self._runner.layer_stream.step_ended()
        return hidden


class _Followers:
    """The other ranks as rank 0 sees them: starts and watches their processes, and sends them orders."""

    def __init__(self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], give_way_s: float) -> None:
        self._name = config.name
        self._give_up_s = config.watchdog_s / _GIVE_UPS_PER_WATCHDOG
        self._speaking = threading.Lock()  # held by the one thread that says why the engine ends
        self._directory = Path(config.ranks_directory)
        self._closing = False
        self._encoder = msgspec.msgpack.Encoder()
        shutil.rmtree(self._directory, ignore_errors=True)  # it may be left from an engine that was killed
        self._directory.mkdir(mode=0o700)
        ranks = range(1, config.tensor_parallel_size)
        self._sockets = [_bind(context, _address(config, rank), _deadline_s(config)) for rank in ranks]
        self._processes = [_start(of_rank(config, rank), give_way_s) for rank in ranks]
        self._watchers = [
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank} watch", daemon=True)
            for rank, process in zip(ranks, self._processes, strict=True)
        ]
        for watcher in self._watchers:
            watcher.start()

    @property
    def pids(self) -> list[int]:
        """The ids of their processes, by rank."""
        return [process.pid for process in self._processes]

    def tell(self, order: Order) -> None:
        """Send an order to every follower. Raises `EngineError` if one does not read its orders."""
        message = self._encoder.encode(order)
        try:
            for socket in self._sockets:
                socket.send(message)
        except zmq.Again as error:
            raise EngineError("a rank of this engine does not read its orders") from error

    def blame(self, error: EngineError) -> NoReturn:
        """End the engine, and say which rank did not answer: the one that does not end by itself."""
        order = self._encoder.encode(EndOrder())
        for socket in self._sockets:
            with contextlib.suppress(zmq.Again):  # it may be the silent one
                socket.send(order, zmq.NOBLOCK)
        deadline_s = time.monotonic() + self._give_up_s
        for watcher in self._watchers:
            watcher.join(max(0.0, deadline_s - time.monotonic()))
        silent = [f"rank {rank}" for rank, watcher in enumerate(self._watchers, start=1) if watcher.is_alive()]
        if silent:
            self._end(1, f"{' and '.join(silent)} did not answer in time")
        was_waiting = isinstance(error.__cause__, RuntimeError)  # for another rank, in a call of the group
        self._end(1, f"{error}{_NOBODY_IS_SILENT if was_waiting else ''}")

    def close(self) -> None:
        """End the followers; returns when they are gone."""
        self._closing = True
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process, watcher in zip(self._processes, self._watchers, strict=True):
            watcher.join(_STOP_TIMEOUT_S)
            process.kill()  # nothing if it has ended
            watcher.join()
        for socket in self._sockets:
            socket.close(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._closing:
            return
        if code == EXIT_GAVE_UP:  # it waited in vain for another rank, and rank 0 waits for that rank, too
            return
        has_said_why = code in (EXIT_LOAD_FAILED, EXIT_NO_ROOM)
        self._end(*((code, None) if has_said_why else (1, f"rank {rank} {how_it_ended(code)}")))

    def _end(self, code: int, why: str | None) -> NoReturn:
        """End this process and the other ranks, even stopped ones; `why` is None if the reason is printed already."""
        self._speaking.acquire()
        for process in self._processes:
            process.kill()
        if why is not None:
            with contextlib.suppress(OSError):  # standard error may be closed
                print(f"swiftkv: model {self._name}: {why}; the engine ends", file=sys.stderr, flush=True)
        os._exit(code)


class Told(NamedTuple):
    """The numbers that a rank sends the others once it has loaded its part."""

    files: int  # `ModelRunner.files_identity`
    pool: Sequence[int]  # `Pool.identity`


def begin_serving(runner: ModelRunner, group: RankGroup, deadline_s: float) -> list[Told]:
    """Wait until all ranks have loaded their parts, and return what each told. See `RankGroup.begin`."""
    told = group.begin(deadline_s, [runner.files_identity(), *runner.pool.identity()])
    return [Told(files, pool) for files, *pool in told]


def pools_of(pids: Sequence[int], identities: Sequence[Sequence[int]]) -> list[HostMemory]:
    """Return the pools of other ranks, given their processes and each `Pool.identity`.

    Return none for pools on GPUs, whose identities are empty: their memory has no descriptor.
    """
    return [HostMemory(pid, *identity) for pid, identity in zip(pids, identities, strict=True) if identity]


def _deadline_s(config: EngineConfig) -> float:
    """Return the most seconds that a rank waits for another within a step."""
    return config.watchdog_s / _DEADLINES_PER_WATCHDOG


def of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """Return the configuration of rank `rank`. The ranks of an engine use consecutive GPUs."""
    kind, _, first = config.device.partition(":")
    device = f"{kind}:{int(first) + rank}" if first else kind
    return msgspec.structs.replace(config, rank=rank, device=device)


@contextlib.contextmanager
def _giving_up() -> Iterator[None]:
    """End this process silently if another rank is missing: rank 0 can say which."""
    try:
        yield
    except EngineError:
        os._exit(EXIT_GAVE_UP)


def _start(config: EngineConfig, give_way_s: float) -> subprocess.Popen[bytes]:
    command = module_command("swiftkv.engine.main", config.name, f"rank {config.rank}")
    environment = {**os.environ, PATIENCE_VARIABLE: str(give_way_s)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it has died already: its watcher notices
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
    return process


def _bind(context: zmq.Context[zmq.Socket[bytes]], address: str, timeout_s: float) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
    socket.bind(address)
    return socket


def _address(config: EngineConfig, rank: int) -> str:
    return f"ipc://{config.ranks_directory}/{rank}"


def _join_group(config: EngineConfig) -> RankGroup:
    store_path = Path(config.ranks_directory) / "group"
    return RankGroup(store_path, config.rank, config.tensor_parallel_size, torch.device(config.device))


def _pack(array: Int32Array | Int64Array) -> bytearray:
    return bytearray(array.tobytes())


def _unpack(array: bytearray) -> Int32Array:
    return np.frombuffer(array, np.int32)


def _unpack_runs(array: bytearray) -> Int64Array:
    return np.frombuffer(array, np.int64).reshape(-1, 5)
