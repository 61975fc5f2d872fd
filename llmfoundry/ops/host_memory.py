"""Memory of the host, kept by the process that frees it.

`distributed.launch` asks for it where a run computes on a CPU, the data room in its worker
processes.
"""

from __future__ import annotations

import ctypes
import sys

# glibc's mallopt: number and value
_OPTIONS = {
    "M_MMAP_MAX": (-4, 0),  # large blocks come from the heap, too
    "M_TRIM_THRESHOLD": (-1, -1),  # whose free end is never given back
    "M_TOP_PAD": (-2, 64 << 20),  # bytes it grows by beyond what is asked for
}


def keep_memory() -> None:
    """Let this process keep the memory that it frees, where the C library is glibc.

    Otherwise every large tensor is new memory of the kernel's, and each 4 KiB of it a page fault:
    a fifth of the time of training a mixture of experts, whose gradients are as large as all of
    its experts.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in _OPTIONS.values():
            mallopt(option, value)
