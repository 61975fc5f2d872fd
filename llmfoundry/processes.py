"""Child processes: how they are started, and that they end with the process that they work for.

A process that is killed (kill -9, out of memory) cannot end its children, and the system does not
either: a fork server stays the parent of its workers, and torchrun's processes are sessions of
their own. The one idea: every child checks by itself, twice a second, whether the process that it
works for is alive. Called by every script, and wherever child processes are started.
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

_SECONDS = 0.5  # between two checks; the next start of a run waits longer for its folder
_STARTERS = "LLMFOUNDRY_END_WITH"  # in the environment: the processes that a script ends with


def cores() -> int:
    """Cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def end_with(pid: int) -> None:
    """From now on end this process, at once and silently, when process `pid` has ended."""
    threading.Thread(target=_watch, args=(pid,), name="end_with", daemon=True).start()


def end_with_parent() -> None:
    """The same in a worker of multiprocessing, for the process that has started it."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    end_with(parent.pid)


def end_with_starters() -> None:
    """The same in a script, for torchrun and for scripts of ours that called `keep_children`."""
    pids = {int(pid) for pid in os.environ.get(_STARTERS, "").split()}
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun, which sets no other sign
        pids.add(os.getppid())
    for pid in pids - {os.getpid()}:  # some scripts are run in the process that starts others
        end_with(pid)


def keep_children(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let scripts that this process starts with an environment, or becomes, end with it."""
    pids = environment.get(_STARTERS, "").split()
    environment[_STARTERS] = " ".join(dict.fromkeys([*pids, str(os.getpid())]))


def start_module(
    name: str,
    *words: str,
    before: Sequence[str] = (),
    env: Mapping[str, str] = os.environ,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start `python -m NAME WORDS` of this package in a session of its own.

    Args:
        name: of the module.
        words: its arguments.
        before: words of a launcher.
        env: the environment; the package is found from any working folder.
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
    """Whether a process is there, and not merely waited for by nobody."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def kill_all(pid: int) -> None:
    """Kill a process and all that it has started, stopped ones too."""
    with suppress(psutil.Error):
        own = psutil.Process(pid)
        for process in [*own.children(recursive=True), own]:
            with suppress(psutil.Error):
                process.kill()


def _watch(pid: int) -> None:
    try:
        process = psutil.Process(pid)  # identified by its start time too, as ids are reused
        while is_alive(process):
            time.sleep(_SECONDS)
    except psutil.NoSuchProcess:
        pass
    os._exit(1)
