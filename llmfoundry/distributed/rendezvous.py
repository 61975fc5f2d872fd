"""Where the processes of a run meet: a store at MASTER_ADDR and MASTER_PORT, within a limit.

`launch.join` calls `meet` first of all. The idea: a wrong address is the one mistake that no
process can see by itself, so each says after `parallel.rendezvous_timeout` where it has looked and
why nobody was there, in one line, rather than in a trace of PyTorch's sockets.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist

from llmfoundry.errors import RunFailure

_PROBE = 5.0  # seconds


def meet(rank: int, size: int, *, limit: timedelta, timeout: timedelta) -> dist.Store:
    """The store by which all processes of the run find each other.

    Args:
        rank: this process.
        size: number of processes.
        limit: until all are there.
        timeout: of what is asked of the store from then on.

    Raises:
        RunFailure: not all have come.
    """
    try:
        store = _store(rank, size, limit)
    except RuntimeError as error:  # DistNetworkError, DistStoreError
        raise RunFailure(_line(error, limit)) from error
    store.set_timeout(timeout)
    return store


def _store(rank: int, size: int, limit: timedelta) -> dist.Store:
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if restart in (None, "0"):
        found: dist.Store = next(dist.rendezvous("env://", timeout=limit))[0]
        return dist.PrefixStore("default_pg", found)  # as init_process_group has it
    # After an in-place restart the agent's store still holds the dead attempt's addresses.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    shared = dist.TCPStore(address, port, size, is_master=rank == 0 and not agent, timeout=limit)
    return dist.PrefixStore(f"attempt{restart}", shared)


def _line(error: RuntimeError, limit: timedelta) -> str:
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return (
        f"MASTER_ADDR: the processes did not meet at {address}:{port} within"
        f" {limit.total_seconds():.0f} s: {_unreachable(address, port) or said}; give every process"
        " the name of rank 0's machine by which it reaches it, and a free port there; where"
        " processes start minutes apart, write a larger parallel.rendezvous_timeout"
    )


def _unreachable(address: str, port: str) -> str:
    """Why nothing can be sent there; empty: it can, or that is this process's own store."""
    try:
        socket.getaddrinfo(address, port)
        if os.environ.get("RANK") != "0":
            socket.create_connection((address, int(port)), _PROBE).close()
    except (OSError, ValueError, OverflowError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ""
