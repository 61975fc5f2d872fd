"""Runs are launched by real ssh, on one machine and on two: this one, by a daemon of the test."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from llmfoundry.launch import runs
from llmfoundry.launch.client import SILENCE, timed
from llmfoundry.launch.record import ENDED, RUNNING, read
from llmfoundry.launch.targets import TARGETS
from tests.launch.test_hosts import LENGTH, SLOW, is_at, launch, recorded, wait
from tests.tiny import ROOT, losses, run, write_recipe

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        SSHD is None or shutil.which("ssh") is None, reason="no sshd: apt install openssh-server"
    ),
]
SETTINGS = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
PidFile {folder}/pid
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PasswordAuthentication no
AcceptEnv none
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A port, and the key that it takes."""
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    (folder / "config").write_text(SETTINGS.format(port=port, folder=folder))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    assert SSHD is not None
    process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "config")])
    yield port, folder / "user"
    process.terminate()
    process.wait()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for process in psutil.process_iter(["cmdline"]):
        if str(tmp_path) in " ".join(process.info["cmdline"] or []):
            with suppress(psutil.Error):
                process.kill()


def words(daemon: tuple[int, Path], place: Path, *hosts: str) -> list[str]:
    port, key = daemon
    options = ["-p", str(port), "-i", str(key), "-o", "StrictHostKeyChecking=no"]
    options += ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
    listed = ",".join(f"'{option}'" for option in options)
    names = ",".join(f"{getpass.getuser()}@{host}" for host in hosts)
    env = f"launch.env={{PYTHONPATH: '{ROOT}', OMP_NUM_THREADS: '1', CUDA_VISIBLE_DEVICES: ''}}"
    python = f"launch.environment={sys.prefix}"
    there = place / "there"
    there.mkdir(exist_ok=True)
    return [
        "launch=ssh", f"launch.hosts=[{names}]", f"launch.options=[{listed}]", env, python,
        f"launch.workdir={there}", f"save_folder={place / 'runs/tiny'}",
    ]  # fmt: skip


def test_one_host_is_launched_followed_stopped_and_resumed(
    daemon: tuple[int, Path], place: Path
) -> None:
    run("train.py", "tiny.yaml", *LENGTH, "run_name=whole", cwd=place)
    there = words(daemon, place, "127.0.0.1")
    secret = ["launch.secrets=[MY_TOKEN]", "launch.setup=['test -n \"$MY_TOKEN\"']"]
    done = launch(place, *LENGTH, *SLOW, *there, *secret, MY_TOKEN="kanarie-kanarie")
    assert done.returncode == 0, done.stderr
    ssh, first = TARGETS["ssh"], recorded(place)
    assert first.where["log"] == f"{place}/there/runs/tiny/launch/node-*.log"
    wait(lambda: is_at(place, 5), "step 5")
    assert ssh.state(first).state == RUNNING
    assert next(ssh.logs(first, follow=True))[0] == "0"
    for process in psutil.process_iter(["cmdline"]):
        assert "kanarie-kanarie" not in " ".join(process.info["cmdline"] or [])
    assert ssh.stop(first, now=False).startswith("asked to save and end on ")
    wait(lambda: ssh.state(first).state == ENDED, "its end")
    assert ssh.state(first).reason == "exit status 75"
    assert launch(place, *LENGTH, *SLOW, *there).returncode == 0
    second = recorded(place)
    wait(lambda: ssh.state(second).state == ENDED, "the end of the second")
    assert ssh.state(second).reason == "exit status 0"
    assert losses(place / "runs/tiny") == losses(place / "runs/whole")
    for path in place.rglob("*"):
        assert not path.is_file() or b"kanarie-kanarie" not in path.read_bytes(), path


@pytest.mark.timeout(900)  # four minutes where nothing else runs
def test_two_hosts_meet_and_outlive_a_process_that_dies(
    daemon: tuple[int, Path], place: Path
) -> None:
    """Each has a supervisor; a process of the second is killed, and both start again."""
    run("train.py", "tiny.yaml", *LENGTH, "run_name=whole", cwd=place, processes=2)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    there = words(daemon, place, "127.0.0.1", "localhost")
    quick = [
        "callbacks.plugins.slow.seconds=0.5",
        "supervise.wait_seconds=0",
        "parallel.dist_timeout=60",
        f"launch.port={port}",
    ]
    done = launch(place, *LENGTH, *SLOW, *there, *quick, "gpus_per_node=0")
    assert done.returncode == 0, done.stderr
    ssh, record = TARGETS["ssh"], recorded(place)
    assert record.nodes == 2 and record.job.count("@") == 4
    wait(lambda: is_at(place, 3), "step 3", 240)
    assert ssh.stop(record, now=False).count("asked to save and end") == 2
    wait(lambda: ssh.state(record).state == ENDED, "the end of both", 120)
    assert ssh.state(record).reason == "exit status 75"
    exits = [path.read_text() for path in place.glob("there/runs/tiny/launch/node-*.exit")]
    assert exits == ["75\n", "75\n"]
    assert launch(place, *LENGTH, *SLOW, *there, *quick, "gpus_per_node=0").returncode == 0
    record, saved = recorded(place), max(losses(place / "runs/tiny"))
    assert saved < 45
    wait(lambda: is_at(place, saved + 3), "three steps more", 240)
    killed = 0
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if str(ROOT / "scripts/train.py") in line[:3] and str(place) in " ".join(line):
            with suppress(psutil.Error):
                if process.environ().get("RANK") == "1":
                    os.kill(process.pid, signal.SIGKILL)
                    killed += 1
    assert killed == 1
    began = time.monotonic()
    wait(lambda: ssh.state(record).state == ENDED, "the end of both", 280)
    print(f"ended {time.monotonic() - began:.0f} s after a process was killed")
    assert ssh.state(record).reason == "exit status 0"
    assert losses(place / "runs/tiny") == losses(place / "runs/whole")
    lines = [line for line in ssh.logs(record, follow=False) if line != SILENCE]
    times = [timed(line)[0] for _, line in lines]
    assert {node for node, _ in lines} == {"0", "1"} and all(times)
    merged = [*runs.logs("tiny")]
    by_time = sorted(zip(times, lines, strict=True), key=lambda line: line[0])
    assert merged == [(node, timed(line)[1]) for _, (node, line) in by_time]


def test_a_host_that_does_not_answer_is_one_line_and_nothing_is_left(
    daemon: tuple[int, Path], place: Path
) -> None:
    there = words(daemon, place, "127.0.0.1", "nowhere.invalid")
    done = launch(place, *LENGTH, *SLOW, *there)
    assert done.returncode == 2
    assert done.stderr.startswith("launch.hosts[1]: "), done.stderr
    assert "ssh: Could not resolve hostname nowhere.invalid" in done.stderr
    assert read(place / "runs/tiny") is None  # no run that failed
    supervisors = ["pgrep", "-f", f"llmfoundry supervise {place}"]
    wait(lambda: subprocess.run(supervisors, check=False).returncode == 1, "no supervisor", 30)
