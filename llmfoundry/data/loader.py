"""`Loader`: the batches of a run, any of them at any time, each rank its own share.

Called by the trainer. Batch number `step` is a pure function of the recipe, so that resuming,
prefetching and changing the number of ranks need no state beyond how many samples were given.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import torch

from llmfoundry.data.order import Order
from llmfoundry.data.tokens import TokenDataset
from llmfoundry.errors import UserError
from llmfoundry.ops.batch import IGNORE, Batch
from llmfoundry.ops.layout import Layout


class Loader:
    """Training batches of one rank.

    Attributes:
        n_rows: rows of an epoch.
        tokens_left_out: of each epoch: those after the last whole row.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        seq_len: int,
        global_batch_size: int,
        seed: int,
        shuffle: bool,
        rank: int = 0,
        world_size: int = 1,
        attend_across_documents: bool = False,
    ) -> None:
        """Fix what every batch of the run holds.

        Args:
            dataset: the training stream.
            seq_len: T, tokens of a row.
            global_batch_size: rows of a step over all ranks; a multiple of `world_size`.
            seed: of the order.
            shuffle: off, rows come in the corpus' order.
            rank: among the ranks that read different rows.
            world_size: their number.
            attend_across_documents: leave out the layout, so that a row is one document.

        Raises:
            UserError: the stream is shorter than one row.
        """
        assert global_batch_size % world_size == 0, (global_batch_size, world_size)
        assert 0 <= rank < world_size
        self.n_rows = dataset.n_rows(seq_len)
        if self.n_rows == 0:
            raise UserError(
                f"max_seq_len: the training text has {dataset.n_tokens:,} tokens, too few for a"
                f" row of {seq_len:,}; write {max(1, dataset.n_tokens - 1):,} or less, or add text"
            )
        self.tokens_left_out = dataset.n_tokens - 1 - self.n_rows * seq_len
        self._dataset, self._seq_len = dataset, seq_len
        self._global_batch_size = global_batch_size
        self._share = global_batch_size // world_size
        self._rank = rank
        self._with_layout = not attend_across_documents
        self._order = Order(self.n_rows, seed=seed, shuffle=shuffle)
        self._origin = (0, 0)  # a step, and the samples given before it

    def batch(self, step: int) -> Batch:
        """This rank's rows of global batch number `step`, from 0: tokens (B, T)."""
        first = self.samples(step) + self._rank * self._share
        rows = self._order.rows(first, self._share).tolist()
        return _batch([self._dataset.row(row, self._seq_len) for row in rows], self._with_layout)

    def prefetch(self, start_step: int, *, depth: int = 2) -> Generator[Batch, None, None]:
        """Batches from `start_step` on, without end, made `depth` ahead in a thread.

        Close the iterator to end the thread. Whatever goes wrong there is raised here.
        """
        made: queue.Queue[Batch | BaseException] = queue.Queue(depth)
        closed = threading.Event()
        arguments = (start_step, made, closed)
        thread = threading.Thread(target=self._make, args=arguments, name="loader", daemon=True)
        thread.start()
        try:
            while True:
                item = made.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            closed.set()
            thread.join()

    def samples(self, step: int) -> int:
        """Samples that all ranks together were given before `step`."""
        origin, given = self._origin
        return given + (step - origin) * self._global_batch_size

    def state(self, step: int) -> dict[str, Any]:
        """For a checkpoint written when `step` steps are done: what `resume` needs."""
        return {"samples": {"train": self.samples(step)}, **self._identity()}

    def resume(self, state: dict[str, Any], step: int) -> None:
        """Continue after `step` done steps with the first sample that `state` had not given.

        The batch size and the number of ranks may have changed since.

        Raises:
            UserError: rows or their order would not be those of the checkpoint.
        """
        for fact, value in self._identity().items():
            if state[fact] != value:
                raise UserError(f"{_KEY[fact]}: {_changed(fact, state[fact], value)}")
        self._origin = (step, state["samples"]["train"])

    def _identity(self) -> dict[str, Any]:
        order = self._order
        return {
            "dataset": self._dataset.fingerprint,
            "seq_len": self._seq_len,
            "seed": order.seed,
            "shuffle": order.shuffle,
        }

    def _make(self, step: int, made: queue.Queue[Any], closed: threading.Event) -> None:
        while not closed.is_set():
            item: Batch | BaseException
            try:
                item = self.batch(step)
            except BaseException as error:
                item = error
            while not closed.is_set():
                try:
                    made.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
            step += 1


def validation_batches(
    dataset: TokenDataset,
    *,
    seq_len: int,
    batch_size: int,
    eos_id: int,
    rank: int = 0,
    world_size: int = 1,
    max_rows: int | None = None,
    attend_across_documents: bool = False,
) -> Iterator[Batch]:
    """The validation stream in order, every token predicted once over all ranks.

    Every rank gets as many batches of as many rows: short and missing rows are filled up with
    `eos_id`, in a document of their own, and IGNORE labels.

    Args:
        dataset: the validation stream.
        seq_len: T, tokens of a row.
        batch_size: rows of a batch of one rank, at most.
        eos_id: what to fill up with.
        rank: among the ranks that read different rows.
        world_size: their number.
        max_rows: read these rows of the stream only, from its first; None: all.
        attend_across_documents: leave out the layout.
    """
    n_rows = dataset.n_rows(seq_len, partial=True)
    n_rows = n_rows if max_rows is None else min(n_rows, max_rows)
    share = min(batch_size, -(-n_rows // world_size))
    for start in range(rank * share, n_rows + rank * share, max(1, share * world_size)):
        rows = [
            dataset.row(row, seq_len) if row < n_rows else (np.array([eos_id]), [])
            for row in range(start, start + share)
        ]
        yield _batch(rows, not attend_across_documents, seq_len=seq_len, eos_id=eos_id)


def _batch(
    rows: list[tuple[np.ndarray, list[int]]],
    with_layout: bool,
    *,
    seq_len: int | None = None,
    eos_id: int = 0,
) -> Batch:
    """Rows of up to T + 1 tokens, filled up to T where they are shorter."""
    seq_len = seq_len or len(rows[0][0]) - 1
    tokens = np.full((len(rows), seq_len), eos_id, np.int64)
    labels = np.full((len(rows), seq_len), IGNORE, np.int64)
    lengths = []
    for n, (row, documents) in enumerate(rows):
        filled = len(row) - 1
        tokens[n, :filled] = row[:-1]
        labels[n, :filled] = row[1:]
        lengths.append([*documents, seq_len - filled] if filled < seq_len else documents)
    padding = [seq_len + 1 - len(row) for row, _ in rows]
    layout = _layout(lengths, seq_len, padding) if with_layout else None
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), layout)


def _layout(lengths: list[list[int]], seq_len: int, padding: list[int]) -> Layout:
    """`Layout.from_lengths` in a few vectorised steps, because every step needs one."""
    flat = np.array([length for row in lengths for length in row])
    numbers = np.array([number for row in lengths for number in range(len(row))], np.int32)
    begins = np.cumsum(flat) - flat
    shape = (len(lengths), seq_len)
    positions = np.arange(len(lengths) * seq_len) - np.repeat(begins, flat)
    return Layout(
        torch.from_numpy(positions.reshape(shape)),
        torch.from_numpy(np.repeat(numbers, flat).reshape(shape)),
        tuple(tuple(row) for row in lengths),
        tuple(padding),
    )


_KEY = {
    "dataset": "data",
    "seq_len": "max_seq_len",
    "seed": "seed",
    "shuffle": "data.shuffle",
}


def _changed(fact: str, before: Any, now: Any) -> str:
    """Why a checkpoint's samples cannot be continued."""
    if fact == "dataset":
        return (
            "the training tokens are not those of the checkpoint: the corpus, its split or the"
            " tokenizer changed; restore them, or start from its weights alone"
        )
    return (
        f"the checkpoint's samples were ordered with {before}, this run has {now}; write {before}"
    )
