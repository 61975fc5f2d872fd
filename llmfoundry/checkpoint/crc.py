"""CRC-32 of files in pieces, so that many processes and threads may read one file.

A checkpoint of 8 processes may be resumed by 512, and one of 512 be opened by one with many cores:
what each of them reads is a part of all bytes, whatever files they lie in. `verify.py` calls it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from llmfoundry.checkpoint.remote_run import open_file

BLOCK = 1 << 22
"""Bytes that are read at once."""
_POLYNOMIAL = 0xEDB88320  # CRC-32's, its lowest power in the highest bit
_WRITER = re.compile(r"__([0-9]+)_")


class Piece(NamedTuple):
    """Bytes `begin` to `end` of a file of a checkpoint."""

    name: str
    begin: int
    end: int

    def cut(self, length: int) -> Iterator[Piece]:
        """Pieces of at most so many bytes."""
        for begin in range(self.begin, self.end, length):
            yield Piece(self.name, begin, min(begin + length, self.end))


def share(sizes: Mapping[str, int], rank: int, n_ranks: int) -> list[Piece]:
    """What one of `n_ranks` processes reads: its part of all bytes, equal to a byte.

    Files follow one another by the process that wrote them, so on as many processes each reads
    about what it wrote and is about to load, and finds it in its machine's memory then.

    Args:
        sizes: bytes of each file.
        rank: the process that asks.
        n_ranks: among how many the bytes are shared out.
    """
    total = sum(sizes.values())
    first, last = total * rank // n_ranks, total * (rank + 1) // n_ranks
    pieces, start = [], 0
    for name in sorted(sizes, key=lambda name: (writer_of(name), name)):
        begin, end = max(first - start, 0), min(last - start, sizes[name])
        if begin < end:
            pieces.append(Piece(name, begin, end))
        start += sizes[name]
    return pieces


def share_files(sizes: Mapping[str, int], rank: int, n_ranks: int) -> list[Piece]:
    """As `share`, but whole files, each read where it was written, and may have been kept."""
    return [
        Piece(name, 0, size)
        for name, size in sorted(sizes.items())
        if max(0, writer_of(name)) % n_ranks == rank and size
    ]


def writer_of(name: str) -> int:
    """The rank that wrote a file of tensors; -1 of any other."""
    found = _WRITER.search(name)
    return int(found[1]) if found else -1


def blocks(folder: Path, piece: Piece) -> Iterator[bytes]:
    """The bytes of a piece, a block at a time; fewer where the file ends before it."""
    with open_file(folder / piece.name) as file:
        file.seek(piece.begin)
        left = piece.end - piece.begin
        while left and (block := file.read(min(BLOCK, left))):
            yield block
            left -= len(block)


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    for block in blocks(path.parent, Piece(path.name, 0, path.stat().st_size)):
        crc = zlib.crc32(block, crc)
    return crc


def joined(sums: Iterable[tuple[Piece, int]]) -> dict[str, int]:
    """CRC-32 of each file, of those of all its pieces in any order."""
    crcs: dict[str, int] = {}
    for piece, crc in sorted(sums):
        crcs[piece.name] = _followed(crcs.get(piece.name, 0), crc, piece.end - piece.begin)
    return crcs


def _followed(first: int, second: int, length: int) -> int:
    """CRC-32 of two texts in a row, of theirs; `length`: the second's, in bytes.

    As zlib's crc32_combine, which Python lacks: the first remainder times x^(8 length).
    """
    power, square, bits = 1 << 31, 1 << 30, 8 * length  # 1 and x
    while bits:
        if bits & 1:
            power = _times(power, square)
        square = _times(square, square)
        bits >>= 1
    return _times(power, first) ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials over two elements, modulo CRC-32's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
