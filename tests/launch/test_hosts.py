"""A run is launched on this machine: it goes on alone, is seen, saved and stopped, and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from llmfoundry.files import try_lock
from llmfoundry.launch.record import ENDED, RUNNING, LaunchRecord, read
from llmfoundry.launch.runs import list_runs
from llmfoundry.launch.targets import TARGETS
from tests.tiny import ENV, ROOT, losses, run, write_recipe

LENGTH = ("max_duration=60ba", "save_interval=10ba")
SLOW = ("callbacks.plugins.slow={}", f"plugins=[{ROOT / 'tests/resilience/slow_steps.py'}]")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for path in tmp_path.glob("runs/*/launch.json"):
        for mark in json.loads(path.read_text())["job"].split(","):
            with suppress(ProcessLookupError, ValueError):
                os.killpg(int(mark.rpartition(":")[2].partition("@")[0]), signal.SIGKILL)


def launch(place: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/launch.py"), "tiny.yaml", *words]
    return subprocess.run(
        command, cwd=place, env=ENV | env, capture_output=True, text=True, timeout=120, check=False
    )


def recorded(place: Path, name: str = "tiny") -> LaunchRecord:
    found = read(place / "runs" / name)
    assert found is not None
    return found


def wait(until: Callable[[], bool], what: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.1)


def is_at(place: Path, batch: int) -> bool:
    folder = place / "runs/tiny"
    return (folder / "metrics.jsonl").exists() and max(losses(folder), default=0) >= batch


def test_launched_followed_stopped_and_resumed_to_the_same_losses(place: Path) -> None:
    run("train.py", "tiny.yaml", *LENGTH, "run_name=whole", cwd=place)
    done = launch(place, *LENGTH, *SLOW, SECRET_TOKEN="kanarie")
    assert done.returncode == 0, done.stderr
    local, first = TARGETS["local"], recorded(place)
    wait(lambda: is_at(place, 5), "step 5")
    assert local.state(first).state == RUNNING
    again = launch(place, *LENGTH)
    assert again.returncode == 2 and "runs/tiny: is running as local" in again.stderr
    node, line = next(local.logs(first, follow=True))
    assert node == "0" and line is not None
    assert local.stop(first, now=False) == "asked to save and end"
    wait(lambda: local.state(first).state == ENDED, "the end")
    assert local.state(first).reason == "exit status 75"
    assert 5 <= max(losses(place / "runs/tiny")) < 60
    assert launch(place, *LENGTH).returncode == 0
    second = recorded(place)
    wait(lambda: local.state(second).state == ENDED, "the end of the second")
    assert local.state(second).reason == "exit status 0"
    assert losses(place / "runs/tiny") == losses(place / "runs/whole")
    printed = [line for _, line in local.logs(second, follow=False)]
    assert any("resum" in line for line in printed)
    assert local.stop(second, now=False) == "had ended"
    for path in (place / "runs/tiny").rglob("*"):
        assert not path.is_file() or b"kanarie" not in path.read_bytes(), path


@pytest.mark.slow
def test_one_that_was_killed_is_no_riddle_and_now_is_at_once(place: Path) -> None:
    assert launch(place, *LENGTH, *SLOW).returncode == 0
    local, record = TARGETS["local"], recorded(place)
    wait(lambda: is_at(place, 1), "a step")
    assert local.stop(record, now=True) == "ended"
    assert local.state(record).state == ENDED
    trains = ["pgrep", "-f", f"{ROOT}/scripts/train.py {place}"]
    wait(lambda: subprocess.run(trains, capture_output=True).returncode == 1, "its processes")
    assert launch(place, *LENGTH, *SLOW).returncode == 0
    record = recorded(place)
    os.killpg(int(record.job.partition("@")[0]), signal.SIGKILL)
    wait(lambda: local.state(record).state == ENDED, "the end")
    assert local.state(record).reason == "it was killed, or its machine has restarted"


def test_a_folder_where_another_trains_is_refused(place: Path) -> None:
    (place / "runs/tiny").mkdir(parents=True)
    lock = try_lock(place / "runs/tiny/run.lock", mode=0o644)
    assert lock is not None
    with lock:
        done = launch(place)
    assert done.returncode == 2 and not (place / "runs/tiny/launch.json").exists()
    assert done.stderr.startswith("runs/tiny: is trained by another process; stop it (llmfoundry ")


@pytest.mark.slow
def test_a_launcher_that_was_killed_starts_nothing_afterwards(place: Path) -> None:
    words = ["tiny.yaml", "launch.setup=[sleep 3]"]
    command = [sys.executable, str(ROOT / "scripts/launch.py"), *words]
    launcher = subprocess.Popen(command, cwd=place, env=ENV, stdout=subprocess.PIPE)
    wait(lambda: (place / "runs/tiny/launch.yaml").exists(), "the record")
    launcher.kill()
    launcher.communicate()
    time.sleep(8)
    assert recorded(place).job == "" and not (place / "runs/tiny/launch/node-0.log").exists()
    assert launch(place).returncode == 0


def test_dry_run_prints_what_bash_would_run_and_writes_nothing(place: Path) -> None:
    env = 'launch.env.GREETING="it\'s"'
    done = launch(place, "dry_run=true", env, "launch.setup=[echo hello]", "gpus_per_node=2")
    assert done.returncode == 0, done.stderr
    assert not (place / "runs").exists()
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0
    assert "export GREETING='it'\"'\"'s'" in done.stdout and "\necho hello\n" in done.stdout
    assert "parallel.nproc_per_node=2" in done.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["launch.secrets=[HF_TOKEN]"], "launch.secrets: HF_TOKEN is not set in this shell"),
        (["launch.setup=[exit 7]"], "launch: bash: exit status 7"),
        (
            ["launch.workdir=/dev/null/x"],
            "launch: bash: launch.workdir: /dev/null/x cannot be made",
        ),
        (["launch.environment=/nowhere"], "launch: bash: /nowhere/bin/python is not there"),
    ],
)
def test_a_mistake_is_one_line(place: Path, words: list[str], line: str) -> None:
    done = launch(place, *words)
    assert done.returncode == 2 and done.stderr.startswith(line), done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    assert list_runs("runs" if (place / "runs").exists() else ".") == []  # none that failed
