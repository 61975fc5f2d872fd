"""Conversion of one task's documents to shards.

Entry point: `make_part`, which the processes of `engines.py` and the workers of Ray call. The one
idea: a part is a pure function of the task and the settings. Its folders appear atomically, and its
JSON file is written last. A killed preparation therefore resumes with its finished parts, and two
processes that write the same part do no harm.

Documents are encoded on several threads, in order, because the `tokenizers` library releases the
GIL. Long texts are split where this leaves the ids unchanged, which limits memory and distributes a
book over cores. A `PartWriter` per stream writes token shards, or MDS of tokens, text or columns.
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

WORK = ".parts"  # folder of unfinished work
REPEAT = "repeats another"
_CHUNK = 1 << 18  # characters that a thread encodes at a time
_LONGEST = 1 << 20  # characters of a document that are encoded at once, if it can be split
# Byte-level tokenizers begin a word at the start of a line, so splitting there does not change the
# ids. The characters on both sides must not be white space, since runs of it are words, too.
_CUT = re.compile(r"\S\n(?=\S)")
STREAMS = ("train", "validation")
TEXTS = "texts.jsonl"


@dataclass
class PartSettings:
    """Settings that all tasks of a preparation share. Picklable.

    Attributes:
        corpus: the corpus.
        split: decides which documents are held out.
        tokenizer: the tokenizer.
        output: format of the files.
        place: output folder.
        settings: everything but the corpus' files that the output depends on. A part with other
            settings is prepared again.
        threads: encoding threads per process.
        repeats: for each task, a file with the documents that repeat another (`deduplicate`); empty
            without deduplication.
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
        """Return the fingerprint of a task's part."""
        return task.fingerprint(self.corpus, **self.settings)


@dataclass(frozen=True)
class PreparedPart:
    """Metadata of a finished part.

    Attributes:
        task: fingerprint of the part.
        counts: counts of each stream.
        shards: index entries of each stream's shards.
        texts: files with held-out documents.
        dropped: number of dropped documents, by reason.
        checksums: sha256 of the input files that were read completely, by number of the file.
    """

    task: str
    counts: dict[str, StreamCounts]
    shards: dict[str, list[dict[str, Any]]]
    texts: list[str]
    dropped: dict[str, int]
    checksums: dict[int, str]

    def to_json(self) -> bytes:
        """Serialize the part for its file."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> PreparedPart:
        """Parse the file of a part."""
        return msgspec.json.decode(data, type=cls)


def make_part(
    job: PartSettings, task: PartitionTask, seen: Callable[[int], None] = ignore
) -> PreparedPart:
    """Read, encode and write the documents of a task.

    Args:
        job: settings of the preparation.
        task: the task.
        seen: called with the number of input bytes read, for a progress bar.
    """
    with job.place.scratch(WORK) as folder:
        # write to a scratch folder
        writers = {name: job.output.sink(folder / name, task.part) for name in STREAMS}
        with (folder / TEXTS).open("w", encoding="utf-8") as texts:
            reader = _Reader(job, task, seen, texts if job.output.keeps_texts else None)
            for piece, ids in _encoded(job, reader.pieces()):
                writers[STREAMS[piece.held_out]].add(piece, ids)
        shards = {name: writer.end() for name, writer in writers.items()}
        names = _place_texts(folder, task)

        # move it to the output
        for name in STREAMS:
            if (folder / name / task.part).is_dir():
                job.place.put(folder / name / task.part, f"{name}/{task.part}")

    # the metadata marks the part as finished
    part = PreparedPart(
        task=job.fingerprint(task),
        counts={name: writer.counts for name, writer in writers.items()},
        shards=shards,
        texts=names,
        dropped=dict(sorted(reader.dropped.items())),
        checksums=dict(_checksums(job.corpus, task)),
    )
    job.place.write(f"{WORK}/{task.part}.json", part.to_json())
    return part


def _place_texts(folder: Path, task: PartitionTask) -> list[str]:
    """Move the file of held-out texts to the part, if it has any; return its name in the index."""
    if not (folder / TEXTS).stat().st_size:
        return []
    target = folder / "validation" / task.part
    target.mkdir(parents=True, exist_ok=True)
    (folder / TEXTS).rename(target / TEXTS)
    return [f"{task.part}/{TEXTS}"]


def find_part(job: PartSettings, task: PartitionTask) -> PreparedPart | None:
    """Return the finished part of a task; None if it is missing or has another fingerprint."""
    data = job.place.read(f"{WORK}/{task.part}.json")
    part = None if data is None else PreparedPart.from_json(data)
    return part if part is not None and part.task == job.fingerprint(task) else None


def sign_part(job: PartSettings, folder: Path, task: PartitionTask) -> None:
    """Write the signatures of a task's documents, which `deduplicate` compares."""
    target = signature_file(folder, task)
    if not target.exists():
        texts = (document.text for document in _Reader(job, task).documents())
        signatures(texts, target, method=job.corpus.config.deduplicate)


def signature_file(folder: Path, task: PartitionTask) -> Path:
    """Return the file of `sign_part`; a folder has the signatures of one version of a corpus."""
    return folder / f"{task.part}.npy"


@dataclass
class _Reader:
    """Reader of a task's documents; counts dropped ones and writes held-out texts to `texts`."""

    job: PartSettings
    task: PartitionTask
    seen: Callable[[int], None] = ignore
    texts: IO[str] | None = None
    dropped: Counter[str] = field(default_factory=Counter)

    def documents(self) -> Iterator[Document]:
        """Yield the documents that the filters retain."""
        corpus = self.job.corpus
        for span in self.task.spans:
            for document in corpus.read(span, self.seen):
                reason = corpus.drops(document)
                if reason is None:
                    yield document
                else:
                    self.dropped[reason] += 1

    def pieces(self) -> Iterator[DocumentPart]:
        """Yield the retained documents; long ones are split if the tokenizer allows it."""
        may_split = self.job.output.tokenizes and cuts_at_lines(self.job.tokenizer)
        for document in self._unrepeated():
            for side, held_out in self.job.split.sides(document.text):
                if held_out and self.texts is not None:
                    self.texts.write(json.dumps(side) + "\n")
                parts = list(split_text(side)) if may_split else [side]
                for n, text in enumerate(parts):
                    yield DocumentPart(text, held_out, n == 0, n == len(parts) - 1)

    def _unrepeated(self) -> Iterator[Document]:
        """Yield the documents that do not repeat another."""
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
    """Yield number and sha256 of the local files that the task reads completely."""
    for span in task.spans if corpus.files else ():
        file = corpus.files[span.source]
        if span.start == 0 and span.stop is None and "://" not in file.name:
            yield span.source, digest("sha256", InputRange(file).chunks())


@dataclass(frozen=True)
class DocumentPart:
    """Document, or piece of a long document.

    Attributes:
        text: text of the piece; never empty.
        held_out: whether it is validation text.
        first: whether it is the first piece of the document.
        last: whether it is the last piece.
    """

    text: str
    held_out: bool
    first: bool
    last: bool

    @property
    def n_bytes(self) -> int:
        """Return the size of the text in UTF-8."""
        return len(self.text.encode())


def split_text(text: str, longest: int = _LONGEST) -> Iterator[str]:
    """Split a text into pieces of about `longest` characters without changing its ids."""
    start = 0
    while (line_end := _CUT.search(text, start + longest)) is not None:
        yield text[start : line_end.end()]
        start = line_end.end()
    yield text[start:]


def cuts_at_lines(tokenizer: Tokenizer) -> bool:
    """Return whether `split_text` leaves the ids unchanged.

    It does not for SentencePiece, which marks the start of each text.
    """
    before, after = "end.\n", "Start here"
    joined_ids = tokenizer.encode(before + after)
    ids = tokenizer.encode(before) + tokenizer.encode(after)
    # a parsed special token may absorb the white space around it
    return tokenizer.byte_level and tokenizer.split_special_tokens and joined_ids == ids


def encode_all(
    pieces: Iterable[DocumentPart], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[DocumentPart, list[int]]]:
    """Yield each piece with its ids, in order; `workers` threads encode some chunks ahead."""
    # in this thread
    if workers == 1:
        with _one_thread_a_call():
            for chunk in _chunks(pieces):
                ids = tokenizer.encode_batch([piece.text for piece in chunk])
                yield from zip(chunk, ids, strict=True)
        return

    # in several threads; at most 2 * workers chunks are in memory
    pending: deque[tuple[list[DocumentPart], Future[list[list[int]]]]] = deque()
    with _one_thread_a_call(), ThreadPoolExecutor(workers) as pool:
        for chunk in _chunks(pieces):
            texts = [piece.text for piece in chunk]
            pending.append((chunk, pool.submit(tokenizer.encode_batch, texts)))
            if len(pending) > 2 * workers:
                oldest, future = pending.popleft()
                yield from zip(oldest, future.result(), strict=True)
        for oldest, future in pending:
            yield from zip(oldest, future.result(), strict=True)


def _chunks(pieces: Iterable[DocumentPart]) -> Iterator[list[DocumentPart]]:
    """Group pieces to chunks of at least _CHUNK characters."""
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
    """Disable the threads of `tokenizers`; num_workers sets the number of cores in use."""
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
    """Format of the output files.

    Attributes:
        kind: tokens (token shards), mds-tokens, mds-text or mds-columns.
        dtype: <u2 or <u4 for token shards; encoding of the column for MDS: ndarray:int32 …, str.
        shard_bytes: size of a shard before compression.
        hashes: hash algorithms of the index.
        eos_id: first id of each document in token shards: the end of text, or the token that the
            tokenizer itself prepends.
        compression: compression of MDS shards; None: none.
        row: tokens of an MDS sample.
        bos, eos: ids around each document; in token shards, `bos` follows `eos_id`.
        no_wrap: begin each MDS sample with a document, and drop the rest of its last document.
        columns: columns of mds-columns with their encoding, str or json.
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
        """Return whether documents are tokenized; they may then be split into pieces."""
        return self.kind not in ("mds-text", "mds-columns")

    @property
    def keeps_texts(self) -> bool:
        """Return whether the text of held-out documents is stored in addition to their ids."""
        return self.kind == "tokens"

    def sink(self, folder: Path, part: str) -> PartWriter:
        """Return the writer of a stream's part, with files in FOLDER/PART."""
        return _SINKS[self.kind](self, folder, part)


def token_output(
    tokenizer: Tokenizer, *, shard_bytes: int = 64 << 20, hashes: tuple[str, ...] = ("sha1",)
) -> OutputFormat:
    """Return the format of token shards, in the smallest dtype that holds all ids."""
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    first, *bos = tokenizer.document_start
    return OutputFormat(
        "tokens", dtype, shard_bytes, hashes, first, bos=tuple(bos), eos=tokenizer.document_end
    )


@dataclass
class StreamCounts:
    """Counts of a stream or of a part of it.

    Attributes:
        documents: number of documents.
        bytes: size of their text in UTF-8.
        tokens: number of written tokens, including special tokens around documents.
        samples: number of MDS samples.
        tokens_left_out: tokens of incomplete MDS samples, which are dropped.
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
    """Writer of one stream of a part: `add` pieces, then `end`."""

    output: OutputFormat
    folder: Path
    part: str
    counts: StreamCounts = field(default_factory=StreamCounts)

    def add(self, piece: DocumentPart, ids: list[int]) -> None:
        """Add the next piece of a document."""
        self.counts.documents += piece.first
        self.counts.bytes += piece.n_bytes
        self._add(piece, ids)

    @abstractmethod
    def _add(self, piece: DocumentPart, ids: list[int]) -> None:
        """Add a piece in the format of the subclass."""

    @abstractmethod
    def end(self) -> list[dict[str, Any]]:
        """Finish the files; return their entries in the index of the stream."""


class _Tokens(PartWriter):
    """Writer of token shards."""

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
    """Writer of MDS. The MDSWriter is created for the first sample, as a part may have none."""

    column: ClassVar[str]

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns with their encodings."""
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
    """Writer of MDS with one sample per document, unchanged."""

    column = "text"

    def _add(self, piece: DocumentPart, ids: list[int]) -> None:
        self._write({self.column: piece.text})


class _MDSColumns(_MDS):
    """Writer of MDS with one sample per row; its document is a JSON object of `readers.pick`."""

    @property
    def columns(self) -> dict[str, str]:
        return dict(self.output.columns)

    def _add(self, piece: DocumentPart, ids: list[int]) -> None:
        self._write(json.loads(piece.text))


class _MDSTokens(_MDS):
    """Writer of MDS with concatenated tokens, as LLM Foundry's ConcatTokens.

    Documents are joined and split into samples of equal length; the last rest is dropped.
    """

    column = "tokens"

    @cached_property
    def _ids(self) -> list[int]:
        return []

    def _add(self, piece: DocumentPart, ids: list[int]) -> None:
        output, pending = self.output, self._ids
        pending += (*output.bos, *ids) if piece.first else ids
        if piece.last:
            pending += output.eos
        if output.no_wrap and not piece.last:
            return

        # write complete samples; with no_wrap at most one, and drop the rest of the document
        n_samples = len(pending) // output.row
        if output.no_wrap:
            n_samples = min(n_samples, 1)
        for start in range(0, n_samples * output.row, output.row):
            self._write({self.column: np.array(pending[start : start + output.row], self._dtype)})
        self.counts.tokens += n_samples * output.row
        if output.no_wrap and n_samples:
            self.counts.tokens_left_out += len(pending) - output.row
            pending.clear()
        del pending[: n_samples * output.row]

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
