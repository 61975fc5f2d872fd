"""A machine's paths, limits, shared memory, versions and clock: how they are read, what they mean.

`run_check` calls `read_machine` and `try_path` on one process of each node and the judging
functions on rank 0; `recipe_paths` finds the paths by the type of their key. The idea: what differs
between the machines of one run is suspect by itself, whatever its value: another version, a folder
that is there on all others. A file system that hangs must not hang the check: each path has a time
limit.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from llmfoundry.errors import one_line
from llmfoundry.files import sync
from llmfoundry.loggers.environment import package_versions
from llmfoundry.recipe.paths import ROOT
from llmfoundry.recipe.schema import PATH, Schema, leaves
from llmfoundry.resilience.check.findings import BAD, NOTICE, SOUND, UNCHECKED, Finding
from llmfoundry.retry import DeadlineExceeded, within

OPEN_FILES = 4096  # a store of 3,072 ranks, shards and loaders
SHARED_MEMORY = 1 << 30  # NCCL and the loader's workers; Docker gives 64 MB
SLOW = 5.0  # seconds for 4 KB


@dataclass(frozen=True)
class NamedPath:
    """A path and the recipe's key that names it."""

    key: str
    path: str
    is_written: bool


@dataclass(frozen=True)
class PathReading(NamedPath):
    """How a path answered on one machine.

    Attributes:
        error: why 4 KB could not be written or read; "" where they could.
        is_missing: nothing is there, and nothing would be written.
        seconds: that it took.
        free: bytes, of a path that is written.
        free_names: files that may still be made there; None: not counted.
    """

    error: str = ""
    is_missing: bool = False
    seconds: float = 0.0
    free: int | None = None
    free_names: int | None = None


@dataclass(frozen=True)
class MachineFacts:
    """Limits of a process (None: none), bytes of shared memory (None: there is none), versions."""

    limits: Mapping[str, int | None]
    shared_memory: int | None
    versions: Mapping[str, str]


def judge_paths(readings: Mapping[str, Sequence[PathReading]], *, least_free: int) -> list[Finding]:
    """Every path of every node: whether it answers, has room, and is there where others have it."""
    every = [(node, path) for node, own in readings.items() for path in own]
    there = {(path.key, path.path) for _, path in every if not path.is_missing}
    judged = [
        (node, path, *_judge_path(path, (path.key, path.path) in there, least_free))
        for node, path in every
    ]
    usable = {(p.key, p.path) for _, p, level, _, _ in judged if level in (SOUND, NOTICE)}
    found = []
    for node, path, level, why, action in judged:
        # where no node can use a path, it is the path that must be repaired, not a node
        nodes = (node,) if level == BAD and (path.key, path.path) in usable else ()
        why = f"{path.key}: {path.path}: {why}"
        found.append(Finding("paths", level, node, why, action, nodes))
    return found


def _judge_path(path: PathReading, is_elsewhere: bool, least_free: int) -> tuple[str, str, str]:
    """Level, why and action."""
    if path.is_missing and is_elsewhere:
        return BAD, "is not there, but it is on other nodes", "mount it"
    if path.is_missing:
        return UNCHECKED, "nothing is there (a hub's name, a pattern, or not made yet)", ""
    if path.error:
        done = "written to" if path.is_written else "read"
        return BAD, f"cannot be {done}: {path.error}", "look at mount, rights and room"
    if path.free is not None and path.free < least_free:
        free = f"{path.free / 1e9:.1f} GB are free, less than {least_free / 1e9:.1f}"
        return BAD, f"{free} (health_check.min_free_disk)", "make room"
    if path.free_names is not None and path.free_names < 1000:
        return BAD, f"only {path.free_names} files can still be made there", "make room"
    if path.seconds > SLOW:
        return NOTICE, f"took {path.seconds:.1f} s for 4 KB", "look at the file server"
    room = "" if path.free is None else f", {path.free / 1e9:,.0f} GB free"
    return SOUND, f"answers in {path.seconds * 1e3:.0f} ms{room}", ""


def judge_machines(machines: Mapping[str, MachineFacts]) -> list[Finding]:
    """Limits and shared memory of each node, and versions, which must be equal on all."""
    found = []
    for node, machine in machines.items():
        small = [Finding("host", NOTICE, node, *answer) for answer in _too_small_limits(machine)]
        found += small or [Finding("host", SOUND, node, "limits and shared memory suffice")]
    return [*found, *_differing_versions(machines)]


def _too_small_limits(machine: MachineFacts) -> Iterator[tuple[str, str]]:
    files = machine.limits.get("open files")
    if files is not None and files < OPEN_FILES:
        why = f"open files: at most {files}; large runs need {OPEN_FILES}"
        yield why, f"ulimit -n {OPEN_FILES}"
    locked = machine.limits.get("locked memory")
    if locked is not None and "nccl" in machine.versions:
        why = f"locked memory: at most {locked >> 10} kB; InfiniBand needs it"
        yield why, "ulimit -l unlimited"
    shared = machine.shared_memory
    if shared is None:
        yield "there is no /dev/shm", "mount a tmpfs there"
    elif shared < SHARED_MEMORY:
        free = f"shared memory: {shared / 2**20:.0f} MiB free in /dev/shm, less than"
        yield f"{free} {SHARED_MEMORY >> 20} MiB", "docker --shm-size, an emptyDir of medium Memory"


def _differing_versions(machines: Mapping[str, MachineFacts]) -> Iterator[Finding]:
    """A finding for each node that differs from what most have."""
    if len(machines) < 2:
        return
    names = dict.fromkeys(name for machine in machines.values() for name in machine.versions)
    differ = False
    for name in names:
        values = {node: m.versions.get(name, "missing") for node, m in machines.items()}
        usual, often = Counter(values.values()).most_common(1)[0]
        level = NOTICE if name == "kernel" else BAD
        is_known = level == BAD and often > len(values) / 2
        for node in [node for node, value in values.items() if value != usual]:
            differ = True
            why = f"{name} {values[node]}, but {usual} on {often} of {len(values)} nodes"
            nodes = (node,) if is_known else ()
            yield Finding("host", level, node, why, "install the same everywhere", nodes)
    if not differ:
        yield Finding("host", SOUND, "all nodes", f"{len(names)} versions are equal")


def judge_clocks(skews: Mapping[str, float], *, most: float) -> list[Finding]:
    """Clocks against the middle one, in seconds; certificates, logs and leases go by them."""
    if len(skews) < 2:
        return []
    middle = statistics.median(skews.values())
    off = {node: skew - middle for node, skew in skews.items()}
    far = {node: by for node, by in off.items() if abs(by) > most}
    widest = max(map(abs, off.values()))
    if not far:
        return [Finding("host", SOUND, "all nodes", f"clocks within {widest:.2f} s")]
    found = []
    for node, by in far.items():
        order = "ahead of" if by > 0 else "behind"
        why = f"the clock is {abs(by):.1f} s {order} the others'"
        limit = f" (health_check.max_clock_skew: {most:g})"
        nodes = (node,) if len(skews) > 2 else ()  # of two, either may be right
        action = "start chrony or ntpd there"
        found.append(Finding("host", BAD, node, why + limit, action, nodes))
    return found


BLOCK = 4096  # bytes written and read
PACKAGES = (
    *("llmfoundry-recipes", "torch", "numpy", "transformers", "tokenizers", "triton"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "flash-attn", "safetensors", "fsspec"),
)
_LIMITS = {"open files": resource.RLIMIT_NOFILE, "locked memory": resource.RLIMIT_MEMLOCK}
_SHARED = Path("/dev/shm")


def read_machine() -> MachineFacts:
    """Limits, shared memory and versions."""
    limits: dict[str, int | None] = {}
    for name, number in _LIMITS.items():
        soft = resource.getrlimit(number)[0]
        limits[name] = None if soft == resource.RLIM_INFINITY else soft
    shared = shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None
    return MachineFacts(limits, shared, _versions())


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    found |= package_versions(PACKAGES) | {"torch build": torch.__version__}
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda or f"HIP {torch.version.hip}"
        version: Any = torch.cuda.nccl.version()
        found["nccl"] = ".".join(map(str, version))
        found["driver"] = read_sys("module/nvidia/version") or "unknown"
    return found


def read_sys(name: str) -> str:
    """A file of Linux's /sys; empty: it is not there."""
    try:
        return Path("/sys", name).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def try_path(named: NamedPath, *, patience: float) -> PathReading:
    """Write 4 KB there and read them again, or only read, within `patience` seconds."""
    try:
        return within(patience, partial(_timed, named))
    except DeadlineExceeded as error:
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
    """Write 4 random KB to a new file of `folder`, on the disk, read them again, and remove it.

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


SHIPPED = ("gauntlet", "table")
"""Last parts of the keys whose value may be a file of this project, found from any folder."""
WRITTEN = ("save_folder", "save_local_folder", "output", "cache_folder", "local")
"""Last parts of the keys of which a run writes the value."""


def recipe_paths(recipe: Any) -> list[NamedPath]:
    """Paths of this machine, each once, in the recipe's order; URLs are a store's business."""
    found: dict[str, NamedPath] = {}
    for key, value in _named("", recipe):
        path = value.removeprefix("file://")
        if not path.strip() or "://" in path or path.startswith(("hf:", "chat:")):
            continue
        last = key.rpartition(".")[2]
        is_written = last in WRITTEN
        known = found.get(path)
        if known is None or (is_written and not known.is_written):
            found[path] = NamedPath(key, _located(path, may_be_shipped=last in SHIPPED), is_written)
    return list(found.values())


def _named(key: str, section: Any) -> Iterator[tuple[str, str]]:
    """The values of keys that are paths, by dotted key."""
    for name, field in Schema.of(section.__class__).keys.items():
        for dotted, value in leaves(name, getattr(section, field.field)):
            if is_dataclass(value):
                yield from _named(f"{key}{dotted}.", value)
            elif PATH in field.rules and isinstance(value, str):
                yield key + dotted, value


def _located(path: str, *, may_be_shipped: bool) -> str:
    """Return a path as written, or where the repository has it and the working folder does not.

    A pattern, `texts/**/*.txt`, stands for the folder that it begins at.
    """
    before = Path(path)
    while any(sign in str(before) for sign in "*?[") and before != before.parent:
        before = before.parent
    if may_be_shipped and not before.expanduser().exists() and (ROOT / before).exists():
        return str(ROOT / before)
    return str(before)
