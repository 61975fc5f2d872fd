"""Read and judge a machine's paths, limits, shared memory, versions and clock.

`run_check` calls `read_machine` and `try_path` on one rank of each node, and the judging functions
on rank 0. `recipe_paths` finds a recipe's paths by the type of their keys. A difference between the
machines of a run is suspicious whatever the value is: a different version, or a folder that exists
on all other machines. Each path has a time limit, because a file system may hang.
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

OPEN_FILES = 4096  # for a store of 3,072 ranks, shards and data loaders
SHARED_MEMORY = 1 << 30  # for NCCL and data loader workers; Docker's default is 64 MB
SLOW = 5.0  # seconds for 4 KB


@dataclass(frozen=True)
class NamedPath:
    """A path, and the recipe's key of it."""

    key: str
    path: str
    is_written: bool


@dataclass(frozen=True)
class PathReading(NamedPath):
    """Result of a read or write test of a path on one machine.

    Attributes:
        error: why 4 KB could not be written or read; empty: success.
        is_missing: the path does not exist and would only be read.
        seconds: duration of the test.
        free: free bytes, for a path that is written.
        free_names: free inodes; None: not counted by the file system.
    """

    error: str = ""
    is_missing: bool = False
    seconds: float = 0.0
    free: int | None = None
    free_names: int | None = None


@dataclass(frozen=True)
class MachineFacts:
    """Limits of a process (None: unlimited), free bytes of /dev/shm (None: missing), versions."""

    limits: Mapping[str, int | None]
    shared_memory: int | None
    versions: Mapping[str, str]


def judge_paths(readings: Mapping[str, Sequence[PathReading]], *, least_free: int) -> list[Finding]:
    """Return a finding for each path of each node: answers, has space, exists as on other nodes."""
    # judge each path; a path that exists on some node must exist on all
    node_paths = [(node, path) for node, paths in readings.items() for path in paths]
    existing = {(path.key, path.path) for _, path in node_paths if not path.is_missing}
    judged = list[tuple[str, PathReading, str, str, str]]()
    for node, path in node_paths:
        is_elsewhere = (path.key, path.path) in existing
        judged.append((node, path, *_judge_path(path, is_elsewhere, least_free)))

    # a node is bad if it cannot use a path that other nodes can use
    usable = {(p.key, p.path) for _, p, level, _, _ in judged if level in (SOUND, NOTICE)}
    findings = []
    for node, path, level, why, action in judged:
        nodes = (node,) if level == BAD and (path.key, path.path) in usable else ()
        why = f"{path.key}: {path.path}: {why}"
        findings.append(Finding("paths", level, node, why, action, nodes))
    return findings


def _judge_path(path: PathReading, is_elsewhere: bool, least_free: int) -> tuple[str, str, str]:
    """Return level, description and action."""
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
    """Return findings on the limits and shared memory of each node, and on different versions."""
    findings = []
    for node, machine in machines.items():
        small = [Finding("host", NOTICE, node, *answer) for answer in _too_small_limits(machine)]
        findings += small or [Finding("host", SOUND, node, "limits and shared memory suffice")]
    return [*findings, *_differing_versions(machines)]


def _too_small_limits(machine: MachineFacts) -> Iterator[tuple[str, str]]:
    """Yield (description, action) for each limit that is too small."""
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
    """Yield a finding for each node with a different version than most nodes."""
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
    """Return findings on the nodes' clocks, compared with their median.

    Args:
        skews: seconds by which each node's clock is ahead.
        most: tolerated difference in seconds.
    """
    if len(skews) < 2:
        return []
    median = statistics.median(skews.values())
    deviations = {node: skew - median for node, skew in skews.items()}
    wrong = {node: by for node, by in deviations.items() if abs(by) > most}
    widest = max(map(abs, deviations.values()))
    if not wrong:
        return [Finding("host", SOUND, "all nodes", f"clocks within {widest:.2f} s")]
    findings = []
    for node, by in wrong.items():
        order = "ahead of" if by > 0 else "behind"
        why = f"the clock is {abs(by):.1f} s {order} the others'"
        limit = f" (health_check.max_clock_skew: {most:g})"
        nodes = (node,) if len(skews) > 2 else ()  # of two clocks, either may be right
        action = "start chrony or ntpd there"
        findings.append(Finding("host", BAD, node, why + limit, action, nodes))
    return findings


BLOCK = 4096  # bytes written and read
PACKAGES = (
    *("llmfoundry-recipes", "torch", "numpy", "transformers", "tokenizers", "triton"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "flash-attn", "safetensors", "fsspec"),
)
_LIMITS = {"open files": resource.RLIMIT_NOFILE, "locked memory": resource.RLIMIT_MEMLOCK}
_SHARED = Path("/dev/shm")


def read_machine() -> MachineFacts:
    """Read the limits, free shared memory and versions of this machine."""
    limits: dict[str, int | None] = {}
    for name, number in _LIMITS.items():
        soft = resource.getrlimit(number)[0]
        limits[name] = None if soft == resource.RLIM_INFINITY else soft
    shared = shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None
    return MachineFacts(limits, shared, _versions())


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    versions |= package_versions(PACKAGES) | {"torch build": torch.__version__}
    if torch.cuda.is_available():
        versions["cuda"] = torch.version.cuda or f"HIP {torch.version.hip}"
        nccl_version: Any = torch.cuda.nccl.version()
        versions["nccl"] = ".".join(map(str, nccl_version))
        versions["driver"] = read_sys("module/nvidia/version") or "unknown"
    return versions


def read_sys(name: str) -> str:
    """Return the content of a file in /sys; empty: it does not exist."""
    try:
        return Path("/sys", name).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def try_path(named: NamedPath, *, patience: float) -> PathReading:
    """Test a path by writing and reading 4 KB, or by reading only, within `patience` seconds."""
    try:
        return within(patience, partial(_timed, named))
    except DeadlineExceeded as error:
        return PathReading(**asdict(named), error=str(error))


def _timed(named: NamedPath) -> PathReading:
    """Test a path and measure the time."""
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
    """Return the free bytes and inodes for this user; None: the file system counts no inodes."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize, room.f_favail if room.f_files else None


def write_and_read(folder: Path) -> None:
    """Write 4 random KB to a new file in `folder`, sync, read them, and remove the file.

    Raises:
        OSError: the file cannot be written, or its content differs from what was written.
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
    """Read the first 4 KB of a file, or of the first file in a folder."""
    if path.is_dir():
        with os.scandir(path) as entries:
            first = next((entry for entry in entries if entry.is_file()), None)
        if first is None:
            return
        path = Path(first.path)
    if path.is_file():  # reading a pipe would block
        with path.open("rb") as file:
            file.read(BLOCK)


SHIPPED = ("gauntlet", "table")
"""Last parts of keys whose value may be a file of this project, found from any folder."""
WRITTEN = ("save_folder", "save_local_folder", "output", "cache_folder", "local")
"""Last parts of keys whose path a run writes to."""


def recipe_paths(recipe: Any) -> list[NamedPath]:
    """Return the local paths of a recipe without duplicates, in the recipe's order; no URLs."""
    paths: dict[str, NamedPath] = {}
    for key, value in _named("", recipe):
        path = value.removeprefix("file://")
        if not path.strip() or "://" in path or path.startswith(("hf:", "chat:")):
            continue
        last = key.rpartition(".")[2]
        is_written = last in WRITTEN
        known = paths.get(path)
        if known is None or (is_written and not known.is_written):
            located = _located(path, may_be_shipped=last in SHIPPED)
            paths[path] = NamedPath(key, located, is_written)
    return list(paths.values())


def _named(key: str, section: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value) of keys that are paths."""
    for name, field in Schema.of(section.__class__).keys.items():
        for dotted, value in leaves(name, getattr(section, field.field)):
            if is_dataclass(value):
                yield from _named(f"{key}{dotted}.", value)
            elif PATH in field.rules and isinstance(value, str):
                yield key + dotted, value


def _located(path: str, *, may_be_shipped: bool) -> str:
    """Return a path as written, or in the repository if only the repository has it.

    A pattern such as `texts/**/*.txt` is replaced by the folder before the pattern.
    """
    before = Path(path)
    while any(sign in str(before) for sign in "*?[") and before != before.parent:
        before = before.parent
    if may_be_shipped and not before.expanduser().exists() and (ROOT / before).exists():
        return str(ROOT / before)
    return str(before)
