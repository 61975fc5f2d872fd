"""Bring the rows of benchmarks into a folder: checked, counted, resumable.

`commands.fetch_eval_data` calls `fetch` with one of two routes, `from_foundry` here and
`fetch_hub.from_hub`. The idea: a file appears under its name only when it is complete, after its
checksum is in `manifest.json`; so a stopped run leaves nothing to repair, the next one resumes, and
a file that changed later is noticed. No file is ever overwritten.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llmfoundry.errors import UserError
from llmfoundry.files import atomic_write, publish
from llmfoundry.gauntlet.fetch.table import DataFile
from llmfoundry.recipe.front.paths import show

MANIFEST = "manifest.json"
FOUNDRY_DATA = "scripts/eval/local_data"
"""Where LLM Foundry's repository keeps its rows."""


class FetchError(Exception):
    """Why one file cannot be had, in one line; the others may still be."""


@dataclass(frozen=True)
class Fetched:
    """What a route says of the file that it has written.

    Attributes:
        source: where the rows are from, with commit or revision.
        licence: under which terms, if it is known.
        notes: what a reader must know before comparing results.
    """

    source: str
    licence: str | None = None
    notes: tuple[str, ...] = ()


Route = Callable[[DataFile, Path], Fetched]
"""Writes a file's rows to a path. Raises `FetchError`."""


@dataclass(frozen=True)
class Content:
    """Size and checksum of a complete file."""

    sha256: str
    bytes: int
    rows: int


@dataclass(frozen=True)
class Outcome:
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
            files = json.loads(path.read_text(encoding="utf-8"))["files"]
            assert all(isinstance(entry["sha256"], str) for entry in files.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise UserError(
                f"{show(path)}: is no manifest ({error!r}); remove it: the files beside it are"
                " checked and entered again"
            ) from error
        return cls(folder, files)

    def enter(self, file: str, content: Content, fetched: Fetched) -> None:
        """Record a file, on disk too."""
        self.files[file] = asdict(content) | {"source": fetched.source, "licence": fetched.licence}
        path = self.folder / MANIFEST
        text = json.dumps({"files": self.files}, indent=1, sort_keys=True, ensure_ascii=False)
        atomic_write(path, text + "\n")


def fetch(files: Iterable[DataFile], *, output: Path, route: Route) -> Iterator[Outcome]:
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


def _fetch_one(file: DataFile, manifest: FetchManifest, route: Route) -> Outcome:
    target = manifest.folder / file.file
    try:
        if target.exists():
            line = _check_present(file, target, manifest)
        else:
            line = _bring(file, target, manifest, route)
    except FetchError as error:
        return Outcome(file.file, False, str(error))
    return Outcome(file.file, True, line)


def _check_present(file: DataFile, target: Path, manifest: FetchManifest) -> str:
    """A line about a file that is there: still as it was fetched, or put there by someone."""
    content = inspect(target)
    entry = manifest.files.get(file.file)
    if entry is None:
        notes = "".join(f"; {note}" for note in _differences(file, content))
        manifest.enter(file.file, content, Fetched("found in place"))
        return f"{content.rows:,} rows, found in place{notes}"
    if entry["sha256"] != content.sha256:
        raise FetchError(
            f"{show(target)} has changed since it was fetched ({content.rows:,} rows, then"
            f" {entry['rows']:,}); remove it to fetch it again"
        )
    return f"{content.rows:,} rows, already there"


def _bring(file: DataFile, target: Path, manifest: FetchManifest, route: Route) -> str:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    try:
        fetched = route(file, partial)
        content = inspect(partial)
        # The manifest comes first: a run that is stopped here leaves no file that it forgot.
        manifest.enter(file.file, content, fetched)
        publish(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    notes = [*_differences(file, content), *fetched.notes]
    if fetched.licence:
        notes.append(f"licence: {fetched.licence}")
    return "; ".join([f"{content.rows:,} rows from {fetched.source}", *notes])


def inspect(path: Path) -> Content:
    """Read a complete jsonl file.

    Raises:
        FetchError: a line is no JSON object, or there is none.
    """
    digest, size, rows = hashlib.sha256(), 0, 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            digest.update(line)
            size += len(line)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise FetchError(f"{show(path)}:{number}: is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise FetchError(f"{show(path)}:{number}: is no row, but a {type(row).__name__}")
            rows += 1
    if rows == 0:
        raise FetchError(f"{show(path)}: has no rows")
    return Content(digest.hexdigest(), size, rows)


def _differences(file: DataFile, content: Content) -> Iterator[str]:
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

    def link(file: DataFile, target: Path) -> Fetched:
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
        return Fetched(source, file.licence or "its source's; LLM Foundry does not state it")

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
