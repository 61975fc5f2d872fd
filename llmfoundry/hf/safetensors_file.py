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
    """Where the tensors of a file are.

    Attributes:
        header: its first bytes.
        places: of each tensor the offset in the file, by name.
        size: bytes of the file.
    """

    header: bytes
    places: dict[str, int]
    size: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.dtype, torch.Size]]) -> FileLayout:
        """As save_file orders them: by dtype, then by name."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        ends = {}
        at = 0
        for name, dtype, shape in sorted(tensors, key=lambda t: (_ORDER[t[1]], t[0].encode())):
            ends[name] = at, at + dtype.itemsize * shape.numel()
            entries[name] = {"dtype": _NAMES[dtype], "shape": [*shape], "data_offsets": ends[name]}
            at = ends[name][1]
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        begin = len(header)
        return cls(header, {name: begin + first for name, (first, _) in ends.items()}, begin + at)

    def create(self, file: Path) -> None:
        """A file of that size, with its header."""
        with file.open("wb") as opened:
            opened.write(self.header)
            opened.truncate(self.size)


def write_tensor(file: Path, at: int, tensor: Tensor) -> None:
    """Write a contiguous tensor on the CPU at its place."""
    if not tensor.numel():
        return
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class _Place:
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int


class SafetensorsFile:
    """A file to read.

    Raises:
        SafetensorError: it is not a safetensors file, ends early, or has more than its tensors.
        KeyError: it has a tensor of a dtype that PyTorch lacks, by the dtype's name.
    """

    def __init__(self, file: Path) -> None:
        """Have the library read the header: in a file that it accepts tensors lie end to end."""
        self._file = file
        with file.open("rb") as opened:
            at = 8 + int.from_bytes(opened.read(8), "little")
        self._places: dict[str, _Place] = {}
        with safe_open(file, framework="numpy") as whole:  # which maps it, and reads no more
            for name in whole.offset_keys():
                tensor = whole.get_slice(name)
                dtype, shape = DTYPES[tensor.get_dtype()], tuple(tensor.get_shape())
                self._places[name] = _Place(dtype, shape, at)
                at += math.prod(shape) * dtype.itemsize
        assert at == file.stat().st_size, "safetensors leaves no byte over"

    def sketches(self) -> dict[str, Tensor]:
        """Its tensors on the meta device."""
        return {
            name: torch.empty(place.shape, dtype=place.dtype, device="meta")
            for name, place in self._places.items()
        }

    def get(self, name: str) -> Tensor:
        """One of them, mapped alone: its pages are read as they are used."""
        place = self._places[name]
        count, at = math.prod(place.shape), place.at
        if not count:
            return torch.empty(place.shape, dtype=place.dtype)
        begin = at - at % mmap.ALLOCATIONGRANULARITY
        with self._file.open("rb") as opened:
            length = at - begin + count * place.dtype.itemsize
            mapped = mmap.mmap(opened.fileno(), length, access=mmap.ACCESS_COPY, offset=begin)
        raw = torch.frombuffer(
            mapped, dtype=torch.uint8, offset=at - begin, count=length - (at - begin)
        )
        if at % place.dtype.itemsize:  # which other writers may leave
            raw = raw.clone()
        return raw.view(place.dtype).view(place.shape)
