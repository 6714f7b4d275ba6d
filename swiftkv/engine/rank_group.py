"""The ranks of one tensor-parallel engine as a `torch.distributed` group of their own: gloo on the CPU, NCCL on GPUs.

They find each other through a file in a directory that only their user can read. Both libraries connect through ports
of the loopback interface, which accept any process that speaks their protocol. So over each connection of the group,
both ends first prove that they read that file. (NCCL makes further connections of its own when it needs them.)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swiftkv.errors import EngineError
from swiftkv.transport.rendezvous import gloo_group, is_proof, new_secret, open_store, proof

_CONNECT_TIMEOUT_S = 300.0  # ranks start together, on a machine that may be busy
_LOAD_TIMEOUT_S = 3600.0  # long: the node that starts the engine limits the load itself
_SECRET_KEY = "secret"


class RankGroup:
    """A `Communicator`; see there."""

    def __init__(self, store_path: Path, rank: int, size: int, device: torch.device) -> None:
        """Returns when all `size` ranks have met at `store_path`. Raises `EngineError` if they do not, or if a process
        that connects is none of them; `OSError` if the file cannot be made.
        """
        self.rank = rank
        self.size = size
        self._device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with _gone_is_an_engine_error():
            store = open_store(store_path, _CONNECT_TIMEOUT_S)
            if rank == 0:
                store.set(_SECRET_KEY, new_secret())
            connect = _nccl_group if device.type == "cuda" else gloo_group
            self._group = connect(store, rank, size, _CONNECT_TIMEOUT_S)
            secret = store.get(_SECRET_KEY).decode()
        self._prove(secret)
        self._bound_waits(_LOAD_TIMEOUT_S)

    def begin(self, deadline_s: float, told: Sequence[int] = ()) -> list[list[int]]:
        """Wait until every rank has called this, and return the numbers that each one told, equally many.

        From then on no call waits longer than `deadline_s` for another rank.
        """
        gathered = self.all_gather(torch.tensor([0, *told], dtype=torch.int64, device=self._device)).cpu()
        self._bound_waits(deadline_s)
        numbers: list[list[int]] = gathered[:, 1:].tolist()
        return numbers

    def all_gather(self, part: Tensor) -> Tensor:
        gathered = part.new_empty((self.size, *part.shape))
        with _gone_is_an_engine_error():
            # The public `allgather` takes a list of tensors, and copies them once more.
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

    def _prove(self, secret: str) -> None:
        """Prove to every other rank that we know the secret, and check the proof of each. Raises `EngineError`."""
        shown = torch.stack([proof(secret, self.rank, other) for other in range(self.size)])
        proofs = self.all_to_all(shown.to(self._device)).cpu()
        for other in range(self.size):
            if not is_proof(proofs[other], secret, other, self.rank):
                raise EngineError(f"the process that connected as rank {other} is not of this engine")

    def _bound_waits(self, timeout_s: float) -> None:
        # Private because older torch has no public `set_timeout`, and NCCL ignores the time-out of a single call.
        self._group._set_default_timeout(timedelta(seconds=timeout_s))


def _nccl_group(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # The engine watches its ranks itself, and may be idle for long. NCCL's watchdog would abort every rank that waits
    # for a silent one, rank 0 included, and then nobody could say which rank was silent.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)  # torch.distributed itself sets it so: it has no public name
    return nccl(store, rank, size, options)


@contextlib.contextmanager
def _gone_is_an_engine_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed raises nothing more exact
        raise EngineError(
            f"a rank of this engine has ended, or does not answer: {str(error).splitlines()[0]}"
        ) from error
