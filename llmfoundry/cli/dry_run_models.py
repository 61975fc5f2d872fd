"""`--dry-run` of eval, generate, chat, serve, convert and average: what they would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llmfoundry.api.averaging import open_sources
from llmfoundry.api.conversion import check_destination
from llmfoundry.api.examine import check_models, check_prompts, with_addresses
from llmfoundry.api.external_models import is_outside
from llmfoundry.api.generation import chosen_template
from llmfoundry.builders.evaluation import check_gauntlet
from llmfoundry.builders.model import attention_refusal
from llmfoundry.builders.open_model import check_model, is_adapter, is_hugging_face, not_a_run
from llmfoundry.builders.registry import find_address
from llmfoundry.checkpoint.load import check_averages
from llmfoundry.checkpoint.object_storage import is_url
from llmfoundry.checkpoint.open_run import find_place
from llmfoundry.checkpoint.verify import ChecksumSelection, find_checkpoint
from llmfoundry.cli.commands.serve import chat_template
from llmfoundry.cli.inference_plan import run_memory_lines
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.files import refuse_used
from llmfoundry.loggers.console import Console
from llmfoundry.recipe.after_training import (
    AverageRecipe,
    ChatRecipe,
    ConvertRecipe,
    EvalRecipe,
    GenerateRecipe,
    SamplingRecipe,
    ServeRecipe,
)
from llmfoundry.recipe.eval import EMA, EvalConfig
from llmfoundry.recipe.finetune import FinetuneRecipe, load_run
from llmfoundry.recipe.hardware import Hardware
from llmfoundry.recipe.paths import find_shipped, show

Rows = Iterator[tuple[str, str]]
CPU = torch.device("cpu")


def plan_evaluation(recipe: EvalRecipe, hardware: Hardware | None = None) -> Rows:
    """Yield the plan of scripts/eval.py."""
    recipe, _ = with_addresses(recipe, ALONE, lambda line: None)
    check_models(recipe)
    check_gauntlet(recipe.eval or EvalConfig())
    for number, model in enumerate(recipe.all_models()):
        yield "" if number else "models", model
        if not is_outside(model):
            yield from run_memory_lines(model, recipe, hardware, replicas=True)
    if recipe.launch is not None:
        yield "runs", f"as a job of one machine, launched on {recipe.launch.target}"
    if recipe.eval is None:
        yield "measured", "what each run measured itself"
    elif recipe.eval.gauntlet is not None:
        yield "gauntlet", show(find_shipped(recipe.eval.gauntlet, "eval.gauntlet"))
    unchecked = [*check_prompts(recipe, ALONE, Console(is_main=False)), "held-out text"]
    yield "checked", "recipe, files of the gauntlet, models on this machine and their prompts"
    yield "not checked", ", ".join(unchecked)
    yield "results", recipe.output or "beside each run, eval/<batch>/"


def plan_drawing(recipe: SamplingRecipe, hardware: Hardware | None = None) -> Rows:
    """Yield the plan of scripts/generate.py or scripts/chat.py."""
    recipe.fill()
    name = _named(recipe)
    yield from _any_model(name, recipe.precision, recipe.weights)
    yield from run_memory_lines(name, recipe, hardware)
    if isinstance(recipe, ChatRecipe) or (
        isinstance(recipe, GenerateRecipe) and recipe.message is not None
    ):
        yield from _template(name, partial(chosen_template, recipe))
    how = "the likeliest token" if recipe.temperature == 0 else f"temperature {recipe.temperature}"
    yield "writes", f"at most {recipe.max_new_tokens:,} tokens, {how}"


def plan_serving(recipe: ServeRecipe, hardware: Hardware | None = None) -> Rows:
    """Yield the plan of scripts/serve.py."""
    name = _named(recipe)
    yield from _any_model(name, recipe.precision, recipe.weights)
    yield from run_memory_lines(name, recipe, hardware, slots=recipe.slots)
    yield from _template(name, partial(chat_template, recipe))
    key = "none" if recipe.read_key() is None else "asked for"
    yield "at", f"{recipe.host}, port {recipe.port or 'that is free'}; API key: {key}"
    yield "answers", f"{recipe.slots} at a time, {recipe.max_waiting} may wait"


def _template(name: str, choose: Callable[[Tokenizer], Any]) -> Rows:
    """Check the chat template of a run on this machine; other models are not opened.

    Args:
        name: checkpoint of the recipe.
        choose: function of the tokenizer that returns the template, or raises a UserError.
    """
    if is_url(name) or is_hugging_face(name) or is_adapter(name):
        yield "not checked", "the chat template, which is the model's"
        return
    place = find_place(name, "checkpoint", ALONE)
    checkpoint = find_checkpoint(place, note=lambda line: None)
    assert checkpoint is not None, "_checkpoint has found it"
    choose(Tokenizer.load(checkpoint.folder / "tokenizer"))
    yield "checked", "the recipe, what is listed above, and the chat template"


def plan_conversion(recipe: ConvertRecipe) -> Rows:
    """Yield the plan of scripts/convert.py."""
    check_destination(recipe)
    if recipe.from_ is None:
        yield from _checkpoint(_named(recipe), recipe.weights)
    else:
        yield "from", f"{_named(recipe)}, a Hugging Face model"
    output = Path(str(recipe.output)).expanduser()
    yield "to", f"{output}, as {recipe.to or 'a run of ours'}"


def _named(recipe: SamplingRecipe | ServeRecipe | ConvertRecipe) -> str:
    """Return the address of a recipe's checkpoint; a version of a registry is looked up."""
    name, uri = str(recipe.checkpoint), recipe.registry.uri
    return find_address(name, "checkpoint", uri=uri, note=lambda line: None)


def _any_model(name: str, precision: str | None, weights: str | None = None) -> Rows:
    """Yield the checkpoint of a run, a Hugging Face model or an adapter."""
    if is_hugging_face(name) or is_adapter(name):
        if weights is not None:
            raise not_a_run(weights)
        check_model(name)
        kind = "a Hugging Face model" if is_hugging_face(name) else "an adapter"
        yield "model", f"{name}, {kind}, {precision or 'fp32'}"
    else:
        yield from _checkpoint(name, weights)


def _checkpoint(path: str, weights: str | None = None) -> Rows:
    """Yield a run's newest complete checkpoint, its model and its attention kernels."""
    place = find_place(path, "checkpoint", ALONE)
    sums = ChecksumSelection.of(weights)
    if is_url(path):
        sums = ChecksumSelection.RECORD  # to check the weights, they would have to be downloaded
    checkpoint = find_checkpoint(place, note=lambda line: None, sums=sums)
    if checkpoint is None:
        raise UserError(f"checkpoint: {place} holds no complete checkpoint; write a run's folder")
    recipe = load_run(checkpoint.folder / "recipe.yaml")
    if (weights or recipe.eval.weights) == EMA:
        check_averages(checkpoint, "weights" if weights else "eval.weights", ALONE)
    yield "checkpoint", str(checkpoint)
    yield "model", f"{recipe.model.name}, {recipe.precision}"
    if not isinstance(recipe, FinetuneRecipe):
        reason = attention_refusal(recipe.resolve(), CPU)
        if reason is not None:
            yield "attention", f"auto here; {reason}"


def plan_averaging(recipe: AverageRecipe) -> Rows:
    """Yield the plan of scripts/average.py."""
    output = Path(str(recipe.output)).expanduser()
    refuse_used(output)
    for source in open_sources(recipe, lambda line: None):
        yield "checkpoint", f"{source.loaded.checkpoint}, {source.share:.4g} of the average"
    yield "to", f"{show(output)}, as a run of ours"
