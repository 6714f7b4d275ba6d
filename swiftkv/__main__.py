"""The command line as `python -m swiftkv`, for environments whose scripts are not on the path."""

from __future__ import annotations

from swiftkv.cli import app

if __name__ == "__main__":
    app(prog_name="swiftkv")
