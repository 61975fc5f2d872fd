"""How many rows a process computes at a time, and what is done where a step of them does not fit.

`builders/trainer.py` calls `settle_microbatch` where a run begins: the estimate's choice
(`plan/fit.py`), or what a probe measured, but never more than an earlier start of the same run was
left with after it ran out of memory; and `build_limit` for the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from llmfoundry.builders.job import Job
from llmfoundry.builders.probe import machine, probe_fit
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.distributed.collectives import all_reduce_min, on_each_machine
from llmfoundry.distributed.launch import World
from llmfoundry.ops.torch_private import Replicas
from llmfoundry.plan.fit import Fit
from llmfoundry.plan.rows import rows_per_process
from llmfoundry.recipe.scripts.train import GRAPH_MODES, TrainRecipe
from llmfoundry.train.out_of_memory import KEY, NAME, MicrobatchLimit, remembered

_ANY = 2**31  # rows: no limit is known
_SPARING = (  # of parallel, beside its degrees
    *("activation_checkpointing", "activation_checkpointing_target", "activation_compression"),
    *("activation_memory_budget", "reshard_after_forward", "reduce_scatter_each_microbatch"),
)


def settle_microbatch(
    recipe: TrainRecipe,
    written: TrainRecipe,
    fit: Fit,
    run: Storage,
    world: World,
    *,
    available: int,
    note: Callable[[str], None],
) -> Fit:
    """The fit, with the rows at a time that a run begins with; every process calls it.

    Args:
        recipe: filled, its activation checkpointing that of `fit`.
        written: the same as written.
        fit: of the estimate.
        run: which remembers what an earlier start was left with.
        world: this process.
        available: bytes that each process may take.
        note: reports what is not the estimate's.
    """
    if recipe.auto_probe == "on":
        fit = probe_fit(recipe, written, fit, world, available=available, note=note)
    if recipe.save_overwrite:  # begins anew
        return fit
    facts = memory_facts(recipe, world)
    rows, changed = on_each_machine(world, lambda: remembered(run.folder, facts))
    least = all_reduce_min(world, rows or _ANY)
    if changed:
        note(f"{KEY}: {NAME} of an earlier start is not used, as {', '.join(changed)} changed")
    if least >= fit.microbatch:
        return fit
    note(f"{KEY}: {least} in place of {fit.microbatch}, as an earlier start ran out of memory")
    return dataclasses.replace(fit, microbatch=least)


def memory_facts(recipe: TrainRecipe, world: World) -> dict[str, Any]:
    """What a step's memory depends on beside rows at a time and the run's own model, by key.

    Where one of them changes, a run may find that more rows fit.
    """
    degrees = dataclasses.asdict(recipe.parallel.degrees(world.size))
    keys = (
        "global_train_batch_size",
        "max_seq_len",
        "precision",
        "fp8_recipe",
        "compile_mode",
        KEY,
    )
    facts = {key: getattr(recipe, key) for key in (*keys, "device_loss_chunk_tokens")}
    facts["optimizer.moments"] = recipe.optimizer.moments
    for key in _SPARING:
        facts[f"parallel.{key}"] = str(getattr(recipe.parallel, key))
    return {**facts, "parallel": degrees, "machine": machine(world.device)}


def build_limit(job: Job, module: nn.Module) -> MicrobatchLimit:
    """What the loop does where a step does not fit; `module` as DDP or FSDP wrapped the model."""
    recipe, world = job.recipe, job.world
    recomputes = recipe.parallel.activation_checkpointing == "whole"
    return MicrobatchLimit(
        folder=job.run.folder,
        facts=memory_facts(recipe, world),
        rank=world.rank,
        size=world.size,
        rows=rows_per_process(recipe, recipe.parallel.degrees(world.size).data),
        in_place=world.size == 1 or (isinstance(module, Replicas) and module.can_go_on),
        is_fixed=recipe.compile_mode in GRAPH_MODES,
        hint="" if recomputes else ", or parallel.activation_checkpointing=true",
    )
