"""A running request that lacks the room of what is loading keeps its blocks, and goes on when that is here.

A request for the log-probabilities of its prompt does not match the prefix cache. If it were preempted instead, it
would compute the same tokens in every step for as long as loads take.
"""

from __future__ import annotations

import numpy as np
import pytest
from kv_oracle import rows_of
from naive_scheduler import Setup
from storage_oracle import StorageEngine, Transfer

BLOCK = 4
LENGTH = 33
REQUEST = 20
PLAIN = Setup(((1, 32, 0), (1, 10, 8)), BLOCK, 4, 64, 48)
SHARED = Setup(((1, 48, 0), (4, 12, 8)), BLOCK, 4, 64, 48, blocks_per_extent=(4, 1))
SETUPS = pytest.mark.parametrize(("setup", "num_loads"), [(PLAIN, 4), (SHARED, 3)], ids=["plain", "shared extents"])


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def stored(setup: Setup, num_prompts: int) -> StorageEngine:
    """Return an engine whose storage has prompts of two blocks, for which requests 1 to `num_prompts` are held."""
    e = StorageEngine(setup)
    for seed in range(1, num_prompts + 1):
        e.add(100 + seed, prompt(9, seed), 1)
        while e.step():
            e.store()
    e.reset_prefix_cache()
    for request_id in range(1, num_prompts + 1):
        e.add_held(request_id, prompt(9, request_id))
    return e


def begin_loads(e: StorageEngine, num_loads: int) -> list[Transfer]:
    transfers = [e.begin_load(request_id) for request_id in range(1, num_loads + 1)]
    return [transfer for transfer in transfers if transfer is not None]


def step(e: StorageEngine) -> tuple[int, int] | None:
    """Return which tokens the request computes in a step; `None`: there is nothing to compute."""
    plan = e.schedule()
    if plan is None:
        return None
    [row] = [row for row in rows_of(plan) if row.request_id == REQUEST]
    e.commit()
    return row.begin, row.end


@SETUPS
def test_every_token_is_computed_once_whatever_loads_hold(setup: Setup, num_loads: int) -> None:
    e = stored(setup, num_loads)
    transfers = begin_loads(e, num_loads)
    e.add(REQUEST, prompt(LENGTH, 0), 1, skip_prefix_match=True)
    chunks = [step(e)]
    assert [step(e) for _ in range(3)] == [None] * 3
    for transfer in transfers:
        e.read(transfer, len(transfer.blocks))
        while (chunk := step(e)) is not None:
            chunks.append(chunk)
        e.check()
    assert [token for begin, end in filter(None, chunks) for token in range(begin, end)] == list(range(LENGTH))
    assert e.scheduler.stats().num_preemptions_total == 0
    e.drain()


def test_no_load_begins_while_a_request_lacks_the_room_of_others() -> None:
    """One load after the other could keep it waiting for ever."""
    e = stored(PLAIN, 5)
    transfers = begin_loads(e, 4)
    e.add(REQUEST, prompt(LENGTH, 0), 1, skip_prefix_match=True)
    assert (step(e), step(e)) == ((0, 8), None)
    for request_id, transfer in enumerate(transfers[:2], 1):
        e.read(transfer, len(transfer.blocks))
        e.abort(request_id)  # what was read for it may give way
    assert e.begin_load(5) is None
    e.begin_loading(b"", prompt(BLOCK, 9))
    assert not e.loads
    assert step(e) == (8, 24)
    while REQUEST in e.requests:
        assert step(e)
    assert e.begin_load(5) is not None
    e.drain()


def test_a_request_that_is_gone_holds_up_no_load() -> None:
    e = stored(PLAIN, 5)
    transfers = begin_loads(e, 4)
    e.add(REQUEST, prompt(LENGTH, 0), 1, skip_prefix_match=True)
    assert (step(e), step(e)) == ((0, 8), None)
    e.read(transfers[0], len(transfers[0].blocks))
    e.abort(REQUEST)
    assert e.begin_load(5) is not None
    e.drain()


def test_loads_that_do_not_help_are_not_waited_for() -> None:
    """The window group has been read, and what it lacks now is pinned."""
    e = stored(Setup(((1, 32, 0), (1, 5, 8)), BLOCK, 4, 64, 48), 2)
    [pinned, transfer] = begin_loads(e, 2)
    e.read(pinned, len(pinned.blocks))
    assert e.pin(b"", prompt(9, 1), 1.0) is not None
    transfer.blocks.sort(key=lambda block: -block[1])
    e.add(REQUEST, prompt(LENGTH, 0), 1, skip_prefix_match=True)
    assert (step(e), step(e)) == ((0, 4), None)
    assert not len(e.scheduler.take_lost_pins())
    e.read(transfer, 2)
    assert step(e) == (4, 12)
    assert step(e) is not None
    assert len(e.scheduler.take_lost_pins()) == 1
    e.drain()


def test_a_request_that_matches_begins_again_behind_what_it_has_computed() -> None:
    """It needs less of the window then."""
    e = stored(Setup(((1, 32, 0), (1, 5, 5)), BLOCK, 4, 64, 48), 3)
    begin_loads(e, 3)
    e.add(REQUEST, prompt(LENGTH, 0), 1)
    chunks = []
    while (chunk := step(e)) is not None:
        chunks.append(chunk)
    assert [token for begin, end in chunks for token in range(begin, end)] == list(range(LENGTH))
    e.drain()
