"""Tensors that several dimensions of the mesh cut, as torch.distributed.checkpoint takes them.

`safe_load.py` and `tensor_files.py` plan with what `as_block_tensors` gives. The idea is DCP's own
protocol: an object that says which blocks of the whole it holds is saved and loaded block by block,
whatever the layout on the other side. DTensor knows one block a process; a fused Wqkv under tensor
parallelism is three, and uneven cuts by two dimensions have places that it does not compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from llmfoundry.ops.shard_layout import Stacked, block_view, local_blocks, sharding_axes


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
            torch.Size(begin for begin, _ in block.whole): block
            for block in local_blocks(tensor, stacked)
        }

    def size(self) -> torch.Size:
        """Of the whole tensor; DCP compares it with what was saved."""
        return self.tensor.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Places of the blocks that this process holds."""
        return [
            ChunkStorageMetadata(
                offsets=begin, sizes=torch.Size(high - low for low, high in block.whole)
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
    """A flat state whose DTensors that several dimensions of the mesh cut are `BlockTensor`s.

    Args:
        state: by names as planners have them: model.NAME, optimizer.state.NAME.KEY.
        stacked: by the names of parameters.
    """
    return {path: _shown(value, stacked.get(_parameter(path), ())) for path, value in state.items()}


def _parameter(path: str) -> str:
    if path.startswith(_MOMENTS):
        return path.removeprefix(_MOMENTS).rpartition(".")[0]
    return path.removeprefix("model.")


_MOMENTS = "optimizer.state."


def _shown(value: Any, stacked: Sequence[int]) -> Any:
    if not isinstance(value, DTensor):
        return value
    cuts = [axis for dim in range(value.ndim) for axis in sharding_axes(value, dim)]
    return BlockTensor(value, stacked) if len(cuts) > 1 else value
