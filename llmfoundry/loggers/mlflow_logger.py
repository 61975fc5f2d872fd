"""MLflow logger: checks the address, opens the run, sends metrics, uploads files, ends the run.

The tracker calls `mlflow_target` when a run is set up. A `BackgroundWriter` calls everything else
from its thread, because importing MLflow takes seconds. The save folder stores the id of its MLflow
run, so that a resumed run continues the same MLflow run.

On resume, values up to the checkpoint that MLflow lacks are sent from metrics.jsonl. Steps after
the checkpoint are repeated, and MLflow cannot delete values. With the same recipe, the repetition
is exact: values that MLflow has are not sent again, and it keeps the first wall-clock values. With
a changed recipe, they are sent again and MLflow shows both. metrics.jsonl always has each step
once.
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
    TextSamples,
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
# limits of MLflow (mlflow.utils.validation): metrics and parameters per request, characters of a
# name and of a parameter's value
MAX_METRICS, MAX_PARAMS, MAX_NAME, MAX_VALUE = 1000, 100, 250, 6000
_LOCK_SECONDS = 30.0  # retry time after training for a database that another process has locked
# error codes of permanent errors
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
    """An open MLflow run.

    Attributes:
        client: MlflowClient of the store.
        run_id: id of the run.
        first_batch: step of the checkpoint that the run resumed from.
        known: last step that MLflow has of each metric. Values of later steps are sent; values
            between `first_batch` and this step are repetitions.
        max_points: maximal number of metrics per request.
    """

    client: Any
    run_id: str
    first_batch: int
    known: Mapping[str, int]
    max_points: int = MAX_METRICS

    def steps(self, name: str) -> Container[int]:
        """Return the batches for which the run has a value of a metric."""
        history = self.client.get_metric_history(self.run_id, metric_name(name))
        return {metric.step for metric in history}

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

    def samples(self, samples: TextSamples) -> None:
        """Store generated texts as an artifact."""
        text = "\n\n".join(f"> {prompt}{text}" for prompt, text in samples.texts)
        self.client.log_text(self.run_id, text, f"samples/ba{samples.batch:07d}.txt")

    def upload(self, path: Path) -> None:
        """Store a text file with the run, passwords masked."""
        self.client.log_text(self.run_id, public(path.read_text(encoding="utf-8")), path.name)

    def tags(self, tags: Mapping[str, str]) -> None:
        """Set tags in one request."""
        _set_tags(self.client, self.run_id, tags)

    def end(self, status: str) -> None:
        """Set the final status of the run."""
        self.client.set_terminated(self.run_id, STATUS[status])


def mlflow_target(config: ResolvedLoggerConfig, run_folder: Path) -> LogTarget:
    """Return the target for the store at `logger.tracking_uri`.

    Raises:
        UserError: MLflow does not support this kind of store.
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
    """Check the address of a store without importing MLflow.

    Raises:
        UserError: the kind of store is unknown, or the address has no file or host.
    """
    hint = "write sqlite:///runs/mlflow.db (a file) or http://HOST:PORT (a server)"
    shown = public(uri)
    try:
        scheme = urlsplit(uri).scheme.split("+")[0]
    except ValueError as error:  # for example an unclosed bracket
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
    """Import MLflow, find or create the experiment, and start or continue the folder's run."""
    client = open_client(uri, say)
    return _begin(client, find_experiment(client, uri, experiment), facts, say)


def _print_error(line: str) -> None:
    print(line, file=sys.stderr)


def open_client(uri: str, say: Callable[[str], None] = _print_error) -> Any:
    """Return MLflow's client for the runs and registered models of one store.

    Args:
        uri: address of the store. The database file of an sqlite store is created if needed.
        say: prints that a broken database file was replaced.
    """
    _silence()
    from mlflow.tracking import MlflowClient

    _silence()  # again, because the import changes the log levels
    database = sqlite_path(uri)
    if database is not None:
        prepare_database(database, say)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def find_experiment(client: Any, uri: str, experiment: str) -> str:
    """Return the id of the experiment with this name; create it if it does not exist.

    Raises:
        RuntimeError: the experiment was deleted, or the server is not MLflow.
    """
    # artifacts are next to the database, at an absolute address: `mlflow ui` may run anywhere
    database, location = sqlite_path(uri), None
    if database is not None:
        location = (database.parent / ARTIFACTS).resolve().as_uri()

    # look the experiment up, again after its addresses were corrected
    entity = client.get_experiment_by_name(experiment)
    if database is not None and move_artifacts(database, str(location)):
        entity = client.get_experiment_by_name(experiment)
    if entity is None:
        experiment_id = client.create_experiment(experiment, artifact_location=location)
        entity = client.get_experiment(experiment_id)

    if not entity.experiment_id:
        raise RuntimeError("its answer names no experiment: what is at this address is not MLflow")
    if entity.lifecycle_stage == "deleted":
        raise RuntimeError(
            f"experiment '{experiment}' was deleted; restore it (mlflow experiments restore"
            f" --experiment-id {entity.experiment_id}) or write another logger.experiment_name"
        )
    return str(entity.experiment_id)


def metric_name(name: str) -> str:
    """Return `name` with forbidden characters replaced by `_`, within MLflow's length limit."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:MAX_NAME]


def param_value(value: Any) -> str:
    """Return a parameter's value as text, truncated to MLflow's limit with a mark."""
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= MAX_VALUE:
        return text
    mark = f" ... (cut; {len(text)} characters)"
    return text[: MAX_VALUE - len(mark)] + mark


def _begin(
    client: Any, experiment_id: str, facts: RunFacts, say: Callable[[str], None]
) -> MlflowSession:
    """Continue the folder's MLflow run, or create a run."""
    # look the run up by the id in the folder
    folder_run = FolderRun.at(facts.folder / RUN_ID_FILE)
    run = existing_run(client, folder_run.id) if folder_run.id else None
    if run is None and folder_run.is_pending:
        run = _run_with_key(client, experiment_id, folder_run.id)
    if run is None:
        if folder_run.id and not folder_run.is_pending:
            say(f"MLflow: run {folder_run.id} is no longer in the store; a new one begins")
        return _create(client, experiment_id, facts, folder_run, say)

    # continue it, with the parameters of this process
    run_id = str(run.info.run_id)
    folder_run.keep(run_id)
    client.update_run(run_id, status="RUNNING")
    has_changes = _tag_changes(client, run, facts.params, say)
    new_params = {key: v for key, v in facts.params.items() if key not in run.data.params}
    _log_params(client, run_id, new_params, say)

    # MLflow returns the last value of each metric together with its step
    last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
    known = {} if has_changes else last_steps
    return MlflowSession(client, run_id, facts.first_batch, known)


def _create(
    client: Any,
    experiment_id: str,
    facts: RunFacts,
    folder_run: FolderRun,
    say: Callable[[str], None],
) -> MlflowSession:
    """Create the folder's MLflow run.

    A key is stored in the folder before the run is created. If the process is killed before it
    knows the id of the run, the next process finds the run by this key.
    """
    tags = {**facts.tags, KEY_TAG: folder_run.keep_pending()}
    original = folder_run.copied_from
    if original and existing_run(client, original) is not None:
        say(
            f"MLflow: {facts.folder} is a copy of a folder that logs into run {original};"
            " it begins a run of its own below that"
        )
        tags["mlflow.parentRunId"] = original
    run = client.create_run(experiment_id, start_time=facts.began, tags=tags, run_name=facts.name)
    # store the id before the parameters: if they fail, the next attempt continues this run
    folder_run.keep(str(run.info.run_id))
    _log_params(client, run.info.run_id, facts.params, say)
    return MlflowSession(client, run.info.run_id, facts.first_batch, {})


def _run_with_key(client: Any, experiment_id: str, key: str) -> Any:
    """Return the run that a killed process created with a key; None if there is no such run."""
    runs = client.search_runs([experiment_id], filter_string=f"tags.`{KEY_TAG}` = '{key}'")
    return runs[0] if runs else None


def tag_ended(uri: str, folder: Path, status: str) -> None:
    """Send the event tags of a run whose processes have exited, and its status if it is still open.

    Raises:
        Exception: an error of MLflow.
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
    """Return the MLflow run of a save folder; None if it was not logged in this store."""
    run_id = FolderRun.at(folder / RUN_ID_FILE).id
    return existing_run(client, run_id) if run_id else None


def existing_run(client: Any, run_id: str) -> Any:
    """Return the run with this id; None if it is unknown or was deleted."""
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
    """Tag the parameters that differ from those of the previous process.

    MLflow cannot change the parameters of a run, so changed values become tags `resumed.KEY`.

    Returns:
        Whether any parameter changed.
    """
    previous = dict(run.data.params)
    for tag, value in run.data.tags.items():
        if tag.startswith("resumed."):
            previous[tag.removeprefix("resumed.")] = value
    changed = {}
    for key, value in params.items():
        if key in previous and previous[key] != param_value(value):
            changed[key] = value
    for key, value in changed.items():
        client.set_tag(run.info.run_id, f"resumed.{key}", param_value(value))
    if changed:
        names = ", ".join(sorted(changed))
        say(f"MLflow keeps a run's first parameters; these changed and are tags: {names}")
    return bool(changed)


def _log_params(
    client: Any, run_id: str, params: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Send parameters, and report those that exceed MLflow's length limit."""
    from mlflow.entities import Param

    for key, value in params.items():
        if isinstance(value, str) and len(value) > MAX_VALUE:
            say(
                f"MLflow: {key} exceeds its {MAX_VALUE} characters and is cut there; recipe.yaml is"
                " not"
            )
    rows = [Param(metric_name(k), param_value(v)) for k, v in params.items()]
    for i in range(0, len(rows), MAX_PARAMS):
        client.log_batch(run_id, params=rows[i : i + MAX_PARAMS])


def _set_tags(client: Any, run_id: str, tags: Mapping[str, str]) -> None:
    """Set tags in one request."""
    from mlflow.entities import RunTag

    run_tags = [RunTag(metric_name(name), text) for name, text in tags.items()]
    client.log_batch(run_id, tags=run_tags)


def _is_permanent(error: Exception) -> bool:
    """Return whether an error is permanent: a missing database driver, or a refusal."""
    return type(error).__name__ == "NoSuchModuleError" or error_code(error) in _PERMANENT


def error_code(error: Exception) -> str | None:
    """Return MLflow's code of an error; None for errors without a code."""
    return getattr(error, "error_code", None)


def _silence() -> None:
    """Turn off MLflow's telemetry, output and retries; the writer retries itself."""
    for variable, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "CRITICAL",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the URL may contain a password
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
        "GIT_PYTHON_REFRESH": "quiet",
    }.items():
        os.environ.setdefault(variable, value)
    for name in ("mlflow", "alembic"):
        # errors reach the writer as exceptions; logged tracebacks would show request contents
        logging.getLogger(name).setLevel(logging.CRITICAL)
