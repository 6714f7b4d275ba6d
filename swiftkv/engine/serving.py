"""Load a model and serve it, as rank 0 of an engine, or as another rank that follows it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

import msgspec
import torch
import zmq

from swiftkv.background import Background
from swiftkv.engine.engine import Engine
from swiftkv.engine.messages import (
    EXIT_LOAD_FAILED,
    EXIT_NO_ROOM,
    HIGH_WATER_MARK,
    MAX_MESSAGE_BYTES,
    EngineConfig,
    Ready,
)
from swiftkv.engine.ranks import Follower, open_runner
from swiftkv.engine.runner import ModelRunner
from swiftkv.errors import CheckpointError, ConfigError, FilesChangedError, LoadError, NoRoomError
from swiftkv.processes import be_killed_first
from swiftkv.progress import PROGRESS

_LINGER_MS = 500
_LOAD_ERRORS = (CheckpointError, ConfigError, OSError)


def run(config_line: bytes, background: Background) -> int:
    """Run the engine or the rank that the line configures; the model is loaded in the `background`.

    Returns the exit code.
    """
    config = msgspec.json.decode(config_line, type=EngineConfig)
    level = config.log_level.upper()
    logging.basicConfig(level=level, format=f"%(asctime)s %(levelname)s engine {config.name}: %(message)s")
    torch.set_num_threads(1)  # the kernels have threads of their own; what torch does here is too small to share
    return _serve(config, background) if config.rank == 0 else _assist(config, background)


def _serve(config: EngineConfig, background: Background) -> int:
    """Load the model, send `Ready`, and run until `Shutdown`. Returns the exit code."""
    be_killed_first()  # the other ranks, which this process starts, inherit it
    if config.progress_fd is not None:
        PROGRESS.share(config.progress_fd)
    context = zmq.Context()
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, linger=_LINGER_MS)
        try:
            runner = stack.enter_context(open_runner(config, context, background))
        except _LOAD_ERRORS as error:
            return _load_failed(config, error)
        requests = _connect(context, zmq.PULL, config.requests_address)
        outputs = _connect(context, zmq.PUSH, config.outputs_address)
        ready = Ready(
            config.name,
            os.getpid(),
            config.max_model_len,
            runner.vocab_size,
            runner.num_blocks,
            runner.pool.nbytes,
            config.block_size,
            list(runner.eos_token_ids),
            config.incarnation,
        )
        with torch.inference_mode():
            try:
                engine = Engine(config, runner, requests, outputs, context)
            except _LOAD_ERRORS as error:  # storage cannot be opened, or an address cannot be bound
                return _load_failed(config, error)
            _watch_compilations(runner)
            background.end()
            outputs.send(msgspec.msgpack.encode(ready))
            try:
                engine.run()
            except LoadError as error:
                return _load_failed(config, error.cause)
            except FilesChangedError as error:
                return _load_failed(config, error)
    return 0


def _assist(config: EngineConfig, background: Background) -> int:
    """Run a rank other than 0 of a tensor-parallel engine until the engine ends. Returns the exit code."""
    try:
        follower = Follower(config, background)
    except _LOAD_ERRORS as error:
        return _load_failed(config, error)
    background.end()
    with torch.inference_mode():
        follower.run()
    return 0


def _watch_compilations(runner: ModelRunner) -> None:
    if runner.kernels == "triton":
        from swiftkv.kernels.triton_compilations import warn_of_compilations

        warn_of_compilations()


def _load_failed(config: EngineConfig, error: Exception) -> int:
    rank = f", rank {config.rank}" if config.rank else ""
    print(f"swiftkv: model {config.name}{rank}: {error}", file=sys.stderr, flush=True)
    return exit_code(error)


def exit_code(error: Exception) -> int:
    """Return the exit code of an engine that could not be loaded; 1 if a restart, with the new files, may succeed."""
    if isinstance(error, FilesChangedError):
        return 1
    return EXIT_NO_ROOM if isinstance(error, NoRoomError) else EXIT_LOAD_FAILED


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.connect(address)
    return socket
