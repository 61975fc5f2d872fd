"""What a run needs, before it is built: memory of weights, optimizer and activations.

`fit.py` asks it for the microbatch that `auto` stands for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from llmfoundry.models.counts import parameter_count
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.moe import ExpertWeights
from llmfoundry.models.quantized import quantized_shapes, value_count
from llmfoundry.ops.loss import chunk_tokens, logit_bytes
from llmfoundry.plan.activations import kept_by_blocks, row_bytes
from llmfoundry.plan.shards import BLOCK, REDUCED, Values, shares, total, unit_of, values_of
from llmfoundry.recipe.parallel import Degrees
from llmfoundry.recipe.scripts.train import TrainRecipe

GIB = 2**30
CPU = torch.device("cpu")
HEAP = 1.5
"""What activations take of a CPU's heap over their own size: tensors of other sizes come and go
between those that stay, and freed memory is kept (`ops/devices.py`). Measured by
`benchmarks/finetune.py`: 1.44 to 1.53 with 47M and 154M parameters, LoRA and QLoRA."""
FRAMEWORK = GIB // 2  # PyTorch and all else that is imported, before there is a model


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one process needs.

    Two moments of a step need most: when the head's gradient is made, while all blocks still keep
    what they keep, and the backward pass of a block, when its weights, the next one's and two
    blocks' gradients are there whole.

    Attributes:
        parameters: of the whole model.
        parameter_bytes: of this process's shard of the weights.
        gradient_bytes: of its gradients.
        moment_bytes: of the optimizer's moments.
        at_head: weights and gradients that are whole while the head's gradient is made.
        at_block: the same in the backward pass of a block.
        row_head: what a row takes then: all that is kept, and what comes and goes.
        row_block: the same in the backward pass of a block.
        load_head: what row_head grows by for each unit by which the load of this process's experts
            exceeds the mean; 0 where processes share none.
        load_block: the same of row_block.
        row_logits: what the loss holds of the logits of one row.
        chunk_logits: the same of a chunk of tokens: it holds no more at once.
        fixed: FRAMEWORK.
        accumulated: what gradients take between microbatches over what `weights` has of them.
        step_rows: rows of a step; with fewer at a time, gradients are accumulated.
    """

    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    moment_bytes: int
    at_head: int
    at_block: int
    row_head: int
    row_block: int
    row_logits: int
    chunk_logits: int
    accumulated: int
    step_rows: int
    load_head: int = 0
    load_block: int = 0
    fixed: int = FRAMEWORK

    @property
    def weights(self) -> int:
        """Bytes of weights, gradients and moments, which stay whatever the microbatch."""
        return self.parameter_bytes + self.gradient_bytes + self.moment_bytes

    def logits(self, rows: int) -> int:
        """Bytes that the loss of a microbatch of `rows` holds of logits."""
        return min(rows * self.row_logits, self.chunk_logits)

    def gradients(self, rows: int) -> int:
        """Bytes of `accumulated` at a microbatch of `rows`: none where it is the only one."""
        return self.accumulated if rows < self.step_rows else 0

    def activations(self, rows: int) -> int:
        """Bytes that a microbatch of `rows` takes, logits left out."""
        return rows * max(self.row_head, self.row_block)

    def total(self, rows: int, load: float = 1.0) -> int:
        """Bytes at a microbatch of `rows`, this process's experts having `load` times the mean."""
        return max(int(even + (load - 1) * more) for even, more in self._moments(rows))

    def parts(self, rows: int) -> dict[str, int]:
        """What `total` is made of, under even load, by what it is for."""
        (head, _), (block, _) = self._moments(rows)
        whole, per_row = (
            (self.at_head, self.row_head) if head >= block else (self.at_block, self.row_block)
        )
        return {
            "weights, gradients and optimizer": self.weights,
            "accumulated gradients": self.gradients(rows),
            "whole weights of a block": whole,
            "activations": rows * per_row,
            "logits": self.logits(rows) if head >= block else 0,
            "PyTorch": self.fixed,
        }

    def fitting_load(self, rows: int, room: int) -> float:
        """The largest load of this process's experts, in means, that fits `room`; inf: any."""
        loads = [1 + (room - even) / more for even, more in self._moments(rows) if more]
        return min(loads, default=math.inf)

    def _moments(self, rows: int) -> list[tuple[int, int]]:
        """Bytes at the head and at a block: under even load, and of each unit of load above."""
        stay = self.weights + self.gradients(rows) + self.fixed
        head = stay + self.at_head + self.logits(rows) + rows * self.row_head
        block = stay + self.at_block + rows * self.row_block
        return [(head, rows * self.load_head), (block, rows * self.load_block)]


def estimate(
    recipe: TrainRecipe,
    world_size: int,
    *,
    meta_model: Decoder | None = None,
    device: torch.device = CPU,
) -> MemoryEstimate:
    """What a filled recipe needs on each of `world_size` processes.

    Args:
        recipe: filled, its activation checkpointing decided; auto counts as none.
        world_size: processes of the run.
        meta_model: of fine-tuning: the model on the meta device, frozen and quantized as it will
            be; None: all parameters train.
        device: where it computes.
    """
    if meta_model is not None:
        return _estimate_part(recipe, world_size, meta_model, device)
    model, degrees = recipe.model, recipe.parallel.degrees(world_size)
    assert model.vocab_size is not None
    width = 2 if recipe.precision == "bf16" else 4
    low = 4 if recipe.precision == "fp32" else 2
    held = shares(model, degrees)
    own, head = width * held.all.shard, held.head.gathered
    block, *apart = (unit.block.gathered for unit in held.units)
    largest = max(block, *apart, 0)
    gathered = Whole(
        ends=low * held.ends.gathered,
        head=low * head,
        block=low * block,
        apart=low * sum(apart),
        trained=low * largest,
        reduced=REDUCED * largest,
    )
    rows = row_bytes(recipe, degrees=degrees, device=device)
    return MemoryEstimate(
        parameters=parameter_count(model),
        parameter_bytes=own,
        gradient_bytes=own,
        moment_bytes=round(recipe.optimizer.moment_bytes(width) * held.all.shard),
        **_whole_weights(recipe, degrees, gathered, head, values=held.blocks.gathered),
        row_head=rows.kept + rows.head,
        row_block=rows.kept + rows.block,
        load_head=rows.load_kept,
        load_block=rows.load_kept + rows.load_block,
        **_logits(recipe, degrees, device),
        accumulated=accumulated_bytes(recipe, degrees, width * held.all.gathered, own),
        step_rows=recipe.global_train_batch_size // degrees.data,
    )


class Whole(NamedTuple):
    """Bytes of weights as they are gathered, and of gradients as they are made.

    Attributes:
        ends: of embeddings, final norm and head.
        head: the gradient of the head.
        block: of a block.
        apart: of a block what is not gathered with it: its experts, where processes share them.
        trained: of what is gathered together the part that trains: the gradient.
        reduced: the same in REDUCED bytes each.
    """

    ends: int
    head: int
    block: int
    apart: int
    trained: int
    reduced: int


def _whole_weights(
    recipe: TrainRecipe, degrees: Degrees, whole: Whole, head: int, *, values: int
) -> dict[str, int]:
    """What is whole of a model beside the shards, when the head and when a block is at work.

    At the head: its gradient in fp32, again times the loss's scale, and in the weights' dtype. At a
    block under FSDP: its weights, the next one's, which are fetched already, its gradient, and
    that of the block before, in fp32, on its way; of what is gathered apart, its own alone. Without
    FSDP: the bf16 copies that autocast makes of the blocks' fp32 weights, which the backward pass
    asks for again.

    Args:
        recipe: filled.
        degrees: of its mesh.
        whole: what is gathered.
        head: values of the head that train.
        values: of the blocks that train.
    """
    at_head = (8 * head + whole.head) if whole.head else 0
    if degrees.is_replicas:
        copies = 2 * values if recipe.precision == "amp_bf16" else 0
        return {"at_head": at_head + copies, "at_block": whole.head + copies}
    one = whole.block + whole.apart
    gathered, before_head = whole.block + one, one
    if recipe.parallel.reshard_after_forward is False:
        gathered = recipe.model.n_layers * one
        before_head = max(gathered // 2, one)
    return {
        "at_head": whole.ends + before_head + at_head,
        "at_block": whole.ends + whole.head + gathered + whole.trained + whole.reduced,
    }


def _logits(recipe: TrainRecipe, degrees: Degrees, device: torch.device) -> dict[str, int]:
    """What the loss holds of logits: of a row's share, and of a chunk of tokens.

    Context parallelism divides the row, tensor parallelism the vocabulary.
    """
    model = recipe.model
    assert model.vocab_size is not None
    capped = model.final_logit_softcapping is not None
    vocabulary = -(-model.vocab_size // degrees.tensor)
    token = logit_bytes(device, capped=capped) * vocabulary
    chunk = chunk_tokens(vocabulary, device, recipe.device_loss_chunk_tokens)
    tokens = -(-recipe.max_seq_len // degrees.context)
    return {"row_logits": tokens * token, "chunk_logits": chunk * token}


def _estimate_part(
    recipe: TrainRecipe, world_size: int, meta_model: Decoder, device: torch.device
) -> MemoryEstimate:
    """Of a model of which a part trains: gradients and moments of that alone."""
    degrees = recipe.parallel.degrees(world_size)
    held = weigh(meta_model, device, degrees)
    low = 4 if recipe.precision == "fp32" else 2
    narrow = 2 if recipe.precision == "amp_bf16" else 1  # fp32 weights are gathered in bf16
    whole = Whole(
        ends=held.ends - held.trained_ends + held.trained_ends // narrow,
        head=held.trained_head // narrow,
        block=held.block - held.trained_block + held.trained_block // narrow,
        apart=held.apart - held.trained_apart + held.trained_apart // narrow,
        trained=max(held.trained_block, held.trained_apart) // narrow,
        reduced=max(held.trained_block, held.trained_apart)
        * (2 if recipe.precision == "bf16" else 1),
    )
    each = 2 if recipe.precision == "bf16" else 4
    rows = row_bytes(recipe, kept_by_blocks(meta_model), degrees=degrees, device=device)
    heap = HEAP if device.type == "cpu" else 1
    beside = _whole_weights(
        recipe, degrees, whole, held.trained_head // each, values=held.trained_matrices
    )
    return MemoryEstimate(
        parameters=held.parameters,
        parameter_bytes=held.frozen + held.trained.shard,
        gradient_bytes=held.trained.shard,
        moment_bytes=round(recipe.optimizer.moment_bytes(each) * held.trained.shard / each),
        at_head=beside["at_head"] + low * held.dequantized,
        at_block=beside["at_block"] + low * held.dequantized,
        row_head=round(heap * (rows.kept + rows.head)),
        row_block=round(heap * (rows.kept + rows.block)),
        load_head=round(heap * rows.load_kept),
        load_block=round(heap * (rows.load_kept + rows.load_block)),
        **_logits(recipe, degrees, device),
        accumulated=accumulated_bytes(recipe, degrees, *reversed(held.trained)),
        step_rows=recipe.global_train_batch_size // degrees.data,
    )


def accumulated_bytes(recipe: TrainRecipe, degrees: Degrees, gathered: int, shard: int) -> int:
    """What gradients take between microbatches over the shard's own.

    FSDP keeps them in fp32 until the last: those of the shard, or, where none are reduce-scattered
    before, all that is gathered. DDP adds them up in place.

    Args:
        recipe: filled.
        degrees: of its mesh.
        gathered: bytes of the weights that train, as a process gathers them.
        shard: bytes of what it keeps of these.
    """
    if degrees.is_replicas:
        return 0
    each = recipe.parallel.reduce_scatter_each_microbatch
    width = 2 if recipe.precision == "bf16" else 4
    return 4 * (shard if each else gathered) // width - shard


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
