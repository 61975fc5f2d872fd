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
    """Run a checked recipe on every process that it wants.

    Raises:
        SystemExit: 75, of the main process: a signal has stopped the run, which was saved; as
            `supervise` says where that is asked for.
    """
    if is_supervised(recipe):
        supervise(recipe)
    outlast_full_disks()
    relaunch(recipe.parallel, again=_resuming(recipe))
    ended = run_training(recipe, Hooks(begin=partial(before_run, recipe), finish=_print_results))
    world = ended.world
    if world.is_main or world.local_rank == 0:  # each machine may have a supervisor of its own
        if ended.is_cut_off:
            record_end(SAVED, "stopped", [f"stopped by {ended.stopped_by}, and saved"])
        else:
            state = "paused" if ended.stopped_by else "complete"
            record_end(DONE, "done", [f"the run is {state}"])
    if ended.is_cut_off and world.is_main:  # of others a launcher would end the main one
        sys.exit(SAVED)


def _resuming(recipe: ResolvedTrainRecipe) -> list[str]:
    """What a command lacks to go on with the run that it has begun."""
    words = ["save_overwrite=false"] if recipe.save_overwrite else []
    return words if recipe.autoresume else [*words, "autoresume=true"]


def _print_results(trainer: Trainer, job: RunContext, tracker: Tracker) -> None:
    tracker.console.finish(_results(trainer, job, tracker))


def _results(trainer: Trainer, job: RunContext, tracker: Tracker) -> list[tuple[str, str]]:
    """The last words: what came out, where it is, and what to do with it."""
    rows = []
    if trainer.first_batch == trainer.batch:
        longer = "patience" if trainer.ended_early else "max_duration"
        rows.append(("complete", f"already; write a longer {longer} or another run_name"))
        if not tracker.has_sent_all:
            rows.append(("trackers", f"may lack values; {command_line('track', str(job.run))}"))
    bits = trainer.latest_evaluation.get("metrics/eval/bits_per_byte")
    if bits is not None:
        rows.append(("held-out text", f"{bits:.3f} bits per byte{_beside_gzip(job)}"))
    folder, checkpoints = job.run.folder, job.run.checkpoints()
    name, brought = str(job.run), ",".join(job.recipe.plugins)
    plugins = [f"plugins=[{brought}]"] * bool(brought)
    output = (
        f"{name}/hf" if not is_url(job.recipe.save_folder) else f"runs/{job.recipe.run_name}/hf"
    )
    rows += console_lines(changes(read_evaluations(folder), metric_rows(folder)))
    return [
        *rows,
        *([("report", f"{name}/report.html")] if tracker.page is not None else []),
        ("checkpoint", job.run.shown(checkpoints[0]) if checkpoints else "none"),
        ("next", command_line(*_try_it(job, name), *plugins)),
        ("", command_line("eval", name, *plugins)),
        ("", command_line("convert", name, "to=hf", f"output={output}", *plugins)),
    ]


def _try_it(job: RunContext, name: str) -> list[str]:
    """How to see what the model writes."""
    if job.tokenizer.has_chat:
        return ["chat", name]
    return ["generate", name, f"prompt={_beginning(job)}"]


def _beginning(job: RunContext) -> str:
    """A prompt like the text: of held-out text, where it is quickly read, the first words."""
    validation = job.prepared.validation
    texts = validation.texts() if validation.n_bytes <= GZIP_LIMIT else []
    method = re.compile(r"^ +def __init__\(self", re.MULTILINE)
    if job.recipe.data.name == "python_stdlib" or any(map(method.search, texts)):
        return "def __init__(self"
    words = (word for text in texts for word in text.split() if word.isalnum())
    return " ".join(islice(words, 3)) or "The"


def _beside_gzip(job: RunContext) -> str:
    """What gzip -9 needs for the same text in one piece, as a yardstick."""
    if any(form != TEXT for _, form in job.recipe.data.formats()):
        return ""  # of supervised rows only answers are measured
    if job.recipe.eval.validation_rows is not None or job.prepared.validation.n_bytes > GZIP_LIMIT:
        return ""
    text = "".join(job.prepared.validation_texts()).encode()
    if not text:  # prompts and answers, whose texts are not kept
        return ""
    return f" (gzip -9: {8 * len(gzip.compress(text, 9)) / len(text):.3f})"
