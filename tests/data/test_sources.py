"""Sources: each kind against a slow construction of its rows; what is refused, and how."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmfoundry.builders.data import RunData, open_data
from llmfoundry.cli.commands.inspect_data import ALONE
from llmfoundry.data import shard_index
from llmfoundry.data.batch import SequenceBatch
from llmfoundry.data.first_look import inspect_samples
from llmfoundry.data.held_out import (
    Chain,
    MDSDocuments,
    MDSRows,
    TokenShards,
    validation_batches,
)
from llmfoundry.data.mds.index import MDSIndex
from llmfoundry.data.mds.shard import MDSWriter
from llmfoundry.data.shard_cache.shard_folder import FetchOptions, FileSpec, ShardFolder
from llmfoundry.data.shard_index import read_index
from llmfoundry.data.sources import MDSTokens, SequenceOptions, TokenSource, open_source
from llmfoundry.data.token_shards import StreamIndex, TokenWriter
from llmfoundry.errors import UserError
from llmfoundry.files import write_json
from llmfoundry.ops.packed_layout import IGNORE
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.source import StreamConfig
from llmfoundry.recipe.train import TrainRecipe
from tests.shards import bytes_tokenizer, texts, write_mds, write_tokens

T = 16
EOS = 256
TOKENIZER = bytes_tokenizer()


def opened(folder: Path, **reading: Any) -> Any:
    shards = ShardFolder.open(None, str(folder), FetchOptions())
    how = replace(SequenceOptions(T, TOKENIZER.fingerprint, eos_id=EOS), **reading)
    return open_source("data", "data", shards, read_index(shards), how)


def write(folder: Path, encoding: str, samples: list[Any], column: str = "tokens") -> Path:
    with MDSWriter(folder, columns={column: encoding}, size_limit=700) as writer:
        for sample in samples:
            writer.write({column: sample})
    return folder


def samples(dtype: str) -> list[np.ndarray]:
    """Shorter than a row, as long, one longer, and much longer; documents end anywhere."""
    draw = np.random.default_rng(5)
    lengths = [1, 2, T - 1, T, T + 1, T + 2, 3 * T, 7, T]
    found = [draw.integers(1, 100, n).astype(dtype) for n in lengths]
    for ids in found:
        ids[draw.random(len(ids)) < 0.2] = 0
    return found


def slow(ids: list[int], *, eos: int | None = None, bos: int | None = None) -> dict[str, Any]:
    """Token by token: what a row of T must be."""
    tokens, labels, documents, number = [], [], [], 0
    for place in range(T):
        if place and place == len(ids):
            number += 1  # padding is a document of its own
        elif 0 < place < len(ids) and (ids[place - 1] == eos or ids[place] == bos):
            number += 1
        tokens.append(ids[place] if place < len(ids) else EOS)
        labels.append(ids[place + 1] if place + 1 < len(ids) else IGNORE)
        documents.append(number)
    return {"tokens": tokens, "labels": labels, "documents": documents}


@pytest.mark.parametrize("marks", [{"eos": 0}, {"bos": 0}, {}])
@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [("ndarray:int32", "int32"), ("ndarray", "uint16"), ("bytes", "int64"), ("bytes", "uint16")],
)
def test_rows_of_an_mds_column(
    tmp_path: Path, encoding: str, dtype: str, marks: dict[str, int]
) -> None:
    given = samples(dtype)
    write(tmp_path, encoding, [s.tobytes() if encoding == "bytes" else s for s in given])
    source = opened(tmp_path, eos_id=marks.get("eos"), bos_id=marks.get("bos"), dtype=dtype)
    assert source.n_rows == len(given) and source.sizes.sum() == len(given)
    filled = SequenceBatch.fill([source.row(n) for n in range(len(given))], T, EOS)
    batch = filled.batch(with_layout=True)
    assert batch.layout is not None
    for n, sample in enumerate(given):
        expected = slow(sample.tolist(), **marks)
        assert batch.tokens[n].tolist() == expected["tokens"]
        assert batch.labels[n].tolist() == expected["labels"]
        assert batch.layout.documents[n].tolist() == expected["documents"]
    assert filled.dropped == sum(max(0, len(s) - T - 1) for s in given)
    assert filled.padded == [max(0, T - len(s)) for s in given]
    narrow = filled.narrow().batch(with_layout=False)
    assert torch.equal(narrow.tokens, batch.tokens) and torch.equal(narrow.labels, batch.labels)


VOCABULARY = 128_256
ALIKE = [3 * T] * 40
MIXED = [1, 2, T - 1, T, T + 1, T + 2, 3 * T, 7, T] * 5


@pytest.mark.parametrize(
    ("lengths", "encoding", "where", "is_exact"),
    [
        (ALIKE, f"ndarray:int32:{3 * T}", "remote", True),  # the index has their lengths
        (ALIKE, "ndarray:int32", "remote", True),  # one shard and the sizes of the others
        (ALIKE, "bytes", "remote", True),
        (MIXED, "ndarray", "here", True),  # all are read
        (MIXED, "bytes", "remote", False),
        ([T + 1] * 30, "bytes", "remote", True),  # each has its label, nothing is cut
    ],
)
def test_what_the_rows_lose_is_known_before_training(
    tmp_path: Path, lengths: list[int], encoding: str, where: str, is_exact: bool
) -> None:
    rows = [np.full(n, 7, np.int32) for n in lengths]
    write(tmp_path / "data", encoding, [r.tobytes() if encoding == "bytes" else r for r in rows])
    local = None if where == "here" else str(tmp_path / "copies")
    shards = ShardFolder.open(str(tmp_path / "data"), local, FetchOptions())
    how = SequenceOptions(T, TOKENIZER.fingerprint, eos_id=EOS, dtype="int32")
    source = open_source("data", "data", shards, read_index(shards), how)
    assert isinstance(source, MDSTokens) and len(source.sizes) > 2
    shard = 1
    cut = inspect_samples(source, shard, TOKENIZER.token_bytes(), key="data", seq_len=T).cut
    begin, size = source.sizes[:shard].sum(), source.sizes[shard]
    known = lengths if is_exact else lengths[begin : begin + size]
    assert sum(source.row(n).dropped for n in range(source.n_rows)) == sum(
        max(0, n - T - 1) for n in lengths
    )
    if max(lengths) == T + 1:
        assert cut is None
        return
    assert cut is not None
    assert cut.tokens == sum(max(0, n - T - 1) for n in known)
    assert cut.rows == sum(n > T + 1 for n in known) and cut.longest == max(known)
    assert (cut.of_rows, cut.of_tokens, cut.is_exact) == (len(known), sum(known), is_exact)


@pytest.mark.parametrize("written", ["int64", "int32", "uint32", "uint16", "int16"])
@pytest.mark.parametrize("read", ["int64", "int32", "uint32", "uint16", "int16", "uint8"])
def test_bytes_of_integers_of_another_width_are_refused(
    tmp_path: Path, written: str, read: str
) -> None:
    draw = np.random.default_rng(3)
    most = min(VOCABULARY, np.iinfo(written).max)
    rows = [draw.integers(0, most, 64).astype(written) for _ in range(20)]
    write(tmp_path, "bytes", [row.tobytes() for row in rows])
    source = opened(tmp_path, dtype=read)

    def look() -> None:
        inspect_samples(source, 0, np.ones(VOCABULARY, np.int64), key="data", seq_len=T)

    if np.array_equal(np.concatenate(rows), np.concatenate(rows).view(read)):
        look()
        return
    right = f"u?int{8 * np.dtype(written).itemsize}"
    line = rf"^data.token_encoding_type: data: .*; write data.token_encoding_type={right}$"
    with pytest.raises(UserError, match=line):
        look()


def test_bytes_that_show_no_width_are_read_as_asked(tmp_path: Path) -> None:
    for number, row in enumerate(([0] * 64, [5, 0, 5, 0])):
        write(tmp_path / str(number), "bytes", [np.array(row, np.uint16).tobytes()])
        source = opened(tmp_path / str(number), dtype="uint16")
        assert inspect_samples(
            source, 0, TOKENIZER.token_bytes(), key="data", seq_len=T
        ).bytes_per_token


def test_rows_of_token_shards(tmp_path: Path) -> None:
    ids = write_tokens(tmp_path, "web", documents=30)
    source = opened(tmp_path)
    assert isinstance(source, TokenSource)
    assert source.n_rows == (len(ids) - 1) // T == source.sizes.sum()
    assert len(source.sizes) > 2
    for row in range(source.n_rows):
        found = source.row(row)
        part = ids[row * T : row * T + T + 1]
        assert found.ids.tolist() == part and found.dropped == 0
        begins = [0, *(n for n in range(1, T) if part[n] == EOS), T]
        assert found.lengths == np.diff(begins).tolist()
    assert source.where(0).endswith("row 0")


def test_a_row_is_named_by_its_shard(tmp_path: Path) -> None:
    write(tmp_path, "ndarray:int32", samples("int32"))
    source = opened(tmp_path)
    seen = [source.where(n) for n in range(source.n_rows)]
    assert len(set(seen)) == len(seen)
    first = int(source.sizes[0])
    assert seen[0] == "shard.00000.mds, sample 0"
    assert seen[first] == "shard.00001.mds, sample 0"


def test_many_shards_are_read_with_few_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [np.full(100, n, np.int32) for n in range(20)]
    write(tmp_path, "ndarray:int32", given)
    monkeypatch.setattr("llmfoundry.data.sources._OPEN_SHARDS", 2)
    source = opened(tmp_path)
    order = np.random.default_rng(0).permutation(20).tolist()
    rows = {n: source.row(n).ids for n in [*order, *order]}
    assert all(rows[n][0] == n for n in order)  # views outlive their shard
    source.close()
    assert source.row(3).ids[0] == 3


@pytest.mark.parametrize(
    ("encoding", "sample", "reading", "message"),
    [
        ("ndarray:float32", np.ones(3, np.float32), {}, r"^data: its column 'tokens' is encoded"),
        ("str", "abc", {}, r"^data: its column 'tokens' is encoded as str"),
        ("bytes", b"abc", {}, r"sample 0: column tokens holds 3 bytes, not a whole number of int"),
        ("bytes", b"12345678", {"text_column": "tokens"}, r"^data: its column 'tokens' is encoded"),
        ("str", "abc", {"text_column": "body"}, r"^data\.text_column: its shards have no column"),
    ],
)
def test_columns_that_cannot_be_read(
    tmp_path: Path, encoding: str, sample: Any, reading: dict[str, Any], message: str
) -> None:
    write(tmp_path, encoding, [sample])
    with pytest.raises(UserError, match=message):
        opened(tmp_path, **reading).row(0)


def test_shards_without_a_known_column_name_theirs(tmp_path: Path) -> None:
    write(tmp_path, "str", ["abc"], column="body")
    with pytest.raises(UserError, match=r"text_column: its shards have no .*; they have body"):
        opened(tmp_path)
    assert opened(tmp_path, text_column="body").text(0) == "abc"


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path, "web")
    with pytest.raises(UserError, match=r"^data: its tokens were made with another tokenizer"):
        opened(tmp_path, tokenizer="other")


def test_a_folder_without_an_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"index\.json"):
        opened(tmp_path)


def held_out_ids(held_out: Any) -> list[list[int]]:
    rows = range(held_out.n_rows(T, partial=True))
    return [held_out.row(n, T)[0].tolist() for n in rows]


def test_held_out_text_of_each_kind(tmp_path: Path) -> None:
    documents = texts("held", 9)
    stream = [i for text in documents for i in [EOS, *TOKENIZER.encode(text)]]
    expected = [stream[n : n + T + 1] for n in range(0, len(stream) - 1, T)]

    folder = write(tmp_path / "text", "str", documents, column="text")
    of_texts = MDSDocuments(opened(folder), TOKENIZER)
    assert held_out_ids(of_texts) == expected
    assert of_texts.texts() == documents

    assert write_tokens(tmp_path / "shards", "held", documents=9) == stream
    of_shards = TokenShards(opened(tmp_path / "shards").dataset, TOKENIZER)
    assert held_out_ids(of_shards) == expected
    assert of_shards.texts() == documents
    assert of_shards.n_bytes == sum(len(text.encode()) for text in documents)

    ids = [np.array(TOKENIZER.encode(text), np.int32) for text in documents]
    source = opened(write(tmp_path / "rows", "ndarray:int32", ids))
    assert isinstance(source, MDSTokens)
    of_rows = MDSRows(source, TOKENIZER)
    assert held_out_ids(of_rows) == [sample[: T + 1].tolist() for sample in ids]
    assert of_rows.texts() == documents

    chain = Chain([of_texts, of_rows])
    assert held_out_ids(chain) == held_out_ids(of_texts) + held_out_ids(of_rows)
    assert chain.texts() == documents * 2


def run_data(folder: Path, **data: Any) -> RunData:
    config = DataConfig(name="shards", cache_folder=str(folder / "cache"), **data)
    recipe = TrainRecipe(max_seq_len=T, global_train_batch_size=2, data=config)
    return open_data(recipe, TOKENIZER, ALONE)


def test_an_index_without_samples_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"shards": [], "version": 2}')
    with pytest.raises(UserError, match=r"^data: its index\.json lists no samples; name a folder"):
        run_data(tmp_path, local=str(tmp_path))


@pytest.mark.parametrize("kind", ["mds", "tokens"])
def test_a_damaged_index_is_named_with_its_folder_and_stream(tmp_path: Path, kind: str) -> None:
    for name in ("web", "code"):
        (write_mds if kind == "mds" else write_tokens)(tmp_path / name, name)
    index = tmp_path / "code" / "index.json"
    index.write_bytes(index.read_bytes()[:-30])
    streams = {
        name: StreamConfig(name="shards", local=str(tmp_path / name)) for name in ("web", "code")
    }
    config = DataConfig(name="mixture", streams=streams)
    recipe = TrainRecipe(max_seq_len=T, global_train_batch_size=2, data=config)
    with pytest.raises(UserError, match=rf"^data\.streams\.code: {index}: "):
        open_data(recipe, TOKENIZER, ALONE)
    validation = StreamConfig(name="shards", local=str(tmp_path / "code"))
    with pytest.raises(UserError, match=rf"^data\.validation: {index}: "):
        run_data(tmp_path, local=str(tmp_path / "web"), validation=validation)


def test_held_out_shards_shorter_than_a_row_are_measured_whole(tmp_path: Path) -> None:
    write_tokens(tmp_path / "web", "web")
    ids = write_tokens(tmp_path / "short", "a", documents=1)[: T - 3]
    write_short(tmp_path / "held", ids)
    validation = StreamConfig(name="shards", local=str(tmp_path / "held"))
    data = run_data(tmp_path, local=str(tmp_path / "web"), validation=validation)
    (batch,) = validation_batches(data.validation, seq_len=T, batch_size=2, eos_id=EOS)
    assert batch.labels[batch.labels != IGNORE].tolist() == ids[1:]
    with pytest.raises(UserError, match=r"^max_seq_len: the training text of data has 13 tokens"):
        run_data(tmp_path, local=str(tmp_path / "held"))
    write_short(tmp_path / "none", ids[:1])
    validation = StreamConfig(name="shards", local=str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"^data\.validation: its text has no token to predict"):
        run_data(tmp_path, local=str(tmp_path / "web"), validation=validation)


@pytest.mark.parametrize("kind", ["local", "remote"])
@pytest.mark.parametrize(("there", "asked"), [("validation", "val"), ("val", "validation")])
def test_both_names_of_the_held_out_folder_are_read(
    tmp_path: Path, kind: str, there: str, asked: str
) -> None:
    """`scripts/prepare_data.py` writes validation, LLM Foundry's data_prep val."""
    write_short(tmp_path / "out/train", [7] * (3 * T + 1))
    write_short(tmp_path / "out" / there, [8] * (T + 1))
    place = {kind: str(tmp_path / "out")}
    validation = StreamConfig(name="shards", split=asked, **place)
    data = run_data(tmp_path, split="train", validation=validation, **place)
    assert data.validation.row(0, T)[0].tolist() == [8] * (T + 1)
    shutil.rmtree(tmp_path / "out" / there)
    with pytest.raises(UserError, match=rf"^data\.validation: \S+/{asked}/index\.json: "):
        run_data(tmp_path, split="train", validation=validation, **place)


def write_short(folder: Path, ids: list[int]) -> None:
    with TokenWriter(folder, "part-00000", np.dtype("<u2"), 1024, ()) as writer:
        writer.add(ids, n_bytes=len(ids), starts_document=True)
    index = StreamIndex("<u2", EOS, TOKENIZER.fingerprint, tuple(writer.shards))
    write_json(folder / "index.json", index.to_dict())


@pytest.mark.timeout(20)
@pytest.mark.parametrize("local", [None, "copies"])
@pytest.mark.parametrize("name", ["index.json", "shard.00000.mds"])
def test_a_pipe_among_shards_is_refused(tmp_path: Path, name: str, local: str | None) -> None:
    write_mds(tmp_path / "set", "web")
    (tmp_path / "set" / name).unlink()
    os.mkfifo(tmp_path / "set" / name)
    copies = {} if local is None else {"local": str(tmp_path / local)}
    with pytest.raises(UserError, match=rf"{name}: .*not a file"):
        run_data(tmp_path, remote=str(tmp_path / "set"), shuffle=False, **copies)


def test_an_index_of_neither_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "rows": []}))
    with pytest.raises(UserError, match=r"index\.json: "):
        opened(tmp_path)


def test_what_comes_is_fetched_ahead_and_what_is_open_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes: list[list[str]] = []

    def prefetch(self: ShardFolder, specs: Iterator[FileSpec]) -> None:
        wishes.append([spec.name for spec in islice(specs, 3)])

    monkeypatch.setattr(ShardFolder, "prefetch", prefetch)
    write(tmp_path / "mds", "ndarray:int32", [np.zeros(100, np.int32)] * 6)
    write_tokens(tmp_path / "tokens", "web")
    for kind in ("mds", "tokens"):
        source = opened(tmp_path / kind)
        source.row(0)
        source.prefetch(iter([1, 0, 2, 3]))
        names = [source.where(int(source.sizes[:n].sum())).partition(",")[0] for n in (1, 2, 3)]
        assert wishes.pop() == names


def test_a_large_index_is_kept_in_its_binary_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_index, "_WORTH_KEEPING", 1)
    write_mds(tmp_path / "set", "web")
    folder = ShardFolder.open(None, str(tmp_path / "set"), FetchOptions())
    first = read_index(folder, str(tmp_path / "cache"))
    (kept,) = (tmp_path / "cache/indices").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(MDSIndex, "from_bytes", None)  # it is not read again
        again = read_index(folder, str(tmp_path / "cache"))
    assert again.fingerprint == first.fingerprint and again.spec(1) == first.spec(1)
    kept.write_bytes(kept.read_bytes()[:-40])
    assert read_index(folder, str(tmp_path / "cache")).fingerprint == first.fingerprint
