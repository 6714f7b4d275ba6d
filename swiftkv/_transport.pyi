"""Copies between pools that are mapped into this process. Memory is passed as addresses, which must stay valid."""

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

class CopyError(RuntimeError):
    """A job named bytes outside its spaces; nothing of it was copied. With the link of a run that did, if one did."""

    args: tuple[str, int | None]

class CopyEngine:
    """One FIFO lane of jobs on `num_threads` threads of its own, which share the rows of one job at a time.

    Remembers the timings of the last `max_timings` jobs. Ends after what was submitted.
    """

    def __init__(self, address: int, nbytes: int, num_threads: int = 1, max_timings: int = 4096) -> None:
        """`address`, `nbytes`: the local pool. Raises `ValueError` unless `num_threads` is 1 to 256, and for bytes at
        address 0 or past the end of all memory."""

    def set_space(self, link: int, address: int, nbytes: int) -> None:
        """Waits until no job is left. Raises `ValueError` for bytes at address 0 or past the end of all memory."""

    def clear_space(self, link: int) -> None:
        """Waits until no job is left: afterwards the memory may go. A link that is not set is ignored."""

    def submit(
        self,
        to_peer: Int64Array,
        to_width_bytes: int,
        to_block_bytes: int,
        from_peer: Int64Array,
        from_width_bytes: int,
        from_block_bytes: int,
        layer: int,
    ) -> int:
        """Copy the runs, int64 [R, 5] each, of one layer: all `to_peer`, then all `from_peer`. Returns the ticket."""

    def wait(self, ticket: int) -> None:
        """Raises `CopyError` if the job failed (to the first who waits), `ValueError` if there is no such ticket."""

    def settle(self) -> None:
        """Waits until no job is left, and forgets failures."""

    def take_timings(self) -> bytes:
        """Of the jobs that ended since the last call, in order: records of `transport.base.COPY_TIMING`."""
