"""What one process of a group makes or reads, handed on to the others, and so is what it raises.

`launch.on_rank0` (once a run) and `launch.on_each_machine` (once a machine) are the ways in. The
idea: thousands of processes that open the same file are an attack on the file system that serves
it, and what one of them finds wrong all must know.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from llmfoundry.errors import one_line
from llmfoundry.ops.torch_private import default_store

Made = TypeVar("Made")

PIECE = 1 << 26
"""Bytes that are sent at a time; each piece waits for `parallel.dist_timeout` anew."""
_FIRST, _LAST = 0.005, 0.5  # seconds between two looks at the store: the first, and at most
_waited: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # alike on who waits


def hand_on(
    make: Callable[[], Made],
    *,
    source: int,
    group: dist.ProcessGroup | None = None,
    patient: bool = False,
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
