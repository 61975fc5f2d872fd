"""`BatchPrefetcher`: a loader's batches, made ahead by a thread and worker processes.

The trainer reads it. While a training step is at work, a thread gets the
next few batches ready for the device; a batch that is asked for before the thread has begun with it
is made by the caller, which takes less than to wait for another thread. Rows are made where the
batch is, or by the processes of a PyTorch DataLoader, which are given step numbers and hand back
`Rows`. Steps come in order, and whatever goes wrong with one comes in its place: it is raised by
`next`, from then on.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.context
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from llmfoundry.data.loader import Loader
from llmfoundry.data.make_batch import Rows
from llmfoundry.errors import UserError
from llmfoundry.ops.batch import Batch
from llmfoundry.ops.device_threads import device_thread
from llmfoundry.ops.host_memory import keep_memory
from llmfoundry.processes import end_with_parent

_PATIENCE = 10.0  # seconds for a thread that waits for a store to notice that it is not needed
_BUSY = 5e-4  # seconds without a question for a batch, after which the training step is at work

_Made: TypeAlias = "tuple[Batch, Rows] | BaseException"


class BatchPrefetcher(Iterator[Batch]):
    """An endless iterator over the batches of a run; close it to end its thread and processes."""

    def __init__(self, loader: Loader, start_step: int, *, depth: int = 2) -> None:
        """Begin to make batches.

        Args:
            loader: what makes them.
            start_step: of the first.
            depth: batches that wait at most, ready for the device.
        """
        self._loader, self._step, self._depth = loader, start_step, depth
        self._workers: _Workers | None = None
        self._made: deque[_Made] = deque()
        self._taken = 0
        self._making = threading.Lock()  # held by the thread that makes a batch, or takes one
        self._making.acquire()  # by the new thread, held until it can make some
        self._room = threading.Event()
        self._closed = False
        self._error: BaseException | None = None
        self._dropped = self._padded = 0
        self._thread = device_thread(self._prefetch, name="loader", daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        if self._error is not None:
            raise self._error
        with self._making:
            item = self._made.popleft() if self._made else self._make()
            self._taken += 1
        self._room.set()
        if isinstance(item, BaseException):
            self._error = item
            self.close()
            raise item
        batch, rows = item
        self._dropped += rows.dropped
        self._padded += sum(rows.padded)
        return batch

    def metrics(self) -> dict[str, float]:
        """Tokens of this rank's rows since the last call that were dropped, and that are padding.

        Left out where there are none.
        """
        found = {"data/tokens_dropped": self._dropped, "data/tokens_padded": self._padded}
        self._dropped = self._padded = 0
        return {name: float(n) for name, n in found.items() if n}

    def close(self) -> None:
        """End the thread and the processes."""
        self._closed = True
        self._room.set()
        self._thread.join(_PATIENCE)

    def _prefetch(self) -> None:
        """Make batches while none is asked for."""
        failed = False
        try:
            # In the main thread PyTorch would answer a worker's end there, in the middle of a step.
            if self._loader.workers:
                self._workers = _Workers(self._loader, self._step)
        except BaseException as error:
            self._made.append(error)
            failed = True
        finally:
            self._making.release()
        while not (self._closed or failed):
            if len(self._made) == self._depth:
                self._room.wait()
                self._room.clear()
            taken = self._taken
            time.sleep(_BUSY)
            if taken != self._taken:
                continue  # a caller that comes this often makes them sooner itself
            with self._making:
                if len(self._made) < self._depth and not self._closed:
                    self._made.append(item := self._make())
                    failed = isinstance(item, BaseException)
        if self._workers is not None:
            self._workers.close()
        self._loader.close()

    def _make(self) -> _Made:
        """The next batch, ready for the device, or what went wrong with it."""
        loader = self._loader
        try:
            rows = self._workers.next() if self._workers else loader.rows(self._step)
            batch = rows.batch(with_layout=loader.with_layout)
            if torch.cuda.is_available():
                batch = batch.pin_memory()
        except BaseException as error:
            # Of a worker's no traceback: its frames here would keep the processes alive.
            return error.with_traceback(None) if loader.workers else error
        self._step += 1
        return batch, rows


class _Workers:
    """Processes that make the rows of one step each, in turn."""

    def __init__(self, loader: Loader, start_step: int) -> None:
        loader.close()  # a process opens its own shards
        self._closing = multiprocessing.RawValue("b", 0)
        steps = DataLoader(
            _Steps(loader),
            batch_size=None,
            sampler=_From(start_step),
            num_workers=loader.workers,
            prefetch_factor=loader.prefetch_factor,
            multiprocessing_context=_context(),
            worker_init_fn=partial(_start_worker, self._closing),
            generator=torch.Generator(),  # or it would draw from the training's
        )
        self._items: Iterator[Rows | UserError] | None = iter(steps)

    def next(self) -> Rows:
        """The rows of the next step.

        Raises:
            UserError: as the worker raised it; anything else has the worker's traceback in it.
            RuntimeError: a worker was killed.
        """
        assert self._items is not None
        item = next(self._items)
        if isinstance(item, UserError):
            raise item
        return item

    def close(self) -> None:
        """End the processes."""
        self._closing.value = 1
        self._items = None  # the DataLoader's iterator ends them when it is dropped


@dataclass(frozen=True)
class _Steps(Dataset[Rows | UserError]):
    """The rows of any step, by its number."""

    loader: Loader

    def __getitem__(self, step: int) -> Rows | UserError:
        try:
            return self.loader.rows(step).narrow()
        except UserError as error:
            return error  # raised, it would arrive as text inside of another


@dataclass(frozen=True)
class _From(Sampler[int]):
    """All steps from one on."""

    step: int

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.step)


def _context() -> multiprocessing.context.BaseContext:
    """How processes begin: never as a fork of this one, whose threads may hold any lock just then.

    A server that has imported what they need forks them; it is started once.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _start_worker(closing: Any, _: int) -> None:
    """In a new process: go on through the signals that make the run end after its step.

    As in the run's own process a second SIGTERM ends it at once.
    """
    end_with_parent()
    keep_memory()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are parallel by themselves
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, partial(_terminate, closing))


def _terminate(closing: Any, *_: object) -> None:
    if closing.value:
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
