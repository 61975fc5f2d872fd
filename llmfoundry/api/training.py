"""Training runs: `train` and `finetune` of `import llmfoundry`, and `run_training` below them.

`scripts/train.py` calls `run_training`, too (`cli/commands/train.py`). The idea: nothing here ends
the process, starts another or keeps what it changes of it, so that a program can train again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmfoundry.api.progress import console_of
from llmfoundry.api.recipes import Overrides, checked_recipe
from llmfoundry.api.run import Run
from llmfoundry.builders.callbacks import MAKERS
from llmfoundry.builders.preflight import check_recipe
from llmfoundry.builders.pretrained import open_base
from llmfoundry.builders.run_context import NOTHING, Additions, RunContext
from llmfoundry.builders.trainer import build_trainer
from llmfoundry.checkpoint.object_storage import is_url
from llmfoundry.checkpoint.open_run import hold_run, run_storage
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.fsdp import set_deterministic
from llmfoundry.distributed.process_group import World, join
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import atomic_write
from llmfoundry.loggers.console import Console
from llmfoundry.loggers.tracker import Tracker
from llmfoundry.plan.compile_choice import may_compile
from llmfoundry.recipe.finetune import FinetuneRecipe, ResolvedFinetuneRecipe
from llmfoundry.recipe.loss import CROSS_ENTROPY
from llmfoundry.recipe.train import ResolvedTrainRecipe, TrainRecipe
from llmfoundry.recipe.typed import to_yaml
from llmfoundry.resilience.hang.start_monitor import keep_recorder, monitored
from llmfoundry.resilience.watch.watch import watch
from llmfoundry.train.own_loss import LossFunction
from llmfoundry.train.trainer import PAUSED, Callback, Trainer

MAKERS["watch"] = watch  # of a package above builders


@dataclass(frozen=True)
class Hooks:
    """What a front adds to a training.

    Attributes:
        additions: loss and callbacks of a program.
        console: shows the run, on each process; None: prints as the command line does.
        begin: called on every process once it holds the run's folder, with the folder.
        finish: called on the main process after a complete run.
        interrupt_again: handler of a second Ctrl-C.
    """

    additions: Additions = NOTHING
    console: Callable[[World], Console] | None = None
    begin: Callable[[World, Path], None] | None = None
    finish: Callable[[Trainer, RunContext, Tracker], None] | None = None
    interrupt_again: Any = signal.SIG_DFL


@dataclass(frozen=True)
class Ended:
    """How a training ended.

    Attributes:
        stopped_by: name of the signal, or another reason; empty: the run is complete.
        run: where the run is kept.
        world: this process among those of the run.
    """

    stopped_by: str
    run: Storage
    world: World

    @property
    def is_cut_off(self) -> bool:
        """Whether the run was stopped before its end, other than by its recipe's `pause_at`."""
        return self.stopped_by not in ("", PAUSED)


def run_training(recipe: ResolvedTrainRecipe, hooks: Hooks = Hooks()) -> Ended:
    """Train a checked recipe in this process, or with the others that a launcher has started.

    Raises:
        UserError: the recipe asks for what cannot be had.
        RunFailure: the run ended, but not by a mistake in the recipe.
    """
    if recipe.deterministic:
        set_deterministic()
    run, hang = run_storage(recipe), recipe.hang
    keep_recorder(hang)
    with (
        join(recipe.parallel) as world,
        hold_run(run, world, note=print),
        monitored(hang, world, run.folder, is_compiled=may_compile(recipe, world.device)),
    ):
        if hooks.begin is not None:
            hooks.begin(world, run.folder)
        return Ended(_train(recipe, world, run, hooks), run, world)


def _train(recipe: ResolvedTrainRecipe, world: World, run: Storage, hooks: Hooks) -> str:
    """Train; return what has stopped the run, empty where it is complete."""
    # The base of fine-tuning, before the record of the run is touched.
    pretrained = None
    check_recipe(recipe, world)
    notes: list[str] = []
    if isinstance(recipe, ResolvedFinetuneRecipe):
        pretrained = open_base(recipe, world, note=notes.append)
        notes.append(f"model.pretrained: {pretrained.summary}")
    console = None if hooks.console is None else hooks.console(world)
    tracker = Tracker(recipe, run.folder, is_main=world.is_main, console=console)
    # The run itself; its record is closed whatever happens.
    status, final = "failed", {}
    try:
        for line in notes:
            tracker.note(line)
        trainer, job = build_trainer(
            recipe, world, tracker, run, pretrained=pretrained, additions=hooks.additions
        )
        on_rank0(world, lambda: _write_recipe(job))
        stopped_by = trainer.fit(hooks.interrupt_again)
        status = "killed" if stopped_by else "finished"
        final = trainer.latest_evaluation
    finally:
        tracker.console.close()
        tracker.close(status, final)
    # What comes next.
    if stopped_by:
        tracker.note(f"stopped by {stopped_by} after batch {trainer.batch}, and saved")
        later = " with a later pause_at, or null," if stopped_by == PAUSED else ""
        tracker.note(f"the same command{later} resumes from there")
    elif world.is_main and hooks.finish is not None:
        hooks.finish(trainer, job, tracker)
    return stopped_by


def _write_recipe(job: RunContext) -> None:
    """Write what the user asked for, and the tokenizer, to the run's folder."""
    try:
        atomic_write(job.run.folder / "recipe.yaml", to_yaml(job.recipe.user_recipe))
        job.tokenizer.save(job.run.folder / "tokenizer")
    except OSError as error:
        raise UserError(
            f"save_folder: {job.run} cannot be written: {one_line(error)}; make room there,"
            " or write another folder"
        ) from error


def train(
    recipe: TrainRecipe | str,
    overrides: Overrides = (),
    *,
    loss: LossFunction | None = None,
    callbacks: Sequence[Callback] = (),
    show: str = "auto",
) -> Run:
    """Train a recipe, as `scripts/train.py` does, in this process.

    The run is written to its folder; if that holds a part of the run, training resumes there. Under
    torchrun every process calls `train`. Ctrl-C ends the run after the current step: it is saved,
    and returned.

    >>> recipe = lf.recipe("tiny.yaml", {"max_duration": "2ba", "run_name": "two"})
    >>> run = lf.train(recipe, show="nothing")
    >>> run.name, run.stopped, len(run.metric("loss/train/total"))
    ('two', '', 2)

    Args:
        recipe: from `lf.recipe`, or what `lf.recipe` takes.
        overrides: with the name of a recipe, as of `lf.recipe`.
        loss: minimized in place of the recipe's loss: a function of model and batch
            (`llmfoundry/train/own_loss.py`; docs/python.md). Validation stays the cross-entropy.
        callbacks: objects of subclasses of `lf.Callback`, called after the recipe's callbacks.
        show: `lines` prints a line each logged step; `bar` draws a progress bar; `nothing` only
            warns; `auto` is `bar` in a notebook, else `lines`.

    Raises:
        UserError: a value of the recipe, or the loss, cannot be used; nothing has been trained.
        RunFailure: the run ended, but not by a mistake; what it has saved is kept.
    """
    return _run_here(checked_recipe(recipe, overrides), loss, callbacks, show)


def finetune(
    recipe: FinetuneRecipe | str,
    overrides: Overrides = (),
    *,
    loss: LossFunction | None = None,
    callbacks: Sequence[Callback] = (),
    show: str = "auto",
) -> Run:
    """Train a recipe that begins with a pretrained model; otherwise as `train`.

    >>> base = lf.Run("runs/quickstart")
    >>> recipe = lf.recipe("finetune.yaml", {"model.pretrained": base, "max_duration": "2ba"})
    >>> lf.finetune(recipe, show="nothing").stopped
    ''
    """
    checked = checked_recipe(recipe, overrides)
    if not isinstance(checked, FinetuneRecipe):
        raise UserError(
            "model.pretrained: is missing; write the run or model that fine-tuning begins with, or"
            " call train"
        )
    return _run_here(checked, loss, callbacks, show)


_training = threading.Lock()  # PyTorch's default generator, which a step seeds, is the process's


def _run_here(
    user_recipe: TrainRecipe,
    loss: LossFunction | None,
    callbacks: Sequence[Callback],
    show: str,
) -> Run:
    recipe = user_recipe.resolve()
    _refuse_more_processes(recipe)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            kind = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            instead = f"{kind}()" if isinstance(callback, type) else "a subclass of lf.Callback"
            raise UserError(f"callbacks: {kind} is no callback; write {instead}")
    if loss is not None:
        _take_loss(recipe, loss)
    if not is_url(recipe.save_folder):  # the program may change its working folder meanwhile
        recipe.save_folder = str(Path(recipe.save_folder).expanduser().absolute())
    hooks = Hooks(
        Additions(loss, tuple(callbacks)),
        console=console_of(show),
        interrupt_again=signal.default_int_handler,
    )
    if not _training.acquire(blocking=False):
        raise UserError("train: this process trains already; wait for its end")
    try:
        with _settings_kept():
            ended = run_training(recipe, hooks)
    finally:
        _training.release()
    return Run(ended.run.folder, stopped=ended.stopped_by, address=recipe.save_folder)


def _take_loss(recipe: ResolvedTrainRecipe, loss: LossFunction) -> None:
    """Name a program's loss in the recipe, which resumed runs and all processes compare."""
    name = getattr(loss, "__name__", type(loss).__name__)
    if not callable(loss):
        raise UserError(f"loss: {loss!r} is no function of model and batch")
    if name == CROSS_ENTROPY:
        raise UserError(
            f"loss: the function is called {name}, as the built-in loss is; give it another name"
        )
    if recipe.loss.name != CROSS_ENTROPY:
        raise UserError(f"loss: {name}, but loss.name is {recipe.loss.name}; write one of the two")
    if recipe.loss.z_loss_weight is not None:
        raise UserError(
            f"loss: {name}, but loss.z_loss_weight is of the built-in loss; leave it out, and add a"
            " z-loss in the function"
        )
    if isinstance(recipe, ResolvedFinetuneRecipe) and recipe.preference.name != "none":
        raise UserError(
            f"loss: {name}, but preference.name: {recipe.preference.name} is a loss, too; write one"
        )
    if recipe.auto_probe == "on":
        raise UserError(f"auto_probe: on measures cross-entropy, and the loss is {name}; write off")
    recipe.loss.name = name


def _refuse_more_processes(recipe: ResolvedTrainRecipe) -> None:
    """Refuse what needs processes other than this one, which the command line starts.

    Raises:
        UserError: a line for each such setting.
    """
    problems = []
    is_launched = "RANK" in os.environ
    wanted = recipe.parallel.nproc_per_node
    if not is_launched and wanted not in (None, 1):
        problems.append(
            f"parallel.nproc_per_node: {wanted}, but a program is one process; start it by"
            f" torchrun --nproc-per-node {wanted}, or write 1"
        )
    if recipe.supervise.enabled:
        problems.append(
            "supervise.enabled: true, but a supervisor starts scripts; write false, or call"
            " scripts/supervise.py"
        )
    if recipe.health_check.before_run != "none":
        problems.append(
            f"health_check.before_run: {recipe.health_check.before_run} ends processes on bad"
            " machines; write none, and call scripts/check.py before"
        )
    if dist.is_initialized():
        problems.append(
            "train: torch.distributed is initialized already; leave that to train, or call"
            " torch.distributed.destroy_process_group() before"
        )
    if problems:
        raise UserError(*problems)


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Restore what a run changes of this process: random numbers and deterministic kernels."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
        torch.backends.cudnn.benchmark = benchmark
