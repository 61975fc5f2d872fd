"""Ranking of parallel layouts of a recipe by estimated step time, among those that fit.

Entry points: `rank` and `own_layout`, for `cli/commands/plan.py`. The idea: the step time with the
largest microbatch and no recomputation, without a memory check, is a lower bound that takes
milliseconds. Only the most promising layouts are searched (`search.py`), until no other layout can
be among the best. A layout that the recipe's own checks refuse is not proposed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from llmfoundry.plan.compile_choice import choose_compile, planned_steps, with_compile
from llmfoundry.plan.fit import choose_fit
from llmfoundry.plan.memory import GIB, MemoryEstimate, weight_bytes
from llmfoundry.plan.search import (
    ActivationChoice,
    Fit,
    MemoryLimit,
    Search,
    choices,
    cost,
    memory_limits,
)
from llmfoundry.plan.seconds import Speeds, StepSeconds, in_seconds, step_seconds
from llmfoundry.recipe.checks import divisors
from llmfoundry.recipe.parallel import (
    AXES,
    EXPERT,
    Degrees,
    ResolvedParallelConfig,
    limits,
)
from llmfoundry.recipe.train import (
    AUTO,
    COMPILE_MODES,
    GRAPH_MODES,
    ResolvedTrainRecipe,
    TrainRecipe,
)

CUDA = torch.device("cuda")
LEAST_TOKENS = 4096
"""Minimum tokens of a sequence per rank under context parallelism; shorter ones fit without it."""
DEFAULT_MODE = COMPILE_MODES[0]
LEAST = ActivationChoice("none")
"""The choice without recomputation, whose step is the shortest with the same microbatch."""
SHARDS_ONLY = ("reshard_after_forward", "reduce_scatter_each_microbatch")
CHOSEN = (
    *AXES, EXPERT, *SHARDS_ONLY, "context_parallel_method", "activation_checkpointing",
    "activation_checkpointing_target", "activation_compression", "activation_memory_budget",
    "expert_capacity", "expert_halves",
)  # fmt: skip
"""Keys of the section parallel that a layout sets, or that have no effect in it."""


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
        room: bytes that the estimate may take.
        choice: the activations that are kept.
        is_compiled: whether blocks are compiled, also if the recipe leaves that to `auto`.
    """

    recipe: ResolvedTrainRecipe
    step: StepSeconds
    need: MemoryEstimate
    room: int
    choice: ActivationChoice
    is_compiled: bool = False

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
        """Whether the layout fits."""
        return self.bytes <= self.room

    @property
    def cost(self) -> float:
        """Step time plus a penalty for memory use."""
        return cost(self.step, self.bytes, self.room)

    def name(self) -> str:
        """Return a description: degrees other than 1, compilation, activations, microbatch."""
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
        if self.is_compiled:
            text += ", compiled"
        return f"{text}, {self.choice.name}, {self.microbatch} rows"

    def changes(self, user_recipe: TrainRecipe) -> dict[str, Any]:
        """Return the keys that turn the user's recipe into this layout, with their values."""
        return changes(self.recipe, user_recipe)

    def overrides(self, user_recipe: TrainRecipe) -> list[str]:
        """Return `changes` as overrides of the command line, without characters to quote."""
        words = []
        for key, value in self.changes(user_recipe).items():
            if value is None:
                value = "null"
            elif isinstance(value, bool):
                value = str(value).lower()
            elif isinstance(value, dict):
                value = "{" + ",".join(f"{name}:{blocks}" for name, blocks in value.items()) + "}"
            words.append(f"{key}={value}")
        return words


def changes(recipe: ResolvedTrainRecipe, user_recipe: TrainRecipe) -> dict[str, Any]:
    """Return the keys that a layout changes in the user's recipe, with their values in `recipe`."""
    changed: dict[str, Any] = {}
    for name in CHOSEN:
        new, old = getattr(recipe.parallel, name), getattr(user_recipe.parallel, name)
        is_default = name in SHARDS_ONLY and new is True and old is None
        if new != old and not is_default:
            changed[f"parallel.{name}"] = new
    for name in ("compile", "compile_mode", "device_train_microbatch_size"):
        new, old = getattr(recipe, name), getattr(user_recipe, name)
        is_default = name == "compile_mode" and new == DEFAULT_MODE and old is None
        if new != old and not is_default:
            changed[name] = new
    return changed


def refusals(recipe: ResolvedTrainRecipe, user_recipe: TrainRecipe) -> list[str]:
    """Return the error lines of the user's recipe with the layout of `recipe`.

    These are the lines of the check that every script makes when it loads a recipe.
    """
    changed = changes(recipe, user_recipe)
    section = {key.removeprefix("parallel."): value for key, value in changed.items()
               if key.startswith("parallel.")}  # fmt: skip
    others = {key: value for key, value in changed.items() if not key.startswith("parallel.")}
    parallel = dataclasses.replace(user_recipe.parallel, **section)
    return [*dataclasses.replace(user_recipe, parallel=parallel, **others).check()]


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
    fit = choose_fit(
        recipe,
        world_size=setting.gpus,
        available=setting.available,
        device=CUDA,
        reached=setting.reached,
    )
    layout = _layout(recipe, setting, fit)
    steps = planned_steps(recipe)
    if recipe.compile != AUTO or steps is None:
        return layout
    choice = choose_compile(
        layout.recipe,
        device=CUDA,
        world_size=setting.gpus,
        steps=steps,
        microbatch=fit.microbatch,
        gpu=setting.reached.gpu,
    )
    if not choice.is_on:
        return layout
    compiled = with_compile(layout.recipe)
    step = step_seconds(compiled, setting.gpus, fit.microbatch, setting.reached)
    return dataclasses.replace(layout, step=step, is_compiled=True)


def rank(recipe: ResolvedTrainRecipe, setting: Cluster, most: int) -> Ranking:
    """Rank the layouts that fit and return the best `most` kinds.

    Layouts of one kind differ only in the degrees of replicas and shards, in the number of blocks
    that are recomputed, and in compilation; the best of each counts.

    Args:
        recipe: resolved recipe; its degrees, checkpointing, compilation and microbatch size are
            ignored.
        setting: the GPUs.
        most: number of layouts to return.
    """
    user_recipe = recipe.user_recipe
    candidates = [
        candidate
        for candidate in candidate_layouts(recipe, setting)
        if not refusals(LEAST.apply(candidate), user_recipe)
    ]
    ranking, needs = Ranking([], None, len(candidates), 0), dict[str, Needs]()
    for limit in memory_limits(setting.available, CUDA):
        ranking = _Ranker(setting, user_recipe, limit, needs).rank(candidates, most)
        if ranking.best:
            break
    return ranking


Needs = dict[ActivationChoice, MemoryEstimate]


@dataclass(frozen=True)
class _Ranker:
    """Ranks layouts under a memory limit.

    Attributes:
        setting: the GPUs.
        user_recipe: recipe as written by the user, whose checks a layout must pass.
        limit: memory limit of a rank.
        needs: known memory estimates, by parallel section: compilation does not change them.
    """

    setting: Cluster
    user_recipe: TrainRecipe
    limit: MemoryLimit
    needs: dict[str, Needs]

    def rank(self, candidates: list[ResolvedTrainRecipe], most: int) -> Ranking:
        """Rank the candidates that fit and return the best `most` kinds."""
        # in the order of their bounds, until no bound is below the last of the best
        bounds = [_bound(candidate, self.setting) for candidate in candidates]
        best: dict[Any, ParallelLayout] = {}
        nearest: _TooLarge | None = None
        searched = 0
        for index in sorted(range(len(candidates)), key=bounds.__getitem__):
            costs = sorted(layout.cost for layout in best.values())
            if len(costs) >= most and bounds[index] >= costs[most - 1]:
                break
            searched += 1
            fitting, too_large = self.layouts(candidates[index])
            for layout in fitting:
                kind = _kind(layout)
                if kind not in best or layout.cost < best[kind].cost:
                    best[kind] = layout
            if too_large and (nearest is None or too_large.seconds < nearest.seconds):
                nearest = too_large

        # count the memory traffic of the best exactly
        finalists = sorted(best.values(), key=lambda layout: layout.cost)[:most]
        exact = [self.exactly(layout) for layout in finalists]
        ranked = sorted(exact, key=lambda layout: layout.cost)
        nearest_layout = None if nearest is None else self.smallest(nearest)
        return Ranking(ranked, nearest_layout, len(candidates), searched)

    def layouts(
        self, candidate: ResolvedTrainRecipe
    ) -> tuple[list[ParallelLayout], _TooLarge | None]:
        """Return the best layout of each family of activation choices, or one that is too large."""
        search = self.search(candidate, roughly=True)
        families, rows = choices(candidate, CUDA), search.sizes()[-1]
        best: dict[ActivationChoice, ParallelLayout] = {}
        # activations are slow to count, and often the weights alone do not fit
        do_weights_fit = weight_bytes(candidate, self.setting.gpus) <= self.limit.room
        for fit in search.fits(families, self.limit) if do_weights_fit else ():
            if fit.choice.family not in best:
                layout = _layout(candidate, self.setting, fit)
                if self.runs(layout):
                    best[fit.choice.family] = layout
        smallest = families[-1]
        if best or (do_weights_fit and search.need(smallest).total(rows) <= self.limit.room):
            return [*best.values()], None
        seconds = search.step(smallest, rows)
        assert seconds is not None
        return [], _TooLarge(candidate, smallest, rows, seconds.total)

    def smallest(self, nearest: _TooLarge) -> ParallelLayout:
        """Return the layout that needs the least memory of a candidate that does not fit."""
        search = self.search(nearest.candidate, roughly=True)
        fit = search.fit(nearest.choice, nearest.rows, self.limit)
        return _layout(nearest.candidate, self.setting, fit)

    def search(self, candidate: ResolvedTrainRecipe, *, roughly: bool) -> Search:
        """Return the search of a candidate's activations and microbatch size."""
        reached, needs = self.setting.reached, self.needs.setdefault(_degrees_key(candidate), {})
        return Search(
            candidate, self.setting.gpus, CUDA, reached=reached, roughly=roughly, needs=needs
        )

    def runs(self, layout: ParallelLayout) -> bool:
        """Return whether the recipe's checks accept the layout, and so do CUDA graphs."""
        recipe, rows = layout.recipe, layout.microbatch
        step_rows = rows * recipe.parallel.written_degrees.data
        has_graphs = recipe.compile_mode in GRAPH_MODES
        if has_graphs and step_rows != recipe.global_train_batch_size:
            return False
        return not refusals(recipe, self.user_recipe)

    def exactly(self, layout: ParallelLayout) -> ParallelLayout:
        """Return the layout after a search with step times from its own memory traffic."""
        recipe = dataclasses.replace(layout.recipe, device_train_microbatch_size="auto")
        fits = self.search(recipe, roughly=False).fits([layout.choice.family], self.limit)
        found = (_layout(recipe, self.setting, fit) for fit in fits)
        return next(filter(self.runs, found))


class _TooLarge(NamedTuple):
    """Candidate that does not fit, with the choice and microbatch that need the least memory.

    Attributes:
        candidate: recipe with its layout.
        choice: the activations that are kept.
        rows: sequences of a microbatch.
        seconds: seconds of a step.
    """

    candidate: ResolvedTrainRecipe
    choice: ActivationChoice
    rows: int
    seconds: float


def _degrees_key(candidate: ResolvedTrainRecipe) -> str:
    """Return a key of what the memory of a candidate depends on, apart from activations."""
    parallel = candidate.parallel
    return repr((parallel.written_degrees, parallel.reshard_after_forward))


def _kind(layout: ParallelLayout) -> tuple[Any, ...]:
    """Return what layouts of one kind have in common."""
    parallel = layout.recipe.parallel
    return (
        parallel.context_parallel_degree,
        parallel.tensor_parallel_degree,
        parallel.expert_parallel_degree,
        parallel.data_parallel_shard_degree == 1,
        parallel.reshard_after_forward,
        layout.choice.family,
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


def _layout(recipe: ResolvedTrainRecipe, setting: Cluster, fit: Fit) -> ParallelLayout:
    """Return the layout of a recipe with a fit; degrees and microbatch size become numbers."""
    assert fit.step is not None
    recipe = fit.choice.apply(recipe)
    degrees = _keys(recipe.parallel.degrees(setting.gpus))
    parallel = dataclasses.replace(recipe.parallel, **degrees)
    chosen = dataclasses.replace(
        recipe, parallel=parallel, device_train_microbatch_size=fit.microbatch
    )
    return ParallelLayout(
        chosen, fit.step, fit.need, fit.room, fit.choice, is_compiled=chosen.compile is True
    )


def candidate_layouts(
    recipe: ResolvedTrainRecipe, setting: Cluster
) -> Iterator[ResolvedTrainRecipe]:
    """Yield the recipe with each layout, in which activations and the microbatch are `auto`."""
    modes = [None, recipe.compile_mode or DEFAULT_MODE]
    if recipe.compile_mode in GRAPH_MODES:  # which require replicas
        modes.append(DEFAULT_MODE)
    for degrees in layouts(recipe, setting):
        # the recipe with these degrees
        parallel = _with(recipe.parallel, degrees)
        if any(limits(recipe.model, parallel, degrees)):
            continue
        parallel.activation_checkpointing = "auto"
        target = parallel.activation_checkpointing_target
        if ActivationChoice.of_keys("whole", "none", target).blocks is not None:
            parallel.activation_checkpointing_target = None  # one of those that are searched
        reshard_values = [parallel.reshard_after_forward]
        if parallel.reshard_after_forward:
            reshard_values.append(False)
        for mode, reshard in itertools.product(modes, reshard_values):
            yield dataclasses.replace(
                recipe,
                parallel=dataclasses.replace(parallel, reshard_after_forward=reshard),
                device_train_microbatch_size="auto",
                compile=mode is not None,
                compile_mode=mode,
            )


def _with(parallel: ResolvedParallelConfig, degrees: Degrees) -> ResolvedParallelConfig:
    """Return the section with these degrees; keys without effect are unset."""
    sharded = not degrees.is_replicas
    method = parallel.context_parallel_method if degrees.context > 1 else None
    return dataclasses.replace(
        parallel,
        **_keys(degrees),
        expert_capacity=parallel.expert_capacity if degrees.expert > 1 else None,
        expert_halves=parallel.expert_halves and degrees.expert > 1,
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
    """Return a lower bound of the step time: all sequences at a time, no recomputation."""
    rows = recipe.global_train_batch_size // recipe.parallel.written_degrees.data
    return step_seconds(
        LEAST.apply(recipe), setting.gpus, rows, setting.reached, roughly=True
    ).total


def too_large(layout: ParallelLayout) -> str:
    """Return a text on how much memory a layout lacks."""
    return (
        f"{layout.bytes / GIB:.1f} GiB of {layout.room / GIB:.1f},"
        f" {(layout.bytes - layout.room) / GIB:.1f} too many"
    )
