"""`Tracker`: all that a run tells, behind one object that the trainer calls.

It gives each metric to the console, metrics.jsonl and MLflow, keeps samples and evaluations in the
run's folder, and writes the report. The idea: the trainer calls it on every rank and only the main
one does anything, so the training loop has no `if rank == 0` for it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import flat
from llmfoundry.track.console import Console
from llmfoundry.track.environment import environment
from llmfoundry.track.metrics import BATCH, TOKEN, JsonLines, plain
from llmfoundry.track.mlflow_store import public
from llmfoundry.track.mlflow_writer import MlflowWriter
from llmfoundry.track.report import TRAIN_LOSS, read_json, write_report


class Tracker:
    """A run's record. `recipe` is filled; `console` prints at once and may be used directly.

    Raises:
        UserError: logger.tracking_uri is of no kind that MLflow writes to.
    """

    def __init__(
        self,
        recipe: TrainRecipe,
        run_folder: Path,
        *,
        is_main: bool,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console(is_main=is_main)
        self._is_main, self._folder = is_main, run_folder
        self._metrics = JsonLines(run_folder / "metrics.jsonl")
        self._samples = JsonLines(run_folder / "samples.jsonl")
        self._run: dict[str, Any] = {"name": recipe.run_name or run_folder.resolve().name}
        self._first, self._total = 0, 0
        self._is_open = False
        self._in_background = False  # versions are asked for and MLflow's thread runs
        self._mlflow: MlflowWriter | None = None
        if is_main and recipe.logger.mlflow:
            self._mlflow = MlflowWriter(
                recipe.logger,
                run_name=self._run["name"],
                run_folder=run_folder,
                params=flatten(recipe),
                note=self.console.note,
                warn=self.console.warn,
            )

    def start(self, first_batch: int, *, total: int, facts: Iterable[tuple[str, str]] = ()) -> None:
        """Open the record of a run of `total` batches that goes on after `first_batch`.

        What an earlier process wrote beyond `first_batch` is dropped; with 0 all of it. `facts` are
        the banner's rows: they are printed, and kept for the report and MLflow.

        Raises:
            UserError: a file of the record is broken elsewhere than at its end.
        """
        self._first, self._total = first_batch, total
        if not self._is_main:
            return
        facts = list(facts)
        if facts:
            self.console.banner(facts)
        dropped = self._metrics.start(first_batch) + self._samples.start(first_batch)
        for path in sorted(self._folder.glob("eval/*.json")):
            if first_batch == 0 or int(read_json(path)[BATCH]) > first_batch:
                path.unlink()
                dropped += 1
        if dropped:
            self.console.note(f"dropped {dropped} records of steps after batch {first_batch}")
        before = read_json(self._folder / "run.json") if first_batch > 0 else {}
        # Until this process has made a step, the record is the earlier one's.
        self._run |= {"facts": facts, "environment": before.get("environment", {})}
        self._run["summary"] = {"status": "running"}
        self._is_open = True
        self._write_run()

    def log(self, batch: int, tokens: int, metrics: Mapping[str, float]) -> None:
        """Record metrics at `batch` and `tokens`; training losses get a line on the console."""
        if not self._is_main:
            return
        self._metrics.write({BATCH: batch, TOKEN: tokens, **metrics})
        if TRAIN_LOSS in metrics:
            self.console.step(batch, metrics, total=self._total)
        if self._mlflow is not None:
            self._mlflow.log(batch, {TOKEN: tokens, **metrics})
        if batch > self._first and not self._in_background:
            self._begin_background()

    def samples(self, batch: int, samples: Sequence[tuple[str, str]]) -> None:
        """Record and print texts that the model wrote: (prompt, continuation) each."""
        if not self._is_main:
            return
        for prompt, text in samples:
            self._samples.write({BATCH: batch, "prompt": prompt, "text": text})
        self.console.samples(batch, samples)

    def gauntlet(self, batch: int, result: Mapping[str, Any]) -> None:
        """Keep a gauntlet's whole result (GauntletResult.to_json) as eval/ba0000100.json."""
        if not self._is_main:
            return
        path = self._folder / "eval" / f"ba{batch:07d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {BATCH: batch, **result})

    def note(self, text: str) -> None:
        """Say what the run decided or did."""
        self.console.note(text)

    def report(self) -> Path | None:
        """Write report.html as things stand; None, and a warning, if that fails."""
        if not self._is_main:
            return None
        try:
            return write_report(self._folder)
        except Exception as error:  # a picture is not worth the run
            self.console.warn(f"report.html was not written: {type(error).__name__}: {error}")
            return None

    def close(self, status: str, final: Mapping[str, Any] | None = None) -> None:
        """End the record: `status` is finished, failed or killed; `final` goes into the report.

        Does nothing before `start`: a run that never began leaves the folder's record alone.
        """
        assert status in ("finished", "failed", "killed"), status
        if not self._is_open:
            return
        self._is_open = False
        self._metrics.close()
        self._samples.close()
        self._run["summary"] = {"status": status, **{k: plain(v) for k, v in (final or {}).items()}}
        self._write_run()
        report = self.report()
        if self._mlflow is not None:
            if report is not None:
                self._mlflow.file(report)
            self._mlflow.close(status)

    def _begin_background(self) -> None:
        """After the first step, whose time counts: ask for versions, start MLflow's thread."""
        self._in_background = True
        self._run["environment"] = environment()
        self._write_run()
        if self._mlflow is not None:
            tags = {**dict(self._run["facts"]), **self._run["environment"]}
            if "git commit" in tags:  # the name under which MLflow's pages show it
                tags["mlflow.source.git.commit"] = tags["git commit"].split()[0]
            recipe = self._folder / "recipe.yaml"
            if recipe.exists():
                self._mlflow.file(recipe)
            self._mlflow.start(resume=self._first > 0, tags=tags)

    def _write_run(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._folder / "run.json", self._run)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
    partial.replace(path)


def flatten(recipe: TrainRecipe) -> dict[str, str]:
    """Dotted key → value of every field, as MLflow's parameters; passwords hidden."""
    return {
        key: public(value) if isinstance(value, str) else json.dumps(value)
        for key, value in flat(dataclasses.asdict(recipe))
    }
