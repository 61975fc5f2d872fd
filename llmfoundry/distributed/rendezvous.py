"""torchrun with retries of the rendezvous, for several machines that each have a supervisor.

Command line: `python -m llmfoundry.distributed.rendezvous` and the arguments of torchrun;
`launch/job.py` writes it into `supervise.launch`. A machine whose process has failed restarts at
once. The first machine, which runs the rendezvous, may notice the failure later. Until then the
rendezvous of the previous attempt is closed, and torchrun fails. This module repeats torchrun, so
that waiting does not count as a failed attempt of the supervisor. It also waits if the name of the
first machine does not resolve yet, as with a pod that starts late, and records an event.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from llmfoundry.events import FOLDERS, add_event
from llmfoundry.exit_status import (
    ENDS_FOLDER,
    FAILED,
    SAVED,
    STOP_FILE,
    STOPS,
    own_node,
    read_ends,
)
from llmfoundry.telemetry import BEATS

SECONDS = 1800.0
"""Maximum seconds of retries: longer than parallel.dist_timeout (600 s), after which the other
machines notice a failure, and the check of these machines together."""
_PAUSE = 2.0
_UNRESOLVED_SECONDS = 20.0  # seconds until a name that does not resolve is reported
_NOT_YET = (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    DistNetworkError,
    DistStoreError,
)


def main(words: list[str] | None = None) -> None:
    """Run torchrun, and repeat it until the other machines have started.

    Raises:
        SystemExit: the run was stopped, so that the other machines may never start again.
    """
    words = sys.argv[1:] if words is None else words
    deadline, is_reported = time.monotonic() + SECONDS, False
    _end_at_stop_signals()
    _wait_for_name(words, deadline)
    while True:
        try:
            torchrun.main(words)
            return
        except _NOT_YET:
            if time.monotonic() > deadline:
                raise
        _end_at_stop_signals()  # torchrun has set handlers
        if _is_stopping():
            print("the run stops: not waiting for the other machines", file=sys.stderr, flush=True)
            sys.exit(FAILED)
        if not is_reported:
            print("waiting for the other machines to start again ...", file=sys.stderr, flush=True)
        is_reported = True
        time.sleep(_PAUSE)


def _end_at_stop_signals() -> None:
    """Let stop signals kill this process at once while it has no child processes.

    Python's handlers would only run once PyTorch returns from a connection attempt (60 s).
    """
    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _is_stopping() -> bool:
    """Return whether the supervisor is stopping, or a process of this attempt saved and ended.

    The supervisor forwards a stop signal to the training processes, so torchrun may not get one.
    """
    heartbeats, ends = os.environ.get(BEATS), os.environ.get(ENDS_FOLDER)
    if heartbeats and (Path(heartbeats) / STOP_FILE).exists():
        return True
    return bool(ends) and any(end["status"] == SAVED for end in read_ends(Path(str(ends))))


def _wait_for_name(words: list[str], deadline: float) -> None:
    """Wait until the name of the first machine resolves; report it after _UNRESOLVED_SECONDS."""
    option = "--rdzv-endpoint="
    endpoint = next((word for word in words if word.startswith(option)), option)
    host = endpoint.removeprefix(option).rpartition(":")[0].strip("[]")
    began, is_reported = time.monotonic(), False
    while host and time.monotonic() < deadline:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if not is_reported and time.monotonic() - began > _UNRESOLVED_SECONDS:
                is_reported = True
                _report(
                    f"{host}, where the machines meet, does not resolve on {own_node()}: {error}"
                )
        time.sleep(_PAUSE)


def _report(what: str) -> None:
    """Print a line to standard error and, under a supervisor, add an event to the run."""
    print(f"{what}; waiting ...", file=sys.stderr, flush=True)
    ends = Path(os.environ.get(ENDS_FOLDER, ""))
    if ends.parent.name in FOLDERS:
        add_event(ends.parents[1], "rendezvous", what, action="wait")


if __name__ == "__main__":
    main()
