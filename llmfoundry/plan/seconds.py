"""Estimated time of a training step by component, for any GPU with a data sheet.

Entry point: `step_seconds`. `layouts.py` ranks layouts by it, `fit.py` ranks activation
checkpointing, and `cli/commands/plan.py` prints it. The times of matmuls, attention and
memory-bound operations add up. Overlapped communication counts only where it takes longer than the
compute beside it. The host must launch all operations in time. A matmul is computed in tiles and
waves of tiles: a partly filled last wave, and small tiles, make small matmuls less efficient than
large ones.

All inputs are data sheets, shapes and bytes. Two numbers are fitted: `sustained`, per kind of GPU,
and STRAGGLING.
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
from llmfoundry.plan.parameter_shards import BLOCK, is_of_tokens, shares, tokens_of_row, unit_of
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
FLEX = 0.86
"""Speed of FlexAttention over that of FlashAttention 2: 0.9 forward, 0.85 backward (He et al.,
2024, pytorch.org/blog/flexattention)."""
SHORT = 512
"""Sequence length at which attention reaches half of its speed on long sequences (Dao, 2023)."""
LAUNCH = 6e-6
"""Seconds of host time per uncompiled PyTorch operation."""
BESIDE = 0.15
"""Fraction of multiprocessor time that NVLink communication takes from overlapped compute (Isaev et
al., 2023, Calculon's a100_80g.json)."""
STRAGGLING = 0.012
"""Share of the computing time that each doubling of the number of nodes adds, because a step ends
when the slowest rank and the slowest part of the network have finished. Fitted to LLM Foundry's
table, where equal models run on 8 to 512 GPUs with equal microbatches (`benchmarks/published.py`):
0.012 is the mean, and 0.015 the median of 19 such series."""


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
        cast: bytes of memory traffic per value cast to FP8.
    """

    gpu: Gpu
    products: float
    attention: float
    memory: float
    fp8: float = 0.0
    launch: float = LAUNCH
    cast: float = CAST


def speeds(gpu: Gpu, recipe: ResolvedTrainRecipe) -> Speeds:
    """Return the achievable speeds of a GPU for a recipe, from the data sheet."""
    attention, kernel_gain = recipe.model.attn_config, 1.0
    if attention.attn_impl == "flash3":
        kernel_gain = FLASH_3
    elif attention.attn_impl == "flex" or attention.sinks:
        kernel_gain = FLEX
    precision_loss = FP32 if recipe.precision == "fp32" else 1.0
    clock = gpu.power ** (1 / 3)
    share = clock * gpu.sustained * gpu.reached  # of the peak, in large matmuls
    attention_share = clock * min(0.75, kernel_gain * gpu.attention)
    return Speeds(
        gpu,
        products=precision_loss * share * gpu.tflops * 1e12,
        fp8=FP8 * share * gpu.fp8_tflops * 1e12,
        attention=precision_loss * attention_share * gpu.tflops * 1e12,
        memory=COPIES * gpu.memory_gb_s * 1e9,
    )


def unmeasured(recipe: ResolvedTrainRecipe) -> list[str]:
    """Return a line for each property of a recipe whose seconds nobody has compared with a run."""
    attention, lines = recipe.model.attn_config, []
    if attention.sinks:
        lines.append(f"attention sinks are counted at {FLEX:g} of FlashAttention 2's speed")
    if attention.is_latent:
        lines.append("latent attention is counted at the speed of heads of equal widths")
    return lines


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step by component. The components add up to `total`.

    Attributes:
        products: matmuls, without recomputation.
        attention: attention, without recomputation.
        memory: memory-bound operations, without recomputation.
        again: recomputation during the backward pass.
        optimizer: gradient clipping and the update.
        waiting: exposed communication, by what is communicated.
        stragglers: waiting for the slowest node.
        beside: slowdown of compute by overlapped communication.
        host: time in which the GPU waits for kernel launches.
        flops: model FLOPs of one rank.
        again_flops: recomputed FLOPs of one rank.
    """

    products: float
    attention: float
    memory: float
    again: float
    optimizer: float
    beside: float
    host: float
    stragglers: float = 0.0
    waiting: dict[str, float] = field(default_factory=dict)
    flops: float = 0.0
    again_flops: float = 0.0

    @cached_property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.split().values())

    def split(self) -> dict[str, float]:
        """Return the seconds of each component by its name in reports, without zero components."""
        named = {
            "products": self.products,
            "attention": self.attention,
            "memory-bound": self.memory,
            "computed again": self.again,
            "optimizer": self.optimizer,
            "beside messages": self.beside,
            "host": self.host,
            "stragglers": self.stragglers,
        }
        named |= {f"waiting for {what}": seconds for what, seconds in self.waiting.items()}
        return {what: seconds for what, seconds in named.items() if seconds > 0}

    def mfu(self, gpu: Gpu) -> float:
        """Return the model FLOPs utilization (MFU): model FLOPs over the peak FLOPs of the time."""
        return self.flops / (self.total * gpu.tflops * 1e12)

    def hfu(self, gpu: Gpu) -> float:
        """Return the hardware FLOPs utilization (HFU), which includes recomputed FLOPs."""
        return (self.flops + self.again_flops) / (self.total * gpu.tflops * 1e12)


def step_line(step: StepSeconds) -> str:
    """Return one line with the seconds of a step and of its components, the longest first."""
    shortest = 0.001 * step.total  # shorter components are left out
    components = sorted(step.split().items(), key=lambda item: -item[1])
    texts = [f"{name} {in_seconds(spent)}" for name, spent in components if spent >= shortest]
    return f"about {in_seconds(step.total)}: {', '.join(texts)}"


def speed_line(step: StepSeconds, recipe: ResolvedTrainRecipe, gpus: int, gpu: Gpu) -> str:
    """Return one line with throughput, MFU and HFU."""
    tokens = recipe.global_train_batch_size * recipe.max_seq_len / step.total
    text = f"{tokens / gpus:,.0f} tokens/s a GPU, {short_count(tokens)} in all"
    text += f"; MFU {percent(step.mfu(gpu))}"
    if step.again_flops:  # without recomputation, HFU equals MFU
        text += f", HFU {percent(step.hfu(gpu))}"
    return text


def in_seconds(seconds: float) -> str:
    """Return a duration as text, for example 1.23 s or 12 ms."""
    return f"{seconds:.3g} s" if seconds >= 0.0995 else f"{seconds * 1e3:.2g} ms"


@dataclass(frozen=True)
class GpuTime(Amounts):
    """GPU time, kernel launches and FLOPs of a pass over part of the model.

    Attributes:
        products: seconds of matmuls.
        attention: seconds of attention.
        memory: seconds of memory-bound operations.
        launches: number of kernels.
        flops: FLOPs of matmuls and attention.
    """

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launches: float = 0.0
    flops: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all operations."""
        return self.products + self.attention + self.memory

    def only_products(self) -> GpuTime:
        """Return the matmuls alone. Callers ensure that `flops` are those of matmuls."""
        return GpuTime(products=self.products, flops=self.flops)


@dataclass(frozen=True)
class Computation:
    """GPU time of one microbatch, without communication.

    Attributes:
        forward: forward pass of all blocks.
        backward: backward pass of all blocks, without recomputation.
        again: recomputation.
        ends: forward and backward pass of embedding, final norm, head and loss.
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
    """Estimate the seconds of a step on each of `world_size` GPUs.

    Args:
        recipe: resolved recipe; activation checkpointing is decided.
        world_size: number of ranks.
        microbatch: sequences per microbatch and rank.
        reached: achievable speeds of the GPU.
        roughly: derive memory traffic from that of one process, divided by the ranks that share a
            sequence. Counting the traffic of the layout itself takes about a second.
        sent: communication of a step; None: as estimated by `communication`.
    """
    degrees, gpu = recipe.parallel.degrees(world_size), reached.gpu
    microbatches = recipe.global_train_batch_size / degrees.data / microbatch
    if sent is None:
        sent = communication(recipe, world_size, microbatch, gpu.node)
    traffic = list(sent)

    # compute of all microbatches
    work = _work(recipe, degrees, microbatch, reached, roughly=roughly)
    passes = work.forward.plus(work.backward).plus(work.ends).times(microbatches)
    again = work.again.times(microbatches)
    computed = passes.total + again.total

    # overlapped communication within a node slows compute, and every node waits for the slowest
    tokens = recipe.global_train_batch_size * recipe.max_seq_len / world_size
    overlapped = [transfer for transfer in traffic if transfer.what not in WAITED_FOR]
    within_node = sum(transfer.sent - transfer.between for transfer in overlapped)
    beside = BESIDE * min(within_node / (gpu.link_gb_s * 1e9), computed)
    nodes = -(-world_size // gpu.node)
    return StepSeconds(
        products=passes.products,
        attention=passes.attention,
        memory=passes.memory,
        again=again.total,
        optimizer=_optimizer(recipe, degrees, reached),
        waiting=_waiting(recipe, traffic, work, microbatches, gpu),
        beside=beside,
        host=max(0.0, reached.launch * (passes.launches + again.launches) - computed - beside),
        stragglers=STRAGGLING * math.log2(nodes) * (computed + beside),
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
    """Return the GPU time of a microbatch: matmuls from their shapes, the rest as counted."""
    model, tokens = recipe.model, microbatch * tokens_of_row(recipe, degrees)
    share = 1 / (degrees.tensor * degrees.context) if roughly else 1.0
    counted = count(recipe, ALONE if roughly else degrees, device=CUDA)

    # memory-bound operations of the blocks
    moved = {
        name: _moved([(getattr(one, name), one.blocks) for one in counted.blocks],
                     microbatch * share, reached, fused=recipe.compile is True)
        for name in ("forward", "backward", "again")
    }  # fmt: skip
    forward, backward = moved["forward"], moved["backward"]

    # matmuls of the blocks
    dense = recipe.fp8_recipe is not None and reached.fp8 > 0
    experts = dense and _has_fp8_experts(model, reached.gpu)
    for block, n in parts(model)[1:]:
        matmuls = [*products(block, model, degrees, tokens)]
        of_inputs, of_weights = ([m.backward()[i] for m in matmuls] for i in (0, 1))
        forward = forward.plus(_multiplied(matmuls, reached, dense, experts).times(n))
        backward = backward.plus(_multiplied(of_inputs, reached, dense, experts).times(n))
        # gradients of experts' weights are computed in bf16
        backward = backward.plus(_multiplied(of_weights, reached, dense).times(n))
    attention = GpuTime()
    for layer in model.layers():
        attention = attention.plus(_attention(recipe, degrees, microbatch, layer.window, reached))

    # recomputation: the same fraction of time as of FLOPs
    again = moved["again"]
    per_row, recomputed = counted.forward.row, counted.again.row
    in_blocks = per_row.products - counted.ends.forward.row.products
    again = again.plus(forward.only_products().times(_over(recomputed.products, in_blocks)))
    again = again.plus(attention.times(_over(recomputed.attention, per_row.attention)))

    # embedding, final norm, head and loss, which no run compiles
    output_head = head(model, degrees, tokens)
    passes = [(counted.ends.forward, 1), (counted.ends.backward, 1)]
    ends = _multiplied([output_head, *output_head.backward()], reached)
    ends = ends.plus(_moved(passes, microbatch * share, reached, fused=False))
    return Computation(
        forward.plus(attention), backward.plus(attention.times(BACKWARD_OF_FORWARD)), again, ends
    )


def _has_fp8_experts(model: ResolvedModelConfig, gpu: Gpu) -> bool:
    """Return whether a GPU multiplies a model's experts in 8 bits; see `ops/moe/fp8.py`."""
    sides = (model.d_model, model.ffn_config.ffn_hidden_size)
    fits = not any(side % gpu.fp8_multiple for side in sides)
    return gpu.fp8_experts and fits and model.ffn_config.moe_impl == "grouped_mm"


def _over(part: float, total: float) -> float:
    """Return part / total; 0 if the total is 0."""
    return part / total if total else 0.0


def _moved(
    passes: Iterable[tuple[Pass, int]], rows: float, reached: Speeds, *, fused: bool
) -> GpuTime:
    """Return the time of memory-bound operations. `fused`: of compiled code."""
    spent = GpuTime()
    for a_pass, n in passes:
        fixed, row = a_pass.fixed, a_pass.row  # bytes and launches in all, and per sequence
        moved = fixed.moved + rows * row.moved
        launches = fixed.launches + rows * row.launches
        if fused:
            moved = fixed.fused + rows * row.fused
            launches = fixed.fused_launches + rows * row.fused_launches
        spent = spent.plus(GpuTime(memory=moved / reached.memory, launches=launches).times(n))
    return spent


def _multiplied(
    matmuls: list[Matmul], reached: Speeds, dense: bool = False, experts: bool = False
) -> GpuTime:
    """Return the time of matmuls. Dense layers or experts use FP8, with both operands cast."""
    seconds = cast_bytes = 0.0
    for matmul in matmuls:
        is_fp8 = dense if matmul.groups == 1 else experts
        speed = reached.fp8 if is_fp8 else reached.products
        seconds += matmul.seconds(reached.gpu, flops=speed, moved=reached.memory)
        if is_fp8:
            values = (matmul.rows + matmul.columns) * matmul.inner * matmul.groups
            cast_bytes += reached.cast * values
    flops = sum(matmul.flops for matmul in matmuls)
    return GpuTime(products=seconds, memory=cast_bytes / reached.memory, flops=flops)


def _attention(
    recipe: ResolvedTrainRecipe, degrees: Degrees, microbatch: int, window: int, reached: Speeds
) -> GpuTime:
    """Return the forward time of one layer; a token attends to half a sequence, or its window."""
    # FLOPs of one rank: two matmuls, of q k^T and of the weights with v
    model, length = recipe.model, recipe.max_seq_len
    mean_keys = length / 2 if window < 0 else min(length / 2, window + 1)
    n_ranks = degrees.tensor * degrees.context
    width = model.head_dim + model.value_dim
    flops = 2.0 * microbatch * length * mean_keys * model.n_heads * width / n_ranks

    # small heads and short sequences are slower
    queries = length
    if context_method(model, recipe.parallel, degrees) == "all_gather":
        queries = math.ceil(length / degrees.context)
    head_share = min(1.0, 0.5 + model.head_dim / 256)  # head_dim 64 reaches three quarters
    length_share = queries / (queries + SHORT)
    speed = reached.attention * length_share * head_share
    return GpuTime(attention=flops / speed, flops=flops)


def _optimizer(recipe: ResolvedTrainRecipe, degrees: Degrees, reached: Speeds) -> float:
    """Return the seconds of clipping and the update, from the bytes that both read and write."""
    width = 2 if recipe.precision == "bf16" else 4
    state_bytes = recipe.state_bytes(width)
    values = shares(recipe.model, degrees).all.shard
    clipping = 3 * width  # two reads and one write of gradients
    update = 2 * (width + state_bytes) + width  # weights and state read and written, gradients read
    return values * (clipping + update) / reached.memory


def _waiting(
    recipe: ResolvedTrainRecipe,
    traffic: list[CollectiveTraffic],
    work: Computation,
    microbatches: float,
    gpu: Gpu,
) -> dict[str, float]:
    """Return the seconds of exposed communication, by what is communicated.

    Communication in WAITED_FOR is exposed, because the next matmul needs its result. FSDP gathers a
    block's weights while the previous block computes, in both passes, and reduces gradients while
    the next gradients are computed. Only the excess over that compute is exposed, and the first
    gather and the last reduction, which overlap with nothing. Replicas all-reduce gradients once
    per step, during the last backward pass.
    """
    # seconds of each collective per step
    took: defaultdict[str, float] = defaultdict(float)
    for transfer in traffic:
        kind = f"{transfer.what} {transfer.kind}"
        if transfer.what in WAITED_FOR:
            kind = transfer.what
        took[kind] += transfer.seconds(gpu)

    # seconds of one block in one microbatch
    n, reshards = recipe.model.n_layers, recipe.parallel.reshard_after_forward is not False
    each_time = recipe.parallel.reduce_scatter_each_microbatch is not False
    gather = took["weights all_gather"] / microbatches / (2 if reshards else 1) / n
    scatter = took["gradients reduce_scatter"] / (microbatches if each_time else 1) / n
    reduce = took["gradients all_reduce"] / n
    forward = work.forward.total / n
    backward = work.backward.plus(work.again).total / n
    again = gather if reshards else 0.0

    # excess of communication over compute, plus what overlaps with nothing
    def left(computed: float, sent: float) -> float:
        return (n - 1) * max(0.0, sent - computed)

    weights = microbatches * (gather + left(forward, gather) + left(backward, again))
    usual = again + scatter if each_time else again
    last = again + scatter + reduce
    gradients = (microbatches - 1) * left(backward, usual) + left(backward, last)
    gradients -= microbatches * left(backward, again)
    gradients += scatter * (microbatches if each_time else 1) + reduce
    waits = {what: took[what] for what in WAITED_FOR}
    waits |= {"weights": weights, "gradients": gradients}
    return {what: seconds for what, seconds in waits.items() if seconds > 0}


TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.7), (64, 64, 0.5))
"""Rows, columns and relative speed of cuBLAS's tiles. Smaller tiles read more bytes per FLOP
(NVIDIA, Matrix Multiplication Background)."""


class Matmul(NamedTuple):
    """Matmul of (rows, inner) and (inner, columns), `groups` times in one call.

    Attributes:
        rows: rows of the first matrix; in the forward pass the number of tokens.
        columns: columns of the second matrix.
        inner: inner dimension.
        groups: number of matmuls in a grouped call, one per expert.
    """

    rows: float
    columns: float
    inner: float
    groups: int = 1

    @property
    def flops(self) -> float:
        """FLOPs; a multiply-add counts as two."""
        return 2.0 * self.rows * self.columns * self.inner * self.groups

    def seconds(self, gpu: Gpu, *, flops: float, moved: float) -> float:
        """Return the seconds on a GPU that reaches `flops` FLOP/s and `moved` bytes/s."""
        waves = min(self._waves(gpu, *tile) for tile in TILES)
        values = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return max(waves * 2 * self.inner / flops, 2 * values * self.groups / moved)

    def _waves(self, gpu: Gpu, height: int, width: int, share: float) -> float:
        """Return the multiply-adds per step of `inner`, rounded up to full waves of tiles."""
        tiles = self.groups * math.ceil(self.rows / height) * math.ceil(self.columns / width)
        waves = math.ceil(tiles / gpu.multiprocessors)
        return waves * gpu.multiprocessors * height * width / share

    def backward(self) -> tuple[Matmul, Matmul]:
        """Return the matmuls that compute the gradients of the first and second matrix."""
        rows, columns, inner, groups = self
        return Matmul(rows, inner, columns, groups), Matmul(inner, columns, rows, groups)


def products(
    module: nn.Module, model: ResolvedModelConfig, degrees: Degrees, tokens: float
) -> Iterator[Matmul]:
    """Yield the forward matmuls of a block, or of the head, on one rank.

    Args:
        module: module of `counts.parts` on the meta device.
        model: resolved model settings.
        degrees: degrees of the mesh. Tensor parallelism shards the matrices, which are multiplied
            with the tokens of all tensor-parallel ranks. Expert parallelism does not change the
            number of rows if experts are evenly loaded.
        tokens: tokens of this rank before sequence parallelism divides them.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim != 2 or name in ("wte.weight", "wpe.weight"):
            continue
        outputs, inputs = parameter.shape
        if EXPERTS in name:
            yield _expert(name, outputs, inputs, model, degrees, tokens)
            continue
        # tensor-parallel ranks share the tokens
        if unit_of(name, degrees) != BLOCK or is_of_tokens(name):
            yield Matmul(tokens / degrees.tensor, outputs, inputs)
            continue
        if tensor_parallel_dim(name) == 0:
            outputs = math.ceil(outputs / degrees.tensor)
        elif tensor_parallel_dim(name) == 1:
            inputs = math.ceil(inputs / degrees.tensor)
        yield Matmul(tokens, outputs, inputs)


def _expert(
    name: str, height: int, width: int, model: ResolvedModelConfig, degrees: Degrees, tokens: float
) -> Matmul:
    """Return the grouped matmul of stacked experts (E * hidden, d), evenly loaded."""
    ffn = model.ffn_config
    experts = ffn.moe_num_experts // degrees.expert
    rows = tokens / degrees.tensor * ffn.moe_top_k / experts
    hidden = height // ffn.moe_num_experts
    outputs, inputs = (width, hidden) if name.endswith("w2") else (hidden, width)
    return Matmul(rows, outputs, inputs, experts)


def head(model: ResolvedModelConfig, degrees: Degrees, tokens: float) -> Matmul:
    """Return the matmul of the output head, tied or not."""
    return Matmul(tokens, math.ceil(model.vocab_size / degrees.tensor), model.d_model)
