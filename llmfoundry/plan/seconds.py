"""Seconds of a training step on hardware that need not be here, part by part.

`layouts.py` ranks layouts by it, `fit.py` what is computed again, `commands/plan.py` shows it. The
idea: what a GPU does one after the other adds up (products, attention, operations bound by memory),
what travels beside it costs only what is longer, and the host must launch it all in time.

All is computed from data sheets, shapes and bytes. Two numbers are fitted: the shares of PRODUCTS.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property

from torch import nn

from llmfoundry.loggers.console import percent, short_count
from llmfoundry.models.counts import flops_per_token, parts
from llmfoundry.plan.activations import tokens_of_row
from llmfoundry.plan.communication import WAITED_FOR, Messages, communication
from llmfoundry.plan.products import Product, head, products
from llmfoundry.plan.shards import shares
from llmfoundry.recipe.hardware import Gpu
from llmfoundry.recipe.parallel import Degrees, recomputation
from llmfoundry.recipe.parallel_limits import context_method
from llmfoundry.recipe.scripts.train import TrainRecipe

PRODUCTS = 0.9
"""Share of the fastest product's speed (`Gpu.reached`) that large products reach within a step."""
COPIES = 0.85
"""Share of the memory's bandwidth that elementwise operations reach."""
FLASH_3 = 1.7
"""How much faster FlashAttention 3 is than 2 on Hopper (Shah et al., 2024: 1.5 to 2.0)."""
SHORT = 512
"""Tokens of a row at which attention reaches half of its speed over long ones (Dao, 2023)."""
BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward pass over those of its forward pass: it makes logits again."""
LAUNCH = 6e-6
"""Seconds of the host for each operation of PyTorch's that is not compiled."""
BESIDE = 0.15
"""Of a multiprocessor's time that NVLink messages take from what computes beside them (Isaev et
al., 2023, Calculon's a100_80g.json)."""


@dataclass(frozen=True)
class Speeds:
    """What a GPU reaches, in FLOP/s, bytes/s and seconds.

    Attributes:
        gpu: its data sheet.
        products: of products of full tiles.
        attention: over long rows.
        memory: bytes read or written.
        launch: seconds of the host for an operation.
    """

    gpu: Gpu
    products: float
    attention: float
    memory: float
    launch: float = LAUNCH


def speeds(gpu: Gpu, recipe: TrainRecipe) -> Speeds:
    """Of a GPU, by its data sheet."""
    newer = FLASH_3 if recipe.model.attn_config.attn_impl == "flash3" else 1.0
    return Speeds(
        gpu,
        products=PRODUCTS * gpu.reached * gpu.tflops * 1e12,
        attention=min(0.75, newer * gpu.attention) * gpu.tflops * 1e12,
        memory=COPIES * gpu.memory_gb_s * 1e9,
    )


@dataclass(frozen=True)
class Traffic:
    """What operations bound by memory do in one pass of one block or head, of one microbatch.

    Attributes:
        forward: bytes read and written.
        backward: the same.
        launches: operations of the forward pass, all kinds.
    """

    forward: float
    backward: float
    launches: float = 0.0


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


def speed_line(step: StepSeconds, recipe: TrainRecipe, gpus: int, gpu: Gpu) -> str:
    """Tokens a second and shares of the peak."""
    tokens = recipe.global_train_batch_size * recipe.max_seq_len / step.total
    hfu = f", HFU {percent(step.hfu(gpu))}" if step.again_flops else ""
    each = f"{tokens / gpus:,.0f} tokens/s a GPU, {short_count(tokens)} in all"
    return f"{each}; MFU {percent(step.mfu(gpu))}{hfu}"


def in_seconds(seconds: float) -> str:
    """Such as 1.23 s or 12 ms."""
    return f"{seconds:.3g} s" if seconds >= 0.0995 else f"{seconds * 1e3:.2g} ms"


@dataclass(frozen=True)
class Pass:
    """Seconds of a GPU, and launches, of one pass over one block, or of several.

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

    def plus(self, other: Pass) -> Pass:
        """One behind the other."""
        names = [each.name for each in fields(self)]
        return Pass(*(getattr(self, name) + getattr(other, name) for name in names))

    def times(self, count: float) -> Pass:
        """So many of them."""
        return Pass(*(getattr(self, each.name) * count for each in fields(self)))


def step_seconds(
    recipe: TrainRecipe,
    world_size: int,
    microbatch: int,
    reached: Speeds,
    *,
    sent: Iterable[Messages] | None = None,
) -> StepSeconds:
    """What a step takes on each of `world_size` GPUs.

    Args:
        recipe: filled; activation checkpointing decided.
        world_size: processes of the run.
        microbatch: rows at a time.
        reached: what each process's GPU does.
        sent: what a process sends in a step; None: `communication`.
    """
    gpu = reached.gpu
    degrees = recipe.parallel.degrees(world_size)
    rows = recipe.global_train_batch_size // degrees.data
    microbatches = rows / microbatch
    if sent is None:
        sent = communication(recipe, world_size, microbatch, gpu.node)
    blocks, ends = _passes(recipe, degrees, microbatch, reached)
    found = [*sent]
    message = dict.fromkeys(((each.what, each.kind) for each in found), 0.0)
    for each in found:
        message[each.what, each.kind] += each.seconds(gpu)
    waits = {
        what: seconds for (what, _), seconds in message.items() if what in WAITED_FOR and seconds
    }
    hidden = _hidden(recipe, message, blocks, microbatches)
    whole = [blocks.forward, blocks.backward, ends.forward, ends.backward]
    done = _sum(whole).times(microbatches)
    again = blocks.again.times(microbatches)
    launched = reached.launch * (done.launches + again.launches)
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
        waiting=waits | hidden,
        beside=beside,
        host=max(0.0, launched - computed - beside),
        flops=tokens * flops_per_token(recipe.model, recipe.max_seq_len),
        again_flops=again.flops,
    )


@dataclass(frozen=True)
class Passes:
    """Of all blocks, or of embeddings and head: one microbatch forward, backward, and again."""

    forward: Pass
    backward: Pass
    again: Pass = Pass()
    count: int = 1


def _sum(passes: Iterable[Pass]) -> Pass:
    found = Pass()
    for one in passes:
        found = found.plus(one)
    return found


def _passes(
    recipe: TrainRecipe, degrees: Degrees, microbatch: int, reached: Speeds
) -> tuple[Passes, Passes]:
    """Of the blocks, and of embeddings and head."""
    model = recipe.model
    tokens = microbatch * tokens_of_row(recipe, degrees)
    level = recomputation(recipe.parallel.activation_checkpointing)
    forward, backward, again = Pass(), Pass(), Pass()
    per_layer = [
        _attention(recipe, degrees, microbatch, layer.window, reached) for layer in model.layers()
    ]
    attention = _sum(per_layer)
    for block, count in parts(model)[1:]:
        one, back = _block(block, recipe, degrees, tokens, reached)
        forward, backward = forward.plus(one.times(count)), backward.plus(back.times(count))
        if level == "whole":
            again = again.plus(one.times(count))
        elif level == "selective":
            again = again.plus(Pass(memory=one.memory, launches=one.launches).times(count))
    forward = forward.plus(attention)
    backward = backward.plus(attention.times(BACKWARD_ATTENTION))
    if level == "whole":
        again = again.plus(attention)
    ends = _ends(recipe, degrees, tokens, reached)
    return Passes(forward, backward, again, model.n_layers), ends


def _block(
    block: nn.Module, recipe: TrainRecipe, degrees: Degrees, tokens: float, reached: Speeds
) -> tuple[Pass, Pass]:
    """One block forward and backward, without attention."""
    found = [*products(block, recipe.model, degrees, tokens)]
    traffic = block_traffic(recipe, degrees, tokens)
    back = [each for one in found for each in one.backward()]
    return (
        _product_pass(found, reached, traffic.forward, traffic.launches),
        _product_pass(back, reached, traffic.backward, 2 * traffic.launches),
    )


def _product_pass(found: list[Product], reached: Speeds, moved: float, launches: float) -> Pass:
    seconds = sum(
        one.seconds(reached.gpu, flops=reached.products, moved=reached.memory) for one in found
    )
    flops = sum(one.flops for one in found)
    return Pass(seconds, 0.0, moved / reached.memory, launches, flops)


def _attention(
    recipe: TrainRecipe, degrees: Degrees, microbatch: int, window: int, reached: Speeds
) -> Pass:
    """A layer's, forward: of whole rows, of which a token sees half, or its window."""
    model, length = recipe.model, recipe.max_seq_len
    assert model.head_dim is not None
    seen = length / 2 if window < 0 else min(length / 2, window + 1)
    shared = degrees.tensor * degrees.context
    flops = 4.0 * microbatch * length * seen * model.n_heads * model.head_dim / shared
    queries = length
    if context_method(model, recipe.parallel, degrees) == "all_gather":
        queries = -(-length // degrees.context)
    narrow = min(1.0, 0.5 + model.head_dim / 256)  # 64 numbers a head: three quarters
    ramp = queries / (queries + SHORT)
    return Pass(attention=flops / (reached.attention * ramp * narrow), flops=flops)


def block_traffic(recipe: TrainRecipe, degrees: Degrees, tokens: float) -> Traffic:
    """Of one block: norms, activations, sums, casts."""
    model, ffn = recipe.model, recipe.model.ffn_config
    assert ffn.ffn_hidden_size is not None
    stream = 2 if recipe.precision == "bf16" else 4
    d, hidden = model.d_model, ffn.ffn_hidden_size
    gated = ffn.ffn_type == "mptglu" or ffn.mlp_type == "glu"
    norms = 2 * d * (2 * stream + 6)
    sums = 2 * d * (2 * stream + 2)
    rotary = 0.0
    inner = hidden * (10 if gated else 4)
    if ffn.ffn_type == "dmoe":
        assert ffn.moe_top_k
        inner = ffn.moe_top_k * (inner + 12 * d)
    forward = tokens * (norms + sums + rotary + inner) / degrees.tensor
    return Traffic(forward, 1.9 * forward, 60)


def _ends(recipe: TrainRecipe, degrees: Degrees, tokens: float, reached: Speeds) -> Passes:
    """Embedding, final norm, head and loss; the head's gradients are made in the forward pass."""
    model = recipe.model
    assert model.vocab_size is not None
    one = head(model, degrees, tokens)
    vocabulary = -(-model.vocab_size // degrees.tensor)
    moved = tokens * (24.0 * vocabulary + 40 * model.d_model)
    first = _product_pass([one], reached, moved / 2, 20)
    return Passes(first, _product_pass([*one.backward()], reached, moved / 2, 20))


def _optimizer(recipe: TrainRecipe, degrees: Degrees, reached: Speeds) -> float:
    """Clipping reads a gradient twice and writes it once; the update writes all but gradients."""
    width = 2 if recipe.precision == "bf16" else 4
    moments = recipe.optimizer.moment_bytes(width)
    values = shares(recipe.model, degrees).all.shard
    return values * (3 * width + 2 * (width + moments) + width) / reached.memory


def _hidden(
    recipe: TrainRecipe,
    message: dict[tuple[str, str], float],
    blocks: Passes,
    microbatches: float,
) -> dict[str, float]:
    """What is left of messages that travel beside other blocks' computation.

    Weights of a block are gathered while the block before computes, forward and backward; gradients
    are reduced while the next ones are made. Of each pass the longer of both is waited for, and the
    first gather and the last reduction, which have nothing beside them.
    """
    n, passes = blocks.count, 2 if recipe.parallel.reshard_after_forward else 1
    gathered = message.get(("weights", "all_gather"), 0.0) / microbatches / passes / n
    forward, backward = blocks.forward.total / n, (blocks.backward.total + blocks.again.total) / n
    each = recipe.parallel.reduce_scatter_each_microbatch is not False
    scatter = message.get(("gradients", "reduce_scatter"), 0.0) / n / (microbatches if each else 1)
    reduced = message.get(("gradients", "all_reduce"), 0.0) / n
    again = gathered if passes == 2 else 0.0

    def left(computed: float, sent: float) -> float:
        return n * max(0.0, sent - computed) + min(sent, computed)

    weights = microbatches * (left(forward, gathered) + (n - 1) * max(0.0, again - backward))
    usual = left(backward, again + scatter if each else again) - left(backward, again)
    last = left(backward, again + scatter + reduced) - left(backward, again)
    gradients = (microbatches - 1) * usual + last
    return {
        what: seconds
        for what, seconds in {"weights": weights, "gradients": gradients}.items()
        if seconds > 0
    }
