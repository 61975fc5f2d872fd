"""Readings, stacks and flight recorders of the processes of this machine, from outside.

`monitor.py` calls it. A process that hangs answers nothing, so all of it comes from elsewhere: its
heartbeat's file, the system's process state, a signal at which Python's faulthandler writes stacks
without the interpreter's help, and py-spy if installed, which reads a stopped process too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from llmfoundry.resilience.hang.judge import STOPPED, RankReading, waits_in_torch
from llmfoundry.telemetry import FLIGHT, STACKS, read_heartbeats, stacks_path

_STACK_SECONDS, _SPY_SECONDS = 2.0, 10.0
_OVER = ("dead", "zombie", "gone")
PIPE = "ask-"
"""Before the rank, in the name of the pipe that has a flight recorder written."""
RECORDERS = "llmfoundry-recorder-"
"""How the temporary folders of flight recorders begin."""


class LocalRanks:
    """The processes of a run on this machine."""

    def __init__(self, folder: Path, node: str) -> None:
        """Those with a heartbeat in a folder."""
        self._folder, self._node = folder, node
        self._known: dict[int, psutil.Process] = {}
        self.recorders: dict[int, Path] = {}
        self._stopped_at: dict[int, float] = {}
        self._asked: set[int] = set()  # ranks whose recorders were written for the stacks

    def read(self) -> list[RankReading]:
        """A reading of each process with a heartbeat, which one that has ended well removes."""
        now, readings = time.monotonic(), []
        for beat in read_heartbeats(self._folder):
            rank, state = int(beat["rank"]), self._state(int(beat["rank"]), int(beat["pid"]))
            if state not in STOPPED:
                self._stopped_at.pop(rank, None)
            if beat.get("recorder"):
                self.recorders[rank] = Path(beat["recorder"])
            since = self._stopped_at.setdefault(rank, now) if state in STOPPED else now
            readings.append(
                RankReading(
                    rank=rank,
                    node=self._node,
                    step=int(beat["step"]),
                    phase=str(beat["phase"]),
                    age=now - float(beat["since"]),
                    state=state,
                    stopped_for=now - since,
                    longest=beat["longest"],
                    callback=str(beat.get("callback", "")),
                )
            )
        return readings

    def _state(self, rank: int, pid: int) -> str:
        try:
            known = self._known.get(rank)
            if known is None or known.pid != pid:
                known = self._known[rank] = psutil.Process(pid)
            return str(known.status()) if known.is_running() else "gone"
        except psutil.Error:
            return "gone"

    def pids(self) -> dict[int, int]:
        """The processes that are still there, by rank."""
        return {r: p.pid for r, p in self._known.items() if self._state(r, p.pid) != "gone"}

    def any_left(self) -> bool:
        """Whether one of them is alive; the parent of a dead one may wait for the monitor."""
        return any(self._state(r, pid) not in _OVER for r, pid in self.pids().items())

    def kill(self, ranks: set[int]) -> None:
        """End these at once; a stopped process too."""
        for rank in ranks & self.pids().keys():
            with suppress(psutil.Error):  # knows a process by its start too, not by its id alone
                self._known[rank].kill()

    def stacks(self, target: Path, *, wake: bool) -> dict[int, bool | None]:
        """Write stacks and the system's facts of each process to the new folder `target`.

        `wake`: continue stopped processes for that, as they are to be ended anyway.

        Returns:
            Of each rank whether its main thread is in PyTorch; None: it gave no stack.
        """
        target.mkdir(parents=True, exist_ok=True)
        pids, waits = self.pids(), dict[int, bool | None]()
        facts = {rank: self._facts(rank, pid) for rank, pid in pids.items()}
        before = {rank: _size(stacks_path(self._folder, rank)) for rank in pids}
        for pid in pids.values():
            with suppress(OSError):
                os.kill(pid, STACKS)
                if wake:
                    os.kill(pid, signal.SIGCONT)
        for rank in pids.keys() & self.recorders.keys():
            _dump_recorder(self.recorders[rank] / f"{PIPE}{rank}.pipe")
            self._asked.add(rank)
        time.sleep(_STACK_SECONDS)
        for rank, pid in pids.items():
            own = stacks_path(self._folder, rank).read_bytes()[before[rank] :].decode()
            waits[rank] = waits_in_torch(own)
            parts = [facts[rank], own or "no answer to the signal for stacks"]
            parts += [_spy(pid)] if not own else []
            (target / f"rank-{rank}.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        for rank, folder in self.recorders.items():
            with suppress(OSError):  # it did not answer, or has nothing
                shutil.copy(folder / f"{FLIGHT}{rank}", target)
        return waits

    def timed_out(self, target: Path) -> list[int]:
        """Copy what NCCL wrote unasked, of a collective that timed out, to the new folder `target`.

        Returns:
            The ranks whose recorders they are.
        """
        written = {
            rank: folder / f"{FLIGHT}{rank}"
            for rank, folder in self.recorders.items()
            if rank not in self._asked and (folder / f"{FLIGHT}{rank}").exists()
        }
        if written:
            target.mkdir(parents=True, exist_ok=True)
        for path in written.values():
            shutil.copy(path, target)
        return sorted(written)

    def _facts(self, rank: int, pid: int) -> str:
        """The system's facts of a process."""
        lines = [f"rank {rank}, process {pid} on {self._node}: {self._state(rank, pid)}"]
        for name in ("wchan", "stack"):  # the second is for root alone
            with suppress(OSError):
                lines.append(f"{name}: {Path(f'/proc/{pid}/{name}').read_text().strip()}")
        with suppress(psutil.Error):
            memory, cpu = self._known[rank].memory_info().rss, self._known[rank].cpu_times()
            lines.append(f"{memory / 2**30:.1f} GiB, {cpu.user + cpu.system:.0f} s of CPU")
        return "\n".join(lines)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _spy(pid: int) -> str:
    """py-spy's view of a process that answers no signal."""
    program = shutil.which("py-spy")
    if program is None:
        return "py-spy, which reads the stack of a stopped process too, is not installed"
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SPY_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return f"py-spy: {error}"
    return done.stdout or f"py-spy: {done.stderr.strip()}"


def _dump_recorder(pipe: Path) -> None:
    """Have a flight recorder written: a thread of PyTorch's NCCL backend reads a pipe for that."""
    with suppress(OSError):  # nobody reads it
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"1\n")
        finally:
            os.close(descriptor)
