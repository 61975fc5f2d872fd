"""Record of a run: metrics, samples, evaluations and report.

Entry point: `Tracker`, which the trainer calls on every rank. It passes each metric to the console,
to metrics.jsonl and to the loggers of the recipe, stores samples and evaluations in the run's
folder, and writes the report. Only the main rank acts, so that the training loop needs no
`if rank == 0`. A failure of the record never ends a running training: it is reported, and lost
values are counted. `send_record` backfills the loggers from the record of a finished run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.events import NAME, add_event
from llmfoundry.files import read_json_if_there, write_json
from llmfoundry.loggers.background_queue import (
    BackgroundWriter,
    DeferredTask,
    RunFacts,
    milliseconds,
)
from llmfoundry.loggers.console import Console
from llmfoundry.loggers.environment import environment
from llmfoundry.loggers.metrics_file import BATCH, TOKEN, WALL, JsonLines, plain, read_metrics
from llmfoundry.loggers.pages.charts import TRAIN_LOSS
from llmfoundry.loggers.pages.report import STATUS, write_report
from llmfoundry.loggers.run_record import read_run_record
from llmfoundry.loggers.writers import close_all, make_writers, stores
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.recipe.typed import as_written, flat
from llmfoundry.redaction import public, public_texts

_REPORT_SECONDS, _REPORT_SHARE = 15.0, 0.01  # limits on how often a running job writes its report
_MOST_EVENTS = 1000  # maximal number of events queued while the disk is full
_A_DAY = 86_400.0  # timeout in seconds of a backfill


class Tracker:
    """Record of a run with a resolved recipe.

    Attributes:
        console: prints immediately; other code may use it directly.
        history: with logger.in_memory, all metrics of this process: (batch, value) pairs by name.
        page: path of the report, after `close`.

    Raises:
        UserError: logger.tracking_uri is of no kind that MLflow writes to, or a logger's package is
            not installed.
    """

    def __init__(
        self,
        recipe: ResolvedTrainRecipe,
        run_folder: Path,
        *,
        is_main: bool,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console(is_main=is_main)
        self._is_main, self._folder = is_main, run_folder
        self._metrics = JsonLines(run_folder / "metrics.jsonl", self.console.warn)
        self._samples = JsonLines(run_folder / "samples.jsonl", self.console.warn)
        self._routing = JsonLines(run_folder / "routing.jsonl", self.console.warn)
        self._has_routing = recipe.model.ffn_config.ffn_type == "dmoe"
        self._run: dict[str, Any] = {"name": recipe.run_name or run_folder.resolve().name}
        self._params, self._began = flatten(recipe), milliseconds()
        self._first, self._total = 0, 0
        self._is_open = False
        self._report_due, self._reporting = 0.0, threading.Thread()
        self.page: Path | None = None
        self._in_background = False  # the threads of the loggers run
        self.history: dict[str, list[tuple[int, float]]] = {}
        self._in_memory = recipe.logger.in_memory
        self._events = deque[Callable[[], object]](maxlen=_MOST_EVENTS)
        say = {"note": self.console.note, "warn": self.console.warn}
        self._writers = make_writers(recipe.logger, run_folder, **say) if is_main else []

    def start(self, first_batch: int, *, total: int, facts: Iterable[tuple[str, str]] = ()) -> None:
        """Open the record of a run of `total` batches that resumes after `first_batch`.

        Records of an earlier process after `first_batch` are deleted; with 0, all records.

        Args:
            first_batch: step of the checkpoint that the run resumes from.
            total: number of steps of the complete run.
            facts: rows (label, text) of the banner. They are printed, and stored for the report
                and the loggers.

        Raises:
            UserError: a file of the record is broken before its last line, or cannot be written.
        """
        self._first, self._total = first_batch, total
        if not self._is_main:
            return

        # print the banner
        facts = [(label, public(text)) for label, text in facts]
        if facts:
            self.console.banner(facts)
        self._drop_after(first_batch)

        # run.json keeps the environment of the previous process until this one has made a step
        previous = read_run_record(self._folder) if first_batch > 0 else {}
        self._run |= {"facts": facts, "environment": previous.get("environment", {})}
        self._run["sent"] = previous.get("sent", not self._stores())
        self._run |= {"total_batches": total, "summary": {"status": "running"}}
        self._is_open, self._report_due = True, time.monotonic() + _REPORT_SECONDS
        self._write_run()

    def rewind(self, batch: int) -> None:
        """Delete the records of steps after `batch`: the run continues from there again."""
        if self._is_main:
            self._drop_after(batch)

    def _drop_after(self, batch: int) -> None:
        """Delete the records of steps after `batch`, and open the files for appending."""
        dropped = self._metrics.start(batch) + self._samples.start(batch)
        if self._has_routing:
            dropped += self._routing.start(batch)
        for path in sorted(self._folder.glob("eval/*.json")):
            if batch == 0 or int(read_json_if_there(path)[BATCH]) > batch:
                path.unlink()
                dropped += 1
        if dropped:
            self.console.note(f"dropped {dropped} records of steps after batch {batch}")

    def log(self, batch: int, tokens: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of step `batch`, after `tokens` tokens.

        Metrics with a training loss are also printed as a line on the console.
        """
        if not self._is_main:
            return

        # file, console, loggers
        now = milliseconds()
        self._metrics.write({BATCH: batch, TOKEN: tokens, WALL: now, **metrics})
        if TRAIN_LOSS in metrics:
            self.console.step(batch, metrics, total=self._total)
        for writer in self._writers:
            writer.log(batch, {TOKEN: tokens, **metrics}, when=now)

        # retry events that a full disk delayed; the first failure was reported
        if self._events:
            with suppress(OSError):
                self._write_events()
        if self._in_memory:
            for name, value in metrics.items():
                self.history.setdefault(name, []).append((batch, value))

        # start the loggers after the first step; refresh the report now and then
        if batch > self._first and not self._in_background:
            self._begin_background()
        if time.monotonic() >= self._report_due and not self._reporting.is_alive():
            self._reporting = threading.Thread(target=self._refresh, name="report", daemon=True)
            self._reporting.start()

    def routing(self, batch: int, tokens: int, load: list[list[int]]) -> None:
        """Record the expert load (tokens per expert) of every layer, for the report's heat maps."""
        if self._is_main:
            self._routing.write({BATCH: batch, TOKEN: tokens, "load": load})

    def samples(self, batch: int, samples: Sequence[tuple[str, ...]]) -> None:
        """Record and print generated texts.

        Args:
            batch: step of the model.
            samples: (prompt, continuation) or (prompt, continuation, expected continuation).
        """
        if not self._is_main:
            return
        texts = []
        for prompt, text, *expected in samples:
            row = {BATCH: batch, "prompt": prompt, "text": text}
            if expected:
                row["expected"] = expected[0]
                text += f"\n[expected: {expected[0]}]"
            self._samples.write(row)
            texts.append((prompt, text))
        for writer in self._writers:
            writer.samples(batch, texts)
        self.console.samples(batch, texts)

    def gauntlet(self, batch: int, result: Mapping[str, Any]) -> None:
        """Write the full result of a gauntlet (GauntletResult.to_json) as eval/ba0000100.json."""
        if not self._is_main:
            return
        self._write_file(self._folder / "eval" / f"ba{batch:07d}.json", {BATCH: batch, **result})

    def registry(self, task: DeferredTask) -> None:
        """Queue a task for the registry of model versions of each logger; return immediately."""
        for writer in self._writers:
            writer.registry(task)

    def note(self, text: str) -> None:
        """Print a decision or an action of the run."""
        self.console.note(text)

    def event(
        self, kind: str, seen: str, done: str, *, step: int, action: str, **more: Any
    ) -> None:
        """Warn of an event on the console and append it to events.jsonl.

        Args:
            kind: kind of the event, such as "loss_spike".
            seen: observation, as text.
            done: action taken, as text.
            step: training step, counted from 1.
            action: action taken, as a keyword.
            more: further fields of the line in events.jsonl.
        """
        if self._is_main:
            self.console.warn(f"{seen}; {done}")
        self.keep_event(kind, seen, done, step=step, action=action, **more)

    def keep_event(
        self, kind: str, seen: str, done: str, *, step: int | None, action: str, **more: Any
    ) -> None:
        """Append an event to events.jsonl without a warning; see `event` for the arguments."""
        if not self._is_main:
            return
        facts = {"done": done, "time": round(time.time(), 3), **more}
        self._events.append(
            partial(add_event, self._folder, kind, seen, step=step, action=action, **facts)
        )
        try:
            self._write_events()
        except OSError as error:
            self.console.warn(
                f"{self._folder / NAME} was not written: {error.strerror}; its line follows once it"
                " can be"
            )
        for writer in self._writers:
            writer.events()

    def _write_events(self) -> None:
        """Write the queued events in their order.

        Raises:
            OSError: an event cannot be written, for example because the disk is full. It stays in
                the queue.
        """
        while self._events:
            self._events[0]()
            self._events.popleft()

    def report(self) -> Path | None:
        """Write report.html from the current record; return its path, or warn and return None."""
        if not self._is_main:
            return None
        try:
            return write_report(self._folder)
        except Exception as error:  # the report is optional: it never ends a run
            self.console.warn(f"report.html was not written: {type(error).__name__}: {error}")
            return None

    def _refresh(self) -> None:
        """Rewrite report.html in a thread during training, at most 1 % of the time."""
        start = time.monotonic()
        with suppress(Exception):  # a lasting error is reported by close()
            write_report(self._folder)
        end = time.monotonic()
        self._report_due = end + max(_REPORT_SECONDS, (end - start) / _REPORT_SHARE)

    def close(self, status: str, final: Mapping[str, Any] | None = None) -> None:
        """Close the record of the run and wait for its loggers.

        Before `start`, this does nothing: a run that did not start leaves the folder's record
        unchanged.

        Args:
            status: "finished", "failed" or "killed".
            final: further values of the summary in run.json and in the report.
        """
        assert status in ("finished", "failed", "killed"), status
        if not self._is_open:
            return
        self._is_open = False

        # close the files
        if self._reporting.ident is not None:
            self._reporting.join()
        self._metrics.close()
        self._samples.close()
        self._routing.close()
        with suppress(OSError):
            self._write_events()

        # write the summary, then the report, which shows it
        summary = {name: plain(value) for name, value in (final or {}).items()}
        self._run["summary"] = {"status": status, **summary}
        self._write_run()
        self.page = self.report()

        # send the rest to the loggers
        for writer in self._writers:
            if self.page is not None:
                writer.file(self.page)
        close_all(self._writers, status)
        if self._in_background:
            self._run["sent"] = all(writer.has_all for writer in self._stores())
            self._write_run()

    def _stores(self) -> list[BackgroundWriter]:
        return [writer for writer in self._writers if writer.is_store]

    @property
    def has_sent_all(self) -> bool:
        """Return whether all loggers that store values have them; valid after `close`."""
        return bool(self._run.get("sent", True))

    def _begin_background(self) -> None:
        """Record the package versions and start the threads of the loggers.

        This runs after the first step, so that it does not delay the start of training.
        """
        self._in_background = True
        self._run["sent"] = False
        self._run["environment"] = environment()
        self._write_run()
        facts = RunFacts(
            name=self._run["name"],
            folder=self._folder,
            first_batch=self._first,
            began=self._began,
            params=self._params,
            tags=tags_of(self._run),
        )
        recipe = self._folder / "recipe.yaml"
        for writer in self._writers:
            if recipe.exists():
                writer.file(recipe)
            writer.start(facts)

    def _write_run(self) -> None:
        self._write_file(self._folder / "run.json", self._run)

    def _write_file(self, path: Path, value: Mapping[str, Any]) -> None:
        """Write a JSON file of the record; warn if that fails."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, public_texts(value))
        except OSError as error:
            self.console.warn(f"{path} was not written: {error.strerror}")


def send_record(
    recipe: ResolvedTrainRecipe,
    folder: Path,
    task: DeferredTask | None,
    *,
    note: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Backfill the loggers of a recipe with the record of an ended run, and wait.

    Args:
        recipe: resolved recipe of the run.
        folder: save folder of the run.
        task: task for the registry of model versions; None: no task.
        note: prints a line about progress.
        warn: prints a line about a failure.

    Raises:
        UserError: metrics.jsonl is empty, the recipe has no logger, or a logger did not get
            everything.
    """
    # read the record
    rows = read_metrics(folder / "metrics.jsonl", lambda name: name in (BATCH, WALL))
    if not rows:
        raise UserError(f"run: {folder}/metrics.jsonl is empty; there is nothing to send")
    writers = stores(make_writers(recipe.logger, folder, note=note, warn=warn), note)
    if not writers:
        raise UserError(
            "logger: names no place; write logger.mlflow=true, tensorboard, wandb or trackio"
        )
    record = read_run_record(folder)
    facts = RunFacts(
        name=record.get("name") or folder.resolve().name,
        folder=folder,
        first_batch=rows[-1][BATCH],
        began=rows[0].get(WALL, milliseconds()),
        params=flatten(recipe),
        tags=tags_of(record),
    )
    status = record.get("summary", {}).get("status")

    # queue everything; each writer compares metrics.jsonl with its logger by itself
    for writer in writers:
        if task is not None:
            writer.registry(task)
        for name in ("recipe.yaml", "report.html"):
            if (folder / name).exists():
                writer.file(folder / name)
        writer.start(facts)
    close_all(writers, status if status in STATUS else "killed", timeout=_A_DAY)
    if not all(writer.has_all for writer in writers):
        raise UserError("logger: not every place got everything (see above); run this again later")
    write_json(folder / "run.json", {**record, "sent": True})


def tags_of(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts and the environment of run.json as tags for the loggers."""
    tags = {**dict(run.get("facts", [])), **run.get("environment", {})}
    if "git commit" in tags:  # MLflow's pages show the commit under this name
        tags["mlflow.source.git.commit"] = tags["git commit"].split()[0]
    return tags


def flatten(recipe: ResolvedTrainRecipe) -> dict[str, Any]:
    """Return every field of a recipe by dotted key, as written by the user, secrets masked."""
    return dict(flat(as_written(recipe)))
