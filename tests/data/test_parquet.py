"""Parquet: the rows are pyarrow's own, memory is bounded by bytes, limits are not called damage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmfoundry.data.mds.shard import MDSWriter
from llmfoundry.data.preparation import parquet
from llmfoundry.data.preparation.bad_rows import BadRow
from llmfoundry.data.preparation.columns import ROW
from llmfoundry.data.preparation.corpus import Corpus, Document
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig

MB = 1 << 20


def corpus(file: Path, **settings: Any) -> Corpus:
    return Corpus(DataConfig(name="files", paths=[str(file)], **settings))


@pytest.fixture
def arrow_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[pa.MemoryPool]:
    """A pool that counts what this test takes."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    yield pool
    pa.set_memory_pool(before)


def repeated(value: str, times: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), pa.array([value]))


def test_a_small_file_of_long_texts_takes_no_more_than_a_batch(
    tmp_path: Path, arrow_memory: pa.MemoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_BATCH", 2 * MB)
    table = pa.table({"text": repeated("x" * (MB // 2), 100)})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "a.parquet").stat().st_size < 1000
    documents = list(corpus(tmp_path / "a.parquet"))
    assert [len(document.text) for document in documents] == [MB // 2] * 100
    assert arrow_memory.max_memory() < 10 * MB  # of 50


def test_long_chats_are_read_although_their_text_passes_what_an_array_holds(
    tmp_path: Path,
) -> None:
    """1,024 rows of more than 2 GB are no nested array of pyarrow's."""
    turns = repeated("y" * (22 * MB // 10), 1024)
    messages = pa.StructArray.from_arrays([repeated("user", 1024), turns], ["role", "content"])
    rows = pa.ListArray.from_arrays(pa.array(range(1025), pa.int32()), messages)
    pq.write_table(pa.table({"messages": rows}), tmp_path / "a.parquet", store_schema=False)
    first = next(iter(corpus(tmp_path / "a.parquet", text_column=ROW)))
    (turn,) = json.loads(first.text)["messages"]
    assert turn == {"role": "user", "content": "y" * (22 * MB // 10)}


@pytest.mark.parametrize("batch", [1, 300, 5000, 64 * MB])
@pytest.mark.parametrize("groups", [7, 1000])
def test_rows_are_those_of_pyarrow(
    tmp_path: Path, batch: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_BATCH", batch)
    draw = np.random.default_rng(batch)
    words = ["a", "ä" * 40, "", "x" * 300]
    choices = [draw.integers(0, 4, n % 5).tolist() for n in range(100)]
    texts = pa.map_(pa.string(), pa.string())
    table = pa.table(
        {
            "turns": pa.array([[{"c": words[k], "n": k} for k in row] for row in choices]),
            "pairs": pa.array([[("k", words[n % 4])] * (n % 3) for n in range(100)], texts),
            "a.b": pa.array([None if n % 9 == 0 else words[n % 4] for n in range(100)]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=groups)
    found = list(corpus(tmp_path / "a.parquet", text_column=ROW))
    expected = pq.read_table(tmp_path / "a.parquet").to_pylist(maps_as_pydicts="lossy")
    assert [json.loads(d.text) for d in found] == json.loads(json.dumps(expected))
    assert [d.row for d in found] == list(range(100))
    column = corpus(tmp_path / "a.parquet", text_column="turns:json,a.b:json")
    some = [{name: row[name] for name in ("turns", "a.b")} for row in expected]
    assert [json.loads(document.text) for document in column] == json.loads(json.dumps(some))


def test_a_librarys_limit_is_not_called_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are then read one at a time; a row that cannot be read is reported as that."""
    pq.write_table(pa.table({"text": [f"row {n}" for n in range(50)]}), tmp_path / "a.parquet")
    monkeypatch.setattr(parquet, "_MOST_ROWS", 8)
    limit, real = 2, pq.ParquetFile.iter_batches

    def limited(file: Any, size: int, *args: Any, **settings: Any) -> Iterator[Any]:
        for number, batch in enumerate(real(file, size, *args, **settings)):
            if number == 3 and size >= limit:
                raise pa.ArrowNotImplementedError("Nested data conversions not implemented")
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", limited)
    assert [d.text for d in corpus(tmp_path / "a.parquet")] == [f"row {n}" for n in range(50)]
    limit = 1
    line = r"a\.parquet: pyarrow cannot read it: Nested data conversions not implemented; write its"
    with pytest.raises(UserError, match=line):
        list(corpus(tmp_path / "a.parquet"))


def rows_of(config: DataConfig) -> tuple[list[Document], list[str]]:
    bad = list[str]()
    source = Corpus(config)

    def note(error: BadRow) -> None:
        bad.append(str(error))

    return [d for span in source.spans() for d in source.read(span, on_bad_row=note)], bad


def test_no_kind_of_rows_may_be_longer_than_max_row_size(tmp_path: Path) -> None:
    texts = ["ä" * 400, "ä" * 501, "x" * 1000, "x" * 1001]
    allowed = [texts[0], "", texts[2], ""]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    (tmp_path / "set").mkdir()
    pq.write_table(pa.table({"text": texts}), tmp_path / "set" / "train.parquet")
    with MDSWriter(tmp_path / "mds", columns={"text": "str"}) as writer:
        for text in texts:
            writer.write({"text": text})
    for settings in (
        {"name": "files", "paths": [str(tmp_path / "a.parquet")]},
        {"name": "huggingface", "dataset": str(tmp_path / "set")},
        {"name": "shards", "local": str(tmp_path / "mds")},
    ):
        documents, bad = rows_of(DataConfig(max_row_size="1kb", **settings))
        assert [document.text for document in documents] == allowed, settings
        assert len(bad) == 2 and all(
            "is longer than 1,000 bytes; divide it" in line for line in bad
        )


def test_a_row_that_is_too_long_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"text": ["short", "x" * MB, "short"]})
    pq.write_table(table, tmp_path / "a.parquet")
    monkeypatch.setattr(
        "llmfoundry.data.preparation.parquet.arrow_texts",
        lambda where, first, column, batch, bad: iter([str(batch.nbytes < MB)] * batch.num_rows),
    )
    config = DataConfig(name="files", paths=[str(tmp_path / "a.parquet")], max_row_size="100kb")
    documents, bad = rows_of(config)
    assert [document.text for document in documents] == ["True", "", "True"]
    assert bad == [
        f"{tmp_path}/a.parquet: row 1: is longer than 100,000 bytes; divide it, or write a larger"
        " data.max_row_size"
    ]
