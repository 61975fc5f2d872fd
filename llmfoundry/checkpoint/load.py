"""Reads checkpoints: their names, state and tensors, on any layout of processes.

    runs/<name>/checkpoints/ba0000100/
        __<rank>_*.distcp .metadata   the model, by torch.distributed.checkpoint
        optimizer__<rank>_*.distcp    what only training needs
        state.json                    time, seed, fingerprints of data and model
        recipe.yaml tokenizer/        all that eval, convert and generate need
        COMMIT                        names, sizes and checksums of the above, written last

A folder without COMMIT, or whose files differ from it, does not count: it is refused by name and
the one before is used. `save.py` writes, `verify.py` finds a complete one.

Nothing in an untrusted file is executed. DCP unpickles the table of contents (`.metadata`) and
every value that is no tensor, so whoever wrote the folder would decide what runs. Here the table's
objects become plain records, which are checked and made into PyTorch's; values that are not tensors
are refused; the tensors themselves PyTorch reads with weights_only.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from llmfoundry.checkpoint.dcp import (
    TABLE,
    BlockTensor,
    as_block_tensors,
    holds_tensors,
    own_names,
    pass_on,
    saved_state,
    training_state,
)
from llmfoundry.checkpoint.storage import Checkpoint
from llmfoundry.distributed.collectives import all_gather_object, all_reduce_min, on_rank0
from llmfoundry.distributed.process_group import ALONE, World
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import read_guarded, read_json
from llmfoundry.models.adapter import is_added, plain_name
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.tensor_parallel import all_stacked_rows
from llmfoundry.ops import torch_private
from llmfoundry.ops.shard_layout import Stacked

# torch warns for every save and load of a run that has one process
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

_LONGEST = 1 << 26  # bytes of a state.json
_LONGEST_TABLE = 1 << 32  # of a table, which has a line for each part of each tensor


def read_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint's state.json.

    Raises:
        UserError: it is not what a run writes.
    """
    path, shown = checkpoint.folder / "state.json", f"{checkpoint}/state.json"
    try:
        state = read_json(path, most=_LONGEST)
    except OSError as error:
        raise UserError(f"{shown}: {one_line(error)}") from error
    except ValueError as error:
        why = one_line(error).partition(";")[0]  # of Python's, without its advice
        raise UserError(
            f"{shown}: is not a run's state ({why}); choose another checkpoint"
        ) from error
    kinds = {"batch": int, "identity": dict, "order": dict, "callbacks": dict, "settings": dict}
    kinds["spikes"] = dict
    sound = isinstance(state, dict) and {"batch", "identity"} <= state.keys()
    if not sound or any(type(state[k]) is not kinds[k] for k in kinds.keys() & state.keys()):
        raise UserError(f"{shown}: is not a run's state; choose another checkpoint")
    return state


_OPTIONS = StateDictOptions(strict=True)
_PARTS = StateDictOptions(strict=False)  # names are the model's own; load_tensors misses none


def load_weights(
    checkpoint: Checkpoint,
    model: Decoder,
    *,
    world: World = ALONE,
    left: Collection[str] = (),
    table: Metadata | None = None,
) -> None:
    """Fill `model`; all processes of `world` call. `table`: of `check_weights`.

    Left alone are an adapter, what is kept in 4 bits, which checkpoints never are, and `left`.
    """
    _load_into(model, checkpoint, _own_weights(model, left), world, table)


def check_weights(
    checkpoint: Checkpoint, model: Decoder, *, world: World = ALONE
) -> Metadata | None:
    """Compare what `load_weights` would fill with the checkpoint's shapes; `model` may be meta.

    Returns:
        The checkpoint's table, on rank 0.

    Raises:
        UserError: they differ; no memory for the model is taken yet.
    """
    shapes = {f"model.{plain_name(n)}": t.shape for n, t in _own_weights(model).items()}
    return _check_shapes(shapes, checkpoint, world=world)


def _own_weights(model: Decoder, left: Collection[str] = ()) -> dict[str, Any]:
    every = get_model_state_dict(model)
    quantized = {n for n, p in model.named_parameters() if p.dtype == torch.uint8}
    others = {n for n in every if is_added(n) or n in quantized or n in left}
    return {n: t for n, t in every.items() if n not in others}


def load_adapter(checkpoint: Checkpoint, model: Decoder, *, world: World = ALONE) -> None:
    """Fill what an adapter's checkpoint holds of `model`, whose base has its weights."""
    _load_into(model, checkpoint, saved_state(model), world)


def _load_into(
    model: Decoder,
    checkpoint: Checkpoint,
    tensors: dict[str, Any],
    world: World,
    table: Metadata | None = None,
) -> None:
    names = {plain_name(name): name for name in tensors}
    state = {"model": {plain: tensors[name] for plain, name in names.items()}}
    load_tensors(state, checkpoint, world=world, stacked=all_stacked_rows(model), table=table)
    loaded = {name: state["model"][plain] for plain, name in names.items()}
    set_model_state_dict(model, loaded, options=_PARTS)


def load_training_state(
    checkpoint: Checkpoint, model: Decoder, optimizer: Optimizer, *, world: World
) -> None:
    """Fill model and optimizer from a checkpoint written by any number of processes."""
    state = training_state(model, optimizer)
    groups = state["optimizer"].pop("param_groups")  # the recipe's, not the past's
    load_tensors(state, checkpoint, world=world, stacked=all_stacked_rows(model))
    set_model_state_dict(model, state["model"], options=_PARTS)
    moments = state["optimizer"] | {"param_groups": groups}
    set_optimizer_state_dict(model, optimizer, moments, options=_OPTIONS)


_DAMAGED = ("PytorchStreamReader", "weights_only", "Weights only")  # PyTorch's words and advice


def load_tensors(
    state: dict[str, Any],
    checkpoint: Checkpoint,
    *,
    world: World = ALONE,
    stacked: Stacked | None = None,
    table: Metadata | None = None,
) -> None:
    """Fill the tensors of `state` from a checkpoint.

    The first process reads the table of contents, each of several the tensors that
    `own_names` gives it, and no two the same ones.

    Args:
        state: tensors in dictionaries; the same names on every process.
        checkpoint: to read.
        world: the processes that fill theirs, each of which calls; ALONE: this one alone.
        stacked: of its parameters, as in `ops.shard_layout`; None: none is.
        table: what `check_weights` has read of it already.

    Raises:
        UserError: the files hold something else; on every process.
    """
    planner, flat, problem = _Planner(), dict[str, Any](), None
    try:
        if table is None or world.size > 1:
            content = on_rank0(world, (checkpoint.folder / TABLE).read_bytes)
            table = table or parse_metadata(content)
        planner.set_up_planner(state, table, is_coordinator=world.is_main)
        flat = planner.state_dict
        planner.state_dict = as_block_tensors(flat, stacked or {})
        _read(planner, table, checkpoint, own_names(flat, world))
    except Exception as error:  # whatever an untrusted file leads to
        problem = one_line(error)
        if any(word in problem for word in _DAMAGED):
            problem = "a file of tensors is damaged, or holds something else"
    if not all_reduce_min(world, 1 if problem is None else 0):
        raise _unreadable(
            checkpoint, *sorted({line for line in all_gather_object(world, problem) if line})
        )
    pass_on(flat, world)


def _unreadable(checkpoint: Checkpoint, *reasons: str) -> UserError:
    return UserError(
        f"checkpoint: {checkpoint} cannot be read: {'; '.join(reasons)}; choose another checkpoint"
    )


def read_table(checkpoint: Checkpoint) -> Metadata:
    """Which tensors a checkpoint holds, and where.

    Raises:
        UserError: its table cannot be read.
    """
    try:
        return parse_metadata(read_guarded(checkpoint.folder / TABLE, most=_LONGEST_TABLE))
    except (OSError, ValueError) as error:
        raise _unreadable(checkpoint, one_line(error)) from error


def _check_shapes(
    shapes: Mapping[str, Sequence[int]], checkpoint: Checkpoint, *, world: World
) -> Metadata | None:
    """Compare a model with a checkpoint's table, before there is memory for any of it.

    Args:
        shapes: of tensors of the model, by their names in the checkpoint.
        checkpoint: to compare with.
        world: this process; every one calls, and rank 0 reads.

    Returns:
        The table, on rank 0.

    Raises:
        UserError: the checkpoint lacks a tensor, or has another shape of it; on every process.
    """
    read: list[Metadata] = []

    def compare() -> None:
        read.append(read_table(checkpoint))
        saved = read[0].state_dict_metadata
        for name, shape in shapes.items():
            found = saved.get(name)
            there = "missing" if found is None else "not a tensor"
            if isinstance(found, TensorStorageMetadata):
                there = str(list(found.size))
            if there != str(list(shape)):
                raise UserError(
                    f"checkpoint: {checkpoint} is not of the model that its recipe describes:"
                    f" {name} is {there} there, but {list(shape)} by the recipe; choose another"
                    " checkpoint"
                )

    on_rank0(world, compare)
    return read[0] if read else None


class _Files(FileSystem):
    """PyTorch's way to files, for those that are in a store as well."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with self._checkpoint.open(Path(path).name) as file:
            yield cast(io.IOBase, file)


def _read(
    planner: _Planner, table: Metadata, checkpoint: Checkpoint, names: Collection[str]
) -> None:
    """Fill the tensors of these names, on this process."""
    reader = FileSystemReader(checkpoint.folder)
    reader.fs = _Files(checkpoint)
    reader.set_up_storage_reader(table, is_coordinator=planner.is_coordinator)
    own = {name: value for name, value in planner.state_dict.items() if name in names}
    plan = create_default_local_load_plan(own, table)
    reader.read_data(planner.finish_plan(plan), planner).wait()


class _Planner(DefaultLoadPlanner):
    """PyTorch's, for tensors alone."""

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        if isinstance(value, BlockTensor):  # PyTorch's handles tensors alone
            return value.__get_tensor_shard__(index)
        return super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor there")


def parse_metadata(content: bytes) -> Metadata:
    """A checkpoint's table of contents, of the bytes of its file.

    Raises:
        ValueError: it is not one, or names what no such table holds.
    """
    try:
        return _metadata(_Unpickler(io.BytesIO(content)).load())
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


def _place(record: Any) -> Any:
    place = _fields(record, "filesystem._StorageInfo")
    name = place["relative_path"]
    if not holds_tensors(name):
        raise ValueError(f"{name!r} is not a file of a checkpoint")
    if place.get("transform_descriptors"):
        raise ValueError("its files are compressed, which ours never are")
    return torch_private.storage_info(name, int(place["offset"]), int(place["length"]))
