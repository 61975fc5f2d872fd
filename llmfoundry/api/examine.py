"""Evaluation of checkpoints, Hugging Face models, endpoints and models that a program holds.

Entry point: `examine`, which `cli/commands/evaluate.py` and `api/evaluation.py` call. Everything
but the weights is read first, of all models, and their questions are made, so that a mistake costs
no computation. Then the models are evaluated one after another.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from llmfoundry.api.external_models import ExternalModel, check_outside, is_outside, open_outside
from llmfoundry.builders.checkpoint import LoadedCheckpoint, open_checkpoint
from llmfoundry.builders.data import RunData, no_held_out, open_held_out
from llmfoundry.builders.evaluation import (
    build_evaluate,
    evaluation_rows,
    open_gauntlet,
    read_tasks,
)
from llmfoundry.builders.model_layout import ModelLayout, full_model
from llmfoundry.builders.open_model import (
    OpenedModel,
    is_endpoint,
)
from llmfoundry.builders.registry import find_address, is_version, score_link, store_uri
from llmfoundry.builders.run_context import RunContext, eval_rows
from llmfoundry.checkpoint.object_storage import is_url
from llmfoundry.checkpoint.open_run import find_place
from llmfoundry.checkpoint.record_sync import read_record
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.distributed.process_group import ALONE, World
from llmfoundry.errors import UserError
from llmfoundry.events import CHECKPOINTS
from llmfoundry.files import atomic_file, write_json
from llmfoundry.gauntlet.gauntlet import Gauntlet, TaskAnswers
from llmfoundry.gauntlet.paired import ModelAnswers
from llmfoundry.gauntlet.results import GauntletResult
from llmfoundry.loggers.background_queue import DeferredTask
from llmfoundry.loggers.console import Console
from llmfoundry.loggers.pages.eval_page import write_eval_page
from llmfoundry.recipe.after_training import EvalRecipe
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.eval import EMA, EvalConfig
from llmfoundry.recipe.logger import LOGGERS, LoggerConfig
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.recipe.typed import missing, require
from llmfoundry.redaction import OPTIONS, public, public_texts

PAGE, REPORT = "gauntlet.html", "report.html"
T = TypeVar("T")


@dataclass
class Examined:
    """What was found out about one model.

    Attributes:
        name: in tables and on the page.
        folder: where it is written down.
        run: where its run is kept; of a model from elsewhere `folder`.
        results: results.json.
        answers: what the gauntlet asked, and what was answered.
        batch: of a checkpoint; 0 elsewhere.
        logger: where metrics go as well; None: nowhere.
        report: the page of its run, if it has one.
        link: gives its scores to the version that it is of a registered model.
    """

    name: str
    folder: Path
    run: Storage
    results: dict[str, Any]
    answers: list[TaskAnswers]
    batch: int = 0
    logger: LoggerConfig | None = None
    report: Path | None = None
    link: DeferredTask | None = None

    def pages(self) -> dict[str, Path]:
        """What a page about it links to, in words."""
        answers = {"answers": self.folder / PAGE} if self.answers else {}
        there = self.report is not None and self.report.exists()
        return {**answers, **({"run": self.report} if self.report and there else {})}

    def judged(self) -> ModelAnswers:
        """Return the judged answers, for paired comparisons."""
        return ModelAnswers.of(self.name, self.results.get("gauntlet") or {}, self.answers)

    def write(self) -> None:
        """results.json, rows.jsonl and the page, and the loggers'; of the main process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results = public_texts(self.results)
        write_json(self.folder / "results.json", self.results)
        if self.answers:
            with atomic_file(self.folder / "rows.jsonl") as file:  # another may write there too
                for part in self.answers:  # a server may answer half a surrogate pair
                    lines = (f"{line}\n" for line in part.lines())
                    file.writelines(line.encode(errors="backslashreplace") for line in lines)
            report = {key: to for key, to in self.pages().items() if key == "run"}
            alone = [(self.name, self.results["gauntlet"])]
            write_eval_page(self.folder / PAGE, alone, links=[report])


Live = Mapping[str, OpenedModel]
"""Models that a program holds, by the names that a recipe gives them. `load` returns each as it is
in memory."""
_NONE: Live = MappingProxyType({})


def examine(
    recipe: EvalRecipe, world: World, layout: ModelLayout, console: Console, live: Live = _NONE
) -> Iterator[Examined]:
    """Yield what is found out about each model, in the recipe's order; every process calls it.

    The questions of all models are made before the first one is asked. The weights of a model are
    freed before those of the next are loaded.

    Raises:
        UserError: the gauntlet or its rows cannot be used with one of the models.
    """
    recipe, named = with_addresses(recipe, world, console.note, live)
    waiting = _ready(recipe, named, world, layout, console, live)
    while waiting:
        yield waiting.popleft()()
        gc.collect()  # a sharded model is in reference cycles


def with_addresses(
    recipe: EvalRecipe, world: World, note: Callable[[str], None], live: Live = _NONE
) -> tuple[EvalRecipe, dict[str, str]]:
    """A recipe with the addresses of versions in place of their names.

    Returns:
        The recipe, and the registered models by those addresses.
    """

    def look(name: str, key: str) -> str:
        if name in live:
            return name
        return find_address(name, key, world, uri=recipe.registry.uri, note=note)

    first = recipe.checkpoint and look(recipe.checkpoint, "checkpoint")
    models = [look(model, "models") for model in recipe.models]
    found = replace(recipe, checkpoint=first, models=models)
    pairs = zip(found.all_models(), recipe.all_models(), strict=True)
    return found, {at: re.split("[:@/]+", name)[1] for at, name in pairs if is_version(name)}


def check_models(recipe: EvalRecipe, live: Live = _NONE) -> None:
    """Every model that is not there, at once; versions of a registry are looked for later."""
    problems: list[str] = []
    for model in recipe.all_models():
        try:
            if is_version(model) or (model in live and not _is_outside(model, live)):
                continue
            if not _is_outside(model, live):
                key = "models" if model in recipe.models else "checkpoint"
                if is_url(model) and "RANK" in os.environ:
                    continue  # looked for before this process was started, or when it is opened
                place = find_place(model, key, ALONE)
                has_some = isinstance(place, Storage) and place.checkpoints()
                if place.folder.parent.name != CHECKPOINTS and not has_some:
                    raise UserError(
                        f"{model}: holds no checkpoint; write a run's folder, or a checkpoint's"
                    )
                continue
            has_run = recipe.eval is None and not all(
                _is_outside(name, live) for name in recipe.all_models()
            )
            if not has_run and (recipe.eval is None or recipe.eval.gauntlet is None):
                raise _no_run(model)
            if model not in live:
                check_outside(model, None if recipe.eval is None else recipe.eval.icl_seq_len)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)


def _no_run(model: str) -> UserError:
    return UserError(
        f"eval: {model} has no run that says what to measure; write eval=v0.3, another choice of"
        " yamls/eval, or eval.gauntlet=FILE"
    )


@dataclass(frozen=True)
class _Run:
    """One of our own, of which all is read but the weights.

    Attributes:
        name: as the user wrote it.
        loaded: the checkpoint.
        recipe: its run's, as it is measured here.
        config: what is measured.
        gauntlet: its tasks, except those of held-out text.
        held_out: opens its run's text, once; every process calls it.
        rows: of max_seq_len evaluated at a time.
        fill: loads the weights.
    """

    name: str
    loaded: LoadedCheckpoint
    recipe: ResolvedTrainRecipe
    config: EvalConfig
    gauntlet: Gauntlet | None
    held_out: Callable[[], RunData]
    rows: int
    fill: Callable[[], None]


@dataclass(frozen=True)
class _Host:
    """The run beside which models from elsewhere are asked the same: gauntlet, and text.

    Attributes:
        config: what is measured of the run.
        texts: its held-out documents; None: it has none of its own.
        fetching: how its rows at an address are asked for.
    """

    config: EvalConfig
    texts: Callable[[], list[str]] | None
    fetching: FetchOptions


def _ready(
    recipe: EvalRecipe,
    named: Mapping[str, str],
    world: World,
    layout: ModelLayout,
    console: Console,
    live: Live,
) -> deque[Callable[[], Examined]]:
    """What asks each model, in their order; see `evaluate` for what is raised."""
    models, problems = recipe.all_models(), list[str]()
    own = [model for model in models if not _is_outside(model, live)]
    opened = [
        _try(partial(_open_run, recipe, model, world, layout, console, live), problems)
        for model in own
    ]
    runs = {run.name: run for run in opened if run is not None}
    host, steps = _host(runs), list[Callable[[], Callable[[], Examined]]]()
    for model in models if not problems else ():
        if model in runs:
            steps.append(partial(_own, recipe, runs[model], named, world, console))
            continue
        read = partial(
            _outside, recipe, model, host, named, world, console, live.get(model), layout
        )
        if step := _try(read, problems):
            steps.append(step)
    # held-out text, which may have to be prepared: after the questions of all models
    for run in runs.values() if not problems else ():
        _try(run.held_out, problems)
    asks = [_try(step, problems) for step in steps if not problems]
    if problems:
        raise UserError(*problems)
    return deque(ask for ask in asks if ask is not None)


def check_prompts(recipe: EvalRecipe, world: World, console: Console) -> list[str]:
    """Read the questions of all models on this machine, without weights, for a dry run.

    Nothing is written or downloaded.

    Returns:
        The models and tasks that are not checked.

    Raises:
        UserError: as `examine`.
    """
    problems: list[str] = []
    runs: dict[str, _Run] = {}
    unchecked: list[str] = []
    models = [name for name in recipe.all_models() if _is_here(name)]
    unchecked += [name for name in recipe.all_models() if name not in models]
    for model in models:
        if is_outside(model):
            continue
        opened = partial(_open_run, recipe, model, world, full_model(), console, _NONE)
        run = _try(partial(opened, is_dry_run=True), problems)
        if run is not None:
            runs[model] = run
            unchecked += _waiting(run.gauntlet)
    host = _host(runs)
    for model in models if not problems else ():
        if model not in runs:
            read = partial(_outside_tasks, recipe, model, host, world, console, None, full_model())
            found = _try(partial(read, is_dry_run=True), problems)
            unchecked += [] if found is None else _waiting(found[1])
    if problems:
        raise UserError(*problems)
    return list(dict.fromkeys(unchecked))


def _is_here(model: str) -> bool:
    """Return whether a model can be opened without a download or a server."""
    return not is_url(model) and not is_endpoint(model) and Path(model).expanduser().exists()


def _waiting(gauntlet: Gauntlet | None) -> list[str]:
    tasks = [] if gauntlet is None else gauntlet.waiting
    return [f"task {task.label} ({task.dataset_uri})" for task in tasks]


def _is_outside(model: str, live: Live) -> bool:
    return live[model].checkpoint is None if model in live else is_outside(model)


def _try(read: Callable[[], T], problems: list[str]) -> T | None:
    """What `read` gives, or None and its problems added to those of others."""
    try:
        return read()
    except UserError as error:
        problems.extend(line for line in error.problems if line not in problems)
    return None


def _host(runs: Mapping[str, _Run]) -> _Host | None:
    """The first run that was trained here, else the first; None without any."""
    trained = [run for run in runs.values() if "order" in run.loaded.state]
    if not runs:
        return None
    run = (trained or list(runs.values()))[0]
    texts = partial(_texts, run) if trained else None
    return _Host(run.config, texts, FetchOptions.from_config(run.recipe.data))


def _texts(run: _Run) -> list[str]:
    """Return the held-out documents of a run."""
    return run.held_out().validation_texts()


def _open_run(
    recipe: EvalRecipe,
    path: str,
    world: World,
    layout: ModelLayout,
    console: Console,
    live: Live,
    *,
    is_dry_run: bool = False,
) -> _Run:
    if path in live:
        checkpoint, fill = live[path].checkpoint, _do_nothing
        assert checkpoint is not None, "else it is of no run"
        loaded = checkpoint
        if recipe.eval is not None and recipe.eval.weights == EMA != loaded.weights:
            raise UserError(
                f"eval.weights: ema, but {path} is loaded with its trained weights; write"
                ' lf.load(NAME, weights="ema")'
            )
    else:
        loaded, fill = open_checkpoint(
            path,
            world,
            note=console.note,
            precision=recipe.precision,
            layout=layout,
            weights=None if recipe.eval is None else recipe.eval.weights,
        )
    if recipe.eval is None or recipe.eval.chooses_weights_only:
        require(loaded.recipe, "eval")
    config = recipe.eval
    if config is None or config.chooses_weights_only:
        config = loaded.recipe.eval
    config = dataclasses.replace(config, icl_max_fraction=None)
    run = dataclasses.replace(loaded.recipe, device_eval_batch_size=recipe.device_eval_batch_size)
    rows = evaluation_rows(run, loaded.root, world)
    if layout.is_sharded:
        console.note(f"{path}: {layout.describe(loaded.root.model, run.precision)}")
    gauntlet = open_gauntlet(
        run,
        config,
        loaded.tokenizer,
        world,
        console.note,
        generate=True,
        is_trained=loaded.is_trained,
        is_dry_run=is_dry_run,
    )
    held_out = cache(partial(_held_out, loaded, run, config, world, console))
    return _Run(path, loaded, run, config, gauntlet, held_out, rows, fill)


def _do_nothing() -> None:
    """Load the weights of a model that has them."""


def _own(
    recipe: EvalRecipe, run: _Run, named: Mapping[str, str], world: World, console: Console
) -> Callable[[], Examined]:
    """What asks one of our own, measured as its run would."""
    loaded = run.loaded
    storage = loaded.checkpoint.storage
    job = RunContext(
        run.recipe,
        world,
        loaded.tokenizer,
        run.held_out(),
        loaded.root,
        run.rows,
        console.note,
        storage,
    )
    found: dict[str, Any] = {"gauntlet": {}}
    answered: list[TaskAnswers] = []

    def record(batch: int, result: GauntletResult, answers: list[TaskAnswers]) -> None:
        found["gauntlet"] = result.to_json()
        answered.extend(answers)
        console.table(result.table())

    measure = build_evaluate(
        job,
        run.config,
        gauntlet=run.gauntlet,
        rows=eval_rows(run.recipe, run.rows),
        record=record,
    )
    read_record(storage, world, console.note)
    run_folder, batch = loaded.folder.parents[1], int(loaded.state["batch"])
    folder = _folder(recipe, run.name, run_folder / "eval" / loaded.score_name)
    logger = _log_to(recipe, _logger(loaded, console), is_named=run.name in named)
    registered = named.get(run.name) or loaded.recipe.registry.name

    def ask() -> Examined:
        run.fill()
        metrics = measure(batch)
        results = {"checkpoint": str(loaded.checkpoint), "time/batch": batch, "metrics": metrics}
        name = f"{Path(storage.shown(run_folder)).name} {loaded.score_name}"
        return Examined(
            name,
            folder,
            storage,
            {**results, **found},
            answered,
            batch,
            logger,
            report=run_folder / REPORT,
            link=score_link(registered, loaded.checkpoint, metrics, batch=batch, folder=folder)
            if registered
            else None,
        )

    return ask


def _held_out(
    loaded: LoadedCheckpoint,
    run: ResolvedTrainRecipe,
    config: EvalConfig,
    world: World,
    console: Console,
) -> RunData:
    """The run's held-out text; none where it is not measured and cannot be had here.

    A key to a store that is not set here may not be needed: the text may lie on this machine.
    """
    for line in missing(loaded.recipe, f"data.{OPTIONS}"):
        console.note(f"continuing without it: {line}")
    others = [f"data.{key}" for key in Schema.of(DataConfig).keys if key != OPTIONS]
    if not config.validation and missing(loaded.recipe, *others):
        return no_held_out()
    require(loaded.recipe, *others)
    return open_held_out(run, loaded.tokenizer, world)


def _logger(loaded: LoadedCheckpoint, console: Console) -> LoggerConfig | None:
    """The run's, if it went to MLflow and its address can be had here."""
    lines = missing(loaded.recipe, "logger")
    for line in lines:
        console.warn(f"the evaluation is not logged: {line}")
    logger = loaded.recipe.logger
    for name in [name for name in logger.plugins if name not in LOGGERS]:
        del logger.plugins[name]
        console.warn(f"the evaluation is not logged by {name}, which is of no plugin named here")
    return logger if logger.mlflow and not lines else None


def _log_to(
    recipe: EvalRecipe, default: LoggerConfig | None, *, is_named: bool
) -> LoggerConfig | None:
    """The recipe's choice, or the default; of a registry's version MLflow, where that was found."""
    if recipe.logger is not None or not is_named:
        return recipe.logger or default
    uri = store_uri(recipe.registry.uri)
    return replace(default or LoggerConfig(), mlflow=True, tracking_uri=uri)


def _outside(
    recipe: EvalRecipe,
    model: str,
    host: _Host | None,
    named: Mapping[str, str],
    world: World,
    console: Console,
    live: OpenedModel | None,
    layout: ModelLayout,
) -> Callable[[], Callable[[], Examined]]:
    """Read the questions for a Hugging Face model or an endpoint: the gauntlet alone.

    Returns:
        A function that adds the questions of held-out text, and returns what asks the model.
    """
    outside, tasks = _outside_tasks(recipe, model, host, world, console, live, layout)
    plain = re.sub(r"[^\w.-]+", "_", public(model)).strip("_")
    folder = _folder(recipe, model, Path("runs") / plain / "eval")

    def ask() -> Examined:
        evaluated, notes = outside.load()
        started = time.perf_counter()
        result, answers = tasks.run(evaluated)
        console.table(result.table())
        for note in notes:
            console.note(f"{model}: {note}")
        results = {
            "model": model,
            "seconds": time.perf_counter() - started,
            "metrics": result.metrics(),
            "gauntlet": result.to_json(),
        }
        return Examined(
            public(model),
            folder,
            Storage(folder),
            results,
            answers,
            logger=_log_to(recipe, None, is_named=model in named),
            link=score_link(named[model], Path(model), result.metrics(), batch=0, folder=folder)
            if model in named
            else None,
        )

    def with_held_out() -> Callable[[], Examined]:
        for problem in tasks.add_held_out(None if host is None else host.texts):
            console.note(problem)
        return ask

    return with_held_out


def _outside_tasks(
    recipe: EvalRecipe,
    model: str,
    host: _Host | None,
    world: World,
    console: Console,
    live: OpenedModel | None,
    layout: ModelLayout,
    *,
    is_dry_run: bool = False,
) -> tuple[ExternalModel, Gauntlet]:
    """Open a model from elsewhere without its weights, and read the questions for it."""
    config = recipe.eval if recipe.eval is not None or host is None else host.config
    if config is None:  # of a version, whose address was not known to `check_models`
        raise _no_run(model)
    if config.gauntlet is None:
        raise UserError(
            f"eval: {model} can only be asked a gauntlet, and the run beside it was asked none;"
            " write eval=v0.3, another choice of yamls/eval, or eval.gauntlet=FILE"
        )
    outside = open_outside(
        model,
        recipe,
        world,
        seq_len=config.icl_seq_len,
        note=console.note,
        live=live,
        layout=layout,
    )
    gauntlet = read_tasks(
        config,
        outside.settings,
        generate=True,
        cache_folder=None if is_dry_run else recipe.cache_folder,
        note=console.note,
        world=world,
        fetching=None if host is None else host.fetching,
    )
    assert gauntlet is not None, "checked before"
    return outside, gauntlet


def _folder(recipe: EvalRecipe, model: str, default: Path) -> Path:
    """The recipe's choice, with a folder for each of several models; else beside the model."""
    if recipe.output is None:
        return default
    folder = Path(recipe.output).expanduser()
    models = recipe.all_models()
    return folder if len(models) == 1 else folder / f"{models.index(model) + 1}"
