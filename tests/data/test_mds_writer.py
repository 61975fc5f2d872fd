"""Writing MDS: where a shard ends, what the index holds, when it appears, and what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmfoundry.data.mds import shard as mds_writer
from llmfoundry.data.mds.shard import MDSIndex, MDSShard, MDSWriter
from llmfoundry.errors import UserError


def index_of(folder: Path) -> MDSIndex:
    path = folder / "index.json"
    return MDSIndex.from_bytes(path.read_bytes(), source=str(path))


def texts(folder: Path) -> list[list[str]]:
    """Each shard's."""
    index = index_of(folder)
    shards = [MDSShard(folder / index.spec(n).name, index, n) for n in range(index.n_shards)]
    return [[shard.read(row, "text") for row in range(len(shard))] for shard in shards]


def write(folder: Path, *values: Any, encoding: str = "str", **arguments: Any) -> None:
    with MDSWriter(folder, columns={"text": encoding}, **arguments) as writer:
        for value in values:
            writer.write({"text": value})


def test_no_shard_passes_the_limit_and_one_more_sample_would(tmp_path: Path) -> None:
    values = [chr(97 + n % 26) * (n * 37 % 100) for n in range(300)]
    write(tmp_path / "first", *values, size_limit=1000)
    found = texts(tmp_path / "first")
    assert list(chain.from_iterable(found)) == values
    sizes = [path.stat().st_size for path in sorted((tmp_path / "first").glob("*.mds"))]
    assert max(sizes) <= 1000
    following = [4 + 4 + len(shard[0]) for shard in found[1:]]
    assert all(size + more > 1000 for size, more in zip(sizes, following, strict=False))

    values[0] += "x" * (1000 - sizes[0])
    write(tmp_path / "filled", *values, size_limit=1000)
    assert (tmp_path / "filled/shard.00000.mds").stat().st_size == 1000
    assert len(texts(tmp_path / "filled")[0]) == len(found[0])


def test_a_sample_above_the_limit_has_a_shard_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "a", "b" * 500, "c", "d", size_limit=250)
    assert texts(tmp_path) == [["a"], ["b" * 500], ["c", "d"]]


@pytest.mark.parametrize(
    ("limit", "n_bytes"),
    [
        *((1 << 20, 1 << 20), ("64mb", 1 << 26), ("100KB", 102_400), ("1.5 mb", 3 << 19)),
        *(("512b", 512), ("77", 77), (None, None), (0, None)),
    ],
)
def test_limits_are_of_1024_as_mosaicml_streamings(
    limit: int | str | None, n_bytes: int | None, tmp_path: Path
) -> None:
    write(tmp_path, "a" * 10, size_limit=limit)
    shard = json.loads((tmp_path / "index.json").read_text())["shards"][-1]
    assert shard["size_limit"] == n_bytes


def test_a_dataset_of_no_samples_is_an_index_of_no_shards(tmp_path: Path) -> None:
    write(tmp_path)
    assert json.loads((tmp_path / "index.json").read_text()) == {"version": 2, "shards": []}


@pytest.mark.parametrize("values", [["a" * 400], ["a" * 60] * 3])
def test_more_than_offsets_can_count_is_refused(
    values: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mds_writer, "_LONGEST", 350)  # 4 GB would take the test too long
    with pytest.raises(UserError, match="its shard passes 4 GB, the most that MDS holds"):
        write(tmp_path, *values, size_limit=None)


@pytest.mark.parametrize("compression", [None, "gz:1", "zstd"])
def test_the_index_has_each_files_length_and_hashes(
    compression: str | None, tmp_path: Path
) -> None:
    hashes = ["sha1", "blake2s"]
    write(tmp_path, *"abcdefgh", size_limit=250, compression=compression, hashes=hashes)
    index = index_of(tmp_path)
    assert index.n_shards > 1
    first = json.loads((tmp_path / "index.json").read_text())["shards"][0]
    assert first["hashes"] == ["blake2s", "sha1"]  # mosaicml-streaming takes none but sorted ones
    for n in range(index.n_shards):
        spec = index.spec(n)
        kept = spec if spec.packed is None else spec.packed
        data = (tmp_path / kept.name).read_bytes()
        assert kept.n_bytes == len(data)
        assert dict(kept.hashes) == {
            "blake2s": hashlib.blake2s(data).hexdigest(),
            "sha1": hashlib.sha1(data).hexdigest(),
        }


def test_an_error_leaves_no_index(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        MDSWriter(tmp_path, columns={"text": "str"}, size_limit=200) as writer,
    ):
        for n in range(20, -1, -1):
            writer.write({"text": "x" * (100 // n)})
    assert list(tmp_path.glob("shard.*.mds"))
    assert not list(tmp_path.glob("index*"))


def test_a_folder_that_holds_a_dataset_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a")
    with pytest.raises(UserError, match="a dataset is there already; delete it"):
        write(tmp_path, "b")
    assert texts(tmp_path) == [["a"]]


@pytest.mark.parametrize(
    ("encoding", "value", "line"),
    [
        ("str", 5, "a int is not str"),
        ("str", b"\xff", "can't decode"),
        ("bytes", 8, "a int is not bytes"),
        ("uint8", 256, "0 <= number <= 255"),
        ("int32", np.int64(1 << 40), ""),
        ("int16", 1.5, "not an integer"),
        ("int16", b"\x01", "1 bytes, not 2"),
        ("float16", 1e6, "too large"),
        ("str_int", 1.0, "a float is not int"),
        ("str_float", Decimal(1), "a Decimal is not float"),
        ("json", {1, 2}, "not JSON serializable"),
        ("ndarray", [1, 2], "a list is not ndarray"),
        ("ndarray", np.array(["a"]), "is not one of numbers"),
        ("ndarray", np.zeros((2, 0)), "at least one element"),
        ("ndarray", np.array(5), "needs 1 to 63 axes"),
        ("ndarray:int32", np.zeros(3, np.int64), "int64 is not one of int32"),
        ("ndarray:int32:3", np.zeros(4, np.int32), r"int32 (4,) is not one of int32 (3,)"),
    ],
)
def test_a_value_that_does_not_fit_is_named(
    encoding: str, value: Any, line: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"^sample 0, column text: ") as raised:
        write(tmp_path, value, encoding=encoding)
    assert line in str(raised.value)


def test_a_missing_column_is_named_and_others_are_left_out(tmp_path: Path) -> None:
    samples: list[Mapping[str, Any]] = [{"text": "a", "url": 5}, {"url": "b"}]
    with (
        pytest.raises(UserError, match="sample 1: it has no column 'text'"),
        MDSWriter(tmp_path, columns={"text": "str"}) as writer,
    ):
        for sample in samples:
            writer.write(sample)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"columns": {}}, "columns: there are none"),
        ({"columns": {"x": "pkl"}}, "columns: x: pkl is refused"),
        ({"columns": {"x": "png"}}, "columns: x: png holds images"),
        ({"columns": {"x": "text"}}, "columns: x: text is not an MDS encoding"),
        ({"columns": {"x": "str"}, "compression": "lz4"}, "no such codec"),
        ({"columns": {"x": "str"}, "hashes": ["crc"]}, "hash 'crc': no such algorithm"),
        ({"columns": {"x": "str"}, "size_limit": "64 mib"}, "size_limit: '64 mib'; write bytes"),
        ({"columns": {"x": "str"}, "size_limit": "4gb"}, "below 4 GB"),
        ({"columns": {"x": "str"}, "size_limit": -1}, "size_limit: -1"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_before_anything_is_written(
    arguments: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as raised:
        MDSWriter(tmp_path / "set", **arguments)
    assert line in str(raised.value)
    assert not (tmp_path / "set").exists()
