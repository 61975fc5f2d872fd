"""Collectives on Python objects and host values, outside of the training step.

All processes must make the same calls in the same order. Each call waits for at most
`parallel.dist_timeout`. Only the main thread may call these functions; other threads use
`mailbox.py`.

`builders` uses them for two purposes. First, free memory, CPU instructions, files and recipe may
differ between machines, but microbatch and number of sequences must be the same on all processes:
the processes agree on such values before they depend on them. Second, thousands of processes
should not open the same file: one process reads the file and broadcasts its content or the error.
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
"""Bytes per broadcast. The timeout `parallel.dist_timeout` applies to each broadcast."""
_KEEPALIVE = 10.0  # maximum seconds between two messages during long work
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.5  # seconds between two polls of the store


def all_reduce_min(world: World, value: int) -> int:
    """Return the smallest `value` of all processes.

    Without a process group, as in a dry run, return `value`.
    """
    if not _joined(world):
        return value
    smallest = torch.tensor(value)  # on the CPU: this uses no GPU memory
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return int(smallest)


def all_gather_object(world: World, value: Made) -> list[Made]:
    """Return the values of all processes in the order of their ranks."""
    values = [value] * world.size
    if _joined(world):
        dist.all_gather_object(values, value)
    return values


def _joined(world: World) -> bool:
    """Return whether there are other processes and a process group."""
    return world.size > 1 and dist.is_initialized()


def on_all_ranks(world: World, make: Callable[[], Made]) -> Made:
    """Call `make` on every process; return its result if it succeeded on all processes.

    Raises:
        UserError: `make` failed on some process. A process where it failed raises its own error;
            the other processes raise all errors, with the ranks.
    """
    # call it; lists hold at most one result or error
    results, errors = list[Made](), list[UserError]()
    try:
        results.append(make())
    except UserError as error:
        errors.append(error)
    if all_reduce_min(world, 0 if errors else 1):
        return results[0]

    # share the errors
    ranks = _ranks_by_line(world, errors[0].problems if errors else ())
    if errors:
        raise errors[0]
    raise UserError(*(f"{line} (on {name_ranks(ranks[line])})" for line in sorted(ranks)))


def check_same_on_all_ranks(world: World, values: Mapping[str, str], *, advice: str) -> None:
    """Check that all processes have the values of rank 0.

    Args:
        world: this process.
        values: values that must be equal, by key of the recipe.
        advice: end of the error line: what to do if they differ.

    Raises:
        UserError: on every process: the keys, and the ranks whose value differs.
    """
    if not _joined(world):
        return
    expected = on_rank0(world, lambda: dict(values))
    keys = expected.keys() | values.keys()
    different = sorted(key for key in keys if expected.get(key) != values.get(key))
    if all_reduce_min(world, 0 if different else 1):
        return
    ranks = _ranks_by_line(world, tuple(different))
    raise UserError(
        *(
            f"{key}: {name_ranks(ranks[key])} found another value than rank 0; {advice}"
            for key in sorted(ranks)
        )
    )


def _ranks_by_line(world: World, lines: tuple[str, ...]) -> dict[str, list[int]]:
    """Return for each line of any process the ranks of the processes that passed it."""
    ranks_by_line = dict[str, list[int]]()
    for rank, rank_lines in enumerate(all_gather_object(world, lines)):
        for line in set(rank_lines):
            ranks_by_line.setdefault(line, []).append(rank)
    return ranks_by_line


def with_keepalive(
    action: Callable[[], Made], all_done: Callable[[bool], bool], timeout: timedelta
) -> Callable[[], Made]:
    """Run an action that may take longer than the timeout of a message. Every process calls this.

    A thread runs the action. Meanwhile all processes exchange messages every few seconds, so that
    no message times out.

    Args:
        action: function without arguments.
        all_done: collective that returns whether its argument is true on all processes.
        timeout: timeout of a message.

    Returns:
        Function that returns the result of the action or raises its error.
    """
    # at most one result or error
    results, errors = list[Made](), list[Exception]()

    def act() -> None:
        try:
            results.append(action())
        except Exception as error:
            errors.append(error)

    def result() -> Made:
        if errors:
            raise errors[0]
        return results[0]

    # exchange messages until the action has ended on all processes
    thread = device_thread(act, name="with keepalive", daemon=True)
    thread.start()
    is_done = False
    while not is_done:
        thread.join(min(_KEEPALIVE, timeout.total_seconds() / 4))
        is_done = all_done(not thread.is_alive())
    return result


def on_rank0(world: World, make: Callable[[], Made], *, patient: bool = False) -> Made:
    """Call `make` on rank 0; return its result, or raise its error, on every process.

    See `_broadcast_result` for `patient`.
    """
    if world.size == 1:
        return make()
    return _broadcast_result(make, source=0, group=None, patient=patient)


def on_each_machine(world: World, make: Callable[[], Made], *, patient: bool = False) -> Made:
    """Call `make` on one process per machine; return its result on all processes of the machine.

    For files that may differ between machines. An error is raised on all processes of the machine.
    See `_broadcast_result` for `patient`.
    """
    machine = world.machine
    if machine is None:
        return make()
    return _broadcast_result(make, source=machine.first, group=machine.group, patient=patient)


def _broadcast_result(
    make: Callable[[], Made], *, source: int, group: dist.ProcessGroup | None, patient: bool
) -> Made:
    """Call `make` on one process; return its result on all processes of a group.

    All processes of the group call this function.

    Args:
        make: function whose result can be pickled.
        source: global rank of the process that calls `make`.
        group: a group of CPU collectives; None: all processes.
        patient: wait as long as `make` takes, for example to prepare a corpus; otherwise for
            parallel.dist_timeout.

    Raises:
        Exception: on every process, the error of `make`. Other processes than `source` raise a
            RuntimeError in place of an error that cannot be pickled.
    """
    # call it on the source; an error is broadcast too, as the other processes wait for a message
    is_source = dist.get_rank() == source
    message: bytes | bytearray = b""
    results: list[Made] = []  # at most one
    failure: Exception | None = None
    if is_source:
        try:
            results.append(make())
            message = pickle.dumps((results[0], None))
        except Exception as error:
            failure = error
            message = _pickled(error)

    # broadcast the pair of result and error
    if patient:
        _wait_for(f"{'all' if group is None else 'some'}.{source}", is_source)
    message = _broadcast(message, source, group)
    if not is_source:
        result, failure = pickle.loads(message)
        results.append(result)
    if failure is not None:
        raise failure
    return results[0]


def _pickled(error: Exception) -> bytes:
    """Return a message with an error: a RuntimeError where the error cannot be unpickled."""
    try:
        data = pickle.dumps((None, error))
        pickle.loads(data)
    except Exception:
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {one_line(error)}")))
    return data


# numbers of calls of `_wait_for` by name; equal on all processes, as all make the same calls
_call_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def _wait_for(name: str, is_source: bool) -> None:
    """Wait until the source calls this function too.

    There is no timeout: if the source is killed, the launcher kills the waiting processes.
    """
    store, key = default_store(), f"llmfoundry/made/{name}/{next(_call_numbers[name])}"
    if is_source:
        store.set(key, "")
        return
    pause = _FIRST_PAUSE
    while not store.check([key]):
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _broadcast(
    data: bytes | bytearray, source: int, group: dist.ProcessGroup | None
) -> bytes | bytearray:
    """Broadcast the bytes of process `source`, at most PIECE bytes at a time."""
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
