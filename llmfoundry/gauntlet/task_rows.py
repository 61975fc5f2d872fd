"""Rows of a task: read from `dataset_uri`, checked, hashed and ordered.

Entry point: `Gauntlet` calls `load_rows` for each task, then `row_order`, `chance`, `majority` and
`rows_hash`. The reader of the task type converts each row (`task_types`). Missing rows raise
`RowsNotFound`, so that the caller can continue without the task. All other errors are `UserError`.

Two sources are generated here. `heldout://continuations` asks which of four pieces of text comes
next. The pieces are split from the run's held-out documents, so that every corpus has a task that
measures training progress. They depend only on the documents' content, not on their order. Wrong
pieces are pieces of the same length from other held-out documents. `instructions://NAME` are chats
that `eval/generated_chats.py` also generates for training sets. No question of its splits
`held_out` and `lengths` is ever in a training set.
"""

from __future__ import annotations

import dataclasses
import glob
import gzip
import hashlib
import io
import itertools
import json
import math
import random
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import fsspec

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.generators import CHATS, TASKS, load_generator
from llmfoundry.data.preparation.columns import unique_keys
from llmfoundry.data.preparation.input_files import list_url
from llmfoundry.data.store import MissingError, Store
from llmfoundry.errors import UserError, import_optional, one_line
from llmfoundry.files import parse_json, read_guarded
from llmfoundry.gauntlet.gauntlet_file import BROKEN, is_broken
from llmfoundry.gauntlet.questions import TaskConfig, TaskRow
from llmfoundry.gauntlet.task_types import TaskType, filled_text, short_repr, type_of
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.paths import ROOT, nearest_path, show

RawRow = str | Mapping[str, Any]

FETCH = "python scripts/fetch_eval_data.py"
GENERATED, HELD_OUT = "generated://", "heldout://"

# Fields of rows that hold lists or numbers; the others are made of columns as text.
_LISTS = ("choices", "context_options", "aliases")
_AS_THEY_ARE = (*_LISTS, "gold")

_UNSAFE = ("pandas",)  # builders of `datasets`; newer ones than 4 refuse it themselves
_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
_CONTENT_FIELDS = sorted(f.name for f in dataclasses.fields(TaskRow) if f.name != "place")
_OF_CONVERSATIONS = ("messages", "reply", "tools", "checks")  # newer than kept hashes
_SHOWN = 10  # problems of one task that are listed before the rest is only counted


class RowsNotFound(UserError):
    """The rows are not where the task specifies."""


class NoHeldOutText(RowsNotFound):
    """The run's held-out text is too short or missing: the task is skipped in every gauntlet."""


def load_rows(
    task: TaskConfig, *, gauntlet_path: Path, fetching: FetchOptions | None = None
) -> list[TaskRow]:
    """Return all rows of a task whose dataset_uri is not heldout://.

    Args:
        task: the task's settings.
        gauntlet_path: the gauntlet file; relative paths are resolved from its folder.
        fetching: see `read_source`.

    Raises:
        UserError: there are no rows; or file, line and mistake of the first ten invalid rows.
    """
    rows: list[TaskRow] = []
    problems: list[str] = []
    for place, raw in read_source(task, gauntlet_path=gauntlet_path, fetching=fetching):
        try:
            rows.append(_row(raw, place, task))
        except ValueError as error:
            problems.append(f"{place}: {error}")
    if len(problems) > _SHOWN:
        more = len(problems) - _SHOWN
        line = f"{task.dataset_uri}: {more} more rows are not {task.icl_task_type} rows either"
        problems[_SHOWN:] = [line]
    if problems:
        raise UserError(*problems)
    if not rows:
        raise UserError(f"{task.dataset_uri}: has no rows; task {task.label} needs at least one")
    return rows


def chance(rows: Sequence[TaskRow], kind: TaskType) -> float:
    """Return the accuracy of guessing, averaged over the rows."""
    return sum(map(kind.guess, rows)) / len(rows)


def majority(rows: Sequence[TaskRow], kind: TaskType) -> float:
    """Return the accuracy of the best constant answer: an index, or a text in generation."""
    return Counter(map(kind.constant, rows)).most_common(1)[0][1] / len(rows)


def rows_hash(rows: Sequence[TaskRow]) -> str:
    """Return a hash (32 hexadecimal digits) of the rows' content and order, without locations."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(_content(row))
    return digest.hexdigest()


def row_hash(row: TaskRow) -> str:
    """Return a hash (16 hexadecimal digits) of one row's content, without its location."""
    return hashlib.blake2b(_content(row), digest_size=8).hexdigest()


def _content(row: TaskRow) -> bytes:
    """Return all fields of a row but its location, as a line of JSON."""
    content = {name: getattr(row, name) for name in _CONTENT_FIELDS}
    content = {n: v for n, v in content.items() if v or n not in _OF_CONVERSATIONS}
    return json.dumps(content, separators=(",", ":")).encode("ascii") + b"\n"


def row_order(rows: Sequence[TaskRow]) -> list[int]:
    """Return the indices of all rows in evaluation order: a prefix is a fixed random sample.

    Within a category, rows are ordered by their hash. Categories interleave in proportion to their
    number of rows.
    """
    categories: dict[str | None, list[tuple[bytes, int]]] = defaultdict(list)
    for i, row in enumerate(rows):
        categories[row.category].append((_digest(row), i))
    places = []
    for members in categories.values():
        for n, (digest, i) in enumerate(sorted(members)):
            places.append(((n + 0.5) / len(members), digest, i))
    return [i for _, _, i in sorted(places)]


def part_of(n: int, share: float) -> int:
    """Return the number of rows in a share of n rows; at least one."""
    return min(n, max(1, math.ceil(share * n)))


def _digest(row: TaskRow) -> bytes:
    text = "\0".join((*row.contexts, *row.choices))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _row(raw: RawRow, place: str, task: TaskConfig) -> TaskRow:
    """Check and convert a raw row. A ValueError has the mistake."""
    row = _parse(raw) if isinstance(raw, str) else raw
    if task.strip_dataset:  # as LLM Foundry: texts of the row itself, not those in its lists
        row = {k: v.strip() if isinstance(v, str) else v for k, v in row.items()}
    for name in (*type_of(task).fields, "aliases", "chain_of_thought", "category"):
        value = row.get(name)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and is_broken(text):
                raise ValueError(f"field '{name}' is {short_repr(text)}: it {BROKEN}")
    for name in _OF_CONVERSATIONS:
        if is_broken(json.dumps(row.get(name), ensure_ascii=False)):
            raise ValueError(f"field '{name}' {BROKEN}")
    read = type_of(task).read(row, place)
    if not task.has_categories:
        return read
    return dataclasses.replace(read, category=filled_text(row, "category", "its category"))


def _parse(line: str) -> dict[str, Any]:
    try:
        row = parse_json(line, of_pairs=unique_keys)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError('is not a row; write {"field": value, ...}')
    return row


def read_source(
    task: TaskConfig, *, gauntlet_path: Path, fetching: FetchOptions | None = None
) -> Iterator[tuple[str, RawRow]]:
    """Yield each raw row with its location (file and line), in a fixed order, without blank lines.

    Args:
        task: its dataset_uri may be a path, a glob, an address, hf://... or generated://...
        gauntlet_path: the gauntlet file; relative paths are resolved from its folder.
        fetching: credentials and retries for remote files; unset: those of the environment.

    Raises:
        UserError: nothing can be read there; the line says why and what to do.
    """
    key, uri = _key(task, gauntlet_path), task.dataset_uri
    if uri.startswith("hf://"):
        yield from _hub_rows(task, gauntlet_path, key)
    elif uri.startswith(GENERATED):
        for number, row in enumerate(load_generator(TASKS).generated_rows(uri, key=key), start=1):
            yield f"{uri}:{number}", row
    elif uri.startswith(CHAT_ADDRESS):
        for number, row in enumerate(chat_rows(uri, key=key), start=1):
            yield f"{uri}:{number}", row
    elif "://" in uri:
        for name, content in _remote_files(uri, key, fetching or FetchOptions()):
            yield from _lines(name, content)
    else:
        for path in local_files(uri, gauntlet_path, key):
            yield from _lines(show(path), _read(path, key))


def is_held_out(task: TaskConfig) -> bool:
    """Return whether the rows are made of a run's held-out text."""
    return task.dataset_uri.startswith(HELD_OUT)


def is_remote(task: TaskConfig) -> bool:
    """Return whether the rows are downloaded."""
    uri = task.dataset_uri
    return "://" in uri and not uri.startswith((GENERATED, HELD_OUT, CHAT_ADDRESS))


def check_source(task: TaskConfig, *, gauntlet_path: Path) -> None:
    """Check a task's dataset_uri without reading any rows.

    Raises:
        RowsNotFound: a local file is missing.
        UserError: the address of held-out text is wrong.
    """
    uri = task.dataset_uri
    if uri.startswith(HELD_OUT):
        _shape(task)
    elif "://" not in uri:
        local_files(uri, gauntlet_path, _key(task, gauntlet_path))


def _key(task: TaskConfig, gauntlet_path: Path) -> str:
    return f"{show(gauntlet_path)}: icl_tasks: {task.label}: dataset_uri"


def local_files(uri: str, gauntlet_path: Path, key: str) -> list[Path]:
    """Return the file at `uri`, or the sorted matches of a glob.

    The first of these folders with a match is used: the folder of the gauntlet file, the working
    folder, the repository, and the two parents of the gauntlet file's folder (for LLM Foundry's
    layout).

    Raises:
        RowsNotFound: there is no match; names the folders, the nearest path and how to get rows.
    """
    given = Path(uri).expanduser()
    beside = gauntlet_path.absolute().parent
    folders = list(dict.fromkeys([beside, Path.cwd(), ROOT, *beside.parents[:2]]))
    for folder in folders:
        path = folder / given
        if path.is_dir():
            raise UserError(f"{key}: {uri} is a folder; write a file, or a glob: {uri}/*.jsonl")
        if path.exists():
            return [path]
        found = sorted(map(Path, glob.glob(str(path), recursive=True)))
        if found := [file for file in found if file.is_file()]:
            return found
    near = [sibling for folder in folders for sibling in (folder / given).parent.glob("*")]
    tried = "" if given.is_absolute() else f" (tried {', '.join(map(show, folders))})"
    raise RowsNotFound(
        f"{key}: nothing at {uri}{nearest_path(given, near)}{tried};"
        f" rows of benchmarks are fetched by: {FETCH}"
    )


_MOST_BYTES = 1 << 31  # of a file of rows, unpacked


def _read(path: Path, key: str) -> bytes:
    if path.suffix == ".parquet":
        raise UserError(f"{key}: {show(path)} is no text; write hf://{show(path)}")
    try:
        return read_guarded(path, most=_MOST_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {show(path)}: {one_line(error)}; write another file") from error


def _lines(name: str, content: bytes) -> Iterator[tuple[str, str]]:
    r"""Yield the lines of a .jsonl or .jsonl.gz file, ended by \n only: texts may have \u2028."""
    try:
        if name.endswith(".gz"):
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as opened:
                content = opened.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise UserError(f"{name}: unpacks to more than {_MOST_BYTES:,} bytes; split it")
        text = content.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{name}: is not complete gzip data ({error}); fetch it again") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: is not UTF-8 text ({error}); convert it") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{name}:{number}", line


def _remote_files(uri: str, key: str, fetching: FetchOptions) -> list[tuple[str, bytes]]:
    """Return URL and content of the file at `uri`, or of all files that match its `*`, sorted."""
    protocol = uri.split("://")[0]
    known = fsspec.available_protocols()
    if protocol not in known and protocol != "oci":
        hint = nearest(protocol, [*known, "heldout", "hf", "generated", "instructions"])
        raise UserError(
            f"{key}: {uri}: unknown protocol {protocol}{hint}; write s3://, https://..."
        )
    try:
        urls = [uri]
        if "*" in uri:
            urls = [file.name for file in list_url(uri, fetching, key="dataset_uri").files]
        return [(url, _fetched(url, fetching)) for url in urls]
    except MissingError as error:
        raise RowsNotFound(f"{key}: nothing at {uri}; write the address of a file") from error
    except UserError as error:
        lines = (f"{key}: cannot read {uri}: {line}" for line in error.problems)
        raise UserError(*lines) from error


def _fetched(url: str, fetching: FetchOptions) -> bytes:
    folder, _, name = url.rpartition("/")
    return Store(folder, fetching).read(name)


def _hub_rows(
    task: TaskConfig, gauntlet_path: Path, key: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a dataset, with columns renamed by hf_parsing_map."""
    datasets = import_optional("datasets", f"{key}: hf://", extra="data")
    builder, arguments = _load_arguments(task, gauntlet_path)
    if builder in _UNSAFE:
        raise UserError(
            f"{key}: {task.dataset_uri} reads pickles, which run what their writer put there; write"
            " the rows again as parquet or jsonl"
        )
    try:
        loaded = datasets.load_dataset(builder, **arguments)
        splits = list(loaded) if isinstance(loaded, dict) else []
        rows = list(loaded[splits[0]] if splits else loaded) if len(splits) < 2 else []
    except FileNotFoundError as error:
        raise RowsNotFound(f"{key}: nothing at {task.dataset_uri}: {_reason(error)}") from error
    except Exception as error:  # the library raises a dozen unrelated types, its client's too
        raise UserError(f"{key}: cannot load {task.dataset_uri}: {_reason(error)}") from error
    if len(splits) > 1:
        raise UserError(
            f"{key}: {task.dataset_uri} has the splits {', '.join(splits)}; choose one:"
            f" hf_loading_vars: {{split: {splits[0]}}}"
        )
    if rows:
        _check_columns(task, rows[0], key)
    for number, row in enumerate(rows, start=1):
        yield f"{task.dataset_uri}:{number}", _mapped(row, task.hf_parsing_map)


def _load_arguments(task: TaskConfig, gauntlet_path: Path) -> tuple[str, dict[str, Any]]:
    """Return the arguments of `datasets.load_dataset` for a hub id, a folder or a file."""
    name, arguments = task.dataset_uri.removeprefix("hf://"), dict(task.hf_loading_vars)
    path = _local_data(name, gauntlet_path)
    if path is None or path.suffix not in _FORMATS:
        return str(path or name), arguments
    # `datasets` names the split of a single file train
    return _FORMATS[path.suffix], {"split": "train", "data_files": str(path), **arguments}


def _local_data(name: str, gauntlet_path: Path) -> Path | None:
    """Find a file or folder next to the gauntlet file, in the working folder or repository."""
    for folder in (gauntlet_path.absolute().parent, Path.cwd(), ROOT):
        path = folder / Path(name).expanduser()
        if path.exists():
            return path
    return None


def _check_columns(task: TaskConfig, columns: Iterable[str], key: str) -> None:
    columns = list(columns)
    problems = [
        f"{key}: hf_parsing_map.{field}: no column '{name}'{nearest(name, columns)}"
        f" (columns: {', '.join(columns)})"
        for field, names in task.hf_parsing_map.items()
        for name in names
        if name not in columns
    ]
    if problems:
        raise UserError(*problems)


def _mapped(row: Mapping[str, Any], parsing_map: Mapping[str, list[str]]) -> Mapping[str, Any]:
    """Return the fields of a row, each from its columns, as in LLM Foundry.

    The texts of several columns are joined by spaces. Lists and `gold` are not converted. Several
    columns for a list are its items.
    """
    if not parsing_map:
        return row
    fields: dict[str, Any] = {}
    for field, names in parsing_map.items():
        values = [row[name] for name in names]
        if field in _AS_THEY_ARE and len(values) == 1:
            fields[field] = values[0]
        elif field in _LISTS:
            fields[field] = values
        else:
            fields[field] = " ".join(str(value) for value in values)
    return fields


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


CHOICES = 4
_WITHIN_LINE = re.compile(r"(?<=\S)(?= ?\S)")  # at line borders, bigrams alone are near chance


@dataclass(frozen=True)
class _Shape:
    """Settings in the query of the address: heldout://continuations?rows=50&piece_chars=80."""

    rows: int = 100
    """Maximal number of questions; fewer if the held-out text is short."""
    context_chars: int = 200
    """Maximal length of the context, which begins at the start of a line and ends within one."""
    piece_chars: int = 32
    """Length of every choice. Small models recognize the beginning of the true piece best, so it
    is short."""


@dataclass(frozen=True)
class _Cut:
    """Position in a document, with the context before it and the piece after it."""

    document: int
    context: str
    piece: str


def heldout_rows(task: TaskConfig, texts: list[str]) -> list[TaskRow]:
    """Return multiple-choice rows made of pieces of held-out documents.

    Raises:
        UserError: a wrong address.
        NoHeldOutText: the text is too short for a single row.
    """
    shape = _shape(task)
    documents = sorted(set(texts), key=_text_digest)
    enough = max(shape.rows, CHOICES)
    cuts = list(itertools.islice(_documents_with_cuts(documents, shape), enough))
    pieces = [cut for of_document in cuts for cut in of_document]
    rows: list[TaskRow] = []
    for cut in _round_robin(cuts):
        if len(rows) == shape.rows:
            break
        wrong = _wrong_pieces(cut, pieces)
        if wrong is not None:
            rows.append(_heldout_row(cut, wrong, len(rows), task))
    if not rows:
        need = shape.context_chars + shape.piece_chars
        found = "1 document is" if len(cuts) == 1 else f"{len(cuts)} documents are"
        larger = ", or a larger data.validation_fraction" if len(documents) > 1 else ""
        raise NoHeldOutText(
            f"icl_tasks: {task.label}: left out: its questions compare held-out documents of more"
            f" than {need} characters, and {found} as long; it needs more or longer"
            f" documents{larger}"
        )
    return rows


def _shape(task: TaskConfig) -> _Shape:
    """Parse the settings in a task's address.

    Raises:
        UserError: the address is not valid.
    """
    key = f"icl_tasks: {task.label}: dataset_uri: {task.dataset_uri}"
    address = urlsplit(task.dataset_uri)
    if address.netloc != "continuations" or address.path:
        raise UserError(f"{key}: is unknown; write heldout://continuations")
    if task.icl_task_type != "multiple_choice":
        raise UserError(f"{key}: gives choices; write icl_task_type: multiple_choice")
    names = [f.name for f in fields(_Shape)]
    values: dict[str, int] = {}
    for name, value in parse_qsl(address.query, keep_blank_values=True):
        if name not in names:
            hint = nearest(name, names)
            raise UserError(f"{key}: unknown setting '{name}'{hint} (known: {', '.join(names)})")
        if not value.isdecimal() or int(value) < 1:
            raise UserError(f"{key}: {name} is {value!r}; write a whole number above 0")
        values[name] = int(value)
    return _Shape(**values)


def _documents_with_cuts(documents: list[str], shape: _Shape) -> Iterator[list[_Cut]]:
    """Yield the cuts of each document that is long enough for one."""
    for i, text in enumerate(documents):
        if cuts := _shuffled_cuts(i, text, shape):
            yield cuts


def _shuffled_cuts(document: int, text: str, shape: _Shape) -> list[_Cut]:
    """Return cuts of a document whose contexts and pieces do not overlap, in random order."""
    cuts, at = [], shape.context_chars
    while (match := _WITHIN_LINE.search(text, at)) is not None:
        cut = match.start()
        piece = text[cut : cut + shape.piece_chars]
        if len(piece) < shape.piece_chars:
            break
        context = text[cut - shape.context_chars : cut]
        border = context.find("\n") + 1  # an incomplete first line is left out
        cuts.append(_Cut(document, context[border:], piece))
        at = cut + shape.piece_chars + shape.context_chars
    random.Random(_text_digest(text)).shuffle(cuts)
    return cuts


def _round_robin(cuts: list[list[_Cut]]) -> Iterator[_Cut]:
    """Yield the first cut of every document, then the second cuts, and so on."""
    for turn in range(max(map(len, cuts), default=0)):
        for of_document in cuts:
            if turn < len(of_document):
                yield of_document[turn]


def _wrong_pieces(cut: _Cut, pieces: list[_Cut]) -> list[str] | None:
    """Sample three different pieces of other documents; None if there are fewer."""
    rng = random.Random(_text_digest(cut.context + cut.piece))
    wrong: dict[str, None] = {}
    for other in rng.sample(pieces, len(pieces)):
        if other.document != cut.document and other.piece != cut.piece:
            wrong[other.piece] = None
        if len(wrong) == CHOICES - 1:
            return list(wrong)
    return None


def _heldout_row(cut: _Cut, wrong: list[str], number: int, task: TaskConfig) -> TaskRow:
    gold = number % CHOICES  # all indices are correct equally often
    choices = (*wrong[:gold], cut.piece, *wrong[gold:])
    return TaskRow((cut.context,), choices, gold, f"{task.dataset_uri}:{number + 1}")


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


CHAT_ADDRESS = "instructions://"
_DEFAULTS = {"rows": "50", "seed": "1", "split": "held_out"}
_PATIENCE = 2000  # samples without a new question after which a task has no more


def chat_rows(uri: str, *, key: str) -> Iterator[dict[str, Any]]:
    """Yield distinct rows of a task: {"messages", "answer", "reply", "checks", "tools"}.

    Args:
        uri: name of the task, with rows, seed and split (held_out, lengths or train) in the query.
        key: key of the address, for errors.

    Raises:
        UserError: a task or setting is unknown, a value is not valid, or the task has fewer rows.
    """
    task, n, seed, split = _read_address(uri, f"{key}: {uri}: ")
    chats = load_generator(CHATS)
    seen: set[str] = set()
    number = in_vain = 0
    while len(seen) < n:
        exchange = chats.draw_exchange(task, number, seed=seed, split=split)
        number += 1
        asked = json.dumps([exchange.messages, exchange.tools])
        if asked in seen:
            in_vain += 1
            if in_vain == _PATIENCE:
                raise UserError(
                    f"{key}: {uri}: rows: {n}, but {task} has about {len(seen)} questions in"
                    f" {split}; write less"
                )
            continue
        seen.add(asked)
        in_vain = 0
        yield _chat_row(exchange)


def _chat_row(exchange: Any) -> dict[str, Any]:
    """Convert an `Exchange` of `eval/generated_chats.py` to a row."""
    row: dict[str, Any] = {
        "messages": list(exchange.messages),
        "answer": exchange.answer or json.dumps(exchange.call),
        "reply": load_generator(CHATS).right_message(exchange),
        "checks": [dict(check) for check in exchange.checks],
    }
    if exchange.tools:
        row["tools"] = list(exchange.tools)
    return row


def _read_address(uri: str, where: str) -> tuple[str, int, int, str]:
    task, _, query = uri.removeprefix(CHAT_ADDRESS).partition("?")
    written = parse_qsl(query, keep_blank_values=True)
    given = dict(written)
    problems = [
        f"{where}unknown key '{name}'{nearest(name, _DEFAULTS)} (keys: {', '.join(_DEFAULTS)})"
        for name in given
        if name not in _DEFAULTS
    ]
    if len(given) < len(written):
        problems.append(f"{where}has a setting twice; write each once")
    given = {**_DEFAULTS, **given}
    for name in ("rows", "seed"):
        value = given[name]
        if not (value.isascii() and value.isdecimal() and 0 < int(value) < 10**6):
            problems.append(f"{where}{name}: {value!r}; write a whole number above 0")
    if problems:
        raise UserError(*problems)
    load_generator(CHATS).check_tasks([task], split=given["split"], key=where)
    return task, int(given["rows"]), int(given["seed"]), given["split"]
