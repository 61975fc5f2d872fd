"""What a preparation writes: token shards, or MDS of tokens, of text, or of columns as they were.

`parts` gives each stream of each part one of these. They take a document's pieces with their ids,
in order, and say in the end what they wrote.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from llmfoundry.data.mds.writer import INDEX, MDSWriter
from llmfoundry.data.preparation.write.encode import DocumentPart
from llmfoundry.data.preparation.write.token_writer import TokenWriter
from llmfoundry.data.text.tokenizer import Tokenizer

STREAMS = ("train", "validation")
TEXTS = "texts.jsonl"


@dataclass(frozen=True)
class Output:
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
        """Whether ids are needed."""
        return self.kind not in ("mds-text", "mds-columns")

    @property
    def cuttable(self) -> bool:
        """Whether a document may come in pieces."""
        return self.tokenizes

    @property
    def keeps_texts(self) -> bool:
        """Whether held-out documents are kept as they are, beside their ids."""
        return self.kind == "tokens"

    def sink(self, folder: Path, part: str) -> Sink:
        """Where a stream's part goes: files below FOLDER/PART."""
        return _SINKS[self.kind](self, folder, part)


def token_output(
    tokenizer: Tokenizer, *, shard_bytes: int = 64 << 20, hashes: tuple[str, ...] = ("sha1",)
) -> Output:
    """Token shards in the narrowest type that holds a tokenizer's ids."""
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    first, *bos = tokenizer.document_start
    return Output(
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
class Sink(ABC):
    """One stream of one part: takes pieces, then is ended."""

    output: Output
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


class _Tokens(Sink):
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


class _MDS(Sink):
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


_SINKS: dict[str, type[Sink]] = {
    "tokens": _Tokens,
    "mds-tokens": _MDSTokens,
    "mds-text": _MDSText,
    "mds-columns": _MDSColumns,
}
