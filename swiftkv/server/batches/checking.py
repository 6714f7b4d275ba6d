"""The check of a batch's input file, part by part, so that the store serves other calls in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count, islice

from swiftkv.server.batches.lines import MAX_ERRORS, CheckedLine, check_line, duplicate, too_long
from swiftkv.server.batches.objects import LineError, OfflineBatch
from swiftkv.server.batches.storage import StorageLimits
from swiftkv.server.batches.store import Store

_LINES_IN_PART = 200


class InputCheck:
    """Reads the input file of a batch, and lets the batch begin or fail. Call it in the store's thread.

    After an error, discard it: a new check begins with the first line.
    """

    def __init__(self, number: int, batch: OfflineBatch, limits: StorageLimits, own_names: Mapping[str, str]) -> None:
        """`own_names` is as in `check_line`."""
        self._number = number
        self._batch = batch
        self._limits = limits
        self._own_names = own_names
        self._lines: Iterator[CheckedLine | LineError] | None = None
        self._num_lines = 0
        self._errors: list[LineError] = []

    def go_on(self, store: Store) -> bool:
        """Check the next part. Return whether it was the last."""
        if self._lines is None:
            store.drop_lines(self._number)
            self._lines = self._checked(store)
        try:
            part = list(islice(self._lines, _LINES_IN_PART))
        except FileNotFoundError:
            return self._fail(store, LineError("invalid_input_file", "the input file was deleted"))
        self._num_lines += len(part)
        taken = store.add_lines(self._number, [line for line in part if isinstance(line, CheckedLine)])
        self._errors += [line for line in part if isinstance(line, LineError)]
        self._errors += [duplicate(line) for line in taken]
        if self._num_lines > self._limits.max_requests:
            limit = f"{self._limits.max_requests} requests (node.batches.max_requests)"
            return self._fail(store, LineError("too_many_tasks", f"the input file has more than {limit}"))
        if len(part) == _LINES_IN_PART and len(self._errors) < MAX_ERRORS:
            return False
        if self._errors:
            return self._fail(store, *sorted(self._errors, key=lambda error: error.line or 0)[:MAX_ERRORS])
        if not self._num_lines:
            return self._fail(store, LineError("empty_file", "the input file has no lines"))
        store.begin(self._number)
        return True

    def _fail(self, store: Store, *errors: LineError) -> bool:
        store.fail(self._number, list(errors))
        return True

    def _checked(self, store: Store) -> Iterator[CheckedLine | LineError]:
        """Yield a result for each line that is not empty."""
        max_bytes, start = self._limits.max_line_bytes, 0
        with open(store.content_path(self._batch.input_file_id), "rb") as file:
            for number in count(1):
                text = file.readline(max_bytes + 1)
                if not text:
                    return
                if len(text) > max_bytes:
                    yield too_long(number, max_bytes)
                    while text and not text.endswith(b"\n"):
                        text = file.readline(max_bytes + 1)
                elif text.strip():
                    yield check_line(text, number, start, self._batch.endpoint, self._own_names)
                start = file.tell()
