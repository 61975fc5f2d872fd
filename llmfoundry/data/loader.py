"""Training data loader with random access: `Loader` builds the batch of any step on any rank.

The batch of a step is a pure function of the recipe and the step number. The `Mixture` chooses the
samples of each stream, and the stream's `Order` maps a sample to a sequence of the data. The only
state is the number of samples consumed from each stream, so a run can resume, prefetch, or change
the number of ranks and workers without replaying the data.

The trainer iterates over a `BatchPrefetcher`. Its thread prepares the next batches for the device
while a training step runs. If the caller requests a batch that the thread has not started, the
caller builds it, because switching threads would take longer. With `workers` > 0 the sequences are
read by the processes of a PyTorch DataLoader. A worker receives a step number and returns
`SequenceBatch` rather than a `Batch`, because the narrow token ids are faster to transfer than the
tensors derived from them. Batches arrive in the order of their steps. An error is raised by `next`
at the step that failed, and by every later call.
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

from llmfoundry.data.batch import SequenceBatch
from llmfoundry.data.order import Mixture, stream_key
from llmfoundry.data.sources import Stream
from llmfoundry.errors import UserError
from llmfoundry.ops.devices import device_thread, keep_memory
from llmfoundry.ops.packed_layout import Batch
from llmfoundry.processes import end_with_parent

_PLANNED_STEPS, _PLANNED_ROWS = 16, 1024  # planned at a time: whichever covers more steps
_PATIENCE = 10.0  # seconds that `close` waits for a thread that may be blocked on a store
_BUSY = 5e-4  # seconds without a request for a batch, after which a training step is running


@dataclass(frozen=True)
class SequenceFormat:
    """Format of the sequences in a batch."""

    seq_len: int
    """T, tokens per sequence."""
    eos_id: int
    """Padding token of short sequences."""
    vocab_size: int
    """Exclusive upper bound of the token ids."""
    attend_across_documents: bool = False
    """Omit the layout, so that attention treats a sequence as one document."""


class Loader:
    """Training batches of one rank.

    Attributes:
        n_rows: total number of sequences in all streams.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        mixture: Mixture,
        form: SequenceFormat,
        *,
        data_rank: int = 0,
        data_size: int = 1,
        workers: int = 0,
        prefetch_factor: int = 2,
        allow_changed: Collection[str] = (),
    ) -> None:
        """Determine the contents of every batch of the run.

        Args:
            streams: streams to read, in the order of the mixture's names.
            mixture: assigns each sequence of a step to a stream. Its batch size must be a multiple
                of `data_size`.
            form: format of the sequences.
            data_rank: data-parallel rank of this process.
            data_size: number of data-parallel ranks.
            workers: number of processes that read sequences; 0: a thread reads them.
            prefetch_factor: number of steps that each worker reads ahead.
            allow_changed: names of the streams whose data may differ from the checkpoint's.
        """
        assert mixture.batch_size % data_size == 0, (mixture.batch_size, data_size)
        assert 0 <= data_rank < data_size
        assert tuple(stream.name for stream in streams) == mixture.names
        self.streams, self.mixture = tuple(streams), mixture
        self.n_rows = sum(stream.n_rows for stream in streams)
        self._form = form
        self._rank_batch_size = mixture.batch_size // data_size
        self._first_slot = data_rank * self._rank_batch_size
        self.with_layout = not form.attend_across_documents
        self.workers, self.prefetch_factor = workers, prefetch_factor
        self._allow_changed = frozenset(allow_changed)
        self._plan: _Plan | None = None
        self._removed: dict[str, Any] = {}  # states of the streams that the recipe no longer has

    def batch(self, step: int) -> Batch:
        """Return this rank's part, tokens (B, T), of the global batch of `step`, from 0."""
        return self.rows(step).batch(with_layout=self.with_layout)

    def rows(self, step: int) -> SequenceBatch:
        """Return the sequences of `batch(step)` in the compact form that workers send.

        Raises:
            UserError: a token id is outside the vocabulary.
        """
        plan = self._plan_of(step)
        source, places = plan.source[step - plan.step], plan.places[step - plan.step]
        samples = [self.streams[n].read(place) for n, place in zip(source, places, strict=True)]
        rows = SequenceBatch.fill(samples, self._form.seq_len, self._form.eos_id)
        invalid = rows.outside(self._form.vocab_size)
        if invalid is not None:
            stream = self.streams[source[invalid]]
            raise self._vocabulary_error(stream, places[invalid], rows.ids[invalid])
        return rows

    def close(self) -> None:
        """Close the open shards. A later read opens them again."""
        for stream in self.streams:
            stream.close()

    def samples(self, step: int) -> int:
        """Return the number of samples that all ranks together consume before `step`."""
        return sum(self.mixture.consumed(step))

    def state(self, step: int) -> dict[str, Any]:
        """Return the state to checkpoint after `step` steps, as JSON, for `resume`."""
        streams = {stream.name: stream.state() for stream in self.streams}
        return {
            "seq_len": self._form.seq_len,
            "mixture": self.mixture.state(step),
            "streams": self._removed | streams,
        }

    def resume(self, state: dict[str, Any], step: int) -> None:
        """Continue at `step` with the first unread sample of each stream.

        The batch size, the proportions, the streams and the number of ranks may have changed.

        Raises:
            UserError: the sequences or their order would differ from the checkpoint's.
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
        self._removed = {name: facts for name, facts in before.items() if name not in names}
        self.mixture.resume(state["mixture"], step)
        self._plan = None

    def skip(self, step: int, steps: int) -> None:
        """Skip the samples of the batches `step` … `step + steps - 1`.

        The batch of `step` then starts with the first sample of each stream after the skipped ones.
        The phases of a mixture keep their steps. No prefetcher may read during this call.
        """
        self.mixture.resume(self.mixture.state(step + steps), step)
        self._plan = None

    def _plan_of(self, step: int) -> _Plan:
        """Return a plan that contains this step.

        A plan covers many steps, because that costs little more than one step. The thread or worker
        that reads the sequences also starts the prefetch of their shards.
        """
        plan = self._plan
        if plan is None or not plan.step <= step < plan.step + len(plan.source):
            source, samples = self._slots(step)
            places = np.empty_like(samples)
            for n in np.unique(source).tolist():
                stream_samples = samples[source == n]
                places[source == n] = self.streams[n].locate(stream_samples)
                with suppress(UserError):  # the step that reads the failed shard raises it again
                    self.streams[n].prefetch(int(stream_samples[0]))
            self._plan = plan = _Plan(step, source.tolist(), places.tolist())
        return plan

    def _slots(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the streams and samples of this rank's slots, each (steps, B) int64."""
        batch_size = self._rank_batch_size
        steps = range(step, step + max(_PLANNED_STEPS, _PLANNED_ROWS // batch_size))
        if len(self.streams) > 1:
            slots = [self.mixture.plan(n, self._first_slot, batch_size) for n in steps]
            source, samples = zip(*slots, strict=True)
            return np.stack(source), np.stack(samples)
        # one stream: its samples are consecutive, and the ranks take turns
        first = self.mixture.consumed(step)[0] + self._first_slot
        begins = first + np.arange(len(steps))[:, None] * self.mixture.batch_size
        samples = begins + np.arange(batch_size)
        return np.zeros_like(samples), samples

    def _vocabulary_error(self, stream: Stream, place: int, ids: np.ndarray) -> UserError:
        """Return the error for a sequence with token ids outside the vocabulary."""
        limit = self._form.vocab_size
        outside = ids[(ids < 0) | (ids >= limit)]
        return UserError(
            f"{stream_key(stream.name)}: {stream.where(place)}: has the id {outside[0]}, but the"
            f" tokenizer's are 0 … {limit - 1}; name the tokenizer that made the data,"
            " or correct data.token_encoding_type"
        )


@dataclass(frozen=True)
class _Plan:
    """This rank's sequences of consecutive steps.

    Attributes:
        step: the first step.
        source: (steps, B), the index of each sequence's stream.
        places: (steps, B), the sequence's location in that stream.
    """

    step: int
    source: list[list[int]]
    places: list[list[int]]


_Outcome: TypeAlias = "tuple[Batch, SequenceBatch] | BaseException"


class BatchPrefetcher(Iterator[Batch]):
    """Endless iterator over the batches of a run. `close` ends its thread and processes."""

    def __init__(self, loader: Loader, start_step: int, *, depth: int = 2) -> None:
        """Start prefetching.

        Args:
            loader: builds the batches.
            start_step: step of the first batch.
            depth: maximum number of batches in the queue.
        """
        self._loader, self._step, self._depth = loader, start_step, depth
        self._workers: _Workers | None = None
        self._queue: deque[_Outcome] = deque()
        self._n_taken = 0
        self._lock = threading.Lock()  # held while a batch is built or taken from the queue
        self._lock.acquire()  # on behalf of the new thread, which releases it when it is ready
        self._room = threading.Event()
        self._closed = False
        self._error: BaseException | None = None
        self._dropped = self._padded = 0
        self._thread = device_thread(self._prefetch, name="loader", daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        if self._error is not None:
            raise self._error
        with self._lock:
            outcome = self._queue.popleft() if self._queue else self._build()
            self._n_taken += 1
        self._room.set()
        if isinstance(outcome, BaseException):
            self._error = outcome
            self.close()
            raise outcome
        batch, rows = outcome
        self._dropped += rows.dropped
        self._padded += sum(rows.padded)
        return batch

    def metrics(self) -> dict[str, float]:
        """Return this rank's counts of dropped and padding tokens since the last call.

        A count of 0 is omitted.
        """
        counts = {"data/tokens_dropped": self._dropped, "data/tokens_padded": self._padded}
        self._dropped = self._padded = 0
        return {name: float(n) for name, n in counts.items() if n}

    def close(self) -> None:
        """End the thread and the processes."""
        self._closed = True
        self._room.set()
        self._thread.join(_PATIENCE)

    def _prefetch(self) -> None:
        """Fill the queue while the caller requests no batch."""
        # Start the workers in this thread: if the main thread did, PyTorch would raise the death of
        # a worker there, in the middle of a training step.
        failed = False
        try:
            if self._loader.workers:
                self._workers = _Workers(self._loader, self._step)
        except BaseException as error:
            self._queue.append(error)
            failed = True
        finally:
            self._lock.release()

        while not (self._closed or failed):
            # wait for room in the queue, then until a training step is running
            if len(self._queue) == self._depth:
                self._room.wait()
                self._room.clear()
            n_taken = self._n_taken
            time.sleep(_BUSY)
            if n_taken != self._n_taken:
                continue  # so frequent a caller is faster if it builds the batches itself
            with self._lock:
                if len(self._queue) < self._depth and not self._closed:
                    self._queue.append(outcome := self._build())
                    failed = isinstance(outcome, BaseException)

        if self._workers is not None:
            self._workers.close()
        self._loader.close()

    def _build(self) -> _Outcome:
        """Return the next batch, pinned if CUDA is available, or the exception that it caused."""
        loader = self._loader
        try:
            rows = self._workers.next() if self._workers else loader.rows(self._step)
            batch = rows.batch(with_layout=loader.with_layout)
            if torch.cuda.is_available():
                batch = batch.pin_memory()
        except BaseException as error:
            # without its traceback, as the frames would keep the worker processes alive
            return error.with_traceback(None) if loader.workers else error
        self._step += 1
        return batch, rows


class _Workers:
    """Worker processes, each of which reads the sequences of one step at a time."""

    def __init__(self, loader: Loader, start_step: int) -> None:
        loader.close()  # each process opens shards for itself
        self._closing = multiprocessing.RawValue("b", 0)
        steps = DataLoader(
            _Steps(loader),
            batch_size=None,
            sampler=_StepSampler(start_step),
            num_workers=loader.workers,
            prefetch_factor=loader.prefetch_factor,
            multiprocessing_context=_context(),
            worker_init_fn=partial(_start_worker, self._closing),
            generator=torch.Generator(),  # the default one would advance the training's generator
        )
        self._results: Iterator[SequenceBatch | UserError] | None = iter(steps)

    def next(self) -> SequenceBatch:
        """Return the sequences of the next step.

        Raises:
            UserError: the error of the worker, unchanged. The message of any other exception
                contains the worker's traceback.
            RuntimeError: a worker was killed.
        """
        assert self._results is not None
        result = next(self._results)
        if isinstance(result, UserError):
            raise result
        return result

    def close(self) -> None:
        """End the processes."""
        self._closing.value = 1
        self._results = None  # the destructor of the DataLoader's iterator ends the processes


@dataclass(frozen=True)
class _Steps(Dataset["SequenceBatch | UserError"]):
    """Map-style dataset from a step number to the sequences of that step."""

    loader: Loader

    def __getitem__(self, step: int) -> SequenceBatch | UserError:
        try:
            return self.loader.rows(step).narrow()
        except UserError as error:
            return error  # PyTorch would wrap a raised error in another one


@dataclass(frozen=True)
class _StepSampler(Sampler[int]):
    """Endless sampler of the step numbers from `step` on."""

    step: int

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.step)


def _context() -> multiprocessing.context.BaseContext:
    """Return the start method of the workers: never a fork of this process.

    Threads of this process may hold a lock at the time of a fork. A fork server, started once,
    imports this module and forks the workers.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _start_worker(closing: Any, _: int) -> None:
    """Initialize a worker process.

    It ignores SIGINT and the first SIGTERM, after which the run still finishes its step. A second
    SIGTERM ends the worker at once, as it does the main process.
    """
    end_with_parent()
    keep_memory()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already run in parallel
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, partial(_terminate, closing))


def _terminate(closing: Any, *_: object) -> None:
    if closing.value:
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
