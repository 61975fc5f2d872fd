"""The process between a command and its torchrun, of which a stand-in plays the part."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import ENV, ROOT

TORCHRUN = """
import json, os, pathlib, signal, sys, time
print(*sys.argv[1:], flush=True)
ends = pathlib.Path(os.environ["LLMFOUNDRY_ENDS"])
end = {"rank": 1, "status": 75, "node": "n", "lines": ["x"], "time": 0}
if "wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: ends.joinpath("heard").touch())
    print("ready", flush=True)
    while not ends.joinpath("heard").exists():
        time.sleep(0.01)
kind = "memory" if int(ends.name) < int(sys.argv[1]) else "lost"
ends.joinpath("rank-1.json").write_text(json.dumps({**end, "kind": kind}))
if "signal" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(ends.name))
"""


@pytest.fixture
def start(tmp_path: Path) -> object:
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "run.py").write_text(TORCHRUN)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])

    def started(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "llmfoundry.distributed.relaunch", *words],
            env={**ENV, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return started


def test_processes_that_lacked_memory_are_started_again_to_go_on(start) -> None:  # type: ignore[no-untyped-def]
    process = start("2", "x=1", "--again", "save_overwrite=false")
    out, err = process.communicate(timeout=60)
    again = "2 x=1 save_overwrite=false"
    assert (process.returncode, out.splitlines()) == (2, ["2 x=1", again, again])
    assert err.count("starting the processes again") == 2


def test_it_ends_as_torchrun_does(start) -> None:  # type: ignore[no-untyped-def]
    process = start("0", "signal")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_who_is_asked_to_stop_starts_nothing(start, number) -> None:  # type: ignore[no-untyped-def]
    """SIGUSR1 would end torchrun at once, and with it processes that have not saved."""
    process = start("5", "wait")
    while process.stdout.readline() != "ready\n":
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")
