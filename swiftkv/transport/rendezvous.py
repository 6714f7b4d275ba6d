"""The rendezvous by which two engines find each other's memory.

It is a `torch.distributed` file store in a directory that only they can read. Each attachment has a file, whose path
both sides know and which names both incarnations. Nothing listens on a socket.

A library of torch may then listen on a port of its own, to which any process on the machine can connect. So each side
first proves, with a secret from the file, that it could read the file.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from swiftkv.errors import TransferError
from swiftkv.transport.base import DevicePool, HostMemory, HostPools, IpcHandle, PeerHandle, SharedPool

_POOL_KEY = "pool"
_SECRET_BYTES = 32
PROOF_BYTES = 32

_log = logging.getLogger(__name__)


def open_store(store_path: Path, timeout_s: float = 10.0) -> Any:
    """Open the file store at `store_path`. Waiting longer than `timeout_s` for a key raises `RuntimeError`.

    Raises `OSError` if the file cannot be made.
    """
    store_path.touch(mode=0o600)  # fails at once where the store itself would retry for minutes
    store: Any = dist.FileStore(str(store_path))  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def gloo_group(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Return a gloo group over the loopback interface, as `rank` of `size` through `store`; no default group is made.

    `timeout_s` bounds the time to connect and the wait of a collective. Raises `RuntimeError` if ranks do not connect.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo has no public argument for it
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs are out of date
    return gloo(store, rank, size, timedelta(seconds=timeout_s))


def publish_pool(
    store_path: Path,
    pool: SharedPool | DevicePool,
    other_ranks: Sequence[HostMemory] = (),
    *,
    is_mapped: bool = True,
) -> PeerHandle:
    """Publish the lender's `pool` at `store_path`, and return the handle that the borrower will find.

    `other_ranks` are the pools of the lender's other ranks, laid out like `pool`. With `is_mapped`, the borrower will
    map the pool.

    Raises `TransferError` if this machine does not allow mapping GPU memory, or if the file cannot be written: the disk
    is full, or the directory is gone.
    """
    try:
        handle = handle_of(store_path, pool, other_ranks, is_mapped=is_mapped)
        open_store(store_path).set(_POOL_KEY, msgspec.json.encode(handle).decode())
    except (OSError, RuntimeError) as error:  # the store raises nothing more exact
        withdraw_pool(store_path)  # it may hold half a record
        reason = str(error).splitlines()[0]
        raise TransferError(f"the pool cannot be published in {store_path.parent}: {reason}") from error
    return handle


def handle_of(
    store_path: Path,
    pool: SharedPool | DevicePool,
    other_ranks: Sequence[HostMemory] = (),
    *,
    is_mapped: bool = True,
) -> PeerHandle:
    """Return a borrower's handle of `pool`, which belongs to this process; see `publish_pool`.

    Raises `CudaRuntimeError` if no other process may map the pool.
    """
    memory: HostPools | IpcHandle | None
    if not isinstance(pool, DevicePool):
        status = os.fstat(pool.fd)
        memory = HostPools((HostMemory(os.getpid(), pool.fd, status.st_dev, status.st_ino), *other_ranks))
    else:
        memory = IpcHandle(pool.ipc_handle().hex()) if is_mapped else None
    return PeerHandle(os.getpid(), pool.nbytes, str(store_path), new_secret(), memory)


def find_pool(store_path: Path, timeout_s: float) -> PeerHandle:
    """Wait until a lender has published its pool for this borrower. The file stays until a transport has attached.

    Raises `TransferError` if that does not happen in time, or if the file has no handle of a pool.
    """
    try:
        handle = msgspec.json.decode(open_store(store_path, timeout_s).get(_POOL_KEY), type=PeerHandle)
    except (OSError, RuntimeError, msgspec.MsgspecError) as error:  # the store raises nothing more exact
        raise TransferError(f"no pool was published at {store_path}: {error}") from error
    if handle.store_path != str(store_path):
        raise TransferError(f"{store_path} holds the pool of {handle.store_path}")
    return handle


def withdraw_pool(store_path: Path) -> None:
    """Remove the rendezvous file, whatever the outcome. Either side may call this."""
    try:
        store_path.unlink(missing_ok=True)
    except OSError as error:  # it is removed with the directory
        _log.warning("cannot remove a rendezvous file: %s", error)


def new_secret() -> str:
    """Return a fresh secret in hexadecimal."""
    return secrets.token_hex(_SECRET_BYTES)


def proof(secret: str, sender: int, receiver: int) -> torch.Tensor:
    """Return the proof of rank `sender` for rank `receiver`, uint8 [PROOF_BYTES]; it reveals no other proof."""
    digest = hashlib.blake2b(f"{sender} to {receiver}".encode(), key=bytes.fromhex(secret), digest_size=PROOF_BYTES)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def is_proof(shown: torch.Tensor, secret: str, sender: int, receiver: int) -> bool:
    """Return whether rank `sender` has shown rank `receiver` that it knows the secret."""
    return hmac.compare_digest(shown.numpy().tobytes(), proof(secret, sender, receiver).numpy().tobytes())
