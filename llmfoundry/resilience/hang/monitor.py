"""Hang monitor of a machine: a process that watches the ranks, saves stacks, and kills hung ranks.

    python -m llmfoundry.resilience.hang.monitor '{"heartbeats": "/dev/shm/…", "node": "n1", …}'

Started by `start_monitor.py`. It is a process and not a thread, because a blocked call can stop all
threads of a rank. It does not import PyTorch, and ends when its ranks have ended.

The monitor on rank 0's machine has the hub, because the rank that others wait for may be on any
machine. Each monitor sends its readings to the hub and receives an order: watch, collect (save the
stacks) or end (kill the ranks). A machine that no longer sends readings is judged by its last
readings, whose age increases.
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
from llmfoundry.recipe.resilience import ResolvedHangConfig
from llmfoundry.resilience.hang.collect import RECORDERS, LocalRanks
from llmfoundry.resilience.hang.judge import HangVerdict, RankReading, judge, refine
from llmfoundry.telemetry import READER

FOLDER = "hangs"
"""Subfolder of a run's folder for stacks of hung runs."""
WATCH, COLLECT, END = "watch", "collect", "end"
_POLL_SECONDS = 0.25
_GRACE_SECONDS = 6.0  # time for other ranks to report the loss of the killed ranks
_COLLECT_SECONDS = 15.0  # limit for the stacks of all machines
_ANSWER_SECONDS = 10.0  # timeout of a request to the hub
_SILENCE_SECONDS = 60.0  # after which the hub closes a connection
_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class MonitorSettings:
    """Settings of a monitor.

    Attributes:
        heartbeats: folder of this machine's heartbeats.
        run_folder: folder of the run.
        node: name of this machine.
        ranks: number of ranks of the run.
        config: fields of the recipe's section, resolved.
        is_compiled: whether steps may be recompiled.
        messages: subfolder of `hangs` for flight recorders after a timeout of a collective.
        hub: address of the hub; empty: this monitor has the hub.
        listen: host name at which the hub listens; empty: there is no other machine.
    """

    heartbeats: str
    run_folder: str
    node: str
    ranks: int
    config: dict[str, Any]
    is_compiled: bool = False
    messages: str = "messages"
    hub: str = ""
    listen: str = ""


@dataclass(frozen=True)
class HubOrder:
    """Order to a monitor.

    Attributes:
        action: WATCH; after a verdict COLLECT the stacks, then END the ranks.
        stamp: name of the folder for the stacks.
        verdict: the hung ranks; None: no verdict.
    """

    action: str = WATCH
    stamp: str = ""
    verdict: HangVerdict | None = None


class Monitor:
    """Monitor of the ranks of this machine, until they have ended."""

    def __init__(self, settings: MonitorSettings) -> None:
        """Create the monitor, and the hub if this machine has it."""
        self._settings = settings
        self._folder = Path(settings.run_folder)
        self._ranks = LocalRanks(Path(settings.heartbeats), settings.node)
        config = ResolvedHangConfig(**settings.config)
        self._ends = config.action == "end"
        self._hub = Hub(config, ranks=settings.ranks, is_compiled=settings.is_compiled)
        self._client = HubClient(settings.hub) if settings.hub else self._hub
        self._waits: dict[int, bool | None] = {}
        self._collected, self._noticed = False, (0, 0)

    def listen(self) -> str:
        """Serve the hub to the monitors of other machines; return its address."""
        return HubServer(self._hub, self._settings.listen).address

    def run(self) -> None:
        """Watch until no rank is left, then delete temporary folders."""
        readings = self._ranks.read()  # the rank that has started this monitor has a heartbeat
        while self._ranks.any_left() and self._poll(readings):
            time.sleep(_POLL_SECONDS)
            readings = self._ranks.read()
        self._keep_messages()
        recorders = [r for r in self._ranks.recorders.values() if r.name.startswith(RECORDERS)]
        for folder in [Path(self._settings.heartbeats), *recorders]:
            shutil.rmtree(folder, ignore_errors=True)

    def _keep_messages(self) -> None:
        """Save the flight recorders if a timeout of a collective has ended the ranks."""
        target = self._folder / FOLDER / self._settings.messages
        with suppress(OSError):
            ranks = self._ranks.timed_out(target)
            if not ranks:
                return
            seen = f"a collective timed out, of ranks {', '.join(map(str, ranks))}"
            done = f"last messages of each process: {READER} {target}"
            print(f"{seen}; {done}", file=sys.stderr, flush=True)
            step = max((reading.step for reading in self._ranks.read()), default=None)
            add_event(
                self._folder,
                "timeout",
                seen,
                step=step,
                action="log",
                done=done,
                ranks=ranks,
                messages=str(target),
                host=self._settings.node,
            )

    def _poll(self, readings: list[RankReading]) -> bool:
        """Send readings, and carry out the hub's order.

        Returns:
            False once the ranks of this machine have been killed.
        """
        readings = [replace(r, waits=self._waits.get(r.rank)) for r in readings]
        try:
            order = self._client.exchange(self._settings.node, readings, collected=self._collected)
        except OSError:  # rank 0's machine is lost, which torchrun and timeouts detect
            return True
        if order.action == WATCH:
            self._collected, self._waits = False, {}
            self._report_notice()
        elif order.action == COLLECT and not self._collected:
            with suppress(OSError):  # the disk may hang or be full
                target = self._folder / FOLDER / order.stamp
                self._waits = self._ranks.stacks(target, wake=self._ends)
            self._collected = True
        elif order.action == END and order.verdict is not None:
            return self._end(order.verdict)
        return True

    def _report_notice(self) -> None:
        """Report, once per step, ranks that the others have long waited for."""
        notice = self._hub.notice
        if notice is None or (notice.step, notice.culprits[0]) == self._noticed:
            return
        self._noticed = (notice.step, notice.culprits[0])
        self._report("waiting", notice, "none")

    def _end(self, verdict: HangVerdict) -> bool:
        """Report a hang and kill the ranks of this machine, hung ranks first.

        Returns:
            True if the monitor goes on, because it only reports.
        """
        if self._client is self._hub:
            self._report("hang", verdict, "end" if self._ends else "report")
            if not self._ends:
                self._hub.resume()
        if not self._ends:
            return True
        self._ranks.kill(set(verdict.culprits))
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._ranks.any_left() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        self._ranks.kill(set(self._ranks.pids()))
        return False

    def _report(self, kind: str, verdict: HangVerdict, action: str) -> None:
        """Print a verdict, and add it to the run's events."""
        target = self._folder / FOLDER / self._hub.order.stamp
        is_hang = kind == "hang"
        stacks = f"; stacks in {target}" if is_hang else ""
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
                stacks=str(target) if is_hang else None,
                moved=round(self._hub.moved, 3) if is_hang else None,
                host=self._settings.node,
            )


class Hub:
    """Collector of the readings of all machines, which decides what the monitors do."""

    def __init__(
        self,
        config: ResolvedHangConfig,
        *,
        ranks: int,
        is_compiled: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the hub of a run with `ranks` ranks. It judges nothing before all have begun."""
        self._config, self._ranks = config, ranks
        self._is_compiled, self._clock = is_compiled, clock
        self._received: dict[str, tuple[float, list[RankReading]]] = {}
        self._collected: set[str] = set()
        self._since = 0.0
        self._lock = threading.Lock()
        self._reported: tuple[int, str, tuple[int, ...]] | None = None
        self.order = HubOrder()
        self.notice: HangVerdict | None = None
        self.moved = 0.0
        """Time of the last progress of any rank before the verdict, by this machine's clock."""

    def exchange(self, node: str, readings: Sequence[RankReading], *, collected: bool) -> HubOrder:
        """Store the readings of a machine, judge, and return the order.

        Args:
            node: name of the machine.
            readings: readings of the ranks of this node.
            collected: whether the machine has saved the stacks of its ranks.
        """
        with self._lock:
            self._received[node] = (self._clock(), list(readings))
            if collected:
                self._collected.add(node)
            self._judge()
            return self.order

    def resume(self) -> None:
        """Watch again after a verdict that was only reported. It is not reported twice."""
        with self._lock:
            assert self.order.verdict is not None
            self._reported, self.order = _identity(self.order.verdict), HubOrder()
            self._collected.clear()

    def _judge(self) -> None:
        """Update the order from the readings; the caller holds the lock."""
        # ages include the time since the readings arrived
        now = self._clock()
        readings = [
            replace(reading, age=reading.age + now - at)
            for at, readings in self._received.values()
            for reading in readings
        ]
        if self.order.action == WATCH and len(readings) == self._ranks:
            verdict = judge(readings, self._config, is_compiled=self._is_compiled)
            if verdict is None or not verdict.is_final:
                self.notice = verdict
            elif _identity(verdict) != self._reported:
                self._since, self.moved = now, now - min(reading.age for reading in readings)
                stamp = f"step-{verdict.step}-{time.strftime('%Y%m%d-%H%M%S')}"
                self.order = HubOrder(COLLECT, stamp, verdict)
        elif self.order.action == COLLECT:
            is_late = now - self._since > _COLLECT_SECONDS
            if is_late or self._collected >= self._received.keys():
                assert self.order.verdict is not None
                verdict = refine(self.order.verdict, readings)
                self.order = replace(self.order, action=END, verdict=verdict)


def _identity(verdict: HangVerdict) -> tuple[int, str, tuple[int, ...]]:
    return verdict.step, verdict.phase, verdict.culprits


class HubServer(socketserver.ThreadingTCPServer):
    """Server of the hub for the monitors of other machines."""

    daemon_threads = True

    def __init__(self, hub: Hub, host: str) -> None:
        """Listen on this machine's `host`; clients need the attribute `address` to connect."""
        super().__init__((host, 0), _HubHandler)
        self.hub, self.secret = hub, secrets.token_hex(16)
        self.address = f"{host}:{self.server_address[1]}:{self.secret}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _HubHandler(socketserver.StreamRequestHandler):
    """Connection of another machine's monitor, with a line of JSON per exchange."""

    timeout = _SILENCE_SECONDS

    def handle(self) -> None:
        """Answer each line with an order, until the connection is closed."""
        server = self.server
        assert isinstance(server, HubServer)
        with suppress(OSError, ValueError, TypeError, KeyError):
            secret = self.rfile.readline(_MESSAGE_BYTES).strip()
            if not secrets.compare_digest(secret, server.secret.encode()):
                return
            while line := self.rfile.readline(_MESSAGE_BYTES):
                message = json.loads(line)
                message["readings"] = [RankReading(**reading) for reading in message["readings"]]
                order = server.hub.exchange(**message)
                self.wfile.write(json.dumps(asdict(order)).encode() + b"\n")


class HubClient:
    """Client of the hub on another machine, with the hub's method `exchange`."""

    def __init__(self, address: str) -> None:
        """Create the client of a HubServer's address; it connects at the first exchange."""
        self._host, port, self._secret = address.rsplit(":", 2)
        self._port = int(port)
        self._socket: socket.socket | None = None

    def exchange(self, node: str, readings: Sequence[RankReading], *, collected: bool) -> HubOrder:
        """Send readings and return the hub's order; arguments as of `Hub.exchange`.

        Raises:
            OSError: the hub does not answer.
        """
        values = [asdict(reading) for reading in readings]
        message = {"node": node, "readings": values, "collected": collected}
        try:
            if self._socket is None:
                self._socket = socket.create_connection((self._host, self._port), _ANSWER_SECONDS)
                self._lines = self._socket.makefile("rb")
                self._socket.sendall(self._secret.encode() + b"\n")
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            answer = json.loads(self._lines.readline(_MESSAGE_BYTES))  # empty: connection closed
        except (OSError, ValueError) as error:
            if self._socket is not None:
                self._socket.close()
            self._socket = None
            raise OSError(str(error)) from error
        if facts := answer["verdict"]:
            facts |= {"culprits": tuple(facts["culprits"]), "nodes": tuple(facts["nodes"])}
            answer["verdict"] = HangVerdict(**facts)
        return HubOrder(**answer)


def main() -> None:
    """Run a monitor with the settings in the first argument; print the hub's address."""
    settings = MonitorSettings(**json.loads(sys.argv[1]))
    monitor = Monitor(settings)
    print(monitor.listen() if settings.listen else "", flush=True)
    sys.stdout.close()
    monitor.run()


if __name__ == "__main__":
    main()
