"""Properties of a device and its host: autocast, fast bf16, threads, memory, random seeds.

Containers, Kubernetes and Slurm limit a host's memory by control groups (cgroups). Processes of a
group still see the memory of the machine, and are killed if the group exceeds its limit. The page
cache of files counts as free, because it can be reclaimed.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from llmfoundry.ops.torch_private import has_avx512_bf16

HAS_BF16: bool = has_avx512_bf16() and torch.backends.mkldnn.is_available()
"""Whether this CPU has instructions for bfloat16 matmuls. Emulated matmuls are up to 100 times
slower than fp32."""


@dataclass(frozen=True)
class PlannedDevice:
    """Device that fake tensors stand for while `plan/count.py` counts; they are always on a CPU.

    Attributes:
        kind: device type, such as `cuda`.
        kernel: wraps a function of PyTorch operations so that it counts as one kernel.
        load: expert load of this rank, in units of the mean.
        used: share of the experts' rows that matmuls compute (parallel.expert_capacity).
    """

    kind: str
    kernel: Callable[[Callable[..., Any]], Callable[..., Any]]
    load: float = 1.0
    used: float = 1.0

    def rows(self, count: int, processes: int) -> tuple[list[int], list[int]]:
        """Split `count` rows over ranks: rows to send to and to receive from each rank."""
        sent = [count // processes + (i < count % processes) for i in range(processes)]
        return sent, [round(self.load * n) for n in sent]


_now: list[
    PlannedDevice
] = []  # a list, because the compiler can read it; it cannot trace a context variable


def planned() -> PlannedDevice | None:
    """Return the device that fake tensors stand for; None: tensors are real."""
    return _now[-1] if _now else None


@contextmanager
def planned_for(what: PlannedDevice) -> Iterator[None]:
    """Context in which fake CPU tensors stand for tensors of another device."""
    _now.append(what)
    try:
        yield
    finally:
        _now.pop()


def kind_of(device: torch.device) -> str:
    """Return the device type that code should be chosen for, the planned one if there is one."""
    what = planned()
    return device.type if what is None or device.type != "cpu" else what.kind


# evaluated at import: the compiler of PyTorch 2.11 cannot trace the call
WITH_AUTOCAST = tuple(
    kind for kind in ("cpu", "cuda", "mps", "xpu", "hpu") if torch.amp.is_autocast_available(kind)
)


def has_autocast(kind: str) -> bool:
    """Return whether autocast is enabled for a device type; never on the meta device."""
    return kind in WITH_AUTOCAST and torch.is_autocast_enabled(kind)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """Cast x to autocast's dtype; return it unchanged if autocast is disabled."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if has_autocast(kind) else x


def without_autocast(kind: str) -> AbstractContextManager[None]:
    """Context in which matmuls on a device type run in the dtypes of their operands."""
    return torch.autocast(kind, enabled=False) if has_autocast(kind) else nullcontext()


def seed_of(seed: int, what: str) -> int:
    """Return the seed of one use of random numbers: the first 56 bits of BLAKE2b of "seed/what"."""
    digest = hashlib.blake2b(f"{seed}/{what}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def device_thread(
    target: Callable[..., None], *args: object, name: str, daemon: bool = False
) -> threading.Thread:
    """Return a thread, not yet started, that inherits the current device of its creator.

    The current device of a new thread is GPU 0, whatever its process has set. Its first use of CUDA
    (pinned memory, a stream) would open a context of a few hundred megabytes on GPU 0, once for
    every process of the machine. Every thread of this project that may use tensors is created here.

    Args:
        target: function to run.
        args: arguments of `target`.
        name: name of the thread.
        daemon: whether the process may exit before the thread ends.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        target(*args)

    return threading.Thread(target=run, name=name, daemon=daemon)


# options of glibc's mallopt: number and value
_OPTIONS = {
    "M_MMAP_MAX": (-4, 0),  # allocate large blocks on the heap, too
    "M_TRIM_THRESHOLD": (-1, -1),  # never return the free end of the heap
    "M_TOP_PAD": (-2, 64 << 20),  # bytes by which the heap grows in addition to the request
}


_RETURNED = {"M_MMAP_THRESHOLD": (-3, 1 << 20)}  # map blocks of 1 MiB and more separately


def keep_memory() -> None:
    """Configure glibc to keep freed memory in this process; no effect with other C libraries.

    By default glibc maps new memory for every large tensor, with a page fault per 4 KiB. This takes
    a fifth of the time of training a mixture of experts, whose gradients are as large as all
    experts.
    """
    _set_allocator(_OPTIONS)


def return_memory() -> None:
    """Configure glibc to return freed tensors to the system; no effect with other C libraries.

    FSDP gathers and frees the weights of every block in each forward pass. In a heap that keeps
    them, fragmentation takes more memory than the full model.
    """
    _set_allocator(_RETURNED)


def _set_allocator(options: Mapping[str, tuple[int, int]]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in options.values():
            mallopt(option, value)


def give_back_memory(device: torch.device) -> None:
    """Return free memory of this process to the system and to other libraries.

    After `keep_memory` the heap keeps all freed memory, and oneDNN finds no pages for its code.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # glibc
        trim(0)


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process


def host_buffer(size: int) -> memoryview:
    """Allocate host memory, pinned if the process has a GPU; freed with the last view of it.

    A copy from a GPU into pageable memory waits for the GPU and passes through a buffer of the
    driver. A copy into pinned memory overlaps with kernels, at the speed of the bus.

    The memory is registered instead of allocated as pinned: PyTorch's allocator would round the
    size up to a power of two and never free it. Pinning runs at about 2 GB/s, once. If the system
    refuses (`ulimit -l`), the memory is used unpinned, and copies are slower.
    """
    array = torch.empty(size, dtype=torch.uint8).numpy()
    if size and torch.cuda.is_available():
        runtime: Any = torch.cuda.cudart()
        address = array.ctypes.data
        if not int(runtime.cudaHostRegister(address, size, _PORTABLE)):
            # views keep the array alive; do not unregister after CUDA is shut down
            weakref.finalize(array, runtime.cudaHostUnregister, address).atexit = False
    return array.data


_OWN = Path("/proc/self/cgroup")
_MOUNTS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroups version 1 reports about 2^63
_FILES = ("active_file", "inactive_file")


class _Version(NamedTuple):
    """Names of files and keys in one version of cgroups."""

    folder: str
    limit: str
    used: str
    stat: str  # prefix of keys in memory.stat that include all groups below


_V2 = _Version("", "memory.max", "memory.current", "")
_V1 = _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def available_host_memory() -> int:
    """Return the bytes that this process may still use, limited by the machine and its cgroups."""
    free = psutil.virtual_memory().available
    return max(0, min([free, *(limit - used for limit, used in _limits())]))


def total_host_memory() -> int:
    """Return the bytes that all processes of this process's cgroup may use together."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and used bytes of each cgroup with a limit, from the process's group upwards."""
    for version, group in _groups():
        with suppress(OSError, ValueError, KeyError):  # a missing file, or "max"
            limit = int((group / version.limit).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            stat = dict(line.split() for line in lines)
            files = sum(int(stat[version.stat + name]) for name in _FILES)
            if limit < _UNLIMITED:
                yield limit, int((group / version.used).read_text()) - files


def _groups() -> Iterator[tuple[_Version, Path]]:
    """Yield the folders of this process's cgroups; in a container, the mounted group."""
    with suppress(OSError, ValueError):  # not Linux
        for line in _OWN.read_text().splitlines():
            number, kinds, path = line.split(":", 2)
            if number != "0" and "memory" not in kinds.split(","):
                continue
            version = _V2 if number == "0" else _V1
            group_path = Path(path.lstrip("/"))
            for group in (group_path, *group_path.parents):
                yield version, _MOUNTS / version.folder / group
