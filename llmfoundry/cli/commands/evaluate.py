"""`scripts/eval.py`: print, write and log the scores of models, and compare them on one page."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmfoundry.api.examine import PAGE, Examined, check_models, examine
from llmfoundry.builders.evaluation import check_gauntlet
from llmfoundry.builders.model_layout import join_layout
from llmfoundry.checkpoint.record_sync import send_files
from llmfoundry.cli.commands.launch import launch_evaluation
from llmfoundry.distributed.local_ranks import with_local_ranks
from llmfoundry.files import write_json
from llmfoundry.gauntlet.paired import PairedComparison, compare_rows
from llmfoundry.loggers.console import Console
from llmfoundry.loggers.pages.eval_page import write_eval_page
from llmfoundry.loggers.writers import log_evaluation
from llmfoundry.recipe.after_training import EvalRecipe
from llmfoundry.recipe.eval import EvalConfig
from llmfoundry.recipe.paths import show

DIFFERENCES = "differences.json"


def evaluate(recipe: EvalRecipe) -> None:
    """Print each model's table, and write results.json, rows.jsonl and the page.

    Raises:
        UserError: a model is not there, or the gauntlet or its rows cannot be used with one of
            them; found before the first is asked.
        SystemExit: 1, where tasks were asked and not one of them has a score.
    """
    is_elsewhere = recipe.launch is not None and recipe.launch.target not in ("local", "slurm")
    if not is_elsewhere:
        check_models(recipe)
        check_gauntlet(recipe.eval or EvalConfig())
    if recipe.launch is not None:
        launch_evaluation(recipe)
        return
    with (
        with_local_ranks(recipe.parallel, replicas=True),
        join_layout(recipe.parallel) as (world, layout),
    ):
        console, examined = Console(is_main=world.is_main), list[Examined]()
        for found in examine(recipe, world, layout, console):
            if world.is_main:
                found.write()
                send_files(found.run, found.folder, console.warn)
                _report(console, found, _logged(found, console))
            examined.append(found)
        if world.is_main and len(examined) > 1:
            _compare(recipe, examined, console)
        # Rank 0 alone: an exit of another rank would end rank 0 while it still writes.
        if world.is_main and _nothing_was_found(examined):
            console.warn("no model has a score for any task; the problems above say why")
            sys.exit(1)


def _nothing_was_found(examined: Sequence[Examined]) -> bool:
    """Return whether there are no metrics, or a gauntlet without a score for any task."""
    if not any(found.results["metrics"] for found in examined):
        return True
    results = [found.results["gauntlet"] for found in examined if found.results["gauntlet"]]
    tasks = [task for result in results for task in result["tasks"]]
    return bool(results) and all(task["accuracy"] is None for task in tasks)


def _logged(found: Examined, console: Console) -> list[str]:
    """Log the scores; return the names of the loggers that received them."""
    if found.logger is None:
        return []
    return log_evaluation(found, found.logger, note=console.note, warn=console.warn)


def _report(console: Console, found: Examined, places: Sequence[str]) -> None:
    """Print the scores of a model, and where they are written and logged."""
    metrics: Mapping[str, float] = found.results["metrics"]
    rows = [(key, f"{value:.4f}") for key, value in metrics.items() if "metrics/eval/" in key]
    rows.append(("model", found.name))
    rows.append(("results", found.run.shown(found.folder / "results.json")))
    if found.answers:
        rows.append(("page", found.run.shown(found.folder / PAGE)))
    if places:
        rows.append(("logged", ", ".join(places)))
    console.finish(rows)


def _compare(recipe: EvalRecipe, examined: Sequence[Examined], console: Console) -> None:
    """Write the page of all models, and compare each model with the first on common examples."""
    with_tasks = [model for model in examined if model.results["gauntlet"]]
    parts = [(model.name, model.results["gauntlet"]) for model in with_tasks]
    if len(parts) < 2:
        return
    folder = Path(recipe.output).expanduser() if recipe.output else Path("runs")
    folder.mkdir(parents=True, exist_ok=True)
    comparisons = _paired(with_tasks)
    for comparison in comparisons:
        console.table(comparison.table())
    write_json(folder / DIFFERENCES, [comparison.to_json() for comparison in comparisons])
    links = [model.pages() for model in with_tasks]
    write_eval_page(folder / PAGE, parts, links=links, comparisons=comparisons)
    console.finish([("models", str(len(parts))), ("side by side", show(folder / PAGE))])


def _paired(examined: Sequence[Examined]) -> list[PairedComparison]:
    """Return the paired differences of each model from the first."""
    baseline, *models = (found.judged() for found in examined)
    return [compare_rows(model, baseline) for model in models]
