"""What is kept of a launched run: `launch.json` in its folder on the machine that launched it.

`cli/commands/launch.py` writes it; whoever lists runs reads it. The idea: it holds what the
target's own client needs to find the job again, and nothing secret; and since folders are copied
and shared, it is data that others may have written, of which nothing may start a program here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError, one_line
from llmfoundry.files import read_json, write_json
from llmfoundry.recipe.launch import ssh_problems
from llmfoundry.recipe.paths import show
from llmfoundry.recipe.typed import Problem, build

RECORD = "launch.json"
HERE = "here"
"""In `where`: the folder that the record was written into, by which a copy is told."""
RUN = "run"
"""In `where`: the run's own folder on the machines that train, or its URL; missing: the record's
folder is the run's."""
WAITING, RUNNING, ENDED, UNKNOWN = "waiting", "running", "ended", "unknown"
_JOBS = {
    "local": re.compile(r"[1-9]\d*@\d+"),
    "ssh": re.compile(r"\w[\w.@:%\[\]-]*:[1-9]\d*@\d+(,\w[\w.@:%\[\]-]*:[1-9]\d*@\d+)*"),
    "slurm": re.compile(r"\d+"),
    "kubernetes": re.compile(r"(job|jobset|trainjob)/[a-z0-9]([a-z0-9-]*[a-z0-9])?"),
}
_NO_OPTION = re.compile(r"[^-].*")


@dataclass(frozen=True)
class LaunchRecord:
    """A run on its target."""

    name: str
    """The run's folder's name."""
    target: str
    """local, ssh, slurm or kubernetes."""
    job: str
    """The target's own id: process@start, host:process@start for each host with commas between,
    Slurm's number, kind/name; empty until it is submitted."""
    where: dict[str, str] = field(default_factory=dict)
    """What is needed to find it again: namespace, context, options of ssh, logs, the run's folder;
    never a secret."""
    nodes: int = 1
    gpus_per_node: int = 0
    recipe: str = ""
    """As it was given; the folder's launch.yaml has all of it."""
    overrides: list[str] = field(default_factory=list)
    git: dict[str, Any] = field(default_factory=dict)
    """commit, branch, dirty, diff: of the repository of the code; empty: none."""
    submitted_at: float = 0.0
    """Seconds since 1970; of the last submission."""


@dataclass(frozen=True)
class TargetState:
    """What a target says of a job."""

    state: str
    """waiting, running, ended or unknown."""
    reason: str = ""
    """In words: PENDING (Resources), exit status 75, no answer."""
    exit_status: int | None = None
    """The supervisor's, of a job that has ended; None: the target does not know it."""


def run_folder(folder: Path, record: LaunchRecord | None) -> Path:
    """Where a run lies whose record is in `folder`; other machines may have another by its path."""
    return Path(record.where.get(RUN) or folder) if record is not None else folder


def write(folder: Path, record: LaunchRecord) -> None:
    """Write a run's record at once."""
    folder.mkdir(parents=True, exist_ok=True)
    where = {**record.where, HERE: str(folder.absolute())}
    write_json(folder / RECORD, dataclasses.asdict(dataclasses.replace(record, where=where)))


def read(folder: Path) -> LaunchRecord | None:
    """A run's record; None: it was not launched, or is a copy of one that was.

    Raises:
        UserError: it is torn, or says what no launch writes.
    """
    path = folder / RECORD
    try:
        if not path.exists():
            return None
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{show(path)}: cannot be read: {one_line(error)}; remove it") from error
    problems: list[Problem] = []
    if not isinstance(values, dict) or "name" not in values:
        raise UserError(f"{show(path)}: is no record of a launch; remove it")
    record = build(LaunchRecord, values, problems)
    lines = [problem.line for problem in problems] or [*_mistakes(record)]
    if lines:
        raise UserError(*(f"{show(path)}: {line}; remove the file" for line in lines))
    return None if _is_copy(folder, record) else _where_it_is(folder, record)


def _mistakes(record: LaunchRecord) -> Iterator[str]:
    """What no launch writes: an option in the place of a name would be one of the client's."""
    if record.target not in _JOBS:
        yield f"target: {record.target!r} is none ({', '.join(_JOBS)})"
    elif record.job and not _JOBS[record.target].fullmatch(record.job):
        yield f"job: {record.job!r} is no job of {record.target}"
    for name, text in record.where.items():
        if name == "options":
            yield from ssh_problems("where.options", text.split("\n") if text else [])
        elif not text.isprintable() or not (text == "" or _NO_OPTION.fullmatch(text)):
            yield f"where.{name}: {text!r} cannot be"


def _where_it_is(folder: Path, record: LaunchRecord) -> LaunchRecord:
    """With the paths of this machine as they are now, if the folder was moved meanwhile."""
    written, here = record.where.get(HERE, ""), str(folder.absolute())
    is_here = record.target in ("local", "slurm")
    if not (written and is_here) or written == here or Path(written).exists():
        return record
    where = {
        name: f"{here}{text.removeprefix(written)}" if text.startswith(f"{written}/") else text
        for name, text in record.where.items()
    }
    return dataclasses.replace(record, where=where)


def _is_copy(folder: Path, record: LaunchRecord) -> bool:
    """Whether a folder was copied from one that is still there, whose job it is."""
    written = Path(record.where.get(HERE) or folder)
    try:
        same = written.exists() and written.samefile(folder)
        return not same and (written / RECORD).is_file()
    except OSError:
        return False
