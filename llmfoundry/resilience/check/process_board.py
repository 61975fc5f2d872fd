"""`Board`: what processes tell each other during a check, and who has gone silent.

Everything goes through the store at which the processes met, never through a collective: a process
that hangs in a broken GPU must not hang those that are to name it. The idea: each posts under its
rank, rank 0 reads what is there when time is up, and tells the others whom it has given up.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_POLL = 0.01  # seconds between looks at what is not there yet


class Board:
    """The check's messages; `store` is None for a process that is alone."""

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
        self._alone: dict[str, Any] = {}
        self.lost: set[int] = set()

    def meeting(self, name: str) -> dist.Store:
        """A part of the store for other uses, where there are several processes."""
        assert self._store is not None
        return dist.PrefixStore(name, self._store)

    def post(self, topic: str, value: Any) -> None:
        """Leave a value that JSON knows."""
        if self._store is None:
            self._alone[topic] = value
        else:
            self._store.set(f"{topic}/{self.rank}", json.dumps(value))

    def gather(self, topic: str, value: Any, *, seconds: float = 0.0) -> dict[int, Any]:
        """Every living process's value, on rank 0; on the others once rank 0 has them, {}.

        Processes that did not come within `seconds` and the patience are lost from then on, on all.
        """
        self.post(topic, value)
        if self._store is None:
            return {0: value}
        if self.rank:
            self.lost |= {*self._wait_for(f"{topic}/lost", 2 * (seconds + self.patience))}
            return {}
        expected = [rank for rank in range(self.size) if rank not in self.lost]
        missing = self._missing(topic, expected, seconds + self.patience)
        self.lost |= missing
        self._store.set(f"{topic}/lost", json.dumps(sorted(self.lost)))
        came = [rank for rank in expected if rank not in missing]
        return {rank: json.loads(self._store.get(f"{topic}/{rank}")) for rank in came}

    def tell(self, topic: str, value: Any = None) -> Any:
        """What rank 0 says, on every living process.

        Raises:
            RuntimeError: rank 0 is silent.
        """
        if self._store is None:
            return value
        if self.rank == 0:
            self._store.set(f"{topic}/told", json.dumps(value))
            return value
        return self._wait_for(f"{topic}/told", 2 * self.patience)

    def tell_last(self, topic: str, value: Any) -> Any:
        """The same; rank 0, which may hold the store, waits until the others have heard it."""
        said = self.tell(topic, value)
        self.post(f"{topic}/heard", True)
        if self._store is not None and self.rank == 0:
            others = [rank for rank in range(self.size) if rank not in self.lost]
            self._missing(f"{topic}/heard", others, self.patience)
        return said

    def _wait_for(self, key: str, seconds: float) -> Any:
        assert self._store is not None
        self._store.wait([key], timedelta(seconds=seconds))
        return json.loads(self._store.get(key))

    def _missing(self, topic: str, ranks: list[int], seconds: float) -> set[int]:
        """Those of whom nothing is there when time is up."""
        assert self._store is not None
        deadline, missing = time.monotonic() + seconds, list(ranks)
        while True:
            missing = [r for r in missing if not self._store.check([f"{topic}/{r}"])]
            if not missing or time.monotonic() > deadline:
                return {*missing}
            time.sleep(_POLL)
