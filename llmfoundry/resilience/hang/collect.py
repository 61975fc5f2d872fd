"""Read the state, stacks and flight recorders of this machine's ranks from outside.

Used by `monitor.py`. A hung process does not answer requests. The sources are therefore its
heartbeat file, the process state of the operating system, a signal at which Python's faulthandler
writes the stacks without the interpreter, and py-spy (if installed) for stopped processes.
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
"""Prefix of the pipe that triggers a dump of the flight recorder; the rank follows."""
RECORDERS = "llmfoundry-recorder-"
"""Prefix of the temporary folders of flight recorders."""


class LocalRanks:
    """Ranks of a run on this machine, identified by their heartbeats."""

    def __init__(self, folder: Path, node: str) -> None:
        """Create the reader of the heartbeats in `folder`; `node` is the name of this machine."""
        self._folder, self._node = folder, node
        self._known: dict[int, psutil.Process] = {}
        self.recorders: dict[int, Path] = {}
        self._stopped_at: dict[int, float] = {}
        self._dumped: set[int] = set()  # ranks whose recorder was dumped with the stacks

    def read(self) -> list[RankReading]:
        """Return a reading of each rank with a heartbeat. A rank removes it at a normal end."""
        now, readings = time.monotonic(), []
        for beat in read_heartbeats(self._folder):
            rank = int(beat["rank"])
            state = self._state(rank, int(beat["pid"]))
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
        """Return the operating system's state of a process; "gone": it has ended."""
        try:
            known = self._known.get(rank)
            if known is None or known.pid != pid:
                known = self._known[rank] = psutil.Process(pid)
            return str(known.status()) if known.is_running() else "gone"
        except psutil.Error:
            return "gone"

    def pids(self) -> dict[int, int]:
        """Return the ids of existing processes, by rank."""
        return {r: p.pid for r, p in self._known.items() if self._state(r, p.pid) != "gone"}

    def any_left(self) -> bool:
        """Return whether any rank is alive.

        Zombies do not count, because their parent may be waiting for the monitor to end.
        """
        return any(self._state(r, pid) not in _OVER for r, pid in self.pids().items())

    def kill(self, ranks: set[int]) -> None:
        """Kill ranks, including stopped processes."""
        for rank in ranks & self.pids().keys():
            with suppress(psutil.Error):  # psutil compares the start time: ids are reused
                self._known[rank].kill()

    def stacks(self, target: Path, *, wake: bool) -> dict[int, bool | None]:
        """Write the stacks and process information of each rank to the new folder `target`.

        Args:
            target: folder for the files.
            wake: continue stopped processes, so that they can write their stacks.

        Returns:
            Whether the main thread of each rank is in PyTorch; None: no stack was written.
        """
        # signal all ranks, and trigger their flight recorders
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
            self._dumped.add(rank)
        time.sleep(_STACK_SECONDS)

        # store what was written since the signal
        for rank, pid in pids.items():
            stack = stacks_path(self._folder, rank).read_bytes()[before[rank] :].decode()
            waits[rank] = waits_in_torch(stack)
            parts = [facts[rank], stack or "no answer to the signal for stacks"]
            parts += [_spy(pid)] if not stack else []
            (target / f"rank-{rank}.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        for rank, folder in self.recorders.items():
            with suppress(OSError):  # the recorder wrote nothing
                shutil.copy(folder / f"{FLIGHT}{rank}", target)
        return waits

    def timed_out(self, target: Path) -> list[int]:
        """Copy the flight recorders that NCCL dumped after a timeout of a collective.

        Args:
            target: new folder; only created if there are dumps.

        Returns:
            The ranks of the recorders.
        """
        written = {
            rank: folder / f"{FLIGHT}{rank}"
            for rank, folder in self.recorders.items()
            if rank not in self._dumped and (folder / f"{FLIGHT}{rank}").exists()
        }
        if written:
            target.mkdir(parents=True, exist_ok=True)
        for path in written.values():
            shutil.copy(path, target)
        return sorted(written)

    def _facts(self, rank: int, pid: int) -> str:
        """Return the operating system's information about a process."""
        lines = [f"rank {rank}, process {pid} on {self._node}: {self._state(rank, pid)}"]
        for name in ("wchan", "stack"):  # only root can read `stack`
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
    """Return the stacks that py-spy reads from a process that does not react to signals."""
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
    """Trigger a dump of a flight recorder, through the pipe that PyTorch's NCCL backend reads."""
    with suppress(OSError):  # the pipe has no reader
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"1\n")
        finally:
            os.close(descriptor)
