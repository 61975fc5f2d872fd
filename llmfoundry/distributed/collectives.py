"""What a process finds on its own machine, and all processes of a run must go by alike.

Every process has to take part in the same collectives in the same order; one with another
microbatch, or with another number of rows, leaves the others waiting. Free memory, a processor's
instructions, and the files and recipe on a disk may differ between machines. So `assemble` asks
here before anything is decided by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from llmfoundry.distributed.failures import names
from llmfoundry.distributed.launch import World, on_rank0
from llmfoundry.errors import UserError
from llmfoundry.ops.device_threads import device_thread

Made = TypeVar("Made")
_SECONDS = 10.0  # between two messages of processes that have long work, at most


def least(world: World, value: int) -> int:
    """The smallest `value` of any process, on all of them; every process calls it.

    A world whose processes have not joined, as a dry run's, keeps its own.
    """
    if not _joined(world):
        return value
    smallest = torch.tensor(value)  # on the host, where memory is counted
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return int(smallest)


def from_all(world: World, value: Made) -> list[Made]:
    """The values of all processes, by rank, on each of them; every process calls it."""
    values = [value] * world.size
    if _joined(world):
        dist.all_gather_object(values, value)
    return values


def together(world: World, make: Callable[[], Made]) -> Made:
    """What `make` gives, once no process refused; every process calls it.

    Raises:
        UserError: on every process: its own, or those of the others with their ranks.
    """
    made, own = list[Made](), list[UserError]()
    try:
        made.append(make())
    except UserError as error:
        own.append(error)
    if least(world, 0 if own else 1):
        return made[0]
    ranks = _ranks_by_line(world, own[0].problems if own else ())
    if own:
        raise own[0]
    raise UserError(*(f"{line} (on {names(ranks[line])})" for line in sorted(ranks)))


def wait_with_others(
    action: Callable[[], Made], all_done: Callable[[bool], bool], timeout: timedelta
) -> Callable[[], Made]:
    """Do what may take longer than processes wait for each other; every process calls it.

    A thread does it, and meanwhile all tell each other every few seconds that they are still there.

    Args:
        action: what is done.
        all_done: an exchange: whether what each process gives it is true of all of them.
        timeout: of a message.

    Returns:
        What gives the action's result, or raises its error.
    """
    made, problems = list[Made](), list[Exception]()

    def act() -> None:
        try:
            made.append(action())
        except Exception as error:
            problems.append(error)

    def tell() -> Made:
        if problems:
            raise problems[0]
        return made[0]

    thread = device_thread(act, name="with others", daemon=True)
    thread.start()
    is_done = False
    while not is_done:
        thread.join(min(_SECONDS, timeout.total_seconds() / 4))
        is_done = all_done(not thread.is_alive())
    return tell


def check_alike(world: World, found: Mapping[str, str], *, advice: str) -> None:
    """Refuse processes that found other than process 0 did; every process calls it.

    Args:
        world: this process.
        found: what must be the same, by the recipe's key.
        advice: what to do where it is not.

    Raises:
        UserError: on every process: the keys, and the ranks that found another value.
    """
    if not _joined(world):
        return
    first = on_rank0(world, lambda: dict(found))
    others = sorted(key for key in first.keys() | found.keys() if first.get(key) != found.get(key))
    if least(world, 0 if others else 1):
        return
    ranks = _ranks_by_line(world, tuple(others))
    said = (f"{key}: {names(ranks[key])} found another value than rank 0" for key in sorted(ranks))
    raise UserError(*(f"{line}; {advice}" for line in said))


def _joined(world: World) -> bool:
    return world.size > 1 and dist.is_initialized()


def _ranks_by_line(world: World, lines: tuple[str, ...]) -> dict[str, list[int]]:
    """Of each line that any process has, the processes that have it."""
    every = from_all(world, lines)
    found = {line for theirs in every for line in theirs}
    return {line: [rank for rank, theirs in enumerate(every) if line in theirs] for line in found}
