"""Corpora: what is read, in which order, and the line for everything that cannot be read."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
import pytest
import zstandard

from llmfoundry.data.preparation.corpus import Corpus, Document
from llmfoundry.data.preparation.readers import left_out
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.source import glob_matches


def read(*paths: Path | str, column: str | None = None) -> list[Document]:
    config = DataConfig(name="files", paths=[str(path) for path in paths], text_column=column)
    return list(Corpus(config))


def texts(*paths: Path | str, column: str | None = None) -> list[str]:
    return [document.text for document in read(*paths, column=column)]


def jsonl(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


ROWS = [{"text": "one"}, {"text": "zwei ä\u2028x"}, {"text": "trois 🚀"}]
WORDS = [row["text"] for row in ROWS]


def test_python_stdlib_reads_sources_and_no_tests() -> None:
    corpus = Corpus(DataConfig())
    root = Path(sysconfig.get_path("stdlib"))
    names = [str(Path(d.source).relative_to(root)) for d in corpus]
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    banned = re.compile(r"(^|/)(test|tests|idle_test|site-packages|dist-packages)/")
    assert not any(banned.search(name) for name in names)
    assert names == [str(Path(d.source).relative_to(root)) for d in corpus]
    source = next(d for d in corpus if d.source.endswith("/argparse.py"))
    assert source.text == (root / "argparse.py").read_bytes().decode()


def test_text_files_are_one_document_each_exactly(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_bytes("# Ä\r\nline\n".encode())
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwith a byte-order mark")
    assert texts(tmp_path) == ["with a byte-order mark", "# Ä\r\nline\n"]


def test_python_files_honour_their_declared_encoding(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_bytes("# -*- coding: latin-1 -*-\ns = 'ä'\n".encode("latin-1"))
    assert texts(tmp_path / "old.py") == ["# -*- coding: latin-1 -*-\ns = 'ä'\n"]


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        (".jsonl", lambda data: data),
        (".jsonl.gz", gzip.compress),
        (".jsonl.gz", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
        (".jsonl.zst", zstandard.compress),
        (".jsonl.zst", lambda data: zstandard.compress(data[:9]) + zstandard.compress(data[9:])),
    ],
)
def test_json_lines_are_read_plain_and_compressed(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / f"rows{suffix}"
    file.write_bytes(compress(jsonl(*ROWS).removesuffix(b"\n")))
    documents = read(file)
    assert [d.text for d in documents] == WORDS
    assert [str(d.row) for d in documents] == ["1", "2", "3"]
    assert documents[1].where == f"{file}:2"


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"text": "a", "text": "b"}', "text"),
        ('{"text": "a", "meta": [{"x": 1, "y": 2, "x": 1}]}', "x"),
        ('{"text": "a", "\\u0074ext": "b"}', "text"),
    ],
)
def test_a_key_that_stands_twice_is_refused_as_pyarrow_does(
    tmp_path: Path, line: str, key: str
) -> None:
    for name, content in (("a.jsonl", '{"text": "ok"}\n' + line), ("b.json", f"[{line}]")):
        (tmp_path / name).write_text(content)
        with pytest.raises(pa.ArrowInvalid, match=r"was specified twice"):
            pyarrow.json.read_json(io.BytesIO(line.encode()))
        with pytest.raises(UserError, match=rf"{name}.*: an object has the key '{key}' twice; rem"):
            read(tmp_path / name, column="*")


def test_a_byte_order_mark_is_one_at_the_files_start_alone(tmp_path: Path) -> None:
    content = '\ufefftext,n\n"\ufeffquoted\n\ufeffsecond line",1\n\ufeffplain,2\n'
    (tmp_path / "a.csv").write_text(content)
    with (tmp_path / "a.csv").open(encoding="utf-8-sig", newline="") as file:
        expected = [row["text"] for row in csv.DictReader(file)]
    assert texts(tmp_path / "a.csv") == expected and expected[0].count("\ufeff") == 2
    page = "\ufeffa page".encode()
    head = f"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: {len(page)}\r\n\r\n".encode()
    (tmp_path / "a.warc.wet").write_bytes(head + page + b"\r\n\r\n")
    assert texts(tmp_path / "a.warc.wet") == ["\ufeffa page"]


def test_lines_longer_than_a_read_are_whole(tmp_path: Path) -> None:
    rows = [{"text": "x" * 2_500_000}, {"text": "y"}, {"text": "z" * 1_048_576}]
    (tmp_path / "long.jsonl").write_bytes(jsonl(*rows))
    assert texts(tmp_path / "long.jsonl") == [row["text"] for row in rows]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet_rows_are_documents(tmp_path: Path, kind: pa.DataType) -> None:
    words = [f"row {n}" for n in range(3000)]
    pq.write_table(pa.table({"body": pa.array(words, kind)}), tmp_path / "a.parquet")
    documents = read(tmp_path / "a.parquet", column="body")
    assert [d.text for d in documents] == words
    assert [d.row for d in documents] == list(range(3000))


def test_folders_are_read_recursively_and_other_files_counted(tmp_path: Path) -> None:
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "a.txt").write_text("nested")
    (tmp_path / "m.jsonl").write_bytes(jsonl({"text": "row"}))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    corpus = Corpus(DataConfig(name="files", paths=[str(tmp_path)]))
    assert [d.text for d in corpus] == ["row", "nested"]
    assert corpus.ignored == 1


HIDDEN = (".venv/lib/site/a.py", ".cache/a.py", ".notes.txt", "src/.ipynb_checkpoints/a.py")
HIDDEN += ("__pycache__/a.txt", "src/__MACOSX/sub/a.txt")
SHOWN = ("src/__init__.py", "src/a.py", "src/sub/__main__.py", "..a/b.txt")
PATTERNS = ("*", "**/*.py", "*/*", "__*/*", "src/.*/*", ".*", ".*/*", "src/**", "src/__init__.py")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in (*HIDDEN, *SHOWN):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path


def relative(corpus: Corpus, folder: Path) -> set[str]:
    return {str(Path(file.name).relative_to(folder)) for file in corpus.files}


def test_hidden_files_and_folders_are_left_out_as_datasets_does_and_counted(project: Path) -> None:
    from datasets.data_files import resolve_pattern

    corpus = Corpus(DataConfig(name="files", paths=[str(project)]))
    theirs = resolve_pattern("**", str(project))
    assert relative(corpus, project) == {str(Path(file).relative_to(project)) for file in theirs}
    assert relative(corpus, project) == {*SHOWN} - {"..a/b.txt"}
    places = {Path(part).relative_to(project) for part in corpus.hidden}
    assert {str(place) for place in places} == {
        "..a", ".venv", ".cache", ".notes.txt", "src/.ipynb_checkpoints", "__pycache__",
        "src/__MACOSX",
    }  # fmt: skip
    assert list(left_out(0, corpus.hidden)) == [
        "7 hidden files and folders left out (..a, .cache, .notes.txt …); to read one, name it in"
        " data.paths"
    ]


def test_hidden_files_and_folders_that_are_named_are_read(project: Path) -> None:
    for name, expected in {
        ".notes.txt": {".notes.txt"},
        ".venv": {".venv/lib/site/a.py"},
        "src/__MACOSX": {"src/__MACOSX/sub/a.txt"},
    }.items():
        corpus = Corpus(DataConfig(name="files", paths=[f"{project}/{name}"]))
        assert relative(corpus, project) == expected and not corpus.hidden
    both = Corpus(DataConfig(name="files", paths=[str(project), f"{project}/.venv"]))
    assert ".venv/lib/site/a.py" in relative(both, project)
    assert f"{project}/.venv" not in both.hidden


@pytest.mark.parametrize("pattern", PATTERNS)
def test_globs_match_hidden_files_as_those_of_datasets_do(project: Path, pattern: str) -> None:
    """`datasets` matches files alone; what a folder that matches holds is ours to read."""
    from datasets.data_files import resolve_pattern

    def ours() -> set[str]:
        found = glob_matches(f"{project}/{pattern}")[0]
        return {str(Path(path).relative_to(project)) for path in found if Path(path).is_file()}

    try:
        theirs = resolve_pattern(pattern, str(project))
    except FileNotFoundError:
        theirs = []
    assert ours() == {str(Path(file).relative_to(project)) for file in theirs}


def test_a_folder_of_hidden_files_alone_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / ".a.txt").write_text("a")
    with pytest.raises(UserError, match=r"no readable file in .*; 1 hidden file or folder left ou"):
        read(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    with pytest.raises(UserError, match=r"no file matches .*left out \(__pycache__\); to read one"):
        read(tmp_path / "*")


def test_a_name_that_is_not_utf8_is_refused_and_a_hidden_one_is_spelled(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / os.fsdecode(b".\xff")).write_text("")
    corpus = Corpus(DataConfig(name="files", paths=[str(tmp_path)]))
    assert corpus.hidden == [f"{tmp_path}/.\\udcff"]
    (tmp_path / os.fsdecode(b"b\xff.txt")).write_text("text")
    with pytest.raises(UserError, match=r"/b\\udcff\.txt: this path is not UTF-8; rename it"):
        read(tmp_path)


def test_paths_keep_the_order_written_and_globs_are_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    assert texts(tmp_path / "c.md", tmp_path / "*.txt") == ["c.md", "a.txt", "b.txt"]


def test_a_linked_folder_that_contains_itself_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "again").symlink_to(tmp_path)
    assert texts(tmp_path) == ["a"]


def test_fingerprint_follows_content_and_not_the_way_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")

    def fingerprint() -> str:
        return Corpus(DataConfig(name="files", paths=[str(tmp_path)])).fingerprint()

    before = fingerprint()
    assert fingerprint() == before
    glob = DataConfig(name="files", paths=[f"{tmp_path}/*.txt"], text_column="text")
    assert Corpus(glob).fingerprint() == before
    (tmp_path / "a.txt").write_text("another")
    assert fingerprint() != before


CASES: dict[str, tuple[str, bytes, str]] = {
    "UTF-8": ("a.txt", b"ab\xff", r"a\.txt: byte 2 \(0xff\) is not utf-8: invalid start byte"),
    "UTF-8 after a mark": ("a.md", b"\xef\xbb\xbfab\xff", r"a\.md: byte 5 \(0xff\) is not utf-8"),
    "UTF-16": ("a.txt", "ab".encode("utf-16"), r"a\.txt: it is UTF-16, by its byte-order mark"),
    "UTF-16 without a mark": ("a.txt", "ab".encode("utf-16-le"), r"50% of its bytes are zero, as"),
    "source": ("a.py", b"x = 1\ny = 2\n# \xe4\n", r"a\.py: byte 14 \(0xe4\) is not utf-8"),
    "source's head": ("a.py", b"# \xe4\n", r"a\.py: byte 2 \(0xe4\) is not utf-8"),
    "unknown coding": ("a.py", b"# coding: klingon\n", r"a\.py: unknown encoding.*klingon"),
    "json": ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2: not JSON: Expecting value"),
    "json UTF-8": ("a.jsonl", b'\n{"text": "\xff"}', r"a\.jsonl:2: byte 10 of the line \(0xff\)"),
    "json list": ("a.jsonl", b"[1]\n", r"a\.jsonl:1: holds a value of type list"),
    "no column": ("a.jsonl", b'{"body": "a"}\n', r"a\.jsonl:1: no column 'text'; set .* of: body"),
    "null": ("a.jsonl", b'{"text": null}\n', r"a\.jsonl:1: 'text' holds null, not text"),
    "number": ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: 'text' holds a value of type int"),
    "surrogate": ("a.jsonl", b'{"text": "a\\ud800"}\n', r"a\.jsonl:1: character 1 is half .*D800"),
    "gzip cut": ("a.jsonl.gz", gzip.compress(jsonl(*ROWS))[:-9], r"\.gz: not a complete gzip"),
    "no gzip": ("a.jsonl.gz", b"plain", r"a\.jsonl\.gz: not a complete gzip file"),
    "zstd cut": (
        "a.jsonl.zst",
        zstandard.compress(jsonl(*ROWS))[:-3],
        r"not a complete zstd file: it",
    ),
    "no zstd": ("a.jsonl.zst", b"plain", r"a\.jsonl\.zst: not a complete zstd file"),
    "no parquet": ("a.parquet", b"plain", r"a\.parquet: not a complete parquet file"),
    "long integer": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "b", "n": ' + b"9" * 5000 + b"}",
        r"a\.jsonl:2: not JSON: Exceeds the limit \(4300 digits\)[^;]*; every line must hold one",
    ),
    "deep": ("a.jsonl", b"[" * 10**5, r"a\.jsonl:1: not JSON: maximum recursion depth"),
    "json number": ("a.jsonl", b"7\n", r"a\.jsonl:1: holds a value of type int; every line"),
    "many columns": ("a.jsonl", json.dumps({"x" * 9999: 1}).encode(), r"one of: x{500} …$"),
    "undefined coding": (
        "a.py",
        b"# coding: undefined\n",
        r"a\.py: is not undefined: .*undefined enc",
    ),
    "no text coding": ("a.py", b"# coding: rot13\n", r"a\.py: is not rot13: 'rot13' is not a text"),
    "coding of names": ("a.py", b"# coding: punycode\n" + b"x" * 200, r"a\.py: .*is not punycode"),
    "csv column twice": (
        "a.csv",
        b"text,n,text\na,1,b\n",
        r"csv:1: has the column 'text' more than",
    ),
    "suffix": ("a.doc", b"x", r"data\.paths: .*a\.doc: cannot read \.doc files; convert .*\.jsonl"),
    "empty": ("a.txt", b"", r"data\.paths: holds no text"),
    "empty csv": ("a.csv", b"", r"data\.paths: holds no text"),
    "blank": ("a.jsonl", b'{"text": " \\n"}\n\n', r"data\.paths: holds no text"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_read_is_named(tmp_path: Path, case: str) -> None:
    name, content, line = CASES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=line):
        read(tmp_path / name)


def test_a_gzip_file_of_random_truncation_is_never_taken_for_whole(tmp_path: Path) -> None:
    for name, data in (
        ("a.jsonl.gz", gzip.compress(jsonl(*ROWS))),
        ("a.jsonl.zst", zstandard.ZstdCompressor(write_checksum=True).compress(jsonl(*ROWS))),
    ):
        for length in range(1, len(data)):
            (tmp_path / name).write_bytes(data[:length])
            with pytest.raises(UserError, match=re.escape(name)):
                read(tmp_path / name, column="*")


def test_parquet_rows_that_are_no_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    for column, line in (
        (pa.array(["a", None]), "row 1: 'text' holds null"),
        (pa.array([1, 2]), "row 0: 'text' holds a value of type int"),
        (pa.array([b"a", b"\xff"]).view(pa.string()), "row 1: byte 0 is not UTF-8"),
    ):
        pq.write_table(pa.table({"text": column}), file)
        with pytest.raises(UserError, match=rf"a\.parquet: {line}"):
            read(file)
    with pytest.raises(UserError, match=r"no column 'body'; set data.text_column to one of: text"):
        read(file, column="body")


def test_paths_that_name_nothing_or_twice_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    for paths, line in (
        ([tmp_path / "b.txt"], r"b\.txt does not exist; write a file, a folder or a glob"),
        ([tmp_path / "*.md"], r"no file matches"),
        ([tmp_path, tmp_path / "*.txt"], r"a\.txt is named by .* and .*\*\.txt.*write it once"),
    ):
        with pytest.raises(UserError, match=line):
            read(*paths)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data\.paths: no readable file in"):
        read(tmp_path / "empty")


def test_a_cache_inside_the_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    inside = str(tmp_path / "deep/cache")
    with pytest.raises(UserError, match=r"data\.cache_folder: .*deep/cache lies in .*outside it"):
        Corpus(DataConfig(name="files", paths=[str(tmp_path)], cache_folder=inside))
    hidden = DataConfig(name="files", paths=[str(tmp_path)], cache_folder=f"{tmp_path}/.cache/x")
    assert len(Corpus(hidden).files) == 1


class TestHuggingFaceDatasets:
    """Local ones; a hub id goes through the same `load_dataset`."""

    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        datasets.disable_progress_bars()

    def corpus(self, folder: Path, **fields: Any) -> Corpus:
        return Corpus(DataConfig(name="huggingface", dataset=str(folder), **fields))

    def test_a_folder_of_parquet(self, tmp_path: Path) -> None:
        folder = tmp_path / "words"
        folder.mkdir()
        pq.write_table(pa.table({"body": WORDS}), folder / "train.parquet")
        documents = list(self.corpus(folder, text_column="body"))
        assert [d.text for d in documents] == WORDS
        assert [d.row for d in documents] == [0, 1, 2]
        with pytest.raises(UserError, match=r"data\.text_column: .* no 'text'; write one of: body"):
            list(self.corpus(folder))
        with pytest.raises(UserError, match=r"data\.dataset: cannot load .*, split 'test': .*test"):
            list(self.corpus(folder, text_column="body", split="test"))

    def test_a_saved_dataset_and_a_saved_dictionary(self, tmp_path: Path) -> None:
        import datasets

        data = datasets.Dataset.from_dict({"text": WORDS})
        data.save_to_disk(tmp_path / "one")
        datasets.DatasetDict({"held": data.select([1])}).save_to_disk(tmp_path / "many")
        assert [d.text for d in self.corpus(tmp_path / "one")] == WORDS
        assert [d.text for d in self.corpus(tmp_path / "many", split="held")] == WORDS[1:2]
        with pytest.raises(UserError, match=r"data\.split: no 'train'; write one of: held"):
            list(self.corpus(tmp_path / "many"))
        with pytest.raises(UserError, match=r"data\.subset: has no effect"):
            list(self.corpus(tmp_path / "one", subset="en"))

    def test_rows_that_are_no_text_and_missing_folders(self, tmp_path: Path) -> None:
        import datasets

        datasets.Dataset.from_dict({"text": ["a", None]}).save_to_disk(tmp_path / "one")
        with pytest.raises(UserError, match=r"one: row 1: 'text' holds null"):
            list(self.corpus(tmp_path / "one"))
        with pytest.raises(UserError, match=r"data\.dataset: .*none is not a folder"):
            list(self.corpus(tmp_path / "none"))

    def test_a_hub_dataset_is_streamed_file_by_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from llmfoundry.data.preparation import corpus as corpus_module

        monkeypatch.setattr(corpus_module, "dataset_folder", lambda config: None)  # a hub id
        folder = tmp_path / "words"
        folder.mkdir()
        for n in range(3):
            table = pa.table({"text": [f"{word} {n}" for word in WORDS]})
            pq.write_table(table, folder / f"train-{n}.parquet")
        corpus = self.corpus(folder)
        expected = [f"{word} {n}" for n in range(3) for word in WORDS]
        assert [d.text for d in corpus] == expected
        other = self.corpus(folder, subset="other").fingerprint()
        assert corpus.fingerprint() == self.corpus(folder).fingerprint() != other
        assert [[d.row for d in corpus.read(span)] for span in corpus.spans(1)] == [[0, 1, 2]] * 3
        with pytest.raises(UserError, match=r"has no 'body'; write one of: text"):
            list(self.corpus(folder, text_column="body"))
        (folder / "train-2.parquet").write_bytes(b"cut")
        with pytest.raises(UserError, match=r"words: file 2: cannot be read"):
            list(corpus)
