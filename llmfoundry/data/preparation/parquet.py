"""Parquet files: rows read in bounded memory, and how a large file is cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from llmfoundry.data.preparation.columns import arrow_texts, check_columns, read_columns
from llmfoundry.data.preparation.files import Input
from llmfoundry.errors import UserError, import_optional, one_line


def parquet_rows(source: Input, text_column: str) -> Iterator[tuple[int, str]]:
    """Yield (row, text) of the row groups start … stop - 1."""
    with _parquet_file(source) as file:
        check_columns(source.name, text_column, file.schema_arrow.names)
        columns = read_columns(text_column)
        groups = range(source.start, file.num_row_groups if source.stop is None else source.stop)
        row = sum(file.metadata.row_group(n).num_rows for n in range(source.start))
        for group in groups:
            for batch in file.iter_batches(1024, [group], columns, use_threads=False):
                where = f"{source.name}: row"
                for text in arrow_texts(where, row, text_column, batch, source.on_bad_row):
                    yield row, text
                    row += 1
            source.seen(source.n_bytes // len(groups))


def cut_parquet(source: Input, longest: int) -> Iterator[tuple[int, int, int]]:
    """Row groups in runs of at most about `longest` bytes, or one each: first, end, and bytes."""
    with _parquet_file(source) as file:
        groups = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    rows = [*accumulate(groups, initial=0)]
    ends = [source.file.size * n // max(1, rows[-1]) for n in rows]
    start = 0
    for stop in range(1, len(ends)):
        if stop == len(groups) or ends[stop + 1] - ends[start] > longest:
            yield start, stop, ends[stop] - ends[start]
            start = stop


@contextmanager
def _parquet_file(source: Input) -> Iterator[Any]:
    pyarrow = import_optional("pyarrow", f"{source.name}:", extra="data")
    parquet = import_optional("pyarrow.parquet", f"{source.name}:", extra="data")
    try:
        with source.open() as opened, parquet.ParquetFile(opened) as file:
            yield file
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        why = one_line(error)
        raise UserError(f"{source.name}: not a complete parquet file: {why}") from error
