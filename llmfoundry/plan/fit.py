"""How a recipe is computed in the memory that there is: rows at a time, and what is computed again.

`builders/trainer.py` asks it, refuses a recipe that cannot fit with what it needs, what there is,
and which shipped recipe fits.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from llmfoundry.distributed.activation_checkpoint import check_graphs
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.loggers.console import format_gib
from llmfoundry.models.counts import parameter_count
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.quantized import is_quantized, value_count
from llmfoundry.ops.devices import available_host_memory
from llmfoundry.plan.memory import GIB, MemoryEstimate, estimate, weight_bytes
from llmfoundry.plan.microbatch_sizes import USABLE, microbatches, rows_per_process
from llmfoundry.plan.seconds import in_seconds, speeds, step_seconds
from llmfoundry.recipe.data import DataConfig, TokenizerConfig
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.recipe.hardware import Gpu
from llmfoundry.recipe.load import load
from llmfoundry.recipe.parallel import RECOMPUTED, compiled_limits, recomputation
from llmfoundry.recipe.paths import YAMLS, recipe_name
from llmfoundry.recipe.train import ResolvedTrainRecipe, TrainRecipe

WORKER_BYTES = 200 * 2**20  # of a process that makes batches, once it has imported what it needs
EXPERT_LOAD = 2.0
"""Load of a process's experts, in means, that auto leaves memory for. In the first 100 steps of
dbrx-tiny, with 2 of its 16 experts on each of 8 processes, the most loaded process has 1.3 at the
first step, 3.9 at most (about step 10), 2.2 in the median and 1.3 at the end; 4 is the limit."""
MIN_TOKENS = 4096
"""Of a microbatch under which auto rather computes again: with fewer, weights take longer to gather
and matrices to read than a third more work takes. Computed for 8 H100, not measured."""
KNOWN_VOCABULARIES = {"bytes": 257, "tiktoken": 100_277, "huggingface": 50_277}


@dataclass(frozen=True)
class Fit:
    """How a recipe is computed in the memory that there is.

    Attributes:
        microbatch: rows that a process computes at a time.
        checkpointing: what the backward pass recomputes, one of `recipe.parallel.RECOMPUTED`.
        need: what that takes.
        load: the largest load of a process's experts, in means, that fits as well; inf: any.
        compression: in what form activations wait.
        seconds: of a step, by the plan; None: of this device it knows no speeds.
        second: what would have been next, by its seconds; None: nothing, or they are not known.
    """

    microbatch: int
    checkpointing: str
    need: MemoryEstimate
    load: float = math.inf
    compression: str = "none"
    seconds: float | None = None
    second: Fit | None = None

    @property
    def kept(self) -> str:
        """How activations are kept, in words."""
        small = self.compression
        return self.checkpointing if small == "none" else f"{self.checkpointing} and {small}"


def choose_fit(
    recipe: ResolvedTrainRecipe,
    *,
    world_size: int,
    available: int,
    device: torch.device,
    meta_model: Decoder | None = None,
    begun_with: str | None = None,
    gpu: Gpu | None = None,
) -> Fit:
    """How much of a block is computed again, in what form it waits, and how many rows at a time.

    A pure function of what all processes know alike, so that they decide alike.
    `parallel.activation_checkpointing: auto` and `activation_compression: auto` are together what
    makes the shortest step by the plan, each with as many rows as fit. Where the device's speeds
    are not known, and in fine-tuning, they are the least with which a microbatch of MIN_TOKENS
    fits, or the process's rows if they are fewer; where none has room for so many, it is that with
    most rows, of those the least. `auto` of the microbatch is then the largest divisor of the
    process's rows that the estimate says fits; on a CPU of those in which a matrix, or an expert
    if they are evenly loaded, meets CPU_TOKENS at most. Where processes share experts, one whose
    experts have EXPERT_LOAD times the mean load is to fit, unless nothing would.

    Args:
        recipe: filled.
        world_size: processes of the run.
        available: bytes for each process: the least that one of them has.
        device: where it computes.
        meta_model: of fine-tuning, as `estimate` takes it.
        begun_with: of a run that resumes: `Fit.kept` when it was saved, for which auto stands
            again as long as a row fits.
        gpu: its data sheet; None: it is not known.

    Raises:
        UserError: the recipe cannot fit; says what it needs, what there is and what fits.
    """
    rows = rows_per_process(recipe, recipe.parallel.degrees(world_size).data)
    candidates = microbatches(recipe, rows, device)
    needs = {
        way: estimate(with_level(recipe, *way), world_size, meta_model=meta_model, device=device)
        for way in _ways(recipe, device)
    }
    room = int(USABLE * available)
    fits = _fitting(needs, candidates, room, EXPERT_LOAD) or _fitting(needs, candidates, room, 1)
    *_, need = needs.values()
    enough = min(candidates[0], -(-MIN_TOKENS // recipe.max_seq_len))
    kept = [fit for fit in fits if fit.kept == begun_with]
    good = [fit for fit in fits if fit.microbatch >= enough]
    if len(fits) > 1 and gpu is not None and meta_model is None:
        good = _by_seconds(recipe, fits, world_size, gpu)
    if fits:
        best = (kept or good or [max(fits, key=lambda fit: fit.microbatch)])[0]
        check_graphs(recipe.compile_mode, rows=rows, microbatch=best.microbatch)
        return best
    if recipe.parallel.reduce_scatter_each_microbatch is False:
        others = need.total(candidates[-1]) - need.gradients(candidates[-1])
        if others <= USABLE * available:
            raise UserError(_gradients_do_not_fit(need, candidates[-1], available))
    if meta_model is not None:
        raise UserError(_does_not_fit_frozen(recipe, need, candidates[-1], available, meta_model))
    raise UserError(_does_not_fit(recipe, need, candidates[-1], world_size, available, device))


def _fitting(
    needs: Mapping[tuple[str, str], MemoryEstimate],
    candidates: Sequence[int],
    room: int,
    load: float,
) -> list[Fit]:
    """Of each way most rows that fit under a load of experts, where some do."""
    fits = list[Fit]()
    for (level, small), need in needs.items():
        found = [n for n in candidates if need.total(n, load) <= room]
        fits += [Fit(n, level, need, need.fitting_load(n, room), small) for n in found[:1]]
    return fits


def _by_seconds(
    recipe: ResolvedTrainRecipe, fits: list[Fit], world_size: int, gpu: Gpu
) -> list[Fit]:
    """The fits, the shortest step first, each with the next one."""
    reached = speeds(gpu, recipe)
    timed = [
        dataclasses.replace(
            fit,
            seconds=step_seconds(
                with_level(recipe, fit.checkpointing, fit.compression),
                world_size,
                fit.microbatch,
                reached,
            ).total,
        )
        for fit in fits
    ]
    timed.sort(key=lambda fit: fit.seconds or math.inf)
    after = [*timed[1:], None]
    return [dataclasses.replace(a, second=b) for a, b in zip(timed, after, strict=True)]


def load_line(recipe: ResolvedTrainRecipe, fit: Fit, world_size: int) -> str | None:
    """Which load of a process's experts fits; None: processes share no experts."""
    p = recipe.parallel.degrees(world_size).expert
    if p == 1 or math.isinf(fit.load):
        return None
    ffn = recipe.model.ffn_config
    most = min(ffn.moe_top_k, ffn.moe_num_experts // p) * p / ffn.moe_top_k
    each = f"{fit.need.load_bytes(fit.microbatch) / GIB:.1f} GiB for each mean above the first"
    fits = f"up to {fit.load:.1f}" if fit.load < most else "any"
    return f"expert load of a process, in means: {fits} fits ({each}; {most:.1f} is the limit)"


def choose_microbatch(recipe: ResolvedTrainRecipe, **memory: Any) -> int:
    """Rows that a process computes at a time, of `choose_fit`, which takes the same."""
    return choose_fit(recipe, **memory).microbatch


def checkpointing_line(recipe: ResolvedTrainRecipe, fit: Fit, begun_with: str | None = None) -> str:
    """What `parallel.activation_checkpointing: auto` stands for, and why, in one line."""
    more = RECOMPUTED[: RECOMPUTED.index(fit.checkpointing)]
    second = fit.second
    if fit.kept == begun_with:
        why = "as the run began"
    elif fit.seconds is not None and second is not None and second.seconds is not None:
        why = (
            f"{in_seconds(fit.seconds)} a step by the plan, where {second.kept} (a microbatch of"
            f" {second.microbatch}) would take {in_seconds(second.seconds)}"
        )
    elif more:
        why = f"with {more[-1]} fewer rows would fit"
    else:
        why = "all that the backward pass asks for fits"
    return (
        f"activation checkpointing: auto is {fit.kept}, {why}; about"
        f" {fit.need.total(fit.microbatch) / GIB:.1f} GiB a process at a microbatch of"
        f" {fit.microbatch}"
    )


def _ways(recipe: ResolvedTrainRecipe, device: torch.device) -> list[tuple[str, str]]:
    """Levels and compressions: those written, or what auto may stand for, the least work first."""
    parallel = recipe.parallel
    level, small = recomputation(parallel.activation_checkpointing), parallel.activation_compression
    levels = _levels(recipe, device) if level == "auto" else [level]
    ways = [*product(levels, ("none", "int8") if small == "auto" else (small,))]
    if not recipe.compile:
        return ways
    parts = [(way, with_level(recipe, *way).parallel) for way in ways]
    found = [way for way, one in parts if not [*compiled_limits(recipe.model, one)]]
    return found or ways


def _levels(recipe: ResolvedTrainRecipe, device: torch.device) -> list[str]:
    without = recipe.compile and (device.type == "cpu" or recipe.cuts_within_blocks)
    return [level for level in RECOMPUTED if not (without and level == "selective")]


def with_level(
    recipe: ResolvedTrainRecipe, level: str, compression: str | None = None
) -> ResolvedTrainRecipe:
    """A copy of which so much is computed again, and activations wait in this form."""
    parallel = dataclasses.replace(recipe.parallel, activation_checkpointing=level)
    if compression is not None:
        parallel.activation_compression = compression
    return dataclasses.replace(recipe, parallel=parallel)


def _gradients_do_not_fit(need: MemoryEstimate, rows: int, available: int) -> str:
    return (
        f"parallel.reduce_scatter_each_microbatch: false needs about {need.total(rows) / GIB:.1f}"
        f" GiB a process at a microbatch of {rows} ({need.accumulated / GIB:.1f} of them for"
        f" gradients of the whole model between microbatches); {available / GIB:.1f} GiB are free;"
        " write true"
    )


def _does_not_fit(
    recipe: ResolvedTrainRecipe,
    need: MemoryEstimate,
    rows: int,
    world_size: int,
    available: int,
    device: torch.device,
) -> str:
    fits = largest_fitting_recipe(world_size, available, device)
    hint = f"the largest shipped recipe that fits is {fits}" if fits else "no shipped recipe fits"
    return (
        f"model: {recipe.run_name} ({need.parameters / 1e6:,.0f}M parameters) needs about"
        f" {need.total(rows) / GIB:.1f} GiB a process at a microbatch of {rows}"
        f" ({parts_text(need, rows)}); {available / GIB:.1f} GiB are free; {hint}; or spread it"
        " with parallel.data_parallel_shard_degree"
    )


def _does_not_fit_frozen(
    recipe: ResolvedTrainRecipe,
    need: MemoryEstimate,
    rows: int,
    available: int,
    meta_model: Decoder,
) -> str:
    """For fine-tuning: what makes it smaller is an adapter, 4 bits, or more processes."""
    frozen = not all(p.requires_grad for p in meta_model.parameters())
    if is_quantized(meta_model):
        hint = "write a smaller max_seq_len, parallel.activation_checkpointing: true"
    elif frozen and isinstance(recipe, ResolvedFinetuneRecipe) and recipe.adapter.name != "none":
        hint = "write model.quantize: nf4"
    else:
        small = (
            value_count(meta_model) * 4.2 / 8
            + need.fixed
            + need.logits(rows)
            + need.activations(rows)
        )
        fits = " and model.quantize: nf4" if small <= USABLE * available else ""
        hint = f"write adapter.name: lora{fits}"
    return (
        f"model.pretrained: {need.parameters / 1e6:,.0f}M parameters need about"
        f" {need.total(rows) / GIB:.1f} GiB a process at a microbatch of {rows}"
        f" ({parts_text(need, rows)}); {available / GIB:.1f} GiB are free; {hint}, or spread it"
        " with parallel.data_parallel_shard_degree"
    )


def parts_text(need: MemoryEstimate, rows: int) -> str:
    """What a process's memory at a microbatch of `rows` is for; it adds up to the total."""
    return ", ".join(f"{what} {format_gib(n / GIB)}" for what, n in need.parts(rows).items() if n)


def largest_fitting_recipe(world_size: int, available: int, device: torch.device) -> str | None:
    """The shipped recipe of most parameters that fits at a microbatch of one row.

    Activations, which take long to count, are counted of those alone whose weights fit.
    """
    room = int(USABLE * available)
    found: list[tuple[int, Path, ResolvedTrainRecipe]] = []
    for path in sorted(YAMLS.glob("*.yaml")):
        recipe = with_guessed_vocabulary(load(TrainRecipe, path).resolve())
        try:
            weights = weight_bytes(recipe, world_size)
        except UserError:  # a mesh that these processes cannot form
            continue
        if weights <= room:
            found.append((parameter_count(recipe.model), path, recipe))
    for _, path, recipe in sorted(found, key=lambda one: -one[0]):
        if estimate(recipe, world_size, device=device).total(1) <= room:
            return recipe_name(path)
    return None


def with_guessed_vocabulary(recipe: ResolvedTrainRecipe) -> ResolvedTrainRecipe:
    """A filled copy whose vocabulary is guessed, to estimate before any text is read."""
    if recipe.model.vocab_size is not None:
        return recipe
    model = dataclasses.replace(recipe.model)
    model.fill(vocab_size=guess_vocab_size(recipe.tokenizer))
    return dataclasses.replace(recipe, model=model)


def check_workers(config: DataConfig, world: World) -> None:
    """Refuse more of data.loader_workers than the machine has memory for.

    Raises:
        UserError: says how many fit.
    """
    free = available_host_memory()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if config.loader_workers * ranks * WORKER_BYTES > free:
        raise UserError(
            f"data.loader_workers: {config.loader_workers} for each of {ranks} processes take"
            f" {WORKER_BYTES / GIB:.1f} GiB each, but {free / GIB:.1f} GiB are free; write at most"
            f" {free // WORKER_BYTES // ranks}"
        )


def guess_vocab_size(config: TokenizerConfig) -> int:
    """The vocabulary's size before the tokenizer exists."""
    return config.vocab_size or KNOWN_VOCABULARIES[config.name]
