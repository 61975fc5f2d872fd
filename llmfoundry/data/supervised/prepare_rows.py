"""`prepare_rows`: the supervised rows of a source in tokens, made once, then only opened.

Called by `builders/data.py` on every process; one of each machine does the work, over its cores,
while the others wait. A killed one leaves nothing that a later one would take for complete. What is
made is a `Store` in a folder of the cache, memory-mapped in every process. Tokens are kept whole:
what is too long is cut, and what is packed together is decided, when a run opens them
(`packed_examples.py`).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from llmfoundry.bounded import OutOfBounds
from llmfoundry.data.generators import CHATS, load_generator
from llmfoundry.data.preparation.bad_rows import MOST_NAMES, BadRow, BadRows, OnBadRow, bad_row
from llmfoundry.data.preparation.columns import ROW
from llmfoundry.data.preparation.corpus import Corpus, Document
from llmfoundry.data.preparation.engines import local_engine
from llmfoundry.data.preparation.partition import Task, content_hash, cut_tasks
from llmfoundry.data.preparation.prepared_folder import build_once, cache_key
from llmfoundry.data.preparation.readers import FileRow
from llmfoundry.data.supervised.formats import EmptyAnswerError, Example, example_or_error, of_each
from llmfoundry.data.supervised.loss_mask import Encoded, Encoder, ExampleOptions
from llmfoundry.data.supervised.reader import RowReader
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.files import write_json
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.source import INSTRUCTIONS

_VERSION = 5  # of what is made of a row; raised when it becomes another
_BATCH = 512  # rows that are encoded at a time
_TOGETHER = 16  # rows whose results come back at a time, where the template runs elsewhere
_LEVELS = 100  # of lists and objects in each other: a template, and pickling, nest with them
EMPTY, LEFT_OUT = "empty", "left out by preprocess"
DOCUMENT = np.dtype([("end", "<i8"), ("side", "i1")])
EXAMPLE = np.dtype([("key", "<u8"), ("content", "<u8"), ("source", "<u4"), ("row", "<i8")])
NO_ROW = -1  # of a source that has no rows
SPLIT, SPELLED = "split", "with the text of a special token"


def prepare_rows(config: DataConfig, key: str, tokenizer: Tokenizer, *, seed: int) -> Store:
    """The rows of a source, from the cache where they are there.

    Raises:
        UserError: rows cannot be read or are not of their format and `bad_rows` is error, there are
            none, or the cache cannot be written.
    """
    plan = _Plan(config, key, tokenizer, seed)
    folder = Path(config.cache_folder).expanduser() / "supervised" / cache_key(**plan.facts())
    build_once(folder, plan.build)
    store = Store(folder)
    if config.supervised.bad_rows == "error":
        store.facts.bad.check(key, store.facts.rows)
    if not len(store.examples):
        more = [f"{key}: {line}" for line in store.facts.bad.lines()]
        why = _why_none(store.facts)
        raise UserError(f"{key}: no row is left to learn from; {why}", *more)
    return store


class _Plan:
    """What to read, and how."""

    def __init__(self, config: DataConfig, key: str, tokenizer: Tokenizer, seed: int) -> None:
        self._config, self._key, self._seed = replace(config, text_column=ROW), key, seed
        self._tokenizer = tokenizer
        self._reader = RowReader(key, config)
        supervised = config.supervised
        shortest = supervised.shortest_target_prompt
        chat = tokenizer.chat if tokenizer.has_chat else None
        self._options = ExampleOptions.of(
            chat,
            last_only=supervised.target_responses == "last",
            prompts=bool(np.isfinite(shortest)),
        )
        self._encoder = Encoder(tokenizer, shortest, always_eos=supervised.chat_eos == "always")

    @cached_property
    def _corpus(self) -> Corpus:
        return Corpus(self._config)

    def facts(self) -> dict[str, Any]:
        """All that decides what is made."""
        config = self._config
        if config.name == INSTRUCTIONS:
            source: Any = [config.tasks, config.rows, config.format, self._seed, _generator_hash()]
        else:
            source = self._corpus.fingerprint()
        chat = self._options.chat
        return {
            "version": _VERSION,
            "source": source,
            "rows": self._reader.facts(),
            "tokenizer": [self._tokenizer.fingerprint, *self._tokenizer.bos_ids],
            "chat": None if chat is None else chat.fingerprint,
            "target_prompts": config.supervised.target_prompts,
            "target_responses": config.supervised.target_responses,
            "chat_eos": config.supervised.chat_eos,
        }

    def build(self, folder: Path) -> None:
        """Read, render and encode all rows."""
        work = _Work(self._reader, self._options, self._encoder, self._key, folder)
        if self._config.name == INSTRUCTIONS:
            config = self._config
            generated = _generated(config, self._key, self._seed)
            made = [work.make(0, lambda on_bad_row: generated)]
            facts = StoreFacts(self._reader.format, ["instructions"])
        else:
            work = replace(work, corpus=self._corpus)
            with local_engine(self._config.num_workers) as run:
                made = sorted(run(work, cut_tasks(self._corpus)), key=lambda part: part[0])
            facts = StoreFacts(self._reader.format, work.sources)
            facts.ignored, facts.hidden = self._corpus.ignored, self._corpus.hidden
        facts.per_example = 2 if self._reader.format == "preference" else 1
        for _, part in made:
            facts.add(part)
        paths = [work.part(number) for number, _ in made]
        write_store(folder, paths, facts, self._tokenizer.vocab_size)


@dataclass(frozen=True)
class _Read:
    """A row as it was read."""

    source: int
    row: int
    where: object
    values: dict[str, Any]


@dataclass(frozen=True)
class _Work:
    """What a process does with a task; sent to each once."""

    reader: RowReader
    options: ExampleOptions
    encoder: Encoder
    key: str
    folder: Path
    corpus: Corpus | None = None

    def __call__(self, task: Task) -> tuple[int, StoreFacts]:
        return self.make(task.number, partial(self._rows, task))

    @property
    def sources(self) -> list[str]:
        """Names of the files, or the dataset's."""
        assert self.corpus is not None
        config = self.corpus.config
        alone = str(config.dataset or config.remote or config.local)
        return [file.name for file in self.corpus.files] or [alone]

    def part(self, number: int) -> Path:
        """Where the rows of a task are kept until all are joined."""
        return self.folder / f"part-{number:05}.npz"

    def make(
        self, number: int, rows: Callable[[OnBadRow], Iterator[_Read]]
    ) -> tuple[int, StoreFacts]:
        """Write a part of those of its rows that can be used."""
        facts = StoreFacts(self.reader.format)

        def unreadable(error: BadRow) -> None:
            facts.rows += 1
            facts.bad(error)

        self.reader.unread.clear()
        made: list[_Made] = []
        waiting = rows(unreadable)
        while batch := [*islice(waiting, _BATCH)]:
            facts.rows += len(batch)
            made += self._encode(self._examples(batch, facts), facts)
        facts.unread = dict(self.reader.unread)
        _arrays(made).write(self.part(number))
        return number, facts

    def _rows(self, task: Task, on_bad_row: OnBadRow) -> Iterator[_Read]:
        assert self.corpus is not None
        for span in task.spans:
            before: int | None = None
            for document in self.corpus.read(span, on_bad_row=on_bad_row):
                if document.blank:
                    continue
                if before is None:
                    before = _lines_before(document)
                number = _number(document, before)
                values = json.loads(document.text)
                yield _Read(span.source, number, f"{document.source}:{number}", values)

    def _examples(self, batch: Sequence[_Read], facts: StoreFacts) -> list[tuple[_Read, Example]]:
        given: list[tuple[_Read, dict[str, Any]]] = []
        for read in batch:
            try:
                values = self.reader(read.where, read.values)
                if _is_deeper(values, _LEVELS):
                    raise BadRow(read.where, f"is nested in more than {_LEVELS} levels; correct it")
            except BadRow as error:
                facts.bad(error)
                continue
            if values is None:
                facts.note(facts.dropped, LEFT_OUT, str(read.where))
            else:
                given.append((read, values))
        kept = []
        for (read, _), outcome in zip(given, self._outcomes(given), strict=True):
            example = self._made(read.where, outcome, facts)
            if example is not None:
                kept.append((read, example))
        return kept

    def _outcomes(self, given: Sequence[tuple[_Read, dict[str, Any]]]) -> list[Example | Exception]:
        """The template runs for many rows at a time, as it may run in another process."""
        make = partial(example_or_error, self.reader.format, self.options)
        rows = [values for _, values in given]
        if self.options.chat is None:
            return [*map(make, rows)]
        some = [rows[n : n + _TOGETHER] for n in range(0, len(rows), _TOGETHER)]
        with suppress(OutOfBounds):  # of a row, or of all together
            return [*chain.from_iterable(self.options.chat.run(partial(of_each, make), some))]
        try:
            return self.options.chat.run(make, rows)
        except OutOfBounds as error:
            raise UserError(f"{error} (for {given[error.index][0].where})") from error

    def _made(
        self, where: object, outcome: Example | Exception, facts: StoreFacts
    ) -> Example | None:
        if isinstance(outcome, Example):
            if any(self._special.search(text) for text in outcome.contents):
                facts.note(facts.told, SPELLED, str(where))
            for what in outcome.told:
                facts.note(facts.told, what, str(where))
            self.reader.note_unread(outcome.unread)
            return outcome
        if isinstance(outcome, UserError) and str(outcome).startswith("tokenizer."):
            raise outcome  # no row is at fault
        if isinstance(outcome, EmptyAnswerError):
            facts.note(facts.dropped, EMPTY, str(where))
        elif isinstance(outcome, ValueError):
            facts.bad(bad_row(where, outcome))
        elif isinstance(outcome, RecursionError):
            facts.bad(BadRow(where, "holds JSON that is nested too deeply; correct the row"))
        else:
            facts.bad(BadRow(where, str(outcome)))
        return None

    @cached_property
    def _special(self) -> re.Pattern[str]:
        tokens = self.encoder.special_tokens
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    def _encode(self, kept: Sequence[tuple[_Read, Example]], facts: StoreFacts) -> list[_Made]:
        encoded = iter(self.encoder([d for _, example in kept for d in example.documents]))
        found = []
        for read, example in kept:
            documents = [next(encoded) for _ in example.documents]
            sides = [document.side for document in example.documents]
            if len(documents) > self._per_example:
                facts.note_split(len(documents), str(read.where))
            for n in range(0, len(documents), self._per_example):
                some = slice(n, n + self._per_example)
                if any(document.is_empty for document in documents[some]):
                    facts.note(facts.dropped, EMPTY, str(read.where))
                    continue
                found.append(
                    _Made(read.source, read.row, example.key, documents[some], sides[some])
                )
        return found

    @property
    def _per_example(self) -> int:
        return 2 if self.reader.format == "preference" else 1


@dataclass(frozen=True)
class _Made:
    source: int
    row: int
    key: str
    documents: list[Encoded]
    sides: list[int]


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects lie in each other in more levels."""
    if not isinstance(value, dict | list):
        return False
    entries = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(entry, levels - 1) for entry in entries)


def _arrays(made: Sequence[_Made]) -> PartArrays:
    encoded = [document for one in made for document in one.documents]
    documents = np.zeros(len(encoded), DOCUMENT)
    documents["end"] = np.cumsum([len(document.ids) for document in encoded])
    documents["side"] = [side for one in made for side in one.sides]
    examples = np.zeros(len(made), EXAMPLE)
    for n, one in enumerate(made):
        content = hashlib.blake2b(digest_size=8)
        for document in one.documents:
            content.update(document.ids.tobytes() + document.weights.tobytes() + b"|")
        content.update(bytes(side + 1 for side in one.sides))
        key = content_hash(one.key)
        examples[n] = (key, int.from_bytes(content.digest(), "little"), one.source, one.row)
    empty = [np.zeros(0, np.uint32)], [np.zeros(0, np.float32)]
    return PartArrays(
        np.concatenate([*empty[0], *(document.ids for document in encoded)]),
        np.concatenate([*empty[1], *(document.weights for document in encoded)]),
        documents,
        examples,
    )


def _lines_before(document: Document) -> int:
    """Lines of the file before the part that the document is in; counted once a part."""
    row = document.row
    return row.source.lines_before() if isinstance(row, FileRow) and row.source.start else 0


def _number(document: Document, before: int) -> int:
    if isinstance(document.row, FileRow):
        return document.row.number + before
    return NO_ROW if document.row is None else document.row


def _generated(config: DataConfig, key: str, seed: int) -> Iterator[_Read]:
    assert config.rows is not None
    rows = load_generator(CHATS).instruction_rows(
        config.tasks, config.rows, seed=seed, format=config.format, key=f"{key}."
    )
    for number, values in enumerate(rows):
        yield _Read(0, number, f"instructions:{number}", dict(values))


def _generator_hash() -> str:
    """Of the code that generates instructions: a changed one makes others."""
    content = Path(inspect.getfile(load_generator(CHATS))).read_bytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _why_none(facts: StoreFacts) -> str:
    reasons = [f"{count:,} {reason}" for reason, count in facts.dropped.items()]
    if facts.bad.count:
        reasons.append(f"{facts.bad.count:,} that cannot be used")
    return f"dropped: {', '.join(reasons)}" if reasons else "the source has no rows"


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
        hidden: files and folders that are left out for their names.
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
    hidden: list[str] = field(default_factory=list)
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
        """Open a folder; its arrays are mapped when they are first read."""
        self._folder = folder
        try:
            facts = (folder / "facts.json").read_bytes()
            self.facts = msgspec.json.decode(facts, type=StoreFacts)
            if len(self.examples) * self.facts.per_example != len(self.documents):
                raise ValueError("rows and documents do not agree")
            if len(self.ids) != self._n_ids or len(self.weights) != self._n_ids:
                raise ValueError("tokens are missing")
        except (OSError, ValueError, KeyError, TypeError, msgspec.DecodeError) as error:
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
    """Join parts, in order, to a store; the parts are removed."""
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
