"""trackio logger: writes rows into the database of a project on this machine, for `trackio show`.

The tracker calls `trackio_target`; a `BackgroundWriter` calls everything else. The session calls
the package's storage class directly, one transaction per request. The package's `Run` is not used:
it reports no failures, so that a full disk would lose values, and it would start another run for
each process. The save folder stores the id of its run, so that a resumed run continues the same
run. Values that the database has are not sent again, so repeated steps keep their first values.

All data is in TRACKIO_DIR (default: ~/.cache/huggingface/trackio). `trackio sync` copies a project
to a Space of the Hugging Face hub.
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
    TextSamples,
    milliseconds,
)
from llmfoundry.loggers.folder_run import FolderRun
from llmfoundry.loggers.tensorboard_logger import TEXTS, literal
from llmfoundry.recipe.logger import ResolvedLoggerConfig
from llmfoundry.redaction import public

RUN_ID_FILE = "trackio_run_id"
_RESERVED = ("project", "run", "timestamp", "step", "time", "metrics")  # names of trackio's columns


@dataclass
class TrackioSession:
    """An open run of a project.

    Attributes:
        storage: class SQLiteStorage of the package.
        project: name of the project.
        run: name and id of the run.
        config: parameters and tags of the run, stored once.
        first_batch: number of steps that earlier processes made.
        known: batches for which the database has a value, by metric.
        max_points: maximal number of metrics per request.
    """

    storage: Any
    project: str
    run: tuple[str, str]
    config: Mapping[str, Any]
    first_batch: int
    known: dict[str, set[int]] = field(default_factory=dict)
    max_points: int = 10_000

    def steps(self, name: str) -> Container[int]:
        """Return the batches for which the run has a value of a metric."""
        return self.known.get(_name(name), set())

    def send(self, points: Sequence[MetricPoint]) -> None:
        """Write a row for each step and time, all in one transaction."""
        new = [p for p in points if p.batch not in self.steps(p.name)]
        rows = []
        for (batch, when), group in groupby(new, lambda p: (p.batch, p.milliseconds)):
            rows.append((batch, when, {_name(p.name): p.value for p in group}))
        self._write(rows)
        for point in new:
            self.known.setdefault(_name(point.name), set()).add(point.batch)

    def samples(self, samples: TextSamples) -> None:
        """Write the generated texts of a step."""
        texts = [literal(prompt + text) for prompt, text in samples.texts]
        markdown = _markdown("\n\n---\n\n".join(texts))
        self._write([(samples.batch, samples.milliseconds, {"samples": markdown})])

    def upload(self, path: Path) -> None:
        """Write a text file as a row. Other files, such as the HTML report, are ignored."""
        if path.suffix in TEXTS:
            text = _markdown(literal(public(path.read_text(encoding="utf-8"))))
            self._write([(self.first_batch, milliseconds(), {path.stem: text})])

    def end(self, status: str) -> None:
        """Do nothing: trackio does not store the status of a run."""

    def _write(self, rows: Sequence[tuple[int, int, dict[str, Any]]]) -> None:
        """Add rows (batch, milliseconds, metrics); rows of an earlier attempt are not duplicated.

        The storage recognizes them by their log id: run, step and metric names.
        """
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
    """Return the target for the project `logger.trackio_project`.

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
        lambda error: isinstance(error, ValueError),  # the project name is reserved
    )


def _open(project: str, facts: RunFacts, say: Callable[[str], None]) -> TrackioSession:
    """Import trackio's storage, and start or continue the folder's run."""
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import TRACKIO_DIR, is_network_filesystem

    if is_network_filesystem(TRACKIO_DIR):
        say(
            f"trackio: {TRACKIO_DIR} is on a network's file system, where several runs at once may"
            " damage its database; set TRACKIO_DIR to a folder of this machine"
        )
    SQLiteStorage.validate_project_name(project)
    folder_run = FolderRun.at(facts.folder / RUN_ID_FILE)
    folder_run.keep(folder_run.id or secrets.token_hex(16))

    # parameters and tags of the run
    params = {name.lstrip("_"): value for name, value in facts.params.items()}
    tags = {f"run.{name}": text for name, text in facts.tags.items()}
    if folder_run.copied_from:
        tags["run.copied_from"] = folder_run.copied_from
    config = {
        **params,
        **tags,
        "_Created": _time(facts.began),
        "_Username": None,
        "_Group": None,
    }

    # steps that the database has
    known: dict[str, set[int]] = {}
    for row in SQLiteStorage.get_logs(project, run_id=folder_run.id):
        for name in row.keys() - {"step", "timestamp"}:
            known.setdefault(name, set()).add(row["step"])
    return TrackioSession(
        SQLiteStorage, project, (facts.name, folder_run.id), config, facts.first_batch, known
    )


def _name(metric: str) -> str:
    """Return the name of a metric in the database; reserved names get a prefix."""
    return f"metric/{metric}" if metric in _RESERVED else metric


def _time(when: int) -> str:
    """Return milliseconds since 1970 as an ISO date."""
    return datetime.fromtimestamp(when / 1000, timezone.utc).isoformat()


def _row_id(run_id: str, batch: int, metrics: Mapping[str, Any]) -> str:
    """Return the id by which the storage recognizes a row that it already has."""
    names = blake2b("\n".join(sorted(metrics)).encode(), digest_size=8).hexdigest()
    return f"{run_id}/{batch}/{names}"


def _markdown(text: str) -> dict[str, str]:
    """Return a text in the database format of the package's class Markdown."""
    return {"_type": "trackio.markdown", "_value": text}
