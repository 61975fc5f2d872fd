"""Data preparation: tokenize the corpus of a recipe into training and validation shards.

Entry points: `prepare_corpus` is called before training on every process. One process per machine
prepares the shards in the cache, unless they exist, while the others wait. `prepare_to` writes to a
folder of the user, local or at a URL. The one idea: the corpus is split into tasks, and each task
is a pure function from its documents to a part of the output. The output therefore depends neither
on the number of processes nor on interruptions, nor on when and where it was prepared. A restarted
preparation retains finished parts and runs the missing tasks. The indices are written after all
parts, and `manifest.json` last, so a folder with a manifest is complete.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from llmfoundry.data.mds.shard import INDEX
from llmfoundry.data.preparation.corpus import Corpus
from llmfoundry.data.preparation.engines import ENGINES, Run
from llmfoundry.data.preparation.filters import deduplicate
from llmfoundry.data.preparation.input_files import ignore
from llmfoundry.data.preparation.output_folder import SCRATCH, OutputFolder
from llmfoundry.data.preparation.partition import HoldoutSplit, PartitionTask, cut_tasks, make_split
from llmfoundry.data.preparation.prepared_folder import build_once, cache_key
from llmfoundry.data.preparation.readers import left_out
from llmfoundry.data.preparation.write_part import (
    REPEAT,
    STREAMS,
    WORK,
    OutputFormat,
    PartSettings,
    PreparedPart,
    StreamCounts,
    find_part,
    make_part,
    sign_part,
    signature_file,
    token_output,
)
from llmfoundry.data.shard_cache.shard_folder import FetchOptions, ShardFolder
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.data.token_shards import StreamIndex, TokenDataset, TokenShard
from llmfoundry.errors import UserError
from llmfoundry.files import one_at_a_time, parse_json
from llmfoundry.processes import cores
from llmfoundry.recipe.data import DataConfig
from llmfoundry.redaction import public
from llmfoundry.terminal import progress

_SETTINGS = f"{WORK}/settings.json"
_VERSION = 2  # of the folder's format and of how documents become tokens
MANIFEST = "manifest.json"
_LIBRARIES = ("llmfoundry-recipes", "tokenizers", "numpy")
_DROPPED = {"blank": "blank documents", REPEAT: "documents that repeat another"}


@dataclass(frozen=True)
class PreparedCorpus:
    """Token streams of a prepared corpus.

    Attributes:
        train: training documents.
        validation: held-out documents; empty with validation_fraction: 0.
        summary: lines to log: counts, sizes and dropped documents.
    """

    train: TokenDataset
    validation: TokenDataset
    summary: str

    def validation_texts(self) -> list[str]:
        """The held-out documents, exactly as read."""
        return self.validation.texts()


def prepare_corpus(
    config: DataConfig, tokenizer: Tokenizer, *, progress: bool, shard_bytes: int = 64 << 20
) -> PreparedCorpus:
    """Return the tokens of a corpus, from the cache if they are there.

    Args:
        config: data section of the recipe.
        tokenizer: the tokenizer.
        progress: show a progress bar.
        shard_bytes: size of a shard.

    Raises:
        UserError: the corpus cannot be read, or the cache cannot be written.
    """
    plan = PreparationPlan(
        Corpus(config), tokenizer, token_output(tokenizer, shard_bytes=shard_bytes)
    )
    key = cache_key(corpus=plan.corpus.fingerprint(), **plan.settings)
    folder = Path(config.cache_folder).expanduser() / "tokens" / key
    execution = ExecutionOptions(config.num_workers, progress=progress)
    build_once(
        folder, lambda partial: _fill_cache(OutputFolder(str(partial)), plan, execution), keep=WORK
    )
    return _open(folder, config)


def prepare_to(
    place: OutputFolder,
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    output: OutputFormat,
    execution: ExecutionOptions,
    about: Mapping[str, str],
) -> Manifest:
    """Prepare a corpus in a folder or at a URL; resume an interrupted preparation.

    Args:
        place: output folder.
        config: data section of the recipe.
        tokenizer: the tokenizer.
        output: format of the shards.
        execution: processes and engine.
        about: license and source of the text, for the manifest.

    Raises:
        UserError: the corpus cannot be read, the output cannot be written, or it contains something
            else.
    """
    plan = PreparationPlan(Corpus(config), tokenizer, output, about)
    check_free(place)
    with _writing(place):
        manifest = Manifest.read(place)
        if manifest is None:
            _claim(place, plan)
            with place.scratch(WORK) as folder:
                tokenizer.save(folder / "tokenizer")
                place.put(folder / "tokenizer", "tokenizer")
            manifest = prepare_folder(place, plan, execution)
        else:
            _check_same(place, manifest.settings, plan.settings)
            if manifest.corpus != plan.corpus.fingerprint():
                raise _other(place, "the corpus' files are others, or changed")
        place.remove(WORK)
    return manifest


def _fill_cache(place: OutputFolder, plan: PreparationPlan, execution: ExecutionOptions) -> None:
    """Prepare a corpus in the cache; leave nothing behind if no part was finished."""
    try:
        prepare_folder(place, plan, execution)
    except UserError:
        if not any(name.endswith(".json") for name in place.names_below(WORK)):
            place.remove(WORK)
        raise


def _open(folder: Path, config: DataConfig) -> PreparedCorpus:
    """Open a prepared folder of the cache.

    Raises:
        UserError: the folder is damaged.
    """
    options = FetchOptions.from_config(config)
    try:
        manifest = Manifest.read(OutputFolder(str(folder)))
        if manifest is None:
            raise UserError(f"{MANIFEST}: is missing")
        folders = [ShardFolder.open(None, str(folder / name), options) for name in STREAMS]
        train, validation = (TokenDataset(files, StreamIndex.read(files)) for files in folders)
    except UserError as error:
        raise UserError(
            f"{folder}: prepared tokens are damaged: {error}; delete it, it will be made again"
        ) from error
    return PreparedCorpus(train, validation, manifest_summary(manifest))


def check_free(place: OutputFolder) -> None:
    """Check that the output folder is empty or belongs to a preparation.

    Raises:
        UserError: it contains other files.
    """
    names = place.names()
    if names and MANIFEST not in names and WORK not in names:
        raise _other(place, f"{names[0]} is not of a preparation")


def _claim(place: OutputFolder, plan: PreparationPlan) -> None:
    """Record the settings of the preparation, or compare them with those of an earlier call.

    Raises:
        UserError: the earlier settings are different or damaged.
    """
    data = place.read(_SETTINGS)
    if data is None:
        place.write(_SETTINGS, json.dumps(plan.settings).encode())
    else:
        try:
            before = parse_json(data)
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise _other(place, f"{_SETTINGS} is damaged")
        _check_same(place, before, plan.settings)


def _check_same(place: OutputFolder, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise a UserError for the first setting that differs."""
    old, new = _flat(before), _flat(now)
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            raise _other(place, f"made with {key} {old.get(key)}, and not {new.get(key)}")


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _other(place: OutputFolder, why: str) -> UserError:
    return UserError(
        f"prepare.output: {place.folder} holds something else: {why}; choose another folder, or"
        " delete this one"
    )


@contextmanager
def _writing(place: OutputFolder) -> Iterator[None]:
    """Lock a local output folder, and raise errors of its disk as a UserError."""
    if place.here is None:
        yield
        return
    try:
        with one_at_a_time(
            place.here / WORK / "lock",
            key="prepare.output",
            busy="another process prepares it; wait for it or end it",
            instead="free space there or choose another folder",
        ):
            yield
    except OSError as error:
        raise UserError(
            f"prepare.output: cannot write {place.folder}: {error.strerror or error};"
            " free space there or choose another folder"
        ) from error


@dataclass(frozen=True)
class ExecutionOptions:
    """Execution of a preparation; the output does not depend on it.

    Attributes:
        workers: concurrent tasks; None: the number of cores of the engine.
        engine: local or ray.
        progress: show a progress bar on stderr.
    """

    workers: int | None = None
    engine: str = "local"
    progress: bool = False


@dataclass(frozen=True)
class PreparationPlan:
    """Input and output of a preparation.

    Attributes:
        corpus: the corpus.
        tokenizer: the tokenizer.
        output: format of the shards.
        about: license and source of the text, for the manifest.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    output: OutputFormat
    about: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return everything but the corpus' files that the output depends on."""
        config = self.corpus.config
        return {
            "version": _VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "text_column": config.text_column,
            "validation_fraction": config.validation_fraction,
            "filter": asdict(config.filter),
            "deduplicate": config.deduplicate,
            "output": json.loads(json.dumps(asdict(self.output))),  # tuples are lists in JSON
        }


def prepare_folder(
    place: OutputFolder, plan: PreparationPlan, execution: ExecutionOptions
) -> Manifest:
    """Prepare the missing parts of a folder that no other process writes to.

    Raises:
        UserError: the corpus cannot be read, changed meanwhile, or has no usable text.
    """
    # tasks and settings
    corpus = plan.corpus
    before = corpus.fingerprint()
    split = make_split(corpus)
    tasks = cut_tasks(corpus)
    settings = {**plan.settings, "held out": split.settings}
    if corpus.config.deduplicate != "none":
        settings["among"] = before

    # parts; if the corpus has changed meanwhile, they are useless
    job = PartSettings(corpus, split, plan.tokenizer, plan.output, place, settings)
    parts = _make_parts(job, tasks, execution)
    manifest = make_manifest(corpus, parts, split, settings=plan.settings, about=plan.about)
    try:
        _check(corpus, manifest, before)
    except UserError:
        for task in tasks:
            place.remove(f"{WORK}/{task.part}.json")
        raise

    # indices and manifest
    _write_indices(job, tasks, parts)
    manifest.write(place)
    return manifest


def _make_parts(
    job: PartSettings, tasks: Sequence[PartitionTask], execution: ExecutionOptions
) -> list[PreparedPart]:
    """Return the parts of all tasks; run tasks whose part is missing or outdated."""
    names = set(job.place.names_below(WORK))
    for name in names:
        if name.startswith(SCRATCH):
            job.place.remove(f"{WORK}/{name}")  # a killed process left it
    old = {t.number: find_part(job, t) for t in tasks if f"{t.part}.json" in names}
    parts = {number: part for number, part in old.items() if part is not None}
    missing = [task for task in tasks if task.number not in parts]
    if missing:
        parts |= _run(job, tasks, missing, execution)
    return [parts[task.number] for task in tasks]


def _run(
    job: PartSettings,
    tasks: Sequence[PartitionTask],
    missing: Sequence[PartitionTask],
    execution: ExecutionOptions,
) -> dict[int, PreparedPart]:
    """Run the missing tasks with a progress bar; return their parts by number."""
    # the bar counts bytes if all sizes are known, else tasks
    sized = all(task.n_bytes is not None for task in tasks)
    amounts = {task.number: (task.n_bytes or 0) if sized else 1 for task in tasks}
    remaining = sum(amounts[task.number] for task in missing)
    workers = execution.workers or cores()
    with ExitStack() as stack:
        total = sum(amounts.values())
        bar = progress(
            total, "preparing", "B" if sized else " parts", done=total - remaining, scaled=sized,
            shown=execution.progress,
        )  # fmt: skip
        stack.enter_context(bar)
        run = stack.enter_context(ENGINES[execution.engine](execution.workers))
        job = replace(job, repeats=_find_repeats(job, tasks, run))
        if execution.engine == "local" and min(workers, len(missing)) == 1:
            # a single task runs in this process: all cores encode it, and the bar shows its bytes
            job = replace(job, threads=workers)
            work = partial(_make, job, seen=bar.update if sized else ignore)
            amounts = {} if sized else amounts
        else:
            work = partial(_make, job)
        parts = {}
        for number, part in run(work, missing):
            parts[number] = part
            bar.update(amounts.get(number, 0))
    if job.repeats and job.place.here is None:
        shutil.rmtree(job.repeats[0].parent)  # in a local output, the caller removes WORK
    return parts


def _make(
    job: PartSettings, task: PartitionTask, seen: Callable[[int], Any] = ignore
) -> tuple[int, PreparedPart]:
    return task.number, make_part(job, task, seen)


def _find_repeats(job: PartSettings, tasks: Sequence[PartitionTask], run: Run) -> list[Path]:
    """Find repeated documents; return a file per task, or nothing without deduplication."""
    if job.corpus.config.deduplicate == "none":
        return []
    names = [job.fingerprint(task) for task in tasks]
    key = hashlib.blake2b("".join(names).encode(), digest_size=16).hexdigest()
    # For a remote output the files are in the cache, which the machines of a cluster must share.
    cache = Path(job.corpus.config.cache_folder).expanduser() / "repeats"
    folder = (job.place.here / WORK if job.place.here else cache) / key
    folder.mkdir(parents=True, exist_ok=True)
    for _ in run(partial(sign_part, job, folder), tasks):
        pass
    return deduplicate(folder, [signature_file(folder, task) for task in tasks], run)


def _check(corpus: Corpus, manifest: Manifest, before: str) -> None:
    """Check that the corpus did not change meanwhile and has training documents.

    Raises:
        UserError: it did, or has none.
    """
    if Corpus(corpus.config).fingerprint() != before:
        raise UserError("data: files of the corpus changed while they were read; start again")
    train, validation = manifest.counts["train"], manifest.counts["validation"]
    reasons = [reason for reason in manifest.dropped if reason != "blank"]
    if not manifest.total.documents and reasons:
        raise UserError(f"data.filter: leaves no document ({', '.join(reasons)}); write less")
    if not manifest.total.documents:
        raise corpus.holds_no_text()
    if not train.documents:
        raise UserError(
            f"data.validation_fraction: {corpus.config.validation_fraction:g} holds out every"
            f" document ({validation.documents}); write a smaller one or add documents"
        )


def _write_indices(
    job: PartSettings, tasks: Sequence[PartitionTask], parts: Sequence[PreparedPart]
) -> None:
    """Write the index of each stream, after removing parts of an earlier partition."""
    for stream in STREAMS:
        shards = [shard for part in parts for shard in part.shards[stream]]
        texts = [name for part in parts for name in part.texts] if stream == "validation" else []
        used = {task.part for task, part in zip(tasks, parts, strict=True) if part.shards[stream]}
        for name in job.place.names_below(stream):
            if name not in used and name != INDEX:
                job.place.remove(f"{stream}/{name}")
        if job.output.kind == "tokens":
            index = StreamIndex(
                dtype=job.output.dtype,
                eos_id=job.output.eos_id,
                tokenizer=job.tokenizer.fingerprint,
                shards=tuple(TokenShard(**shard) for shard in shards),
                texts=tuple(texts),
            ).to_dict()
        elif shards:
            index = {"version": 2, "shards": shards}
        else:
            continue
        job.place.write(f"{stream}/{INDEX}", json.dumps(index).encode())


@dataclass(frozen=True)
class Manifest:
    """Metadata of a prepared folder.

    Attributes:
        settings: everything but the files that the content depends on.
        corpus: fingerprint of the files.
        about: license and source, free text of the recipe.
        counts: counts of each stream.
        dropped: number of dropped documents, by reason.
        ignored: number of files of other types in the folders.
        hidden: files and folders that are skipped because of their names.
        note: message about the split; usually empty.
        ends: each held-out document is the end of a training document.
        sources: name and size of every file, and its sha256 (local files read completely) or stamp
            (modification time in ns, or tag of the store).
        versions: versions of the programs.
    """

    settings: dict[str, Any]
    corpus: str
    about: dict[str, str]
    counts: dict[str, StreamCounts]
    dropped: dict[str, int]
    ignored: int
    note: str
    ends: bool = False
    hidden: list[str] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> StreamCounts:
        """Return the sum over all streams."""
        return sum(self.counts.values(), StreamCounts())

    def write(self, place: OutputFolder) -> None:
        """Write the manifest, which marks the folder as complete."""
        place.write(MANIFEST, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def read(cls, place: OutputFolder) -> Manifest | None:
        """Read the manifest of a folder; None if it has none.

        Raises:
            UserError: it is damaged.
        """
        data = place.read(MANIFEST)
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise UserError(
                f"{place.folder}/{MANIFEST}: is damaged: {error!r}; delete {place.folder}, it will"
                " be made again"
            ) from error


def make_manifest(
    corpus: Corpus,
    parts: Iterable[PreparedPart],
    split: HoldoutSplit,
    *,
    settings: dict[str, Any],
    about: Mapping[str, str],
) -> Manifest:
    """Return the manifest of all parts together."""
    counts = {name: StreamCounts() for name in STREAMS}
    dropped: Counter[str] = Counter()
    checksums: dict[int, str] = {}
    for part in parts:
        counts = {name: counts[name] + part.counts[name] for name in STREAMS}
        dropped.update(part.dropped)
        checksums.update(part.checksums)
    sources: list[dict[str, Any]] = []
    for n, file in enumerate(corpus.files):
        version_of: dict[str, Any] = (
            {"sha256": checksums[n]} if n in checksums else {"stamp": file.stamp}
        )
        sources.append({"name": public(file.name), "bytes": file.size, **version_of})
    return Manifest(
        settings=settings,
        corpus=corpus.fingerprint(),
        about={name: public(text) for name, text in about.items() if text},
        counts=counts,
        dropped=dict(sorted(dropped.items())),
        ignored=corpus.ignored,
        hidden=[public(name) for name in corpus.hidden],
        note=split.note,
        ends=bool(split.ends),
        sources=sources,
        versions={"python": platform.python_version(), **_versions()},
    )


def manifest_summary(manifest: Manifest) -> str:
    """Return lines with counts, sizes and dropped documents, to print."""
    total, held_out = manifest.total, manifest.counts["validation"]
    documents = manifest.counts["train"].documents if manifest.ends else total.documents
    end = "the end of " if held_out.documents == 1 else "the ends of "
    tokens, share = "", ""
    if total.tokens:
        tokens = f", {total.tokens:,} tokens ({total.bytes / total.tokens:.2f} bytes each)"
        share = f", {held_out.tokens:,} tokens ({held_out.tokens / total.tokens:.1%})"
    lines = [
        f"data: {_documents(documents)}, {total.bytes / 1e6:,.2f} MB{tokens};"
        f" held out: {end * manifest.ends}{_documents(held_out.documents)}{share}"
    ]
    for reason, count in manifest.dropped.items():
        lines.append(f"data: {count:,} {_DROPPED.get(reason, reason + ': documents')} dropped")
    if total.tokens_left_out:
        lines.append(f"data: {total.tokens_left_out:,} tokens left out, too few for a last row")
    lines += [f"data: {line}" for line in left_out(manifest.ignored, manifest.hidden)]
    return "\n".join([*lines, *([f"data: {manifest.note}"] if manifest.note else [])])


def _documents(count: int) -> str:
    return "1 document" if count == 1 else f"{count:,} documents"


def _versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue  # a checkout is not installed
    return versions
