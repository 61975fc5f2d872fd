"""What this machine has: limits of a process, shared memory, versions, and how its paths answer.

`host` judges it. The idea: a file system that hangs must not hang the check, so each path is
given up on after a while.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import time
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from llmfoundry.errors import one_line
from llmfoundry.files import sync
from llmfoundry.resilience.check.host import MachineFacts, NamedPath, PathReading
from llmfoundry.resilience.check.probes.time_limit import Late, within

BLOCK = 4096  # bytes written and read
PACKAGES = (
    *("llmfoundry-recipes", "torch", "numpy", "transformers", "tokenizers", "triton"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "flash-attn", "safetensors", "fsspec"),
)
_LIMITS = {"open files": resource.RLIMIT_NOFILE, "locked memory": resource.RLIMIT_MEMLOCK}
_SHARED = Path("/dev/shm")


def read() -> MachineFacts:
    """Limits, shared memory and versions."""
    limits: dict[str, int | None] = {}
    for name, number in _LIMITS.items():
        soft = resource.getrlimit(number)[0]
        limits[name] = None if soft == resource.RLIM_INFINITY else soft
    if hasattr(resource, "RLIMIT_NPROC"):
        soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        limits["processes"] = None if soft == resource.RLIM_INFINITY else soft
    shared = shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None
    return MachineFacts(limits, shared, _versions())


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["torch build"] = torch.__version__
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda or f"HIP {torch.version.hip}"
        version: Any = torch.cuda.nccl.version()
        found["nccl"] = ".".join(map(str, version))
        found["driver"] = _driver()
    return found


def _driver() -> str:
    try:
        text = Path("/sys/module/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return text.strip()


def try_path(named: NamedPath, *, patience: float) -> PathReading:
    """Write 4 KB there and read them again, or only read, within `patience` seconds."""
    try:
        return within(patience, partial(_timed, named))
    except Late as error:
        return PathReading(**asdict(named), error=str(error))


def _timed(named: NamedPath) -> PathReading:
    path = Path(os.path.expanduser(named.path))
    started = time.perf_counter()
    facts: dict[str, Any] = asdict(named)
    try:
        folder = next(p for p in (path, *path.parents) if os.path.exists(p))
        if named.is_written:
            facts["free"], facts["free_names"] = _room(folder)
            write_and_read(folder if folder.is_dir() else folder.parent)
        elif folder != path:
            return PathReading(**facts, is_missing=True)
        else:
            _read(path)
    except (OSError, StopIteration) as error:
        return PathReading(**facts, error=one_line(error))
    return PathReading(**facts, seconds=time.perf_counter() - started)


def _room(folder: Path) -> tuple[int, int | None]:
    """Bytes that this user may still write, and files; some file systems do not count files."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize, room.f_favail if room.f_files else None


def write_and_read(folder: Path) -> None:
    """4 KB of chance to a new file of `folder`, on the disk, read again, and gone.

    Raises:
        OSError: it could not be written, or is not what was written.
    """
    block, probe = os.urandom(BLOCK), folder / f".check-{uuid4().hex}"
    try:
        with probe.open("xb") as file:
            file.write(block)
        sync(probe)
        if probe.read_bytes() != block:
            raise OSError(errno.EIO, "what was read is not what was written")
    finally:
        probe.unlink(missing_ok=True)


def _read(path: Path) -> None:
    """The first 4 KB of a file, or of the first file that a folder has."""
    if path.is_dir():
        with os.scandir(path) as found:
            first = next((entry for entry in found if entry.is_file()), None)
        if first is None:
            return
        path = Path(first.path)
    if path.is_file():  # a pipe would wait for its writer
        with path.open("rb") as file:
            file.read(BLOCK)
