"""A pool that cannot be published is an error at once, and no half of a record is left."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from swiftkv.errors import TransferError
from swiftkv.kernels.cuda_runtime import CudaRuntimeError
from swiftkv.transport.rendezvous import find_pool, publish_pool
from tests.support.lender import pool_of


def test_a_directory_that_is_gone_is_an_error_at_once(tmp_path: Path) -> None:
    """torch's store alone would try for five minutes."""
    for act in (lambda: publish_pool(tmp_path / "gone" / "store", pool_of(4096)), lambda: find_pool(GONE, 60)):
        with pytest.raises(TransferError, match="No such file or directory"):
            act()


class UnmappedPool:
    """A pool on a GPU, on a system without CUDA IPC."""

    nbytes = 4096
    tensor = torch.empty(0)

    def ipc_handle(self) -> bytes:
        raise CudaRuntimeError("cudaIpcGetMemHandle: cudaErrorNotSupported: operation not supported")


def test_a_pool_that_nobody_can_map_is_an_error_and_serves_those_who_map_nothing(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="cudaErrorNotSupported"):
        publish_pool(tmp_path / "store", UnmappedPool())
    assert not (tmp_path / "store").exists()
    published = publish_pool(tmp_path / "store", UnmappedPool(), is_mapped=False)
    assert find_pool(tmp_path / "store", 60) == published


GONE = Path("/nonexistent/store")


@contextmanager
def full_file_system(directory: Path) -> Iterator[None]:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(directory)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no small file system can be mounted: {mounted.stderr.decode()}")
    try:
        (directory / "everything").write_bytes(bytes(4096))
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_file_system_that_is_full_is_an_error_and_no_reason_not_to_try_again(tmp_path: Path) -> None:
    pool = pool_of(4096)
    with full_file_system(tmp_path):
        with pytest.raises(TransferError, match="No space left on device"):
            publish_pool(tmp_path / "store", pool)
        assert not (tmp_path / "store").exists()
        (tmp_path / "everything").unlink()
        published = publish_pool(tmp_path / "store", pool)
        assert find_pool(tmp_path / "store", 60) == published
