"""`scripts/train.py` and `scripts/finetune.py`: train a recipe, or resume it."""

from __future__ import annotations

import gzip
import re
import sys
from functools import partial
from itertools import islice

from llmfoundry.api.training import Hooks, run_training
from llmfoundry.builders.run_context import RunContext
from llmfoundry.checkpoint.object_storage import is_url
from llmfoundry.cli.commands.check import before_run
from llmfoundry.cli.commands.supervise import is_supervised, supervise
from llmfoundry.command_text import command_line
from llmfoundry.distributed.process_group import relaunch
from llmfoundry.exit_status import DONE, SAVED, record_end
from llmfoundry.loggers.pages.report import metric_rows, read_evaluations
from llmfoundry.loggers.pages.score_tables import changes, console_lines
from llmfoundry.loggers.tracker import Tracker
from llmfoundry.recipe.source import TEXT
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.terminal import outlast_full_disks
from llmfoundry.train.trainer import Trainer

GZIP_LIMIT = 50_000_000  # bytes of held-out text up to which gzip is tried: a few seconds


def train(recipe: ResolvedTrainRecipe) -> None:
    """Train by a checked recipe. Starts the processes of `parallel`, or a supervisor if set.

    Raises:
        SystemExit: in rank 0, status 75 if a signal stopped the run, which was saved before; under
            a supervisor, the status that `supervise` documents.
    """
    # train, possibly in new processes
    if is_supervised(recipe):
        supervise(recipe)
    outlast_full_disks()
    relaunch(recipe.parallel, again=_resuming(recipe))
    ended = run_training(recipe, Hooks(begin=partial(before_run, recipe), finish=_print_results))

    # record the end for the supervisor of each machine
    world = ended.world
    if world.is_main or world.local_rank == 0:
        if ended.is_cut_off:
            record_end(SAVED, "stopped", [f"stopped by {ended.stopped_by}, and saved"])
        else:
            state = "paused" if ended.stopped_by else "complete"
            record_end(DONE, "done", [f"the run is {state}"])
    # only rank 0 exits with this status: if another rank did, the launcher would kill rank 0
    if ended.is_cut_off and world.is_main:
        sys.exit(SAVED)


def _resuming(recipe: ResolvedTrainRecipe) -> list[str]:
    """Return the overrides with which this command continues its run after a restart."""
    words = ["save_overwrite=false"] if recipe.save_overwrite else []
    return words if recipe.autoresume else [*words, "autoresume=true"]


def _print_results(trainer: Trainer, job: RunContext, tracker: Tracker) -> None:
    """Print the summary at the end of a run."""
    tracker.console.finish(_results(trainer, job, tracker))


def _results(trainer: Trainer, job: RunContext, tracker: Tracker) -> list[tuple[str, str]]:
    """Return the summary of a finished run: results, paths and commands to continue with."""
    # a run that was complete before this command
    rows = []
    if trainer.first_batch == trainer.batch:
        longer = "patience" if trainer.ended_early else "max_duration"
        rows.append(("complete", f"already; write a longer {longer} or another run_name"))
        if not tracker.has_sent_all:
            rows.append(("trackers", f"may lack values; {command_line('track', str(job.run))}"))

    # results
    bits = trainer.latest_evaluation.get("metrics/eval/bits_per_byte")
    if bits is not None:
        rows.append(("held-out text", f"{bits:.3f} bits per byte{_beside_gzip(job)}"))
    folder, checkpoints = job.run.folder, job.run.checkpoints()
    rows += console_lines(changes(read_evaluations(folder), metric_rows(folder)))

    # paths
    run = str(job.run)
    if tracker.page is not None:
        rows.append(("report", f"{run}/report.html"))
    rows.append(("checkpoint", job.run.shown(checkpoints[0]) if checkpoints else "none"))

    # commands, which need the plugins of the run; an export is always on this machine
    plugins = [f"plugins=[{','.join(job.recipe.plugins)}]"] if job.recipe.plugins else []
    is_remote = is_url(job.recipe.save_folder)
    output = f"runs/{job.recipe.run_name}/hf" if is_remote else f"{run}/hf"
    rows.append(("next", command_line(*_try_it(job, run), *plugins)))
    rows.append(("", command_line("eval", run, *plugins)))
    rows.append(("", command_line("convert", run, "to=hf", f"output={output}", *plugins)))
    return rows


def _try_it(job: RunContext, name: str) -> list[str]:
    """Return the command that generates text with the model."""
    if job.tokenizer.has_chat:
        return ["chat", name]
    return ["generate", name, f"prompt={_beginning(job)}"]


def _beginning(job: RunContext) -> str:
    """Return a prompt that is similar to the training text.

    It is the beginning of a Python method for code, and otherwise the first words of the held-out
    text, or "The" if the held-out text is long.
    """
    validation = job.prepared.validation
    texts = validation.texts() if validation.n_bytes <= GZIP_LIMIT else []
    method = re.compile(r"^ +def __init__\(self", re.MULTILINE)  # an indented Python method
    if job.recipe.data.name == "python_stdlib" or any(map(method.search, texts)):
        return "def __init__(self"
    words = (word for text in texts for word in text.split() if word.isalnum())
    return " ".join(islice(words, 3)) or "The"


def _beside_gzip(job: RunContext) -> str:
    """Return the bits per byte of gzip -9 on the held-out text, for comparison with the model.

    Empty if the text is long, or the evaluation uses only a part of it.
    """
    if any(form != TEXT for _, form in job.recipe.data.formats()):
        return ""  # the loss of supervised examples is that of the answers only
    if job.recipe.eval.validation_rows is not None or job.prepared.validation.n_bytes > GZIP_LIMIT:
        return ""
    text = "".join(job.prepared.validation_texts()).encode()
    if not text:  # prompts and answers, which are stored as tokens only
        return ""
    return f" (gzip -9: {8 * len(gzip.compress(text, 9)) / len(text):.3f})"
