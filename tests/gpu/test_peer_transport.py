"""Two engines on one GPU: a lender in a process of its own, and a transport that reads and writes its pool."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("msgspec")  # rendezvous of pools

from swiftkv.cache.cuda_pool import CudaPool
from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.pool import Pool
from swiftkv.errors import TransferError
from swiftkv.policies import IoBackend
from swiftkv.shared_memory import make_memory, map_memory
from swiftkv.transport.base import COPY_TIMING, PeerHandle, Runs
from swiftkv.transport.peer import PeerTransport
from swiftkv.transport.rendezvous import find_pool
from tests.support.runs import move_blocks_reference

pytestmark = pytest.mark.gpu

GROUP = KVGroup((0, 1, 2), 2, 64, "bfloat16", 16)
NUM_BLOCKS = 64
WIDTH, BLOCK = GROUP.layer_block_bytes, GROUP.block_bytes

# Owns a pool whose byte i is i % 251, publishes it through the file store and says so, and answers each line on stdin
# with the sum of its bytes, until stdin ends.
LENDER = """
import sys
from pathlib import Path
import torch
from swiftkv.cache.cuda_pool import CudaPool
from swiftkv.transport.rendezvous import publish_pool
from tests.gpu.test_peer_transport import GROUP, NUM_BLOCKS
pool = CudaPool([(GROUP, NUM_BLOCKS)], torch.device("cuda", 0))
pool.tensor.copy_(torch.arange(pool.nbytes, device="cuda") % 251)
torch.cuda.synchronize()
publish_pool(Path(sys.argv[1]), pool)
print("published", flush=True)
for line in sys.stdin:
    print(int(pool.tensor.sum(dtype=torch.int64)), flush=True)
"""


@dataclass
class Lender:
    process: subprocess.Popen[str]
    handle: PeerHandle

    def sum(self) -> int:
        """Return the sum of all bytes of the lender's pool, as it sees them now."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("sum\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def kill(self) -> None:
        """Kill the lender, and return when it is gone."""
        gone = os.pidfd_open(self.process.pid)
        self.process.send_signal(signal.SIGKILL)
        assert select.select([gone], [], [], 60)[0]
        os.close(gone)
        self.process.wait()


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[Lender]:
    path = tmp_path / "store"
    process = subprocess.Popen(
        [sys.executable, "-c", LENDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "published\n", "the lender has ended; its standard error says why"
        yield Lender(process, find_pool(path, timeout_s=10))
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def pool() -> CudaPool:
    return CudaPool([(GROUP, NUM_BLOCKS)], torch.device("cuda", 0))


@pytest.fixture(params=["kernel", "direct"])
def io_backend(request: pytest.FixtureRequest) -> IoBackend:
    backend: IoBackend = request.param
    return backend


def lender_bytes() -> torch.Tensor:
    """The lender's pool as it starts, on the CPU."""
    return (torch.arange(NUM_BLOCKS * BLOCK) % 251).to(torch.uint8)


def runs(*rows: tuple[int, int, int, bool]) -> Runs:
    """Rows of (peer block, our first block or slot, count, staged) as runs of link 7."""
    table = [
        (7, peer * BLOCK, local * (WIDTH if staged else BLOCK), count, staged) for peer, local, count, staged in rows
    ]
    return Runs(np.array(table, np.int64).reshape(-1, 5), WIDTH, BLOCK)


def test_the_pool_is_zeros_and_exactly_its_blocks(pool: CudaPool) -> None:
    assert pool.nbytes == pool.tensor.numel() == NUM_BLOCKS * BLOCK
    assert not pool.tensor.any()


def test_a_pool_lies_on_a_device_as_it_does_on_the_host() -> None:
    windowed = KVGroup((3, 4), 1, 64, "bfloat16", 16, kind="window", window=64)
    groups = [(GROUP, 5), (windowed, 7)]
    device_pool, host_pool = CudaPool(groups, torch.device("cuda", 0)), Pool(groups)
    assert device_pool.regions == host_pool.regions
    assert device_pool.nbytes == host_pool.nbytes


def test_loads_and_stores_between_processes(lender: Lender, pool: CudaPool, io_backend: IoBackend) -> None:
    transport = PeerTransport(pool, io_backend)
    transport.attach(7, lender.handle)
    assert not Path(lender.handle.store_path).exists()
    torch.manual_seed(1)
    pool.tensor.random_(0, 256)
    expected_pool, expected_peer = pool.tensor.cpu(), lender_bytes()
    store, load = runs((3, 5, 4, False), (20, 0, 6, True)), runs((40, 9, 2, True), (1, 30, 2, False), (3, 50, 4, False))
    for layer in range(GROUP.num_layers):
        transport.wait(transport.submit(store, load, layer))
        for moved, is_store in ((store, True), (load, False)):
            move_blocks_reference(expected_pool, {7: expected_peer}, moved.runs, WIDTH, BLOCK, layer, is_store)
    transport.settle()
    assert torch.equal(pool.tensor.cpu(), expected_pool)
    assert lender.sum() == int(expected_peer.sum(dtype=torch.int64))
    timings = transport.take_timings()
    assert timings.dtype == COPY_TIMING
    assert timings["ticket"].tolist() == [1, 2, 3]
    assert timings["to_peer_bytes"].tolist() == [10 * WIDTH] * 3
    assert (timings["from_peer_s"] > 0).all()
    assert (timings["begin_s"] <= time.monotonic() + 1).all()
    transport.close()


def test_copies_follow_what_the_compute_stream_did_and_it_follows_them(
    lender: Lender, pool: CudaPool, io_backend: IoBackend
) -> None:
    """Nothing but events stands between a slow kernel, the store of what it wrote, the load of that, and its use."""
    transport = PeerTransport(pool, io_backend)
    transport.attach(7, lender.handle)
    transport.wait(transport.submit(runs((0, 0, 8, False)), runs((0, 8, 8, False)), 0))  # compiled, allocated
    transport.settle()
    region = pool.region_tensor(0)
    region[:8, 2] = 77
    assert region[:8, 2].clone().eq(77).all()  # loads the kernels used below: a load may wait for the device
    a = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(4):
        a = a @ a  # tens of milliseconds; the copies would be done long before it is
    before = torch.cuda.Event()
    before.record()
    region[:8, 1] = 77
    ticket = transport.submit(runs((0, 0, 8, False)), runs((0, 8, 8, False)), 1)
    transport.wait(ticket)
    seen = region[8:16, 1].clone()
    assert not before.query(), "the host waited: nothing was shown"
    assert seen.eq(77).all()
    exposures = transport.take_exposures()
    assert exposures["ticket"].tolist() == [1, ticket]
    assert exposures["exposed_s"][1] > 0
    transport.close()


def test_what_is_not_there_fails_when_it_is_waited_for_and_copies_nothing(
    lender: Lender, pool: CudaPool, io_backend: IoBackend
) -> None:
    transport = PeerTransport(pool, io_backend)
    one = runs((0, 0, 1, False))
    with pytest.raises(TransferError, match="not attached"):
        transport.wait(transport.submit(None, one, 0))
    transport.attach(7, lender.handle)
    for outside in (runs((NUM_BLOCKS, 0, 1, False)), runs((0, NUM_BLOCKS - 1, 2, False))):
        ticket = transport.submit(None, outside, 0)
        with pytest.raises(TransferError, match="outside of the pools"):
            transport.wait(ticket)
        transport.wait(ticket)  # said once
    with pytest.raises(TransferError, match="no layer block 3"):
        transport.wait(transport.submit(None, one, GROUP.num_layers))
    transport.settle()
    assert not pool.tensor.any()
    transport.wait(transport.submit(None, None, 0))  # nothing to copy is nothing wrong
    transport.detach(7)
    with pytest.raises(TransferError, match="not attached"):
        transport.wait(transport.submit(None, one, 0))
    transport.close()


def test_host_memory_is_read_until_the_transport_is_closed(pool: CudaPool, io_backend: IoBackend) -> None:
    """Then the device has let go of it, so that it can be registered anew."""
    nbytes = NUM_BLOCKS * BLOCK
    fd = make_memory("host", nbytes)
    memory = map_memory(fd, nbytes)
    os.close(fd)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    host.copy_(lender_bytes())
    load = runs((NUM_BLOCKS - 4, 9, 4, False), (20, 0, 6, True))
    for _ in range(2):
        transport = PeerTransport(pool, io_backend)
        transport.attach_host(7, memory)
        pool.tensor.zero_()
        expected = pool.tensor.cpu()
        for layer in range(GROUP.num_layers):
            transport.wait(transport.submit(None, load, layer))
            move_blocks_reference(expected, {7: host}, load.runs, WIDTH, BLOCK, layer, False)
        transport.settle()
        assert torch.equal(pool.tensor.cpu(), expected)
        ticket = transport.submit(None, runs((NUM_BLOCKS - 3, 0, 4, False)), 0)
        with pytest.raises(TransferError, match="outside of the pools"):
            transport.wait(ticket)
        transport.close()
    assert torch.equal(host, lender_bytes())


def test_a_lender_that_is_gone_cannot_be_attached(lender: Lender, pool: CudaPool) -> None:
    lender.kill()
    transport = PeerTransport(pool)
    with pytest.raises(TransferError, match="cannot be mapped"):
        transport.attach(7, lender.handle)
    assert not pool.tensor.any()  # and the device is fine
    transport.close()


# The driver decides whether a mapping outlives the process that made it, so this runs in a process of its own: a fault
# would take its CUDA context along.
BORROWER = """
import json, sys
import torch
from swiftkv.cache.cuda_pool import CudaPool
from swiftkv.errors import TransferError
from swiftkv.transport.base import PeerHandle
from swiftkv.transport.peer import PeerTransport
from tests.gpu.test_peer_transport import GROUP, NUM_BLOCKS, lender_bytes, runs
pool = CudaPool([(GROUP, NUM_BLOCKS)], torch.device("cuda", 0))
transport = PeerTransport(pool, sys.argv[1])
transport.attach(7, PeerHandle(**json.loads(sys.argv[2])))
load = runs((0, 0, NUM_BLOCKS, False))
transport.wait(transport.submit(None, load, 0))
transport.settle()
print("attached", flush=True)
sys.stdin.readline()  # the lender is dead now
try:
    for layer in range(GROUP.num_layers):
        transport.wait(transport.submit(None, load, layer))
        transport.wait(transport.submit(load, None, layer))
    transport.settle()
    same = torch.equal(pool.tensor.cpu(), lender_bytes())
    print("went on", "with the bytes of before" if same else "with other bytes", flush=True)
except TransferError as error:
    print("raised TransferError", error, flush=True)
transport.detach(7)
pool.region_tensor(0).fill_(9)
assert pool.region_tensor(0).eq(9).all()
print("serves", flush=True)
"""


def test_a_borrower_outlives_a_lender_that_is_killed(
    lender: Lender, io_backend: IoBackend, record_property: Callable[[str, object], None]
) -> None:
    borrower = subprocess.Popen(
        [sys.executable, "-c", BORROWER, io_backend, json.dumps(asdict(lender.handle))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert borrower.stdout is not None
        assert borrower.stdout.readline() == "attached\n", borrower.communicate()
        lender.kill()
        out, errors = borrower.communicate("dead\n", timeout=120)
    finally:
        borrower.kill()
        borrower.wait()
    print(f"{io_backend}: after the lender's death the borrower {out!r}")  # to be seen with -s
    record_property("borrower", out)
    assert borrower.returncode == 0, errors
    assert out.splitlines()[-1] == "serves"
