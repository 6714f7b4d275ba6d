"""Compiles grammars in a thread of its own, so that no step waits, and keeps the most recently used."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator

from llguidance import LLMatcher, LLTokenizer

from swiftkv.grammars import new_matcher

_KEPT = 32
_STACK_BYTES = 16 << 20


class GrammarCompiler:
    """Compiles grammars. All calls come from the thread of the step loop."""

    def __init__(self, tokenizer: LLTokenizer, wake: Callable[[], None]) -> None:
        """`wake` is called, from another thread, when `take_compiled` has something."""
        self._tokenizer = tokenizer
        self._wake = wake
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()  # unused ones, to copy; the last used is last
        self._compiling: set[str] = set()
        self._wanted: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._compiled: queue.SimpleQueue[tuple[str, LLMatcher | BaseException]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=self._run, name="grammars", daemon=True).start()
        finally:
            threading.stack_size(before)

    def copy_of(self, grammar: str) -> LLMatcher | None:
        """Return a matcher at the beginning of `grammar`, or `None` if the grammar must be compiled first."""
        kept = self._kept.get(grammar)
        if kept is not None:
            self._kept.move_to_end(grammar)
            return kept.deep_copy()
        if grammar not in self._compiling:
            self._compiling.add(grammar)
            self._wanted.put(grammar)
        return None

    def take_compiled(self) -> Iterator[tuple[str, ValueError | None]]:
        """Yield the grammars that were compiled since the last time, or why one could not be.

        Each is kept at least until the next one is yielded; later it may have to make room. Raises the error that ended
        the compiler, because the requests of its grammar would wait for ever.
        """
        while not self._compiled.empty():
            grammar, outcome = self._compiled.get()
            self._compiling.remove(grammar)
            if isinstance(outcome, ValueError):
                yield grammar, outcome
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            self._kept[grammar] = outcome
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            yield grammar, None

    def close(self) -> None:
        """Compile no more. A grammar in progress is left to the end of the process."""
        with self._lock:
            self._is_closed = True
        self._wanted.put(None)

    def _run(self) -> None:
        while (grammar := self._wanted.get()) is not None:
            try:
                matcher = new_matcher(self._tokenizer, grammar)
                matcher.compute_bitmask()  # copies of the matcher begin with this mask, and need not compute it again
                outcome: LLMatcher | BaseException = matcher
            except BaseException as error:  # noqa: BLE001 (the thread of the step loop raises it)
                outcome = error
            self._compiled.put((grammar, outcome))
            with self._lock:
                if not self._is_closed:
                    self._wake()
