"""Start child processes, and end them with the process that they work for.

A killed process (kill -9, out of memory) cannot end its children, and the operating system does not
end them either: a fork server remains the parent of its workers, and torchrun starts new sessions.
Every child therefore checks twice a second whether the process that it works for is alive. Used by
every script, and wherever child processes are started.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

_SECONDS = 0.5  # between two checks; a restarted run waits longer for its folder
_STARTERS = "LLMFOUNDRY_END_WITH"  # environment variable: ids of the processes to end with


def cores() -> int:
    """Return the number of cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def end_with(pid: int) -> None:
    """End this process silently when the process `pid` has ended."""
    threading.Thread(target=_watch, args=(pid,), name="end_with", daemon=True).start()


def end_with_parent() -> None:
    """End this worker of multiprocessing when the process that started it has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    end_with(parent.pid)


def end_with_starters() -> None:
    """End this script when torchrun, or a script that called `keep_children`, has ended."""
    pids = {int(pid) for pid in os.environ.get(_STARTERS, "").split()}
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
        pids.add(os.getppid())
    for pid in pids - {os.getpid()}:  # some scripts run in the process that starts others
        end_with(pid)


def keep_children(environment: MutableMapping[str, str] = os.environ) -> None:
    """Add this process to an environment, so that scripts started with it end with this process."""
    pids = environment.get(_STARTERS, "").split()
    environment[_STARTERS] = " ".join(dict.fromkeys([*pids, str(os.getpid())]))


def start_module(
    name: str,
    *words: str,
    before: Sequence[str] = (),
    env: Mapping[str, str] = os.environ,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start a module of this package (`python -m NAME WORDS`) in a new session.

    Args:
        name: of the module.
        words: its arguments.
        before: command of a launcher.
        env: environment; PYTHONPATH is extended, so that the package is found from any folder.
        options: of Popen.
    """
    paths = [str(Path(__file__).resolve().parents[1]), env.get("PYTHONPATH")]
    return subprocess.Popen(
        [*before, sys.executable, "-m", name, *words],
        env={**env, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        start_new_session=True,
        **options,
    )


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process is running and is not a zombie."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def kill_all(pid: int) -> None:
    """Kill a process and all its descendants, including stopped processes."""
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in [*parent.children(recursive=True), parent]:
            with suppress(psutil.Error):
                process.kill()


def _watch(pid: int) -> None:
    try:
        process = psutil.Process(pid)  # psutil compares the start time, because ids are reused
        while is_alive(process):
            time.sleep(_SECONDS)
    except psutil.NoSuchProcess:
        pass
    os._exit(1)


ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
ALLOCATOR_VARIABLES = (
    ALLOCATOR_VARIABLE,
    "PYTORCH_CUDA_ALLOC_CONF",  # older names, still read by PyTorch
    "PYTORCH_HIP_ALLOC_CONF",
)


def allocator_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return allocator settings to add to the environment before PyTorch is imported.

    Inputs of experts and packed documents have a different length in each step. With segments of
    fixed size, fragmentation grows until a step runs out of memory. Settings of the user take
    precedence.
    """
    is_set = any(name in environment for name in ALLOCATOR_VARIABLES)
    return {} if is_set else {ALLOCATOR_VARIABLE: "expandable_segments:True"}
