"""Reader and writer of safetensors files, one tensor at a time.

`read_folder.py` and `write_folder.py` call it. The safetensors library reads and checks the header.
Its functions for tensors are not used, because they map the full file or need all tensors at once.
Format (safetensors' README): length of the header in 8 bytes, little-endian; a JSON header with the
dtype, shape and offsets of each tensor, padded with spaces; the tensors' bytes. The header depends
only on dtypes and shapes, so that tensors can be written in any order. Files are identical to those
of `safetensors.torch.save_file`.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

DTYPES = {  # by safetensors' names, in the order of its files, last to first
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: -number for number, dtype in enumerate(DTYPES.values())}


@dataclass(frozen=True)
class FileLayout:
    """Locations of the tensors in a file.

    Attributes:
        header: first bytes of the file.
        places: offset of each tensor in the file, by name.
        size: size of the file in bytes.
    """

    header: bytes
    places: dict[str, int]
    size: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.dtype, torch.Size]]) -> FileLayout:
        """Return the layout of a file with tensors of these names, dtypes and shapes.

        The order is that of save_file: by dtype, then by name.
        """
        # offsets from the end of the header
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offsets = {}
        end = 0
        for name, dtype, shape in sorted(tensors, key=lambda t: (_ORDER[t[1]], t[0].encode())):
            begin, end = end, end + dtype.itemsize * shape.numel()
            offsets[name] = begin
            entries[name] = {
                "dtype": _NAMES[dtype],
                "shape": [*shape],
                "data_offsets": (begin, end),
            }

        # header: length in 8 bytes, JSON padded to a multiple of 8
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        places = {name: len(header) + offset for name, offset in offsets.items()}
        return cls(header, places, len(header) + end)

    def create(self, file: Path) -> None:
        """Create a sparse file of the final size with the header."""
        with file.open("wb") as opened:
            opened.write(self.header)
            opened.truncate(self.size)


def write_tensor(file: Path, at: int, tensor: Tensor) -> None:
    """Write a contiguous tensor on the CPU at offset `at` of a file."""
    if not tensor.numel():
        return
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class _Place:
    """Dtype and shape of a tensor, and its offset `at` in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int


class SafetensorsFile:
    """Reader of a safetensors file.

    Raises:
        SafetensorError: the file is not a safetensors file, is truncated, or has extra bytes.
        KeyError: the name of a dtype that PyTorch does not have.
    """

    def __init__(self, file: Path) -> None:
        """Read the header with the safetensors library.

        The library only accepts files whose tensors follow each other without gaps, so that the
        offset of each tensor is the end of the previous tensor.
        """
        self._file = file
        with file.open("rb") as opened:
            at = 8 + int.from_bytes(opened.read(8), "little")  # the end of the header
        self._places: dict[str, _Place] = {}
        with safe_open(file, framework="numpy") as library_file:  # reads the header only
            for name in library_file.offset_keys():
                tensor = library_file.get_slice(name)
                dtype, shape = DTYPES[tensor.get_dtype()], tuple(tensor.get_shape())
                self._places[name] = _Place(dtype, shape, at)
                at += math.prod(shape) * dtype.itemsize
        assert at == file.stat().st_size, "the last tensor ends at the end of the file"

    def sketches(self) -> dict[str, Tensor]:
        """Return all tensors on the meta device."""
        return {
            name: torch.empty(place.shape, dtype=place.dtype, device="meta")
            for name, place in self._places.items()
        }

    def get(self, name: str) -> Tensor:
        """Return a tensor by name. Only its part of the file is mapped and read when it is used."""
        place = self._places[name]
        n_bytes = math.prod(place.shape) * place.dtype.itemsize
        if not n_bytes:
            return torch.empty(place.shape, dtype=place.dtype)
        # a mapping must begin at a multiple of the page size
        page_offset = place.at % mmap.ALLOCATIONGRANULARITY
        with self._file.open("rb") as opened:
            mapped = mmap.mmap(
                opened.fileno(),
                page_offset + n_bytes,
                access=mmap.ACCESS_COPY,
                offset=place.at - page_offset,
            )
        raw = torch.frombuffer(mapped, dtype=torch.uint8, offset=page_offset, count=n_bytes)
        if place.at % place.dtype.itemsize:  # not aligned, in files of other writers
            raw = raw.clone()
        return raw.view(place.dtype).view(place.shape)
