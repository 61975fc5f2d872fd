"""Tensor files of a checkpoint, by torch.distributed.checkpoint (DCP): plans, copies, files.

Entry points: `save.py` uses `TensorFiles`; `load.py` uses `own_names` and `pass_on`.

Ownership (`own_names`): every byte of a checkpoint is written once and read once, for any number of
replicas. A tensor that is sharded over a device mesh belongs to the first rank along each mesh
dimension over which it is replicated. Under HSDP only the first replica plans, copies, writes and
reads. In a run that shards its weights, a tensor that every rank has in full belongs to rank 0. In
a run that shards nothing (DDP), the tensors are distributed over all ranks by size. The ranks then
read and write in parallel, and after a load `pass_on` broadcasts each tensor. The rules depend on
names, shapes and meshes only, so all ranks agree without communication.

Plan cache: rank 0 merges the lists of all ranks into a global plan and a table of contents
(`.metadata`), in Python. For 1,300 tensors on 64 ranks this takes 10 CPU-seconds. Each rank
therefore caches its part of the plan, and rank 0 the table. The cache is valid while names, shapes,
dtypes, meshes, placements and stacked rows are unchanged on every rank. PyTorch's own cache
(`enable_plan_caching`) is unsuitable: all savers of a process share it, it misses a change of
dtype, and it still sends the table to all ranks. In 2.11 it also keeps the plan of a failed save,
and the next save silently writes a table without tensors.

Copies (`Staging`): a background save copies this rank's tensors into host memory. Training waits
for the copies, not for the files. The buffer is reused between saves and as large as the largest
save so far, because page faults of new memory take longer than the copy itself. Copies from a GPU
run on a separate stream during the next forward and backward passes, which do not change weights.
`before_update` makes the GPU, not the host, wait for the copies before the optimizer step. Each
copy is a separate storage within the buffer, so that PyTorch writes it without a clone.

Blocks (`BlockTensor`): a tensor that several mesh dimensions shard is saved and loaded in blocks,
by DCP's protocol for such tensors. DTensor supports one block per rank. A fused Wqkv under tensor
parallelism has three blocks, and DTensor does not compute the offsets of uneven shards over two
dimensions.
"""

from __future__ import annotations

import heapq
import io
import math
import os
import pickle
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.optim import Optimizer

from llmfoundry.checkpoint.commit import FileSums
from llmfoundry.distributed.mailbox import CollectiveError, Mailbox
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import one_line
from llmfoundry.files import atomic_write
from llmfoundry.models.adapter import is_added, saved_names
from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.devices import host_buffer
from llmfoundry.ops.shard_layout import ShardLayout, Stacked, block_view, local_blocks

TABLE = ".metadata"
_OPTIMIZER, AVERAGE = "optimizer", "ema"
"""Prefixes of the names of tensors that are not weights, and of the files that hold them."""
_NAME = re.compile(rf"({_OPTIMIZER}|{AVERAGE})?__[0-9]+_[0-9]+\.distcp")


def holds_tensors(name: str) -> bool:
    """Return whether a file of a checkpoint holds tensors, by its name."""
    return _NAME.fullmatch(name) is not None


def holds_optimizer(name: str) -> bool:
    """Return whether a file holds optimizer state only, by its name.

    In checkpoints of older versions every tensor file may hold weights and optimizer state.
    """
    return holds_tensors(name) and name.startswith(_OPTIMIZER)


def holds_average(name: str) -> bool:
    """Return whether a file holds averaged weights only, by its name."""
    return holds_tensors(name) and name.startswith(AVERAGE)


@dataclass
class StagedTensors:
    """Tensors that this rank writes in a save, optionally copied to host memory.

    Attributes:
        form: properties of the full state that the plan depends on; see `_form`.
        part: DCP plan of this rank.
        values: planner that returns the tensors of the plan's items, or their copies.
        copies: copies in host memory; None: the original tensors are written and must not change
            before.
    """

    form: Any
    part: SavePlan
    values: SavePlanner
    copies: HostCopies | None = None

    def before_update(self) -> None:
        """Make the GPU finish the copies before it changes the tensors."""
        if self.copies is not None:
            self.copies.before_update()

    def wait(self) -> None:
        """Block until the tensors can be written."""
        if self.copies is not None:
            self.copies.wait()


@dataclass
class _Plan:
    """Cached plan, valid for states of the same form.

    Attributes:
        form: properties of the state; see `_form`.
        part: DCP plan of this rank.
        written: file positions of this rank's tensors.
        table: content of `.metadata` on rank 0; empty on the other ranks.
    """

    form: Any
    part: SavePlan
    written: list[WriteResult]
    table: bytes


class TensorFiles:
    """Writer of the tensor files of successive saves; it caches the plan and the copy buffer."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._staging = Staging()
        self._listed: tuple[Any, SavePlan] | None = None  # of the state before: form and part
        self._plan: _Plan | None = None

    def stage(self, state: dict[str, Any], stacked: Stacked, *, copy: bool) -> StagedTensors:
        """Plan this rank's part of a state, and begin to copy it if `copy`.

        No communication and no file access. Copies are valid until the next call.

        Args:
            state: nested dictionaries of tensors and other values.
            stacked: stacked rows of the parameters, see `ops.shard_layout`.
            copy: copy the tensors to host memory, for a background save.
        """
        # list the values that this rank writes
        planner = _Planner()
        planner.set_up_planner(state, is_coordinator=self._mailbox.is_main)
        local_names = own_names(planner.state_dict, self._mailbox.world)
        planner.state_dict = as_block_tensors(planner.state_dict, stacked)
        form = _form(planner)
        if self._listed is None or self._listed[0] != form:
            self._listed = form, self._list(planner, local_names)
        part = self._listed[1]
        if not copy:
            return StagedTensors(form, part, planner)

        # copy the tensors; `resolve_data` serializes the other values
        values = {item.index: planner.resolve_data(item) for item in part.items}
        tensors = {index: value for index, value in values.items() if isinstance(value, Tensor)}
        copies = self._staging.copy(list(tensors.values()))
        values |= dict(zip(tensors, copies.tensors, strict=True))
        return StagedTensors(form, part, _Copied(planner, values), copies)

    def _list(self, planner: DefaultSavePlanner, local_names: Collection[str]) -> SavePlan:
        """Return the local plan for the values named in `local_names`, which this rank writes."""
        written = {name: value for name, value in planner.state_dict.items() if name in local_names}
        is_main = self._mailbox.is_main
        plan = create_default_local_save_plan(written, is_main)
        # names are the same everywhere
        return replace(plan, planner_data=planner.mappings if is_main else {})

    def write(self, folder: Path, staged: StagedTensors) -> FileSums:
        """Write this rank's part of a staged state; collective, after `StagedTensors.wait`.

        Returns:
            Size and checksum of the files that this rank has written.

        Raises:
            CollectiveError: writing failed on some rank; on every rank.
        """
        writer = FilesWriter(folder)
        is_unchanged = self._plan is not None and self._plan.form == staged.form
        if self._mailbox.all_true(is_unchanged):
            assert self._plan is not None
            self._write_as_before(folder, staged, self._plan, writer)
            return writer.files
        self._plan = None
        part = self._write_anew(staged, writer)
        table = self._mailbox.run((folder / TABLE).read_bytes, only_main=True)
        self._plan = _Plan(staged.form, part, writer.written, table)
        return writer.files

    def _write_anew(self, staged: StagedTensors, writer: FilesWriter) -> SavePlan:
        """Make a global plan and write this rank's part; return the part.

        `dcp.save` does the same, but needs a process group and sends the table to all ranks.
        """
        mailbox, planner = self._mailbox, DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        writer.set_up_storage_writer(mailbox.is_main)
        plans, table = mailbox.gather(staged.part), Metadata({})

        def share() -> list[SavePlan]:
            nonlocal table
            parts, table = planner.create_global_plan(plans)
            return writer.prepare_global_plan(parts)

        part = mailbox.scatter(mailbox.run(share, only_main=True))
        mailbox.run_long(partial(writer.write_data, part, staged.values))
        results = mailbox.gather(writer.written)
        mailbox.run(partial(writer.finish, table, results), only_main=True)
        return part

    def _write_as_before(
        self, folder: Path, staged: StagedTensors, plan: _Plan, writer: FilesWriter
    ) -> None:
        self._mailbox.run_long(partial(writer.write_data, plan.part, staged.values))
        # file positions change if a value that is not a tensor changes its length
        moved = writer.written != plan.written
        if not self._mailbox.all_true(not moved):
            results = self._mailbox.gather(writer.written if moved else [])
            plan.table = self._mailbox.run(lambda: _moved(plan.table, results), only_main=True)
            plan.written = writer.written
        self._mailbox.run(lambda: atomic_write(folder / TABLE, plan.table), only_main=True)


class _Copied(DefaultSavePlanner):
    """Planner that returns the copies of a plan's items."""

    def __init__(
        self, planner: DefaultSavePlanner, copies: Mapping[MetadataIndex, Tensor | io.BytesIO]
    ) -> None:
        super().__init__()
        self.mappings, self._found = planner.mappings, copies

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._found[write_item.index]


def _form(planner: DefaultSavePlanner) -> Any:
    """Return the properties of a state that a plan depends on, for comparison with a cached one."""
    state = planner.state_dict
    return [(name, *_form_of(value)) for name, value in state.items()], planner.mappings


def _form_of(value: Any) -> tuple[Any, ...]:
    if isinstance(value, BlockTensor):
        return *_form_of(value.tensor), value.stacked
    if isinstance(value, DTensor):
        how = value.device_mesh, value.placements, type(value.to_local())
        return value.dtype, value.shape, value.requires_grad, type(value), *how
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.requires_grad, type(value)
    return ()


def _moved(table: bytes, results: list[list[WriteResult]]) -> bytes:
    """Return the table of contents with the file positions in `results` updated."""
    metadata = pickle.loads(table)  # trusted: this process has pickled it
    metadata.storage_data |= {one.index: one.storage_data for part in results for one in part}
    return pickle.dumps(metadata)


class _Planner(DefaultSavePlanner):
    """DCP save planner that supports `BlockTensor`."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if isinstance(value, BlockTensor):
            return value.__get_tensor_shard__(index)
        return super().lookup_object(index)


_FILES = {"model": "", AVERAGE: AVERAGE}  # file prefix by the first part of a tensor's name


class FilesWriter(FileSystemWriter):
    """DCP file writer with separate files for weights, averages and optimizer state; has checksums.

    Errors are raised as `CollectiveError`, which keeps their message on the way to other ranks.

    Attributes:
        written: file positions of the values that this rank has written.
        files: size and checksum of this rank's files, computed while they are written.
    """

    written: list[WriteResult]
    files: FileSums

    def __init__(self, folder: Path) -> None:
        """Prepare to write to `folder`; no file is created yet."""
        super().__init__(folder)
        self.written, self.files = [], {}
        self.fs = _Summing(self.files)

    def storage_meta(self) -> StorageMeta:
        """Return empty metadata, because PyTorch's has the folder's path and a new identifier."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of a plan."""
        prefix = plan.storage_data.prefix
        files: dict[str, list[WriteItem]] = {"": [], _OPTIMIZER: [], AVERAGE: []}
        for item in plan.items:
            files[_FILES.get(item.index.fqn.partition(".")[0], _OPTIMIZER)].append(item)
        try:
            for kind, items in files.items():
                if items:
                    place = replace(plan.storage_data, prefix=kind + prefix)
                    part = replace(plan, items=items, storage_data=place)
                    self.written += super().write_data(part, planner).value()
        except Exception as error:
            raise CollectiveError(one_line(error)) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(self.written)
        return done


class _Summing(FileSystem):
    """File system that records size and checksum of the tensor files that it writes."""

    def __init__(self, files: FileSums) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            summed = ChecksumStream(stream)
            yield summed
        if holds_tensors(name := Path(path).name):
            self._files[name] = {"bytes": summed.bytes, "crc32": summed.crc}


class ChecksumStream:
    """Sequential output stream that counts its bytes and computes their CRC-32."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream, self.bytes, self.crc = stream, 0, 0
        self.fileno, self.flush, self.close = stream.fileno, stream.flush, stream.close

    def write(self, content: Any) -> int:
        """Write all of `content`; return the number of bytes."""
        view = memoryview(content).cast("B")
        remaining = view
        while remaining:  # a raw stream may write only a part
            remaining = remaining[self._stream.write(remaining) :]
        self.crc = zlib.crc32(view, self.crc)
        self.bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self.bytes


class BlockTensor:
    """View of a DTensor as the blocks of `ops.shard_layout`, without a copy.

    Attributes:
        tensor: the DTensor.
        stacked: numbers of rows of the matrices that are stacked in it.
    """

    def __init__(self, tensor: DTensor, stacked: Sequence[int] = ()) -> None:
        self.tensor, self.stacked = tensor, tuple(stacked)
        self._local = tensor.to_local().detach()
        self._blocks = {
            torch.Size(begin for begin, _ in block.full): block
            for block in local_blocks(tensor, stacked)
        }

    def size(self) -> torch.Size:
        """Return the shape of the full tensor, which DCP compares with the saved shape."""
        return self.tensor.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return offsets and sizes of the blocks that this rank holds."""
        return [
            ChunkStorageMetadata(
                offsets=begin, sizes=torch.Size(high - low for low, high in block.full)
            )
            for begin, block in self._blocks.items()
        ]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """Return one write item for each block."""
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=properties, size=self.tensor.shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return a writable view of the block that begins at `index.offset`."""
        assert index.offset is not None
        return block_view(self._local, self._blocks[torch.Size(index.offset)].local)


def as_block_tensors(state: dict[str, Any], stacked: Stacked) -> dict[str, Any]:
    """Return a flat state, DTensors sharded over several mesh dimensions as `BlockTensor`s.

    Args:
        state: values by the planner's names: model.NAME, ema.NAME, optimizer.state.NAME.KEY.
        stacked: stacked rows by parameter name.
    """
    shown = dict(state)
    for path, value in state.items():
        if isinstance(value, DTensor) and len(ShardLayout.of(value).axes) > 1:
            shown[path] = BlockTensor(value, stacked.get(_parameter(path), ()))
    return shown


def _parameter(path: str) -> str:
    if path.startswith(_MOMENTS):
        return path.removeprefix(_MOMENTS).rpartition(".")[0]
    return path.removeprefix("model.").removeprefix(f"{AVERAGE}.")


_MOMENTS = "optimizer.state."
_MESSAGE = 1 << 28  # maximal bytes of a broadcast of several tensors, and of its buffer


def own_names(state: Mapping[str, Any], world: World) -> set[str]:
    """Return the names of the values that this rank writes, and reads for all of their replicas.

    Args:
        state: tensors and other values by name, with the same names on every rank.
        world: process group.
    """
    owners = _owners(state, world)
    return {
        name
        for name, value in state.items()
        if (_is_first(value) if isinstance(value, DTensor) else owners[name] == world.rank)
    }


def pass_on(state: Mapping[str, Any], world: World) -> None:
    """Broadcast the tensors that each rank has read to their replicas, in place; collective."""
    if world.size == 1:
        return

    # separate full tensors from sharded tensors
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    owners = _owners(tensors, world)
    full, sharded = dict[_Route, list[Tensor]](), list[tuple[Tensor, list[dist.ProcessGroup]]]()
    assert dist.group.WORLD is not None
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            sharded.append((tensor.to_local().detach(), _replicated(tensor)))
        else:
            route = _Route(dist.group.WORLD, owners[name], tensor.device, tensor.dtype)
            full.setdefault(route, []).append(tensor.detach())

    # broadcast full tensors, then sharded tensors along one replicated dimension at a time
    _send(full)
    for step in range(max((len(groups) for _, groups in sharded), default=0)):
        routes: dict[_Route, list[Tensor]] = {}
        for local, groups in sharded:
            # Only ranks that are first along all later dimensions have the values at this step.
            if step < len(groups) and all(dist.get_rank(g) == 0 for g in groups[step + 1 :]):
                source = dist.get_global_rank(groups[step], 0)
                route = _Route(groups[step], source, local.device, local.dtype)
                routes.setdefault(route, []).append(local)
        _send(routes)


class _Route(NamedTuple):
    """Source rank and group of a broadcast; tensors of one route are broadcast together."""

    group: dist.ProcessGroup
    source: int
    device: torch.device
    dtype: torch.dtype


def _owners(state: Mapping[str, Any], world: World) -> dict[str, int]:
    """Return the owner of each value that every rank has in full."""
    full = [name for name, value in state.items() if not isinstance(value, DTensor)]
    owners = dict.fromkeys(full, 0)
    if len(full) < len(state):  # the run shards its weights
        return owners

    # assign the largest tensors first, each to the rank with the fewest bytes
    sizes = [(state[name].nbytes, name) for name in full if isinstance(state[name], Tensor)]
    load = [(0, rank) for rank in range(world.size)]
    for size, name in sorted(sizes, key=lambda of: (-of[0], of[1])):
        n_bytes, rank = heapq.heappop(load)
        owners[name] = rank
        heapq.heappush(load, (n_bytes + size, rank))
    return owners


def _replicated(tensor: DTensor) -> list[dist.ProcessGroup]:
    """Return the process group of each mesh dimension over which a tensor is replicated."""
    mesh = tensor.device_mesh
    axes = [axis for axis, place in enumerate(tensor.placements) if place.is_replicate()]
    return [mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1]


def _is_first(tensor: DTensor) -> bool:
    return all(dist.get_rank(group) == 0 for group in _replicated(tensor))


def _send(routes: Mapping[_Route, list[Tensor]]) -> None:
    """Broadcast the tensors of all routes of this rank, in the order of the routes."""
    for route, tensors in routes.items():
        for part in _messages(tensors):
            _broadcast(part, route)


def _messages(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield groups of tensors of at most `_MESSAGE` bytes; a larger one is a group of its own."""
    batch: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if batch and size + tensor.nbytes > _MESSAGE:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.nbytes
    if batch:
        yield batch


def _broadcast(tensors: list[Tensor], route: _Route) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        dist.broadcast(tensors[0], route.source, group=route.group)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, route.source, group=route.group)
    if dist.get_rank() != route.source:
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


_ALIGNED = 256  # bytes; copies do not share a cache line


@dataclass
class HostCopies:
    """Copies in host memory of the tensors at the start of a save.

    Attributes:
        tensors: the copies, in the order of the sources.
        done: event after the last copy from a GPU; None: all copies are complete.
        sources: original tensors, referenced until their copies are complete.
    """

    tensors: list[Tensor]
    done: torch.cuda.Event | None = None
    sources: Sequence[Tensor] = field(default=(), repr=False)

    def before_update(self) -> None:
        """Make later GPU work of this thread wait for the copies."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)

    def wait(self) -> None:
        """Block until the copies are complete; called in the thread that writes them."""
        if self.done is not None:
            self.done.synchronize()
        self.sources = ()


class Staging:
    """Reusable host buffer for the copies of one save at a time."""

    def __init__(self) -> None:
        self._buffer = host_buffer(0)
        self._stream: torch.cuda.Stream | None = None

    def copy(self, sources: Sequence[Tensor]) -> HostCopies:
        """Begin to copy tensors; the copies of an earlier call are overwritten.

        Copies from a GPU continue after the return. Copies from the host are complete.
        """
        detached = [source.detach() for source in sources]
        tensors = self._places(detached)
        on_gpu = [pair for pair in zip(tensors, detached, strict=True) if pair[1].is_cuda]
        for place, source in zip(tensors, detached, strict=True):
            if not source.is_cuda:
                place.copy_(source)
        if not on_gpu:
            return HostCopies(tensors)
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for place, source in on_gpu:
                place.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return HostCopies(tensors, done, detached)

    def _places(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous tensors of these shapes and dtypes in the buffer, one storage each."""
        sizes = [tensor.nbytes for tensor in like]
        spaces = [math.ceil(size / _ALIGNED) * _ALIGNED for size in sizes]
        if sum(spaces) > self._buffer.nbytes:
            self._buffer = host_buffer(0)  # free the old buffer before allocating a larger one
            self._buffer = host_buffer(sum(spaces))
        begin, places = 0, list[Tensor]()
        for tensor, size, space in zip(like, sizes, spaces, strict=True):
            if size:
                flat = torch.frombuffer(self._buffer[begin : begin + size], dtype=tensor.dtype)
            else:
                flat = torch.empty(0, dtype=tensor.dtype)
            places.append(flat.view(tensor.shape))
            begin += space
        return places


def training_state(
    model: Decoder, optimizer: Optimizer | None, averages: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return all tensors of a run, by their names in a checkpoint.

    `averages` are the averaged weights by parameter name; None: the run keeps none.
    """
    state: dict[str, Any] = {"model": saved_state(model)}
    if averages is not None:
        state[AVERAGE] = dict(averages)
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def saved_state(model: Decoder) -> dict[str, Any]:
    """Return the tensors that a checkpoint holds of a model.

    These are all tensors, or, of a model with an adapter, those that its base does not determine.
    """
    tensors = get_model_state_dict(model)
    if not any(is_added(name) for name in tensors):
        return tensors
    names = set(saved_names(model))
    return {name: tensor for name, tensor in tensors.items() if name in names}
