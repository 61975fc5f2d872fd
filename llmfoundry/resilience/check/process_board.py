"""`Board`: messages between processes during a check, and which processes have gone silent.

Everything goes through the store at which the processes met, never through a collective: a process
that hangs in a broken GPU must not hang those that are to name it. The idea: each posts under its
rank, rank 0 reads what is there when time is up, and sends the others the ranks that it gave up on.
"""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

_POLL = 0.01  # seconds between two reads of what is not there yet


class Board:
    """The check's messages; `store` is None for a process that is alone.

    Attributes:
        lost: the ranks that have gone silent, the same on all processes, each with the topic on
            which it was waited for.
    """

    def __init__(self, store: dist.Store | None, *, rank: int, size: int, patience: float) -> None:
        """For one check of a store.

        Args:
            store: of no other use, or under a prefix.
            rank: of this process.
            size: number of processes.
            patience: seconds that a step may take beyond what it is known to.
        """
        self.rank, self.size, self.patience = rank, size, patience
        self._store = store
        self.lost: dict[int, str] = {}

    def meeting(self, name: str) -> dist.Store:
        """A part of the store for other uses, where there are several processes."""
        assert self._store is not None
        return dist.PrefixStore(name, self._store)

    def gather(self, topic: str, value: Any, *, seconds: float = 0.0) -> dict[int, Any]:
        """Every living process's value, on rank 0; on the others once rank 0 has them, {}.

        Processes that did not come within `seconds` and the patience are lost from then on, on all.
        """
        if self._store is None:
            return {0: value}
        self._post(f"{topic}/{self.rank}", value)
        if self.rank:
            self.lost = self._wait_for(f"{topic}/lost", 2 * (seconds + self.patience))
            return {}
        expected = [rank for rank in range(self.size) if rank not in self.lost]
        missing = self._missing(topic, expected, seconds + self.patience)
        self.lost |= dict.fromkeys(missing, topic)
        self._post(f"{topic}/lost", self.lost)
        return {rank: self._read(f"{topic}/{rank}") for rank in expected if rank not in missing}

    def broadcast(self, topic: str, value: Any = None) -> Any:
        """Rank 0's value, on every living process.

        Raises:
            RuntimeError: rank 0 is silent.
        """
        if self._store is None:
            return value
        if self.rank:
            return self._wait_for(f"{topic}/sent", 2 * self.patience)
        self._post(f"{topic}/sent", value)
        return value

    def broadcast_last(self, topic: str, value: Any) -> Any:
        """The same; rank 0, which may hold the store, waits until the others have read it."""
        received = self.broadcast(topic, value)
        if self._store is not None:
            self._post(f"{topic}/read/{self.rank}", True)
            if self.rank == 0:
                others = [rank for rank in range(self.size) if rank not in self.lost]
                self._missing(f"{topic}/read", others, self.patience)
        return received

    def _post(self, key: str, value: Any) -> None:
        assert self._store is not None
        self._store.set(key, cast(str, pickle.dumps(value)))  # it takes bytes too

    def _read(self, key: str) -> Any:
        assert self._store is not None
        return pickle.loads(self._store.get(key))

    def _wait_for(self, key: str, seconds: float) -> Any:
        assert self._store is not None
        self._store.wait([key], timedelta(seconds=seconds))
        return self._read(key)

    def _missing(self, topic: str, ranks: list[int], seconds: float) -> list[int]:
        """Those that have posted nothing when time is up."""
        assert self._store is not None
        deadline = time.monotonic() + seconds
        while True:
            ranks = [r for r in ranks if not self._store.check([f"{topic}/{r}"])]
            if not ranks or time.monotonic() > deadline:
                return ranks
            time.sleep(_POLL)
