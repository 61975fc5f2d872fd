"""The monitor as a process beside processes that beat: stopped, asleep, killed, and left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from llmfoundry.events import read_events
from llmfoundry.recipe.resilience import HangConfig
from llmfoundry.resilience.hang.collect import RECORDERS
from llmfoundry.resilience.hang.monitor import MonitorSettings
from llmfoundry.telemetry import RECORDER, read_heartbeats
from tests.tiny import ENV, ROOT

# A rank without PyTorch: each step waits for all others, as a sum over gradients does.
RANK = """
import os, sys, threading, time
from pathlib import Path
from llmfoundry.telemetry import RECORDER, beat, in_callback, read_heartbeats
from llmfoundry.telemetry import start_heartbeat, stop_heartbeat

folder, rank, ranks, asleep = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
done = folder.parent / "done"

def record():  # what PyTorch's thread beside NCCL does
    place = Path(os.environ[RECORDER])
    pipe = place / f"ask-{rank}.pipe"
    os.mkfifo(pipe)
    asked, said = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), b""
    while not said:
        time.sleep(0.05)
        try:
            said = os.read(asked, 1)
        except BlockingIOError:  # somebody has opened it, and is about to write
            pass
    (place / f"flight-{rank}").write_text(f"messages of {rank}")

def wait_for_a_store_that_never_answers():
    time.sleep(1000)

if RECORDER in os.environ:
    threading.Thread(target=record, daemon=True).start()
start_heartbeat(folder, rank)
for step in range(1, 100_000):
    beat("data", step)
    if rank == 1 and step == 20 and asleep == "data":
        wait_for_a_store_that_never_answers()
    beat("step", step)
    if rank == 1 and step == 20 and asleep == "callback":
        beat("callbacks", step)
        with in_callback("Samples.on_step"):
            time.sleep(1000)
    beat("update", step)
    with in_callback("Speed.on_log"):
        pass
    while len(there := read_heartbeats(folder)) < ranks or min(b["step"] for b in there) < step:
        time.sleep(0.002)
        if done.exists() and len(there) < ranks:
            break
    if done.exists():
        break
stop_heartbeat()
"""
LIMITS = HangConfig(step_seconds=2.0, data_seconds=2.0, stopped_seconds=2.0, callback_seconds=2.0)
LIMITS.fill()
RANKS = 3


class Group:
    """Three ranks and their monitor."""

    def __init__(self, folder: Path) -> None:
        self.beats, self.run = folder / "beats", folder / "run"
        self.recorder = folder / "recorder"
        self.beats.mkdir()
        self.recorder.mkdir()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, asleep: str = "", *, ends: bool = True, recorder: bool = False) -> None:
        """Start all of them; `asleep`: the phase in which rank 1 sleeps at step 20."""
        env = ENV | {"PYTHONPATH": str(ROOT)} | ({RECORDER: str(self.recorder)} if recorder else {})
        self.run.mkdir()
        config = asdict(replace(LIMITS, action="end" if ends else "report"))
        facts = MonitorSettings(str(self.beats), str(self.run), "here", RANKS, config)
        words = ["-m", "llmfoundry.resilience.hang.monitor", json.dumps(asdict(facts))]
        commands = [["-c", RANK, str(self.beats), str(r), str(RANKS), asleep] for r in range(RANKS)]
        for command in [*commands, words]:
            if command == words:
                until(lambda: bool(read_heartbeats(self.beats)))
            process = subprocess.Popen(
                [sys.executable, *command],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self.processes.append(process)
        self.ranks, self.monitor = self.processes[:RANKS], self.processes[RANKS]
        assert self.monitor.stdout is not None
        self.monitor.stdout.readline()  # it looks from now on
        until(lambda: [b["step"] >= 10 for b in read_heartbeats(self.beats)] == [True] * RANKS)

    def wait(self) -> str:
        """What the monitor said by its end."""
        return self.monitor.communicate(timeout=100)[1]

    def steps(self) -> list[int]:
        return [beat["step"] for beat in read_heartbeats(self.beats)]


def until(is_so: Callable[[], bool]) -> None:
    """Wait for something, in vain for at most 100 s."""
    deadline = time.monotonic() + 100
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def test_a_stopped_rank_is_named_with_its_stack_and_all_are_ended(group: Group) -> None:
    group.start(recorder=True)
    sent = time.monotonic()
    group.ranks[1].send_signal(signal.SIGSTOP)
    said = group.wait()
    assert "rank 1 on here hangs in phase" in said and "process state: stopped" in said
    (event,) = read_events(group.run)
    assert (event["kind"], event["rank"], event["action"]) == ("hang", 1, "end")
    # It was woken for its stack, and beat once more; that is not when the run last went on.
    assert sent - 30 < event["moved"] < time.monotonic() - (LIMITS.stopped_seconds or 0) / 2
    stacks = Path(event["stacks"])
    for rank in range(RANKS):
        text = (stacks / f"rank-{rank}.txt").read_text()
        assert "most recent call first" in text  # by faulthandler
        assert (stacks / f"flight-{rank}").read_text() == f"messages of {rank}"
    text = (stacks / "rank-1.txt").read_text()  # those of ranks that continue may be cut short
    assert "on here: stopped" in text and 'File "<string>"' in text
    assert [rank.wait(10) for rank in group.ranks] == [-signal.SIGKILL] * RANKS
    assert not group.beats.exists()


def test_what_nccl_wrote_of_a_timeout_is_kept_with_the_run(group: Group) -> None:
    """Its watchdog writes, and ends the process: nobody hangs, and nobody asks for stacks."""
    group.recorder = group.recorder.rename(group.recorder.with_name(f"{RECORDERS}1"))
    group.start(recorder=True)
    (group.recorder / "flight-2").write_bytes(b"messages of 2")
    for rank in group.ranks:
        rank.kill()
        rank.wait()
    said = group.wait()
    (event,) = read_events(group.run)
    assert (event["kind"], event["ranks"], event["action"]) == ("timeout", [2], "log")
    assert event["messages"] in said and "torchfrtrace" in said
    assert (Path(event["messages"]) / "flight-2").read_bytes() == b"messages of 2"
    assert not group.recorder.exists()


def test_a_rank_that_sleeps_is_named_by_its_phase_and_its_stack_says_where(group: Group) -> None:
    group.start("data")
    said = group.wait()
    assert "rank 1 on here hangs in phase data of step 20" in said
    assert "all others wait for it" in said
    (event,) = read_events(group.run)
    assert (event["rank"], event["phase"], event["step"]) == (1, "data", 20)
    named = "in wait_for_a_store_that_never_answers"
    texts = [(Path(event["stacks"]) / f"rank-{rank}.txt").read_text() for rank in range(RANKS)]
    assert [named in text for text in texts] == [False, True, False]


@pytest.mark.slow
def test_a_callback_that_does_not_return_is_named(group: Group) -> None:
    group.start("callback")
    said = group.wait()
    assert "rank 1 on here hangs in callback Samples.on_step, in phase callbacks of step 20" in said


def test_a_killed_rank_is_no_hang_while_its_launcher_ends_the_others(group: Group) -> None:
    group.start()
    os.kill(group.ranks[2].pid, signal.SIGKILL)
    group.ranks[2].wait()
    for rank in group.ranks[:2]:
        rank.kill()
        rank.wait()
    assert group.wait() == ""
    assert not list(read_events(group.run))


def test_ranks_that_are_done_take_the_monitor_with_them(group: Group) -> None:
    group.start()
    (group.run.parent / "done").touch()
    assert group.wait() == ""  # though nobody has waited for them yet
    assert [rank.wait(100) for rank in group.ranks] == [0] * RANKS
    assert not list(read_events(group.run)) and not group.beats.exists()


def test_where_it_only_reports_the_run_continues_once_it_can(group: Group) -> None:
    group.start(ends=False)
    group.ranks[1].send_signal(signal.SIGSTOP)
    until(lambda: bool(list(read_events(group.run))))
    time.sleep(1)  # in which the same could be reported again
    (event,) = read_events(group.run)
    assert (event["rank"], event["action"]) == (1, "report")
    before = max(group.steps())
    group.ranks[1].send_signal(signal.SIGCONT)
    until(lambda: len(group.steps()) == RANKS and min(group.steps()) > before + 5)
    assert [rank.poll() for rank in group.ranks] == [None] * RANKS
