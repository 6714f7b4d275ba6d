"""Reads the small files of `/proc` and `/sys`, which a system may lack."""

from __future__ import annotations

from pathlib import Path


def read_system_file(file: Path) -> str:
    """Return the text of a file without the spaces around it, or "" if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
