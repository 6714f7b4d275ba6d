"""A process that shares a GPU with others, as an engine does, and counts its steps:

python gpu_turn_taker.py TABLE_FD COUNTS_FD ACCOUNT WEIGHT

There need not be a GPU: a step only notes whose it is, for a while, and counts in the last cell if another one noted
something meanwhile.
"""

from __future__ import annotations

import mmap
import sys

STEP_NS = 5_000_000  # what a step is charged, however long it takes
NUM_LOOKS = 1000  # within a step: a fraction of a millisecond
HOLDER, OVERLAPS = -2, -1


def main() -> None:
    from swiftkv import _cpu  # not there on every platform, where tests import the constants above

    table_fd, counts_fd, account, weight = map(int, sys.argv[1:])
    counts = memoryview(mmap.mmap(counts_fd, mmap.PAGESIZE)).cast("Q")
    turns = _cpu.DeviceTurns(table_fd, account, weight, 1.0)
    while True:
        turns.wait()
        counts[HOLDER] = account
        if any(counts[HOLDER] != account for _ in range(NUM_LOOKS)):
            counts[OVERLAPS] += 1
        counts[account] += 1
        turns.charge(STEP_NS)


if __name__ == "__main__":
    main()
