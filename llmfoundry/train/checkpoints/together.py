"""Steps that all processes end before one of them begins the next.

So what goes wrong on one of them is known to all, at the same step. `checkpointer.py` and
`tensor_files.py` save in such steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from llmfoundry.errors import one_line
from llmfoundry.parallel.launch import World

Made = TypeVar("Made")


class SaveError(Exception):
    """Why a save failed, in one line; the same on every process."""


class Together:
    """All processes of a run, over a group that nothing else uses meanwhile."""

    def __init__(self, world: World, group: dist.ProcessGroup | None) -> None:
        self.is_main, self._size, self.group = world.is_main, world.size, group

    def run(self, action: Callable[[], Made], *, only_main: bool = False) -> Made:
        """What `action` gives, once it went well on every process (or on the main one).

        Raises:
            SaveError: on every process, with the reasons of those where it went wrong.
        """
        made, problem = None, None
        try:
            made = action() if self.is_main or not only_main else None
        except (Exception, CheckpointException) as error:
            problem = _reason(error)
        found = sorted({line for line in self._all(problem) if line})
        if found:
            raise SaveError("; ".join(found))
        return cast(Made, made)

    def is_everywhere(self, value: bool) -> bool:
        """Whether it is true on every process."""
        return all(self._all(value))

    def to_main(self, value: Made) -> list[Made]:
        """The values of all processes, by rank, on the main one; nothing on the others."""
        if self.group is None:
            return [value]
        found: list[Any] | None = [None] * self._size if self.is_main else None
        dist.gather_object(value, found, dst=0, group=self.group)
        return found or []

    def _all(self, value: Made) -> list[Made]:
        found = [value] * self._size
        if self.group is not None:
            dist.all_gather_object(found, value, group=self.group)
        return found


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({one_line(part) for part, _ in error.failures.values()}))
    return one_line(error)
