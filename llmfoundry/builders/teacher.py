"""A teacher's stored tokens next to the data of a run, for `loss=distill`.

Entry points: `with_teacher` opens them for training and validation, and `write_teacher`, for
`scripts/prepare_data.py teacher=MODEL`, computes them. The teacher reads the data once, in units
that do not depend on the student's run (`data/teacher.py`). Parts of about 32 MiB are written
atomically one after another, and the index last, so a killed preparation goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from llmfoundry.builders.data import RunData
from llmfoundry.builders.preference import identity_of
from llmfoundry.data.batch import SequenceBatch, TeacherRows
from llmfoundry.data.file_spec import INDEX, FetchOptions
from llmfoundry.data.held_out import Chain, HeldOut
from llmfoundry.data.mds.index import MDSIndex
from llmfoundry.data.mds.shard import MDSWriter
from llmfoundry.data.order import stream_key
from llmfoundry.data.preparation.output_folder import OutputFolder
from llmfoundry.data.shard_index import read_index
from llmfoundry.data.sources import OrderedStream, SequenceSource, Stream
from llmfoundry.data.store_address import without_secrets
from llmfoundry.data.store_errors import is_missing
from llmfoundry.data.teacher import (
    FACTS,
    IDS,
    LOG_PROBS,
    STREAM,
    TaughtHeldOut,
    TaughtSource,
    TaughtUnits,
    TeacherFacts,
    TeacherStore,
    bytes_per_token,
    columns,
    narrow,
    open_folder,
    parse_facts,
    read_facts,
)
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.collectives import on_all_ranks, on_rank0
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError, enough_memory
from llmfoundry.files import one_at_a_time
from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.loss import chunk_tokens
from llmfoundry.ops.packed_layout import Batch
from llmfoundry.recipe.loss import DISTILL
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.terminal import progress

if TYPE_CHECKING:
    from llmfoundry.builders.open_model import LoadedModel, OpenedModel  # imports transformers

PART_BYTES = 32 << 20
ROWS = 8  # sequences that a teacher reads at a time, unless device_eval_batch_size is a number
RECORDS, LOCK = ".parts", "lock"
TEXT = "text is tokenized while it is read; prepare it as tokens first (scripts/prepare_data.py)"


def with_teacher(
    data: RunData, recipe: ResolvedTrainRecipe, tokenizer: Tokenizer, world: World
) -> RunData:
    """Return the data of a run, wrapped to add the teacher's tokens if the loss needs them.

    Raises:
        UserError: a stream has no teacher, or one that does not fit the recipe.
    """
    if recipe.loss.name != DISTILL:
        return data
    opening = _Opening(recipe, tokenizer, world)
    lines, streams, every = [], [], []
    for stream in data.streams:
        key = stream_key(stream.name)
        source = _source(stream, key)
        units, teacher = opening.units(key, source)
        every.append((key, teacher.facts))
        lines.append(_line(key, teacher.facts, tokenizer))
        streams.append(OrderedStream(TaughtSource(source, units, teacher), _order(stream)))
    _check_same_width(every)
    validation, note = opening.validation(data.validation, every[0][1])
    summary = "\n".join([data.summary, *lines, *note])
    return replace(data, streams=tuple(streams), validation=validation, summary=summary)


def _source(stream: Stream, key: str) -> SequenceSource:
    if not isinstance(stream, OrderedStream):
        raise UserError(f"{key}: {TEXT}")
    return stream.source


def _order(stream: Stream) -> Any:
    assert isinstance(stream, OrderedStream)
    return stream.order


def _line(key: str, facts: TeacherFacts, tokenizer: Tokenizer) -> str:
    size = bytes_per_token(tokenizer.vocab_size, facts.top_k)
    return (
        f"{key}: teacher {facts.model}: {facts.top_k} log-probabilities at each token, {size}"
        f" bytes; it read {facts.seq_len:,} tokens at a time in {facts.precision}"
    )


def _check_same_width(every: list[tuple[str, TeacherFacts]]) -> None:
    """Check that all streams have the same k."""
    first_key, first = every[0]
    for key, facts in every[1:]:
        if facts.top_k != first.top_k:
            raise UserError(
                f"{key}: has {facts.top_k} tokens of its teacher, and {first_key} has"
                f" {first.top_k}; prepare both with the same top_k"
            )


class _Opening:
    """Opens the teachers of several sources for the same recipe."""

    def __init__(self, recipe: ResolvedTrainRecipe, tokenizer: Tokenizer, world: World) -> None:
        self._recipe, self._tokenizer, self._world = recipe, tokenizer, world
        self._options = FetchOptions.from_config(recipe.data)

    def units(self, key: str, part: SequenceSource | HeldOut) -> tuple[TaughtUnits, TeacherStore]:
        """Open the teacher of some data.

        Raises:
            UserError: there is none, or it is of other data or of another tokenizer.
        """
        try:
            units = TaughtUnits(part, self._recipe.max_seq_len)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
        folder = open_folder(units.data, self._options)

        def read() -> tuple[TeacherFacts, MDSIndex]:
            facts = read_facts(folder)
            index = read_index(folder)
            assert isinstance(index, MDSIndex)
            return facts, index

        try:
            facts, index = on_rank0(self._world, read)
        except UserError as error:
            if not is_missing(error):
                raise
            place = without_secrets(folder.url)
            raise UserError(
                f"{key}: has no teacher for loss=distill: {place} has no {INDEX}; write it:"
                " python scripts/prepare_data.py RECIPE teacher=MODEL top_k=64, with the data keys"
                " of this run"
            ) from error
        self._check(key, facts, units)
        return units, TeacherStore(folder, index, facts)

    def validation(self, held_out: HeldOut, trained: TeacherFacts) -> tuple[HeldOut, list[str]]:
        """Return held-out data with the teacher's tokens, or a line that says why not."""
        parts, taught = held_out.parts if isinstance(held_out, Chain) else (held_out,), []
        seq_len = self._recipe.max_seq_len
        for part in parts:
            if not part.n_rows(seq_len, partial=True):
                continue
            try:
                units, teacher = self.units("data.validation", part)
                _check_same_width([("data", trained), ("data.validation", teacher.facts)])
            except UserError as error:
                return held_out, [f"loss/eval/kl is not measured: {error}"]
            taught.append(TaughtHeldOut(part, seq_len, units, teacher))
        if not taught:
            return held_out, []
        return taught[0] if len(parts) == 1 else Chain(taught), []

    def _check(self, key: str, facts: TeacherFacts, units: TaughtUnits) -> None:
        """Check stored tokens against the data and the recipe."""
        if facts.vocabulary != self._tokenizer.vocabulary:
            raise UserError(
                f"{key}: its teacher {facts.model} has another vocabulary than this recipe's"
                " tokenizer; write the tokenizer that the data was prepared with, or a teacher with"
                " the same tokens"
            )
        if (facts.data, facts.units) != (units.fingerprint, units.kind):
            raise UserError(
                f"{key}: its teacher {facts.model} read other data: the tokens changed since; write"
                f" scripts/prepare_data.py teacher={facts.model} again"
            )
        if facts.units != STREAM and facts.seq_len < self._recipe.max_seq_len:
            raise UserError(
                f"max_seq_len: {self._recipe.max_seq_len:,}, but the teacher of {key} read the"
                f" first {facts.seq_len:,} tokens of each of its {facts.units}; write at most that,"
                " or prepare the teacher again with a longer max_seq_len"
            )


@dataclass(frozen=True)
class TeacherJob:
    """What a teacher is asked to write.

    Attributes:
        name: the teacher, as the user named it.
        top_k: k, tokens to store.
        recipe: data, sequence length and batch size.
        tokenizer: the student's tokenizer.
        world: this process.
        note: reports a line.
    """

    name: str
    top_k: int
    recipe: ResolvedTrainRecipe
    tokenizer: Tokenizer
    world: World
    note: Callable[[str], None]


def check_teacher(job: TeacherJob, opened: OpenedModel) -> None:
    """Check a teacher before any weights are read.

    Raises:
        UserError: its vocabulary differs, its window is too short, or top_k is too large.
    """
    if opened.tokenizer.vocabulary != job.tokenizer.vocabulary:
        raise UserError(
            f"teacher: {job.name} has another vocabulary than the recipe's tokenizer; write"
            " tokenizer=huggingface tokenizer.path=FOLDER, the teacher's, or a teacher with the"
            " same tokens"
        )
    if job.top_k > job.tokenizer.vocab_size:
        raise UserError(
            f"top_k: {job.top_k}, but the vocabulary has {job.tokenizer.vocab_size} tokens; write"
            " at most that"
        )
    if job.recipe.max_seq_len > opened.window:
        raise UserError(
            f"max_seq_len: {job.recipe.max_seq_len:,}, but {job.name} reads {opened.window:,}"
            " tokens at most; write at most that here: training may read token shards in longer"
            " sequences"
        )


def write_teacher(job: TeacherJob, data: RunData, opened: OpenedModel) -> None:
    """Compute and write the teacher's tokens of all training and held-out data."""
    parts: list[tuple[str, SequenceSource | HeldOut]] = []
    for stream in data.streams:
        key = stream_key(stream.name)
        parts.append((key, _source(stream, key)))
    held_out = data.validation.parts if isinstance(data.validation, Chain) else (data.validation,)
    parts += [("data.validation", part) for part in held_out]

    model, identity, written = None, "", set()
    for key, part in parts:
        try:
            units = TaughtUnits(part, job.recipe.max_seq_len)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
        folder = open_folder(units.data, FetchOptions.from_config(job.recipe.data))
        if not len(units.sizes) or folder.url in written:
            continue
        written.add(folder.url)
        if model is None:
            model = opened.load()
            for line in model.notes:
                job.note(line)
            identity = identity_of(model.root.model if model.root else model.hugging_face)
        facts = TeacherFacts(
            model=job.name,
            weights=identity,
            vocabulary=job.tokenizer.vocabulary,
            data=units.fingerprint,
            units=units.kind,
            n_units=len(units.sizes),
            seq_len=job.recipe.max_seq_len,
            attend_across_documents=job.recipe.data.attend_across_documents,
            top_k=job.top_k,
            precision=model.precision,
        )
        place = OutputFolder(folder.url, job.recipe.data.storage_options)
        try:
            with _locked(place) if job.world.is_main else nullcontext():
                _write_units(_Writer(job, key, units, model, facts, place))
        except OSError as error:
            raise UserError(
                f"teacher: cannot write {without_secrets(folder.url)}: {error.strerror or error};"
                " free space there, and the same command continues"
            ) from error


def _locked(place: OutputFolder) -> AbstractContextManager[None]:
    """Lock a local folder."""
    if place.here is None:
        return nullcontext()
    return one_at_a_time(
        place.here / RECORDS / LOCK,
        key="teacher",
        busy="another process writes it; wait for it or end it",
        instead="write prepare.output=FOLDER",
    )


@dataclass(frozen=True)
class _Writer:
    """One folder to write.

    Attributes:
        job: what is asked.
        key: recipe key of the data.
        units: what the teacher reads.
        model: the teacher.
        facts: metadata of the folder.
        place: the folder.
    """

    job: TeacherJob
    key: str
    units: TaughtUnits
    model: LoadedModel
    facts: TeacherFacts
    place: OutputFolder


def _write_units(writer: _Writer) -> None:
    """Write the missing parts of a folder, then its index. The ranks share the parts."""
    place, key, facts, world = writer.place, writer.key, writer.facts, writer.job.world
    on_rank0(world, partial(_begin, place, facts))
    n_tokens = int(writer.units.sizes.sum())
    per_token = bytes_per_token(writer.job.tokenizer.vocab_size, facts.top_k)
    if on_rank0(world, lambda: place.read(INDEX) is not None):
        writer.job.note(f"{key}: {place.folder} is complete")
        return
    writer.job.note(
        f"{key}: {facts.model} reads {n_tokens:,} tokens for {facts.top_k} log-probabilities each,"
        f" {per_token} bytes per token: {n_tokens * per_token / 1e6:,.1f} MB at most"
    )
    spans = [*_parts(writer.units.sizes, max(1, PART_BYTES // per_token))]

    def write_parts() -> None:
        with progress(n_tokens, "teacher", " tokens", shown=world.is_main) as bar:
            for number, span in enumerate(spans):
                if number % world.size == world.rank and _record(place, number) is None:
                    _write_part(writer, number, span)
                bar.update(int(writer.units.sizes[span.start : span.stop].sum()))

    on_all_ranks(world, write_parts)
    on_rank0(world, partial(_finish, place, len(spans)))


def _finish(place: OutputFolder, n_parts: int) -> None:
    """Write the index of all parts, and remove their records and what killed processes left."""
    records = [_record(place, number) for number in range(n_parts)]
    shards = [shard for record in records if record is not None for shard in record]
    place.write(INDEX, json.dumps({"version": 2, "shards": shards}, sort_keys=True).encode())
    for name in place.names_below(RECORDS):
        if name != LOCK:
            place.remove(f"{RECORDS}/{name}")


def _record_name(number: int) -> str:
    return f"{RECORDS}/{number:05}.json"


def _record(place: OutputFolder, number: int) -> list[dict[str, Any]] | None:
    """Return the entries of a part for the index; None if it is not written yet."""
    data = place.read(_record_name(number))
    return None if data is None else json.loads(data)


def _begin(place: OutputFolder, facts: TeacherFacts) -> None:
    """Write the metadata, or compare it with that of the folder.

    Raises:
        UserError: the folder has the tokens of another teacher, or of other data, or the metadata
            is damaged.
    """
    data = place.read(FACTS)
    if data is None:
        place.write(FACTS, msgspec.json.format(msgspec.json.encode(facts)))
        return
    before = msgspec.to_builtins(parse_facts(data, place.folder))
    now = msgspec.to_builtins(facts)
    different = [name for name in now if before[name] != now[name] and name != "model"]
    if different:
        name = different[0]
        raise UserError(
            f"teacher: {without_secrets(place.folder)} holds the tokens of {before['model']}"
            f" with {name} {before[name]}, and not {now[name]}; delete it, or write"
            " prepare.output=FOLDER"
        )


def _parts(sizes: np.ndarray, most: int) -> Iterator[range]:
    """Yield ranges of units of about `most` tokens each."""
    first, total = 0, 0
    for number, size in enumerate(sizes.tolist()):
        total += size
        if total >= most or number == len(sizes) - 1:
            yield range(first, number + 1)
            first, total = number + 1, 0


def _write_part(writer: _Writer, number: int, span: range) -> None:
    """Write a part, then the record of its shards."""
    name, place = f"{number:05}", writer.place
    encodings = columns(writer.job.tokenizer.vocab_size)
    rows = writer.job.recipe.device_eval_batch_size
    size = rows if isinstance(rows, int) else ROWS
    with place.scratch(RECORDS) as folder:
        with MDSWriter(folder / name, columns=encodings, hashes=["sha1"], size_limit=None) as out:
            for start in range(span.start, span.stop, size):
                for ids, log_probs in _read_units(
                    writer, range(start, min(start + size, span.stop))
                ):
                    kind = encodings[IDS].removeprefix("ndarray:")
                    out.write({IDS: ids.astype(kind), LOG_PROBS: narrow(log_probs)})
        shards = json.loads((folder / name / INDEX).read_text())["shards"]
        (folder / name / INDEX).unlink()
        place.put(folder / name, name)
    for shard in shards:
        shard["raw_data"]["basename"] = f"{name}/{shard['raw_data']['basename']}"
    place.write(_record_name(number), json.dumps(shards).encode())


@enough_memory("teacher: it ran out of memory; write device_eval_batch_size=1, or fewer tokens")
def _read_units(writer: _Writer, numbers: range) -> list[TeacherRows]:
    """Return the rows to store of some units, which the teacher reads together."""
    units, job = writer.units, writer.job
    sequences = [units.sequence(number) for number in numbers]
    longest = max(max(sum(sequence.lengths) for sequence in sequences), 1)
    batch = SequenceBatch.fill(sequences, longest, job.tokenizer.eos_id).batch(
        with_layout=not writer.facts.attend_across_documents
    )
    top = partial(top_tokens, k=writer.facts.top_k, n_tokens=job.tokenizer.vocab_size)
    values, ids = _of_batch(writer.model, batch, top)
    stored = []
    for n, (number, sequence) in enumerate(zip(numbers, sequences, strict=True)):
        size = max(1, sum(sequence.lengths))
        stored.append(units.stored(number, (ids[n, :size], values[n, :size])))
    return stored


@torch.no_grad()
def _of_batch(
    model: LoadedModel, batch: Batch, top: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities and ids of a batch, each (B, T, k)."""
    batch = batch.to(model.device)
    if model.root is not None:

        def finish(decoder: Decoder, hidden: Tensor) -> tuple[Tensor, Tensor]:
            flat = hidden.flatten(0, 1)
            size = chunk_tokens(decoder.config.vocab_size or 1, flat.device)
            parts = [top(decoder.head(part)) for part in flat.split(size)]
            values, ids = zip(*parts, strict=True)
            shape = (*hidden.shape[:2], -1)
            return torch.cat(values).view(shape), torch.cat(ids).view(shape)

        with model.autocast():
            values, ids = model.root(batch.tokens, batch.layout, finish)
        return values.cpu().numpy(), ids.cpu().numpy()

    # transformers' class: one document after the other, as causal classes need no layout then
    results = []
    for n, tokens in enumerate(batch.tokens):
        lengths = [len(tokens)] if batch.layout is None else batch.layout.lengths[n]
        with model.autocast():
            parts = [
                top(model.hugging_face(input_ids=part[None], use_cache=False).logits[0])
                for part in tokens.split(list(lengths))
            ]
        results.append([torch.cat(each) for each in zip(*parts, strict=True)])
    values, ids = (torch.stack(each) for each in zip(*results, strict=True))
    return values.cpu().numpy(), ids.cpu().numpy()


def top_tokens(logits: Tensor, *, k: int, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the k largest log-probabilities (n, k) fp32 of logits (n, V), and their token ids.

    The log-softmax is that of all V logits. Ids from `n_tokens`, the padding of the vocabulary, are
    not returned.
    """
    log_probs = torch.log_softmax(logits.float(), -1)
    top = log_probs[:, :n_tokens].topk(k)
    return top.values, top.indices
