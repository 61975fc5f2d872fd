"""Exclusive lock of a run, in its folder (`only_run`) and at its URL (`Lease`).

`cli/commands/train.py` holds both while it trains. Reading or evaluating a run needs no lock.

Folder: the main process locks `run.lock`, which contains the name of the holder. This is a kernel
lock: it is released when the process exits, also after kill -9, and a remaining file has no effect.
Whether other machines see the lock depends on the shared file system. NFS, and Lustre mounted with
`flock`, support it.

URL: the lock is an object that the holder renews, because a store does not know processes. The
holder writes a new number into `run.lock` every few seconds. If the number has not changed for a
minute, another process takes the lock over. A holder that resumes after a pause finds the name of
the new holder before it commits its next checkpoint, and does not commit. Only the waiting process
measures time, so clocks of different machines are never compared.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from llmfoundry.checkpoint.object_storage import ObjectStorage
from llmfoundry.data.store import ExistsError, MissingError
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.files import RUN_LOCK, LockedFile, parse_json, remove_partials, try_lock

LOCK = RUN_LOCK
_PATIENCE = 5.0  # seconds: a killed process frees its memory before its locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def only_run(folder: Path, world: World, *, note: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run's folder, which is created if missing; collective.

    Args:
        folder: folder of the run.
        world: process group.
        note: reports a file system without locks.

    Raises:
        UserError: another process holds the lock, or the folder is not writable; on every rank.
    """
    held: list[LockedFile] = []  # on the main process
    made: list[Path] = []  # created folders, the innermost first

    def take() -> None:
        made.extend(path for path in (folder, *folder.parents) if not path.exists())
        held.extend(_take(folder, note))
        for place in (folder, *folder.glob("*/"), *folder.glob("eval/*/")):
            remove_partials(place)

    on_rank0(world, take)
    try:
        yield
    finally:
        for locked in held:
            with suppress(OSError):
                locked.path.unlink()
                for path in dict.fromkeys([folder, *made]):
                    path.rmdir()  # fails unless empty: only a rejected run's folder is removed
            locked.release()


def _take(folder: Path, note: Callable[[str], None]) -> list[LockedFile]:
    """Lock `run.lock`; return the locked file, or no file if the file system has no locks."""
    path, deadline = folder / LOCK, time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            locked = None
            with suppress(FileNotFoundError):  # another process has just removed the folder
                locked = try_lock(path, mode=0o644)
            if locked is not None:
                os.ftruncate(locked.descriptor, 0)
                os.pwrite(locked.descriptor, f"{_this_process()}\n".encode(), 0)
                return [locked]
        except OSError as error:
            if error.errno in _NO_LOCKS:
                note(f"{path}: the file system has no locks, so a second start is not noticed")
                return []
            raise UserError(
                f"save_folder: {folder} cannot be written ({error.strerror}); make room, or write"
                " another folder"
            ) from error
        time.sleep(0.1)
    raise UserError(
        f"save_folder: {folder} is in use by {_owner(path)}; wait for its end, or write another"
        " run_name"
    )


def _this_process() -> str:
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()}, since {now}"


def _owner(path: Path) -> str:
    try:
        return path.read_text().strip() or "another process"
    except OSError:
        return "another process"


BEAT_S = 15.0
"""Seconds between two renewals of the lock."""
_DEAD_S = 60.0  # a holder without a renewal for this long is considered dead
_LOOK_S = 3.0  # polling interval of a waiting process
_SETTLE_S = 1.0  # of two processes that take over at once, the slower has written by then


class Lease:
    """Renewable lock of a run at a URL."""

    def __init__(self, run: ObjectStorage, note: Callable[[str], None]) -> None:
        """Prepare to take the lock; `note` reports a wait."""
        self._run, self._note = run, note
        self._owner, self._beat = uuid.uuid4().hex, 0
        self._who = _this_process()

    def take(self) -> None:
        """Take the lock; wait if the present holder may be dead.

        Raises:
            UserError: another process holds the lock, or the store cannot be read or written.
        """
        first, deadline = "", 0.0
        while True:
            with suppress(ExistsError):
                self._run.store.write(LOCK, self._facts(), new=True)
                return
            text = self._read()
            facts = _parsed(text)
            if text and not first:
                if facts.get("place") == self._run.identity():
                    break  # same folder: its process has exited, since this one locked the folder
                first, deadline = text, time.monotonic() + _DEAD_S
                self._note(
                    f"save_folder: {self._run.place} was left by {_name(facts)}, or is in use by"
                    f" it; {_DEAD_S:.0f} s will tell"
                )
            elif text and text != first:
                raise self._in_use(facts)
            elif text and time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
        self._run.store.write(LOCK, self._facts())
        time.sleep(_SETTLE_S)
        self.check()

    def beat(self) -> None:
        """Renew the lock.

        Raises:
            UserError: another process holds the lock, or the store cannot be read or written.
        """
        self.check()
        self._beat += 1
        self._run.store.write(LOCK, self._facts())

    def check(self) -> None:
        """Check that no other process has taken the lock over.

        Raises:
            UserError: another process holds the lock, or the store cannot be read.
        """
        text = self._read()
        if text and _parsed(text).get("owner") != self._owner:
            raise self._in_use(_parsed(text))

    def release(self) -> None:
        """Release the lock, if this process still holds it."""
        with suppress(UserError):
            self.check()
            self._run.store.delete([LOCK])

    def _facts(self) -> bytes:
        place = self._run.identity()
        facts = {"owner": self._owner, "who": self._who, "place": place, "beat": self._beat}
        return encoded(facts)

    def _read(self) -> str:
        """Return the content of the lock object; empty if it does not exist."""
        try:
            return self._run.store.read(LOCK).decode(errors="replace")
        except MissingError:
            return ""

    def _in_use(self, facts: dict[str, object]) -> UserError:
        return UserError(
            f"save_folder: {self._run.place} is in use by {_name(facts)}; wait for its end, or"
            " write another run_name"
        )


def _parsed(text: str) -> dict[str, object]:
    with suppress(ValueError):
        facts = parse_json(text)
        if isinstance(facts, dict):
            return facts
    return {}


def _name(facts: dict[str, object]) -> str:
    return str(facts.get("who") or "another process")[:200]


def encoded(facts: Mapping[str, object]) -> bytes:
    """Encode the content of a lock object as a line of JSON."""
    return json.dumps(facts).encode() + b"\n"
