"""Report of missing ranks when a collective fails.

Entry point: `explain_failure`, which `distributed.launch` calls with the error that ends a run.
The error of a failed collective names no rank. So each process whose collective failed sets a mark
in torch.distributed's store, waits some seconds for the marks of the other ranks, and reports the
ranks without a mark.
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

# Seconds to wait for the marks of other ranks, whose collective may fail later than ours.
_AFTER_TIMEOUT, _AFTER_LOSS = 10.0, 3.0
_MOST_LISTED = 8  # ranks in a message
_TIMEOUT, _LOSS, _MARKS = "timeout", "loss", "llmfoundry/failed"
# Texts in RuntimeErrors of failed collectives, which are not always a DistError. "pair closure" is
# raised by collectives of the same group after one that timed out.
_SIGNS = ("gloo", "nccl", "pair closure")
_messages_folder: Path | None = None


def explain_failure(
    error: BaseException, store: dist.Store, *, rank: int, size: int, timeout: timedelta
) -> RunFailure | None:
    """Return an error that names the missing ranks; None if no collective has failed.

    Args:
        error: error that ends this process.
        store: store of the default process group.
        rank: rank of this process.
        size: number of processes.
        timeout: timeout of collectives.
    """
    failure = failed_collective(error)
    if failure is None:
        return None
    # The launcher sends SIGTERM as soon as one process has ended. Ignore it to report first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    # find the ranks without a mark
    timed_out = "timed out" in str(failure).lower() or "timeout" in str(failure).lower()
    missing, timed_out = _missing(store, rank, size, timed_out)

    # report
    where = _place(failure)
    if timed_out:
        recorder_note = _keep_messages(rank)
        who = name_ranks(missing) or "though all are there, a collective"
        return RunFailure(
            f"parallel.dist_timeout: {who} did not come within {timeout.total_seconds():.0f} s"
            f" (waited for in {where}): it hangs, was stopped or is slow; look at that process, or"
            f" write a larger parallel.dist_timeout{recorder_note}"
        )
    if not missing:
        return None
    return RunFailure(f"{name_ranks(missing)} ended before the others (seen in {where})")


def keep_messages_in(folder: Path | None) -> None:
    """Set the folder for PyTorch's flight recorder after a timeout; None: do not write it."""
    global _messages_folder
    _messages_folder = folder


def _keep_messages(rank: int) -> str:
    """Write the flight recorder of this process; return the end of the error line about it."""
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
    """Return the error of a collective among an error and its causes; None if there is none."""
    return next(filter(_is_of_collective, _causes(error)), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of its cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_collective(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def _missing(store: dist.Store, rank: int, size: int, timed_out: bool) -> tuple[list[int], bool]:
    """Set this rank's mark; return the ranks without a mark, and whether any collective timed out.

    All marks are lines of one value of the store: with a key for each mark, n processes would send
    n^2 requests.

    Args:
        store: store of the default process group.
        rank: rank of this process.
        size: number of processes.
        timed_out: whether the collective of this process timed out.
    """
    patience = _AFTER_TIMEOUT if timed_out else _AFTER_LOSS
    deadline = time.monotonic() + patience
    results: list[tuple[list[int], bool]] = []  # at most one

    def exchange_marks() -> None:
        """Append a line `RANK REASON`, then poll until all ranks have a line or time is up."""
        reasons, pause = dict[int, str](), 0.1
        with suppress(RuntimeError):  # the store is closed
            mark = f"{rank} {_TIMEOUT if timed_out else _LOSS}\n"
            store.append(_MARKS, mark)  # type: ignore[attr-defined]  # all stores but FileStore
            while len(reasons) < size and time.monotonic() < deadline:
                time.sleep(pause)
                lines = store.get(_MARKS).decode().splitlines()
                reasons = {int(marked): reason for marked, reason in map(str.split, lines)}
                pause = min(2 * pause, 1.0)
            missing = [other for other in range(size) if other not in reasons]
            results.append((missing, _TIMEOUT in reasons.values()))

    # a thread, as a store that hangs never returns
    thread = threading.Thread(target=exchange_marks, daemon=True)
    thread.start()
    thread.join(patience + 2)
    if not results:
        return [0], timed_out  # the store is part of rank 0 or of its launcher
    return results[0]


def name_ranks(ranks: list[int]) -> str:
    """Return a text such as `rank 3`, `ranks 3, 4` or `ranks 0, ..., 7 and 5 more`."""
    if not ranks:
        return ""
    listed = ", ".join(map(str, ranks[:_MOST_LISTED]))
    if len(ranks) > _MOST_LISTED:
        listed += f" and {len(ranks) - _MOST_LISTED} more"
    return f"ranks {listed}" if len(ranks) > 1 else f"rank {listed}"


def _place(error: BaseException) -> str:
    """Return file and line of this package's innermost frame in the traceback."""
    package = Path(__file__).parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if package in Path(frame.filename).parents:
            return f"{Path(frame.filename).relative_to(package.parent)}:{frame.lineno}"
    return "a thread"
