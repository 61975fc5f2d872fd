"""What a run needs, before it is built: memory of weights, optimizer and activations.

`fit.py` asks it for the microbatch that `auto` stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from llmfoundry.estimate.activations import row_bytes
from llmfoundry.estimate.trained import kept_by_blocks, weigh
from llmfoundry.models.counts import parameter_count
from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.logits import chunk_tokens, logit_bytes
from llmfoundry.recipe.optimizer import OPTIMIZERS
from llmfoundry.recipe.scripts.train import TrainRecipe

GIB = 2**30
CPU = torch.device("cpu")
HEAP = 1.5
"""What activations take of a CPU's heap over their own size: tensors of other sizes come and go
between those that stay, and freed memory is kept (`ops/host_memory.py`). Measured by
`benchmarks/finetune/memory.py`: 1.44 to 1.53 with 47M and 154M parameters, LoRA and QLoRA."""
FRAMEWORK = GIB // 2  # PyTorch and all else that is imported, before there is a model
REDUCED = 4  # bytes of a gradient on its way to its shard: added up in fp32


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

    def total(self, rows: int) -> int:
        """Bytes at a microbatch of `rows`."""
        head = self.at_head + self.logits(rows) + rows * self.row_head
        most = max(head, self.at_block + rows * self.row_block)
        return self.weights + self.gradients(rows) + self.fixed + most


def estimate(
    recipe: TrainRecipe,
    world_size: int,
    *,
    sketch: Decoder | None = None,
    device: torch.device = CPU,
) -> MemoryEstimate:
    """What a filled recipe needs on each of `world_size` processes.

    Args:
        recipe: filled, its activation checkpointing decided; auto counts as none.
        world_size: processes of the run.
        sketch: of fine-tuning: the model on the meta device, frozen and quantised as it will be;
            None: all parameters train.
        device: where it computes.
    """
    if sketch is not None:
        return _estimate_part(recipe, world_size, sketch, device)
    model = recipe.model
    assert model.vocab_size is not None
    width = 2 if recipe.precision == "bf16" else 4
    parameters, degrees = parameter_count(model), recipe.parallel.degrees(world_size)
    shard = degrees.weights
    head = model.vocab_size * model.d_model
    ends = head * (1 if model.tie_word_embeddings else 2)
    block = (parameters - ends) // model.n_layers
    own = width * -(-parameters // shard)
    low = 4 if recipe.precision == "fp32" else 2
    trained = Whole(low * ends, low * head, low * block, REDUCED * block)
    rows = row_bytes(recipe, device=device)
    return MemoryEstimate(
        parameters=parameters,
        parameter_bytes=own,
        gradient_bytes=own,
        moment_bytes=OPTIMIZERS[recipe.optimizer.name].moments * own,
        **_whole_weights(recipe, shard, trained, head, values=parameters - ends),
        row_head=rows.kept + rows.head,
        row_block=rows.kept + rows.block,
        **_logits(recipe, device),
        accumulated=accumulated_bytes(recipe, width * parameters, shard),
        step_rows=recipe.global_train_batch_size // degrees.data,
    )


class Whole(NamedTuple):
    """Bytes of weights as they are gathered, and of gradients as they are made.

    Attributes:
        ends: of embeddings, final norm and head.
        head: the gradient of the head.
        block: of a block.
        reduced: a block's gradient, in REDUCED bytes each.
        trained: the part of `block` that trains; None: all.
    """

    ends: int
    head: int
    block: int
    reduced: int
    trained: int | None = None


def _whole_weights(
    recipe: TrainRecipe, shard: int, whole: Whole, head: int, *, values: int
) -> dict[str, int]:
    """What is whole of a model beside the shards, when the head and when a block is at work.

    At the head: its gradient in fp32, again times the loss's scale, and in the weights' dtype. At a
    block under FSDP: its weights, the next one's, which are fetched already, its gradient, and
    that of the block before, in fp32, on its way. Without FSDP: the bf16 copies that autocast makes
    of the blocks' fp32 weights, which the backward pass asks for again.

    Args:
        recipe: filled.
        shard: processes that share the weights.
        whole: what is gathered.
        head: values of the head that train.
        values: of the blocks that train.
    """
    at_head = (8 * head + whole.head) if whole.head else 0
    if shard == 1:
        copies = 2 * values if recipe.precision == "amp_bf16" else 0
        return {"at_head": at_head + copies, "at_block": whole.head + copies}
    trained = whole.block if whole.trained is None else whole.trained
    gathered = 2 * whole.block
    if recipe.parallel.reshard_after_forward is False:
        gathered = recipe.model.n_layers * whole.block
    return {
        "at_head": whole.ends + max(gathered // 2, whole.block) + at_head,
        "at_block": whole.ends + whole.head + gathered + trained + whole.reduced,
    }


def _logits(recipe: TrainRecipe, device: torch.device) -> dict[str, int]:
    """What the loss holds of logits: of a row, and of a chunk of tokens."""
    model = recipe.model
    assert model.vocab_size is not None
    capped = model.final_logit_softcapping is not None
    token = logit_bytes(device, capped=capped) * model.vocab_size
    chunk = chunk_tokens(model.vocab_size, device, recipe.device_loss_chunk_tokens)
    return {"row_logits": recipe.max_seq_len * token, "chunk_logits": chunk * token}


def _estimate_part(
    recipe: TrainRecipe, world_size: int, sketch: Decoder, device: torch.device
) -> MemoryEstimate:
    """Of a model of which a part trains: gradients and moments of that alone."""
    held, degrees = weigh(sketch, device), recipe.parallel.degrees(world_size)
    shard = degrees.weights
    low = 4 if recipe.precision == "fp32" else 2
    narrow = 2 if recipe.precision == "amp_bf16" else 1  # fp32 weights are gathered in bf16
    whole = Whole(
        ends=held.ends - held.trained_ends + held.trained_ends // narrow,
        head=held.trained_head // narrow,
        block=held.block - held.trained_block + held.trained_block // narrow,
        reduced=held.trained_block * (2 if recipe.precision == "bf16" else 1),
        trained=held.trained_block // narrow,
    )
    each = 2 if recipe.precision == "bf16" else 4
    rows = row_bytes(recipe, kept_by_blocks(sketch), device=device)
    heap = HEAP if device.type == "cpu" else 1
    beside = _whole_weights(
        recipe, shard, whole, held.trained_head // each, values=held.trained_matrices
    )
    return MemoryEstimate(
        parameters=held.parameters,
        parameter_bytes=(held.frozen + held.trained) // shard,
        gradient_bytes=held.trained // shard,
        moment_bytes=OPTIMIZERS[recipe.optimizer.name].moments * held.trained // shard,
        at_head=beside["at_head"] + low * held.dequantized,
        at_block=beside["at_block"] + low * held.dequantized,
        row_head=round(heap * (rows.kept + rows.head)),
        row_block=round(heap * (rows.kept + rows.block)),
        **_logits(recipe, device),
        accumulated=accumulated_bytes(recipe, held.trained, shard),
        step_rows=recipe.global_train_batch_size // degrees.data,
    )


def accumulated_bytes(recipe: TrainRecipe, trained: int, shard: int) -> int:
    """What gradients take between microbatches over the shard's own; `trained`: bytes of weights.

    FSDP keeps them in fp32 until the last: those of the shard, or, where none are reduce-scattered
    before, of the whole model. DDP adds them up in place.
    """
    if shard == 1:
        return 0
    values = trained // (2 if recipe.precision == "bf16" else 4)
    each = recipe.parallel.reduce_scatter_each_microbatch
    return 4 * values // (shard if each else 1) - trained // shard
