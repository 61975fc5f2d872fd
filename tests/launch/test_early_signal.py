"""TERM comes before the supervisor takes signals: the job is requeued all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from llmfoundry.launch import slurm
from tests.launch.test_hosts import place, wait  # noqa: F401
from tests.launch.test_render import job_of
from tests.tiny import ENV

SCONTROL = """#!/bin/sh
echo "$@" >> "$ASKED"
echo "JobId=7 JobState=RUNNING ExcNodeList=(null)"
"""


@pytest.mark.parametrize("setup", [[], ["launch.setup=[sleep 1]"]])
def test_a_job_that_is_ended_while_it_starts_is_requeued(
    place: Path,  # noqa: F811
    setup: list[str],
) -> None:
    job = job_of("launch=slurm", "gpus_per_node=1", *setup, recipe=str(place / "tiny.yaml"))
    (job.folder / "launch").mkdir(parents=True)
    (job.folder / "launch.yaml").write_text(job.text)
    (place / "scontrol").write_text(SCONTROL)
    (place / "scontrol").chmod(0o755)
    asked = place / "asked"
    env = ENV | {"PATH": f"{place}:{os.environ['PATH']}", "ASKED": str(asked), "SLURM_JOB_ID": "7"}
    process = subprocess.Popen(["bash", "-c", slurm.render(job)], env=env, cwd=place)
    line = Path(f"/proc/{process.pid}/cmdline")
    if setup:
        time.sleep(0.3)
    else:  # the interpreter of the supervisor has begun, and imports
        wait(lambda: b"llmfoundry\0supervise" in line.read_bytes()[:400], "it")
        wait(lambda: b"pthread_sigmask" not in line.read_bytes(), "its own interpreter")
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75
    assert "requeue 7" in asked.read_text().splitlines()
