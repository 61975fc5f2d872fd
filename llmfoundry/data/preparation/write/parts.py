"""`make_part`: one task's documents to files. What processes, Ray's workers or anyone else run.

The one idea: a part is a pure function of the task and the job. Its folders appear atomically, and
the mark that it is done comes last, so that a killed preparation resumes with the parts it has, and
two that make the same part do no harm.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from llmfoundry.data.mds.checksums import digest
from llmfoundry.data.preparation.choose.deduplicate import read_drops, signatures
from llmfoundry.data.preparation.read.corpus import Corpus, Document
from llmfoundry.data.preparation.read.open_files import Input
from llmfoundry.data.preparation.split import Split
from llmfoundry.data.preparation.tasks import Task
from llmfoundry.data.preparation.write.encode import (
    DocumentPart,
    cuts_at_lines,
    encode_all,
    split_text,
)
from llmfoundry.data.preparation.write.output_folder import OutputFolder
from llmfoundry.data.preparation.write.outputs import STREAMS, TEXTS, Output, StreamCounts
from llmfoundry.data.text.tokenizer import Tokenizer

WORK = ".parts"  # the folder of what is unfinished
REPEAT = "repeats another"


@dataclass
class PartSettings:
    """What all tasks of a preparation share. Picklable.

    Attributes:
        corpus: what is read.
        split: what is held out.
        tokenizer: what encodes.
        output: what is written.
        place: where to.
        settings: what decides the output beside the corpus' files; a part made with others is
            made again.
        threads: that encode in each process.
        repeats: of each task, which of its documents repeat another (`deduplicate`), or nothing.
    """

    corpus: Corpus
    split: Split
    tokenizer: Tokenizer
    output: Output
    place: OutputFolder
    settings: dict[str, Any]
    threads: int = 1
    repeats: list[Path] = field(default_factory=list)

    def fingerprint(self, task: Task) -> str:
        """Names what a task makes."""
        return task.fingerprint(self.corpus, **self.settings)


@dataclass(frozen=True)
class Part:
    """What a task made.

    Attributes:
        task: its fingerprint.
        counts: of each stream.
        shards: of each stream, as its index lists them.
        texts: files with held-out documents.
        dropped: documents that were left out, by reason.
        checksums: sha256 of the files that were read whole, by their number.
    """

    task: str
    counts: dict[str, StreamCounts]
    shards: dict[str, list[dict[str, Any]]]
    texts: list[str]
    dropped: dict[str, int]
    checksums: dict[int, str]

    def to_json(self) -> bytes:
        """For its file."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Part:
        """From its file."""
        facts = json.loads(data)
        facts["counts"] = {name: StreamCounts(**counts) for name, counts in facts["counts"].items()}
        facts["checksums"] = {int(number): sha for number, sha in facts["checksums"].items()}
        return cls(**facts)


def ignore(n_bytes: int) -> None:
    """Report no progress."""


def _forget(text: str) -> None:
    """Nobody asks for it."""


def make_part(job: PartSettings, task: Task, seen: Callable[[int], None] = ignore) -> Part:
    """Read, encode and write a task.

    Args:
        job: what all tasks share.
        task: what to read.
        seen: called with the bytes of input on the way.

    Raises:
        UserError: something cannot be read or written.
    """
    with job.place.scratch(WORK) as folder, _Texts(folder, task.part) as texts:
        reader = _Reader(job, task, seen, texts.keep if job.output.keeps_texts else _forget)
        sinks = {name: job.output.sink(folder / name, task.part) for name in STREAMS}
        for piece, ids in _encoded(job, reader.pieces()):
            sinks[STREAMS[piece.held_out]].add(piece, ids)
        shards = {name: sink.end() for name, sink in sinks.items()}
        texts.close()
        for name in STREAMS:
            if (folder / name / task.part).is_dir():
                job.place.put(folder / name / task.part, f"{name}/{task.part}")
    part = Part(
        task=job.fingerprint(task),
        counts={name: sink.counts for name, sink in sinks.items()},
        shards=shards,
        texts=texts.names,
        dropped=dict(sorted(reader.dropped.items())),
        checksums=dict(_checksums(job.corpus, task)),
    )
    job.place.write(f"{WORK}/{task.part}.json", part.to_json())
    return part


def find_part(job: PartSettings, task: Task) -> Part | None:
    """What a task made earlier, if it would make the same now."""
    data = job.place.read(f"{WORK}/{task.part}.json")
    part = None if data is None else Part.from_json(data)
    return part if part is not None and part.task == job.fingerprint(task) else None


def sign_part(job: PartSettings, folder: Path, task: Task) -> None:
    """Write what `deduplicate` compares of a task's documents."""
    target = signature_file(folder, task)
    if not target.exists():
        texts = (document.text for document in _Reader(job, task, ignore, _forget).documents())
        signatures(texts, target, method=job.corpus.config.deduplicate)


def signature_file(folder: Path, task: Task) -> Path:
    """Where `sign_part` writes; a folder has those of one corpus as it is."""
    return folder / f"{task.part}.npy"


@dataclass
class _Reader:
    """The documents of a task that stay; counts the others and gives held-out texts to `keep`."""

    job: PartSettings
    task: Task
    seen: Callable[[int], None]
    keep: Callable[[str], None]
    dropped: Counter[str] = field(default_factory=Counter)

    def documents(self) -> Iterator[Document]:
        """Those that their own text does not rule out."""
        corpus = self.job.corpus
        for span in self.task.spans:
            for document in corpus.read(span, self.seen):
                reason = corpus.drops(document)
                if reason is None:
                    yield document
                else:
                    self.dropped[reason] += 1

    def pieces(self) -> Iterator[DocumentPart]:
        """Those that stay, long ones cut where that is possible."""
        cuttable = self.job.output.cuttable and cuts_at_lines(self.job.tokenizer)
        for document in self._unrepeated():
            for side, held_out in self.job.split.sides(document.text):
                if held_out:
                    self.keep(side)
                parts = list(split_text(side)) if cuttable else [side]
                for n, text in enumerate(parts):
                    yield DocumentPart(text, held_out, n == 0, n == len(parts) - 1)

    def _unrepeated(self) -> Iterator[Document]:
        if not self.job.repeats:
            yield from self.documents()
            return
        repeats = read_drops(self.job.repeats[self.task.number])
        for document, repeated in zip(self.documents(), repeats, strict=True):
            if repeated:
                self.dropped[REPEAT] += 1
            else:
                yield document


def _encoded(
    job: PartSettings, pieces: Iterable[DocumentPart]
) -> Iterator[tuple[DocumentPart, list[int]]]:
    if job.output.tokenizes:
        return encode_all(pieces, job.tokenizer, job.threads)
    return ((piece, []) for piece in pieces)


class _Texts:
    """The file of a part's held-out texts, made for the first of them."""

    def __init__(self, folder: Path, part: str) -> None:
        self._folder, self._name = folder / "validation", f"{part}/{TEXTS}"
        self._file: IO[str] | None = None

    @property
    def names(self) -> list[str]:
        """The file, as the index lists it, if there is one."""
        return [self._name] if self._file is not None else []

    def keep(self, text: str) -> None:
        """Append a document."""
        if self._file is None:
            path = self._folder / self._name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
        self._file.write(json.dumps(text) + "\n")

    def close(self) -> None:
        """End it; a second time does nothing."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> _Texts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _checksums(corpus: Corpus, task: Task) -> Iterator[tuple[int, str]]:
    """Of the files of this machine that the task read whole; it is fast beside encoding them."""
    for span in task.spans if corpus.files else ():
        file = corpus.files[span.source]
        if span.start == 0 and span.stop is None and "://" not in file.name:
            yield span.source, digest("sha256", Input(file).chunks())
