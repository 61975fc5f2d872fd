"""Write a checkpoint from tensors that are read one at a time, in a single process.

Entry point: `write_streamed`, used by `api/conversion.py` for imports, where `save.py` would need
the complete model in memory. PyTorch's writer holds all tensors of a file until the file is
written. This module therefore writes the files itself in PyTorch's format: consecutive `torch.save`
outputs, and a table with their positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.storage import WriteResult

from llmfoundry.checkpoint.commit import sums_of_small_files, write_commit
from llmfoundry.checkpoint.dcp import ChecksumStream, FilesWriter
from llmfoundry.files import Journal, sync, write_json
from llmfoundry.models.lazy_tensors import LazyTensor
from llmfoundry.ops import torch_private

FILE_BYTES, MOST_FILES = 1 << 28, 64
"""Size of a file, and maximum number of files, after which files are larger. An interrupted import
repeats at most one file."""


def write_streamed(
    folder: Path,
    tensors: Sequence[LazyTensor],
    state: Mapping[str, Any],
    files: Mapping[str, str],
    journal: Journal,
) -> int:
    """Write a complete checkpoint, without the files in the journal, and return its bytes.

    Args:
        folder: existing folder of the checkpoint.
        tensors: all tensors of the model with its shapes and dtypes, in the order of the files.
        state: content of state.json.
        files: other texts by name: recipe.yaml, tokenizer/...
        journal: journal of the unfinished folder.
    """
    # group the tensors by file
    limit = max(FILE_BYTES, sum(t.nbytes for t in tensors) // MOST_FILES)
    groups: list[list[LazyTensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(t.nbytes for t in [*groups[-1], tensor]) > limit:
            groups.append([])
        groups[-1].append(tensor)

    # write the files that an interrupted import has not written
    for number, group in enumerate(groups):
        name = f"__0_{number}.distcp"
        if name not in journal.done:
            journal.add({name: _write_file(folder / name, group)})

    # write the table, the state and other files, and the marker
    _write_table(folder, groups, journal)
    write_json(folder / "state.json", state, indent=2)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
    sums = {file: noted["sums"] for file, noted in journal.done.items()}
    return write_commit(folder, [sums, sums_of_small_files(folder)])


def _write_file(file: Path, group: list[LazyTensor]) -> dict[str, Any]:
    """Write a file; return its bytes and checksum, and the end position of each tensor."""
    ends = []
    with file.open("wb") as opened:
        summed = ChecksumStream(opened)
        for tensor in group:
            value = tensor.read().to(tensor.dtype).contiguous()
            if value.untyped_storage().nbytes() != value.nbytes:
                value = value.clone()  # torch.save writes the complete storage of a view
            assert value.shape == tensor.shape, (tensor.name, value.shape)
            torch.save(value, cast(IO[bytes], summed))
            ends.append(summed.bytes)
    sync(file)
    return {"sums": {"bytes": summed.bytes, "crc32": summed.crc}, "ends": ends}


def _write_table(folder: Path, groups: list[list[LazyTensor]], journal: Journal) -> None:
    """Write PyTorch's table of contents with the position of each tensor."""
    planner = DefaultSavePlanner()
    state = {"model": {t.name: t.like() for group in groups for t in group}}
    planner.set_up_planner(state, is_coordinator=True)
    local = create_default_local_save_plan(planner.state_dict, True)
    plan = replace(local, planner_data=planner.mappings)
    (plan,), table = planner.create_global_plan([plan])
    items = {item.index.fqn: item.index for item in plan.items}
    results = []
    for number, group in enumerate(groups):
        name, begin = f"__0_{number}.distcp", 0
        for tensor, end in zip(group, journal.done[name]["ends"], strict=True):
            place = torch_private.storage_info(name, begin, end - begin)
            results.append(WriteResult(items[f"model.{tensor.name}"], end - begin, place))
            begin = end
    FilesWriter(folder).finish(table, [results])
