"""An engine process: `python -m swiftkv.engine.main`, with an `EngineConfig` as the first line of standard input.

The end of standard input says that the parent is gone, and ends the process at once; the kernel ends one that cannot
see it because it is stopped or stuck. SIGTERM and `Shutdown` end it with code 0, a model that cannot be loaded with
EXIT_LOAD_FAILED and one line on standard error, a device without room with EXIT_NO_ROOM and one line, a defect with a
traceback and code 1. The ranks of a tensor-parallel engine are processes like this one that rank 0 starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from swiftkv.engine.messages import (
    EXIT_LOAD_FAILED,
    EXIT_NO_ROOM,
    HIGH_WATER_MARK,
    MAX_MESSAGE_BYTES,
    EngineConfig,
    Ready,
)
from swiftkv.errors import CheckpointError, ConfigError, LoadError, NoRoomError
from swiftkv.output import detach_output
from swiftkv.processes import be_killed_first, die_with_parent
from swiftkv.progress import PROGRESS

if TYPE_CHECKING:
    from swiftkv.engine.runner import ModelRunner

_LINGER_MS = 500
_OUTPUT_PATIENCE_S = 1.0  # a last word before `os._exit` gets out where anybody reads
_LOAD_ERRORS = (CheckpointError, ConfigError, OSError)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    if not die_with_parent():
        return 0
    detach_output(_OUTPUT_PATIENCE_S)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    threading.Thread(target=_exit_with_parent, name="parent watch", daemon=True).start()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s engine {config.name}: %(message)s")
    _quieten_threads()
    return serve(config) if config.rank == 0 else assist(config)


def serve(config: EngineConfig) -> int:
    """Load the model, say Ready, and run until told to stop. Returns the exit code."""
    be_killed_first()  # the other ranks, which this process starts, inherit it
    if config.progress_fd is not None:
        PROGRESS.share(config.progress_fd)
    import torch  # after the environment is set

    from swiftkv.engine.engine import Engine
    from swiftkv.engine.ranks import open_runner

    torch.set_num_threads(1)  # the kernels have threads of their own; what torch does here is too small to share
    context = zmq.Context()
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, linger=_LINGER_MS)
        try:
            runner = stack.enter_context(open_runner(config, context))
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
            except _LOAD_ERRORS as error:  # storage failed, or an address
                return _load_failed(config, error)
            _watch_compilations(runner)
            outputs.send(msgspec.msgpack.encode(ready))
            try:
                engine.run()
            except LoadError as error:
                return _load_failed(config, error.cause)
    return 0


def assist(config: EngineConfig) -> int:
    """Be another rank than the first of a tensor-parallel engine, until that ends. Returns the exit code."""
    import torch

    from swiftkv.engine.ranks import Follower

    torch.set_num_threads(1)
    try:
        follower = Follower(config)
    except _LOAD_ERRORS as error:
        return _load_failed(config, error)
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
    """Return the exit code of an engine that could not be loaded."""
    return EXIT_NO_ROOM if isinstance(error, NoRoomError) else EXIT_LOAD_FAILED


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.connect(address)
    return socket


def _quieten_threads() -> None:
    """Let no thread of the libraries that torch brings spin while it waits: the cores belong to other engines too."""
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["GOMP_SPINCOUNT"] = "0"


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):  # not through the buffered reader, whose lock Python takes when it exits
        pass
    os._exit(0)


def _exit(code: int) -> NoReturn:
    """End this process when everything of its own is closed.

    The interpreter's end would abort it, now and then, under threads of libraries that come back from C++ too late.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main())
