"""Cached tokenization of the supervised rows of a source.

Entry point: `prepare_rows`, which `builders/data.py` calls on every process. One process per
machine reads, renders and encodes the rows on all cores while the others wait. The result is a
`ExampleStore` in the cache folder, memory-mapped by every process and reused by later runs. A
killed process leaves no folder that looks complete. Documents are stored at full length. Truncation
and packing happen when a run opens the store (`packed_examples.py`).
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
from llmfoundry.data.preparation.partition import PartitionTask, content_hash, cut_tasks
from llmfoundry.data.preparation.prepared_folder import build_once, cache_key
from llmfoundry.data.preparation.readers import FileRow
from llmfoundry.data.supervised.formats import EmptyAnswerError, Example, example_or_error, of_each
from llmfoundry.data.supervised.loss_mask import EncodedDocument, Encoder, ExampleOptions
from llmfoundry.data.supervised.reader import RowReader
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.files import write_json
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.source import INSTRUCTIONS

_VERSION = 5  # of the stored content of a row; to be raised when that changes
_BATCH = 512  # rows encoded at a time
_ROWS_PER_REPLY = 16  # results returned at a time if the template runs in another process
_LEVELS = 100  # maximal nesting of lists and objects: templates and pickling recurse over them
EMPTY, LEFT_OUT = "empty", "left out by preprocess"
DOCUMENT = np.dtype([("end", "<i8"), ("side", "i1")])
EXAMPLE = np.dtype([("key", "<u8"), ("content", "<u8"), ("source", "<u4"), ("row", "<i8")])
NO_ROW = -1  # row number in a source without row numbers
SPLIT, SPELLED = "split", "with the text of a special token"


def prepare_rows(config: DataConfig, key: str, tokenizer: Tokenizer, *, seed: int) -> ExampleStore:
    """Return the encoded rows of a source, from the cache if they are there.

    Args:
        config: data source.
        key: recipe key of the source, for errors.
        tokenizer: tokenizer with its chat template.
        seed: seed of generated instructions.

    Raises:
        UserError: a row cannot be read or does not have the format while `bad_rows` is error, no
            row remains, or the cache cannot be written.
    """
    plan = _Plan(config, key, tokenizer, seed)
    folder = Path(config.cache_folder).expanduser() / "supervised" / cache_key(**plan.facts())
    build_once(folder, plan.build)
    store = ExampleStore(folder)
    if config.supervised.bad_rows == "error":
        store.facts.bad.check(key, store.facts.rows)
    if not len(store.examples):
        bad_rows = [f"{key}: {line}" for line in store.facts.bad.lines()]
        why = _why_none(store.facts)
        raise UserError(f"{key}: no row is left to learn from; {why}", *bad_rows)
    return store


def prepare_first_rows(
    config: DataConfig, key: str, tokenizer: Tokenizer, folder: Path, *, seed: int, most: int
) -> ExampleStore:
    """Return the encoded first rows of a source, to check them before all rows are prepared.

    Args:
        config: data source.
        key: recipe key of the source, for errors.
        tokenizer: tokenizer with its chat template.
        folder: empty folder for the store.
        seed: seed of generated instructions.
        most: maximum number of rows.

    Raises:
        UserError: the source cannot be read, or the template rejects a row.
    """
    _Plan(config, key, tokenizer, seed).build(folder, most)
    return ExampleStore(folder)


class _Plan:
    """Source, row reader and encoder of one preparation."""

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
        """Return everything that the content of the store depends on, for its cache key."""
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

    def build(self, folder: Path, most: int | None = None) -> None:
        """Read, render and encode all rows, or the first `most` rows in this process."""
        config = self._config
        work = _Work(self._reader, self._options, self._encoder, self._key, folder)
        facts = ExampleStoreFacts(self._reader.format, ["instructions"])
        if config.name == INSTRUCTIONS:
            generated = islice(_generated(config, self._key, self._seed), most)
            parts = [work.make(0, lambda on_bad_row: generated)]
        else:
            work = replace(work, corpus=self._corpus)
            tasks = cut_tasks(self._corpus)
            if most is not None:
                parts = [work.make(0, lambda on_bad_row: islice(work.all(tasks, on_bad_row), most))]
            else:
                with local_engine(config.num_workers) as run:
                    parts = sorted(run(work, tasks), key=lambda part: part[0])
            facts.sources = work.sources
            facts.ignored, facts.hidden = self._corpus.ignored, self._corpus.hidden
        facts.per_example = 2 if self._reader.format == "preference" else 1
        for _, part in parts:
            facts.add(part)
        paths = [work.part(number) for number, _ in parts]
        write_store(folder, paths, facts, self._tokenizer.vocab_size)


@dataclass(frozen=True)
class _Read:
    """Row of the source, before conversion."""

    source: int
    row: int
    where: object
    values: dict[str, Any]


@dataclass(frozen=True)
class _Work:
    """Conversion of one task's rows, sent once to each worker process."""

    reader: RowReader
    options: ExampleOptions
    encoder: Encoder
    key: str
    folder: Path
    corpus: Corpus | None = None

    def __call__(self, task: PartitionTask) -> tuple[int, ExampleStoreFacts]:
        return self.make(task.number, partial(self._rows, task))

    @property
    def sources(self) -> list[str]:
        """Return the names of the files, or the name of the dataset."""
        assert self.corpus is not None
        config = self.corpus.config
        dataset = str(config.dataset or config.remote or config.local)
        return [file.name for file in self.corpus.files] or [dataset]

    def part(self, number: int) -> Path:
        """Return the file of a task's rows until all parts are joined."""
        return self.folder / f"part-{number:05}.npz"

    def make(
        self, number: int, rows: Callable[[OnBadRow], Iterator[_Read]]
    ) -> tuple[int, ExampleStoreFacts]:
        """Convert and write the usable rows of a part.

        Args:
            number: number of the part.
            rows: yields the rows; reports each unreadable row to its argument.

        Returns:
            The number and the counts of the part.
        """
        facts = ExampleStoreFacts(self.reader.format)

        def unreadable(error: BadRow) -> None:
            facts.rows += 1
            facts.bad(error)

        self.reader.unread.clear()
        encoded: list[_EncodedRow] = []
        remaining = rows(unreadable)
        while batch := [*islice(remaining, _BATCH)]:
            facts.rows += len(batch)
            encoded += self._encode(self._examples(batch, facts), facts)
        facts.unread = dict(self.reader.unread)
        _arrays(encoded).write(self.part(number))
        return number, facts

    def all(self, tasks: Sequence[PartitionTask], on_bad_row: OnBadRow) -> Iterator[_Read]:
        """Yield the rows of several tasks."""
        for task in tasks:
            yield from self._rows(task, on_bad_row)

    def _rows(self, task: PartitionTask, on_bad_row: OnBadRow) -> Iterator[_Read]:
        """Yield the rows of a task, numbered within their file."""
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

    def _examples(
        self, batch: Sequence[_Read], facts: ExampleStoreFacts
    ) -> list[tuple[_Read, Example]]:
        """Convert rows; count rows that are bad or dropped instead of returning them."""
        # rename columns and preprocess
        readable: list[tuple[_Read, dict[str, Any]]] = []
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
                readable.append((read, values))

        # convert to examples
        examples = []
        for (read, _), outcome in zip(readable, self._outcomes(readable), strict=True):
            example = self._usable(read.where, outcome, facts)
            if example is not None:
                examples.append((read, example))
        return examples

    def _outcomes(
        self, readable: Sequence[tuple[_Read, dict[str, Any]]]
    ) -> list[Example | Exception]:
        """Convert many rows in one call, because the template may run in another process.

        Raises:
            UserError: a row makes the template exceed its limits.
        """
        convert = partial(example_or_error, self.reader.format, self.options)
        rows = [values for _, values in readable]
        if self.options.chat is None:
            return [*map(convert, rows)]
        groups = [rows[n : n + _ROWS_PER_REPLY] for n in range(0, len(rows), _ROWS_PER_REPLY)]
        with suppress(OutOfBounds):  # one row exceeds a limit, or the group as a whole does
            return [*chain.from_iterable(self.options.chat.run(partial(of_each, convert), groups))]
        # retry row by row: the group may fit in parts, and the error names the row
        try:
            return self.options.chat.run(convert, rows)
        except OutOfBounds as error:
            raise UserError(f"{error} (for {readable[error.index][0].where})") from error

    def _usable(
        self, where: object, outcome: Example | Exception, facts: ExampleStoreFacts
    ) -> Example | None:
        """Return a converted row, or count its error and return None."""
        if isinstance(outcome, Example):
            if any(self._special.search(text) for text in outcome.contents):
                facts.note(facts.told, SPELLED, str(where))
            for warning in outcome.warnings:
                facts.note(facts.told, warning, str(where))
            self.reader.note_unread(outcome.unread)
            return outcome
        if isinstance(outcome, UserError) and str(outcome).startswith("tokenizer."):
            raise outcome  # the tokenizer's settings are at fault, not a row
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

    def _encode(
        self, examples: Sequence[tuple[_Read, Example]], facts: ExampleStoreFacts
    ) -> list[_EncodedRow]:
        """Tokenize examples; drop those with an empty document."""
        # one call of the encoder for all documents
        all_documents = [d for _, example in examples for d in example.documents]
        encoded = iter(self.encoder(all_documents))
        rows = []
        for read, example in examples:
            documents = [next(encoded) for _ in example.documents]
            sides = [document.side for document in example.documents]
            if len(documents) > self._per_example:
                facts.note_split(len(documents), str(read.where))
            # a split conversation becomes one row per answer
            for n in range(0, len(documents), self._per_example):
                group = slice(n, n + self._per_example)
                if any(document.is_empty for document in documents[group]):
                    facts.note(facts.dropped, EMPTY, str(read.where))
                    continue
                rows.append(
                    _EncodedRow(read.source, read.row, example.key, documents[group], sides[group])
                )
        return rows

    @property
    def _per_example(self) -> int:
        return 2 if self.reader.format == "preference" else 1


@dataclass(frozen=True)
class _EncodedRow:
    """Documents of one row of the store; two for a preference."""

    source: int
    row: int
    key: str
    documents: list[EncodedDocument]
    sides: list[int]


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested more than `levels` deep."""
    if not isinstance(value, dict | list):
        return False
    entries = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(entry, levels - 1) for entry in entries)


def _arrays(rows: Sequence[_EncodedRow]) -> PartArrays:
    """Concatenate rows to arrays."""
    encoded = [document for row in rows for document in row.documents]
    documents = np.zeros(len(encoded), DOCUMENT)
    documents["end"] = np.cumsum([len(document.ids) for document in encoded])
    documents["side"] = [side for row in rows for side in row.sides]

    # hashes of key and content of each row
    examples = np.zeros(len(rows), EXAMPLE)
    for n, row in enumerate(rows):
        content = hashlib.blake2b(digest_size=8)
        for document in row.documents:
            content.update(document.ids.tobytes() + document.weights.tobytes() + b"|")
        content.update(bytes(side + 1 for side in row.sides))
        key = content_hash(row.key)
        examples[n] = (key, int.from_bytes(content.digest(), "little"), row.source, row.row)

    # the leading empty arrays set the dtype if there are no rows
    ids = [np.zeros(0, np.uint32), *(document.ids for document in encoded)]
    weights = [np.zeros(0, np.float32), *(document.weights for document in encoded)]
    return PartArrays(np.concatenate(ids), np.concatenate(weights), documents, examples)


def _lines_before(document: Document) -> int:
    """Return the number of lines in the file before the part that the document is in."""
    row = document.row
    return row.source.lines_before() if isinstance(row, FileRow) and row.source.start else 0


def _number(document: Document, before: int) -> int:
    """Return the row number of a document, given the lines before its part of the file."""
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
    """Return the hash of the code that generates instructions, because it decides their content."""
    content = Path(inspect.getfile(load_generator(CHATS))).read_bytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _why_none(facts: ExampleStoreFacts) -> str:
    reasons = [f"{count:,} {reason}" for reason, count in facts.dropped.items()]
    if facts.bad.count:
        reasons.append(f"{facts.bad.count:,} that cannot be used")
    return f"dropped: {', '.join(reasons)}" if reasons else "the source has no rows"


@dataclass
class ExampleStoreFacts:
    """Counts and metadata of a store.

    Attributes:
        format: format of the rows.
        sources: names of the files.
        per_example: documents per row: 2 for preferences, else 1.
        dropped: number of dropped rows, by reason.
        first: file and row of the first occurrence of each reason and warning.
        told: number of rows, by warning.
        split: number of conversations that were split into one row per answer.
        parts: number of rows that they were split into.
        unread: number of rows with a column or message key that is not read, by its name.
        rows: number of rows read.
        bad: unusable rows.
        ignored: number of files of other types in the folders.
        hidden: files and folders that are skipped because of their names.
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
        """Count a row under a reason or warning; store the location of the first."""
        counter[what] = counter.get(what, 0) + 1
        self.first.setdefault(what, where)

    def note_split(self, parts: int, where: str) -> None:
        """Count a conversation that becomes several rows."""
        self.split, self.parts = self.split + 1, self.parts + parts
        self.first.setdefault(SPLIT, where)

    def add(self, part: ExampleStoreFacts) -> None:
        """Add the counts of the next part of the input."""
        for name in ("dropped", "told", "unread"):
            counts = Counter(getattr(self, name)) + Counter(getattr(part, name))
            setattr(self, name, dict(counts.most_common(MOST_NAMES)))
        self.split, self.parts = self.split + part.split, self.parts + part.parts
        self.first = part.first | self.first
        self.rows += part.rows
        self.bad.add(part.bad)


class ExampleStore:
    """Memory-mapped encoded rows of a cache folder.

    Attributes:
        folder: the folder.
        facts: counts and metadata.
    """

    def __init__(self, folder: Path) -> None:
        """Open a folder. Its arrays are mapped on first access.

        Raises:
            UserError: the folder is damaged.
        """
        self.folder = folder
        try:
            facts = (folder / "facts.json").read_bytes()
            self.facts = msgspec.json.decode(facts, type=ExampleStoreFacts)
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
        """Return the rows, (rows,) of EXAMPLE."""
        return np.load(self.folder / "examples.npy", mmap_mode="r")

    @cached_property
    def documents(self) -> np.ndarray:
        """Return the end of each document in `ids`, and its side; (documents,) of DOCUMENT."""
        return np.load(self.folder / "documents.npy", mmap_mode="r")

    @cached_property
    def ids(self) -> np.ndarray:
        """Return the tokens of all documents, (tokens,) <u2 or <u4."""
        return self._mapped("ids")

    @cached_property
    def weights(self) -> np.ndarray:
        """Return the loss weight of each token as a label, (tokens,) u1 or <f4."""
        return self._mapped("weights")

    @cached_property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each document, (documents,) int64."""
        return np.diff(self.documents["end"], prepend=0)

    def where(self, example: int) -> str:
        """Return the file and row that a row was read from."""
        entry = self.examples[example]
        name = self.facts.sources[entry["source"]]
        return name if entry["row"] == NO_ROW else f"{name}:{entry['row']}"

    @property
    def _n_ids(self) -> int:
        return int(self.documents["end"][-1]) if len(self.documents) else 0

    def _mapped(self, name: str) -> np.ndarray:
        (file,) = self.folder.glob(f"{name}.*")
        dtype = np.dtype(file.suffix[1:])
        if not file.stat().st_size:
            return np.zeros(0, dtype)
        return np.memmap(file, dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "facts": self.facts}

    def close(self) -> None:
        """Unmap the files. The next access maps them again."""
        for name in ("ids", "weights", "documents", "examples"):
            self.__dict__.pop(name, None)


@dataclass(frozen=True)
class PartArrays:
    """Encoded rows of a part of the input.

    Attributes:
        ids: (tokens,) uint32.
        weights: (tokens,) fp32.
        documents: (documents,) of DOCUMENT, ends within the part.
        examples: (rows,) of EXAMPLE, sources numbered over the complete input.
    """

    ids: np.ndarray
    weights: np.ndarray
    documents: np.ndarray
    examples: np.ndarray

    def write(self, file: Path) -> None:
        """Write the arrays to a file."""
        with file.open("wb") as opened:
            np.savez(opened, **{name: getattr(self, name) for name in self.__dataclass_fields__})

    @classmethod
    def read(cls, file: Path) -> PartArrays:
        """Read the arrays from a file of `write`."""
        with np.load(file) as arrays:
            return cls(**{name: arrays[name] for name in arrays.files})


def write_store(
    folder: Path, parts: Sequence[Path], facts: ExampleStoreFacts, vocab_size: int
) -> None:
    """Join parts, in order, to a store, and delete the parts.

    Args:
        folder: folder of the store.
        parts: files of `PartArrays`.
        facts: counts of all parts; gets the content hash.
        vocab_size: decides the dtype of the ids.
    """
    # the smallest dtypes that hold all values
    is_fractional = any(_is_fractional(PartArrays.read(part).weights) for part in parts)
    dtypes = {
        "ids": "<u2" if vocab_size <= 1 << 16 else "<u4",
        "weights": "<f4" if is_fractional else "u1",
    }

    # append ids and weights part by part, so that only one part is in memory
    content = hashlib.blake2b(digest_size=16)
    documents, examples, end = [], [], 0
    files = {name: (folder / f"{name}.{dtype}").open("wb") for name, dtype in dtypes.items()}
    try:
        for path in parts:
            part = PartArrays.read(path)
            for name, dtype in dtypes.items():
                data = getattr(part, name).astype(dtype).tobytes()
                files[name].write(data)
                content.update(data)
            part.documents["end"] += end
            end += len(part.ids)
            documents.append(part.documents)
            examples.append(part.examples)
    finally:
        for file in files.values():
            file.close()

    # write the tables; facts.json comes last
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
