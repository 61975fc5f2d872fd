"""Writes a checkpoint's tensors by torch.distributed.checkpoint, which plans the first save alone.

A plan says which process writes what: rank 0 makes it of all processes' lists, in Python, beside
the training step, and sends the table of contents to all: 10 CPU-seconds for 1,300 tensors on 64
processes. So each process keeps its part, rank 0 the table, for as long as names, shapes, dtypes
and shards are the same on every process; else all plan anew.

PyTorch's own cache (`enable_plan_caching`) will not do: all savers of a process share it, it sees
no change of dtype, still sends the table to all, and in 2.11 keeps the plan of a save that failed:
the next one writes a table without tensors, and says nothing.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from llmfoundry.errors import one_line
from llmfoundry.files import write_whole
from llmfoundry.models.spread.held import Stacked
from llmfoundry.train.checkpoints.cut_tensors import CutTensor, as_blocks
from llmfoundry.train.checkpoints.together import SaveError, Together

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

    def __init__(self, together: Together) -> None:
        self._together = together
        self._plan: _Plan | None = None

    def write(self, folder: Path, state: dict[str, Any], stacked: Stacked) -> None:
        """Write this process's part of a state; every process calls it.

        `stacked` is of its parameters, as in `models.spread.held`.

        Raises:
            SaveError: it failed on one of them; on all.
        """
        planner = _Planner()
        planner.set_up_planner(state, is_coordinator=self._together.is_main)
        planner.state_dict = as_blocks(planner.state_dict, stacked)
        form = _form(planner)
        if self._together.is_everywhere(self._plan is not None and self._plan.form == form):
            assert self._plan is not None
            self._write_as_before(folder, planner, self._plan)
            return
        self._plan = None
        writer = _Writer(folder)
        self._write_anew(planner, writer)
        table = self._together.run((folder / TABLE).read_bytes, only_main=True)
        self._plan = _Plan(form, planner.plan, writer.written, table)

    def _write_anew(self, planner: SavePlanner, writer: _Writer) -> None:
        """What `dcp.save` does, which speaks by a process group, and sends the table to all."""
        together = self._together
        writer.set_up_storage_writer(together.is_main)
        own = together.run(lambda: writer.prepare_local_plan(planner.create_local_plan()))
        plans, table = together.to_main(own), Metadata({})

        def share() -> list[SavePlan]:
            nonlocal table
            parts, table = planner.create_global_plan(plans)
            return writer.prepare_global_plan(parts)

        part = together.from_main(together.run(share, only_main=True))
        together.run(lambda: writer.write_data(planner.finish_plan(part), planner))
        told = together.to_main(writer.written)
        together.run(lambda: writer.finish(table, told), only_main=True)

    def _write_as_before(self, folder: Path, planner: SavePlanner, plan: _Plan) -> None:
        writer = _Writer(folder)
        self._together.run(lambda: writer.write_data(plan.part, planner))
        moved = writer.written != plan.written  # a value that is no tensor has another length
        if not self._together.is_everywhere(not moved):
            told = self._together.to_main(writer.written if moved else [])
            plan.table = self._together.run(lambda: _moved(plan.table, told), only_main=True)
            plan.written = writer.written
        self._together.run(lambda: write_whole(folder / TABLE, plan.table), only_main=True)


def _form(planner: DefaultSavePlanner) -> Any:
    """All that a plan depends on, to be compared with another's."""
    state = planner.state_dict
    return [(name, *_form_of(value)) for name, value in state.items()], planner.mappings


def _form_of(value: Any) -> tuple[Any, ...]:
    if isinstance(value, CutTensor):
        return *_form_of(value.tensor), value.stacked
    if isinstance(value, DTensor):
        return value.dtype, value.shape, value.requires_grad, value.device_mesh, value.placements
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.requires_grad
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
        if isinstance(value, CutTensor):
            return value.__get_tensor_shard__(index)
        return super().lookup_object(index)


class _Writer(FileSystemWriter):
    """PyTorch's; weights in a file of their own, and errors that keep their reason on the way.

    Attributes:
        written: what this process wrote, and where.
    """

    written: list[WriteResult]

    def storage_meta(self) -> StorageMeta:
        """Nothing: PyTorch's has the folder's path, and a number that is new each time."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix = plan.storage_data.prefix
        weights = [item for item in plan.items if item.index.fqn.startswith("model.")]
        others = [item for item in plan.items if not item.index.fqn.startswith("model.")]
        self.written = []
        try:
            for items, name in ((weights, prefix), (others, _OPTIMIZER + prefix)):
                if items:
                    place = replace(plan.storage_data, prefix=name)
                    part = replace(plan, items=items, storage_data=place)
                    self.written += super().write_data(part, planner).value()
        except Exception as error:
            raise SaveError(one_line(error)) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(self.written)
        return done
