"""The ranks of one tensor-parallel engine as a `torch.distributed` group of their own: gloo on the CPU, NCCL on GPUs.

They find each other through a file in a directory that only their user can read. Both libraries connect through ports
of the loopback interface that nothing else is told of.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swiftkv.errors import EngineError
from swiftkv.transport.rendezvous import open_store

_CONNECT_TIMEOUT_S = 300.0  # ranks start together, on a machine that may be busy
_NO_TIMEOUT = timedelta(days=365)  # a rank that is stopped is waited for; one that died is known to be dead


class RankGroup:
    """A `Communicator`; see there."""

    def __init__(self, store_path: Path, rank: int, size: int, device: torch.device) -> None:
        """Returns when all `size` ranks have come to `store_path`. Raises `EngineError` if they do not."""
        self.rank = rank
        self.size = size
        self._device = device
        with _gone_is_an_engine_error():
            store = open_store(store_path, _CONNECT_TIMEOUT_S)
            self._group = (_nccl if device.type == "cuda" else _gloo)(store, rank, size, device)
            self.barrier()
        self._group._set_default_timeout(_NO_TIMEOUT)

    def all_gather(self, part: Tensor) -> Tensor:
        gathered = part.new_empty((self.size, *part.shape))
        with _gone_is_an_engine_error():
            self._group._allgather_base(gathered.view(-1), part.view(-1)).wait()
        return gathered

    def all_to_all(self, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts)
        with _gone_is_an_engine_error():
            self._group.alltoall_base(received, parts, [], []).wait()
        return received

    def gather(self, part: Tensor) -> Tensor | None:
        gathered = part.new_empty((self.size, *part.shape)) if self.rank == 0 else None
        options: Any = dist.GatherOptions()
        options.rootRank = 0
        with _gone_is_an_engine_error():
            outputs = [] if gathered is None else [list(gathered.unbind())]
            self._group.gather(outputs, [part], options).wait()
        return gathered

    def barrier(self) -> None:
        """Returns when every rank is here."""
        self.all_gather(torch.zeros(1, device=self._device)).cpu()


def _gloo(store: Any, rank: int, size: int, device: torch.device) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs know nothing of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._threads = 2  # with one, a message takes 2 ms
    options._timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(device)
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _NO_TIMEOUT
    return nccl(store, rank, size, options)


@contextlib.contextmanager
def _gone_is_an_engine_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed raises nothing more exact
        raise EngineError(f"a rank of this engine has gone: {str(error).splitlines()[0]}") from error
