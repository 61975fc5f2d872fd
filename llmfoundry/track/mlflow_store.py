"""MLflow's side of a run: is the address one it knows, open the run, send, upload, end.

`mlflow_writer` calls `check_uri` when a run is set up and everything else from its thread, because
importing MLflow takes seconds. The idea: a folder's MLflow run is found again by the id kept in the
folder, so a resumed run goes on in the same one.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import nearest

SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
RUN_ID_FILE = "mlflow_run_id"
# MLflow's limits (mlflow.utils.validation): metrics and parameters a request, characters of a name
# and of a parameter's value.
MAX_METRICS, MAX_PARAMS, MAX_NAME, MAX_VALUE = 1000, 100, 250, 6000


@dataclass(frozen=True)
class Point:
    """One value of one metric."""

    name: str
    value: float
    milliseconds: int
    batch: int


@dataclass(frozen=True)
class RunFacts:
    """What MLflow is told about a run besides its metrics. `say` prints one line.

    `began` is in milliseconds since 1970: the run is older than the thread that creates it.
    """

    experiment: str
    name: str
    folder: Path
    began: int
    params: Mapping[str, str]
    tags: Mapping[str, str]
    say: Callable[[str], None]


@dataclass(frozen=True)
class Session:
    """An open MLflow run. Every method may raise whatever MLflow and its store raise."""

    client: Any
    run_id: str

    def send(self, points: list[Point]) -> bool:
        """Write at most MAX_METRICS points in one request."""
        from mlflow.entities import Metric

        metrics = [Metric(p.name, p.value, p.milliseconds, p.batch) for p in points]
        self.client.log_batch(self.run_id, metrics=metrics)
        return True

    def upload(self, path: Path) -> bool:
        """Keep a file with the run."""
        self.client.log_artifact(self.run_id, str(path))
        return True

    def end(self, status: str) -> bool:
        """Mark the run FINISHED, FAILED or KILLED."""
        self.client.set_terminated(self.run_id, status)
        return True


def check_uri(uri: str) -> None:
    """Refuse what is no store that MLflow writes to, without importing MLflow.

    Raises:
        UserError: an unknown kind of store, or an address without its file or host.
    """
    key, scheme = "logger.tracking_uri", urlsplit(uri).scheme.split("+")[0]
    hint = "write sqlite:///runs/mlflow.db (a file) or http://HOST:PORT (a server)"
    if uri == "databricks":
        return
    if not scheme or scheme == "file":
        raise UserError(f"{key}: '{uri}' is a path, and MLflow no longer writes to folders; {hint}")
    if scheme not in SCHEMES:
        close = nearest(scheme, SCHEMES)
        raise UserError(f"{key}: '{uri}': MLflow has no store of kind '{scheme}'{close}; {hint}")
    if scheme == "sqlite" and sqlite_path(uri) is None:
        raise UserError(f"{key}: '{uri}' names no file; {hint}, with three slashes")
    if scheme in ("http", "https") and not urlsplit(uri).hostname:
        raise UserError(f"{key}: '{uri}' names no host; {hint}")


def open_session(uri: str, facts: RunFacts) -> Session:
    """Import MLflow quietly, find or create the experiment, and begin or continue the run."""
    _silence()
    from mlflow.tracking import MlflowClient

    _silence()  # once more: the import sets levels of its own
    database, location = sqlite_path(uri), None
    if database is not None:
        database.parent.mkdir(parents=True, exist_ok=True)
        # Beside the database and absolute, so that `mlflow ui` finds it from any folder.
        location = (database.parent / "mlartifacts").resolve().as_uri()
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(facts.experiment)
    if found is None:
        number = client.create_experiment(facts.experiment, artifact_location=location)
        found = client.get_experiment(number)
    if found.lifecycle_stage == "deleted":
        raise RuntimeError(
            f"experiment '{facts.experiment}' was deleted; restore it (mlflow experiments restore"
            f" --experiment-id {found.experiment_id}) or write another logger.experiment_name"
        )
    return Session(client, _begin(client, found.experiment_id, facts))


def sqlite_path(uri: str) -> Path | None:
    """The database's file in `sqlite:///relative` or `sqlite:////absolute`; None elsewhere."""
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", uri)
    return Path(match[1]) if match and match[1] != ":memory:" else None


def public(text: str) -> str:
    """`text` with the password of any address in it hidden."""
    return re.sub(r"://([^/@:\s]*):[^/@\s]*@", r"://\1:***@", text)


def metric_name(name: str) -> str:
    """`name` with what MLflow forbids replaced by `_`, at most its 250 characters."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:MAX_NAME]


def cut(value: str) -> str:
    """A parameter's value within MLflow's limit, marked where it was cut."""
    if len(value) <= MAX_VALUE:
        return value
    mark = f" ... (cut; {len(value)} characters)"
    return value[: MAX_VALUE - len(mark)] + mark


def error_code(error: Exception) -> str | None:
    """MLflow's name for the kind of error, where it has one."""
    return getattr(error, "error_code", None)


def _begin(client: Any, experiment_id: str, facts: RunFacts) -> str:
    """Continue the folder's MLflow run, or create one. Returns its id."""
    file = facts.folder / RUN_ID_FILE
    run_id = file.read_text().strip() if file.exists() else ""
    run = _existing(client, run_id) if run_id else None
    if run is None:
        if run_id:
            facts.say(f"MLflow: run {run_id} is no longer in the store; a new one begins")
        run = client.create_run(
            experiment_id, start_time=facts.began, tags=dict(facts.tags), run_name=facts.name
        )
        # Before the parameters: if those fail, the next try continues this run.
        file.write_text(f"{run.info.run_id}\n")
        params = facts.params
    else:
        client.update_run(run_id, status="RUNNING")
        params = _new_params(client, run, facts)
    _log_params(client, run.info.run_id, params, facts.say)
    return str(run.info.run_id)


def _existing(client: Any, run_id: str) -> Any:
    """The run of that id, or None where it is unknown or was deleted."""
    try:
        run = client.get_run(run_id)
    except Exception as error:
        if error_code(error) == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def _new_params(client: Any, run: Any, facts: RunFacts) -> dict[str, str]:
    """Parameters that MLflow's run lacks; those that changed become tags, as it keeps the first."""
    known = run.data.params
    changed = {k: v for k, v in facts.params.items() if k in known and known[k] != cut(v)}
    for key, value in changed.items():
        client.set_tag(run.info.run_id, f"resumed.{key}", cut(value))
    if changed:
        names = ", ".join(sorted(changed))
        facts.say(f"MLflow keeps a run's first parameters; these changed and are tags: {names}")
    return {k: v for k, v in facts.params.items() if k not in known}


def _log_params(
    client: Any, run_id: str, params: Mapping[str, str], say: Callable[[str], None]
) -> None:
    from mlflow.entities import Param

    for key in [k for k, v in params.items() if len(v) > MAX_VALUE]:
        say(
            f"MLflow: {key} exceeds its {MAX_VALUE} characters and is cut there; recipe.yaml is not"
        )
    rows = [Param(metric_name(k), cut(v)) for k, v in params.items()]
    for i in range(0, len(rows), MAX_PARAMS):
        client.log_batch(run_id, params=rows[i : i + MAX_PARAMS])


def _silence() -> None:
    """No telemetry, no lines of MLflow's own, and our retries instead of its."""
    for variable, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
        "GIT_PYTHON_REFRESH": "quiet",
    }.items():
        os.environ.setdefault(variable, value)
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
