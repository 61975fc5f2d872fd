"""Writes a checkpoint's tensors by torch.distributed.checkpoint (DCP): plans, copies, files.

`save.py` calls `TensorFiles`, `load.py` the functions that say who reads what.

Who (`own_names`): a checkpoint's bytes are written once and read once, however many replicas a run
has. A tensor sharded over a device mesh belongs to the first process along each dimension over
which it is replicated: under HSDP the first replica writes and reads, and the others neither plan
nor copy nor touch a file. A tensor that every process has in full belongs to rank 0, where a run
shards its weights; where nothing is sharded (DDP) these tensors are dealt out among all processes
by size: each reads and writes its part of the bytes at the same time, and `pass_on` broadcasts each
part. Every rule looks at names, shapes and meshes alone, so all processes decide alike without a
message.

Where: only a plan of all says so. Rank 0 makes it from all processes' lists, in Python, beside the
training step, with the table of contents: 10 CPU-seconds for 1,300 tensors on 64 processes. So each
process keeps its part and rank 0 the table, for as long as names, shapes, dtypes, meshes,
placements and stacked rows are the same on every process; else all plan anew. PyTorch's own cache
(`enable_plan_caching`) will not do: all savers of a process share it, it sees no change of dtype,
still sends the table to all, and in 2.11 keeps the plan of a save that failed: the next one writes
a table without tensors, silently.

Copies (`Staging`): a background save copies what this process writes into host memory that is kept
from one save to the next; training waits for these copies and for no file. New memory costs a page
fault for each 4 KiB, more than the copy itself: hence one buffer, as large as the largest save so
far. From a GPU the copies run on a stream of their own, beside the next step's forward and backward
passes, which change no weight; `before_update` makes the device, and not the host, wait for them
before the optimizer does. Each tensor's copy is a storage of its own within that buffer, so that
PyTorch writes it as it is.

Tensors that several dimensions of the mesh shard are saved and loaded block by block, by DCP's own
protocol (`BlockTensor`): DTensor knows one block a process; a fused Wqkv under tensor parallelism
is three, and uneven shards of two dimensions have places that it does not compute.
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
_OPTIMIZER = "optimizer"
_NAME = re.compile(rf"({_OPTIMIZER})?__[0-9]+_[0-9]+\.distcp")


def holds_tensors(name: str) -> bool:
    """Whether a checkpoint's file of that name holds tensors."""
    return _NAME.fullmatch(name) is not None


def holds_optimizer(name: str) -> bool:
    """Whether it holds nothing but what training needs; before such files all were of both."""
    return holds_tensors(name) and name.startswith(_OPTIMIZER)


@dataclass
class Staged:
    """What a process is to write of a state, listed and perhaps copied.

    Attributes:
        form: of the full state: all that a plan depends on, to be compared with another's.
        part: what this process writes.
        values: what a plan's items stand for: the state's own, or copies.
        copies: None: the state's own, which must not change before it is written.
    """

    form: Any
    part: SavePlan
    values: SavePlanner
    copies: HostCopies | None = None

    def before_update(self) -> None:
        """Let the GPU finish the copies before it changes what they are of."""
        if self.copies is not None:
            self.copies.before_update()

    def wait(self) -> None:
        """Until the values can be written."""
        if self.copies is not None:
            self.copies.wait()


@dataclass
class _Plan:
    """What is kept between saves.

    Attributes:
        form: of the state that it was made for.
        part: what this process writes.
        written: where it wrote that.
        table: the content of `.metadata`; empty but on rank 0.
    """

    form: Any
    part: SavePlan
    written: list[WriteResult]
    table: bytes


class TensorFiles:
    """Writes states, one after another."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._staging = Staging()
        self._listed: tuple[Any, SavePlan] | None = None  # of the state before: form and part
        self._plan: _Plan | None = None

    def stage(self, state: dict[str, Any], stacked: Stacked, *, copy: bool) -> Staged:
        """List what this process writes of a state, and begin to copy it where `copy`.

        No message is sent and nothing written. Copies last until the next call.

        Args:
            state: tensors and other values, in dictionaries.
            stacked: of the state's parameters, as in `ops.shard_layout`.
            copy: to host memory, for a save in the background.
        """
        planner = _Planner()
        planner.set_up_planner(state, is_coordinator=self._mailbox.is_main)
        own = own_names(planner.state_dict, self._mailbox.world)
        planner.state_dict = as_block_tensors(planner.state_dict, stacked)
        form = _form(planner)
        if self._listed is None or self._listed[0] != form:
            self._listed = form, self._list(planner, own)
        part = self._listed[1]
        if not copy:
            return Staged(form, part, planner)
        found = {item.index: planner.resolve_data(item) for item in part.items}
        tensors = {index: value for index, value in found.items() if isinstance(value, Tensor)}
        copies = self._staging.copy(list(tensors.values()))
        found |= dict(zip(tensors, copies.tensors, strict=True))
        return Staged(form, part, _Copied(planner, found), copies)

    def _list(self, planner: DefaultSavePlanner, own: Collection[str]) -> SavePlan:
        """What this process writes; of what others hold as well, one of them alone."""
        written = {name: value for name, value in planner.state_dict.items() if name in own}
        is_main = self._mailbox.is_main
        plan = create_default_local_save_plan(written, is_main)
        # names are the same everywhere
        return replace(plan, planner_data=planner.mappings if is_main else {})

    def write(self, folder: Path, staged: Staged) -> FileSums:
        """Write this process's part, which can be written; every process calls it.

        Returns:
            The files of this process, with the bytes and checksum that were written.

        Raises:
            CollectiveError: it failed on one of them; on all.
        """
        writer = FilesWriter(folder)
        kept = self._plan is not None and self._plan.form == staged.form
        if self._mailbox.all_true(kept):
            assert self._plan is not None
            self._write_as_before(folder, staged, self._plan, writer)
            return writer.files
        self._plan = None
        part = self._write_anew(staged, writer)
        table = self._mailbox.run((folder / TABLE).read_bytes, only_main=True)
        self._plan = _Plan(staged.form, part, writer.written, table)
        return writer.files

    def _write_anew(self, staged: Staged, writer: FilesWriter) -> SavePlan:
        """What `dcp.save` does, which uses a process group, and sends the table to all."""
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
        self, folder: Path, staged: Staged, plan: _Plan, writer: FilesWriter
    ) -> None:
        self._mailbox.run_long(partial(writer.write_data, plan.part, staged.values))
        moved = writer.written != plan.written  # a value that is no tensor has another length
        if not self._mailbox.all_true(not moved):
            results = self._mailbox.gather(writer.written if moved else [])
            plan.table = self._mailbox.run(lambda: _moved(plan.table, results), only_main=True)
            plan.written = writer.written
        self._mailbox.run(lambda: atomic_write(folder / TABLE, plan.table), only_main=True)


class _Copied(DefaultSavePlanner):
    """Gives copies of the values that a plan's items stand for."""

    def __init__(
        self, planner: DefaultSavePlanner, found: Mapping[MetadataIndex, Tensor | io.BytesIO]
    ) -> None:
        super().__init__()
        self.mappings, self._found = planner.mappings, found

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._found[write_item.index]


def _form(planner: DefaultSavePlanner) -> Any:
    """All that a plan depends on, to be compared with another's."""
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
    """A table of contents in which some values have other places."""
    metadata = pickle.loads(table)  # of this process's own making
    metadata.storage_data |= {one.index: one.storage_data for part in results for one in part}
    return pickle.dumps(metadata)


class _Planner(DefaultSavePlanner):
    """PyTorch's, for `BlockTensor`s too."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if isinstance(value, BlockTensor):
            return value.__get_tensor_shard__(index)
        return super().lookup_object(index)


class FilesWriter(FileSystemWriter):
    """PyTorch's; weights in a file of their own, and errors that keep their reason on the way.

    Attributes:
        written: what this process wrote, and where.
        files: the bytes and checksums of its files, taken on the way to the disk.
    """

    written: list[WriteResult]
    files: FileSums

    def __init__(self, folder: Path) -> None:
        """Nothing is written yet."""
        super().__init__(folder)
        self.written, self.files = [], {}
        self.fs = _Summing(self.files)

    def storage_meta(self) -> StorageMeta:
        """Nothing: PyTorch's has the folder's path, and a number that is new each time."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This process's part of a plan."""
        prefix = plan.storage_data.prefix
        weights = [item for item in plan.items if item.index.fqn.startswith("model.")]
        others = [item for item in plan.items if not item.index.fqn.startswith("model.")]
        try:
            for items, name in ((weights, prefix), (others, _OPTIMIZER + prefix)):
                if items:
                    place = replace(plan.storage_data, prefix=name)
                    part = replace(plan, items=items, storage_data=place)
                    self.written += super().write_data(part, planner).value()
        except Exception as error:
            raise CollectiveError(one_line(error)) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(self.written)
        return done


class _Summing(FileSystem):
    """Files as they are, summed up while they are written."""

    def __init__(self, files: FileSums) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            summed = Summed(stream)
            yield summed
        if holds_tensors(name := Path(path).name):
            self._files[name] = {"bytes": summed.bytes, "crc32": summed.crc}


class Summed:
    """A stream that is written from its beginning to its end, with its length and CRC-32."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream, self.bytes, self.crc = stream, 0, 0
        self.fileno, self.flush, self.close = stream.fileno, stream.flush, stream.close

    def write(self, content: Any) -> int:
        """All of it; the bytes."""
        view = memoryview(content).cast("B")
        left = view
        while left:  # a raw stream may take a part
            left = left[self._stream.write(left) :]
        self.crc = zlib.crc32(view, self.crc)
        self.bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """The bytes so far."""
        return self.bytes


class BlockTensor:
    """A DTensor in the blocks of `ops.shard_layout`; its values stay where they are.

    Attributes:
        tensor: the DTensor.
        stacked: heights of what its rows stack.
    """

    def __init__(self, tensor: DTensor, stacked: Sequence[int] = ()) -> None:
        self.tensor, self.stacked = tensor, tuple(stacked)
        self._local = tensor.to_local().detach()
        self._blocks = {
            torch.Size(begin for begin, _ in block.full): block
            for block in local_blocks(tensor, stacked)
        }

    def size(self) -> torch.Size:
        """Of the full tensor; DCP compares it with what was saved."""
        return self.tensor.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Places of the blocks that this process holds."""
        return [
            ChunkStorageMetadata(
                offsets=begin, sizes=torch.Size(high - low for low, high in block.full)
            )
            for begin, block in self._blocks.items()
        ]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """One for each block."""
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
        """The block that begins at `index.offset`, to be read from or written to."""
        assert index.offset is not None
        return block_view(self._local, self._blocks[torch.Size(index.offset)].local)


def as_block_tensors(state: dict[str, Any], stacked: Stacked) -> dict[str, Any]:
    """A flat state whose DTensors that several dimensions of the mesh shard are `BlockTensor`s.

    Args:
        state: by names as planners have them: model.NAME, optimizer.state.NAME.KEY.
        stacked: by the names of parameters.
    """
    shown = dict(state)
    for path, value in state.items():
        if isinstance(value, DTensor) and len(ShardLayout.of(value).axes) > 1:
            shown[path] = BlockTensor(value, stacked.get(_parameter(path), ()))
    return shown


def _parameter(path: str) -> str:
    if path.startswith(_MOMENTS):
        return path.removeprefix(_MOMENTS).rpartition(".")[0]
    return path.removeprefix("model.")


_MOMENTS = "optimizer.state."
_MESSAGE = 1 << 28  # bytes of a broadcast at most, and of the copy that it is made from


def own_names(state: Mapping[str, Any], world: World) -> set[str]:
    """The values of a state that this process writes, or reads for those that hold them as well.

    Args:
        state: tensors and other values by their names, the same names on every process.
        world: this process.
    """
    owners = _owners(state, world)
    return {
        name
        for name, value in state.items()
        if (_is_first(value) if isinstance(value, DTensor) else owners[name] == world.rank)
    }


def pass_on(state: Mapping[str, Any], world: World) -> None:
    """Fill the tensors that others have read, in place; every process calls it after reading."""
    if world.size == 1:
        return
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
    _send(full)
    for step in range(max((len(groups) for _, groups in sharded), default=0)):
        routes: dict[_Route, list[Tensor]] = {}
        for local, groups in sharded:
            # Who has not got it yet along a later dimension has nothing to give along this one.
            if step < len(groups) and all(dist.get_rank(g) == 0 for g in groups[step + 1 :]):
                source = dist.get_global_rank(groups[step], 0)
                route = _Route(groups[step], source, local.device, local.dtype)
                routes.setdefault(route, []).append(local)
        _send(routes)


class _Route(NamedTuple):
    """From a source to a group; tensors of one route are broadcast together."""

    group: dist.ProcessGroup
    source: int
    device: torch.device
    dtype: torch.dtype


def _owners(state: Mapping[str, Any], world: World) -> dict[str, int]:
    """The process that each value belongs to that all have in full."""
    full = [name for name, value in state.items() if not isinstance(value, DTensor)]
    owners = dict.fromkeys(full, 0)
    if len(full) < len(state):  # the others are sharded
        return owners
    sizes = [(state[name].nbytes, name) for name in full if isinstance(state[name], Tensor)]
    load = [(0, rank) for rank in range(world.size)]
    for size, name in sorted(sizes, key=lambda of: (-of[0], of[1])):
        n_bytes, rank = heapq.heappop(load)
        owners[name] = rank
        heapq.heappush(load, (n_bytes + size, rank))
    return owners


def _replicated(tensor: DTensor) -> list[dist.ProcessGroup]:
    """The groups of processes along each mesh dimension over which a tensor is replicated."""
    mesh = tensor.device_mesh
    axes = [axis for axis, place in enumerate(tensor.placements) if place.is_replicate()]
    return [mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1]


def _is_first(tensor: DTensor) -> bool:
    return all(dist.get_rank(group) == 0 for group in _replicated(tensor))


def _send(routes: Mapping[_Route, list[Tensor]]) -> None:
    """Broadcasts; each process takes part in its own, in the order of names."""
    for route, tensors in routes.items():
        for part in _messages(tensors):
            _broadcast(part, route)


def _messages(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in rows of at most `_MESSAGE` bytes, or of one that is larger."""
    row: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if row and size + tensor.nbytes > _MESSAGE:
            yield row
            row, size = [], 0
        row.append(tensor)
        size += tensor.nbytes
    if row:
        yield row


def _broadcast(tensors: list[Tensor], route: _Route) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        dist.broadcast(tensors[0], route.source, group=route.group)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, route.source, group=route.group)
    if dist.get_rank() != route.source:
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


_ALIGNED = 256  # bytes; no copy begins within a cache line of another


@dataclass
class HostCopies:
    """Tensors as they were when a save began.

    Attributes:
        tensors: on the host, in order.
        done: recorded behind the last copy from a GPU; None: they are there.
        sources: kept until then.
    """

    tensors: list[Tensor]
    done: torch.cuda.Event | None = None
    sources: Sequence[Tensor] = field(default=(), repr=False)

    def before_update(self) -> None:
        """Let what this thread launches on the GPU from now on wait for the copies."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)

    def wait(self) -> None:
        """Until the copies are there; in the thread that writes them."""
        if self.done is not None:
            self.done.synchronize()
        self.sources = ()


class Staging:
    """The buffer of a process, which serves one save at a time."""

    def __init__(self) -> None:
        self._buffer = host_buffer(0)
        self._stream: torch.cuda.Stream | None = None

    def copy(self, sources: Sequence[Tensor]) -> HostCopies:
        """Begin to copy tensors; those of an earlier call are overwritten.

        Returns at once where they are on a GPU, else when they are copied.
        """
        kept = [source.detach() for source in sources]
        tensors = self._places(kept)
        on_gpu = [pair for pair in zip(tensors, kept, strict=True) if pair[1].is_cuda]
        for place, source in zip(tensors, kept, strict=True):
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
        return HostCopies(tensors, done, kept)

    def _places(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous tensors of these shapes and dtypes in the buffer, each its own storage."""
        sizes = [tensor.nbytes for tensor in like]
        spaces = [math.ceil(size / _ALIGNED) * _ALIGNED for size in sizes]
        if sum(spaces) > self._buffer.nbytes:
            self._buffer = host_buffer(0)  # let go before there is another
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


def training_state(model: Decoder, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return all tensors of a run, by their names in a checkpoint."""
    state = {"model": saved_state(model)}
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
