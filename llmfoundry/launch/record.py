"""Launch record: `launch.json` in the run's folder on the machine that launched the run.

`cli/commands/launch.py` writes the record and `runs.py` reads it. It contains what the target's
client (ssh, squeue, kubectl) needs to find the job, and no secrets. Folders are copied and shared,
so the record is untrusted input: no value in it may start a program on this machine.
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
"""Key of `where`: the folder that the record was written into. It identifies copies."""
RUN = "run"
"""Key of `where`: the run's folder on the training machines, or its URL; missing: the folder of the
record."""
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
    """A launched run and its job on the target."""

    name: str
    """Name of the run's folder."""
    target: str
    """local, ssh, slurm or kubernetes."""
    job: str
    """Id of the job on the target: process@start (local), comma-separated host:process@start (ssh),
    job number (Slurm), kind/name (Kubernetes); empty until the job is submitted."""
    where: dict[str, str] = field(default_factory=dict)
    """Values that locate the job: namespace, context, ssh options, logs, the run's folder. Never a
    secret."""
    nodes: int = 1
    gpus_per_node: int = 0
    recipe: str = ""
    """Recipe as the user wrote it; launch.yaml in the folder is the composed recipe."""
    overrides: list[str] = field(default_factory=list)
    git: dict[str, Any] = field(default_factory=dict)
    """commit, branch, dirty and diff of the code's repository; empty: no repository."""
    submitted_at: float = 0.0
    """Time of the last submission, in seconds since 1970."""


@dataclass(frozen=True)
class TargetState:
    """State of a job as its target reports it."""

    state: str
    """waiting, running, ended or unknown."""
    reason: str = ""
    """Reason for people, such as `PENDING (Resources)`, `exit status 75`, `no answer`."""
    exit_status: int | None = None
    """Exit status of the supervisor of an ended job; None: not known to the target."""


def run_folder(folder: Path, record: LaunchRecord | None) -> Path:
    """Return the folder of the run whose record is in `folder`.

    It may be a path on another machine.
    """
    return Path(record.where.get(RUN) or folder) if record is not None else folder


def write(folder: Path, record: LaunchRecord) -> None:
    """Write the launch record of a run atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    where = {**record.where, HERE: str(folder.absolute())}
    write_json(folder / RECORD, dataclasses.asdict(dataclasses.replace(record, where=where)))


def read(folder: Path) -> LaunchRecord | None:
    """Return the launch record of a run; None: not launched, or a copy of a launched run.

    Raises:
        UserError: the record is damaged, or has a value that no launch writes.
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
    """Yield an error line for each value that no launch writes.

    For example, a name that begins with `-` would be an option of the target's client.
    """
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
    """Return the record with paths adjusted, if its folder on this machine was moved."""
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
    """Return whether the folder is a copy: the folder that launched the job still exists."""
    written = Path(record.where.get(HERE) or folder)
    try:
        same = written.exists() and written.samefile(folder)
        return not same and (written / RECORD).is_file()
    except OSError:
        return False
