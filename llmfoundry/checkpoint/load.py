"""Checkpoint reader: state and tensors, on any number of ranks and any parallel layout.

    runs/<name>/checkpoints/ba0000100/
        __<rank>_*.distcp .metadata   the model, by torch.distributed.checkpoint (DCP)
        ema__<rank>_*.distcp          averaged weights, of a run with ema.decay
        optimizer__<rank>_*.distcp    optimizer state, which only training needs
        state.json                    time, seed, fingerprints of data and model
        recipe.yaml tokenizer/        the other files that eval, convert and generate need
        COMMIT                        names, sizes and checksums of the files above, written last

A folder without COMMIT, or with files that differ from COMMIT, is not a checkpoint. It is reported
by name, and the previous checkpoint is used. `save.py` writes checkpoints; `verify.py` finds the
newest complete one.

No code in an untrusted file is executed. DCP itself unpickles the table of contents (`.metadata`)
and every value that is not a tensor, which would run code of the folder's author. This module
unpickles the table into plain records, checks them and converts them to PyTorch's classes. Values
that are not tensors are rejected. PyTorch reads the tensors with weights_only.
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
    AVERAGE,
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

# torch warns at every save and load of a single-process run
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

_LONGEST = 1 << 26  # bytes of a state.json
_LONGEST_TABLE = 1 << 32  # bytes of a .metadata file, which lists every shard of every tensor


def read_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json.

    Raises:
        UserError: the file cannot be read, or was not written by a run.
    """
    path, shown = checkpoint.folder / "state.json", f"{checkpoint}/state.json"
    try:
        state = read_json(path, most=_LONGEST)
    except OSError as error:
        raise UserError(f"{shown}: {one_line(error)}") from error
    except ValueError as error:
        reason = one_line(error).partition(";")[0]  # without the parser's advice
        raise UserError(
            f"{shown}: is not a run's state ({reason}); choose another checkpoint"
        ) from error
    types = {"batch": int, "identity": dict, "order": dict, "callbacks": dict, "settings": dict}
    types["spikes"] = dict
    is_complete = isinstance(state, dict) and {"batch", "identity"} <= state.keys()
    if not is_complete or any(type(state[k]) is not types[k] for k in types.keys() & state.keys()):
        raise UserError(f"{shown}: is not a run's state; choose another checkpoint")
    return state


_OPTIONS = StateDictOptions(strict=True)
_PARTS = StateDictOptions(strict=False)  # load_tensors has checked that no tensor is missing


def load_weights(
    checkpoint: Checkpoint,
    model: Decoder,
    *,
    world: World = ALONE,
    left: Collection[str] = (),
    table: Metadata | None = None,
) -> None:
    """Load the weights of `model` in place; collective over `world`.

    Adapter weights, 4-bit weights (a checkpoint holds none) and the tensors named in `left` are not
    loaded.

    Args:
        checkpoint: to read.
        model: model to fill.
        world: process group.
        left: names of tensors to leave unchanged.
        table: result of `check_weights`, which saves reading the table a second time.
    """
    _load_into(model, checkpoint, _own_weights(model, left), world, table)


def check_weights(
    checkpoint: Checkpoint, model: Decoder, *, world: World = ALONE
) -> Metadata | None:
    """Check that a checkpoint has every tensor that `load_weights` loads, in the model's shape.

    `model` may be on the meta device, so that a mismatch is found before memory is allocated.

    Returns:
        The checkpoint's table of contents, on rank 0.

    Raises:
        UserError: a tensor is missing or has a different shape; on every rank.
    """
    shapes = {f"model.{plain_name(n)}": t.shape for n, t in _own_weights(model).items()}
    return _check_shapes(shapes, checkpoint, world=world)


def _own_weights(model: Decoder, left: Collection[str] = ()) -> dict[str, Any]:
    """Return the tensors that `load_weights` loads, by the model's names."""
    tensors = get_model_state_dict(model)
    quantized = {n for n, p in model.named_parameters() if p.dtype == torch.uint8}
    excluded = {n for n in tensors if is_added(n) or n in quantized or n in left}
    return {n: t for n, t in tensors.items() if n not in excluded}


def load_adapter(checkpoint: Checkpoint, model: Decoder, *, world: World = ALONE) -> None:
    """Load an adapter checkpoint into `model`, whose base weights are loaded already."""
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
    checkpoint: Checkpoint,
    model: Decoder,
    optimizer: Optimizer,
    averages: Mapping[str, Tensor] | None = None,
    *,
    world: World,
) -> bool:
    """Load model and optimizer state in place; the checkpoint may be from any number of ranks.

    Returns:
        Whether the `averages` were loaded, too; a checkpoint of a run without them has none.
    """
    state = training_state(model, optimizer, averages)
    # learning rates and other settings are the recipe's, not the checkpoint's
    groups = state["optimizer"].pop("param_groups")
    load_tensors(state, checkpoint, world=world, stacked=all_stacked_rows(model), optional=AVERAGE)
    set_model_state_dict(model, state["model"], options=_PARTS)
    optimizer_state = state["optimizer"] | {"param_groups": groups}
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=_OPTIONS)
    return AVERAGE in state


def check_averages(checkpoint: Checkpoint, key: str, world: World) -> None:
    """Check that a checkpoint holds averaged weights; collective.

    Raises:
        UserError: it holds none; `key` is the recipe key that requires them.
    """

    def check() -> None:
        if not _holds(read_table(checkpoint), f"{AVERAGE}."):
            raise UserError(
                f"{key}: ema, but {checkpoint} holds no averaged weights, which a run keeps with"
                " ema.decay; write trained, or average checkpoints with scripts/average.py"
            )

    on_rank0(world, check)


_DAMAGED = ("PytorchStreamReader", "weights_only", "Weights only")
"""Words of PyTorch's messages about a damaged file; its advice does not apply here."""


def load_tensors(
    state: dict[str, Any],
    checkpoint: Checkpoint,
    *,
    world: World = ALONE,
    stacked: Stacked | None = None,
    table: Metadata | None = None,
    optional: str | None = None,
) -> None:
    """Load the tensors of `state` from a checkpoint, in place; collective over `world`.

    Rank 0 reads the table of contents. Each rank reads the tensors that `own_names` assigns to it,
    so that every byte is read once, and `pass_on` broadcasts replicated tensors.

    Args:
        state: nested dictionaries of tensors, with the same names on every rank.
        checkpoint: to read.
        world: process group; ALONE: this process only.
        stacked: stacked rows of the parameters, see `ops.shard_layout`; None: none are stacked.
        table: result of `check_weights`, if it was called.
        optional: key of `state` that is removed if the checkpoint has no tensors of this name.

    Raises:
        UserError: the files cannot be read or have other contents; on every rank.
    """
    # read the tensors that this rank owns
    planner, flat, problem = _Planner(), dict[str, Any](), None
    try:
        if table is None or world.size > 1:
            content = on_rank0(world, (checkpoint.folder / TABLE).read_bytes)
            table = table or _selected(parse_metadata(content), checkpoint)
        if optional in state and not _holds(table, f"{optional}."):
            del state[optional]
        planner.set_up_planner(state, table, is_coordinator=world.is_main)
        flat = planner.state_dict
        planner.state_dict = as_block_tensors(flat, stacked or {})
        _read(planner, table, checkpoint, own_names(flat, world))
    except Exception as error:  # an untrusted file can raise almost anything
        problem = one_line(error)
        if any(word in problem for word in _DAMAGED):
            problem = "a file of tensors is damaged, or holds something else"

    # raise on every rank if any rank failed
    if not all_reduce_min(world, 1 if problem is None else 0):
        problems = all_gather_object(world, problem)
        raise _unreadable(checkpoint, *sorted({line for line in problems if line}))

    # broadcast tensors to the ranks that hold replicas
    pass_on(flat, world)


def _unreadable(checkpoint: Checkpoint, *reasons: str) -> UserError:
    return UserError(
        f"checkpoint: {checkpoint} cannot be read: {'; '.join(reasons)}; choose another checkpoint"
    )


def read_table(checkpoint: Checkpoint) -> Metadata:
    """Return a checkpoint's table of contents: names, shapes, dtypes and file positions of tensors.

    Raises:
        UserError: the table cannot be read.
    """
    try:
        content = read_guarded(checkpoint.folder / TABLE, most=_LONGEST_TABLE)
        return _selected(parse_metadata(content), checkpoint)
    except (OSError, ValueError) as error:
        raise _unreadable(checkpoint, one_line(error)) from error


def _holds(table: Metadata, prefix: str) -> bool:
    """Return whether a checkpoint has a tensor whose name begins with `prefix`."""
    return any(name.startswith(prefix) for name in table.state_dict_metadata)


def _selected(table: Metadata, checkpoint: Checkpoint) -> Metadata:
    """Return a table in which, if `checkpoint.averaged`, weights are their averages.

    Tensors without an average keep their entry: frozen weights and integers.
    """
    if not checkpoint.averaged:
        return table
    items = table.state_dict_metadata
    averages = {
        f"model.{name.removeprefix(AVERAGE + '.')}": item
        for name, item in items.items()
        if name.startswith(f"{AVERAGE}.")
    }
    places = {at: place for at, place in table.storage_data.items() if at.fqn not in averages}
    for at, place in table.storage_data.items():
        name = f"model.{at.fqn.removeprefix(AVERAGE + '.')}"
        if at.fqn.startswith(f"{AVERAGE}."):
            places[MetadataIndex(name, at.offset, at.index)] = place
    return Metadata({**items, **averages}, storage_data=places, storage_meta=table.storage_meta)


def _check_shapes(
    shapes: Mapping[str, Sequence[int]], checkpoint: Checkpoint, *, world: World
) -> Metadata | None:
    """Compare the shapes of a model's tensors with a checkpoint's table; collective.

    Args:
        shapes: shapes of the model's tensors, by their names in the checkpoint.
        checkpoint: to compare with.
        world: process group; rank 0 reads the table.

    Returns:
        The table, on rank 0.

    Raises:
        UserError: the checkpoint lacks a tensor or has another shape of it; on every rank.
    """
    tables: list[Metadata] = []  # one on rank 0, none on the other ranks

    def compare() -> None:
        tables.append(read_table(checkpoint))
        saved = tables[0].state_dict_metadata
        for name, shape in shapes.items():
            metadata = saved.get(name)
            saved_shape = "missing" if metadata is None else "not a tensor"
            if isinstance(metadata, TensorStorageMetadata):
                saved_shape = str(list(metadata.size))
            if saved_shape != str(list(shape)):
                raise UserError(
                    f"checkpoint: {checkpoint} is not of the model that its recipe describes:"
                    f" {name} is {saved_shape} there, but {list(shape)} by the recipe; choose"
                    " another checkpoint"
                )

    on_rank0(world, compare)
    return tables[0] if tables else None


class _Files(FileSystem):
    """File system for DCP's reader that also opens files in an object store."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with self._checkpoint.open(Path(path).name) as file:
            yield cast(io.IOBase, file)


def _read(
    planner: _Planner, table: Metadata, checkpoint: Checkpoint, names: Collection[str]
) -> None:
    """Load the tensors with these names, on this rank."""
    reader = FileSystemReader(checkpoint.folder)
    reader.fs = _Files(checkpoint)
    reader.set_up_storage_reader(table, is_coordinator=planner.is_coordinator)
    tensors = {name: value for name, value in planner.state_dict.items() if name in names}
    plan = create_default_local_load_plan(tensors, table)
    reader.read_data(planner.finish_plan(plan), planner).wait()


class _Planner(DefaultLoadPlanner):
    """DCP load planner that supports `BlockTensor` and rejects values that are not tensors."""

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        if isinstance(value, BlockTensor):
            return value.__get_tensor_shard__(index)
        return super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor there")


def parse_metadata(content: bytes) -> Metadata:
    """Parse the content of a `.metadata` file without executing code in it.

    Raises:
        ValueError: the content is not a table of tensors, or names other classes or functions.
    """
    try:
        return _metadata(_Unpickler(io.BytesIO(content)).load())
    except Exception as error:  # a pickle can raise almost anything
        raise ValueError(f".metadata is not a table of tensors ({one_line(error)})") from error


class _Record:
    """Object of the pickle; subclasses stand for PyTorch's classes and keep the saved state."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _nothing(*args: object) -> None:
    """Replace functions and classes that a table may name but whose values are not used."""


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
    """Unpickler that accepts only the classes in a table written by PyTorch 2.4 to 2.13."""

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get(f"{module}.{name}")
        if known is None and module == "torch":
            attribute = vars(torch).get(name)
            known = attribute if isinstance(attribute, torch.dtype) else None
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and would run it")
        return known


def _fields(record: Any, name: str) -> Any:
    """Return the state of a record; TypeError if the record is of another class than `name`."""
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
