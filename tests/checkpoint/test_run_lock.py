"""One run at a time in a folder; two ranks: ../distributed/test_lost_ranks.py."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from llmfoundry.checkpoint import run_lock
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_path
from tests.tiny import ENV, write_recipe
from tests.train.here import train_here

ALONE = World(0, 1, 0, torch.device("cpu"))
# A forked child has the parent's open files, and would have its lock.
HOLDER = """
import os, sys, time, torch
from pathlib import Path
from llmfoundry.checkpoint.run_lock import only_run
from llmfoundry.distributed.process_group import World
with only_run(Path(sys.argv[1]), World(0, 1, 0, torch.device("cpu")), note=print):
    if os.fork() == 0:
        print("held", flush=True)
    time.sleep(60)
"""


def hold(folder: Path) -> None:
    with run_lock.only_run(folder, ALONE, note=print):
        assert (folder / run_lock.LOCK).exists()


def test_a_folder_is_free_as_soon_as_its_owner_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    arguments = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(
        arguments, env=ENV, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        monkeypatch.setattr(run_lock, "_PATIENCE", 0.2)
        with pytest.raises(UserError) as refused:
            hold(folder)
        (line,) = refused.value.problems
        assert f"process {process.pid} on {socket.gethostname()}, since 20" in line
        assert line.startswith(f"save_folder: {folder} is in use") and "another run_name" in line
        process.send_signal(signal.SIGKILL)
        process.wait()
        monkeypatch.setattr(run_lock, "_PATIENCE", 5.0)
        began = time.monotonic()
        hold(folder)  # its child still lives
        assert time.monotonic() - began < 2
        assert not folder.exists()  # a run that wrote nothing leaves nothing
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_refused_start_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_lock, "_PATIENCE", 0.2)
    folder = train_here("one", "max_duration=2ba")
    assert not (folder / run_lock.LOCK).exists()

    def state() -> dict[str, int]:
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        return {str(path): path.stat().st_mtime_ns for path in files}

    with run_lock.only_run(folder, ALONE, note=print):
        before = state()
        for more in ("autoresume=true", "save_overwrite=true"):
            with pytest.raises(UserError, match=r"^save_folder: runs/one is in use"):
                train_here("one", "max_duration=4ba", "logger.mlflow=true", more)
        assert state() == before
    train_here("one", "max_duration=4ba")


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^save_folder: \S+/file cannot be written \("):
        hold(tmp_path / "file")


def test_without_locks_a_run_continues_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    notes: list[str] = []
    with run_lock.only_run(tmp_path / "run", ALONE, note=notes.append):
        pass
    assert len(notes) == 1 and "has no locks" in notes[0]


def test_what_a_killed_run_left_half_written_goes_with_the_next_start(tmp_path: Path) -> None:
    """But not what another process writes at this moment, as eval.py does."""
    (tmp_path / "tokenizer").mkdir()
    old, new = "report.html.0a1b.partial", "results.json.0c2d.partial"
    for name in (old, new, f"tokenizer/{old}", "report.html"):
        (tmp_path / name).write_text("half")
    for name in (old, f"tokenizer/{old}", "report.html"):
        os.utime(tmp_path / name, (0, 0))
    hold(tmp_path)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"report.html", new}


def test_what_a_killed_process_left_half_written_goes_at_once(tmp_path: Path) -> None:
    """That of one which lives stays, and so does that of another machine, however it ended."""
    writes = (
        "import os, sys; from pathlib import Path; from llmfoundry.files import atomic_path\n"
        "for name in sys.argv[1:]:\n"
        "    with atomic_path(Path(name)) as half:\n"
        "        half.write_text('half'); print(half, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", writes, tmp_path / "recipe.yaml"], capture_output=True, text=True
    )
    half = Path(killed.stdout.strip())
    assert half.is_file()
    other = tmp_path / re.sub(r"[0-9a-f]{8}-", "00000000-", half.name, count=1)
    other.write_text("half")
    (tmp_path / "eval/ba0000001").mkdir(parents=True)
    half.rename(tmp_path / "eval/ba0000001" / half.name)
    with atomic_path(tmp_path / "report.html") as living:
        living.write_text("half")
        hold(tmp_path)
        left = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {living, other}
