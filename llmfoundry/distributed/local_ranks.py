"""Startup of generate, chat and serve on several processes: this process becomes rank 0.

Entry point: `with_local_ranks`. torchrun would stand between the user and rank 0: it starts all
ranks in sessions without a terminal, ends all of them on Ctrl-C, and kills them 30 seconds after
SIGTERM. Here the user's process is rank 0, with its terminal, its signals and its exit status, and
starts the other ranks as child processes. Under torchrun or Slurm nothing is started.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from llmfoundry.distributed.process_group import slurm_environment, wanted_processes
from llmfoundry.processes import cores, keep_children
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.terminal import is_watched

_HOST = "127.0.0.1"


@contextmanager
def with_local_ranks(config: ParallelConfig) -> Iterator[None]:
    """Start the other ranks of a model that is sharded over this machine's devices.

    The model of one process needs no other ranks: without a sharded layout, a machine with eight
    GPUs still runs one process. If a rank ends before this process, so does this process, with a
    line that names the rank.
    """
    started = "RANK" in os.environ or bool(slurm_environment())
    wanted = 1
    if not started and (config.nproc_per_node is not None or not config.keeps_whole):
        wanted = wanted_processes(config)
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


def _start(rank: int) -> subprocess.Popen[bytes]:
    """Start this command as another rank. It reads no input, and prints errors only."""
    return subprocess.Popen(
        [sys.executable, *sys.argv],
        env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for rank 0
    )


def _watch(rank: int, process: subprocess.Popen[bytes], is_over: threading.Event) -> None:
    """End this process if a rank ends with an error. The rank has printed its own error line."""
    status = process.wait()
    if status == 0 or is_over.is_set():
        return
    if status < 0:
        name = signal.Signals(-status).name
        print(f"rank {rank} was killed by {name}; all ranks end", file=sys.stderr, flush=True)
    os._exit(max(status, 1))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((_HOST, 0))
        port: int = free.getsockname()[1]
        return port
