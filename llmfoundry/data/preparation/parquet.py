"""Parquet files: rows read in bounded memory, and how a large file is cut.

A row group is read some rows at a time, as many as become about `_BATCH` bytes. The metadata has
the bytes of a column as it is encoded. What is written once there, in a dictionary, may stand in
every row, so a small file may hold a lot: the longest value of the dictionary bounds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from llmfoundry.data.preparation.columns import arrow_texts, check_columns, read_columns
from llmfoundry.data.preparation.input_files import InputRange
from llmfoundry.errors import UserError, import_optional, one_line

_BATCH = 64 << 20  # bytes of rows in memory at a time, about
_MOST_ROWS = 1024  # read at a time
_SPARSE = 8  # bytes of Arrow that may be one of text, such as those of the number 1


def parquet_rows(source: InputRange, text_column: str) -> Iterator[tuple[int, str]]:
    """Yield (row, text) of the row groups start … stop - 1."""
    with _reading(source), source.open() as opened:
        reader = _RowGroups(opened, read_columns(text_column))
        file = reader.file
        check_columns(source.name, text_column, file.schema_arrow.names)
        groups = range(source.start, file.num_row_groups if source.stop is None else source.stop)
        row = sum(file.metadata.row_group(n).num_rows for n in range(source.start))
        for group in groups:
            for batch in reader.batches(group):
                for text in _texts(source, row, text_column, batch):
                    yield row, text
                    row += 1
            source.seen(source.n_bytes // len(groups))


def _texts(source: InputRange, row: int, text_column: str, batch: Any) -> Iterator[str]:
    """The texts of a batch that begins with number `row`; a row that is too long is not decoded."""
    where, most = f"{source.name}: row", _SPARSE * source.longest
    if batch.nbytes <= most:
        yield from arrow_texts(where, row, text_column, batch, source.on_bad_row)
        return
    for number in range(row, row + batch.num_rows):
        one = batch.slice(number - row, 1)
        if one.nbytes > most:
            source.on_bad_row(source.too_long(f"{where} {number}"))
            yield ""
        else:
            yield from arrow_texts(where, number, text_column, one, source.on_bad_row)


def cut_parquet(source: InputRange, longest: int) -> Iterator[tuple[int, int, int]]:
    """Row groups in runs of at most about `longest` bytes, or one each: first, end, and bytes."""
    with _reading(source), source.open() as opened:
        metadata = _RowGroups(opened, None).file.metadata
        groups = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
    rows = [*accumulate(groups, initial=0)]
    ends = [source.file.size * n // max(1, rows[-1]) for n in rows]
    start = 0
    for stop in range(1, len(ends)):
        if stop == len(groups) or ends[stop + 1] - ends[start] > longest:
            yield start, stop, ends[stop] - ends[start]
            start = stop


@contextmanager
def _reading(source: InputRange) -> Iterator[None]:
    """Turn pyarrow's errors into a UserError: a limit of pyarrow, or a damaged file."""
    pyarrow = import_optional("pyarrow", f"{source.name}:", extra="data")
    import_optional("pyarrow.parquet", f"{source.name}:", extra="data")
    limits = (
        pyarrow.ArrowNotImplementedError,
        pyarrow.ArrowCapacityError,
        pyarrow.ArrowMemoryError,
        MemoryError,
    )
    try:
        yield
    except limits as error:
        raise UserError(
            f"{source.name}: pyarrow cannot read it: {one_line(error)}; write its rows as"
            " .jsonl, or shorter rows"
        ) from error
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        why = one_line(error)
        raise UserError(f"{source.name}: not a complete parquet file: {why}") from error


class _RowGroups:
    """An open file, read a row group at a time.

    Attributes:
        file: pyarrow's `ParquetFile`.
    """

    def __init__(self, opened: Any, columns: list[str] | None) -> None:
        """Read the footer of the file.

        Args:
            opened: seekable file.
            columns: columns to read; None: all.
        """
        import pyarrow.parquet

        self._opened, self._columns = opened, columns
        self.file = pyarrow.parquet.ParquetFile(opened)

    def batches(self, group: int) -> Iterator[Any]:
        """Yield the rows of a group in record batches.

        If a few rows are much longer than the others, a batch may exceed pyarrow's limits. The
        remaining rows of the group are then read one at a time.
        """
        import pyarrow

        n_rows, done = self._rows_at_a_time(group), 0
        try:
            for batch in self._batches(group, n_rows):
                done += batch.num_rows
                yield batch
        except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowCapacityError):
            if n_rows == 1:
                raise
            for number, batch in enumerate(self._batches(group, 1)):
                if number >= done:
                    yield batch

    def _batches(self, group: int, n_rows: int) -> Iterator[Any]:
        yield from self.file.iter_batches(n_rows, [group], self._columns, use_threads=False)

    def _rows_at_a_time(self, group: int) -> int:
        metadata = self.file.metadata.row_group(group)
        chunks = [metadata.column(n) for n in range(metadata.num_columns)]
        chunks = [chunk for chunk in chunks if self._is_read(chunk.path_in_schema)]
        n_rows = max(1, metadata.num_rows)
        encoded = sum(chunk.total_uncompressed_size for chunk in chunks)
        # Text columns whose values a dictionary stores once, so that rows may be much larger in
        # memory than in the file. Columns that cannot exceed a batch are ignored.
        repeating = [
            chunk
            for chunk in chunks
            if chunk.has_dictionary_page
            and chunk.physical_type == "BYTE_ARRAY"
            and chunk.num_values * chunk.total_uncompressed_size > _BATCH
        ]
        values = sum(chunk.num_values for chunk in repeating)
        longest = self._longest_value(group, repeating) if repeating else 0
        row_bytes = (encoded + values * longest) / n_rows
        return max(1, min(_MOST_ROWS, int(_BATCH / max(1.0, row_bytes))))

    def _is_read(self, path: str) -> bool:
        names = self._columns
        return names is None or any(path == name or path.startswith(f"{name}.") for name in names)

    def _longest_value(self, group: int, chunks: list[Any]) -> int:
        """Return the bytes of the longest value in the dictionaries of these columns.

        If the first row lacks a value, return the size of the largest column as an upper bound.
        """
        import pyarrow.compute
        import pyarrow.parquet

        paths = [chunk.path_in_schema for chunk in chunks]
        # Reading one row yields the full dictionary; the row itself holds only an index into it.
        file = pyarrow.parquet.ParquetFile(
            self._opened, metadata=self.file.metadata, read_dictionary=paths
        )
        first_row = next(file.iter_batches(1, [group], self._columns, use_threads=False))
        lengths = []
        for column in first_row.columns:
            for dictionary in _dictionaries(column):
                value_lengths = pyarrow.compute.binary_length(dictionary)
                lengths.append(pyarrow.compute.max(value_lengths).as_py())
        if len(lengths) < len(chunks) or None in lengths:  # the first row has no value
            return int(max(chunk.total_uncompressed_size for chunk in chunks))
        return int(max(lengths))


def _dictionaries(array: Any) -> Iterator[Any]:
    """Yield the dictionaries of a text array, or of all text arrays nested in an array."""
    import pyarrow.types as types

    if types.is_dictionary(array.type):
        if types.is_string(array.type.value_type) or types.is_binary(array.type.value_type):
            yield array.dictionary
    elif types.is_struct(array.type):
        for number in range(array.type.num_fields):
            yield from _dictionaries(array.field(number))
    elif types.is_map(array.type):
        yield from _dictionaries(array.keys)
        yield from _dictionaries(array.items)
    elif types.is_list(array.type) or types.is_large_list(array.type):
        yield from _dictionaries(array.values)
