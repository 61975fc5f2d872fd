"""What scripts/prepare_data.py writes: read back, counted, refused; inputs beyond plain files."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet
import pytest
import zstandard

from llmfoundry.cli.commands.prepare_data import prepare_data
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.preparation import partition, write_part
from llmfoundry.data.preparation.corpus import Corpus
from llmfoundry.data.shard_cache.shard_folder import ShardFolder
from llmfoundry.data.shard_index import read_index
from llmfoundry.data.sources import MDSColumn
from llmfoundry.data.token_shards import StreamIndex, TokenDataset
from llmfoundry.errors import UserError
from llmfoundry.recipe.before_training import PrepareRecipe
from llmfoundry.recipe.load import checked
from tests.shards import bytes_tokenizer

EOS = 256  # of the bytes tokenizer, whose ids are UTF-8


def texts(n: int = 60) -> list[str]:
    return [f"document {k} " + "wörter\n" * (k % 12) for k in range(n)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    return file


def recipe(source: Path, *overrides: str) -> PrepareRecipe:
    return checked(
        PrepareRecipe,
        None,
        [
            *("run_name=a", "model=dbrx-tiny", "tokenizer=bytes", "data=files"),
            *(f"data.paths=[{source}]", "data.validation_fraction=0.1", "data.num_workers=1"),
            *(f"data.cache_folder={source.parent / 'cache'}", "max_seq_len=16"),
            f"prepare.output={source.parent / 'out'}",
            *overrides,
        ],
    )


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    def held_out(text: str) -> bool:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < int(0.1 * 2**64)

    return [t for t in documents if not held_out(t)], [t for t in documents if held_out(t)]


def folder(path: Path) -> ShardFolder:
    return ShardFolder.open(None, str(path), FetchOptions())


def samples(path: Path, column: str) -> list[Any]:
    files = folder(path)
    index = read_index(files)
    assert not isinstance(index, StreamIndex)
    shards = MDSColumn("train", files, index, column)
    return [shards.read(row) for row in range(int(index.sizes.sum()))]


def test_token_shards_are_read_back_and_counted(source: Path) -> None:
    prepare_data(recipe(source, "prepare.licence=CC0", "prepare.hashes=[md5]").resolve())
    out = source.parent / "out"
    manifest = json.loads((out / "manifest.json").read_bytes())
    for name, expected in zip(("train", "validation"), split(texts()), strict=True):
        files = folder(out / name)
        dataset = TokenDataset(files, StreamIndex.read(files))
        ids = [token for text in expected for token in [EOS, *text.encode()]]
        assert dataset.row(0, len(ids) - 1)[0].tolist() == ids
        dataset.verify()
        assert [*dataset.index.shards[0].hashes] == ["md5"]
        n_bytes = sum(len(text.encode()) for text in expected)
        counts = {"documents": len(expected), "bytes": n_bytes, "tokens": len(ids)}
        assert manifest["counts"][name] == {**counts, "samples": 0, "tokens_left_out": 0}
    assert dataset.texts() == split(texts())[1]
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    size = source.stat().st_size
    assert manifest["sources"] == [{"name": str(source), "bytes": size, "sha256": sha256}]
    assert manifest["about"] == {"licence": "CC0"}
    assert sorted(path.name for path in out.iterdir()) == [
        "manifest.json", "tokenizer", "train", "validation"
    ]  # fmt: skip


@pytest.mark.parametrize("compression", ["null", "zstd"])
def test_mds_text_is_the_documents(source: Path, compression: str) -> None:
    more = ("prepare.format=mds", "prepare.column=text", f"prepare.compression={compression}")
    prepare_data(recipe(source, *more, "prepare.size_limit=300").resolve())
    train, validation = split(texts())
    assert samples(source.parent / "out/train", "text") == train
    assert samples(source.parent / "out/validation", "text") == validation


def concatenated(documents: list[str], *, bos: list[int], eos: list[int], wrap: bool) -> Any:
    """LLM Foundry's ConcatTokensDataset, as its source has it."""
    rows, buffer = [], []
    for document in documents:
        buffer += [*bos, *document.encode(), *eos]
        while len(buffer) >= 16:
            rows.append(buffer[:16])
            buffer = buffer[16:] if wrap else []
    return rows


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize(("bos", "eos"), [("", None), ("<|endoftext|>", ""), ("ab", "ä")])
def test_mds_tokens_are_foundrys_rows(source: Path, wrap: bool, bos: str, eos: str | None) -> None:
    more = [f"prepare.bos_text='{bos}'"] if bos else []
    more += [] if eos is None else [f"prepare.eos_text='{eos}'"]
    more += [] if wrap else ["prepare.no_wrap=true"]
    prepare_data(recipe(source, "prepare.format=mds", "prepare.size_limit=2000", *more).resolve())
    ids = {"": [], "<|endoftext|>": [EOS], None: [EOS], "ab": [97, 98], "ä": [195, 164]}
    train, _ = split(texts())
    expected = concatenated(train, bos=ids[bos], eos=ids[eos], wrap=wrap)
    found = samples(source.parent / "out/train", "tokens")
    assert [row.tolist() for row in found] == expected
    assert {row.dtype for row in found} == {np.dtype("int32")}
    manifest = json.loads((source.parent / "out/manifest.json").read_bytes())
    counts = manifest["counts"]["train"]
    around = len(ids[bos]) + len(ids[eos])
    total = sum(len(text.encode()) + around for text in train)
    assert counts["tokens"] == 16 * len(expected) == 16 * counts["samples"]
    assert counts["tokens"] + counts["tokens_left_out"] == total


def test_integers_too_small_for_the_vocabulary_are_refused_before_anything_is_read(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.vocab_size = 70_000
    build = "llmfoundry.cli.commands.prepare_data.build_tokenizer"
    monkeypatch.setattr(build, lambda *_, **__: tokenizer)
    more = ["prepare.format=mds", "prepare.dtype=uint16"]
    line = r"^prepare\.dtype: uint16 holds ids up to 65,535, the tokenizer's go up to 69,999; write"
    with pytest.raises(UserError, match=line):
        prepare_data(recipe(source, *more).resolve())
    assert not (source.parent / "out").exists()


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_columns_are_kept_as_they_are(tmp_path: Path, form: str) -> None:
    """What LLM Foundry's convert_finetuning_dataset writes."""
    rows = [{"prompt": f"2 + {n}?", "response": f"„{2 + n}“", "id": n} for n in range(40)]
    columns = "prepare.columns={prompt: str, response: str}"
    if form == "csv":
        lines = ["prompt,response,id", *(f"{r['prompt']},{r['response']},{r['id']}" for r in rows)]
        (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    elif form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    else:
        rows = [{"messages": [{"role": "user", "content": r["prompt"]}], "n": None} for r in rows]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        columns = "prepare.columns={messages: json}"
    prepare_data(recipe(tmp_path / f"rows.{form}", "prepare.format=mds", columns).resolve())
    kept = ["messages"] if form == "jsonl" else ["prompt", "response"]
    found = [
        dict(zip(kept, values, strict=True))
        for part in ("train", "validation")
        for values in zip(*(samples(tmp_path / "out" / part, name) for name in kept), strict=True)
    ]
    expected = [{name: row[name] for name in kept} for row in rows]
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_a_row_without_its_column_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a", "response": 3}\n')
    columns = "prepare.columns={prompt: str, response: str}"
    with pytest.raises(UserError, match=r"rows\.jsonl:2: 'response' holds a value of type int"):
        prepare_data(recipe(file, "prepare.format=mds", columns).resolve())
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:1: no column 'response'"):
        prepare_data(recipe(file, "prepare.format=mds", columns).resolve())


def test_mds_is_an_input_too(source: Path) -> None:
    prepare_data(recipe(source, "prepare.format=mds", "prepare.column=text").resolve())
    again = recipe(source, "prepare.format=tokens", f"prepare.output={source.parent / 'again'}")
    again.data = replace(
        again.data, name="shards", paths=[], local=str(source.parent / "out/train")
    )
    again.data.text_column = None
    prepare_data(again.resolve())
    train, _ = split(texts())
    manifest = json.loads((source.parent / "again/manifest.json").read_bytes())
    # No hash of the training text lies below the bound: of these few the longest lose their ends.
    assert manifest["ends"] and manifest["counts"]["train"]["documents"] == len(train)


def test_the_same_again_is_nothing_to_do(source: Path) -> None:
    prepare_data(recipe(source).resolve())
    out = source.parent / "out"
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    prepare_data(recipe(source).resolve())
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before


def test_a_folder_of_something_else_is_refused(source: Path) -> None:
    out = source.parent / "out"
    out.mkdir()
    (out / "letter.txt").write_text("mine")
    with pytest.raises(UserError, match=r"prepare\.output: .*letter\.txt is not of a preparation"):
        prepare_data(recipe(source).resolve())
    assert os.listdir(out) == ["letter.txt"]
    (out / "letter.txt").unlink()
    prepare_data(recipe(source).resolve())
    with pytest.raises(
        UserError, match=r"made with validation_fraction 0\.1, and not 0\.2; choose"
    ):
        prepare_data(recipe(source, "data.validation_fraction=0.2").resolve())
    with pytest.raises(UserError, match=r"made with output\.kind tokens, and not mds-tokens"):
        prepare_data(recipe(source, "prepare.format=mds").resolve())
    source.write_text(source.read_text() * 2)
    with pytest.raises(UserError, match=r"corpus' files are others, or changed"):
        prepare_data(recipe(source).resolve())


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("prepare.column=text", r"prepare\.column: has no effect with prepare\.format"),
        ("prepare.compression=zstd", r"prepare\.compression: has no effect with prepare\.format"),
        ("prepare.format=arrow", r"prepare\.format: 'arrow' is not a choice"),
        ("prepare.size_limit=5000000000", r"prepare\.size_limit: .* less than 4 GiB"),
        (
            "prepare.columns={a:str}",
            r"prepare\.columns: has no effect with prepare\.format: tokens",
        ),
        ("prepare.format=mds prepare.columns={a:int}", r"prepare\.columns\.a: 'int' is not a"),
        ("prepare.engine=spark", r"prepare\.engine: 'spark' is not a choice"),
    ],
)
def test_settings_that_cannot_be_are_named(source: Path, override: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        recipe(source, *override.split(" "))


def test_without_output_only_token_shards_can_be_written(source: Path) -> None:
    with pytest.raises(UserError, match=r"prepare\.format: mds needs prepare\.output"):
        recipe(source, "prepare.output=null", "prepare.format=mds")


def test_filters_and_repeats_are_counted_by_reason(source: Path) -> None:
    rows = [*texts(), *texts(5), "short", " "]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    prepare_data(recipe(source, "data.filter.min_chars=10", "data.deduplicate=exact").resolve())
    manifest = json.loads((source.parent / "out/manifest.json").read_bytes())
    assert manifest["dropped"] == {"blank": 1, "min_chars": 1, "repeats another": 5}
    assert sum(counts["documents"] for counts in manifest["counts"].values()) == len(texts())


@pytest.fixture
def store() -> Iterator[Any]:
    """A store at memory://, which only this process sees."""
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/", recursive=True)


def test_text_at_a_url_is_prepared_to_a_url(source: Path, store: Any) -> None:
    prepare_data(recipe(source).resolve())
    store.pipe_file("/in/deep/rows.jsonl", source.read_bytes())
    store.pipe_file("/in/picture.png", b"PNG")
    for paths in ("memory://in", "memory://in/deep/rows.jsonl", "memory://in/*/*.jsonl"):
        there = recipe(source, f"data.paths=['{paths}']", "prepare.output=memory://bucket/out")
        prepare_data(there.resolve())
        before = store.find("/bucket", detail=True)
        prepare_data(there.resolve())
        assert store.find("/bucket", detail=True) == before
        for path in (source.parent / "out").rglob("part-*/*"):
            name = path.relative_to(source.parent / "out")
            assert store.cat_file(f"/bucket/out/{name}") == path.read_bytes()
        manifest = json.loads(store.cat_file("/bucket/out/manifest.json"))
        assert manifest["sources"][0]["name"] == "memory://in/deep/rows.jsonl"
        assert manifest["ignored"] == (paths == "memory://in")
        assert not [name for name in before if ".parts" in name]
        store.rm("/bucket", recursive=True)


def test_a_preparation_to_a_url_is_gone_on_with(
    source: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "_SMALLEST", 1000)
    there = recipe(source, "prepare.output=memory://bucket/out")
    prepare_data(there.resolve())
    whole = {name: store.cat_file(name) for name in store.find("/bucket")}
    store.rm("/bucket", recursive=True)
    made: list[str] = []

    def stop(job: write_part.PartSettings, task: partition.PartitionTask, *rest: object) -> object:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(task.part)
        return write_part.make_part(job, task)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("llmfoundry.data.preparation.prepare.make_part", stop)
        prepare_data(there.resolve())
    kept = store.find("/bucket/out/train", detail=True)
    assert len(kept) == 2
    prepare_data(there.resolve())
    assert {name: store.cat_file(name) for name in store.find("/bucket")} == whole
    found = store.find("/bucket/out/train", detail=True)
    assert all(found[name]["created"] == entry["created"] for name, entry in kept.items())


@pytest.mark.parametrize("path", ["memory://in/none.jsonl", "memory://in/*.jsonl", "memory://no"])
def test_urls_of_nothing_are_named(source: Path, store: Any, path: str) -> None:
    store.pipe_file("/in/a.txt", b"a")
    with pytest.raises(UserError, match=rf"data\.paths: {re.escape(path)}: .*not? "):
        prepare_data(recipe(source, f"data.paths=['{path}']").resolve())


def test_lines_at_a_url_are_cut_as_here(source: Path, store: Any) -> None:
    store.pipe_file("/in/rows.jsonl", source.read_bytes())
    config = recipe(source).data
    here, there = Corpus(config), Corpus(replace(config, paths=["memory://in/rows.jsonl"]))
    for longest in (50, 1000):
        found = [[d.text for d in c.read(s)] for c in (here, there) for s in c.spans(longest)]
        assert found[: len(found) // 2] == found[len(found) // 2 :]


def read(file: Path, column: str = "text") -> list[str]:
    config = recipe(file).data
    config.text_column = column
    return [document.text for document in Corpus(config)]


PAGES = ["Eine Seite\nmit Zeilen\n", "Zweite 🚀", "x" * 100_000]


def wet(pages: list[str]) -> list[bytes]:
    """Records as Common Crawl writes them, the first about the file."""

    def record(kind: str, content: bytes) -> bytes:
        head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
        return head.encode() + content + b"\r\n\r\n"

    pages_ = [record("conversion", page.encode()) for page in pages]
    return [record("warcinfo", b"Software-Info: x\r\n"), *pages_]


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        (".warc.wet", b"".join),
        (".warc.wet.gz", lambda records: b"".join(map(gzip.compress, records))),
        (".warc.wet.zst", lambda records: b"".join(map(zstandard.compress, records))),
    ],
)
def test_pages_of_common_crawl_are_documents(
    tmp_path: Path, suffix: str, pack: Callable[[list[bytes]], bytes]
) -> None:
    file = tmp_path / f"CC-MAIN{suffix}"
    file.write_bytes(pack(wet(PAGES)))
    assert read(file) == PAGES
    whole = b"".join(wet(PAGES))
    if suffix == ".warc.wet":
        file.write_bytes(whole[:-60])
        with pytest.raises(UserError, match=r"record 4: the file ends within it"):
            read(file)
        file.write_bytes(whole.replace(b"WARC/1.0\r\nWARC-Type: conv", b"HTTP\r\nWARC-Type: conv"))
        with pytest.raises(UserError, match=r"record 2: begins with b'HTTP.*not WARC/"):
            read(file)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_csv_fields_may_go_over_lines(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    words = ['plain, "quoted"', "two\nlines", "ä 🚀", "", "x" * 200_000]
    table = io.StringIO(newline="")
    csv.writer(table).writerows([["id", "body"], *([n, w] for n, w in enumerate(words))])
    suffix = {bytes: "", gzip.compress: ".gz"}.get(pack, ".zst")
    file = tmp_path / f"rows.csv{suffix}"
    file.write_bytes(pack(table.getvalue().encode()))
    assert read(file, "body") == words


def test_rows_in_utf_16_are_named(tmp_path: Path) -> None:
    """Python itself reads JSON in UTF-16."""
    (tmp_path / "rows.jsonl").write_bytes('{"text": "a"}\n{"text": "b"}\n'.encode("utf-16"))
    with pytest.raises(UserError, match=r"rows\.jsonl:1: byte 0 of the line \(0xff\) is not UTF-8"):
        read(tmp_path / "rows.jsonl")


def test_blank_lines_before_the_names_of_columns_hide_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("\n\r\ntext,n\none,1\ntwo,2\n")
    assert read(tmp_path / "rows.csv") == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"id,body\n1,a\n", r"rows\.csv:1: no column 'text'; set .* to one of: id, body"),
        (b"text,b\na,b\nonly\n", r"rows\.csv:3: has 1 fields, line 1 names 2"),
        (b"\n\ntext,b\nonly\n", r"rows\.csv:4: has 1 fields, line 3 names 2"),
        (b'text,b\n"a\nb",c\n"d', r"rows\.csv:4: not CSV: unexpected end of data"),
        (b"text\nab\xff\n", r"rows\.csv:2: byte 2 \(0xff\) is not utf-8"),
    ],
)
def test_csv_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, line: str) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(UserError, match=line):
        read(tmp_path / "rows.csv")


def test_text_files_may_be_compressed(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("ä\n".encode()))
    (tmp_path / "b.md.zst").write_bytes(zstandard.compress(b"# b"))
    assert read(tmp_path / "a.txt.gz") == ["ä\n"]
    assert read(tmp_path / "b.md.zst") == ["# b"]
