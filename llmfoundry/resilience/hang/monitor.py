"""The process beside the ranks of a machine: looks twice a second, tells, keeps stacks, ends.

    python -m llmfoundry.resilience.hang.monitor '{"beats": "/dev/shm/…", "run_folder": "runs/x",
    …}'

`beside.py` starts it. It is no thread of a rank, which a stuck call may keep from running, and it
imports no PyTorch. It ends when the processes that it looks at have ended.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmfoundry.events import add_event
from llmfoundry.resilience.hang.collect import Ranks
from llmfoundry.resilience.hang.hub import COLLECT, END, WATCH, Hub, HubDoor, Line
from llmfoundry.resilience.hang.judge import HangLimits, HangVerdict, RankReading

_SECONDS = 0.25
_GRACE = 6.0  # in which the others tell whom they have lost
FOLDER = "hangs"
"""Below a run's folder: the stacks of those that hung."""
RECORDERS = "llmfoundry-recorder-"
"""How the temporary folders of flight recorders begin."""


@dataclass(frozen=True)
class Settings:
    """What a monitor is told.

    Attributes:
        beats: the folder of this machine's beats.
        run_folder: the run's.
        node: what this machine is called.
        ranks: processes of the whole run.
        ends: whether a run that hangs is ended.
        limits: fields of `judge.HangLimits`.
        hub: where the hub is: empty: here; else its address.
        listen: the host of this machine at which the hub listens; empty: there is no other machine.
    """

    beats: str
    run_folder: str
    node: str
    ranks: int
    ends: bool
    limits: dict[str, Any]
    hub: str = ""
    listen: str = ""


class Monitor:
    """Looks at the processes of this machine until they have ended."""

    def __init__(self, settings: Settings) -> None:
        """Nothing is looked at yet."""
        self._settings = settings
        self._folder = Path(settings.run_folder)
        self._ranks = Ranks(Path(settings.beats), settings.node)
        self._hub = Hub(HangLimits(**settings.limits), ranks=settings.ranks)
        self._line = Line(settings.hub) if settings.hub else self._hub
        self._waits: dict[int, bool | None] = {}
        self._collected, self._noticed = False, (0, 0)

    def listen(self) -> str:
        """Hear the monitors of other machines; the address to give them."""
        return HubDoor(self._hub, self._settings.listen).address

    def run(self) -> None:
        """Look, until no process is left; the one that has started this beats already."""
        readings = self._ranks.read()
        while self._ranks.any_left() and self._look(readings):
            time.sleep(_SECONDS)
            readings = self._ranks.read()
        own = [r for r in self._ranks.recorders.values() if r.name.startswith(RECORDERS)]
        for folder in [Path(self._settings.beats), *own]:
            shutil.rmtree(folder, ignore_errors=True)

    def _look(self, readings: list[RankReading]) -> bool:
        """Ask what to do, and do it; False once this machine's processes have been ended."""
        seen = [replace(r, waits=self._waits.get(r.rank)) for r in readings]
        try:
            order = self._line.hear(self._settings.node, seen, collected=self._collected)
        except OSError:  # rank 0's machine is lost or unreachable; torchrun and timeouts see that
            return True
        if order == WATCH:
            self._collected, self._waits = False, {}
            self._tell_notice()
        elif order == COLLECT and not self._collected:
            place = self._folder / FOLDER / self._line.stamp
            with suppress(OSError):  # the disk may be what hangs or is full
                self._waits = self._ranks.stacks(place, wake=self._settings.ends)
            self._collected = True
        elif order == END and self._line.verdict is not None:
            return self._end(self._line.verdict)
        return True

    def _tell_notice(self) -> None:
        notice = self._hub.notice
        if notice is None or (notice.step, notice.culprits[0]) == self._noticed:
            return
        self._noticed = (notice.step, notice.culprits[0])
        self._tell("waiting", notice, "none")

    def _end(self, verdict: HangVerdict) -> bool:
        """Tell, and end this machine's processes, those that hang first."""
        ends = self._settings.ends
        if self._line is self._hub:
            self._tell("hang", verdict, "end" if ends else "report")
        if not ends:
            if self._line is self._hub:
                self._hub.go_on()
            return True
        self._ranks.kill(set(verdict.culprits))
        deadline = time.monotonic() + _GRACE
        while self._ranks.any_left() and time.monotonic() < deadline:
            time.sleep(_SECONDS)
        self._ranks.kill(set(self._ranks.pids()))
        return False

    def _tell(self, kind: str, verdict: HangVerdict, action: str) -> None:
        place = self._folder / FOLDER / self._hub.stamp
        stacks = f"; stacks in {place}" if kind == "hang" else ""
        ended = "; all processes are ended now" if action == "end" else ""
        print(f"{verdict.line()}{stacks}{ended}", file=sys.stderr, flush=True)
        with suppress(OSError):
            add_event(
                self._folder,
                kind,
                verdict.line(),
                step=verdict.step,
                rank=verdict.culprits[0] if len(verdict.culprits) == 1 else None,
                action=action,
                ranks=list(verdict.culprits),
                nodes=list(verdict.nodes),
                phase=verdict.phase,
                seconds=round(verdict.seconds, 1),
                stacks=str(place) if kind == "hang" else None,
                moved=round(self._hub.moved, 3) if kind == "hang" else None,
                host=self._settings.node,
            )


def main() -> None:
    """Look at what the first argument says; tells the hub's address on standard output."""
    monitor = Monitor(settings := Settings(**json.loads(sys.argv[1])))
    print(monitor.listen() if settings.listen else "", flush=True)
    sys.stdout.close()
    monitor.run()


if __name__ == "__main__":
    main()
