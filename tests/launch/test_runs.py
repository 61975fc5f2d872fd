"""Runs are listed, described, read, followed and stopped, whoever started them; what is not so."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.cli.commands.runs import runs as command
from llmfoundry.errors import UserError
from llmfoundry.events import add_event, read_events
from llmfoundry.exit_status import own_node
from llmfoundry.files import RUN_LOCK, is_locked, try_lock
from llmfoundry.launch import runs
from llmfoundry.launch.record import LaunchRecord, TargetState, write
from llmfoundry.launch.states import judge
from llmfoundry.launch.stop import stop
from llmfoundry.loggers.pages.run_time import goodput, grown
from llmfoundry.recipe.after_training import RunsRecipe
from llmfoundry.recipe.load import checked
from tests.loggers.hearing import closed_port
from tests.loggers.test_goodput import EVENTS, ROWS
from tests.tiny import ENV, ROOT, losses, write_recipe

SLOW = ("callbacks.plugins.slow={}", f"plugins=[{ROOT / 'tests/resilience/slow_steps.py'}]")
LOSS = "loss/train/total"


def write_run(folder: Path, steps: int = 3, *, status: str = "finished") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"time/batch": n, "time/unix_ms": 1000 * (1000 + n), "time/train": 0.5 * n, LOSS: 4.0 / n}
        for n in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = {"total_batches": 10, "summary": {"status": status}}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "recipe.yaml").write_text("max_duration: 10ba\n")
    return folder


def decision(action: str, when: float, status: int = 0, **more: Any) -> dict[str, Any]:
    event = {"kind": "decision", "action": action, "time": when, "what": f"decided {action}"}
    return event | {"exit_status": status} | more


@pytest.mark.parametrize(
    ("state", "given"),
    [
        ("running", {"held": True}),
        ("running", {"held": True, "events": [decision("restart", 99)]}),
        ("finished", {"status": "finished"}),
        ("stopped", {"status": "killed"}),
        ("failed", {"status": "failed"}),
        ("failed", {"status": "running"}),  # kill -9
        ("failed", {}),
        ("given up", {"status": "failed", "events": [decision("stop", 60, 93)]}),
        ("stopped", {"status": "killed", "events": [decision("stop", 60, 75)]}),
        ("failed", {"status": "running", "events": [decision("stop", 60, 1)]}),
        ("restarting", {"status": "running", "events": [decision("restart", 60)]}),
        ("failed", {"status": "running", "events": [decision("restart", 60)], "now": 5000.0}),
        # A later start by hand is newer than what a supervisor once decided.
        ("stopped", {"status": "killed", "events": [decision("stop", 20, 93)]}),
        ("waiting", {"events": [{"kind": "start", "time": 60, "what": "a", "attempt": 1}]}),
        ("restarting", {"events": [{"kind": "start", "time": 60, "what": "a", "attempt": 2}]}),
        ("waiting", {"target": TargetState("waiting", "PENDING (Resources)")}),
        ("waiting", {"target": TargetState("running", "process 1")}),
        (
            "restarting",
            {"target": TargetState("running"), "events": [decision("restart", 60)], "now": 5000.0},
        ),
        ("unknown", {"target": TargetState("unknown", "no answer"), "status": "running"}),
        ("finished", {"target": TargetState("unknown", "no answer"), "status": "finished"}),
        ("failed", {"target": TargetState("ended", "exit status 1")}),
    ],
)
def test_the_state_of_a_run_follows_from_its_lock_target_and_record(
    state: str, given: dict[str, Any]
) -> None:
    usual: dict[str, Any] = {
        "held": False,
        "target": None,
        "status": "",
        "changed": 50.0,
        "events": [],
        "now": 100.0,
    }
    assert judge(**(usual | given))[0] == state


def test_goodput_is_the_reports(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    for event in EVENTS:
        add_event(folder, event["kind"], "a", attempt=event.get("attempt"))
    events = [*read_events(folder)]
    for event, known in zip(events, EVENTS, strict=True):
        event["time"] = known["time"]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    found = goodput(ROWS, EVENTS)
    assert runs.state_of(folder).goodput == found["training"] / found["whole"] == 8 / 45
    (folder / "events.jsonl").unlink()
    assert runs.state_of(folder).goodput is None


def test_goodput_follows_a_file_that_grows_is_cut_and_grows_again(tmp_path: Path) -> None:
    events = [{"time": 100.0, "kind": "start", "attempt": 1}]
    path = tmp_path / "metrics.jsonl"
    for kept in (ROWS[:2], ROWS[:4], [*ROWS[:3], *ROWS[5:]], ROWS):
        path.write_text("".join(json.dumps(row) + "\n" for row in kept) + '{"time/train": 9')
        trained = sum(grown(kept, "time/train"))
        whole = kept[-1]["time/unix_ms"] / 1000 - 100
        assert runs.goodput(tmp_path, kept, events) == trained / whole


def test_runs_are_listed_with_what_their_folders_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/a")
    write_run(tmp_path / "runs/b", status="running")
    add_event(tmp_path / "runs/b", "loss_spike", "rose", step=2)
    (tmp_path / "runs/not-a-run").mkdir()
    lock = try_lock(tmp_path / "runs/b" / RUN_LOCK, mode=0o644)
    assert lock is not None
    with lock:
        a, b = runs.list_runs("runs")
    assert (a.name, a.state, a.step, a.total) == ("a", "finished", 3, 10)
    assert a.loss == pytest.approx(4 / 3) and a.logged_at == 1003
    assert (b.state, b.event) == ("running", "rose")
    command(recipe("list"))
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["run", "state", "step"]
    assert lines[0].split()[:5] == ["a", "finished", "3", "of", "10"] and "1.3333" in lines[0]
    command(recipe("list", "format=json"))
    assert [r["name"] for r in json.loads(capsys.readouterr().out)] == ["a", "b"]
    command(recipe("describe", "a", "format=json"))
    assert json.loads(capsys.readouterr().out)["run"]["step"] == 3


def recipe(verb: str, *words: str) -> RunsRecipe:
    names = [word for word in words if "=" not in word]
    keys = [word for word in words if "=" in word]
    return checked(RunsRecipe, None, [f"words=[{','.join([verb, *names])}]", *keys])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lst"], "did you mean 'list'"),
        (["stop"], "stop of which run?"),
        (["list", "a"], "list is of all runs"),
        (["follow", "a", "b"], "follow is of one run"),
        (["list", "now=true"], "now: has no effect with list"),
        (["stop", "a", "port=1"], "port: has no effect with stop"),
    ],
)
def test_words_that_mean_nothing_are_one_line(words: list[str], says: str) -> None:
    with pytest.raises(UserError) as error:
        recipe(*words)
    assert len(error.value.problems) == 1 and says in error.value.problems[0]


def test_names_that_are_no_runs_are_one_line(tmp_path: Path) -> None:
    write_run(tmp_path / "quickstart")
    with pytest.raises(UserError, match="did you mean 'quickstart'"):
        runs.describe("quickstrat", tmp_path)
    with pytest.raises(UserError, match="is finished, so there is nothing to stop"):
        stop("quickstart", tmp_path)
    with pytest.raises(UserError, match="folder"):
        runs.list_runs(tmp_path / "none")


def test_hostile_folders_end_no_listing(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    for name in ("torn", "array", "pipe", "link", "\x1b[31mred"):
        (tmp_path / name).mkdir()
    (tmp_path / "torn/launch.json").write_text('{"name": ')
    (tmp_path / "array/run.json").write_text('[1, {"summary": 3}]')
    (tmp_path / "array/metrics.jsonl").write_bytes(b'{"time/batch": "x"}\n\xff\xfe\n[1]\n')
    (tmp_path / "array/events.jsonl").write_text('{"time": 1}\n"x"\n')
    (tmp_path / "\x1b[31mred/run.json").write_text('{"summary": {"status": ["finished"]}}')
    os.mkfifo(tmp_path / "pipe/metrics.jsonl")
    (tmp_path / "pipe/run.json").write_text("{}")
    (tmp_path / "link/run.json").symlink_to("/dev/zero")
    (tmp_path / "link/events.jsonl").write_text("")
    found = {run.name: run for run in runs.list_runs(tmp_path)}
    assert found["good"].state == "finished"
    assert found["torn"].state == "unknown" and "launch.json" in found["torn"].why
    assert {run.state for name, run in found.items() if name not in ("good", "torn")} == {"failed"}
    read = subprocess.run(
        [sys.executable, ROOT / "scripts/runs.py", "list", f"folder={tmp_path}"],
        capture_output=True,
        text=True,
        env=ENV,
        timeout=60,
    )
    assert read.returncode == 0 and "\x1b" not in read.stdout and r"\x1b[31mred" in read.stdout


@pytest.mark.parametrize(
    "row",
    [
        {LOSS: "abc"},
        {LOSS: [1]},
        {LOSS: None},
        {"time/unix_ms": 10**400},
        {"time/train": 10**400, "time/unix_ms": 10**15},
    ],
)
def test_numbers_that_are_none_end_no_listing(tmp_path: Path, row: dict[str, Any]) -> None:
    write_run(tmp_path / "good")
    folder = write_run(tmp_path / "odd")
    add_event(folder, "start", "attempt 1", attempt=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"time/batch": 9, **row}) + "\n")
    (folder / "eval").mkdir()
    (folder / "eval/ba9.json").write_text('{"time/batch": 9, "averages": [1]}')
    assert [run.step for run in runs.list_runs(tmp_path)] == [3, 9]
    assert runs.describe("odd", tmp_path).evaluation["time/batch"] == 9


def test_a_folder_that_may_not_be_read_ends_no_listing() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # pytest's own is for one user alone
        above, is_root = Path(place), os.geteuid() == 0
        above.chmod(0o755)
        closed = write_run(above / "closed")
        write_run(above / "good")
        closed.chmod(0)
        try:
            if is_root:
                os.seteuid(65534)
            found = {run.name: run for run in runs.list_runs(above)}
        finally:
            if is_root:
                os.seteuid(0)
            closed.chmod(0o755)
        assert found["good"].state == "finished"
        assert found["closed"].state == "unknown" and "Permission" in found["closed"].why


def test_runs_of_a_sweep_have_its_name_and_one_that_is_removed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sweep/lr=1e-3", "sweep/lr=2e-3", "going"):
        write_run(tmp_path / name)
    (tmp_path / "link").symlink_to("sweep/lr=1e-3")
    (tmp_path / "cache/deep").mkdir(parents=True)
    state_of = runs.state_of

    def removed_first(folder: Path) -> runs.RunState:
        if folder.name == "going":
            shutil.rmtree(folder)
        return state_of(folder)

    monkeypatch.setattr(runs, "state_of", removed_first)
    names = [run.name for run in runs.list_runs(tmp_path)]
    assert names == ["link", "sweep/lr=1e-3", "sweep/lr=2e-3"]
    assert runs.describe(names[1], tmp_path).run.state == "finished"


@pytest.mark.slow
def test_two_hundred_runs_take_about_a_second(tmp_path: Path) -> None:
    for n in range(200):
        folder = write_run(tmp_path / f"{n:03d}", 30)
        where = {"log": str(folder / "node-*.log")}
        write(folder, LaunchRecord(folder.name, "local", "999999@5", where=where))
        (folder / "node-0.exit").write_text("0\n")
    began = time.monotonic()
    assert {run.state for run in runs.list_runs(tmp_path)} == {"finished"}
    assert time.monotonic() - began < 5  # 0.5 s where nothing else runs; as processes 10


@pytest.mark.parametrize(("action", "alive"), [("start", "waiting"), ("restart", "restarting")])
def test_a_supervisor_that_was_killed_is_neither_waiting_nor_restarting(
    tmp_path: Path, action: str, alive: str
) -> None:
    folder = write_run(tmp_path / "a", status="running")
    kind = "start" if action == "start" else "decision"
    add_event(folder, kind, "attempt 1", action=action, attempt=1)
    assert runs.state_of(folder).state == alive  # of an older supervisor, for some minutes
    (folder / "supervise").mkdir()
    lock = folder / "supervise" / f"{own_node()}.lock"
    with try_lock(lock, mode=0o644) or pytest.fail():
        assert runs.state_of(folder).state == alive
    assert runs.state_of(folder).state == "failed"
    lock.rename(lock.with_name("node-17.lock"))  # which may be alive, and its lock not come here
    assert runs.state_of(folder).state == alive


def test_a_run_of_another_machine_is_said_to_be_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", status="running")
    lock = folder / RUN_LOCK
    lock.write_text("process 5 on node-17, since 2026-01-02 03:04:05+00:00\n")
    with try_lock(lock) or pytest.fail():
        found = runs.state_of(folder)
        assert (found.state, found.why) == ("running", "on node-17")
        with pytest.raises(
            UserError, match=r"is trained by process 5 on node-17, .*; stop it there"
        ):
            stop("a", tmp_path)
    found = runs.state_of(folder)
    assert found.state == "unknown" and found.why.startswith("node-17 wrote ")
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    assert runs.state_of(folder).state == "failed"


def test_what_a_target_prints_is_followed_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launched run, whose log a process here writes."""
    folder = write_run(tmp_path / "mine", status="running")
    log = folder / "launch/node-0.log"
    log.parent.mkdir()
    log.write_text("first\n")
    sleeper = subprocess.Popen(["sleep", "60"])
    began = int(time.time())
    where = {"log": f"{log.parent}/node-*.log"}
    write(folder, LaunchRecord("mine", "local", f"{sleeper.pid}@{began}", where))
    assert [*runs.logs("mine", tmp_path)] == [("0", "first")]
    found: list[tuple[str, str]] = []
    thread = threading.Thread(target=lambda: found.extend(runs.follow("mine", tmp_path)))
    thread.start()
    until(lambda: bool(runs.state_of(folder).state == "waiting"), "the target's process")
    with log.open("a") as file:
        file.write("second\n")
    sleeper.kill()
    sleeper.wait()
    thread.join(30)
    assert not thread.is_alive() and found == [("0", "first"), ("0", "second")]


def test_what_a_run_started_by_hand_records_is_followed_through_a_rewind(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine", status="running")
    lock = try_lock(folder / RUN_LOCK, mode=0o644)
    assert lock is not None
    lines: list[str] = []
    with lock:
        reader = threading.Thread(
            target=lambda: lines.extend(line for _, line in runs.follow("mine", tmp_path))
        )
        reader.start()
        until(lambda: len(lines) == 3, "what was there")
        add_event(folder, "roll_back", "went back to step 1")
        write_run(folder, 1, status="running")
        until(lambda: len(lines) == 5, "what came")
    reader.join(30)
    steps = [line.partition("step ")[2].partition(",")[0] for line in lines]
    assert sorted(steps[3:]) == ["1", "1"] and steps[:3] == ["1", "2", "3"]
    assert sum("went back to step 1" in line for line in lines) == 1


def until(is_so: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.1)


Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a script on a recipe of slow steps, in a folder of its own."""
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    started: list[subprocess.Popen[bytes]] = []
    words = ["tiny.yaml", *SLOW, "max_duration=600ba", "save_interval=5ba"]

    def begin(script: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(ROOT / f"scripts/{script}.py"), *words]
        quiet = subprocess.DEVNULL
        started.append(subprocess.Popen(command, env=ENV, stderr=quiet, stdout=quiet))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def is_at(batch: int) -> bool:
    folder = Path("runs/tiny")
    return (folder / "metrics.jsonl").exists() and max(losses(folder), default=0) >= batch


@pytest.mark.slow
def test_a_run_is_stopped_saved_and_one_that_is_killed_has_failed(start: Start) -> None:
    process = start("train")
    until(lambda: is_at(3), "steps")
    assert runs.list_runs()[0].state == "running"
    stopped = stop("tiny", timeout=120)
    assert stopped.state == "stopped" and process.wait(120) == 75
    last = f"ba{stopped.step:07}"
    assert runs.describe("tiny").checkpoints[-1] == last

    process = start("train")
    until(lambda: is_at(stopped.step + 2), "more steps")
    process.send_signal(signal.SIGKILL)
    process.wait()
    dead = runs.state_of(Path("runs/tiny"))
    assert dead.state == "failed" and "killed" in dead.why
    with pytest.raises(UserError, match="is failed, so there is nothing to stop"):
        stop("tiny")


@pytest.mark.slow
def test_two_stops_at_once_are_one_and_now_is_at_once_under_a_supervisor(start: Start) -> None:
    process = start("supervise")
    until(lambda: is_at(3), "steps under a supervisor")
    assert is_locked(Path("runs/tiny/supervise") / f"{own_node()}.lock")
    both = [threading.Thread(target=stop, args=["tiny"]) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert process.wait(120) == 75
    saved = runs.state_of(Path("runs/tiny"))
    assert runs.describe("tiny").checkpoints[-1] == f"ba{saved.step:07}"
    asked = [e for e in read_events(Path("runs/tiny")) if e["kind"] == "stop"]
    assert len(asked) == 1

    process = start("supervise")
    until(lambda: is_at(saved.step + 3), "steps under a supervisor")
    ended = stop("tiny", now=True, timeout=120)
    assert ended.state in ("stopped", "failed") and process.wait(120) != 0
    assert not runs.is_held(Path("runs/tiny"))


def test_the_states_are_served_for_prometheus(tmp_path: Path) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    from llmfoundry.cli.commands.runs import Collector

    write_run(tmp_path / "a")
    write_run(tmp_path / 'b"\n', status="running")
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(Collector(str(tmp_path)))
    text = prometheus_client.generate_latest(registry).decode()
    assert 'llmfoundry_run_state{run="a",state="finished"} 1.0' in text
    assert 'llmfoundry_run_state{run="a",state="running"} 0.0' in text
    assert 'llmfoundry_run_state{run="b\\"\\n",state="failed"} 1.0' in text
    assert 'llmfoundry_run_step{run="a"} 3.0' in text
    if shutil.which("promtool"):
        words = ["promtool", "check", "metrics"]
        done = subprocess.run(words, input=text, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
def test_a_real_prometheus_scrapes_the_states_and_a_dead_run_fires_its_alert(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path / "runs/dies", status="running")
    port, own = closed_port(), closed_port()
    rules = (ROOT / "llmfoundry/resilience/examples/prometheus-rules.yaml").read_text()
    (tmp_path / "rules.yml").write_text(rules.replace("for: 1m", "for: 2s"))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": "runs", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    serve = [sys.executable, str(ROOT / "scripts/runs.py"), "serve", f"port={port}"]
    scrape = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    scrape += [f"--web.listen-address=127.0.0.1:{own}"]
    processes = [subprocess.Popen(words, cwd=tmp_path, env=ENV) for words in (serve, scrape)]

    def ask(query: str) -> bool:
        address = f"http://127.0.0.1:{own}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            return bool(json.load(urllib.request.urlopen(address, timeout=10))["data"]["result"])
        except OSError:
            return False

    try:
        lock = try_lock(folder / RUN_LOCK, mode=0o644)
        assert lock is not None
        with lock:
            until(lambda: ask('llmfoundry_run_state{run="dies",state="running"} == 1'), "a scrape")
            assert not ask('ALERTS{alertname="LlmfoundryRunDead"}')
        until(
            lambda: ask('ALERTS{alertname="LlmfoundryRunDead",run="dies",alertstate="firing"}'),
            "the alert",
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_copied_record_answers_as_a_program_would_read_it(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    assert json.loads(json.dumps(asdict(runs.describe("a", tmp_path))))["run"]["name"] == "a"
