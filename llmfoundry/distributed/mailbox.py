"""What processes tell each other beside the training step: by the store at which they all met.

The checkpoint's thread speaks so. A process group would mix its messages with the step's, and one
of its own is a socket to every other process, which at 512 processes is what a system lets a
process open. The store has a connection to each already; messages are few and small. And a message
that does not come ends this exchange alone: gloo closes the connection, for the step too.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch.distributed as dist

from llmfoundry.distributed.failures import names
from llmfoundry.distributed.launch import World
from llmfoundry.ops.torch_private import default_store

Value = TypeVar("Value")

_made: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # alike on all processes
_FIRST, _LAST = 0.005, 0.5  # seconds between two looks at the store: the first, and at most


class HostMessages:
    """Exchanges among all processes, each of which makes the same calls in the same order.

    Only one thread of a process speaks at a time. Every exchange waits for `parallel.dist_timeout`.
    """

    def __init__(self, world: World, subject: str) -> None:
        """Prepare to exchange.

        Args:
            world: this process.
            subject: what it is about; messages of two subjects never mix, nor those of two objects.
        """
        self._world, self._subject = world, f"{subject}.{next(_made[subject])}"
        self._store = None if world.size == 1 else default_store()
        self._round = self._step = 0
        self._sent: list[str] = []  # by this process; removed once it is known that all have read

    def begin(self) -> None:
        """Begin anew, and hear nothing more of an exchange that was cut short on some process."""
        self._round += 1
        self._step = 0

    def to_main(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, on rank 0; nothing on the others.

        Raises:
            DistStoreError: a process did not come in time, or the store is gone.
        """
        if self._store is None:
            return [value]
        keys = self._keys()
        if not self._world.is_main:
            self._send(keys[self._world.rank], value)
            return []
        self._wait(keys[1:])
        told = [value, *map(pickle.loads, self._store.multi_get(keys[1:]))]
        self._forget()  # who told this has read what was told before
        return told

    def from_main(self, values: list[Value]) -> Value:
        """To each process its own of rank 0's values; elsewhere `values` is ignored.

        Raises:
            DistStoreError: rank 0 did not come in time, or the store is gone.
        """
        if self._store is None:
            return values[0]
        keys = self._keys()
        if self._world.is_main:
            for key, value in zip(keys[1:], values[1:], strict=True):
                self._send(key, value)
            return values[0]
        told: Value = self._receive(keys[self._world.rank])
        return told

    def all(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, on each.

        Raises:
            DistStoreError: a process did not come in time, or the store is gone.
        """
        told = self.to_main(value)
        if self._store is None:
            return told
        key = self._keys()[0]
        if not self._world.is_main:
            found: list[Value] = self._receive(key)
            return found
        self._send(key, told)
        return told

    def _keys(self) -> list[str]:
        """Of the next message, by the rank that it is of or for."""
        self._step += 1
        where = f"llmfoundry/{self._subject}/{self._round}/{self._step}"
        return [f"{where}/{rank}" for rank in range(self._world.size)]

    def _send(self, key: str, value: Any) -> None:
        assert self._store is not None
        self._store.set(key, cast(str, pickle.dumps(value)))  # it takes bytes too
        self._sent.append(key)

    def _receive(self, key: str) -> Any:
        """What rank 0 says; it has read all that this process has told it before."""
        assert self._store is not None
        self._wait([key])
        value = pickle.loads(self._store.get(key))
        self._forget()
        return value

    def _wait(self, keys: list[str]) -> None:
        """Until all are there. Looks again and again: a store that waits serves no other thread."""
        assert self._store is not None
        limit, pause = self._world.timeout.total_seconds(), _FIRST
        deadline = time.monotonic() + limit
        while not self._store.check(keys):
            if not threading.main_thread().is_alive():
                raise dist.DistStoreError("the run has ended")
            if time.monotonic() > deadline:
                lost = [int(key.rpartition("/")[2]) for key in keys if not self._store.check([key])]
                who = names(lost if self._world.is_main else [0])
                raise dist.DistStoreError(f"timed out: {who} did not come within {limit:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _LAST)

    def _forget(self) -> None:
        assert self._store is not None
        for key in self._sent:
            self._store.delete_key(key)
        self._sent = []
