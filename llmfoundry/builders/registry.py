"""What a version of a registered model names: `models:/NAME@best` becomes a folder or a URL.

`eval`, `generate`, `chat`, `serve`, `convert`, load_path and model.pretrained call `find_address`,
once and on the main process, so that an alias that moves meanwhile is the same for all. The idea: a
name is never resolved to anything else than what was registered: weights that are gone, pruned or
others than they were are a line that says so. `register_export` and `link_scores` write.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmfoundry.checkpoint.commit import COMMIT
from llmfoundry.checkpoint.run_folder import find_place
from llmfoundry.checkpoint.storage import Checkpoint
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.launch import ALONE, World
from llmfoundry.errors import UserError
from llmfoundry.loggers.background_queue import describe
from llmfoundry.loggers.mlflow_logger import (
    RUN_ID_FILE,
    check_uri,
    existing_run,
    find_experiment,
    open_client,
    sqlite_path,
)
from llmfoundry.loggers.registry import (
    BEST,
    CHECKPOINT,
    Tag,
    Weights,
    add_scores,
    fingerprint,
    fingerprint_of_files,
    register,
    versions,
)
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.logger import LOGGERS, LoggerConfig
from llmfoundry.recipe.registry import VERSION, ExportRegistry, name_problem
from llmfoundry.redaction import public
from llmfoundry.retry import backoff, retry

_WRITTEN = re.compile(re.escape(VERSION) + r"([^/@]+)(?:@([\w-]+)|/(\d+|latest))")
_LATEST = "latest"
_FETCHED = Path("~/.cache/llmfoundry/registry")
_PATIENCE = 4  # tries of what is written once, seconds apart


@dataclass(frozen=True)
class Found:
    """A version: where its weights are, MLflow's object, and where it was found."""

    address: str
    version: Any
    uri: str

    @property
    def label(self) -> str:
        """As users write it."""
        return f"{VERSION}{self.version.name}/{self.version.version}"


def is_version(name: str | None) -> bool:
    """Whether a name is a registered model's version."""
    return name is not None and name.startswith(VERSION)


def find_address(
    written: str,
    key: str,
    world: World = ALONE,
    *,
    uri: str | None = None,
    note: Callable[[str], None],
) -> str:
    """Where the weights of a version are; what is no version's name is returned as it is.

    Args:
        written: a checkpoint's or a model's name.
        key: the recipe's.
        world: this process; all of its processes call.
        uri: MLflow's store; None: as the environment says.
        note: reports which version it is.

    Raises:
        UserError: there is no such version, or not these weights any more.
    """
    if not is_version(written):
        return written

    def find() -> str:
        found = find_version(written, key, uri=uri)
        note(f"{key}: {written} is {found.label}, {public(found.address)}")
        return found.address

    return on_rank0(world, find)


def store_uri(uri: str | None) -> str:
    """Where versions are looked for."""
    variables = (os.environ.get(f"MLFLOW_{kind}_URI") for kind in ("REGISTRY", "TRACKING"))
    return uri or next(filter(None, variables), str(LOGGERS["mlflow"].keys["tracking_uri"]))


def find_version(written: str, key: str, *, uri: str | None = None) -> Found:
    """The version of a name, whose weights are there and are those that were registered.

    Raises:
        UserError: as `find_address`.
    """
    parts = _WRITTEN.fullmatch(written)
    if parts is None:
        raise UserError(
            f"{key}: {public(written)} names no version; write {VERSION}NAME@best,"
            f" {VERSION}NAME/latest or {VERSION}NAME/3"
        )
    name, alias, number = parts.groups()
    if problem := name_problem(name):
        raise UserError(f"{key}: {problem}")
    uri = store_uri(uri)
    what = f"{key}: {written}"
    client = open_store(uri, key)
    version = _asked(what, uri, partial(_choose, client, name, alias, number, what))
    if pruned := version.tags.get(Tag.PRUNED):
        raise UserError(
            f"{what}: the weights of version {version.version} are gone, as of {pruned}; write"
            " another version"
        )
    kind = version.tags.get(Tag.KIND)
    if kind is None or not {Tag.ADDRESS, Tag.FINGERPRINT} <= version.tags.keys():
        raise UserError(f"{what}: was not registered from here, and says not where its weights are")
    if kind == "gguf":
        raise UserError(
            f"{what}: version {version.version} is a file for llama.cpp,"
            f" {version.tags[Tag.ADDRESS]}; write a version that is a checkpoint or of to=hf"
        )
    return Found(_weights_of(version, what, client, uri), version, uri)


def open_store(uri: str, key: str) -> Any:
    """MLflow's client of a store that is there.

    Raises:
        UserError: it is of no kind that MLflow knows, or its file is not there.
    """
    check_uri(uri, "registry.uri")
    database = sqlite_path(uri)
    if database is not None and not database.exists():
        raise UserError(
            f"{key}: there is no registry at {public(uri)}; write registry.uri, or set"
            " MLFLOW_TRACKING_URI"
        )
    return open_client(uri)


def _asked(what: str, uri: str, ask: Callable[[], Any]) -> Any:
    """What MLflow answers.

    Raises:
        UserError: it does not.
    """
    try:
        return ask()
    except UserError:
        raise
    except Exception as error:  # requests', SQLAlchemy's, MLflow's
        raise UserError(
            f"{what}: MLflow ({public(uri)}) does not answer: {describe(error)}; start it, or write"
            " another registry.uri or MLFLOW_TRACKING_URI"
        ) from error


def _choose(client: Any, name: str, alias: str | None, number: str | None, what: str) -> Any:
    every = {str(version.version): version for version in versions(client, name)}
    if not every:
        names = [model.name for model in client.search_registered_models(max_results=1000)]
        there = ", ".join(sorted(names)[:10]) or "none"
        raise UserError(
            f"{what}: no registered model of that name{nearest(name, names)}; there are: {there}"
        )
    if _LATEST in (alias, number):
        live = [found for found in every.values() if Tag.PRUNED not in found.tags]
        return (live or [*every.values()])[-1]
    if alias is not None:
        aliases = client.get_registered_model(name).aliases
        if alias not in aliases:
            why = ", or no version has a value of its metric" if alias == BEST else ""
            there = ", ".join([*sorted(aliases), _LATEST])
            raise UserError(f"{what}: there is no alias '{alias}'{why}; there are: {there}")
        number = str(aliases[alias])
    if number not in every:
        raise UserError(f"{what}: no version {number}; the newest is {[*every][-1]}")
    return every[number]


def _weights_of(version: Any, what: str, client: Any, uri: str) -> str:
    """The address of a version's weights, which are there, unchanged."""
    address = version.tags[Tag.ADDRESS]
    try:
        now = _fingerprint(address, version.tags[Tag.KIND], what)
    except (OSError, UserError) as error:
        if Tag.UPLOADED in version.tags:
            return _asked(what, uri, partial(_fetch, client, version, uri, what))
        raise UserError(
            f"{what}: version {version.version} names {address}, and nothing is there any more, or"
            " not on this machine; bring it back, or write another version"
        ) from error
    if now != version.tags.get(Tag.FINGERPRINT):
        raise UserError(
            f"{what}: what is at {address} is not what became version {version.version}: it was"
            " changed or replaced since; write that path itself if you want it as it is"
        )
    return str(address)


def _fingerprint(address: str, kind: str, what: str) -> str:
    if kind != CHECKPOINT:
        return fingerprint_of_files(Path(address).resolve(strict=True))
    place = find_place(address, what, ALONE)
    assert isinstance(place, Checkpoint)
    with place.open(COMMIT) as file:
        return fingerprint(file)


def _fetch(client: Any, version: Any, uri: str, what: str) -> str:
    """The copy of an export in MLflow's artifacts, on this machine's disk."""
    import mlflow.artifacts

    where = client.get_logged_model(version.tags[Tag.MODEL]).artifact_location
    folder = _FETCHED.expanduser() / version.tags[Tag.MODEL]
    copy = folder / where.rstrip("/").rpartition("/")[2]  # where MLflow puts it
    registered = version.tags[Tag.FINGERPRINT]
    if not copy.exists() or fingerprint_of_files(copy) != registered:
        folder.mkdir(parents=True, exist_ok=True)
        mlflow.artifacts.download_artifacts(
            artifact_uri=where, dst_path=str(folder), tracking_uri=uri
        )
    if fingerprint_of_files(copy) != registered:
        raise UserError(f"{what}: the copy in MLflow's artifacts is not what was registered")
    return str(copy)


def check_registry(config: ExportRegistry) -> None:
    """Before an export is made that is to be registered: whether MLflow answers.

    Raises:
        UserError: it does not.
    """
    if config.name is not None:
        uri = store_uri(config.uri)
        check_uri(uri, "registry.uri")
        client = open_client(uri)
        _asked("registry.name", uri, partial(versions, client, config.name))


def register_export(
    config: ExportRegistry,
    kind: str,
    output: Path,
    source: Checkpoint | None,
    facts: Mapping[str, str],
) -> str:
    """Make an export a version; a line that says which, empty where none is asked for.

    Args:
        config: the recipe's section.
        kind: convert.py's `to`.
        output: what was written.
        source: the checkpoint that it was made of, if it was one of ours.
        facts: tags.

    Raises:
        UserError: MLflow does not take it; the export stays.
    """
    if config.name is None:
        return ""
    name, uri, path = config.name, store_uri(config.uri), output.resolve()
    client = open_client(uri)
    upload = path if config.upload else None
    weights = Weights(kind, str(path), fingerprint_of_files(path), facts, upload)

    def act() -> Any:
        for version in versions(client, name):  # of a try whose answer was lost
            if weights.tags.items() <= version.tags.items():
                return version
        if (run_id := _run_of(client, source)) is not None:
            return register(client, name, weights, run_id=run_id)
        experiment = find_experiment(client, uri, str(LOGGERS["mlflow"].keys["experiment_name"]))
        return register(client, name, weights, experiment_id=experiment)

    version = _asked(f"registry.name: {path} is written, but not registered", uri, _patient(act))
    return f"version {version.version} of {name}"


def _run_of(client: Any, source: Checkpoint | None) -> str | None:
    """The MLflow run that has saved a checkpoint, if it is in this store."""
    file = None if source is None else source.folder.parents[1] / RUN_ID_FILE
    if file is None or not file.is_file():
        return None
    run = existing_run(client, file.read_text().strip())
    return None if run is None else str(run.info.run_id)


def _patient(act: Callable[[], Any]) -> Callable[[], Any]:
    """Try a few times."""

    def again(error: Exception, failures: int) -> float:
        if failures >= _PATIENCE:
            raise error
        return backoff(failures, first=1.0, longest=8.0)

    return lambda: retry(act, again=again)


def version_of(weights: Checkpoint | Path, name: str, uri: str) -> Found | None:
    """The version that a checkpoint or an export became; None: it is none.

    Raises:
        Exception: whatever MLflow raises.
    """
    if isinstance(weights, Path):
        now = fingerprint_of_files(weights)
    else:
        with weights.open(COMMIT) as file:
            now = fingerprint(file)
    found = [v for v in versions(open_client(uri), name) if v.tags.get(Tag.FINGERPRINT) == now]
    return Found(str(weights), found[-1], uri) if found else None


def logger_uri(logger: LoggerConfig) -> str | None:
    """The store that a recipe's logger names; None: it leaves it to the default."""
    uri = logger.tracking_uri if logger.mlflow else None
    return uri if uri != LOGGERS["mlflow"].keys["tracking_uri"] else None


def link_scores(
    found: Found, metrics: Mapping[str, float], *, batch: int, folder: Path, name: str
) -> str:
    """Give an evaluation's scores to a version; a line that says so.

    Raises:
        Exception: whatever MLflow raises.
    """
    client = open_client(found.uri)
    act = partial(add_scores, client, found.version, metrics, batch=batch, folder=folder, name=name)
    best = _patient(act)()
    is_best = best is not None and str(best.version) == str(found.version.version)
    return f"{found.label}{', the best' if is_best else ''}"
