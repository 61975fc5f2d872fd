"""Sources of training sequences: token shards and MDS shards, opened and put in order.

`builders/data.py` opens the sources of a recipe with `open_source`, and the loader reads them. A
`RowSource` numbers sequences by their position in the data; a `Stream` numbers them by the sample
of the run. A stream is either a source in its order (`OrderedStream`) or text that is packed while
it is read (`text_packing.py`). Token shards are a `TokenSource`. MDS shards are `MDSTokens`
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

from llmfoundry.data.batch import Row
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
_OPEN_SHARDS = 64  # of a process; a block of 2**18 rows of 2,048 tokens is in 33 shards of 64 MiB


class RowSource(Protocol):
    """Rows by their number.

    Attributes:
        name: of the stream.
        n_rows: of an epoch.
        sizes: (shards,) int64, rows that begin in each shard.
        fingerprint: of the rows: a resumed run must find the same.
    """

    name: str
    n_rows: int
    sizes: np.ndarray
    fingerprint: str

    def row(self, row: int) -> Row:
        """Row number `row`, 0 … n_rows - 1."""

    def where(self, row: int) -> str:
        """Its shard and place, for messages."""

    def prefetch(self, shards: Iterator[int]) -> None:
        """Fetch these shards ahead, in this order, in place of those asked for before."""

    def close(self) -> None:
        """Let go of open shards; reading opens them again."""


class Stream(Protocol):
    """Rows by the number of the sample in a run, epoch after epoch.

    Attributes:
        name: in the recipe; data where it is the only one.
    """

    name: str

    @property
    def n_rows(self) -> int:
        """Rows of an epoch."""

    def locate(self, samples: np.ndarray) -> np.ndarray:
        """(n,) int64: the places of samples number `samples` (n,) int64, for `read` and `where`."""

    def read(self, place: int) -> Row:
        """The row at a place."""

    def where(self, place: int) -> str:
        """Its shard and place there, for messages."""

    def prefetch(self, sample: int) -> None:
        """Fetch ahead what this and the following samples need."""

    def state(self) -> dict[str, Any]:
        """What decides which rows the samples are, as JSON."""

    def resume(self, state: dict[str, Any], *, allow_changed: bool) -> None:
        """Go on with the samples that an earlier `state` describes."""

    def close(self) -> None:
        """Let go of open shards; reading opens them again."""


class OrderedStream:
    """A source's rows in their order."""

    def __init__(self, source: RowSource, order: Order) -> None:
        """Read `source` in an order of its rows."""
        self.source, self.name, self.n_rows, self.order = source, source.name, source.n_rows, order

    def locate(self, samples: np.ndarray) -> np.ndarray:
        """(n,) int64: which rows the samples number `samples` (n,) int64 are."""
        return self.order.at(samples)

    def read(self, place: int) -> Row:
        """A row by its number."""
        return self.source.row(place)

    def where(self, place: int) -> str:
        """A row's shard and place there, for messages."""
        return self.source.where(place)

    def prefetch(self, sample: int) -> None:
        """Fetch next what this and the following samples need."""
        self.source.prefetch(self.order.shards(sample))

    def state(self) -> dict[str, Any]:
        """What decides which rows the samples are, as JSON."""
        return {"fingerprint": self.source.fingerprint, **order_state(self.order)}

    def resume(self, state: dict[str, Any], *, allow_changed: bool) -> None:
        """Go on with the samples that an earlier `state` describes."""
        check_fingerprint(self.name, state, self.source.fingerprint, allow_changed=allow_changed)
        check_order(self.order, state)

    def close(self) -> None:
        """Let go of open shards; reading opens them again."""
        self.source.close()


def order_state(order: Order) -> dict[str, Any]:
    """What decides an order beside the rows."""
    return {
        "n_rows": order.n_rows,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "block_size": order.block_size,
    }


def check_order(order: Order, state: dict[str, Any]) -> None:
    """Refuse to continue in another order."""
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
    """Refuse to continue with other data."""
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
class RowOptions:
    """How rows are made of what a dataset holds.

    Attributes:
        seq_len: T, tokens of a row.
        tokenizer: fingerprint of the one that must have made the tokens of token shards.
        text_column: the MDS column to tokenize; None: that of tokens, or else of text.
        eos_id: ends a document in MDS tokens; None, and no `bos_id`: a row is one document.
        bos_id: begins a document in MDS tokens.
        apart: documents are kept apart; otherwise a row is one.
        dtype: of the integers in an MDS column of bytes.
    """

    seq_len: int
    tokenizer: str
    text_column: str | None = None
    eos_id: int | None = None
    bos_id: int | None = None
    apart: bool = True
    dtype: str = "int64"


def open_source(
    name: str, key: str, folder: ShardFolder, index: Index, reading: RowOptions
) -> TokenSource | MDSTokens | MDSTexts:
    """Rows, or texts, of a folder of shards."""
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
    name: str, key: str, folder: ShardFolder, index: StreamIndex, reading: RowOptions
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
    """Refuse a stream of less than a row to train on."""
    n_tokens = source.dataset.n_tokens
    if not source.n_rows:
        raise UserError(
            f"max_seq_len: the training text of {key} has {n_tokens:,} tokens, too few for a row of"
            f" {seq_len:,}; write {max(1, n_tokens - 1):,} or less, or add text"
        )


def _column(key: str, index: MDSIndex, asked: str | None) -> str:
    """The column that every shard has, and that holds what to train on."""
    shared = set.intersection(*({*c.names} for c in index.column_sets))
    for name in [TOKENS, TEXT] if asked is None else [asked]:
        if name in shared:
            return name
    missing = f"columns {TOKENS} or {TEXT}" if asked is None else f"column {asked!r}"
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
    """Rows cut through a token stream: row r is its ids r * T … r * T + T.

    Attributes:
        dataset: what is read.
        tokens_left_out: after the last whole row.
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
        """Without a `folder` its shards are here; not `apart`, a row is one document."""
        self.name, self.dataset = name, dataset
        self._seq_len, self._folder, self._apart = seq_len, folder, apart
        self.sizes = dataset.row_sizes(seq_len)
        self.n_rows = int(self.sizes.sum())
        self.fingerprint = dataset.fingerprint
        self.tokens_left_out = max(0, dataset.n_tokens - 1 - self.n_rows * seq_len)
        self._specs = dataset.specs()
        self._ends: list[int] = np.cumsum(self.sizes).tolist()
        self._lately: dict[int, None] = {}  # shards read since the last prefetch

    def row(self, row: int) -> Row:
        """Row number `row`."""
        self._lately[bisect_right(self._ends, row)] = None
        return Row(*self.dataset.row(row, self._seq_len, apart=self._apart))

    def where(self, row: int) -> str:
        """The file and the row in it, for messages."""
        shard = bisect_right(self._ends, row)
        first = self._ends[shard] - int(self.sizes[shard])
        return f"{self._specs[shard].name}, row {row - first:,}"

    def prefetch(self, shards: Iterator[int]) -> None:
        """Fetch these shards next, in this order, but for those that were just read."""
        if self._folder is None:
            return
        lately, self._lately = self._lately, {}
        self._folder.prefetch(self._specs[shard] for shard in shards if shard not in lately)

    def close(self) -> None:
        """Let go of open shards; reading opens them again."""
        self.dataset.close()
        if self._folder is not None:
            self._folder.close()


def tokens_left_out(streams: Iterable[Stream]) -> int:
    """Tokens of each epoch that are after the last whole row of token streams."""
    sources = (s.source for s in streams if isinstance(s, OrderedStream))
    return sum(s.tokens_left_out for s in sources if isinstance(s, TokenSource))


class MDSColumn:
    """One column of all samples of an MDS dataset: a `RowSource` but for what a sample becomes.

    Attributes:
        index: of its shards.
        column: its name.
        n_bytes: of their files.
    """

    def __init__(self, name: str, folder: ShardFolder, index: MDSIndex, column: str) -> None:
        self.name, self.index, self._folder, self.column = name, index, folder, column
        self.sizes = index.sizes
        self.n_rows = int(self.sizes.sum())
        self.fingerprint = index.fingerprint
        self.n_bytes = int(index.raw_bytes.sum())
        self._begins: list[int] = [0, *np.cumsum(index.sizes).tolist()]
        self._open: OrderedDict[int, _Open] = OrderedDict()  # the least recently read first

    def read(self, row: int) -> Any:
        """The value of sample number `row`; of bytes and arrays a view."""
        n, place = self.place(row)
        shard = self._open.get(n) or self._map(n)
        self._open.move_to_end(n)
        return shard.read(place)

    def place(self, row: int) -> tuple[int, int]:
        """The number of a sample's shard, and its own in it."""
        shard = bisect_right(self._begins, row) - 1
        return shard, row - self._begins[shard]

    def where(self, row: int) -> str:
        """The file and the sample in it, for messages."""
        shard, place = self.place(row)
        return f"{self.index.names[shard]}, sample {place:,}"

    def prefetch(self, shards: Iterator[int]) -> None:
        """Fetch these shards next, in this order, but for those that are open."""
        unopened = (shard for shard in shards if shard not in self._open)
        self._folder.prefetch(self.index.spec(shard) for shard in unopened)

    def close(self) -> None:
        """Let go of open shards; reading opens them again."""
        while self._open:
            self._open.popitem()[1].pins.close()
        self._folder.close()

    @property
    def is_here(self) -> bool:
        """Whether all files are read where they lie on this machine."""
        return self._folder.is_in_place and not self.index.is_packed

    def first_byte(self, shard: int) -> int:
        """Where the first sample of a shard begins in its file."""
        with self._folder.pin(self.index.spec(shard)) as path:
            return MDSShard(path, self.index, shard).first_byte

    def _map(self, n: int) -> _Open:
        with ExitStack() as stack:
            path = stack.enter_context(self._folder.pin(self.index.spec(n)))
            read = MDSShard(path, self.index, n).reader(self.column)
            found = self._open[n] = _Open(read, stack.pop_all())
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)[1].pins.close()
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}


@dataclass(frozen=True)
class _Open:
    read: Callable[[int], Any]
    pins: ExitStack


class MDSTokens(MDSColumn):
    """Rows out of a column of ids: a sample is a row, cut or filled up to its length.

    Attributes:
        dtype_of_bytes: of the integers that a column of bytes holds; None: it holds arrays.
    """

    def __init__(
        self, name: str, folder: ShardFolder, index: MDSIndex, column: str, reading: RowOptions
    ) -> None:
        super().__init__(name, folder, index, column)
        self._seq_len = reading.seq_len
        assert reading.eos_id is None or reading.bos_id is None
        mark = reading.eos_id if reading.bos_id is None else reading.bos_id
        self._mark = mark if reading.apart else None  # None: a row is one document
        self._after = 1 if reading.bos_id is None else 0
        self._dtype = np.dtype(reading.dtype).newbyteorder("<")
        encodings = {c.encodings[c.position[column]] for c in index.column_sets}
        self.dtype_of_bytes = self._dtype if encodings == {"bytes"} else None

    def ids(self, row: int) -> np.ndarray:
        """All ids of a sample."""
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

    def row(self, row: int) -> Row:
        """Row number `row`."""
        return self.cut(row, self._seq_len)

    def cut(self, row: int, seq_len: int) -> Row:
        """Row number `row`, of up to `seq_len` tokens."""
        ids = self.ids(row)
        fitting = ids if len(ids) <= seq_len + 1 else ids[: seq_len + 1]
        if self._mark is None:
            size = min(len(fitting), seq_len)
            return Row(fitting, [size] if size else [], len(ids) - len(fitting))
        return Row(fitting, self._lengths(fitting[:seq_len]), len(ids) - len(fitting))

    def _lengths(self, ids: np.ndarray) -> list[int]:
        marks = (ids == self._mark).nonzero()[0]
        borders = [0, *(marks + self._after).tolist(), len(ids)]
        return [after - before for before, after in pairwise(borders) if after > before]

    def _wrong(self, row: int, what: str) -> UserError:
        return UserError(f"{self.where(row)}: column {self.column} {what}")


class MDSTexts(MDSColumn):
    """Documents out of a column of texts."""

    def text(self, row: int) -> str:
        """Document number `row`."""
        return self.read(row)
