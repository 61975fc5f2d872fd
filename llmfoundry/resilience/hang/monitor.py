"""The process beside the ranks of a machine: looks twice a second, tells, keeps stacks, ends.

    python -m llmfoundry.resilience.hang.monitor '{"beats": "/dev/shm/…", "run_folder": "runs/x",
    …}'

`beside.py` starts it. It is no thread of a rank, which a stuck call may keep from running, and it
imports no PyTorch. It ends when the processes that it looks at have ended.
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmfoundry.events import add_event
from llmfoundry.resilience.hang.collect import Ranks
from llmfoundry.resilience.hang.judge import HangLimits, HangVerdict, RankReading, judge, refine

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
        self._line = HubClient(settings.hub) if settings.hub else self._hub
        self._waits: dict[int, bool | None] = {}
        self._collected, self._noticed = False, (0, 0)

    def listen(self) -> str:
        """Hear the monitors of other machines; the address to give them."""
        return HubServer(self._hub, self._settings.listen).address

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


# --- from llmfoundry.resilience.hang.hub: What all machines of a run know, in one place: the
# monitor beside rank 0 hears the others.
#
# Each monitor sends its readings once a second and gets an order back: watch, collect (keep
# stacks), end (these processes hang: end yours). The idea: a machine by itself cannot tell who is
# behind, as the process that its own wait for may be elsewhere; and a machine from which nothing
# comes any more is told of by its last readings, which grow old.


WATCH, COLLECT, END = "watch", "collect", "end"
_PATIENCE = 15.0  # seconds for the stacks of all machines
_MOST = 1 << 20  # bytes of a message
_QUIET = 10.0  # seconds without an answer


class Hub:
    """The readings of all machines, and what is to be done about them."""

    def __init__(
        self, limits: HangLimits, *, ranks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """For a run of so many processes; nothing is judged before all have begun."""
        self._limits, self._ranks, self._clock = limits, ranks, clock
        self._heard: dict[str, tuple[float, list[RankReading]]] = {}
        self._collected: set[str] = set()
        self._since = 0.0
        self._lock = threading.Lock()
        self.state = WATCH
        self.verdict: HangVerdict | None = None
        self.notice: HangVerdict | None = None
        self.stamp = ""
        self.moved = 0.0
        """When a process last went on before the verdict, by this machine's clock."""
        self._told: tuple[int, str, tuple[int, ...]] | None = None

    def go_on(self) -> None:
        """Watch again after a verdict that was only told; the same one is not given twice."""
        with self._lock:
            assert self.verdict is not None
            self._told = (self.verdict.step, self.verdict.phase, self.verdict.culprits)
            self.verdict, self.state = None, WATCH
            self._collected.clear()

    def hear(self, node: str, readings: Sequence[RankReading], *, collected: bool) -> str:
        """Take a machine's readings; its order.

        Args:
            node: the machine.
            readings: of its processes.
            collected: whether it has kept their stacks.
        """
        with self._lock:
            self._heard[node] = (self._clock(), list(readings))
            if collected:
                self._collected.add(node)
            self._judge()
            return self.state

    def known(self) -> list[RankReading]:
        """The newest readings of all machines, as old as they are now."""
        now = self._clock()
        return [
            replace(reading, age=reading.age + now - at)
            for at, readings in self._heard.values()
            for reading in readings
        ]

    def _judge(self) -> None:
        known = self.known()
        if self.state == WATCH and len(known) == self._ranks:
            found = judge(known, self._limits)
            if found is not None and found.is_final:
                if (found.step, found.phase, found.culprits) == self._told:
                    return
                self.verdict, self.state, self._since = found, COLLECT, self._clock()
                self.moved = self._since - min(reading.age for reading in known)
                self.stamp = f"step-{found.step}-{time.strftime('%Y%m%d-%H%M%S')}"
            else:
                self.notice = found
        elif self.state == COLLECT:
            late = self._clock() - self._since > _PATIENCE
            if late or self._collected >= self._heard.keys():
                assert self.verdict is not None
                self.verdict, self.state = refine(self.verdict, known), END


class HubServer(socketserver.ThreadingTCPServer):
    """Where the monitors of other machines speak to the hub."""

    daemon_threads = True

    def __init__(self, hub: Hub, host: str) -> None:
        """Listen on this machine's address; `address` is what others need to know."""
        super().__init__((host, 0), _HubHandler)
        self.hub, self.secret = hub, secrets.token_hex(16)
        self.address = f"{host}:{self.server_address[1]}:{self.secret}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _HubHandler(socketserver.StreamRequestHandler):
    """A monitor of another machine, a line each second."""

    timeout = 60.0

    def handle(self) -> None:
        """Answer each line with an order, until it leaves."""
        door = self.server
        assert isinstance(door, HubServer)
        with suppress(OSError, ValueError, TypeError, KeyError):
            told = self.rfile.readline(_MOST).strip()
            if not secrets.compare_digest(told, door.secret.encode()):
                return
            while line := self.rfile.readline(_MOST):
                self.wfile.write(json.dumps(_answer(door.hub, json.loads(line))).encode() + b"\n")


def _answer(hub: Hub, message: dict[str, Any]) -> dict[str, Any]:
    readings = [RankReading(**reading) for reading in message["readings"]]
    order = hub.hear(message["node"], readings, collected=message["collected"])
    verdict = None if hub.verdict is None else hub.verdict.as_json()
    return {"order": order, "stamp": hub.stamp, "verdict": verdict}


class HubClient:
    """A monitor's line to the hub of another machine; as `Hub.hear`, by the network."""

    def __init__(self, address: str) -> None:
        """Speak to a Door's address; connected at the first message."""
        self._host, port, self._secret = address.rsplit(":", 2)
        self._port = int(port)
        self._socket: socket.socket | None = None
        self.verdict: HangVerdict | None = None
        self.stamp = ""

    def hear(self, node: str, readings: Sequence[RankReading], *, collected: bool) -> str:
        """Send readings; the order.

        Raises:
            OSError: nobody answers.
        """
        message = {"node": node, "collected": collected}
        message |= {"readings": [asdict(reading) for reading in readings]}
        try:
            if self._socket is None:
                self._socket = socket.create_connection((self._host, self._port), _QUIET)
                self._lines = self._socket.makefile("rb")
                self._socket.sendall(self._secret.encode() + b"\n")
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            answer = json.loads(self._lines.readline(_MOST) or b"null")
            if answer is None:
                raise OSError("the monitor beside rank 0 has left")
        except (OSError, ValueError) as error:
            self._close()
            raise OSError(str(error)) from error
        if answer["verdict"] is not None:
            facts = answer["verdict"]
            facts |= {"culprits": tuple(facts["culprits"]), "nodes": tuple(facts["nodes"])}
            self.verdict = HangVerdict(**facts)
        self.stamp = answer["stamp"]
        return str(answer["order"])

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


if __name__ == "__main__":
    main()
