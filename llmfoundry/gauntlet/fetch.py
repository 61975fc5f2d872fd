"""Bring the rows of benchmarks into a folder: checked, counted, resumable.

`commands.fetch_eval_data` reads the table of files, `eval/fetch.yaml`, and calls `fetch` with one
of two routes: `from_foundry`, or `from_hub`, whose rows `eval/hub_rows.yaml` turns into LLM
Foundry's form. A file is named by its path below the data folder, as in LLM Foundry:
`world_knowledge/arc_easy.jsonl`; tasks may share one. The idea: a file appears under its name only
when it is complete, after its checksum is in `manifest.json`; so a stopped run leaves nothing to
repair, the next one resumes, and a file that changed later is noticed. No file is ever overwritten.
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
"""Where LLM Foundry's repository keeps its rows."""
FOLDER = "local_data/"
"""What ends the part of a dataset_uri before a file's name."""


@dataclass(frozen=True)
class HubSource:
    """A data set on the Hugging Face hub, or a local folder that `datasets` loads."""

    id: str
    split: str
    mapping: str
    """A name in eval/hub_rows.yaml."""
    config: str | None = None
    revision: str | None = None
    """Branch, tag or commit; refs/convert/parquet where the data set is a loading script."""
    sample: int | None = None
    """Rows to draw, always the same; unset: all."""


@dataclass(frozen=True)
class DataFile:
    """A file that tasks read, as LLM Foundry has it, and where else its rows are."""

    file: str
    rows: int
    bytes: int | None = None
    sha256: str | None = None
    licence: str | None = None
    hub: HubSource | None = None
    differs: str | None = None
    """Why the hub's rows make another version of the task."""


def read_table(path: Path) -> dict[str, DataFile]:
    """The entries of a fetch table, by file.

    Raises:
        UserError: every unknown key, missing key and unknown mapping.
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
    """The files that a gauntlet's tasks read, each with their labels; and tasks that read others.

    Raises:
        UserError: the gauntlet file has a mistake.
    """
    tasks = read_gauntlet(path).tasks
    return _by_file((task.label, task.dataset_uri) for task in tasks)


def files_of_tasks(labels: Iterable[str], folder: str = "eval/tasks") -> dict[str, list[str]]:
    """The files that the tasks of these labels read, as the YAMLs in `folder` define them.

    Raises:
        UserError: a label is defined nowhere; names the nearest.
    """
    defined = {
        str(task["label"]): str(task["dataset_uri"])
        for path in sorted(find_shipped(folder, "tasks").glob("*.yaml"))
        for task in read_yaml(path)["tasks"]
    }
    unknown = [
        f"tasks: {label}: is not defined in {folder}{nearest(label, defined)}"
        for label in labels
        if label not in defined
    ]
    if unknown:
        raise UserError(*unknown)
    files, others = _by_file((label, defined[label]) for label in labels)
    if others:
        raise UserError(*(f"tasks: {task}; it needs no fetching" for task in others))
    return files


def _by_file(tasks: Iterable[tuple[str, str]]) -> tuple[dict[str, list[str]], list[str]]:
    """Labels by file below the data folder, and `label reads URI` for all other tasks."""
    files: dict[str, list[str]] = {}
    others = []
    for label, uri in tasks:
        _, found, file = uri.replace("\\", "/").rpartition(FOLDER)
        if not found or "://" in uri:
            others.append(f"{label} reads {uri}")
        elif label not in files.setdefault(file, []):
            files[file].append(label)
    return files, others


class FetchError(Exception):
    """Why one file cannot be had, in one line; the others may still be."""


@dataclass(frozen=True)
class FileProvenance:
    """What a route says of the file that it has written.

    Attributes:
        source: where the rows are from, with commit or revision.
        licence: under which terms, if it is known.
        notes: what a reader must know before comparing results.
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
    """What became of one file; `line` is for people."""

    file: str
    there: bool
    line: str


@dataclass
class FetchManifest:
    """What was fetched into a folder, kept in it as manifest.json."""

    folder: Path
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> FetchManifest:
        """The folder's manifest; empty where there is none.

        Raises:
            UserError: it cannot be read.
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
        """Record a file, on disk too."""
        self.files[file] = asdict(content) | {"source": fetched.source, "licence": fetched.licence}
        path = self.folder / MANIFEST
        text = json.dumps({"files": self.files}, indent=1, sort_keys=True, ensure_ascii=False)
        atomic_write(path, text + "\n")


def fetch(files: Iterable[DataFile], *, output: Path, route: Route) -> Iterator[FetchOutcome]:
    """Bring each file to `output`, unless it is there; one outcome each, with a progress bar.

    Raises:
        UserError: the folder or its manifest cannot be used.
    """
    files = list(files)
    try:
        output.mkdir(parents=True, exist_ok=True)
        manifest = FetchManifest.load(output)
        with tqdm(files, unit="file", disable=None) as bar:  # None: only where a person looks on
            for file in bar:
                bar.set_description(Path(file.file).stem)
                yield _fetch_one(file, manifest, route)
    except OSError as error:
        where = show(Path(error.filename)) if error.filename else show(output)
        raise UserError(f"output: cannot write {where}: {error.strerror}") from error


def _fetch_one(file: DataFile, manifest: FetchManifest, route: Route) -> FetchOutcome:
    target = manifest.folder / file.file
    try:
        if target.exists():
            line = _check_present(file, target, manifest)
        else:
            line = _bring(file, target, manifest, route)
    except FetchError as error:
        return FetchOutcome(file.file, False, str(error))
    return FetchOutcome(file.file, True, line)


def _check_present(file: DataFile, target: Path, manifest: FetchManifest) -> str:
    """A line about a file that is there: still as it was fetched, or put there by someone."""
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


def _bring(file: DataFile, target: Path, manifest: FetchManifest, route: Route) -> str:
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as partial:
        fetched = route(file, partial)
        content = inspect(partial)
        # The manifest comes first: a run that is stopped here leaves no file that it forgot.
        manifest.enter(file.file, content, fetched)
    notes = [*_differences(file, content), *fetched.notes]
    if fetched.licence:
        notes.append(f"licence: {fetched.licence}")
    return "; ".join([f"{content.rows:,} rows from {fetched.source}", *notes])


def inspect(path: Path) -> FileDigest:
    """Read a complete jsonl file.

    Raises:
        FetchError: a line is no JSON object, or there is none.
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
    """How a file differs from LLM Foundry's of that name, as far as that is known."""
    if content.rows != file.rows:
        yield f"LLM Foundry's file has {file.rows:,} rows"
    elif file.sha256 is not None and content.sha256 != file.sha256:
        yield "not byte for byte LLM Foundry's file"
    elif file.bytes is not None and content.bytes != file.bytes:
        yield f"{content.bytes:,} bytes, LLM Foundry's file has {file.bytes:,}"


def from_foundry(clone: Path) -> Route:
    """The route that links to files of a clone of LLM Foundry's repository, which are read there.

    Raises:
        UserError: the folder holds no such data.
    """
    folder = _data_folder(clone)
    source = "LLM Foundry" + _commit(clone)

    def link(file: DataFile, target: Path) -> FileProvenance:
        path = folder / file.file
        if not path.is_file():
            raise FetchError(f"{file.file} is not in {show(folder)}{_other_route(file)}")
        try:
            content = inspect(path)
            target.unlink(missing_ok=True)  # of a run that was killed
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
    tried = [clone / FOUNDRY_DATA, clone / "local_data", clone]
    for folder in tried:
        if (folder / "world_knowledge").is_dir():
            return folder
    raise UserError(
        f"from_foundry: {show(clone)} has no {FOUNDRY_DATA}; write the folder of a clone: git clone"
        " --depth 1 https://github.com/mosaicml/llm-foundry"
    )


def _commit(clone: Path) -> str:
    """` at 8c8dd48f`, or nothing where git does not say."""
    if not (clone / ".git").exists():
        return ""
    command = ["git", "-C", str(clone), "rev-parse", "--short=8", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return f" at {done.stdout.strip()}"


def _other_route(file: DataFile) -> str:
    return "; the hub has it: from_hub=true" if file.hub else ""


_SAMPLE_SEED = 1234


def from_hub() -> Route:
    """The route that loads data sets of the hub.

    Raises:
        UserError: a package is missing.
    """
    import_optional("datasets", "from_hub:", extra="data")  # once, before any file is tried
    return _write


def _write(file: DataFile, target: Path) -> FileProvenance:
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
    """Commit and licence of a data set; both unknown for a local folder and in offline mode.

    Raises:
        FetchError: the hub does not answer, or does not show the data set.
    """
    if Path(hub.id).is_dir():
        return None, None
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        info = huggingface_hub.HfApi().dataset_info(hub.id, revision=hub.revision)
    except OfflineModeIsEnabled:
        return None, None
    except Exception as error:  # its client's errors share no base class
        raise FetchError(_reason(error, hub)) from error
    licence = getattr(info.card_data, "license", None)
    return info.sha, ", ".join(licence) if isinstance(licence, list) else licence


def _load(hub: HubSource, commit: str | None) -> Iterable[Row]:
    """The rows of the asked split, at the commit whose licence was read.

    Raises:
        FetchError: with the library's own reason in it.
    """
    import datasets

    # The library's cache does not notice that a local folder has changed.
    mode = "force_redownload" if Path(hub.id).is_dir() else None
    try:
        return datasets.load_dataset(
            hub.id,
            hub.config,
            split=hub.split,
            revision=commit or hub.revision,
            download_mode=mode,
        )
    except Exception as error:  # the library raises a dozen unrelated types, its client's too
        raise FetchError(_reason(error, hub)) from error


def _mapped(source: Iterable[Row], hub: HubSource) -> tuple[list[Row], int]:
    """All rows in LLM Foundry's form, and how many of the source gave none.

    Raises:
        FetchError: the source does not have the columns and values that its mapping knows.
    """
    make = hub_mappings()[hub.mapping]
    rows: list[Row] = []
    dropped = 0
    for number, row in enumerate(source):
        try:
            made = make(row)
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise FetchError(
                f"{hub.id}: row {number}: {type(error).__name__}: {error}; its columns"
                f" ({', '.join(row)}) or values are not those that mapping {hub.mapping} knows"
            ) from error
        dropped += not made
        rows.extend(made)
    if hub.sample is not None and hub.sample < len(rows):
        chosen = random.Random(_SAMPLE_SEED).sample(range(len(rows)), hub.sample)
        rows = [rows[i] for i in sorted(chosen)]
    return rows, dropped


# --- mappings: eval/hub_rows.yaml -------------------------------------------------------------

_EXPRESSIONS = ("choices", "context_options", "aliases", "gold")
"""Fields of a row that are no texts."""
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
HubMapping = Callable[[Row], list[Row]]
"""From a row in the columns that its source publishes to the rows that it becomes: mostly one, none
where it does not fit, several where a source keeps a conversation in one row."""


@functools.cache
def hub_mappings() -> dict[str, HubMapping]:
    """The mappings of eval/hub_rows.yaml, which explains them, by name."""
    import jinja2

    class Missing(jinja2.StrictUndefined):
        """A part of a column that is not there: a KeyError of its name, once it is used."""

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
    from jinja2.meta import find_undeclared_variables

    columns: set[str] = set()

    def template(text: str) -> Callable[[Row], Any]:
        columns.update(find_undeclared_variables(environment.parse(text)))
        if not (whole := re.fullmatch(r"\{\{((?:(?!\}\}).)*)\}\}", text)):
            return environment.from_string(text).render
        value = environment.compile_expression(whole[1], undefined_to_none=False)
        return lambda known: None if (found := value(known)) is None else str(found)  # no "None"

    def expression(text: str) -> Callable[[Row], Any]:
        columns.update(find_undeclared_variables(environment.parse(f"{{{{ {text} }}}}")))
        return environment.compile_expression(text, undefined_to_none=False)

    where = expression(entry.get("where", "true"))
    each = expression(entry.get("each", "[none]"))
    let = {name: expression(text) for name, text in entry.get("let", {}).items()}
    fields = {
        name: expression(text) if name in _EXPRESSIONS else template(text)
        for name, text in entry.items()
        if name not in ("where", "each", "let")
    }
    columns -= {"row", "turn", "turns", *let, *environment.globals}

    def make(source: Row) -> list[Row]:
        for name in columns - source.keys():
            raise KeyError(name)
        known = {**source, "row": source}
        if not where(known):
            return []
        for name, compute in let.items():
            known[name] = compute(known)
        known["turns"] = each(known)
        return [
            {name: write({**known, "turn": turn}) for name, write in fields.items()}
            for turn in range(len(known["turns"]))
        ]

    return make


def _only(values: Sequence[Any]) -> Any:
    (value,) = values
    return value


def _lettered(texts: Sequence[str]) -> str:
    """One choice a line, each after its letter."""
    return "\n".join(f"{_LETTERS[i]}. {text}" for i, text in enumerate(texts))


def _in_sentence(option: str, before: str, pronoun: str) -> str:
    """`before`, and an option with the case and ending that it has there in place of `pronoun`."""
    if not before.rstrip().endswith((".", "!", "?")):
        name = r"^(An?|The|My|His|Her|Their|She|He|It|They)\b"
        option = re.sub(name, lambda match: match[0].lower(), option)
    possessive = pronoun.lower() in ("my", "his", "her", "our", "their")
    return before + (f"{option}'s" if possessive else option)


def _clean_wikihow(text: str) -> str:
    """Titles in brackets end a sentence, other brackets go, and double spaces become one."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


_FILTERS: dict[str, Callable[..., Any]] = {
    "only": _only,
    "int": int,  # Jinja's own gives 0 for what is no number
    "join": lambda texts, between: between.join(texts),  # Jinja's own writes None for a null
    "lettered": _lettered,
    "letters": lambda texts: list(_LETTERS[: len(texts)]),
    "sampled": lambda values, seed: random.Random(seed).sample(values, len(values)),
    "cut": lambda text, pattern: re.split(pattern, text)[1:],
    "distinct": lambda values: list(dict.fromkeys(values)),
    "zip": lambda first, second: list(zip(first, second, strict=True)),
    "clean_wikihow": _clean_wikihow,
    "in_sentence": _in_sentence,
}

# --- what a data set's reader says ------------------------------------------------------------


def _reason(error: Exception, hub: HubSource) -> str:
    """One line: what went wrong with a data set, and what to do."""
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


# Names, as the hub's client has been built on two HTTP libraries: requests, now httpx.
_NETWORK = {
    "ConnectionError",
    "NetworkError",
    "TimeoutException",
    "Timeout",
    "LocalEntryNotFoundError",
}
