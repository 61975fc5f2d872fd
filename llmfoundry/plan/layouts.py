"""Ranking of parallel layouts of a recipe by estimated step time, among those that fit.

Entry points: `rank` and `own_layout`, for `cli/commands/plan.py`. The idea: the step time with the
largest microbatch, without a memory check, is a lower bound that takes milliseconds. Memory is
estimated only for the most promising layouts, until no other layout can be among the best.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from llmfoundry.plan.fit import choose_fit, with_level
from llmfoundry.plan.memory import GIB, MemoryEstimate, estimate
from llmfoundry.plan.microbatch_sizes import USABLE
from llmfoundry.plan.seconds import Speeds, StepSeconds, in_seconds, step_seconds
from llmfoundry.recipe.checks import divisors
from llmfoundry.recipe.parallel import (
    AXES,
    EXPERT,
    RECOMPUTED,
    Degrees,
    ResolvedParallelConfig,
    limits,
)
from llmfoundry.recipe.train import ResolvedTrainRecipe, TrainRecipe

CUDA = torch.device("cuda")
TAKEN = 3 * 10**9
"""Bytes of GPU memory that a run cannot use: the driver's context and NCCL's buffers."""
FULL = 0.01
"""Penalty on the step time of a layout, as a fraction, at full memory use. Of two layouts that are
equally fast, the one with more free memory is better."""
LEAST_TOKENS = 4096
"""Minimum tokens of a sequence per rank under context parallelism; shorter ones fit without it."""
SHARDS_ONLY = ("reshard_after_forward", "reduce_scatter_each_microbatch")
CHOSEN = (
    *AXES, EXPERT, *SHARDS_ONLY, "context_parallel_method", "activation_checkpointing",
    "activation_checkpointing_target", "activation_compression", "activation_memory_budget",
    "expert_capacity",
)  # fmt: skip
"""Keys of the section parallel that a layout sets, or that have no effect in it."""
MOST_ROWS = 64
"""Maximum microbatch size that is considered."""


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, and their achievable speeds.

    Attributes:
        gpus: number of GPUs.
        reached: achievable speeds of each.
        available: bytes of memory that a rank may use.
    """

    gpus: int
    reached: Speeds
    available: int


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel layout of a recipe: degrees, activation checkpointing and microbatch size.

    Attributes:
        recipe: resolved recipe in which all of these are set.
        step: estimated step time.
        need: memory estimate.
        room: bytes available.
    """

    recipe: ResolvedTrainRecipe
    step: StepSeconds
    need: MemoryEstimate
    room: int

    @property
    def microbatch(self) -> int:
        """Sequences per microbatch and rank."""
        rows = self.recipe.device_train_microbatch_size
        assert isinstance(rows, int)
        return rows

    @property
    def bytes(self) -> int:
        """Bytes that a rank needs."""
        return self.need.total(self.microbatch)

    @property
    def fits(self) -> bool:
        """Whether the layout fits, with the margin that the allocator needs."""
        return self.bytes <= self.room

    @property
    def cost(self) -> float:
        """Step time plus the penalty FULL for memory use."""
        return self.step.total * (1 + FULL * self.bytes / self.room)

    @property
    def level(self) -> str:
        """Level of activation checkpointing."""
        return str(self.recipe.parallel.activation_checkpointing)

    def name(self) -> str:
        """Return a description: degrees other than 1, activation checkpointing, microbatch."""
        parallel = self.recipe.parallel
        degrees = {
            "replicate": parallel.data_parallel_replicate_degree,
            "shard": parallel.data_parallel_shard_degree,
            "context": parallel.context_parallel_degree,
            "tensor": parallel.tensor_parallel_degree,
            "expert": parallel.expert_parallel_degree,
        }
        text = " ".join(f"{axis} {n}" for axis, n in degrees.items() if n > 1) or "one process"
        if parallel.reshard_after_forward is False:
            text += ", weights kept"
        return f"{text}, {self.level}, {self.microbatch} rows"

    def overrides(self, user_recipe: TrainRecipe) -> list[str]:
        """Return the command-line overrides that turn the user's recipe into this layout."""
        # the keys whose value differs; some are true by default
        changed: dict[str, Any] = {}
        for name in CHOSEN:
            new, old = getattr(self.recipe.parallel, name), getattr(user_recipe.parallel, name)
            is_default = name in SHARDS_ONLY and new is True and old is None
            if new != old and not is_default:
                changed[f"parallel.{name}"] = new
        if self.microbatch != user_recipe.device_train_microbatch_size:
            changed["device_train_microbatch_size"] = self.microbatch

        # as YAML
        words = []
        for key, value in changed.items():
            if value is None:
                value = "null"
            elif isinstance(value, bool):
                value = str(value).lower()
            words.append(f"{key}={value}")
        return words


@dataclass(frozen=True)
class Ranking:
    """Layouts ordered by cost.

    Attributes:
        best: layouts that fit.
        nearest: fastest layout that was estimated and does not fit; None: all fit.
        looked_at: number of layouts that were considered.
        estimated: number of layouts whose memory was estimated.
    """

    best: list[ParallelLayout]
    nearest: ParallelLayout | None
    looked_at: int
    estimated: int


def own_layout(recipe: ResolvedTrainRecipe, setting: Cluster) -> ParallelLayout:
    """Return the recipe's own layout, with `auto` decided as in a run.

    Raises:
        UserError: it does not fit, or its degrees do not match the number of GPUs.
    """
    gpu, world = setting.reached.gpu, setting.gpus
    fit = choose_fit(recipe, world_size=world, available=setting.available, device=CUDA, gpu=gpu)
    fitting = with_level(recipe, fit.checkpointing, fit.compression)
    chosen = _written(fitting, world, fit.microbatch)
    return _layout(chosen, setting, fit.need)


def rank(recipe: ResolvedTrainRecipe, setting: Cluster, most: int) -> Ranking:
    """Rank the layouts that fit and return the best `most` kinds.

    Layouts of one kind differ only in the degrees of replicas and shards; the best of each counts.

    Args:
        recipe: resolved recipe; its degrees, checkpointing and microbatch size are ignored.
        setting: the GPUs.
        most: number of layouts to return.
    """
    # lower bounds of all layouts
    candidates = [*_all(recipe, setting)]
    bounds = [_bound(candidate, setting) for candidate in candidates]

    # estimate the memory, in the order of the bounds, until no bound is below the last of the best
    best: dict[Any, ParallelLayout] = {}
    nearest: ParallelLayout | None = None
    estimated = 0
    for index in sorted(range(len(candidates)), key=bounds.__getitem__):
        candidate, bound = candidates[index], bounds[index]
        costs = sorted(layout.cost for layout in best.values())
        if len(costs) >= most and bound >= costs[most - 1]:
            break
        kind = _kind(candidate)
        if kind in best and bound >= best[kind].cost:
            continue
        layout = _fitting(candidate, setting)
        estimated += 1
        if not layout.fits:
            if nearest is None or layout.step.total < nearest.step.total:
                nearest = layout
        elif kind not in best or layout.cost < best[kind].cost:
            best[kind] = layout

    # count the memory traffic of the best exactly
    finalists = sorted(best.values(), key=lambda layout: layout.cost)[:most]
    exact = [_exactly(layout, setting) for layout in finalists]
    ranked = sorted(exact, key=lambda layout: layout.cost)
    return Ranking(ranked, nearest, len(candidates), estimated)


def _exactly(layout: ParallelLayout, setting: Cluster) -> ParallelLayout:
    """Return the layout with the step time from its own memory traffic."""
    step = step_seconds(layout.recipe, setting.gpus, layout.microbatch, setting.reached)
    return dataclasses.replace(layout, step=step)


def _kind(recipe: ResolvedTrainRecipe) -> tuple[Any, ...]:
    """Return what layouts have in common that differ only in replicas and shards."""
    parallel = recipe.parallel
    return (
        parallel.context_parallel_degree,
        parallel.tensor_parallel_degree,
        parallel.expert_parallel_degree,
        parallel.data_parallel_shard_degree == 1,
        parallel.reshard_after_forward,
        parallel.activation_checkpointing,
    )


def why(first: ParallelLayout, other: ParallelLayout) -> str:
    """Return a clause on why the first layout is better: the largest differences, and memory."""
    # seconds that the first layout saves by component
    split, other_split = first.step.split(), other.step.split()
    saved = {
        name: other_split.get(name, 0.0) - split.get(name, 0.0) for name in split | other_split
    }

    # the three largest ones, if they are a tenth of the total difference
    total = other.step.total - first.step.total
    least = max(0.1 * abs(total), 1e-4 * other.step.total)
    clauses = []
    for name, seconds in sorted(saved.items(), key=lambda item: -abs(item[1]))[:3]:
        if abs(seconds) > least:
            direction = "less" if seconds > 0 else "more"
            clauses.append(f"{in_seconds(abs(seconds))} {direction} of {name}")
    if first.bytes < 0.95 * other.bytes:
        clauses.append(f"{(other.bytes - first.bytes) / GIB:.1f} GiB less memory")
    return ", ".join(clauses) or "nothing that matters"


def _layout(
    recipe: ResolvedTrainRecipe, setting: Cluster, need: MemoryEstimate, *, roughly: bool = False
) -> ParallelLayout:
    """Return the layout of a recipe whose degrees and microbatch size are numbers."""
    rows = recipe.device_train_microbatch_size
    assert isinstance(rows, int)
    step = step_seconds(recipe, setting.gpus, rows, setting.reached, roughly=roughly)
    return ParallelLayout(recipe, step, need, int(USABLE * setting.available))


def _written(recipe: ResolvedTrainRecipe, world: int, microbatch: int) -> ResolvedTrainRecipe:
    """Return a copy with degrees and microbatch size as numbers."""
    parallel = recipe.parallel
    parallel = dataclasses.replace(parallel, **_keys(parallel.degrees(world)))
    return dataclasses.replace(recipe, parallel=parallel, device_train_microbatch_size=microbatch)


def _all(recipe: ResolvedTrainRecipe, setting: Cluster) -> Iterator[ResolvedTrainRecipe]:
    """Yield each layout with each checkpointing, with the largest microbatch."""
    for degrees in layouts(recipe, setting):
        # the recipe with these degrees
        parallel = _with(recipe.parallel, degrees)
        if any(limits(recipe.model, parallel, degrees)):
            continue
        rows = recipe.global_train_batch_size // degrees.data
        base = dataclasses.replace(
            recipe, parallel=parallel, device_train_microbatch_size=min(rows, MOST_ROWS)
        )
        reshard_values = [parallel.reshard_after_forward]
        if parallel.reshard_after_forward:
            reshard_values.append(False)
        is_uncompiled = base.compile is True and base.cuts_within_blocks
        compression = "none" if parallel.activation_compression == "auto" else None

        # each checkpointing, without the settings that have no effect on it
        for level, reshard in itertools.product(RECOMPUTED, reshard_values):
            if is_uncompiled and level == "selective":
                continue
            candidate = with_level(base, level, compression)
            candidate.parallel.reshard_after_forward = reshard
            if level != "whole":
                candidate.parallel.activation_checkpointing_target = None
            if level != "none":
                candidate.parallel.activation_memory_budget = None
            yield candidate


def _with(parallel: ResolvedParallelConfig, degrees: Degrees) -> ResolvedParallelConfig:
    """Return the section with these degrees; keys without effect are unset."""
    sharded = not degrees.is_replicas
    method = parallel.context_parallel_method if degrees.context > 1 else None
    return dataclasses.replace(
        parallel,
        **_keys(degrees),
        expert_capacity=parallel.expert_capacity if degrees.expert > 1 else None,
        context_parallel_method=method,
        reshard_after_forward=True if sharded else None,
        reduce_scatter_each_microbatch=True if sharded else None,
    )


def _keys(degrees: Degrees) -> dict[str, Any]:
    """Return the degrees by their keys in the section."""
    return dict(zip((*AXES, EXPERT), dataclasses.astuple(degrees), strict=True))


def layouts(recipe: ResolvedTrainRecipe, setting: Cluster) -> Iterator[Degrees]:
    """Yield the degrees that are possible with the number of GPUs and the batch size.

    Tensor and expert parallelism stay inside a node, because their communication is exposed. One
    copy of the model spans one GPU, part of a node, or complete nodes.
    """
    world, node = setting.gpus, min(setting.gpus, setting.reached.gpu.node)
    experts = math.gcd(recipe.model.ffn_config.moe_num_experts or 1, node)
    most_tensor = 1 if experts > 1 else node  # tensor parallelism does not shard experts
    for tensor in divisors(math.gcd(world, most_tensor)):
        for context in divisors(world // tensor):
            if context > 1 and recipe.max_seq_len / context < LEAST_TOKENS:
                continue
            data = world // tensor // context  # ranks with different sequences
            if recipe.global_train_batch_size % data:
                continue
            for shard in divisors(data):
                copy = shard * context * tensor  # ranks that share one copy of the model
                if not _is_even(copy, node, world):
                    continue
                for expert in {1, math.gcd(experts, copy), math.gcd(experts // 2, copy) or 1}:
                    yield Degrees(data // shard, shard, context, tensor, expert)


def _is_even(copy: int, node: int, world: int) -> bool:
    """Return whether a copy spans all ranks, part of a node, or 2^n nodes."""
    nodes, remainder = divmod(copy, node)
    is_power_of_two = nodes & (nodes - 1) == 0
    return copy == world or node % copy == 0 or (remainder == 0 and is_power_of_two)


def _bound(recipe: ResolvedTrainRecipe, setting: Cluster) -> float:
    """Return a lower bound of the step time: that of the largest microbatch."""
    rows = recipe.device_train_microbatch_size
    assert isinstance(rows, int)
    return step_seconds(recipe, setting.gpus, rows, setting.reached, roughly=True).total


def _fitting(recipe: ResolvedTrainRecipe, setting: Cluster) -> ParallelLayout:
    """Return the layout with the largest microbatch that fits, or 1 if none does."""
    need = estimate(recipe, setting.gpus, device=CUDA)
    room = int(USABLE * setting.available)
    degrees = recipe.parallel.degrees(setting.gpus)
    rows = recipe.global_train_batch_size // degrees.data
    candidates = [n for n in divisors(rows) if n <= MOST_ROWS and need.total(n) <= room]
    microbatch = max(candidates, default=1)
    return _layout(
        dataclasses.replace(recipe, device_train_microbatch_size=microbatch), setting, need
    )


def too_large(layout: ParallelLayout) -> str:
    """Return a text on how much memory a layout lacks."""
    return (
        f"{layout.bytes / GIB:.1f} GiB of {layout.room / GIB:.1f},"
        f" {(layout.bytes - layout.room) / GIB:.1f} too many"
    )
