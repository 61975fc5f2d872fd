"""Sources of training sequences: token shards and MDS shards, opened and put in order.

`builders/data.py` opens the sources of a recipe with `open_source`, and the loader reads them. A
`SequenceSource` numbers sequences by their position in the data; a `Stream` numbers them by the
sample of the run. A stream is either a source in its order (`OrderedStream`) or text that is packed
while it is read (`text_packing.py`). Token shards are a `TokenSource`. MDS shards are `MDSTokens`
(sequences of ids) or `MDSTexts` (documents to tokenize), read as views of memory-mapped files, of
which a process keeps a few open and pinned at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from llmfoundry.data.batch import TrainingSequence
from llmfoundry.data.file_spec import INDEX
from llmfoundry.data.mds.index import MDSIndex
from llmfoundry.data.mds.shard import MDSShard
from llmfoundry.data.order import Order, stream_key
from llmfoundry.data.shard_cache.shard_folder import ShardFolder
from llmfoundry.data.shard_index import Index
from llmfoundry.data.token_shards import StreamIndex, TokenDataset
from llmfoundry.errors import UserError

TOKENS, TEXT = "tokens", "text"  # columns that LLM Foundry's preparation writes
_KEY = {"seed": "seed", "shuffle": "data.shuffle"}
_OPEN_SHARDS = 64  # per process; 2**18 sequences of 2,048 tokens take 33 shards of 64 MiB


class SequenceSource(Protocol):
    """Random access to sequences by their number in the data.

    Attributes:
        name: name of the stream.
        n_rows: sequences per epoch.
        sizes: (shards,) int64, number of sequences that begin in each shard.
        fingerprint: hash of the sequences; a resumed run requires the same one.
    """

    name: str
    n_rows: int
    sizes: np.ndarray
    fingerprint: str

    def row(self, row: int) -> TrainingSequence:
        """Return sequence number `row`, 0 … n_rows - 1."""

    def where(self, row: int) -> str:
        """Return the shard of a sequence and its number there, for error messages."""

    def prefetch(self, shards: Iterator[int]) -> None:
        """Start to fetch these shards in this order. This replaces earlier prefetch requests."""

    def close(self) -> None:
        """Close the open shards. A later read opens them again."""


class Stream(Protocol):
    """Random access to sequences by their sample number in the run, epoch after epoch.

    A sample number is first mapped to a place in the data (`locate`), which is then read.

    Attributes:
        name: name in the recipe; `data` if there is only one stream.
    """

    name: str

    @property
    def n_rows(self) -> int:
        """Sequences per epoch."""

    def locate(self, samples: np.ndarray) -> np.ndarray:
        """Return the places (n,) int64 of sample numbers (n,) int64, for `read` and `where`."""

    def read(self, place: int) -> TrainingSequence:
        """Return the sequence at a place."""

    def where(self, place: int) -> str:
        """Return the shard of a place and the position in that shard, for error messages."""

    def prefetch(self, sample: int) -> None:
        """Start to fetch the shards that this and the following samples need."""

    def state(self) -> dict[str, Any]:
        """Return all that determines the sequence of a sample number, as JSON."""

    def resume(self, state: dict[str, Any], *, allow_changed: bool) -> None:
        """Continue the stream that `state` describes.

        Raises:
            UserError: the data, unless `allow_changed`, or the order are different.
        """

    def close(self) -> None:
        """Close the open shards. A later read opens them again."""


class OrderedStream:
    """Sequences of a `SequenceSource` in a shuffled or sequential `Order`."""

    def __init__(self, source: SequenceSource, order: Order) -> None:
        """Read `source` in `order`, an order of its sequences."""
        self.source, self.name, self.n_rows, self.order = source, source.name, source.n_rows, order

    def locate(self, samples: np.ndarray) -> np.ndarray:
        """Return the sequence numbers (n,) int64 of sample numbers (n,) int64."""
        return self.order.at(samples)

    def read(self, place: int) -> TrainingSequence:
        """Return the sequence with this number."""
        return self.source.row(place)

    def where(self, place: int) -> str:
        """Return the shard of a sequence and its number there, for error messages."""
        return self.source.where(place)

    def prefetch(self, sample: int) -> None:
        """Start to fetch the shards that this and the following samples need."""
        self.source.prefetch(self.order.shards(sample))

    def state(self) -> dict[str, Any]:
        """Return all that determines the sequence of a sample number, as JSON."""
        return {"fingerprint": self.source.fingerprint, **order_state(self.order)}

    def resume(self, state: dict[str, Any], *, allow_changed: bool) -> None:
        """Continue the stream that `state` describes."""
        check_fingerprint(self.name, state, self.source.fingerprint, allow_changed=allow_changed)
        check_order(self.order, state)

    def close(self) -> None:
        """Close the open shards. A later read opens them again."""
        self.source.close()


def order_state(order: Order) -> dict[str, Any]:
    """Return the settings that determine an order of given data, as JSON."""
    return {
        "n_rows": order.n_rows,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "block_size": order.block_size,
    }


def check_order(order: Order, state: dict[str, Any]) -> None:
    """Raise a `UserError` if `order` differs from the order that `state` describes."""
    for fact, value in (("seed", order.seed), ("shuffle", order.shuffle)):
        if state[fact] != value:
            raise _reordered(_KEY[fact], state[fact], value)
    before = state["block_size"]
    smaller = min(before, order.block_size)
    if order.shuffle and before != order.block_size and order.n_rows > smaller:
        raise _reordered("data.shuffle_block_size", before, order.block_size)


def check_fingerprint(
    name: str, state: dict[str, Any], fingerprint: str, *, allow_changed: bool
) -> None:
    """Raise a `UserError` if the data differ from the data that `state` describes."""
    if state["fingerprint"] == fingerprint or allow_changed:
        return
    raise UserError(
        f"{stream_key(name)}: its rows are not those of the checkpoint: the shards, the corpus, its"
        f" split or the tokenizer changed; restore them, write data.allow_changed=[{name}] to use"
        " other rows, or start from the checkpoint's weights alone"
    )


def _reordered(key: str, before: Any, now: Any) -> UserError:
    return UserError(
        f"{key}: the checkpoint's samples were ordered with {before}, this run has {now};"
        f" write {before}"
    )


@dataclass(frozen=True)
class SequenceOptions:
    """How the samples of a dataset become sequences.

    Attributes:
        seq_len: T, tokens per sequence.
        tokenizer: fingerprint of the recipe's tokenizer, which token shards must match.
        text_column: MDS column to tokenize; None: read column `tokens` or, without it, tokenize
            column `text`.
        eos_id: token that ends a document in MDS tokens. Without it and `bos_id` a sequence is one
            document.
        bos_id: token that begins a document in MDS tokens.
        apart: whether documents are separated; otherwise a sequence is one document.
        dtype: integer type of an MDS column of bytes.
    """

    seq_len: int
    tokenizer: str
    text_column: str | None = None
    eos_id: int | None = None
    bos_id: int | None = None
    apart: bool = True
    dtype: str = "int64"


def open_source(
    name: str, key: str, folder: ShardFolder, index: Index, reading: SequenceOptions
) -> TokenSource | MDSTokens | MDSTexts:
    """Open a folder of shards as a source of sequences or of texts.

    Args:
        name: name of the stream.
        key: recipe key of the stream, for error messages.
        folder: folder of the shards, local or remote.
        index: index of the folder.
        reading: how samples become sequences.
    """
    folder.claim(index)
    if isinstance(index, StreamIndex):
        return _open_tokens(name, key, folder, index, reading)
    if not index.sizes.sum():
        raise UserError(f"{key}: its {INDEX} lists no samples; name a folder that has some")
    column = _column(key, index, reading.text_column)
    encodings = {c.encodings[c.position[column]] for c in index.column_sets}
    if reading.text_column is None and column == TOKENS:
        _check(key, column, encodings, "arrays of integers or bytes", _is_ids)
        return MDSTokens(name, folder, index, column, reading)
    _check(key, column, encodings, "str", lambda encoding: encoding == "str")
    return MDSTexts(name, folder, index, column)


def _open_tokens(
    name: str, key: str, folder: ShardFolder, index: StreamIndex, reading: SequenceOptions
) -> TokenSource:
    if index.tokenizer != reading.tokenizer:
        raise UserError(
            f"{key}: its tokens were made with another tokenizer than this recipe's; write"
            " tokenizer=huggingface tokenizer.path=FOLDER, the folder `tokenizer` that"
            " prepare_data.py wrote beside them, or prepare the text again"
        )
    if reading.text_column is not None:
        raise UserError(f"{key}.text_column: has no effect on token shards; remove it")
    dataset = TokenDataset(folder, index)
    return TokenSource(name, dataset, reading.seq_len, folder, apart=reading.apart)


def check_length(source: TokenSource, key: str, seq_len: int) -> None:
    """Raise a `UserError` if a stream is shorter than one sequence."""
    n_tokens = source.dataset.n_tokens
    if not source.n_rows:
        raise UserError(
            f"max_seq_len: the training text of {key} has {n_tokens:,} tokens, too few for a row of"
            f" {seq_len:,}; write {max(1, n_tokens - 1):,} or less, or add text"
        )


def _column(key: str, index: MDSIndex, text_column: str | None) -> str:
    """Return the name of the column to train on, which every shard must have."""
    shared = set.intersection(*({*c.names} for c in index.column_sets))
    for name in [TOKENS, TEXT] if text_column is None else [text_column]:
        if name in shared:
            return name
    missing = f"columns {TOKENS} or {TEXT}" if text_column is None else f"column {text_column!r}"
    raise UserError(
        f"{key}.text_column: its shards have no {missing}; they have {', '.join(sorted(shared))}"
    )


def _check(key: str, column: str, encodings: set[str], wanted: str, fits: Any) -> None:
    for encoding in sorted(encodings):
        if not fits(encoding):
            raise UserError(
                f"{key}: its column {column!r} is encoded as {encoding}, not as {wanted};"
                f" write {key}.text_column for a column of text, or prepare the data again"
            )


def _is_ids(encoding: str) -> bool:
    dtype = encoding.removeprefix("ndarray").removeprefix(":").partition(":")[0]
    return encoding == "bytes" or (encoding.startswith("ndarray") and "float" not in dtype)


class TokenSource:
    """Consecutive sequences of a token stream: sequence r is the ids r * T … r * T + T.

    Attributes:
        dataset: the token stream.
        tokens_left_out: number of tokens after the last full sequence.
    """

    def __init__(
        self,
        name: str,
        dataset: TokenDataset,
        seq_len: int,
        folder: ShardFolder | None = None,
        *,
        apart: bool = True,
    ) -> None:
        """Split a token stream into sequences.

        Args:
            name: name of the stream.
            dataset: the token stream.
            seq_len: T, tokens per sequence.
            folder: folder to prefetch the shards from; None: no prefetch.
            apart: whether documents are separated; otherwise a sequence is one document.
        """
        self.name, self.dataset = name, dataset
        self._seq_len, self._folder, self._apart = seq_len, folder, apart
        self.sizes = dataset.row_sizes(seq_len)
        self.n_rows = int(self.sizes.sum())
        self.fingerprint = dataset.fingerprint
        self.tokens_left_out = max(0, dataset.n_tokens - 1 - self.n_rows * seq_len)
        self._specs = dataset.specs()
        self._ends: list[int] = np.cumsum(self.sizes).tolist()
        self._recent_shards: dict[int, None] = {}  # read since the last prefetch

    def row(self, row: int) -> TrainingSequence:
        """Return sequence number `row`."""
        self._recent_shards[bisect_right(self._ends, row)] = None
        return TrainingSequence(*self.dataset.row(row, self._seq_len, apart=self._apart))

    def where(self, row: int) -> str:
        """Return the file of a sequence and its number in the file, for error messages."""
        shard = bisect_right(self._ends, row)
        first = self._ends[shard] - int(self.sizes[shard])
        return f"{self._specs[shard].name}, row {row - first:,}"

    def prefetch(self, shards: Iterator[int]) -> None:
        """Start to fetch these shards in this order, except shards that were just read."""
        if self._folder is None:
            return
        recent, self._recent_shards = self._recent_shards, {}
        self._folder.prefetch(self._specs[shard] for shard in shards if shard not in recent)

    def close(self) -> None:
        """Close the open shards. A later read opens them again."""
        self.dataset.close()
        if self._folder is not None:
            self._folder.close()


def tokens_left_out(streams: Iterable[Stream]) -> int:
    """Return the tokens per epoch after the last full sequence of each token stream, in all."""
    sources = (s.source for s in streams if isinstance(s, OrderedStream))
    return sum(getattr(source, "tokens_left_out", 0) for source in sources)


class MDSColumn:
    """One column of an MDS dataset. Subclasses convert its values to sequences or texts.

    Attributes:
        folder: folder of the shards.
        index: index of the shards.
        column: name of the column.
        n_bytes: total size of the uncompressed shards.
    """

    def __init__(self, name: str, folder: ShardFolder, index: MDSIndex, column: str) -> None:
        self.name, self.index, self.folder, self.column = name, index, folder, column
        self.sizes = index.sizes
        self.n_rows = int(self.sizes.sum())
        self.fingerprint = index.fingerprint
        self.n_bytes = int(index.raw_bytes.sum())
        self._begins: list[int] = [0, *np.cumsum(index.sizes).tolist()]
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()  # least recently used first

    def read(self, row: int) -> Any:
        """Return the value of sample number `row`. Bytes and arrays are views of the file."""
        n, place = self.place(row)
        shard = self._open.get(n) or self._map(n)
        self._open.move_to_end(n)
        return shard.read(place)

    def place(self, row: int) -> tuple[int, int]:
        """Return the shard number of a sample, and the sample's number in that shard."""
        shard = bisect_right(self._begins, row) - 1
        return shard, row - self._begins[shard]

    def where(self, row: int) -> str:
        """Return the file of a sample and its number in the file, for error messages."""
        shard, place = self.place(row)
        return f"{self.index.names[shard]}, sample {place:,}"

    def prefetch(self, shards: Iterator[int]) -> None:
        """Start to fetch these shards in this order, except open shards."""
        unopened = (shard for shard in shards if shard not in self._open)
        self.folder.prefetch(self.index.spec(shard) for shard in unopened)

    def close(self) -> None:
        """Close the open shards. A later read opens them again."""
        while self._open:
            self._open.popitem()[1].pins.close()
        self.folder.close()

    @property
    def is_here(self) -> bool:
        """Whether the shards are local files that are read without a copy or decompression."""
        return self.folder.is_in_place and not self.index.is_packed

    def first_byte(self, shard: int) -> int:
        """Return the byte offset of the first sample of a shard in its file."""
        with self.folder.pin(self.index.spec(shard)) as path:
            return MDSShard(path, self.index, shard).first_byte

    def _map(self, n: int) -> _OpenShard:
        with ExitStack() as stack:
            path = stack.enter_context(self.folder.pin(self.index.spec(n)))
            read = MDSShard(path, self.index, n).reader(self.column)
            shard = self._open[n] = _OpenShard(read, stack.pop_all())
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)[1].pins.close()
        return shard

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}


@dataclass(frozen=True)
class _OpenShard:
    """A memory-mapped shard, pinned in the local cache until `pins` is closed."""

    read: Callable[[int], Any]
    pins: ExitStack


class MDSTokens(MDSColumn):
    """Sequences from a column of token ids: each sample is one, truncated or padded to T tokens.

    Attributes:
        dtype_of_bytes: integer type of the ids in a column of bytes; None for a column of arrays.
    """

    def __init__(
        self, name: str, folder: ShardFolder, index: MDSIndex, column: str, reading: SequenceOptions
    ) -> None:
        super().__init__(name, folder, index, column)
        self._seq_len = reading.seq_len
        assert reading.eos_id is None or reading.bos_id is None
        mark = reading.eos_id if reading.bos_id is None else reading.bos_id
        self._mark = mark if reading.apart else None  # None: a sequence is one document
        self._after = 1 if reading.bos_id is None else 0  # a new document begins after eos, at bos
        self._dtype = np.dtype(reading.dtype).newbyteorder("<")
        encodings = {c.encodings[c.position[column]] for c in index.column_sets}
        self.dtype_of_bytes = self._dtype if encodings == {"bytes"} else None

    def ids(self, row: int) -> np.ndarray:
        """Return all token ids (n,) of a sample.

        Raises:
            UserError: the value is not an array of integers.
        """
        value = self.read(row)
        if isinstance(value, np.ndarray):
            if value.dtype.kind in "iu":
                return value if value.ndim == 1 else value.reshape(-1)
            raise self._wrong(row, f"holds {value.dtype}; ids are whole numbers")
        if len(value) % self._dtype.itemsize:
            raise self._wrong(
                row, f"holds {len(value)} bytes, not a whole number of {self._dtype.name};"
                " write data.token_encoding_type as the data were encoded"
            )  # fmt: skip
        return np.frombuffer(value, self._dtype)

    def row(self, row: int) -> TrainingSequence:
        """Return sequence number `row`."""
        return self.cut(row, self._seq_len)

    def cut(self, row: int, seq_len: int) -> TrainingSequence:
        """Return sequence number `row`, truncated to `seq_len` tokens."""
        ids = self.ids(row)
        truncated = ids if len(ids) <= seq_len + 1 else ids[: seq_len + 1]
        dropped = len(ids) - len(truncated)
        if self._mark is None:
            size = min(len(truncated), seq_len)
            return TrainingSequence(truncated, [size] if size else [], dropped)
        return TrainingSequence(truncated, self._lengths(truncated[:seq_len]), dropped)

    def _lengths(self, ids: np.ndarray) -> list[int]:
        """Return the lengths of the documents in a sequence, which their marks separate."""
        marks = (ids == self._mark).nonzero()[0]
        borders = [0, *(marks + self._after).tolist(), len(ids)]
        return [after - before for before, after in pairwise(borders) if after > before]

    def _wrong(self, row: int, what: str) -> UserError:
        return UserError(f"{self.where(row)}: column {self.column} {what}")


class MDSTexts(MDSColumn):
    """Documents from a column of texts."""

    def text(self, row: int) -> str:
        """Return document number `row`."""
        return self.read(row)
