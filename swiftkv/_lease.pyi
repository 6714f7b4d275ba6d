"""Ledgers of extents and their holders: the lender's table of a link and the borrower's replica of it (C++).

Extents are int32, epochs uint32, arrays one-dimensional; extents and epochs that belong together have one length.
Messages may come late, reordered and more than once: any that is not about an extent's current lease is ignored.
Every operation is O(log n) for each of the n extents that it names. All raise ValueError, and change nothing, for an
extent that the link does not have, that is named twice, or that has no epoch. An instance belongs to one thread.
"""

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
UInt32Array = npt.NDArray[np.uint32]
UInt8Array = npt.NDArray[np.uint8]

class LenderLedger:
    """The truth about one link. States, as in `table()`: 0 home, 1 offered, 2 lent, 3 recalled. All start home."""

    def __init__(self, num_extents: int) -> None: ...
    @property
    def num_extents(self) -> int: ...
    @property
    def home(self) -> int:
        """The number of extents at home, to which only the lender writes."""
    @property
    def offered(self) -> int: ...
    @property
    def lent(self) -> int: ...
    @property
    def recalled(self) -> int:
        """The number of extents that are recalled and still the borrower's."""
    def offer(self, extents: Int32Array) -> UInt32Array:
        """Offer extents; returns the epoch of each. Raises ValueError, and changes nothing, unless all are home."""

    def on_accept(self, extents: Int32Array, epochs: UInt32Array) -> None: ...
    def recall(self, count: int) -> tuple[Int32Array, UInt32Array]:
        """Recall up to `count` extents. Returns them and the epochs to recall them at.

        Raises ValueError if `count` is negative.
        """

    def on_return(self, extents: Int32Array, epochs: UInt32Array) -> Int32Array:
        """Take extents home, and return those that were lent until now."""

    def peer_died(self) -> Int32Array:
        """End all leases. Return the extents that this brings home; their epochs go on."""

    def table(self) -> tuple[UInt8Array, UInt32Array]:
        """Return [num_extents] state and epoch of every extent, as a copy."""

class BorrowerLedger:
    """The replica of one link. States, as in `table()`: 0 none, 1 held, 2 recalled. All start as none, at epoch 0."""

    def __init__(self, num_extents: int) -> None: ...
    @property
    def num_extents(self) -> int: ...
    @property
    def none(self) -> int:
        """The number of extents that the borrower must not touch."""
    @property
    def held(self) -> int: ...
    @property
    def recalled(self) -> int:
        """The number of extents that are recalled and not yet given back."""
    def on_offer(self, extents: Int32Array, epochs: UInt32Array) -> tuple[Int32Array, Int32Array, UInt32Array]:
        """Return the extents that are held from now on, and the (extents, epochs) to accept: those and repetitions.

        Raises ValueError if an extent that is borrowed is offered at a later epoch: no lender may do that.
        """

    def on_recall(self, extents: Int32Array, epochs: UInt32Array) -> tuple[Int32Array, Int32Array, UInt32Array]:
        """Return the extents to drain, then to give back, and the (extents, epochs) to return at once.

        Raises ValueError if an extent that is borrowed is recalled at a later epoch: no lender may do that.
        """

    def give_back(self, extents: Int32Array) -> UInt32Array:
        """Stop using extents, recalled or not. Returns the epochs to return them at.

        Raises ValueError, and gives back nothing, unless all are borrowed.
        """

    def lender_died(self) -> Int32Array:
        """Forget everything, epochs too. Returns the extents that were borrowed."""

    def table(self) -> tuple[UInt8Array, UInt32Array]:
        """Return [num_extents] state and epoch of every extent, as a copy."""
