"""Versions of registered models in MLflow: made of what a run has saved, compared, scored.

A `BackgroundWriter` calls `register_saved` after each save, `commands` call `register` for an
export and `add_scores` for an evaluation; `builders/registry.py` finds what a version names. The
idea: a version is an external LoggedModel of the run, whose tags (`Tag`) say where the weights are
and what they are (a fingerprint); MLflow gets no weights. The registry is made what the run's
folder is, each time, so that what an outage or a kill has left out is there after the next save,
resume or scripts/track.py, and what was pruned is marked.

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
from pathlib import Path
from typing import IO, Any, Protocol

from llmfoundry.loggers.metrics import BATCH, WALL, milliseconds, read_metrics
from llmfoundry.loggers.mlflow_logger import (
    MAX_METRICS,
    RUN_ID_FILE,
    error_code,
    existing_run,
    metric_name,
)
from llmfoundry.recipe.registry import RegistryConfig
from llmfoundry.redaction import public

BEST, COMMIT = "best", "COMMIT"
CHECKPOINT = "checkpoint"  # a version's kind; of exports it is convert.py's `to`
_LOOKS = 10  # at what others do to `best` meanwhile


class Tag:
    """Names of a version's tags."""

    KIND = "llmfoundry.kind"
    ADDRESS = "llmfoundry.address"
    FINGERPRINT = "llmfoundry.fingerprint"
    FOLDER = "llmfoundry.run_folder"
    RUN = "llmfoundry.run"
    STEP = "llmfoundry.step"
    RECIPE = "llmfoundry.recipe"
    SOURCE = "llmfoundry.exported_from"
    MODEL = "llmfoundry.model_id"
    METRIC, MODE = "llmfoundry.best.metric", "llmfoundry.best.mode"
    VALUE = "llmfoundry.best.value"
    PRUNED = "llmfoundry.pruned"
    UPLOADED = "llmfoundry.uploaded"
    EVALUATED = "llmfoundry.evaluation"


class SavedRun(Protocol):
    """What `checkpoint.storage.Storage` has, which this file does not import: it needs torch."""

    folder: Path
    place: str

    def checkpoints(self) -> list[Path]:
        """Newest first."""

    def shown(self, path: Path) -> str:
        """Its URL, where the run has one."""

    def has_commit(self, folder: Path) -> bool:
        """Whether a checkpoint is complete."""

    def open(self, path: Path) -> IO[bytes]:
        """A file to read."""


class RunSession(Protocol):
    """An open MLflow run."""

    client: Any
    run_id: str


@dataclass(frozen=True)
class Weights:
    """What becomes a version.

    Attributes:
        kind: checkpoint, hf, gguf or peft.
        address: an absolute path, or a URL.
        fingerprint: of their content.
        facts: further tags.
        upload: a file or folder to copy to MLflow's artifacts.
    """

    kind: str
    address: str
    fingerprint: str
    facts: Mapping[str, str] = field(default_factory=dict)
    upload: Path | None = None

    @property
    def tags(self) -> dict[str, str]:
        """A version's."""
        own = {
            Tag.KIND: self.kind,
            Tag.ADDRESS: public(self.address),
            Tag.FINGERPRINT: self.fingerprint,
        }
        return {**own, **self.facts, **({Tag.UPLOADED: "true"} if self.upload else {})}


class Evaluations:
    """What a run's evaluations have measured after which steps, as its record has it.

    Attributes:
        fingerprints: of checkpoints, by their steps, as far as they were read.
    """

    def __init__(self, config: RegistryConfig) -> None:
        self.metric, self.mode = config.best.metric, config.best.mode
        self.fingerprints: dict[int, str] = {}
        self._at: dict[int, tuple[int, dict[str, float]]] = {}

    def read(self, record: Path) -> None:
        """Begin with what metrics.jsonl has."""
        wanted = {BATCH, WALL}
        rows = read_metrics(record, lambda n: n in wanted or self._is_one(n))
        for row in rows if record.exists() else ():
            self.add(row.pop(BATCH), row.pop(WALL, milliseconds()), row)

    def add(self, batch: int, when: int, metrics: Mapping[str, float]) -> None:
        """What is logged after a step, at a time in milliseconds."""
        found = {name: float(value) for name, value in metrics.items() if self._is_one(name)}
        if found:
            _, before = self._at.get(batch, (when, {}))
            self._at[batch] = (when, {**before, **found})

    def drop_after(self, batch: int) -> None:
        """The run went back."""
        self.fingerprints = {at: found for at, found in self.fingerprints.items() if at <= batch}
        self._at = {at: found for at, found in self._at.items() if at <= batch}

    def at(self, batch: int) -> tuple[int, dict[str, float]]:
        """When the weights of a step were evaluated, and what was found."""
        return self._at.get(batch, (0, {}))

    def tags(self, batch: int) -> dict[str, str]:
        """By what a version is compared, and its value."""
        if self.metric is None or self.mode is None:
            return {}
        value = self.at(batch)[1].get(self.metric, math.nan)
        measured = {Tag.VALUE: repr(value)} if math.isfinite(value) else {}
        return {Tag.METRIC: self.metric, Tag.MODE: self.mode, **measured}

    def best(self, batches: Iterable[int]) -> int | None:
        """The best of a run's checkpoints, of the first where there are several."""
        return _best((batch, self.tags(batch)) for batch in sorted(batches))

    def _is_one(self, name: str) -> bool:
        is_score = name.startswith(("metrics/", "icl/")) and not name.startswith("metrics/train/")
        return is_score or name == self.metric


def _best(tagged: Iterable[tuple[Any, Mapping[str, str]]]) -> Any:
    """Of what has a value the first that none is better than; None: nothing has."""
    best, best_value = None, math.inf
    for found, tags in tagged:
        value = _value(tags) * (1 if tags.get(Tag.MODE) == "min" else -1)
        if value < best_value:  # not of NaN
            best, best_value = found, value
    return best


def _value(tags: Mapping[str, str]) -> float:
    """By which a version is compared; NaN: it is not, or somebody wrote a tag that is no number."""
    try:
        value = float(tags.get(Tag.VALUE, math.nan)) if Tag.METRIC in tags else math.nan
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def register_saved(
    session: RunSession,
    note: Callable[[str], None],
    *,
    name: str,
    run: SavedRun,
    facts: Mapping[str, str],
    evaluations: Evaluations,
) -> None:
    """Make a registered model's versions those of the checkpoints that a run has.

    Args:
        session: MLflow's run.
        note: reports each version that is made.
        name: the registered model's.
        run: where its checkpoints are.
        facts: tags of all of its versions.
        evaluations: what was measured.

    Raises:
        Exception: whatever MLflow raises; calling again does what is left.
    """
    client, folder = session.client, address_of(run, run.folder)
    there = {}
    for path in reversed(run.checkpoints()):
        if (found := _fingerprint_of_checkpoint(run, path, evaluations.fingerprints)) is not None:
            there[address_of(run, path)] = (path, found)
    known = [v for v in versions(client, name) if v.tags.get(Tag.FOLDER) == public(folder)]
    known = [v for v in known if Tag.PRUNED not in v.tags]
    has = {public(at): fingerprint for at, (_, fingerprint) in there.items()}
    kept = [v for v in known if has.get(v.tags.get(Tag.ADDRESS)) == v.tags.get(Tag.FINGERPRINT)]
    for version in known:
        if version not in kept:
            _mark_pruned(client, version)
    new = []
    for at, (path, fingerprint) in there.items():
        if public(at) not in {version.tags.get(Tag.ADDRESS) for version in kept}:
            batch = int(path.name[2:])
            tags = {Tag.FOLDER: public(folder), Tag.RECIPE: public(f"{at}/recipe.yaml")}
            tags |= {Tag.STEP: str(batch), **facts, **evaluations.tags(batch)}
            weights = Weights(CHECKPOINT, at, fingerprint, tags)
            version = register(client, name, weights, run_id=session.run_id)
            _add_metrics(client, session.run_id, version, *evaluations.at(batch), batch=batch)
            new.append((version, path.name))
    best = settle_best(client, name)
    for version, saved in new:
        is_best = best is not None and str(best.version) == str(version.version)
        note(f"{saved} is version {version.version} of {name}{', the best' if is_best else ''}")
    _warn_of_other_metric(note, name, best, evaluations, is_new=bool(new))


def _warn_of_other_metric(
    note: Callable[[str], None], name: str, best: Any, evaluations: Evaluations, *, is_new: bool
) -> None:
    if best is None or not is_new or evaluations.metric is None:
        return
    theirs, mode = best.tags[Tag.METRIC], best.tags.get(Tag.MODE)
    if (theirs, mode) != (evaluations.metric, evaluations.mode):
        note(
            f"registry.best.metric: {evaluations.metric}, but the best of {name} is compared by"
            f" {theirs} ({mode}), and stays; write that, or another registry.name"
        )


def address_of(run: SavedRun, path: Path) -> str:
    """What a version calls a run's folder or a checkpoint, from anywhere."""
    return run.shown(path) if "://" in run.place else str(path.resolve())


def _fingerprint_of_checkpoint(run: SavedRun, path: Path, known: dict[int, str]) -> str | None:
    """Of a complete one; None: it is being written or removed."""
    batch = int(path.name[2:])
    if batch not in known:
        if not run.has_commit(path):
            return None
        try:
            with run.open(path / COMMIT) as file:
                known[batch] = fingerprint(file)
        except FileNotFoundError:
            return None
    return known[batch]


def fingerprint(commit: IO[bytes]) -> str:
    """Of a checkpoint, by its COMMIT, which has the checksums of all of its files."""
    return hashlib.sha256(commit.read()).hexdigest()


def fingerprint_of_files(path: Path) -> str:
    """Of the content of a file, or of all files below a folder and their names.

    Raises:
        OSError: one cannot be read.
    """
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    digest = hashlib.sha256()
    for file in files:
        name = "" if file == path else file.relative_to(path).as_posix()
        digest.update(f"{name}\0{file.stat().st_size}\0".encode(errors="surrogateescape"))
        with file.open("rb") as opened:
            while block := opened.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def versions(client: Any, name: str) -> list[Any]:
    """All versions of a registered model, oldest first; none where there is no such model."""
    found, token = list[Any](), None
    while True:
        page = client.search_model_versions(f"name = '{name}'", max_results=1000, page_token=token)
        found += page
        token = page.token
        if not token:
            return sorted(found, key=lambda version: int(version.version))


def register(
    client: Any,
    name: str,
    weights: Weights,
    *,
    run_id: str | None = None,
    experiment_id: str | None = None,
) -> Any:
    """Make a version; of the run's experiment, or of one that is given."""
    try:
        client.create_registered_model(name)
    except Exception as error:
        if error_code(error) != "RESOURCE_ALREADY_EXISTS":
            raise
    if run_id is not None:
        experiment_id = client.get_run(run_id).info.experiment_id
    stem = re.sub(r"[^\w-]", "_", f"{name}-{Path(weights.address).name}")
    external = {} if weights.upload else {"mlflow.model.isExternal": "true"}
    model = client.create_logged_model(
        experiment_id,
        name=stem,
        source_run_id=run_id,
        tags={**weights.tags, **external},
        model_type=weights.kind,
    )
    if weights.upload is not None:
        try:
            _upload(client, model.model_id, weights.upload)
        except Exception:
            client.finalize_logged_model(model.model_id, "FAILED")
            raise
    client.finalize_logged_model(model.model_id, "READY")
    return client.create_model_version(
        name,
        source=model.artifact_location,
        run_id=run_id,
        model_id=model.model_id,
        tags={**weights.tags, Tag.MODEL: model.model_id},
        await_creation_for=0,
    )


def _upload(client: Any, model_id: str, path: Path) -> None:
    if path.is_dir():
        client.log_model_artifacts(model_id, str(path))
    else:
        client.log_model_artifact(model_id, str(path))


def _mark_pruned(client: Any, version: Any) -> None:
    """Say that a version's weights are gone; `settle_best` and who resolves names pass it over."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    client.set_model_version_tag(version.name, str(version.version), Tag.PRUNED, when)


def settle_best(client: Any, name: str) -> Any:
    """Point `best` to the best version; the version, None: there is none to compare."""
    for look in range(1, _LOOKS + 1):
        every = versions(client, name)
        live = [version for version in every if Tag.PRUNED not in version.tags]
        holder = str(client.get_registered_model(name).aliases.get(BEST))
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


def _best_version(live: Sequence[Any], holder: str) -> Any:
    """By the holder's metric; where it has none, by the first that a version has."""
    with_value = [version for version in live if math.isfinite(_value(version.tags))]
    first = [v for v in with_value if str(v.version) == holder] or with_value
    how = [first[0].tags.get(name) for name in (Tag.METRIC, Tag.MODE)] if first else []
    same = (v for v in with_value if [v.tags.get(n) for n in (Tag.METRIC, Tag.MODE)] == how)
    return _best((version, version.tags) for version in same)


def _add_metrics(
    client: Any, run_id: str, version: Any, when: int, metrics: Mapping[str, float], *, batch: int
) -> None:
    """What was measured of a version; of a run's own values MLflow keeps no second copy."""
    from mlflow.entities import Metric

    model = version.tags[Tag.MODEL]
    rows = [Metric(metric_name(n), v, when, batch, model_id=model) for n, v in metrics.items()]
    for start in range(0, len(rows), MAX_METRICS):
        client.log_batch(run_id, metrics=rows[start : start + MAX_METRICS])


def add_scores(
    client: Any, version: Any, metrics: Mapping[str, float], *, batch: int, folder: Path, name: str
) -> Any:
    """Link an evaluation with its version, which `best` may then move to; the best version.

    Args:
        client: MLflow's.
        version: of the weights that were evaluated.
        metrics: what was measured.
        batch: of the checkpoint.
        folder: with results.json, and the id of the evaluation's MLflow run if it has one there.
        name: what was evaluated, in words.
    """
    file = folder / RUN_ID_FILE
    run = existing_run(client, file.read_text().strip()) if file.exists() else None
    if run is None:
        experiment = client.get_logged_model(version.tags[Tag.MODEL]).experiment_id
        run = client.create_run(experiment, run_name=f"eval {name}")
        client.set_terminated(run.info.run_id)
    _add_metrics(client, run.info.run_id, version, milliseconds(), metrics, batch=batch)
    tags = {Tag.EVALUATED: f"{run.info.run_id} {public(os.path.abspath(folder))}"}
    value = metrics.get(version.tags.get(Tag.METRIC, ""), math.nan)
    if Tag.VALUE not in version.tags and math.isfinite(value):
        tags[Tag.VALUE] = repr(value)
    for key, text in tags.items():
        client.set_model_version_tag(version.name, str(version.version), key, text)
    return settle_best(client, version.name)
