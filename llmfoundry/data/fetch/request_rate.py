"""At most so many requests a second from a machine, whichever of its processes make them.

One idea: a file holds the moment at which the next request may begin. Under the file's lock each
request takes that moment and moves it on by a share of a second, then waits for it unlocked.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

from llmfoundry.files import lock

_MOMENT = struct.Struct("<d")
_BURST_S = 1.0  # what a second allows may be made at once after a pause
_STALE_S = 600.0  # a moment further off was written before the clock was set back


def take_turn(path: Path, *, per_second: float, mode: int) -> float:
    """Take the next turn; returns the seconds to wait for it.

    Args:
        path: the file that all share.
        per_second: requests.
        mode: the file's permissions, if it is made.

    Raises:
        OSError: the file cannot be written.
    """
    with lock(path, mode=mode) as locked:
        now = time.time()
        stored = os.pread(locked.descriptor, _MOMENT.size, 0)
        turn = _MOMENT.unpack(stored)[0] if len(stored) == _MOMENT.size else now
        if not turn <= now + _STALE_S:  # written this way to catch NaN too
            turn = now
        turn = max(turn, now - _BURST_S)
        os.pwrite(locked.descriptor, _MOMENT.pack(turn + 1 / per_second), 0)
    return float(max(0.0, turn - now))
