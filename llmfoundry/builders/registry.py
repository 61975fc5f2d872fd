"""Versions of registered models in MLflow: made, compared, scored; and what `models:/NAME@best` is.

A `BackgroundWriter` does the tasks of `registration` after each save, and of `score_link` after an
evaluation; convert.py calls `register_export`; whatever takes a checkpoint calls `find_address`,
once and on the main process, so that an alias that moves meanwhile is the same for all.

A version is an external LoggedModel whose tags (`Tag`) say where the weights are and what they are
(a fingerprint); MLflow gets no weights. The registry is made what the run's folder is, each time,
so that what an outage or a kill has left out is there after the next save, resume or
scripts/track.py, and what was pruned is marked. A name never becomes anything else than what was
registered: weights that are gone, or others than they were, are a line that says so.

MLflow has no compare-and-set. So each process first writes its version and the metric's value, then
points `best` to the best of all versions, and looks again until it does: whoever looks last sees
every version that was there, so that several runs may do so at once. `latest` is no alias (MLflow
reserves the word): it is the newest version whose weights are there.
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

CHECKPOINT = "checkpoint"  # a version's kind; of exports it is convert.py's `to`
BEST, LATEST = "best", "latest"
_WRITTEN = re.compile(re.escape(VERSION) + r"([^/@]+)(?:@([\w-]+)|/(\d+|latest))")
_LOOKS = 10  # at what others do to `best` meanwhile
_ALL = 200_000  # versions: as many as MLflow gives at once

Scores = Mapping[str, tuple[float, int]]
"""What was measured of some weights, and when, in milliseconds since 1970."""


class Tag:
    """Names of a version's tags."""

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
    REGISTERED = "llmfoundry.registered"  # of a LoggedModel: the model whose version it was made
    EVALUATED = "llmfoundry.evaluation"


@dataclass(frozen=True)
class VersionSource:
    """What becomes a version.

    Attributes:
        kind: checkpoint, hf, gguf or peft.
        address: an absolute path, or a URL.
        fingerprint: of their content.
        facts: further tags.
        scores: what the run measured of them, after Tag.STEP.
        is_uploaded: to MLflow's artifacts, from `address`.
    """

    kind: str
    address: str
    fingerprint: str
    facts: Mapping[str, str]
    scores: Scores = field(default_factory=dict)
    is_uploaded: bool = False

    @property
    def tags(self) -> dict[str, str]:
        """A version's, and its LoggedModel's."""
        place = {Tag.ADDRESS: public(self.address), Tag.FINGERPRINT: self.fingerprint}
        copied = {(Tag.UPLOADED if self.is_uploaded else "mlflow.model.isExternal"): "true"}
        return {Tag.KIND: self.kind, **place, **copied, **self.facts}

    def match(self, tags: Mapping[str, str]) -> bool:
        """Whether a version, or a LoggedModel, is theirs, and was not marked as gone."""
        same = all(tags.get(name) == self.tags[name] for name in (Tag.ADDRESS, Tag.FINGERPRINT))
        return same and Tag.PRUNED not in tags


def registration(recipe: ResolvedTrainRecipe, run: Storage) -> DeferredTask | None:
    """What makes a model's versions those of a run's checkpoints; None: the recipe names none."""
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
    """Make a registered model's versions those of the checkpoints that a run has.

    Raises:
        Exception: whatever MLflow or the store raises; calling again does what is left.
    """
    client, name = session.client, str(config.name)
    saved = _saved_weights(run, config.best, run_name)
    own = public(address_of(run, run.folder / CHECKPOINTS)) + "/"
    before = [v for v in versions(client, name) if v.tags.get(Tag.ADDRESS, "").startswith(own)]
    for version in before:
        if Tag.PRUNED not in version.tags and not any(w.match(version.tags) for w in saved):
            when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
            client.set_model_version_tag(name, str(version.version), Tag.PRUNED, when)
    new = [w for w in saved if not any(w.match(version.tags) for version in before)]
    made = _register_new(session, name, new) if new else []
    best = settle_best(client, name) if made or before else None
    for weights, version in made:
        saved_as = Path(weights.address).name
        note(f"{saved_as} is version {version.version} of {name}{_if_best(version, best)}")
    by = _compared_by(config.best)
    if made and best is not None and by not in (None, best.tags[Tag.BY]):
        note(
            f"registry.best: {by}, but the best of {name} is by {best.tags[Tag.BY]}, and stays;"
            " write that, or another registry.name"
        )


def _register_new(
    session: MlflowSession, name: str, weights: Iterable[VersionSource]
) -> list[tuple[VersionSource, Any]]:
    """Register weights that have no version; those whose version was deleted are left out."""
    client = session.client
    run = client.get_run(session.run_id)
    experiment = run.info.experiment_id
    models = client.search_registered_models(f"name = '{name}'")
    if any(model.name == name for model in models):
        weights = [w for w in weights if not _was_registered(client, experiment, name, w)]
    return [(w, register(client, name, w, run, experiment)) for w in weights]


def _saved_weights(run: Storage, best: BestConfig, run_name: str) -> list[VersionSource]:
    """A run's complete checkpoints, oldest first."""
    found, scores = list[VersionSource](), measured(run.folder / "metrics.jsonl", best)
    for path in reversed(run.checkpoints()):
        batch, content = batch_of(path), fingerprint(Checkpoint(run, path))
        at = scores.get(batch, {})
        facts = {Tag.RUN: run_name, Tag.STEP: str(batch), **_value_tags(best, at)}
        if content is not None:
            found.append(VersionSource(CHECKPOINT, address_of(run, path), content, facts, at))
    return found


def measured(record: Path, best: BestConfig) -> dict[int, Scores]:
    """What a run's evaluations have found, by the steps after which they were."""
    names = ("metrics/eval/", "icl/", *filter(None, [best.metric]))
    found: dict[int, dict[str, tuple[float, int]]] = {}
    if not record.exists():
        return {}
    rows = read_metrics(record, lambda name: name.startswith((BATCH, WALL, *names)), marks=names)
    for row in rows:
        batch, when = row.pop(BATCH), row.pop(WALL, 0)
        found.setdefault(batch, {}).update({name: (float(v), when) for name, v in row.items()})
    return dict(found)


def address_of(run: Storage, path: Path) -> str:
    """What a version calls a checkpoint's folder, from anywhere."""
    return run.shown(path) if "://" in run.place else str(path.resolve())


def fingerprint(weights: Checkpoint | Path) -> str | None:
    """Of a checkpoint's COMMIT, which has its files' checksums, or of an export's names and bytes.

    Returns:
        None: there is no complete checkpoint.

    Raises:
        OSError: something cannot be read.
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
    """Before an export is made that is to be registered: whether MLflow answers.

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
    """Make an export a version; a line that says which, empty where none is asked for.

    `kind` is convert.py's `to`, `output` what it wrote, `source` the checkpoint that it was made
    of, if it was one of ours, `facts` are tags.

    Raises:
        UserError: MLflow does not take it; the export stays.
    """
    if config.name is None:
        return ""
    name, uri, path = config.name, store_uri(config.uri), output.resolve()
    client, experiment = open_client(uri), str(LOGGERS["mlflow"].keys["experiment_name"])
    os.environ["MLFLOW_TRACKING_URI"] = uri  # where MLflow looks for a model that has no run
    content, is_uploaded = str(fingerprint(path)), bool(config.upload)
    weights = VersionSource(kind, str(path), content, facts, is_uploaded=is_uploaded)

    def act() -> Any:
        run = None if source is None else run_of_folder(client, source.folder.parents[1])
        kept_in = run.info.experiment_id if run else find_experiment(client, uri, experiment)
        return register(client, name, weights, run, kept_in)

    version = _asked(f"registry.name: {path} is written, but not registered", uri, act)
    return f"version {version.version} of {name}"


def register(client: Any, name: str, weights: VersionSource, run: Any, experiment: str) -> Any:
    """The version of some weights, which is made if there is none.

    It is made last: a LoggedModel that a kill has left without one is taken up. `run` is MLflow's
    that made them, if it is in this store; `experiment` is the LoggedModel's, by its id.
    """
    for version in versions(client, name):  # of a try whose answer was lost
        if weights.match(version.tags):
            return version
    try:
        client.create_registered_model(name)
    except Exception as error:
        if error_code(error) != "RESOURCE_ALREADY_EXISTS":
            raise
    run_id = run and run.info.run_id
    left = _logged_models(client, experiment, weights)  # of a kill
    left = [model for model in left if model.source_run_id == run_id]
    title = re.sub(r"[^\w-]", "_", f"{name}-{Path(weights.address).name}")
    given = {"name": title, "source_run_id": run_id, "model_type": weights.kind}
    model = left[0] if left else client.create_logged_model(experiment, tags=weights.tags, **given)
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
    """MLflow's LoggedModels of some weights."""
    same = f"tags.`{Tag.FINGERPRINT}` = '{weights.fingerprint}'"
    models = client.search_logged_models([experiment], filter_string=same)
    return [model for model in models if weights.match(model.tags)]


def _was_registered(client: Any, experiment: str, name: str, weights: VersionSource) -> bool:
    """Whether some weights were a version of a model: one that is missing now was deleted."""
    models = _logged_models(client, experiment, weights)
    return any(model.tags.get(Tag.REGISTERED) == name for model in models)


def versions(client: Any, name: str) -> list[Any]:
    """All versions of a registered model, oldest first; none where there is no such model."""
    found = client.search_model_versions(f"name = '{name}'", max_results=_ALL)
    return sorted(found, key=lambda version: int(version.version))


def _add_metrics(client: Any, run_id: str, model: str, scores: Scores, batch: int) -> None:
    """What was measured of a LoggedModel; of a run's own values MLflow keeps no second copy."""
    from mlflow.entities import Metric

    rows = [Metric(metric_name(n), v, at, batch, model_id=model) for n, (v, at) in scores.items()]
    for start in range(0, len(rows), MAX_METRICS):
        client.log_batch(run_id, metrics=rows[start : start + MAX_METRICS])


def score_link(
    name: str, weights: Checkpoint | Path, metrics: Mapping[str, float], *, batch: int, folder: Path
) -> DeferredTask:
    """What gives an evaluation's scores to the version of its weights; `best` may then move to it.

    `name` is the registered model's, `batch` the checkpoint's, `folder` that of results.json.
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
    """Point `best` to the best version; the version, None: there is none to compare."""
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
            except Exception:  # a server answers BAD_REQUEST where two make an alias at once
                if look == _LOOKS:
                    raise
        elif best is None and holder in {str(v.version) for v in every if v not in live}:
            client.delete_registered_model_alias(name, BEST)
        else:
            return best
    return best


def _is_deleted(tags: Mapping[str, str]) -> bool:
    """Whether a version's checkpoint was deleted.

    A path counts as deleted only if the folder that held the run is there: on another machine it
    is unknown. So is a store that does not answer.
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
    """As the holder is compared; where it is not, as the first that has a value."""
    with_value = [version for version in live if math.isfinite(_rank(version.tags))]
    first = [v for v in with_value if str(v.version) == holder] or with_value
    return _best((v, v.tags) for v in with_value if v.tags[Tag.BY] == first[0].tags[Tag.BY])


def _if_best(version: Any, best: Any) -> str:
    is_best = best is not None and str(best.version) == str(version.version)
    return ", the best" if is_best else ""


def best_saved(record: Path, best: BestConfig, batches: Iterable[int]) -> int | None:
    """The best of a run's checkpoints, by its metrics.jsonl; None: none has a value."""
    scores = measured(record, best)
    return _best((batch, _value_tags(best, scores.get(batch, {}))) for batch in sorted(batches))


def _value_tags(best: BestConfig, scores: Scores) -> dict[str, str]:
    """By what a version is compared, and its value where that is finite."""
    by = _compared_by(best)
    if by is None:
        return {}
    value, _ = scores.get(str(best.metric), (math.nan, 0))
    return {Tag.BY: by, **({Tag.VALUE: repr(value)} if math.isfinite(value) else {})}


def _compared_by(best: BestConfig) -> str | None:
    return None if best.metric is None else f"{best.mode} {best.metric}"


def _best(tagged: Iterable[tuple[Any, Mapping[str, str]]]) -> Any:
    """Of what has a value the first that none is better than; None: nothing has."""
    ranked = [(_rank(tags), found) for found, tags in tagged]
    ranked = [pair for pair in ranked if math.isfinite(pair[0])]
    return min(ranked, key=lambda pair: pair[0], default=(0.0, None))[1]


def _rank(tags: Mapping[str, str]) -> float:
    """Less is better; NaN: it has no value, or somebody wrote one that is no number."""
    try:
        return float(tags[Tag.VALUE]) * (1 if tags[Tag.BY].startswith("min ") else -1)
    except (KeyError, ValueError):
        return math.nan


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
        uri: MLflow's store; None, or the logger's default: as the environment says.
        note: reports which version it is.

    Raises:
        UserError: there is no such version, or not these weights any more.
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
    """Whether the weights of a version are there, and are those that were registered."""
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
    """Where versions are looked for, which is of a kind that MLflow knows."""
    default = str(LOGGERS["mlflow"].keys["tracking_uri"])
    given = None if uri == default else uri
    found = given or os.environ.get("MLFLOW_REGISTRY_URI") or os.environ.get("MLFLOW_TRACKING_URI")
    found = found or default
    check_uri(found, "registry.uri")
    return found


def _asked(what: str, uri: str, ask: Callable[[], Any]) -> Any:
    """What MLflow answers."""
    try:
        return ask()
    except UserError:
        raise
    except Exception as error:  # requests', SQLAlchemy's, MLflow's
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
