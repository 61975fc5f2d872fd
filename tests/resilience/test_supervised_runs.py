"""Supervised runs of two processes that are struck: found, begun again, to the same losses."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmfoundry.events import read_events
from tests.tiny import ENV, ROOT, losses, run, write_recipe
from tests.warm_scripts import run_script

LENGTH = ("max_duration=40ba", "save_interval=4ba", "parallel=ddp")
QUICK = (
    *("hang.step_seconds=5", "hang.stopped_seconds=4", "supervise.wait_seconds=0"),
    *("supervise.confirm=off", "parallel.nproc_per_node=2"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("supervised")
    write_recipe(folder)
    return folder


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[int, float]:
    """The losses of a run that nothing happens to."""
    run("train.py", "tiny.yaml", *LENGTH, "run_name=whole", cwd=place, processes=2)
    return losses(place / "runs/whole")


class Run:
    """A supervised run and its processes."""

    def __init__(self, place: Path, name: str, *overrides: str) -> None:
        script = ROOT / "scripts/supervise.py"
        slow = (f"plugins=[{ROOT / 'tests/resilience/slow_steps.py'}]", "callbacks.plugins.slow={}")
        words = ["tiny.yaml", f"run_name={name}", *LENGTH, *QUICK, *slow, *overrides]
        self.folder = place / "runs" / name
        self.process = subprocess.Popen(
            [sys.executable, str(script), *words],
            cwd=place,
            env=ENV | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, batch: int) -> None:
        """Wait until a step is done."""
        deadline = time.monotonic() + 400
        while not (self.folder / "metrics.jsonl").exists() or self._last() < batch:
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.05)

    def _last(self) -> int:
        return max(losses(self.folder), default=0)

    def processes(self) -> tuple[psutil.Process, dict[int, psutil.Process]]:
        """The launcher, and the processes of the run by rank."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        ranks = {}
        for process in found:
            is_script = any(word.endswith("scripts/train.py") for word in process.cmdline())
            if is_script and "RANK" in (env := process.environ()):
                ranks.setdefault(int(env["RANK"]), process)
        launcher = next(p for p in found if "torch.distributed.run" in p.cmdline())
        return launcher, ranks

    def end(self) -> str:
        """What it said by its end."""
        return self.process.communicate(timeout=400)[0]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.folder) if event["kind"] == kind]


@pytest.fixture
def started(place: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    made = Run(place, *request.param)
    yield made
    made.process.kill()
    made.process.communicate()


def names(*runs: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("started", [(n,) for n in runs], indirect=True, ids=runs)


STOPS_ITSELF = """
import os, signal, time
from llmfoundry.recipe.logger import CALLBACKS, CallbackType
from llmfoundry.train.trainer import Callback

class Stop(Callback):
    def on_step(self, trainer):
        while trainer.batch == 10 and trainer.world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1)  # woken for its stack

CALLBACKS["stop"] = CallbackType(lambda job: Stop(), keys={})
"""


def test_a_run_has_a_monitor_that_ends_it_where_a_rank_is_stopped(
    place: Path,
) -> None:
    (place / "stop.py").write_text(STOPS_ITSELF)
    short = ["tiny.yaml", *LENGTH, "max_duration=14ba"]
    words = [*short, "run_name=monitored"]
    stop = ["plugins=[stop.py]", "callbacks.plugins.stop={}", "hang.stopped_seconds=1"]
    done = run_script("train.py", [*words, *stop], cwd=place, processes=2)
    assert done.returncode == 1 and "rank 1 on" in done.stderr
    (event,) = read_events(place / "runs/monitored")
    assert (event["kind"], event["rank"], event["phase"]) == ("hang", 1, "callbacks")
    assert "in callback Stop.on_step" in event["what"]
    stacks = [(place / event["stacks"] / f"rank-{r}.txt").read_text() for r in (0, 1)]
    assert "llmfoundry/train/trainer.py" in stacks[0] and "on_step" in stacks[1]
    for name in ("monitored", "undisturbed"):
        run("train.py", *short, f"run_name={name}", cwd=place, processes=2)
    assert losses(place / "runs/monitored") == losses(place / "runs/undisturbed")
    assert max(losses(place / "runs/monitored")) == 14


@pytest.mark.slow
@names("stopped")
def test_a_stopped_rank_is_found_and_the_run_ends_as_one_that_never_was(
    started: Run, whole: dict[int, float]
) -> None:
    started.wait_for(10)
    _, ranks = started.processes()
    ranks[1].send_signal(signal.SIGSTOP)
    said = started.end()
    assert started.process.returncode == 0, said[-3000:]
    (hang,) = started.events("hang")
    assert hang["rank"] == 1 and "stopped" in hang["what"]
    stacks = (Path(hang["stacks"]) / "rank-0.txt").read_text()
    assert "llmfoundry/train/trainer.py" in stacks
    decisions = [(e["cause"], e["action"]) for e in started.events("decision")]
    assert decisions == [("hang", "restart"), ("done", "finish")]
    (back,) = started.events("returned")
    assert set(back["seconds"]) == {"detect", "restart", "start", "load", "first_step"}
    assert back["seconds"]["detect"] > 4  # hang.stopped_seconds; not since it was woken
    assert losses(started.folder) == whole


@pytest.mark.slow
@names("rank-killed", "agent-killed", "damaged")
def test_what_is_killed_resumes_to_the_same_losses(started: Run, whole: dict[int, float]) -> None:
    """Also where the newest checkpoint is damaged by it."""
    started.wait_for(10)
    launcher, ranks = started.processes()
    struck = launcher if started.folder.name == "agent-killed" else ranks[1]
    if started.folder.name == "damaged":
        launcher.suspend()  # until the checkpoint is damaged
    struck.kill()
    if started.folder.name == "damaged":
        deadline = time.monotonic() + 100
        while ranks[0].status() != psutil.STATUS_ZOMBIE:  # nobody buries it meanwhile
            assert time.monotonic() < deadline
            time.sleep(0.05)
        newest = max((started.folder / "checkpoints").glob("ba*/COMMIT")).parent
        largest = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-1] + b"x")
        launcher.resume()
    said = started.end()
    assert started.process.returncode == 0, said[-3000:]
    assert [e["action"] for e in started.events("decision")] == ["restart", "finish"]
    assert ("is refused" in said) == (started.folder.name == "damaged")
    assert losses(started.folder) == whole


@pytest.mark.slow
@names("preempted")
def test_a_preempted_run_is_saved_and_resumes(
    started: Run, place: Path, whole: dict[int, float]
) -> None:
    started.wait_for(10)
    started.process.send_signal(signal.SIGUSR1)
    said = started.end()
    assert started.process.returncode == 75, said[-3000:]
    assert "stopped by SIGTERM, and saved" in said or "stopped by SIGUSR1, and saved" in said
    assert [e["cause"] for e in started.events("decision")] == ["preemption"]
    again = Run(place, "preempted")
    said = again.end()
    assert again.process.returncode == 0, said[-3000:]
    assert losses(started.folder) == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "started", [("mistaken", "data.paths=[nowhere]"), ("exploded", "optimizer.lr=1e30")],
    indirect=True,
)  # fmt: skip
def test_what_the_recipe_is_to_blame_for_is_not_tried_for_ever(started: Run) -> None:
    said = started.end()
    causes = [event["cause"] for event in started.events("decision")]
    if started.folder.name == "mistaken":
        assert (started.process.returncode, causes) == (2, ["user"]), said[-3000:]
    else:
        assert (started.process.returncode, causes) == (93, ["numerical"] * 2), said[-3000:]


def test_a_typo_starts_nothing(place: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/supervise.py"), "tiny.yaml", "max_duratoin=3ba"],
        cwd=place,
        env=ENV | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "max_duration" in done.stderr
    assert not (place / "runs/tiny").exists()


@pytest.mark.slow
def test_a_run_may_ask_for_its_own_supervisor(place: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{place}/runs/mlflow.db"
    (place / "runs").mkdir(exist_ok=True)
    MlflowClient(uri).search_experiments()  # its tables are made: that takes long on a busy machine
    words = ("max_duration=40ba", "supervise.enabled=true", "logger.mlflow=true")
    run("train.py", "tiny.yaml", *words, cwd=place)
    events = list(read_events(place / "runs/tiny"))
    assert [event["kind"] for event in events] == ["start", "decision"]
    assert Path(events[0]["command"][1]) == ROOT / "scripts/train.py"
    number = (place / "runs/tiny/mlflow_run_id").read_text().strip()
    # Of the last decision, which has a minute: test_mlflow.py.
    assert MlflowClient(uri).get_run(number).data.tags["supervise.attempts"] == "1"
