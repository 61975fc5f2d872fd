"""One training at a time at a URL: a lock object that its holder renews.

`run_place` takes it after the lock on the working copy, which dies with its process; a store knows
nothing of processes. So the holder writes a new number into `run.lock` every few seconds, and who
finds the object of a holder that has written nothing for a minute takes it over. A holder that
comes back from a pause finds another's name there before its next checkpoint counts, and saves
nothing more. Times are measured by the one who waits: no two clocks are compared.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

from llmfoundry.checkpoint.remote_run import StoredRun, record
from llmfoundry.data.fetch.download import MissingError
from llmfoundry.data.fetch.object_store import ExistsError
from llmfoundry.errors import UserError

NAME = "run.lock"
BEAT_S = 15.0
"""Between two signs of life."""
_DEAD_S = 60.0  # without one
_LOOK_S = 3.0  # between two looks of one that waits
_SETTLE_S = 1.0  # after which of two that take over at once the slower has written, too


class Lease:
    """The right to write a run's URL, of one process."""

    def __init__(self, run: StoredRun, note: Callable[[str], None]) -> None:
        """Nothing is taken yet; `note` reports a wait."""
        self._run, self._note = run, note
        self._owner, self._beat = uuid.uuid4().hex, 0
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        self._who = f"process {os.getpid()} on {socket.gethostname()}, since {now}"

    def take(self) -> None:
        """Take the lock; waits where its holder may be dead.

        Raises:
            UserError: another lives, or the store cannot be asked or written.
        """
        first, deadline = "", 0.0
        while True:
            with suppress(ExistsError):
                self._run.store.write(NAME, self._facts(), new=True)
                return
            text = self._read()
            facts = _parsed(text)
            if text and not first:
                if facts.get("place") == self._run.identity():
                    break  # whose process has ended, since the lock on the folder is ours
                first, deadline = text, time.monotonic() + _DEAD_S
                self._note(
                    f"save_folder: {self._run.url} was left by {_name(facts)}, or is in use by it;"
                    f" {_DEAD_S:.0f} s will tell"
                )
            elif text and text != first:
                raise self._in_use(facts)
            elif text and time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
        self._run.store.write(NAME, self._facts())
        time.sleep(_SETTLE_S)
        self.check()

    def beat(self) -> None:
        """A sign of life; does nothing for one who has lost the lock.

        Raises:
            UserError: another has it, or the store cannot be asked or written.
        """
        self.check()
        self._beat += 1
        self._run.store.write(NAME, self._facts())

    def check(self) -> None:
        """Refuse to go on where another has taken the lock over.

        Raises:
            UserError: so it is, or the store cannot be asked.
        """
        text = self._read()
        if text and _parsed(text).get("owner") != self._owner:
            raise self._in_use(_parsed(text))

    def release(self) -> None:
        """Give the lock back, if it is still this process's."""
        with suppress(UserError):
            self.check()
            self._run.store.delete([NAME])

    def _facts(self) -> bytes:
        place = self._run.identity()
        facts = {"owner": self._owner, "who": self._who, "place": place, "beat": self._beat}
        return record(facts)

    def _read(self) -> str:
        """What the object says; nothing where it is not there."""
        try:
            return self._run.store.read(NAME).decode(errors="replace")
        except MissingError:
            return ""

    def _in_use(self, facts: dict[str, object]) -> UserError:
        return UserError(
            f"save_folder: {self._run.url} is in use by {_name(facts)}; wait for its end, or write"
            " another run_name"
        )


def _parsed(text: str) -> dict[str, object]:
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return {}


def _name(facts: dict[str, object]) -> str:
    return str(facts.get("who") or "another process")[:200]
