"""trackio's side of a run: rows in its project's database on this machine, for `trackio show`.

The tracker calls `trackio_target`, a `BackgroundWriter` the rest. The idea: the package's own
storage is called, each request one transaction, rather than its `Run`, which reports no failure: a
full disk would lose values with a warning, and each process of a run would be another run. A
folder's run is found again by the id kept in the folder; steps of which the database has a value
are not sent again, so a resumed run stands there once, with what was measured the first time.

Everything is in TRACKIO_DIR (~/.cache/huggingface/trackio unless set); `trackio sync` copies a
project to a Space of the Hugging Face hub.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.loggers.background_queue import (
    LogTarget,
    MetricPoint,
    RunFacts,
    Samples,
    milliseconds,
)
from llmfoundry.loggers.folder_run import FolderRun
from llmfoundry.loggers.tensorboard_logger import TEXTS, literal
from llmfoundry.recipe.logger import ResolvedLoggerConfig
from llmfoundry.redaction import public

RUN_ID_FILE = "trackio_run_id"
_OWN = ("project", "run", "timestamp", "step", "time", "metrics")  # names that trackio reserves


@dataclass
class TrackioSession:
    """An open run of a project.

    Attributes:
        storage: the package's SQLiteStorage.
        project: its name.
        run: its own name, and its id.
        config: what is kept of it once.
        first_batch: steps that earlier processes made.
        known: batches that it has a value for, by metric.
    """

    storage: Any
    project: str
    run: tuple[str, str]
    config: Mapping[str, Any]
    first_batch: int
    known: dict[str, set[int]] = field(default_factory=dict)
    max_points: int = 10_000

    def steps(self, name: str) -> Container[int]:
        """The batches for which the run has a value."""
        return self.known.get(_name(name), set())

    def send(self, points: Sequence[MetricPoint]) -> None:
        """A row for what was measured at one time, all in one transaction."""
        new = [p for p in points if p.batch not in self.steps(p.name)]
        rows = [
            (batch, when, {_name(p.name): p.value for p in group})
            for (batch, when), group in groupby(new, lambda p: (p.batch, p.milliseconds))
        ]
        self._write(rows)
        for point in new:
            self.known.setdefault(_name(point.name), set()).add(point.batch)

    def samples(self, samples: Samples) -> None:
        """The texts of a step."""
        text = "\n\n---\n\n".join(literal(prompt + text) for prompt, text in samples.texts)
        self._write([(samples.batch, samples.milliseconds, {"samples": _markdown(text)})])

    def upload(self, path: Path) -> None:
        """Show a text; the report lies in the run's folder, and trackio cannot show it."""
        if path.suffix in TEXTS:
            text = _markdown(literal(public(path.read_text(encoding="utf-8"))))
            self._write([(self.first_batch, milliseconds(), {path.stem: text})])

    def end(self, status: str) -> None:
        """Nothing: trackio has no word for how a run ended."""

    def _write(self, rows: Sequence[tuple[int, int, dict[str, Any]]]) -> None:
        """Add rows; one of the same step and names, from a try before, is passed over."""
        name, run_id = self.run
        self.storage.bulk_log(
            project=self.project,
            run=name,
            run_id=run_id,
            metrics_list=[metrics for *_, metrics in rows],
            steps=[batch for batch, *_ in rows],
            timestamps=[_time(when) for _, when, _ in rows],
            log_ids=[_row_id(run_id, batch, metrics) for batch, _, metrics in rows],
            config=dict(self.config),
        )


def trackio_target(config: ResolvedLoggerConfig, run_folder: Path) -> LogTarget:
    """The project of `logger.trackio_project`.

    Raises:
        UserError: the package is not installed.
    """
    if find_spec("trackio") is None:
        raise UserError(
            "logger.trackio: needs the package trackio; pip install 'llmfoundry-recipes[trackio]'"
        )
    return LogTarget(
        f"trackio (project {config.trackio_project})",
        partial(_open, config.trackio_project),
        lambda folder: FolderRun.at(folder / RUN_ID_FILE).forget(),
        lambda error: isinstance(error, ValueError),  # a project's name that is reserved
    )


def _open(project: str, facts: RunFacts, say: Callable[[str], None]) -> TrackioSession:
    """Import trackio's storage, and begin or continue the folder's run."""
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import TRACKIO_DIR, is_network_filesystem

    if is_network_filesystem(TRACKIO_DIR):
        say(
            f"trackio: {TRACKIO_DIR} is on a network's file system, where several runs at once may"
            " damage its database; set TRACKIO_DIR to a folder of this machine"
        )
    SQLiteStorage.validate_project_name(project)
    own = FolderRun.at(facts.folder / RUN_ID_FILE)
    own.keep(own.id or secrets.token_hex(16))
    copy = {"copied_from": own.copied_from} if own.copied_from else {}
    config = {
        **{name.lstrip("_"): value for name, value in facts.params.items()},
        **{f"run.{name}": text for name, text in {**facts.tags, **copy}.items()},
        "_Created": _time(facts.began),
        "_Username": None,
        "_Group": None,
    }
    known: dict[str, set[int]] = {}
    for row in SQLiteStorage.get_logs(project, run_id=own.id):
        for name in row.keys() - {"step", "timestamp"}:
            known.setdefault(name, set()).add(row["step"])
    return TrackioSession(
        SQLiteStorage, project, (facts.name, own.id), config, facts.first_batch, known
    )


def _name(metric: str) -> str:
    return f"metric/{metric}" if metric in _OWN else metric


def _time(when: int) -> str:
    return datetime.fromtimestamp(when / 1000, timezone.utc).isoformat()


def _row_id(run_id: str, batch: int, metrics: Mapping[str, Any]) -> str:
    names = blake2b("\n".join(sorted(metrics)).encode(), digest_size=8).hexdigest()
    return f"{run_id}/{batch}/{names}"


def _markdown(text: str) -> dict[str, str]:
    """A text as the package's own class has it in the database."""
    return {"_type": "trackio.markdown", "_value": text}
