"""A checkpoint opened by itself: its recipe, its tokenizer and its model, to be asked or exported.

`scripts/eval.py`, `generate`, `chat`, `serve` and `convert` call `open_checkpoint`. All but the
weights is read at once, so that a mistake costs nothing; the function that comes with it loads
those, of an adapter's run its base's too. A `ModelLayout` distributes the model over processes; the
weights are then read straight into each rank's shards, whatever layout the model was trained on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from llmfoundry.builders.adapter import FOLDER, adapt, check_base, has_adapter
from llmfoundry.builders.model import attention_refusal, build_root, loaded_precision
from llmfoundry.builders.model_layout import ModelLayout, full_model
from llmfoundry.builders.pretrained import base_of, open_pretrained, read_model
from llmfoundry.checkpoint.load import (
    check_averages,
    check_weights,
    load_adapter,
    load_weights,
    read_state,
)
from llmfoundry.checkpoint.open_run import find_place
from llmfoundry.checkpoint.storage import Checkpoint
from llmfoundry.checkpoint.verify import ChecksumSelection, find_checkpoint
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Root
from llmfoundry.recipe.eval import EMA, WEIGHTS
from llmfoundry.recipe.finetune import FinetuneRecipe, ResolvedFinetuneRecipe, load_run
from llmfoundry.recipe.model import ResolvedModelConfig
from llmfoundry.recipe.schema import check_fields
from llmfoundry.recipe.train import ResolvedTrainRecipe, TrainRecipe
from llmfoundry.recipe.typed import flat, know_secrets, require


def model_identity(config: ResolvedModelConfig) -> dict[str, Any]:
    """Every setting of a model by its dotted key, but for how its layers are computed."""
    settings = dict(flat(dataclasses.asdict(config), "model"))
    how = (".attn_impl", ".moe_impl")
    return {key: value for key, value in settings.items() if not key.endswith(how)}


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint ready to use."""

    checkpoint: Checkpoint
    recipe: ResolvedTrainRecipe
    """Filled."""
    root: Root
    tokenizer: Tokenizer
    state: dict[str, Any]
    layout: ModelLayout = field(default_factory=full_model)

    @property
    def folder(self) -> Path:
        """The checkpoint's, on this machine."""
        return self.checkpoint.folder

    @property
    def weights(self) -> str:
        """Which weights are loaded: trained or ema."""
        return EMA if self.checkpoint.averaged else WEIGHTS[0]

    @property
    def score_name(self) -> str:
        """Name of the folder of these weights' scores below eval/ in the run's folder."""
        is_default = self.weights == self.recipe.eval.weights
        return self.checkpoint.name if is_default else f"{self.checkpoint.name}-{self.weights}"

    @property
    def is_trained(self) -> bool:
        """Whether it was trained here, rather than imported as another's."""
        return "order" in self.state or bool(self.state.get("is_trained"))


def load_checkpoint(
    path: str,
    world: World,
    *,
    note: Callable[[str], None],
    precision: str | None = None,
    layout: ModelLayout | None = None,
    weights: str | None = None,
) -> LoadedCheckpoint:
    """What `open_checkpoint` opens, with its weights."""
    loaded, fill = open_checkpoint(
        path, world, note=note, precision=precision, layout=layout, weights=weights
    )
    fill()
    return loaded


def open_checkpoint(
    path: str,
    world: World,
    *,
    note: Callable[[str], None],
    precision: str | None = None,
    layout: ModelLayout | None = None,
    weights: str | None = None,
) -> tuple[LoadedCheckpoint, Callable[[], None]]:
    """The model, tokenizer and recipe at `path`: a run's folder or one checkpoint's.

    Attention that was trained with a backend that this device lacks is served by another here.

    Returns:
        The model without its weights, and a function that loads them.

    Args:
        path: where to look.
        world: this process.
        note: reports checkpoints that are passed over.
        precision: of the loaded weights; None: see `loaded_precision`.
        layout: how the model is distributed over processes; None: this process holds all of it.
        weights: trained, or ema for their average; None: those that the run evaluates.

    Raises:
        UserError: there is no complete checkpoint at `path`, its recipe takes a setting of the
            model from a variable that is not set here, or the model cannot be sharded this way.
    """
    layout = layout or full_model()
    place = find_place(path, "checkpoint", world)
    sums = ChecksumSelection.of(weights)
    checkpoint = find_checkpoint(place, note=note, sums=sums, world=world)
    if checkpoint is None:
        raise UserError(f"checkpoint: {place} holds no complete checkpoint; write a run's folder")
    folder = checkpoint.folder

    def read_files() -> tuple[TrainRecipe, Tokenizer, ResolvedModelConfig | None]:
        user_recipe = load_run(folder / "recipe.yaml")
        require(user_recipe, "model", "precision", "max_seq_len", "global_train_batch_size")
        model = read_model(checkpoint) if isinstance(user_recipe, FinetuneRecipe) else None
        return user_recipe, Tokenizer.load(folder / "tokenizer"), model

    user_recipe, tokenizer, model = on_rank0(world, read_files)
    problems = [*check_fields("model.", user_recipe.model)]
    if problems:
        raise UserError(*(f"{checkpoint}/recipe.yaml: {line}" for line in problems))
    know_secrets(user_recipe)
    recipe = user_recipe.resolve()
    if (weights or recipe.eval.weights) == EMA:
        check_averages(checkpoint, "eval.weights" if weights is None else "weights", world)
        checkpoint.averaged = True
    recipe.parallel = layout.config
    recipe.model = model or recipe.model
    recipe.precision = loaded_precision(precision, recipe.precision, world, note)
    reason = attention_refusal(recipe, world.device)
    if reason is not None:
        recipe.model.attn_config.attn_impl = "auto"
        note(f"model.attn_config.attn_impl: auto here; {reason}")
    tokenizer.split_special_tokens = recipe.tokenizer.split_special_tokens
    recipe.model.fill(vocab_size=tokenizer.vocab_size)
    state = on_rank0(world, lambda: read_state(checkpoint))
    _check_same_model(checkpoint, recipe.model, state["identity"])
    layout.check(recipe.model)
    root = build_root(recipe)
    loaded = LoadedCheckpoint(checkpoint, recipe, root.eval(), tokenizer, state, layout)
    return loaded, partial(_fill_loaded, loaded, world, note)


def _check_same_model(
    checkpoint: Checkpoint, model: ResolvedModelConfig, identity: Mapping[str, Any]
) -> None:
    """Raise a UserError if a variable gives the recipe another model than the one that trained."""
    for key, value in model_identity(model).items():
        then = identity.get(key, value)
        if value != then:
            raise UserError(
                f"{key}: {value} by {checkpoint}/recipe.yaml, but it was trained with {then};"
                " set the variable that the recipe names to that"
            )


def _fill_loaded(loaded: LoadedCheckpoint, world: World, note: Callable[[str], None]) -> None:
    """Weights of a checkpoint, or of an adapter's base and the adapter."""
    checkpoint, root = loaded.checkpoint, loaded.root
    if has_adapter(loaded.recipe):
        _fill_adapted(loaded, world, note)
    else:
        table = check_weights(checkpoint, root.model, world=world)
        _allocate(loaded, world)
        load_weights(checkpoint, root.model, world=world, table=table)
    checkpoint.unpin()


def _fill_adapted(loaded: LoadedCheckpoint, world: World, note: Callable[[str], None]) -> None:
    assert isinstance(loaded.recipe, ResolvedFinetuneRecipe)
    folder, model = loaded.folder, loaded.root.model
    adapt(model, loaded.recipe, checkpoint=folder)
    _allocate(loaded, world)
    open_pretrained(base_of(loaded.recipe.base, folder), world, note=note).fill(model)
    check_base(model, folder / FOLDER, "model.pretrained")
    load_adapter(loaded.checkpoint, model, world=world)


def _allocate(loaded: LoadedCheckpoint, world: World) -> None:
    """Allocate this rank's shards of the model, without values."""
    loaded.layout.place(loaded.root, world, precision=loaded.recipe.precision)
