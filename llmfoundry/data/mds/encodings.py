"""The encodings of MDS columns: how a value of each kind becomes bytes and comes back.

`MDSShard` decodes with them, `MDSWriter` encodes; the bytes are mosaicml-streaming's. A value is
decoded from a view of the file: `bytes` and `ndarray` stay views of it, the rest is made new.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from typing import Any

import numpy as np

# What `encode` and `decode` raise for a value that does not fit or bytes that hold none; a bad
# decimal is an ArithmeticError, bytes that end too early an IndexError.
CODING_ERRORS = (ValueError, TypeError, OverflowError, ArithmeticError, IndexError, struct.error)


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
    """Of a shape, by the byte before it: axes << 2 | log2 of the bytes of each."""
    return struct.Struct(f"<{form >> 2}{'BHIQ'[form & 3]}")
