"""The few calls of CUDA that torch does not offer: separate allocations, IPC handles, 2-D copies.

They act on torch's current device and context, through the runtime library that torch has loaded. (NVIDIA's
`cuda.bindings` would have to be kept at torch's version of CUDA, for only seven functions.) Addresses are plain
integers. The process that made a handle cannot open it itself.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import cache

import torch
from torch import Tensor

from swiftkv.arithmetic import ceil_div

IPC_HANDLE_BYTES = 64

_GRANULARITY_BYTES = 2 << 20  # smaller allocations share blocks of the runtime, which an IPC handle exposes as a whole

_IPC_LAZY_ENABLE_PEER_ACCESS = 1
_HOST_REGISTER_PORTABLE_MAPPED = 3
_MEMCPY_DEFAULT = 4  # the runtime infers the direction from the addresses


class CudaRuntimeError(RuntimeError):
    """A failed call of the CUDA runtime: its name, CUDA's name for the error, and what that means."""


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * IPC_HANDLE_BYTES)]


class DeviceMemory:
    """A separate `cudaMalloc`, so that an IPC handle names its first byte. It is freed with the last tensor over it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Allocate zeros. Raises `CudaRuntimeError` if the device has no `nbytes` bytes left."""
        self.nbytes = nbytes
        self.device = device
        address = ctypes.c_void_p()
        with torch.cuda.device(device):
            allocated = ceil_div(nbytes, _GRANULARITY_BYTES) * _GRANULARITY_BYTES
            _call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(allocated))
            self.address = int(address.value or 0)
            weakref.finalize(self, _free, self.address, device).atexit = False  # at the end, the driver frees it
            _call("cudaMemset", address, 0, ctypes.c_size_t(nbytes))
            torch.cuda.synchronize()  # torch's streams do not wait for the stream of this call

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def tensor(self) -> Tensor:
        """Return the memory as uint8 `[nbytes]`, a view that keeps it allocated."""
        tensor = torch.as_tensor(self, device=self.device)
        assert tensor.data_ptr() == self.address, "torch copied instead of viewing"
        return tensor

    def ipc_handle(self) -> bytes:
        """Return the `IPC_HANDLE_BYTES` bytes with which another process opens this memory."""
        handle = _IpcHandle()
        with torch.cuda.device(self.device):
            _call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(self.address))
        return bytes(handle)


class HostRegistration:
    """Host memory that is page-locked and mapped for a device, until `end`. It must stay mapped in this process."""

    def __init__(self, memory: memoryview, device: torch.device) -> None:
        """Lock all pages of `memory`, which takes as long as touching them.

        Raises `CudaRuntimeError` if they cannot be locked, or the device cannot read them.
        """
        self._memory = memory
        self._device = device
        self._host_address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
        address = ctypes.c_void_p()
        with torch.cuda.device(device):
            begin = ctypes.c_void_p(self._host_address)
            _call(
                "cudaHostRegister", begin, ctypes.c_size_t(memory.nbytes), ctypes.c_uint(_HOST_REGISTER_PORTABLE_MAPPED)
            )
            try:
                _call("cudaHostGetDevicePointer", ctypes.byref(address), begin, ctypes.c_uint(0))
            except CudaRuntimeError:
                self.end()
                raise
        self.address = int(address.value or 0)
        """The address of the first byte for the device."""

    def end(self) -> None:
        """Unlock the memory. No copy may be using it."""
        with torch.cuda.device(self._device):
            _call("cudaHostUnregister", ctypes.c_void_p(self._host_address))


def open_ipc_handle(handle: bytes, device: torch.device) -> int:
    """Map another process's memory for use on `device`, with peer access if it lies on another; returns the address.

    Opening a handle again gives the same address; each call needs a `close_ipc_handle`.
    Raises `CudaRuntimeError` if that process is gone, or the devices cannot reach each other.
    """
    assert len(handle) == IPC_HANDLE_BYTES
    address = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call(
            "cudaIpcOpenMemHandle",
            ctypes.byref(address),
            _IpcHandle.from_buffer_copy(handle),
            ctypes.c_uint(_IPC_LAZY_ENABLE_PEER_ACCESS),
        )
    return int(address.value or 0)


def close_ipc_handle(address: int, device: torch.device) -> None:
    """Unmap memory that `open_ipc_handle` mapped. No copy may be using it."""
    with torch.cuda.device(device):
        _call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))


def copy_2d(
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: torch.cuda.Stream
) -> None:
    """Copy `height` rows of `width` bytes between device addresses, rows `pitch` bytes apart, in order on `stream`."""
    _call(
        "cudaMemcpy2DAsync",
        ctypes.c_void_p(target),
        ctypes.c_size_t(target_pitch),
        ctypes.c_void_p(source),
        ctypes.c_size_t(source_pitch),
        ctypes.c_size_t(width),
        ctypes.c_size_t(height),
        ctypes.c_int(_MEMCPY_DEFAULT),
        ctypes.c_void_p(stream.cuda_stream),
    )


def _free(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        _call("cudaFree", ctypes.c_void_p(address))


def _call(name: str, *arguments: object) -> None:
    runtime = _runtime()
    code = getattr(runtime, name)(*arguments)
    if code != 0:
        runtime.cudaGetLastError()  # otherwise torch would blame its own next launch
        error = runtime.cudaGetErrorName(code).decode()
        raise CudaRuntimeError(f"{name}: {error}: {runtime.cudaGetErrorString(code).decode()}")


@cache
def _runtime() -> ctypes.CDLL:
    """Return the library that torch has already loaded; dlopen finds it by its name."""
    assert torch.version.cuda is not None, "this torch has no CUDA"
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    for name in ("cudaGetErrorName", "cudaGetErrorString"):
        getattr(runtime, name).restype = ctypes.c_char_p
    return runtime


def bytes_beside_torch(device: torch.device) -> int | None:
    """Return the bytes that this process holds on `device` outside torch's allocator, if the driver knows them."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        used = [p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    if not used or used[0] is None:  # in a container, the driver knows processes by other ids
        return None
    return max(0, int(used[0]) - torch.cuda.memory_reserved(device))
