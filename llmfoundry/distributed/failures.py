"""Which ranks are missing when a collective fails: reported in one line by all others.

`distributed.launch` calls `explain_failure` as an error leaves the run. The error itself names no
rank: so every process in which a collective failed leaves a mark in the store at which all met,
waits a little for the marks of the others, and names the ranks that left none.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from llmfoundry.errors import RunFailure
from llmfoundry.files import atomic_write
from llmfoundry.ops.torch_private import newest_messages
from llmfoundry.telemetry import FLIGHT, READER

# Seconds for the marks of others: they wait for the lost one too, but have not begun when we did.
_AFTER_TIMEOUT, _AFTER_LOSS = 10.0, 3.0
_NAMED = 8  # ranks at most
_TIMEOUT, _LOSS, _MARKS = "timeout", "loss", "llmfoundry/failed"
# In what PyTorch raises of them where it is not a DistError. The last is for what waits in the same
# group after a collective that timed out.
_SIGNS = ("gloo", "nccl", "pair closure")
_messages_folder: Path | None = None


def explain_failure(
    error: BaseException, store: dist.Store, *, rank: int, size: int, timeout: timedelta
) -> RunFailure | None:
    """A line about the processes that never came; None: that was not the error.

    Args:
        error: what ends this process.
        store: by which all processes met.
        rank: this process.
        size: number of processes.
        timeout: how long a collective waits.
    """
    failure = failed_collective(error)
    if failure is None:
        return None
    # The launcher ends all as soon as one has ended: each reports first what it has found out.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    timed_out = "timed out" in str(failure).lower() or "timeout" in str(failure).lower()
    missing, timed_out = _missing(store, rank, size, timed_out)
    where = _place(failure)
    if timed_out:
        kept = _keep_messages(rank)
        who = name_ranks(missing) or "though all are there, a collective"
        return RunFailure(
            f"parallel.dist_timeout: {who} did not come within {timeout.total_seconds():.0f} s"
            f" (waited for in {where}): it hangs, was stopped or is slow; look at that process, or"
            f" write a larger parallel.dist_timeout{kept}"
        )
    if not missing:
        return None
    return RunFailure(f"{name_ranks(missing)} ended before the others (seen in {where})")


def keep_messages_in(folder: Path | None) -> None:
    """Where this process leaves its last messages when a collective times out; None: nowhere."""
    global _messages_folder
    _messages_folder = folder


def _keep_messages(rank: int) -> str:
    """Write this process's flight recorder; what to say of it."""
    if _messages_folder is None:
        return ""
    try:
        messages = newest_messages()
        if not messages:
            return ""
        _messages_folder.mkdir(parents=True, exist_ok=True)
        atomic_write(_messages_folder / f"{FLIGHT}{rank}", messages)
    except (OSError, RuntimeError):  # a full disk; the line that follows is what matters
        return ""
    return f"; last messages of each process: {READER} {_messages_folder}"


def failed_collective(error: BaseException) -> BaseException | None:
    """What was raised where processes wait for each other, if that has led to this error."""
    return next(filter(_is_of_collective, _causes(error)), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and all that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_collective(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def _missing(store: dist.Store, rank: int, size: int, timed_out: bool) -> tuple[list[int], bool]:
    """Ranks without a mark, and whether any process waited to the end of its time.

    All marks are one text: a request for each mark, by every process, would be n x n of them.
    """
    patience = _AFTER_TIMEOUT if timed_out else _AFTER_LOSS
    deadline = time.monotonic() + patience
    found: list[tuple[list[int], bool]] = []

    def ask() -> None:
        marks, pause = dict[int, str](), 0.1
        with suppress(RuntimeError):  # that the store is gone
            mark = f"{rank} {_TIMEOUT if timed_out else _LOSS}\n"
            store.append(_MARKS, mark)  # type: ignore[attr-defined]  # of every kind but a file's
            while len(marks) < size and time.monotonic() < deadline:
                time.sleep(pause)
                lines = store.get(_MARKS).decode().splitlines()
                marks = {int(who): why for who, why in map(str.split, lines)}
                pause = min(2 * pause, 1.0)
            missing = [other for other in range(size) if other not in marks]
            found.append((missing, _TIMEOUT in marks.values()))

    asking = threading.Thread(target=ask, daemon=True)  # a store that hangs keeps it for ever
    asking.start()
    asking.join(patience + 2)
    return found[0] if found else ([0], timed_out)  # it is rank 0's, or its launcher's


def name_ranks(ranks: list[int]) -> str:
    """Processes in a message: `rank 3`, `ranks 3, 4`, or the first of many and their number."""
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    listed = ", ".join(map(str, ranks[:_NAMED])) + more
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}" if ranks else ""


def _place(error: BaseException) -> str:
    """The line of ours that called the collective."""
    ours = Path(__file__).parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if ours in Path(frame.filename).parents:
            return f"{Path(frame.filename).relative_to(ours.parent)}:{frame.lineno}"
    return "a thread"
