"""Check that a run's checkpoints still exist before an attempt resumes from them.

The supervisor lists the checkpoints (`list_in_folder`, `list_in_store`) and `judge_listing`, a pure
function, decides. Without checkpoints a run begins at step 1. An unmounted file system, a renamed
folder or an emptied bucket would therefore silently discard all training.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from llmfoundry.data import store_errors
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.store import Store
from llmfoundry.errors import UserError, one_line
from llmfoundry.events import CHECKPOINTS
from llmfoundry.exit_status import FAILED, GIVE_UP
from llmfoundry.recipe.paths import show
from llmfoundry.recipe.resilience import SuperviseConfig
from llmfoundry.resilience.supervise.decide import STOP, Decision

START, WAIT = "start", "wait"
_LONGEST_WAIT = 300.0  # seconds between two listings
_NAME = re.compile(r"ba(\d{7,})")
_COMMIT = "COMMIT"
_LASTING = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP)


@dataclass(frozen=True)
class CheckpointListing:
    """Listing of a run's checkpoints.

    Attributes:
        batches: batch numbers of committed checkpoints, newest first.
        problem: why the checkpoints cannot be listed; empty: no problem.
        may_pass: whether the problem may be temporary.
        missing: topmost missing folder of the path to the checkpoints; empty: the path exists.
    """

    batches: tuple[int, ...] = ()
    problem: str = ""
    may_pass: bool = False
    missing: str = ""

    @property
    def newest(self) -> int:
        """Batch of the newest checkpoint; -1: none."""
        return self.batches[0] if self.batches else -1

    def before(self, batch: int) -> int:
        """Return the batch of the newest checkpoint before `batch`; -1: none."""
        return next((other for other in self.batches if other < batch), -1)


def judge_listing(
    expected: int,
    listing: CheckpointListing,
    config: SuperviseConfig,
    *,
    where: str,
    waited: float,
    tries: int,
) -> Decision:
    """Return whether an attempt may begin: START, WAIT (list again after `wait` s) or STOP.

    Args:
        expected: batch of the newest checkpoint after the last attempt; -1: none.
        listing: current checkpoints.
        config: settings from the recipe.
        where: path of the run, for messages.
        waited: seconds since the first listing.
        tries: number of listings so far.
    """
    if expected < 0 or (not listing.problem and listing.newest >= expected):
        return Decision(START, "")
    is_away = bool(listing.problem) and listing.may_pass
    limit = config.store_seconds if is_away else config.vanished_seconds
    name = f"checkpoint ba{expected:07d} in {where}"
    if waited < limit:
        wait = min(_LONGEST_WAIT, 2.0 ** min(tries, 10), limit - waited)
        what = f"cannot be listed: {listing.problem}" if listing.problem else "is no longer there"
        return Decision(WAIT, f"{name} {what}; trying again", wait=wait)
    if is_away:
        why = f"{name} could not be listed for {waited:.0f} s: {listing.problem}"
        return Decision(STOP, f"{why}; run the same command once it can", FAILED)
    return Decision(STOP, _vanished(name, expected, listing, where), GIVE_UP)


def _vanished(name: str, expected: int, listing: CheckpointListing, where: str) -> str:
    if listing.problem:
        return f"{name} cannot be listed: {listing.problem}; run the same command once it can"
    if listing.batches:
        there = f"the newest there is ba{listing.newest:07d}"
        way = f", or run the same command to repeat all after step {listing.newest}"
    else:
        there = f"{listing.missing} is not there" if listing.missing else "none is there"
        way = f"; to begin at step 1, delete the rest of {where} or write another run_name"
    return (
        f"{name} has vanished since the last attempt ended, and {there}: renamed, deleted or not"
        f" mounted? nothing was started; bring it back and run the same command{way}"
    )


def expected_newest(
    before: int, saved: int, listing: CheckpointListing, *, went_back: bool = False
) -> int:
    """Return the batch of the newest checkpoint that must exist after an attempt; -1: none.

    Args:
        before: the result before the attempt.
        saved: from the last heartbeats of the attempt; -1: not known.
        listing: checkpoints after the attempt.
        went_back: whether the attempt removed checkpoints in a rollback before a loss spike.
    """
    candidates = [saved] if listing.problem else [saved, listing.newest]
    return max(candidates if went_back else [before, *candidates])


def list_in_folder(run: Path) -> CheckpointListing:
    """List the committed checkpoints in a run's folder."""
    folder = run / CHECKPOINTS
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
        committed = [name for name in names if _has_commit(folder / name)]
    except (FileNotFoundError, NotADirectoryError):
        return CheckpointListing(missing=show(folder if folder.is_dir() else _missing(folder)))
    except OSError as error:
        return CheckpointListing(problem=one_line(error), may_pass=error.errno not in _LASTING)
    return CheckpointListing(_batches(committed))


def list_in_store(url: str, options: FetchOptions) -> CheckpointListing:
    """List the committed checkpoints of a run at a URL, retried as `data.download_retry` says."""
    try:
        store = Store(url, options, key="save_folder")
        names = [name for name in store.folders(CHECKPOINTS) if _NAME.fullmatch(name)]
        committed = [n for n in names if store.size(f"{CHECKPOINTS}/{n}/{_COMMIT}") is not None]
    except UserError as error:
        cause = error.__cause__
        passes = isinstance(cause, Exception) and store_errors.is_passing(cause)
        return CheckpointListing(problem=" ".join(str(error).split()), may_pass=passes)
    return CheckpointListing(_batches(committed))


def _has_commit(folder: Path) -> bool:
    try:
        (folder / _COMMIT).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _batches(names: list[str]) -> tuple[int, ...]:
    return tuple(sorted((int(name[2:]) for name in names), reverse=True))


def _missing(folder: Path) -> Path:
    """Return the topmost missing folder of a path."""
    return next(path for path in (*reversed(folder.parents), folder) if not path.is_dir())
