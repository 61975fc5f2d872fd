"""Download of benchmark rows to a folder: verified and resumable.

Entry point: `fetch`, which `commands/fetch_eval_data.py` calls with the table of files
(`eval/fetch.yaml`) and a source. The source is `from_foundry`, a clone of LLM Foundry, or
`from_hub`, the Hugging Face hub, whose rows `eval/hub_rows.yaml` converts to the form of LLM
Foundry. A file is identified by its path in the data folder, as in LLM Foundry:
`world_knowledge/arc_easy.jsonl`. Several tasks may read one file.

A file gets its final name only when it is complete and its checksum is in `manifest.json`. An
interrupted run therefore resumes without repair, and later changes of a file are detected. Existing
files are never overwritten.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llmfoundry.errors import UserError, import_optional
from llmfoundry.files import atomic_path, atomic_write, open_guarded, parse_json, read_json
from llmfoundry.gauntlet.gauntlet_file import read_gauntlet, read_section
from llmfoundry.recipe.checks import nearest, one_of
from llmfoundry.recipe.paths import ROOT, find_shipped, show
from llmfoundry.recipe.yaml_file import read_yaml

Row = dict[str, Any]

MANIFEST = "manifest.json"
FOUNDRY_DATA = "scripts/eval/local_data"
"""Folder of the rows in LLM Foundry's repository."""
FOLDER = "local_data/"
"""Folder in a dataset_uri after which the name of a file begins."""


@dataclass(frozen=True)
class HubSource:
    """Dataset on the Hugging Face hub, or a local folder that `datasets` can load."""

    id: str
    split: str
    mapping: str
    """A name in eval/hub_rows.yaml."""
    config: str | None = None
    revision: str | None = None
    """Branch, tag or commit; refs/convert/parquet for a dataset that is a loading script."""
    sample: int | None = None
    """Number of rows to sample, with a fixed seed; None: all rows."""


@dataclass(frozen=True)
class DataFile:
    """File of LLM Foundry that tasks read, and the hub dataset with the same rows."""

    file: str
    rows: int
    bytes: int | None = None
    sha256: str | None = None
    licence: str | None = None
    hub: HubSource | None = None
    differs: str | None = None
    """Why the rows of the hub are a different version of the task."""


def read_table(path: Path) -> dict[str, DataFile]:
    """Read the entries of a fetch table, by file.

    Raises:
        UserError: one line per unknown key, missing key and unknown mapping.
    """
    entries = read_yaml(path).get("files")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{show(path)}: files: is missing or empty; write a list of files")
    problems: list[str] = []
    table: dict[str, DataFile] = {}
    for i, raw in enumerate(entries):
        where = f"{show(path)}: files[{i}]"
        file = read_section(DataFile, raw, where, problems)
        if file is not None and file.hub is not None:
            problems.extend(one_of(f"{where}: hub.mapping", file.hub.mapping, hub_mappings()))
        if file is not None and file.file in table:
            problems.append(f"{where}: file: {file.file} is there before; remove one")
        elif file is not None:
            table[file.file] = file
    if problems:
        raise UserError(*problems)
    return table


def files_of_gauntlet(path: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Return the files that the tasks of a gauntlet read.

    Returns:
        Labels of tasks by file, and a line for each task with another kind of dataset_uri.

    Raises:
        UserError: the gauntlet file is not valid.
    """
    tasks = read_gauntlet(path).tasks
    return _by_file((task.label, task.dataset_uri) for task in tasks)


def files_of_tasks(labels: Iterable[str], folder: str = "eval/tasks") -> dict[str, list[str]]:
    """Return the files that tasks read, with the labels of the tasks.

    Args:
        labels: labels of tasks.
        folder: folder with YAML files of tasks.

    Raises:
        UserError: a label is not defined, or its task needs no file.
    """
    uris: dict[str, str] = {}
    for path in sorted(find_shipped(folder, "tasks").glob("*.yaml")):
        for task in read_yaml(path)["tasks"]:
            uris[str(task["label"])] = str(task["dataset_uri"])
    unknown = [
        f"tasks: {label}: is not defined in {folder}{nearest(label, uris)}"
        for label in labels
        if label not in uris
    ]
    if unknown:
        raise UserError(*unknown)
    files, others = _by_file((label, uris[label]) for label in labels)
    if others:
        raise UserError(*(f"tasks: {task}; it needs no fetching" for task in others))
    return files


def _by_file(tasks: Iterable[tuple[str, str]]) -> tuple[dict[str, list[str]], list[str]]:
    """Return labels by file in the data folder, and `label reads URI` for all other tasks."""
    files: dict[str, list[str]] = {}
    others = []
    for label, uri in tasks:
        _, folder, file = uri.replace("\\", "/").rpartition(FOLDER)
        if not folder or "://" in uri:
            others.append(f"{label} reads {uri}")
        elif label not in files.setdefault(file, []):
            files[file].append(label)
    return files, others


class FetchError(Exception):
    """One file cannot be fetched. The text is one line; other files may succeed."""


@dataclass(frozen=True)
class FileProvenance:
    """Origin of a file that a route has written.

    Attributes:
        source: source of the rows, with commit or revision.
        licence: license; None: unknown.
        notes: differences that matter when results are compared.
    """

    source: str
    licence: str | None = None
    notes: tuple[str, ...] = ()


Route = Callable[[DataFile, Path], FileProvenance]
"""Writes a file's rows to a path. Raises `FetchError`."""


@dataclass(frozen=True)
class FileDigest:
    """Size and checksum of a complete file."""

    sha256: str
    bytes: int
    rows: int


@dataclass(frozen=True)
class FetchOutcome:
    """Result for one file; `line` is the message to print."""

    file: str
    there: bool
    line: str


@dataclass
class FetchManifest:
    """Checksums and sources of the files in a folder, stored there as manifest.json."""

    folder: Path
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> FetchManifest:
        """Load the manifest of a folder; an empty one if there is none.

        Raises:
            UserError: the file cannot be read.
        """
        path = folder / MANIFEST
        if not path.exists():
            return cls(folder)
        try:
            files = read_json(path)["files"]
            assert all(isinstance(entry["sha256"], str) for entry in files.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise UserError(
                f"{show(path)}: is no manifest ({error!r}); remove it: the files beside it are"
                " checked and entered again"
            ) from error
        return cls(folder, files)

    def enter(self, file: str, content: FileDigest, fetched: FileProvenance) -> None:
        """Record a file and write the manifest."""
        self.files[file] = asdict(content) | {"source": fetched.source, "licence": fetched.licence}
        path = self.folder / MANIFEST
        text = json.dumps({"files": self.files}, indent=1, sort_keys=True, ensure_ascii=False)
        atomic_write(path, text + "\n")


def fetch(files: Iterable[DataFile], *, output: Path, route: Route) -> Iterator[FetchOutcome]:
    """Fetch each file that is not in `output`, with a progress bar; yield the outcome of each.

    Args:
        files: the files.
        output: data folder.
        route: writes the rows of a file.

    Raises:
        UserError: the folder or its manifest cannot be read or written.
    """
    files = list(files)
    try:
        output.mkdir(parents=True, exist_ok=True)
        manifest = FetchManifest.load(output)
        with tqdm(files, unit="file", disable=None) as bar:  # None: only on a terminal
            for file in bar:
                bar.set_description(Path(file.file).stem)
                yield _fetch_one(file, manifest, route)
    except OSError as error:
        where = show(Path(error.filename)) if error.filename else show(output)
        raise UserError(f"output: cannot write {where}: {error.strerror}") from error


def _fetch_one(file: DataFile, manifest: FetchManifest, route: Route) -> FetchOutcome:
    """Fetch or check one file."""
    target = manifest.folder / file.file
    try:
        if target.exists():
            line = _check_present(file, target, manifest)
        else:
            line = _download(file, target, manifest, route)
    except FetchError as error:
        return FetchOutcome(file.file, False, str(error))
    return FetchOutcome(file.file, True, line)


def _check_present(file: DataFile, target: Path, manifest: FetchManifest) -> str:
    """Check an existing file against the manifest; record a file that the user put there.

    Raises:
        FetchError: the file has changed since it was fetched.
    """
    content = inspect(target)
    entry = manifest.files.get(file.file)
    if entry is None:
        notes = "".join(f"; {note}" for note in _differences(file, content))
        manifest.enter(file.file, content, FileProvenance("found in place"))
        return f"{content.rows:,} rows, found in place{notes}"
    if entry["sha256"] != content.sha256:
        raise FetchError(
            f"{show(target)} has changed since it was fetched ({content.rows:,} rows, then"
            f" {entry['rows']:,}); remove it to fetch it again"
        )
    return f"{content.rows:,} rows, already there"


def _download(file: DataFile, target: Path, manifest: FetchManifest, route: Route) -> str:
    """Write a file with `route` and record it; return a line about it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as partial:
        fetched = route(file, partial)
        content = inspect(partial)
        # The manifest is written first, so that every file with its final name is in it.
        manifest.enter(file.file, content, fetched)
    notes = [*_differences(file, content), *fetched.notes]
    if fetched.licence:
        notes.append(f"licence: {fetched.licence}")
    return "; ".join([f"{content.rows:,} rows from {fetched.source}", *notes])


def inspect(path: Path) -> FileDigest:
    """Return size and checksum of a JSONL file.

    Raises:
        FetchError: a line is not a JSON object, or the file has no rows.
    """
    digest, size, rows = hashlib.sha256(), 0, 0
    with open_guarded(path) as lines:
        for number, line in enumerate(lines, start=1):
            digest.update(line)
            size += len(line)
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise FetchError(f"{show(path)}:{number}: is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise FetchError(f"{show(path)}:{number}: is no row, but a {type(row).__name__}")
            rows += 1
    if rows == 0:
        raise FetchError(f"{show(path)}: has no rows")
    return FileDigest(digest.hexdigest(), size, rows)


def _differences(file: DataFile, content: FileDigest) -> Iterator[str]:
    """Yield how a file differs from the file of that name in LLM Foundry."""
    if content.rows != file.rows:
        yield f"LLM Foundry's file has {file.rows:,} rows"
    elif file.sha256 is not None and content.sha256 != file.sha256:
        yield "not byte for byte LLM Foundry's file"
    elif file.bytes is not None and content.bytes != file.bytes:
        yield f"{content.bytes:,} bytes, LLM Foundry's file has {file.bytes:,}"


def from_foundry(clone: Path) -> Route:
    """Return the route that creates links to the files of a clone of LLM Foundry.

    Raises:
        UserError: the folder is not a clone with data.
    """
    folder = _data_folder(clone)
    source = "LLM Foundry" + _commit(clone)

    def link(file: DataFile, target: Path) -> FileProvenance:
        path = folder / file.file
        if not path.is_file():
            raise FetchError(f"{file.file} is not in {show(folder)}{_other_route(file)}")
        try:
            content = inspect(path)
            target.unlink(missing_ok=True)  # left by a killed run
            target.symlink_to(path.resolve())
        except OSError as error:
            raise FetchError(f"{show(path)}: {error.strerror}") from error
        if content.rows != file.rows:
            raise FetchError(
                f"{show(path)} has {content.rows:,} rows, not {file.rows:,}; is the clone complete"
                " and its main branch checked out?"
            )
        return FileProvenance(source, file.licence or "its source's; LLM Foundry does not state it")

    return link


def _data_folder(clone: Path) -> Path:
    for folder in (clone / FOUNDRY_DATA, clone / "local_data", clone):
        if (folder / "world_knowledge").is_dir():
            return folder
    raise UserError(
        f"from_foundry: {show(clone)} has no {FOUNDRY_DATA}; write the folder of a clone: git clone"
        " --depth 1 https://github.com/mosaicml/llm-foundry"
    )


def _commit(clone: Path) -> str:
    """Return ` at 8c8dd48f`, the commit of a clone; "" if it is unknown."""
    if not (clone / ".git").exists():
        return ""
    command = ["git", "-C", str(clone), "rev-parse", "--short=8", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return f" at {result.stdout.strip()}"


def _other_route(file: DataFile) -> str:
    return "; the hub has it: from_hub=true" if file.hub else ""


_SAMPLE_SEED = 1234


def from_hub() -> Route:
    """Return the route that loads datasets of the hub.

    Raises:
        UserError: a package is missing.
    """
    import_optional("datasets", "from_hub:", extra="data")  # fail before the first file
    return _write


def _write(file: DataFile, target: Path) -> FileProvenance:
    """Load, convert and write the rows of a hub dataset."""
    if file.hub is None:
        raise FetchError("only LLM Foundry's repository has it: from_foundry=PATH")
    commit, licence = _card(file.hub)
    source = _load(file.hub, commit)
    rows, dropped = _mapped(source, file.hub)
    with target.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    notes = [f"another task version: {file.differs}"] if file.differs else []
    if dropped:
        notes.append(f"{dropped:,} rows of the source do not fit and were left out")
    at = f" at {commit[:8]}" if commit else ""
    licence = file.licence or licence or "not stated; see the data set's page"
    return FileProvenance(f"{file.hub.id}{at}", licence, tuple(notes))


def _card(hub: HubSource) -> tuple[str | None, str | None]:
    """Return commit and license of a dataset; None for a local folder and in offline mode.

    Raises:
        FetchError: the hub does not respond, or the dataset is not accessible.
    """
    if Path(hub.id).is_dir():
        return None, None
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        info = huggingface_hub.HfApi().dataset_info(hub.id, revision=hub.revision)
    except OfflineModeIsEnabled:
        return None, None
    except Exception as error:  # errors of the hub's client share no base class
        raise FetchError(_reason(error, hub)) from error
    licence = getattr(info.card_data, "license", None)
    return info.sha, ", ".join(licence) if isinstance(licence, list) else licence


def _load(hub: HubSource, commit: str | None) -> Iterable[Row]:
    """Load the rows of a split at a commit.

    Raises:
        FetchError: the library cannot load them.
    """
    import datasets

    # The cache of the library does not detect changes of a local folder.
    mode = "force_redownload" if Path(hub.id).is_dir() else None
    try:
        return datasets.load_dataset(
            hub.id,
            hub.config,
            split=hub.split,
            revision=commit or hub.revision,
            download_mode=mode,
        )
    except Exception as error:  # the library raises a dozen unrelated types
        raise FetchError(_reason(error, hub)) from error


def _mapped(source: Iterable[Row], hub: HubSource) -> tuple[list[Row], int]:
    """Convert rows to the form of LLM Foundry.

    Returns:
        The rows, and the number of source rows that do not fit.

    Raises:
        FetchError: the columns or values do not match the mapping.
    """
    convert = hub_mappings()[hub.mapping]
    rows: list[Row] = []
    dropped = 0
    for number, row in enumerate(source):
        try:
            converted = convert(row)
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise FetchError(
                f"{hub.id}: row {number}: {type(error).__name__}: {error}; its columns"
                f" ({', '.join(row)}) or values are not those that mapping {hub.mapping} knows"
            ) from error
        dropped += not converted
        rows.extend(converted)

    # sample, in the order of the source
    if hub.sample is not None and hub.sample < len(rows):
        sample = random.Random(_SAMPLE_SEED).sample(range(len(rows)), hub.sample)
        rows = [rows[i] for i in sorted(sample)]
    return rows, dropped


# --- mappings: eval/hub_rows.yaml -------------------------------------------------------------

_EXPRESSIONS = ("choices", "context_options", "aliases", "gold")
"""Fields of a row that are not text."""
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
HubMapping = Callable[[Row], list[Row]]
"""Converts a row of a hub dataset to rows of LLM Foundry: usually one, none if it does not fit,
several if a row contains a conversation."""


@functools.cache
def hub_mappings() -> dict[str, HubMapping]:
    """Return the mappings of eval/hub_rows.yaml by name. The file documents its format."""
    import jinja2

    class Missing(jinja2.StrictUndefined):
        """Missing part of a column, which raises a KeyError with its name when it is used."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "exc": KeyError})

        @property
        def _undefined_message(self) -> Any:
            return self._undefined_name

    environment = jinja2.Environment(undefined=Missing, keep_trailing_newline=True)
    environment.filters |= _FILTERS
    entries = read_yaml(ROOT / "eval" / "hub_rows.yaml")
    return {name: _mapping(entry, environment) for name, entry in entries.items()}


def _mapping(entry: Mapping[str, Any], environment: Any) -> HubMapping:
    """Compile an entry of eval/hub_rows.yaml."""
    from jinja2.meta import find_undeclared_variables

    columns: set[str] = set()  # read by templates and expressions

    def template(text: str) -> Callable[[Row], Any]:
        """Compile a text field; a single expression whose value is None stays None."""
        columns.update(find_undeclared_variables(environment.parse(text)))

        # a text with more than one expression is rendered as text
        single_expression = re.fullmatch(r"\{\{((?:(?!\}\}).)*)\}\}", text)  # {{…}} without }}
        if not single_expression:
            return environment.from_string(text).render

        # rendering would turn None into "None", so the expression is evaluated instead
        evaluate = environment.compile_expression(single_expression[1], undefined_to_none=False)

        def render(variables: Row) -> str | None:
            value = evaluate(variables)
            return None if value is None else str(value)

        return render

    def expression(text: str) -> Callable[[Row], Any]:
        """Compile a field that is not text."""
        columns.update(find_undeclared_variables(environment.parse(f"{{{{ {text} }}}}")))
        return environment.compile_expression(text, undefined_to_none=False)

    # compile all fields
    where = expression(entry.get("where", "true"))
    each = expression(entry.get("each", "[none]"))
    let = {name: expression(text) for name, text in entry.get("let", {}).items()}
    fields = {
        name: expression(text) if name in _EXPRESSIONS else template(text)
        for name, text in entry.items()
        if name not in ("where", "each", "let")
    }
    columns -= {"row", "turn", "turns", *let, *environment.globals}

    def convert(source: Row) -> list[Row]:
        """Convert a row of the source."""
        for name in columns - source.keys():
            raise KeyError(name)
        # variables of the expressions
        variables = {**source, "row": source}
        if not where(variables):
            return []
        for name, compute in let.items():
            variables[name] = compute(variables)
        variables["turns"] = each(variables)
        # one row per turn
        rows = []
        for turn in range(len(variables["turns"])):
            of_turn = {**variables, "turn": turn}
            rows.append({name: write(of_turn) for name, write in fields.items()})
        return rows

    return convert


def _only(values: Sequence[Any]) -> Any:
    (value,) = values
    return value


def _lettered(texts: Sequence[str]) -> str:
    """Return one line per choice, with its letter."""
    return "\n".join(f"{_LETTERS[i]}. {text}" for i, text in enumerate(texts))


def _in_sentence(option: str, before: str, pronoun: str) -> str:
    """Append an option to `before`, with the case and ending that replace `pronoun`."""
    if not before.rstrip().endswith((".", "!", "?")):
        name = r"^(An?|The|My|His|Her|Their|She|He|It|They)\b"
        option = re.sub(name, lambda match: match[0].lower(), option)
    possessive = pronoun.lower() in ("my", "his", "her", "our", "their")
    return before + (f"{option}'s" if possessive else option)


def _clean_wikihow(text: str) -> str:
    """Replace [title] with the end of a sentence; remove other brackets and double spaces."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


_FILTERS: dict[str, Callable[..., Any]] = {
    "only": _only,
    "int": int,  # Jinja's filter returns 0 for text that is not a number
    "join": lambda texts, between: between.join(texts),  # Jinja's filter writes None for a null
    "lettered": _lettered,
    "letters": lambda texts: list(_LETTERS[: len(texts)]),
    "sampled": lambda values, seed: random.Random(seed).sample(values, len(values)),
    "cut": lambda text, pattern: re.split(pattern, text)[1:],
    "distinct": lambda values: list(dict.fromkeys(values)),
    "zip": lambda first, second: list(zip(first, second, strict=True)),
    "clean_wikihow": _clean_wikihow,
    "in_sentence": _in_sentence,
}

# --- errors of a dataset's reader -------------------------------------------------------------


def _reason(error: Exception, hub: HubSource) -> str:
    """Return one line about an error of a dataset and what to do."""
    text = " ".join(str(error).split()) or type(error).__name__
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if "GatedRepoError" in kinds or re.search(r"\bgated\b", text):
        page = f"https://huggingface.co/datasets/{hub.id}"
        return f"{hub.id}: its terms must be accepted first, at {page}; then: hf auth login"
    if kinds & _NETWORK:
        return f"{hub.id}: no network ({text}); if it is in the cache: HF_HUB_OFFLINE=1"
    if "scripts are no longer supported" in text:
        return f"{hub.id}: is a loading script; write revision: refs/convert/parquet in the table"
    return f"{hub.id}: {type(error).__name__}: {text}"


# Class names, because versions of the hub's client use different HTTP libraries (requests, httpx).
_NETWORK = {
    "ConnectionError",
    "NetworkError",
    "TimeoutException",
    "Timeout",
    "LocalEntryNotFoundError",
}
