"""One attempt at a run: start the command, monitor its processes, collect its times and output.

Entry point: `RunningAttempt`. `supervisor.py` starts it and calls `poll` until the command has
ended. Stop signals are forwarded to the ranks and not to torchrun, which would kill the ranks after
30 s while a save may take longer. Decisions are made in `decide.py`.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import psutil

from llmfoundry.errors import UserError, one_line
from llmfoundry.exit_status import (
    DONE,
    ENDS_FOLDER,
    MEMORY,
    SAVED,
    STOP_FILE,
    ResumeLimits,
    read_ends,
)
from llmfoundry.processes import is_alive, keep_children, kill_all
from llmfoundry.resilience.supervise import slurm_nodes
from llmfoundry.telemetry import BEATS, PHASES, read_heartbeats

SUPERVISED = "LLMFOUNDRY_SUPERVISED"
"""Environment variable of processes that a supervisor has started."""
_POLL_SECONDS = 0.1
_TAIL_LINES = 400
_LINE_BYTES, _CHUNK = 2**14, 2**16  # only the end of a longer line is stored
_ENDS_SECONDS = 2.0  # between two reads of the shared folder of process ends
_LAUNCHER_SECONDS, _REMOTE_LAUNCHER_SECONDS = 30.0, 120.0
"""Time for the launcher to exit after a rank has failed: if all ranks of this machine have ended,
and if this machine has no ranks. torchrun gives other ranks 30 s. srun would wait for a dead
machine until Slurm marks it down (SlurmdTimeout, 300 s)."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@dataclass
class AttemptTimes:
    """Times of an attempt, in seconds of CLOCK_MONOTONIC; None: not reached.

    Attributes:
        started: the command was started.
        joined: the ranks had joined the process group.
        loaded: data, model and checkpoint were loaded, and the first step began.
        stepped: the first step was complete.
        last_beat: last heartbeat of any rank.
        ended: the command had ended.
        first_step: number of the first step (from 1).
        last_step: number of the last step that began.
        saved: batch of the newest checkpoint, from the ranks' heartbeats; -1: none.
    """

    started: float
    joined: float | None = None
    loaded: float | None = None
    stepped: float | None = None
    last_beat: float | None = None
    ended: float = 0.0
    first_step: int | None = None
    last_step: int = 0
    saved: int = -1

    @property
    def resumed(self) -> int | None:
        """Batch of the checkpoint that the attempt resumed from; 0: none; None: not known."""
        return None if self.first_step is None else self.first_step - 1

    def useful(self, newest: int) -> float:
        """Return the seconds spent in steps that the checkpoint of batch `newest` contains."""
        if self.loaded is None or self.first_step is None:
            return 0.0
        steps = self.last_step - self.first_step + 1
        saved_steps = min(steps, newest - self.first_step + 1)
        stepping = (self.last_beat or self.ended) - self.loaded
        return max(0.0, stepping * saved_steps / steps)

    def last_moved(self, hang: dict[str, Any] | None, node: str) -> float:
        """Return when a rank of an ended attempt last made progress.

        After a hang the last heartbeat is too late, because the monitor wakes ranks to collect
        their stacks. The time is then taken from the event `hang`. If another machine than `node`
        wrote the event, its clock differs, and only the duration of the hang is used.
        """
        last = self.ended if self.last_beat is None else self.last_beat
        if hang is None or not isinstance(hang.get("seconds"), int | float):
            return last
        moved = hang.get("moved")
        if hang.get("host") != node or not isinstance(moved, int | float):
            moved = self.ended - hang["seconds"]
        return min(last, max(self.started, float(moved)))


class RunningAttempt:
    """A running command and its ranks on this machine."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        heartbeats: Path,
        ends: Path,
        is_local: bool,
        limits: ResumeLimits,
    ) -> None:
        """Start a command.

        Args:
            command: words of the command.
            heartbeats: folder for heartbeats, in memory of this machine.
            ends: folder on a shared file system, where processes record how they ended.
            is_local: whether all ranks are on this machine; they are killed if this process dies.
            limits: checkpoints from which the attempt may resume.

        Raises:
            UserError: the command cannot be started, or a folder cannot be created.
        """
        for folder in (heartbeats, ends):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = f"the folder of this attempt cannot be made: {one_line(error)}"
                raise UserError(f"save_folder: {why}; make room for it") from error

        base = dict(os.environ) if is_local else slurm_nodes.step_environment()
        env = {**base, BEATS: str(heartbeats), ENDS_FOLDER: str(ends), SUPERVISED: "1"}
        env |= limits.environment()
        if is_local:
            keep_children(env)
        self.times = AttemptTimes(time.monotonic())
        self.stderr_tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.ends = ends
        self._heartbeats, self._is_local = heartbeats, is_local
        self._ranks: dict[int, psutil.Process] = {}
        self._ends_read, self._failed = 0.0, 0.0  # times; 0: not yet
        options = {word.partition("=")[0].replace("_", "-") for word in command}
        self._restarts_itself = "--max-restarts" in options  # torchrun restarts failed ranks
        try:
            self._process = subprocess.Popen(
                list(command), env=env, stderr=subprocess.PIPE, start_new_session=True
            )
        except (OSError, ValueError) as error:
            why = one_line(error) if isinstance(error, OSError) else str(error)
            raise UserError(
                f"supervise.launch: {command[0]!r} cannot be started: {why}; write a program that"
                " this machine has"
            ) from error
        self._reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._reader.start()

    def poll(self) -> bool:
        """Sleep, read the heartbeats, and return whether the command is still running."""
        time.sleep(_POLL_SECONDS)
        is_running = self._process.poll() is None
        self._read_heartbeats()
        is_due = time.monotonic() - self._ends_read > _ENDS_SECONDS
        if is_running and is_due and not self._restarts_itself:
            self._ends_read = time.monotonic()
            self._end_launcher()
        return is_running

    def request_stop(self, number: int) -> None:
        """Forward a stop signal to the ranks, or to the command if no rank is running.

        A file in the heartbeat folder also tells `distributed/rendezvous.py` not to wait for other
        machines: the ranks may end, and torchrun with them, before anything signals torchrun. For
        srun, SIGTERM means "kill the step", so Slurm forwards the signal to what srun has started.
        """
        with suppress(OSError):
            (self._heartbeats / STOP_FILE).touch()
        self._read_heartbeats()  # torchrun may have replaced its processes
        ranks = [rank for rank in self._ranks.values() if is_alive(rank)]
        if not ranks and not self._is_local and slurm_nodes.in_job():
            slurm_nodes.signal_steps("TERM")
        elif not ranks or self.times.loaded is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)
        for rank in ranks:
            with suppress(psutil.Error):
                rank.send_signal(signal.SIGTERM)

    def _end_launcher(self) -> None:
        """Kill a launcher that does not exit, although a rank failed and none is left here."""
        now = time.monotonic()
        if not self._failed:
            ends = read_ends(self.ends)
            failed = (end["kind"] == MEMORY or end["status"] not in (DONE, SAVED) for end in ends)
            self._failed = now if any(failed) else 0.0
            return
        patience = _LAUNCHER_SECONDS if self._ranks else _REMOTE_LAUNCHER_SECONDS
        if now - self._failed > patience and not any(map(is_alive, self._ranks.values())):
            self.kill()

    def kill(self) -> None:
        """Kill the command and all its processes."""
        if not self._is_local and slurm_nodes.in_job():
            slurm_nodes.signal_steps("KILL")
        kill_all(self._process.pid)

    def end(self) -> int:
        """Kill the ranks that remain after the command has ended; return its exit status."""
        self.times.ended = time.monotonic()
        for rank in self._ranks.values():  # a rank may be stopped, or blocked in a driver
            with suppress(psutil.Error):
                if is_alive(rank):
                    rank.kill()
        self._reader.join(5.0)
        return self._process.wait()

    def _read_heartbeats(self) -> None:
        """Update the ranks and the times from the heartbeats of this machine's ranks."""
        beats = [beat for folder in self._heartbeats.glob("*/") for beat in read_heartbeats(folder)]
        if not beats:
            return

        # processes and last progress
        now, times = time.monotonic(), self.times
        times.joined = times.joined or now
        times.last_beat = max(times.last_beat or 0.0, *(float(beat["since"]) for beat in beats))
        for beat in beats:
            known = self._ranks.get(int(beat["rank"]))
            if known is None or known.pid != int(beat["pid"]):  # torchrun restarts processes
                with suppress(psutil.Error):
                    self._ranks[int(beat["rank"])] = psutil.Process(int(beat["pid"]))

        # steps: the first begins when a rank waits for its data
        steps = [(int(beat["step"]), PHASES.index(str(beat["phase"]))) for beat in beats]
        begun = [step for step, phase in steps if phase >= PHASES.index("data") and step]
        if begun and times.first_step is None:
            times.loaded, times.first_step = now, min(begun)
        times.last_step = max([times.last_step, *begun])
        times.saved = max(int(beat.get("saved", -1)) for beat in beats)
        if times.first_step is not None and times.stepped is None:
            last_phase = (times.first_step, PHASES.index("update"))
            times.stepped = now if min(steps) > last_phase else None

    def _read_stderr(self) -> None:
        """Forward standard error as it arrives, and store its last lines."""
        assert isinstance(self._process.stderr, io.BufferedReader)
        line = b""
        with self._process.stderr as stream:
            while chunk := stream.read1(_CHUNK):
                _write_stderr(chunk)
                *complete, line = (line + chunk).split(b"\n")
                self.stderr_tail.extend(_decoded(line) for line in complete)
                line = line[-_LINE_BYTES:]
        self.stderr_tail.extend([_decoded(line)] if line else [])


def _write_stderr(chunk: bytes) -> None:
    """Write to standard error; ignore a missing stream or a closed terminal."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.buffer.write(chunk)
            sys.stderr.flush()


def _decoded(line: bytes) -> str:
    return line[-_LINE_BYTES:].decode(errors="replace").rstrip("\r")


def make_ends_folder(above: Path, number: int, heartbeats: Path) -> Path:
    """Create the folder in which processes record how they ended.

    If the disk is full, the folder is in memory, and only ranks of this machine can use it.
    """
    folder = new_folder(above, f"attempt-{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in _DISK_FULL:
            return heartbeats.with_name(f"{heartbeats.name}-ends")
    return folder  # RunningAttempt creates it again and reports other errors


def new_folder(above: Path, name: str) -> Path:
    """Return the path of a folder that does not exist, even if the clock was set back."""
    stamped = above / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stamped.with_name(f"{stamped.name}-{n}") for n in count(2))
    return next(path for path in chain([stamped], names) if not path.exists())
