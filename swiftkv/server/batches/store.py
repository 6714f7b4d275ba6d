"""Files and batches on disk: SQLite holds everything that changes, and a directory holds the bytes of files.

A `Store` belongs to the thread that opened it. Each of its methods is one transaction or none, so that a process which
is killed in the middle loses at most what it was about to write.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from swiftkv.server.batches.database import open_database, transaction
from swiftkv.server.batches.lines import CheckedLine, unfinished
from swiftkv.server.batches.objects import (
    ENDED,
    UPLOAD_PURPOSE,
    FileDeleted,
    LineError,
    LineErrors,
    OfflineBatch,
    OfflineBatchList,
    Status,
    StoredFile,
    StoredFileList,
    new_id,
    now_s,
)
from swiftkv.server.errors import ApiError

OUTPUT_PURPOSE = "batch_output"

_PENDING, _RUNNING, _COMPLETED, _FAILED = range(4)
"""Values of `lines.state`. The schema and the query for pending lines write `_PENDING` as 0."""


@dataclass(frozen=True, slots=True)
class TakenLine:
    """A line that runs. `batch` and `number` identify it."""

    batch: int
    number: int
    start: int
    length: int
    custom_id: str
    model: str
    input_file_id: str


class Store:
    """The files and batches in one directory, which only one process may use."""

    def __init__(self, directory: Path) -> None:
        """Open what the directory holds, or begin empty. Lines that ran when the last process ended are pending again.

        Raises:
            ConfigError: the database is damaged, or was written by a later version.
        """
        self._contents = directory / "files"
        self._contents.mkdir(mode=0o700, exist_ok=True)
        self._path = directory / "batches.sqlite3"
        self._database = open_database(self._path)
        with transaction(self._database):
            self._database.execute(f"UPDATE lines SET state = {_PENDING} WHERE state = {_RUNNING}")
        self._remove_strays()

    def _remove_strays(self) -> None:
        """Remove contents that no file names: what is left of unfinished uploads and results."""
        named = {file_id for (file_id,) in self._database.execute("SELECT id FROM files")}
        for content in self._contents.iterdir():
            if content.name not in named:
                content.unlink()

    def close(self) -> None:
        """Close the database, and remove it if it is empty."""
        (is_used,) = self._database.execute(
            "SELECT EXISTS (SELECT 1 FROM files) OR EXISTS (SELECT 1 FROM batches)"
        ).fetchone()
        self._database.close()
        if not is_used:
            self._path.unlink(missing_ok=True)
            with suppress(OSError):  # an upload may be under way
                self._contents.rmdir()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self._files("", ()))

    # Files

    def content_path(self, file_id: str) -> Path:
        """Return the path of a file's bytes; before `add_file`, the path to write them to."""
        return self._contents / file_id

    def add_file(self, file: StoredFile) -> StoredFile:
        """Add a file whose bytes are at `content_path` already."""
        self._database.execute(
            "INSERT INTO files (id, purpose, object) VALUES (?, ?, ?)", (file.id, file.purpose, _encoded(file))
        )
        return file

    def file(self, file_id: str) -> StoredFile:
        """Return a file. Raises `ApiError` 404 if there is none."""
        files = self._files("WHERE id = ?", (file_id,))
        if not files:
            raise ApiError(404, f"no file '{file_id}'", param="file_id", code="file_not_found")
        return files[0]

    def open_file(self, file_id: str) -> BinaryIO:
        """Open a file, which stays readable if it is deleted meanwhile. Raises `ApiError` 404 if there is none."""
        return open(self.content_path(self.file(file_id).id), "rb")

    def files(self, after: str | None, limit: int, order: str, purpose: str | None) -> StoredFileList:
        where, values = ("purpose = ?", (purpose,)) if purpose else ("1", ())
        rows, has_more = self._page("files", where, values, after, limit, order)
        files = [msgspec.json.decode(row, type=StoredFile) for row in rows]
        first, last = (files[0].id, files[-1].id) if files else (None, None)
        return StoredFileList(files, first, last, has_more)

    def delete_file(self, file_id: str) -> tuple[FileDeleted, int]:
        """Delete a file; return also the number of bytes that are now free.

        Raises:
            ApiError: 409 while a batch reads the file, 404 if there is none.
        """
        file = self.file(file_id)
        reader = next((batch for _, batch in self._batches(_not_ended()) if batch.input_file_id == file_id), None)
        if reader is not None:
            message = f"the file is the input of batch '{reader.id}', which is {reader.status}; cancel that first"
            raise ApiError(409, message, param="file_id", code="file_in_use")
        self._database.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.content_path(file_id).unlink(missing_ok=True)
        return FileDeleted(file_id), file.bytes

    def _files(self, where: str, values: Sequence[object]) -> list[StoredFile]:
        rows = self._database.execute(f"SELECT object FROM files {where}", values)
        return [msgspec.json.decode(row, type=StoredFile) for (row,) in rows]

    # Batches

    def add_batch(self, batch: OfflineBatch) -> OfflineBatch:
        """Add a batch. Raises `ApiError` if its input file does not exist or was not uploaded for a batch."""
        if self.file(batch.input_file_id).purpose != UPLOAD_PURPOSE:
            message = f"file '{batch.input_file_id}' was not uploaded with purpose '{UPLOAD_PURPOSE}'"
            raise ApiError(400, message, param="input_file_id")
        self._database.execute(
            "INSERT INTO batches (id, status, object) VALUES (?, ?, ?)", (batch.id, batch.status, _encoded(batch))
        )
        return batch

    def batch(self, batch_id: str) -> OfflineBatch:
        """Return a batch. Raises `ApiError` 404 if there is none."""
        return self._numbered_batch(batch_id)[1]

    def batches(self, after: str | None, limit: int) -> OfflineBatchList:
        rows, has_more = self._page("batches", "1", (), after, limit, "desc")
        batches = [msgspec.json.decode(row, type=OfflineBatch) for row in rows]
        first, last = (batches[0].id, batches[-1].id) if batches else (None, None)
        return OfflineBatchList(batches, first, last, has_more)

    def active_batches(self) -> list[tuple[int, OfflineBatch]]:
        """Return the batches that have not ended, with their numbers, the oldest first."""
        return self._batches(_not_ended())

    def cancel(self, batch_id: str) -> OfflineBatch:
        """Begin to cancel a batch, unless that was done. Raises `ApiError` 409 if it has ended or is finalizing."""
        number, batch = self._numbered_batch(batch_id)
        if batch.status in ("cancelling", "cancelled"):
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise ApiError(409, f"batch '{batch_id}' is {batch.status}; there is nothing to cancel", code="batch_ended")
        batch.enter("cancelling")
        return self._put(number, batch)

    def fail(self, number: int, errors: list[LineError]) -> None:
        """End a batch whose input file has mistakes."""
        batch = self._batch_at(number)
        batch.errors = LineErrors(errors)
        batch.enter("failed")
        with transaction(self._database):
            self.drop_lines(number)
            self._put(number, batch)

    def begin(self, number: int) -> None:
        """Let the lines of a batch run, once all were added. A batch that was cancelled meanwhile stays cancelled."""
        batch = self._batch_at(number)
        if batch.status == "validating":
            (batch.request_counts.total,) = self._database.execute(
                "SELECT COUNT(*) FROM lines WHERE batch = ?", (number,)
            ).fetchone()
            batch.enter("in_progress")
            self._put(number, batch)

    def finish(self, number: int, status: Status) -> list[StoredFile]:
        """End a batch: its results become files, and lines without a result count as failed. Return the files."""
        batch = self._batch_at(number)
        if batch.in_progress_at is None:  # not all of its lines were added
            self.drop_lines(number)
        if status == "completed":
            batch.enter("finalizing")
            self._put(number, batch)
        counts = batch.request_counts
        counts.failed = counts.total - counts.completed
        with ExitStack() as undo:
            output = self._write_results(undo, number, status, f"state = {_COMPLETED}", f"{batch.id}_output.jsonl")
            errors = self._write_results(undo, number, status, f"state <> {_COMPLETED}", f"{batch.id}_error.jsonl")
            files = [file for file in (output, errors) if file is not None]
            batch.output_file_id = None if output is None else output.id
            batch.error_file_id = None if errors is None else errors.id
            batch.enter(status)
            with transaction(self._database):
                for file in files:
                    self.add_file(file)
                self.drop_lines(number)
                self._put(number, batch)
            undo.pop_all()
        with suppress(sqlite3.Error):  # the vacuum only gives back space
            self._database.executescript("PRAGMA incremental_vacuum")
        return files

    def _write_results(
        self, undo: ExitStack, number: int, status: Status, where: str, filename: str
    ) -> StoredFile | None:
        """Write the results of some lines to a file, which `undo` removes; return `None` if there are no such lines."""
        file_id = new_id("file-")
        path, num_bytes = self.content_path(file_id), 0
        rows = self._database.execute(
            f"SELECT custom_id, result FROM lines WHERE batch = ? AND {where} ORDER BY number", (number,)
        )
        undo.callback(path.unlink, missing_ok=True)
        with open(path, "xb", opener=_private) as file:
            for custom_id, result in rows:
                num_bytes += file.write((result or unfinished(custom_id, status)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if not num_bytes:
            path.unlink()
            return None
        return StoredFile(file_id, num_bytes, now_s(), filename, OUTPUT_PURPOSE)

    def _numbered_batch(self, batch_id: str) -> tuple[int, OfflineBatch]:
        found = self._batches("WHERE id = ?", batch_id)
        if not found:
            raise ApiError(404, f"no batch '{batch_id}'", param="batch_id", code="batch_not_found")
        return found[0]

    def _batch_at(self, number: int) -> OfflineBatch:
        return self._batches("WHERE number = ?", number)[0][1]

    def _batches(self, where: str, *values: object) -> list[tuple[int, OfflineBatch]]:
        rows = self._database.execute(f"SELECT number, object FROM batches {where} ORDER BY number", values)
        return [(number, msgspec.json.decode(row, type=OfflineBatch)) for number, row in rows]

    def _put(self, number: int, batch: OfflineBatch) -> OfflineBatch:
        self._database.execute(
            "UPDATE batches SET status = ?, object = ? WHERE number = ?", (batch.status, _encoded(batch), number)
        )
        return batch

    # Lines

    def drop_lines(self, number: int) -> None:
        """Forget the lines of a batch."""
        self._database.execute("DELETE FROM lines WHERE batch = ?", (number,))

    def add_lines(self, number: int, lines: Sequence[CheckedLine]) -> list[CheckedLine]:
        """Add lines to a batch that is being validated; return those whose custom_id is taken."""
        with transaction(self._database):
            return [line for line in lines if not self._add_line(number, line)]

    def _add_line(self, number: int, line: CheckedLine) -> bool:
        added = self._database.execute(
            "INSERT INTO lines (batch, number, start, length, custom_id, model) VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT DO NOTHING",
            (number, line.number, line.start, line.length, line.custom_id, line.model),
        )
        return added.rowcount == 1

    def take(self, models: Sequence[str], is_among: bool, limit: int) -> list[TakenLine]:
        """Take the next lines for one of `models`, or with `is_among` false for a model outside them.

        They count as running: `keep` their results, or `put_back` those that are to run again.
        """
        among, names = "IN" if is_among else "NOT IN", ", ".join("?" * len(models))
        with transaction(self._database):
            rows = self._database.execute(
                f"""
                UPDATE lines SET state = {_RUNNING} WHERE rowid IN (
                    SELECT rowid FROM lines WHERE state = 0 AND model {among} ({names})
                    AND batch IN (SELECT number FROM batches WHERE status = 'in_progress')
                    ORDER BY batch, number LIMIT ?
                ) RETURNING batch, number, start, length, custom_id, model
                """,
                (*models, limit),
            ).fetchall()
            inputs = {number: self._batch_at(number).input_file_id for number in {row[0] for row in rows}}
        return [
            TakenLine(batch, number, start, length, custom_id, model, inputs[batch])
            for batch, number, start, length, custom_id, model in sorted(rows)
        ]

    def text(self, line: TakenLine) -> bytes:
        """Return the bytes of a line from its input file; none if somebody has removed the file."""
        try:
            with open(self.content_path(line.input_file_id), "rb") as file:
                file.seek(line.start)
                return file.read(line.length)
        except FileNotFoundError:
            return b""

    def keep(self, line: TakenLine, result: bytes, *, has_failed: bool) -> None:
        """Keep the result of a line, unless it has one or its batch has ended."""
        state = _FAILED if has_failed else _COMPLETED
        with transaction(self._database):
            kept = self._database.execute(
                f"UPDATE lines SET state = ?, result = ? WHERE batch = ? AND number = ? AND state = {_RUNNING}",
                (state, result, line.batch, line.number),
            )
            if kept.rowcount:
                batch = self._batch_at(line.batch)
                batch.request_counts.completed += not has_failed
                batch.request_counts.failed += has_failed
                self._put(line.batch, batch)

    def put_back(self, line: TakenLine) -> None:
        """Let a line run again."""
        self._database.execute(
            f"UPDATE lines SET state = {_PENDING} WHERE batch = ? AND number = ? AND state = {_RUNNING}",
            (line.batch, line.number),
        )

    # SQL

    def _page(
        self, table: str, where: str, values: Sequence[object], after: str | None, limit: int, order: str
    ) -> tuple[list[bytes], bool]:
        """Return up to `limit` objects after `after`, and whether there are more."""
        if after is not None:
            found = self._database.execute(f"SELECT number FROM {table} WHERE id = ?", (after,)).fetchone()
            if found is None:
                raise ApiError(400, f"field 'after': nothing in the list has the id '{after}'", param="after")
            where, values = f"{where} AND number {'<' if order == 'desc' else '>'} ?", (*values, found[0])
        rows = self._database.execute(
            f"SELECT object FROM {table} WHERE {where} ORDER BY number {order} LIMIT ?", (*values, limit + 1)
        ).fetchall()
        return [row for (row,) in rows[:limit]], len(rows) > limit


def _encoded(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value)


def _not_ended() -> str:
    return f"WHERE status NOT IN ({', '.join(map(repr, ENDED))})"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
