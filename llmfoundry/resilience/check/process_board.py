"""`Board`: communication between ranks during a check, which detects ranks that do not answer.

All messages go through the rendezvous store and not through collectives, because a rank that hangs
in a broken GPU would block a collective. Each rank posts under its number. Rank 0 reads the posts
until the time limit and tells the other ranks which ranks are lost.
"""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

_POLL = 0.01  # seconds between two checks for missing posts


class Board:
    """Message board of a check.

    Attributes:
        lost: ranks that did not answer, with the topic that they did not answer; equal on all
            ranks.
    """

    def __init__(self, store: dist.Store | None, *, rank: int, size: int, patience: float) -> None:
        """Create the board of one check.

        Args:
            store: used only for this check, or with a prefix; None: there is a single rank.
            rank: rank of this process.
            size: number of ranks.
            patience: seconds that a stage may take beyond its expected time.
        """
        self.rank, self.size, self.patience = rank, size, patience
        self._store = store
        self.lost: dict[int, str] = {}

    def meeting(self, name: str) -> dist.Store:
        """Return a part of the store for a process group; requires several ranks."""
        assert self._store is not None
        return dist.PrefixStore(name, self._store)

    def gather(self, topic: str, value: Any, *, seconds: float = 0.0) -> dict[int, Any]:
        """Gather the values of all living ranks on rank 0, by rank; other ranks get {}.

        Other ranks return when rank 0 has the values. Ranks that do not post within `seconds` plus
        the patience are lost from then on.
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
        """Return rank 0's value on all living ranks.

        Raises:
            RuntimeError: rank 0 does not answer.
        """
        if self._store is None:
            return value
        if self.rank:
            return self._wait_for(f"{topic}/sent", 2 * self.patience)
        self._post(f"{topic}/sent", value)
        return value

    def broadcast_last(self, topic: str, value: Any) -> Any:
        """Broadcast; rank 0, whose process may host the store, waits until all have read it."""
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
        """Return the ranks that have not posted within `seconds`."""
        assert self._store is not None
        deadline = time.monotonic() + seconds
        while True:
            ranks = [r for r in ranks if not self._store.check([f"{topic}/{r}"])]
            if not ranks or time.monotonic() > deadline:
                return ranks
            time.sleep(_POLL)
