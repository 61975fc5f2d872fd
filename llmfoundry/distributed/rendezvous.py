"""torchrun on one of several machines that each have a supervisor: `python -m`, this module, words.

`launch/job.py` writes it into `supervise.launch`. The one idea: a machine whose process has failed
starts again at once, while the first machine, which keeps the meeting place, may take a while to
miss it. Until then the old meeting stands there, closed, and torchrun would fail; here it is asked
again, so that no attempt is counted for waiting.
"""

from __future__ import annotations

import sys
import time

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

SECONDS = 1800.0
"""How long to ask: longer than parallel.dist_timeout (600 s), by which the others' processes miss
one at the latest, and the check of their machines."""
_PAUSE = 2.0
_NOT_YET = (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    DistNetworkError,
    DistStoreError,
)


def main(words: list[str] | None = None) -> None:
    """Run torchrun, again while there is nobody to meet."""
    deadline, said = time.monotonic() + SECONDS, False
    while True:
        try:
            torchrun.main(sys.argv[1:] if words is None else words)
            return
        except _NOT_YET:
            if time.monotonic() > deadline:
                raise
        if not said:
            print("waiting for the other machines to start again ...", file=sys.stderr, flush=True)
        said = True
        time.sleep(_PAUSE)


if __name__ == "__main__":
    main()
