"""Memory estimate of a run, before it is built: weights, optimizer state and activations.

Entry point: `estimate`. `fit.py` calls it to choose the microbatch size `auto`. A step uses most
memory at one of a few points (`PeakPoint`); the estimate is the maximum over these points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from llmfoundry.models.counts import parameter_count
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.moe import ExpertWeights
from llmfoundry.models.quantized import quantized_shapes, value_count
from llmfoundry.ops.loss import chunk_tokens
from llmfoundry.plan.count import BlockCount, Bytes, ModelCount, count
from llmfoundry.plan.microbatch_sizes import FRAMEWORK
from llmfoundry.plan.parameter_shards import (
    BLOCK,
    REDUCED,
    Values,
    shares,
    total,
    unit_of,
    values_of,
)
from llmfoundry.recipe.parallel import Degrees
from llmfoundry.recipe.train import ResolvedTrainRecipe

GIB = 2**30
CPU = torch.device("cpu")
HEAP = 1.5
"""Ratio of heap memory to the size of activations on a CPU. Heap fragmentation causes the
difference, and freed memory is not returned (`ops/devices.py`). Measured by
`benchmarks/finetune.py`: 1.44 to 1.53 with 47M and 154M parameters, LoRA and QLoRA."""


class PeakPoint(NamedTuple):
    """Point of a step at which the memory of a rank may peak.

    Attributes:
        whole: bytes of gathered (unsharded) weights and gradients and of their copies.
        rows: bytes of activations per sequence; `fixed` are temporary gradients and copies of
            weights.
    """

    whole: float
    rows: Bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one rank needs.

    Attributes:
        parameters: number of parameters of the full model.
        parameter_bytes: bytes of the rank's shard of the weights.
        gradient_bytes: bytes of the shard's gradients.
        moment_bytes: bytes of the shard's optimizer state, and of averaged weights.
        moments: points of a step at which memory may peak: the loss, the gradient of the head, the
            backward pass of a block, and the backward pass of the embedding.
        chunk_rows: number of sequences whose logits the loss holds at once (may be a fraction).
        accumulated: additional bytes of gradients that are accumulated between microbatches.
        step_rows: sequences of the rank in a step; gradients are accumulated if a microbatch has
            fewer.
        fixed: FRAMEWORK.
    """

    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    moment_bytes: int
    moments: tuple[PeakPoint, ...]
    chunk_rows: float
    accumulated: int
    step_rows: int
    fixed: int = FRAMEWORK

    @property
    def weights(self) -> int:
        """Bytes of weights, gradients and optimizer state, for any microbatch size."""
        return self.parameter_bytes + self.gradient_bytes + self.moment_bytes

    def logits(self, rows: int) -> int:
        """Return the bytes of logits in the loss of a microbatch of `rows` sequences."""
        return max(self._logits(moment, rows) for moment in self.moments)

    def gradients(self, rows: int) -> int:
        """Return `accumulated` for a microbatch of `rows`; 0 if it is the step's only one."""
        return self.accumulated if rows < self.step_rows else 0

    def activations(self, rows: int) -> int:
        """Return the bytes of activations of a microbatch of `rows`, without logits."""
        return int(rows * max(moment.rows.row for moment in self.moments))

    def total(self, rows: int, load: float = 1.0) -> int:
        """Return the peak bytes at a microbatch of `rows`.

        `load` is the expert load of the rank in units of the mean over ranks.
        """
        return max(self._at(moment, rows, load) for moment in self.moments)

    def load_bytes(self, rows: int) -> int:
        """Return the growth of `total` per unit of expert load."""
        return self.total(rows, 2.0) - self.total(rows)

    def parts(self, rows: int) -> dict[str, int]:
        """Return the components of `total` by purpose, at balanced expert load."""
        most = max(self.moments, key=lambda moment: self._at(moment, rows, 1.0))
        return {
            "weights, gradients and optimizer": self.weights,
            "accumulated gradients": self.gradients(rows),
            "whole weights of a block": int(most.whole + most.rows.fixed),
            "activations": int(rows * most.rows.row),
            "logits": self._logits(most, rows),
            "PyTorch": self.fixed,
        }

    def fitting_load(self, rows: int, room: int) -> float:
        """Return the largest expert load, in units of the mean, that fits `room`; inf: any."""
        loads = [
            1 + (room - self._at(moment, rows, 1.0)) / (rows * moment.rows.load)
            for moment in self.moments
            if moment.rows.load > 0
        ]
        return min(loads, default=math.inf)

    def _at(self, moment: PeakPoint, rows: int, load: float) -> int:
        """Return the bytes at one point of a step, for a microbatch and an expert load."""
        constant = self.weights + self.gradients(rows) + self.fixed + moment.whole
        activations = moment.rows
        per_sequence = activations.row + (load - 1) * activations.load
        return int(constant + activations.fixed + rows * per_sequence) + self._logits(moment, rows)

    def _logits(self, moment: PeakPoint, rows: int) -> int:
        """Return the bytes of the logits at one point of a step."""
        return int(min(rows, self.chunk_rows) * moment.rows.logits)


def estimate(
    recipe: ResolvedTrainRecipe,
    world_size: int,
    *,
    meta_model: Decoder | None = None,
    device: torch.device = CPU,
) -> MemoryEstimate:
    """Estimate the memory of each rank of a run.

    Args:
        recipe: resolved recipe; activation checkpointing `auto` counts as none.
        world_size: number of ranks.
        meta_model: for fine-tuning: the model on the meta device, with frozen and quantized
            parameters as in the run; None: all parameters are trained.
        device: device type of the run.
    """
    # weights; bytes of a value in matmuls and in the optimizer's copy
    degrees = recipe.parallel.degrees(world_size)
    if meta_model is None:
        weights = _weights(recipe, degrees)
    else:
        weights = count_weight_bytes(meta_model, device, degrees)
    compute_width = 4 if recipe.precision == "fp32" else 2
    width = 2 if recipe.precision == "bf16" else 4

    # activations at the points where memory may peak
    gathered = _whole(recipe, weights, compute_width)
    model_count = count(recipe, degrees, device=device, meta_model=meta_model)
    moments = _moments(recipe, degrees, gathered, model_count)
    dequantized = compute_width * weights.dequantized
    heap = HEAP if device.type == "cpu" and meta_model is not None else 1
    return MemoryEstimate(
        parameters=weights.parameters,
        parameter_bytes=weights.frozen + weights.trained.shard,
        gradient_bytes=weights.trained.shard,
        moment_bytes=round(recipe.state_bytes(width) * weights.trained.shard / width),
        moments=tuple(
            PeakPoint(moment.whole + dequantized, _times(moment.rows, heap)) for moment in moments
        ),
        chunk_rows=_chunk_rows(recipe, degrees, device),
        accumulated=accumulated_bytes(recipe, degrees, *reversed(weights.trained)),
        step_rows=recipe.global_train_batch_size // degrees.data,
    )


def weight_bytes(recipe: ResolvedTrainRecipe, world_size: int) -> int:
    """Return `weights` plus `fixed` of an estimate, if all parameters are trained.

    This lower bound of the memory is fast: it counts no activations.
    """
    shard_bytes = _weights(recipe, recipe.parallel.degrees(world_size)).trained.shard
    width = 2 if recipe.precision == "bf16" else 4
    return FRAMEWORK + 2 * shard_bytes + round(recipe.state_bytes(width) * shard_bytes / width)


def _times(rows: Bytes, heap: float) -> Bytes:
    """Return activations that are multiplied by `heap`, without temporary tensors and logits."""
    return Bytes(rows.fixed, heap * rows.row, heap * rows.load, rows.logits)


def _chunk_rows(recipe: ResolvedTrainRecipe, degrees: Degrees, device: torch.device) -> float:
    """Return the number of sequences whose logits the loss holds at once; an own loss holds all."""
    if recipe.loss.is_own:
        return math.inf
    vocabulary = math.ceil(recipe.model.vocab_size / degrees.tensor)  # of a rank
    sequence_tokens = math.ceil(recipe.max_seq_len / degrees.context)
    chunk = chunk_tokens(vocabulary, device, recipe.device_loss_chunk_tokens)
    return chunk / sequence_tokens


class GatheredBytes(NamedTuple):
    """Bytes of gathered weights, and of gradients that are being reduced.

    Attributes:
        ends: weights of embeddings, final norm and head.
        block: weights of a block, without separate FSDP units.
        apart: weights of separate FSDP units of a block: its experts under expert parallelism, a
            layer with experts under tensor parallelism.
        head: gradient of the head.
        grads_apart: gradients of the separate units.
        reduced: gradients of the block while they are reduced, REDUCED bytes per value.
        reduced_apart: gradients of the separate units while they are reduced.
        reduced_ends: gradients of the ends while they are reduced, and before the cast.
    """

    ends: int
    block: int
    apart: int
    head: int
    grads_apart: int
    reduced: int
    reduced_apart: int
    reduced_ends: int


def _whole(recipe: ResolvedTrainRecipe, weights: WeightBytes, compute_width: int) -> GatheredBytes:
    """Return gathered bytes. Under amp_bf16 FSDP gathers in bf16 and reduces in fp32.

    Args:
        recipe: resolved recipe.
        weights: bytes in the dtype of the optimizer's copy.
        compute_width: bytes of a weight in matmuls.
    """
    width = 2 if recipe.precision == "bf16" else 4
    narrow = width // compute_width  # ratio of both dtypes: 2 under amp_bf16, otherwise 1

    def gathered(all_bytes: int, trained: int) -> int:
        """Return the gathered bytes of a unit. Only trained weights are cast."""
        return all_bytes - trained + trained // narrow

    def reduced(trained: int) -> int:
        """Return the bytes of the unit's gradients in the dtype in which they are reduced."""
        return trained * REDUCED // width

    return GatheredBytes(
        ends=gathered(weights.ends, weights.trained_ends),
        block=gathered(weights.block, weights.trained_block),
        apart=gathered(weights.apart, weights.trained_apart),
        head=weights.trained_head // narrow,
        grads_apart=weights.trained_apart // narrow,
        reduced=reduced(weights.trained_block),
        reduced_apart=reduced(weights.trained_apart),
        reduced_ends=reduced(weights.trained_ends) + weights.trained_ends // narrow,
    )


def _moments(
    recipe: ResolvedTrainRecipe, degrees: Degrees, gathered: GatheredBytes, counted: ModelCount
) -> list[PeakPoint]:
    """Return the points of a step at which memory may peak.

    Under FSDP the ends stay gathered. During the head, the weights that were gathered last are
    still in memory. During the backward pass of a block, the prefetched weights of the next block
    are too, and the fp32 gradient of the previous block while it is reduced (none before the last
    block). The weights of a unit are freed before its gradient is cast. An untied head is a unit of
    its own, whose gradient is reduced in fp32 during the backward pass of the last block: as many
    bytes as the head and its gradient have under autocast. Under DDP nothing is gathered; all
    weights are counted as such.
    """
    # saved activations of all blocks, and those that are left at the backward pass of each kind
    left = [_saved(counted.blocks, block.up_to_last) for block in counted.blocks]
    saved, ends = left[-1], counted.ends

    # DDP
    if degrees.is_replicas:
        at_blocks = [
            kept.plus(rows)
            for block, kept in zip(counted.blocks, left, strict=True)
            for rows in (*block.at_backward, *block.behind_experts)
        ]
        at_ends = [saved.plus(rows) for rows in (*ends.at_loss, *ends.at_head)]
        return [PeakPoint(0, rows) for rows in (*at_ends, *at_blocks, *ends.behind)]

    # FSDP: the weights that were gathered last
    at_loss, at_head = gathered.apart or gathered.block, gathered.block
    if recipe.parallel.reshard_after_forward is False:
        at_loss = at_head = recipe.model.n_layers * (gathered.block + gathered.apart)

    # before the backward pass of the last block no gradient is being reduced
    last = counted.blocks[-1]
    others = [*zip(counted.blocks[:-1], left[:-1], strict=True)]
    if last.blocks > 1:
        others.append((last, saved.plus(last.kept.times(-1))))
    return [
        *(PeakPoint(gathered.ends + at_loss, saved.plus(rows)) for rows in ends.at_loss),
        *(PeakPoint(gathered.ends + at_head, saved.plus(rows)) for rows in ends.at_head),
        *_at_block(recipe, gathered, last, saved, on_its_way=0),
        *(
            moment
            for block, kept in others
            for moment in _at_block(recipe, gathered, block, kept, on_its_way=gathered.reduced)
        ),
        *(PeakPoint(gathered.ends + gathered.reduced, rows) for rows in ends.behind),
        PeakPoint(gathered.reduced_ends, Bytes()),
    ]


def _saved(blocks: Sequence[BlockCount], numbers: Sequence[int]) -> Bytes:
    """Return the saved activations of so many blocks of each kind."""
    saved = Bytes()
    for block, number in zip(blocks, numbers, strict=True):
        saved = saved.plus(block.kept.times(number))
    return saved


def _at_block(
    recipe: ResolvedTrainRecipe,
    whole: GatheredBytes,
    block: BlockCount,
    kept: Bytes,
    *,
    on_its_way: int,
) -> Iterator[PeakPoint]:
    """Yield the possible peaks of a block's backward pass under FSDP.

    Args:
        recipe: resolved recipe.
        whole: gathered bytes.
        block: cost of the block.
        kept: saved activations of this block and all blocks before it.
        on_its_way: bytes of the previous unit's gradient while it is reduced.
    """
    gathered = 2 * whole.block + whole.apart
    if recipe.parallel.reshard_after_forward is False:
        gathered = recipe.model.n_layers * (whole.block + whole.apart)
    stay = whole.ends + whole.head + gathered
    for rows in block.at_backward:
        yield PeakPoint(stay + on_its_way, kept.plus(rows))
    sent = on_its_way
    if whole.apart:  # the experts' weights are freed; their gradients are cast, then reduced
        sent = whole.reduced_apart - whole.apart
        if block.experts_done is not None:
            yield PeakPoint(stay + sent, kept.plus(block.experts_done))
        sent -= whole.grads_apart
    for rows in block.behind_experts:
        yield PeakPoint(stay + sent, kept.plus(rows))


def _weights(recipe: ResolvedTrainRecipe, degrees: Degrees) -> WeightBytes:
    """Return the bytes of a model whose parameters are all trained, from its settings."""
    width = 2 if recipe.precision == "bf16" else 4
    parameters = shares(recipe.model, degrees)
    block, *apart = (width * unit.block.gathered for unit in parameters.units)
    ends = width * parameters.ends.gathered
    return WeightBytes(
        parameters=parameter_count(recipe.model),
        frozen=0,
        trained=parameters.all.times(width),
        block=block,
        apart=sum(apart),
        ends=ends,
        trained_block=block,
        trained_apart=max(apart, default=0),
        trained_ends=ends,
        trained_head=width * parameters.head.gathered,
        dequantized=0,
    )


def accumulated_bytes(
    recipe: ResolvedTrainRecipe, degrees: Degrees, gathered: int, shard: int
) -> int:
    """Return the additional bytes of gradients that are accumulated between microbatches.

    FSDP accumulates in fp32: the gradients of the shard if each microbatch is reduce-scattered, and
    otherwise the gradients of all gathered weights. DDP accumulates in place.

    Args:
        recipe: resolved recipe.
        degrees: parallel degrees of the mesh.
        gathered: bytes of the trained weights when gathered.
        shard: bytes of the rank's shard of these weights.
    """
    if degrees.is_replicas:
        return 0
    each = recipe.parallel.reduce_scatter_each_microbatch
    width = 2 if recipe.precision == "bf16" else 4
    return 4 * (shard if each else gathered) // width - shard


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a model's parameters on one rank.

    Attributes:
        parameters: number of parameters of the model, before quantization.
        frozen: bytes of frozen parameters, which have no gradients or optimizer state.
        trained: bytes of trained parameters.
        block: bytes of the largest block, gathered.
        apart: bytes of separate FSDP units of a block, such as experts.
        ends: bytes of embeddings, final norm and head.
        trained_block: trained bytes of `block`.
        trained_apart: trained bytes of `apart`.
        trained_ends: trained bytes of the ends.
        trained_head: trained bytes of the head.
        dequantized: number of values of the largest 4-bit matrix, which is dequantized for use.
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
    dequantized: int


def count_weight_bytes(model: nn.Module, device: torch.device, degrees: Degrees) -> WeightBytes:
    """Return the bytes of a model's parameters on one rank; the model has a list `blocks`."""

    def held(module: nn.Module, *, trained: bool) -> dict[str, Values]:
        """Return the bytes of all parameters, or of trained ones, by FSDP unit."""
        units: dict[str, Values] = {}
        for name, p in module.named_parameters():
            if p.requires_grad or not trained:
                unit, values = unit_of(name, degrees), values_of(name, p.shape, degrees)
                units[unit] = units.get(unit, Values()).plus(values.times(p.itemsize))
        return units

    def largest(*, trained: bool) -> tuple[int, int]:
        """Return the largest gathered bytes of a block, and of its separate units."""
        most_block, most_apart = 0, 0
        for block in blocks:
            units = held(block, trained=trained)
            block_bytes = units.pop(BLOCK, Values()).gathered
            most_block = max(most_block, block_bytes)
            most_apart = max(most_apart, total(units.values()).gathered)
        return most_block, most_apart

    # bytes of the model, and of its blocks, of all and of trained parameters
    blocks: list[nn.Module] = list(model.blocks)  # type: ignore[arg-type]
    everything = total(held(model, trained=False).values())
    trained_everything = total(held(model, trained=True).values())
    in_blocks, trained_in_blocks = (
        total(values for block in blocks for values in held(block, trained=is_trained).values())
        for is_trained in (False, True)
    )

    # the largest block determines how much is gathered at once
    block, apart = largest(trained=False)
    trained_block, trained_apart = largest(trained=True)
    return WeightBytes(
        parameters=value_count(model),
        frozen=everything.shard - trained_everything.shard,
        trained=trained_everything,
        block=block,
        apart=apart,
        ends=everything.gathered - in_blocks.gathered,
        trained_block=trained_block,
        trained_apart=trained_apart,
        trained_ends=trained_everything.gathered - trained_in_blocks.gathered,
        trained_head=_trained_head(model) // degrees.tensor,
        dequantized=_largest_matrix(model, device),
    )


def _trained_head(model: nn.Module) -> int:
    """Return the bytes of the output head (or tied embedding) if it is trained."""
    head = model.head_weight
    assert isinstance(head, Tensor)
    return head.nbytes if head.requires_grad else 0


def _largest_matrix(model: nn.Module, device: torch.device) -> int:
    """Return the values of the largest 4-bit matrix; a CPU dequantizes one expert at a time."""
    sizes = [0]
    for name, (height, width) in quantized_shapes(model):
        module = model.get_submodule(name.rpartition(".")[0])
        experts = module.n if isinstance(module, ExpertWeights) and device.type == "cpu" else 1
        sizes.append(height * width // experts)
    return max(sizes)
