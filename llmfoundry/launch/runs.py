"""Current state of runs, wherever they were launched: list, describe, read logs, follow.

The command `llmfoundry runs` calls these functions. They can also be called from Python:

    from llmfoundry.launch import runs
    for run in runs.list_runs("runs"):
        print(run.name, run.state, run.step, run.loss)

A run's folder records what happened (metrics.jsonl, events.jsonl, run.json), and a file lock shows
whether a process is training there now. The target (ssh host, Slurm, Kubernetes) is queried only
for runs that were launched on one. `states.py` derives the state from these sources. A launched run
may write to a different folder than the one with its launch record. If this machine cannot see that
folder, only the target is queried. `stop.py` ends runs. Does not import PyTorch.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from llmfoundry.errors import UserError
from llmfoundry.events import CHECKPOINTS, FOLDERS, read_events
from llmfoundry.exit_status import own_node
from llmfoundry.files import (
    RUN_LOCK,
    is_locked,
    open_guarded,
    parse_json,
    read_json_if_there,
)
from llmfoundry.launch import record as records
from llmfoundry.launch.client import SILENCE, in_order, timed
from llmfoundry.launch.record import RECORD, LaunchRecord, TargetState, read
from llmfoundry.launch.states import (
    ENDS,
    FAILED,
    NOT_KNOWN,
    UNDER_WAY,
    judge,
    judge_unseen,
)
from llmfoundry.launch.targets import TARGETS
from llmfoundry.loggers.metrics_file import BATCH, WALL
from llmfoundry.loggers.pages.charts import TRAIN_LOSS, is_number
from llmfoundry.loggers.pages.run_time import growth, whole_seconds
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.paths import show

METRICS = "metrics.jsonl"
_FILES = (METRICS, "run.json", RECORD, "events.jsonl")
_TAIL = 2**18  # bytes at the end of metrics.jsonl: hundreds of lines
_LONGEST = 2**24  # bytes; a longer line is read in parts
_PARALLEL_QUERIES = 16  # targets queried at the same time
_LOOK_S = 1.0  # seconds between two polls of a run's files
_ASK_S = 5.0  # seconds between two queries of a scheduler or host, which other users query too
_SKEW_S = 300.0  # maximum lag of another machine's clock
_QUIET_S = 600.0  # seconds without a file change until a run on another machine counts as dead
# the number of seconds in a line of metrics.jsonl
_TRAINED = re.compile(rb'"time/train": ?(\d+(?:\.\d+)?(?:e[+-]?\d+)?)')
# the text in a run's lock: process id, machine and time
_HOLDER = re.compile(r"process (\d+) on (\S+), since (.+)")


@dataclass(frozen=True)
class RunState:
    """Current state of a run."""

    name: str
    folder: str
    """The folder with the run's files or its launch record."""
    state: str
    """State of the run, one of `states.STATES`."""
    why: str = ""
    """Reason for the state, for people."""
    step: int = 0
    """Last logged step; 0: none."""
    total: int | None = None
    """Number of steps of the complete run; None: not known yet."""
    loss: float | None = None
    """Last logged training loss, in nats per token."""
    goodput: float | None = None
    """For a supervised run: the share of time spent in steps that were not repeated."""
    logged_at: float | None = None
    """Time of the last line of metrics.jsonl, in seconds since 1970."""
    event: str = ""
    """The last event of events.jsonl."""
    event_at: float | None = None
    target: str = ""
    """Launch target: local, ssh, slurm or kubernetes; empty: started by hand."""
    job: str = ""
    nodes: int = 1
    run_folder: str = ""
    """Folder or URL that the launched run writes to; empty: `folder`."""
    is_seen: bool = True
    """Whether this machine can read the run's files; if not, step and loss are unknown."""


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's: it has a run's file, or it is not readable."""
    try:
        return any((folder / name).is_file() for name in _FILES)
    except OSError as error:
        return isinstance(error, PermissionError)


def list_runs(folder: Path | str = "runs") -> list[RunState]:
    """Return all runs in a folder, including those of sweeps and grids, sorted by path.

    Targets are queried in parallel. A run whose files cannot be read is listed as unknown, with the
    reason.

    Raises:
        UserError: there is no such folder.
    """
    place = Path(folder).expanduser()
    try:
        paths = [run for path in sorted(place.iterdir()) for run in _runs_at(path)]
    except OSError as error:
        raise UserError(f"folder: {place}: {error.strerror}; write the folder of runs") from error
    with ThreadPoolExecutor(_PARALLEL_QUERIES, thread_name_prefix="runs") as pool:
        states = list(pool.map(state_of, paths))
    runs = [
        replace(run, name=path.relative_to(place).as_posix())
        for run, path in zip(states, paths, strict=True)
    ]
    return [run for run in runs if Path(run.folder).is_dir()]  # a run may be deleted meanwhile


def _runs_at(path: Path, depth: int = 2) -> list[Path]:
    """Return the folder if it is a run's, else the runs in it (SWEEP/, GRID/points/)."""
    if is_run(path):
        return [path]
    runs = list[Path]()
    with suppress(OSError):
        if depth and path.is_dir():
            runs = [run for child in sorted(path.iterdir()) for run in _runs_at(child, depth - 1)]
    return runs


def find(name: str, folder: Path | str = "runs") -> Path:
    """Return the folder of a run, given its path or its name below `folder`.

    Raises:
        UserError: there is no such run; suggests the most similar name.
    """
    candidates = [Path(folder).expanduser() / name, Path(name).expanduser()]
    for candidate in candidates:
        if is_run(candidate):
            return candidate
    known = [path.name for path in candidates[0].parent.glob("*") if is_run(path)]
    raise UserError(
        f"{name}: is no run of {show(Path(folder))}{nearest(name, known)};"
        " llmfoundry runs list names them"
    )


def state_of(folder: Path) -> RunState:
    """Return the current state of a run.

    The state is unknown, with the reason, if the launch record cannot be read.
    """
    try:
        record = read(folder)
    except UserError as error:
        return RunState(folder.name, str(folder), NOT_KNOWN, str(error))
    place = records.run_folder(folder, record)

    # a launched run whose files are not visible here: the target alone knows its state
    launched: dict[str, Any] = {}
    if record is not None:
        launched = {"target": record.target, "job": record.job, "nodes": record.nodes}
        launched |= {"run_folder": record.where.get(records.RUN, "")}
        if not _is_seen(place, record):
            shown_folder = launched["run_folder"] or str(place)
            state, why = judge_unseen(TARGETS[record.target].state(record), shown_folder)
            name = folder.resolve().name
            return RunState(name, str(folder), state, why, is_seen=False, **launched)

    # otherwise combine the run's files, its lock and the target
    events = list(read_events(place))
    run = _mapping(place / "run.json")
    rows = tail(place / METRICS)
    last = rows[-1] if rows else {}
    held = is_held(place)
    target = target_state(record, held=held)
    status = str(_of(run, "summary", dict, {}).get("status", ""))
    changed = _changed(place / "run.json")
    supervised = _supervised(place)
    state, why = judge(
        held=held,
        target=target,
        status=status,
        changed=changed,
        events=events,
        supervised=supervised,
    )
    if target is None:
        state, why = _seen_from_here(place, state, why, held=held, is_ended=status in ENDS)

    losses = (_number(row.get(TRAIN_LOSS)) for row in reversed(rows))
    logged_at = _number(last.get(WALL))
    return RunState(
        name=folder.resolve().name,
        folder=str(folder),
        state=state,
        why=why,
        step=_of(last, BATCH, int, 0),
        total=_of(run, "total_batches", int, None),
        loss=next((loss for loss in losses if loss is not None), None),
        goodput=goodput(place, rows, events),
        logged_at=None if logged_at is None else logged_at / 1000,
        event=str(events[-1]["what"]) if events else "",
        event_at=float(events[-1]["time"]) if events else None,
        **launched,
    )


def _is_seen(place: Path, record: LaunchRecord) -> bool:
    """Return whether the files of a launched run are visible on this machine.

    Another machine may have a different folder of the same path. Here the folder only counts as the
    run's if a file in it has changed since the launch.
    """
    if not record.job:
        return True
    if "://" in record.where.get(records.RUN, ""):
        return False
    if record.target == "local" or (record.target == "slurm" and records.RUN not in record.where):
        return True
    changed = max(_changed(place / name) for name in (METRICS, "run.json", "events.jsonl"))
    return changed + _SKEW_S > record.submitted_at


def goodput(
    folder: Path, rows: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> float | None:
    """Return the goodput as the report computes it (`run_time.py`).

    Args:
        folder: folder of the run; its metrics.jsonl is read completely.
        rows: last rows of metrics.jsonl.
        events: events of the run.

    Returns:
        The share in [0, 1]; None: no supervisor has recorded anything yet.
    """
    times = [_number(row.get(WALL)) for row in rows]
    known_times = [when for when in times if when is not None]
    total = whole_seconds(events, [{WALL: known_times[-1]}]) if known_times else 0.0
    if not total:
        return None
    with suppress(OSError):
        return min(1.0, _trained_seconds(folder / METRICS) / total)
    return None


def _trained_seconds(path: Path) -> float:
    """Return the total growth of `time/train`. A file that only grew is read from where it ended.

    A restarted process counts `time/train` from its checkpoint, so the value may decrease.
    """
    before, total, last = _trained.get(path, (_Place(), 0.0, 0.0))
    place = before
    for line, place in _new_lines(path, before):
        if place.end == len(line):  # the first line: the file is read from its start
            total = last = 0.0
        if match := _TRAINED.search(line):
            value = float(match[1])
            total, last = total + growth(last, value), value
    _trained[path] = place, total, last
    return total


@dataclass(frozen=True)
class _Place:
    """Position up to which a file of lines was read, and the last bytes before it."""

    end: int = 0
    mark: bytes = b""


_trained: dict[Path, tuple[_Place, float, float]] = {}
"""State of `_trained_seconds` per file: position, total growth, and last value."""


def _new_lines(path: Path, place: _Place) -> Iterator[tuple[bytes, _Place]]:
    """Yield the complete lines after a position, each with the position after it.

    A file that was rewritten is read from its start.

    Raises:
        OSError: the file cannot be read.
    """
    with open_guarded(path) as file:
        file.seek(max(0, place.end - len(place.mark)))
        if file.read(len(place.mark)) != place.mark:
            place = _Place()
            file.seek(0)
        for line in iter(partial(file.readline, _LONGEST), b""):
            if len(line) < _LONGEST and not line.endswith(b"\n"):
                return  # still being written
            place = _Place(place.end + len(line), line[-64:])
            yield line, place


def tail(path: Path) -> list[dict[str, Any]]:
    """Return the last rows of a metrics file; damaged lines and other records are skipped."""
    try:
        with open_guarded(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            lines = file.read(_TAIL).split(b"\n")
    except OSError:
        return []
    rows = _objects(lines if size <= _TAIL else lines[1:])
    return [row for row in rows if type(row.get(BATCH)) is int]


def _objects(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among some lines; other lines are skipped."""
    for line in lines:
        with suppress(ValueError):
            value = parse_json(line.decode(errors="replace"))
            if isinstance(value, dict):
                yield value


def is_held(folder: Path) -> bool:
    """Return whether a process (here or on a machine that shares the files) holds the run."""
    return is_locked(folder / RUN_LOCK)


def _supervised(folder: Path) -> bool | None:
    """Return whether a supervisor is running in the folder; None: not known.

    Each supervisor holds a lock file with the name of its machine.
    """
    locks: list[Path] = []
    with suppress(OSError):
        locks = sorted((folder / FOLDERS[0]).glob("*.lock"))
    if any(map(is_locked, locks)):
        return True
    return False if [path.stem for path in locks] == [own_node()] else None


def _seen_from_here(
    folder: Path, state: str, why: str, *, held: bool, is_ended: bool
) -> tuple[str, str]:
    """Return the state and reason, corrected for a run that another machine trains.

    A network file system may not share locks, so a missing lock does not prove that the run failed.
    """
    holder = _HOLDER.fullmatch(_holder_text(folder))
    if holder is None or holder[2] == socket.gethostname():
        return state, why
    ago = time.time() - max(_changed(folder / name) for name in (*_FILES, RUN_LOCK))
    if held:
        return state, f"on {holder[2]}"
    if state == FAILED and not is_ended and ago < _QUIET_S:
        return NOT_KNOWN, f"{holder[2]} wrote {ago:.0f} s ago; its lock is not seen here"
    return state, why


def _holder_text(folder: Path) -> str:
    """Return the text that the training process wrote into its lock; empty: none."""
    with suppress(OSError):
        if (folder / RUN_LOCK).is_file():  # reading a pipe would block
            return (folder / RUN_LOCK).read_bytes()[:500].decode(errors="replace").strip()
    return ""


def holder(folder: Path) -> psutil.Process:
    """Return the process that holds the run's lock.

    Raises:
        UserError: the process is on another machine, has ended, or cannot be identified.
    """
    text = _holder_text(folder)
    if not (folder / RUN_LOCK).exists():
        raise UserError(f"{show(folder)}: its process has just ended")
    holder = _HOLDER.fullmatch(text)
    if holder is not None and holder[2] != socket.gethostname():
        raise UserError(f"{show(folder)}: is trained by {text}; stop it there")
    with suppress(psutil.Error, ValueError):
        process = psutil.Process(int(holder[1]) if holder else -1)
        # process ids are reused, so check that this process has the lock file open
        paths = [Path(file.path) for file in process.open_files()]
        if any(path.name == RUN_LOCK and path.samefile(folder / RUN_LOCK) for path in paths):
            return process
    raise UserError(f"{show(folder)}: who holds it is not known ({text}); stop it by hand")


def target_state(record: LaunchRecord | None, *, held: bool) -> TargetState | None:
    """Return the state of a run's job at its target; None: no job was launched."""
    if record is None or not record.job:
        return None
    if held and record.target == "local":  # saves two subprocesses per run
        return TargetState(records.RUNNING, f"process {record.job}")
    return TARGETS[record.target].state(record)


def _mapping(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing or damaged."""
    with suppress(OSError, ValueError):
        values = read_json_if_there(path)
        return values if isinstance(values, dict) else {}
    return {}


def _of(values: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """Return the value of a key if it is of the type, else the default."""
    value = values.get(key)
    return value if isinstance(value, kind) and not isinstance(value, bool) else default


def _number(value: Any) -> float | None:
    """Return a number of a JSON record, where NaN and infinity are strings; None: not a number."""
    with suppress(ValueError, OverflowError):
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return float(value)
    return None


def _float(values: Mapping[str, Any], key: str) -> float:
    """Return the number of a key; 0 if there is none."""
    return _number(values.get(key)) or 0.0


def _changed(path: Path) -> float:
    """Return when a file was changed, in seconds since 1970; 0: no such file."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


@dataclass(frozen=True)
class RunDetails:
    """Everything that is known about a run."""

    run: RunState
    recipe: str = ""
    """Recipe that was launched; empty: started by hand."""
    overrides: list[str] = field(default_factory=list)
    git: dict[str, Any] = field(default_factory=dict)
    submitted_at: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """Decisions of the supervisor: attempt, cause, why, action, step, seconds, status."""
    checkpoints: list[str] = field(default_factory=list)
    """Names of the checkpoints in the run's folder, oldest first."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """Averages of the last gauntlet, and its step."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """The last twenty events."""
    logs: str = ""
    """Path of the logs."""


def describe(name: str, folder: Path | str = "runs") -> RunDetails:
    """Return everything that is known about a run.

    Raises:
        UserError: there is no such run, or its launch record is damaged.
    """
    record_folder = find(name, folder)
    record, run = read(record_folder), state_of(record_folder)
    place = records.run_folder(record_folder, record)
    details = RunDetails(run, logs=f"{place}/{METRICS}")
    if record is not None:
        details = replace(
            details,
            recipe=record.recipe,
            overrides=list(record.overrides),
            git=dict(record.git),
            submitted_at=record.submitted_at,
            logs=record.where.get("log", "") or details.logs,
        )
    return _with_files(details, place) if run.is_seen else details


def _with_files(details: RunDetails, place: Path) -> RunDetails:
    """Return the details, completed from the files of the run's folder."""
    events = list(read_events(place))
    decision_keys = ("attempt", "cause", "why", "action", "step", "seconds", "status")
    decisions = [event for event in events if event["kind"] == "decision"]

    # the gauntlet result of the latest step
    results = [_mapping(path) for path in sorted(place.glob("eval/*.json"))]
    results = [result for result in results if type(result.get(BATCH)) is int]
    newest = sorted(results, key=lambda result: result[BATCH])[-1] if results else {}
    averages = _of(newest, "averages", dict, {}) or {"average": newest.get("average")}

    return replace(
        details,
        environment=_of(_mapping(place / "run.json"), "environment", dict, {}),
        attempts=[{key: event.get(key) for key in decision_keys} for event in decisions],
        checkpoints=sorted(p.name for p in (place / CHECKPOINTS).glob("*/") if p.is_dir()),
        evaluation={BATCH: newest[BATCH], **averages} if newest else {},
        events=events[-20:],
    )


def logs(name: str, folder: Path | str = "runs") -> Iterator[tuple[str, str]]:
    """Yield (machine or rank, line) of what a run has printed.

    The output of a run that was started by hand is not stored. Its metrics and events are yielded
    instead.

    Raises:
        UserError: there is no such run, or its target does not answer.
    """
    place = find(name, folder)
    record = read(place)
    if record is not None and record.job:
        output = TARGETS[record.target].logs(record, follow=False)
        lines = (line for line in output if line != SILENCE)
        return in_order(lines) if record.nodes > 1 else lines
    return _Recorded(place).lines()


def follow(name: str, folder: Path | str = "runs") -> Iterator[tuple[str, str]]:
    """Yield the lines of `logs`, then new lines as they appear, until the run ends.

    Raises:
        UserError: there is no such run, or its target does not answer.
    """
    place = find(name, folder)
    record = read(place)
    if record is not None and record.job:
        lines, is_timed = TARGETS[record.target].logs(record, follow=True), record.nodes > 1
    else:
        lines, is_timed = _recorded(place), False
    has_ended, queried_at = False, -math.inf
    for source, line in lines:
        if (source, line) != SILENCE:
            yield source, timed(line)[1] if is_timed else line
        elif has_ended:  # no line since the run ended, so all lines were read
            return
        elif time.monotonic() - queried_at >= poll_interval(record):
            queried_at = time.monotonic()
            has_ended = state_of(place).state not in UNDER_WAY


def poll_interval(record: LaunchRecord | None) -> float:
    """Return the seconds between two polls of a run; a poll may query the run's target."""
    return 0.2 if record is None or record.target == "local" else _ASK_S


def _recorded(place: Path) -> Iterator[tuple[str, str]]:
    """Yield the metrics and events of a run as they appear, with a SILENCE after each poll."""
    recorded = _Recorded(place)
    while True:
        yield from recorded.lines()
        yield SILENCE
        time.sleep(_LOOK_S)


class _Recorded:
    """Incremental reader of metrics.jsonl and events.jsonl, ordered by time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, _Place] = {}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield (source, line) of the records since the last call."""
        lines: list[tuple[float, str, str]] = []
        for row in self._new(METRICS):
            lines.append((_float(row, WALL) / 1000, "metrics", _metrics_line(row)))
        for event in self._new("events.jsonl"):
            lines.append((_float(event, "time"), str(event.get("kind")), str(event.get("what"))))
        for when, source, text in sorted(lines, key=lambda line: line[0]):
            clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
            yield source, f"{clock} {text}"

    def _new(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the records that a file has got since the last call."""
        path = self._folder / name
        if not path.is_file():
            return
        with suppress(OSError):
            before = self._read.get(name, _Place())
            for line, place in _new_lines(path, before):
                self._read[name] = place
                yield from _objects([line])


def _metrics_line(row: Mapping[str, Any]) -> str:
    """Return the step, losses, metrics and throughput of a row of metrics.jsonl as text."""
    texts = [f"step {row.get(BATCH)}"]
    for name, value in row.items():
        if name.startswith(("loss/", "metrics/")) or name == "throughput/tokens_per_sec":
            texts.append(f"{name} {value:.5g}" if is_number(value) else f"{name} {value}")
    return ", ".join(texts)
