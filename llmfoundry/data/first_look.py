"""A first look at MDS rows of ids: their integers, what `max_seq_len` cuts, bytes of a token.

`builders/data.py` asks once, on one process, before training. An index gives the lengths of rows
only where its arrays have a fixed shape. Elsewhere rows are read: all of a small data set that is
on this machine, else those of the shard that training begins with. If these are equally long, the
shards' sizes show whether all others are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmfoundry.data.mds.codecs import encoded_size
from llmfoundry.data.sources import MDSTokens
from llmfoundry.errors import UserError

_MOST_ROWS = 20_000  # whose lengths are looked at
_DECODED = 256  # rows of a shard that say of which type the ids are, and their bytes
_FEWEST_IDS = 16  # that show a type


@dataclass(frozen=True)
class CutRows:
    """Rows longer than a sequence.

    Attributes:
        rows: how many are longer.
        tokens: that are cut off them.
        longest: tokens of the longest.
        of_rows, of_tokens: among how many.
        is_exact: whether this is all of an epoch; otherwise only these rows were looked at.
    """

    rows: int
    tokens: int
    longest: int
    of_rows: int
    of_tokens: int
    is_exact: bool

    def line(self, key: str, seq_len: int) -> str:
        """For the user."""
        seen = "" if self.is_exact else f" of the {self.of_rows:,} rows looked at"
        return (
            f"{key}: {self.tokens:,} of {self.of_tokens:,} tokens{seen} are cut off, because"
            f" {self.rows:,} of {self.of_rows:,} rows are longer than max_seq_len: {seq_len:,}"
            f" (up to {self.longest:,} tokens); write max_seq_len={self.longest}, or prepare the"
            f" text again in rows of {seq_len:,}"
        )


@dataclass(frozen=True)
class FirstLook:
    """What rows of ids are.

    Attributes:
        bytes_per_token: UTF-8 bytes of text that a token stands for; an estimate.
        cut: what does not fit a sequence; None: everything fits.
    """

    bytes_per_token: float
    cut: CutRows | None


def look_at(
    source: MDSTokens, shard: int, token_bytes: np.ndarray, *, key: str, seq_len: int
) -> FirstLook:
    """Read some rows.

    Args:
        source: of the rows.
        shard: the one that is needed first.
        token_bytes: (vocabulary,) bytes of each token of the tokenizer.
        key: of the stream, for messages.
        seq_len: T, tokens of a sequence.

    Raises:
        UserError: the ids are integers of another type than data.token_encoding_type.
    """
    begin, size = int(source.sizes[:shard].sum()), int(source.sizes[shard])
    some = np.linspace(begin, begin + size - 1, min(size, _DECODED)).astype(np.int64)
    rows = [source.ids(row) for row in np.unique(some).tolist()]
    _check_type(source, rows, len(token_bytes), key)
    ids = np.concatenate(rows)
    known = ids[(ids >= 0) & (ids < len(token_bytes))]  # the loader refuses others, with place
    ratio = max(1, int(token_bytes[known].sum())) / max(1, len(ids))
    found = FirstLook(ratio, _cut_rows(source, shard, seq_len))
    source.close()
    return found


def _check_type(source: MDSTokens, rows: Sequence[np.ndarray], vocab_size: int, key: str) -> None:
    """Refuse bytes of ids of another width.

    Ids read as wider integers than they are lie beyond the vocabulary. Read as narrower ones they
    do not, but then wider ones are ids of the vocabulary, too, which ids of the right width are
    only by chance.
    """
    written = source.dtype_of_bytes
    data = b"".join(ids.tobytes() for ids in rows)
    if written is None or len(data) < _FEWEST_IDS * written.itemsize or not data.strip(b"\0"):
        return
    signs = (written.kind, "i" if written.kind == "u" else "u")
    kinds = [np.dtype(f"<{sign}{width}") for width in (8, 4, 2, 1) for sign in signs]
    sizes = [ids.nbytes for ids in rows]
    fitting = [
        kind
        for kind in kinds
        if not any(size % kind.itemsize for size in sizes)
        and _are_ids(np.frombuffer(data, kind), vocab_size)
    ]
    if fitting and fitting[0] != written:
        raise UserError(
            f"data.token_encoding_type: {key}: its bytes are ids of {fitting[0].name}, not of"
            f" {written.name}; write data.token_encoding_type={fitting[0].name}"
        )


def _are_ids(values: np.ndarray, vocab_size: int) -> bool:
    return bool(values.min() >= 0 and values.max() < vocab_size)


def _cut_rows(source: MDSTokens, shard: int, seq_len: int) -> CutRows | None:
    """What of the rows does not fit: T tokens and the label of the last."""
    lengths, counts, is_exact = _lengths(source, shard)
    over = np.maximum(lengths - (seq_len + 1), 0)
    if not over.any():
        return None
    return CutRows(
        rows=int(counts[over > 0].sum()),
        tokens=int(over @ counts),
        longest=int(lengths.max()),
        of_rows=int(counts.sum()),
        of_tokens=int(lengths @ counts),
        is_exact=is_exact,
    )


def _lengths(source: MDSTokens, shard: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Lengths of rows, how many rows have each, and whether these are all rows."""
    fixed = _fixed_lengths(source)
    if fixed is not None:
        return fixed, source.sizes, True
    begin, size = int(source.sizes[:shard].sum()), int(source.sizes[shard])
    is_all = source.is_here and source.n_rows <= _MOST_ROWS
    rows = range(source.n_rows) if is_all else range(begin, begin + min(size, _MOST_ROWS))
    lengths, counts = np.unique([len(source.ids(row)) for row in rows], return_counts=True)
    if not is_all and len(lengths) == 1 and len(rows) == size and _are_alike(source, shard):
        return lengths, np.array([source.n_rows]), True
    return lengths, counts, is_all


def _fixed_lengths(source: MDSTokens) -> np.ndarray | None:
    """(shards,) tokens of each row of a shard; None where the index does not give them."""
    lengths = []
    for columns in source.index.column_sets:
        encoding = columns.encodings[columns.position[source.column]]
        size = encoded_size(encoding)
        if size is None:
            return None
        lengths.append(size // np.dtype(encoding.split(":")[1]).itemsize)
    return np.array(lengths, np.int64)[source.index.column_set]


def _are_alike(source: MDSTokens, shard: int) -> bool:
    """Whether every file is as long as one whose samples are as long as those of `shard`."""
    sizes, n_bytes = source.index.sizes, source.index.raw_bytes
    first = source.first_byte(shard)
    table = 4 * (sizes + 2)
    sample, rest = divmod(int(n_bytes[shard]) - first, int(sizes[shard]))
    expected = first - table[shard] + table + sizes * sample
    return not rest and bool((n_bytes == expected)[sizes > 0].all())
