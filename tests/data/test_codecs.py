"""Codecs and checksums: mosaicml-streaming's bytes and names, streamed, and every wrong file."""

from __future__ import annotations

import hashlib
import io
import sys
import tracemalloc
from pathlib import Path

import pytest

from llmfoundry.data.mds import codecs
from llmfoundry.errors import UserError

DATA = b"mosaic data shard " * 9
# DATA as mosaicml-streaming 0.13 compresses it
PACKED = {
    "br": "1ba100f805ea64a97eae371f08664348182140e9392a641e5db216",
    "bz2": (
        "425a683931415926535976de44a100003a118040002c629c0020004052a9901ea100d34d1a8dc6e32323"
        "b8e63c8c8f63a8f2351f46a32371a8fc5dc914e14241db791284"
    ),
    "gz": ("1f8b080006de016b02ffcbcd2f4ecc4c5648492c495428ce482c4a51c81d642200d83549eea2000000"),
    "snappy": "a201446d6f73616963206461746120736861726420fe1200fe12003e1200",
    "zstd": "28b52ffd20a2cd0000906d6f7361696320646174612073686172642001001a45cd30",
    "br:1": (
        "8b50000080aaaaaaeaff74e5f39540f82072101080050ee0e2578a4e918d03e04c083d4785cca34bd6da1103"
    ),
    "bz2:1": (
        "425a683131415926535976de44a100003a118040002c629c0020004052a9901ea100d34d1a8dc6e32323"
        "b8e63c8c8f63a8f2351f46a32371a8fc5dc914e14241db791284"
    ),
    "gz:1": ("1f8b080006de016b04ffcbcd2f4ecc4c5648492c495428ce482c4a51c81d642200d83549eea2000000"),
    "zstd:19": "28b52ffd20a2d50000986d6f736169632064617461207368617264206d01001945cd30",
}
LIBRARY = {"br": "brotli", "snappy": "snappy", "zstd": "zstandard"}


def need(compression: str) -> None:
    """Skip where the codec's library is not installed."""
    library = LIBRARY.get(compression.partition(":")[0])
    if library is not None:
        pytest.importorskip(library)


def unpack(compression: str, data: bytes, folder: Path) -> bytes:
    source = folder / "packed"
    source.write_bytes(data)
    target = io.BytesIO()
    codecs.decompress(compression, source, target)
    return target.getvalue()


@pytest.mark.parametrize("compression", PACKED)
def test_files_of_mosaicml_streaming_are_unpacked(compression: str, tmp_path: Path) -> None:
    need(compression)
    assert unpack(compression, bytes.fromhex(PACKED[compression]), tmp_path) == DATA


@pytest.mark.parametrize("compression", PACKED)
def test_packed_bytes_are_mosaicml_streamings_but_for_gzips_time(compression: str) -> None:
    need(compression)
    theirs = bytearray.fromhex(PACKED[compression])
    if compression.startswith("gz"):
        theirs[4:8] = bytes(4)
    assert codecs.compress(compression, DATA) == theirs


@pytest.mark.parametrize("compression", ["br:0", "bz2:1", "gz:0", "snappy", "zstd:1"])
def test_files_longer_than_a_read_come_out_whole(compression: str, tmp_path: Path) -> None:
    need(compression)
    data = b"".join(hashlib.sha512(str(n).encode()).digest() for n in range(20_000))
    assert unpack(compression, codecs.compress(compression, data), tmp_path) == data
    assert unpack(compression, codecs.compress(compression, b""), tmp_path) == b""


@pytest.mark.parametrize("compression", ["bz2", "gz", "zstd"])
def test_packed_files_one_after_another_are_one(compression: str, tmp_path: Path) -> None:
    need(compression)
    packed = codecs.compress(compression, DATA) + codecs.compress(compression, b"more")
    assert unpack(compression, packed, tmp_path) == DATA + b"more"


@pytest.mark.parametrize("compression", ["br", "bz2", "gz", "snappy", "zstd"])
@pytest.mark.parametrize("damage", ["short", "garbage", "empty", "longer"])
def test_a_damaged_file_is_named(compression: str, damage: str, tmp_path: Path) -> None:
    need(compression)
    packed = bytes.fromhex(PACKED[compression])
    wrong = {"short": packed[:-5], "garbage": b"\xff" * 40, "empty": b"", "longer": packed + b"x"}
    with pytest.raises(codecs.PackedError):
        unpack(compression, wrong[damage], tmp_path)


def bomb(compression: str, n_bytes: int) -> bytes:
    """A small file that unpacks to that many zeros."""
    if compression != "br":
        return codecs.compress(compression, bytes(n_bytes))
    return codecs.compress("br:5", bytes(n_bytes))  # 11 takes a minute


@pytest.mark.parametrize("compression", ["br", "bz2", "gz", "snappy", "zstd"])
def test_unpacking_ends_soon_after_the_length_that_it_is_given(
    compression: str, tmp_path: Path
) -> None:
    need(compression)
    promised = 1000
    (tmp_path / "packed").write_bytes(bomb(compression, 1 << 26))
    target = io.BytesIO()
    tracemalloc.start()
    with pytest.raises(
        codecs.PackedError, match="more than the 1000 bytes that its index specifies"
    ):
        codecs.decompress(compression, tmp_path / "packed", target, n_bytes=promised)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(target.getvalue()) <= promised and most < 1 << 25
    (tmp_path / "packed").write_bytes(codecs.compress(compression, DATA))
    codecs.decompress(compression, tmp_path / "packed", target, n_bytes=len(DATA))
    assert target.getvalue().endswith(DATA)


def test_a_file_packed_with_a_long_window_is_called_so(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    settings = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    with pytest.raises(UserError, match=r"window of more than 128 MB \(zstd --long\), which is"):
        unpack("zstd", stream.compress(DATA) + stream.flush(), tmp_path)


@pytest.mark.parametrize(
    ("compression", "line"),
    [
        ("lz4", "no such codec; write one of br, bz2, gz, snappy, zstd"),
        ("zstd:23", "no such level; write zstd, or a level of 1 to 22"),
        ("gz:-1", "no such level; write gz, or a level of 0 to 9"),
        ("bz2:", "no such level"),
        ("snappy:1", "no such level; write snappy, or a level of none"),
        ("", "no such codec"),
    ],
)
def test_an_unknown_compression_says_what_to_write(compression: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        codecs.suffix(compression)


@pytest.mark.parametrize(
    ("compression", "package"),
    [("br", "'Brotli>=1.2'"), ("snappy", "python-snappy"), ("zstd:3", "zstandard")],
)
def test_a_missing_library_is_named_with_its_pip_line(
    compression: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, LIBRARY[compression.partition(":")[0]], None)
    with pytest.raises(UserError, match=f"pip install {package}$"):
        codecs.compress(compression, DATA)
    with pytest.raises(UserError, match=f"pip install {package}$"):
        unpack(compression, b"x", tmp_path)


def test_suffixes_are_mosaicml_streamings() -> None:
    names = ["zstd:3", "gz:9", "br", "snappy", "bz2:1"]
    assert [codecs.suffix(n) for n in names] == [".zstd", ".gz", ".br", ".snappy", ".bz2"]


@pytest.mark.parametrize("algorithm", codecs.HASHLIB)
def test_hashlibs_digests_do_not_depend_on_the_chunks(algorithm: str) -> None:
    expected = hashlib.new(algorithm, DATA).hexdigest()
    assert codecs.digest(algorithm, [DATA]) == expected
    assert codecs.digest(algorithm, [DATA[:7], b"", memoryview(DATA)[7:]]) == expected


def test_xxhashs_digests_are_those_of_its_specification() -> None:
    pytest.importorskip("xxhash")
    # Of the empty input, from the specification of XXH32 and XXH64 and of XXH3's reference code.
    empty = {
        "xxh32": "02cc5d05",
        "xxh64": "ef46db3751d8e999",
        "xxh3_64": "2d06800538d394c2",
        "xxh3_128": "99aa06d3014798d86001c324468d497f",
        "xxh128": "99aa06d3014798d86001c324468d497f",
    }
    assert {name: codecs.digest(name, []) for name in codecs.XXHASH} == empty


def test_an_unknown_or_missing_hash_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("crc32", "shake_128", "new"):
        with pytest.raises(UserError, match=f"hash '{name}': no such algorithm; write one of"):
            codecs.digest(name, [b""])
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(UserError, match=r"pip install xxhash$"):
        codecs.digest("xxh64", [b""])
