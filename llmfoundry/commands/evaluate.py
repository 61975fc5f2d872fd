"""`scripts/eval.py`: measure a checkpoint as its run would."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from llmfoundry.build.evaluate import build_evaluate, eval_rows
from llmfoundry.build.job import Job
from llmfoundry.build.start import Loaded, load_checkpoint
from llmfoundry.build.trainer import memory_of_process
from llmfoundry.data.prepare import prepare
from llmfoundry.estimate import choose_microbatch
from llmfoundry.gauntlet.categories import GauntletResult
from llmfoundry.parallel.launch import World, join, relaunch
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.recipe.paths import show
from llmfoundry.recipe.tasks import EvalRecipe
from llmfoundry.track.console import Console
from llmfoundry.track.loggers import write_json


def evaluate(recipe: EvalRecipe) -> None:
    """Print the gauntlet's table and the validation loss, and write results.json."""
    assert recipe.checkpoint is not None
    relaunch(ParallelConfig())
    with join(ParallelConfig()) as world:
        console = Console(is_main=world.is_main)
        loaded = load_checkpoint(
            recipe.checkpoint, world, note=console.note, precision=recipe.precision
        )
        results = _measure(recipe, loaded, world, console)
        if world.is_main:
            file = _output(recipe, loaded)
            write_json(file, results)
            shown = [(k, f"{v:.4f}") for k, v in results["metrics"].items() if "metrics/eval" in k]
            console.finish([*shown, ("checkpoint", show(loaded.folder)), ("results", show(file))])


def _measure(recipe: EvalRecipe, loaded: Loaded, world: World, console: Console) -> dict[str, Any]:
    """Metrics and the gauntlet's whole result; every process takes part."""
    run = dataclasses.replace(
        loaded.recipe,
        precision=recipe.precision or loaded.recipe.precision,
        device_eval_batch_size=recipe.device_eval_batch_size,
        global_train_batch_size=world.size * 8,  # rows that a process evaluates at a time, at most
    )
    rows = choose_microbatch(
        run, world_size=world.size, available=memory_of_process(world), device=world.device
    )
    prepared = prepare(run.data, loaded.tokenizer, progress=world.is_main)
    job = Job(run, world, loaded.tokenizer, prepared, loaded.root, rows, console.note)
    gauntlet: dict[str, Any] = {}

    def record(batch: int, result: GauntletResult) -> None:
        gauntlet.update(result.to_json())
        console.table(result.table())

    config = recipe.eval or run.eval
    measure = build_evaluate(job, config, rows=eval_rows(run, rows), record=record)
    batch = int(loaded.state["batch"])
    return {
        "checkpoint": show(loaded.folder),
        "time/batch": batch,
        "metrics": measure(batch),
        "gauntlet": gauntlet,
    }


def _output(recipe: EvalRecipe, loaded: Loaded) -> Path:
    """Where results go: the recipe's choice, else runs/<name>/eval/<checkpoint>/results.json."""
    if recipe.output is None:
        folder = loaded.folder.parents[1] / "eval" / loaded.folder.name
    else:
        folder = Path(recipe.output).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "results.json"
