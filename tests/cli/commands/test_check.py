"""scripts/check.py as users call it: exit status, files, and what it says; and before a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.resilience.fake_nvml import environment
from tests.tiny import ENV, command, run, write_recipe

XID = "NVRM: Xid (PCI:0000:c1:00): 79, pid=1, name=python, GPU has fallen off the bus.\n"


@pytest.fixture
def quiet(tmp_path: Path) -> str:
    """A kernel log in which nothing happened, as this machine's own may not be so."""
    (tmp_path / "kern.log").write_text("[ 1.0] usb 1-1: new device\n")
    return "health_check.kernel_log=kern.log"


def read(folder: Path) -> dict[str, object]:
    found = json.loads((folder / "check.json").read_text())
    assert (folder / "check.html").read_text().startswith("<!doctype html>")
    assert isinstance(found, dict) and found["version"] == 1
    return found


def test_a_sound_machine_is_0_and_says_what_was_not_looked_at(tmp_path: Path, quiet: str) -> None:
    words = [quiet, "health_check.burn_seconds=0.2", "health_check.min_free_disk=1kb"]
    said = run("check.py", *words, cwd=tmp_path).stdout
    found = read(tmp_path / "check")
    assert found["bad_nodes"] == [] and "nothing is bad on 1 node" in said
    assert "one process alone has no pair" in said and "check/check.html" in said
    assert len(found["speeds"]) == 1  # type: ignore[arg-type]


def test_a_fault_is_3_and_named(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    (tmp_path / "kern.log").write_text(XID)
    words = ["tiny.yaml", "level=quick", "output=found", "health_check.kernel_log=kern.log"]
    done = run("check.py", *words, cwd=tmp_path, status=3)
    found = read(tmp_path / "found")
    assert found["level"] == "bad" and found["bad_nodes"] == found["nodes"]
    assert "XID 79: the GPU has fallen off the bus" in done.stdout and done.stderr == ""
    assert "data.paths[0]" in done.stdout and "reboot" in done.stdout


@pytest.mark.parametrize(
    "word, line",
    [
        ("health_check.kernel_log=none.log", "health_check.kernel_log: no file at none.log; write"),
        ("health_check.payloads=[4xb]", "health_check.payloads[0]: '4xb' is not a size; write"),
        ("health_check.payloads=[1b]", "health_check.payloads[0]: 1b cannot be sent at once"),
        ("health_check.burn_seconds=0", "health_check.burn_seconds: 0.0 must be greater than 0"),
        ("level=ful", "level: 'ful' is not a choice; did you mean 'full'?"),
        ("health_check.brun=1", "unknown key 'health_check.brun'"),
        ("quikstart.yaml", "no recipe at quikstart.yaml"),
        ("level=quick output=kern.log", "output: kern.log cannot be written"),
    ],
)
def test_a_mistake_is_2_and_one_line(word: str, line: str, tmp_path: Path, quiet: str) -> None:
    words = word.split() if "kernel_log" in word else [quiet, *word.split()]
    done = run("check.py", *words, cwd=tmp_path, status=2)
    assert line in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "check").exists()


def test_a_dry_run_names_every_path_and_writes_nothing(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    before = sorted(tmp_path.iterdir())
    said = run("check.py", "tiny.yaml", "--dry-run", cwd=tmp_path).stdout
    assert "save_folder: runs/tiny, written" in said and "all rounds" in said
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_does_not_begin_on_a_machine_that_is_bad(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    log = tmp_path / "kern.log"
    log.write_text(XID)
    words = ["tiny.yaml", "max_duration=1ba", f"health_check.kernel_log={log}"]
    words += ["health_check.before_run=quick", "health_check.min_free_disk=1kb"]
    done = run("train.py", *words, cwd=tmp_path, status=3)
    run_folder = tmp_path / "runs" / "tiny"
    assert "XID 79" in done.stdout and read(run_folder)["level"] == "bad"
    assert not (run_folder / "metrics.jsonl").exists()
    log.write_text("")
    said = run("train.py", *words, cwd=tmp_path).stdout
    assert "nothing is bad" in said and (run_folder / "metrics.jsonl").exists()
    assert read(run_folder)["level"] != "bad"


def test_a_lost_gpu_is_named_by_the_whole_command(tmp_path: Path, quiet: str) -> None:
    env = ENV | environment("healthy,lost")
    words = command("check.py", "level=quick", quiet, "health_check.min_free_disk=1kb")
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    bad = [line for line in done.stdout.splitlines() if line.startswith("bad")]
    assert len(bad) == 2 and "GPU 1" in bad[0] and "lost: GPU is lost" in bad[0]


@pytest.mark.slow
def test_several_processes_are_started_and_the_verdict_is_their_parents(
    tmp_path: Path, quiet: str
) -> None:
    words = [quiet, "parallel.nproc_per_node=2", "health_check.burn_seconds=0.2"]
    words.append("health_check.min_free_disk=1kb")
    started = command("check.py", *words)
    done = subprocess.run(started, cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(read(tmp_path / "check")["pairs"]) == 3  # type: ignore[arg-type]
    (tmp_path / "kern.log").write_text(XID)
    done = subprocess.run(started, cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert done.stdout.count("XID 79") == 1, "rank 0 alone says it"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*torchrun, "--nproc-per-node=2", *started[1:-2], "level=quick"]
    done = subprocess.run(words, cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert done.returncode == 1, "torchrun's own; the report has it"
    assert read(tmp_path / "check")["level"] == "bad" and os.environ.get("RANK") is None
