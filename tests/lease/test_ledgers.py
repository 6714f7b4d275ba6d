"""The lender's table and the borrower's replica, one operation at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from swiftkv._lease import BorrowerLedger, LenderLedger

HOME, OFFERED, LENT, RECALLED = range(4)
NONE, HELD, DRAINING = range(3)


def extents(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def epochs(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def as_lists(arrays: tuple[np.ndarray, ...]) -> tuple[list[int], ...]:
    return tuple(array.tolist() for array in arrays)


def test_a_lease_from_offer_to_return() -> None:
    lender, borrower = LenderLedger(4), BorrowerLedger(4)
    offered = lender.offer(extents(2, 0))
    assert offered.tolist() == [1, 1]
    taken, accepted, accepted_epochs = borrower.on_offer(extents(2, 0), offered)
    assert taken.tolist() == accepted.tolist() == [2, 0]
    lender.on_accept(accepted, accepted_epochs)
    assert as_lists(lender.table()) == ([LENT, HOME, LENT, HOME], [1, 0, 1, 0])
    assert as_lists(borrower.table()) == ([HELD, NONE, HELD, NONE], [1, 0, 1, 0])
    recalled, recalled_epochs = lender.recall(1)
    assert recalled.tolist() == [0]
    assert (lender.home, lender.offered, lender.lent, lender.recalled) == (2, 0, 1, 1)
    to_drain, returned, _ = borrower.on_recall(recalled, recalled_epochs)
    assert as_lists((to_drain, returned)) == ([0], [])
    assert (borrower.none, borrower.held, borrower.recalled) == (2, 1, 1)
    assert lender.on_return(extents(0), borrower.give_back(to_drain)).tolist() == [0]
    assert lender.home == borrower.none == 3
    assert lender.offer(extents(0)).tolist() == [2]


def test_a_recall_that_overtakes_its_offer_makes_it_void() -> None:
    borrower = BorrowerLedger(1)
    assert as_lists(borrower.on_recall(extents(0), epochs(1))) == ([], [0], [1])
    assert as_lists(borrower.on_offer(extents(0), epochs(1))) == ([], [], [])
    assert borrower.none == 1
    assert as_lists(borrower.on_offer(extents(0), epochs(2))) == ([0], [0], [2])


def test_what_is_repeated_changes_nothing_and_is_answered_again() -> None:
    lender, borrower = LenderLedger(1), BorrowerLedger(1)
    first = lender.offer(extents(0))
    borrower.on_offer(extents(0), first)
    assert as_lists(borrower.on_offer(extents(0), first)) == ([], [0], [1])
    borrower.on_recall(extents(0), first)
    assert as_lists(borrower.on_recall(extents(0), first)) == ([], [], [])
    borrower.give_back(extents(0))
    assert as_lists(borrower.on_recall(extents(0), first)) == ([], [0], [1])
    assert lender.on_return(extents(0), first).tolist() == [0]
    assert lender.on_return(extents(0), first).tolist() == []


def test_an_offer_of_an_earlier_lease_is_not_accepted() -> None:
    borrower = BorrowerLedger(1)
    borrower.on_offer(extents(0), epochs(1))
    borrower.give_back(extents(0))
    borrower.on_offer(extents(0), epochs(2))
    assert as_lists(borrower.on_offer(extents(0), epochs(1))) == ([], [], [])
    assert as_lists(borrower.table()) == ([HELD], [2])


def test_a_return_of_an_earlier_lease_is_ignored() -> None:
    lender = LenderLedger(1)
    first = lender.offer(extents(0))
    lender.on_return(extents(0), first)
    lender.offer(extents(0))
    assert lender.on_return(extents(0), first).tolist() == []
    lender.on_accept(extents(0), first)
    assert lender.offered == 1


def test_epochs_outlive_a_borrower_and_not_a_lender() -> None:
    lender, borrower = LenderLedger(3), BorrowerLedger(3)
    offered = lender.offer(extents(0, 1, 2))
    borrower.on_offer(extents(0, 1, 2), offered)
    lender.recall(1)
    assert sorted(lender.peer_died().tolist()) == [0, 1, 2]
    assert lender.home == 3
    assert lender.offer(extents(1)).tolist() == [2]
    borrower.on_recall(extents(1), epochs(1))
    assert sorted(borrower.lender_died().tolist()) == [0, 1, 2]
    assert as_lists(borrower.table()) == ([NONE] * 3, [0] * 3)


@pytest.mark.parametrize("refused", [(0, 1), (2, 2), (3,), (-1,)])
def test_only_what_is_home_is_offered(refused: tuple[int, ...]) -> None:
    lender = LenderLedger(3)
    lender.offer(extents(1))
    before = as_lists(lender.table())
    with pytest.raises(ValueError, match="extent"):
        lender.offer(extents(*refused))
    assert as_lists(lender.table()) == before
    assert (lender.home, lender.offered) == (2, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: LenderLedger(2).on_accept(extents(2), epochs(1)),
        lambda: LenderLedger(2).on_return(extents(-1), epochs(1)),
        lambda: LenderLedger(2).on_return(extents(0, 1), epochs(1)),
        lambda: BorrowerLedger(2).on_offer(extents(2), epochs(1)),
        lambda: BorrowerLedger(2).on_offer(extents(1), epochs(1, 2)),
        lambda: BorrowerLedger(2).on_recall(extents(-1), epochs(1)),
        lambda: BorrowerLedger(2).give_back(extents(0)),
        lambda: BorrowerLedger(2).on_offer(extents(1, 1), epochs(1, 2)),
        lambda: BorrowerLedger(2).on_recall(extents(1, 1), epochs(1, 2)),
        lambda: LenderLedger(2).on_accept(extents(0, 0), epochs(1, 1)),
        lambda: LenderLedger(2).on_return(extents(0, 0), epochs(1, 1)),
        lambda: BorrowerLedger(-1),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"extent"):
        call()


def test_a_count_to_recall_is_not_negative() -> None:
    with pytest.raises(ValueError, match="count"):
        LenderLedger(2).recall(-1)


@pytest.mark.parametrize(
    ("named", "spoken_at"), [((0, 2), (2, 1)), ((0, -1), (2, 1)), ((0, 0), (2, 2)), ((0, 1), (2, 9)), ((0, 1), (2,))]
)
@pytest.mark.parametrize("message", ["on_offer", "on_recall", "give_back"])
def test_a_borrower_that_refuses_one_extent_changes_none(
    message: str, named: tuple[int, ...], spoken_at: tuple[int, ...]
) -> None:
    borrower = BorrowerLedger(2)
    borrower.on_offer(extents(0, 1), epochs(1, 1))
    borrower.give_back(extents(0))
    before = as_lists(borrower.table())
    names = (extents(*named),) if message == "give_back" else (extents(*named), epochs(*spoken_at))
    with pytest.raises(ValueError, match="extent"):
        getattr(borrower, message)(*names)
    assert as_lists(borrower.table()) == before
    assert borrower.give_back(extents(1)).tolist() == [1]


@pytest.mark.parametrize("named", [(0, 2), (0, -1), (0, 0)])
@pytest.mark.parametrize("message", ["on_accept", "on_return"])
def test_a_lender_that_refuses_one_extent_changes_none(message: str, named: tuple[int, ...]) -> None:
    lender = LenderLedger(2)
    lender.offer(extents(0, 1))
    before = as_lists(lender.table())
    with pytest.raises(ValueError, match="extent"):
        getattr(lender, message)(extents(*named), epochs(1, 1))
    assert as_lists(lender.table()) == before
    assert lender.on_return(extents(0, 1), epochs(1, 1)).tolist() == [0, 1]


def test_extents_and_epochs_are_not_converted_from_another_kind_of_array() -> None:
    with pytest.raises(TypeError):
        LenderLedger(2).offer(np.array([2**32 + 1]))
    with pytest.raises(TypeError):
        BorrowerLedger(2).on_offer(extents(1), np.array([2**32 + 1]))


@pytest.mark.parametrize("message", ["on_offer", "on_recall"])
def test_a_lender_cannot_speak_of_a_later_lease_of_what_is_borrowed(message: str) -> None:
    borrower = BorrowerLedger(1)
    borrower.on_offer(extents(0), epochs(1))
    with pytest.raises(ValueError, match="borrowed"):
        getattr(borrower, message)(extents(0), epochs(2))
    assert borrower.held == 1
