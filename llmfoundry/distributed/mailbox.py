"""Messages between background threads of the processes, through torch.distributed's store.

Entry point: `Mailbox`. The thread that saves a checkpoint uses it (`checkpoint/save.py`); for the
main thread there is `collectives.py`.

Why not a process group: messages in the group of the training step would mix with those of the
step. A second group opens a socket to each other process; with 512 processes, that reaches the
usual limit of open files. Every process is already connected to the store, and the messages are
few and small. Also, a timeout ends one exchange only, whereas gloo then closes its connections,
also for the training step.
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

# numbers of mailboxes; equal on all processes, as all create mailboxes in the same order
_mailbox_numbers = itertools.count()
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.5  # seconds between two polls of the store


class CollectiveError(Exception):
    """Failure of an action on some process: one line, equal on all processes."""


class Mailbox:
    """Exchanges of small Python objects among all processes.

    All processes make the same calls in the same order, each from one thread at a time. Every
    exchange waits for at most `parallel.dist_timeout`. It raises DistStoreError if a process did
    not call it in time or the store is closed.
    """

    def __init__(self, world: World) -> None:
        """Create a mailbox. Messages of different mailboxes are independent."""
        self.world, self.is_main = world, world.is_main
        self._name = f"llmfoundry/mailbox/{next(_mailbox_numbers)}"
        self._store = None if world.size == 1 else default_store()
        self._round = self._step = 0
        # keys that this process has set and not deleted yet, as a reader may still need them
        self._sent_keys: list[str] = []

    def begin(self) -> None:
        """Start a round. Messages of an earlier, interrupted round are never read."""
        self._round += 1
        self._step = 0

    def run(self, action: Callable[[], Value], *, only_main: bool = False) -> Value:
        """Call `action` and return its result if it succeeded on all processes.

        Args:
            action: function without arguments.
            only_main: call `action` on rank 0 alone; the other processes return None.

        Raises:
            CollectiveError: on every process, with the errors of all processes.
        """
        result, problem = None, None
        try:
            result = action() if self.is_main or not only_main else None
        except Exception as error:
            problem = one_line(error)
        problems = sorted({line for line in self.all_gather(problem) if line})
        if problems:
            raise CollectiveError("; ".join(problems))
        return cast(Value, result)

    def run_long(self, action: Callable[[], Value]) -> Value:
        """Do as `run` for an action that may take longer than `parallel.dist_timeout`."""
        if self._store is None:
            return self.run(action)
        return self.run(with_keepalive(action, self.all_true, self.world.timeout))

    def all_true(self, value: bool) -> bool:
        """Return whether `value` is true on every process."""
        return all(self.all_gather(value))

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes by rank on rank 0, and [] on the other processes."""
        if self._store is None:
            return [value]
        keys = self._keys()
        if not self.is_main:
            self._send(keys[self.world.rank], value)
            return []
        self._wait(keys[1:])
        values = [value, *map(pickle.loads, self._store.multi_get(keys[1:]))]
        self._delete_sent()  # a process that has sent this value has read all earlier messages
        return values

    def scatter(self, values: list[Value]) -> Value:
        """Return rank 0's value for this process.

        Args:
            values: on rank 0 one value per rank; ignored on the other processes.
        """
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
        """Return the values of all processes by rank, on every process."""
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
        """Return the store's keys of the next exchange: one per rank that sends or receives."""
        self._step += 1
        prefix = f"{self._name}/{self._round}/{self._step}"
        return [f"{prefix}/{rank}" for rank in range(self.world.size)]

    def _send(self, key: str, value: Any) -> None:
        assert self._store is not None
        self._store.set(key, cast(str, pickle.dumps(value)))  # the store accepts bytes as well
        self._sent_keys.append(key)

    def _receive(self, key: str) -> Any:
        """Return a message of rank 0.

        Rank 0 sends it after it has read all messages of this process, so their keys are deleted.
        """
        assert self._store is not None
        self._wait([key])
        value = pickle.loads(self._store.get(key))
        self._delete_sent()
        return value

    def _wait(self, keys: list[str]) -> None:
        """Wait until the store has all keys.

        Poll instead of calling `store.wait`, which would block the store for the other threads.
        """
        assert self._store is not None
        limit, pause = self.world.timeout.total_seconds(), _FIRST_PAUSE
        deadline = time.monotonic() + limit
        while not self._store.check(keys):
            if not threading.main_thread().is_alive():
                raise dist.DistStoreError("the run has ended")
            if time.monotonic() > deadline:
                missing_ranks = [0]  # other processes than rank 0 wait for rank 0 only
                if self.is_main:
                    missing_keys = [key for key in keys if not self._store.check([key])]
                    missing_ranks = [int(key.rpartition("/")[2]) for key in missing_keys]
                who = name_ranks(missing_ranks)
                raise dist.DistStoreError(f"timed out: {who} did not come within {limit:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _delete_sent(self) -> None:
        """Delete the messages of this process from the store; all have been read."""
        assert self._store is not None
        for key in self._sent_keys:
            self._store.delete_key(key)
        self._sent_keys = []
