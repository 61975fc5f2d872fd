"""Packing of supervised examples into sequences, for training and evaluation.

`prepare_rows` writes the tokens of all examples, without truncation, to a `ExampleStore`, which
every process memory-maps. `open_rows` truncates, drops and packs the examples for the max_seq_len
of a run, and one process writes the result to the cache. The examples are taken in a seeded order
and in windows. Within a window, the longest example comes first, and each goes to the fullest
sequence that still has room for it (best fit, decreasing). The packing is therefore a pure function
of the examples and the seed, so the order, resuming, ranks and mixtures work as with any other
source. `SupervisedSource` and `SupervisedHeldOut` read the packed sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np

from llmfoundry.data.batch import TrainingSequence
from llmfoundry.data.order import Order
from llmfoundry.data.preparation.bad_rows import shortened
from llmfoundry.data.preparation.prepared_folder import build_once, cache_key
from llmfoundry.data.preparation.readers import left_out
from llmfoundry.data.supervised.formats import KEYS, LACKS_ARGUMENT, SPELLS_CHAT
from llmfoundry.data.supervised.prepare_rows import SPELLED, SPLIT, ExampleStore, ExampleStoreFacts
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.files import write_json
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.data import SupervisedConfig

_VERSION = 1  # of the packing; raised when the same examples give other sequences
_LOOKED_AT = 1 << 24  # tokens that are counted at a time
TOO_LONG, NOTHING, REPEATS = "too long", "without a learned token", "repeated"
TRUNCATED = "truncated"
_KEYS_SHOWN = 10
_ARRAYS = ("members", "ends", "held_out")


@dataclass(frozen=True)
class PackOptions:
    """Settings that determine the packing of given examples.

    Attributes:
        seq_len: T, tokens per sequence.
        seed: seed of the order in which examples are packed.
        shuffle: whether to pack the examples in the seeded order; otherwise in the source's order.
        held_out: fraction of the examples that is held out, chosen by their content.
        supervised: section `data.supervised` of the recipe.
        key: recipe key of the source, for error messages.
    """

    seq_len: int
    seed: int
    shuffle: bool
    held_out: float
    supervised: SupervisedConfig
    key: str


_KEYS_OF_COUNTS = {
    "loss_tokens": "learned",
    "loss_bytes": "learned_bytes",
    "truncated_loss_tokens": "lost",
}
"""Keys of counts.json that differ from the attribute."""


class ExampleCounts(msgspec.Struct, rename=_KEYS_OF_COUNTS):
    """Statistics of the packed examples, stored as counts.json.

    Attributes:
        rows: number of training sequences.
        examples: number of examples in them.
        tokens: number of tokens in them, without padding.
        loss_tokens: number of these tokens that are in the loss.
        loss_bytes: UTF-8 bytes of the tokens in the loss.
        held_out: number of held-out examples.
        truncated_loss_tokens: number of tokens in the loss that were truncated.
        changed: number of examples that were dropped, truncated or repeated, by reason.
        first: location of the first example for each reason.
    """

    rows: int = 0
    examples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    loss_bytes: int = 0
    held_out: int = 0
    truncated_loss_tokens: int = 0
    changed: dict[str, int] = {}
    first: dict[str, str] = {}


@dataclass(frozen=True)
class PackedExamples:
    """Assignment of examples to sequences.

    Attributes:
        members: (examples,) int64, example numbers, sequence by sequence.
        ends: (sequences,) int64, exclusive end of each sequence in `members`.
        held_out: (m,) int64, numbers of the held-out examples.
        counts: statistics of the packing.
        fingerprint: hash of the sequences.
    """

    members: np.ndarray
    ends: np.ndarray
    held_out: np.ndarray
    counts: ExampleCounts
    fingerprint: str


def open_rows(
    store: ExampleStore, options: PackOptions, token_bytes: np.ndarray, cache_folder: str
) -> PackedExamples:
    """Pack the examples of a store, or read the packing from the cache.

    Args:
        store: the examples.
        options: settings of the packing.
        token_bytes: (vocab_size,) UTF-8 bytes of each token.
        cache_folder: cache folder of the recipe.

    Raises:
        UserError: an example is too long or has no token in the loss, and the recipe treats this as
            an error; or no example is left.
    """
    settings = asdict(options) | {"key": None}
    del settings["supervised"]["bad_rows"]  # which rows are left is in `content`
    key = cache_key(version=_VERSION, content=store.facts.content, **settings)
    folder = Path(cache_folder).expanduser() / "supervised" / f"rows-{key}"
    build_once(folder, lambda partial: _build(partial, store, options, token_bytes))
    try:
        counts = msgspec.json.decode((folder / "counts.json").read_bytes(), type=ExampleCounts)
        members, ends, held_out = (np.load(folder / f"{n}.npy") for n in _ARRAYS)
        return PackedExamples(members, ends, held_out, counts, key)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise UserError(
            f"{folder}: packed rows are damaged: {error}; delete it, it will be made again"
        ) from error


def check_lengths(store: ExampleStore, options: PackOptions, token_bytes: np.ndarray) -> None:
    """Check the examples of a store without packing them.

    Raises:
        UserError: an example is too long or has no token in the loss, and the recipe treats this as
            an error.
    """
    kept, counts = np.ones(len(store.examples), bool), ExampleCounts()
    cut = cut_lengths(store.lengths, store.facts.per_example, options.seq_len)
    _handle_too_long(store, options, cut, kept, counts)
    learned, _, _ = _learned(store, cut, token_bytes)
    _handle_nothing_learned(store, options, learned, kept, counts)


def cut_lengths(lengths: np.ndarray, per_example: int, seq_len: int) -> np.ndarray:
    """Return the truncated lengths of documents, so that each example fits into a sequence.

    Each document of a pair may fill half a sequence, plus the room that the other one leaves.

    Args:
        lengths: (documents,) int64, tokens of each document.
        per_example: documents per example: 1, or 2 for pairs.
        seq_len: T, tokens per sequence.
    """
    if per_example == 1:
        return np.minimum(lengths, seq_len)
    first, second = lengths[0::2], lengths[1::2]
    cut = np.empty_like(lengths)
    cut[0::2] = np.minimum(first, np.maximum(seq_len // 2, seq_len - second))
    cut[1::2] = np.minimum(second, seq_len - cut[0::2])
    return cut


def best_fit(sizes: np.ndarray, seq_len: int) -> list[list[int]]:
    """Pack items into bins of `seq_len` tokens by best fit, decreasing.

    Args:
        sizes: (n,) int64, tokens of each item; at most `seq_len`.
        seq_len: capacity of a bin.

    Returns:
        The indices of the items in each bin, ascending; bins are sorted by their first index.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        fullest = bisect_left(room, (size, -1))  # of the rows with enough room
        if fullest == len(room):
            free, row = seq_len, len(rows)
            rows.append([])
        else:
            free, row = room.pop(fullest)
        rows[row].append(index)
        if free > size:
            insort(room, (free - size, row))
    return sorted(sorted(row) for row in rows)


def pack_examples(
    sizes: np.ndarray, seq_len: int, *, window: int, packed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Pack examples and return the `members` and `ends` of `PackedExamples`.

    Args:
        sizes: (n,) int64, tokens of each example, in order; at most `seq_len`.
        seq_len: T, tokens per sequence.
        window: number of consecutive examples that are packed together.
        packed: whether examples share a sequence; otherwise each has its own.
    """
    if not packed:
        return np.arange(len(sizes)), np.arange(1, len(sizes) + 1)
    members: list[int] = []
    ends: list[int] = []
    for begin in range(0, len(sizes), window):
        for row in best_fit(sizes[begin : begin + window], seq_len):
            members += [begin + index for index in row]
            ends.append(len(members))
    return np.array(members, np.int64), np.array(ends, np.int64)


def _build(
    folder: Path, store: ExampleStore, options: PackOptions, token_bytes: np.ndarray
) -> None:
    """Select, truncate and pack the examples, and write the packing to `folder`."""
    # drop or truncate examples by the recipe's policies
    counts, n = ExampleCounts(), store.facts.per_example
    kept = np.ones(len(store.examples), bool)
    if options.supervised.drop_duplicates or len(np.unique(store.examples["content"])) < len(kept):
        _leave_out_repeated(store, options, kept, counts)
    cut = cut_lengths(store.lengths, n, options.seq_len)
    _handle_too_long(store, options, cut, kept, counts)
    learned, n_bytes, lost = _learned(store, cut, token_bytes)
    _handle_nothing_learned(store, options, learned, kept, counts)

    # split into held-out and training examples
    numbers = np.flatnonzero(kept)
    held_out = _held_out(store.examples["key"][numbers], options, numbers)
    train = np.setdiff1d(numbers, held_out, assume_unique=True)
    if not len(train):
        raise UserError(f"{options.key}: no row is left to train on; {_reasons(counts)}")
    counts.truncated_loss_tokens = int(lost[np.repeat(kept, n)].sum())

    # pack the training examples in their order
    if options.shuffle:
        train = train[Order(len(train), seed=options.seed, shuffle=True).rows(0, len(train))]
    sizes = cut.reshape(-1, n).sum(1)
    supervised = options.supervised
    members, ends = pack_examples(
        sizes[train], options.seq_len, window=supervised.packing_window,
        packed=supervised.packing == "best_fit",
    )  # fmt: skip

    # count, and write
    in_train = np.zeros(len(kept), bool)
    in_train[train] = True
    documents = np.repeat(in_train, n)
    counts.rows, counts.examples, counts.held_out = len(ends), len(train), len(held_out)
    counts.tokens, counts.loss_tokens = int(cut[documents].sum()), int(learned[documents].sum())
    counts.loss_bytes = int(n_bytes[documents].sum())
    for name, array in zip(_ARRAYS, (train[members], ends, held_out), strict=True):
        np.save(folder / f"{name}.npy", array)
    write_json(folder / "counts.json", msgspec.to_builtins(counts))


def _note(counts: ExampleCounts, store: ExampleStore, what: str, examples: np.ndarray) -> None:
    if len(examples):
        counts.changed[what] = len(examples)
        counts.first[what] = store.where(int(examples[0]))


def _leave_out_repeated(
    store: ExampleStore, options: PackOptions, kept: np.ndarray, counts: ExampleCounts
) -> None:
    _, first = np.unique(store.examples["content"], return_index=True)
    repeated = np.setdiff1d(np.arange(len(kept)), first)
    _note(counts, store, REPEATS, repeated)
    if options.supervised.drop_duplicates:
        kept[repeated] = False


def _handle_too_long(
    store: ExampleStore,
    options: PackOptions,
    cut: np.ndarray,
    kept: np.ndarray,
    counts: ExampleCounts,
) -> None:
    n = store.facts.per_example
    long = np.flatnonzero((cut < store.lengths).reshape(-1, n).any(1) & kept)
    policy = options.supervised.too_long
    if len(long) and policy == "error":
        example = int(long[0])
        size = int(store.lengths.reshape(-1, n)[example].sum())
        raise UserError(
            f"{store.where(example)}: has {size:,} tokens"
            + (" in two answers, which share a row, each with the prompt" if n == 2 else "")
            + f", more than max_seq_len: {options.seq_len:,}, and so have {len(long) - 1:,} others;"
            " write a larger max_seq_len, or data.supervised.too_long: truncate or drop"
        )
    _note(counts, store, TRUNCATED if policy == "truncate" else TOO_LONG, long)
    if policy == "drop":
        kept[long] = False


def _handle_nothing_learned(
    store: ExampleStore,
    options: PackOptions,
    learned: np.ndarray,
    kept: np.ndarray,
    counts: ExampleCounts,
) -> None:
    without = np.flatnonzero((learned == 0).reshape(-1, store.facts.per_example).any(1) & kept)
    if len(without) and options.supervised.nothing_learned == "error":
        more = f", nor of {len(without) - 1:,} others" if len(without) > 1 else ""
        raise UserError(
            f"{store.where(int(without[0]))}: not one token is learned of its first"
            f" {options.seq_len:,}{more}; write a larger max_seq_len, correct the row, or write"
            " data.supervised.nothing_learned: drop"
        )
    _note(counts, store, NOTHING, without)
    kept[without] = False


def _learned(
    store: ExampleStore, cut: np.ndarray, token_bytes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count the tokens in the loss of each document.

    Args:
        store: the examples.
        cut: (documents,) int64, truncated lengths.
        token_bytes: (vocab_size,) UTF-8 bytes of each token.

    Returns:
        Three arrays (documents,) int64: retained tokens in the loss, their UTF-8 bytes, and
        truncated tokens in the loss.
    """
    ends, lengths = store.documents["end"], store.lengths
    totals = np.zeros((3, len(ends)), np.int64)
    first = 0
    while first < len(ends):
        # a range of documents with about _LOOKED_AT tokens
        begin = int(ends[first] - lengths[first])
        stop = max(first + 1, int(np.searchsorted(ends, begin + _LOOKED_AT, side="right")))
        part = slice(first, stop)
        begins = ends[part] - lengths[part] - begin
        is_label = np.asarray(store.weights[begin : int(ends[stop - 1])]) > 0
        ids = np.asarray(store.ids[begin : int(ends[stop - 1])])
        position = np.arange(len(ids)) - np.repeat(begins, lengths[part])
        is_kept = position < np.repeat(cut[part], lengths[part])
        # sums per document, as differences of cumulative sums
        sizes = token_bytes[ids] * (is_label & is_kept)
        for n, values in enumerate((is_label & is_kept, sizes, is_label & ~is_kept)):
            sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
            totals[n, part] = sums[begins + lengths[part]] - sums[begins]
        first = stop
    return totals[0], totals[1], totals[2]


def _held_out(keys: np.ndarray, options: PackOptions, numbers: np.ndarray) -> np.ndarray:
    """Return the numbers of the held-out examples: those with a hash below a bound.

    If that selects none or all of the examples, those with the smallest hash are held out instead.
    If all examples have the same hash (for instance a single example), none is held out.

    Args:
        keys: (n,) uint64, hash of each example.
        options: settings of the packing.
        numbers: (n,) int64, number of each example.
    """
    bound = int(options.held_out * 2**64)
    if not bound or not len(numbers):
        return np.zeros(0, np.int64)
    below = keys < np.uint64(min(bound, 2**64 - 1))
    if not below.any():
        below = keys == keys.min()
    if below.all():
        below = keys == keys.min()
    return numbers[below] if not below.all() else numbers[:0]


def _reasons(counts: ExampleCounts) -> str:
    found = [f"{count:,} {what}" for what, count in counts.changed.items()]
    return (
        f"{', '.join(found)}; look at them, or at max_seq_len" if found else "the source is empty"
    )


def packing_summary(
    key: str, facts: ExampleStoreFacts, packed: PackedExamples, options: PackOptions
) -> list[str]:
    """Return lines to log: counts, and which examples were dropped or changed."""
    counts, rows = packed.counts, packed.counts.rows
    padding = 1 - counts.tokens / (rows * options.seq_len)
    share = counts.loss_tokens / max(1, counts.tokens)

    # examples, tokens and padding
    lines = [
        f"{key}: {_rows(counts.examples)} of {facts.format}, {counts.tokens:,} tokens,"
        f" {counts.loss_tokens:,} learned ({share:.1%}); held out: {_rows(counts.held_out)}"
    ]
    length = f"{options.seq_len:,} tokens"
    if options.supervised.packing == "best_fit":
        lines.append(f"{key}: packed into {_rows(rows)} of {length}, {padding:.2%} padding")
    else:
        lines.append(f"{key}: each padded to {length}, {padding:.1%} padding")

    # examples that packing dropped or truncated
    dropped = {NOTHING: "dropped", TOO_LONG: "dropped", TRUNCATED: f"to {options.seq_len:,} tokens"}
    dropped[REPEATS] = "dropped" if options.supervised.drop_duplicates else "kept"
    for what, count in counts.changed.items():
        change = dropped[what]
        if what == TRUNCATED:
            change += f", {counts.truncated_loss_tokens:,} learned tokens cut off"
        lines.append(_line(key, count, what, change, counts.first[what]))

    # examples that the reader dropped or changed
    for what, count in facts.dropped.items():
        lines.append(_line(key, count, what, "dropped", facts.first[what]))
    lines += bad_lines(key, facts)
    for what, count in facts.told.items():
        then = _THEN.get(what, "left out by the chat template")
        lines.append(_line(key, count, what, then, facts.first[what]))
    if facts.split:
        lines.append(
            f"{key}: {_rows(facts.split)} split into {facts.parts:,}, one for each answer, because"
            " the chat template renders earlier answers otherwise than the last (the first:"
            f" {facts.first[SPLIT]})"
        )

    # unread columns, and unread keys of messages ("messages[].key"), most frequent first
    columns = sorted(name for name in facts.unread if "[]." not in name)
    if columns:
        lines.append(f"{key}: columns not read: {shortened(', '.join(columns))}")
    keys = sorted(facts.unread.keys() - {*columns}, key=lambda name: (-facts.unread[name], name))
    for name in keys[:_KEYS_SHOWN]:
        meant = nearest(name.partition("[].")[2], KEYS)
        lines.append(
            f"{key}: a key of messages not read: {name}, in {_rows(facts.unread[name])}{meant}"
        )
    if len(keys) > _KEYS_SHOWN:
        lines.append(f"{key}: {len(keys) - _KEYS_SHOWN:,} other keys of messages not read")
    lines += [f"{key}: {line}" for line in left_out(facts.ignored, facts.hidden)]
    return lines


def bad_lines(key: str, facts: ExampleStoreFacts) -> list[str]:
    """Return lines to log about invalid rows, which are skipped, one line per reason."""
    return [f"{key}: {line}" for line in facts.bad.lines()]


_THEN = {
    SPELLED: "read as that token",
    SPELLS_CHAT: "learned as text; a function that preprocess names can make messages of it",
    LACKS_ARGUMENT: "learned so; null in a struct of Arrow (parquet) is a missing key, but"
    " arguments written as a JSON text keep it",
}
"""Treatment of the rows that `ExampleStoreFacts.told` counts, by its keys."""


def _line(key: str, count: int, what: str, then: str, first: str) -> str:
    return f"{key}: {_rows(count)} {what}: {then} (the first: {first})"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def lengths_of(
    store: ExampleStore, examples: Sequence[int] | np.ndarray, seq_len: int
) -> np.ndarray:
    """Return the truncated lengths (examples,) int64 of these examples."""
    n = store.facts.per_example
    return cut_lengths(store.lengths, n, seq_len).reshape(-1, n).sum(1)[np.asarray(examples)]


class SupervisedSource:
    """Training sequences of packed examples: a `SequenceSource` with a single shard."""

    def __init__(
        self,
        name: str,
        store: ExampleStore,
        packed: PackedExamples,
        seq_len: int,
        *,
        per_sequence: bool,
        with_others: bool = False,
    ) -> None:
        """Read packed examples.

        Args:
            name: name of the stream.
            store: the examples.
            packed: assignment of the examples to sequences.
            seq_len: T, tokens per sequence.
            per_sequence: the loss weights of a document sum to 1; otherwise each is 1.
            with_others: append the previous sequence, with side 0, in the padding of each sequence.
                Used for sequences of one answer, because KTO compares two.
        """
        self.name, self.store, self._packed = name, store, packed
        self.n_rows = len(packed.ends)
        self.sizes = np.array([self.n_rows], np.int64)
        self.fingerprint = packed.fingerprint
        self._assemble = _SequenceAssembler(store, seq_len, per_sequence)
        self._with_others = with_others and self.n_rows > 1

    @property
    def sides(self) -> np.ndarray:
        """Sides of all documents, (documents,) int8, in the order of the sequences.

        1: chosen or desirable, -1: rejected or undesirable.
        """
        example_sides = self.store.documents["side"].reshape(-1, self.store.facts.per_example)
        return example_sides[self._packed.members].ravel()

    def row(self, row: int) -> TrainingSequence:
        """Return sequence number `row`."""
        other = self.members((row - 1) % self.n_rows) if self._with_others else ()
        return self._assemble(self.members(row), other)

    def where(self, row: int) -> str:
        """Return the file and row of the first example of a sequence, for error messages."""
        members = self.members(row)
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        return f"{self.store.where(int(members[0]))}{more}"

    def prefetch(self, shards: Iterator[int]) -> None:
        """Do nothing: the store is local."""

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        self.store.close()

    def members(self, row: int, seq_len: int = 0) -> np.ndarray:
        """Return the numbers of the examples in a sequence."""
        return self._packed.members[_span(self._packed.ends, row)]


@dataclass(frozen=True)
class HeldOutPrompt:
    """A held-out prompt and its reference answer.

    Attributes:
        prompt: (n,) ids before the last answer.
        answer: (m,) ids of the last answer.
    """

    prompt: np.ndarray
    answer: np.ndarray


class SupervisedHeldOut:
    """Held-out examples. The evaluation measures the tokens that are in the loss."""

    def __init__(
        self,
        store: ExampleStore,
        examples: np.ndarray,
        tokenizer: Tokenizer,
        config: SupervisedConfig,
    ) -> None:
        """Read these examples (n,) int64 of a store, in this order."""
        self.store, self._examples, self._tokenizer = store, examples, tokenizer
        self._packing, self._window = config.packing, config.packing_window
        self._with_others = brings_others(store, config)
        self._rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by seq_len

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of the texts of the examples."""
        token_bytes = self._tokenizer.token_bytes()
        return sum(int(token_bytes[self._ids(n)].sum()) for n in self._documents())

    def n_rows(self, seq_len: int, *, partial: bool = False) -> int:
        """Return the number of sequences. `partial` has no effect, as any may have padding."""
        return len(self._packed(seq_len)[1])

    def row(self, row: int, seq_len: int) -> TrainingSequence:
        """Return sequence number `row`."""
        examples, n_rows = self.members(row, seq_len), self.n_rows(seq_len)
        has_other = self._with_others and n_rows > 1
        other = self.members((row - 1) % n_rows, seq_len) if has_other else examples[:0]
        return _SequenceAssembler(self.store, seq_len, False)(examples, other)

    def members(self, row: int, seq_len: int) -> np.ndarray:
        """Return the numbers of the examples in a sequence."""
        members, ends = self._packed(seq_len)
        return self._examples[members[_span(ends, row)]]

    def texts(self) -> list[str]:
        """Return the decoded documents."""
        return [self._tokenizer.decode(self._ids(n).tolist()) for n in self._documents()]

    def prompts(self, n: int) -> list[HeldOutPrompt]:
        """Return the prompts and last answers of the first `n` examples (of a pair: the chosen)."""
        prompts = []
        for example in self._examples[:n].tolist():
            span = _span(self.store.documents["end"], example * self.store.facts.per_example)
            ids = np.asarray(self.store.ids[span])
            in_loss = np.asarray(self.store.weights[span]) > 0
            starts = np.flatnonzero(in_loss & ~np.concatenate([[False], in_loss[:-1]]))
            if len(starts):
                prompts.append(HeldOutPrompt(ids[: starts[-1]], ids[starts[-1] :]))
        return prompts

    def _packed(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        if seq_len not in self._rows:
            sizes = lengths_of(self.store, self._examples, seq_len)
            is_packed = self._packing == "best_fit"
            packed = pack_examples(sizes, seq_len, window=self._window, packed=is_packed)
            self._rows = {seq_len: packed}
        return self._rows[seq_len]

    def _documents(self) -> list[int]:
        n = self.store.facts.per_example
        return (self._examples[:, None] * n + np.arange(n)).ravel().tolist()

    def _ids(self, document: int) -> np.ndarray:
        return np.asarray(self.store.ids[_span(self.store.documents["end"], document)])


def _span(ends: np.ndarray, number: int) -> slice:
    """Return the range of item `number`, given the exclusive ends of all items.

    Used for sequences in `members` and for documents in the ids of a store.
    """
    return slice(int(ends[number - 1]) if number else 0, int(ends[number]))


def brings_others(store: ExampleStore, config: SupervisedConfig) -> bool:
    """Return whether each sequence has one answer and needs another one for KTO to compare with."""
    return store.facts.format == "unpaired" and config.packing == "off"


class _SequenceAssembler:
    """Concatenates the documents of examples to one sequence."""

    def __init__(self, store: ExampleStore, seq_len: int, per_sequence: bool) -> None:
        self._store, self._seq_len, self._per_sequence = store, seq_len, per_sequence

    def __call__(
        self, examples: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray = ()
    ) -> TrainingSequence:
        """Return the sequence of these examples.

        Args:
            examples: numbers of the examples.
            other: numbers of examples to append with side 0, if a part of their answer fits.
        """
        store, n, ends = self._store, self._store.facts.per_example, self._store.documents["end"]
        ids, weights, lengths, sides, dropped = [], [], [], [], 0
        # documents of the examples, truncated to fit
        for example in np.asarray(examples).tolist():
            spans = [_span(ends, example * n + k) for k in range(n)]
            sizes = np.array([span.stop - span.start for span in spans], np.int64)
            cut_sizes = cut_lengths(sizes, n, self._seq_len).tolist()
            for k, (span, size) in enumerate(zip(spans, cut_sizes, strict=True)):
                retained = slice(span.start, span.start + size)
                ids.append(store.ids[retained])
                weights.append(self._loss_weights(store.weights[retained]))
                sides.append(int(store.documents["side"][example * n + k]))
            lengths += cut_sizes
            dropped += int(sizes.sum()) - sum(cut_sizes)

        # in the remaining room, the example to compare with, if a token of its answer fits
        for example in np.asarray(other, np.int64).tolist():
            span = _span(ends, example)
            begin, end = span.start, min(span.stop, span.start + self._seq_len - sum(lengths))
            if np.any(store.weights[begin + 1 : max(begin + 1, end)]):
                ids.append(store.ids[begin:end])
                weights.append(self._loss_weights(store.weights[begin:end]))
                sides.append(0)
                lengths.append(end - begin)
        return TrainingSequence(
            np.concatenate(ids),
            lengths,
            dropped,
            np.concatenate(weights),
            sides if any(sides) else None,
        )

    def _loss_weights(self, weights: np.ndarray) -> np.ndarray:
        """Return the loss weights of a document in fp32, normalized if `per_sequence`."""
        loss_weights = weights.astype(np.float32)
        total = float(loss_weights.sum(dtype=np.float64))
        if not (self._per_sequence and total):
            return loss_weights
        return loss_weights / np.float32(total)
