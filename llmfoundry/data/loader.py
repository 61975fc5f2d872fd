"""`Loader`: the batches of a run, any of them at any time, each rank its own share.

Called by the trainer. Batch number `step` is a pure function of the recipe: the mixture says which
samples of which stream it has, each stream's order says which rows those are. So resuming,
prefetching and changing the number of ranks or workers need no state beyond how many samples each
stream has given.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmfoundry.data.make_batch import Rows
from llmfoundry.data.mixture import Mixture
from llmfoundry.data.sources import OrderedStream, Stream, stream_key
from llmfoundry.data.token_source import TokenSource
from llmfoundry.errors import UserError
from llmfoundry.ops.batch import Batch


class Loader:
    """Training batches of one rank.

    Attributes:
        n_rows: rows of all streams.
        tokens_left_out: of each epoch: those after the last whole row of token streams.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        mixture: Mixture,
        *,
        seq_len: int,
        eos_id: int,
        vocab_size: int,
        data_rank: int = 0,
        data_size: int = 1,
        attend_across_documents: bool = False,
        workers: int = 0,
        prefetch_factor: int = 2,
        allow_changed: Collection[str] = (),
    ) -> None:
        """Fix what every batch of the run holds.

        Args:
            streams: what is read, in the mixture's order.
            mixture: which of them gives which row of a step; its batch is a multiple of
                `data_size`.
            seq_len: T, tokens of a row.
            eos_id: what short rows are filled up with.
            vocab_size: ids are below it.
            data_rank: among the processes that read different rows.
            data_size: their number.
            attend_across_documents: leave out the layout, so that a row is one document.
            workers: processes that make batches; 0: a thread does.
            prefetch_factor: batches made ahead, by each of them.
            allow_changed: streams that a resumed run may find changed.
        """
        assert mixture.batch_size % data_size == 0, (mixture.batch_size, data_size)
        assert 0 <= data_rank < data_size
        assert tuple(stream.name for stream in streams) == mixture.names
        self.streams, self.mixture = tuple(streams), mixture
        self.n_rows = sum(stream.n_rows for stream in streams)
        sources = (s.source for s in streams if isinstance(s, OrderedStream))
        self.tokens_left_out = sum(s.tokens_left_out for s in sources if isinstance(s, TokenSource))
        self._seq_len, self._eos_id, self._vocab_size = seq_len, eos_id, vocab_size
        self._share = mixture.batch_size // data_size
        self._first_slot = data_rank * self._share
        self.with_layout = not attend_across_documents
        self.workers, self.prefetch_factor = workers, prefetch_factor
        self._allow_changed = frozenset(allow_changed)
        self._plan: _Plan | None = None
        self._gone: dict[str, Any] = {}  # of streams that the recipe has no longer

    def batch(self, step: int) -> Batch:
        """This rank's rows of global batch number `step`, from 0: tokens (B, T)."""
        return self.rows(step).batch(with_layout=self.with_layout)

    def rows(self, step: int) -> Rows:
        """The same as workers hand it on.

        Raises:
            UserError: a shard cannot be had, is damaged, or has ids that no token has.
        """
        plan = self._plan_of(step)
        source, places = plan.source[step - plan.step], plan.places[step - plan.step]
        found = [self.streams[n].read(place) for n, place in zip(source, places, strict=True)]
        rows = Rows.fill(found, self._seq_len, self._eos_id)
        wrong = rows.outside(self._vocab_size)
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
            "seq_len": self._seq_len,
            "mixture": self.mixture.state(step),
            "streams": self._gone | streams,
        }

    def resume(self, state: dict[str, Any], step: int) -> None:
        """Continue after `step` done steps with each stream's first sample not given yet.

        The batch size, the proportions, the streams and the number of ranks may have changed.

        Raises:
            UserError: rows or their order would not be those of the checkpoint.
        """
        if state["seq_len"] != self._seq_len:
            raise UserError(
                f"max_seq_len: the checkpoint's samples were ordered with {state['seq_len']}, this"
                f" run has {self._seq_len}; write {state['seq_len']}"
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

        Each stream goes on with the first sample that none of them had; phases of a mixture begin
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
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        return UserError(
            f"{stream_key(stream.name)}: {stream.where(place)}: has the id {outside[0]}, but the"
            f" tokenizer's are 0 … {self._vocab_size - 1}; name the tokenizer that made the data,"
            " or correct data.token_encoding_type"
        )


_PLANNED_STEPS, _PLANNED_ROWS = 16, 1024  # at a time; the larger of the two


@dataclass(frozen=True)
class _Plan:
    """What some steps hold: of each this rank's rows, as streams by number and places in them."""

    step: int
    source: list[list[int]]
    places: list[list[int]]
