"""MLflow's side of a run: is the address one it knows, open the run, send, upload, end.

The tracker calls `mlflow_target` when a run is set up; a `BackgroundWriter` calls the rest from its
thread, because importing MLflow takes seconds. The idea: a folder's MLflow run is found again by
the id kept in the folder, so a resumed run continues the same one.

Steps up to the checkpoint that MLflow lacks come from metrics.jsonl (`steps`). A resume repeats the
steps after its checkpoint, and MLflow cannot delete what it has. With the same
recipe the repetition is exact, so values that MLflow has are not sent again, and it keeps the
wall-clock ones of the first time. With another recipe they are sent, and it shows both;
metrics.jsonl holds the steps once, always.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmfoundry.errors import UserError
from llmfoundry.events import read_events
from llmfoundry.loggers.background_queue import (
    PATIENCE_WHILE_AWAY,
    LogTarget,
    MetricPoint,
    RunFacts,
    Samples,
    event_tags,
)
from llmfoundry.loggers.folder_run import FolderRun
from llmfoundry.loggers.mlflow_database import (
    ARTIFACTS,
    move_artifacts,
    prepare_database,
    sqlite_path,
)
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.logger import ResolvedLoggerConfig
from llmfoundry.redaction import public

SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
RUN_ID_FILE = "mlflow_run_id"
KEY_TAG = "llmfoundry.key"
STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
# MLflow's limits (mlflow.utils.validation): metrics and parameters a request, characters of a name
# and of a parameter's value.
MAX_METRICS, MAX_PARAMS, MAX_NAME, MAX_VALUE = 1000, 100, 250, 6000
_LOCK_SECONDS = 30.0  # after training, for a database file that another process has locked
# Answers that a repetition would not change.
_PERMANENT = {
    "BAD_REQUEST",
    "ENDPOINT_NOT_FOUND",
    "INVALID_PARAMETER_VALUE",
    "PERMISSION_DENIED",
    "RESOURCE_DOES_NOT_EXIST",
    "UNAUTHENTICATED",
}


@dataclass(frozen=True)
class MlflowSession:
    """An open MLflow run. `known`: of steps after `first_batch`, the last that it has already."""

    client: Any
    run_id: str
    first_batch: int
    known: Mapping[str, int]
    max_points: int = MAX_METRICS

    def steps(self, name: str) -> Container[int]:
        """The batches for which the run has a value."""
        return {m.step for m in self.client.get_metric_history(self.run_id, metric_name(name))}

    def send(self, points: Sequence[MetricPoint]) -> None:
        """Write at most MAX_METRICS points in one request."""
        from mlflow.entities import Metric

        rows = [Metric(metric_name(p.name), p.value, p.milliseconds, p.batch) for p in points]
        rows = [
            row
            for row in rows
            if row.step <= self.first_batch or row.step > self.known.get(row.key, -1)
        ]
        if rows:
            self.client.log_batch(self.run_id, metrics=rows)

    def samples(self, samples: Samples) -> None:
        """Keep texts as an artifact."""
        text = "\n\n".join(f"> {prompt}{text}" for prompt, text in samples.texts)
        self.client.log_text(self.run_id, text, f"samples/ba{samples.batch:07d}.txt")

    def upload(self, path: Path) -> None:
        """Keep a text file with the run, passwords hidden."""
        self.client.log_text(self.run_id, public(path.read_text(encoding="utf-8")), path.name)

    def tags(self, tags: Mapping[str, str]) -> None:
        """Set tags in one request."""
        _set_tags(self.client, self.run_id, tags)

    def end(self, status: str) -> None:
        """Mark the run."""
        self.client.set_terminated(self.run_id, STATUS[status])


def mlflow_target(config: ResolvedLoggerConfig, run_folder: Path) -> LogTarget:
    """Where `logger.tracking_uri` points.

    Raises:
        UserError: it is of no kind that MLflow writes to.
    """
    check_uri(config.tracking_uri)
    return LogTarget(
        f"MLflow ({public(config.tracking_uri)})",
        partial(open_session, config.tracking_uri, config.experiment_name),
        lambda folder: FolderRun.at(folder / RUN_ID_FILE).forget(),
        _is_permanent,
        _LOCK_SECONDS if sqlite_path(config.tracking_uri) else PATIENCE_WHILE_AWAY,
        tag=MlflowSession.tags,
        has_registry=True,
    )


def check_uri(uri: str, key: str = "logger.tracking_uri") -> None:
    """Refuse what is not a store that MLflow writes to, without importing MLflow.

    Raises:
        UserError: an unknown kind of store, or an address without its file or host.
    """
    hint = "write sqlite:///runs/mlflow.db (a file) or http://HOST:PORT (a server)"
    shown = public(uri)
    try:
        scheme = urlsplit(uri).scheme.split("+")[0]
    except ValueError as error:  # such as a bracket without its end
        raise UserError(f"{key}: '{shown}' is no address: {error}; {hint}") from error
    if uri == "databricks":
        return
    if not scheme or scheme == "file":
        raise UserError(
            f"{key}: '{shown}' is a path, and MLflow no longer writes to folders; {hint}"
        )
    if scheme not in SCHEMES:
        close = nearest(scheme, SCHEMES)
        raise UserError(f"{key}: '{shown}': MLflow has no store of kind '{scheme}'{close}; {hint}")
    if scheme == "sqlite" and sqlite_path(uri) is None:
        raise UserError(f"{key}: '{shown}' names no file; {hint}, with three slashes")
    if scheme == "sqlite" and str(sqlite_path(uri)).startswith("~"):
        home = Path("~").expanduser()
        raise UserError(f"{key}: '{shown}': ~ is not expanded here; write sqlite:///{home}/...")
    if scheme in ("http", "https") and not urlsplit(uri).hostname:
        raise UserError(f"{key}: '{shown}' names no host; {hint}")


def open_session(
    uri: str, experiment: str, facts: RunFacts, say: Callable[[str], None]
) -> MlflowSession:
    """Import MLflow quietly, find or create the experiment, and begin or continue the run."""
    client = open_client(uri, say)
    return _begin(client, find_experiment(client, uri, experiment), facts, say)


def _print_error(line: str) -> None:
    print(line, file=sys.stderr)


def open_client(uri: str, say: Callable[[str], None] = _print_error) -> Any:
    """Return MLflow's client for the runs and registered models of one store.

    Args:
        uri: the store. The database file of an sqlite store is created if need be.
        say: prints that a broken database file was replaced.
    """
    _silence()
    from mlflow.tracking import MlflowClient

    _silence()  # once more: the import sets levels of its own
    if (database := sqlite_path(uri)) is not None:
        prepare_database(database, say)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def find_experiment(client: Any, uri: str, experiment: str) -> str:
    """The id of the experiment of a name, which is made where there is none.

    Raises:
        RuntimeError: it was deleted, or there is no MLflow.
    """
    database, location = sqlite_path(uri), None
    if database is not None:
        # Beside the database and absolute, so that `mlflow ui` finds it from any folder.
        location = (database.parent / ARTIFACTS).resolve().as_uri()
    found = client.get_experiment_by_name(experiment)
    if database is not None and move_artifacts(database, str(location)):
        found = client.get_experiment_by_name(experiment)
    if found is None:
        number = client.create_experiment(experiment, artifact_location=location)
        found = client.get_experiment(number)
    if not found.experiment_id:
        raise RuntimeError("its answer names no experiment: what is at this address is not MLflow")
    if found.lifecycle_stage == "deleted":
        raise RuntimeError(
            f"experiment '{experiment}' was deleted; restore it (mlflow experiments restore"
            f" --experiment-id {found.experiment_id}) or write another logger.experiment_name"
        )
    return str(found.experiment_id)


def metric_name(name: str) -> str:
    """`name` with what MLflow forbids replaced by `_`, at most its 250 characters."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:MAX_NAME]


def param_value(value: Any) -> str:
    """A parameter's value as text within MLflow's limit, marked where it was cut."""
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= MAX_VALUE:
        return text
    mark = f" ... (cut; {len(text)} characters)"
    return text[: MAX_VALUE - len(mark)] + mark


def _begin(
    client: Any, experiment_id: str, facts: RunFacts, say: Callable[[str], None]
) -> MlflowSession:
    """Continue the folder's MLflow run, or create one."""
    own = FolderRun.at(facts.folder / RUN_ID_FILE)
    run = existing_run(client, own.id) if own.id else None
    if run is None and own.is_pending:
        run = _run_with_key(client, experiment_id, own.id)
    if run is None:
        if own.id and not own.is_pending:
            say(f"MLflow: run {own.id} is no longer in the store; a new one begins")
        return _create(client, experiment_id, facts, own, say)
    run_id = str(run.info.run_id)
    own.keep(run_id)
    client.update_run(run_id, status="RUNNING")
    changed = _tag_changes(client, run, facts.params, say)
    new = {key: v for key, v in facts.params.items() if key not in run.data.params}
    _log_params(client, run_id, new, say)
    # MLflow returns the last value of each metric together with its step.
    known = {} if changed else {m.key: m.step for m in run.data.to_proto().metrics}
    return MlflowSession(client, run_id, facts.first_batch, known)


def _create(
    client: Any,
    experiment_id: str,
    facts: RunFacts,
    own: FolderRun,
    say: Callable[[str], None],
) -> MlflowSession:
    """Create the folder's MLflow run.

    A key is kept in the folder before the run is created: a process that is killed before it knows
    the run's id finds the run again by the key.
    """
    tags = {**facts.tags, KEY_TAG: own.keep_pending()}
    if own.copied_from and existing_run(client, own.copied_from) is not None:
        say(
            f"MLflow: {facts.folder} is a copy of a folder that logs into run {own.copied_from};"
            " it begins a run of its own below that"
        )
        tags["mlflow.parentRunId"] = own.copied_from
    run = client.create_run(experiment_id, start_time=facts.began, tags=tags, run_name=facts.name)
    # Before the parameters: if those fail, the next try continues this run.
    own.keep(str(run.info.run_id))
    _log_params(client, run.info.run_id, facts.params, say)
    return MlflowSession(client, run.info.run_id, facts.first_batch, {})


def _run_with_key(client: Any, experiment_id: str, key: str) -> Any:
    """Return the run that a killed process has created under a key; None if it did not."""
    runs = client.search_runs([experiment_id], filter_string=f"tags.`{KEY_TAG}` = '{key}'")
    return runs[0] if runs else None


def tag_ended(uri: str, folder: Path, status: str) -> None:
    """Bring the tags of a run whose processes have ended; and its end, if they could not report it.

    Raises:
        Exception: whatever MLflow raises.
    """
    client = open_client(uri)
    run = run_of_folder(client, folder)
    if run is None:
        return
    tags = event_tags(read_events(folder))
    if tags:
        _set_tags(client, run.info.run_id, tags)
    if run.info.status == "RUNNING":
        client.set_terminated(run.info.run_id, STATUS[status])


def run_of_folder(client: Any, folder: Path) -> Any:
    """The run that a folder is, or None where it was not logged in this store."""
    run_id = FolderRun.at(folder / RUN_ID_FILE).id
    return existing_run(client, run_id) if run_id else None


def existing_run(client: Any, run_id: str) -> Any:
    """The run of that id, or None where it is unknown or was deleted."""
    try:
        run = client.get_run(run_id)
    except Exception as error:
        if error_code(error) == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def _tag_changes(
    client: Any, run: Any, params: Mapping[str, Any], say: Callable[[str], None]
) -> bool:
    """Whether parameters differ from the last process's; MLflow keeps the first, so tag them."""
    last = run.data.params | {
        tag.removeprefix("resumed."): value
        for tag, value in run.data.tags.items()
        if tag.startswith("resumed.")
    }
    changed = {k: v for k, v in params.items() if k in last and last[k] != param_value(v)}
    for key, value in changed.items():
        client.set_tag(run.info.run_id, f"resumed.{key}", param_value(value))
    if changed:
        names = ", ".join(sorted(changed))
        say(f"MLflow keeps a run's first parameters; these changed and are tags: {names}")
    return bool(changed)


def _log_params(
    client: Any, run_id: str, params: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    from mlflow.entities import Param

    for key in [k for k, v in params.items() if isinstance(v, str) and len(v) > MAX_VALUE]:
        say(
            f"MLflow: {key} exceeds its {MAX_VALUE} characters and is cut there; recipe.yaml is not"
        )
    rows = [Param(metric_name(k), param_value(v)) for k, v in params.items()]
    for i in range(0, len(rows), MAX_PARAMS):
        client.log_batch(run_id, params=rows[i : i + MAX_PARAMS])


def _set_tags(client: Any, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(metric_name(k), v) for k, v in tags.items()])


def _is_permanent(error: Exception) -> bool:
    """Whether trying again is useless: a driver that is not installed, or a refusal."""
    return type(error).__name__ == "NoSuchModuleError" or error_code(error) in _PERMANENT


def error_code(error: Exception) -> str | None:
    """MLflow's name for the kind of error, where it has one."""
    return getattr(error, "error_code", None)


def _silence() -> None:
    """No telemetry, no lines of MLflow's own, and our retries instead of its."""
    for variable, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "CRITICAL",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # with its password
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
        "GIT_PYTHON_REFRESH": "quiet",
    }.items():
        os.environ.setdefault(variable, value)
    for name in ("mlflow", "alembic"):
        # its errors reach us; as lines of its own they are tracebacks, with the values of a request
        logging.getLogger(name).setLevel(logging.CRITICAL)
