"""Whether a run's checkpoints are still where they were, before an attempt resumes from them.

The supervisor lists them (`list_in_folder`, `list_in_store`); `judge_listing`, a pure function,
decides what to do. The idea: without checkpoints a run begins at step 1, so a file system that is
not mounted, a folder that was renamed, or a bucket that was emptied would silently cost all that
was trained.
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
    """A run's checkpoints, as far as they can be seen.

    Attributes:
        batches: of the committed ones, the newest first.
        problem: why they cannot be listed; empty: they can.
        may_pass: whether the problem may be temporary.
        missing: the topmost folder that does not exist; empty: the checkpoints' does.
    """

    batches: tuple[int, ...] = ()
    problem: str = ""
    may_pass: bool = False
    missing: str = ""

    @property
    def newest(self) -> int:
        """The batch of the newest; -1: there is none."""
        return self.batches[0] if self.batches else -1

    def before(self, batch: int) -> int:
        """The batch of the newest before one; -1: there is none."""
        return next((found for found in self.batches if found < batch), -1)


def judge_listing(
    expected: int,
    listing: CheckpointListing,
    config: SuperviseConfig,
    *,
    where: str,
    waited: float,
    tries: int,
) -> Decision:
    """Whether an attempt may begin: START, WAIT (and list again after `wait` seconds) or STOP.

    Args:
        expected: the batch of the newest checkpoint after the last attempt; -1: there was none.
        listing: what is there.
        config: of the recipe.
        where: the run, for messages.
        waited: seconds since the first of `tries` listings.
        tries: how many there were.
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
    """The batch of the newest checkpoint that an attempt has left, as far as is known; -1: none.

    `before`: the same before it; `saved`: by its last heartbeats, -1: not known; `went_back`:
    whether it has removed checkpoints itself, as it rolled back before a spike.
    """
    known = [saved] if listing.problem else [saved, listing.newest]
    return max(known if went_back else [before, *known])


def list_in_folder(run: Path) -> CheckpointListing:
    """The checkpoints of a run's folder."""
    above = run / CHECKPOINTS
    try:
        names = os.listdir(above)
        found = [name for name in names if _NAME.fullmatch(name) and _has_commit(above / name)]
    except (FileNotFoundError, NotADirectoryError):
        return CheckpointListing(missing=show(above if above.is_dir() else _missing(above)))
    except OSError as error:
        return CheckpointListing(problem=one_line(error), may_pass=error.errno not in _LASTING)
    return CheckpointListing(_batches(found))


def list_in_store(url: str, options: FetchOptions) -> CheckpointListing:
    """The checkpoints of a run at a URL, with the retries of `data.download_retry`."""
    try:
        store = Store(url, options, key="save_folder")
        names = [name for name in store.folders(CHECKPOINTS) if _NAME.fullmatch(name)]
        found = [n for n in names if store.size(f"{CHECKPOINTS}/{n}/{_COMMIT}") is not None]
    except UserError as error:
        cause = error.__cause__
        passes = isinstance(cause, Exception) and store_errors.is_passing(cause)
        return CheckpointListing(problem=" ".join(str(error).split()), may_pass=passes)
    return CheckpointListing(_batches(found))


def _has_commit(folder: Path) -> bool:
    try:
        (folder / _COMMIT).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _batches(names: list[str]) -> tuple[int, ...]:
    return tuple(sorted((int(name[2:]) for name in names), reverse=True))


def _missing(folder: Path) -> Path:
    """The topmost of a folder and those above it that does not exist."""
    return next(path for path in (*reversed(folder.parents), folder) if not path.is_dir())
