"""What runs do now, wherever they were launched: listed, described, read, followed, stopped.

The command `llmfoundry runs` calls these functions, and so may anyone's program:

    from llmfoundry.launch import runs
    for run in runs.list_runs("runs"):
        print(run.name, run.state, run.step, run.loss)

The idea: a run's own folder says what happened (metrics.jsonl, events.jsonl, run.json), a lock that
the kernel releases says whether somebody trains there now, and only where a run was launched
elsewhere its target is asked. `states.py` puts these together. A launched run's folder
may be another than the one that keeps its record, and one that this machine does not have: then the
target alone is asked. No PyTorch.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from llmfoundry.errors import UserError
from llmfoundry.events import CHECKPOINTS, FOLDERS, add_event, read_events
from llmfoundry.exit_status import ENDS_FOLDER, own_node
from llmfoundry.files import (
    RUN_LOCK,
    is_locked,
    open_guarded,
    parse_json,
    read_json_if_there,
    try_lock,
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
from llmfoundry.processes import is_alive, kill_all
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.paths import show

METRICS = "metrics.jsonl"
_FILES = (METRICS, "run.json", RECORD, "events.jsonl")
_TAIL = 2**18  # bytes at the end of metrics.jsonl: hundreds of lines
_LONGEST = 2**24  # bytes of a line; of a longer one a part
_ASKED = 16  # targets at a time
_LOOK_S, _HARD_S = 1.0, 20.0
_ASK_S = 5.0  # between two questions to a scheduler or a host, which many may ask
_SKEW_S = 300.0  # by which another machine's clock may be behind this one
_QUIET_S = 600.0  # without a sign, after which a run of another machine counts as dead
_TRAINED = re.compile(rb'"time/train": ?(\d+(?:\.\d+)?(?:e[+-]?\d+)?)')
_HOLDER = re.compile(r"process (\d+) on (\S+), since (.+)")


@dataclass(frozen=True)
class RunState:
    """A run as it is now."""

    name: str
    folder: str
    """That has its files, or the record of its launch."""
    state: str
    """One of `states.STATES`."""
    why: str = ""
    """Of the state, in words."""
    step: int = 0
    """The last that was logged; 0: none."""
    total: int | None = None
    """Steps of the whole run; None: no process has counted them yet."""
    loss: float | None = None
    """Of training, in nats a token, at the last step that logged it."""
    goodput: float | None = None
    """Of a supervised run: the share of its time that went into steps that were not done again."""
    logged_at: float | None = None
    """Seconds since 1970: the last line of metrics.jsonl."""
    event: str = ""
    """The last one of events.jsonl."""
    event_at: float | None = None
    target: str = ""
    """Where it was launched: local, ssh, slurm, kubernetes; empty: started by hand."""
    job: str = ""
    nodes: int = 1
    run_folder: str = ""
    """Where it was launched to write, or its URL; empty: `folder`."""
    is_seen: bool = True
    """Whether what it writes can be read here; else step and loss are unknown, and not 0."""


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's: it has a file of one, or may not be read."""
    try:
        return any((folder / name).is_file() for name in _FILES)
    except OSError as error:
        return isinstance(error, PermissionError)


def list_runs(folder: Path | str = "runs") -> list[RunState]:
    """All runs of a folder, and of sweeps and grids in it; targets are asked side by side.

    A run whose files cannot be read is listed as unknown, with the reason.

    Raises:
        UserError: there is no such folder.
    """
    place = Path(folder).expanduser()
    try:
        found = [run for path in sorted(place.iterdir()) for run in _runs_at(path)]
    except OSError as error:
        raise UserError(f"folder: {place}: {error.strerror}; write the folder of runs") from error
    with ThreadPoolExecutor(_ASKED, thread_name_prefix="runs") as pool:
        states = list(pool.map(state_of, found))
    named = zip(states, found, strict=True)
    runs = [replace(run, name=path.relative_to(place).as_posix()) for run, path in named]
    return [run for run in runs if Path(run.folder).is_dir()]  # not removed meanwhile


def _runs_at(path: Path, depth: int = 2) -> list[Path]:
    """A run's folder, also one that may not be read, or the runs in SWEEP/ and GRID/points/."""
    if is_run(path):
        return [path]
    found = list[Path]()
    with suppress(OSError):
        if depth and path.is_dir():
            found = [run for one in sorted(path.iterdir()) for run in _runs_at(one, depth - 1)]
    return found


def find(name: str, folder: Path | str = "runs") -> Path:
    """A run's folder: a path, or a name below `folder`.

    Raises:
        UserError: there is none; the nearest name.
    """
    places = [Path(folder).expanduser() / name, Path(name).expanduser()]
    found = next((place for place in places if is_run(place)), None)
    if found is not None:
        return found
    known = [path.name for path in places[0].parent.glob("*") if is_run(path)]
    raise UserError(
        f"{name}: is no run of {show(Path(folder))}{nearest(name, known)};"
        " llmfoundry runs list names them"
    )


def state_of(folder: Path) -> RunState:
    """A run as it is now; unknown, and why, where the record of its launch cannot be read."""
    try:
        record = read(folder)
    except UserError as error:
        return RunState(folder.name, str(folder), NOT_KNOWN, str(error))
    place = records.run_folder(folder, record)
    launched: dict[str, Any] = {}
    if record is not None:
        launched = {"target": record.target, "job": record.job, "nodes": record.nodes}
        launched |= {"run_folder": record.where.get(records.RUN, "")}
        if not _is_seen(place, record):
            named = launched["run_folder"] or str(place)
            state, why = judge_unseen(TARGETS[record.target].state(record), named)
            name = folder.resolve().name
            return RunState(name, str(folder), state, why, is_seen=False, **launched)
    events = list(read_events(place))
    run = _mapping(place / "run.json")
    rows = tail(place / METRICS)
    last = rows[-1] if rows else {}
    held = is_held(place)
    target = _target_state(record, held=held)
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
    """Whether what a launched run writes comes here, and is not another folder of the same path.

    A folder of another machine does where something in it has changed since the launch.
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
    """As the report has it (`run_time.py`); None: no supervisor has recorded anything yet.

    Args:
        folder: of the run, all of whose metrics.jsonl counts.
        rows: the last of it.
        events: of the run.
    """
    times = [when for row in rows if (when := _number(row.get(WALL))) is not None]
    whole = whole_seconds(events, [{WALL: times[-1]}]) if times else 0.0
    if not whole:
        return None
    with suppress(OSError):
        return min(1.0, _trained_seconds(folder / METRICS) / whole)
    return None


def _trained_seconds(path: Path) -> float:
    """What `time/train` has grown in all; of a file that only grew, what is new alone is read."""
    before, total, last = _trained.get(path, (_Place(), 0.0, 0.0))
    place = before
    for line, place in _new_lines(path, before):
        if place.end == len(line):
            total = last = 0.0
        if found := _TRAINED.search(line):
            value = float(found[1])
            total, last = total + growth(last, value), value
    _trained[path] = place, total, last
    return total


@dataclass(frozen=True)
class _Place:
    """Where a reading of a file of lines ended, and the last bytes before it."""

    end: int = 0
    mark: bytes = b""


_trained: dict[Path, tuple[_Place, float, float]] = {}
"""Of each file how far `_trained_seconds` has read it, what it found in all, and the last value."""


def _new_lines(path: Path, place: _Place) -> Iterator[tuple[bytes, _Place]]:
    """The whole lines after a place, each with the place after it; of a file that went back all.

    Raises:
        OSError: it cannot be read.
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
    """The last rows of a file of JSON lines; a torn or foreign line is left out."""
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
    for line in lines:
        with suppress(ValueError):
            found = parse_json(line.decode(errors="replace"))
            if isinstance(found, dict):
                yield found


def is_held(folder: Path) -> bool:
    """Whether a process of this machine, or of one that shares its files, is at work there."""
    return is_locked(folder / RUN_LOCK)


def _supervised(folder: Path) -> bool | None:
    """Whether a supervisor is at work there: each holds a lock of its machine's name."""
    locks: list[Path] = []
    with suppress(OSError):
        locks = sorted((folder / FOLDERS[0]).glob("*.lock"))
    if any(map(is_locked, locks)):
        return True
    return False if [path.stem for path in locks] == [own_node()] else None


def _seen_from_here(
    folder: Path, state: str, why: str, *, held: bool, is_ended: bool
) -> tuple[str, str]:
    """The state, where a run of another machine, whose lock may not come here, is said to be so."""
    found = _HOLDER.fullmatch(_holder_text(folder))
    if found is None or found[2] == socket.gethostname():
        return state, why
    ago = time.time() - max(_changed(folder / name) for name in (*_FILES, RUN_LOCK))
    if held:
        return state, f"on {found[2]}"
    if state == FAILED and not is_ended and ago < _QUIET_S:
        return NOT_KNOWN, f"{found[2]} wrote {ago:.0f} s ago; its lock is not seen here"
    return state, why


def _holder_text(folder: Path) -> str:
    """What the process that trains has written into its lock; empty: nothing."""
    with suppress(OSError):
        if (folder / RUN_LOCK).is_file():  # a pipe would wait
            return (folder / RUN_LOCK).read_bytes()[:500].decode(errors="replace").strip()
    return ""


def _holder(folder: Path) -> psutil.Process:
    """The process that has the run's lock.

    Raises:
        UserError: it is another machine's, or gone.
    """
    text = _holder_text(folder)
    if not (folder / RUN_LOCK).exists():
        raise UserError(f"{show(folder)}: its process has just ended")
    found = _HOLDER.fullmatch(text)
    if found is not None and found[2] != socket.gethostname():
        raise UserError(f"{show(folder)}: is trained by {text}; stop it there")
    with suppress(psutil.Error, ValueError):
        process = psutil.Process(int(found[1]) if found else -1)
        paths = [Path(file.path) for file in process.open_files()]
        if any(path.name == RUN_LOCK and path.samefile(folder / RUN_LOCK) for path in paths):
            return process  # and no later process of its number
    raise UserError(f"{show(folder)}: who holds it is not known ({text}); stop it by hand")


def _target_state(record: LaunchRecord | None, *, held: bool) -> TargetState | None:
    if record is None or not record.job:
        return None
    if held and record.target == "local":  # two processes less for each run
        return TargetState(records.RUNNING, f"process {record.job}")
    return TARGETS[record.target].state(record)


def _mapping(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = read_json_if_there(path)
        return found if isinstance(found, dict) else {}
    return {}


def _of(values: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    found = values.get(key)
    return found if isinstance(found, kind) and not isinstance(found, bool) else default


def _number(value: Any) -> float | None:
    """A number of a record, in which those that are not finite are texts; None: it is none."""
    with suppress(ValueError, OverflowError):
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return float(value)
    return None


def _float(values: Mapping[str, Any], key: str) -> float:
    return _number(values.get(key)) or 0.0


def _changed(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


@dataclass(frozen=True)
class RunDetails:
    """All that is known of one run."""

    run: RunState
    recipe: str = ""
    """As it was launched; empty: started by hand."""
    overrides: list[str] = field(default_factory=list)
    git: dict[str, Any] = field(default_factory=dict)
    submitted_at: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """A supervisor's decisions: attempt, cause, why, action, step, seconds."""
    checkpoints: list[str] = field(default_factory=list)
    """Names of those in the run's folder, oldest first."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """The last gauntlet's averages, and the step it was at."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """The last twenty."""
    logs: str = ""
    """Where they are."""


def describe(name: str, folder: Path | str = "runs") -> RunDetails:
    """All that is known of one run.

    Raises:
        UserError: there is no such run, or the record of its launch is torn.
    """
    found = find(name, folder)
    record, run = read(found), state_of(found)
    place = records.run_folder(found, record)
    known = RunDetails(run, logs=f"{place}/{METRICS}")
    if record is not None:
        known = replace(
            known,
            recipe=record.recipe,
            overrides=list(record.overrides),
            git=dict(record.git),
            submitted_at=record.submitted_at,
            logs=record.where.get("log", "") or known.logs,
        )
    return _with_files(known, place) if run.is_seen else known


def _with_files(known: RunDetails, place: Path) -> RunDetails:
    """With what the run's folder says."""
    events = list(read_events(place))
    kept = ("attempt", "cause", "why", "action", "step", "seconds", "status")
    decisions = [event for event in events if event["kind"] == "decision"]
    results = [_mapping(path) for path in sorted(place.glob("eval/*.json"))]
    results = sorted((r for r in results if type(r.get(BATCH)) is int), key=lambda r: r[BATCH])
    newest = results[-1] if results else {}
    averages = _of(newest, "averages", dict, {}) or {"average": newest.get("average")}
    return replace(
        known,
        environment=_of(_mapping(place / "run.json"), "environment", dict, {}),
        attempts=[{key: event.get(key) for key in kept} for event in decisions],
        checkpoints=sorted(p.name for p in (place / CHECKPOINTS).glob("*/") if p.is_dir()),
        evaluation={BATCH: newest[BATCH], **averages} if newest else {},
        events=events[-20:],
    )


def logs(name: str, folder: Path | str = "runs") -> Iterator[tuple[str, str]]:
    """(Machine or rank, line) of what a run has printed.

    Of a run that was started by hand, whose terminal nobody keeps: its metrics and events.

    Raises:
        UserError: there is no such run, or its target does not answer.
    """
    place = find(name, folder)
    record = read(place)
    if record is not None and record.job:
        found = TARGETS[record.target].logs(record, follow=False)
        lines = (line for line in found if line != SILENCE)
        return in_order(lines) if record.nodes > 1 else lines
    return _Recorded(place).lines()


def follow(name: str, folder: Path | str = "runs") -> Iterator[tuple[str, str]]:
    """The same, live: ends with the run, and leaves it alone.

    Raises:
        UserError: there is no such run, or its target does not answer.
    """
    place = find(name, folder)
    record = read(place)
    if record is not None and record.job:
        lines, is_timed = TARGETS[record.target].logs(record, follow=True), record.nodes > 1
    else:
        lines, is_timed = _recorded(place), False
    has_ended, asked = False, -math.inf
    for source, line in lines:
        if (source, line) != SILENCE:
            yield source, timed(line)[1] if is_timed else line
        elif has_ended:  # silent since: all of it has come
            return
        elif time.monotonic() - asked >= _pause(record):
            asked = time.monotonic()
            has_ended = state_of(place).state not in UNDER_WAY


def _recorded(place: Path) -> Iterator[tuple[str, str]]:
    """What a run records, as it comes, with a SILENCE after each look."""
    recorded = _Recorded(place)
    while True:
        yield from recorded.lines()
        yield SILENCE
        time.sleep(_LOOK_S)


class _Recorded:
    """The lines that metrics.jsonl and events.jsonl have gained, by time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, _Place] = {}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Those since the last call."""
        found: list[tuple[float, str, str]] = []
        for row in self._new(METRICS):
            found.append((_float(row, WALL) / 1000, "metrics", _metrics_line(row)))
        for event in self._new("events.jsonl"):
            found.append((_float(event, "time"), str(event.get("kind")), str(event.get("what"))))
        for when, source, text in sorted(found, key=lambda line: line[0]):
            clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
            yield source, f"{clock} {text}"

    def _new(self, name: str) -> Iterator[dict[str, Any]]:
        path = self._folder / name
        if not path.is_file():
            return
        with suppress(OSError):
            before = self._read.get(name, _Place())
            for line, place in _new_lines(path, before):
                self._read[name] = place
                yield from _objects([line])


def _metrics_line(row: Mapping[str, Any]) -> str:
    shown = [f"step {row.get(BATCH)}"]
    for name, value in row.items():
        if name.startswith(("loss/", "metrics/")) or name in ("throughput/tokens_per_sec",):
            shown.append(f"{name} {value:.5g}" if is_number(value) else f"{name} {value}")
    return ", ".join(shown)


def stop(
    name: str, folder: Path | str = "runs", *, now: bool = False, timeout: float = 600.0
) -> RunState:
    """Ask a run to save and end, and wait for it; `now`: end it at once, unsaved.

    Args:
        name: of the run, or its folder.
        folder: of runs.
        now: without a checkpoint of the steps since the last.
        timeout: seconds to wait for its end.

    Raises:
        UserError: there is no such run, it is not under way, it cannot be stopped from here, or it
            is still at it after `timeout`.
    """
    found = find(name, folder)
    record, before = read(found), state_of(found)
    place = records.run_folder(found, record)
    is_here = before.is_seen and is_held(place)
    if before.state == NOT_KNOWN and not is_here:
        raise UserError(
            f"{show(found)}: whether it runs is unknown here: {before.why}; try again, or stop it"
            " where it runs"
        )
    if before.state not in UNDER_WAY and not is_here:
        raise UserError(f"{show(found)}: is {before.state}, so there is nothing to stop")
    target = _target_state(record, held=False)
    with _alone(found) as is_first:
        if (
            record is not None
            and target is not None
            and target.state in (records.WAITING, records.RUNNING)
        ):
            who = f"{record.job} {record.submitted_at:.0f}"
            told = place if before.is_seen else found
            if is_first and (now or not _was_asked(told, who)):
                TARGETS[record.target].stop(record, now=now)
                _note_stop(told, who, now=now)  # after it: a machine may not have answered
        elif is_first:
            _stop_here(place, timeout=timeout, now=now)
    deadline = time.monotonic() + timeout
    while (after := state_of(found)).state in UNDER_WAY or (after.is_seen and is_held(place)):
        if time.monotonic() > deadline:
            raise UserError(
                f"{show(found)}: was asked to save and end, and is {after.state} after"
                f" {timeout:.0f} s; look again, or write now=true"
            )
        time.sleep(min(_pause(record), max(0.1, deadline - time.monotonic())))
    return after


def _pause(record: LaunchRecord | None) -> float:
    """Seconds between two looks at a run, which may be questions to its target."""
    return 0.2 if record is None or record.target == "local" else _ASK_S


@contextmanager
def _alone(place: Path) -> Iterator[bool]:
    """Whether no other stop is asking this run at the moment; the folder itself is locked."""
    locked, is_first = None, True
    with suppress(OSError):  # a file system without locks
        locked = try_lock(place)
        is_first = locked is not None
    try:
        yield is_first
    finally:
        if locked is not None:
            locked.release()


def _was_asked(place: Path, who: str) -> bool:
    """Whether a process or job was asked before: a second signal would end it without a save."""
    return any(e["kind"] == "stop" and e.get("who") == who for e in read_events(place))


def _note_stop(place: Path, who: str, *, now: bool) -> None:
    """Make it an event of the run that a process or job is asked."""
    with suppress(OSError):
        what = "is ended at once" if now else "is asked to save and end"
        add_event(place, "stop", f"{what} by llmfoundry runs stop", action="stop", who=who)


def _stop_here(place: Path, *, timeout: float, now: bool) -> None:
    """Signal the process that trains on this machine; its supervisor, if any, ends with it.

    Between two attempts of a supervisor nobody holds the folder: the next one is waited for.
    """
    deadline = time.monotonic() + timeout
    while not is_held(place):
        if time.monotonic() > deadline or state_of(place).state not in UNDER_WAY:
            raise UserError(f"{show(place)}: no process trains it; there is nothing to stop")
        time.sleep(0.2)
    process = _outermost(_holder(place))
    who = f"{process.pid} {process.create_time():.0f}"
    if not now and _was_asked(place, who):
        return
    _note_stop(place, who, now=now)
    process.send_signal(signal.SIGTERM)  # SIGINT is ignored by what a script started with &
    if not now:
        return
    deadline = time.monotonic() + _HARD_S
    time.sleep(1.0)
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGINT)
        while is_alive(process):
            if time.monotonic() > deadline:
                return kill_all(process.pid)
            time.sleep(0.1)


def _outermost(process: psutil.Process) -> psutil.Process:
    """The supervisor of a process that trains, or itself; what it starts has a folder for ends."""
    with suppress(psutil.Error):
        if ENDS_FOLDER in process.environ():
            return next(p for p in process.parents() if ENDS_FOLDER not in p.environ())
    return process
