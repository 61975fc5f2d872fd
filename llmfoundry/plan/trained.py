"""What a model of which a part is frozen takes, counted on the model itself, on the meta device.

`memory.py` asks it for fine-tuning: there is a model before there is a run, and who knows which
of its weights train, and in how many bits the others are kept, is the model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmfoundry.models.decoder import Decoder
from llmfoundry.models.low_rank import LowRank
from llmfoundry.models.moe import ExpertWeights
from llmfoundry.models.quantized import quantized_shapes, value_count
from llmfoundry.plan.shards import BLOCK, Values, total, unit_of, values_of
from llmfoundry.recipe.parallel import Degrees


@dataclass(frozen=True)
class SavedInputs:
    """Which inputs of its matrices one block keeps for the backward pass: those that train.

    Attributes:
        anything: whether a gradient reaches the block at all.
        qkv: the input of the projection to queries, keys and values.
        out: of the projection of what attention gives.
        up: of the feed-forward layer, or of the experts.
        down: of its second half; experts make theirs again.
        added: values a token that adapters keep: between their factors, and DoRA's and dropout's.
    """

    anything: bool = True
    qkv: bool = True
    out: bool = True
    up: bool = True
    down: bool = True
    added: int = 0


ALL = SavedInputs()


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a model's parameters as one process has them.

    Attributes:
        parameters: their number in all, those in 4 bits as those that they stand for.
        frozen: bytes that it keeps and that nothing but products need.
        trained: bytes that gradients and moments are kept of as well.
        block: bytes of the largest block, gathered.
        apart: of a block what is not gathered with it: experts that processes share.
        ends: bytes of embeddings, final norm and head.
        trained_block: of `block` the bytes that train.
        trained_apart: of `apart` the bytes that train.
        trained_ends: of the ends the bytes that train.
        trained_head: of these the bytes of the head.
        trained_matrices: values of the blocks that train.
        dequantized: values of the largest matrix in 4 bits, which are there while it is at work.
    """

    parameters: int
    frozen: int
    trained: Values
    block: int
    apart: int
    ends: int
    trained_block: int
    trained_apart: int
    trained_ends: int
    trained_head: int
    trained_matrices: int
    dequantized: int


def weigh(model: nn.Module, device: torch.device, degrees: Degrees) -> WeightBytes:
    """What a process has of a model with `blocks`, computing on a device of that kind."""

    def held(module: nn.Module, *, trained: bool) -> dict[str, Values]:
        """Bytes of its parameters, or of those that train, by what they are gathered with."""
        found: dict[str, Values] = {}
        for name, p in module.named_parameters():
            if p.requires_grad or not trained:
                unit, values = unit_of(name, degrees), values_of(name, p.shape, degrees)
                found[unit] = found.get(unit, Values()).plus(values.times(p.itemsize))
        return found

    def largest(*, trained: bool) -> tuple[int, int]:
        """Of a block what is gathered with it, and apart from it."""
        each = [held(block, trained=trained) for block in blocks]
        own = max((found.pop(BLOCK, Values()).gathered for found in each), default=0)
        return own, max((total(found.values()).gathered for found in each), default=0)

    blocks: list[nn.Module] = list(model.blocks)  # type: ignore[arg-type]
    inside = {id(p) for block in blocks for p in block.parameters()}
    everything, trains = (total(held(model, trained=t).values()) for t in (False, True))
    in_blocks, trains_there = (
        total(values for block in blocks for values in held(block, trained=t).values())
        for t in (False, True)
    )
    block, apart = largest(trained=False)
    trained_block, trained_apart = largest(trained=True)
    return WeightBytes(
        parameters=value_count(model),
        frozen=everything.shard - trains.shard,
        trained=trains,
        block=block,
        apart=apart,
        ends=everything.gathered - in_blocks.gathered,
        trained_block=trained_block,
        trained_apart=trained_apart,
        trained_ends=trains.gathered - trains_there.gathered,
        trained_head=_trained_head(model) // degrees.tensor,
        trained_matrices=sum(
            p.numel() for p in model.parameters() if p.requires_grad and id(p) in inside
        ),
        dequantized=_largest_matrix(model, device),
    )


def _trained_head(model: nn.Module) -> int:
    """Of the output head, which may be the embedding."""
    head = model.head_weight
    assert isinstance(head, Tensor)
    return head.nbytes if head.requires_grad else 0


def _largest_matrix(model: nn.Module, device: torch.device) -> int:
    """Of stacked experts a CPU dequantises one at a time, an accelerator all."""
    sizes = [0]
    for name, (height, width) in quantized_shapes(model):
        module = model.get_submodule(name.rpartition(".")[0])
        experts = module.n if isinstance(module, ExpertWeights) and device.type == "cpu" else 1
        sizes.append(height * width // experts)
    return max(sizes)


def kept_by_blocks(model: nn.Module) -> list[SavedInputs]:
    """What each block keeps, in order."""
    if not isinstance(model, Decoder):
        return _kept_by_others(model)
    ends = [p for n, p in model.named_parameters() if n.startswith(("wte.", "wpe."))]
    reached, found = _trains(ends), list[SavedInputs]()
    for block in model.blocks:
        named = list(block.named_parameters())
        reached |= _trains([p for _, p in named])

        def input_of(*parts: str, named: Sequence[tuple[str, Tensor]] = named) -> bool:
            mine = [p for n, p in named if any(part in n for part in parts) and p.ndim > 1]
            return _trains(mine)

        found.append(
            SavedInputs(
                anything=reached,
                qkv=input_of("attn.W"),
                out=input_of("attn.out_proj"),
                up=input_of("up_proj", "gate_proj", "experts."),
                down=input_of("down_proj"),
                added=_added(block),
            )
        )
    return found


def _kept_by_others(model: nn.Module) -> list[SavedInputs]:
    """Of a class of transformers: all inputs of a block in which anything trains."""
    in_blocks = {id(p) for block in model.blocks for p in block.parameters()}  # type: ignore[union-attr]
    reached, found = _trains([p for p in model.parameters() if id(p) not in in_blocks]), []
    for block in model.blocks:  # type: ignore[union-attr]
        trains = _trains(list(block.parameters()))
        reached |= trains
        found.append(SavedInputs(reached, trains, trains, trains, trains))
    return found


def _trains(parameters: Sequence[Tensor]) -> bool:
    return any(parameter.requires_grad for parameter in parameters)


def _added(block: nn.Module) -> int:
    """Values a token between the factors of the adapters on dense layers, and beside them."""
    values = 0
    for module in block.modules():
        lora = getattr(module, "lora", None)
        if isinstance(lora, LowRank):
            inner, inputs = module.get_parameter("lora_A").shape
            values += inner + (2 * lora.rows if lora.dora else 0) + (inputs if lora.dropout else 0)
    return values
