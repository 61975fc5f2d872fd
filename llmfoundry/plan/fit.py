"""Choice of microbatch size and activation checkpointing for the available memory (`auto`).

Entry point: `choose_fit`, which `builders/trainer.py` calls. A recipe that cannot fit is rejected
with an error that states the required memory, the available memory and a remedy.
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

WORKER_BYTES = 200 * 2**20  # of a data loader process after its imports
EXPERT_LOAD = 2.0
"""Expert load of a rank, in units of the mean, for which `auto` reserves memory. In the first 100
steps of dbrx-tiny, with 2 of 16 experts on each of 8 ranks, the load of the most loaded rank is 1.3
at the first step, 3.9 at most (about step 10), 2.2 in the median and 1.3 at the end; 4 is the
limit."""
MIN_TOKENS = 4096
"""Tokens of a microbatch below which `auto` prefers recomputation. With fewer tokens, gathering
weights and reading matrices take longer than the additional third of the compute. Calculated for 8
H100, not measured."""
KNOWN_VOCABULARIES = {"bytes": 257, "tiktoken": 100_277, "huggingface": 50_277}


@dataclass(frozen=True)
class Fit:
    """Configuration of a run that fits the available memory.

    Attributes:
        microbatch: sequences of a rank's microbatch.
        checkpointing: what the backward pass recomputes, one of `recipe.parallel.RECOMPUTED`.
        need: memory estimate of this configuration.
        load: largest expert load of a rank, in units of the mean, that fits; inf: any.
        compression: format of the stored activations (`parallel.activation_compression`).
        seconds: estimated step time; None: the speeds of the device are unknown.
        second: the configuration with the next longer step time; None: there is none, or step times
            are unknown.
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
        """Checkpointing and compression of activations, in words."""
        if self.compression == "none":
            return self.checkpointing
        return f"{self.checkpointing} and {self.compression}"


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
    """Choose activation checkpointing, activation compression and microbatch size.

    The result is a pure function of values that are equal on all ranks, so all ranks agree.

    - Microbatch `auto`: the largest divisor of the rank's sequences that fits. On a CPU a matrix,
      or an expert under balanced load, processes at most CPU_TOKENS per microbatch.
    - Checkpointing and compression `auto`, with known speeds: the pair with the shortest estimated
      step, each with the largest microbatch that fits.
    - Without known speeds, and in fine-tuning: the pair with the least recomputation that fits
      MIN_TOKENS (or all sequences of the rank). If no pair does, the pair with the largest
      microbatch.
    - With expert parallelism: a rank with EXPERT_LOAD times the mean load must fit, unless no
      configuration does.

    Args:
        recipe: resolved recipe.
        world_size: number of ranks.
        available: bytes per rank, the minimum over all ranks.
        device: device type of the run.
        meta_model: for fine-tuning, see `estimate`.
        begun_with: `Fit.kept` of the run that is resumed; it is chosen again if it fits.
        gpu: data sheet of the GPU; None: unknown.

    Raises:
        UserError: the recipe cannot fit.
    """
    # estimate the memory of each way to store activations
    rows = rows_per_process(recipe, recipe.parallel.degrees(world_size).data)
    candidates = microbatches(recipe, rows, device)
    needs = {
        way: estimate(with_level(recipe, *way), world_size, meta_model=meta_model, device=device)
        for way in _ways(recipe, device)
    }

    # those that fit: with uneven expert load, or else with even load
    room = int(USABLE * available)
    fits = _fitting(needs, candidates, room, EXPERT_LOAD)
    if not fits:
        fits = _fitting(needs, candidates, room, 1)

    # choose: that of the resumed run, the fastest or the first large enough, the largest microbatch
    resumed = [fit for fit in fits if fit.kept == begun_with]
    if len(fits) > 1 and gpu is not None and meta_model is None:
        preferred = _by_seconds(recipe, fits, world_size, gpu)
    else:
        least_rows = min(candidates[0], math.ceil(MIN_TOKENS / recipe.max_seq_len))
        preferred = [fit for fit in fits if fit.microbatch >= least_rows]
    if fits:
        best = (resumed or preferred or [max(fits, key=lambda fit: fit.microbatch)])[0]
        check_graphs(recipe.compile_mode, rows=rows, microbatch=best.microbatch)
        return best

    # nothing fits: report the cause, for the way with the most recomputation
    *_, need = needs.values()
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
    """Return the largest fitting microbatch of each way to store activations, if any fits."""
    fits = list[Fit]()
    for (level, compression), need in needs.items():
        largest = next((n for n in candidates if need.total(n, load) <= room), None)
        if largest is not None:
            load_limit = need.fitting_load(largest, room)
            fits.append(Fit(largest, level, need, load_limit, compression))
    return fits


def _by_seconds(
    recipe: ResolvedTrainRecipe, fits: list[Fit], world_size: int, gpu: Gpu
) -> list[Fit]:
    """Return the fits in the order of their estimated step time, each with its successor."""
    reached = speeds(gpu, recipe)
    timed = []
    for fit in fits:
        fit_recipe = with_level(recipe, fit.checkpointing, fit.compression)
        step = step_seconds(fit_recipe, world_size, fit.microbatch, reached)
        timed.append(dataclasses.replace(fit, seconds=step.total))
    timed.sort(key=lambda fit: fit.seconds or math.inf)
    successors = [*timed[1:], None]
    return [
        dataclasses.replace(fit, second=successor)
        for fit, successor in zip(timed, successors, strict=True)
    ]


def load_line(recipe: ResolvedTrainRecipe, fit: Fit, world_size: int) -> str | None:
    """Return a log line on the expert load that fits; None: no expert parallelism, or no limit."""
    degree = recipe.parallel.degrees(world_size).expert
    if degree == 1 or math.isinf(fit.load):
        return None
    # the load if all tokens choose the experts of one rank
    ffn = recipe.model.ffn_config
    most = min(ffn.moe_top_k, ffn.moe_num_experts // degree) * degree / ffn.moe_top_k
    growth = fit.need.load_bytes(fit.microbatch) / GIB
    fits = f"up to {fit.load:.1f}" if fit.load < most else "any"
    return (
        f"expert load of a process, in means: {fits} fits ({growth:.1f} GiB for each mean above"
        f" the first; {most:.1f} is the limit)"
    )


def choose_microbatch(recipe: ResolvedTrainRecipe, **memory: Any) -> int:
    """Return the microbatch size of `choose_fit`, which takes the same arguments."""
    return choose_fit(recipe, **memory).microbatch


def checkpointing_line(recipe: ResolvedTrainRecipe, fit: Fit, begun_with: str | None = None) -> str:
    """Return a log line on what `activation_checkpointing: auto` has chosen, and why."""
    less_recomputed = RECOMPUTED[: RECOMPUTED.index(fit.checkpointing)]
    second = fit.second
    if fit.kept == begun_with:
        why = "as the run began"
    elif fit.seconds is not None and second is not None and second.seconds is not None:
        why = (
            f"{in_seconds(fit.seconds)} a step by the plan, where {second.kept} (a microbatch of"
            f" {second.microbatch}) would take {in_seconds(second.seconds)}"
        )
    elif less_recomputed:
        why = f"with {less_recomputed[-1]} fewer rows would fit"
    else:
        why = "all that the backward pass asks for fits"
    return (
        f"activation checkpointing: auto is {fit.kept}, {why}; about"
        f" {fit.need.total(fit.microbatch) / GIB:.1f} GiB a process at a microbatch of"
        f" {fit.microbatch}"
    )


def _ways(recipe: ResolvedTrainRecipe, device: torch.device) -> list[tuple[str, str]]:
    """Return the candidate (checkpointing, compression) pairs, the least recomputation first."""
    # all pairs
    level = recomputation(recipe.parallel.activation_checkpointing)
    levels = _levels(recipe, device) if level == "auto" else [level]
    compression = recipe.parallel.activation_compression
    compressions = ("none", "int8") if compression == "auto" else (compression,)
    ways = [*product(levels, compressions)]
    if recipe.compile is not True:
        return ways

    # those that can be compiled
    supported = []
    for way in ways:
        parallel = with_level(recipe, *way).parallel
        if not any(compiled_limits(recipe.model, parallel)):
            supported.append(way)
    return supported or ways


def _levels(recipe: ResolvedTrainRecipe, device: torch.device) -> list[str]:
    """Return the levels of checkpointing; `selective` only if it can be compiled."""
    is_uncompiled = recipe.compile is True and (device.type == "cpu" or recipe.cuts_within_blocks)
    return [level for level in RECOMPUTED if not (is_uncompiled and level == "selective")]


def with_level(
    recipe: ResolvedTrainRecipe, level: str, compression: str | None = None
) -> ResolvedTrainRecipe:
    """Return a copy of a recipe with this activation checkpointing and compression."""
    parallel = dataclasses.replace(recipe.parallel, activation_checkpointing=level)
    if compression is not None:
        parallel.activation_compression = compression
    return dataclasses.replace(recipe, parallel=parallel)


def _gradients_do_not_fit(need: MemoryEstimate, rows: int, available: int) -> str:
    """Return the error if only the gradients between microbatches exceed the memory."""
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
    """Return the error of training, which names the largest shipped recipe that fits."""
    fitting = largest_fitting_recipe(world_size, available, device)
    hint = "no shipped recipe fits"
    if fitting:
        hint = f"the largest shipped recipe that fits is {fitting}"
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
    """Return the error of fine-tuning; remedies are an adapter, 4 bits, or more ranks."""
    is_frozen = not all(p.requires_grad for p in meta_model.parameters())
    if is_quantized(meta_model):
        hint = "write a smaller max_seq_len, parallel.activation_checkpointing: true"
    elif is_frozen and isinstance(recipe, ResolvedFinetuneRecipe) and recipe.adapter.name != "none":
        hint = "write model.quantize: nf4"
    else:
        hint = "write adapter.name: lora"
        quantized = value_count(meta_model) * 4.2 / 8  # bytes; 4.2 bits with scales
        other_bytes = need.fixed + need.logits(rows) + need.activations(rows)
        if quantized + other_bytes <= USABLE * available:
            hint += " and model.quantize: nf4"
    return (
        f"model.pretrained: {need.parameters / 1e6:,.0f}M parameters need about"
        f" {need.total(rows) / GIB:.1f} GiB a process at a microbatch of {rows}"
        f" ({parts_text(need, rows)}); {available / GIB:.1f} GiB are free; {hint}, or spread it"
        " with parallel.data_parallel_shard_degree"
    )


def parts_text(need: MemoryEstimate, rows: int) -> str:
    """Return a text on the components of `need.total(rows)` by purpose."""
    return ", ".join(f"{what} {format_gib(n / GIB)}" for what, n in need.parts(rows).items() if n)


def largest_fitting_recipe(world_size: int, available: int, device: torch.device) -> str | None:
    """Return the largest shipped recipe that fits at a microbatch of one sequence.

    Counting activations is slow and therefore limited to recipes whose weights fit.
    """
    room = int(USABLE * available)
    candidates: list[tuple[int, Path, ResolvedTrainRecipe]] = []
    for path in sorted(YAMLS.glob("*.yaml")):
        recipe = with_guessed_vocabulary(load(TrainRecipe, path).resolve())
        try:
            weights = weight_bytes(recipe, world_size)
        except UserError:  # a mesh that these processes cannot form
            continue
        if weights <= room:
            candidates.append((parameter_count(recipe.model), path, recipe))
    candidates.sort(key=lambda candidate: -candidate[0])  # the most parameters first
    for _, path, recipe in candidates:
        if estimate(recipe, world_size, device=device).total(1) <= room:
            return recipe_name(path)
    return None


def with_guessed_vocabulary(recipe: ResolvedTrainRecipe) -> ResolvedTrainRecipe:
    """Return a copy of a recipe with a guessed vocabulary size, to estimate without data."""
    if recipe.model.vocab_size is not None:
        return recipe
    model = dataclasses.replace(recipe.model)
    model.fill(vocab_size=guess_vocab_size(recipe.tokenizer))
    return dataclasses.replace(recipe, model=model)


def check_workers(config: DataConfig, world: World) -> None:
    """Check that the machine has memory for `data.loader_workers`.

    Raises:
        UserError: too many workers; the message states the maximum.
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
    """Return the vocabulary size of the recipe, or the usual size for this kind of tokenizer."""
    return config.vocab_size or KNOWN_VOCABULARIES[config.name]
