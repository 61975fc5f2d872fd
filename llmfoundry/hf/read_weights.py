"""The weight files of a Hugging Face folder, opened together and read tensor by tensor.

`read.py` and the loader of transformers' classes read through `WeightFiles`. Nothing is held:
tensors are views of mapped files, which are opened anew from time to time, since pages that were
once read count as this process's memory for as long as the file is mapped.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmfoundry.errors import UserError, one_line

REOPEN_BYTES = 1 << 28  # read from a file before it is mapped anew: 256 MiB, a moment's work
SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
DTYPES = {  # as safetensors names them
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class WeightFiles:
    """All tensors of a folder by name.

    Attributes:
        names: of all of them.
    """

    def __init__(self, files: list[Path], reader: Callable[[Path], Reader]) -> None:
        """Open every file once, for its list of tensors."""
        self._reader = reader
        self._where: dict[str, Path] = {}
        self._sketches: dict[str, Tensor] = {}
        for file in files:
            sketches = reader(file).sketches()
            self._where |= dict.fromkeys(sketches, file)
            self._sketches |= sketches
        self._open: tuple[Path, Reader] | None = None
        self._read = 0

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._where)

    def get(self, name: str) -> Tensor:
        """A tensor, on the CPU; its pages are read from the file as they are used."""
        file = self._where[name]
        sketch = self._sketches[name]
        if self._open is None or self._open[0] != file or self._read > REOPEN_BYTES:
            self._open = None  # unmapped first, so that two are never mapped
            self._open, self._read = (file, self._reader(file)), 0
        self._read += sketch.numel() * sketch.itemsize
        return self._open[1].get(name)

    def sketch(self, name: str) -> Tensor:
        """A vector, or a bias, itself; of what is larger shape and dtype, on the meta device."""
        sketch = self._sketches[name]
        return self.get(name) if sketch.ndim < 2 or name.endswith("bias") else sketch

    def numbers_by_dtype(self) -> dict[torch.dtype, int]:
        """How many numbers are stored in each dtype."""
        found: dict[torch.dtype, int] = {}
        for sketch in self._sketches.values():
            found[sketch.dtype] = found.get(sketch.dtype, 0) + sketch.numel()
        return found

    def close(self) -> None:
        """Unmap what is open."""
        self._open = None


class Reader:
    """One open file."""

    def sketches(self) -> dict[str, Tensor]:
        """Its tensors on the meta device."""
        raise NotImplementedError

    def get(self, name: str) -> Tensor:
        """One of them."""
        raise NotImplementedError


class SafeReader(Reader):
    """A safetensors file."""

    def __init__(self, file: Path) -> None:
        from safetensors import safe_open

        self._file = file
        try:
            self._opened = safe_open(file, framework="pt")
        except Exception as error:
            raise UserError(f"{file}: cannot be read: {one_line(error)}") from error

    def sketches(self) -> dict[str, Tensor]:
        """Its tensors on the meta device."""
        found = {}
        for name in self._opened.keys():  # noqa: SIM118  (it is not a mapping)
            part = self._opened.get_slice(name)
            kind = part.get_dtype()
            if kind not in DTYPES:
                raise UserError(f"{name}: is {kind} in {self._file}, which cannot be read")
            found[name] = torch.empty(part.get_shape(), dtype=DTYPES[kind], device="meta")
        return found

    def get(self, name: str) -> Tensor:
        """One of them, mapped."""
        return self._opened.get_tensor(name)


class PickleReader(Reader):
    """A file of torch.save, of which tensors alone are read."""

    def __init__(self, file: Path) -> None:
        try:
            state = _load_tensors_only(file)
        except pickle.UnpicklingError as error:
            raise UserError(
                f"{file}: holds more than tensors, such as code to run, and is not read; save it"
                " as safetensors where you trust it"
            ) from error
        except Exception as error:
            raise UserError(f"{file}: cannot be read: {one_line(error)}") from error
        if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
            raise UserError(f"{file}: is not a list of tensors; save the model as safetensors")
        self._state = state

    def sketches(self) -> dict[str, Tensor]:
        """Its tensors on the meta device."""
        return {str(name): tensor.to("meta") for name, tensor in self._state.items()}

    def get(self, name: str) -> Tensor:
        """One of them, mapped where the file can be."""
        return self._state[name]


def _load_tensors_only(file: Path) -> Any:
    """What a file holds; files of PyTorch before 1.6 cannot be mapped."""
    import zipfile

    mapped = zipfile.is_zipfile(file)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


@contextmanager
def open_weights(folder: Path) -> Iterator[WeightFiles]:
    """The weights of a folder: safetensors, or else files of torch.save.

    Raises:
        UserError: there are none, one that the index names is missing, or one cannot be read.
    """
    files, reader = _find_files(folder)
    weights = WeightFiles(files, reader)
    try:
        yield weights
    finally:
        weights.close()


def _find_files(folder: Path) -> tuple[list[Path], Callable[[Path], Reader]]:
    """The files, and what opens one."""
    for one, reader in ((SAFETENSORS, SafeReader), (PICKLE, PickleReader)):
        index = folder / f"{one}.index.json"
        suffix = one.rpartition(".")[2]
        if index.is_file():
            return _shards(index, suffix), reader
        if (folder / one).is_file():
            return [folder / one], reader
        found = folder.glob(f"{one.removesuffix(f'.{suffix}')}*.{suffix}")
        if parts := sorted(file for file in found if file.is_file()):
            return parts, reader
    raise UserError(
        f"{folder}: has no model.safetensors and no other weights; copy them there, or save the"
        " model again with transformers"
    )


def _shards(index: Path, suffix: str) -> list[Path]:
    """The files that an index names, all beside it, and all there."""
    written = read_json(index)
    names = written.get("weight_map") if isinstance(written, dict) else None
    if not isinstance(names, dict):
        raise UserError(f"{index}: has no weight_map; copy or download it again")
    for name in names.values():
        if not isinstance(name, str) or not re.fullmatch(rf"[^/\\\0]+\.{suffix}", name):
            raise UserError(f"{index}: {name!r} is not a file of this folder; correct it")
    files = [index.parent / name for name in sorted({*names.values()})]
    missing = [file for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{missing[0]}{more}: is missing, but {index.name} names it; copy or download it again"
        )
    return files


def read_json(path: Path) -> dict[str, Any]:
    """A folder's config.json, or another of its files.

    Raises:
        UserError: it is missing, or is not JSON.
    """
    if path.exists() and not path.is_file():  # a pipe, which would be waited for
        raise UserError(f"{path}: is not a file; write a folder that transformers saved")
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: is missing; write a folder that transformers saved") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON: {one_line(error)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from error
