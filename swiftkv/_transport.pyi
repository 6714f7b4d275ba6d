"""Copies between pools that are mapped into this process. Memory is passed as addresses, which must stay valid."""

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

class CopyError(RuntimeError):
    """A job named bytes outside its spaces; nothing of it was copied. The second argument is the run's link."""

    args: tuple[str, int | None]

class CopyEngine:
    """A queue of copy jobs, done in order by `num_threads` threads, which share the rows of one job at a time.

    The engine remembers the timings of the last `max_timings` jobs. Its destructor waits for submitted jobs.
    """

    def __init__(self, address: int, nbytes: int, num_threads: int = 1, max_timings: int = 4096) -> None:
        """`address`, `nbytes`: the local pool. Raises `ValueError` unless `num_threads` is 1 to 256, and for bytes at
        address 0 or past the end of all memory."""

    def set_space(self, link: int, address: int, nbytes: int) -> None:
        """Set the peer's pool of a link, after waiting until no job is left.

        Raises `ValueError` for bytes at address 0 or past the end of all memory.
        """

    def clear_space(self, link: int) -> None:
        """Forget a link's pool, if it has one, after waiting until no job is left. The pool may then be unmapped."""

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
        """Wait for a job. Raises `CopyError` if it failed (to the first caller), `ValueError` for an unknown ticket."""

    def settle(self) -> None:
        """Wait until no job is left, and forget failures."""

    def take_timings(self) -> bytes:
        """Return the timings of jobs that ended since the last call: records of `transport.base.COPY_TIMING`."""
