"""The thread in which the masks of steps are made, beside the model."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

from swiftkv.engine.token_masks import TokenMasks

MakeMasks: TypeAlias = Callable[[], TokenMasks | None]
_Made: TypeAlias = "queue.SimpleQueue[TokenMasks | Exception | None]"


class MaskThread:
    """Makes masks in the order in which they were asked for.

    It uses plain queues, not an executor. A step of the model evicts everything else from the processor's caches, and
    an executor's Python code would then cost each step twice as much.
    """

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[tuple[MakeMasks, _Made] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="masks", daemon=True)
        self._thread.start()

    def begin(self, make: MakeMasks) -> _Made:
        """Have masks made. Return a queue that gets the masks, or an error for the caller to raise."""
        made: _Made = queue.SimpleQueue()
        self._wanted.put((make, made))
        return made

    def close(self) -> None:
        """End the thread, once it has made all masks that were asked for."""
        self._wanted.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            make, made = wanted
            try:
                made.put(make())
            except Exception as error:  # noqa: BLE001 (the thread of the step loop raises it)
                made.put(error)


class PendingMasks:
    """The masks of one step. They can be made, in a thread, once the tokens before it are known."""

    def __init__(self, thread: MaskThread, prepare: Callable[[], MakeMasks]) -> None:
        """`prepare` is called once the tokens are known, in the thread of the step loop."""
        self._thread = thread
        self._prepare = prepare
        self._made: _Made | None = None

    def begin(self) -> None:
        """Have the masks made in another thread, if they are not yet."""
        if self._made is None:
            self._made = self._thread.begin(self._prepare())

    def take(self) -> TokenMasks | None:
        """Return the masks, made now if `begin` was not called. May be called once.

        `None` if the rows may have any token after all: their requests are reasoning.
        """
        self.begin()
        assert self._made is not None
        made = self._made.get()
        if isinstance(made, Exception):
            raise made
        return made
