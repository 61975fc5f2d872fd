"""`Store`: prepared supervised rows in a folder of the cache, memory-mapped.

Written once by `prepare`, read by `source` in every process. Tokens are kept whole: what is too
long is cut, and what is packed together is decided, when a run opens them with its max_seq_len.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry.data.supervised.bad_rows import MOST_NAMES, BadRows
from llmfoundry.errors import UserError
from llmfoundry.files import write_json

DOCUMENT = np.dtype([("end", "<i8"), ("side", "i1")])
EXAMPLE = np.dtype([("key", "<u8"), ("content", "<u8"), ("source", "<u4"), ("row", "<i8")])
NO_ROW = -1  # of a source that has no rows
SPLIT, SPELLED = "split", "with the text of a special token"


@dataclass
class StoreFacts:
    """What was read, beside the rows that are kept.

    Attributes:
        format: of the rows.
        sources: names of the files.
        per_example: documents of each row: 1, or 2 of a preference.
        dropped: rows left out, by reason.
        first: of each reason, and of each thing to tell, the first row's place.
        told: rows of which something is to be told, by what.
        split: conversations that are one row for each answer.
        parts: rows that these are.
        unread: rows that have a column, or a key of a message, that is not read, by its name.
        rows: that were read.
        bad: those that cannot be used.
        ignored: files of other kinds in the folders named.
        content: hash of ids and weights.
    """

    format: str
    sources: list[str] = field(default_factory=list)
    per_example: int = 1
    dropped: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    split: int = 0
    parts: int = 0
    unread: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    bad: BadRows = field(default_factory=BadRows)
    ignored: int = 0
    content: str = ""

    def note(self, counter: dict[str, int], what: str, where: str) -> None:
        """Count a row, and keep the place of the first."""
        counter[what] = counter.get(what, 0) + 1
        self.first.setdefault(what, where)

    def note_split(self, parts: int, where: str) -> None:
        """Count a conversation that becomes several rows."""
        self.split, self.parts = self.split + 1, self.parts + parts
        self.first.setdefault(SPLIT, where)

    def add(self, part: StoreFacts) -> None:
        """Count what a part of the input counted; parts come in order."""
        for name in ("dropped", "told", "unread"):
            counts = Counter(getattr(self, name)) + Counter(getattr(part, name))
            setattr(self, name, dict(counts.most_common(MOST_NAMES)))
        self.split, self.parts = self.split + part.split, self.parts + part.parts
        self.first = part.first | self.first
        self.rows += part.rows
        self.bad.add(part.bad)


class Store:
    """The rows of a folder.

    Attributes:
        facts: see there.
    """

    def __init__(self, folder: Path) -> None:
        """Open a folder; its arrays are mapped when they are first read.

        Raises:
            UserError: it is damaged.
        """
        self._folder = folder
        try:
            facts = json.loads((folder / "facts.json").read_text())
            self.facts = StoreFacts(**facts | {"bad": BadRows(**facts["bad"])})
            if len(self.examples) * self.facts.per_example != len(self.documents):
                raise ValueError("rows and documents do not agree")
            if len(self.ids) != self._n_ids or len(self.weights) != self._n_ids:
                raise ValueError("tokens are missing")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder}: prepared rows are damaged: {error}; delete it, it will be made again"
            ) from error

    @cached_property
    def examples(self) -> np.ndarray:
        """(rows,) of EXAMPLE."""
        return np.load(self._folder / "examples.npy", mmap_mode="r")

    @cached_property
    def documents(self) -> np.ndarray:
        """(documents,) of DOCUMENT: where each ends in `ids`, and its side."""
        return np.load(self._folder / "documents.npy", mmap_mode="r")

    @cached_property
    def ids(self) -> np.ndarray:
        """(tokens,) <u2 or <u4, of all documents."""
        return self._mapped("ids")

    @cached_property
    def weights(self) -> np.ndarray:
        """(tokens,) u1 or <f4: what each counts as a label."""
        return self._mapped("weights")

    @cached_property
    def lengths(self) -> np.ndarray:
        """(documents,) int64: tokens of each."""
        return np.diff(self.documents["end"], prepend=0)

    def span(self, document: int) -> tuple[int, int]:
        """Where a document begins and ends in `ids`."""
        ends = self.documents["end"]
        return int(ends[document - 1]) if document else 0, int(ends[document])

    def where(self, example: int) -> str:
        """The file and row that a row was read from."""
        found = self.examples[example]
        name = self.facts.sources[found["source"]]
        return name if found["row"] == NO_ROW else f"{name}:{found['row']}"

    @property
    def _n_ids(self) -> int:
        return int(self.documents["end"][-1]) if len(self.documents) else 0

    def _mapped(self, name: str) -> np.ndarray:
        (file,) = self._folder.glob(f"{name}.*")
        dtype = np.dtype(file.suffix[1:])
        if not file.stat().st_size:
            return np.zeros(0, dtype)
        return np.memmap(file, dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "facts": self.facts}

    def close(self) -> None:
        """Let go of the files; reading opens them again."""
        for name in ("ids", "weights", "documents", "examples"):
            self.__dict__.pop(name, None)


@dataclass(frozen=True)
class PartArrays:
    """What a part of the input became; all of one length by documents or by examples.

    Attributes:
        ids: (tokens,) uint32.
        weights: (tokens,) fp32.
        documents: (documents,) of DOCUMENT, ends within the part.
        examples: (rows,) of EXAMPLE, sources by their number in the whole.
    """

    ids: np.ndarray
    weights: np.ndarray
    documents: np.ndarray
    examples: np.ndarray

    def write(self, file: Path) -> None:
        """Keep it until the parts are joined."""
        with file.open("wb") as opened:
            np.savez(opened, **{name: getattr(self, name) for name in self.__dataclass_fields__})

    @classmethod
    def read(cls, file: Path) -> PartArrays:
        """What `write` kept."""
        with np.load(file) as arrays:
            return cls(**{name: arrays[name] for name in arrays.files})


def write_store(folder: Path, parts: Sequence[Path], facts: StoreFacts, vocab_size: int) -> None:
    """Join parts, in order, to a store; the parts are removed.

    Args:
        folder: where.
        parts: files of `PartArrays`.
        facts: of all of them; `content` is filled in.
        vocab_size: ids are below it.
    """
    wide = any(_is_fractional(PartArrays.read(part).weights) for part in parts)
    kinds = {"ids": "<u2" if vocab_size <= 1 << 16 else "<u4", "weights": "<f4" if wide else "u1"}
    content = hashlib.blake2b(digest_size=16)
    documents, examples, end = [], [], 0
    files = {name: (folder / f"{name}.{kind}").open("wb") for name, kind in kinds.items()}
    try:
        for path in parts:
            part = PartArrays.read(path)
            for name, kind in kinds.items():
                data = getattr(part, name).astype(kind).tobytes()
                files[name].write(data)
                content.update(data)
            part.documents["end"] += end
            end += len(part.ids)
            documents.append(part.documents)
            examples.append(part.examples)
    finally:
        for file in files.values():
            file.close()
    tables: Mapping[str, np.ndarray] = {
        "documents": np.concatenate([np.zeros(0, DOCUMENT), *documents]),
        "examples": np.concatenate([np.zeros(0, EXAMPLE), *examples]),
    }
    for name, table in tables.items():
        np.save(folder / f"{name}.npy", table)
    content.update(tables["documents"].tobytes())
    facts.content = content.hexdigest()
    for path in parts:
        path.unlink()
    write_json(folder / "facts.json", asdict(facts))


def _is_fractional(weights: np.ndarray) -> bool:
    return bool(np.any((weights != 0) & (weights != 1)))
