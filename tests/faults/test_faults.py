"""Faults injected into runs of four processes: who detects each, what is done, and what it costs.

    make bench-faults                     all of them, a minute or more each on two cores; a table
    make bench-faults FAULTS="rank_killed or typo"

Each function below `@fault` is a row of the table in benchmarks/README.md. Where a machine lacks
something, the fault is skipped with the reason: full disks, bad links and lost machines need root,
clocks and GPUs a C++ compiler (libraries that replace libc's clock and NVML), stores moto's server.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.harness import child_environment, table, write
from llmfoundry.events import read_events
from llmfoundry.loggers.metrics_file import read_metrics
from llmfoundry.recipe.paths import ROOT
from tests.data.s3_server import BUCKET, FaultyS3, s3_server
from tests.faults.network import DEVICE, Network, network
from tests.faults.runs import (
    CONSOLE,
    ENDED,
    EQUAL,
    LENGTH,
    NONE,
    PATIENCE,
    RANKS,
    SAVE,
    SKIPPED,
    STOPPED,
    Expected,
    Observed,
    Place,
    Run,
    as_table,
    compared,
)  # fmt: skip
from tests.resilience.fake_nvml import environment as fake_gpus
from tests.shards import write_mds

LOST = 2 * SAVE  # steps at most: a background save may still be running when the next is due
SLOW = "callbacks.plugins.pace.seconds=0.3"
RESTARTED = Expected("supervisor: unknown", "restart", detect_seconds=15, lost_steps=LOST)

FAULTS: dict[str, tuple[str, Expected, Callable[[Place], Observed]]] = {}
"""By function: title, what is expected, what injects it; in the order of the table."""
ROWS: dict[str, tuple[Expected, Observed]] = {}
"""Of the faults that were injected in this process."""

Inject = Callable[[Place], Observed]


def fault(title: str, expected: Expected) -> Callable[[Inject], Inject]:
    """Add the function below to `FAULTS`."""

    def added(inject: Inject) -> Inject:
        FAULTS[inject.__name__] = (title, expected, inject)
        return inject

    return added


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("faults") / "place")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_detected_and_costs_no_more_than_it_may(place: Place, name: str) -> None:
    title, expected, inject = FAULTS[name]
    place.name = name.replace("_", "-")
    ROWS[title] = expected, inject(place)
    assert ROWS[title][1].wrong(expected) == [], ROWS[title][1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_without_faults_reports_none(place: Place) -> None:
    """2,000 steps with all that watches a run; a slow process of a loaded machine may be true."""
    place.name = "quiet"
    length = ("max_duration=2000ba", "save_interval=100ba", "save_num_checkpoints_to_keep=2")
    with place.start(*length, "callbacks.watch.gpu=log", "callbacks.plugins.pace.seconds=0") as run:
        run.process.wait()
        expected = ("start", "decision")
        false = [
            e for e in run.events() if e["kind"] not in expected or e.get("cause", "done") != "done"
        ]
        assert (run.process.returncode, len(run.steps())) == (0, 2000), run.output()[-3000:]
    assert [e["what"] for e in false] == []


# Processes


def _kill(run: Run) -> None:
    run.signal(run.ranks()[1])


@fault("rank killed", RESTARTED)
def rank_killed(place: Place) -> Observed:
    """As the kernel does when memory runs out, or somebody by mistake."""
    return place.inject(_kill, after=2 * SAVE + 3)


@fault("rank killed while saving", RESTARTED)
def rank_killed_while_saving(place: Place) -> Observed:
    """The others' background saves wait for it: they must not delay the end."""

    def kill(run: Run) -> None:
        rank = run.ranks()[1]
        run.wait_for(2 * SAVE)
        run.signal(rank)

    fsdp = ("parallel=fsdp", f"parallel.nproc_per_node={RANKS}")  # a group replaces the section
    return place.inject(kill, *fsdp, like=fsdp, after=2 * SAVE - 1)


@fault("agent (torchrun) killed", RESTARTED)
def agent_killed(place: Place) -> Observed:
    """The ranks are orphans, which must not continue beside those of the next start.

    A save under way may report first that it failed: the agent hosts the store of all ranks.
    """
    return place.inject(lambda run: run.signal(run.launcher()), ignored=("save_failed",))


@fault(
    "rank stopped (SIGSTOP)",
    Expected("hang, rank 1", "end, restart", detect_seconds=STOPPED + 10, lost_steps=LOST),
)
def rank_stopped(place: Place) -> Observed:
    """It neither ends nor proceeds; all others wait for it."""
    return place.inject(lambda run: run.signal(run.ranks()[1], signal.SIGSTOP))


@fault("rank slowed by half", Expected("slow_rank, rank 2", "log", detect_seconds=60))
def rank_slowed(place: Place) -> Observed:
    """Its blocks take twice as long; a machine that is only slow is logged, and no more."""
    watch = ("callbacks.watch.interval=5", "callbacks.watch.slow_rank_above=1.5")
    return _inside(place, "slow_rank={step: 21}", *watch)


@fault("all ranks throttled to a quarter", Expected("mfu_drop", "log", detect_seconds=90))
def throttled(place: Place) -> Observed:
    """As heat or a power limit does, by SIGSTOP and SIGCONT; all processes alike.

    Steps during which a checkpoint is written are not compared: here no round would be left.
    """

    def throttle(run: Run) -> None:
        ranks = list(run.ranks().values())
        while run.process.poll() is None:
            for number, seconds in ((signal.SIGSTOP, 0.3), (signal.SIGCONT, 0.1)):
                for rank in ranks:
                    with suppress(psutil.Error):
                        rank.send_signal(number)
                time.sleep(seconds)

    watch = ("callbacks.watch.interval=4", "callbacks.watch.slow_rank=off")
    return place.inject(throttle, *watch, "save_interval=60ba", after=40)


@fault(
    "preemption (SIGTERM), and started again",
    Expected("supervisor: preemption", "stop", detect_seconds=30, lost_steps=0),
)
def preempted(place: Place) -> Observed:
    """It saves before it ends with status 75, on which a scheduler starts it again."""
    with place.start() as run:
        run.wait_for(12)
        run.signal(psutil.Process(run.process.pid), signal.SIGTERM)
        status = run.end()
    with place.start() as again:
        again.injected = run.injected
        again.end()
        seen = again.observed(place.undisturbed())
    return seen if status == 75 else replace(seen, status=status)


@fault("ended by the kernel for memory (SIGKILL)", replace(RESTARTED, detect_seconds=30))
def ended_for_memory(place: Place) -> Observed:
    """The kernel's log says why, and so does the decision. The log is a file of ours here."""
    log = place.folder / "kernel.log"
    log.touch()

    def kill(run: Run) -> None:
        rank = run.ranks()[3]
        _log_line(log, f"kernel: Out of memory: Killed process {rank.pid} (python) total-vm:9999kB")
        run.signal(rank)

    seen = place.inject(kill, f"health_check.kernel_log={log}")
    return seen if "no memory left" in seen.notes else replace(seen, detected_by="supervisor: ?")


def _log_line(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line}\n")


@fault(
    "callback does not return",
    Expected("hang, rank 2", "end, restart", detect_seconds=25, lost_steps=LOST),
)
def callback_hangs(place: Place) -> Observed:
    """One of the user's own, in one rank; it is named."""
    return _inside(place, "stuck={step: 23}", "hang.callback_seconds=10")


def _inside(place: Place, plugin: str, *overrides: str) -> Observed:
    """A fault of the plugin's, which notes its time itself."""
    return place.inject(lambda run: None, f"callbacks.plugins.{plugin}", *overrides, after=0)


# Numbers and data


@fault(
    "NaN in one rank, once",
    Expected("supervisor: numerical", "restart", detect_seconds=30, lost_steps=LOST),
)
def not_a_number(place: Place) -> Observed:
    """A silent error of one machine: the same steps, repeated, are right."""
    return _inside(place, "poison={step: 23}")


@fault(
    "out of memory in one rank",
    Expected("supervisor: user", "stop", detect_seconds=30, losses=ENDED, status=2),
)
def out_of_memory(place: Place) -> Observed:
    """PyTorch cannot allocate: a repetition would fail too, and the line says what to write."""
    return _inside(place, "out_of_memory={step: 23}")


@fault(
    "checkpoint of weights that are not finite",
    Expected("supervisor: numerical", "restart", detect_seconds=30, lost_steps=LOST),
)
def bad_checkpoint(place: Place) -> Observed:
    """Saved before the step that detects it: the second restart resumes from the one before."""
    return _inside(place, f"bad_weights={{step: {4 * SAVE}}}")


BAD = 31  # the first step with noise in its rows
BACK_TO = 20  # the newest checkpoint that is roll_back_steps (6) older
WITHOUT = f"callbacks.plugins.without_rows={{step: {BACK_TO + 1}, steps: {BAD - BACK_TO + 5}}}"
SPIKES = ("callbacks.watch.spike_window=16", "schedule.t_warmup=2ba")
ROLL_BACK = ("loss_spike=roll_back", "roll_back_steps=6", "roll_back_skip=5")


def _bad_data(place: Place, *overrides: str) -> Run:
    bad = f"callbacks.plugins.bad_rows={{step: {BAD}}}"
    return place.start(bad, *SPIKES, *overrides)


def _watch(*words: str) -> list[str]:
    return [f"callbacks.watch.{word}" for word in words]


def _bad_rows_read(run: Run) -> None:
    run.injected = next(step.time for step in run.steps() if step.number == BAD - 1)


@fault(
    "bad data, loss_spike=roll_back",
    Expected("loss_spike", "roll_back", detect_seconds=20, lost_steps=BAD - BACK_TO),
)
def bad_data_rolled_back(place: Place) -> Observed:
    """It ends as the run that never had the batches, with which it is compared."""
    expected = place.undisturbed(*SPIKES, WITHOUT)
    with _bad_data(place, *_watch(*ROLL_BACK)) as run:
        run.end()
        _bad_rows_read(run)
        return run.observed(expected)


@fault(
    "bad data, loss_spike=skip", Expected("loss_spike", "skip", detect_seconds=20, losses=SKIPPED)
)
def bad_data_skipped(place: Place) -> Observed:
    """Its three updates are left out."""
    with _bad_data(place, *_watch("loss_spike=skip")) as run:
        run.end()
        _bad_rows_read(run)
        return run.observed({}, losses_are=SKIPPED)


# Recipes and the supervisor


@fault(
    "typo in a key",
    Expected("the recipe's check", "stop", detect_seconds=30, losses=NONE, status=2),
)
def typo(place: Place) -> Observed:
    """Nothing is started, and the line names the key that was meant."""
    with place.start("save_intervall=5ba") as run:
        began, status = run.injected, run.end()
        is_named = "save_interval" in run.output() and not run.folder.exists()
        who, after = "the recipe's check" if is_named else "", time.time() - began
        return Observed(who, "stop", after, None, None, NONE, status, run.output().strip())


@fault(
    "mistake that only the run finds",
    Expected("supervisor: user", "stop", detect_seconds=60, losses=NONE, status=2),
)
def mistake(place: Place) -> Observed:
    """It is not tried again."""
    with place.start("data.paths=[nowhere]") as run:
        run.end()
        return run.observed({})


@fault("newest checkpoint damaged, and a rank killed",
       replace(RESTARTED, detect_seconds=30, lost_steps=LOST + SAVE))  # fmt: skip
def damaged(place: Place) -> Observed:
    """A few bytes are flipped meanwhile; the run resumes from the one before."""
    expected = place.undisturbed()
    with place.start() as run:
        run.wait_for(3 * SAVE + 2)
        launcher, ranks = run.launcher(), run.ranks()
        launcher.suspend()  # until the bytes are flipped
        run.signal(ranks[1])
        deadline = time.monotonic() + 60
        while any(_is_alive(rank) for rank in ranks.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        newest = max((run.folder / "checkpoints").glob("ba*/COMMIT")).parent
        path = max(newest.glob("*.distcp"), key=lambda one: one.stat().st_size)
        content = bytearray(path.read_bytes())
        middle = len(content) // 2
        content[middle : middle + 8] = bytes(byte ^ 0xFF for byte in content[middle : middle + 8])
        path.write_bytes(content)
        launcher.resume()
        run.end()
        seen = run.observed(expected)
        is_refused = f"{newest.name} is refused" in run.output()
    return seen if is_refused else replace(seen, losses=f"{newest.name} was not refused")


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@fault(
    "a second supervisor on the same run",
    Expected("supervisor: user", "stop", detect_seconds=60, losses=ENDED, status=75),
)
def second_supervisor(place: Place) -> Observed:
    """The second ends with a user's mistake; the first continues, and is then ended."""
    expected = place.undisturbed()
    with place.start("callbacks.plugins.pace.seconds=3") as first:
        first.wait_for(1)
        with place.start() as second:
            first.injected, status = time.time(), second.end()
        first.wait_for(len(first.steps()) + 1)
        first.process.terminate()
        first.end()
        seen = first.observed(expected)
    return replace(seen, status=seen.status if status == 2 else status)


@fault("logs on a full disk, rank killed", RESTARTED)
def logs_on_a_full_disk(place: Place) -> Observed:
    """Neither the run nor its supervisor can print a line from the start on."""
    return place.inject(_kill, log=Path("/dev/full"))


@fault(
    "checkpoints' folder renamed, rank killed",
    Expected("supervisor: unknown", "restart, wait, stop", 15, losses=ENDED, status=93),
)
def checkpoints_renamed(place: Place) -> Observed:
    """While the run is under way: nothing starts again from step 1."""

    def rename(run: Run) -> None:
        (run.folder / "checkpoints").rename(run.folder / "elsewhere")
        _kill(run)

    words = ("supervise.vanished_seconds=5",)
    return place.inject(rename, *words, after=2 * SAVE + 3, ignored=("save_failed", "hang"))


# Machines: disks, the kernel's log, GPUs, clocks


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """A file system of 24 MB in memory."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a disk")
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> Path:
    """Use every byte of it; the file that does."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


NOT_SAVED = "was not saved: No space left on device; training continues"


@fault(
    "a node's disk full for good, then room by hand",
    Expected("save_failed", "log, stop; by hand", detect_seconds=15, lost_steps=3 * LOST),
)
def disk_full(place: Place) -> Observed:
    """Three saves in a row fail, and it ends; with room again the same command resumes."""
    expected = place.undisturbed()
    with disk(place.folder / "runs" / place.name) as room:
        with place.start() as run:
            run.wait_for(12)
            run.injected = time.time()
            filler = fill(room)
            line = run.wait_for_text(NOT_SAVED)
            ended = run.end()
            seen = run.observed(expected).on_console(*line)
            stopped = "make room there, and run the same command" in run.output()
        filler.unlink()
        with place.start() as again:
            again.injected = run.injected
            again.end()
            after = again.observed(expected)
    if ended == 2 and stopped and seen.losses == ENDED:
        seen = replace(seen, detected_by="save_failed", action="log, stop; by hand")
    return replace(seen, back_seconds=after.back_seconds, lost_steps=after.lost_steps,
                   losses=after.losses, status=after.status)  # fmt: skip


@fault("a node's disk full for three seconds", Expected("save_failed", "log", detect_seconds=15))
def disk_full_for_a_while(place: Place) -> Observed:
    """A save fails and is repeated when the next is due; no line of the record is lost."""
    expected = place.undisturbed()
    with disk(place.folder / "runs" / place.name) as room, place.start() as run:
        run.wait_for(12)
        run.injected = time.time()
        filler = fill(room)
        line = run.wait_for_text(NOT_SAVED)
        filler.unlink()
        run.end()
        seen = run.observed(expected).on_console(*line)
        return replace(seen, detected_by="save_failed", action=seen.action or "log")


@fault("disk of the record full, checkpoints fit", Expected(CONSOLE, "", detect_seconds=5))
def record_full(place: Place) -> Observed:
    """Training ends well; the lines that did not fit are elsewhere, and complete the record."""
    expected = place.undisturbed()
    checkpoints = place.folder / "checkpoints-elsewhere"
    checkpoints.mkdir()
    with disk(place.folder / "runs" / place.name) as room:
        (room / "checkpoints").symlink_to(checkpoints)
        with place.start(env={"TMPDIR": str(place.folder)}) as run:
            run.wait_for(12)
            run.injected = time.time()
            filler = fill(room)
            line = run.wait_for_text("metrics.jsonl cannot be written: No space left on device")
            run.end()
            filler.unlink()
            (kept,) = place.folder.glob(f"{place.name}-metrics-*.jsonl")
            record = run.folder / "metrics.jsonl"
            record.write_bytes(record.read_bytes() + kept.read_bytes())
            return run.observed(expected).on_console(*line)


CHECKED = 600  # seconds for starts and checks: half a minute, except on a loaded machine
XID_79 = "NVRM: Xid (PCI:0000:c1:00): 79, pid=4067, name=python, GPU has fallen off the bus."


@fault(
    "XID 79 in the kernel's log, and a rank dies",
    Expected("check", "check, restart", detect_seconds=CHECKED, lost_steps=LOST),
)
def xid(place: Place) -> Observed:
    """The machine is blamed, not the program; supervise.act is false, so that is advice."""
    log = place.folder / "kernel-of-xid.log"
    log.write_text("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64\n")

    def die(run: Run) -> None:
        _log_line(log, XID_79)
        run.signal(run.ranks()[2])

    words = (f"health_check.kernel_log={log}", "supervise.confirm=quick", "hang.stopped_seconds=30")
    seen = place.inject(die, *words)
    decisions = [e for e in read_events(place.folder / "runs" / place.name) if
                 e["kind"] == "decision" and e.get("cause") != "done"]  # fmt: skip
    assert [d["cause"] for d in decisions] == ["machine"] and decisions[0]["bad_nodes"], decisions
    return seen


BROKEN = Expected("check", "check, stop", detect_seconds=CHECKED, losses=NONE, status=75)


def _before_run(place: Place, gpus: str) -> Observed:
    """A run with `health_check.before_run` on a machine one of whose GPUs is broken."""
    words = ("health_check.before_run=quick", "supervise.confirm=quick", "supervise.act=true")
    with place.start(*words, env=fake_gpus(gpus)) as run:
        run.end()
        return run.observed({})


@fault("GPU lost, before the run", BROKEN)
def gpu_lost(place: Place) -> Observed:
    """The run does not start; there is no other machine, so it has to be run elsewhere."""
    return _before_run(place, "healthy,healthy,healthy,lost")


@fault("uncorrectable ECC errors, before the run", BROKEN)
def gpu_ecc(place: Place) -> Observed:
    """As above."""
    return _before_run(place, "healthy,ecc,healthy,healthy")


@fault(
    "GPU lost in the run, and then its rank dies",
    Expected("gpu, rank 2", "log, restart", detect_seconds=60, lost_steps=LOST),
)
def gpu_lost_in_run(place: Place) -> Observed:
    """The watch reports it at the end of a round; the supervisor blames the machine."""
    states = place.folder / "gpus"
    states.write_text("healthy,healthy,healthy,healthy")

    def lose(run: Run) -> None:
        states.write_text("healthy,healthy,lost,healthy")
        run.wait_for_event()
        states.write_text("healthy,healthy,healthy,healthy")  # reset, before the next start
        run.ranks()[2].kill()

    alone = _watch("interval=4", "slow_rank=off", "mfu_drop=off")  # other work on this machine
    words = ("callbacks.plugins.fake_gpus={}", *alone, "hang.stopped_seconds=30")
    seen = place.inject(lose, *words, env=fake_gpus("none", FAKE_NVML_FILE=str(states)))
    causes = [e["cause"] for e in read_events(place.folder / "runs" / place.name) if
              e["kind"] == "decision"]  # fmt: skip
    assert causes == ["machine", "done"], causes
    return seen


CLOCK = ROOT / "tests" / "resilience" / "jumping_clock.cpp"
TIMES = ("time/remaining", "time/data_wait", "time/train", "time/checkpoint", "time/total")


@fault(
    "clock set on and back by an hour, and a rank stopped",
    Expected("hang, rank 1", "end, restart", detect_seconds=40, lost_steps=LOST),
)
def clock_jump(place: Place) -> Observed:
    """Of all processes of the run. The jumps alone do nothing, and the hang is still detected."""
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    clock, library = place.folder / "clock", place.folder / "clock.so"
    clock.write_text("0\n")
    build = [compiler, "-std=c++17", "-shared", "-fPIC", "-o", str(library), str(CLOCK)]
    subprocess.run([*build, "-ldl"], check=True)

    def jump(run: Run) -> None:
        for step, seconds in ((8, 3600), (16, 0), (24, -3600)):
            run.wait_for(step)
            with clock.open("r+") as file:  # at once: a reader sees the old or the new value
                file.write(f"{seconds}\n".ljust(16, "\n"))
        run.wait_for(32)
        kinds = [event["kind"] for event in read_events(run.folder)]
        assert kinds == ["start"], kinds
        run.signal(run.ranks()[1], signal.SIGSTOP)
        run.injected -= 3600  # by the run's clock

    env = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(clock)}
    seen = place.inject(jump, env=env, after=0)
    rows = read_metrics(place.folder / "runs" / place.name / "metrics.jsonl")
    times = [value for row in rows for name, value in row.items() if name.startswith(TIMES)]
    assert times and all(0 <= value < 1800 for value in times), (min(times), max(times))
    return seen


# Links, and machines of a network


MACHINES, LATE = 8, 0.05  # and seconds of a packet on a bad link
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
        started = [_start_check(machines, number, words, folder) for number in range(MACHINES)]
        for process in started:
            stack.callback(process.kill)
        statuses = [process.wait(CHECKED) for process in started]
    found = json.loads((folder / "found" / "check.json").read_text())["findings"]
    bad = [f for f in found if f["check"] == "pairs" and f["level"] != "sound"]
    return statuses[0], [f"{f['where']}: {f['why']}" for f in bad], time.monotonic() - began


def _start_check(
    machines: Network, number: int, words: Sequence[str], folder: Path
) -> subprocess.Popen[bytes]:
    env = child_environment() | {
        "RANK": str(number), "LOCAL_RANK": "0", "WORLD_SIZE": str(MACHINES),
        "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(number), "NODE_NAME": f"node-{number}",
        "MASTER_ADDR": machines.address(0), "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    check = [*machines.within(number), sys.executable, str(ROOT / "scripts" / "check.py"), *words]
    with (folder / f"rank-{number}.log").open("wb") as log:
        return subprocess.Popen(check, cwd=folder, env=env, stdout=log, stderr=log)


def _named(place: Place, is_late: Callable[[int, int], bool], who: str) -> Observed:
    """Whether the check blames `who`, and nothing else."""
    status, named, seconds = check_links(place.folder / place.name, is_late)
    is_named = len(named) == 1 and named[0].startswith(f"{who}: ")
    action, by = "named" if is_named else "not named", "check" if named else ""
    return Observed(by, action, seconds, None, None, NONE, status, "; ".join(named))


@fault("a bad link: 50 ms between two of eight machines", NAMED)
def bad_pair(place: Place) -> Observed:
    """Machines 2 and 5."""
    return _named(place, lambda a, b: {a, b} == {2, 5}, "node-2, rank 2 - node-5, rank 5")


@fault("a bad switch: 50 ms between two halves of eight machines", NAMED)
def bad_switch(place: Place) -> Observed:
    """Machines 0 to 3, and 4 to 7."""
    half = ", ".join(f"node-{number}, rank {number}" for number in range(4))
    return _named(place, lambda a, b: (a < 4) != (b < 4), half)


def _on_two(place: Place, inject: Callable[[Network, Run], None]) -> Observed:
    """A run of two agents, each on a machine of its own with two processes."""
    with network(2, "agents") as machines:
        program = [sys.executable, str(Path(__file__).with_name("network.py"))]
        launch = json.dumps([*program, ",".join(machines.names), str(RANKS // 2)])
        words = (f"supervise.launch={launch}", "parallel.nproc_per_node=null")
        return place.inject(lambda run: inject(machines, run), *words)


@fault(
    "a machine gone: agent and ranks of one of two killed",
    Expected("supervisor: machine", "restart", detect_seconds=60, lost_steps=LOST),
)
def machine_gone(place: Place) -> Observed:
    """The scheduler ends the step, and the supervisor starts the next one."""

    def kill(machines: Network, run: Run) -> None:
        (agent,) = (p for p in run.children() if "--local-addr=10.77.0.2" in p.cmdline())
        for process in [agent, *agent.children(recursive=True)]:
            process.kill()

    return _on_two(place, kill)


@fault(
    "no packet between two machines any more, until the run is ended",
    Expected("hang", "end, restart", detect_seconds=60, lost_steps=LOST),
)
def network_gone(place: Place) -> Observed:
    """No process is notified: connections stay open, and all wait. hang.step_seconds is 10 here."""

    def cut(machines: Network, run: Run) -> None:
        machines.delay = lambda one, other: None
        run.wait_for_event()
        machines.delay = lambda one, other: 0.0

    return _on_two(place, cut)


# Stores: a real S3 server behind a proxy in this process that fails on request; MLflow's server


class Store:
    """A store that answers, or fails. `env`: what a run needs to reach it."""

    def __init__(self, server: FaultyS3) -> None:
        self._answers, self._how = threading.Event(), ""
        self._answers.set()
        server.next_fault = self._fault  # type: ignore[method-assign]
        self.env = {"S3_ENDPOINT_URL": server.url, "AWS_ENDPOINT_URL": server.url}
        self.env |= {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}

    def fail(self, how: str) -> None:
        """Hang, or answer as `tests.data.s3_server` names it, until `answer`."""
        self._how = how
        self._answers.clear()

    def answer(self) -> None:
        """Answer again, waiting requests too."""
        self._answers.set()

    def _fault(self, key: str, method: str) -> str | None:
        if self._answers.is_set():
            return None
        if self._how != "hang":
            return self._how
        self._answers.wait()
        return "reset"


@contextmanager
def store(place: Place) -> Iterator[tuple[Store, tuple[str, ...], tuple[str, ...]]]:
    """It; overrides of a run with data there, in small shards, and of one with the same here."""
    shards = place.folder / "shards"
    if not shards.exists():
        write_mds(shards / "train", "rows", rows=RANKS * LENGTH)
    with s3_server() as (server, put):
        for path in sorted(shards.rglob("*")):
            if path.is_file():
                put(f"data/{path.relative_to(shards).as_posix()}", path.read_bytes())
        same = ("data.name=shards", "data.paths=[]", "data.split=train", "data.shuffle=false")
        there = (f"data.remote=s3://{BUCKET}/data", "data.prefetch=1b")
        there += (f"data.cache_folder={place.folder / f'cache-of-{place.name}'}",)
        yield Store(server), (*same, *there), (*same, f"data.local={shards}")


@fault("data store hangs for ten seconds", Expected("data_wait", "log", detect_seconds=60))
def data_hangs(place: Place) -> Observed:
    """It accepts and does not answer: retried after data.download_timeout, and no hang."""
    watch = _watch("slow_rank=off", "mfu_drop=off", "interval=4", "in_a_row=1")  # other work here
    watch += ["save_interval=20ba"]  # steps during which something is saved are not compared
    patient = ("data.download_timeout=3", "data.download_retry=50")

    with store(place) as (remote, there, here):

        def hang(run: Run) -> None:
            remote.fail("hang")
            time.sleep(10)
            remote.answer()

        words = (*there, *watch, *patient, SLOW)
        seen = place.inject(hang, *words, after=30, like=here, env=remote.env)
        kind, _, _ = seen.detected_by.partition(",")  # any rank may be the one that waits longest
        return replace(seen, detected_by=kind)


@fault(
    "data store answers 503, for longer than it is retried",
    Expected("supervisor: network", "restart", detect_seconds=90, lost_steps=LOST),
)
def data_busy(place: Place) -> Observed:
    """The run ends with a line of it, and is started again."""
    with store(place) as (remote, there, here):

        def fail(run: Run) -> None:
            remote.fail("slow down")
            run.wait_for_event()
            remote.answer()

        words = (*there, "data.download_timeout=3", "data.download_retry=2", SLOW)
        return place.inject(fail, *words, after=30, like=here, env=remote.env)


@fault(
    "checkpoint store gone until a save has failed",
    Expected("save_failed", "log", detect_seconds=60),
)
def checkpoints_gone(place: Place) -> Observed:
    """Connections are reset; training continues, and the next save is complete."""
    expected = place.undisturbed()
    with store(place) as (remote, *_):
        words = [f"save_folder=s3://{BUCKET}/runs/mine", "save_local_folder=here"]
        words += ["data.download_retry=1", "data.download_timeout=3", SLOW]
        with place.start(*words, env=remote.env) as run:
            run.folder = _working_copy(place.folder / "here", run)
            run.wait_for(12)
            run.injected = time.time()
            remote.fail("reset")
            run.wait_for_event()
            remote.answer()
            run.end()
            seen = run.observed(expected)
            others = [action for action in seen.action.split(", ") if action != "log"]
            return replace(seen, action=", ".join(["log", *others]) if seen.action else "")


@fault(
    "bad data, loss_spike=roll_back, checkpoints in a store",
    Expected("loss_spike", "roll_back", detect_seconds=30, lost_steps=BAD - BACK_TO),
)
def rolled_back_in_a_store(place: Place) -> Observed:
    """What was saved since is removed there, and all read the older checkpoint from there."""
    expected = place.undisturbed(*SPIKES, WITHOUT)
    words = [*_watch(*ROLL_BACK), f"callbacks.plugins.bad_rows={{step: {BAD}}}", *SPIKES]
    words += [f"save_folder=s3://{BUCKET}/runs/mine", "save_local_folder=here-too"]
    with store(place) as (remote, *_), place.start(*words, env=remote.env) as run:
        run.folder = _working_copy(place.folder / "here-too", run)
        run.end()
        _bad_rows_read(run)
        return run.observed(expected, ignored=("save_failed",))  # save_max_wait, under load


def _working_copy(above: Path, run: Run) -> Path:
    """Where the run works on this machine."""
    deadline = time.monotonic() + PATIENCE
    while run.process.poll() is None and time.monotonic() < deadline:
        for folder in above.glob("mine-*"):
            return folder
        time.sleep(0.1)
    raise RuntimeError(f"no working copy:\n{run.output()[-3000:]}")


@fault("MLflow's server killed, and later there again", Expected(CONSOLE, "", detect_seconds=60))
def mlflow_gone(place: Place) -> Observed:
    """Training does not wait for it; what it lacks is reported, and sent by scripts/track.py."""
    from tests.loggers.test_mlflow_server import Server

    expected = place.undisturbed()
    folder = place.folder / "mlflow"
    folder.mkdir()
    server = Server(folder)
    server.start()
    words = ("logger.mlflow=true", f"logger.tracking_uri={server.address}", SLOW)
    try:
        with place.start(*words) as run:
            run.wait_for(12)
            run.injected = time.time()
            server.kill()
            line = run.wait_for_text(") fails: ")
            run.end()
            lacking = "metrics.jsonl has every value" in run.output()
            seen = run.observed(expected).on_console(*line)
        server.start()
        track = [sys.executable, str(ROOT / "scripts" / "track.py"), f"run={run.folder}"]
        subprocess.run(track, cwd=place.folder, check=True, capture_output=True)
        has_all = dict(server.losses(run.folder)) == expected
    finally:
        server.kill()
    return replace(seen, action="" if lacking and has_all else "MLflow lacks values")


# No fault


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_reported_in_2000_steps_without_a_fault(place: Place) -> None:
    """On a machine with other work a drop of speed or a slow rank may be true: see the load."""
    steps, loads, place.name = 2000, [os.getloadavg()[0]], "quiet"
    words = (f"max_duration={steps}ba", "save_interval=100ba", "save_num_checkpoints_to_keep=2")
    pace = "callbacks.plugins.pace.seconds=0"
    with place.start(*words, *_watch("gpu=log"), pace) as run:
        while run.process.poll() is None:
            loads.append(os.getloadavg()[0])
            time.sleep(1.0)
        events, done = list(read_events(run.folder)), run.steps()
    assert not run.process.returncode and len(done) == steps, run.output()[-3000:]
    ends = ("start", "decision")
    false = [e for e in events if e["kind"] not in ends or e.get("cause", "done") != "done"]
    row: dict[str, Any] = {"run": "quiet", "steps": len(done), "events": len(false)}
    row |= {"seconds": done[-1].time - done[0].time, "load": sum(loads) / len(loads)}
    print("\n".join(table([row], {key: "{}" for key in row})))
    print(f"\nwritten to {write('faults-quiet', [row], {'ranks': RANKS})}")
    assert not false, [f"{event['kind']}: {event['what']}" for event in false]


# The table itself


SEEN = Observed("hang, rank 1", "end, restart", 4.0, 30.0, 3, EQUAL, 0, busy=1.0)
EXPECTED = Expected("hang, rank 1", "end, restart", detect_seconds=5, lost_steps=5)


def test_a_row_lists_what_is_not_as_expected() -> None:
    def wrong(**changes: Any) -> str:
        return "; ".join(replace(SEEN, **changes).wrong(EXPECTED))

    assert wrong() == wrong(detect_seconds=9.0, busy=2.0) == ""
    assert wrong(detect_seconds=9.0) == "detect_seconds: 9.0, expected at most 5.0"
    assert wrong(lost_steps=6) == "lost_steps: 6, expected at most 5"
    assert "lost_steps: None" in wrong(lost_steps=None) and "status: 1" in wrong(status=1)
    nobody = wrong(detected_by="", detect_seconds=None)
    assert "detected_by: ''" in nobody and "detect_seconds: None" in nobody
    lines = as_table({"one": (EXPECTED, replace(SEEN, losses="differ"))}).splitlines()
    assert lines[2].endswith("| 30.0 | 3 | differ | NO |") and "expected 'equal'" in lines[-1]


def test_losses_are_compared_with_the_undisturbed_runs() -> None:
    losses = {1: 4.0, 2: 3.0, 3: 2.5}
    assert compared(losses, losses) == EQUAL and compared({}, losses) == NONE
    assert compared({1: 4.0, 2: 3.0}, losses) == ENDED
    assert "missing" in compared({1: 4.0, 3: 2.5}, losses)
    assert compared({**losses, 2: 3.25, 3: 2.6}, losses) == "differ from step 2 on, by 0.2 at most"
