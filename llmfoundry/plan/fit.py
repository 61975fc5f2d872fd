"""Choice of microbatch size and activation checkpointing for the available memory (`auto`).

Entry point: `choose_fit`, which `builders/trainer.py` calls. It searches with `search.py`, as a
plan does. A recipe that cannot fit is rejected with an error that states the required memory, the
available memory and a remedy.
"""

from __future__ import annotations

import dataclasses
import math
import os
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
from llmfoundry.plan.microbatch_sizes import rooms, rows_per_process
from llmfoundry.plan.search import ActivationChoice, Fit, Search, choices, memory_limits
from llmfoundry.plan.seconds import Speeds, in_seconds
from llmfoundry.recipe.data import DataConfig, TokenizerConfig
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.recipe.load import load
from llmfoundry.recipe.parallel import RECOMPUTED
from llmfoundry.recipe.paths import YAMLS, recipe_name
from llmfoundry.recipe.train import ResolvedTrainRecipe, TrainRecipe

WORKER_BYTES = 200 * 2**20  # of a data loader process after its imports
MIN_TOKENS = 4096
"""Tokens of a microbatch below which `auto` prefers recomputation if speeds are unknown. With fewer
tokens, gathering weights and reading matrices take longer than the additional third of the compute.
Calculated for 8 H100, not measured."""
KNOWN_VOCABULARIES = {"bytes": 257, "tiktoken": 100_277, "huggingface": 50_277}


def choose_fit(
    recipe: ResolvedTrainRecipe,
    *,
    world_size: int,
    available: int,
    device: torch.device,
    meta_model: Decoder | None = None,
    begun_with: ActivationChoice | None = None,
    reached: Speeds | None = None,
) -> Fit:
    """Choose activation checkpointing, activation compression and microbatch size.

    The result is a pure function of values that are equal on all ranks, so all ranks agree.

    - With known speeds: the configuration with the shortest estimated step.
    - Without known speeds, and in fine-tuning: the least recomputation that fits MIN_TOKENS (or all
      sequences of the rank), with the largest microbatch. If none does, the largest microbatch. On
      a CPU a matrix, or an expert under balanced load, processes at most CPU_TOKENS per microbatch.
    - What fits with the margin of `rooms`, and with EXPERT_LOAD under expert parallelism, is
      preferred.

    Args:
        recipe: resolved recipe.
        world_size: number of ranks.
        available: free bytes per rank, the minimum over all ranks.
        device: device type of the run.
        meta_model: for fine-tuning, see `estimate`.
        begun_with: choice of the run that is resumed; it is chosen again if it fits.
        reached: achievable speeds of the GPU; None: unknown.

    Raises:
        UserError: the recipe cannot fit.
    """
    reached = None if meta_model is not None else reached
    search = Search(recipe, world_size, device, meta_model, reached)
    candidates = choices(recipe, device)
    if begun_with is not None and begun_with not in candidates and begun_with.family in candidates:
        candidates.append(begun_with)

    # those that fit, with the margin and uneven expert load if possible
    fits = next(filter(None, (search.fits(candidates, limit) for limit in
                              memory_limits(available, device))), [])  # fmt: skip
    if not fits:
        raise _refusal(search, candidates[-1], available)

    # choose: that of the resumed run, the fastest, or the first that is large enough
    preferred = fits
    if reached is None:
        sizes = search.sizes()
        least_rows = min(sizes[0], math.ceil(MIN_TOKENS / recipe.max_seq_len))
        preferred = [fit for fit in fits if fit.microbatch >= least_rows]
    resumed = [fit for fit in fits if fit.choice == begun_with]
    best = (resumed or preferred or [max(fits, key=lambda fit: fit.microbatch)])[0]
    rows = rows_per_process(recipe, recipe.parallel.degrees(world_size).data)
    check_graphs(recipe.compile_mode, rows=rows, microbatch=best.microbatch)
    others = (fit for fit in fits if fit.choice.family != best.choice.family)
    return dataclasses.replace(best, second=None if reached is None else next(others, None))


def _refusal(search: Search, choice: ActivationChoice, available: int) -> UserError:
    """Return the error if nothing fits, for the choice with the most recomputation."""
    recipe, need, rows = search.recipe, search.need(choice), search.sizes()[-1]
    if recipe.parallel.reduce_scatter_each_microbatch is False:
        others = need.total(rows) - need.gradients(rows)
        if others <= rooms(available, search.device)[-1]:
            return UserError(_gradients_do_not_fit(need, rows, available))
    if search.meta_model is not None:
        return UserError(_does_not_fit_frozen(search, need, rows, available))
    return UserError(_does_not_fit(search, need, rows, available))


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


def checkpointing_line(
    recipe: ResolvedTrainRecipe, fit: Fit, begun_with: ActivationChoice | None = None
) -> str:
    """Return a log line on what `activation_checkpointing: auto` has chosen, and why."""
    level, second = fit.choice.level, fit.second
    less_recomputed = RECOMPUTED[: RECOMPUTED.index(level)]
    if fit.choice == begun_with:
        why = "as the run began"
    elif fit.seconds is not None and second is not None and second.seconds is not None:
        why = (
            f"{in_seconds(fit.seconds)} a step by the plan, where {second.choice.name}"
            f" (a microbatch of {second.microbatch}) would take {in_seconds(second.seconds)}"
        )
    elif fit.choice.blocks is not None:
        why = "with fewer blocks fewer rows would fit"
    elif less_recomputed:
        why = f"with {less_recomputed[-1]} fewer rows would fit"
    else:
        why = "all that the backward pass asks for fits"
    return (
        f"activation checkpointing: auto is {fit.choice.name}, {why}; about"
        f" {fit.bytes / GIB:.1f} GiB a process at a microbatch of {fit.microbatch}"
    )


def _gradients_do_not_fit(need: MemoryEstimate, rows: int, available: int) -> str:
    """Return the error if only the gradients between microbatches exceed the memory."""
    return (
        f"parallel.reduce_scatter_each_microbatch: false needs about {need.total(rows) / GIB:.1f}"
        f" GiB a process at a microbatch of {rows} ({need.accumulated / GIB:.1f} of them for"
        f" gradients of the whole model between microbatches); {available / GIB:.1f} GiB are free;"
        " write true"
    )


def _does_not_fit(search: Search, need: MemoryEstimate, rows: int, available: int) -> str:
    """Return the error of training, which names the largest shipped recipe that fits."""
    fitting = largest_fitting_recipe(search.world_size, available, search.device)
    hint = "no shipped recipe fits"
    if fitting:
        hint = f"the largest shipped recipe that fits is {fitting}"
    return (
        f"model: {search.recipe.run_name} ({need.parameters / 1e6:,.0f}M parameters) needs about"
        f" {need.total(rows) / GIB:.1f} GiB a process at a microbatch of {rows}"
        f" ({parts_text(need, rows)}); {available / GIB:.1f} GiB are free; {hint}; or spread it"
        " with parallel.data_parallel_shard_degree"
    )


def _does_not_fit_frozen(search: Search, need: MemoryEstimate, rows: int, available: int) -> str:
    """Return the error of fine-tuning; remedies are an adapter, 4 bits, or more ranks."""
    recipe, meta_model = search.recipe, search.meta_model
    assert meta_model is not None
    is_frozen = not all(p.requires_grad for p in meta_model.parameters())
    if is_quantized(meta_model):
        hint = "write a smaller max_seq_len, parallel.activation_checkpointing: true"
    elif is_frozen and isinstance(recipe, ResolvedFinetuneRecipe) and recipe.adapter.name != "none":
        hint = "write model.quantize: nf4"
    else:
        hint = "write adapter.name: lora"
        quantized = value_count(meta_model) * 4.2 / 8  # bytes; 4.2 bits with scales
        other_bytes = need.fixed + need.logits(rows) + need.activations(rows)
        if quantized + other_bytes <= rooms(available, search.device)[0]:
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
    room = rooms(available, device)[0]
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
    guessed = dataclasses.replace(recipe, model=model)
    guessed.user_recipe = recipe.user_recipe
    return guessed


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
