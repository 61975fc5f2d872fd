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
from llmfoundry.loggers.background_queue import BackgroundWriter, RunFacts, Task, milliseconds
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

    `console` prints immediately and may be used directly. With logger.in_memory, `history` has all
    metrics of this process as lists of (batch, value) by name.

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
        self.page: Path | None = None  # the report, once the record is closed
        self._in_background = False  # versions are asked for and the loggers' threads run
        self.history: dict[str, list[tuple[int, float]]] = {}
        self._in_memory = recipe.logger.in_memory
        self._events = deque[Callable[[], object]](maxlen=_MOST_EVENTS)
        say = {"note": self.console.note, "warn": self.console.warn}
        self._writers = make_writers(recipe.logger, run_folder, **say) if is_main else []

    def start(self, first_batch: int, *, total: int, facts: Iterable[tuple[str, str]] = ()) -> None:
        """Open the record of a run of `total` batches that resumes after `first_batch`.

        What an earlier process wrote beyond `first_batch` is dropped; with 0 all of it. `facts` are
        the banner's rows: they are printed, and kept for the report and the loggers.

        Raises:
            UserError: a file of the record is broken elsewhere than at its end, or cannot be
                written.
        """
        self._first, self._total = first_batch, total
        if not self._is_main:
            return
        facts = [(label, public(text)) for label, text in facts]  # which are kept
        if facts:
            self.console.banner(facts)
        self._drop_after(first_batch)
        before = read_run_record(self._folder) if first_batch > 0 else {}
        # Until this process has made a step, the record is the earlier one's.
        self._run |= {"facts": facts, "environment": before.get("environment", {})}
        self._run["sent"] = before.get("sent", not self._stores())
        self._run |= {"total_batches": total, "summary": {"status": "running"}}
        self._is_open, self._report_due = True, time.monotonic() + _REPORT_SECONDS
        self._write_run()

    def rewind(self, batch: int) -> None:
        """Drop what was recorded of steps after `batch`: the run went back there."""
        if self._is_main:
            self._drop_after(batch)

    def _drop_after(self, batch: int) -> None:
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
        """Record metrics at `batch` and `tokens`; training losses get a line on the console."""
        if not self._is_main:
            return
        now = milliseconds()
        self._metrics.write({BATCH: batch, TOKEN: tokens, WALL: now, **metrics})
        if TRAIN_LOSS in metrics:
            self.console.step(batch, metrics, total=self._total)
        for writer in self._writers:
            writer.log(batch, {TOKEN: tokens, **metrics}, when=now)
        if self._events:
            with suppress(OSError):  # reported when the first came
                self._write_events()
        if self._in_memory:
            for name, value in metrics.items():
                self.history.setdefault(name, []).append((batch, value))
        if batch > self._first and not self._in_background:
            self._begin_background()
        if time.monotonic() >= self._report_due and not self._reporting.is_alive():
            self._reporting = threading.Thread(target=self._refresh, name="report", daemon=True)
            self._reporting.start()

    def routing(self, batch: int, tokens: int, load: list[list[int]]) -> None:
        """Record the load of every expert of every layer, for the report's heat maps."""
        if self._is_main:
            self._routing.write({BATCH: batch, TOKEN: tokens, "load": load})

    def samples(self, batch: int, samples: Sequence[tuple[str, ...]]) -> None:
        """Record and print texts that the model wrote: (prompt, continuation) each.

        A third member is what was expected.
        """
        if not self._is_main:
            return
        shown = []
        for prompt, text, *expected in samples:
            row = {BATCH: batch, "prompt": prompt, "text": text}
            self._samples.write({**row, "expected": expected[0]} if expected else row)
            shown.append((prompt, text + "".join(f"\n[expected: {e}]" for e in expected)))
        for writer in self._writers:
            writer.samples(batch, shown)
        self.console.samples(batch, shown)

    def gauntlet(self, batch: int, result: Mapping[str, Any]) -> None:
        """Keep a gauntlet's full result (GauntletResult.to_json) as eval/ba0000100.json."""
        if not self._is_main:
            return
        self._keep(self._folder / "eval" / f"ba{batch:07d}.json", {BATCH: batch, **result})

    def registry(self, task: Task) -> None:
        """Have something done with versions of models, where the run is logged; returns at once."""
        for writer in self._writers:
            writer.registry(task)

    def note(self, text: str) -> None:
        """Say what the run decided or did."""
        self.console.note(text)

    def event(
        self, kind: str, seen: str, done: str, *, step: int, action: str, **more: Any
    ) -> None:
        """Warn of what happened in a step (from 1), and keep it, and `more`, in events.jsonl."""
        if self._is_main:
            self.console.warn(f"{seen}; {done}")
        self.keep_event(kind, seen, done, step=step, action=action, **more)

    def keep_event(
        self, kind: str, seen: str, done: str, *, step: int | None, action: str, **more: Any
    ) -> None:
        """Keep what happened, and `more`, in events.jsonl; without a warning of it."""
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
        """Write the events that wait, such as for room on the disk, in their order.

        Raises:
            OSError: the first of them still cannot be written.
        """
        while self._events:
            self._events[0]()
            self._events.popleft()

    def report(self) -> Path | None:
        """Write report.html as things stand; None, and a warning, if that fails."""
        if not self._is_main:
            return None
        try:
            return write_report(self._folder)
        except Exception as error:  # a picture is not worth the run
            self.console.warn(f"report.html was not written: {type(error).__name__}: {error}")
            return None

    def _refresh(self) -> None:
        """Rewrite report.html beside the training, for a hundredth of the time at most."""
        began = time.monotonic()
        with suppress(Exception):  # which is reported at the end, if it lasts
            write_report(self._folder)
        ended = time.monotonic()
        self._report_due = ended + max(_REPORT_SECONDS, (ended - began) / _REPORT_SHARE)

    def close(self, status: str, final: Mapping[str, Any] | None = None) -> None:
        """End the record: `status` is finished, failed or killed; `final` goes into the report.

        Does nothing before `start`: a run that never began leaves the folder's record alone.
        """
        assert status in ("finished", "failed", "killed"), status
        if not self._is_open:
            return
        self._is_open = False
        if self._reporting.ident is not None:
            self._reporting.join()
        self._metrics.close()
        self._samples.close()
        self._routing.close()
        with suppress(OSError):
            self._write_events()
        self._run["summary"] = {"status": status, **{k: plain(v) for k, v in (final or {}).items()}}
        self._write_run()
        self.page = self.report()
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
        """Whether all places that keep values have got them; known once the record is closed."""
        return bool(self._run.get("sent", True))

    def _begin_background(self) -> None:
        """After the first step, whose time counts: ask for versions, start the loggers' threads."""
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
        self._keep(self._folder / "run.json", self._run)

    def _keep(self, path: Path, value: Mapping[str, Any]) -> None:
        """Write a file of the record; a warning if that fails."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, public_texts(value))
        except OSError as error:
            self.console.warn(f"{path} was not written: {error.strerror}")


def send_record(
    recipe: ResolvedTrainRecipe,
    folder: Path,
    task: Task | None,
    *,
    note: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Send to every place of a recipe what it lacks of a run that has ended, and wait.

    Args:
        recipe: the run's, filled.
        folder: the run's.
        task: what is to be done with versions of models.
        note: reports what is sent.
        warn: reports what fails.

    Raises:
        UserError: nothing is recorded, no place is named, or one did not get everything.
    """
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
    """Facts and environment of run.json as tags, for the loggers."""
    tags = {**dict(run.get("facts", [])), **run.get("environment", {})}
    if "git commit" in tags:  # the name under which MLflow's pages show it
        tags["mlflow.source.git.commit"] = tags["git commit"].split()[0]
    return tags


def flatten(recipe: ResolvedTrainRecipe) -> dict[str, Any]:
    """Dotted key → value of every field, for the loggers; as it was written, secrets masked."""
    return dict(flat(as_written(recipe)))
