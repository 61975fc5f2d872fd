"""Collectives outside of the training step, on objects and host values: every process calls each.

Every process must make the same calls in the same order; one with another microbatch, or another
number of rows, leaves the others waiting. Free memory, a processor's instructions, and the files
and recipe on a disk may differ between machines: so `builders` calls these before anything is
decided by them. And thousands of processes that open the same file are an attack on the file system
that serves it: one reads it, and broadcasts it or its error. All wait for `parallel.dist_timeout`.
Threads other than the main one must not call these: `mailbox.py` is for them.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from llmfoundry.distributed.failures import name_ranks
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError, one_line
from llmfoundry.ops.devices import device_thread
from llmfoundry.ops.torch_private import default_store

Made = TypeVar("Made")

PIECE = 1 << 26
"""Bytes that are broadcast at a time; each piece waits for `parallel.dist_timeout` anew."""
_KEEPALIVE = 10.0  # seconds between two messages of processes that have long work, at most
_FIRST, _LAST = 0.005, 0.5  # seconds between two looks at the store: the first, and at most


def all_reduce_min(world: World, value: int) -> int:
    """The smallest `value` of any process, on all of them.

    A world whose processes have not joined, as a dry run's, keeps its own.
    """
    if not _joined(world):
        return value
    smallest = torch.tensor(value)  # on the host, where memory is counted
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return int(smallest)


def all_gather_object(world: World, value: Made) -> list[Made]:
    """The values of all processes, by rank, on each of them."""
    values = [value] * world.size
    if _joined(world):
        dist.all_gather_object(values, value)
    return values


def _joined(world: World) -> bool:
    return world.size > 1 and dist.is_initialized()


def on_all_ranks(world: World, make: Callable[[], Made]) -> Made:
    """What `make` returns, once no process refused.

    Raises:
        UserError: on every process: its own, or those of the others with their ranks.
    """
    made, own = list[Made](), list[UserError]()
    try:
        made.append(make())
    except UserError as error:
        own.append(error)
    if all_reduce_min(world, 0 if own else 1):
        return made[0]
    ranks = _ranks_by_line(world, own[0].problems if own else ())
    if own:
        raise own[0]
    raise UserError(*(f"{line} (on {name_ranks(ranks[line])})" for line in sorted(ranks)))


def check_same_on_all_ranks(world: World, found: Mapping[str, str], *, advice: str) -> None:
    """Refuse processes that found other values than rank 0.

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
    if all_reduce_min(world, 0 if others else 1):
        return
    ranks = _ranks_by_line(world, tuple(others))
    raise UserError(
        *(
            f"{key}: {name_ranks(ranks[key])} found another value than rank 0; {advice}"
            for key in sorted(ranks)
        )
    )


def _ranks_by_line(world: World, lines: tuple[str, ...]) -> dict[str, list[int]]:
    """Of each line that any process has, the processes that have it."""
    every = all_gather_object(world, lines)
    found = {line for theirs in every for line in theirs}
    return {line: [rank for rank, theirs in enumerate(every) if line in theirs] for line in found}


def with_keepalive(
    action: Callable[[], Made], all_done: Callable[[bool], bool], timeout: timedelta
) -> Callable[[], Made]:
    """Do what may take longer than a message's timeout; every process calls it.

    A thread does it, and meanwhile all processes exchange messages every few seconds.

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

    def result() -> Made:
        if problems:
            raise problems[0]
        return made[0]

    thread = device_thread(act, name="with keepalive", daemon=True)
    thread.start()
    is_done = False
    while not is_done:
        thread.join(min(_KEEPALIVE, timeout.total_seconds() / 4))
        is_done = all_done(not thread.is_alive())
    return result


def on_rank0(world: World, make: Callable[[], Made], *, patient: bool = False) -> Made:
    """What rank 0 makes, on every process; so is what it raises. See `_broadcast_result`."""
    if world.size == 1:
        return make()
    return _broadcast_result(make, source=0, group=None, patient=patient)


def on_each_machine(world: World, make: Callable[[], Made], *, patient: bool = False) -> Made:
    """What the first process of each machine makes, on all of that machine; so is what it raises.

    For files that each machine may have of its own. See `_broadcast_result`.
    """
    machine = world.machine
    if machine is None:
        return make()
    return _broadcast_result(make, source=machine.first, group=machine.group, patient=patient)


def _broadcast_result(
    make: Callable[[], Made], *, source: int, group: dist.ProcessGroup | None, patient: bool
) -> Made:
    """What process `source` makes, on every process of a group, all of which call it.

    Args:
        make: called on `source` alone; gives what can be pickled.
        source: its rank among all processes.
        group: of the host; None: all processes.
        patient: wait however long `make` takes, as for the preparation of a corpus; else for
            parallel.dist_timeout.

    Raises:
        Exception: on every process, what `make` raised; a RuntimeError in place of what cannot be
            pickled.
    """
    is_source = dist.get_rank() == source
    sent: bytes | bytearray = b""
    made: list[Made] = []
    failure: Exception | None = None
    if is_source:
        try:
            made.append(make())
            sent = pickle.dumps((made[0], None))
        except Exception as error:  # the others would wait for ever
            failure = error
            sent = _pickled(error)
    if patient:
        _wait_for(f"{'all' if group is None else 'some'}.{source}", is_source)
    sent = _broadcast(sent, source, group)
    if not is_source:
        value, failure = pickle.loads(sent)
        made.append(value)
    if failure is not None:
        raise failure
    return made[0]


def _pickled(error: Exception) -> bytes:
    """A failure for the others; some of other libraries' cannot be made again from their pickle."""
    try:
        data = pickle.dumps((None, error))
        pickle.loads(data)
    except Exception:
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {one_line(error)}")))
    return data


_waited: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # the same on all that wait


def _wait_for(what: str, is_source: bool) -> None:
    """Until the source has come here. If it ends before, its launcher ends the others."""
    store, key = default_store(), f"llmfoundry/made/{what}/{next(_waited[what])}"
    if is_source:
        store.set(key, "")
        return
    pause = _FIRST
    while not store.check([key]):
        time.sleep(pause)
        pause = min(2 * pause, _LAST)


def _broadcast(
    data: bytes | bytearray, source: int, group: dist.ProcessGroup | None
) -> bytes | bytearray:
    """The bytes of `source`, on every process; piece by piece, each copied once."""
    is_source = dist.get_rank() == source
    size = torch.tensor(len(data))
    dist.broadcast(size, source, group=group)
    received: Any = data if is_source else bytearray(int(size))
    for begin in range(0, int(size), PIECE):
        end = min(begin + PIECE, int(size))
        piece = torch.empty(end - begin, dtype=torch.uint8)
        if is_source:
            piece.numpy()[:] = np.frombuffer(data, np.uint8, end - begin, begin)
        dist.broadcast(piece, source, group=group)
        if not is_source:
            received[begin:end] = piece.numpy().data
    return received
