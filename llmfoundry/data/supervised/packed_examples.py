"""Supervised rows to train and measure on: the store of examples, packed once per run, read by row.

`prepare_rows` writes a `Store`, memory-mapped in every process; tokens are kept whole. `open_rows`
decides with a run's max_seq_len what is cut, left out and packed together, in one process, into the
cache: examples are taken in a seeded order, in windows, and within a window the longest first, each
into the fullest row that still holds it (best fit, decreasing). So which row holds what is a pure
function of the rows and the seed, and a run's rows are fixed: their order, resuming, ranks and
mixtures are those of every other source. `SupervisedSource` and `SupervisedHeldOut` read them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from llmfoundry.data.batch import Row
from llmfoundry.data.order import Order
from llmfoundry.data.preparation.bad_rows import shortened
from llmfoundry.data.preparation.prepared_folder import build_once, cache_key
from llmfoundry.data.preparation.readers import left_out
from llmfoundry.data.supervised.formats import KEYS, LACKS_ARGUMENT, SPELLS_CHAT
from llmfoundry.data.supervised.prepare_rows import SPELLED, SPLIT, Store, StoreFacts
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.files import write_json
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.data import SupervisedConfig

_VERSION = 1  # of how rows are made; raised when the same examples become others
_LOOKED_AT = 1 << 24  # tokens at a time
TOO_LONG, NOTHING, REPEATS = "too long", "without a learned token", "repeated"
TRUNCATED = "truncated"
_KEYS_SHOWN = 10
_ARRAYS = ("members", "ends", "held_out")


@dataclass(frozen=True)
class PackOptions:
    """What decides the rows, beside the examples.

    Attributes:
        seq_len: T, tokens of a row.
        seed: of the order in which examples are packed.
        shuffle: take them in that order; otherwise in the source's.
        held_out: share of the examples, chosen by their content.
        supervised: the recipe's section.
        key: of the source in the recipe, for messages.
    """

    seq_len: int
    seed: int
    shuffle: bool
    held_out: float
    supervised: SupervisedConfig
    key: str


@dataclass
class ExampleCounts:
    """What became of the examples.

    Attributes:
        rows: of T tokens, to train on.
        examples: in them.
        tokens: in them, padding left out.
        learned: tokens of these that are labels.
        learned_bytes: UTF-8 bytes that the learned tokens stand for.
        held_out: examples held out.
        lost: learned tokens that were cut off.
        changed: examples dropped, truncated or repeated, by what.
        first: the place of the first of each.
    """

    rows: int = 0
    examples: int = 0
    tokens: int = 0
    learned: int = 0
    learned_bytes: int = 0
    held_out: int = 0
    lost: int = 0
    changed: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PackedExamples:
    """Examples in rows.

    Attributes:
        members: (examples,) int64, numbers of the examples, row by row.
        ends: (rows,) int64, where each row ends in `members`.
        held_out: (m,) int64, examples to measure on.
        counts: see there.
        fingerprint: of the rows.
    """

    members: np.ndarray
    ends: np.ndarray
    held_out: np.ndarray
    counts: ExampleCounts
    fingerprint: str


def open_rows(
    store: Store, options: PackOptions, token_bytes: np.ndarray, cache_folder: str
) -> PackedExamples:
    """The rows of a store, from the cache where they are there.

    Args:
        store: the examples.
        options: how they become rows.
        token_bytes: (vocab_size,) UTF-8 bytes of each token.
        cache_folder: the recipe's.

    Raises:
        UserError: an example is too long or nothing of it is learned, where the recipe says that
            this is an error; or none is left.
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


def cut_lengths(lengths: np.ndarray, per_example: int, seq_len: int) -> np.ndarray:
    """(documents,) int64: tokens kept of each, so that an example fits into a row of `seq_len`.

    Of a pair each may fill half a row, and what the other one leaves.
    """
    if per_example == 1:
        return np.minimum(lengths, seq_len)
    first, second = lengths[0::2], lengths[1::2]
    cut = np.empty_like(lengths)
    cut[0::2] = np.minimum(first, np.maximum(seq_len // 2, seq_len - second))
    cut[1::2] = np.minimum(second, seq_len - cut[0::2])
    return cut


def best_fit(sizes: np.ndarray, seq_len: int) -> list[list[int]]:
    """Places of `sizes` (n,) int64 in rows of at most `seq_len`: best fit, decreasing.

    The rows come in the order of their first places, and the places of each ascend.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens free, row), sorted
    for place in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[place])
        found = bisect_left(room, (size, -1))
        if found == len(room):
            free, row = seq_len, len(rows)
            rows.append([])
        else:
            free, row = room.pop(found)
        rows[row].append(place)
        if free > size:
            insort(room, (free - size, row))
    return sorted(sorted(row) for row in rows)


def pack_examples(
    sizes: np.ndarray, seq_len: int, *, window: int, packed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Examples of these sizes, in this order, in rows; `PackedExamples`'s members and ends.

    Args:
        sizes: (n,) int64, tokens of each; at most `seq_len`.
        seq_len: T, tokens of a row.
        window: how many are packed with each other.
        packed: several share a row; otherwise each has one.
    """
    if not packed:
        return np.arange(len(sizes)), np.arange(1, len(sizes) + 1)
    members: list[int] = []
    ends: list[int] = []
    for begin in range(0, len(sizes), window):
        for row in best_fit(sizes[begin : begin + window], seq_len):
            members += [begin + place for place in row]
            ends.append(len(members))
    return np.array(members, np.int64), np.array(ends, np.int64)


def _build(folder: Path, store: Store, options: PackOptions, token_bytes: np.ndarray) -> None:
    counts, n = ExampleCounts(), store.facts.per_example
    kept = np.ones(len(store.examples), bool)
    if options.supervised.drop_duplicates or len(np.unique(store.examples["content"])) < len(kept):
        _leave_out_repeated(store, options, kept, counts)
    cut = cut_lengths(store.lengths, n, options.seq_len)
    _handle_too_long(store, options, cut, kept, counts)
    learned, n_bytes, lost = _learned(store, cut, token_bytes)
    _handle_nothing_learned(store, options, learned, kept, counts)
    numbers = np.flatnonzero(kept)
    held_out = _held_out(store.examples["key"][numbers], options, numbers)
    train = np.setdiff1d(numbers, held_out, assume_unique=True)
    if not len(train):
        raise UserError(f"{options.key}: no row is left to train on; {_reasons(counts)}")
    counts.lost = int(lost[np.repeat(kept, n)].sum())
    if options.shuffle:
        train = train[Order(len(train), seed=options.seed, shuffle=True).rows(0, len(train))]
    sizes = cut.reshape(-1, n).sum(1)
    supervised = options.supervised
    members, ends = pack_examples(
        sizes[train], options.seq_len, window=supervised.packing_window,
        packed=supervised.packing == "best_fit",
    )  # fmt: skip
    in_train = np.zeros(len(kept), bool)
    in_train[train] = True
    documents = np.repeat(in_train, n)
    counts.rows, counts.examples, counts.held_out = len(ends), len(train), len(held_out)
    counts.tokens, counts.learned = int(cut[documents].sum()), int(learned[documents].sum())
    counts.learned_bytes = int(n_bytes[documents].sum())
    for name, array in zip(_ARRAYS, (train[members], ends, held_out), strict=True):
        np.save(folder / f"{name}.npy", array)
    write_json(folder / "counts.json", asdict(counts))


def _note(counts: ExampleCounts, store: Store, what: str, examples: np.ndarray) -> None:
    if len(examples):
        counts.changed[what] = len(examples)
        counts.first[what] = store.where(int(examples[0]))


def _leave_out_repeated(
    store: Store, options: PackOptions, kept: np.ndarray, counts: ExampleCounts
) -> None:
    _, first = np.unique(store.examples["content"], return_index=True)
    repeated = np.setdiff1d(np.arange(len(kept)), first)
    _note(counts, store, REPEATS, repeated)
    if options.supervised.drop_duplicates:
        kept[repeated] = False


def _handle_too_long(
    store: Store, options: PackOptions, cut: np.ndarray, kept: np.ndarray, counts: ExampleCounts
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
    store: Store, options: PackOptions, learned: np.ndarray, kept: np.ndarray, counts: ExampleCounts
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
    store: Store, cut: np.ndarray, token_bytes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(n,) int64, of each document: learned tokens kept, their bytes, learned tokens cut off."""
    ends, lengths = store.documents["end"], store.lengths
    found = np.zeros((3, len(ends)), np.int64)
    first = 0
    while first < len(ends):
        begin = int(ends[first] - lengths[first])
        stop = max(first + 1, int(np.searchsorted(ends, begin + _LOOKED_AT, side="right")))
        part = slice(first, stop)
        begins = ends[part] - lengths[part] - begin
        is_label = np.asarray(store.weights[begin : int(ends[stop - 1])]) > 0
        ids = np.asarray(store.ids[begin : int(ends[stop - 1])])
        place = np.arange(len(ids)) - np.repeat(begins, lengths[part])
        is_kept = place < np.repeat(cut[part], lengths[part])
        sizes = token_bytes[ids] * (is_label & is_kept)
        for n, values in enumerate((is_label & is_kept, sizes, is_label & ~is_kept)):
            sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
            found[n, part] = sums[begins + lengths[part]] - sums[begins]
        first = stop
    return found[0], found[1], found[2]


def _held_out(keys: np.ndarray, options: PackOptions, numbers: np.ndarray) -> np.ndarray:
    """The examples whose hash lies below a bound; of so few that none or all do, the smallest.

    Of one example none: it is trained on.
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
    key: str, facts: StoreFacts, packed: PackedExamples, options: PackOptions
) -> list[str]:
    """Lines for the user: counts, and what was left out or changed."""
    counts, rows = packed.counts, packed.counts.rows
    padding = 1 - counts.tokens / (rows * options.seq_len)
    lines = [
        f"{key}: {_rows(counts.examples)} of {facts.format}, {counts.tokens:,} tokens,"
        f" {counts.learned:,} learned ({counts.learned / max(1, counts.tokens):.1%}); held out:"
        f" {_rows(counts.held_out)}",
        f"{key}: packed into {_rows(rows)} of {options.seq_len:,} tokens, {padding:.2%} padding"
        if options.supervised.packing == "best_fit"
        else f"{key}: each padded to {options.seq_len:,} tokens, {padding:.1%} padding",
    ]
    dropped = {NOTHING: "dropped", TOO_LONG: "dropped", TRUNCATED: f"to {options.seq_len:,} tokens"}
    dropped[REPEATS] = "dropped" if options.supervised.drop_duplicates else "kept"
    for what, count in counts.changed.items():
        more = f", {counts.lost:,} learned tokens cut off" if what == TRUNCATED else ""
        lines.append(_line(key, count, what, dropped[what] + more, counts.first[what]))
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


def bad_lines(key: str, facts: StoreFacts) -> list[str]:
    """Lines for rows that cannot be used and are left out, one for each reason."""
    return [f"{key}: {line}" for line in facts.bad.lines()]


_THEN = {
    SPELLED: "read as that token",
    SPELLS_CHAT: "learned as text; a function that preprocess names can make messages of it",
    LACKS_ARGUMENT: "learned so; null in a struct of Arrow (parquet) is a missing key, but"
    " arguments written as a JSON text keep it",
}
"""By `StoreFacts.told`: what became of these rows."""


def _line(key: str, count: int, what: str, then: str, first: str) -> str:
    return f"{key}: {_rows(count)} {what}: {then} (the first: {first})"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def lengths_of(store: Store, examples: Sequence[int] | np.ndarray, seq_len: int) -> np.ndarray:
    """(examples,) int64: tokens of each, cut to fit a row."""
    n = store.facts.per_example
    return cut_lengths(store.lengths, n, seq_len).reshape(-1, n).sum(1)[np.asarray(examples)]


class SupervisedSource:
    """The rows of a run: a `RowSource` of which all lie in one place."""

    def __init__(
        self,
        name: str,
        store: Store,
        packed: PackedExamples,
        seq_len: int,
        *,
        per_sequence: bool,
        with_others: bool = False,
    ) -> None:
        """Read packed examples.

        Args:
            name: of the stream.
            store: the examples.
            packed: which of them each row has.
            seq_len: T, tokens of a row.
            per_sequence: the labels of a document weigh 1 together, in place of 1 each.
            with_others: behind each row, in its padding, is the row before it, on neither side:
                rows of one answer, of which KTO needs two.
        """
        self.name, self._store, self._packed = name, store, packed
        self.n_rows = len(packed.ends)
        self.sizes = np.array([self.n_rows], np.int64)
        self.fingerprint = packed.fingerprint
        self._maker = _Maker(store, seq_len, per_sequence)
        self._with_others = with_others and self.n_rows > 1

    @property
    def sides(self) -> np.ndarray:
        """(documents,) int8 of all rows: 1 chosen or desirable, -1 rejected or undesirable."""
        of_examples = self._store.documents["side"].reshape(-1, self._store.facts.per_example)
        return of_examples[self._packed.members].ravel()

    def row(self, row: int) -> Row:
        """Row number `row`."""
        other = self._members((row - 1) % self.n_rows) if self._with_others else ()
        return self._maker(self._members(row), other)

    def where(self, row: int) -> str:
        """The file and row of its first example, for messages."""
        members = self._members(row)
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        return f"{self._store.where(int(members[0]))}{more}"

    def prefetch(self, shards: Iterator[int]) -> None:
        """All is here."""

    def close(self) -> None:
        """Let go of the files; reading opens them again."""
        self._store.close()

    def _members(self, row: int) -> np.ndarray:
        return self._packed.members[_span(self._packed.ends, row)]


@dataclass(frozen=True)
class HeldOutPrompt:
    """A held-out prompt and its right answer.

    Attributes:
        prompt: (n,) ids up to its last answer.
        answer: (m,) ids of that.
    """

    prompt: np.ndarray
    answer: np.ndarray


class SupervisedHeldOut:
    """Held-out examples; a row's weights say which tokens are learned, and so measured."""

    def __init__(
        self, store: Store, examples: np.ndarray, tokenizer: Tokenizer, config: SupervisedConfig
    ) -> None:
        """Read these examples of a store, in its order."""
        self._store, self._examples, self._tokenizer = store, examples, tokenizer
        self._packing, self._window = config.packing, config.packing_window
        self._with_others = brings_others(store, config)
        self._rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by seq_len

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of their texts."""
        token_bytes = self._tokenizer.token_bytes()
        return sum(int(token_bytes[self._ids(n)].sum()) for n in self._documents())

    def n_rows(self, seq_len: int, *, partial: bool = False) -> int:
        """Rows of T tokens; none is short of its examples, all may have padding."""
        return len(self._packed(seq_len)[1])

    def row(self, row: int, seq_len: int) -> Row:
        """A row's ids, documents and weights."""
        members, ends = self._packed(seq_len)
        own = members[_span(ends, row)]
        has_other = self._with_others and len(ends) > 1
        other = members[_span(ends, (row - 1) % len(ends))] if has_other else own[:0]
        maker = _Maker(self._store, seq_len, False)
        return maker(self._examples[own], self._examples[other])

    def texts(self) -> list[str]:
        """The documents, as their tokens spell them."""
        return [self._tokenizer.decode(self._ids(n).tolist()) for n in self._documents()]

    def prompts(self, n: int) -> list[HeldOutPrompt]:
        """The first `n` examples (of a pair the chosen one), cut where the last answer begins."""
        found = []
        for example in self._examples[:n].tolist():
            span = _span(self._store.documents["end"], example * self._store.facts.per_example)
            ids = np.asarray(self._store.ids[span])
            learned = np.asarray(self._store.weights[span]) > 0
            places = np.flatnonzero(learned & ~np.concatenate([[False], learned[:-1]]))
            if len(places):
                found.append(HeldOutPrompt(ids[: places[-1]], ids[places[-1] :]))
        return found

    def _packed(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        if seq_len not in self._rows:
            sizes = lengths_of(self._store, self._examples, seq_len)
            is_packed = self._packing == "best_fit"
            made = pack_examples(sizes, seq_len, window=self._window, packed=is_packed)
            self._rows = {seq_len: made}
        return self._rows[seq_len]

    def _documents(self) -> list[int]:
        n = self._store.facts.per_example
        return (self._examples[:, None] * n + np.arange(n)).ravel().tolist()

    def _ids(self, document: int) -> np.ndarray:
        return np.asarray(self._store.ids[_span(self._store.documents["end"], document)])


def _span(ends: np.ndarray, number: int) -> slice:
    """Where a row lies in `members`, or a document in a store's ids, by where each ends."""
    return slice(int(ends[number - 1]) if number else 0, int(ends[number]))


def brings_others(store: Store, config: SupervisedConfig) -> bool:
    """Whether rows are of one answer each, and bring another for KTO to compare with."""
    return store.facts.format == "unpaired" and config.packing == "off"


class _Maker:
    """Examples to a row."""

    def __init__(self, store: Store, seq_len: int, per_sequence: bool) -> None:
        self._store, self._seq_len, self._per_sequence = store, seq_len, per_sequence

    def __call__(
        self, examples: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray = ()
    ) -> Row:
        """Their documents one after another, and `other`'s where an answer of it fits behind."""
        store, n, ends = self._store, self._store.facts.per_example, self._store.documents["end"]
        ids, weights, lengths, sides, dropped = [], [], [], [], 0
        for example in np.asarray(examples).tolist():
            spans = [_span(ends, example * n + k) for k in range(n)]
            whole = np.array([span.stop - span.start for span in spans], np.int64)
            cut = cut_lengths(whole, n, self._seq_len).tolist()
            for k, (span, size) in enumerate(zip(spans, cut, strict=True)):
                kept = slice(span.start, span.start + size)
                ids.append(store.ids[kept])
                weights.append(self._weighed(store.weights[kept]))
                sides.append(int(store.documents["side"][example * n + k]))
            lengths += cut
            dropped += int(whole.sum()) - sum(cut)
        for example in np.asarray(other, np.int64).tolist():
            span = _span(ends, example)
            begin, end = span.start, min(span.stop, span.start + self._seq_len - sum(lengths))
            if np.any(store.weights[begin + 1 : max(begin + 1, end)]):
                ids.append(store.ids[begin:end])
                weights.append(self._weighed(store.weights[begin:end]))
                sides.append(0)
                lengths.append(end - begin)
        return Row(
            np.concatenate(ids),
            lengths,
            dropped,
            np.concatenate(weights),
            sides if any(sides) else None,
        )

    def _weighed(self, weights: np.ndarray) -> np.ndarray:
        found = weights.astype(np.float32)
        total = float(found.sum(dtype=np.float64))
        return found / np.float32(total) if self._per_sequence and total else found
