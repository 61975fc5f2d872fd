"""`scripts/eval.py`: examine checkpoints, Hugging Face models and endpoints, side by side.

One model after another; each has a folder with results.json and rows.jsonl, and one page shows
them all.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry.build.data import Data, no_held_out, open_held_out
from llmfoundry.build.evaluate import build_evaluate, eval_rows, read_tasks
from llmfoundry.build.job import Job
from llmfoundry.build.start import Loaded, load_checkpoint
from llmfoundry.build.subjects import Outside, check_outside, is_outside, open_outside
from llmfoundry.build.trainer import memory_of_process
from llmfoundry.errors import UserError
from llmfoundry.estimate import choose_microbatch
from llmfoundry.files import whole_file, write_json
from llmfoundry.gauntlet.gauntlet import Answered, Gauntlet
from llmfoundry.gauntlet.results import GauntletResult
from llmfoundry.masking import OPTIONS, public, public_texts
from llmfoundry.parallel.launch import World, join, relaunch
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.eval import EvalConfig
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.recipe.paths import find_file, show
from llmfoundry.recipe.tasks import EvalRecipe
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import keys, missing, require
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
        self.results = public_texts(self.results)
        write_json(self.folder / "results.json", self.results)
        if self.answers:
            with whole_file(self.folder / "rows.jsonl") as file:  # another may write there too
                for part in self.answers:  # a server may answer half a surrogate pair
                    lines = (f"{line}\n" for line in part.lines())
                    file.writelines(line.encode(errors="backslashreplace") for line in lines)
            write_eval_page(self.folder / PAGE, [(self.name, self.results["gauntlet"])])


def evaluate(recipe: EvalRecipe) -> None:
    """Print each model's table, and write results.json, rows.jsonl and the page.

    Raises:
        UserError: a model is not there, found before the first is asked; or the gauntlet or its
            rows cannot be used, found before anything runs for the model that it concerns. What was
            found out about models before it is kept.
        SystemExit: 1, where tasks were asked and not one of them has a score.
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
        if _nothing_was_found(examined):
            console.warn("no model has a score for any task; the problems above say why")
            sys.exit(1)


def _nothing_was_found(examined: Sequence[Examined]) -> bool:
    """Whether tasks were asked, and every one of every model is n/a."""
    results = [found.results["gauntlet"] for found in examined if found.results["gauntlet"]]
    tasks = [task for result in results for task in result["tasks"]]
    return bool(results) and all(task["accuracy"] is None for task in tasks)


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
    if recipe.eval is None:
        require(loaded.recipe, "eval")
    config = dataclasses.replace(recipe.eval or loaded.recipe.eval, icl_max_fraction=None)
    run = dataclasses.replace(
        loaded.recipe,
        precision=recipe.precision or loaded.recipe.precision,
        device_eval_batch_size=recipe.device_eval_batch_size,
        global_train_batch_size=world.size * 8,  # rows that a process evaluates at a time, at most
    )
    rows = choose_microbatch(
        run, world_size=world.size, available=memory_of_process(world), device=world.device
    )
    held_out = _held_out(loaded, run, config, world, console)
    job = Job(run, world, loaded.tokenizer, held_out, loaded.root, rows, console.note)
    found: dict[str, Any] = {"gauntlet": {}}
    answered: list[Answered] = []

    def record(batch: int, result: GauntletResult, answers: list[Answered]) -> None:
        found["gauntlet"] = result.to_json()
        answered.extend(answers)
        console.table(result.table())

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
    logger = recipe.logger or _logger(loaded, console)
    return Examined(name, folder, results, answered, batch, logger)


def _held_out(
    loaded: Loaded, run: TrainRecipe, config: EvalConfig, world: World, console: Console
) -> Data:
    """The run's held-out text; none where it is not measured and cannot be had here.

    A key to a store that is not set here may not be needed: the text may lie on this machine.
    """
    for line in missing(loaded.recipe, f"data.{OPTIONS}"):
        console.note(f"going on without it: {line}")
    others = [f"data.{key}" for key in keys(DataConfig) if key != OPTIONS]
    if not config.validation and missing(loaded.recipe, *others):
        return no_held_out()
    require(loaded.recipe, *others)
    return open_held_out(run, loaded.tokenizer, world)


def _logger(loaded: Loaded, console: Console) -> LoggerConfig | None:
    """The run's, if it went to MLflow and its address can be had here."""
    lines = missing(loaded.recipe, "logger")
    for line in lines:
        console.warn(f"the evaluation is not logged: {line}")
    logger = loaded.recipe.logger
    return logger if logger.mlflow and not lines else None


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
    name = public(model)
    plain = re.sub(r"[^\w.-]+", "_", name).strip("_")
    folder = _folder(recipe, model, Path("runs") / plain / "eval")
    return Examined(name, folder, results, answers, logger=recipe.logger)


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
