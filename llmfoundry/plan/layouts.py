"""Which layout of a recipe's processes is fastest on some GPUs, among those that fit.

`cli/commands/plan.py` shows it. The idea: a layout with most rows at a time and nothing checked is
a bound on its seconds that costs milliseconds; memory is estimated of the most promising alone,
until no other can be among the best.
"""

from __future__ import annotations

import dataclasses
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
"""Bytes of a GPU that a run finds taken: the driver's context and NCCL's buffers."""
FULL = 0.01
"""Share of its seconds by which a layout that fills the memory is put back behind one that needs
none: of two that are as fast, that with more room is the better."""
LEAST_TOKENS = 4096
"""Of a row that a process still has under context parallelism: rows of as many fit without it."""
SHARDS_ONLY = ("reshard_after_forward", "reduce_scatter_each_microbatch")
CHOSEN = (
    *AXES, EXPERT, *SHARDS_ONLY, "context_parallel_method", "activation_checkpointing",
    "activation_checkpointing_target", "activation_compression", "activation_memory_budget",
)  # fmt: skip
"""Keys of the section parallel that a layout decides, or that have no effect in it."""
MOST_ROWS = 64
"""Rows at a time that are looked at, the largest divisors of a process's rows."""


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, and what they are known to reach.

    Attributes:
        gpus: their number.
        reached: their speeds.
        available: bytes of memory that a process may use.
    """

    gpus: int
    reached: Speeds
    available: int


@dataclass(frozen=True)
class ParallelLayout:
    """A way to compute a recipe.

    Attributes:
        recipe: filled, with all of it written: degrees, recomputation, rows at a time.
        step: its seconds.
        need: its memory.
        room: bytes that there are.
    """

    recipe: ResolvedTrainRecipe
    step: StepSeconds
    need: MemoryEstimate
    room: int

    @property
    def microbatch(self) -> int:
        """Rows at a time."""
        rows = self.recipe.device_train_microbatch_size
        assert isinstance(rows, int)
        return rows

    @property
    def bytes(self) -> int:
        """That a process needs."""
        return self.need.total(self.microbatch)

    @property
    def fits(self) -> bool:
        """Whether there are as many, with what the allocator leaves unused."""
        return self.bytes <= self.room

    @property
    def cost(self) -> float:
        """Seconds, and FULL of them for a memory that is used to the last byte."""
        return self.step.total * (1 + FULL * self.bytes / self.room)

    @property
    def level(self) -> str:
        """What is computed again."""
        return str(self.recipe.parallel.activation_checkpointing)

    def name(self) -> str:
        """In words: its degrees that are not 1, recomputation, rows."""
        parallel = self.recipe.parallel
        named = {
            "replicate": parallel.data_parallel_replicate_degree,
            "shard": parallel.data_parallel_shard_degree,
            "context": parallel.context_parallel_degree,
            "tensor": parallel.tensor_parallel_degree,
            "expert": parallel.expert_parallel_degree,
        }
        found = " ".join(f"{what} {n}" for what, n in named.items() if n > 1) or "one process"
        kept = ", weights kept" if parallel.reshard_after_forward is False else ""
        return f"{found}{kept}, {self.level}, {self.microbatch} rows"

    def overrides(self, user_recipe: TrainRecipe) -> list[str]:
        """What to write behind the user's recipe to have it."""
        new, old = self.recipe.parallel, user_recipe.parallel
        pairs = {name: (getattr(new, name), getattr(old, name)) for name in CHOSEN}
        for name in SHARDS_ONLY:  # which are true where nothing is written
            if pairs[name] == (True, None):
                del pairs[name]
        changed = {f"parallel.{name}": now for name, (now, was) in pairs.items() if now != was}
        if self.microbatch != user_recipe.device_train_microbatch_size:
            changed["device_train_microbatch_size"] = self.microbatch
        plain = {True: "true", False: "false", None: "null"}
        return [
            f"{key}={plain[value] if value is None or isinstance(value, bool) else value}"
            for key, value in changed.items()
        ]


@dataclass(frozen=True)
class Ranking:
    """Layouts, the fastest first.

    Attributes:
        best: those that fit.
        nearest: the fastest looked at that does not fit; None: all do.
        looked_at: how many there were.
        estimated: of how many the memory was estimated.
    """

    best: list[ParallelLayout]
    nearest: ParallelLayout | None
    looked_at: int
    estimated: int


def own_layout(recipe: ResolvedTrainRecipe, setting: Cluster) -> ParallelLayout:
    """The recipe's own, `auto` decided as a run would.

    Raises:
        UserError: it does not fit, or cannot be spread over so many processes.
    """
    gpu, world = setting.reached.gpu, setting.gpus
    fit = choose_fit(recipe, world_size=world, available=setting.available, device=CUDA, gpu=gpu)
    kept = with_level(recipe, fit.checkpointing, fit.compression)
    chosen = _written(kept, world, fit.microbatch)
    return _layout(chosen, setting, fit.need)


def rank(recipe: ResolvedTrainRecipe, setting: Cluster, most: int) -> Ranking:
    """The `most` best kinds of layout that fit, of each the best degrees of replicas and shards.

    Args:
        recipe: filled; its own degrees, recomputation and microbatch do not matter.
        setting: where it runs.
        most: as many as are asked for.
    """
    found = enumerate(_all(recipe, setting))
    looked = [(_bound(one, setting), number, one) for number, one in found]
    best: dict[Any, ParallelLayout] = {}
    nearest: ParallelLayout | None = None
    estimated = 0
    for bound, _, candidate in sorted(looked, key=lambda one: one[:2]):
        worst = sorted(one.cost for one in best.values())[most - 1 :]
        if worst and bound >= worst[0]:
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
    ranked = [
        _exactly(one, setting) for one in sorted(best.values(), key=lambda one: one.cost)[:most]
    ]
    return Ranking(sorted(ranked, key=lambda one: one.cost), nearest, len(looked), estimated)


def _exactly(layout: ParallelLayout, setting: Cluster) -> ParallelLayout:
    """With its own memory traffic."""
    step = step_seconds(layout.recipe, setting.gpus, layout.microbatch, setting.reached)
    return dataclasses.replace(layout, step=step)


def _kind(recipe: ResolvedTrainRecipe) -> tuple[Any, ...]:
    """What layouts have in common that differ in replicas and shards alone."""
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
    """What makes the first better, in a clause: the parts that differ most, and memory."""
    mine, theirs = first.step.split(), other.step.split()
    total = other.step.total - first.step.total
    saved = {what: theirs.get(what, 0.0) - mine.get(what, 0.0) for what in mine | theirs}
    matter = sorted(saved.items(), key=lambda one: -abs(one[1]))[:3]
    clauses = [
        f"{in_seconds(abs(seconds))} {'less' if seconds > 0 else 'more'} of {what}"
        for what, seconds in matter
        if abs(seconds) > max(0.1 * abs(total), 1e-4 * other.step.total)
    ]
    if first.bytes < 0.95 * other.bytes:
        clauses.append(f"{(other.bytes - first.bytes) / GIB:.1f} GiB less memory")
    return ", ".join(clauses) or "nothing that matters"


def _layout(
    recipe: ResolvedTrainRecipe, setting: Cluster, need: MemoryEstimate, *, roughly: bool = False
) -> ParallelLayout:
    rows = recipe.device_train_microbatch_size
    assert isinstance(rows, int)
    step = step_seconds(recipe, setting.gpus, rows, setting.reached, roughly=roughly)
    return ParallelLayout(recipe, step, need, int(USABLE * setting.available))


def _written(recipe: ResolvedTrainRecipe, world: int, microbatch: int) -> ResolvedTrainRecipe:
    """A copy in which degrees and rows are numbers."""
    parallel = recipe.parallel
    parallel = dataclasses.replace(parallel, **_keys(parallel.degrees(world)))
    return dataclasses.replace(recipe, parallel=parallel, device_train_microbatch_size=microbatch)


def _all(recipe: ResolvedTrainRecipe, setting: Cluster) -> Iterator[ResolvedTrainRecipe]:
    """Every sensible layout with every recomputation, all rows of a process at a time."""
    for degrees in layouts(recipe, setting):
        parallel = _with(recipe.parallel, degrees)
        if any(limits(recipe.model, parallel, degrees)):
            continue
        rows = recipe.global_train_batch_size // degrees.data
        one = dataclasses.replace(
            recipe, parallel=parallel, device_train_microbatch_size=min(rows, MOST_ROWS)
        )
        keeps = [parallel.reshard_after_forward]
        if parallel.reshard_after_forward:
            keeps.append(False)
        uncompiled = one.compile and one.cuts_within_blocks
        is_auto = parallel.activation_compression == "auto"
        for level in RECOMPUTED:
            for reshard in keeps if not (uncompiled and level == "selective") else ():
                again = with_level(one, level, "none" if is_auto else None)
                again.parallel.reshard_after_forward = reshard
                if level != "whole":
                    again.parallel.activation_checkpointing_target = None
                if level != "none":
                    again.parallel.activation_memory_budget = None
                yield again


def _with(parallel: ResolvedParallelConfig, degrees: Degrees) -> ResolvedParallelConfig:
    """The section with these degrees; what has no effect with them is unset."""
    sharded = not degrees.is_replicas
    method = parallel.context_parallel_method if degrees.context > 1 else None
    return dataclasses.replace(
        parallel,
        **_keys(degrees),
        context_parallel_method=method,
        reshard_after_forward=True if sharded else None,
        reduce_scatter_each_microbatch=True if sharded else None,
    )


def _keys(degrees: Degrees) -> dict[str, Any]:
    """Degrees by their keys in the section."""
    return dict(zip((*AXES, EXPERT), dataclasses.astuple(degrees), strict=True))


def layouts(recipe: ResolvedTrainRecipe, setting: Cluster) -> Iterator[Degrees]:
    """Degrees that the processes and the batch allow.

    Tensor and expert parallelism stay inside a node, whose links they wait for; a copy of the model
    is one process, a part of a node, or whole nodes.
    """
    world, node = setting.gpus, min(setting.gpus, setting.reached.gpu.node)
    experts = math.gcd(recipe.model.ffn_config.moe_num_experts or 1, node)
    most = 1 if experts > 1 else node  # it divides none of the experts' layers
    for tensor in divisors(math.gcd(world, most)):
        for context in divisors(world // tensor):
            if context > 1 and recipe.max_seq_len / context < LEAST_TOKENS:
                continue
            rest = world // tensor // context
            if recipe.global_train_batch_size % rest:
                continue
            for shard in divisors(rest):
                copy = shard * context * tensor
                if not _is_even(copy, node, world):
                    continue
                for expert in {1, math.gcd(experts, copy), math.gcd(experts // 2, copy) or 1}:
                    yield Degrees(rest // shard, shard, context, tensor, expert)


def _is_even(copy: int, node: int, world: int) -> bool:
    """Whether a copy of the model is all processes, a part of a node, or nodes by powers of two."""
    nodes, rest = divmod(copy, node)
    return copy == world or node % copy == 0 or (rest == 0 and nodes & (nodes - 1) == 0)


def _bound(recipe: ResolvedTrainRecipe, setting: Cluster) -> float:
    """Seconds with as many rows at a time as there are; fewer are not faster."""
    rows = recipe.device_train_microbatch_size
    assert isinstance(rows, int)
    return step_seconds(recipe, setting.gpus, rows, setting.reached, roughly=True).total


def _fitting(recipe: ResolvedTrainRecipe, setting: Cluster) -> ParallelLayout:
    """With as many rows as fit; with one where none does."""
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
    """By how much a layout does not fit."""
    return (
        f"{layout.bytes / GIB:.1f} GiB of {layout.room / GIB:.1f},"
        f" {(layout.bytes - layout.room) / GIB:.1f} too many"
    )
