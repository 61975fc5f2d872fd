"""Faults of links: a check of eight made-up machines, and a run on two of them.

The machines are network namespaces (`network.py`), and what is late or lost are packets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.faults.machines import LOST
from benchmarks.faults.network import DEVICE, Network, network
from benchmarks.faults.outcome import NONE, Expected, Seen
from benchmarks.faults.runs import RANKS, Place, Run
from benchmarks.faults.table import fault
from benchmarks.harness import child_environment
from llmfoundry.recipe.front.paths import ROOT

_AGENTS = Path(__file__).with_name("agents.py")
MACHINES, LATE = 8, 0.05  # and seconds of a packet on a bad link
_PATIENCE = 600.0  # seconds, on a busy machine
NAMED = Expected("check", "named", detect_seconds=300, losses=NONE, status=3)


def check_links(folder: Path, is_late: Callable[[int, int], bool]) -> tuple[int, list[str], float]:
    """The check's exit status, whom it names for slow pairs, and the seconds it took."""
    folder.mkdir(parents=True)
    (folder / "kernel.log").write_text("[ 1.0] usb 1-1: new device\n")
    words = ["output=found", "health_check.kernel_log=kernel.log", "health_check.burn_seconds=0.1"]
    words += ["health_check.min_free_disk=1kb", "health_check.payloads=[4kb,256kb]"]
    began = time.monotonic()
    with network(MACHINES, "faults") as machines, ExitStack() as stack:
        machines.delay = lambda one, other: LATE if is_late(one, other) else 0.0
        started = [start(machines, number, words, folder) for number in range(MACHINES)]
        for process in started:
            stack.callback(process.kill)
        status = started[0].wait(_PATIENCE)
        for process in started:
            process.wait(_PATIENCE)
    found = json.loads((folder / "found" / "check.json").read_text())["findings"]
    named = [f"{f['where']}: {f['why']}" for f in found if f["check"] == "pairs" and
             f["level"] != "sound"]  # fmt: skip
    return status, named, time.monotonic() - began


def start(
    machines: Network, number: int, words: list[str], folder: Path
) -> subprocess.Popen[bytes]:
    """The check's process of a machine."""
    env = child_environment() | {
        "RANK": str(number), "LOCAL_RANK": "0", "WORLD_SIZE": str(MACHINES),
        "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(number), "NODE_NAME": f"node-{number}",
        "MASTER_ADDR": machines.address(0), "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with (folder / f"rank-{number}.log").open("wb") as log:
        return subprocess.Popen(
            [*machines.within(number), sys.executable, str(ROOT / "scripts" / "check.py"), *words],
            cwd=folder, env={**os.environ, **env}, stdout=log, stderr=log,
        )  # fmt: skip


def _named(place: Place, name: str, is_late: Callable[[int, int], bool], who: str) -> Seen:
    """Whether the check blames `who`, and nothing and nobody else."""
    status, named, seconds = check_links(place.folder / name, is_late)
    is_named = len(named) == 1 and named[0].startswith(f"{who}: ")
    action = "named" if is_named else "not named"
    told = "; ".join(named)
    return Seen("check" if named else "", action, seconds, None, None, NONE, status, told)


@fault("a bad link: 50 ms between two of eight machines", NAMED)
def bad_pair(place: Place) -> Seen:
    """Machines 2 and 5."""
    return _named(place, "pair", lambda a, b: {a, b} == {2, 5}, "node-2, rank 2 - node-5, rank 5")


@fault("a bad switch: 50 ms between two halves of eight machines", NAMED)
def bad_switch(place: Place) -> Seen:
    """Machines 0 to 3, and 4 to 7."""
    half = ", ".join(f"node-{number}, rank {number}" for number in range(4))
    return _named(place, "switch", lambda a, b: (a < 4) != (b < 4), half)


def _on_two(place: Place, name: str, strike: Callable[[Network, Run], None]) -> Seen:
    """A run of two agents, each on a machine of its own with two processes."""
    whole = place.undisturbed()
    with network(2, "agents") as machines:
        launch = [sys.executable, str(_AGENTS), ",".join(machines.names), str(RANKS // 2)]
        words = (f"supervise.launch={json.dumps(launch)}", "parallel.nproc_per_node=null")
        with place.start(name, *words) as run:
            run.wait_for(12)
            run.struck = time.time()
            strike(machines, run)
            run.end()
            return run.seen(whole)


@fault(
    "a machine gone: agent and ranks of one of two killed",
    Expected("supervisor: machine", "restart", detect_seconds=60, lost_steps=LOST),
)
def machine_gone(place: Place) -> Seen:
    """The scheduler ends the step, and the supervisor begins the next one."""

    def kill(machines: Network, run: Run) -> None:
        (agent,) = (p for p in run.children() if "--local-addr=10.77.0.2" in p.cmdline())
        for process in [agent, *agent.children(recursive=True)]:
            process.kill()

    return _on_two(place, "machine-gone", kill)


@fault(
    "no packet between two machines any more, until the run is ended",
    Expected("hang", "end, restart", detect_seconds=60, lost_steps=LOST),
)
def network_gone(place: Place) -> Seen:
    """Nobody is told: connections stay open, and all wait. hang.step_seconds is 10 here."""

    def cut(machines: Network, run: Run) -> None:
        machines.delay = lambda one, other: None
        run.wait_for_event()
        machines.delay = lambda one, other: 0.0

    return _on_two(place, "network-gone", cut)
