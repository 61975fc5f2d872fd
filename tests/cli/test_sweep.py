"""-m: a run for every combination, each in its own process and folder."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from llmfoundry.files import try_lock
from llmfoundry.recipe.paths import YAMLS
from tests.front import Front
from tests.selection import slow_but

QUICKSTART = str(YAMLS / "quickstart.yaml")
TARGET = """
import json, os
def remember(recipe):
    reported = [recipe.run_name, recipe.save_folder, recipe.optimizer.lr, recipe.seed, os.getpid(),
                recipe.pause_at]
    with open("reported.jsonl", "a") as file:
        print(json.dumps(reported), file=file)
    os.makedirs(recipe.save_folder, exist_ok=True)
    loss = 20 - recipe.seed if recipe.seed != 15 else float("nan")
    with open(f"{recipe.save_folder}/metrics.jsonl", "w") as file:
        for n, row in enumerate(({"loss/train/total": 99.0}, {"loss/train/total": loss},
                    {"metrics/train/bits_per_byte": loss / 4})):
            print(json.dumps({"time/batch": n, "time/token": n, **row}), file=file)
        print('{"loss/train', file=file)
    if recipe.seed == 13:
        raise RuntimeError("unlucky")
"""
SCRIPT = """
from llmfoundry.cli.script import run
from llmfoundry.recipe.train import TrainRecipe
run(TrainRecipe, "sweep_target:remember")
"""


def sweep(
    folder: Path, *words: str, loss: str = "20 - recipe.seed"
) -> tuple[subprocess.CompletedProcess[str], list[list[object]]]:
    """Run a script with -m; what it printed, and what each run's target was given."""
    (folder / "sweep_target.py").write_text(TARGET.replace("20 - recipe.seed", loss))
    (folder / "script.py").write_text(SCRIPT)
    (folder / "reported.jsonl").write_text("")
    arguments = [sys.executable, "script.py", *words]
    got = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=120)
    reported = (folder / "reported.jsonl").read_text().splitlines()
    return got, [json.loads(line) for line in reported]


def test_each_point_has_its_own_process_name_and_folder(tmp_path: Path) -> None:
    got, reported = sweep(tmp_path, QUICKSTART, "optimizer.lr=1e-3,3e-3", "-m", "seed=1")
    assert got.returncode == 0, got.stderr
    names = ["quickstart/optimizer.lr=0.001", "quickstart/optimizer.lr=0.003"]
    assert [row[:4] for row in reported] == [
        [names[0], f"runs/{names[0]}", 1e-3, 1],
        [names[1], f"runs/{names[1]}", 3e-3, 1],
    ]
    assert reported[0][4] != reported[1][4]
    table = table_of(got.stdout)
    assert [line[0] for line in table[1:3]] == [name.split("/")[1] for name in names]
    assert [line[1:3] for line in table[1:3]] == [["best", "finished"]] * 2, "a tie"


Sweep = tuple[subprocess.CompletedProcess[str], list[list[object]]]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sweep]:
    """A folder in which five seeds were run, one of which fails, and what that gave."""
    folder = tmp_path_factory.mktemp("seeds")
    return folder, sweep(folder, "-m", QUICKSTART, "seed=2,13,14,15,16")


def test_a_failed_point_does_not_stop_the_others_but_fails_the_sweep(
    seeds: tuple[Path, Sweep],
) -> None:
    folder, (got, reported) = seeds
    assert got.returncode == 1
    assert [row[3] for row in reported] == [2, 13, 14, 15, 16]
    table = table_of(got.stdout)
    assert table[2][:3] == ["seed=13", "exit", "1"] and table[3][:2] == ["seed=14", "finished"]
    page = (folder / "runs/quickstart/index.html").read_text()
    assert "exit 1" in page and "seed=14" in page


def table_of(printed: str) -> list[list[str]]:
    """The words of each line, from the table's head on."""
    return [line.split() for line in printed[printed.index("run ") :].splitlines()]


def test_the_table_has_each_points_last_metrics_and_names_the_best(
    seeds: tuple[Path, Sweep],
) -> None:
    folder, (got, _) = seeds
    rows = [row for row in table_of(got.stdout)[1:6] if row[0] != "seed=13"]
    assert [row[-2:] for row in rows[:3]] == [
        ["4.5000", "18.0000"],
        ["1.5000", "6.0000"],
        ["nan", "nan"],
    ]
    assert [row[1] for row in rows] == ["finished"] * 3 + ["best"]
    lines = [line for line in got.stdout.splitlines() if line]
    best = lines.index(
        "best: seed=16, by the least bits per byte, training at the end of each run: 1.0000"
    )
    assert lines[best + 1] == "not finite at the end: seed=15"
    page = (folder / "runs/quickstart/index.html").read_text()
    assert "best: seed=16, by the least" in page and "data-written" not in page


def test_a_point_that_is_done_is_not_run_again(seeds: tuple[Path, Sweep], tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(seeds[0], folder)
    again, ran = sweep(folder, "-m", QUICKSTART, "seed=12,13,14,15")
    assert again.returncode == 1 and [row[3] for row in ran] == [12, 13]
    assert "[3/4] runs/quickstart/seed=14: done before" in again.stdout
    assert [line[0] for line in table_of(again.stdout)[1:5]] == [f"seed={n}" for n in range(12, 16)]
    shutil.rmtree(folder / "runs/quickstart/seed=12")
    other, ran = sweep(folder, "-m", QUICKSTART, "seed=12,14", "max_duration=7ba")
    assert other.returncode == 0 and [row[3] for row in ran] == [12, 14], "gone, and changed"


@pytest.mark.slow
def test_a_page_of_somebody_elses_stays_and_the_sweep_goes_on(tmp_path: Path) -> None:
    theirs = tmp_path / "runs/quickstart/index.html"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("<html>mine</html>")
    got, ran = sweep(tmp_path, "-m", QUICKSTART, "seed=12,14")
    assert got.returncode == 0 and len(ran) == 2 and theirs.read_text() == "<html>mine</html>"
    assert "no page is written: output: " in got.stderr and "page:" not in got.stdout


def test_two_sweeps_in_one_folder_are_refused(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "runs/quickstart"
    home.mkdir(parents=True)
    lock = try_lock(home / "sweep.lock", mode=0o644)
    assert lock is not None
    with lock:
        got = front("-m", QUICKSTART, "seed=12,14")
    assert got.status == 2 and "another sweep is at work there" in got.errors[0]
    assert [file.name for file in home.iterdir()] == ["sweep.lock"]


def test_a_record_that_cannot_be_read_is_named(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "runs/quickstart"
    home.mkdir(parents=True)
    for text in ("{", '{"points": {"a": {"recipe": "", "status": 0, "at": {"x": {}}}}}'):
        (home / "sweep.json").write_text(text)
        got = front("-m", QUICKSTART, "seed=12,14")
        assert got.status == 2 and "sweep.json: cannot be read" in got.errors[0]
        assert not list(home.glob("seed=*"))


def test_cfg_prints_every_point_and_runs_none(front: Front) -> None:
    got = front(QUICKSTART, "-m", "optimizer.lr=1e-3,3e-3", "--cfg", "job")
    assert (got.status, got.errors, got.recipe) == (0, [], None)
    points = list(yaml.safe_load_all(got.out))
    assert [point["optimizer"]["lr"] for point in points] == [1e-3, 3e-3]
    assert [point["run_name"] for point in points] == [
        "quickstart/optimizer.lr=0.001",
        "quickstart/optimizer.lr=0.003",
    ]
    assert front(QUICKSTART, "-m", "seed=1,x", "--cfg=job").status == 2


@pytest.mark.slow
def test_places_differ_even_where_folder_names_would_not(tmp_path: Path) -> None:
    saved = tmp_path / "flat.yaml"
    saved.write_text("run_name: fixed\nsave_folder: runs/fixed\ndata: {name: files}\n")
    got, reported = sweep(tmp_path, "flat.yaml", "-m", "data.paths=[a/b],[a-b]", "run_name=p,q")
    assert got.returncode == 0, got.stderr
    assert len({row[1] for row in reported}) == len(reported) == 4
    assert {str(row[0]).split("/")[0] for row in reported} == {"p", "q"}


def test_all_points_are_checked_before_the_first_starts(front: Front) -> None:
    got = front(QUICKSTART, "-m", "model=quickstart,mpt-125n", "seed=1,x")
    assert got.status == 2 and got.out == ""
    assert "model=quickstart,seed=x: seed: 'x' is not an integer" in got.errors
    assert any("could not find 'model/mpt-125n'" in line for line in got.errors)


@pytest.mark.parametrize("word", ["seed=1", "seed=1,1", "data.paths=[a,b]"])
def test_a_sweep_over_nothing_is_a_mistake(front: Front, word: str) -> None:
    assert front(QUICKSTART, "-m", word).errors[0].startswith("-m: nothing to sweep;")


def test_a_sweep_under_torchrun_is_a_mistake(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    errors = front(QUICKSTART, "-m", "seed=1,2").errors
    assert errors == ["-m: starts processes of its own; run it without torchrun"]


STOPPABLE = """
import os, signal, sys, time
def wait(recipe):
    def saved(*_):
        os.write(1, b"saved\\n")  # print() may be interrupted, and not entered again
        sys.exit(0)
    signal.signal(signal.SIGTERM, saved)
    os.write(1, f"pid {os.getpid()}\\n".encode())
    time.sleep(60)
"""


@pytest.mark.parametrize("end", slow_but([signal.SIGKILL], [signal.SIGTERM, signal.SIGKILL]))
def test_the_point_at_work_ends_with_its_sweep(tmp_path: Path, end: signal.Signals) -> None:
    (tmp_path / "sweep_target.py").write_text(STOPPABLE)
    (tmp_path / "script.py").write_text(SCRIPT.replace("remember", "wait"))
    arguments = [sys.executable, "script.py", QUICKSTART, "-m", "seed=1,2"]
    with subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = next(int(line.split()[1]) for line in process.stdout if line.startswith("pid"))
        process.send_signal(end)
        said = process.stdout.read()  # until both are gone, for the pipe is the point's too
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(10)  # it has closed the pipe, and is about to end
    assert ("saved" in said) == (end == signal.SIGTERM)
    assert "pid" not in said  # no other point was begun


@pytest.mark.slow
def test_a_random_sweep_is_drawn_by_its_seed_and_more_of_it_goes_on(front: Front) -> None:
    def points(*words: str) -> list[str]:
        swept = ["optimizer.lr=tag(log,interval(1e-4,1e-1))", "seed=int(interval(1,3))"]
        got = front(QUICKSTART, *swept, "model.n_layers=2,3", "sweep=random", *words, "--dry-run")
        assert (got.status, got.errors) == (0, [])
        return [line for line in got.out.splitlines() if line.startswith("runs/")]

    few, more = points("sweep.n=5"), points("sweep.n=40")
    assert more[:5] == few and len({*more}) == 40 and points("sweep.n=5", "sweep.seed=1") != few
    values = [
        dict(re.findall(r"([\w.]+)=([\w.-]+)", line.partition("/quickstart/")[2])) for line in more
    ]
    rates = sorted(float(each["optimizer.lr"]) for each in values)
    assert 1e-4 <= rates[0] < 1e-3 and 1e-2 < rates[-1] <= 1e-1
    assert 10 < sum(rate < 10**-2.5 for rate in rates) < 30, "half of them, by the logarithm"
    assert {each["seed"] for each in values} == {"1", "2", "3"}
    assert {each["model.n_layers"] for each in values} == {"2", "3"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["seed=1,2", "sweep=rondom"],
            "sweep.how: 'rondom' is not a choice; did you mean",
        ),
        (["seed=1,2", "sweep=random"], "sweep.n: is missing"),
        (["seed=1,2", "sweep.n=2"], "sweep.n: has no effect with sweep.how: grid, only with"),
        (["seed=1,2", "sweep=random", "sweep.n=3"], "sweep.n: 3, but no more than 2 different"),
        (
            ["seed=1,2", "sweep=random", "sweep.n=2", "sweep.factor=2"],
            "sweep.factor: has no effect",
        ),
        (["seed=1,2", "sweep=halving"], "sweep.factor: one of 3 would go on"),
        (["seed=1,2,3", "sweep=halving", "save_folder=s3://a/b"], "save_folder: halving keeps its"),
        (["seed=interval(1,2)", "-m"], "seed=interval(1,2): cannot be listed"),
        (["seed=interval(2,1)", "sweep=random", "sweep.n=2"], "seed=interval(2,1): is no interval"),
        (["seed=tag(log,interval(0,1))", "sweep=halving", "sweep.n=9"], "with 0 < a < b"),
        (["seed=1", "sweep=random", "sweep.n=2"], "-m: nothing to sweep"),
        (["seed=1,2", "sweep.m=3"], "unknown key 'sweep.m'"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(front: Front, words: list[str], why: str) -> None:
    got = front(QUICKSTART, *words)
    assert got.status == 2 and why in got.errors[0], got.errors


@pytest.mark.slow  # tests/train/test_pause.py compares bytes of a pause
def test_halving_runs_all_to_a_pause_and_the_better_on(tmp_path: Path) -> None:
    """The target's loss is 20 - seed; that of 15 is not finite, and 13 fails."""
    words = ("sweep=halving", "sweep.factor=2", QUICKSTART)
    got, ran = sweep(tmp_path, *words, "seed=13,15,18,19")
    assert got.returncode == 1, "one failed"
    quarter, half = "0.25dur", "0.5dur"
    assert [(row[3], row[5]) for row in ran] == [
        *((seed, quarter) for seed in (13, 15, 18, 19)),
        *((seed, half) for seed in (18, 19)),
        (19, None),
    ]
    assert "2 of 4 go on: runs/quickstart/seed=18, runs/quickstart/seed=19" in got.stdout
    assert [" ".join(row[1:4]) for row in table_of(got.stdout)[1:5]] == [
        "exit 1 2", "paused at 0.25dur", "paused at 0.5dur", "best finished 2",
    ]  # fmt: skip
    again, ran = sweep(tmp_path, *words, "seed=12,13,15,18,19")
    assert again.returncode == 1 and [(row[3], row[5]) for row in ran] == [
        (12, quarter),
        (13, quarter),
    ]
