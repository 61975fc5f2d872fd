"""`scripts/eval.py`: examine checkpoints, Hugging Face models and endpoints, side by side.

One model after another; each has a folder with results.json and rows.jsonl, and one page shows
them all.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry.build.data import open_held_out
from llmfoundry.build.evaluate import build_evaluate, eval_rows, read_tasks
from llmfoundry.build.job import Job
from llmfoundry.build.start import load_checkpoint
from llmfoundry.build.subjects import Outside, check_outside, is_outside, open_outside
from llmfoundry.build.trainer import memory_of_process
from llmfoundry.errors import UserError
from llmfoundry.estimate import choose_microbatch
from llmfoundry.files import write_json
from llmfoundry.gauntlet.gauntlet import Answered, Gauntlet
from llmfoundry.gauntlet.results import GauntletResult
from llmfoundry.parallel.launch import World, join, relaunch
from llmfoundry.recipe.eval import EvalConfig
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.recipe.paths import find_file, show
from llmfoundry.recipe.tasks import EvalRecipe
from llmfoundry.track.console import Console
from llmfoundry.track.eval_page import write_eval_page
from llmfoundry.track.eval_session import log_evaluation
from llmfoundry.train.checkpoint import list_checkpoints

PAGE = "gauntlet.html"


@dataclass
class Examined:
    """What was found out about one model.

    Attributes:
        name: in tables and on the page.
        folder: where it is written down.
        results: results.json.
        answers: what the gauntlet asked, and what was answered.
        batch: of a checkpoint; 0 elsewhere.
        logger: where metrics go as well; None: nowhere.
    """

    name: str
    folder: Path
    results: dict[str, Any]
    answers: list[Answered]
    batch: int = 0
    logger: LoggerConfig | None = None

    def write(self) -> None:
        """results.json, rows.jsonl and the page, and the loggers'; of the main process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "results.json", self.results)
        if self.answers:
            rows = self.folder / "rows.jsonl"
            # JSON spells half a surrogate pair, which a server may answer, as Python escapes it
            with rows.open("w", encoding="utf-8", errors="backslashreplace") as file:
                for part in self.answers:
                    file.writelines(f"{line}\n" for line in part.lines())
            write_eval_page(self.folder / PAGE, [(self.name, self.results["gauntlet"])])


def evaluate(recipe: EvalRecipe) -> None:
    """Print each model's table, and write results.json, rows.jsonl and the page.

    Raises:
        UserError: a model is not there, found before the first is asked; or the gauntlet or its
            rows cannot be used, found before anything runs for the model that it concerns. What was
            found out about models before it is kept.
    """
    _check_models(recipe)
    relaunch(ParallelConfig())
    with join(ParallelConfig()) as world:
        console = Console(is_main=world.is_main)
        examined: list[Examined] = []
        for model in recipe.all_models():
            look = _outside if is_outside(model) else _checkpoint
            found = look(recipe, model, world, console)
            if world.is_main:
                found.write()
                if found.logger is not None:
                    log_evaluation(found, found.logger, note=console.note, warn=console.warn)
                _tell(console, found)
            examined.append(found)
        if world.is_main and len(examined) > 1:
            _compare(recipe, examined, console)


def _check_models(recipe: EvalRecipe) -> None:
    """Every model that is not there, at once."""
    problems: list[str] = []
    for model in recipe.all_models():
        try:
            if not is_outside(model):
                path = find_file(model, "models" if model in recipe.models else "checkpoint")
                if path.parent.name != "checkpoints" and not list_checkpoints(path):
                    raise UserError(
                        f"{model}: holds no checkpoint; write a run's folder, or a checkpoint's"
                    )
                continue
            if recipe.eval is None or recipe.eval.gauntlet is None:
                raise UserError(
                    f"eval: {model} has no run that says what to measure; write eval=v0.3, another"
                    " choice of yamls/eval, or eval.gauntlet=FILE"
                )
            check_outside(model, recipe.eval.icl_seq_len)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)


def _tell(console: Console, found: Examined) -> None:
    metrics: Mapping[str, float] = found.results["metrics"]
    shown = [(key, f"{value:.4f}") for key, value in metrics.items() if "metrics/eval/" in key]
    page = [("page", show(found.folder / PAGE))] * bool(found.answers)
    results = ("results", show(found.folder / "results.json"))
    console.finish([*shown, ("model", found.name), results, *page])


def _compare(recipe: EvalRecipe, examined: Sequence[Examined], console: Console) -> None:
    """A page with all of them."""
    parts = [(e.name, e.results["gauntlet"]) for e in examined if e.results["gauntlet"]]
    if len(parts) < 2:
        return
    folder = Path(recipe.output).expanduser() if recipe.output else Path("runs")
    folder.mkdir(parents=True, exist_ok=True)
    write_eval_page(folder / PAGE, parts)
    console.finish([("models", str(len(parts))), ("side by side", show(folder / PAGE))])


def _checkpoint(recipe: EvalRecipe, path: str, world: World, console: Console) -> Examined:
    """One of our own, measured as its run would."""
    loaded = load_checkpoint(path, world, note=console.note, precision=recipe.precision)
    run = dataclasses.replace(
        loaded.recipe,
        precision=recipe.precision or loaded.recipe.precision,
        device_eval_batch_size=recipe.device_eval_batch_size,
        global_train_batch_size=world.size * 8,  # rows that a process evaluates at a time, at most
    )
    rows = choose_microbatch(
        run, world_size=world.size, available=memory_of_process(world), device=world.device
    )
    held_out = open_held_out(run, loaded.tokenizer, world)
    job = Job(run, world, loaded.tokenizer, held_out, loaded.root, rows, console.note)
    found: dict[str, Any] = {"gauntlet": {}}
    answered: list[Answered] = []

    def record(batch: int, result: GauntletResult, answers: list[Answered]) -> None:
        found["gauntlet"] = result.to_json()
        answered.extend(answers)
        console.table(result.table())

    config = dataclasses.replace(recipe.eval or run.eval, icl_max_fraction=None)
    measure = build_evaluate(
        job,
        config,
        rows=eval_rows(run, rows),
        record=record,
        generate=True,
        is_trained=loaded.is_trained,
    )
    batch = int(loaded.state["batch"])
    metrics = measure(batch)
    folder = _folder(recipe, path, loaded.folder.parents[1] / "eval" / loaded.folder.name)
    results = {"checkpoint": show(loaded.folder), "time/batch": batch, "metrics": metrics, **found}
    name = f"{loaded.folder.parents[1].name} {loaded.folder.name}"
    logger = recipe.logger or run.logger
    return Examined(name, folder, results, answered, batch, logger if logger.mlflow else None)


def _outside(recipe: EvalRecipe, model: str, world: World, console: Console) -> Examined:
    """A Hugging Face model or an endpoint: the gauntlet alone."""
    assert recipe.eval is not None, "checked before"
    outside = open_outside(model, recipe, world)
    gauntlet = _tasks(recipe.eval, outside, recipe, console.note)
    started = time.perf_counter()
    result, answers = gauntlet.run(outside.subject)
    console.table(result.table())
    for note in outside.notes():
        console.note(f"{model}: {note}")
    results = {
        "model": model,
        "seconds": time.perf_counter() - started,
        "metrics": result.metrics(),
        "gauntlet": result.to_json(),
    }
    plain = re.sub(r"[^\w.-]+", "_", model).strip("_")
    folder = _folder(recipe, model, Path("runs") / plain / "eval")
    return Examined(model, folder, results, answers, logger=recipe.logger)


def _tasks(
    config: EvalConfig, outside: Outside, recipe: EvalRecipe, note: Callable[[str], None]
) -> Gauntlet:
    gauntlet = read_tasks(
        config,
        outside.asking,
        generate=True,
        validation_texts=None,
        cache_folder=recipe.cache_folder,
        note=note,
    )
    assert gauntlet is not None
    return gauntlet


def _folder(recipe: EvalRecipe, model: str, default: Path) -> Path:
    """The recipe's choice, with a folder for each of several models; else beside the model."""
    if recipe.output is None:
        return default
    folder = Path(recipe.output).expanduser()
    models = recipe.all_models()
    return folder if len(models) == 1 else folder / f"{models.index(model) + 1}"
