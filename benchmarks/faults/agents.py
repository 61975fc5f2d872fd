"""Starts a command under torchrun on several made-up machines, as `srun --kill-on-bad-exit` does.

    python agents.py NAMESPACE,NAMESPACE,… PROCESSES scripts/train.py RECIPE …

`links.py` names it in supervise.launch. The machines are network namespaces with names of hosts of
their own; the first one holds the rendezvous (c10d). Where one agent fails, the others are ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

_DEVICE, _PORT = "net0", 29400


def main(machines: list[str], processes: int, command: list[str]) -> int:
    """The first exit status that is not 0."""
    agents = [
        subprocess.Popen(_agent(n, machines, processes, command), start_new_session=True)
        for n in range(len(machines))
    ]
    status = 0
    while any(agent.poll() is None for agent in agents) and not status:
        time.sleep(0.1)
        status = next((agent.returncode for agent in agents if agent.returncode), 0)
    for agent in agents:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
    return 1 if status else 0


def _agent(number: int, machines: list[str], processes: int, command: list[str]) -> list[str]:
    own, first = f"10.77.0.{number + 1}", "10.77.0.1"
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{_PORT}", "--rdzv-id=faults"]
    where = [f"--local-addr={own}", f"--nnodes={len(machines)}", f"--nproc-per-node={processes}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meeting, *where, *command]
    inside = ["ip", "netns", "exec", machines[number], "unshare", "--uts", "sh", "-c"]
    named = f"NODE_NAME=node-{number} GLOO_SOCKET_IFNAME={_DEVICE}"
    script = f'hostname {own}; {named} exec "$@"'  # a name that needs no /etc/hosts
    return [*inside, script, "sh", *torchrun]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3:]))
