"""The rate at which this machine copies KV between two pools, for all lending_*.py programs."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np

from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.pool import Pool
from swiftkv.transport.base import Runs
from swiftkv.transport.rendezvous import handle_of
from swiftkv.transport.shm import ShmTransport


def copy_rate(group: KVGroup, num_blocks: int, num_threads: int = 1) -> tuple[float, float]:
    """Measure one layer's load and store with nothing else running; return (load, store) in bytes a second.

    The copies are those of the layer stream: from consecutive blocks of the peer's pool to adjacent layer blocks of
    ours, and back.
    """
    peer, own = Pool([(group, num_blocks)]), Pool([(group, -(-num_blocks // group.num_layers))])
    peer.tensor.fill_(1)
    own.tensor.fill_(2)
    transport = ShmTransport(own, num_threads)
    transport.attach(0, handle_of(Path("unused"), peer))
    rows = np.array([[0, 0, 0, num_blocks, 1]], np.int64)
    runs = Runs(rows, group.layer_block_bytes, group.block_bytes)
    rates = []
    for to_peer, from_peer in ((None, runs), (runs, None)):
        times_s = []
        for number in range(2 * group.num_layers):
            begin_s = time.perf_counter()
            transport.wait(transport.submit(to_peer, from_peer, number % group.num_layers))
            times_s.append(time.perf_counter() - begin_s)
        rates.append(runs.num_bytes / statistics.median(times_s))
    transport.close()
    return rates[0], rates[1]
