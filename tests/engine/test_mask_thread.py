"""The thread that makes masks beside the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from swiftkv.engine.mask_thread import MakeMasks, MaskThread, PendingMasks
from swiftkv.engine.token_masks import TokenMasks

MASKS = [TokenMasks(np.array([row], np.int32), np.zeros((1, 2), np.uint32)) for row in range(3)]


@pytest.fixture
def thread() -> Iterator[MaskThread]:
    running = MaskThread()
    yield running
    running.close()


def test_masks_are_made_in_the_order_in_which_they_were_begun(thread: MaskThread) -> None:
    made: list[int] = []
    may_go_on = threading.Event()

    def make(index: int) -> MakeMasks:
        def masks() -> TokenMasks:
            may_go_on.wait()
            made.append(index)
            return MASKS[index]

        return masks

    pending = [PendingMasks(thread, lambda index=index: make(index)) for index in range(3)]  # type: ignore[misc]
    for index in (2, 0, 1):
        pending[index].begin()
        pending[index].begin()  # once is enough
    may_go_on.set()
    assert [each.take() for each in pending] == MASKS
    assert made == [2, 0, 1]


def test_masks_that_were_not_begun_are_made_when_they_are_taken(thread: MaskThread) -> None:
    assert PendingMasks(thread, lambda: lambda: MASKS[0]).take() is MASKS[0]
    assert PendingMasks(thread, lambda: lambda: None).take() is None


def test_what_making_masks_raises_is_raised_where_they_are_taken(thread: MaskThread) -> None:
    def fail() -> TokenMasks:
        raise RuntimeError("the matcher is in use")

    failing, next_one = PendingMasks(thread, lambda: fail), PendingMasks(thread, lambda: lambda: MASKS[1])
    failing.begin()
    next_one.begin()
    with pytest.raises(RuntimeError, match="in use"):
        failing.take()
    assert next_one.take() is MASKS[1]


def test_a_thread_that_is_closed_makes_what_was_begun_first() -> None:
    thread = MaskThread()
    pending = PendingMasks(thread, lambda: lambda: MASKS[0])
    pending.begin()
    thread.close()
    assert pending.take() is MASKS[0]
