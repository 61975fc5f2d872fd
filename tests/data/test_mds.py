"""MDS shards: every encoding there and back, views of the file, and a line for every damage."""

from __future__ import annotations

import gc
import json
import math
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmfoundry.data.mds.shard import MDSIndex, MDSShard, MDSWriter
from llmfoundry.errors import UserError

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "float32", "float64")


def write(folder: Path, columns: dict[str, str], *samples: dict[str, Any]) -> None:
    with MDSWriter(folder, columns=columns, size_limit=None) as writer:
        for sample in samples:
            writer.write(sample)


def open_shard(folder: Path, n: int = 0) -> MDSShard:
    index = MDSIndex.from_bytes((folder / "index.json").read_bytes())
    return MDSShard(folder / index.spec(n).name, index, n)


def there_and_back(folder: Path, encoding: str, values: list[Any]) -> list[Any]:
    """Between columns of other kinds, so that a wrong place would show."""
    columns = {"a": "str", "b": encoding, "c": "uint16", "d": "bytes"}
    rows = [{"a": "x" * n, "b": v, "c": n, "d": b"y" * n} for n, v in enumerate(values)]
    write(folder, columns, *rows)
    shard = open_shard(folder)
    for n in range(len(shard)):
        rest = {name: value for name, value in shard.sample(n).items() if name != "b"}
        assert rest == {name: value for name, value in rows[n].items() if name != "b"}
    return [shard.read(n, "b") for n in range(len(shard))]


@pytest.mark.parametrize("dtype", [*INTEGERS, "int"])
def test_integers_come_back_to_their_limits(dtype: str, tmp_path: Path) -> None:
    limits = np.iinfo("int64" if dtype == "int" else dtype)
    values = [limits.min, limits.max, 0, 1]
    assert there_and_back(tmp_path, dtype, values) == values


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_come_back_rounded_as_numpy_rounds(dtype: str, tmp_path: Path) -> None:
    values = [0.0, -0.0, 0.1, math.pi, 1e-7, math.inf, -math.inf, float(np.finfo(dtype).max)]
    found = there_and_back(tmp_path, dtype, values)
    assert [struct.pack("<d", v) for v in found] == [
        struct.pack("<d", float(np.dtype(dtype).type(v))) for v in values
    ]


@pytest.mark.parametrize(
    ("encoding", "values"),
    [
        ("bytes", [b"", b"\x00\xff", bytes(range(256)) * 300]),
        ("str", ["", "plain", "zwei ä\u2028x 🚀\x00"]),
        ("str_int", [0, -(10**300), True]),
        ("str_float", [0.1, -math.inf, 5e-324]),
        ("str_decimal", [Decimal("0.10"), Decimal("-1E+1000")]),
        ("json", [None, {"turns": [{"role": "ä"}]}, [1, 2.5], "s", True]),
    ],
)
def test_values_of_any_length_come_back(encoding: str, values: list[Any], tmp_path: Path) -> None:
    assert there_and_back(tmp_path, encoding, values) == values


@pytest.mark.parametrize("form", ["ndarray", "ndarray:{}", "ndarray:{}:2,3"])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_arrays_come_back_in_every_form(form: str, dtype: str, tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = [(1,), (255,), (256,), (65_536,), (2, 1, 3), (1,) * 32]
    if form.endswith("2,3"):
        shapes = [(2, 3)] * 3
    values = [(np.arange(math.prod(shape)) % 100).astype(dtype).reshape(shape) for shape in shapes]
    values.append(values[1].astype(np.dtype(dtype).newbyteorder(">")))
    found = there_and_back(tmp_path, form.format(dtype), values)
    assert [array.dtype for array in found] == [np.dtype(dtype)] * len(values)
    for ours, given in zip(found, values, strict=True):
        assert np.array_equal(ours, given)


def test_a_transposed_array_is_stored_in_row_order(tmp_path: Path) -> None:
    value = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert there_and_back(tmp_path, "ndarray", [value])[0].tolist() == value.tolist()


def test_what_is_bytes_already_is_stored_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, {"a": "str", "b": "int16"}, {"a": "ä".encode(), "b": b"\x01\x02"})
    assert open_shard(tmp_path).sample(0) == {"a": "ä", "b": 513}


def test_bytes_and_arrays_are_views_of_the_file_and_outlive_it(tmp_path: Path) -> None:
    columns = {"a": "bytes", "b": "ndarray:int32", "c": "ndarray:int16:3"}
    arrays = {"b": np.arange(5, dtype=np.int32), "c": np.arange(3, dtype=np.int16)}
    write(tmp_path, columns, {"a": b"abc", **arrays})
    shard = open_shard(tmp_path)
    values = shard.sample(0)
    assert isinstance(values["a"], memoryview)
    assert values["a"].readonly
    for name in ("b", "c"):
        assert not values[name].flags.owndata
        assert not values[name].flags.writeable
    (tmp_path / "shard.00000.mds").unlink()
    del shard
    gc.collect()
    assert values["a"] == b"abc"
    assert values["b"].tolist() == [0, 1, 2, 3, 4]
    assert values["c"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("encoding", "line"),
    [
        ("pkl", "pkl is refused: to read it is to run whatever code its writer put there"),
        ("jpeg", "jpeg holds images, not text"),
        ("list[png]", "holds images, not text"),
        ("mine", "mine is not an MDS encoding of text; known are bytes, str"),
        ("int:5", "int:5 is not an MDS encoding"),
        ("ndarray:complex64", "no dtype 'complex64'"),
        ("ndarray:int32:3,x", "'3,x' is not a shape"),
    ],
)
def test_a_refused_column_stops_nobody_who_does_not_read_it(
    encoding: str, line: str, tmp_path: Path
) -> None:
    write(tmp_path, {"a": "bytes", "b": "str"}, {"a": b"x", "b": "text"})
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0]["column_encodings"][0] = encoding
    (tmp_path / "index.json").write_text(json.dumps(index))
    shard = open_shard(tmp_path)
    assert shard.read(0, "b") == "text"
    with pytest.raises(UserError, match=r"shard.00000.mds: sample 0, column a: ") as raised:
        shard.read(0, "a")
    assert line in str(raised.value)


def damaged(folder: Path, data: bytes, samples: int = 2) -> MDSShard:
    """A shard of these bytes whose index agrees on their number."""
    raw = {"basename": "s.mds", "bytes": len(data), "hashes": {}}
    columns = {
        "column_names": ["a", "b", "c"],
        "column_encodings": ["str", "ndarray", "int32"],
        "column_sizes": [None, None, 4],
    }
    shard = {"version": 2, "format": "mds", "samples": samples, "raw_data": raw, **columns}
    (folder / "s.mds").write_bytes(data)
    index = MDSIndex.from_bytes(json.dumps({"version": 2, "shards": [shard]}).encode())
    return MDSShard(folder / "s.mds", index, 0)


def join(*samples: bytes) -> bytes:
    """A shard by the layout in the reference, with no columns' JSON."""
    start = 4 * (len(samples) + 2)
    ends = np.cumsum([start, *map(len, samples)])
    table = np.array([len(samples), *ends], "<u4")
    return table.tobytes() + b"".join(samples)


ARRAY = bytes([33, 1 << 2, 2]) + struct.pack("<2i", 5, 6)
GOOD = struct.pack("<2I", 2, len(ARRAY)) + b"xy" + ARRAY + struct.pack("<i", -7)


def test_a_shard_made_by_hand_is_read(tmp_path: Path) -> None:
    shard = damaged(tmp_path, join(GOOD, GOOD))
    assert (shard.read(1, "a"), shard.read(1, "c")) == ("xy", -7)
    assert shard.read(1, "b").tolist() == [5, 6]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "it has 0 bytes"),
        (b"\x02\x00\x00", "it does not hold the 2 samples"),
        (join(GOOD, GOOD)[:12], "it does not hold the 2 samples"),
        (join(GOOD), "it does not hold the 2 samples"),
        (join(GOOD, GOOD)[:-1], "its 2 samples do not lie within its"),
        (join(GOOD, GOOD) + b"x", "its 2 samples do not lie within its"),
        (struct.pack("<4I", 2, 12, 16, 16), "do not lie within"),
        (struct.pack("<4I", 2, 16, 4, 16), "do not lie within"),
    ],
)
def test_a_file_that_is_cut_short_is_named(data: bytes, line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"s.mds: damaged: .*; copy it again") as raised:
        damaged(tmp_path, data)
    assert line in str(raised.value)


def test_a_file_of_another_length_than_the_index_says_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"a": "int"}, {"a": 1})
    path = tmp_path / "shard.00000.mds"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(
        UserError, match=r"00000.mds: damaged: it has [0-9]+ bytes, the index specifies"
    ):
        open_shard(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"00000.mds: the shard is missing"):
        open_shard(tmp_path)


@pytest.mark.parametrize(
    ("sample", "column", "line"),
    [
        (b"\x01", "a", "the sample ends after 1 bytes"),
        (GOOD[:-1], "c", "columns' sizes are not the sample's"),
        (GOOD + b"x", "c", "columns' sizes are not the sample's"),
        (b"\xff" * 8 + GOOD[8:], "a", "columns' sizes are not the sample's"),
        (GOOD.replace(b"xy", b"\xffy"), "a", "'utf-8' codec can't decode"),
        (GOOD.replace(ARRAY, b"\x07" + ARRAY[1:]), "b", "no dtype has the code 7"),
        (GOOD.replace(ARRAY, ARRAY[:2] + b"\x03" + ARRAY[3:]), "b", "cannot reshape"),
        (struct.pack("<3I", 0, 0, 0), "b", "index out of"),
    ],
)
def test_a_damaged_sample_is_named_with_its_column(
    sample: bytes, column: str, line: str, tmp_path: Path
) -> None:
    shard = damaged(tmp_path, join(GOOD, sample))
    assert shard.read(0, "a") == "xy"
    with pytest.raises(UserError, match=rf"s.mds: sample 1, column {column}: ") as raised:
        shard.read(1, column)
    assert line in str(raised.value)


def test_an_unknown_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    shard = damaged(tmp_path, join(GOOD, GOOD))
    with pytest.raises(UserError, match=r"s.mds: no column 'text'; it has a, b, c"):
        shard.read(0, "text")
