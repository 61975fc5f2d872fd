"""Startup of eval, generate, chat and serve on several processes: this process becomes rank 0.

Entry point: `with_local_ranks`. torchrun would stand between the user and rank 0: it starts all
ranks in sessions without a terminal, ends all of them on Ctrl-C, kills them 30 seconds after
SIGTERM, and reports a failed rank in 30 lines. Here the user's process is rank 0, with its
terminal, its signals and its exit status, and starts the other ranks as child processes. Under
torchrun or Slurm nothing is started.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from llmfoundry.distributed.process_group import slurm_environment, wanted_processes
from llmfoundry.processes import cores, keep_children
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.terminal import is_watched

_HOST = "127.0.0.1"
_GRACE = 2.0  # seconds in which rank 0 ends by itself if it has found the same mistake


@contextmanager
def with_local_ranks(config: ParallelConfig, *, replicas: bool = False) -> Iterator[None]:
    """Start the other ranks of a command on this machine.

    If a rank fails before this process ends, so does this process, with a line that says why.

    Args:
        config: determines the number of processes.
        replicas: whether ranks with full models share the work: by default one per GPU. False:
            without a sharded layout there is one process, however many GPUs there are.
    """
    started = "RANK" in os.environ or bool(slurm_environment())
    wanted = 1 if started else local_ranks(config, replicas=replicas)
    if wanted == 1:
        yield
        return
    config.degrees(wanted)  # reports a wrong layout once, instead of once per process
    if is_watched():
        print(f"starting {wanted} processes ...", file=sys.stderr, flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // wanted)))
    keep_children()
    os.environ |= {
        "WORLD_SIZE": str(wanted),
        "LOCAL_WORLD_SIZE": str(wanted),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(_free_port()),
    }
    ranks = {rank: _start(rank) for rank in range(1, wanted)}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    is_over = threading.Event()
    for rank, process in ranks.items():
        watch = threading.Thread(target=_watch, args=(rank, process, is_over), daemon=True)
        watch.start()
    yield
    is_over.set()  # not after an error: the other ranks end with this process
    for process in ranks.values():
        process.wait()


def local_ranks(config: ParallelConfig, *, replicas: bool) -> int:
    """Return the number of processes of a command on this machine; see `with_local_ranks`."""
    several = replicas or config.nproc_per_node is not None or not config.keeps_whole
    return wanted_processes(config) if several else 1


def _start(rank: int) -> subprocess.Popen[str]:
    """Start this command as another rank. It reads no input, and prints errors only."""
    return subprocess.Popen(
        [sys.executable, *sys.argv],
        env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for rank 0
    )


def _watch(rank: int, process: subprocess.Popen[str], is_over: threading.Event) -> None:
    """Pass on the error output of a rank, and end this process if the rank fails.

    Mistakes that every rank finds are reported by rank 0 alone: the error lines of another rank
    are held until rank 0 has had time to end.
    """
    assert process.stderr is not None
    held: list[str] = []
    for line in process.stderr:
        if line.startswith(f"[rank {rank}] "):
            held.append(line)
        else:
            sys.stderr.write(line)
            sys.stderr.flush()
    status = process.wait()
    if status == 0 or is_over.is_set():
        return
    if status < 0:
        held.append(f"rank {rank} was killed by {signal.Signals(-status).name}; all ranks end\n")
    else:
        time.sleep(_GRACE)
    sys.stdout.flush()
    sys.stderr.write("".join(held))
    sys.stderr.flush()
    os._exit(max(status, 1))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((_HOST, 0))
        port: int = free.getsockname()[1]
        return port
