"""Objective of preference tuning, and a cache of its reference's log-probabilities.

Entry points: `open_reference`, for `build_trainer`, and `needs_reference`. The idea: the documents
of dpo and kto do not change, so the initial model is evaluated once on each document, before the
first step, by all ranks together. Training then needs neither the memory nor the time of a second
model. Parts of 256 rows are written atomically one after another, and a killed run resumes there.
A trained model is never used as reference: if the cache was deleted, a resumed run first loads
model.pretrained again and compares it with the model that the run began with.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate

from llmfoundry.builders.adapter import begin_adapter
from llmfoundry.builders.checkpoint import model_identity
from llmfoundry.builders.data import RunData
from llmfoundry.builders.resume import StartPoint
from llmfoundry.builders.run_context import RunContext, eval_rows
from llmfoundry.checkpoint.load import read_state
from llmfoundry.checkpoint.storage import Checkpoint
from llmfoundry.data.batch import SequenceBatch, TrainingSequence
from llmfoundry.data.held_out import HeldOut, WrappedHeldOut
from llmfoundry.data.preparation.prepared_folder import cache_key
from llmfoundry.data.sources import OrderedStream, SequenceSource
from llmfoundry.data.supervised.packed_examples import SupervisedSource
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_write
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.terminal import progress
from llmfoundry.train.preference_loss import answer_log_probs, mismatched


def check_sides(data: RunData, recipe: ResolvedTrainRecipe) -> None:
    """Check that the data of kto has desirable and undesirable answers."""
    if not isinstance(recipe, ResolvedFinetuneRecipe) or recipe.preference.name != "kto":
        return
    sources = [s.source for s in data.streams if isinstance(s, OrderedStream)]
    sides = [source.sides for source in sources if isinstance(source, SupervisedSource)]
    kinds = np.unique(np.concatenate(sides)) if sides else np.zeros(0)
    if len(kinds) == 1:
        there, missing = ("true", "false") if kinds[0] > 0 else ("false", "true")
        raise UserError(
            f"data: the label of every row is {there}, and kto learns from both kinds; add rows"
            f" with label: {missing}"
        )


PART = 256  # rows per file: a minute or two with a large model
WEIGHTS = "preference.weights"  # key of a run's identity: hash of the reference's weights
Fill = Callable[[Decoder], None]


class ReferencedSource:
    """A source that adds the reference's log-probabilities to its sequences.

    Attributes:
        values: (rows, k, D) fp32.
    """

    def __init__(self, source: SequenceSource) -> None:
        """Wrap a source."""
        self.source, self.values = source, np.zeros((0, 1, 1), np.float32)
        self.name, self.n_rows, self.sizes = source.name, source.n_rows, source.sizes
        self.fingerprint = source.fingerprint
        self.where, self.prefetch, self.close = source.where, source.prefetch, source.close

    def row(self, row: int) -> TrainingSequence:
        """Return sequence number `row` with the reference's log-probabilities."""
        return _with(self.source.row(row), self.values[row])


class ReferencedHeldOut(WrappedHeldOut):
    """Held-out data that adds the reference's log-probabilities to its sequences.

    Attributes:
        values: (rows, k, D) fp32, of the first rows.
    """

    def __init__(self, held_out: HeldOut) -> None:
        """Wrap held-out data."""
        super().__init__(held_out)
        self.values = np.zeros((0, 1, 1), np.float32)

    def row(self, row: int, seq_len: int) -> TrainingSequence:
        """Return a sequence with the reference's log-probabilities."""
        return _with(TrainingSequence(*self.held_out.row(row, seq_len)), self.values[row])


def _with(row: TrainingSequence, values: np.ndarray) -> TrainingSequence:
    return row._replace(references=values[:, : len(row.lengths)])


def needs_reference(recipe: ResolvedTrainRecipe) -> bool:
    """Return whether a recipe needs the reference's log-probabilities."""
    if not isinstance(recipe, ResolvedFinetuneRecipe):
        return False
    return recipe.preference.reference in ("auto", "precompute")


def with_places(data: RunData, recipe: ResolvedTrainRecipe) -> RunData:
    """Return the data, wrapped to add the reference's log-probabilities if they are needed."""
    check_sides(data, recipe)
    if not needs_reference(recipe):
        return data
    streams = tuple(
        OrderedStream(ReferencedSource(stream.source), stream.order)
        if isinstance(stream, OrderedStream)
        else stream
        for stream in data.streams
    )
    return replace(data, streams=streams, validation=ReferencedHeldOut(data.validation))


def open_reference(
    job: RunContext, data: RunData, start: StartPoint, fill: Fill | None
) -> ReferenceLogProbs:
    """Open the reference of a run, before the run's weights are loaded.

    If the run resumes from a checkpoint, all sequences get their values here.

    Args:
        job: the run.
        data: data from `with_places`.
        start: start of the run.
        fill: writes the weights that the run began with.

    Raises:
        UserError: model.pretrained is not the initial model of the run, and the cache is empty.
    """
    reference = ReferenceLogProbs(job, data, eval_rows(job.recipe, job.microbatch))
    if needs_reference(job.recipe) and start.checkpoint is not None and not start.weights_only:
        assert fill is not None, "fine-tuning begins with someone's weights"
        reference.resume(start.checkpoint, fill)
    return reference


@dataclass
class ReferenceLogProbs:
    """Computes, caches and provides the reference's log-probabilities of a run's sequences."""

    job: RunContext
    data: RunData
    """Data from `with_places`."""
    rows: int
    """Sequences computed at a time."""
    weights: str = ""
    """Hash of the reference's weights, once it is known."""

    def begin(self) -> dict[str, Any]:
        """Compute values with the initial model; return the reference's entry of the identity."""
        if not needs_reference(self.job.recipe):
            return {}
        if not self.weights:
            self.weights = identity_of(self.job.root.model)
            self._attach()
        return {WEIGHTS: self.weights}

    def resume(self, checkpoint: Checkpoint, fill: Fill) -> None:
        """Provide the values of a run that resumes from a checkpoint."""
        state = on_rank0(self.job.world, lambda: read_state(checkpoint))
        self.weights = state["identity"].get(WEIGHTS, "")
        if not self.weights or self._missing():
            model = self.job.root.model
            fill(model)
            begin_adapter(model, self.job.recipe)
            identity = identity_of(model)
            if self.weights and identity != self.weights:
                raise UserError(
                    f"model.pretrained: is not what the run of {checkpoint} began with, whose"
                    " log-probabilities are no longer in data.cache_folder; restore either, or"
                    " write another run_name"
                )
            self.weights = identity
        self._attach()

    def _missing(self) -> bool:
        """Return whether any value has to be computed; the same on all ranks."""
        tables = [table for _, table in self._tables()]
        return on_rank0(self.job.world, lambda: any(table.missing() for table in tables))

    def _tables(self) -> Iterator[tuple[ReferencedSource | ReferencedHeldOut, _Table]]:
        """Yield each wrapped source or held-out data with its table."""
        for stream in self.data.streams:
            assert isinstance(stream, OrderedStream) and isinstance(stream.source, ReferencedSource)
            source = stream.source.source
            yield stream.source, self._table(source.fingerprint, source.n_rows, source.row)
        if isinstance(self.data.validation, ReferencedHeldOut):
            yield self.data.validation, self._held_out_table(self.data.validation.held_out)

    def _held_out_table(self, held_out: HeldOut) -> _Table:
        seq_len, most = self.job.recipe.max_seq_len, self.job.recipe.eval.validation_rows
        n_rows = held_out.n_rows(seq_len, partial=True)
        n_rows = n_rows if most is None else min(n_rows, most)
        digest = hashlib.blake2b(digest_size=12)
        for n in range(n_rows):
            row = TrainingSequence(*held_out.row(n, seq_len))
            digest.update(np.asarray(row.ids, np.int64).tobytes() + repr(row.lengths).encode())
            digest.update(b"" if row.weights is None else row.weights.tobytes())
        return self._table(
            digest.hexdigest(), n_rows, lambda n: TrainingSequence(*held_out.row(n, seq_len))
        )

    def _table(self, rows: str, n_rows: int, read: Callable[[int], TrainingSequence]) -> _Table:
        recipe = self.job.recipe
        assert isinstance(recipe, ResolvedFinetuneRecipe)
        with_others = recipe.preference.name == "kto"
        key = cache_key(
            version=1,
            weights=self.weights,
            rows=rows,
            precision=recipe.precision,
            with_others=with_others,
            seq_len=recipe.max_seq_len,
            model=model_identity(self.job.root.model.config),
        )
        folder = Path(recipe.data.cache_folder).expanduser() / "reference" / key
        return _Table(folder, n_rows, read, 2 if with_others else 1)

    def _attach(self) -> None:
        """Compute missing values, and attach the values of every sequence."""
        for place, table in self._tables():
            place.values = self._values(table)

    def _values(self, table: _Table) -> np.ndarray:
        """Return (rows, k, D) fp32, the values of all sequences, on every rank."""
        world, note = self.job.world, self.job.note
        missing = on_rank0(world, table.missing)
        if missing:
            note(f"preference.reference: asking the model about {table.n_rows:,} rows")
            root = self.job.root
            root.eval()
            with progress(len(missing), "reference", " parts", shown=world.is_main) as bar:
                for part in missing:
                    values = self._compute(table, part)
                    on_rank0(world, partial(table.write, part, values))
                    bar.update()
            root.train()
        elif table.n_rows:
            note(f"preference.reference: {table.n_rows:,} rows in {table.folder}")
        return on_rank0(world, table.read_all)

    @torch.no_grad()
    def _compute(self, table: _Table, part: int) -> np.ndarray:
        """Return (rows, k, D) of a part; every rank computes some sequences and gets all."""
        world, span = self.job.world, table.span(part)
        local_rows = list(range(span.start + world.data_rank, span.stop, world.data_size))
        share = -(-len(span) // world.data_size)
        size = min(self.rows, share)
        chunks = [local_rows[n : n + size] for n in range(0, share, size)]
        results = [(chunk, self._ask(table, chunk, size)) for chunk in chunks]
        width = torch.tensor(max(values.shape[2] for _, values in results), device=world.device)
        if world.data_size > 1:
            dist.all_reduce(width, dist.ReduceOp.MAX, group=world.data_group)
        total = torch.zeros(len(span), table.kinds, int(width), device=world.device)
        for chunk, values in results:
            if chunk:
                places = torch.tensor(chunk, device=world.device) - span.start
                total[places, :, : values.shape[2]] = values[: len(chunk)]
        if world.data_size > 1:
            dist.all_reduce(total, group=world.data_group)
        return total.cpu().numpy()

    def _ask(self, table: _Table, numbers: Sequence[int], size: int) -> Tensor:
        """Return (size, k, D) for some sequences, padded with empty ones: all ranks take part."""
        rows = [table.read(n) for n in numbers]
        assert all(row.sides is not None for row in rows), "the recipe asks for preference rows"
        rows += [_EMPTY] * (size - len(rows))
        filled = SequenceBatch.fill(rows, self.job.recipe.max_seq_len, self.job.tokenizer.eos_id)
        batch = filled.batch(with_layout=True).to(self.job.world.device)
        log_probs = []
        for one in [batch, mismatched(batch)[0]][: table.kinds]:
            with self.job.autocast():
                log_probs.append(self.job.root(one.tokens, one.layout, answer_log_probs(one)))
        return torch.stack(log_probs, 1).float()


_EMPTY = TrainingSequence(np.zeros(0, np.int64), [], sides=[])


@dataclass(frozen=True)
class _Table:
    """Cached values of some sequences, in parts.

    Attributes:
        folder: folder of the parts.
        n_rows: number of sequences.
        read: returns a sequence.
        kinds: k, values per document.
    """

    folder: Path
    n_rows: int
    read: Callable[[int], TrainingSequence]
    kinds: int

    def span(self, part: int) -> range:
        """Return the numbers of the sequences of a part."""
        return range(part * PART, min(self.n_rows, (part + 1) * PART))

    def missing(self) -> list[int]:
        """Return the parts that are missing or damaged."""
        return [part for part in self._parts() if self._read_part(part) is None]

    def write(self, part: int, values: np.ndarray) -> None:
        """Write a part."""
        content = io.BytesIO()
        np.save(content, values, allow_pickle=False)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path(part), content.getvalue())
        except OSError as error:
            raise UserError(
                f"data.cache_folder: cannot write {self.folder}: {error.strerror or error}; free"
                " space there or choose another folder"
            ) from error

    def read_all(self) -> np.ndarray:
        """Return (rows, k, D) of all parts."""
        parts = [self._read_part(part) for part in self._parts()]
        complete = [part for part in parts if part is not None]
        assert len(complete) == len(parts), "written before"
        width = max((part.shape[2] for part in complete), default=1)
        values = np.zeros((self.n_rows, self.kinds, width), np.float32)
        for number, part in enumerate(complete):
            values[number * PART : number * PART + len(part), :, : part.shape[2]] = part
        return values

    def _parts(self) -> range:
        return range(-(-self.n_rows // PART))

    def _path(self, part: int) -> Path:
        return self.folder / f"{part:06}.npy"

    def _read_part(self, part: int) -> np.ndarray | None:
        """Return a part; None if it is missing or incomplete."""
        try:
            values = np.load(self._path(part), allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        fits = values.dtype == np.float32 and values.ndim == 3
        return values if fits and values.shape[:2] == (len(self.span(part)), self.kinds) else None


@torch.no_grad()
def identity_of(model: nn.Module) -> str:
    """Return a hash of the weights' bits that does not depend on the number of ranks."""
    facts: dict[str, Any] = {}
    for name, tensor in get_model_state_dict(model).items():
        assert isinstance(tensor, Tensor), name
        facts[name] = [list(tensor.shape), str(tensor.dtype), _sums(tensor).tolist()]
    return cache_key(**facts)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_A_TIME = 1 << 22


def _sums(tensor: Tensor) -> Tensor:
    """Return (2,) int64 over all shards: sums modulo 2**64, which no order of additions changes."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    sums = torch.zeros(2, dtype=torch.int64, device=local.device)
    if local.numel():
        rows = local.reshape(len(local), -1) if local.ndim else local.reshape(1, 1)
        factors = torch.arange(1, 2 * rows.shape[1], 2, device=local.device)
        for part in rows.split(max(1, _AT_A_TIME // rows.shape[1])):
            bits = part.contiguous().view(_BITS[part.element_size()]).long()
            of_rows = (bits * factors).sum(1)
            sums += torch.stack([of_rows.sum(), (of_rows * of_rows).sum()])
    if isinstance(tensor, DTensor):
        kinds = [Replicate() if p.is_replicate() else Partial() for p in tensor.placements]
        return DTensor.from_local(sums, tensor.device_mesh, kinds).full_tensor()
    return sums
