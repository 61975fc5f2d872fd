"""Whatever ends a run, soon none of its processes is alive, those with another parent included."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest

from llmfoundry.processes import end_with_starters, keep_children
from tests.tiny import ENV, command, write_recipe

ENDLESS = ("max_duration=1000000ba", "save_interval=0ba", "data.loader_workers=1")
PATIENCE = 30  # seconds; two on a machine that has nothing else to do
OWN = "parallel.nproc_per_node=2"


def alive(mark: str) -> list[psutil.Process]:
    """Processes with this mark in their environment, wherever in the tree they are."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def survivors(
    folder: Path, *overrides: str, end: signal.Signals, after: float | None, processes: int = 1
) -> list[str]:
    """What is still alive after a run was ended: in its midst, or so long after its start."""
    mark = uuid.uuid4().hex
    arguments = command("train.py", "tiny.yaml", *ENDLESS, *overrides, processes=processes)
    with (folder / "said").open("w") as said:
        run = subprocess.Popen(
            arguments, cwd=folder, env=ENV | {"MARK": mark}, stdout=said, stderr=said
        )
    metrics, began = folder / "runs/tiny/metrics.jsonl", time.monotonic()
    while time.monotonic() - began < (200 if after is None else after):
        assert run.poll() is None, (folder / "said").read_text()[-2000:]
        if after is None and metrics.exists() and metrics.stat().st_size:
            break
        time.sleep(0.05)
    n_before = len(alive(mark))
    os.kill(run.pid, end)
    ended = time.monotonic()
    while (left := alive(mark)) and time.monotonic() - ended < PATIENCE:
        time.sleep(0.1)
    names = [" ".join(process.cmdline()) for process in left]
    for process in left:
        process.kill()
    run.wait()
    assert after is not None or n_before >= 4, n_before  # run, worker, fork server, tracker
    return names


def test_a_killed_launcher_leaves_no_rank_and_no_worker(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    assert survivors(tmp_path, OWN, end=signal.SIGKILL, after=None) == []
    assert "2 x CPU" in (tmp_path / "said").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
@pytest.mark.parametrize("after", [None, 3, 5, 7])
def test_nothing_of_a_run_outlives_it(
    tmp_path: Path, end: signal.Signals, after: float | None
) -> None:
    write_recipe(tmp_path)
    assert survivors(tmp_path, end=end, after=after) == []


@pytest.mark.slow
@pytest.mark.parametrize("after", [None, 3, 5, 7, 9])
@pytest.mark.parametrize("own", [False, True])
def test_nothing_of_ranks_outlives_torchrun(tmp_path: Path, after: float | None, own: bool) -> None:
    write_recipe(tmp_path)
    more, processes = ((OWN,), 1) if own else ((), 2)
    left = survivors(tmp_path, *more, end=signal.SIGKILL, after=after, processes=processes)
    assert left == []


def test_a_process_does_not_watch_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who calls many scripts in one process would have a thread more with each of them."""
    monkeypatch.setenv("LLMFOUNDRY_END_WITH", "")
    keep_children()
    keep_children()
    assert os.environ["LLMFOUNDRY_END_WITH"] == str(os.getpid())
    before = threading.active_count()
    end_with_starters()
    assert threading.active_count() == before
