"""Messages that must not wait for the training step: through the store at which all processes met.

A save's thread speaks so (`checkpoint/save.py`); everything else is in `collectives.py`. The idea:
a process group would mix its messages with the step's, and one of its own is a socket to every
other process, which at 512 processes is what a system lets a process open. The store has a
connection to each already; messages are few and small. And a message that does not come ends this
exchange alone: gloo closes the connection, for the step too.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from llmfoundry.distributed.collectives import with_keepalive
from llmfoundry.distributed.failures import name_ranks
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import one_line
from llmfoundry.ops.torch_private import default_store

Value = TypeVar("Value")

_numbers = itertools.count()  # of mailboxes, which all processes make in the same order
_FIRST, _LAST = 0.005, 0.5  # seconds between two looks at the store: the first, and at most


class CollectiveError(Exception):
    """Why an action failed on some process, in one line; the same on every process."""


class Mailbox:
    """Exchanges among all processes, each of which makes the same calls in the same order.

    Only one thread of a process uses it at a time. Every exchange waits for `parallel.dist_timeout`
    and raises DistStoreError where a process did not come in time, or the store is gone.
    """

    def __init__(self, world: World) -> None:
        """Prepare to exchange; messages of two mailboxes never mix."""
        self.world, self.is_main = world, world.is_main
        self._name = f"llmfoundry/mailbox/{next(_numbers)}"
        self._store = None if world.size == 1 else default_store()
        self._round = self._step = 0
        self._sent: list[str] = []  # by this process; deleted once it is known that all have read

    def begin(self) -> None:
        """Start a round: messages of one that was cut short on some process are not read."""
        self._round += 1
        self._step = 0

    def run(self, action: Callable[[], Value], *, only_main: bool = False) -> Value:
        """What `action` returns, once it succeeded on every process (or on rank 0).

        Raises:
            CollectiveError: on every process, with the reasons of those where it failed.
        """
        result, problem = None, None
        try:
            result = action() if self.is_main or not only_main else None
        except Exception as error:
            problem = one_line(error)
        found = sorted({line for line in self.all_gather(problem) if line})
        if found:
            raise CollectiveError("; ".join(found))
        return cast(Value, result)

    def run_long(self, action: Callable[[], Value]) -> Value:
        """`run` of what may take longer than `parallel.dist_timeout`."""
        if self._store is None:
            return self.run(action)
        return self.run(with_keepalive(action, self.all_true, self.world.timeout))

    def all_true(self, value: bool) -> bool:
        """Whether it is true on every process."""
        return all(self.all_gather(value))

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, on rank 0; nothing on the others."""
        if self._store is None:
            return [value]
        keys = self._keys()
        if not self.is_main:
            self._send(keys[self.world.rank], value)
            return []
        self._wait(keys[1:])
        values = [value, *map(pickle.loads, self._store.multi_get(keys[1:]))]
        self._delete_sent()  # who sent this has read what was sent before
        return values

    def scatter(self, values: list[Value]) -> Value:
        """To each process its own of rank 0's values; elsewhere `values` is ignored."""
        if self._store is None:
            return values[0]
        keys = self._keys()
        if self.is_main:
            for key, value in zip(keys[1:], values[1:], strict=True):
                self._send(key, value)
            return values[0]
        received: Value = self._receive(keys[self.world.rank])
        return received

    def all_gather(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, on each."""
        values = self.gather(value)
        if self._store is None:
            return values
        key = self._keys()[0]
        if not self.is_main:
            received: list[Value] = self._receive(key)
            return received
        self._send(key, values)
        return values

    def _keys(self) -> list[str]:
        """Of the next message, by the rank that it is of or for."""
        self._step += 1
        where = f"{self._name}/{self._round}/{self._step}"
        return [f"{where}/{rank}" for rank in range(self.world.size)]

    def _send(self, key: str, value: Any) -> None:
        assert self._store is not None
        self._store.set(key, cast(str, pickle.dumps(value)))  # it takes bytes too
        self._sent.append(key)

    def _receive(self, key: str) -> Any:
        """A message of rank 0, which has read all that this process sent before."""
        assert self._store is not None
        self._wait([key])
        value = pickle.loads(self._store.get(key))
        self._delete_sent()
        return value

    def _wait(self, keys: list[str]) -> None:
        """Until all are there. Polls: a store that waits serves no other thread."""
        assert self._store is not None
        limit, pause = self.world.timeout.total_seconds(), _FIRST
        deadline = time.monotonic() + limit
        while not self._store.check(keys):
            if not threading.main_thread().is_alive():
                raise dist.DistStoreError("the run has ended")
            if time.monotonic() > deadline:
                lost = [int(key.rpartition("/")[2]) for key in keys if not self._store.check([key])]
                who = name_ranks(lost if self.is_main else [0])
                raise dist.DistStoreError(f"timed out: {who} did not come within {limit:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _LAST)

    def _delete_sent(self) -> None:
        assert self._store is not None
        for key in self._sent:
            self._store.delete_key(key)
        self._sent = []
