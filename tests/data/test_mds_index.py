"""The index of an MDS dataset: what it says, its binary form, and a line for all that is wrong."""

from __future__ import annotations

import copy
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmfoundry.data.file_spec import CompressedFile, FileSpec
from llmfoundry.data.mds.shard import MDSIndex
from llmfoundry.errors import UserError

Entry = dict[str, Any]


def entry(n: int, **changes: Any) -> Entry:
    """A shard's entry as mosaicml-streaming writes it."""
    plain: Entry = {
        "column_encodings": ["ndarray:int32:2048", "str"],
        "column_names": ["tokens", "url"],
        "column_sizes": [8192, None],
        "compression": "zstd:3",
        "format": "mds",
        "hashes": ["sha1", "xxh64"],
        "raw_data": {
            "basename": f"a/shard.{n:05}.mds",
            "bytes": 1000 + n,
            "hashes": {"xxh64": f"ab{n}", "sha1": f"cd{n}"},
        },
        "samples": n,
        "size_limit": 1 << 26,
        "version": 2,
        "zip_data": {
            "basename": f"a/shard.{n:05}.mds.zstd",
            "bytes": 100 + n,
            "hashes": {"sha1": f"ef{n}"},
        },
    }
    return {**plain, **changes}


def encode(shards: list[Any], **changes: Any) -> bytes:
    return json.dumps({"version": 2, "shards": shards, **changes}).encode()


def parse(shards: list[Any], **changes: Any) -> MDSIndex:
    return MDSIndex.from_bytes(encode(shards, **changes), source="set/index.json")


RAW_ONLY = entry(7, compression=None, zip_data=None, column_names=["x", "y"])
MIXED = [entry(0), entry(1), RAW_ONLY, entry(3, compression="gz")]


def test_each_shards_file_is_as_the_index_says() -> None:
    index = parse(MIXED)
    assert index.n_shards == 4
    assert index.sizes.tolist() == [0, 1, 7, 3]
    assert index.sizes.dtype == np.int64
    assert index.spec(1) == FileSpec(
        name="a/shard.00001.mds",
        n_bytes=1001,
        hashes=(("sha1", "cd1"), ("xxh64", "ab1")),
        packed=CompressedFile("a/shard.00001.mds.zstd", 101, (("sha1", "ef1"),), "zstd:3"),
    )
    assert index.spec(2) == FileSpec(
        "a/shard.00007.mds", 1007, hashes=(("sha1", "cd7"), ("xxh64", "ab7"))
    )
    packed = index.spec(3).packed
    assert packed is not None
    assert packed.compression == "gz"


def test_columns_that_shards_share_are_kept_once() -> None:
    index = parse(MIXED)
    assert len(index.column_sets) == 2
    assert index.columns(0) is index.columns(3)
    assert index.columns(0).names == ("tokens", "url")
    assert index.columns(0).sizes == (8192, None)
    assert index.columns(2).names == ("x", "y")


def test_an_index_of_no_shards_has_none() -> None:
    index = parse([])
    assert index.n_shards == 0
    assert index.sizes.sum() == 0


def test_names_may_be_of_any_script() -> None:
    raw = {"basename": "Größe/数.mds", "bytes": 9}
    index = parse([entry(0), entry(1, raw_data=raw), entry(2)])
    assert index.spec(1).name == "Größe/数.mds"
    assert index.spec(2).name == "a/shard.00002.mds"


def test_columns_are_the_same_however_their_json_is_written() -> None:
    spaced = json.dumps({"version": 2, "shards": [entry(0), entry(1)]}).encode()
    index = MDSIndex.from_bytes(spaced.replace(b'"tokens", "url"', b'"tokens","url"', 1))
    assert len(index.column_sets) == 1


def test_hashes_may_be_missing() -> None:
    raw = {"basename": "shard.00000.mds", "bytes": 9}
    index = parse([entry(0, raw_data=raw, zip_data=None)])
    assert index.spec(0) == FileSpec("shard.00000.mds", 9)


@pytest.mark.parametrize("by_path", [True, False])
@pytest.mark.parametrize("shards", [MIXED, []])
def test_the_binary_form_holds_the_same(shards: list[Any], by_path: bool, tmp_path: Path) -> None:
    index = parse(shards)
    path = tmp_path / "index"
    if by_path:
        index.save(path)
        loaded = MDSIndex.load(path)
    else:
        file = io.BytesIO()
        index.save(file)
        file.seek(0)
        loaded = MDSIndex.load(file)
    assert [loaded.spec(n) for n in range(loaded.n_shards)] == [
        index.spec(n) for n in range(index.n_shards)
    ]
    assert loaded.sizes.tolist() == index.sizes.tolist()
    assert loaded.column_sets == index.column_sets
    assert loaded.fingerprint == index.fingerprint


def test_a_binary_form_that_is_not_whole_is_named(tmp_path: Path) -> None:
    path = tmp_path / "index"
    parse(MIXED).save(path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(b"shard.00001")] ^= 1
    other = io.BytesIO()
    np.savez(other, facts=np.zeros(3))
    method = bytearray(whole)
    method[whole.rindex(b"PK\x01\x02") + 10] = 99  # of compression
    damages = (whole[:-30], whole[:100], bytes(flipped), bytes(method), b"", b"text")
    for damaged in (*damages, other.getvalue()):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"index: not a binary MDS index: .*; delete it"):
            MDSIndex.load(path)


def test_a_binary_form_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    parse(MIXED).save(path)
    with zipfile.ZipFile(path) as whole:
        members = {name: whole.read(name) for name in whole.namelist()}
    members["facts.npy"] = members["facts.npy"].replace(b"index 1", b"index 2")
    with zipfile.ZipFile(path, "w") as other:
        for name, data in members.items():
            other.writestr(name, data)
    with pytest.raises(UserError, match="'llmfoundry-mds-index 2', not"):
        MDSIndex.load(path)


def changed(change: Callable[[Entry], object]) -> str:
    shards = copy.deepcopy(MIXED)
    change(shards[1])
    return parse(shards).fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.update(samples=2),
        lambda e: e["raw_data"].update(bytes=1002),
        lambda e: e["raw_data"].update(hashes={}),
        lambda e: e["raw_data"]["hashes"].update(sha1="cd2"),
        lambda e: e.update(column_names=["tokens", "urls"]),
        lambda e: e.update(column_encodings=["ndarray:int32:2048", "bytes"]),
    ],
)
def test_what_decides_the_samples_changes_the_fingerprint(
    change: Callable[[Entry], object],
) -> None:
    assert changed(change) != parse(MIXED).fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e["raw_data"].update(basename="elsewhere.mds"),
        lambda e: e.update(compression=None, zip_data=None),
        lambda e: e.update(compression="zstd:9"),
        lambda e: e["zip_data"].update(bytes=5, hashes={}),
        lambda e: e.update(size_limit=None),
    ],
)
def test_where_and_how_files_are_kept_does_not(change: Callable[[Entry], object]) -> None:
    assert changed(change) == parse(MIXED).fingerprint


def test_the_fingerprint_sees_an_exchange_of_shards() -> None:
    assert parse(MIXED[::-1]).fingerprint != parse(MIXED).fingerprint


BARE = {"basename": "bare", "hashes": {}}


def test_the_fingerprint_sees_which_shard_a_hash_is_of() -> None:
    raw = entry(1)["raw_data"]
    one, other = (entry(1, raw_data=r, zip_data=None) for r in (raw, raw | BARE))
    assert parse([one, other]).fingerprint != parse([other, one]).fingerprint


RAW = entry(1)["raw_data"]
WRONG: list[tuple[Entry, str]] = [
    ({"format": "csv"}, "format 'csv'; only mds is read"),
    ({"version": 1}, "version 1; only 2 is read"),
    ({"samples": -1}, "samples: Expected `int` >= 0; write the index again"),
    ({"samples": None}, "samples: Expected `int`, got `null`; write the index again"),
    ({"samples": 1.5}, "samples: Expected `int`, got `float`"),
    ({"samples": True}, "samples: Expected `int`, got `bool`"),
    ({"samples": 1 << 32}, "samples: Expected `int` <= 4294967295"),
    ({"samples": 1e30}, "samples: Expected `int`, got `float`"),
    ({"samples": 10**4000}, "samples: Expected `int` <= 4294967295"),
    ({"version": 10**4000}, "version 10000"),
    ({"raw_data": RAW | {"bytes": 1 << 34}}, "raw_data.bytes: Expected `int` <= 8589934590"),
    ({"zip_data": RAW | {"bytes": True}}, "zip_data.bytes: Expected `int`, got `bool`"),
    ({"raw_data": RAW | {"basename": "a\0b"}}, "raw_data.basename: 'a\\x00b' cannot be the name"),
    ({"raw_data": RAW | {"basename": "a\nb"}}, "raw_data.basename: 'a\\nb' cannot be the name"),
    ({"raw_data": RAW | {"basename": "a//b"}}, "raw_data.basename: 'a//b' cannot be the name"),
    ({"raw_data": RAW | {"basename": "a/index.json"}}, "'a/index.json' cannot be the name"),
    ({"raw_data": RAW | {"basename": "x" * 5000}}, "'… is too long for the name of a file"),
    ({"raw_data": RAW | {"basename": "ü" * 200}}, "'… is too long for the name of a file"),
    ({"zip_data": RAW | {"basename": "a/../../b"}}, "zip_data.basename: 'a/../../b' lies outside"),
    ({"raw_data": entry(0)["raw_data"]}, "'a/shard.00000.mds' is that of shard 0, too"),
    ({"zip_data": entry(0)["zip_data"]}, "'a/shard.00000.mds.zstd' is that of shard 0, too"),
    ({"compression": "zstd:" + "9" * 5000}, "compression 'zstd:9999"),
    ({"raw_data": RAW | {"hashes": {"sha1": "-" * 5000}}}, "raw_data.hashes: "),
    ({"column_names": ["x" * 301, "url"]}, "column_names[0]: Expected `str` of length <= 300"),
    ({"column_encodings": ["ndarray:int32:" + "9999," * 5 + "1", "str"]}, "cannot have a size of"),
    ({"raw_data": None}, "raw_data: Expected `object`, got `null`"),
    ({"raw_data": RAW | {"bytes": -5}}, "raw_data.bytes: Expected `int` >= 0"),
    ({"raw_data": {"bytes": 5}}, "raw_data: Object missing required field `basename`"),
    ({"raw_data": RAW | {"basename": ""}}, "raw_data.basename: Expected `str` of length >= 1"),
    ({"raw_data": RAW | {"basename": "../../x"}}, "'../../x' lies outside"),
    ({"raw_data": RAW | {"basename": "/etc/x"}}, "'/etc/x' lies outside"),
    ({"raw_data": RAW | {"hashes": {"sha1": 5}}}, "raw_data.hashes[...]: Expected `str`"),
    ({"raw_data": RAW | {"hashes": {"sha1": "a b:c"}}}, "raw_data.hashes: "),
    ({"zip_data": {"basename": "x"}}, "zip_data: Object missing required field `bytes`"),
    ({"compression": "lz4"}, "compression 'lz4': no such codec"),
    ({"compression": None}, "compression 'None': no such codec"),
    ({"column_names": None}, "column_names: Expected `array`, got `null`"),
    ({"column_names": ["tokens"]}, "do not match"),
    ({"column_names": ["url", "url"]}, "do not match"),
    ({"column_names": [], "column_encodings": [], "column_sizes": []}, "do not match"),
    ({"column_names": [["tokens"], "url"]}, "column_names[0]: Expected `str`, got `array`"),
    ({"column_names": [5, "url"]}, "column_names[0]: Expected `str`, got `int`"),
    ({"column_sizes": [None, None]}, "ndarray:int32:2048 cannot have a size of None"),
    ({"column_sizes": [8191, None]}, "ndarray:int32:2048 cannot have a size of 8191"),
    ({"column_sizes": [8192, 0]}, "column_sizes[1]: Expected `int` >= 1"),
    ({"column_sizes": [8192.5, None]}, "column_sizes[0]: Expected `int | null`, got `float`"),
]


@pytest.mark.parametrize(("changes", "line"), WRONG)
def test_what_is_wrong_with_a_shard_is_one_line_with_its_number(changes: Entry, line: str) -> None:
    with pytest.raises(UserError) as raised:
        parse([entry(0), entry(1, **changes), entry(2)])
    text = str(raised.value)
    assert text.startswith("set/index.json: shard 1: ")
    assert line in text
    assert "\n" not in text and len(text) < 400


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "it is not JSON"),
        (b"\xff\xfe\xff", "it is not JSON"),
        (encode(MIXED)[:-9], "it is not JSON"),
        (b'{"shards": ' + b"[" * 100_000, "it is not JSON"),
        (encode([entry(0)]).replace(b"url", b"\xff"), "shard 0: column_names: 'utf-8' codec can't"),
        (b"[]", "not an MDS index: Expected `object`, got `array`; write it again"),
        (b'{"version": 2}', "an index of format unknown, not of MDS"),
        (b'{"chunks": [], "config": {}}', "an index of format unknown, not of MDS"),
        (encode([], format="llmfoundry-tokens"), "format llmfoundry-tokens, not of MDS"),
        (encode([], version=1), "version 1; only MDS of version 2 is read"),
        (
            b'{"version": 2, "shards": {}}',
            "not an MDS index: shards: Expected `array | null`, got `object`",
        ),
        (encode([entry(0), {"samples": 1}]), "shard 1: Object missing required field `raw_data`"),
        (encode([entry(0), None]), "shard 1: Expected `object`, got `null`"),
        (encode([entry(0), 0], more=entry(1)), "shard 1: Expected `object`, got `int`"),
        (encode([entry(0)], format=None), "an index of format None, not of MDS"),
        (b"[" * 100_000, "not an MDS index: Expected `object`, got `array`"),
        (b'{"version": ' + b"9" * 5000 + b"}", "MDS index: version: Integer value out of range"),
    ],
)
def test_a_file_that_is_no_mds_index_is_one_line(data: bytes, line: str) -> None:
    with pytest.raises(UserError) as raised:
        MDSIndex.from_bytes(data, source="set/index.json")
    assert str(raised.value).startswith("set/index.json: ")
    assert line in str(raised.value)
