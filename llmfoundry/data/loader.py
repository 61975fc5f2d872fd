"""`Loader`: the batches of a run, any of them at any time, each rank its own share.

Batch number `step` is a pure function of the recipe: the mixture decides which samples of which
stream it has, each stream's order which rows those are. So resuming, prefetching and changing the
number of ranks or workers need no state beyond how many samples each stream has given.

The trainer reads `BatchPrefetcher`: while a training step is at work, a thread gets the next few
batches ready for the device; a batch that is asked for before the thread has begun with it is made
by the caller, which takes less than to wait for another thread. Rows are made where the batch is,
or by the processes of a PyTorch DataLoader, which are given step numbers and return `Rows`: one
array of narrow ids travels faster than all that can be computed from it. Steps come in order, and
an error in one comes in its place: it is raised by `next`, from then on.
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
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from llmfoundry.data.batch import Rows
from llmfoundry.data.order import Mixture, stream_key
from llmfoundry.data.sources import Stream
from llmfoundry.errors import UserError
from llmfoundry.ops.devices import device_thread, keep_memory
from llmfoundry.ops.packed_layout import Batch
from llmfoundry.processes import end_with_parent

_PLANNED_STEPS, _PLANNED_ROWS = 16, 1024  # at a time; the larger of the two
_PATIENCE = 10.0  # seconds for a thread that waits for a store to notice that it is not needed
_BUSY = 5e-4  # seconds without a question for a batch, after which the training step is at work


@dataclass(frozen=True)
class RowFormat:
    """What rows become in a batch."""

    seq_len: int
    """T, tokens of a row."""
    eos_id: int
    """What short rows are filled up with."""
    vocab_size: int
    """Ids are below it."""
    attend_across_documents: bool = False
    """Leave out the layout, so that a row is one document."""


class Loader:
    """Training batches of one rank.

    Attributes:
        n_rows: rows of all streams.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        mixture: Mixture,
        form: RowFormat,
        *,
        data_rank: int = 0,
        data_size: int = 1,
        workers: int = 0,
        prefetch_factor: int = 2,
        allow_changed: Collection[str] = (),
    ) -> None:
        """Fix what every batch of the run holds.

        Args:
            streams: what is read, in the mixture's order.
            mixture: which of them gives which row of a step; its batch is a multiple of
                `data_size`.
            form: of its rows.
            data_rank: among the processes that read different rows.
            data_size: their number.
            workers: processes that make batches; 0: a thread does.
            prefetch_factor: batches made ahead, by each of them.
            allow_changed: streams that a resumed run may find changed.
        """
        assert mixture.batch_size % data_size == 0, (mixture.batch_size, data_size)
        assert 0 <= data_rank < data_size
        assert tuple(stream.name for stream in streams) == mixture.names
        self.streams, self.mixture = tuple(streams), mixture
        self.n_rows = sum(stream.n_rows for stream in streams)
        self._form = form
        self._share = mixture.batch_size // data_size
        self._first_slot = data_rank * self._share
        self.with_layout = not form.attend_across_documents
        self.workers, self.prefetch_factor = workers, prefetch_factor
        self._allow_changed = frozenset(allow_changed)
        self._plan: _Plan | None = None
        self._gone: dict[str, Any] = {}  # of streams that the recipe has no longer

    def batch(self, step: int) -> Batch:
        """This rank's rows of global batch number `step`, from 0: tokens (B, T)."""
        return self.rows(step).batch(with_layout=self.with_layout)

    def rows(self, step: int) -> Rows:
        """The same as workers hand it on."""
        plan = self._plan_of(step)
        source, places = plan.source[step - plan.step], plan.places[step - plan.step]
        found = [self.streams[n].read(place) for n, place in zip(source, places, strict=True)]
        rows = Rows.fill(found, self._form.seq_len, self._form.eos_id)
        wrong = rows.outside(self._form.vocab_size)
        if wrong is not None:
            raise self._strange(self.streams[source[wrong]], places[wrong], rows.ids[wrong])
        return rows

    def close(self) -> None:
        """Let go of open shards; reading opens them again."""
        for stream in self.streams:
            stream.close()

    def samples(self, step: int) -> int:
        """Samples that all ranks together were given before `step`."""
        return sum(self.mixture.consumed(step))

    def state(self, step: int) -> dict[str, Any]:
        """For a checkpoint written when `step` steps are done: what `resume` needs, as JSON."""
        streams = {stream.name: stream.state() for stream in self.streams}
        return {
            "seq_len": self._form.seq_len,
            "mixture": self.mixture.state(step),
            "streams": self._gone | streams,
        }

    def resume(self, state: dict[str, Any], step: int) -> None:
        """Continue after `step` done steps with each stream's first sample not given yet.

        The batch size, the proportions, the streams and the number of ranks may have changed.

        Raises:
            UserError: rows or their order would not be those of the checkpoint.
        """
        if state["seq_len"] != self._form.seq_len:
            raise UserError(
                f"max_seq_len: the checkpoint's samples were ordered with {state['seq_len']}, this"
                f" run has {self._form.seq_len}; write {state['seq_len']}"
            )
        before = state["streams"]
        for stream in self.streams:
            if stream.name in before:
                allowed = stream.name in self._allow_changed
                stream.resume(before[stream.name], allow_changed=allowed)
        names = self.mixture.names
        self._gone = {name: facts for name, facts in before.items() if name not in names}
        self.mixture.resume(state["mixture"], step)
        self._plan = None

    def skip(self, step: int, steps: int) -> None:
        """Leave out the batches number `step` … `step + steps - 1`: the next one takes their place.

        Each stream continues with the first sample that none of them had; phases of a mixture begin
        at their own steps. No prefetcher may read meanwhile.
        """
        self.mixture.resume(self.mixture.state(step + steps), step)
        self._plan = None

    def _plan_of(self, step: int) -> _Plan:
        """A plan that has this step; made for some at a time, which costs little more than one.

        Whoever makes rows, a thread or a worker, fetches ahead for itself: what is used makes room.
        """
        plan = self._plan
        if plan is None or not plan.step <= step < plan.step + len(plan.source):
            source, samples = self._slots(step)
            places = np.empty_like(samples)
            for n in np.unique(source).tolist():
                mine = samples[source == n]
                places[source == n] = self.streams[n].locate(mine)
                with suppress(UserError):  # it comes again at the step that needs what failed
                    self.streams[n].prefetch(int(mine[0]))
            self._plan = plan = _Plan(step, source.tolist(), places.tolist())
        return plan

    def _slots(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Streams and samples of this rank's slots of some steps, each (steps, share) int64."""
        numbers = range(step, step + max(_PLANNED_STEPS, _PLANNED_ROWS // self._share))
        if len(self.streams) > 1:
            slots = [self.mixture.plan(n, self._first_slot, self._share) for n in numbers]
            source, samples = zip(*slots, strict=True)
            return np.stack(source), np.stack(samples)
        first = self.mixture.consumed(step)[0] + self._first_slot
        begins = first + np.arange(len(numbers))[:, None] * self.mixture.batch_size
        samples = begins + np.arange(self._share)
        return np.zeros_like(samples), samples

    def _strange(self, stream: Stream, place: int, ids: np.ndarray) -> UserError:
        """Ids that no token has."""
        limit = self._form.vocab_size
        outside = ids[(ids < 0) | (ids >= limit)]
        return UserError(
            f"{stream_key(stream.name)}: {stream.where(place)}: has the id {outside[0]}, but the"
            f" tokenizer's are 0 … {limit - 1}; name the tokenizer that made the data,"
            " or correct data.token_encoding_type"
        )


@dataclass(frozen=True)
class _Plan:
    """What some steps hold: of each this rank's rows, as streams by number and places in them."""

    step: int
    source: list[list[int]]
    places: list[list[int]]


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
class _Steps(Dataset["Rows | UserError"]):
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
    """In a new process: continue through the signals that make the run end after its step.

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
