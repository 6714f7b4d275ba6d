"""Measure the bandwidth of moving one layer of borrowed blocks between two processes:

    python benchmarks/streaming.py [--mib 64] [--seconds 2]

A layer's layer blocks lie one block apart in the lender's pool, in runs of consecutive blocks at random places, and
side by side in the layer-stream cache. The two transports are compared with one plain memcpy of as many bytes. Prints
the median and the best in GB/s of jobs of `--mib` MiB; each job takes another layer than the one before.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.pool import Pool
from swiftkv.transport.base import HostPools, Runs, Transport
from swiftkv.transport.p2p import serve_p2p
from swiftkv.transport.rendezvous import find_pool, publish_pool
from swiftkv.transport.select import open_transport

RUN_LENGTHS = (1, 8, 64)
GROUP = KVGroup(tuple(range(8)), 8, 128, "bfloat16", 16)  # layer blocks of 64 KiB, as Qwen3-0.6B has
TRANSPORTS = ("shm, 1 thread", "shm, 2 threads", "gloo p2p")


def make_runs(num_blocks: int, run_length: int) -> Runs:
    """Return all of the lender's blocks once, cut into runs that come in random order."""
    starts = np.random.default_rng(run_length).permutation(np.arange(0, num_blocks, run_length))
    rows = np.zeros((len(starts), 5), np.int64)
    rows[:, 1] = starts * GROUP.block_bytes
    rows[:, 2] = np.arange(len(starts)) * run_length * GROUP.layer_block_bytes
    rows[:, 3] = run_length
    rows[:, 4] = 1
    return Runs(rows, GROUP.layer_block_bytes, GROUP.block_bytes)


def measure(call: Callable[[int], object], num_bytes: int, seconds: float) -> str:
    times_s: list[float] = []
    call(0)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s or len(times_s) < 5:
        begin_s = time.monotonic()
        call(len(times_s) % GROUP.num_layers)
        times_s.append(time.monotonic() - begin_s)
    return f"{num_bytes / np.median(times_s) / 1e9:6.1f} {num_bytes / min(times_s) / 1e9:6.1f}"


def copy(transport: Transport, runs: Runs, to_peer: bool) -> Callable[[int], None]:
    to, from_ = (runs, None) if to_peer else (None, runs)
    return lambda layer: transport.wait(transport.submit(to, from_, layer))


def memcpy(own: Pool, lent: np.ndarray, num_bytes: int, to_peer: bool) -> Callable[[int], None]:
    def call(layer: int) -> None:
        mine, theirs = own.tensor.numpy()[:num_bytes], lent[layer * num_bytes :][:num_bytes]
        np.copyto(theirs, mine) if to_peer else np.copyto(mine, theirs)

    return call


def lend(num_blocks: int, store_paths: list[Path]) -> None:
    pool = Pool([(GROUP, num_blocks)])
    pool.tensor.fill_(1)
    for number, path in enumerate(store_paths):
        published = publish_pool(path, pool)
        if TRANSPORTS[number].startswith("gloo"):
            serve_p2p(pool, published, connect_timeout_s=60)
    sys.stdin.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="MiB of each job")
    parser.add_argument("--seconds", type=float, default=2, help="seconds for each figure")
    parser.add_argument("--lend", type=Path, nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    num_blocks = (arguments.mib << 20) // GROUP.layer_block_bytes
    num_blocks -= num_blocks % max(RUN_LENGTHS)
    if arguments.lend:
        lend(num_blocks, arguments.lend)
        return
    num_bytes = num_blocks * GROUP.layer_block_bytes
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / str(number) for number in range(len(TRANSPORTS))]
        command = [sys.executable, __file__, "--mib", str(arguments.mib), "--lend", *map(str, paths)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as lender:
            report(paths, num_blocks, num_bytes, arguments.seconds)
            lender.kill()


def report(paths: list[Path], num_blocks: int, num_bytes: int, seconds: float) -> None:
    own = Pool([(GROUP, -(-num_blocks // GROUP.num_layers))])
    own.tensor.fill_(2)
    handles = [find_pool(path, timeout_s=60) for path in paths]
    assert isinstance(handles[0].memory, HostPools)
    (memory,) = handles[0].memory.ranks
    lent = np.memmap(f"/proc/{memory.pid}/fd/{memory.fd}", np.uint8, "r+", shape=(handles[0].nbytes,))
    transports = [open_transport("shm", own), open_transport("shm", own, num_threads=2), open_transport("p2p", own)]
    for transport, handle in zip(transports, handles, strict=True):
        transport.attach(0, handle)
    print(f"GB/s, median and best; {num_blocks} layer blocks of {GROUP.layer_block_bytes >> 10} KiB")
    print(f"{'':24}{'memcpy':>16}" + "".join(f"{name:>16}" for name in TRANSPORTS))
    for to_peer in (False, True):
        plain = measure(memcpy(own, lent, num_bytes, to_peer), num_bytes, seconds)
        for run_length in RUN_LENGTHS:
            runs = make_runs(num_blocks, run_length)
            figures = [measure(copy(transport, runs, to_peer), num_bytes, seconds) for transport in transports]
            label = f"{'store' if to_peer else 'load'}, runs of {run_length}"
            print(f"{label:24}" + "".join(f"{figure:>16}" for figure in (plain, *figures)), flush=True)
    for transport in transports:
        transport.close()


if __name__ == "__main__":
    main()
