"""A process that shares cores with others, as an engine does, and counts the parts of its work that it has done:

python turn_taker.py TABLE_FD COUNTS_FD ACCOUNT NUM_CORES
"""

from __future__ import annotations

import mmap
import sys

import numpy as np

from swiftkv import _cpu

ROWS, WIDTH = 4096, 1024  # a few milliseconds, in chunks of microseconds


def main() -> None:
    table_fd, counts_fd, account, num_cores = map(int, sys.argv[1:])
    counts = memoryview(mmap.mmap(counts_fd, mmap.PAGESIZE)).cast("Q")
    x, weight = np.ones((ROWS, WIDTH), np.float32), np.ones(WIDTH, np.float32)
    at_x, at_weight = x.ctypes.data, weight.ctypes.data
    _cpu.set_num_threads(num_cores)
    turns = _cpu.Turns(table_fd, account, threads=num_cores, weight=1, max_share=1, num_cores=num_cores, num_ranks=1)
    turns.begin()
    while True:
        _cpu.rms_norm(at_x, ROWS, WIDTH, at_weight, _cpu.NormWeight.FLOAT32, 1e-6, _cpu.DType.F32, at_x)
        counts[account] += 1


if __name__ == "__main__":
    main()
