"""`make_part`: one task's documents to files. What processes, Ray's workers or anyone else run.

The one idea: a part is a pure function of the task and the job. Its folders appear atomically, and
the mark that it is done comes last, so that a killed preparation resumes with the parts it has, and
two that make the same part do no harm. Documents are encoded on several threads, in order: the
`tokenizers` library encodes without holding Python's lock. Long texts are cut where that leaves the
ids unchanged, which bounds memory and spreads one book over cores. A sink for each stream takes a
document's pieces with their ids and writes token shards, or MDS of tokens, text or columns.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, ClassVar

import msgspec
import numpy as np

from llmfoundry.data.mds.codecs import digest
from llmfoundry.data.mds.shard import INDEX, MDSWriter
from llmfoundry.data.preparation.corpus import Corpus, Document
from llmfoundry.data.preparation.filters import read_drops, signatures
from llmfoundry.data.preparation.input_files import InputRange, ignore
from llmfoundry.data.preparation.output_folder import OutputFolder
from llmfoundry.data.preparation.partition import HoldoutSplit, PartitionTask
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.data.token_shards import TokenWriter

WORK = ".parts"  # the folder of what is unfinished
REPEAT = "repeats another"
_CHUNK = 1 << 18  # characters that a thread encodes at a time
_LONGEST = 1 << 20  # characters of a document encoded in one go, where it can be cut
# Byte-level tokenizers begin a word at a line's first character, so that cutting there gives the
# ids of the whole. Only after a character and before one: runs of white space are words too.
_CUT = re.compile(r"\S\n(?=\S)")
STREAMS = ("train", "validation")
TEXTS = "texts.jsonl"


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
    split: HoldoutSplit
    tokenizer: Tokenizer
    output: OutputFormat
    place: OutputFolder
    settings: dict[str, Any]
    threads: int = 1
    repeats: list[Path] = field(default_factory=list)

    def fingerprint(self, task: PartitionTask) -> str:
        """Names what a task makes."""
        return task.fingerprint(self.corpus, **self.settings)


@dataclass(frozen=True)
class PreparedPart:
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
    def from_json(cls, data: bytes) -> PreparedPart:
        """From its file."""
        return msgspec.json.decode(data, type=cls)


def make_part(
    job: PartSettings, task: PartitionTask, seen: Callable[[int], None] = ignore
) -> PreparedPart:
    """Read, encode and write a task; `seen` gets the bytes of input on the way."""
    with job.place.scratch(WORK) as folder:
        sinks = {name: job.output.sink(folder / name, task.part) for name in STREAMS}
        with (folder / TEXTS).open("w", encoding="utf-8") as texts:
            reader = _Reader(job, task, seen, texts if job.output.keeps_texts else None)
            for piece, ids in _encoded(job, reader.pieces()):
                sinks[STREAMS[piece.held_out]].add(piece, ids)
        shards = {name: sink.end() for name, sink in sinks.items()}
        names = _place_texts(folder, task)
        for name in STREAMS:
            if (folder / name / task.part).is_dir():
                job.place.put(folder / name / task.part, f"{name}/{task.part}")
    part = PreparedPart(
        task=job.fingerprint(task),
        counts={name: sink.counts for name, sink in sinks.items()},
        shards=shards,
        texts=names,
        dropped=dict(sorted(reader.dropped.items())),
        checksums=dict(_checksums(job.corpus, task)),
    )
    job.place.write(f"{WORK}/{task.part}.json", part.to_json())
    return part


def _place_texts(folder: Path, task: PartitionTask) -> list[str]:
    """The file of held-out texts, if there are any, as the index lists it."""
    if not (folder / TEXTS).stat().st_size:
        return []
    target = folder / "validation" / task.part
    target.mkdir(parents=True, exist_ok=True)
    (folder / TEXTS).rename(target / TEXTS)
    return [f"{task.part}/{TEXTS}"]


def find_part(job: PartSettings, task: PartitionTask) -> PreparedPart | None:
    """What a task made earlier, if it would make the same now."""
    data = job.place.read(f"{WORK}/{task.part}.json")
    part = None if data is None else PreparedPart.from_json(data)
    return part if part is not None and part.task == job.fingerprint(task) else None


def sign_part(job: PartSettings, folder: Path, task: PartitionTask) -> None:
    """Write what `deduplicate` compares of a task's documents."""
    target = signature_file(folder, task)
    if not target.exists():
        texts = (document.text for document in _Reader(job, task).documents())
        signatures(texts, target, method=job.corpus.config.deduplicate)


def signature_file(folder: Path, task: PartitionTask) -> Path:
    """Where `sign_part` writes; a folder has those of one corpus as it is."""
    return folder / f"{task.part}.npy"


@dataclass
class _Reader:
    """The documents of a task that stay; counts the others and writes held-out texts to `texts`."""

    job: PartSettings
    task: PartitionTask
    seen: Callable[[int], None] = ignore
    texts: IO[str] | None = None
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
        cuttable = self.job.output.tokenizes and cuts_at_lines(self.job.tokenizer)
        for document in self._unrepeated():
            for side, held_out in self.job.split.sides(document.text):
                if held_out and self.texts is not None:
                    self.texts.write(json.dumps(side) + "\n")
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


def _checksums(corpus: Corpus, task: PartitionTask) -> Iterator[tuple[int, str]]:
    """Of the files of this machine that the task read whole; it is fast beside encoding them."""
    for span in task.spans if corpus.files else ():
        file = corpus.files[span.source]
        if span.start == 0 and span.stop is None and "://" not in file.name:
            yield span.source, digest("sha256", InputRange(file).chunks())


@dataclass(frozen=True)
class DocumentPart:
    """A document, or a part of a long one, on its way to a stream.

    Attributes:
        text: never empty.
        held_out: whether it is validation text.
        first: whether a document begins with it.
        last: whether a document ends with it.
    """

    text: str
    held_out: bool
    first: bool
    last: bool

    @property
    def n_bytes(self) -> int:
        """Of its text in UTF-8."""
        return len(self.text.encode())


def split_text(text: str, longest: int = _LONGEST) -> Iterator[str]:
    """A long text in parts of about `longest` characters whose ids join to those of the whole."""
    start = 0
    while (place := _CUT.search(text, start + longest)) is not None:
        yield text[start : place.end()]
        start = place.end()
    yield text[start:]


def cuts_at_lines(tokenizer: Tokenizer) -> bool:
    """Whether `split_text` keeps the ids; SentencePiece marks the start of each text."""
    before, after = "end.\n", "Start here"
    whole = tokenizer.encode(before + after)
    parts = tokenizer.encode(before) + tokenizer.encode(after)
    # A special token that is read may take the white space at its sides with it.
    return tokenizer.byte_level and tokenizer.split_special_tokens and whole == parts


def encode_all(
    pieces: Iterable[DocumentPart], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[DocumentPart, list[int]]]:
    """Each piece with its ids, in order, encoded by `workers` threads some chunks ahead."""
    if workers == 1:
        with _one_thread_a_call():
            for chunk in _chunks(pieces):
                ids = tokenizer.encode_batch([piece.text for piece in chunk])
                yield from zip(chunk, ids, strict=True)
        return
    waiting: deque[tuple[list[DocumentPart], Future[list[list[int]]]]] = deque()
    with _one_thread_a_call(), ThreadPoolExecutor(workers) as pool:
        for chunk in _chunks(pieces):
            texts = [piece.text for piece in chunk]
            waiting.append((chunk, pool.submit(tokenizer.encode_batch, texts)))
            if len(waiting) > 2 * workers:
                done, future = waiting.popleft()
                yield from zip(done, future.result(), strict=True)
        for done, future in waiting:
            yield from zip(done, future.result(), strict=True)


def _chunks(pieces: Iterable[DocumentPart]) -> Iterator[list[DocumentPart]]:
    chunk: list[DocumentPart] = []
    size = 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece.text)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


@contextmanager
def _one_thread_a_call() -> Iterator[None]:
    """Keep `tokenizers` from spreading each call over all cores: num_workers says how many."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@dataclass(frozen=True)
class OutputFormat:
    """What files are made of.

    Attributes:
        kind: tokens (token shards), mds-tokens, mds-text or mds-columns.
        dtype: <u2 or <u4 in token shards; of MDS the column's encoding: ndarray:int32 …, str.
        shard_bytes: of a file, before compression.
        hashes: algorithms, for the index.
        eos_id: begins each document of token shards; the end of text, or what the tokenizer itself
            puts before a text.
        compression: of MDS shards.
        row: tokens of an MDS sample.
        bos, eos: ids around each document; in token shards `bos` comes after `eos_id`.
        no_wrap: begin each row with a document; leave out what is over of a row's last one.
        columns: of mds-columns: each with its encoding, str or json.
    """

    kind: str
    dtype: str
    shard_bytes: int
    hashes: tuple[str, ...]
    eos_id: int
    compression: str | None = None
    row: int = 0
    bos: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    no_wrap: bool = False
    columns: tuple[tuple[str, str], ...] = ()

    @property
    def tokenizes(self) -> bool:
        """Whether ids are needed; a document may then come in pieces."""
        return self.kind not in ("mds-text", "mds-columns")

    @property
    def keeps_texts(self) -> bool:
        """Whether held-out documents are kept as they are, beside their ids."""
        return self.kind == "tokens"

    def sink(self, folder: Path, part: str) -> PartWriter:
        """Where a stream's part goes: files below FOLDER/PART."""
        return _SINKS[self.kind](self, folder, part)


def token_output(
    tokenizer: Tokenizer, *, shard_bytes: int = 64 << 20, hashes: tuple[str, ...] = ("sha1",)
) -> OutputFormat:
    """Token shards in the narrowest type that holds a tokenizer's ids."""
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    first, *bos = tokenizer.document_start
    return OutputFormat(
        "tokens", dtype, shard_bytes, hashes, first, bos=tuple(bos), eos=tokenizer.document_end
    )


@dataclass
class StreamCounts:
    """What a stream, or a part of it, holds.

    Attributes:
        documents: documents.
        bytes: of their text in UTF-8.
        tokens: written; those around documents included.
        samples: of MDS.
        tokens_left_out: of MDS rows that did not become whole.
    """

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    samples: int = 0
    tokens_left_out: int = 0

    def __add__(self, other: StreamCounts) -> StreamCounts:
        return StreamCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class PartWriter(ABC):
    """One stream of one part: takes pieces, then is ended."""

    output: OutputFormat
    folder: Path
    part: str
    counts: StreamCounts = field(default_factory=StreamCounts)

    def add(self, piece: DocumentPart, ids: list[int]) -> None:
        """Take the next piece of a document."""
        self.counts.documents += piece.first
        self.counts.bytes += piece.n_bytes
        self._add(piece, ids)

    @abstractmethod
    def _add(self, piece: DocumentPart, ids: list[int]) -> None:
        """Write what is complete."""

    @abstractmethod
    def end(self) -> list[dict[str, Any]]:
        """Finish the files; their entries in the index of the stream."""


class _Tokens(PartWriter):
    """Token shards."""

    @cached_property
    def _writer(self) -> TokenWriter:
        output, dtype = self.output, np.dtype(self.output.dtype)
        return TokenWriter(self.folder, self.part, dtype, output.shard_bytes, output.hashes)

    def _add(self, piece: DocumentPart, ids: list[int]) -> None:
        output = self.output
        ids = [output.eos_id, *output.bos, *ids] if piece.first else ids
        ids = [*ids, *output.eos] if piece.last and output.eos else ids
        self.counts.tokens += len(ids)
        self._writer.add(ids, n_bytes=piece.n_bytes, starts_document=piece.first)

    def end(self) -> list[dict[str, Any]]:
        return [asdict(shard) for shard in self._writer.finish()]


class _MDS(PartWriter):
    """MDS. The writer is made for the first sample, as a part may have none."""

    column: ClassVar[str]

    @property
    def columns(self) -> dict[str, str]:
        """Each with its encoding."""
        return {self.column: self.output.dtype}

    @cached_property
    def _writer(self) -> MDSWriter:
        output = self.output
        return MDSWriter(
            self.folder / self.part,
            columns=self.columns,
            compression=output.compression,
            hashes=output.hashes,
            size_limit=output.shard_bytes,
        )

    def _write(self, sample: dict[str, Any]) -> None:
        self._writer.write(sample)
        self.counts.samples += 1

    def end(self) -> list[dict[str, Any]]:
        if not self.counts.samples:
            return []
        self._writer.finish()
        index = self.folder / self.part / INDEX
        shards = json.loads(index.read_bytes())["shards"]
        for shard in shards:
            for file in filter(None, (shard["raw_data"], shard["zip_data"])):
                file["basename"] = f"{self.part}/{file['basename']}"
        return shards


class _MDSText(_MDS):
    """A sample a document, as it was read."""

    column = "text"

    def _add(self, piece: DocumentPart, ids: list[int]) -> None:
        self._write({self.column: piece.text})


class _MDSColumns(_MDS):
    """A sample a row, as it was read: its document is the JSON object that `readers.pick` made."""

    @property
    def columns(self) -> dict[str, str]:
        return dict(self.output.columns)

    def _add(self, piece: DocumentPart, ids: list[int]) -> None:
        self._write(json.loads(piece.text))


class _MDSTokens(_MDS):
    """LLM Foundry's ConcatTokens: documents joined and cut into rows; the last rest is left out."""

    column = "tokens"

    @cached_property
    def _ids(self) -> list[int]:
        return []

    def _add(self, piece: DocumentPart, ids: list[int]) -> None:
        output, waiting = self.output, self._ids
        waiting += (*output.bos, *ids) if piece.first else ids
        if piece.last:
            waiting += output.eos
        if output.no_wrap and not piece.last:
            return
        rows = min(len(waiting) // output.row, 1 if output.no_wrap else len(waiting))
        for start in range(0, rows * output.row, output.row):
            self._write({self.column: np.array(waiting[start : start + output.row], self._dtype)})
        self.counts.tokens += rows * output.row
        if output.no_wrap and rows:
            self.counts.tokens_left_out += len(waiting) - output.row
            waiting.clear()
        del waiting[: rows * output.row]

    def end(self) -> list[dict[str, Any]]:
        self.counts.tokens_left_out += len(self._ids)
        return super().end()

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(self.output.dtype.removeprefix("ndarray:"))


_SINKS: dict[str, type[PartWriter]] = {
    "tokens": _Tokens,
    "mds-tokens": _MDSTokens,
    "mds-text": _MDSText,
    "mds-columns": _MDSColumns,
}
