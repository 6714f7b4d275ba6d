"""The `swiftkv` command as a process that tests can interrupt."""

from __future__ import annotations

import sys

_HEED_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
_RUN = "from swiftkv.__main__ import main; main()"


def interruptible(*arguments: str, before: str = "") -> list[str]:
    """Return the command line of `swiftkv` with these arguments, for a process that ends at SIGINT.

    Tests that run in the background ignore SIGINT, and so would their children. `before` is Python that runs first.
    """
    return [sys.executable, "-c", "\n".join((_HEED_INTERRUPTS, before, _RUN)), *arguments]
