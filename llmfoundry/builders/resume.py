"""Start of a run: from its newest checkpoint, from another one, or without a checkpoint.

Entry points: `find_start` and `fill_weights`. Before training, `check_same_recipe` and
`check_same_rows` verify that all ranks, each on its machine, have the same recipe and data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmfoundry.builders.adapter import FOLDER, begin_adapter, check_base, has_adapter
from llmfoundry.builders.checkpoint import model_identity
from llmfoundry.builders.registry import find_address
from llmfoundry.builders.run_context import RunContext
from llmfoundry.checkpoint.load import (
    check_averages,
    load_training_state,
    load_weights,
    read_state,
)
from llmfoundry.checkpoint.open_run import find_place
from llmfoundry.checkpoint.storage import Checkpoint, Storage, batch_of
from llmfoundry.checkpoint.verify import ChecksumSelection, find_checkpoint
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.held_out import HeldOut
from llmfoundry.data.loader import Loader
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.collectives import check_same_on_all_ranks, on_rank0
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import NoRestart, UserError
from llmfoundry.exit_status import ResumeLimits, resume_limits
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.quantized import quantization
from llmfoundry.recipe.adapter import AdapterConfig
from llmfoundry.recipe.eval import EMA
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.recipe.typed import flat
from llmfoundry.train.average import AveragedWeights
from llmfoundry.train.spikes import ResumeStep
from llmfoundry.train.trainer import Trainer

OF_MACHINE = re.compile(  # keys that may differ between the machines of a run
    r"(logger|plugins|parallel\.nproc_per_node|data\.(.*\.)?(paths|remote|local|storage_options"
    r"|cache_\w+|prefetch|prefetch_factor|download_\w+|requests_per_second|num_workers"
    r"|loader_workers))(\..*)?"
)


@dataclass(frozen=True)
class StartPoint:
    """Checkpoint that a run begins with, if any."""

    checkpoint: Checkpoint | None = None
    weights_only: bool = False


def find_start(
    recipe: ResolvedTrainRecipe, run: Storage, world: World, note: Callable[[str], None]
) -> StartPoint:
    """Return the run's newest checkpoint, else load_path's, else none; the same on all ranks.

    Raises:
        UserError: the folder has a run that the recipe does not allow to resume.
        NoRestart: checkpoints are missing that the run's supervisor knows to be saved.
    """
    # may this run resume?
    limits, existing = on_rank0(world, resume_limits), on_rank0(world, run.checkpoints)
    _refuse_vanished(run, existing, limits)
    if existing and not (recipe.autoresume or recipe.save_overwrite):
        raise UserError(
            f"save_folder: {run} holds checkpoints of an earlier run; write"
            " autoresume=true to resume it, save_overwrite=true to delete it, or another run_name"
        )

    # the run's newest complete checkpoint
    if existing and not recipe.save_overwrite:
        refused: list[str] = []
        newest = find_checkpoint(run, note=refused.append, world=world, until=limits.until)
        for line in refused:
            note(line)
        if newest is not None:
            return StartPoint(newest)
        if limits.before is not None:
            raise NoRestart(
                f"save_folder: {run} holds no complete checkpoint from before batch"
                f" {limits.before}, after which the run was not finite; write another run_name"
            )
        on_rank0(world, lambda: _refuse_to_begin(run, existing, refused))
        if world.is_main:
            note("its first save was interrupted: there is nothing to resume from")

    # otherwise load_path
    if recipe.load_path is None:
        return StartPoint()
    weights_only, uri = bool(recipe.load_weights_only), recipe.logger.tracking_uri
    written = find_address(recipe.load_path, "load_path", world, uri=uri, note=note)
    options = FetchOptions.from_config(recipe.data)
    place = find_place(written, "load_path", world, options=options)
    weights = recipe.load_weights
    sums = ChecksumSelection.of(weights) if weights_only else ChecksumSelection.ALL
    newest = find_checkpoint(place, note=note, sums=sums, world=world)
    if newest is None:
        raise UserError(f"load_path: {place} holds no complete checkpoint; write one that does")
    if weights == EMA:
        check_averages(newest, "load_weights", world)
        newest.averaged = True
    return StartPoint(newest, weights_only=weights_only)


def _refuse_vanished(run: Storage, existing: list[Path], limits: ResumeLimits) -> None:
    """Raise if a run would repeat steps whose checkpoint its supervisor knows to be saved.

    Raises:
        NoRestart: the newest checkpoint is older than that one, or there is none.
    """
    newest = batch_of(existing[0]) if existing else -1
    if newest < limits.saved:
        there = f"its newest is {existing[0].name}" if existing else "there is none"
        raise NoRestart(
            f"save_folder: checkpoint ba{limits.saved:07d} of this run has vanished from"
            f" {run} as this machine sees it: {there}; mount or bring back the folder,"
            " and run the same command"
        )


def _refuse_to_begin(run: Storage, existing: list[Path], refused: list[str]) -> None:
    """Raise if a run's folder had a checkpoint but none can be used now."""
    if len(existing) > 1 or run.has_commit(existing[0]):
        raise UserError(
            f"save_folder: no checkpoint in {run} can be used ({refused[0]}); write"
            " save_overwrite=true to delete them and begin anew, or another run_name"
        )


ANEW: dict[str, Any] = {"batch": 0, "window": (0.0, 0), "callbacks": {}}


def fill_weights(
    job: RunContext,
    start: StartPoint,
    optimizer: torch.optim.Optimizer,
    identity: dict[str, Any],
    loader: Loader,
    *,
    total: int,
    fill: Callable[[Decoder], None] | None = None,
    average: AveragedWeights | None = None,
) -> dict[str, Any]:
    """Initialize the model or load a checkpoint; return the state to resume (`Trainer.save`).

    `total` is the run's length in batches; `fill` writes pretrained weights, if there are any. The
    `average` begins with the weights of a new run, or of a checkpoint without one.

    Raises:
        UserError: the checkpoint belongs to another model, another order of samples, or a longer
            run.
    """
    checkpoint, model, world = start.checkpoint, job.root.model, job.world
    if checkpoint is None:
        if fill is None:
            model.init_weights(job.recipe.seed)
        else:
            fill(model)
            begin_adapter(model, job.recipe)
        return _anew(average)
    state = on_rank0(world, lambda: read_state(checkpoint))
    _refuse_changes(start, state, identity)
    if start.weights_only:
        load_weights(checkpoint, model, world=world)
        checkpoint.unpin()
        kind = "averaged weights" if checkpoint.averaged else "weights"
        job.note(f"{kind} of {checkpoint} (batch {state['batch']})")
        return _anew(average)
    if state["batch"] > total:
        raise UserError(
            f"max_duration: {job.recipe.max_duration} is {total} batches, but {checkpoint} has"
            f" done {state['batch']} already; write a longer one, or another run_name"
        )
    if has_adapter(job.recipe):  # checkpoints do not contain the base
        assert fill is not None
        fill(model)
        check_base(model, checkpoint.folder / FOLDER, "model.pretrained")
    loader.resume(state["order"], state["batch"])
    _load_all(checkpoint, model, optimizer, average, world)
    checkpoint.unpin()
    for line in _changes(job.recipe, checkpoint, state):
        job.note(line)
    job.note(f"resuming from {checkpoint}")
    return state


def _anew(average: AveragedWeights | None) -> dict[str, Any]:
    """Return the state of a new run, whose average begins with its weights."""
    if average is not None:
        average.restart()
    return dict(ANEW)


def _load_all(
    checkpoint: Checkpoint,
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    average: AveragedWeights | None,
    world: World,
) -> None:
    """Load a run's tensors; the average of a checkpoint without one begins with its weights."""
    averages = None if average is None else average.tensors
    is_loaded = load_training_state(checkpoint, model, optimizer, averages, world=world)
    if average is not None and not is_loaded:
        average.restart()


def check_start(
    recipe: ResolvedTrainRecipe, tokenizer: Tokenizer, start: StartPoint, world: World
) -> None:
    """Compare the recipe with the checkpoint to begin with, before any data is prepared.

    Every process must call this. The quantization of the base is compared later (`fill_weights`),
    with the model.

    Raises:
        UserError: the checkpoint belongs to another model, tokenizer or kind of run.
    """
    checkpoint = start.checkpoint
    if checkpoint is not None:
        state = on_rank0(world, lambda: read_state(checkpoint))
        _refuse_changes(start, state, _recipe_identity(recipe, tokenizer))


def _refuse_changes(start: StartPoint, state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise if a checkpoint does not fit what the run is.

    Args:
        start: the checkpoint, and what is loaded of it.
        state: state.json of the checkpoint.
        identity: `run_identity` of the run, or a part of it.
    """
    if "order" not in state and not start.weights_only:
        raise UserError(
            f"load_weights_only: {start.checkpoint} holds weights alone; write"
            " load_weights_only=true"
        )
    then = _defaults() | state["identity"]  # earlier versions lack some keys
    keys = [k for k in identity if k.startswith("model.") or not start.weights_only]
    changed = [k for k in keys if then.get(k) != identity[k]]
    if "adapter.name" in changed:  # all other keys of an adapter came or went with it
        changed = ["adapter.name"]
    if changed:
        raise UserError(
            *(
                f"{key}: {identity[key]}, but checkpoint {start.checkpoint} was trained with"
                f" {then.get(key)}; write that, or another run_name"
                for key in changed
            )
        )


def _defaults() -> dict[str, Any]:
    """Return the defaults of the settings of model and adapter, by their dotted keys."""
    model = flat(dataclasses.asdict(ModelConfig()), "model")
    return dict(model) | dict(flat(dataclasses.asdict(AdapterConfig()), "adapter"))


def _changes(
    recipe: ResolvedTrainRecipe, checkpoint: Checkpoint, state: dict[str, Any]
) -> Iterator[str]:
    """Return a line for every training setting that differs from the checkpoint's."""
    then = state["settings"]  # not from recipe.yaml, whose values may come from the environment
    defaults = type(recipe)().training_settings()  # for keys that the checkpoint lacks
    for key, value in recipe.training_settings().items():
        if then.get(key, defaults.get(key)) != value:
            yield f"{key}: {then.get(key)} until {checkpoint.name}, {value} from here on"


def roll_back(trainer: Trainer, spike: int) -> ResumeStep:
    """Roll back before a spike: load an older checkpoint and skip the batches after it.

    The order of batches is a pure function of the number of samples that each stream has given.
    Batches are skipped by counting their samples as given; checkpoints contain these counts, so a
    later resume needs nothing else. A run that is killed before its next save loads the same
    checkpoint, reaches the same spike and decides the same. All ranks call this while no thread
    reads the loader.

    Args:
        trainer: the run; its model, optimizer and loader state are loaded.
        spike: number of steps before the one that spiked; the weights are those before it.
    """
    checkpointer, loader, world = trainer.checkpointer, trainer.loader, trainer.world
    config = trainer.recipe.callbacks.watch
    checkpoint = checkpointer.find(spike - config.roll_back_steps)
    batch, state = spike, dict[str, Any]()
    if checkpoint is not None:
        state = on_rank0(world, lambda: read_state(checkpoint))
        batch = int(state["batch"])
        loader.resume(state["order"], batch)
        model, optimizer = trainer.root.model, trainer.optimizer
        _load_all(checkpoint, model, optimizer, trainer.average, world)
        checkpoint.unpin()
    skipped = spike + 1 + config.roll_back_skip - batch
    loader.skip(batch, skipped)
    checkpointer.forget_after(batch)
    return ResumeStep(batch, skipped, checkpoint.name if checkpoint is not None else "", state)


WIDE = "fp32 or amp_bf16"  # both keep fp32 weights, so a run may change between them


def run_identity(job: RunContext) -> dict[str, Any]:
    """Return the settings that must not change on resume, apart from the order of the data.

    Weights and optimizer state of another dtype would be rounded silently on loading.
    """
    recipe = job.recipe
    return {
        **_recipe_identity(recipe, job.tokenizer),
        **(quantization(job.root.model) if has_adapter(recipe) else {}),
    }


def _recipe_identity(recipe: ResolvedTrainRecipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """The part of `run_identity` that needs no model."""
    return {
        "precision": "bf16" if recipe.precision == "bf16" else WIDE,
        "global_train_batch_size": recipe.global_train_batch_size,
        "data.attend_across_documents": recipe.data.attend_across_documents,
        "tokenizer": tokenizer.fingerprint,
        "optimizer.name": recipe.optimizer.name,
        "optimizer.moments": "int8" if recipe.optimizer.moments == "int8" else None,
        "optimizer.disable_grad": recipe.optimizer.disable_grad,
        **model_identity(recipe.model),
        **_finetuning_identity(recipe),
    }


def _finetuning_identity(recipe: ResolvedTrainRecipe) -> dict[str, Any]:
    """Return the same for fine-tuning: which parameters exist, and which are trained."""
    if not isinstance(recipe, ResolvedFinetuneRecipe):
        return {}
    adapter = flat(dataclasses.asdict(recipe.adapter), "adapter")
    return {**dict(adapter), "freeze": recipe.freeze, "preference.name": recipe.preference.name}


def check_same_recipe(recipe: ResolvedTrainRecipe, world: World) -> None:
    """Compare the settings of all ranks, except paths and settings of a machine.

    Raises:
        UserError: on every rank; names the keys.
    """
    settings = flat(dataclasses.asdict(recipe))
    digests = {
        key: _digest(v) for key, v in settings if not (OF_MACHINE.fullmatch(key) or _is_path(v))
    }
    check_same_on_all_ranks(
        world, digests, advice="start every process with the same recipe and overrides"
    )


def check_same_rows(
    loader: Loader, validation: HeldOut, tokenizer: Tokenizer, world: World
) -> None:
    """Compare the data and tokenizers that all ranks have opened.

    Raises:
        UserError: on every rank; names the difference.
    """
    digests = {
        "tokenizer": tokenizer.fingerprint,
        "data": _digest([loader.n_rows, loader.state(0)]),
        "data.validation": _digest(validation.n_bytes),
    }
    check_same_on_all_ranks(world, digests, advice="every machine must read the same files")


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _is_path(value: Any) -> bool:
    """Return whether a text, or one of a list, is a path on this machine."""
    texts = value if isinstance(value, list) else [value]
    return any(isinstance(text, str) and "/" in text for text in texts)
