"""Compiles grammars in a thread of its own, so that no step waits, and keeps the most recently used."""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from swiftkv.grammars import new_matcher

_KEPT = 32
_SHORT_S = 0.05
"""The most seconds for which a step is held up to compile a grammar again."""
_STACK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Compiled:
    """A matcher at the beginning of its grammar. Requests get copies of it, which share the states of its automaton."""

    grammar: str
    matcher: LLMatcher
    compiling_s: float  # of processor time


class GrammarCompiler:
    """Compiles grammars. Call `alone` from any thread, and everything else from the thread of the step loop."""

    def __init__(self, tokenizer: LLTokenizer, wake: Callable[[], None]) -> None:
        """`wake` is called, from another thread, when `take_compiled` has something."""
        self._tokenizer = tokenizer
        self._wake = wake
        self._kept: OrderedDict[str, Compiled] = OrderedDict()  # the last used is last
        self._kept_lock = threading.Lock()
        self._compiling: set[str] = set()
        self._wanted: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._compiled: queue.SimpleQueue[tuple[str, Compiled | BaseException]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=self._run, name="grammars", daemon=True).start()
        finally:
            threading.stack_size(before)

    def find(self, grammar: str) -> Compiled | None:
        """Return a compiled grammar, or `None` if it must be compiled first."""
        with self._kept_lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
                return kept
        if grammar not in self._compiling:
            self._compiling.add(grammar)
            self._wanted.put(grammar)
        return None

    def take_compiled(self) -> Iterator[tuple[str, ValueError | None]]:
        """Yield the grammars that were compiled since the last call, each with the error if it could not be compiled.

        A grammar is kept at least until the next one is yielded; later it may be evicted. Raises the error that ended
        the compiler, because the requests that wait for it would wait for ever.
        """
        while not self._compiled.empty():
            grammar, outcome = self._compiled.get()
            self._compiling.remove(grammar)
            if isinstance(outcome, ValueError):
                yield grammar, outcome
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            with self._kept_lock:
                self._kept[grammar] = outcome
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            yield grammar, None

    def alone(self, full: Compiled) -> LLMatcher | None:
        """Return a matcher with an automaton of its own, in place of that of `full`, which may have no more states.

        Return `None` if compiling would hold up a step for long. In any case `full` is forgotten, so the next request
        has the grammar compiled again.
        """
        with self._kept_lock:
            if self._kept.get(full.grammar) is full:
                del self._kept[full.grammar]
        return new_matcher(self._tokenizer, full.grammar) if full.compiling_s <= _SHORT_S else None

    def close(self) -> None:
        """Compile no more. A grammar in progress is left to the end of the process."""
        with self._lock:
            self._is_closed = True
        self._wanted.put(None)

    def _run(self) -> None:
        while (grammar := self._wanted.get()) is not None:
            begun_s = time.thread_time()
            try:
                matcher = new_matcher(self._tokenizer, grammar)
                outcome: Compiled | BaseException = Compiled(grammar, matcher, time.thread_time() - begun_s)
                matcher.compute_bitmask()  # copies of the matcher begin with this mask, and need not compute it again
            except BaseException as error:  # noqa: BLE001 (the thread of the step loop raises it)
                outcome = error
            self._compiled.put((grammar, outcome))
            with self._lock:
                if not self._is_closed:
                    self._wake()
