"""-m: a run for every combination, each in its own process and folder."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from recipe_front import Front

from llmfoundry.files import try_lock
from llmfoundry.recipe.paths import YAMLS

QUICKSTART = str(YAMLS / "quickstart.yaml")
TARGET = """
import json, os
def remember(recipe):
    reported = [recipe.run_name, recipe.save_folder, recipe.optimizer.lr, recipe.seed, os.getpid()]
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
from llmfoundry.recipe.script import run
from llmfoundry.recipe.train import TrainRecipe
run(TrainRecipe, "sweep_target:remember")
"""


def sweep(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], list[list[object]]]:
    """Run a script with -m; what it printed, and what each run's target was given."""
    (folder / "sweep_target.py").write_text(TARGET)
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


def test_a_failed_point_does_not_stop_the_others_but_fails_the_sweep(tmp_path: Path) -> None:
    got, reported = sweep(tmp_path, "-m", QUICKSTART, "seed=13,14")
    assert got.returncode == 1
    assert [row[3] for row in reported] == [13, 14]
    table = table_of(got.stdout)
    assert table[1][:3] == ["seed=13", "exit", "1"] and table[2][:2] == ["seed=14", "finished"]
    assert "best" not in got.stdout, "of one that ended"
    page = (tmp_path / "runs/quickstart/index.html").read_text()
    assert "exit 1" in page and "seed=14" in page


def table_of(printed: str) -> list[list[str]]:
    """The words of each line, from the table's head on."""
    return [line.split() for line in printed[printed.index("run ") :].splitlines()]


def test_the_table_has_each_points_last_metrics_and_names_the_best(tmp_path: Path) -> None:
    got, _ = sweep(tmp_path, "-m", QUICKSTART, "seed=2,14,15,16")
    assert got.returncode == 0, got.stderr
    rows = table_of(got.stdout)[1:5]
    assert [row[-2:] for row in rows[:3]] == [
        ["4.5000", "18.0000"],
        ["1.5000", "6.0000"],
        ["nan", "nan"],
    ]
    assert [row[1] for row in rows] == ["finished"] * 3 + ["best"]
    assert [line for line in got.stdout.splitlines() if line][-4:-2] == [
        "best: seed=16, by the least bits per byte, training at the end of each run: 1.0000",
        "not finite at the end: seed=15",
    ]
    page = (tmp_path / "runs/quickstart/index.html").read_text()
    assert "best: seed=16, by the least" in page and "data-written" not in page


def test_a_point_that_is_done_is_not_run_again(tmp_path: Path) -> None:
    first, ran = sweep(tmp_path, "-m", QUICKSTART, "seed=12,13,14")
    assert first.returncode == 1 and len(ran) == 3
    again, ran = sweep(tmp_path, "-m", QUICKSTART, "seed=12,13,14,15")
    assert again.returncode == 1 and [row[3] for row in ran] == [13, 15]
    assert "[1/4] runs/quickstart/seed=12: done before" in again.stdout
    assert [line[0] for line in table_of(again.stdout)[1:5]] == [f"seed={n}" for n in range(12, 16)]
    shutil.rmtree(tmp_path / "runs/quickstart/seed=12")
    other, ran = sweep(tmp_path, "-m", QUICKSTART, "seed=12,14", "max_duration=7ba")
    assert other.returncode == 0 and [row[3] for row in ran] == [12, 14], "gone, and changed"


def test_a_page_of_somebody_elses_stays_and_the_sweep_goes_on(tmp_path: Path) -> None:
    theirs = tmp_path / "runs/quickstart/index.html"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("<html>mine</html>")
    got, ran = sweep(tmp_path, "-m", QUICKSTART, "seed=12,14")
    assert got.returncode == 0 and len(ran) == 2 and theirs.read_text() == "<html>mine</html>"
    assert "no page is written: output: " in got.stderr and "page:" not in got.stdout


def test_two_sweeps_in_one_folder_are_refused(tmp_path: Path) -> None:
    home = tmp_path / "runs/quickstart"
    home.mkdir(parents=True)
    lock = try_lock(home / "sweep.lock", mode=0o644)
    assert lock is not None
    with lock:
        got, ran = sweep(tmp_path, "-m", QUICKSTART, "seed=12,14")
    assert got.returncode == 2 and not ran and "another sweep is at work there" in got.stderr


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    home = tmp_path / "runs/quickstart"
    home.mkdir(parents=True)
    for text in ("{", "[]", '{"points": 3}'):
        (home / "sweep.json").write_text(text)
        got, ran = sweep(tmp_path, "-m", QUICKSTART, "seed=12,14")
        assert got.returncode == 2 and not ran and "sweep.json: cannot be read" in got.stderr


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


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
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
