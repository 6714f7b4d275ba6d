"""The `swiftkv` command, also as `python -m swiftkv` for environments whose scripts are not on the path."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it: 128 and the signal's number."""


def main() -> None:
    """Run the command line. Ctrl-C ends it quietly, also while it is imported."""
    try:
        from swiftkv.cli import app
        from swiftkv.output import failures_of_output_as_lines

        with failures_of_output_as_lines():
            app(prog_name="swiftkv")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
