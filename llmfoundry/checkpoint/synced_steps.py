"""Steps that all processes end before one of them begins the next.

So what goes wrong on one of them is known to all, at the same step. `checkpointer.py` and
`tensor_files.py` save in such steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from llmfoundry.distributed.collectives import wait_with_others
from llmfoundry.distributed.launch import World
from llmfoundry.distributed.mailbox import HostMessages
from llmfoundry.errors import one_line

Made = TypeVar("Made")


class SaveError(Exception):
    """Why a save failed, in one line; the same on every process."""


class Together:
    """All processes of a run; one save after another."""

    def __init__(self, world: World) -> None:
        self.is_main, self._messages = world.is_main, HostMessages(world, "checkpoint")
        self._timeout = world.timeout

    def begin(self) -> None:
        """Before each save: nothing more is heard of one before that was cut short."""
        self._messages.begin()

    def run(self, action: Callable[[], Made], *, only_main: bool = False) -> Made:
        """What `action` gives, once it went well on every process (or on the main one).

        Raises:
            SaveError: on every process, with the reasons of those where it went wrong.
        """
        made, problem = None, None
        try:
            made = action() if self.is_main or not only_main else None
        except Exception as error:
            problem = one_line(error)
        found = sorted({line for line in self._messages.all(problem) if line})
        if found:
            raise SaveError("; ".join(found))
        return cast(Made, made)

    def run_long(self, action: Callable[[], Made]) -> Made:
        """`run` of what may take longer than processes wait for each other's messages.

        Raises:
            SaveError: as `run`.
        """
        return self.run(wait_with_others(action, self.is_everywhere, self._timeout))

    def is_everywhere(self, value: bool) -> bool:
        """Whether it is true on every process."""
        return all(self._messages.all(value))

    def to_main(self, value: Made) -> list[Made]:
        """The values of all processes, by rank, on the main one; nothing on the others."""
        return self._messages.to_main(value)

    def from_main(self, values: list[Made]) -> Made:
        """To each process its own of the main one's values; elsewhere they are ignored."""
        return self._messages.from_main(values)
