"""`prepare_folder`: a corpus to shards, by parts made once and joined in corpus order.

Called by `prepare` with a folder of the cache or of the user's. What is finished there is kept,
what is missing is made, and the indices come last.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from llmfoundry.data.mds.writer import INDEX
from llmfoundry.data.preparation.choose.deduplicate import deduplicate
from llmfoundry.data.preparation.engines import ENGINES, Run
from llmfoundry.data.preparation.read.corpus import Corpus
from llmfoundry.data.preparation.split import make_split
from llmfoundry.data.preparation.tasks import Task, cut_tasks
from llmfoundry.data.preparation.write.manifest import Manifest, make_manifest
from llmfoundry.data.preparation.write.output_folder import SCRATCH, OutputFolder
from llmfoundry.data.preparation.write.outputs import STREAMS, Output
from llmfoundry.data.preparation.write.parts import (
    WORK,
    Part,
    PartSettings,
    find_part,
    ignore,
    make_part,
    sign_part,
    signature_file,
)
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.data.token_rows import Shard, StreamIndex
from llmfoundry.errors import UserError
from llmfoundry.processes import cores
from llmfoundry.terminal import progress

_VERSION = 2  # of the folder's format and of how documents become tokens


@dataclass(frozen=True)
class ExecutionOptions:
    """How a preparation is done; nothing of it can be seen in the output.

    Attributes:
        workers: tasks at a time; None: as many as the engine has cores.
        engine: local or ray.
        progress: show a bar on stderr.
    """

    workers: int | None = None
    engine: str = "local"
    progress: bool = False


@dataclass(frozen=True)
class PreparationPlan:
    """What is prepared.

    Attributes:
        corpus: what to read.
        tokenizer: what to encode with.
        output: what to write.
        about: licence and source of the text, for the manifest.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    output: Output
    about: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that decides the output, beside the corpus' files."""
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
    """Make what is missing at a place that nobody else writes to.

    Raises:
        UserError: the corpus cannot be read, or no training text is left.
    """
    corpus = plan.corpus
    before = corpus.fingerprint()
    split = make_split(corpus)
    tasks = cut_tasks(corpus)
    settings = {**plan.settings, "held out": split.settings}
    if corpus.config.deduplicate != "none":
        settings["among"] = before
    job = PartSettings(corpus, split, plan.tokenizer, plan.output, place, settings)
    parts = _make_parts(job, tasks, execution)
    manifest = make_manifest(
        corpus, parts, settings=plan.settings, about=plan.about, note=split.note
    )
    try:
        _check(corpus, manifest, before)
    except UserError:
        for task in tasks:
            place.remove(f"{WORK}/{task.part}.json")  # of no use to anybody
        raise
    _write_indices(job, tasks, parts)
    manifest.write(place)
    return manifest


def _make_parts(
    job: PartSettings, tasks: Sequence[Task], execution: ExecutionOptions
) -> list[Part]:
    """Every task's part; those of an earlier call where they are there."""
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
    job: PartSettings, tasks: Sequence[Task], missing: Sequence[Task], execution: ExecutionOptions
) -> dict[int, Part]:
    sized = all(task.n_bytes is not None for task in tasks)  # else the bar counts tasks
    amounts = {task.number: (task.n_bytes or 0) if sized else 1 for task in tasks}
    left = sum(amounts[task.number] for task in missing)
    workers = execution.workers or cores()
    with ExitStack() as stack:
        total = sum(amounts.values())
        bar = progress(
            total, "preparing", "B" if sized else " parts", done=total - left, scaled=sized,
            shown=execution.progress,
        )  # fmt: skip
        stack.enter_context(bar)
        run = stack.enter_context(ENGINES[execution.engine](execution.workers))
        job = replace(job, repeats=_find_repeats(job, tasks, run))
        if execution.engine == "local" and min(workers, len(missing)) == 1:
            # In this process: its one task is encoded by all cores, and the bar moves within it.
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
        shutil.rmtree(job.repeats[0].parent)  # what is here goes with the folder of the work
    return parts


def _make(job: PartSettings, task: Task, seen: Callable[[int], Any] = ignore) -> tuple[int, Part]:
    return task.number, make_part(job, task, seen)


def _find_repeats(job: PartSettings, tasks: Sequence[Task], run: Run) -> list[Path]:
    """Which documents of each task repeat another, if that is asked for."""
    if job.corpus.config.deduplicate == "none":
        return []
    names = [job.fingerprint(task) for task in tasks]
    key = hashlib.blake2b("".join(names).encode(), digest_size=16).hexdigest()
    # Beside an output elsewhere the work is kept here; a cluster's machines must share it.
    cache = Path(job.corpus.config.cache_folder).expanduser() / "repeats"
    folder = (job.place.here / WORK if job.place.here else cache) / key
    folder.mkdir(parents=True, exist_ok=True)
    for _ in run(partial(sign_part, job, folder), tasks):
        pass
    return deduplicate(folder, [signature_file(folder, task) for task in tasks], run)


def _check(corpus: Corpus, manifest: Manifest, before: str) -> None:
    """Whether what was read is what is there, and can be trained on."""
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


def _write_indices(job: PartSettings, tasks: Sequence[Task], parts: Sequence[Part]) -> None:
    """Each stream's index, once nothing else is in its folder."""
    for stream in STREAMS:
        shards = [shard for part in parts for shard in part.shards[stream]]
        texts = [name for part in parts for name in part.texts] if stream == "validation" else []
        used = {task.part for task, part in zip(tasks, parts, strict=True) if part.shards[stream]}
        for name in job.place.names_below(stream):
            if name not in used and name != INDEX:
                job.place.remove(f"{stream}/{name}")  # of a corpus that was cut otherwise
        if job.output.kind == "tokens":
            index = StreamIndex(
                dtype=job.output.dtype,
                eos_id=job.output.eos_id,
                tokenizer=job.tokenizer.fingerprint,
                shards=tuple(Shard(**shard) for shard in shards),
                texts=tuple(texts),
            ).to_dict()
        elif shards:
            index = {"version": 2, "shards": shards}
        else:
            continue
        job.place.write(f"{stream}/{INDEX}", json.dumps(index).encode())
