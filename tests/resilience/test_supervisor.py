"""The supervisor around commands that fail as reported: real processes without PyTorch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.cli.command_line import CommandLine
from llmfoundry.cli.commands.supervise import supervise
from llmfoundry.cli.recipe_types import checked_for, supervised
from llmfoundry.errors import UserError
from llmfoundry.events import add_event, read_events
from llmfoundry.exit_status import ResumeLimits, own_node
from llmfoundry.recipe.before_training import CheckFinetuneRecipe
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.resilience import SuperviseConfig
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.resilience.supervise import supervisor
from llmfoundry.resilience.supervise.attempt import AttemptTimes, RunningAttempt, new_folder
from llmfoundry.resilience.supervise.supervisor import earlier_attempts
from tests.tiny import ENV, ROOT

XID = "NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.\n"
# A run of ten steps with a checkpoint after each third, that fails as its plan says for an attempt.
RUN = (
    f"XID = {XID!r}"
    + """
import json, os, signal, sys, time
from pathlib import Path
from llmfoundry.exit_status import record_end
from llmfoundry.telemetry import beat, start_heartbeat, stop_heartbeat
from llmfoundry.exit_status import resume_limits

run = Path("run")
plan = json.loads(Path("plan.json").read_text())
started = len(list(run.glob("started-*")))
(run / f"started-{started}").touch()
fault = plan[started] if started < len(plan) else ""
beats = Path(os.environ["LLMFOUNDRY_BEATS"]) / "here"
beats.mkdir()
start_heartbeat(beats, 0)
limits = resume_limits()
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
store = Path("store") if Path("store").exists() else run
saved = [int(p.parent.name[2:]) for p in store.glob("checkpoints/ba*/COMMIT")]
done = max((batch for batch in saved if batch < (limits.before or 99)), default=0)

saved_last = done or -1

def save(step):
    global saved_last
    saved_last = step
    folder = store / f"checkpoints/ba{step:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "COMMIT").touch()

for step in range(done + 1, 11):
    beat("data", step, saved=saved_last)
    beat("step", step)
    if step == 5 and fault == "vanishes":
        (run / "checkpoints").rename(run / "renamed")
        os.kill(os.getpid(), signal.SIGKILL)
    if step == done + 1 == 7 and fault == "bad checkpoint":
        record_end(2, "mistake", ["optimizer.lr: the loss was not finite in step 7"])
        sys.exit(2)
    if step == 7 and fault == "killed in step 7":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 5 and fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == done + 1 and fault == "killed at once":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 5 and fault == "xid":
        with Path("kernel.log").open("a") as log:
            log.write(XID)
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 5 and fault == "hung, and the clock is wrong":
        hang = {"time": 1.0, "kind": "hang", "action": "end", "what": "rank 0 hangs", "nodes": []}
        with (run / "events.jsonl").open("a") as events:
            print(json.dumps(hang), file=events)
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 2 and fault == "mistake":
        record_end(2, "mistake", ["data.paths[0]: x is not there; write another"])
        sys.exit(2)
    if step == 5 and fault == "nan":
        record_end(2, "mistake", ["optimizer.lr: the loss was not finite in step 5"])
        sys.exit(2)
    while step == 5 and fault == "waits":
        time.sleep(0.02)
        if asked:
            save(4)
            record_end(75, "stopped", ["stopped by SIGTERM, and saved"])
            sys.exit(75)
    beat("update", step)
    time.sleep(0.3 if step == done + 1 else 0.06)
    if step % 3 == 0 or step == 10:
        beat("save", step)
        save(step)
stop_heartbeat()
if fault != "says nothing":
    record_end(0, "done", [])
"""
)
CHECK = """
import json, sys
from pathlib import Path
output = Path(next(word for word in sys.argv if word.startswith("output="))[7:])
output.mkdir(parents=True, exist_ok=True)
(output / "check.json").write_text(json.dumps({"bad_nodes": json.loads(sys.argv[1])}))
sys.exit(3)
"""
SUPERVISE = """
import json, os, sys
from pathlib import Path
from llmfoundry.exit_status import own_node
from llmfoundry.resilience.supervise import kubernetes_nodes
from llmfoundry.resilience.supervise.checkpoints import list_in_folder
from llmfoundry.resilience.supervise.supervisor import Supervisor, earlier_attempts
from llmfoundry.recipe.resilience import SuperviseConfig
config = SuperviseConfig(**{"wait_seconds": 0.1} | json.loads(sys.argv[1]))
check = ["check.py", json.dumps([own_node()])]
kubernetes_nodes.ACCOUNT = Path(sys.argv[2])
run = Path("run")
attempts = earlier_attempts(run)
store = Path("store") if Path("store").exists() else None
facts = {"kernel_log": "kernel.log", "attempts": attempts, "url": "s3://store" if store else ""}
facts["list_checkpoints"] = lambda: list_in_folder(store or run)
supervisor = Supervisor(config, run, ["run.py"], check, **facts)
sys.exit(supervisor.run())
"""


class Place:
    """A folder with a run, its plan, and a supervisor to start."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.run.mkdir()
        (folder / "run.py").write_text(RUN)
        (folder / "check.py").write_text(CHECK)
        (folder / "kernel.log").touch()

    def start(
        self,
        plan: list[str],
        *,
        env: Mapping[str, str] | None = None,
        account: Path | None = None,
        stdout: int | None = None,
        stderr: int = subprocess.PIPE,
        no_stderr: bool = False,
        **config: Any,
    ) -> subprocess.Popen[str]:
        """`account`: a folder in place of a Kubernetes pod's."""
        (self.folder / "plan.json").write_text(json.dumps(plan))
        command = [sys.executable, "-c", SUPERVISE, json.dumps(config), str(account or "none")]
        return subprocess.Popen(
            ["sh", "-c", 'exec "$@" 2>&-', "sh", *command] if no_stderr else command,
            cwd=self.folder,
            env={**ENV, "PYTHONPATH": str(ROOT), **(env or {})},
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    def supervise(self, plan: list[str], **config: Any) -> int:
        process = self.start(plan, **config)
        self.said = process.communicate(timeout=100)[1]
        return process.returncode

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run) if event["kind"] == kind]

    def decisions(self) -> list[tuple[str, str]]:
        return [(event["cause"], event["action"]) for event in self.events("decision")]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    yield Place(tmp_path)


def test_a_killed_run_resumes_and_the_way_back_is_measured(place: Place) -> None:
    assert place.supervise(["killed"]) == 0
    assert place.decisions() == [("unknown", "restart"), ("done", "finish")]
    (back,) = place.events("returned")
    assert back["step"] == 4 and back["lost_steps"] == 1  # killed in step 5, saved after step 3
    parts = back["seconds"]
    assert list(parts) == ["detect", "restart", "start", "load", "first_step"]
    assert all(seconds >= 0 for seconds in parts.values()) and parts["restart"] >= 0.1
    assert [event["checkpoint"] for event in place.events("decision")] == [3, 10]
    assert "back at step 4 after" in place.said


def test_three_attempts_without_a_newer_checkpoint_are_enough(place: Place) -> None:
    assert place.supervise(["killed at once"] * 9, max_restarts=9) == 93
    assert place.decisions() == [("unknown", "restart")] * 2 + [("unknown", "stop")]
    assert "3 attempts in a row left no newer checkpoint" in place.said


def test_progress_in_a_store_is_seen_there(place: Place) -> None:
    (place.folder / "store").mkdir()
    assert place.supervise(["killed", "killed at once"]) == 0
    progress = [event["progressed"] for event in place.events("decision")]
    assert progress == [True, False, True]


def test_checkpoints_that_have_vanished_are_waited_for_and_nothing_begins_at_step_1(
    place: Place,
) -> None:
    """Renamed while the run was under way: only what it logged shows that there were any."""
    assert place.supervise(["vanishes"], vanished_seconds=0.3) == 93
    reported = (
        "checkpoint ba0000003 in run has vanished since the last attempt ended, and run/checkpoints"
        " is not there: renamed, deleted or not mounted? nothing was started; bring it back and run"
        " the same command; to begin at step 1, delete the rest of run or write another run_name"
    )
    assert reported in place.said and len(place.events("start")) == 1
    assert place.events("checkpoints")[0]["action"] == "wait"
    assert place.supervise([], vanished_seconds=0.1) == 93  # another supervisor knows it, too
    process = place.start([], vanished_seconds=60)
    deadline = time.monotonic() + 60
    while len(place.events("checkpoints")) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    (place.run / "renamed").rename(place.run / "checkpoints")  # it is mounted late
    process.communicate(timeout=100)
    assert process.returncode == 0
    last = place.events("start")[-1]
    assert last["attempt"] == 1 and len(place.events("start")) == 2
    assert sorted(p.name for p in place.run.glob("checkpoints/ba*"))[0] == "ba0000003"


def test_a_folder_that_is_gone_is_not_made_anew(place: Place) -> None:
    process = place.start(["killed at once"] * 2, wait_seconds=1.0, vanished_seconds=0.1)
    deadline = time.monotonic() + 60
    while not place.events("decision") and time.monotonic() < deadline:
        time.sleep(0.02)
    (place.run / "checkpoints/ba0000003").mkdir(parents=True)
    process.kill()
    process.communicate()
    (place.run / "checkpoints/ba0000003/COMMIT").touch()
    process = place.start(["", "killed"], wait_seconds=1.0, vanished_seconds=0.1)
    while len(place.events("decision")) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    place.run.rename(place.folder / "elsewhere")
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 93 and "run is not there" in said
    assert not place.run.exists()


def test_a_checkpoint_after_which_nothing_is_finite_is_passed_over(place: Place) -> None:
    """Also by an attempt after that which fails of something else before it is saved anew."""
    plan = ["killed in step 7", "bad checkpoint", "killed"]
    assert place.supervise(plan) == 0
    assert [cause for cause, _ in place.decisions()] == ["unknown", "numerical", "unknown", "done"]
    assert (
        "that was the first step after ba0000006, so it resumes from ba0000003, the checkpoint"
        " before it; restart"
    ) in place.said
    steps = [event["step"] for event in place.events("returned")]
    assert steps == [4, 4]


def test_a_request_between_two_attempts_is_heard(place: Place) -> None:
    process = place.start(["killed at once"] * 2, wait_seconds=90)
    deadline = time.monotonic() + 100
    while not place.events("decision"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 75, said
    assert len(place.events("start")) == 1


def test_what_is_of_an_attempt_goes_by_the_order_of_lines_and_not_by_the_clock(
    place: Place,
) -> None:
    old = {"time": time.time() + 1e6, "kind": "hang", "action": "end", "what": "x", "nodes": []}
    (place.run / "events.jsonl").write_text(json.dumps(old) + "\n")  # then the clock was set back
    (place.folder / "kernel.log").write_text(f"2999-01-01T00:00:00+00:00 {XID}")
    assert place.supervise(["killed", "hung, and the clock is wrong"]) == 0
    assert [cause for cause, _ in place.decisions()] == ["unknown", "hang", "done"]


def test_a_machine_that_hangs_stands_still_since_its_last_move_not_since_it_was_woken() -> None:
    times = AttemptTimes(started=100.0, last_beat=240.0, ended=243.0)  # the woken one's beat
    hang = {"seconds": 34.5, "moved": 205.25, "host": "here"}
    assert times.last_moved(hang, "here") == 205.25
    assert times.last_moved(hang, "elsewhere") == 243.0 - 34.5  # by another machine's clock
    assert times.last_moved({**hang, "moved": 1.0}, "here") == 100.0
    assert times.last_moved(None, "here") == 240.0
    assert AttemptTimes(started=100.0, ended=110.0).last_moved(None, "here") == 110.0


def test_what_attempts_say_has_a_folder_of_its_own_however_the_clock_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    made = []
    for _ in range(3):
        made.append(new_folder(tmp_path, "attempt-1"))
        made[-1].mkdir()
    assert len(set(made)) == 3


def test_a_launcher_that_leaves_the_run_alone_has_not_completed_it(place: Place) -> None:
    assert place.supervise(["says nothing"]) == 2
    assert "write a supervise.launch that waits for the run" in place.said


def facts(folder: Path) -> dict[str, Any]:
    """Of an attempt on this machine that may resume from any checkpoint."""
    folders = {"heartbeats": folder / "b", "ends": folder / "e"}
    return {**folders, "is_local": True, "limits": ResumeLimits()}


def test_a_program_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    for word in ("nosuchprogram", str(tmp_path), "a\0b"):
        with pytest.raises(UserError, match=r"supervise.launch: '.*' cannot be started: "):
            RunningAttempt([word], **facts(tmp_path))


def test_a_file_in_the_place_of_a_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "supervise").touch()
    ends = tmp_path / "supervise/attempt-1"
    with pytest.raises(UserError, match=r"save_folder: .* cannot be made: Not a directory"):
        RunningAttempt(["true"], **facts(tmp_path) | {"ends": ends})


@pytest.mark.parametrize("name", ["RANK", "LLMFOUNDRY_SUPERVISED"])
def test_who_is_started_by_a_launcher_does_not_supervise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(UserError, match="start it alone"):
        supervise(TrainRecipe().resolve())


def test_an_endless_line_is_passed_on_and_only_its_end_is_kept(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    flood = "import os; [os.write(2, b'x' * 10**6) for _ in range(30)]; os.write(2, b'\\xff end')"
    command = [sys.executable, "-c", flood]
    attempt = RunningAttempt(command, **facts(tmp_path))
    while attempt.poll():
        pass
    assert attempt.end() == 0
    (line,) = attempt.stderr_tail
    assert len(line) < 10**5 and line.endswith("\ufffd end")
    assert len(capfdbinary.readouterr().err) == 30 * 10**6 + 5


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"launch": ["srun", "--exclude={excluded}"]},
            "launch\\[1\\]: {excluded} stands for nothing",
        ),
        ({"launch": [" "]}, "launch\\[0\\]: is empty"),
        ({"act": True, "confirm": "off"}, "act: has no effect with supervise.confirm: off"),
    ],
)
def test_keys_without_effect_are_refused(keys: dict[str, Any], line: str) -> None:
    (found,) = SuperviseConfig(**keys).check()
    assert re.match(f"supervise.{line}", found)


def test_a_mistake_is_not_tried_again(place: Place) -> None:
    assert place.supervise(["mistake"]) == 2
    assert place.decisions() == [("user", "stop")]
    assert "data.paths[0]: x is not there" in place.said


def test_a_loss_that_is_not_finite_is_tried_once_more(place: Place) -> None:
    assert place.supervise(["nan", "nan"]) == 93
    assert place.decisions() == [("numerical", "restart"), ("numerical", "stop")]


def test_a_loss_that_is_finite_the_second_time_was_a_machines_error(place: Place) -> None:
    assert place.supervise(["nan"]) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_stop_reaches_the_run_which_saves(
    place: Place, number: signal.Signals
) -> None:
    process = place.start(["waits"])
    wait_for_step(place, 5)
    process.send_signal(number)
    if number == signal.SIGHUP:  # a shell sends one too
        time.sleep(0.2)
        process.send_signal(number)
    said = process.communicate(timeout=100)[1]
    assert process.returncode == 75, said
    assert place.decisions() == [("preemption", "stop")]
    assert f"stopped by {number.name}, and saved" in said
    assert (place.run / "checkpoints/ba0000004/COMMIT").exists()
    assert place.supervise([]) == 0  # the same command resumes


def test_who_asks_twice_does_not_wait(place: Place) -> None:
    process = place.start(["waits"])
    wait_for_step(place, 5)
    (run,) = [child for child in children(process.pid) if "run.py" in child[1]]
    os.kill(run[0], signal.SIGSTOP)  # so that it cannot save
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=100)[1]
    assert process.returncode == 75, said
    assert "before it could save" in said


def test_a_machine_is_checked_and_reported_but_not_touched(place: Place) -> None:
    assert place.supervise(["xid"]) == 0
    assert place.decisions() == [("machine", "restart"), ("done", "finish")]
    first, _ = place.events("decision")
    assert first["bad_nodes"] == [os.uname().nodename]
    assert "take it out (supervise.act is false)" in first["what"]
    assert [event["action"] for event in place.events("check")] == ["check"]


def test_with_act_the_only_machine_is_left_to_the_scheduler(place: Place) -> None:
    assert place.supervise(["xid"], act=True) == 75
    assert place.decisions() == [("machine", "stop")]


def test_with_act_and_a_launcher_the_next_start_does_without(place: Place) -> None:
    launch = ["env", "LEFT_OUT={exclude}", sys.executable]
    assert place.supervise(["xid"], act=True, launch=launch) == 0
    commands = [event["command"] for event in place.events("start")]
    assert commands == [
        ["env", sys.executable, "run.py"],
        ["env", f"LEFT_OUT={os.uname().nodename}", sys.executable, "run.py"],
    ]


def test_a_requeued_job_remembers_what_it_has_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"why": "x", "progressed": False, "nodes": []}
    for attempt, cause in ((1, "network"), (2, "network"), (1, "hang"), (2, "machine")):
        add_event(tmp_path, "decision", "x", cause=cause, attempt=attempt, **facts)
    assert earlier_attempts(tmp_path) == []  # started by a person
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert [a.cause.kind for a in earlier_attempts(tmp_path)] == ["hang", "machine"]


def children(pid: int) -> list[tuple[int, str]]:
    """Processes below one, with their words."""
    import psutil

    return [(p.pid, " ".join(p.cmdline())) for p in psutil.Process(pid).children(recursive=True)]


def wait_for_step(place: Place, step: int) -> None:
    """Wait until the run has done all steps before one and waits there."""
    deadline = time.monotonic() + 100
    while not (place.run / f"checkpoints/ba{step // 3 * 3:07d}/COMMIT").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        (TrainRecipe(save_overwrite=True), "^save_overwrite: true, but every restart would delete"),
        (TrainRecipe(autoresume=False), "^autoresume: false, but a supervised run resumes"),
    ],
)
def test_a_run_that_would_not_continue_is_not_supervised(recipe: TrainRecipe, line: str) -> None:
    with pytest.raises(UserError, match=line):
        supervise(recipe.resolve())


def test_a_pretrained_model_on_the_command_line_makes_it_fine_tuning() -> None:
    command = CommandLine(recipe=None, overrides=["model.pretrained=runs/x"])
    assert supervised(command) is FinetuneRecipe
    assert checked_for(command) is CheckFinetuneRecipe


def test_a_machine_has_its_schedulers_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_NAME", "gpu-7.pool")
    assert own_node() == "gpu-7.pool"
    monkeypatch.setenv("SLURMD_NODENAME", "gpu07")
    assert own_node() == "gpu07"


def test_a_killed_supervisors_folder_in_memory_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "memory_folder", lambda: str(tmp_path))
    hold = "import sys, time; from llmfoundry.resilience.supervise import supervisor as s"
    hold += "; s.memory_folder = lambda: sys.argv[1]; held = s._folder_in_memory()"
    hold += "; print(held[0], flush=True); time.sleep(60)"
    words = [sys.executable, "-c", hold, str(tmp_path)]
    both = [
        subprocess.Popen(words, env=ENV, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    killed, alive = (Path(one.stdout.readline().strip()) for one in both if one.stdout)
    both[0].kill()
    both[0].wait()
    try:
        for folder in (killed, alive):
            os.utime(folder, (1e9, 1e9))
        mine, lock = supervisor._folder_in_memory()
        lock.release()
        assert {*tmp_path.iterdir()} == {alive, mine}
    finally:
        both[1].kill()
        both[1].wait()
