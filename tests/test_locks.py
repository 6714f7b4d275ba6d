"""Files and directories that are locked while their process lives."""

from __future__ import annotations

import os
from pathlib import Path

from swiftkv.locks import hold_lock, is_still_at, remove_if_unlocked


def test_what_took_the_place_of_a_file_is_another(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("first")
    link.symlink_to(path)
    first = os.open(path, os.O_RDONLY)
    assert is_still_at(path, first)
    assert is_still_at(link, first)
    path.unlink()
    assert not is_still_at(path, first)
    path.write_text("second")
    assert not is_still_at(path, first)
    os.close(first)


def test_what_is_locked_stays(tmp_path: Path) -> None:
    file, directory = tmp_path / "file", tmp_path / "directory"
    file.touch()
    (directory / "full").mkdir(parents=True)
    locks = [hold_lock(file), hold_lock(directory)]
    for path in (file, directory):
        remove_if_unlocked(path)
        assert path.exists()
    for lock in locks:
        os.close(lock)
    for path in (file, directory):
        remove_if_unlocked(path)
        assert not path.exists()
