"""What a device and its host offer: autocast, fast bf16, threads, memory, seeds of draws.

Containers, Kubernetes and Slurm limit a host's memory by control groups (cgroups), whose processes
see all of the machine's all the same; who passes the limit is killed. Files in memory give way, and
are free.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from llmfoundry.ops.torch_private import has_avx512_bf16

HAS_BF16: bool = has_avx512_bf16() and torch.backends.mkldnn.is_available()
"""Whether matrix products in bfloat16 are instructions of this CPU; emulated they are up to 100
times slower than in fp32."""


@dataclass(frozen=True)
class PlannedDevice:
    """What fake tensors stand for while `plan/count.py` counts: they are on a CPU in any case.

    Attributes:
        kind: of device, such as `cuda`.
        kernel: makes, of a function of PyTorch operations, one that counts as a single kernel.
        load: rows that this process's experts get, in means.
    """

    kind: str
    kernel: Callable[[Callable[..., Any]], Callable[..., Any]]
    load: float = 1.0

    def rows(self, count: int, processes: int) -> tuple[list[int], list[int]]:
        """Of `count` rows how many go to each process and come from it: fake counts have none."""
        sent = [count // processes + (i < count % processes) for i in range(processes)]
        return sent, [round(self.load * n) for n in sent]


_now: list[
    PlannedDevice
] = []  # a plain list: the compiler reads it, a context variable would stop it


def planned() -> PlannedDevice | None:
    """What the tensors at hand stand for; None: themselves."""
    return _now[-1] if _now else None


@contextmanager
def planned_for(what: PlannedDevice) -> Iterator[None]:
    """A context in which CPU tensors, all of them fake, stand for those of another device."""
    _now.append(what)
    try:
        yield
    finally:
        _now.pop()


def kind_of(device: torch.device) -> str:
    """The kind of device that code is to be chosen for: its type, or that which is planned for."""
    what = planned()
    return device.type if what is None or device.type != "cpu" else what.kind


# asked once: the compiler of PyTorch 2.11 cannot trace the question
WITH_AUTOCAST = tuple(
    kind for kind in ("cpu", "cuda", "mps", "xpu", "hpu") if torch.amp.is_autocast_available(kind)
)


def has_autocast(kind: str) -> bool:
    """Whether autocast is on for devices of this kind; the meta device has none to ask for."""
    return kind in WITH_AUTOCAST and torch.is_autocast_enabled(kind)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """X in the dtype that autocast computes products in; as it is where autocast is off."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if has_autocast(kind) else x


def without_autocast(kind: str) -> AbstractContextManager[None]:
    """A context in which products on such devices are computed in the dtypes of their factors."""
    return torch.autocast(kind, enabled=False) if has_autocast(kind) else nullcontext()


def seed_of(seed: int, what: str) -> int:
    """The seed of one of a run's draws: the first 56 bits of BLAKE2b of "seed/what"."""
    digest = hashlib.blake2b(f"{seed}/{what}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def device_thread(
    target: Callable[..., None], *args: object, name: str, daemon: bool = False
) -> threading.Thread:
    """A thread, not yet started, whose current device is that of the thread that makes it.

    A new thread's current device is GPU 0, whatever its process has chosen. What it does there
    first (pinned memory, a stream) opens a context of a few hundred megabytes: on GPU 0, once for
    every process of the machine. Every thread of ours that may touch a tensor is made here.

    Args:
        target: what it runs.
        args: of `target`.
        name: the thread's.
        daemon: whether the process may end before it.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        target(*args)

    return threading.Thread(target=run, name=name, daemon=daemon)


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


def give_back_memory(device: torch.device) -> None:
    """Give what this process keeps free to others: the kernel, other libraries, other tensors.

    Where `keep_memory` was called the heap keeps all, and code that oneDNN compiles finds no page.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # glibc
        trim(0)


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process


def host_buffer(size: int) -> memoryview:
    """Memory of so many bytes, pinned where the process has a GPU; freed with the last view of it.

    A copy from a GPU into memory that the system may move waits for the GPU and passes through a
    buffer of the driver's; into pinned memory it runs beside kernels, at the speed of the bus.

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


_OWN = Path("/proc/self/cgroup")
_MOUNTS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes about 2^63
_FILES = ("active_file", "inactive_file")


class _Version(NamedTuple):
    """Names of files and lines: of cgroups version 2 and 1."""

    folder: str
    limit: str
    used: str
    stat: str  # before a name of memory.stat: with those of all groups below


_V2 = _Version("", "memory.max", "memory.current", "")
_V1 = _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def available_host_memory() -> int:
    """Bytes that this process may still use, of this machine and of every group that it is in."""
    free = psutil.virtual_memory().available
    return max(0, min([free, *(limit - used for limit, used in _limits())]))


def total_host_memory() -> int:
    """Bytes that this process and others of its group may use together."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def _limits() -> Iterator[tuple[int, int]]:
    """Limit and used bytes of each group with a limit, from this process's own upwards."""
    for version, group in _groups():
        with suppress(OSError, ValueError, KeyError):  # no such file, or "max"
            limit = int((group / version.limit).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            stat = dict(line.split() for line in lines)
            files = sum(int(stat[version.stat + name]) for name in _FILES)
            if limit < _UNLIMITED:
                yield limit, int((group / version.used).read_text()) - files


def _groups() -> Iterator[tuple[_Version, Path]]:
    """Folders of this process's groups; of a container, whose own group is mounted, this one."""
    with suppress(OSError, ValueError):  # not Linux
        for line in _OWN.read_text().splitlines():
            number, kinds, path = line.split(":", 2)
            if number != "0" and "memory" not in kinds.split(","):
                continue
            version = _V2 if number == "0" else _V1
            own = Path(path.lstrip("/"))
            for group in (own, *own.parents):
                yield version, _MOUNTS / version.folder / group
