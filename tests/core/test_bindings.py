"""The scheduler refuses meaningless calls by name, and a refused call changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from swiftkv import _core
from swiftkv._core import GroupSpec, Link, Scheduler

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
NO_STOP = np.array([], np.int32)


def extents(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass(frozen=True)
class Setup:
    """A pool of 16 blocks that lends four extents of two blocks and borrows over two links, extents of two blocks."""

    groups: tuple[tuple[int, ...], ...] = ((2, 16, 0, 64, 0),)  # of GroupSpec's arguments; the links likewise
    lend: tuple[tuple[int, ...], ...] = ((0, 4, 2),)
    borrow: tuple[tuple[int, ...], ...] = ((0, 4, 2, 256), (0, 3, 2, 300))
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    max_model_len: int = 48
    stream_buffers: int = 2
    target_tpot_s: float | None = None

    def scheduler(self) -> Scheduler:
        return Scheduler(
            [GroupSpec(*group) for group in self.groups],
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            lend_links=[Link(*link) for link in self.lend],
            borrow_links=[Link(*link) for link in self.borrow],
            stream_buffers=self.stream_buffers,
            target_tpot_s=self.target_tpot_s,
        )


def add(scheduler: Scheduler, request_id: int, prompt: np.ndarray, max_tokens: int, min_tokens: int = 0) -> None:
    scheduler.add_request(
        request_id,
        prompt,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=NO_STOP,
        namespace=b"",
        skip_prefix_match=False,
    )


def lending_scheduler() -> Scheduler:
    """Extents 2 and 3 are lent; of link 0, extents 1 and 2 are held, and 0 is recalled and still in use."""
    scheduler = Setup().scheduler()
    assert scheduler.lend(0, 2).tolist() == [3, 2]
    scheduler.borrow(0, extents(0, 1, 2))
    add(scheduler, 1, np.arange(44, dtype=np.int32), 4)
    assert scheduler.schedule() is not None
    assert scheduler.stats().groups[0].borrowed_used == 2
    scheduler.recall(0, extents(0))
    return scheduler


def look(scheduler: Scheduler) -> list[int]:
    scheduler.check_invariants()
    (group,) = scheduler.stats().groups
    return [getattr(group, name) for name in dir(group) if not name.startswith("_")]


REFUSED: dict[str, tuple[Callable[[Scheduler], object], str]] = {
    "lend: no such link": (lambda s: s.lend(1, 1), "link"),
    "lend: link -1": (lambda s: s.lend(-1, 1), "link"),
    "lend: a negative number": (lambda s: s.lend(0, -1), "max_extents"),
    "take_back: no such link": (lambda s: s.take_back(1, extents(2)), "link"),
    "take_back: link -1": (lambda s: s.take_back(-1, extents(2)), "link"),
    "take_back: no such extent": (lambda s: s.take_back(0, extents(2, 4)), "extent 4"),
    "take_back: extent -1": (lambda s: s.take_back(0, extents(2, -1)), "extent -1"),
    "take_back: twice": (lambda s: s.take_back(0, extents(2, 3, 2)), "extent 2 is named twice"),
    "take_back: not lent": (lambda s: s.take_back(0, extents(2, 1)), "extent 1 is not lent"),
    "borrow: no such link": (lambda s: s.borrow(2, extents(0)), "link"),
    "borrow: link -1": (lambda s: s.borrow(-1, extents(0)), "link"),
    "borrow: no such extent": (lambda s: s.borrow(1, extents(0, 3)), "extent 3"),
    "borrow: extent -1": (lambda s: s.borrow(1, extents(0, -1)), "extent -1"),
    "borrow: the largest number": (lambda s: s.borrow(1, extents(0, INT32_MAX)), f"extent {INT32_MAX}"),
    "borrow: twice": (lambda s: s.borrow(1, extents(0, 1, 0)), "extent 0 is named twice"),
    "borrow: held": (lambda s: s.borrow(0, extents(3, 1)), "extent 1 is borrowed already"),
    "borrow: recalled": (lambda s: s.borrow(0, extents(3, 0)), "extent 0 was recalled"),
    "recall: no such link": (lambda s: s.recall(2, extents(0)), "link"),
    "recall: link -1": (lambda s: s.recall(-1, extents(0)), "link"),
    "recall: no such extent": (lambda s: s.recall(0, extents(1, 4)), "extent 4"),
    "recall: extent -1": (lambda s: s.recall(0, extents(1, -1)), "extent -1"),
    "recall: twice": (lambda s: s.recall(0, extents(1, 1)), "extent 1 is named twice"),
    "recall: not held": (lambda s: s.recall(0, extents(1, 3)), "extent 3 is not held"),
    "recall: recalled before": (lambda s: s.recall(0, extents(1, 0)), "extent 0 is not held"),
    "take_returned: no such link": (lambda s: s.take_returned(2), "link"),
    "take_returned: link -1": (lambda s: s.take_returned(-1), "link"),
    "lose: no such link": (lambda s: s.lose(2), "link"),
    "lose: link -1": (lambda s: s.lose(-1), "link"),
    "commit: too few tokens": (lambda s: s.commit(extents()), "logits_rows"),
    "commit: too many tokens": (lambda s: s.commit(extents(1, 2)), "logits_rows"),
    "add_request: a token below 0": (
        lambda s: add(s, 2, extents(1, -1), 1),
        "token id below 0",
    ),
    "add_request: an id that is known": (
        lambda s: add(s, 1, extents(1), 1),
        "already known",
    ),
    "add_request: no prompt": (lambda s: add(s, 2, extents(), 1), "empty prompt"),
    "add_request: no answer": (lambda s: add(s, 2, extents(1), 0), "max_tokens"),
    "add_request: min_tokens": (lambda s: add(s, 2, extents(1), 1, -1), "min_tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_caller_cannot_mean_is_refused_and_changes_nothing(name: str) -> None:
    call, message = REFUSED[name]
    scheduler = lending_scheduler()
    before = look(scheduler)
    with pytest.raises(ValueError, match=message):
        call(scheduler)
    assert look(scheduler) == before
    finish(scheduler)


def finish(scheduler: Scheduler) -> None:
    """A call that was refused is possible afterwards, in the right state."""
    scheduler.commit(extents(1))
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(np.ones(len(plan.logits_rows), np.int32))
    assert scheduler.take_returned(0).tolist() == [0]
    scheduler.borrow(0, extents(0, 3))
    scheduler.take_back(0, extents(3, 2))
    scheduler.check_invariants()


def test_an_extent_that_was_lost_is_not_borrowed_while_a_step_may_still_use_it() -> None:
    scheduler = lending_scheduler()
    scheduler.lose(0)
    with pytest.raises(ValueError, match="extent 0 was lost"):
        scheduler.borrow(0, extents(0))
    scheduler.commit(extents(1))
    scheduler.borrow(0, extents(0))
    scheduler.check_invariants()


def test_two_links_over_the_same_blocks_do_not_take_back_each_other_s_extents() -> None:
    scheduler = replace(Setup(), lend=((0, 4, 2), (0, 2, 4))).scheduler()
    assert sorted(scheduler.lend(0, 4).tolist()) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="extent 0 is not lent"):
        scheduler.take_back(1, extents(0))
    scheduler.take_back(0, extents(0, 1))
    scheduler.check_invariants()


@pytest.mark.parametrize(
    "array",
    [np.array([2**32 + 1]), np.array([1.0]), np.zeros((1, 1), np.int32), np.zeros(4, np.int32)[::2], [0], None],
)
def test_extents_are_not_converted_from_another_kind_of_array(array: object) -> None:
    """A conversion would wrap: 2**32 + 1 is not extent 1."""
    scheduler = lending_scheduler()
    for call in (scheduler.take_back, scheduler.borrow, scheduler.recall):
        with pytest.raises(TypeError):
            call(0, array)  # type: ignore[arg-type]


@pytest.mark.parametrize(("group", "buffer"), [(1, 0), (-1, 0), (0, 2), (0, -1), (INT64_MAX, 0)])
def test_a_plan_has_no_copies_of_another_group_or_buffer(group: int, buffer: int) -> None:
    scheduler = Setup().scheduler()
    scheduler.borrow(0, extents(0))
    add(scheduler, 1, extents(1, 2, 3), 1)
    plan = scheduler.schedule()
    assert plan is not None
    assert len(plan.copies(0, "load")) == 0
    with pytest.raises(IndexError, match="group" if group else "buffer"):
        plan.copies(group, "load", buffer)
    with pytest.raises(ValueError, match="spill, load or store"):
        plan.copies(0, "other")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [
        {"groups": ()},
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": -1},
        {"max_model_len": 1},
        {"max_model_len": INT32_MAX},
        {"stream_buffers": 3},
        {"groups": ((0, 16, 0, 64),)},
        {"groups": ((2, -1, 0, 64),)},
        {"groups": ((2, 16, -1, 64),)},
        {"groups": ((2, 16, 0, -64),)},
        {"groups": ((2, 16, 0, 64, -1),)},
        {"groups": ((2, 16, 0, INT64_MAX),)},
        {"groups": ((2, 16, 0, 64, INT64_MAX),)},
        {"groups": ((1, INT32_MAX, 0, 64), (1, INT32_MAX, 0, 64))},
        {"lend": ((1, 4, 2),)},
        {"lend": ((-1, 4, 2),)},
        {"lend": ((0, 9, 2),)},
        {"lend": ((0, -1, 2),)},
        {"lend": ((0, 4, 0),)},
        {"borrow": ((1, 4, 2, 256),)},
        {"borrow": ((0, 4, 2, 0),)},
        {"borrow": ((0, 4, 2, 255),)},  # an extent is smaller than its blocks
        {"borrow": ((0, 4, 2, 256, -1),)},
        {"borrow": ((0, 4, 2, INT64_MAX),)},
        {"borrow": ((0, 4, 2, 256, INT64_MAX),)},
        {"borrow": ((0, 1, INT32_MAX, INT64_MAX),)},
        {"borrow": ((0, INT32_MAX, INT32_MAX, 256),)},
        {"borrow": ((0, INT32_MAX, 2, 256),)},
        {"groups": ((1, 64, 0, 1),), "borrow": ((0, INT32_MAX, INT32_MAX, INT32_MAX),) * 3},  # 3 * 2 ** 62 blocks
    ],
)
def test_sizes_that_cannot_be_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        replace(Setup(), **changed).scheduler()  # type: ignore[arg-type]


def test_sizes_near_the_end_of_an_int_do_not_overflow() -> None:
    setup = replace(Setup(), groups=((1, 64, INT32_MAX, 64),), max_num_batched_tokens=INT32_MAX, block_size=1)
    scheduler = setup.scheduler()
    add(scheduler, 1, extents(*range(40)), INT32_MAX, INT32_MAX)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.context_lens.tolist() == [40]
    scheduler.commit(extents(1))
    scheduler.check_invariants()


def test_the_first_chunk_beside_answers_is_whole_where_a_block_is_as_large_as_an_int() -> None:
    scheduler = replace(Setup(), block_size=INT32_MAX, target_tpot_s=1.0).scheduler()
    add(scheduler, 1, extents(*range(40)), 4)
    assert scheduler.schedule() is not None
    scheduler.commit(extents(1))
    add(scheduler, 2, extents(*range(30)), 4)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.context_lens.tolist() == [41, 30]
    scheduler.check_invariants()


def test_a_prefill_is_not_predicted_from_before_the_first_token() -> None:
    scheduler = Setup().scheduler()
    with pytest.raises(ValueError, match="begin"):
        scheduler.prefill_s(-(2**31), INT32_MAX)
    assert scheduler.prefill_s(0, INT32_MAX) is None


def test_the_scheduler_knows_when_requests_arrived_and_how_long_steps_took() -> None:
    scheduler = Setup().scheduler()
    scheduler.add_request(
        1,
        extents(1, 2, 3),
        max_tokens=2,
        min_tokens=0,
        stop_token_ids=NO_STOP,
        namespace=b"",
        skip_prefix_match=False,
        arrival_s=12.5,
    )
    plan = scheduler.schedule(now_s=13.0)
    assert plan is not None
    assert plan.new_arrivals_s.tolist() == [12.5]
    scheduler.commit(extents(1), duration_s=0.25)
    scheduler.schedule(now_s=14.0)
    scheduler.commit(extents(1), duration_s=0.5)
    assert scheduler.stats().step_s_total == 0.75


def test_block_keys_need_a_block_size() -> None:
    with pytest.raises(ValueError, match="block_size"):
        _core.block_keys(b"", extents(1), 0)
    assert _core.block_keys(b"", extents(), 4) == b""
