"""The blocks that a sliding-window group keeps, matches and forgets; kv_oracle checks everything else alongside."""

from __future__ import annotations

import numpy as np
import pytest
from kv_oracle import Engine
from naive_boundaries import Worth
from naive_scheduler import Setup

from swiftkv import _core
from swiftkv.cache.geometry import KVGroup

BLOCK = 4


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def run(e: Engine, request_id: int, tokens: list[int], max_tokens: int = 1) -> int:
    """Return how many tokens of a request were found in the cache; it runs alone, and to its end."""
    e.add(request_id, tokens, max_tokens)
    e.drain()
    return e.finished[request_id].cached


@pytest.mark.parametrize(("window", "num_needed"), [(2, 1), (5, 1), (6, 2), (8, 2), (9, 2), (10, 3)])
def test_a_match_needs_the_blocks_that_the_next_token_sees_and_no_other(window: int, num_needed: int) -> None:
    """A window counts the token that looks back: nine tokens see two whole blocks of four, and not three."""
    tokens = prompt(17)
    for num_loaded in (num_needed - 1, num_needed):
        e = Engine(Setup(((1, 16, window),), BLOCK, 4, 16, 32))
        for block in range(4 - num_loaded, 4):
            e.begin_loading(b"", tokens[: (block + 1) * BLOCK])
        for load in list(e.loads):
            e.end_loading(load, is_loaded=True)
        assert run(e, 1, tokens) == (16 if num_loaded == num_needed else 0)


def test_an_equal_prompt_that_ends_with_a_block_hits_again_under_pressure() -> None:
    """Its last token is computed again, so its match ends a block earlier, and needs a block further back."""
    e = Engine(Setup(((1, 32, 0), (1, 6, 8)), BLOCK, 4, 64, 24))
    run(e, 1, prompt(16))
    run(e, 2, prompt(13, 1))  # which needs two blocks more than are free
    assert run(e, 3, prompt(16)) == 12


@pytest.mark.parametrize("length", [16, 17, 19])
def test_a_long_prefill_flushes_nobodys_tail(length: int) -> None:
    """Blocks that leave a window serve no boundary, so they are the first to go, though they were used last."""
    e = Engine(Setup(((1, 256, 0), (1, 24, 8)), BLOCK, 4, 16, 512))
    run(e, 1, prompt(length))
    run(e, 2, prompt(400, 1))
    assert run(e, 3, prompt(length)) == (length - 1) // BLOCK * BLOCK
    run(e, 4, prompt(500, 2))
    assert run(e, 5, [*prompt(400, 1), 1]) == 400


def test_sixteen_conversations_in_turn_hit_their_last_boundary_each_time() -> None:
    """With a long prefill between the turns, and window blocks for a quarter of what they all ever had."""
    e = Engine(Setup(((1, 2_000, 0), (1, 120, 8)), BLOCK, 4, 64, 600))
    turns = [prompt(61, i) for i in range(16)]
    request = 0
    for turn in range(4):
        for i, tokens in enumerate(turns):
            e.add(request, tokens, max_tokens=6)
            e.drain()
            done = e.finished[request]
            assert done.cached == (len(tokens) - 10) // BLOCK * BLOCK * (turn > 0)
            turns[i] = [*tokens, *done.outputs, *prompt(9, 100 * turn + i)]
            request += 1
        run(e, 1_000 + turn, prompt(590, 1_000 + turn))


def test_a_prompt_is_found_again_however_long_its_answer_was() -> None:
    e = Engine(Setup(((1, 64, 0), (1, 16, 8)), BLOCK, 4, 16, 128))
    run(e, 1, prompt(20), max_tokens=40)
    run(e, 2, prompt(40, 1))
    assert run(e, 3, prompt(20)) == 16


def test_where_a_second_continuation_appeared_a_third_one_begins() -> None:
    e = Engine(Setup(((1, 256, 0), (1, 28, 8)), BLOCK, 4, 16, 128))
    shared = prompt(40)
    cached = []
    for i in range(4):
        cached.append(run(e, i, shared + prompt(40, 1 + i)))
        run(e, 10 + i, prompt(100, 10 + i))  # evicts what no boundary needs
    # The tail at the branch is gone when the second one comes, which computes it, and so does whoever comes next.
    assert cached == [0, 0, 40, 40]


def test_a_shared_prefix_outlives_its_hundred_continuations() -> None:
    """Each of them is kept where it ends, and evicts the one before; what all use is used last by every one."""
    e = Engine(Setup(((1, 256, 0), (1, 20, 8)), BLOCK, 4, 16, 64))
    cached = [run(e, i, prompt(40) + prompt(9, 1 + i)) for i in range(100)]
    assert cached[2:] == [40] * 98


@pytest.mark.parametrize(
    ("num_blocks", "asked"),
    [
        (5, [("000010101010101", 2), ("0000101082", 3), ("00001010101010101", 1), ("000010101", 12), ("0000101", 2)]),
        (7, [("000010101010101", 10), ("0000101010101081", 1), ("0000", 13), ("000010", 3)]),
    ],
)
def test_a_block_of_a_boundary_is_kept_when_it_is_computed_again(num_blocks: int, asked: list[tuple[str, int]]) -> None:
    """A boundary can lose the block before its tail. The plain model tells which blocks go first afterwards."""
    e = Engine(Setup(((1, 64, 0), (1, num_blocks, 5)), BLOCK, 4, 64, 64))
    for i, (digits, max_tokens) in enumerate(asked):
        e.add(i, [int(digit) for digit in digits], max_tokens, skip_prefix_match=num_blocks == 7 and i == 1)
        e.drain()


def test_equal_ends_of_different_prefixes_share_nothing() -> None:
    e = Engine(Setup(((1, 64, 8),), BLOCK, 4, 16, 64))
    run(e, 1, prompt(20, 1) + prompt(20))
    assert run(e, 2, prompt(20, 2) + prompt(20)) == 0


def test_regular_boundaries_are_kept_until_others_need_the_room() -> None:
    cached = {}
    for interval in (None, 32):
        e = Engine(Setup(((1, 128, 0), (1, 24, 8)), BLOCK, 4, 16, 256, retention_interval=interval))
        run(e, 1, prompt(100))
        run(e, 2, prompt(80, 1))  # takes the room of what no boundary needs
        cached[interval] = run(e, 4, prompt(100)[:70] + prompt(9, 3))
        for i in range(8):
            run(e, 10 + i, prompt(16, 10 + i))
        assert run(e, 5, prompt(100)[:38] + prompt(9, 4)) == 0, (
            "the first to go is no boundary, the second a regular one"
        )
    assert cached == {None: 0, 32: 64}


def test_a_tail_whose_prefix_is_gone_goes_with_it() -> None:
    e = Engine(Setup(((1, 16, 0), (1, 24, 8)), BLOCK, 4, 64, 64))
    run(e, 1, prompt(17))
    run(e, 2, prompt(61, 1))  # evicts the last full blocks of the first
    run(e, 3, prompt(60, 2))
    e.check()
    kept = {prefix for boundary in e.naive.boundaries.kept for prefix in boundary.prefixes}
    assert all(prefix in e.naive.pools[0].holders for prefix in kept)


@pytest.mark.parametrize("windows", [(9,), (0, 9), (5, 0, 9)])
@pytest.mark.parametrize("chunk", [4, 512])
def test_a_prompt_longer_than_the_window_group_is_computed_in_what_fits(windows: tuple[int, ...], chunk: int) -> None:
    """A window of nine tokens needs two blocks, one more for an equal prompt, and one for what is computed."""
    groups = tuple((1, 4 if window else 64, window) for window in windows)
    e = Engine(Setup(groups, BLOCK, 4, chunk, 256))
    run(e, 1, prompt(250), max_tokens=5)
    assert max(e.computed_tokens) <= 16
    assert sum(e.computed_tokens) == 254
    assert e.scheduler.stats().num_preemptions_total == 0


def test_a_chunk_shrinks_before_its_request_waits() -> None:
    e = Engine(Setup(((1, 64, 0), (1, 10, 9)), BLOCK, 4, 64, 128))
    e.add(1, prompt(12), max_tokens=20)
    e.step()
    e.add(2, prompt(60, 1), max_tokens=1)
    e.step()
    # The first one holds four blocks, and another stays free for it.
    assert e.computed_tokens == [12, 1 + 20]


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("is_lower", [False, True], ids=["of its class", "of a lower class"])
def test_a_prompt_does_not_stand_still_while_an_answer_behind_it_goes_on(
    is_lower: bool, is_pinned: bool, num_ahead: int
) -> None:
    """Both would fit with one window block more, which the answer gives up now and then, and takes again first."""
    e = Engine(Setup(((1, 200, 0), (1, 7 + is_pinned, 8)), BLOCK, 3, 32, 400, scheduling_policy="hrrn"))
    if is_pinned:
        run(e, 9, prompt(5, 9))
        assert e.pin(b"", prompt(5, 9), max_share=0.5) == 0
    if is_lower:
        e.add(2, prompt(5, 2), max_tokens=300, priority=2 * _core.PRIORITIES_PER_CLASS)
        e.step()
    e.add(1, prompt(300, 1), max_tokens=1)
    if not is_lower:
        e.step()
        e.add(2, prompt(5, 2), max_tokens=300)  # so few tokens go first
    num_without = 0
    while 1 not in e.finished:
        plan = e.schedule()
        if plan is not None:
            num_without = 0 if 1 in plan.request_ids else num_without + 1
            assert num_without <= num_ahead
        if plan is None or len(e.plans) > num_ahead:
            e.commit()
    assert len(e.pins) == is_pinned
    e.drain()
    assert sorted(e.finished)[:2] == [1, 2]


def test_who_begins_in_a_step_stays_in_it() -> None:
    """The first of two prompts in part takes all room; the other has its turn in the next step."""
    groups = ((1, 200, 0), (1, 11, 8))
    e = Engine(
        Setup(
            groups,
            BLOCK,
            4,
            48,
            200,
            long_prefill_token_threshold=16,
            max_long_partial_prefills=2,
            scheduling_policy="hrrn",
        )
    )
    e.add(1, prompt(100, 1), max_tokens=1)
    e.add(2, prompt(120, 2), max_tokens=1)
    e.step()
    e.add(3, prompt(5, 3), max_tokens=3)
    plan = e.schedule()
    assert plan is not None
    assert plan.new_request_ids.tolist() == [3]
    assert sorted(plan.request_ids.tolist()) == [1, 3]
    assert plan.preempted_request_ids.tolist() == []
    e.drain()


@pytest.mark.parametrize("window", [17, 24, 33, 64])
@pytest.mark.parametrize("chunk", [1, 16, 40, 128])
def test_a_sequence_takes_what_its_geometry_says(window: int, chunk: int) -> None:
    group = KVGroup((0,), 1, 16, "float32", 16, kind="window", window=window)
    e = Engine(Setup(((1, 32, 0), (1, 32, window)), 16, 4, chunk, 512))
    e.add(1, prompt(320), max_tokens=1)
    most_used = 0
    while e.requests:
        e.schedule()
        most_used = max(most_used, e.scheduler.stats().groups[1].used)
        e.commit()
    assert group.blocks_in_prefill(320, chunk) - 1 <= most_used <= group.blocks_in_prefill(320, chunk)
    assert len(e.naive.pools[1].lru[Worth.KEPT]) == group.blocks_at_rest(320)
