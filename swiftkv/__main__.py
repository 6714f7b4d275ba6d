"""The `swiftkv` command, also as `python -m swiftkv` for environments whose scripts are not on the path."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

_EXIT_INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it: 128 and the signal's number."""


def main() -> None:
    """Run the command line. Ctrl-C ends it quietly, also while it is imported."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:  # a shell ignores it for commands in the background
        signal.signal(signal.SIGINT, _end_at_once)
    from swiftkv.cli import app
    from swiftkv.errors import SwiftkvError
    from swiftkv.output import failures_of_output_as_lines

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        with failures_of_output_as_lines():
            app(prog_name="swiftkv")
    except SwiftkvError as error:
        print(f"swiftkv: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)


def _end_at_once(*_: Any) -> None:
    """End without a `KeyboardInterrupt`, which extension modules that call Python would print and ignore."""
    os._exit(_EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
