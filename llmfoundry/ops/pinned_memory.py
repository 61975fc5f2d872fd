"""Memory of the host into which a GPU copies while it computes.

`checkpoint/dcp.py` keeps some from one save to the next. A copy into memory that the
system may move waits for the GPU and passes through a buffer of the driver's; into memory that is
pinned it runs beside kernels, at the speed of the bus.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process


def host_buffer(size: int) -> memoryview:
    """Memory of so many bytes, pinned where the process has a GPU; freed with the last view of it.

    Registered, not allocated as pinned: PyTorch's allocator would round the size up to a power of
    two, and never give it back. Pages are pinned at about 2 GB/s, once. Where the system refuses
    (`ulimit -l`), the memory serves all the same, and copies into it are slower.
    """
    array = torch.empty(size, dtype=torch.uint8).numpy()
    if size and torch.cuda.is_available():
        runtime: Any = torch.cuda.cudart()
        address = array.ctypes.data
        if not int(runtime.cudaHostRegister(address, size, _PORTABLE)):
            # views hold the array; not after CUDA is gone
            weakref.finalize(array, runtime.cudaHostUnregister, address).atexit = False
    return array.data
