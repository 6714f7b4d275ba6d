"""A process that computes in turns with others, as an engine does, and counts the turns' parts that it was given:

python turn_taker.py TABLE_FD COUNTS_FD SLOT
"""

from __future__ import annotations

import mmap
import sys
import time

from swiftkv._cpu import Turns

PART_S = 0.001


def main() -> None:
    table_fd, counts_fd, slot = map(int, sys.argv[1:])
    counts = memoryview(mmap.mmap(counts_fd, mmap.PAGESIZE)).cast("Q")
    turns = Turns(table_fd, slot, threads=1, weight=1, max_share=1, num_cores=1, num_ranks=1)
    turns.begin()
    while True:
        until_s = time.perf_counter() + PART_S
        while time.perf_counter() < until_s:
            pass
        turns.check()
        counts[slot] += 1


if __name__ == "__main__":
    main()
