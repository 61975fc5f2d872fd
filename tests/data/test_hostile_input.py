"""Untrusted input: one line that names the file and the row, in bounded time and memory.

What is refused for its form alone stands in test_data_corpus.py.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import socket
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from llmfoundry.data.preparation import prepare
from llmfoundry.data.preparation.corpus import Corpus
from llmfoundry.data.preparation.input_files import InputFile, InputRange
from llmfoundry.data.preparation.prepare import prepare_corpus
from llmfoundry.data.preparation.write_part import make_part
from llmfoundry.data.store import Store
from llmfoundry.data.store_clients import ListedObject
from llmfoundry.data.text.bpe import END_OF_TEXT, bytes_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
}


def texts(*paths: Path | str, column: str = "text", longest: str = "1gb") -> list[str]:
    names = [str(path) for path in paths]
    config = DataConfig(name="files", paths=names, text_column=column, max_row_size=longest)
    return [document.text for document in Corpus(config)]


def refused(*paths: Path | str, column: str = "text", longest: str = "1gb") -> str:
    with pytest.raises(UserError) as caught:
        texts(*paths, column=column, longest=longest)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def page(length: object, kind: str = "conversion", content: bytes = b"page") -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + content + b"\r\n\r\n"


# What names a thing that has no end or no content, by what it is called in the message.
def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        listener.bind(path.name)
        os.chdir(before)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _nothing(path: Path) -> None:
    path.symlink_to("gone")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_pipe, "is a pipe; write its content to a file"),
        (_socket, "is a socket; write its content to a file"),
        (_device, "is a device; write its content to a file"),
        (_loop, "cannot be read: Too many levels of symbolic links"),
        (_nothing, "cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], None], what: str
) -> None:
    make(tmp_path / "x.jsonl")
    begun = time.monotonic()
    for name in (tmp_path / "x.jsonl", tmp_path, f"{tmp_path}/*.jsonl"):
        assert refused(name) == f"{tmp_path}/x.jsonl: {what}"
    assert time.monotonic() - begun < 5
    (tmp_path / "x.jsonl").unlink()
    make(tmp_path / "x.lock")  # of no readable kind, it is one of those that are counted
    (tmp_path / "a.txt").write_text("a")
    assert texts(tmp_path) == ["a"]


def test_a_folder_may_be_called_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()
    (tmp_path / "x.jsonl/a.txt").write_text("a")
    assert texts(tmp_path) == texts(tmp_path / "x.jsonl") == ["a"]


def test_a_link_is_read_by_its_own_name_and_once(tmp_path: Path) -> None:
    """As the hub's cache has it: names that link to files called by their hashes."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/ab12").write_text('{"text": "a"}\n')
    (tmp_path / "names").mkdir()
    (tmp_path / "names/x.jsonl").symlink_to("../blobs/ab12")
    assert texts(tmp_path) == ["a"]
    (tmp_path / "names/y.jsonl").symlink_to("x.jsonl")
    assert texts(tmp_path) == ["a"]
    named = refused(tmp_path / "names/x.jsonl", tmp_path / "names/y.jsonl")
    assert "y.jsonl is named by" in named and "its text would count double" in named


def test_a_folder_that_cannot_be_listed_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("a")
    listed = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert refused(tmp_path) == f"{tmp_path}/deep: cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("~nobody-of-this-name/*.txt", "Could not determine home directory"),
        ("a\0b*.txt", "does not exist|embedded null|no file matches"),
        ("x" * 5000, "does not exist|File name too long"),
        ("x" * 5000 + "*.txt", "does not exist|File name too long|no file matches"),
    ],
)
def test_names_that_no_system_has_are_refused(name: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"^data\.paths: .*({why})"):
        texts(name)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".warc.wet"])
@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_small_file_that_unpacks_to_a_large_row_takes_little_memory(
    tmp_path: Path, suffix: str, packed: str
) -> None:
    size = 1 << (27 if packed == ".zst" else 25)  # of zstd a step may become 32 MiB
    head, row = {
        ".txt": (b"", ""),
        ".csv": (b'text\n"', ":2"),
        ".jsonl": (b'{"text": "a"}\n{"text": "b"}\n{"text": "', ":3"),
        ".warc.wet": (page(4) + page(size, content=b"").rstrip() + b"\r\n\r\n", ": record 2"),
    }[suffix]
    data = head + bytes(size)
    file = tmp_path / f"bomb{suffix}{packed}"
    file.write_bytes(zstandard.compress(data) if packed == ".zst" else gzip.compress(data, 1))
    assert file.stat().st_size < 1 << 20
    tracemalloc.start()
    message = refused(file, longest="1mb")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message == (
        f"{file}{row}: is longer than 1,000,000 bytes; divide it, or write a larger"
        " data.max_row_size"
    )
    assert peak < size // 2 + (8 << 20)


def test_rows_are_bounded_one_by_one(tmp_path: Path) -> None:
    """Many rows together, or a file of them, may be longer; parts name the file's own line."""
    rows = ["x" * 900] * 50
    for suffix, content in {
        ".jsonl": "".join(json.dumps({"text": row}) + "\n" for row in rows),
        ".csv": "text\n" + "".join(f'"{row}"\n' for row in rows),
    }.items():
        file = tmp_path / f"a{suffix}"
        file.write_text(content)
        assert texts(file, longest="1kb") == rows
    file = tmp_path / "a.csv"
    file.write_text("text\nshort\n" + ",".join(['"' + "a\n" * 100 + '"'] * 9))
    assert refused(file, longest="1kb").startswith(f"{file}:3: is longer than 1,000 bytes")
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in [*rows, "y" * 2000, *rows]))
    corpus = Corpus(DataConfig(name="files", paths=[str(file)], max_row_size="1kb"))
    for longest in (None, 7000, 500):
        with pytest.raises(UserError, match=r"a\.jsonl:51: is longer"):
            for span in corpus.spans(longest):
                list(corpus.read(span))


@pytest.mark.parametrize("exponent", [28, 31])
def test_zstd_with_a_long_window_is_read(tmp_path: Path, exponent: int) -> None:
    """`zstd --long=28 … 31`: the frame's second byte says how far back it may refer."""
    stream = zstandard.ZstdCompressor().compressobj()  # of unknown size, so the window is written
    packed = bytearray(stream.compress(b'{"text": "a"}\n') + stream.flush())
    assert packed[4] & 0b11100000 == 0, "neither size nor single segment"
    packed[5] = (exponent - 10) << 3
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    assert texts(tmp_path / "a.jsonl.zst") == ["a"]


@pytest.mark.parametrize("length", ["-4", "9" * 5000, "9" * 19, "1e3", "٤", "", "0x4"])
def test_absurd_lengths_of_pages_are_refused(tmp_path: Path, length: str) -> None:
    file = tmp_path / "a.warc.wet"
    for kind in ("conversion", "warcinfo"):
        file.write_bytes(page(4) + page(length, kind))
        tracemalloc.start()
        message = refused(file)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()
        assert message.startswith(f"{file}: record 2: ") and len(message) < 200


def test_headers_without_end_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.warc.wet.gz"
    lines = "".join(f"Name-{n}: x\r\n" for n in range(100_000))
    file.write_bytes(gzip.compress(b"WARC/1.0\r\n" + lines.encode()))
    assert refused(file) == f"{file}: record 1: has no end of headers; download the file again"


def test_columns_of_parquet_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    late = pa.array([2**62]).cast(pa.timestamp("us"))  # a time that Python does not know
    for column in (late, pa.array([[1]]), pa.array([{"a": 1}]), pa.array([b"a"])):
        pq.write_table(pa.table({"text": column}), file)
        assert f"{file}: row 0: " in refused(file)
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, file)
    assert "has the column 'text' more than once" in refused(file)


def test_a_file_that_goes_while_it_is_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n')
    known = InputFile.here(file)
    corpus = Corpus(DataConfig(name="files", paths=[str(file)]))
    file.unlink()
    for read in (lambda: list(corpus), lambda: list(InputRange(known).chunks())):
        with pytest.raises(UserError, match=r"a\.jsonl: cannot be read: No such file"):
            read()


def test_a_corpus_that_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(99)))
    config = DataConfig(
        name="files", paths=[str(file)], num_workers=1, cache_folder=str(tmp_path / "cache")
    )
    tokenizer = Tokenizer(bytes_backend(), END_OF_TEXT)

    def changing(*task: Any, **more: Any) -> Any:
        part = make_part(*task, **more)
        with file.open("a") as more_text:
            more_text.write('{"text": "another"}\n')
        return part

    monkeypatch.setattr(prepare, "make_part", changing)
    with pytest.raises(UserError, match=r"data: files of the corpus changed while they were read"):
        prepare_corpus(config, tokenizer, progress=False)
    monkeypatch.undo()
    prepared = prepare_corpus(config, tokenizer, progress=False)
    assert prepared.train.n_documents == 100  # four of them without their ends


def test_a_file_of_unknown_length_at_a_url_is_not_taken_for_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As servers that make a page when it is asked for."""
    entry = {"https://host/a.txt": ListedObject("https://host/a.txt")}
    monkeypatch.setattr(Store, "find", lambda store: (True, entry))
    assert "does not say how long https://host/a.txt is" in refused("https://host/a.txt")


ROWS = ["plain", "zwei ä\u2028x", "🚀" * 5, "a\x00b", " "]
_table = io.BytesIO()
pq.write_table(pa.table({"text": ROWS * 40, "n": range(200)}), _table, row_group_size=50)
WHOLE = {
    ".txt": "Grüße\n".encode() * 3,
    ".py": b"# -*- coding: utf-8 -*-\nx = 1\n# \xc3\xa4\n",
    ".jsonl": "".join(json.dumps({"text": t, "n": [1, None]}) + "\n" for t in ROWS).encode(),
    ".csv": b'id,text,n\n1,"a, ""b""",\n2,"zwei\nzeilen",3\n',
    ".warc.wet": page(9, "warcinfo", b"Version: ") + page(5) + page(4, content="zwä".encode()),
    ".parquet": _table.getvalue(),
}
TOKENS = [
    *(b"9" * 5000, b"1e999", b"NaN", b"\\ud800", b"\x00", b"\xff", b"\xef\xbb\xbf", b"[" * 3000),
    *(b'"', b",", b"\n", b"\r", b"text,text", b"null", b"coding: idna", b"coding: hex"),
    *(b"Content-Length: 999999999999\r\n", b"\x28\xb5\x2f\xfd", b"\x1f\x8b", b"PAR1"),
]


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, cut out, put in, repeated, cut off."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 4])):
        at, kind = draw.randrange(len(changed) + 1), draw.randrange(5)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[at : at + draw.choice([1, 3, 20])]
        elif kind == 2:
            changed[at:at] = draw.choice(TOKENS)
        elif kind == 3:
            changed[at:at] = changed[: draw.randrange(30)]
        else:
            del changed[at:]
    return bytes(changed)


@pytest.mark.parametrize("suffix", WHOLE)
def test_mutated_files_are_read_or_refused_in_a_line(tmp_path: Path, suffix: str) -> None:
    draw = random.Random(suffix)
    counts = [0, 0]
    for _ in range(250):
        packed = "" if suffix == ".parquet" else draw.choice([*PACK])
        inside = draw.random() < 0.7 or not packed
        data = PACK[packed](mutated(WHOLE[suffix], draw) if inside else WHOLE[suffix])
        file = tmp_path / f"a{suffix}{packed}"
        file.write_bytes(data if inside else mutated(data, draw))
        column = draw.choice(["text", "text", "text,n:json", "n"])
        corpus = Corpus(DataConfig(name="files", paths=[str(file)], text_column=column))
        try:
            for span in corpus.spans(draw.choice([None, 60])):
                list(corpus.read(span))
            counts[0] += 1
        except UserError as error:
            assert len(error.problems) == 1 and "\n" not in str(error) and len(str(error)) < 1000
            assert str(file) in str(error)
            counts[1] += 1
    assert min(counts) > 10, "neither all nor none"
