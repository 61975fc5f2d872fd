"""Writes a checkpoint's tensors by torch.distributed.checkpoint, which plans the first save alone.

What a process writes follows from names, shapes and meshes (`replicas.py`), so it is copied and
listed without a message. A plan of all says where: rank 0 makes it of all processes' lists, in
Python, beside the training step, with the table of contents: 10 CPU-seconds for 1,300 tensors on 64
processes. So each process keeps its part, rank 0 the table, for as long as names, shapes, dtypes,
meshes, placements and translations of layout are the same on every process; else all plan anew.

PyTorch's own cache (`enable_plan_caching`) will not do: all savers of a process share it, it sees
no change of dtype, still sends the table to all, and in 2.11 keeps the plan of a save that failed:
the next one writes a table without tensors, and says nothing.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from llmfoundry.checkpoint.commit import Written
from llmfoundry.checkpoint.dcp_tensors import BlockTensor, as_block_tensors
from llmfoundry.checkpoint.replicas import own_names
from llmfoundry.checkpoint.staging import HostCopies, Staging
from llmfoundry.distributed.launch import World
from llmfoundry.distributed.mailbox import CollectiveError, Mailbox
from llmfoundry.errors import one_line
from llmfoundry.files import atomic_write
from llmfoundry.ops.shard_layout import Stacked

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
        form: of the whole state: all that a plan depends on, to be compared with another's.
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

    def __init__(self, world: World, mailbox: Mailbox) -> None:
        self._world, self._mailbox = world, mailbox
        self._staging = Staging()
        self._listed: tuple[Any, SavePlan] | None = None  # of the state before: form and part
        self._plan: _Plan | None = None

    def stage(self, state: dict[str, Any], stacked: Stacked, *, copy: bool) -> Staged:
        """List what this process writes of a state, and begin to copy it if asked.

        No message is sent and nothing written. Copies last until the next call. `stacked` is of the
        state's parameters, as in `ops.shard_layout`.
        """
        planner = _Planner()
        planner.set_up_planner(state, is_coordinator=self._world.is_main)
        own = own_names(planner.state_dict, self._world)
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
        held = {name: value for name, value in planner.state_dict.items() if name in own}
        plan = create_default_local_save_plan(held, self._world.is_main)
        # names are the same everywhere
        return replace(plan, planner_data=planner.mappings if self._world.is_main else {})

    def write(self, folder: Path, staged: Staged) -> Written:
        """Write this process's part; every process calls it.

        Returns:
            The files of this process, with the bytes and checksum that were written.

        `stacked` is of its parameters, as in `ops.shard_layout`.

        Raises:
            CollectiveError: it failed on one of them; on all.
        """
        self._mailbox.run(staged.wait)
        writer = _Writer(folder)
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

    def _write_anew(self, staged: Staged, writer: _Writer) -> SavePlan:
        """What `dcp.save` does, which speaks by a process group, and sends the table to all."""
        mailbox, planner = self._mailbox, DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        writer.set_up_storage_writer(mailbox.is_main)
        plans, table = mailbox.gather(staged.part), Metadata({})

        def share() -> list[SavePlan]:
            nonlocal table
            parts, table = planner.create_global_plan(plans)
            return writer.prepare_global_plan(parts)

        part = mailbox.scatter(mailbox.run(share, only_main=True))
        mailbox.run_long(lambda: writer.write_data(part, staged.values))
        told = mailbox.gather(writer.written)
        mailbox.run(lambda: writer.finish(table, told), only_main=True)
        return part

    def _write_as_before(self, folder: Path, staged: Staged, plan: _Plan, writer: _Writer) -> None:
        self._mailbox.run_long(lambda: writer.write_data(plan.part, staged.values))
        moved = writer.written != plan.written  # a value that is no tensor has another length
        if not self._mailbox.all_true(not moved):
            told = self._mailbox.gather(writer.written if moved else [])
            plan.table = self._mailbox.run(lambda: _moved(plan.table, told), only_main=True)
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


def _moved(table: bytes, told: list[list[WriteResult]]) -> bytes:
    """A table of contents in which some values have other places."""
    metadata = pickle.loads(table)  # of this process's own making
    metadata.storage_data |= {one.index: one.storage_data for part in told for one in part}
    return pickle.dumps(metadata)


class _Planner(DefaultSavePlanner):
    """PyTorch's, which asks tensors alone for their blocks."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if isinstance(value, BlockTensor):
            return value.__get_tensor_shard__(index)
        return super().lookup_object(index)


class _Writer(FileSystemWriter):
    """PyTorch's; weights in a file of their own, and errors that keep their reason on the way.

    Attributes:
        written: what this process wrote, and where.
        files: the bytes and checksums of its files, taken on the way to the disk.
    """

    written: list[WriteResult]
    files: Written

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.written, self.files = [], {}
        self.fs = _Summing(self.files)

    def storage_meta(self) -> StorageMeta:
        """Nothing: PyTorch's has the folder's path, and a number that is new each time."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
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

    def __init__(self, files: Written) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            summed = _Summed(stream)
            yield summed
        if holds_tensors(name := Path(path).name):
            self._files[name] = {"bytes": summed.bytes, "crc32": summed.crc}


class _Summed:
    """A stream that is written from its beginning to its end, with its length and CRC-32."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream, self.bytes, self.crc = stream, 0, 0
        self.fileno, self.flush, self.close = stream.fileno, stream.flush, stream.close

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        left = view
        while left:  # a raw stream may take a part
            left = left[self._stream.write(left) :]
        self.crc = zlib.crc32(view, self.crc)
        self.bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self.bytes
