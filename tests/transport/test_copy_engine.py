"""The copy engine refuses memory and runs that cannot be: nothing is copied, and the engine goes on."""

from __future__ import annotations

import numpy as np
import pytest

from swiftkv._transport import CopyEngine, CopyError

WIDTH, BLOCK = 64, 128
MAX = 2**63 - 1
NO_RUNS = np.zeros((0, 5), np.int64)


def memory(size: int) -> np.ndarray:
    return np.zeros(size, np.uint8)


@pytest.mark.parametrize(("address", "nbytes"), [(0, 1), (2**64 - 8, 16), (4096, 2**63)])
def test_memory_that_cannot_be_is_refused(address: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="address"):
        CopyEngine(address, nbytes)
    engine = CopyEngine(0, 0)
    with pytest.raises(ValueError, match="address"):
        engine.set_space(0, address, nbytes)


@pytest.mark.parametrize("num_threads", [-1, 0, 257, 2**31 - 1])
def test_a_number_of_threads_that_cannot_be_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match="num_threads"):
        CopyEngine(0, 0, num_threads)


@pytest.mark.parametrize(
    "run",
    [
        (1, 0, 0, 1, 0),  # another link
        (0, -1, 0, 1, 0),
        (0, 0, -1, 1, 0),
        (0, 0, 0, -1, 0),
        (0, 0, 0, 5, 0),
        (0, 0, 0, MAX, 0),
        (0, 4 * BLOCK, 0, 1, 0),
        (0, 0, 4 * BLOCK, 1, 1),
        (0, MAX, 0, 1, 0),
        (0, 0, MAX, 1, 0),
        (0, 0, MAX, 1, 1),
    ],
)
@pytest.mark.parametrize("to_peer", [True, False])
def test_a_run_outside_its_pools_is_refused_and_the_next_one_is_copied(run: tuple[int, ...], to_peer: bool) -> None:
    ours, theirs = memory(4 * BLOCK), memory(4 * BLOCK)
    ours[:], theirs[:] = 1, 2
    engine = CopyEngine(ours.ctypes.data, ours.nbytes)
    engine.set_space(0, theirs.ctypes.data, theirs.nbytes)
    runs = np.array([(0, 0, 0, 1, 0), run], np.int64)
    both = (runs, NO_RUNS) if to_peer else (NO_RUNS, runs)
    ticket = engine.submit(both[0], WIDTH, BLOCK, both[1], WIDTH, BLOCK, 1)
    with pytest.raises(CopyError):
        engine.wait(ticket)
    assert set(ours) == {1}
    assert set(theirs) == {2}
    engine.wait(engine.submit(NO_RUNS, WIDTH, BLOCK, runs[:1], WIDTH, BLOCK, 1))
    assert ours[WIDTH:BLOCK].tolist() == [2] * WIDTH


@pytest.mark.parametrize("ticket", [-1, 0, 1])
def test_a_ticket_that_was_not_given_is_refused(ticket: int) -> None:
    with pytest.raises(ValueError, match="ticket"):
        CopyEngine(0, 0).wait(ticket)
