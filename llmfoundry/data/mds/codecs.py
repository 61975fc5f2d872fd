"""Compression of whole files under mosaicml-streaming's names: `zstd`, `gz:9`, `br:11` and such.

The shard cache decompresses what it fetched, `MDSWriter` compresses what it writes. One idea: a
library gives an object that takes bytes and knows where its data ends, so one loop streams them
all: memory stays constant and a file that was cut short is noticed. Only snappy's format has to be
unpacked in one piece.
"""

from __future__ import annotations

import bz2
import importlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from llmfoundry.errors import UserError

_CHUNK = 1 << 18
_GZIP = 31  # zlib's window bits for a gzip header; its time stays 0: equal data packs equally


class _DamagedError(Exception):
    """The packed bytes are not what they should be."""


@dataclass(frozen=True)
class _Codec:
    """One library.

    Attributes:
        levels: those that may be written.
        level: meant where none is written.
        pack: (data, level) to packed bytes.
        unpack: a file of packed bytes to the data, part by part.
    """

    levels: range
    level: int
    pack: Callable[[bytes, int], bytes]
    unpack: Callable[[IO[bytes]], Iterator[bytes]]


def decompress(compression: str, source: Path, target: IO[bytes]) -> None:
    """Write what `source` holds to `target`.

    Raises:
        UserError: an unknown compression, its library is missing, or `source` is damaged.
    """
    codec, _ = _parse(compression)
    with source.open("rb") as file:
        try:
            for part in codec.unpack(file):
                target.write(part)
        except _DamagedError as error:
            raise UserError(
                f"{source}: damaged: {error} ({compression}); copy or write the file again"
            ) from error


def compress(compression: str, data: bytes) -> bytes:
    """`data`, packed.

    Raises:
        UserError: an unknown compression, or its library is missing.
    """
    codec, level = _parse(compression)
    return codec.pack(data, level)


def suffix(compression: str) -> str:
    """What the name of a packed file ends with: `.zstd`, `.gz`, `.br`, `.snappy`, `.bz2`.

    Raises:
        UserError: an unknown compression.
    """
    _parse(compression)
    return f".{compression.partition(':')[0]}"


def _parse(compression: str) -> tuple[_Codec, int]:
    name, colon, level = compression.partition(":")
    codec = _CODECS.get(name)
    if codec is None:
        raise UserError(
            f"compression {compression!r}: no such codec; write one of {', '.join(_CODECS)}"
        )
    if not colon:
        return codec, codec.level
    if not (level.isascii() and level.isdigit() and int(level) in codec.levels):
        levels = f"{codec.levels[0]} to {codec.levels[-1]}" if codec.levels else "none"
        raise UserError(
            f"compression {compression!r}: no such level; write {name}, or a level of {levels}"
        )
    return codec, int(level)


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"compression {module}: needs the package {package}; write: pip install {package}"
        ) from error


def _unpack_stream(file: IO[bytes], *, start: Callable[[], Any]) -> Iterator[bytes]:
    """Unpack by an object with `decompress`, `eof` and `unused_data`, as bz2's has them."""
    stream = start()
    while packed := file.read(_CHUNK):
        while packed:
            if stream.eof:  # packed files one after another are one file
                stream = start()
            yield _attempt(stream.decompress, packed)
            packed = stream.unused_data if stream.eof else b""
    if not stream.eof:
        raise _DamagedError("it ends too early")


def _attempt(unpack: Callable[[bytes], bytes], packed: bytes) -> bytes:
    try:
        return unpack(packed)
    except MemoryError:
        raise
    except Exception as error:  # each library has its own, with no common base
        raise _DamagedError(str(error) or type(error).__name__) from error


class _BrotliStream:
    """Brotli's decompressor behind bz2's names."""

    unused_data = b""  # it takes no byte behind its end

    def __init__(self) -> None:
        self._stream = _library("brotli", "Brotli").Decompressor()

    @property
    def eof(self) -> bool:
        return bool(self._stream.is_finished())

    def decompress(self, packed: bytes) -> bytes:
        return bytes(self._stream.process(packed))


def _pack_brotli(data: bytes, level: int) -> bytes:
    return bytes(_library("brotli", "Brotli").compress(data, quality=level))


def _pack_gzip(data: bytes, level: int) -> bytes:
    stream = zlib.compressobj(level, wbits=_GZIP)
    return stream.compress(data) + stream.flush()


def _pack_snappy(data: bytes, level: int) -> bytes:
    return bytes(_library("snappy", "python-snappy").compress(data))


def _unpack_snappy(file: IO[bytes]) -> Iterator[bytes]:
    yield _attempt(_library("snappy", "python-snappy").decompress, file.read())


def _pack_zstd(data: bytes, level: int) -> bytes:
    return bytes(_library("zstandard", "zstandard").ZstdCompressor(level=level).compress(data))


def _zstd_stream() -> Any:
    return _library("zstandard", "zstandard").ZstdDecompressor().decompressobj()


# The levels, and those meant where none is written, are mosaicml-streaming's.
_CODECS = {
    "br": _Codec(range(12), 11, _pack_brotli, partial(_unpack_stream, start=_BrotliStream)),
    "bz2": _Codec(
        range(1, 10), 9, bz2.compress, partial(_unpack_stream, start=bz2.BZ2Decompressor)
    ),
    "gz": _Codec(
        range(10), 9, _pack_gzip, partial(_unpack_stream, start=partial(zlib.decompressobj, _GZIP))
    ),
    "snappy": _Codec(range(0), 0, _pack_snappy, _unpack_snappy),
    "zstd": _Codec(range(1, 23), 3, _pack_zstd, partial(_unpack_stream, start=_zstd_stream)),
}
