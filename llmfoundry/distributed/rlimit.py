"""How many files and sockets a process may open: raised as far as it can be, and whether it does.

`distributed.launch` calls it before a process meets the others. Many systems set 1,024, and mean it
as a default that programs raise: the hard limit is far higher.
"""

from __future__ import annotations

from contextlib import suppress

from llmfoundry.errors import UserError

MESH, STORE = 1, 3
"""Sockets for each process of the run. Measured with gloo on 2, 4 and 8 processes: a group opens
one to each other process, and one that listens. Who holds the store has one of each process, and
one or two more of NCCL's watchers."""
MOST = 1 << 20
"""Some hard limits are a thousand times higher, and some programs walk through all numbers."""
OTHERS = 256
"""What else a process opens: libraries, shards, logs, pipes of workers, NCCL's own sockets."""


def raise_limit(n_processes: int, *, holds_store: bool) -> None:
    """Let this process open as many files as the system allows.

    Args:
        n_processes: of the run.
        holds_store: whether all connect to this one first.

    Raises:
        UserError: they are too few for so many processes.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = (MOST if n == resource.RLIM_INFINITY else n for n in (soft, hard))
    if soft < min(most, MOST):
        with suppress(OSError, ValueError):  # macOS promises more than it gives
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, MOST), hard))
            soft = min(most, MOST)
    needed = needed_files(n_processes, holds_store=holds_store)
    if soft < needed:
        raise UserError(
            f"ulimit -n: a process may open {soft:,} files and sockets here, and one of"
            f" {n_processes:,} needs {needed:,}; raise the hard limit (limits.conf, LimitNOFILE of"
            f" slurmd, docker run --ulimit nofile={needed}), or start fewer processes"
        )


def needed_files(n_processes: int, *, holds_store: bool) -> int:
    """How many files and sockets one of so many processes opens; of one alone nothing is asked."""
    if n_processes == 1:
        return 0
    return n_processes * (MESH + STORE * holds_store) + OTHERS
