"""Inspection of MDS samples of token ids: integer type, truncated tokens, bytes per token.

Entry point: `inspect_samples`, which `builders/data.py` calls once, on one process, before
training. The index has the lengths of the samples only if its arrays have a fixed shape. Otherwise
samples are read: all samples of a small local data set, else those of the first shard of the
training. If the samples of that shard have the same length, the file sizes of the other shards show
whether all samples have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmfoundry.data.mds.codecs import encoded_size
from llmfoundry.data.sources import MDSTokens
from llmfoundry.errors import UserError

_MOST_ROWS = 20_000  # maximum number of samples whose lengths are read
_DECODED = 256  # samples of a shard that are read for the integer type and the bytes per token
_FEWEST_IDS = 16  # minimum number of ids to infer an integer type from


@dataclass(frozen=True)
class TruncatedSamples:
    """Samples that are longer than a sequence.

    Attributes:
        rows: number of these samples.
        tokens: number of truncated tokens.
        longest: tokens of the longest sample.
        of_rows, of_tokens: number of samples considered, and their tokens.
        is_exact: whether these are all samples of an epoch.
    """

    rows: int
    tokens: int
    longest: int
    of_rows: int
    of_tokens: int
    is_exact: bool

    def line(self, key: str, seq_len: int) -> str:
        """Return a line to log."""
        seen = "" if self.is_exact else f" of the {self.of_rows:,} rows looked at"
        return (
            f"{key}: {self.tokens:,} of {self.of_tokens:,} tokens{seen} are cut off, because"
            f" {self.rows:,} of {self.of_rows:,} rows are longer than max_seq_len: {seq_len:,}"
            f" (up to {self.longest:,} tokens); write max_seq_len={self.longest}, or prepare the"
            f" text again in rows of {seq_len:,}"
        )


@dataclass(frozen=True)
class SampleInspection:
    """Result of the inspection.

    Attributes:
        bytes_per_token: estimated UTF-8 bytes of text per token.
        cut: samples longer than a sequence; None: there are none.
    """

    bytes_per_token: float
    cut: TruncatedSamples | None


def inspect_samples(
    source: MDSTokens, shard: int, token_bytes: np.ndarray, *, key: str, seq_len: int
) -> SampleInspection:
    """Inspect some samples.

    Args:
        source: the samples.
        shard: number of the shard that training reads first.
        token_bytes: (vocab_size,) UTF-8 bytes of each token.
        key: recipe key of the stream, for error messages.
        seq_len: T, tokens per sequence.

    Raises:
        UserError: the ids are integers of another type than data.token_encoding_type.
    """
    begin, size = int(source.sizes[:shard].sum()), int(source.sizes[shard])
    some = np.linspace(begin, begin + size - 1, min(size, _DECODED)).astype(np.int64)
    rows = [source.ids(row) for row in np.unique(some).tolist()]
    _check_type(source, rows, len(token_bytes), key)
    ids = np.concatenate(rows)
    valid = ids[(ids >= 0) & (ids < len(token_bytes))]  # the loader reports invalid ids
    ratio = max(1, int(token_bytes[valid].sum())) / max(1, len(ids))
    result = SampleInspection(ratio, _cut_rows(source, shard, seq_len))
    source.close()
    return result


def _check_type(source: MDSTokens, rows: Sequence[np.ndarray], vocab_size: int, key: str) -> None:
    """Raise a `UserError` if the bytes of the ids have another integer type than the recipe's.

    Ids that are read as too wide integers lie outside the vocabulary. Ids that are read as too
    narrow integers lie inside it, but then wider integers do too, which happens only by chance if
    the width is right. The widest type with valid ids is therefore the right one.
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


def _cut_rows(source: MDSTokens, shard: int, seq_len: int) -> TruncatedSamples | None:
    """Return the samples longer than T tokens and the label of the last one; None without any."""
    lengths, counts, is_exact = _lengths(source, shard)
    over = np.maximum(lengths - (seq_len + 1), 0)
    if not over.any():
        return None
    return TruncatedSamples(
        rows=int(counts[over > 0].sum()),
        tokens=int(over @ counts),
        longest=int(lengths.max()),
        of_rows=int(counts.sum()),
        of_tokens=int(lengths @ counts),
        is_exact=is_exact,
    )


def _lengths(source: MDSTokens, shard: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return lengths of samples, the number of samples of each, and whether these are all."""
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
    """Return the length of the samples in each shard, (shards,); None if the index lacks it."""
    lengths = []
    for columns in source.index.column_sets:
        encoding = columns.encodings[columns.position[source.column]]
        size = encoded_size(encoding)
        if size is None:
            return None
        lengths.append(size // np.dtype(encoding.split(":")[1]).itemsize)
    return np.array(lengths, np.int64)[source.index.column_set]


def _are_alike(source: MDSTokens, shard: int) -> bool:
    """Return whether the size of every file implies the same sample length as in `shard`."""
    sizes, n_bytes = source.index.sizes, source.index.raw_bytes
    first = source.first_byte(shard)
    table = 4 * (sizes + 2)
    sample, rest = divmod(int(n_bytes[shard]) - first, int(sizes[shard]))
    expected = first - table[shard] + table + sizes * sample
    return not rest and bool((n_bytes == expected)[sizes > 0].all())
