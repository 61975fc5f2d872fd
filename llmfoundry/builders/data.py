"""Data of a run, from the recipe's `data` section: training streams and held-out text.

Entry point: `open_data`. Only rank 0 reads the indices of shards and inspects their samples, and
broadcasts the results: otherwise thousands of ranks would request the same file from a store. On
each machine one rank prepares corpora, or finds them in the machine's cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from llmfoundry.data.first_look import inspect_samples
from llmfoundry.data.held_out import Chain, HeldOut, MDSDocuments, MDSRows, TokenShards
from llmfoundry.data.order import ONLY, Order, stream_key, stream_weights
from llmfoundry.data.preparation.bad_rows import BadRowsError
from llmfoundry.data.preparation.prepare import prepare_corpus
from llmfoundry.data.shard_cache.shard_folder import FetchOptions, ShardFolder
from llmfoundry.data.shard_index import TWINS, Index, open_shards, read_index, with_sample
from llmfoundry.data.sources import (
    MDSTexts,
    MDSTokens,
    OrderedStream,
    SequenceOptions,
    Stream,
    TokenSource,
    check_length,
    open_source,
)
from llmfoundry.data.store_errors import is_missing
from llmfoundry.data.supervised.packed_examples import (
    ExampleCounts,
    PackedExamples,
    PackOptions,
    SupervisedHeldOut,
    SupervisedSource,
    bad_lines,
    brings_others,
    open_rows,
    packing_summary,
)
from llmfoundry.data.supervised.prepare_rows import ExampleStore, prepare_rows
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.data.text_packing import PackedStream, PackingProbe, PackingRatio, cut_share, probe
from llmfoundry.distributed.collectives import on_each_machine, on_rank0
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import Clock, Duration
from llmfoundry.recipe.data import DataConfig, FilterConfig
from llmfoundry.recipe.source import CORPORA, SourceConfig, StreamConfig, under_key
from llmfoundry.recipe.train import ResolvedTrainRecipe

_STEPS = 10  # with fewer steps, the optimizer does not warm up
_EPOCHS, _WORTH = 16, 4  # repetition is worth little above 16 epochs, and nearly as much as new
# text up to 4: Muennighoff et al., 2023 (arXiv 2305.16264)
_HELD_OUT_BYTES = 4096  # about 1,000 tokens: their mean loss has a standard error of 2 to 3 %


@dataclass(frozen=True)
class RunData:
    """Data of a run.

    Attributes:
        streams: training streams, in the recipe's order.
        weights: initial share of the sequences of each stream.
        epoch_rows: sequences per epoch.
        validation: held-out text; no sequences if there is none.
        bytes_per_token: ratio in the training text; an estimate for MDS shards.
        summary: lines to log: counts, sizes, and dropped examples.
        bad_rows: lines of the summary about invalid rows, which are skipped.
        units: how many of data.proportion_unit a sequence of each stream has, on average. A
            proportion divided by it is a share of the sequences.
    """

    streams: tuple[Stream, ...]
    weights: tuple[float, ...]
    epoch_rows: int
    validation: HeldOut
    bytes_per_token: float
    summary: str
    bad_rows: tuple[str, ...] = ()
    units: tuple[float, ...] = ()

    def validation_texts(self) -> list[str]:
        """Return the held-out documents."""
        return self.validation.texts()


@dataclass
class _Opened:
    """One opened stream."""

    stream: Stream
    bytes_per_token: float
    notes: list[str]
    validation: list[HeldOut] = field(default_factory=list)
    bad_rows: list[str] = field(default_factory=list)
    counts: ExampleCounts | None = None

    def per_sequence(self, unit: str, seq_len: int) -> float:
        """Return how many of `unit`, a value of data.proportion_unit, a sequence has on average."""
        if unit == "sequences":
            return 1.0
        if self.counts is None:  # text
            return float(seq_len)
        return max(1, getattr(self.counts, unit)) / max(1, self.counts.rows)


@dataclass(frozen=True)
class _Probed:
    """Result of rank 0's inspection of a folder of shards."""

    index: Index
    probe: PackingProbe | None = None
    bytes_per_token: float | None = None
    cut: list[str] = field(default_factory=list)


def open_data(recipe: ResolvedTrainRecipe, tokenizer: Tokenizer, world: World) -> RunData:
    """Open all data of the recipe; all ranks call this.

    Raises:
        UserError: data cannot be read or does not match the recipe; on every rank.
    """
    config = recipe.data
    streams: Mapping[str, SourceConfig] = config.streams or {ONLY: config}
    if all(source.name == "shards" and not source.is_supervised for source in streams.values()):
        _refuse_filters(config)
    opening = _Opening(recipe, tokenizer, world)
    held_out = config.validation if is_measured(recipe) else None
    opened, validation = _open_all(opening, streams, held_out)
    if held_out is not config.validation:
        opening.notes.append("data.validation: not read, as eval.validation is false")
    n_rows = [each.stream.n_rows for each in opened]
    units = tuple(each.per_sequence(config.proportion_unit, recipe.max_seq_len) for each in opened)
    if config.streams:
        weights, epoch_rows = stream_weights(config.streams, n_rows, units)
    else:
        weights, epoch_rows = (1.0,), n_rows[0]
    parts = np.array(weights) / sum(weights)
    lines = [line for each in opened for line in each.notes]
    return RunData(
        streams=tuple(each.stream for each in opened),
        weights=weights,
        epoch_rows=epoch_rows,
        validation=validation,
        bytes_per_token=float(parts @ [each.bytes_per_token for each in opened]),
        summary="\n".join(lines + opening.notes),
        bad_rows=tuple([line for each in opened for line in each.bad_rows] + opening.bad_rows),
        units=units,
    )


def is_measured(recipe: ResolvedTrainRecipe) -> bool:
    """Return whether a run needs held-out text, for evaluation or for samples."""
    generate = recipe.callbacks.generate
    return recipe.eval.validation or bool(generate and generate.from_validation)


def _refuse_filters(config: DataConfig) -> None:
    """Reject filters of shards, whose documents are fixed."""
    set_keys = {
        "filter": config.filter != FilterConfig(),
        "deduplicate": config.deduplicate != "none",
    }
    for key in (key for key, is_given in set_keys.items() if is_given):
        raise UserError(
            f"data.{key}: has no effect on shards while training; remove it, or prepare the shards"
            " with it (scripts/prepare_data.py)"
        )


def open_held_out(recipe: ResolvedTrainRecipe, tokenizer: Tokenizer, world: World) -> RunData:
    """Open only the held-out text, for an evaluation; training shards are not read."""
    config = recipe.data
    streams: Mapping[str, SourceConfig] = config.streams or {ONLY: config}
    opening = _Opening(recipe, tokenizer, world)
    corpora = {name: source for name, source in streams.items() if source.is_read_whole}
    _, held_out = _open_all(opening, corpora, config.validation)
    return RunData((), (), 0, held_out, math.nan, "")


def no_held_out() -> RunData:
    """Return data without text, for runs that measure no loss on text."""
    return RunData((), (), 0, Chain([]), math.nan, "")


def _open_all(
    opening: _Opening, streams: Mapping[str, SourceConfig], validation: StreamConfig | None
) -> tuple[list[_Opened], HeldOut]:
    """Open training and held-out data; invalid rows of all sources are reported together."""
    by_name: dict[str, _Opened] = {}
    measured: list[HeldOut] = []
    problems: list[str] = []
    # the cheapest sources first: of shards only the index is read, a corpus is tokenized
    sources: list[tuple[str | None, SourceConfig]] = [*streams.items()]
    sources += [(None, validation)] if validation is not None else []
    for name, source in sorted(sources, key=lambda pair: _cost(pair[1])):
        try:
            with under_key("data.validation" if name is None else stream_key(name)):
                if name is not None:
                    by_name[name] = opening.stream(name, source)
                else:
                    assert isinstance(source, StreamConfig)
                    measured.append(opening.held_out(source))
        except BadRowsError as error:
            problems += error.problems
    if problems:
        raise BadRowsError(*problems)
    opened = [by_name[name] for name in streams]
    held_out = [*(part for each in opened for part in each.validation), *measured]
    return opened, held_out[0] if len(held_out) == 1 else Chain(held_out)


def _cost(source: SourceConfig) -> int:
    """Return the rank of a source by what opening it costs for the first time."""
    if source.is_supervised:
        return 1
    return 2 if source.name in CORPORA else 0


def learning_corpus(config: DataConfig) -> DataConfig:
    """Return the part of the data that a tokenizer is trained on: corpora, not shards."""
    sources = [config.alone(s) for s in config.streams.values()] or [config]
    corpora = [s for s in sources if s.name in CORPORA and not s.is_supervised]
    if not corpora:
        raise UserError(
            "tokenizer.name: train learns from documents, and data has none; write"
            " tokenizer=huggingface tokenizer.path=FOLDER"
        )
    first = corpora[0]
    files = [c for c in corpora if c.name == "files" and c.text_column == first.text_column]
    if len(corpora) == 1:
        return first
    if len(files) == len(corpora):
        return dataclasses.replace(first, paths=[path for c in files for path in c.paths])
    raise UserError(
        "tokenizer.name: train learns from one corpus, or from several of files; train one on"
        " either, and write tokenizer=huggingface tokenizer.path=RUN/tokenizer"
    )


def few_rows_lines(recipe: ResolvedTrainRecipe, data: RunData, clock: Clock) -> Iterator[str]:
    """Yield lines about a run with little training or held-out data."""
    batch, rows, total = recipe.global_train_batch_size, data.epoch_rows, clock.total
    epochs = total / clock.batches_per_epoch
    steps = "1 step" if total == 1 else f"{total:,} steps"
    max_duration = Duration.parse(recipe.max_duration)
    smaller = max(1, rows // _STEPS)

    # length of the run
    if rows < batch:
        yield (
            f"global_train_batch_size: {batch:,}, but there are {rows:,} rows of"
            f" {recipe.max_seq_len:,} tokens: the run is {steps}, each reading every row"
            f" {batch / rows:.3g} times; write global_train_batch_size={smaller}"
        )
    elif max_duration.unit == "ep" and total < _STEPS:
        yield (
            f"max_duration: {max_duration} of {rows:,} rows is {steps}; write a longer one, or"
            f" global_train_batch_size={smaller}"
        )

    # repetition
    if epochs > _EPOCHS:
        yield (
            f"max_duration: {max_duration} reads each of {rows:,} rows {epochs:,.0f} times, until"
            f" they are known by heart; write max_duration={_WORTH}ep, or add data"
        )

    # size of the held-out text
    n_bytes = data.validation.n_bytes if recipe.eval.validation else _HELD_OUT_BYTES
    if not n_bytes:
        yield "eval.validation: nothing could be held out, so no loss of it is measured; add data"
    elif n_bytes < _HELD_OUT_BYTES:
        more = "a larger data.validation_fraction, or add data"
        yield (
            f"eval.validation: {n_bytes:,} bytes are held out, on which runs differ by chance;"
            f" write {more if recipe.data.validation is None else 'more rows of data.validation'}"
        )


class _Opening:
    """Opens sources one after another for the same recipe and tokenizer."""

    def __init__(self, recipe: ResolvedTrainRecipe, tokenizer: Tokenizer, world: World) -> None:
        self._recipe, self._config = recipe, recipe.data
        self._tokenizer, self._world = tokenizer, world
        self._options = FetchOptions.from_config(recipe.data)
        self.notes: list[str] = []  # stores without an index, held-out rows
        self.bad_rows: list[str] = []  # lines about invalid held-out rows

    def stream(self, name: str, source: SourceConfig) -> _Opened:
        """Open a training stream."""
        if source.is_supervised:
            opened = partial(self._supervised, name, source)
            return on_each_machine(self._world, opened, patient=True)
        return self._corpus(name, source) if source.name in CORPORA else self._shards(name, source)

    def held_out(self, config: StreamConfig) -> HeldOut:
        """Open held-out shards or supervised examples."""
        # supervised examples
        if config.is_supervised:
            opened = partial(self._validation_rows, config)
            rows, lines, bad_rows = on_each_machine(self._world, opened, patient=True)
            self.notes += lines
            self.bad_rows += bad_rows
            return rows

        # shards: rank 0 reads the index and inspects samples
        split = on_rank0(self._world, lambda: self._held_out_split(config))
        config = replace(config, split=split)
        key, folder = "data.validation", open_shards(config, self._options)
        reading = self._reading(config)

        def find() -> tuple[Index, list[str]]:
            index = self._read_index(key, folder)
            source = open_source("validation", key, folder, index, reading)
            if not isinstance(source, MDSTokens):
                return index, []
            return index, self._look(key, source, int(source.sizes.nonzero()[0][0]))[1]

        index, lines = on_rank0(self._world, find)
        self.notes += lines

        # every rank opens the shards with that index
        source = open_source("validation", key, folder, index, reading)
        if isinstance(source, TokenSource) and source.dataset.n_tokens < 2:
            raise UserError(f"{key}: its text has no token to predict; name other text")
        kinds: dict[type, Callable[[Any], HeldOut]] = {
            TokenSource: lambda s: TokenShards(s.dataset, self._tokenizer),
            MDSTokens: lambda s: MDSRows(s, self._tokenizer),
            MDSTexts: lambda s: MDSDocuments(s, self._tokenizer),
        }
        return kinds[type(source)](source)

    def _held_out_split(self, config: StreamConfig) -> str | None:
        """Return the folder of held-out shards, which has one of two names."""
        if config.split not in TWINS:
            return config.split
        for split in (config.split, TWINS[config.split]):
            folder = open_shards(replace(config, split=split), self._options)
            try:
                read_index(folder, self._config.cache_folder)
                return split
            except UserError as error:
                if not is_missing(error):
                    break  # reported when the folder is opened
        return config.split

    def _read_index(self, key: str, folder: ShardFolder) -> Index:
        try:
            index = read_index(folder, self._config.cache_folder)
        except UserError as error:
            lines = (line.removeprefix(f"{key}: ") for line in error.problems)
            raise UserError(*(f"{key}: {line}" for line in lines)) from error
        if folder.silence:
            self.notes.append(f"{key}: {folder.silence}")
        return index

    def _supervised(self, name: str, source: SourceConfig) -> _Opened:
        """Open supervised training examples, and the examples that they hold out."""
        config = self._config if name == ONLY else self._config.alone(source)
        held_out = config.validation_fraction if self._config.validation is None else 0.0
        key = stream_key(name)
        store, packed, lines = self._packed_rows(key, config, held_out)
        supervised, counts = config.supervised, packed.counts
        rows = SupervisedSource(
            name,
            store,
            packed,
            self._recipe.max_seq_len,
            per_sequence=supervised.loss == "sequences",
            with_others=brings_others(store, supervised),
        )
        validation: list[HeldOut] = []
        if len(packed.held_out):
            validation.append(
                SupervisedHeldOut(store, packed.held_out, self._tokenizer, supervised)
            )
        ratio = max(1, counts.loss_bytes) / max(1, counts.loss_tokens)
        stream = OrderedStream(rows, self._order(rows.sizes))
        return _Opened(stream, ratio, lines, validation, bad_lines(key, store.facts), counts)

    def _validation_rows(
        self, source: SourceConfig
    ) -> tuple[SupervisedHeldOut, list[str], list[str]]:
        """Open the rows of data.validation; notes and invalid rows are as in `_Opened`."""
        config, key = self._config.alone(source), "data.validation"
        store, packed, lines = self._packed_rows(key, config, 0.0)
        members = np.sort(packed.members)
        held_out = SupervisedHeldOut(store, members, self._tokenizer, config.supervised)
        return held_out, lines, bad_lines(key, store.facts)

    def _packed_rows(
        self, key: str, config: DataConfig, held_out: float
    ) -> tuple[ExampleStore, PackedExamples, list[str]]:
        """Return tokenized and packed rows, from the cache if possible, and lines to log."""
        config = replace(config)
        config.fill()
        store = prepare_rows(config, key, self._tokenizer, seed=self._recipe.seed)
        options = PackOptions(
            seq_len=self._recipe.max_seq_len,
            seed=self._recipe.seed,
            shuffle=config.shuffle,
            held_out=held_out,
            supervised=config.supervised,
            key=key,
        )
        packed = open_rows(store, options, self._tokenizer.token_bytes(), config.cache_folder)
        return store, packed, packing_summary(key, store.facts, packed, options)

    def _corpus(self, name: str, source: SourceConfig) -> _Opened:
        config = self._config if name == ONLY else self._config.alone(source)
        opened = partial(prepare_corpus, config, self._tokenizer, progress=self._world.is_main)
        prepared = on_each_machine(self._world, opened, patient=True)
        dataset = prepared.train
        tokens = TokenSource(name, dataset, self._recipe.max_seq_len)
        check_length(tokens, stream_key(name), self._recipe.max_seq_len)
        lines = prepared.summary.splitlines()
        if name != ONLY:
            lines = [f"{stream_key(name)}{line.removeprefix('data')}" for line in lines]
        ratio = dataset.n_bytes / dataset.n_tokens
        return _Opened(
            OrderedStream(tokens, self._order(tokens.sizes)), ratio, lines, [prepared.validation]
        )

    def _shards(self, name: str, config: SourceConfig) -> _Opened:
        folder = open_shards(config, self._options)
        reading = self._reading(config)

        def opened(index: Index) -> TokenSource | MDSTokens | MDSTexts:
            source = open_source(name, stream_key(name), folder, index, reading)
            if isinstance(source, TokenSource):
                check_length(source, stream_key(name), reading.seq_len)
            return source

        def find() -> _Probed:
            index = with_sample(folder, self._read_index(stream_key(name), folder))
            source = opened(index)
            if isinstance(source, MDSTexts):
                return _Probed(index, probe=self._probe(source))
            if isinstance(source, MDSTokens):
                first = next(self._order(source.sizes).shards(0))
                ratio, cut = self._look(stream_key(name), source, first)
                return _Probed(index, bytes_per_token=ratio, cut=cut)
            return _Probed(index, bytes_per_token=source.dataset.n_bytes / source.dataset.n_tokens)

        # rank 0 inspects the shards; every rank then opens them
        probed = on_rank0(self._world, find)
        source = opened(probed.index)
        if isinstance(source, MDSTexts):
            assert probed.probe is not None
            return self._packed(source, probed.probe)

        # describe the stream
        assert probed.bytes_per_token is not None
        line = f"{stream_key(name)}: {source.n_rows:,} rows in {len(source.sizes):,} shards"
        if isinstance(source, MDSTokens):
            line += f"; about {probed.bytes_per_token:.2f} bytes each token (an estimate)"
        else:
            line += (
                f", {source.dataset.n_documents:,} documents, {source.dataset.n_tokens:,} tokens"
            )
        lines = [line, *probed.cut]
        return _Opened(
            OrderedStream(source, self._order(source.sizes)), probed.bytes_per_token, lines
        )

    def _packed(self, texts: MDSTexts, packing_probe: PackingProbe) -> _Opened:
        ratio = self._config.packing_ratio
        exact = not isinstance(ratio, str)
        packing = packing_probe.packing
        if not isinstance(ratio, str):
            packing = PackingRatio.of_ratio(ratio, self._recipe.global_train_batch_size)
        stream = PackedStream(
            texts,
            self._tokenizer,
            self._order(texts.sizes),
            packing,
            seq_len=self._recipe.max_seq_len,
            exact=exact,
        )
        line = (
            f"{stream_key(texts.name)}: {texts.n_rows:,} documents in {len(texts.sizes):,} shards;"
            f" {packing.documents / packing.rows:.2f} are packed into a row on average"
        )
        cut = cut_share(packing_probe.sizes, packing, self._recipe.max_seq_len)
        if cut:
            line += f", and about {cut:.1%} of their tokens do not fit and are cut off"
        return _Opened(stream, packing_probe.bytes_per_token, [line])

    def _order(self, sizes: np.ndarray) -> Order:
        config = self._config
        return Order(
            sizes,
            seed=self._recipe.seed,
            shuffle=config.shuffle,
            block_size=config.shuffle_block_size,
        )

    def _probe(self, texts: MDSTexts) -> PackingProbe:
        result = probe(
            texts,
            self._order(texts.sizes),
            self._tokenizer,
            seq_len=self._recipe.max_seq_len,
            batch_size=self._recipe.global_train_batch_size,
        )
        texts.close()
        return result

    def _look(self, key: str, source: MDSTokens, shard: int) -> tuple[float, list[str]]:
        """Return bytes of text per token, and a line about truncated samples.

        `shard` is the shard that training reads first.
        """
        seq_len = self._recipe.max_seq_len
        inspection = inspect_samples(
            source, shard, self._tokenizer.token_bytes(), key=key, seq_len=seq_len
        )
        truncated = inspection.cut
        return inspection.bytes_per_token, [truncated.line(key, seq_len)] if truncated else []

    def _reading(self, source: SourceConfig) -> SequenceOptions:
        config = self._config
        eos_id = self._tokenizer.eos_id if config.eos_token_id is None else config.eos_token_id
        return SequenceOptions(
            seq_len=self._recipe.max_seq_len,
            tokenizer=self._tokenizer.fingerprint,
            text_column=source.text_column,
            eos_id=eos_id if config.bos_token_id is None else None,
            bos_id=config.bos_token_id,
            apart=not config.attend_across_documents,
            dtype=config.token_encoding_type,
        )
