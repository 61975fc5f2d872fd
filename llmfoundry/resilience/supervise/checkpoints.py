"""Whether a run's checkpoints are still where they were, before an attempt resumes from them.

The supervisor looks (`look_in_folder`, `look_in_store`) and asks `judge_look` what to do. The
idea: where there are no checkpoints a run begins at step 1, so a file system that is not mounted, a
folder that was renamed, or a bucket that was emptied would cost all that was trained, silently.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from llmfoundry.data.fetch import remote_errors
from llmfoundry.data.fetch.object_store import ObjectStore
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.errors import UserError, one_line
from llmfoundry.exit_status import FAILED, GIVE_UP
from llmfoundry.recipe.front.paths import show

START, WAIT, STOP = "start", "wait", "stop"
_LONGEST_WAIT = 300.0  # seconds between two looks
_NAME = re.compile(r"ba(\d{7,})")
_FOLDER, _COMMIT = "checkpoints", "COMMIT"
_LASTING = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP)


@dataclass(frozen=True)
class Look:
    """What is seen of a run's checkpoints.

    Attributes:
        batches: of those that count, the newest first.
        problem: why it could not be seen; empty: it could.
        may_pass: whether that may be otherwise a while later.
        missing: the topmost folder that is not there; empty: the checkpoints' is.
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


@dataclass(frozen=True)
class LookVerdict:
    """What to do: START, WAIT (and look again after `wait` seconds) or STOP with `status`; why."""

    action: str
    why: str = ""
    status: int = 0
    wait: float = 0.0


def judge_look(
    expected: int,
    look: Look,
    *,
    place: str,
    waited: float,
    looks: int,
    vanished_seconds: float,
    store_seconds: float,
) -> LookVerdict:
    """Whether an attempt may begin.

    Args:
        expected: the batch of the newest checkpoint after the last attempt; -1: there was none.
        look: what is there.
        place: where, for people.
        waited: seconds since the first look.
        looks: how many there were.
        vanished_seconds: as `SuperviseConfig` has it.
        store_seconds: as `SuperviseConfig` has it.
    """
    if expected < 0 or (not look.problem and look.newest >= expected):
        return LookVerdict(START)
    is_away = bool(look.problem) and look.may_pass
    limit = store_seconds if is_away else vanished_seconds
    name = f"checkpoint ba{expected:07d} in {place}"
    if waited < limit:
        wait = min(_LONGEST_WAIT, 2.0 ** min(looks, 10), limit - waited)
        what = f"cannot be asked for: {look.problem}" if look.problem else "is not there any more"
        return LookVerdict(WAIT, f"{name} {what}; looked for again", wait=wait)
    if is_away:
        why = f"{name} cannot be asked for since {waited:.0f} s: {look.problem}"
        return LookVerdict(STOP, f"{why}; run the same command once it can", FAILED)
    return LookVerdict(STOP, _vanished(name, expected, look, place), GIVE_UP)


def _vanished(name: str, expected: int, look: Look, place: str) -> str:
    if look.problem:
        return f"{name} cannot be asked for: {look.problem}; run the same command once it can"
    if look.batches:
        there = f"the newest there is ba{look.newest:07d}"
        way = f", or run the same command to do again all after step {look.newest}"
    else:
        there = f"{look.missing} is not there" if look.missing else "none is there"
        way = f"; to begin at step 1, delete the rest of {place} or write another run_name"
    return (
        f"{name} has vanished since the last attempt ended, and {there}: renamed, deleted or not"
        f" mounted? nothing was started; bring it back and run the same command{way}"
    )


def expected_newest(
    before: int, told: int | None, look: Look | None, *, went_back: bool = False
) -> int:
    """The batch of the newest checkpoint that an attempt has left, as far as is known; -1: none.

    Args:
        before: the same before it.
        told: what its processes said last; None, -1: they did not.
        look: what was seen after it; None: nothing could be.
        went_back: whether it has removed checkpoints itself, as it went back before a spike.
    """
    known = [] if told is None else [told]
    known += [] if look is None or look.problem else [look.newest]
    return max(known if went_back and known else [before, *known])


def look_in_folder(folder: Path) -> Look:
    """The checkpoints of a run's folder."""
    above = folder / _FOLDER
    try:
        names = os.listdir(above)
        found = [name for name in names if _NAME.fullmatch(name) and _has_commit(above / name)]
    except (FileNotFoundError, NotADirectoryError):
        return Look(missing=show(above if above.is_dir() else _missing(above)))
    except OSError as error:
        return Look(problem=one_line(error), may_pass=error.errno not in _LASTING)
    return Look(_batches(found))


def look_in_store(url: str, options: FetchOptions) -> Look:
    """The checkpoints of a run at a URL; asked as `data.download_retry` says."""
    try:
        store = ObjectStore(url, options, key="save_folder")
        names = [name for name in store.folders(_FOLDER) if _NAME.fullmatch(name)]
        found = [n for n in names if store.size(f"{_FOLDER}/{n}/{_COMMIT}") is not None]
    except UserError as error:
        cause = error.__cause__
        passes = isinstance(cause, Exception) and remote_errors.is_passing(cause)
        return Look(problem=" ".join(str(error).split()), may_pass=passes)
    return Look(_batches(found))


def _has_commit(folder: Path) -> bool:
    try:
        (folder / _COMMIT).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _batches(names: list[str]) -> tuple[int, ...]:
    return tuple(sorted((int(name[2:]) for name in names), reverse=True))


def _missing(folder: Path) -> Path:
    """The topmost of a folder and those above it that is not there."""
    return next(path for path in (*reversed(folder.parents), folder) if not path.is_dir())
