"""How two engines find each other's memory: a `torch.distributed` file store in a directory that only they can read.

One file per attachment, at a path that both sides know and that names both incarnations. Nothing listens on a socket.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from swiftkv.errors import TransferError
from swiftkv.transport.base import DevicePool, PeerHandle, SharedPool

_POOL_KEY = "pool"


def open_store(store_path: Path, timeout_s: float = 10.0) -> Any:
    """The file store at `store_path`; what waits for a key that nobody sets raises `RuntimeError` in the end."""
    store: Any = dist.FileStore(str(store_path))  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def publish_pool(store_path: Path, pool: SharedPool | DevicePool) -> PeerHandle:
    """The lender's side: say where `pool` is to whoever looks at `store_path`. Returns what the borrower will find."""
    if isinstance(pool, DevicePool):
        handle = PeerHandle(os.getpid(), -1, 0, pool.nbytes, str(store_path), pool.ipc_handle().hex())
    else:
        handle = PeerHandle(os.getpid(), pool.fd, os.fstat(pool.fd).st_ino, pool.nbytes, str(store_path))
    open_store(store_path).set(_POOL_KEY, msgspec.json.encode(handle).decode())
    return handle


def find_pool(store_path: Path, timeout_s: float) -> PeerHandle:
    """The borrower's side: wait until a lender published its pool. The file stays until a transport attached.

    Raises `TransferError` if nobody does in time, or if it is not a pool.
    """
    try:
        handle = msgspec.json.decode(open_store(store_path, timeout_s).get(_POOL_KEY), type=PeerHandle)
    except (RuntimeError, msgspec.MsgspecError) as error:  # the store raises nothing more exact
        raise TransferError(f"no pool was published at {store_path}: {error}") from error
    if handle.store_path != str(store_path):
        raise TransferError(f"{store_path} holds the pool of {handle.store_path}")
    return handle


def withdraw_pool(store_path: Path) -> None:
    """Either side: the rendezvous is over, whatever came of it."""
    store_path.unlink(missing_ok=True)
