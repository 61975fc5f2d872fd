"""Preparation and streams: against concatenating the documents in plain Python."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from llmfoundry.data.preparation import write_part
from llmfoundry.data.preparation.corpus import Corpus
from llmfoundry.data.preparation.partition import (
    content_hash,
    make_split,
    tail_start,
    training_sample,
)
from llmfoundry.data.preparation.prepare import PreparedCorpus, prepare_corpus
from llmfoundry.data.preparation.write_part import cuts_at_lines, split_text
from llmfoundry.data.text.bpe import END_OF_TEXT, bytes_backend, train_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig


def write(folder: Path, texts: list[str], *, fraction: float = 0.1) -> DataConfig:
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return DataConfig(
        name="files",
        paths=[str(folder / "rows.jsonl.gz")],
        validation_fraction=fraction,
        cache_folder=str(folder / "cache"),
    )


def documents(n: int = 200) -> list[str]:
    rng = random.Random(0)
    return [f"document {k} " + "wörter\n" * rng.randrange(12) for k in range(n)]


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return Tokenizer(bytes_backend(), END_OF_TEXT)


def sides(texts: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """Training and held-out text, by the rules in words."""
    whole = [text for text in texts if content_hash(text) < fraction * 2**64]
    if len(whole) >= 4:
        return [text for text in texts if text not in whole], whole
    longest = sorted(texts, key=lambda text: (len(text), content_hash(text)))[-4:]
    share = min(0.5, fraction * sum(map(len, texts)) / sum(map(len, longest)))
    starts = {text: tail_start(text, share) for text in longest}
    ends = [text[starts[text] :] for text in texts if text in starts]
    return [text[: starts.get(text)] for text in texts], ends


def stream(texts: list[str], eos: int = 256) -> list[int]:
    return [token for text in texts for token in [eos, *text.encode()]]


@pytest.mark.parametrize("shard_bytes", [1 << 20, 1000, 62, 6])
@pytest.mark.parametrize("seq_len", [1, 16, 100])
def test_rows_are_slices_of_the_concatenated_documents(
    tmp_path: Path, plain: Tokenizer, shard_bytes: int, seq_len: int
) -> None:
    texts = documents(12 if shard_bytes == 6 else 60)
    prepared = prepare_corpus(
        write(tmp_path, texts), plain, progress=False, shard_bytes=shard_bytes
    )
    trained_on, held_out = sides(texts, 0.1)
    for dataset, expected in ((prepared.train, trained_on), (prepared.validation, held_out)):
        tokens = stream(expected)
        starts = [n for n, token in enumerate(tokens) if token == 256]
        assert dataset.n_tokens == len(tokens)
        assert dataset.n_documents == len(expected)
        assert dataset.n_bytes == sum(len(text.encode()) for text in expected)
        n_rows = (len(tokens) - 1) // seq_len
        assert dataset.n_rows(seq_len) == n_rows
        for row in range(n_rows):
            first = row * seq_len
            ids, lengths = dataset.row(row, seq_len)
            assert ids.tolist() == tokens[first : first + seq_len + 1]
            borders = [n for n in starts if first < n < first + seq_len]
            assert np.cumsum([0, *lengths]).tolist() == [
                0, *(n - first for n in borders), seq_len
            ]  # fmt: skip
        dataset.verify()
    assert prepared.validation_texts() == held_out


def test_a_partial_last_row_holds_what_is_left(tmp_path: Path, plain: Tokenizer) -> None:
    validation = prepare_corpus(write(tmp_path, documents()), plain, progress=False).validation
    seq_len = 50
    rows = [validation.row(r, seq_len) for r in range(validation.n_rows(seq_len, partial=True))]
    labels = [token for ids, _ in rows for token in ids[1:].tolist()]
    assert labels == stream(validation.texts())[1:]
    assert all(sum(lengths) == len(ids) - 1 for ids, lengths in rows)
    assert len(rows[-1][0]) <= seq_len


def test_summary_counts_what_was_read_and_dropped(tmp_path: Path, plain: Tokenizer) -> None:
    prepared = prepare_corpus(write(tmp_path, [*documents(), "", " \n"]), plain, progress=False)
    held_out = len(prepared.validation_texts())
    first, second = prepared.summary.splitlines()
    n_bytes = sum(len(text.encode()) for text in documents())
    assert first.startswith(
        f"data: 200 documents, {n_bytes / 1e6:.2f} MB, {n_bytes + 200:,} tokens"
    )
    assert f"held out: {held_out} documents" in first
    assert second == "data: 2 blank documents dropped"


def test_reopening_reads_the_cache_and_changed_text_does_not(
    tmp_path: Path, plain: Tokenizer
) -> None:
    config = write(tmp_path, documents())
    first = prepare_corpus(config, plain, progress=False)
    files = {f: f.stat().st_mtime_ns for f in (tmp_path / "cache/tokens").rglob("*")}
    again = prepare_corpus(config, plain, progress=False)
    assert again.summary == first.summary
    assert again.train.fingerprint == first.train.fingerprint
    assert files == {f: f.stat().st_mtime_ns for f in (tmp_path / "cache/tokens").rglob("*")}
    changed = prepare_corpus(write(tmp_path, documents(201)), plain, progress=False)
    assert changed.train.fingerprint != first.train.fingerprint


def test_fingerprint_names_the_tokens_and_not_their_place(tmp_path: Path, plain: Tokenizer) -> None:
    (tmp_path / "elsewhere").mkdir()
    here = prepare_corpus(write(tmp_path, documents()), plain, progress=False)
    there = prepare_corpus(write(tmp_path / "elsewhere", documents()), plain, progress=False)
    assert here.train.fingerprint == there.train.fingerprint
    assert here.validation.fingerprint == there.validation.fingerprint


@pytest.mark.parametrize("workers", [1, 3])
def test_streams_do_not_depend_on_the_number_of_threads(
    tmp_path: Path, plain: Tokenizer, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_part, "_CHUNK", 100)
    config = write(tmp_path, documents())
    config.num_workers = workers
    prepared = prepare_corpus(config, plain, progress=False)
    bound = int(0.1 * 2**64)
    trained_on = [text for text in documents() if content_hash(text) >= bound]
    ids, _ = prepared.train.row(0, prepared.train.n_tokens - 1)
    assert ids.tolist() == stream(trained_on)


def test_equal_documents_are_on_one_side_and_the_split_never_moves(tmp_path: Path) -> None:
    config = write(tmp_path, documents() * 2, fraction=0.3)
    split = make_split(Corpus(config))
    held_out = {text for text in documents() if split.holds_out(text)}
    assert 0.2 < len(held_out) / 200 < 0.4
    larger = make_split(Corpus(write(tmp_path, [*documents(), "more"], fraction=0.3)))
    assert {text for text in documents() if larger.holds_out(text)} == held_out


@pytest.mark.parametrize("n", [2, 5, 60])
def test_of_few_documents_the_ends_of_the_longest_are_held_out(
    tmp_path: Path, plain: Tokenizer, n: int
) -> None:
    texts = [
        "".join(f"line {i} of document {k}\n" for i in range(40 + 7 * k % 50)) for k in range(n)
    ]
    prepared = prepare_corpus(write(tmp_path, texts, fraction=0.02), plain, progress=False)
    trained_on, held_out = sides(texts, 0.02)
    assert len(held_out) == min(n, 4) and prepared.validation_texts() == held_out
    ids, _ = prepared.train.row(0, prepared.train.n_tokens - 1)
    assert ids.tolist() == stream(trained_on)
    assert 0.018 < sum(map(len, held_out)) / sum(map(len, texts)) < 0.035, "of all the text"
    assert f"data: {n} documents, " in prepared.summary
    assert f"held out: the ends of {len(held_out)} documents" in prepared.summary
    assert f"data: {n} documents are few, so of the longest the last " in prepared.summary
    corpus = Corpus(write(tmp_path, texts, fraction=0.02))
    learned_from = "".join(training_sample(corpus, make_split(corpus), 10**7))
    assert learned_from == "".join(trained_on), "a tokenizer does not see held-out text"


def test_copies_of_few_documents_lose_the_same_end(tmp_path: Path, plain: Tokenizer) -> None:
    texts = [f"{word} one two three\n" * 50 for word in ("first", "second", "first")]
    held_out = prepare_corpus(
        write(tmp_path, texts, fraction=0.1), plain, progress=False
    ).validation_texts()
    assert held_out[0] == held_out[2] and len(held_out) == 3
    assert 0.1 <= sum(map(len, held_out)) / sum(map(len, texts)) < 0.12
    twice = [texts[0]] * 2
    (once, again) = prepare_corpus(
        write(tmp_path, twice, fraction=0.1), plain, progress=False
    ).validation_texts()
    assert once == again and 0.1 <= len(once) / len(texts[0]) < 0.12


@pytest.mark.parametrize("texts", [["x"], ["x", " x"]])
def test_the_only_document_is_trained_on_where_it_has_no_end(
    tmp_path: Path, plain: Tokenizer, texts: list[str]
) -> None:
    prepared = prepare_corpus(write(tmp_path, texts[:1] * len(texts)), plain, progress=False)
    assert prepared.train.n_documents == len(texts) and prepared.validation_texts() == []
    assert "rows.jsonl.gz:1 is the only document, and no end of it could be" in prepared.summary


def test_documents_of_one_character_are_held_out_whole(tmp_path: Path, plain: Tokenizer) -> None:
    texts = ["a", "b", "c", "a"]
    prepared = prepare_corpus(write(tmp_path, texts, fraction=1e-6), plain, progress=False)
    smallest = min(texts, key=content_hash)
    assert set(prepared.validation_texts()) == {smallest}
    assert prepared.train.n_documents == len([text for text in texts if text != smallest])
    assert "no document fell into the held-out 1e-06, so one was taken: " in prepared.summary


@pytest.mark.parametrize("fraction", [0.05, 0.3])
@pytest.mark.parametrize("hash_below_bound", [False, True])
def test_of_the_only_document_the_end_is_held_out(
    tmp_path: Path, plain: Tokenizer, fraction: float, hash_below_bound: bool
) -> None:
    texts = ("\n".join(f"line {n} of {k}" for n in range(300)) + "\n" for k in range(1000))
    below = (text for text in texts if (content_hash(text) < fraction * 2**64) == hash_below_bound)
    text = next(below)
    prepared = prepare_corpus(write(tmp_path, [text], fraction=fraction), plain, progress=False)
    (tail,) = prepared.validation_texts()
    assert text.endswith(tail) and tail.startswith("line ")
    assert fraction <= len(tail) / len(text) < fraction + 0.01
    ids, _ = prepared.train.row(0, prepared.train.n_tokens - 1)
    assert ids.tolist() == stream([text.removesuffix(tail)])
    corpus = Corpus(write(tmp_path, [text], fraction=fraction))
    learned_from = "".join(training_sample(corpus, make_split(corpus), 10**6))
    assert learned_from == text.removesuffix(tail), "a tokenizer does not see held-out text"
    assert f"only document, so its last {fraction:g} was held out" in prepared.summary


def test_the_end_of_a_document_without_lines_begins_at_a_word_or_anywhere() -> None:
    assert tail_start("word " * 100, 0.1) == 450
    assert tail_start("x" * 100, 0.1) == 90
    assert tail_start("only", 0.02) == 3
    assert tail_start("first line\n" + "x" * 100, 0.1) == 100, "not the whole long line"
    for text in ("ab", "  a b  ", "a" + "\n" * 100 + "b\n\n\n", "\n\n\n\n\na\nb"):
        for share in (1e-9, 0.1, 0.5, 0.999):
            start = tail_start(text, share)
            assert text[:start].strip() and text[start:].strip(), (text, share)


def test_no_validation_is_an_empty_stream(tmp_path: Path, plain: Tokenizer) -> None:
    prepared = prepare_corpus(write(tmp_path, ["only"], fraction=0.0), plain, progress=False)
    assert prepared.train.n_documents == 1
    assert prepared.validation.n_tokens == prepared.validation.n_rows(4, partial=True) == 0
    assert prepared.validation_texts() == []


@pytest.mark.parametrize(
    ("texts", "fraction", "line"),
    [
        (["x", "y"], 0.999999, r"holds out every document \(2\)"),
        (["", " "], 0.02, r"data\.paths: holds no text"),
    ],
)
def test_splits_that_leave_nothing_are_errors(
    tmp_path: Path, plain: Tokenizer, texts: list[str], fraction: float, line: str
) -> None:
    with pytest.raises(UserError, match=line):
        prepare_corpus(write(tmp_path, texts, fraction=fraction), plain, progress=False)
    assert list((tmp_path / "cache/tokens").glob("*/")) == []


def test_damaged_caches_are_named(tmp_path: Path, plain: Tokenizer) -> None:
    config = write(tmp_path, documents())

    def again() -> PreparedCorpus:
        return prepare_corpus(config, plain, progress=False, shard_bytes=4096)

    def last_row() -> None:
        train = again().train
        train.row(train.n_rows(8) - 1, 8)

    last_row()
    *_, shard = sorted((tmp_path / "cache/tokens").glob("*/train/part-00000/*.tokens"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    with pytest.raises(UserError, match=rf"{shard.name}: .*100"):
        last_row()
    shard.write_bytes(whole[:99] + bytes([whole[99] ^ 1]) + whole[100:])
    with pytest.raises(UserError, match=rf"{shard.name}: .*sha1"):
        again().train.verify()
    shard.unlink()
    with pytest.raises(UserError, match=shard.name):
        last_row()
    (shard.parents[1] / "index.json").write_text("{")
    with pytest.raises(UserError, match=r"index\.json: is damaged.*; delete it, it will be made"):
        again()
    (shard.parents[2] / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json: is damaged.*; delete"):
        again()


def test_an_interrupted_preparation_leaves_nothing_that_counts(
    tmp_path: Path, plain: Tokenizer
) -> None:
    config = write(tmp_path, documents())
    file = Path(config.paths[0])
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    with pytest.raises(UserError, match=r"rows\.jsonl\.gz: not a complete gzip"):
        prepare_corpus(config, plain, progress=False)
    file.write_bytes(whole)
    prepare_corpus(config, plain, progress=False)
    made = next(path for path in (tmp_path / "cache/tokens").iterdir() if path.is_dir())
    leftover = made.rename(made.with_name(f"{made.name}.tmp.1"))  # what a killed one leaves
    prepare_corpus(config, plain, progress=False)
    assert made.is_dir() and not leftover.exists()


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path, plain: Tokenizer) -> None:
    config = write(tmp_path, documents())
    (tmp_path / "file").write_text("")
    config.cache_folder = str(tmp_path / "file" / "cache")
    with pytest.raises(UserError, match=r"data\.cache_folder: cannot write .*choose another"):
        prepare_corpus(config, plain, progress=False)


def _prepare_elsewhere(config: DataConfig) -> str:
    return prepare_corpus(config, Tokenizer(bytes_backend(), END_OF_TEXT), progress=False).summary


def test_processes_that_prepare_at_once_agree(tmp_path: Path, plain: Tokenizer) -> None:
    config = write(tmp_path, documents())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=context) as pool:
        summaries = list(pool.map(_prepare_elsewhere, [config] * 3))
    assert summaries == [prepare_corpus(config, plain, progress=False).summary] * 3
    assert len([p for p in (tmp_path / "cache/tokens").iterdir() if p.is_dir()]) == 1


def test_long_texts_are_cut_without_changing_the_ids() -> None:
    text = Path(json.decoder.__file__).read_text() + "ä\n\n b\r\nc\n\tx y\n'll 12\n345\n"
    assert "".join(split_text(text, 40)) == text
    assert len(list(split_text(text, 40))) > 5
    tokenizer = Tokenizer(train_backend([text], 600, progress=False), END_OF_TEXT)
    assert cuts_at_lines(tokenizer)
    parts = [token for part in split_text(text, 40) for token in tokenizer.encode(part)]
    assert parts == tokenizer.encode(text)


def test_a_cut_document_is_one_document(
    tmp_path: Path, plain: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_text, "__defaults__", (20,))
    texts = documents(40)
    dataset = prepare_corpus(write(tmp_path, texts, fraction=0.0), plain, progress=False).train
    assert dataset.row(0, dataset.n_tokens - 1)[0].tolist() == stream(texts)
    assert dataset.n_documents == 40


def test_the_training_sample_is_bounded_and_spread(tmp_path: Path) -> None:
    texts = [f"{n:05} " + "x" * 194 for n in range(1000)]
    corpus = Corpus(write(tmp_path, texts, fraction=0.0))
    sample = training_sample(corpus, make_split(corpus), 20_000)
    size = sum(len(piece.encode()) for piece in sample)
    assert 19_700 < size <= 20_000
    assert sample == training_sample(corpus, make_split(corpus), 20_000)
    places = [int(piece[:5]) for piece in sample]
    assert places == sorted(places)
    tenths = np.histogram(places, bins=10, range=(0, 1000))[0]
    assert tenths.min() >= 2 and tenths.max() <= 22  # ten expected in each
    assert "".join(training_sample(corpus, make_split(corpus), 10**6)) == "".join(texts)


def test_large_vocabularies_need_four_bytes(tmp_path: Path, plain: Tokenizer) -> None:
    config = write(tmp_path, documents())
    backend = bytes_backend()
    backend.add_tokens([f"extra{n}" for n in range(1 << 16)])
    wide = prepare_corpus(config, Tokenizer(backend, END_OF_TEXT), progress=False).train
    narrow = prepare_corpus(config, plain, progress=False).train
    assert (narrow.index.dtype, wide.index.dtype) == ("<u2", "<u4")
    assert wide.row(3, 20)[0].tolist() == narrow.row(3, 20)[0].tolist()
