"""Reads the tensors of a checkpoint; nothing that its files say is run.

`torch.distributed.checkpoint` unpickles the table of contents (`.metadata`) and every value that
is no tensor, so whoever wrote the folder decides what runs. Here the table's objects become plain
records, which are checked and made into PyTorch's, and values that are not tensors are refused; the
tensors themselves PyTorch reads with weights_only.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from llmfoundry.errors import UserError, one_line
from llmfoundry.train.checkpoints.tensor_files import holds_tensors


def load_tensors(state: dict[str, Any], folder: Path, *, distributed: bool) -> None:
    """Fill the tensors of `state` from a checkpoint; every process calls it if `distributed`.

    Raises:
        UserError: the files hold something else; on every process.
    """
    try:
        dcp.load(
            state,
            storage_reader=_Reader(folder),
            planner=_Planner(),
            no_dist=not distributed,
        )
    except CheckpointException as failed:
        reasons = {one_line(error) for error, _ in failed.failures.values()}
        raise UserError(
            f"checkpoint: {folder} cannot be read: {'; '.join(sorted(reasons))};"
            " choose another checkpoint"
        ) from failed


class _Reader(FileSystemReader):
    """PyTorch's, with `.metadata` read by `read_metadata`."""

    _problem: Exception | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            with (Path(self.path) / ".metadata").open("rb") as file:
                return read_metadata(file)
        except Exception as error:  # PyTorch would log a traceback, and look for other files
            self._problem = error
            return Metadata({}, storage_data={})

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        if self._problem is not None:
            raise self._problem
        super().set_up_storage_reader(*args, **kwargs)


class _Planner(DefaultLoadPlanner):
    """PyTorch's, for tensors alone."""

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor there")


def read_metadata(file: IO[bytes]) -> Metadata:
    """A checkpoint's table of contents.

    Raises:
        ValueError: it is not one, or names what no such table holds.
    """
    try:
        return _metadata(_Unpickler(file).load())
    except Exception as error:  # a pickle can raise almost anything
        raise ValueError(f".metadata is not a table of tensors ({one_line(error)})") from error


class _Record:
    """An object of the pickle: its class by name, and the state that was saved of it."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _nothing(*args: object) -> None:
    """In place of what a table may name and no reader needs."""


_MODULE = "torch.distributed.checkpoint"
_RECORDS: dict[str, type[_Record]] = {
    f"{_MODULE}.{name}": type(name, (_Record,), {})
    for name in (
        "metadata.Metadata",
        "metadata.MetadataIndex",
        "metadata.TensorStorageMetadata",
        "metadata.BytesStorageMetadata",
        "metadata.ChunkStorageMetadata",
        "metadata.TensorProperties",
        "metadata.StorageMeta",
        "filesystem._StorageInfo",
    )
}
_KNOWN: dict[str, Any] = {
    **_RECORDS,
    "torch.Size": tuple,
    "torch.serialization._get_layout": _nothing,
    f"{_MODULE}.metadata._MEM_FORMAT_ENCODING": _nothing,
    "pathlib.PosixPath": _nothing,
    "pathlib._local.PosixPath": _nothing,  # its name in Python 3.13
}


class _Unpickler(pickle.Unpickler):
    """Knows what PyTorch (2.4 to 2.13) writes into a table, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get(f"{module}.{name}")
        if known is None and module == "torch":
            found = vars(torch).get(name)
            known = found if isinstance(found, torch.dtype) else None
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and would run it")
        return known


def _fields(record: Any, name: str) -> Any:
    """The state of a record of that class."""
    if not isinstance(record, _RECORDS[f"{_MODULE}.{name}"]):
        raise TypeError(f"a {type(record).__name__} in place of {name}")
    return record.state


def _metadata(record: Any) -> Metadata:
    table = _fields(record, "metadata.Metadata")
    return Metadata(
        {str(name): _item(item) for name, item in table["state_dict_metadata"].items()},
        storage_data={_index(at): _place(place) for at, place in table["storage_data"].items()},
        storage_meta=StorageMeta(),
    )


def _item(record: Any) -> STORAGE_TYPES:
    if isinstance(record, _RECORDS[f"{_MODULE}.metadata.BytesStorageMetadata"]):
        return BytesStorageMetadata()
    item = _fields(record, "metadata.TensorStorageMetadata")
    dtype = _fields(item["properties"], "metadata.TensorProperties")[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype} is not a dtype")
    return TensorStorageMetadata(
        TensorProperties(dtype), torch.Size(item["size"]), [_chunk(c) for c in item["chunks"]]
    )


def _chunk(record: Any) -> ChunkStorageMetadata:
    chunk = _fields(record, "metadata.ChunkStorageMetadata")
    return ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"]))


def _index(record: Any) -> MetadataIndex:
    at = _fields(record, "metadata.MetadataIndex")
    return MetadataIndex(str(at["fqn"]), at.get("offset"), at.get("index"))


def _place(record: Any) -> _StorageInfo:
    place = _fields(record, "filesystem._StorageInfo")
    name = place["relative_path"]
    if not holds_tensors(name):
        raise ValueError(f"{name!r} is not a file of a checkpoint")
    if place.get("transform_descriptors"):
        raise ValueError("its files are compressed, which ours never are")
    return _StorageInfo(name, int(place["offset"]), int(place["length"]))
