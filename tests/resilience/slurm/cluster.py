"""Slurm on this machine: a controller, and machines that are daemons of their own on one host.

Debian's and Ubuntu's packages do, without systemd, munge or root: everything lies in a folder, runs
as the user and listens on free ports. With root each machine has a /dev/shm of its own, too.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")
INSTALL = "apt install slurmctld slurmd slurm-client"
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_MINUTES = 240.0  # seconds for a job to come as far as a test waits for

CONF = """
ClusterName=tiny
FirstJobId={first}
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
SlurmdTimeout={timeout}
ReturnToService=0
GresTypes=gpu
"""


def missing() -> str:
    """Which of Slurm's programs are not there; empty: all are."""
    return ", ".join(name for name in PROGRAMS if shutil.which(name, path=PATH) is None)


class Cluster:
    """Machines n1, n2, ... of two cores and two devices each."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        """None is started yet."""
        self._folder, self.nodes = folder, [f"n{n + 1}" for n in range(nodes)]
        self._ports = free_ports(nodes + 1)
        self._daemons = dict[str, subprocess.Popen[bytes]]()
        (folder / "state").mkdir()
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
        self._write(timeout=300)

    def begin(self) -> None:
        """Start all of it."""
        self._start("slurmctld", ["slurmctld", "-D"])
        for node in self.nodes:
            (self._folder / node).mkdir()
            self.start(node)
        wait(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "the machines", 60)

    def _write(self, *, timeout: int) -> None:
        host = socket.gethostname().split(".")[0]
        # Ranks make the port at which they meet of the job number: clusters of a host differ in it.
        text = CONF.format(
            host=host, user=_user(), port=self._ports[-1], folder=self._folder,
            timeout=timeout, first=1 + self._ports[0] % 9000,
        )  # fmt: skip
        for node, port in zip(self.nodes, self._ports, strict=False):
            text += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2"
            text += " Gres=gpu:2\n"
        text += f"PartitionName=main Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE\n"
        (self._folder / "slurm.conf").write_text(text)
        devices = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"  # nobody opens them
        (self._folder / "gres.conf").write_text(devices)

    def _start(self, name: str, words: list[str]) -> None:
        with (self._folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                words, env=self.env, stdout=out, stderr=out, start_new_session=True
            )

    def give_up_after(self, seconds: int) -> None:
        """Change how long Slurm waits for a silent machine."""
        self._write(timeout=seconds)
        self.ask("scontrol", "reconfigure")

    def start(self, node: str) -> None:
        """Start a machine's daemon."""
        own = ["slurmd", "-D", "-N", node]
        memory = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs x /dev/shm && exec "$@"', "sh"]
        can = os.geteuid() == 0 and subprocess.run([*memory, "true"], check=False).returncode == 0
        self._start(node, [*memory, *own] if can else own)

    def kill(self, node: str) -> None:
        """What the loss of its power does to a machine: none of its processes is left.

        All stop first: srun has a process that ends its step when srun itself is killed.
        """
        daemon = self._daemons[node]
        found = [] if daemon.poll() is not None else [psutil.Process(daemon.pid)]
        for look in range(2):  # those that one has started meanwhile
            found += [one for one in self.processes(node) if one not in found]
            for process in found:
                with suppress(psutil.Error):
                    process.suspend() if look == 0 else process.kill()
        daemon.wait()

    def processes(self, node: str) -> list[psutil.Process]:
        """Those of jobs on a machine, and Slurm's own beside them."""
        found = dict[int, psutil.Process]()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                env = process.environ()
                own = env.get("SLURM_CONF") == self.env["SLURM_CONF"]
                if own and env.get("SLURMD_NODENAME") == node:
                    found[process.pid] = process
                    above = process.parent()
                    if above is not None and "slurmstepd" in "".join(above.cmdline()):
                        found[above.pid] = above
        return list(found.values())

    def repair(self) -> None:
        """Every machine is there again, and empty."""
        self.ask("scancel", f"--user={_user()}", "--signal=KILL", "--full")
        self.ask("scancel", f"--user={_user()}")
        for node in self.nodes:
            if self._daemons[node].poll() is not None:
                self.start(node)
        for node in self.nodes:
            wait(lambda node=node: "*" not in self.states()[node], f"{node} to answer", 60)  # type: ignore[misc]
            if self.states()[node].startswith(("down", "drain")):
                self.ask("scontrol", "update", f"nodename={node}", "state=resume")
        self.give_up_after(300)
        wait(lambda: set(self.states().values()) == {"idle"}, "all machines to be idle", 90)

    def states(self) -> dict[str, str]:
        """What Slurm says of each machine."""
        lines = self.ask("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(tuple(line.split()) for line in lines)  # type: ignore[misc]

    def reason(self, node: str) -> str:
        """Why a machine was drained."""
        return self.ask("sinfo", "--noheader", f"--nodes={node}", "--format=%E")

    def ask(self, *words: str) -> str:
        """What one of Slurm's commands says."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def submit(self, *words: str, cwd: Path, **env: str) -> str:
        """The number of a job that sbatch has made."""
        command = ["sbatch", "--parsable", *words]
        done = subprocess.run(
            command, cwd=cwd, env=self.env | env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job."""
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def stop(self) -> None:
        """End all of it."""
        self.ask("scancel", f"--user={_user()}", "--signal=KILL", "--full")
        for node in self.nodes:
            self.kill(node)
        self._daemons["slurmctld"].kill()
        self._daemons["slurmctld"].wait()


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def wait(until: Callable[[], bool], what: str, seconds: float = _MINUTES) -> None:
    """Wait; fails where it takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.2)


PYTHON = str(Path(sys.executable).parent)
