"""A grid of small runs by real Slurm: launched, left alone by Ctrl-C, waited for, fitted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmfoundry.launch.record import read
from tests.cli.commands.test_scaling import write_grid
from tests.resilience.slurm.cluster import INSTALL, PYTHON, Cluster, missing, wait
from tests.tiny import ROOT

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=f"no {missing()}: {INSTALL}"),
]


def test_grid_is_launched_left_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    cluster = Cluster(tmp_path / "cluster", nodes=2)
    env = cluster.env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env |= {"PATH": f"{PYTHON}:{cluster.env['PATH']}"}
    path = write_grid(tmp_path)
    launch = ["launch=slurm", "launch.queue=main", "launch.gpus_per_node=1"]
    words = [sys.executable, str(ROOT / "scripts/scaling.py"), str(path), *launch]
    points = tmp_path / "out/points"

    def jobs() -> dict[str, str]:
        found = {folder.name: read(folder) for folder in points.glob("*/")}
        return {name: record.job for name, record in found.items() if record and record.job}

    try:
        cluster.begin()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(words, cwd=tmp_path, env=env, text=True, **pipes)  # type: ignore[call-overload]
        wait(lambda: len(jobs()) == 9, "nine jobs")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 130 and "launched runs that go on: 9" in said, said
        before = jobs()
        listed = [sys.executable, str(ROOT / "scripts/runs.py"), "list", f"folder={tmp_path}"]
        done = subprocess.run(listed, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.stdout.count("out/points/size=") == 9 and "slurm" in done.stdout, done.stdout
        cancelled = max(before, key=lambda name: int(before[name]))
        cluster.ask("scancel", before[cancelled])
        again = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert again.returncode == 0, again.stdout + again.stderr
        after = jobs()
        assert {name for name in before if after[name] != before[name]} == {cancelled}
        assert len(after) == 10  # the one that is held out, once its loss was predicted
    finally:
        cluster.stop()
    found = json.loads((tmp_path / "out/scaling.json").read_text())
    (test,) = found["families"][""]["held_out"]
    assert test["before"] is True and test["measured"] > 0
