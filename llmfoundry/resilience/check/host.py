"""What a machine's readings mean: room and answers of paths, limits, clock, versions. Pure.

`probes/machine.py` reads them. The idea: what differs between the machines of one run is suspect by
itself, whatever its value: another version, a folder that is there on all others.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmfoundry.resilience.check.findings import BAD, NOTICE, SOUND, UNCHECKED, Finding

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
    there = {(r.key, r.path) for rs in readings.values() for r in rs if not r.is_missing}
    found, sound = list[tuple[str, PathReading, str, str, str]](), set[tuple[str, str]]()
    for node, own in readings.items():
        for path in own:
            name = (path.key, path.path)
            for level, why, action in _path_answers(path, name in there, least_free):
                found.append((node, path, level, why, action))
                if level in (SOUND, NOTICE):
                    sound.add(name)
    findings = []
    for node, path, level, why, action in found:
        # where no node can use a path, it is the path that is to be mended, not a node
        nodes = (node,) if level == BAD and (path.key, path.path) in sound else ()
        said = f"{path.key}: {path.path}: {why}"
        findings.append(Finding("paths", level, node, said, action, nodes))
    return findings


def _path_answers(
    path: PathReading, is_elsewhere: bool, least_free: int
) -> Iterator[tuple[str, str, str]]:
    if path.is_missing:
        if is_elsewhere:
            yield BAD, "is not there, but it is on other nodes", "mount it"
        else:
            yield UNCHECKED, "nothing is there (a hub's name, a pattern, or not made yet)", ""
        return
    if path.error:
        done = "written to" if path.is_written else "read"
        yield BAD, f"cannot be {done}: {path.error}", "look at mount, rights and room"
        return
    if path.free is not None and path.free < least_free:
        free = f"{path.free / 1e9:.1f} GB are free, less than {least_free / 1e9:.1f}"
        yield BAD, f"{free} (health_check.min_free_disk)", "make room"
    elif path.free_names is not None and path.free_names < 1000:
        yield BAD, f"only {path.free_names} files can still be made there", "make room"
    elif path.seconds > SLOW:
        yield NOTICE, f"took {path.seconds:.1f} s for 4 KB", "look at the file server"
    else:
        room = "" if path.free is None else f", {path.free / 1e9:,.0f} GB free"
        yield SOUND, f"answers in {path.seconds * 1e3:.0f} ms{room}", ""


def judge_machines(machines: Mapping[str, MachineFacts]) -> list[Finding]:
    """Limits and shared memory of each node, and versions, which must be equal on all."""
    found = []
    for node, machine in machines.items():
        problems = list(_limits(machine))
        found += [Finding("host", NOTICE, node, why, action) for why, action in problems]
        if not problems:
            found.append(Finding("host", SOUND, node, "limits and shared memory suffice"))
    return [*found, *_versions(machines)]


def _limits(machine: MachineFacts) -> Iterator[tuple[str, str]]:
    files = machine.limits.get("open files")
    if files is not None and files < OPEN_FILES:
        yield (
            f"open files: at most {files}; large runs need {OPEN_FILES}",
            f"ulimit -n {OPEN_FILES}",
        )
    locked = machine.limits.get("locked memory")
    if locked is not None and "nccl" in machine.versions:
        yield (
            f"locked memory: at most {locked >> 10} kB; InfiniBand needs it",
            "ulimit -l unlimited",
        )
    shared = machine.shared_memory
    if shared is None:
        yield "there is no /dev/shm", "mount a tmpfs there"
    elif shared < SHARED_MEMORY:
        free = f"shared memory: {shared / 2**20:.0f} MiB free in /dev/shm, less than"
        yield f"{free} {SHARED_MEMORY >> 20} MiB", "docker --shm-size, an emptyDir of medium Memory"


def _versions(machines: Mapping[str, MachineFacts]) -> Iterator[Finding]:
    """A finding for each node that differs from what most have."""
    if len(machines) < 2:
        return
    names = dict.fromkeys(name for machine in machines.values() for name in machine.versions)
    differ = False
    for name in names:
        values = {node: m.versions.get(name, "missing") for node, m in machines.items()}
        usual, often = Counter(values.values()).most_common(1)[0]
        others = {node: value for node, value in values.items() if value != usual}
        level = NOTICE if name == "kernel" else BAD
        for node, value in others.items():
            differ = True
            known = often > len(values) / 2
            why = f"{name} {value}, but {usual} on {often} of {len(values)} nodes"
            nodes = (node,) if level == BAD and known else ()
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
