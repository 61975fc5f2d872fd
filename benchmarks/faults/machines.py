"""Faults of machines: full disks, GPUs, the kernel's log, clocks.

Disks are small file systems in memory, which takes root (`mount`); GPUs are those of the library
that stands in for NVIDIA's in tests/resilience; the clock is that of jumping_clock.cpp there.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.outcome import ENDED, NONE, Expected, Seen, need
from benchmarks.faults.runs import Place, Run
from benchmarks.faults.table import fault
from llmfoundry.events import read_events
from llmfoundry.loggers.metrics import read_metrics
from llmfoundry.recipe.front.paths import ROOT
from tests.resilience.fake_nvml import environment as fake_gpus

LOST = 10  # steps at most: two saves
WARNED = "console"
"""Who tells what is in no event."""
_TIMES = ("time/remaining", "time/data_wait", "time/train", "time/checkpoint", "time/total")
_ROOM = "24m"
_CHECKED = 600  # seconds for starts and checks: half a minute, but on a machine with other work
_CLOCK = ROOT / "tests" / "resilience" / "jumping_clock.cpp"
XID_79 = "NVRM: Xid (PCI:0000:c1:00): 79, pid=4067, name=python, GPU has fallen off the bus."


class Listener:
    """When a text was first in a run's output, after the fault."""

    def __init__(self, run: Run, text: str) -> None:
        """Listen from now on."""
        self._run, self._text, self.heard = run, text, None
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    heard: float | None

    def _listen(self) -> None:
        while self._run.process.poll() is None and not self._hears():
            time.sleep(0.1)
        self._hears()

    def _hears(self) -> bool:
        if self.heard is None and self._text in self._run.said():
            self.heard = time.time()
        return self.heard is not None

    def seen(self, seen: Seen) -> Seen:
        """The same, with the console as who told, if it has."""
        self._thread.join()
        if self.heard is None:
            return seen
        line = next(line for line in self._run.said().splitlines() if self._text in line)
        seconds = self.heard - self._run.struck
        return replace(seen, detected_by=WARNED, detect_seconds=seconds, notes=line.strip())


@contextmanager
def disk(place: Path) -> Iterator[Path]:
    """A small file system in memory."""
    need(os.geteuid() == 0, "root, to mount a disk")
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_ROOM}", "none", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: Path) -> Path:
    """Use every byte of it; the file that does."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


@fault(
    "a node's disk full for good, then room by hand",
    Expected("save_failed", "log, stop; by hand", detect_seconds=15, lost_steps=3 * LOST),
)
def disk_full(place: Place) -> Seen:
    """Three saves in a row fail, and it ends; with room again the same command goes on."""
    whole = place.undisturbed()
    with disk(place.folder / "runs" / "disk-full") as room:
        with place.start("disk-full") as run:
            run.wait_for(12)
            run.struck = time.time()
            filler = fill(room)
            heard = Listener(run, "was not saved: No space left on device; training continues")
            ended = run.end()
            seen = heard.seen(run.seen(whole))
            stopped = "make room there, and run the same command" in run.said()
        told = ended == 2 and stopped and seen.losses == ENDED
        filler.unlink()
        with place.start("disk-full") as again:
            again.struck = run.struck
            again.end()
            after = again.seen(whole)
    action = "log, stop; by hand" if told else seen.action
    return replace(seen, detected_by="save_failed" if told else seen.detected_by, action=action,
                   back_seconds=after.back_seconds, lost_steps=after.lost_steps,
                   losses=after.losses, status=after.status)  # fmt: skip


@fault("a node's disk full for three seconds", Expected("save_failed", "log", detect_seconds=15))
def disk_full_for_a_while(place: Place) -> Seen:
    """A save fails and is tried again when the next is due; no line of the record is lost."""
    whole = place.undisturbed()
    name = "disk-full-a-while"
    with disk(place.folder / "runs" / name) as room, place.start(name) as run:
        run.wait_for(12)
        run.struck = time.time()
        filler = fill(room)
        failed = Listener(run, "was not saved: No space left on device; training continues")
        while failed.heard is None and run.process.poll() is None:
            time.sleep(0.1)
        filler.unlink()
        run.end()
        seen = failed.seen(run.seen(whole))
        return replace(seen, detected_by="save_failed", action=seen.action or "log")


@fault("disk of the record full, checkpoints fit", Expected(WARNED, "", detect_seconds=5))
def record_full(place: Place) -> Seen:
    """Training ends well; the lines that found no room lie elsewhere, and complete the record."""
    whole = place.undisturbed()
    checkpoints = place.folder / "checkpoints-elsewhere"
    checkpoints.mkdir()
    with disk(place.folder / "runs" / "record-full") as room:
        (room / "checkpoints").symlink_to(checkpoints)
        with place.start("record-full", env={"TMPDIR": str(place.folder)}) as run:
            run.wait_for(12)
            run.struck = time.time()
            filler = fill(room)
            heard = Listener(run, "metrics.jsonl cannot be written: No space left on device")
            run.end()
            filler.unlink()
            (kept,) = place.folder.glob("record-full-metrics-*.jsonl")
            record = run.folder / "metrics.jsonl"
            record.write_bytes(record.read_bytes() + kept.read_bytes())
            return heard.seen(run.seen(whole))


@fault(
    "XID 79 in the kernel's log, and a rank dies",
    Expected("check", "check, restart", detect_seconds=_CHECKED, lost_steps=LOST),
)
def xid(place: Place) -> Seen:
    """The machine is blamed, not the program; supervise.act is false, so that is advice."""
    whole = place.undisturbed()
    log = place.folder / "kernel.log"
    log.write_text("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64\n")
    words = (f"health_check.kernel_log={log}", "supervise.confirm=quick", "hang.stopped_seconds=30")
    with place.start("xid", *words) as run:
        run.wait_for(12)
        with log.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {XID_79}\n")
        run.strike(run.ranks()[2])
        run.end()
        seen = run.seen(whole)
        (decision,) = (event for event in run.events() if event["kind"] == "decision")
        assert decision["cause"] == "machine" and decision["bad_nodes"], decision
        return replace(seen, notes=str(decision["what"]))


def _before_run(place: Place, name: str, gpus: str) -> Seen:
    """A run with `health_check.before_run` on a machine one of whose GPUs is broken."""
    words = ("health_check.before_run=quick", "supervise.confirm=quick", "supervise.act=true")
    with place.start(name, *words, env=fake_gpus(gpus)) as run:
        run.end()
        return run.seen({})


BAD = Expected("check", "check, stop", detect_seconds=_CHECKED, losses=NONE, status=75)


@fault("GPU lost, before the run", BAD)
def gpu_lost(place: Place) -> Seen:
    """The run does not begin; there is no other machine, so that it is to be run elsewhere."""
    return _before_run(place, "gpu-lost", "healthy,healthy,healthy,lost")


@fault("uncorrectable ECC errors, before the run", BAD)
def gpu_ecc(place: Place) -> Seen:
    """As above."""
    return _before_run(place, "gpu-ecc", "healthy,ecc,healthy,healthy")


@fault(
    "GPU lost in the run, and then its rank dies",
    Expected("gpu, rank 2", "log, restart", detect_seconds=60, lost_steps=LOST),
)
def gpu_lost_in_run(place: Place) -> Seen:
    """The watch tells of it at the end of a round; the supervisor blames the machine."""
    whole = place.undisturbed()
    states = place.folder / "gpus"
    states.write_text("healthy,healthy,healthy,healthy")
    plugins = [str(Path(__file__).with_name(name)) for name in ("inside.py", "inside_gpus.py")]
    watch = [f"callbacks.watch.{word}" for word in ("interval=4", "slow_rank=off", "mfu_drop=off")]
    words = (f"plugins=[{','.join(plugins)}]", *watch)  # other work on this machine is not asked
    env = fake_gpus("none", FAKE_NVML_FILE=str(states))
    with place.start("gpu-lost-in-run", *words, "hang.stopped_seconds=30", env=env) as run:
        run.wait_for(12)
        run.struck = time.time()
        states.write_text("healthy,healthy,lost,healthy")
        run.wait_for_event()
        states.write_text("healthy,healthy,healthy,healthy")  # reset, before the next start
        run.ranks()[2].kill()
        run.end()
        decisions = [e["cause"] for e in run.events() if e["kind"] == "decision"]
        assert decisions == ["machine"], decisions
        return run.seen(whole)


def _set(clock: Path, seconds: int) -> None:
    """Set the clock of a run off; who reads the file meanwhile finds the one or the other."""
    with clock.open("r+") as file:
        file.write(f"{seconds}\n".ljust(16, "\n"))


@fault(
    "clock set on and back by an hour, and a rank stopped",
    Expected("hang, rank 1", "end, restart", detect_seconds=40, lost_steps=LOST),
)
def clock_jump(place: Place) -> Seen:
    """Of all processes of the run. The jumps alone do nothing, and the hang is still found."""
    compiler = shutil.which("g++")
    need(compiler is not None, "g++")
    whole = place.undisturbed()
    clock, library = place.folder / "clock", place.folder / "clock.so"
    clock.write_text("0\n")
    build = [str(compiler), "-std=c++17", "-shared", "-fPIC", "-o", str(library), str(_CLOCK)]
    subprocess.run([*build, "-ldl"], check=True)
    env = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(clock)}
    with place.start("clock-jump", env=env) as run:
        for step, jump in ((8, 3600), (16, 0), (24, -3600)):
            run.wait_for(step)
            _set(clock, jump)
        run.wait_for(32)
        told = [event["kind"] for event in read_events(run.folder)]
        assert told == ["start"], told
        run.strike(run.ranks()[1], signal.SIGSTOP)
        run.struck -= 3600  # by the run's clock
        run.end()
        rows = read_metrics(run.folder / "metrics.jsonl")
        times = [value for row in rows for name, value in row.items() if name.startswith(_TIMES)]
        assert times and all(0 <= value < 1800 for value in times), (min(times), max(times))
        return run.seen(whole)
