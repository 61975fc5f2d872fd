"""Compression of whole files under mosaicml-streaming's names: `zstd`, `gz:9`, `br:11` and such.

The shard cache decompresses what it fetched, `MDSWriter` compresses what it writes. One idea: a
library gives an object that takes bytes and knows where its data ends, so one loop streams them
all: memory stays bounded, a file that was cut short is noticed, and one that unpacks to more than
its index specifies is left as soon as it does. Only snappy's format has to be unpacked in one
piece; it begins with the length.
"""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from llmfoundry.errors import UserError, import_optional

# Bytes given to a library at a time. One may become 32 kB (zstd), so these become 32 MB at most;
# more at a time are no faster.
_CHUNK = 1 << 10
_MOST = 1 << 20  # bytes asked of bz2 and brotli, whose bytes may become millions
_GZIP = 31  # zlib's window bits for a gzip header
_GZIP_SYSTEM = 9  # the header's byte for the operating system
_LONG_WINDOW = "Frame requires too much memory"  # what zstd calls a window of more than 128 MB


class PackedError(Exception):
    """The packed bytes are not what they should be."""


@dataclass(frozen=True)
class _Codec:
    """One library.

    Attributes:
        levels: those that may be written.
        level: meant where none is written.
        pack: (data, level) to packed bytes.
        unpack: (a file of packed bytes, the data's length if known) to the data, part by part.
    """

    levels: range
    level: int
    pack: Callable[[bytes, int], bytes]
    unpack: Callable[[IO[bytes], int | None], Iterator[bytes]]


def decompress(
    compression: str, source: Path, target: IO[bytes], *, n_bytes: int | None = None
) -> None:
    """Write what `source` holds to `target`.

    Args:
        compression: the codec, with or without a level.
        source: the packed file.
        target: it may hold a part after an error, never more than `n_bytes`.
        n_bytes: the length that the data must have; None: unknown, and unbounded.

    Raises:
        UserError: an unknown compression, its library is missing, or a setting that is not read.
        PackedError: `source` is damaged, or holds more than `n_bytes`.
    """
    codec, _ = _parse(compression)
    found = 0
    with source.open("rb") as file:
        for part in codec.unpack(file, n_bytes):
            found += len(part)
            if n_bytes is not None and found > n_bytes:
                raise _too_long(n_bytes)
            target.write(part)


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
    if not (level.isascii() and level.isdigit() and int(level[:3]) in codec.levels):
        levels = f"{codec.levels[0]} to {codec.levels[-1]}" if codec.levels else "none"
        raise UserError(
            f"compression {compression!r}: no such level; write {name}, or a level of {levels}"
        )
    return codec, int(level)


def _library(module: str, package: str) -> Any:
    return import_optional(module, f"compression {module}:", package=package)


def _too_long(n_bytes: int) -> PackedError:
    return PackedError(f"it holds more than the {n_bytes} bytes that its index specifies")


def _unpack_stream(
    file: IO[bytes], n_bytes: int | None, *, start: Callable[[], Any], most: tuple[int, ...] = ()
) -> Iterator[bytes]:
    """Unpack by an object with `decompress`, `eof` and `unused_data`, as bz2's has them.

    With `most`, by one with `needs_input` too, which gives at most so many bytes at a time.
    """
    stream = start()
    while packed := file.read(_CHUNK):
        while packed:
            if stream.eof:  # packed files one after another are one file
                stream = start()
            yield _attempt(stream.decompress, packed, *most)
            while most and not (stream.eof or stream.needs_input):
                yield _attempt(stream.decompress, b"", *most)
            packed = stream.unused_data if stream.eof else b""
    if not stream.eof:
        raise PackedError("it ends too early")


def _attempt(unpack: Callable[..., bytes], packed: bytes, *most: int) -> bytes:
    try:
        return unpack(packed, *most)
    except MemoryError:
        raise
    except Exception as error:  # each library has its own, with no common base
        if _LONG_WINDOW in str(error):
            raise UserError(
                "was packed with a window of more than 128 MB (zstd --long), which is not read;"
                " pack it again without"
            ) from error
        raise PackedError(str(error) or type(error).__name__) from error


class _BrotliStream:
    """Brotli's decompressor behind bz2's names."""

    unused_data = b""  # it takes no byte behind its end

    def __init__(self) -> None:
        self._stream = _library("brotli", "'Brotli>=1.2'").Decompressor()

    @property
    def eof(self) -> bool:
        return bool(self._stream.is_finished())

    @property
    def needs_input(self) -> bool:
        return bool(self._stream.can_accept_more_data())

    def decompress(self, packed: bytes, most: int) -> bytes:
        return bytes(self._stream.process(packed, output_buffer_limit=most))


def _pack_brotli(data: bytes, level: int) -> bytes:
    return bytes(_library("brotli", "'Brotli>=1.2'").compress(data, quality=level))


def _pack_gzip(data: bytes, level: int) -> bytes:
    """As mosaicml-streaming by Python's gzip, but for the time, 0: equal data packs equally."""
    stream = zlib.compressobj(level, wbits=_GZIP)
    packed = bytearray(stream.compress(data) + stream.flush())
    packed[_GZIP_SYSTEM] = 255  # unknown; zlib writes the one that it was built on
    return bytes(packed)


def _pack_snappy(data: bytes, level: int) -> bytes:
    return bytes(_library("snappy", "python-snappy").compress(data))


def _unpack_snappy(file: IO[bytes], n_bytes: int | None) -> Iterator[bytes]:
    library, packed = _library("snappy", "python-snappy"), file.read()
    # The length comes first, in groups of 7 bits, the lowest first; the last has no eighth bit.
    ends = next((n for n, byte in enumerate(packed[:5]) if byte < 0x80), 0)
    length = sum((byte & 0x7F) << 7 * n for n, byte in enumerate(packed[: ends + 1]))
    if n_bytes is not None and length > n_bytes:
        raise _too_long(n_bytes)
    yield _attempt(library.decompress, packed)


def _pack_zstd(data: bytes, level: int) -> bytes:
    return bytes(_library("zstandard", "zstandard").ZstdCompressor(level=level).compress(data))


def _zstd_stream() -> Any:
    return _library("zstandard", "zstandard").ZstdDecompressor().decompressobj()


# The levels, and those meant where none is written, are mosaicml-streaming's.
_CODECS = {
    "br": _Codec(
        range(12), 11, _pack_brotli, partial(_unpack_stream, start=_BrotliStream, most=(_MOST,))
    ),
    "bz2": _Codec(
        range(1, 10),
        9,
        bz2.compress,
        partial(_unpack_stream, start=bz2.BZ2Decompressor, most=(_MOST,)),
    ),
    "gz": _Codec(
        range(10), 9, _pack_gzip, partial(_unpack_stream, start=partial(zlib.decompressobj, _GZIP))
    ),
    "snappy": _Codec(range(0), 0, _pack_snappy, _unpack_snappy),
    "zstd": _Codec(range(1, 23), 3, _pack_zstd, partial(_unpack_stream, start=_zstd_stream)),
}
