"""Writes a checkpoint of tensors that are read one by one, by this process alone.

`api/conversion.py` calls `write_streamed` for an import, where `save.py` would need the
model. PyTorch's writer keeps all tensors of a file until the file is written, so the files are
written here, in its format: one `torch.save` after another, and a table of where each begins.
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
"""A file's size, and how many there are before files are larger: what an interruption repeats."""


def write_streamed(
    folder: Path,
    tensors: Sequence[LazyTensor],
    state: Mapping[str, Any],
    files: Mapping[str, str],
    journal: Journal,
) -> int:
    """Write a whole checkpoint, but for what the journal has; its bytes.

    Args:
        folder: the checkpoint's, which exists.
        tensors: all of the model's, of its shapes and dtypes, in the order of the files.
        state: its state.json.
        files: other texts by name: recipe.yaml, tokenizer/...
        journal: of the folder that is being written.
    """
    limit = max(FILE_BYTES, sum(t.nbytes for t in tensors) // MOST_FILES)
    groups: list[list[LazyTensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(t.nbytes for t in [*groups[-1], tensor]) > limit:
            groups.append([])
        groups[-1].append(tensor)
    for number, group in enumerate(groups):
        name = f"__0_{number}.distcp"
        if name not in journal.done:
            journal.add({name: _write_file(folder / name, group)})
    _write_table(folder, groups, journal)
    write_json(folder / "state.json", state, indent=2)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
    sums = {file: noted["sums"] for file, noted in journal.done.items()}
    return write_commit(folder, [sums, sums_of_small_files(folder)])


def _write_file(file: Path, group: list[LazyTensor]) -> dict[str, Any]:
    """Its bytes and checksum, and where each of its tensors ends."""
    ends = []
    with file.open("wb") as opened:
        summed = ChecksumStream(opened)
        for tensor in group:
            value = tensor.read().to(tensor.dtype).contiguous()
            if value.untyped_storage().nbytes() != value.nbytes:
                value = value.clone()  # torch.save writes all of the memory that it is a part of
            assert value.shape == tensor.shape, (tensor.name, value.shape)
            torch.save(value, cast(IO[bytes], summed))
            ends.append(summed.bytes)
    sync(file)
    return {"sums": {"bytes": summed.bytes, "crc32": summed.crc}, "ends": ends}


def _write_table(folder: Path, groups: list[list[LazyTensor]], journal: Journal) -> None:
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
