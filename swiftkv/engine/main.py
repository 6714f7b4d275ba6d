"""An engine process: `python -m swiftkv.engine.main`, with an `EngineConfig` as the first line of standard input.

The process ends at once when its standard input ends, because the parent is gone then. If the process is stopped or
stuck, the kernel ends it instead. Its exit codes:

- SIGTERM and `Shutdown`: 0;
- a model that cannot be loaded: EXIT_LOAD_FAILED, and one line on standard error;
- a device without room: EXIT_NO_ROOM, and one line;
- a defect: 1, and a traceback.

The ranks of a tensor-parallel engine are processes like this one that rank 0 starts.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from swiftkv.background import Background, patience_s
from swiftkv.output import detach_output
from swiftkv.processes import die_with_parent

_OUTPUT_PATIENCE_S = 1.0  # the time for the last output to be read before `os._exit`


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    if not die_with_parent():
        return 0
    background = Background(patience_s())
    detach_output(_OUTPUT_PATIENCE_S)
    config_line = sys.stdin.buffer.readline()
    threading.Thread(target=_exit_with_parent, name="parent watch", daemon=True).start()
    _quieten_threads()
    try:
        run = background.run(_import_run)
        return run(config_line, background)
    except SystemExit:  # by SIGTERM
        return 0


def _import_run() -> Callable[[bytes, Background], int]:
    """Import the engine, which takes seconds, most of them torch."""
    from swiftkv.engine.serving import run

    return run


def _quieten_threads() -> None:
    """Stop the threads of torch's libraries from spinning while they wait: other engines need the cores.

    numpy gets a single thread. It has no work here, and threads that it starts on import would keep the low priority of
    the importing thread.
    """
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["GOMP_SPINCOUNT"] = "0"
    os.environ["OPENBLAS_NUM_THREADS"] = "1"


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):  # not through the buffered reader, whose lock Python takes when it exits
        pass
    os._exit(0)


def _exit(code: int) -> NoReturn:
    """End this process, which has closed everything that it opened.

    A normal exit aborts now and then, when a thread of a library returns from C++ after the interpreter has ended.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main())
