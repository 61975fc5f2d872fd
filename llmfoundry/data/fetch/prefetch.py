"""Threads that fetch the files wanted next, until enough bytes are ahead of their use.

`ShardFolder.prefetch` gives the queue, an iterator that may be endless, and reports each file that
is used. One idea: a file is ahead from when the queue names it until it is used; while those add up
to less than the budget, the next is taken from the queue. A failure is raised to the caller that
reads the file, so none is lost and none comes too early.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator

from llmfoundry.data.file_spec import FileSpec
from llmfoundry.data.store import CancelledError

N_THREADS = 4  # one connection rarely fills a link; more would take turns on one interpreter
_REMEMBERED = 1024  # files used before the queue came to them, which it then leaves out
_RETRY_S = 1.0  # how soon to look again for room in the cache


class Prefetcher:
    """The threads of one folder in one process. `close` ends them."""

    def __init__(
        self, fetch: Callable[[FileSpec, threading.Event], int | None], *, budget: int
    ) -> None:
        """Threads begin with the first queue.

        Args:
            fetch: gets a file and returns its bytes, or None if there is no room for it now.
            budget: bytes to be ahead.
        """
        self._fetch = fetch
        self._budget = budget
        self._changed = threading.Condition()
        self._cancelled = threading.Event()
        self._threads: list[threading.Thread] = []
        self._queue: Iterator[FileSpec] | None = None
        self._next: FileSpec | None = None  # taken from the queue, not needed yet
        self._waiting: list[tuple[int, FileSpec]] = []  # for room, a heap by their place
        self._room = True
        self._taken = 0
        self._ahead: dict[str, int] = {}
        self._used: dict[str, None] = {}  # lately, before the queue came to them; oldest first
        self._failures: dict[str, BaseException] = {}
        self._broken: BaseException | None = None  # the queue itself failed

    def prefetch(self, specs: Iterator[FileSpec]) -> None:
        """Fetch these from now on, in place of the queue before.

        Raises:
            BaseException: what a fetch of the earlier queue failed with, if no one asked for it.
        """
        with self._changed:
            self._raise(next(iter(self._failures), None))
            self._queue, self._next = specs, None
            self._waiting.clear()
            self._ahead.clear()
            self._used.clear()
            self._changed.notify_all()
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._run, name=f"prefetch-{n}", daemon=True)
                    for n in range(N_THREADS)
                ]
                for thread in self._threads:
                    thread.start()

    def ask(self, name: str) -> None:
        """A file is going to be used: it need not be fetched ahead any more.

        Raises:
            BaseException: what its fetch failed with.
        """
        self.check(name)
        with self._changed:
            if self._queue is not None and name not in self._ahead:
                self._used[name] = None
                if len(self._used) > _REMEMBERED:
                    del self._used[next(iter(self._used))]

    def check(self, name: str) -> None:
        """Whether a file's fetch, or the queue, has failed.

        Raises:
            BaseException: what it failed with.
        """
        with self._changed:
            self._raise(name if name in self._failures else None)

    def use(self, name: str) -> None:
        """A file is here and being used: others may take its place.

        Kept apart from `ask`, so that none of them takes the room that this file needs.
        """
        with self._changed:
            self._ahead.pop(name, None)
            self._room = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads; a request that is under way is left to itself."""
        with self._changed:
            self._cancelled.set()
            self._changed.notify_all()

    def _raise(self, name: str | None) -> None:
        error = self._failures.pop(name) if name is not None else self._broken
        if name is None:
            self._broken = None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            with self._changed:
                while (taken := self._take()) is None and not self._cancelled.is_set():
                    if not self._changed.wait(None if self._room else _RETRY_S):
                        self._room = True  # other processes make room, too
            if taken is None or not self._get(*taken):
                return

    def _take(self) -> tuple[int, FileSpec] | None:
        """The next file to fetch and its place, if one is wanted and within the budget."""
        if not self._room:
            return None
        while self._waiting:  # first, so that no later file takes the room that it needs
            place, spec = heapq.heappop(self._waiting)
            if spec.name in self._ahead:
                return place, spec
        while self._queue is not None and sum(self._ahead.values()) < self._budget:
            try:
                spec = self._next or next(self._queue)
            except StopIteration:
                self._queue = None
                break
            except BaseException as error:
                self._queue, self._broken = None, error
                break
            self._next = None
            if spec.name in self._used:
                del self._used[spec.name]
            elif spec.name in self._ahead:  # once round: it has to be used first
                self._next = spec
                break
            else:
                self._ahead[spec.name] = spec.n_bytes or 0
                self._taken += 1
                return self._taken, spec
        return None

    def _get(self, place: int, spec: FileSpec) -> bool:
        """Fetch a file; False: the threads are to end."""
        try:
            size = self._fetch(spec, self._cancelled)
        except CancelledError:
            return False
        except BaseException as error:
            with self._changed:
                self._failures[spec.name] = error
                self._queue = None  # the file will be asked for soon, and ends the run
                self._changed.notify_all()
            return True
        with self._changed:
            if size is None:
                heapq.heappush(self._waiting, (place, spec))
                self._room = False
            elif spec.name in self._ahead:
                self._ahead[spec.name] = size
        return True
