"""Memory of this machine that this process may have: a container's limit counts, not the host's.

`plan/rows.py` asks what is free, `builders/microbatch.py` how much there is. Containers, Kubernetes
and Slurm limit memory by control groups (cgroups), whose processes see all of the machine's memory
all the same; who passes the limit is killed. Files in memory give way, and are free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

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
