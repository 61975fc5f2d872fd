"""Memory of the host into which a GPU copies while it computes.

`train/checkpoints/staging.py` keeps some from one save to the next. A copy into memory that the
system may move waits for the GPU and passes through a buffer of the driver's; into memory that is
pinned it runs beside kernels, at the speed of the bus.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process


def host_buffer(size: int) -> Tensor:
    """Memory of so many bytes: (size,), uint8; pinned where the process has a GPU.

    Registered, not allocated as pinned: PyTorch's allocator would round the size up to a power of
    two, and never give it back. Pages are pinned at about 2 GB/s, once. Where the system refuses
    (`ulimit -l`), the memory serves all the same, and copies into it are slower.
    """
    buffer = torch.empty(size, dtype=torch.uint8)
    if size and torch.cuda.is_available():
        _pin(buffer, torch.cuda.cudart())
    return buffer


def _pin(buffer: Tensor, runtime: object) -> bool:
    """Register a buffer with CUDA for as long as it lives; whether that was allowed."""
    register: Callable[..., object] = runtime.cudaHostRegister  # type: ignore[attr-defined]
    release: Callable[..., object] = runtime.cudaHostUnregister  # type: ignore[attr-defined]
    address = buffer.data_ptr()
    if int(register(address, buffer.numel(), _PORTABLE)):  # type: ignore[call-overload]
        return False
    weakref.finalize(buffer, release, address).atexit = False  # not after CUDA is gone
    return True
