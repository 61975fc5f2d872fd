"""`Batches`: what a loader makes ahead of the training step, in a thread and worker processes.

Made by `Loader.prefetch`, read by the trainer. A thread fills a short queue with batches that are
ready for the device; it makes them itself, or takes them from the processes of a PyTorch
DataLoader, which are given step numbers and hand back `Rows`. Steps come in order, and whatever
goes wrong with one comes in its place: it is raised by `next`, then and ever after.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.context
import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from llmfoundry.data.rows import Rows
from llmfoundry.errors import UserError
from llmfoundry.ops.batch import Batch
from llmfoundry.ops.host_memory import keep_memory

if TYPE_CHECKING:
    from llmfoundry.data.loader import Loader

_PATIENCE = 10.0  # seconds for a thread that waits for a store to notice that it is not needed


class Batches(Iterator[Batch]):
    """An endless iterator over the batches of a run; close it to end its thread and processes."""

    def __init__(self, loader: Loader, start_step: int, *, depth: int) -> None:
        """Begin to make batches.

        Args:
            loader: what makes them.
            start_step: of the first.
            depth: batches that wait at most.
        """
        self._loader, self._start_step = loader, start_step
        self._made: queue.Queue[tuple[Batch, Rows] | BaseException] = queue.Queue(depth)
        self._closed = threading.Event()
        self._error: BaseException | None = None
        self._dropped = self._padded = 0
        self._thread = threading.Thread(target=self._make, name="loader", daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        if self._error is not None:
            raise self._error
        item = self._made.get()
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
        self._closed.set()
        self._thread.join(_PATIENCE)

    def _make(self) -> None:
        loader, step = self._loader, self._start_step
        workers = _Workers(loader, step) if loader.workers else None
        try:
            while not self._closed.is_set():
                rows = loader.rows(step) if workers is None else workers.next()
                batch = rows.batch(with_layout=loader.with_layout)
                if torch.cuda.is_available():
                    batch = batch.pin_memory()
                self._put((batch, rows))
                step += 1
        except BaseException as error:
            # Of a worker's no traceback: its frames here would keep the processes alive.
            self._put(error if workers is None else error.with_traceback(None))
        finally:
            if workers is not None:
                workers.close()
            loader.close()

    def _put(self, item: tuple[Batch, Rows] | BaseException) -> None:
        """Wait for a place in the queue, unless nobody wants it any more."""
        while not self._closed.is_set():
            with suppress(queue.Full):
                return self._made.put(item, timeout=0.1)


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
    context.set_forkserver_preload(["llmfoundry.data.loader"])
    return context


def _start_worker(closing: Any, _: int) -> None:
    """In a new process: go on through the signals that make the run end after its step."""
    keep_memory()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are parallel by themselves
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if closing.value else None)
