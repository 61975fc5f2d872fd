"""Search for the activations to keep and for the microbatch size, at given degrees of parallelism.

Entry point: `search`. `fit.py` calls it for `auto` of a run, and `layouts.py` for each layout of a
plan, so that both choose the same. The candidates are levels of activation checkpointing, full
checkpointing of only the first blocks, compression, and all microbatch sizes. Recomputing only as
many blocks as the memory requires costs less than recomputing all of them. The first blocks are
recomputed, because their backward pass comes last, when the activations of the other blocks are
already freed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from llmfoundry.models.decoder import Decoder
from llmfoundry.plan.memory import MemoryEstimate, estimate
from llmfoundry.plan.microbatch_sizes import microbatches, rooms, rows_per_process
from llmfoundry.plan.seconds import Speeds, StepSeconds, step_seconds
from llmfoundry.recipe.parallel import BLOCK, RECOMPUTED, compiled_limits, recomputation
from llmfoundry.recipe.train import ResolvedTrainRecipe

EXPERT_LOAD = 2.0
"""Expert load of a rank, in units of the mean, for which memory is reserved. In the first 100
steps of dbrx-tiny, with 2 of 16 experts on each of 8 ranks, the load of the most loaded rank is 1.3
at the first step, 3.9 at most (about step 10), 2.2 in the median and 1.3 at the end; 4 is the
limit."""
FULL = 0.01
"""Penalty on the step time, as a fraction, at full memory use. Of two configurations that are
equally fast, the one with more free memory is better."""


@dataclass(frozen=True)
class ActivationChoice:
    """Which activations the blocks keep for the backward pass.

    Attributes:
        level: level of activation checkpointing, one of RECOMPUTED.
        compression: format of the stored activations (`parallel.activation_compression`).
        blocks: with level whole: number of first blocks that are recomputed; 0: any number, as a
            candidate; None: all, or those of `parallel.activation_checkpointing_target`.
    """

    level: str
    compression: str = "none"
    blocks: int | None = None

    @staticmethod
    def of_keys(level: str, compression: str, target: object) -> ActivationChoice:
        """Return the choice of these keys of the section parallel, of a recipe or a run."""
        word = target.get(BLOCK, "") if isinstance(target, dict) else ""
        kind, _, number = str(word).partition("-")
        is_range = kind == "first" and number.isdecimal()
        return ActivationChoice(level, compression, int(number) if is_range else None)

    @property
    def name(self) -> str:
        """The choice in words."""
        text = self.level
        if self.blocks is not None:
            text += f" in the first {self.blocks} blocks"
        return text if self.compression == "none" else f"{text} and {self.compression}"

    @property
    def order(self) -> tuple[int, str, int]:
        """Sort key by the number of recomputed operations, then by compression."""
        rank = 2 * RECOMPUTED.index(self.level) - (self.blocks is not None)
        return rank, ("" if self.compression == "none" else self.compression), self.blocks or 0

    @property
    def family(self) -> ActivationChoice:
        """The candidate that this choice is one of."""
        return self if self.blocks is None else dataclasses.replace(self, blocks=0)

    def settings(self) -> dict[str, Any]:
        """Return the keys of the section parallel; keys without effect on the choice are unset."""
        settings: dict[str, Any] = {
            "activation_checkpointing": self.level,
            "activation_compression": self.compression,
        }
        if self.blocks is not None:
            settings["activation_checkpointing_target"] = {BLOCK: f"first-{max(1, self.blocks)}"}
        if self.level != "whole":
            settings["activation_checkpointing_target"] = None
        if self.level != "none":
            settings["activation_memory_budget"] = None
        return settings

    def apply(self, recipe: ResolvedTrainRecipe) -> ResolvedTrainRecipe:
        """Return a copy of a recipe with this choice."""
        parallel = dataclasses.replace(recipe.parallel, **self.settings())
        return dataclasses.replace(recipe, parallel=parallel)


@dataclass(frozen=True)
class Fit:
    """Configuration of a run that fits the available memory.

    Attributes:
        microbatch: sequences of a rank's microbatch.
        choice: the activations that are kept.
        need: memory estimate of this configuration.
        load: largest expert load of a rank, in units of the mean, that fits; inf: any.
        room: bytes that the estimate may take, see `rooms`.
        step: estimated step time; None: the speeds of the device are unknown.
        second: the choice with the next longer step time; None: there is none, or step times are
            unknown.
    """

    microbatch: int
    choice: ActivationChoice
    need: MemoryEstimate
    load: float = math.inf
    room: int = 0
    step: StepSeconds | None = None
    second: Fit | None = None

    @property
    def bytes(self) -> int:
        """Bytes that a rank needs."""
        return self.need.total(self.microbatch)

    @property
    def seconds(self) -> float | None:
        """Estimated seconds of a step; None: unknown."""
        return None if self.step is None else self.step.total

    @property
    def cost(self) -> float:
        """Step time plus the penalty FULL for memory use."""
        assert self.step is not None
        return cost(self.step, self.bytes, self.room)


def cost(step: StepSeconds, n_bytes: int, room: int) -> float:
    """Return the step time plus the penalty FULL for memory use."""
    return step.total * (1 + FULL * n_bytes / room)


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the memory estimate of a rank.

    Attributes:
        room: bytes.
        load: expert load of the rank, in units of the mean.
    """

    room: int
    load: float = 1.0


def memory_limits(available: int, device: torch.device) -> list[MemoryLimit]:
    """Return the limits to try in turn, until any configuration fits.

    At first a rank with EXPERT_LOAD times the mean expert load must fit.

    Args:
        available: free bytes of a rank.
        device: device type of the run.
    """
    first, *others = rooms(available, device)
    return [MemoryLimit(first, EXPERT_LOAD), *(MemoryLimit(room) for room in (first, *others))]


def choices(recipe: ResolvedTrainRecipe, device: torch.device) -> list[ActivationChoice]:
    """Return the candidates for the recipe's `auto`, the least recomputation first."""
    # all pairs of level and compression
    parallel, compression = recipe.parallel, recipe.parallel.activation_compression
    level = recomputation(parallel.activation_checkpointing)
    if level == "auto":
        levels = _levels(recipe, device)
    else:
        target = parallel.activation_checkpointing_target
        levels = [(level, ActivationChoice.of_keys(level, compression, target).blocks)]
    compressions = ("none", "int8") if compression == "auto" else (compression,)
    pairs = product(levels, compressions)
    candidates = [ActivationChoice(level, small, blocks) for (level, blocks), small in pairs]
    if recipe.compile is not True:
        return candidates

    # those that can be compiled
    supported = []
    for candidate in candidates:
        parallel = candidate.apply(recipe).parallel
        if not any(compiled_limits(recipe.model, parallel)):
            supported.append(candidate)
    return supported or candidates


def _levels(recipe: ResolvedTrainRecipe, device: torch.device) -> list[tuple[str, int | None]]:
    """Return levels and numbers of blocks; `selective` only if it can be compiled."""
    is_uncompiled = recipe.compile is True and (device.type == "cpu" or recipe.cuts_within_blocks)
    levels = [level for level in RECOMPUTED if not (is_uncompiled and level == "selective")]
    every: list[tuple[str, int | None]] = [(level, None) for level in levels]
    return [*every[:-1], ("whole", 0), every[-1]]


@dataclass(frozen=True)
class Search:
    """Configurations of a recipe at given degrees, and what they need.

    Attributes:
        recipe: resolved recipe.
        world_size: number of ranks.
        device: device type of the run.
        meta_model: for fine-tuning, see `estimate`.
        reached: achievable speeds of the GPU; None: unknown, or the run fine-tunes.
        roughly: estimate step times without counting the memory traffic of this layout.
        needs: memory estimates that are known already. Searches that differ only in `reached`,
            `roughly`, compilation and the microbatch size share them.
    """

    recipe: ResolvedTrainRecipe
    world_size: int
    device: torch.device
    meta_model: Decoder | None = None
    reached: Speeds | None = None
    roughly: bool = False
    needs: dict[ActivationChoice, MemoryEstimate] = field(default_factory=dict, compare=False)

    def sizes(self) -> list[int]:
        """Return the candidates of the microbatch size, the largest first."""
        rows = rows_per_process(self.recipe, self.recipe.parallel.degrees(self.world_size).data)
        return microbatches(self.recipe, rows, self.device)

    def need(self, choice: ActivationChoice) -> MemoryEstimate:
        """Return the memory estimate of a choice."""
        if choice not in self.needs:
            self.needs[choice] = estimate(
                choice.apply(self.recipe),
                self.world_size,
                meta_model=self.meta_model,
                device=self.device,
            )
        return self.needs[choice]

    def fits(self, candidates: Iterable[ActivationChoice], limit: MemoryLimit) -> list[Fit]:
        """Return all configurations that fit, the best first.

        With known speeds, the best one has the lowest cost. Otherwise it has the least
        recomputation, and then the largest microbatch.
        """
        by_family = sorted(candidates, key=lambda choice: choice.blocks == 0)  # counts are shared
        fits = [fit for candidate in by_family for fit in self._fits(candidate, limit)]
        if self.reached is None:
            # fewer sequences at a time are not traded for fewer recomputed blocks
            most = max((fit.microbatch for fit in fits), default=0)
            fits = [fit for fit in fits if fit.choice.blocks is None or fit.microbatch == most]
            return sorted(fits, key=lambda fit: (fit.choice.order, -fit.microbatch))
        return sorted(fits, key=lambda fit: fit.cost)

    def _fits(self, choice: ActivationChoice, limit: MemoryLimit) -> Iterator[Fit]:
        """Yield the configurations of a choice that fit, the largest microbatch first.

        Of the numbers of recomputed blocks, the smallest one that fits each microbatch is yielded.
        """
        if choice.blocks == 0:
            yield from self._in_first_blocks(choice, limit)
            return
        need = self.need(choice)
        for rows in self.sizes():
            if need.total(rows, limit.load) <= limit.room:
                yield self.fit(choice, rows, limit)

    def _in_first_blocks(self, choice: ActivationChoice, limit: MemoryLimit) -> Iterator[Fit]:
        """Yield the configurations that recompute some of the blocks, but not all of them."""
        model = self.meta_model
        depth = self.recipe.model.n_layers if model is None else len(model.blocks)
        none_recomputed = self.need(dataclasses.replace(choice, level="none", blocks=None))

        def fitting(blocks: int, rows: int) -> bool:
            need = self.need(dataclasses.replace(choice, blocks=blocks))
            return need.total(rows, limit.load) <= limit.room

        # bisect the number of blocks for each microbatch that fits only with recomputation
        for rows in self.sizes():
            if none_recomputed.total(rows, limit.load) <= limit.room:
                return
            low, high = 1, depth - 1
            if high < low or not fitting(high, rows):
                continue
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if fitting(middle, rows) else (middle + 1, high)
            yield self.fit(dataclasses.replace(choice, blocks=high), rows, limit)

    def fit(self, choice: ActivationChoice, rows: int, limit: MemoryLimit) -> Fit:
        """Return the configuration of a choice with a microbatch size, whether or not it fits."""
        need = self.need(choice)
        load = need.fitting_load(rows, limit.room)
        return Fit(rows, choice, need, load, limit.room, self.step(choice, rows))

    def step(self, choice: ActivationChoice, rows: int) -> StepSeconds | None:
        """Return the step time of a choice with a microbatch size; None: speeds are unknown."""
        if self.reached is None:
            return None
        recipe = choice.apply(self.recipe)
        return step_seconds(recipe, self.world_size, rows, self.reached, roughly=self.roughly)
