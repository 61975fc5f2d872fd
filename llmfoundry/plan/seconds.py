"""Estimated time of a training step by component, for any GPU with a data sheet.

Entry point: `step_seconds`. `layouts.py` ranks layouts by it, `fit.py` ranks activation
checkpointing, and `cli/commands/plan.py` prints it. The times of matmuls, attention and
memory-bound operations add up. Overlapped communication counts only where it takes longer than the
compute beside it. The host must launch all operations in time. A matmul is computed in tiles and
waves of tiles: a partly filled last wave, and small tiles, make small matmuls less efficient than
large ones.

All inputs are data sheets, shapes and bytes. One number per kind of GPU is fitted, `sustained`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from llmfoundry.loggers.console import percent, short_count
from llmfoundry.models.counts import EXPERTS, flops_per_token, parts
from llmfoundry.models.tensor_parallel import tensor_parallel_dim
from llmfoundry.plan.communication import WAITED_FOR, CollectiveTraffic, communication
from llmfoundry.plan.count import count
from llmfoundry.plan.meter import BACKWARD_OF_FORWARD, Amounts, Pass
from llmfoundry.plan.parameter_shards import BLOCK, shares, tokens_of_row, unit_of
from llmfoundry.recipe.hardware import Gpu
from llmfoundry.recipe.model import ResolvedModelConfig
from llmfoundry.recipe.parallel import Degrees, context_method
from llmfoundry.recipe.train import ResolvedTrainRecipe

CUDA = torch.device("cuda")
ALONE = Degrees(shard=2)
"""Degrees of ranks that share no sequences, matrices or experts."""
COPIES = 0.85
"""Fraction of the memory bandwidth that elementwise operations reach."""
FP8 = 0.88
"""Ratio of the peak fractions that the fastest matmuls reach, FP8 over bfloat16: 71 % over 80 % on
H100 (S. Bekman's table, `recipe/hardware.py`)."""
FP32 = 1 / 15
"""Ratio of the speeds of fp32 matmuls, without tensor cores, and bfloat16 matmuls: 19.5 of 312
TFLOP/s on A100, 67 of 989 on H100, by their data sheets."""
CAST = 5
"""Bytes of memory traffic per value cast to FP8: read for the scale, read again, written."""
FLASH_3 = 1.7
"""How much faster FlashAttention 3 is than 2 on Hopper (Shah et al., 2024: 1.5 to 2.0)."""
SHORT = 512
"""Sequence length at which attention reaches half of its speed on long sequences (Dao, 2023)."""
LAUNCH = 6e-6
"""Seconds of host time per uncompiled PyTorch operation."""
BESIDE = 0.15
"""Fraction of multiprocessor time that NVLink communication takes from overlapped compute (Isaev et
al., 2023, Calculon's a100_80g.json)."""


@dataclass(frozen=True)
class Speeds:
    """Achievable speeds of a GPU.

    Attributes:
        gpu: data sheet.
        products: FLOP/s of matmuls with full tiles.
        attention: FLOP/s of attention over long sequences.
        memory: bytes/s read or written.
        fp8: FLOP/s of FP8 matmuls; 0: not used.
        launch: seconds of host time per operation.
    """

    gpu: Gpu
    products: float
    attention: float
    memory: float
    fp8: float = 0.0
    launch: float = LAUNCH


def speeds(gpu: Gpu, recipe: ResolvedTrainRecipe) -> Speeds:
    """Of a GPU, by its data sheet."""
    newer = FLASH_3 if recipe.model.attn_config.attn_impl == "flash3" else 1.0
    share, narrow = gpu.sustained * gpu.reached, FP32 if recipe.precision == "fp32" else 1.0
    return Speeds(
        gpu,
        products=narrow * share * gpu.tflops * 1e12,
        fp8=FP8 * share * gpu.fp8_tflops * 1e12,
        attention=narrow * min(0.75, newer * gpu.attention) * gpu.tflops * 1e12,
        memory=COPIES * gpu.memory_gb_s * 1e9,
    )


@dataclass(frozen=True)
class StepSeconds:
    """A step's seconds; those of the parts add up to `total`.

    Attributes:
        products: of matrix products, without those computed again.
        attention: the same of attention.
        memory: of operations bound by memory.
        again: of what the backward pass computes again.
        optimizer: of clipping and the update.
        waiting: of messages that nothing hides, by what is sent.
        beside: that hidden messages take from computation.
        host: that the GPU waits for launches.
        flops: of the model, of one process's share of the step.
        again_flops: of what is computed again.
    """

    products: float
    attention: float
    memory: float
    again: float
    optimizer: float
    beside: float
    host: float
    waiting: dict[str, float] = field(default_factory=dict)
    flops: float = 0.0
    again_flops: float = 0.0

    @cached_property
    def total(self) -> float:
        """Of the whole step."""
        return sum(self.split().values())

    def split(self) -> dict[str, float]:
        """Each part's seconds by what it is, those that take none left out."""
        named = {
            "products": self.products,
            "attention": self.attention,
            "memory-bound": self.memory,
            "computed again": self.again,
            "optimizer": self.optimizer,
            "beside messages": self.beside,
            "host": self.host,
        }
        named |= {f"waiting for {what}": seconds for what, seconds in self.waiting.items()}
        return {what: seconds for what, seconds in named.items() if seconds > 0}

    def mfu(self, gpu: Gpu) -> float:
        """Model FLOPs over those that the GPU could have done."""
        return self.flops / (self.total * gpu.tflops * 1e12)

    def hfu(self, gpu: Gpu) -> float:
        """The same with what is computed again."""
        return (self.flops + self.again_flops) / (self.total * gpu.tflops * 1e12)


def step_line(step: StepSeconds) -> str:
    """A step's seconds and its parts, the longest first."""
    split = sorted(step.split().items(), key=lambda part: -part[1])
    named = ", ".join(f"{what} {in_seconds(n)}" for what, n in split if n >= 0.001 * step.total)
    return f"about {in_seconds(step.total)}: {named}"


def speed_line(step: StepSeconds, recipe: ResolvedTrainRecipe, gpus: int, gpu: Gpu) -> str:
    """Tokens a second and shares of the peak."""
    tokens = recipe.global_train_batch_size * recipe.max_seq_len / step.total
    hfu = f", HFU {percent(step.hfu(gpu))}" if step.again_flops else ""
    each = f"{tokens / gpus:,.0f} tokens/s a GPU, {short_count(tokens)} in all"
    return f"{each}; MFU {percent(step.mfu(gpu))}{hfu}"


def in_seconds(seconds: float) -> str:
    """Such as 1.23 s or 12 ms."""
    return f"{seconds:.3g} s" if seconds >= 0.0995 else f"{seconds * 1e3:.2g} ms"


@dataclass(frozen=True)
class GpuTime(Amounts):
    """Seconds of a GPU, launches and FLOPs of a pass over some part of the model.

    Attributes:
        products: seconds of products.
        attention: of attention.
        memory: of operations bound by memory.
        launches: operations.
        flops: of products and attention.
    """

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launches: float = 0.0
    flops: float = 0.0

    @property
    def total(self) -> float:
        """Of all kinds."""
        return self.products + self.attention + self.memory

    def only_products(self) -> GpuTime:
        """Without all else; FLOPs are those of products in any case that asks."""
        return GpuTime(products=self.products, flops=self.flops)


@dataclass(frozen=True)
class Computation:
    """What a microbatch costs, without messages.

    Attributes:
        forward: of all blocks.
        backward: of all blocks, without what is computed again.
        again: what is.
        ends: of embedding, final norm, head and loss, both ways.
    """

    forward: GpuTime
    backward: GpuTime
    again: GpuTime
    ends: GpuTime


def step_seconds(
    recipe: ResolvedTrainRecipe,
    world_size: int,
    microbatch: int,
    reached: Speeds,
    *,
    roughly: bool = False,
    sent: Iterable[CollectiveTraffic] | None = None,
) -> StepSeconds:
    """What a step takes on each of `world_size` GPUs.

    Args:
        recipe: filled; activation checkpointing decided.
        world_size: processes of the run.
        microbatch: rows at a time.
        reached: what each process's GPU does.
        roughly: whether memory traffic is that of one process over as many as share a row, in place
            of the layout's own, which takes a second to count.
        sent: what a process sends in a step; None: `communication`.
    """
    degrees, gpu = recipe.parallel.degrees(world_size), reached.gpu
    microbatches = recipe.global_train_batch_size / degrees.data / microbatch
    found = [*(communication(recipe, world_size, microbatch, gpu.node) if sent is None else sent)]
    work = _work(recipe, degrees, microbatch, reached, roughly=roughly)
    done = work.forward.plus(work.backward).plus(work.ends).times(microbatches)
    again = work.again.times(microbatches)
    computed = done.total + again.total
    tokens = recipe.global_train_batch_size * recipe.max_seq_len / world_size
    inside = sum(each.sent - each.between for each in found if each.what not in WAITED_FOR)
    beside = BESIDE * min(inside / (gpu.link_gb_s * 1e9), computed)
    return StepSeconds(
        products=done.products,
        attention=done.attention,
        memory=done.memory,
        again=again.total,
        optimizer=_optimizer(recipe, degrees, reached),
        waiting=_waiting(recipe, found, work, microbatches, gpu),
        beside=beside,
        host=max(0.0, reached.launch * (done.launches + again.launches) - computed - beside),
        flops=tokens * flops_per_token(recipe.model, recipe.max_seq_len),
        again_flops=again.flops,
    )


def _work(
    recipe: ResolvedTrainRecipe,
    degrees: Degrees,
    microbatch: int,
    reached: Speeds,
    *,
    roughly: bool,
) -> Computation:
    """Of a microbatch: products by their shapes, all else by what is counted."""
    model, tokens = recipe.model, microbatch * tokens_of_row(recipe, degrees)
    share = 1 / (degrees.tensor * degrees.context) if roughly else 1.0
    counted = count(recipe, ALONE if roughly else degrees, device=CUDA)
    moved = {
        name: _moved(recipe, [(getattr(one, name), one.blocks) for one in counted.blocks],
                     microbatch * share, reached)
        for name in ("forward", "backward", "again")
    }  # fmt: skip
    forward, backward = moved["forward"], moved["backward"]
    for block, n in parts(model)[1:]:
        first = [*products(block, model, degrees, tokens)]
        back = [each for one in first for each in one.backward()]
        narrow = recipe.fp8_recipe is not None and reached.fp8 > 0
        forward = forward.plus(_multiplied(first, reached, narrow=narrow).times(n))
        backward = backward.plus(_multiplied(back, reached, narrow=narrow).times(n))
    attention = GpuTime()
    for layer in model.layers():
        attention = attention.plus(_attention(recipe, degrees, microbatch, layer.window, reached))
    again = moved["again"]
    whole, repeated = counted.forward.row, counted.again.row
    in_blocks = whole.products - counted.ends.forward.row.products
    again = again.plus(forward.only_products().times(_over(repeated.products, in_blocks)))
    again = again.plus(attention.times(_over(repeated.attention, whole.attention)))
    one = head(model, degrees, tokens)
    ends = [(counted.ends.forward, 1), (counted.ends.backward, 1)]
    return Computation(
        forward.plus(attention),
        backward.plus(attention.times(BACKWARD_OF_FORWARD)),
        again,
        _multiplied([one, *one.backward()], reached).plus(
            _moved(recipe, ends, microbatch * share, reached)
        ),
    )


def _over(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _moved(
    recipe: ResolvedTrainRecipe, passes: Iterable[tuple[Pass, int]], rows: float, reached: Speeds
) -> GpuTime:
    """Operations bound by memory, each a kernel, or fused where the recipe is compiled."""
    spent = GpuTime()
    for one, n in passes:
        moved = one.fixed.moved + rows * one.row.moved
        launches = one.fixed.launches + rows * one.row.launches
        if recipe.compile:
            moved = one.fixed.fused + rows * one.row.fused
            launches = one.fixed.fused_launches + rows * one.row.fused_launches
        spent = spent.plus(GpuTime(memory=moved / reached.memory, launches=launches).times(n))
    return spent


def _multiplied(found: list[Matmul], reached: Speeds, *, narrow: bool = False) -> GpuTime:
    """Products; `narrow`: those of dense layers in 8 bits, to which both operands are cast."""
    seconds = cast = 0.0
    for one in found:
        is_narrow = narrow and one.groups == 1
        flops = reached.fp8 if is_narrow else reached.products
        seconds += one.seconds(reached.gpu, flops=flops, moved=reached.memory)
        cast += CAST * (one.rows + one.columns) * one.inner * is_narrow
    flops = sum(one.flops for one in found)
    return GpuTime(products=seconds, memory=cast / reached.memory, flops=flops)


def _attention(
    recipe: ResolvedTrainRecipe, degrees: Degrees, microbatch: int, window: int, reached: Speeds
) -> GpuTime:
    """A layer's, forward: of whole rows, of which a token sees half, or its window."""
    model, length = recipe.model, recipe.max_seq_len
    seen = length / 2 if window < 0 else min(length / 2, window + 1)
    shared = degrees.tensor * degrees.context
    flops = 4.0 * microbatch * length * seen * model.n_heads * model.head_dim / shared
    queries = length
    if context_method(model, recipe.parallel, degrees) == "all_gather":
        queries = -(-length // degrees.context)
    narrow = min(1.0, 0.5 + model.head_dim / 256)  # 64 numbers a head: three quarters
    ramp = queries / (queries + SHORT)
    return GpuTime(attention=flops / (reached.attention * ramp * narrow), flops=flops)


def _optimizer(recipe: ResolvedTrainRecipe, degrees: Degrees, reached: Speeds) -> float:
    """Clipping reads a gradient twice and writes it once; the update writes all but gradients."""
    width = 2 if recipe.precision == "bf16" else 4
    moments = recipe.optimizer.moment_bytes(width)
    values = shares(recipe.model, degrees).all.shard
    return values * (3 * width + 2 * (width + moments) + width) / reached.memory


def _waiting(
    recipe: ResolvedTrainRecipe,
    found: list[CollectiveTraffic],
    work: Computation,
    microbatches: float,
    gpu: Gpu,
) -> dict[str, float]:
    """Seconds of messages that nothing hides, by what is sent.

    What the next products need is waited for. Weights of a block are gathered while the block
    before computes, forward and backward; gradients are reduced while the next ones are made. Of
    each pair the longer is waited for, and the first gather and the last reduction, which have
    nothing beside them. Replicas reduce theirs once a step, beside the last backward pass.
    """
    took: defaultdict[str, float] = defaultdict(float)
    for each in found:
        kind = each.what if each.what in WAITED_FOR else f"{each.what} {each.kind}"
        took[kind] += each.seconds(gpu)
    n, reshards = recipe.model.n_layers, recipe.parallel.reshard_after_forward is not False
    each_time = recipe.parallel.reduce_scatter_each_microbatch is not False
    gather = took["weights all_gather"] / microbatches / (2 if reshards else 1) / n
    scatter = took["gradients reduce_scatter"] / (microbatches if each_time else 1) / n
    reduce = took["gradients all_reduce"] / n
    forward = work.forward.total / n
    backward = work.backward.plus(work.again).total / n
    again = gather if reshards else 0.0

    def left(computed: float, sent: float) -> float:
        return (n - 1) * max(0.0, sent - computed)

    weights = microbatches * (gather + left(forward, gather) + left(backward, again))
    usual = again + scatter if each_time else again
    last = again + scatter + reduce
    gradients = (microbatches - 1) * left(backward, usual) + left(backward, last)
    gradients -= microbatches * left(backward, again)
    gradients += scatter * (microbatches if each_time else 1) + reduce
    waits = {what: took[what] for what in WAITED_FOR}
    return {
        k: v for k, v in (waits | {"weights": weights, "gradients": gradients}).items() if v > 0
    }


TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.7), (64, 64, 0.5))
"""Rows and columns of cuBLAS's tiles, and the share of the largest one's speed that each reaches:
smaller ones read more for each product (NVIDIA, Matrix Multiplication Background)."""


class Matmul(NamedTuple):
    """(rows, inner) times (inner, columns), so often side by side.

    Attributes:
        rows: of the first matrix: tokens, in the forward pass.
        columns: of the second.
        inner: of both.
        groups: such products in one call: experts.
    """

    rows: float
    columns: float
    inner: float
    groups: int = 1

    @property
    def flops(self) -> float:
        """A multiply-add is two."""
        return 2.0 * self.rows * self.columns * self.inner * self.groups

    def seconds(self, gpu: Gpu, *, flops: float, moved: float) -> float:
        """On a GPU whose fastest product reaches `flops` FLOP/s and that moves `moved` bytes/s."""
        waves = min(self._waves(gpu, *tile) for tile in TILES)
        values = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return max(waves * 2 * self.inner / flops, 2 * values * self.groups / moved)

    def _waves(self, gpu: Gpu, height: int, width: int, share: float) -> float:
        """Multiply-adds of an inner step that as many full waves of tiles would be."""
        tiles = self.groups * math.ceil(self.rows / height) * math.ceil(self.columns / width)
        waves = math.ceil(tiles / gpu.multiprocessors)
        return waves * gpu.multiprocessors * height * width / share

    def backward(self) -> tuple[Matmul, Matmul]:
        """What gives the gradients of the first matrix and of the second."""
        rows, columns, inner, groups = self
        return Matmul(rows, inner, columns, groups), Matmul(inner, columns, rows, groups)


def products(
    module: nn.Module, model: ResolvedModelConfig, degrees: Degrees, tokens: float
) -> Iterator[Matmul]:
    """Those of a block, or of the head, on one process in a forward pass over so many tokens.

    Args:
        module: on the meta device: one of `counts.parts`.
        model: filled.
        degrees: of the mesh: tensor parallelism divides the matrices, whose products then meet the
            tokens of all its processes; expert parallelism leaves rows evenly loaded as many.
        tokens: of this process, before tensor parallelism divides them.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim != 2 or name in ("wte.weight", "wpe.weight"):
            continue
        outputs, inputs = parameter.shape
        if EXPERTS in name:
            yield _expert(name, outputs, inputs, model, degrees, tokens)
            continue
        if unit_of(name, degrees) != BLOCK:  # beside experts each process has its own tokens
            yield Matmul(tokens / degrees.tensor, outputs, inputs)
            continue
        if tensor_parallel_dim(name) == 0:
            outputs = -(-outputs // degrees.tensor)
        elif tensor_parallel_dim(name) == 1:
            inputs = -(-inputs // degrees.tensor)
        yield Matmul(tokens, outputs, inputs)


def _expert(
    name: str, height: int, width: int, model: ResolvedModelConfig, degrees: Degrees, tokens: float
) -> Matmul:
    """Of a stack of experts (experts * hidden, d), each with its share of evenly loaded rows."""
    ffn = model.ffn_config
    experts = ffn.moe_num_experts // degrees.expert
    rows = tokens / degrees.tensor * ffn.moe_top_k / experts
    hidden = height // ffn.moe_num_experts
    outputs, inputs = (width, hidden) if name.endswith("w2") else (hidden, width)
    return Matmul(rows, outputs, inputs, experts)


def head(model: ResolvedModelConfig, degrees: Degrees, tokens: float) -> Matmul:
    """The output head's, tied or not."""
    return Matmul(tokens, -(-model.vocab_size // degrees.tensor), model.d_model)
