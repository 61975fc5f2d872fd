"""Versions of registered models in MLflow: creation, comparison, scores, and `models:/NAME@best`.

A `BackgroundWriter` runs the tasks of `registration` after each save, and of `score_link` after an
evaluation. convert.py calls `register_export`. Whatever reads a checkpoint calls `find_address`,
once and on the main process, so that all ranks agree even if an alias moves.

A version is an external LoggedModel whose tags (`Tag`) contain the address of the weights and a
fingerprint; MLflow stores no weights. Each task synchronizes the registry with the run's folder, so
that versions which an outage or a kill prevented are created after the next save, resume or
scripts/track.py, and pruned checkpoints are marked. A name never refers to anything else than what
was registered: missing or changed weights are reported.

MLflow has no compare-and-set. Each process therefore first writes its version and the metric's
value, then points `best` to the best of all versions, and checks again until it does. The process
that checks last sees all versions, so that several runs may do so concurrently. `latest` is not an
alias, because MLflow reserves the word: it is the newest version whose weights exist.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from llmfoundry.checkpoint.commit import COMMIT
from llmfoundry.checkpoint.object_storage import is_url
from llmfoundry.checkpoint.open_run import find_place
from llmfoundry.checkpoint.storage import Checkpoint, Storage, batch_of
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.process_group import ALONE, World
from llmfoundry.errors import UserError
from llmfoundry.events import CHECKPOINTS
from llmfoundry.loggers.background_queue import DeferredTask, describe
from llmfoundry.loggers.metrics_file import BATCH, WALL, milliseconds, read_metrics
from llmfoundry.loggers.mlflow_logger import (
    MAX_METRICS,
    MlflowSession,
    check_uri,
    error_code,
    find_experiment,
    metric_name,
    open_client,
    run_of_folder,
    sqlite_path,
)
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.logger import LOGGERS
from llmfoundry.recipe.registry import (
    VERSION,
    BestConfig,
    ExportRegistry,
    RegistryConfig,
    name_problem,
)
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.redaction import public

CHECKPOINT = "checkpoint"  # kind of a version; the kind of an export is convert.py's `to`
BEST, LATEST = "best", "latest"
_WRITTEN = re.compile(re.escape(VERSION) + r"([^/@]+)(?:@([\w-]+)|/(\d+|latest))")
_LOOKS = 10  # checks of `best` for changes by other processes
_ALL = 200_000  # versions: the most that MLflow returns at once

Scores = Mapping[str, tuple[float, int]]
"""Measurements of some weights, and their time in milliseconds since 1970."""


class Tag:
    """Names of the tags of a version."""

    KIND = "llmfoundry.kind"
    ADDRESS = "llmfoundry.address"
    FINGERPRINT = "llmfoundry.fingerprint"
    RUN = "llmfoundry.run"
    STEP = "llmfoundry.step"
    SOURCE = "llmfoundry.exported_from"
    MODEL = "llmfoundry.model_id"
    BY, VALUE = "llmfoundry.best.by", "llmfoundry.best.value"
    PRUNED = "llmfoundry.pruned"
    UPLOADED = "llmfoundry.uploaded"
    REGISTERED = "llmfoundry.registered"  # of a LoggedModel: the model that it is a version of
    EVALUATED = "llmfoundry.evaluation"


@dataclass(frozen=True)
class VersionSource:
    """Weights that become a version.

    Attributes:
        kind: checkpoint, hf, gguf or peft.
        address: an absolute path, or a URL.
        fingerprint: fingerprint of the content.
        facts: additional tags.
        scores: metrics that the run measured, after Tag.STEP.
        is_uploaded: whether the files at `address` are uploaded to MLflow's artifacts.
    """

    kind: str
    address: str
    fingerprint: str
    facts: Mapping[str, str]
    scores: Scores = field(default_factory=dict)
    is_uploaded: bool = False

    @property
    def tags(self) -> dict[str, str]:
        """Return the tags of the version and of its LoggedModel."""
        place = {Tag.ADDRESS: public(self.address), Tag.FINGERPRINT: self.fingerprint}
        copied = {(Tag.UPLOADED if self.is_uploaded else "mlflow.model.isExternal"): "true"}
        return {Tag.KIND: self.kind, **place, **copied, **self.facts}

    def match(self, tags: Mapping[str, str]) -> bool:
        """Return whether a version or LoggedModel has these weights and is not marked deleted."""
        same = all(tags.get(name) == self.tags[name] for name in (Tag.ADDRESS, Tag.FINGERPRINT))
        return same and Tag.PRUNED not in tags


def registration(recipe: ResolvedTrainRecipe, run: Storage) -> DeferredTask | None:
    """Return the task that registers a run's checkpoints; None: the recipe registers none."""
    config = recipe.registry
    if config.name is None:
        return None
    run_name = recipe.run_name or run.folder.resolve().name
    act = partial(register_saved, config=config, run=run, run_name=run_name)
    return DeferredTask(f"versions of {config.name}", act)


def register_saved(
    session: MlflowSession,
    note: Callable[[str], None],
    *,
    config: RegistryConfig,
    run: Storage,
    run_name: str,
) -> None:
    """Synchronize the versions of a registered model with the checkpoints of a run.

    Raises:
        Exception: any error of MLflow or the store; another call does the rest.
    """
    client, name = session.client, str(config.name)
    saved = _saved_weights(run, config.best, run_name)
    prefix = public(address_of(run, run.folder / CHECKPOINTS)) + "/"
    before = [v for v in versions(client, name) if v.tags.get(Tag.ADDRESS, "").startswith(prefix)]
    for version in before:
        if Tag.PRUNED not in version.tags and not any(w.match(version.tags) for w in saved):
            when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
            client.set_model_version_tag(name, str(version.version), Tag.PRUNED, when)
    new = [w for w in saved if not any(w.match(version.tags) for version in before)]
    created = _register_new(session, name, new) if new else []
    best = settle_best(client, name) if created or before else None
    for weights, version in created:
        saved_as = Path(weights.address).name
        note(f"{saved_as} is version {version.version} of {name}{_if_best(version, best)}")
    by = _compared_by(config.best)
    if created and best is not None and by not in (None, best.tags[Tag.BY]):
        note(
            f"registry.best: {by}, but the best of {name} is by {best.tags[Tag.BY]}, and stays;"
            " write that, or another registry.name"
        )


def _register_new(
    session: MlflowSession, name: str, weights: Iterable[VersionSource]
) -> list[tuple[VersionSource, Any]]:
    """Register weights that have no version, except those whose version was deleted."""
    client = session.client
    run = client.get_run(session.run_id)
    experiment = run.info.experiment_id
    models = client.search_registered_models(f"name = '{name}'")
    if any(model.name == name for model in models):
        weights = [w for w in weights if not _was_registered(client, experiment, name, w)]
    return [(w, register(client, name, w, run, experiment)) for w in weights]


def _saved_weights(run: Storage, best: BestConfig, run_name: str) -> list[VersionSource]:
    """Return the complete checkpoints of a run, oldest first."""
    sources, scores = list[VersionSource](), measured(run.folder / "metrics.jsonl", best)
    for path in reversed(run.checkpoints()):
        batch, content = batch_of(path), fingerprint(Checkpoint(run, path))
        at = scores.get(batch, {})
        facts = {Tag.RUN: run_name, Tag.STEP: str(batch), **_value_tags(best, at)}
        if content is not None:
            sources.append(VersionSource(CHECKPOINT, address_of(run, path), content, facts, at))
    return sources


def measured(record: Path, best: BestConfig) -> dict[int, Scores]:
    """Return the metrics of a run's evaluations by step."""
    names = ("metrics/eval/", "icl/", *filter(None, [best.metric]))
    values: dict[int, dict[str, tuple[float, int]]] = {}
    if not record.exists():
        return {}
    rows = read_metrics(record, lambda name: name.startswith((BATCH, WALL, *names)), marks=names)
    for row in rows:
        batch, when = row.pop(BATCH), row.pop(WALL, 0)
        values.setdefault(batch, {}).update({name: (float(v), when) for name, v in row.items()})
    return dict(values)


def address_of(run: Storage, path: Path) -> str:
    """Return the address of a checkpoint's folder that is valid from any working directory."""
    return run.shown(path) if "://" in run.place else str(path.resolve())


def fingerprint(weights: Checkpoint | Path) -> str | None:
    """Return a hash of a checkpoint's COMMIT, which has checksums, or of an export's files.

    Returns:
        None if the checkpoint is not complete.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    if isinstance(weights, Checkpoint):
        if not weights.has_commit():
            return None
        with weights.open(COMMIT) as file:
            digest.update(file.read())
        return digest.hexdigest()
    for path in sorted([weights.resolve(strict=True), *weights.rglob("*")]):
        if path.is_file():
            name = os.path.relpath(path, weights)
            digest.update(f"{name}\0{path.stat().st_size}\0".encode(errors="surrogateescape"))
            with path.open("rb") as opened:
                while block := opened.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()


def check_registry(config: ExportRegistry) -> None:
    """Check that MLflow answers, before an export is created that will be registered.

    Raises:
        UserError: it does not.
    """
    if config.name is not None:
        uri = store_uri(config.uri)
        _asked("registry.name", uri, partial(versions, open_client(uri), config.name))


def register_export(
    config: ExportRegistry,
    kind: str,
    output: Path,
    source: Checkpoint | None,
    facts: Mapping[str, str],
) -> str:
    """Register an export as a version; return a line to log, empty if none is requested.

    `kind` is convert.py's `to`, `output` the export, `source` the checkpoint of a run that it was
    created from, if any, and `facts` are tags.

    Raises:
        UserError: MLflow rejects it; the export is kept.
    """
    if config.name is None:
        return ""
    name, uri, path = config.name, store_uri(config.uri), output.resolve()
    client, experiment = open_client(uri), str(LOGGERS["mlflow"].keys["experiment_name"])
    os.environ["MLFLOW_TRACKING_URI"] = uri  # MLflow's setting for a model without a run
    content, is_uploaded = str(fingerprint(path)), bool(config.upload)
    weights = VersionSource(kind, str(path), content, facts, is_uploaded=is_uploaded)

    def act() -> Any:
        run = None if source is None else run_of_folder(client, source.folder.parents[1])
        kept_in = run.info.experiment_id if run else find_experiment(client, uri, experiment)
        return register(client, name, weights, run, kept_in)

    version = _asked(f"registry.name: {path} is written, but not registered", uri, act)
    return f"version {version.version} of {name}"


def register(client: Any, name: str, weights: VersionSource, run: Any, experiment: str) -> Any:
    """Return the version of some weights; create it if there is none.

    The version is created last: a LoggedModel without a version, left by a kill, is reused. `run`
    is the MLflow run that created the weights, if it is in this store; `experiment` is the id of
    the LoggedModel's experiment.
    """
    for version in versions(client, name):  # from an earlier attempt whose response was lost
        if weights.match(version.tags):
            return version
    try:
        client.create_registered_model(name)
    except Exception as error:
        if error_code(error) != "RESOURCE_ALREADY_EXISTS":
            raise
    run_id = run and run.info.run_id
    left = _logged_models(client, experiment, weights)  # left by a kill
    left = [model for model in left if model.source_run_id == run_id]
    title = re.sub(r"[^\w-]", "_", f"{name}-{Path(weights.address).name}")
    arguments = {"name": title, "source_run_id": run_id, "model_type": weights.kind}
    model = (
        left[0] if left else client.create_logged_model(experiment, tags=weights.tags, **arguments)
    )
    if weights.is_uploaded:
        is_folder = Path(weights.address).is_dir()
        upload = client.log_model_artifacts if is_folder else client.log_model_artifact
        upload(model.model_id, weights.address)
    client.finalize_logged_model(model.model_id, "READY")
    if weights.scores:
        _add_metrics(client, run_id, model.model_id, weights.scores, int(weights.facts[Tag.STEP]))
    version = client.create_model_version(
        name,
        source=model.artifact_location,
        run_id=run_id,
        model_id=model.model_id,
        tags={**weights.tags, Tag.MODEL: model.model_id},
        await_creation_for=0,
    )
    client.set_logged_model_tags(model.model_id, {Tag.REGISTERED: name})
    return version


def _logged_models(client: Any, experiment: str, weights: VersionSource) -> list[Any]:
    """Return MLflow's LoggedModels of some weights."""
    same = f"tags.`{Tag.FINGERPRINT}` = '{weights.fingerprint}'"
    models = client.search_logged_models([experiment], filter_string=same)
    return [model for model in models if weights.match(model.tags)]


def _was_registered(client: Any, experiment: str, name: str, weights: VersionSource) -> bool:
    """Return whether some weights were a version of a model; if it is missing, it was deleted."""
    models = _logged_models(client, experiment, weights)
    return any(model.tags.get(Tag.REGISTERED) == name for model in models)


def versions(client: Any, name: str) -> list[Any]:
    """Return all versions of a registered model, oldest first; none if it does not exist."""
    all_versions = client.search_model_versions(f"name = '{name}'", max_results=_ALL)
    return sorted(all_versions, key=lambda version: int(version.version))


def _add_metrics(client: Any, run_id: str, model: str, scores: Scores, batch: int) -> None:
    """Log the metrics of a LoggedModel, without a second copy of the run's values."""
    from mlflow.entities import Metric

    rows = [Metric(metric_name(n), v, at, batch, model_id=model) for n, (v, at) in scores.items()]
    for start in range(0, len(rows), MAX_METRICS):
        client.log_batch(run_id, metrics=rows[start : start + MAX_METRICS])


def score_link(
    name: str, weights: Checkpoint | Path, metrics: Mapping[str, float], *, batch: int, folder: Path
) -> DeferredTask:
    """Return the task that writes an evaluation's scores to its version; `best` may then move.

    `name` is the registered model, `batch` the checkpoint, `folder` that of results.json.
    """

    def act(session: MlflowSession, note: Callable[[str], None]) -> None:
        client, content = session.client, fingerprint(weights)
        live = [v for v in versions(client, name) if Tag.PRUNED not in v.tags]
        same = [version for version in live if version.tags.get(Tag.FINGERPRINT) == content]
        if not same:
            return
        version, scores = same[-1], {key: (v, milliseconds()) for key, v in metrics.items()}
        _add_metrics(client, session.run_id, version.tags[Tag.MODEL], scores, batch)
        tags = {Tag.EVALUATED: f"{session.run_id} {public(str(folder.resolve()))}"}
        value = metrics.get(version.tags.get(Tag.BY, "").partition(" ")[2], math.nan)
        if Tag.VALUE not in version.tags and math.isfinite(value):
            tags[Tag.VALUE] = repr(value)
        for key, text in tags.items():
            client.set_model_version_tag(name, str(version.version), key, text)
        is_best = _if_best(version, settle_best(client, name))
        note(f"{VERSION}{name}/{version.version} has the scores{is_best}")

    return DeferredTask(f"scores of a version of {name}", act)


def settle_best(client: Any, name: str) -> Any:
    """Point `best` to the best version; return it, or None if no version has a value."""
    for look in range(1, _LOOKS + 1):
        every = versions(client, name)
        live = [version for version in every if Tag.PRUNED not in version.tags]
        holder = str(client.get_registered_model(name).aliases.get(BEST))
        best = _best_version(live, holder)
        while best is not None and _is_deleted(best.tags):
            live.remove(best)
            best = _best_version(live, holder)
        if best is not None and str(best.version) != holder:
            try:
                client.set_registered_model_alias(name, BEST, str(best.version))
            except Exception:  # a server responds BAD_REQUEST if two processes create an alias
                if look == _LOOKS:
                    raise
        elif best is None and holder in {str(v.version) for v in every if v not in live}:
            client.delete_registered_model_alias(name, BEST)
        else:
            return best
    return best


def _is_deleted(tags: Mapping[str, str]) -> bool:
    """Return whether a version's checkpoint was deleted.

    A path counts as deleted only if the folder of the run exists: on another machine this is
    unknown, as it is for a store that does not answer.
    """
    address = tags.get(Tag.ADDRESS, "")
    if not is_url(address):
        folder = Path(address)  # runs/NAME/checkpoints/ba0000100
        return len(folder.parents) > 2 and folder.parents[2].is_dir() and not folder.exists()
    try:
        place = find_place(address, "registry.name", ALONE)
        return isinstance(place, Checkpoint) and not place.has_commit()
    except (OSError, UserError):
        return False


def _best_version(live: Sequence[Any], holder: str) -> Any:
    """Return the best version, by the metric of the holder of `best` or of the first with one."""
    with_value = [version for version in live if math.isfinite(_rank(version.tags))]
    first = [v for v in with_value if str(v.version) == holder] or with_value
    return _best((v, v.tags) for v in with_value if v.tags[Tag.BY] == first[0].tags[Tag.BY])


def _if_best(version: Any, best: Any) -> str:
    is_best = best is not None and str(best.version) == str(version.version)
    return ", the best" if is_best else ""


def best_saved(record: Path, best: BestConfig, batches: Iterable[int]) -> int | None:
    """Return the best checkpoint of a run by its metrics.jsonl; None: none has a value."""
    scores = measured(record, best)
    return _best((batch, _value_tags(best, scores.get(batch, {}))) for batch in sorted(batches))


def _value_tags(best: BestConfig, scores: Scores) -> dict[str, str]:
    """Return the tags for the comparison: the metric, and its value if it is finite."""
    by = _compared_by(best)
    if by is None:
        return {}
    value, _ = scores.get(str(best.metric), (math.nan, 0))
    return {Tag.BY: by, **({Tag.VALUE: repr(value)} if math.isfinite(value) else {})}


def _compared_by(best: BestConfig) -> str | None:
    return None if best.metric is None else f"{best.mode} {best.metric}"


def _best(tagged: Iterable[tuple[Any, Mapping[str, str]]]) -> Any:
    """Return the best item that has a value, the first of equal ones; None: no item has a value."""
    ranked = [(_rank(tags), item) for item, tags in tagged]
    ranked = [pair for pair in ranked if math.isfinite(pair[0])]
    return min(ranked, key=lambda pair: pair[0], default=(0.0, None))[1]


def _rank(tags: Mapping[str, str]) -> float:
    """Return the value, smaller is better; NaN: it is missing or not a number."""
    try:
        return float(tags[Tag.VALUE]) * (1 if tags[Tag.BY].startswith("min ") else -1)
    except (KeyError, ValueError):
        return math.nan


def is_version(name: str | None) -> bool:
    """Return whether a name refers to a version of a registered model."""
    return name is not None and name.startswith(VERSION)


def find_address(
    written: str,
    key: str,
    world: World = ALONE,
    *,
    uri: str | None = None,
    note: Callable[[str], None],
) -> str:
    """Return the address of a version's weights; any other name is returned unchanged.

    Args:
        written: name of a checkpoint or model.
        key: recipe key.
        world: this process; all ranks call this.
        uri: MLflow's store; None, or the logger's default: that of the environment.
        note: reports the version.

    Raises:
        UserError: the version does not exist, or its weights were changed.
    """
    if not is_version(written):
        return written
    return on_rank0(world, partial(_look, written, key, uri, note))


def _look(written: str, key: str, uri: str | None, note: Callable[[str], None]) -> str:
    parts, uri = _WRITTEN.fullmatch(written), store_uri(uri)
    if parts is None:
        raise UserError(
            f"{key}: {public(written)} names no version; write {VERSION}NAME@best,"
            f" {VERSION}NAME/latest or {VERSION}NAME/3"
        )
    if problem := name_problem(parts[1]):
        raise UserError(f"{key}: {problem}")
    database = sqlite_path(uri)
    if database is not None and not database.exists():
        raise UserError(
            f"{key}: there is no registry at {public(uri)}; write registry.uri, or set"
            " MLFLOW_TRACKING_URI"
        )
    what = f"{key}: {written}"
    version = _asked(what, uri, partial(_choose, open_client(uri), *parts.groups(), what=what))
    _check_weights(version, f"{what}: version {version.version}")
    address = str(version.tags[Tag.ADDRESS])
    note(f"{what} is {VERSION}{version.name}/{version.version}, {address}")
    return address


def _check_weights(version: Any, what: str) -> None:
    """Raise an error if the weights of a version are missing or not those that were registered."""
    tags = version.tags
    if not {Tag.KIND, Tag.ADDRESS, Tag.FINGERPRINT} <= tags.keys():
        raise UserError(f"{what} was not registered from here, and says not where its weights are")
    address = tags[Tag.ADDRESS]
    try:
        place = Path(address) if tags[Tag.KIND] != CHECKPOINT else find_place(address, what, ALONE)
        assert not isinstance(place, Storage)
        content = fingerprint(place)
    except (OSError, UserError):
        content = None
    if content is None:
        since = f", as of {tags[Tag.PRUNED]}" if Tag.PRUNED in tags else ", or not on this machine"
        copy = f"mlflow artifacts download -u {VERSION}{version.name}/{version.version} -d FOLDER"
        copy = f"; MLflow (MLFLOW_TRACKING_URI) has a copy: {copy}"
        raise UserError(
            f"{what} names {address}, and nothing is there any more{since}; bring it back, or write"
            f" another version{copy if Tag.UPLOADED in tags else ''}"
        )
    if content != tags[Tag.FINGERPRINT]:
        raise UserError(
            f"{what} is not what is at {address}, which was changed or replaced since; write that"
            " path itself if you want it as it is"
        )


def store_uri(uri: str | None) -> str:
    """Return the store to search for versions, of a kind that MLflow supports."""
    default = str(LOGGERS["mlflow"].keys["tracking_uri"])
    explicit = None if uri == default else uri
    store = (
        explicit or os.environ.get("MLFLOW_REGISTRY_URI") or os.environ.get("MLFLOW_TRACKING_URI")
    )
    store = store or default
    check_uri(store, "registry.uri")
    return store


def _asked(what: str, uri: str, ask: Callable[[], Any]) -> Any:
    """Return the result of a query to MLflow; errors become a UserError."""
    try:
        return ask()
    except UserError:
        raise
    except Exception as error:  # of requests, SQLAlchemy or MLflow
        raise UserError(
            f"{what}: MLflow ({public(uri)}) does not answer: {describe(error)}; start it, or write"
            " another registry.uri or MLFLOW_TRACKING_URI"
        ) from error


def _choose(client: Any, name: str, alias: str | None, number: str | None, *, what: str) -> Any:
    every = versions(client, name)
    if not every:
        names = sorted(model.name for model in client.search_registered_models(max_results=1000))
        if name in names:
            raise UserError(f"{what}: {name} has no version yet; register one, or write another")
        raise UserError(
            f"{what}: no registered model of that name{nearest(name, names)}; there are:"
            f" {', '.join(names[:10]) or 'none'}"
        )
    if LATEST in (alias, number):
        live = (version for version in reversed(every) if Tag.PRUNED not in version.tags)
        return next((version for version in live if not _is_deleted(version.tags)), every[-1])
    aliases = client.get_registered_model(name).aliases
    number = number or str(aliases.get(alias))
    for version in every:
        if str(version.version) == number:
            return version
    there = ", ".join([*sorted(aliases), LATEST, f"1 to {every[-1].version}"])
    raise UserError(f"{what}: there is no such version or alias; there are: {there}")
