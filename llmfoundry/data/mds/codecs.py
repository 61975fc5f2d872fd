"""How MDS writes values, packs files and names their hashes; the bytes are mosaicml-streaming's.

`MDSShard` decodes values, `MDSWriter` encodes them; a value is decoded from a view of the file:
`bytes` and `ndarray` stay views of it. Files are packed whole (`zstd`, `gz:9`, `br:11` …): a
library gives an object that takes bytes and knows where its data ends, so one loop streams them
all. Memory stays bounded, a file that was cut short is noticed, and one that unpacks to more than
its index specifies is left as soon as it does. Only snappy is unpacked in one piece; it begins with
the length. `digest` hashes what was written or fetched.
"""

from __future__ import annotations

import bz2
import hashlib
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from llmfoundry.errors import UserError, import_optional

# What `encode` and `decode` raise for a value that does not fit or bytes that hold none; a bad
# decimal is an ArithmeticError, bytes that end too early an IndexError.
CODING_ERRORS = (ValueError, TypeError, OverflowError, ArithmeticError, IndexError, struct.error)
_IMAGES = (
    *("pil", "jpeg", "png", "jpeg_array", "jpegarray"),
    *("list[pil]", "list[jpeg]", "list[png]"),
)
_DTYPES: dict[int, np.dtype[Any]] = {
    8: np.dtype("<u1"),
    9: np.dtype("<i1"),
    16: np.dtype("<u2"),
    17: np.dtype("<i2"),
    18: np.dtype("<f2"),
    32: np.dtype("<u4"),
    33: np.dtype("<i4"),
    34: np.dtype("<f4"),
    64: np.dtype("<u8"),
    65: np.dtype("<i8"),
    66: np.dtype("<f8"),
}
_DTYPE_CODES = {dtype.name: code for code, dtype in _DTYPES.items()}
_MAX_AXES = 63  # six bits
# Bytes given to a library at a time. One may become 32 kB (zstd), so these become 32 MB at most;
# more at a time are no faster.
_CHUNK = 1 << 10
_MOST = 1 << 20  # bytes asked of bz2 and brotli, whose bytes may become millions
_GZIP = 31  # zlib's window bits for a gzip header
_GZIP_SYSTEM = 9  # the header's byte for the operating system
_LONG_WINDOW = "Frame requires too much memory"  # what zstd calls a window of more than 128 MB
# shake_* has no digest of a fixed length, so an index cannot name it.
HASHLIB = tuple(sorted(n for n in hashlib.algorithms_guaranteed if not n.startswith("shake_")))
XXHASH = ("xxh128", "xxh32", "xxh3_128", "xxh3_64", "xxh64")


@dataclass(frozen=True)
class Encoding:
    """How values of a column are stored.

    Attributes:
        size: bytes of each value; None if they differ.
        encode: value to bytes.
        decode: view of the bytes to value.
    """

    size: int | None
    encode: Callable[[Any], bytes]
    decode: Callable[[memoryview], Any]


@cache
def find_encoding(name: str) -> Encoding:
    """The encoding called `name` in an index, such as `str` or `ndarray:int32:2048`.

    Raises:
        ValueError: why it cannot be read or written.
    """
    if name in _ENCODINGS:
        return _ENCODINGS[name]
    if name in _IMAGES:
        raise ValueError(f"{name} holds images, not text; leave the column out")
    if name == "pkl":
        raise ValueError(
            "pkl is refused: to read it is to run whatever code its writer put there;"
            " write the column again as json"
        )
    kind, _, form = name.partition(":")
    if kind == "ndarray":
        return _find_ndarray(name, form)
    known = ", ".join([*_ENCODINGS, "ndarray[:dtype[:d0,d1…]]"])
    raise ValueError(f"{name} is not an MDS encoding of text; known are {known}")


def encoded_size(name: str) -> int | None:
    """Bytes of each value; None if they differ, or if the encoding is not one of text."""
    try:
        return find_encoding(name).size
    except ValueError:
        return None


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} is not {kind.__name__}")
    return value


def _encode_bytes(value: Any) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):  # bytes() makes 8 zeros of an 8
        raise TypeError(f"a {type(value).__name__} is not bytes")
    return bytes(value)


def _decode_bytes(data: memoryview) -> memoryview:
    return data


def _encode_str(value: Any) -> bytes:
    return str(_expect(value, str)).encode()


def _decode_str(data: memoryview) -> str:
    return str(data, "utf-8")


def _encode_digits(value: Any, *, kind: type[Any]) -> bytes:
    return str(kind(_expect(value, kind))).encode()  # kind: a bool's digits are those of an int


def _decode_digits(data: memoryview, *, kind: Callable[[str], Any]) -> Any:
    return kind(str(data, "utf-8"))


def _encode_json(value: Any) -> bytes:
    return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value).encode()


def _decode_json(data: memoryview) -> Any:
    return json.loads(str(data, "utf-8"))


def _scalar(code: str) -> Encoding:
    """A number of fixed size; code: struct's. One that does not fit is an error, never wrapped."""
    layout = struct.Struct(f"<{code}")

    def decode(data: memoryview) -> Any:
        return layout.unpack(data)[0]

    return Encoding(layout.size, layout.pack, decode)


_ENCODINGS = {
    "bytes": Encoding(None, _encode_bytes, _decode_bytes),
    "str": Encoding(None, _encode_str, _decode_str),
    "int": _scalar("q"),
    "uint8": _scalar("B"),
    "uint16": _scalar("H"),
    "uint32": _scalar("I"),
    "uint64": _scalar("Q"),
    "int8": _scalar("b"),
    "int16": _scalar("h"),
    "int32": _scalar("i"),
    "int64": _scalar("q"),
    "float16": _scalar("e"),
    "float32": _scalar("f"),
    "float64": _scalar("d"),
    "str_int": Encoding(None, partial(_encode_digits, kind=int), partial(_decode_digits, kind=int)),
    "str_float": Encoding(
        None, partial(_encode_digits, kind=float), partial(_decode_digits, kind=float)
    ),
    "str_decimal": Encoding(
        None, partial(_encode_digits, kind=Decimal), partial(_decode_digits, kind=Decimal)
    ),
    "json": Encoding(None, _encode_json, _decode_json),
}


def _find_ndarray(name: str, form: str) -> Encoding:
    """`form`: "", "int32" or "int32:3,4". What it leaves out is stored with each value."""
    dtype_name, _, dims = form.partition(":")
    if form and dtype_name not in _DTYPE_CODES:
        raise ValueError(f"{name}: no dtype {dtype_name!r}; known are {', '.join(_DTYPE_CODES)}")
    if form.count(":") == 0:
        dtype = np.dtype(dtype_name).newbyteorder("<") if form else None
        return Encoding(
            None, partial(_encode_ndarray, dtype=dtype), partial(_decode_ndarray, dtype=dtype)
        )
    parts = dims.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"{name}: {dims!r} is not a shape; write whole numbers above 0, as in 3,4")
    shape = tuple(int(part) for part in parts)
    dtype = np.dtype(dtype_name).newbyteorder("<")
    return Encoding(
        math.prod(shape) * dtype.itemsize,
        partial(_encode_static, dtype=dtype, shape=shape),
        partial(_decode_static, dtype=dtype, shape=shape),
    )


def _encode_static(value: Any, *, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    name = _expect(value, np.ndarray).dtype.name
    if name != dtype.name or value.shape != shape:
        raise ValueError(f"an array of {name} {value.shape} is not one of {dtype.name} {shape}")
    return bytes(value.astype(dtype, copy=False).tobytes())


def _decode_static(data: memoryview, *, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(data, dtype).reshape(shape)


def _encode_ndarray(value: Any, *, dtype: np.dtype[Any] | None) -> bytes:
    """[dtype code] form shape values; the form as in `_shape_layout`."""
    name = _expect(value, np.ndarray).dtype.name
    if name not in _DTYPE_CODES or (dtype is not None and name != dtype.name):
        raise ValueError(f"an array of {name} is not one of {dtype.name if dtype else 'numbers'}")
    if value.size == 0 or not 0 < value.ndim <= _MAX_AXES:
        raise ValueError(
            f"an array of shape {value.shape} cannot be stored: it needs 1 to {_MAX_AXES} axes"
            " and at least one element"
        )
    code = _DTYPE_CODES[name]
    head = b"" if dtype is not None else bytes([code])
    longest = max(value.shape)
    form = value.ndim << 2 | sum(longest >= 1 << bits for bits in (8, 16, 32))
    values = value.astype(_DTYPES[code], copy=False).tobytes()
    return b"".join((head, bytes([form]), _shape_layout(form).pack(*value.shape), values))


def _decode_ndarray(data: memoryview, *, dtype: np.dtype[Any] | None) -> np.ndarray:
    start = 0
    if dtype is None:
        dtype = _DTYPES.get(data[0])
        start = 1
        if dtype is None:
            raise ValueError(f"no dtype has the code {data[0]}")
    layout = _shape_layout(data[start])
    shape = layout.unpack_from(data, start + 1)
    values = np.frombuffer(data, dtype, offset=start + 1 + layout.size)
    return values if values.shape == shape else values.reshape(shape)


@cache
def _shape_layout(form: int) -> struct.Struct:
    """Return the layout of a stored shape.

    Args:
        form: the byte before the shape: number of axes << 2 | log2 of the bytes of each length.
    """
    n_axes, log2_bytes = form >> 2, form & 3
    return struct.Struct(f"<{n_axes}{'BHIQ'[log2_bytes]}")


class PackedError(Exception):
    """The compressed data is damaged or longer than expected."""


@dataclass(frozen=True)
class _Codec:
    """Compression and decompression by a library.

    Attributes:
        levels: valid compression levels.
        level: default level.
        pack: compresses (data, level) to bytes.
        unpack: decompresses (file, length of the data if known) in parts.
    """

    levels: range
    level: int
    pack: Callable[[bytes, int], bytes]
    unpack: Callable[[IO[bytes], int | None], Iterator[bytes]]


def decompress(
    compression: str, source: Path, target: IO[bytes], *, n_bytes: int | None = None
) -> None:
    """Decompress the file `source` to `target`.

    Args:
        compression: name of the codec, with or without a level.
        source: path of the compressed file.
        target: output file. After an error it may have a part of the data, at most `n_bytes`.
        n_bytes: length of the decompressed data; None: unknown and unlimited.

    Raises:
        UserError: the compression is unknown or unsupported, or its library is missing.
        PackedError: `source` is damaged, or its data is longer than `n_bytes`.
    """
    codec, _ = _parse(compression)
    n_written = 0
    with source.open("rb") as file:
        for part in codec.unpack(file, n_bytes):
            n_written += len(part)
            if n_bytes is not None and n_written > n_bytes:
                raise _too_long(n_bytes)
            target.write(part)


def compress(compression: str, data: bytes) -> bytes:
    """Return the compressed data."""
    codec, level = _parse(compression)
    return codec.pack(data, level)


def suffix(compression: str) -> str:
    """Return the file suffix of a compression: `.zstd`, `.gz`, `.br`, `.snappy`, `.bz2`."""
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
    """Compress with gzip so that equal data gives equal bytes.

    The bytes are those of Python's gzip, which mosaicml-streaming uses, with a time of 0.
    """
    stream = zlib.compressobj(level, wbits=_GZIP)
    packed = bytearray(stream.compress(data) + stream.flush())
    packed[_GZIP_SYSTEM] = 255  # "unknown"; zlib writes the operating system of its build
    return bytes(packed)


def _pack_snappy(data: bytes, level: int) -> bytes:
    return bytes(_library("snappy", "python-snappy").compress(data))


def _unpack_snappy(file: IO[bytes], n_bytes: int | None) -> Iterator[bytes]:
    library, packed = _library("snappy", "python-snappy"), file.read()

    # The data starts with its decompressed length as a varint of at most 5 bytes: 7 bits in each
    # byte, lowest bits first; the highest bit of a byte is set if another byte follows.
    last = next((n for n, byte in enumerate(packed[:5]) if byte < 0x80), 0)
    length = 0
    for n, byte in enumerate(packed[: last + 1]):
        length += (byte & 0x7F) << (7 * n)
    if n_bytes is not None and length > n_bytes:
        raise _too_long(n_bytes)
    yield _attempt(library.decompress, packed)


def _pack_zstd(data: bytes, level: int) -> bytes:
    return bytes(_library("zstandard", "zstandard").ZstdCompressor(level=level).compress(data))


def _zstd_stream() -> Any:
    return _library("zstandard", "zstandard").ZstdDecompressor().decompressobj()


# Valid levels and default levels are those of mosaicml-streaming.
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


def digest(algorithm: str, chunks: Iterable[bytes | memoryview]) -> str:
    """Return the hex digest of the concatenated chunks."""
    state = _new(algorithm)
    for chunk in chunks:
        state.update(chunk)
    return str(state.hexdigest())


def check_algorithm(algorithm: str) -> None:
    """Check that `digest` supports the algorithm.

    Raises:
        UserError: the algorithm is unknown, or its library is missing.
    """
    _new(algorithm)


def _new(algorithm: str) -> Any:
    if algorithm in HASHLIB:
        # not used for security, so md5 also works on systems that forbid it
        return hashlib.new(algorithm, usedforsecurity=False)
    if algorithm not in XXHASH:
        raise UserError(
            f"hash {algorithm!r}: no such algorithm; write one of {', '.join((*HASHLIB, *XXHASH))}"
        )
    library = import_optional("xxhash", f"hash {algorithm}:", package="xxhash")
    return getattr(library, algorithm)()
