"""What each process holds of a cut parameter: every value once, where torch puts it too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmfoundry.checkpoint.dcp import TensorFiles
from llmfoundry.checkpoint.load import load_tensors
from llmfoundry.checkpoint.storage import Checkpoint
from llmfoundry.distributed.mailbox import Mailbox
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.ops.shard_layout import (
    TENSOR,
    assign,
    assign_rows,
    block_view,
    full_rows,
    local_blocks,
    local_ranges,
)

HEIGHTS = (8, 4, 4)  # queries of 4 heads, keys and values of 2


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=6)
    yield init_device_mesh("cpu", (3, 2), mesh_dim_names=("shard", TENSOR))
    dist.destroy_process_group()


def cut(mesh: Any, shape: tuple[int, ...], placement: Any) -> DTensor:
    """A parameter under tensor parallelism, then FSDP."""
    module = torch.nn.Module()
    whole = torch.zeros(shape)
    tensor = distribute_tensor(whole, mesh[TENSOR], [placement], src_data_rank=None)
    module.weight = torch.nn.Parameter(tensor)
    fully_shard(module, mesh=mesh["shard"])
    assert isinstance(module.weight, DTensor)
    return module.weight


def everyone(mesh: Any) -> list[tuple[int, int]]:
    return [(shard, tensor) for shard in range(3) for tensor in range(2)]


@pytest.mark.parametrize("height", [16, 17, 5, 1])
def test_each_row_is_held_once_where_a_chunk_of_a_chunk_is(mesh: Any, height: int) -> None:
    tensor = cut(mesh, (height, 3), Shard(0))
    rows = torch.arange(height)
    for shard, rank in everyone(mesh):
        mine = rows.new_empty(0)
        of_rank = rows.chunk(2)
        if rank < len(of_rank):
            parts = of_rank[rank].chunk(3)
            mine = parts[shard] if shard < len(parts) else mine
        found = [
            n for run in local_ranges(tensor, 0, coordinate=(shard, rank)) for n in range(*run)
        ]
        assert found == mine.tolist()
        assert local_ranges(tensor, 1, coordinate=(shard, rank)) == [(0, 3)]


def test_a_fused_projection_lies_head_by_head(mesh: Any) -> None:
    """Rank 1 of 2 has the queries 4..8 of 8, the keys 2..4 of 4 behind them, then the values."""
    tensor = cut(mesh, (16, 3), Shard(0))
    of_rank = {0: [0, 1, 2, 3, 8, 9, 12, 13], 1: [4, 5, 6, 7, 10, 11, 14, 15]}
    for rank, expected in of_rank.items():
        found = [
            n
            for shard in range(3)
            for run in local_ranges(tensor, 0, HEIGHTS, (shard, rank))
            for n in range(*run)
        ]
        assert found == expected


def test_columns_and_rows_are_cut_apart(mesh: Any) -> None:
    tensor = cut(mesh, (7, 4), Shard(1))
    assert local_ranges(tensor, 0, coordinate=(1, 1)) == [(3, 6)]
    assert local_ranges(tensor, 1, coordinate=(1, 1)) == [(2, 4)]
    replicated = cut(mesh, (7, 4), Replicate())
    assert local_ranges(replicated, 0, coordinate=(2, 1)) == [(6, 7)]
    assert local_ranges(replicated, 1, coordinate=(2, 1)) == [(0, 4)]


def test_assigned_values_are_those_of_the_runs(mesh: Any) -> None:
    tensor = cut(mesh, (16, 3), Shard(0))
    whole = torch.arange(48.0).view(16, 3)
    assign(tensor, whole, HEIGHTS)
    assert tensor.to_local().tolist() == whole[[0, 1, 2]].tolist()
    (block,) = local_blocks(tensor, HEIGHTS)
    assert torch.equal(block_view(whole, block.full), tensor.to_local())


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
def test_single_rows_are_read_and_written_where_they_are(mesh: Any, placement: Any) -> None:
    """Of 16 rows, this rank has 0 to 2, or the first two columns of 0 to 5."""
    tensor, ids = cut(mesh, (16, 4), placement), [9, 2, 0]
    whole, values = torch.arange(64.0).view(16, 4), -torch.arange(1.0, 13.0).view(3, 4)
    assign(tensor, whole)
    local = torch.zeros(16, 4)
    (block,) = local_blocks(tensor)
    block_view(local, block.full).copy_(block_view(whole, block.full))
    # the ranks of the fake group add nothing
    assert torch.equal(full_rows(tensor, ids), local[ids])
    assert torch.equal(full_rows(whole, ids), whole[ids])
    for table in (tensor, plain := whole.clone()):
        assign_rows(table, ids, values)
    expected = whole.index_copy(0, torch.tensor(ids), values)
    assert torch.equal(plain, expected)
    assert torch.equal(tensor.to_local(), block_view(expected, block.full))


def test_a_checkpoint_of_blocks_loads_into_a_plain_tensor_and_back(
    mesh: Any, tmp_path: Path
) -> None:
    whole = torch.arange(48.0).view(16, 3)
    save({"model": {"w": whole}}, tmp_path / "plain")
    tensor = cut(mesh, (16, 3), Shard(0))
    plain = Checkpoint.at(tmp_path / "plain")
    load_tensors({"model": {"w": tensor}}, plain, stacked={"w": HEIGHTS})
    assert tensor.to_local().tolist() == whole[[0, 1, 2]].tolist()
    save({"model": {"w": tensor}}, tmp_path / "cut")
    back = {"model": {"w": torch.zeros(16, 3)}}
    load_tensors(back, Checkpoint.at(tmp_path / "cut"))
    assert back["model"]["w"][:3].equal(whole[:3]) and not back["model"]["w"][3:].any()


def save(state: dict[str, Any], folder: Path) -> None:
    files = TensorFiles(Mailbox(ALONE))
    folder.mkdir()
    files.write(folder, files.stage(state, {"w": HEIGHTS}, copy=False))
