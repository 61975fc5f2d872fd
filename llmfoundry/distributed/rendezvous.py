"""torchrun on one of several machines that each have a supervisor: `python -m`, this module, words.

`launch/job.py` writes it into `supervise.launch`. The one idea: a machine whose process has failed
starts again at once, while the first machine, which keeps the meeting place, may take a while to
miss it. Until then the old meeting stands there, closed, and torchrun would fail; here it is asked
again, so that no attempt is counted for waiting. A name of the first machine that does not resolve
is an event of the run, and waited for as long: a pod may come late.
"""

from __future__ import annotations

import os
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
from llmfoundry.exit_status import ENDS_FOLDER, own_node

SECONDS = 1800.0
"""How long to ask: longer than parallel.dist_timeout (600 s), by which the others' processes miss
one at the latest, and the check of their machines."""
_PAUSE = 2.0
_UNRESOLVED_SECONDS = 20.0  # after which a name that does not resolve is reported
_NOT_YET = (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    DistNetworkError,
    DistStoreError,
)


def main(words: list[str] | None = None) -> None:
    """Run torchrun, again while there is nobody to meet."""
    words = sys.argv[1:] if words is None else words
    deadline, said = time.monotonic() + SECONDS, False
    _wait_for_name(words, deadline)
    while True:
        try:
            torchrun.main(words)
            return
        except _NOT_YET:
            if time.monotonic() > deadline:
                raise
        if not said:
            print("waiting for the other machines to start again ...", file=sys.stderr, flush=True)
        said = True
        time.sleep(_PAUSE)


def _wait_for_name(words: list[str], deadline: float) -> None:
    """Wait until the name of the first machine resolves, and report where it does not soon."""
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
    """As an event of the run, whose supervisor has named a folder in it; and on standard error."""
    print(f"{what}; waiting ...", file=sys.stderr, flush=True)
    ends = Path(os.environ.get(ENDS_FOLDER, ""))
    if ends.parent.name in FOLDERS:
        add_event(ends.parents[1], "rendezvous", what, action="wait")


if __name__ == "__main__":
    main()
