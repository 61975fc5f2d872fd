"""SQLite database of a local MLflow store: atomic creation, repair, relocation.

`mlflow_logger.open_client` calls `prepare_database` before MLflow opens the file. MLflow creates
its tables one by one in the final file. If it is killed meanwhile, no later process can open the
file. Therefore this module creates the database under a temporary name and then renames it.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

from llmfoundry.files import atomic_path, lock, open_guarded

ARTIFACTS = "mlartifacts"
_MAGIC = b"SQLite format 3\0"  # first bytes of a database
QUIET_SECONDS = 10.0  # MLflow creates its tables within a few seconds, without a pause


def sqlite_path(uri: str) -> Path | None:
    """Return the file of `sqlite:///relative` or `sqlite:////absolute`; None for other stores.

    The syntax is that of SQLAlchemy.
    """
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", uri)
    return Path(unquote(match[1])) if match and match[1] != ":memory:" else None


def prepare_database(database: Path, say: Callable[[str], None]) -> None:
    """Create a missing or empty database; rename a broken one and create a new one.

    Args:
        database: path of the file; its folder is created.
        say: prints that a broken file was replaced.

    Raises:
        RuntimeError: another process is creating its tables in the file.
        OSError: the file is not a database.
    """
    database = Path(os.path.realpath(database))  # keep a symbolic link
    database.parent.mkdir(parents=True, exist_ok=True)
    if _problem(database) is None:
        return
    # the lock is on the file that is replaced, so a process that waited for it checks again
    with lock(database, mode=0o644):
        problem = _problem(database)
        if problem is None:
            return
        if problem:
            _set_aside(database, problem, say)
        with atomic_path(database) as new:
            _create(new)


def _problem(database: Path) -> str | None:
    """Return why MLflow cannot use a file: "" if it is missing or empty, None if it is usable.

    MLflow creates its experiment "Default" as the last step. A store without any experiment is
    therefore incomplete, and has no data that could be lost. A database with tables of another
    program is usable: MLflow adds its tables.

    Raises:
        OSError: the file is not a database. It is not changed.
    """
    # missing or empty
    if not database.exists():
        return ""
    with open_guarded(database) as file:
        head = file.read(len(_MAGIC))
    if not head:
        return ""
    # not a database; a power failure may leave zeros
    if head != _MAGIC and head.strip(b"\0"):
        raise OSError(errno.EEXIST, "is not an SQLite database; write another file", str(database))
    # a database without experiments
    try:
        with closing(sqlite3.connect(database, timeout=20.0)) as connection:
            tables = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'experiments'"
            if connection.execute(tables).fetchone() is None:
                return None
            if connection.execute("SELECT 1 FROM experiments LIMIT 1").fetchone() is None:
                return "it was left incomplete by a process that was killed"
    except sqlite3.OperationalError:  # locked, or not readable: MLflow reports it
        return None
    except sqlite3.DatabaseError as error:
        return str(error)
    return None


def _set_aside(database: Path, problem: str, say: Callable[[str], None]) -> None:
    """Link a broken file under another name, so that its contents survive the replacement."""
    idle_seconds = time.time() - database.stat().st_mtime
    if idle_seconds < QUIET_SECONDS:
        raise RuntimeError(f"{database} is not complete yet; another process may be creating it")
    aside = database.with_name(f"{database.name}.broken-{time.strftime('%Y%m%d-%H%M%S')}")
    os.link(database, aside)
    journal = database.with_name(f"{database.name}-journal")
    if journal.exists():
        journal.rename(aside.with_name(f"{aside.name}-journal"))
    say(
        f"MLflow: {database} cannot be used ({problem}); it is now {aside.name}, and a new database"
        " gets the values of metrics.jsonl"
    )


def _create(database: Path) -> None:
    from mlflow.tracking import MlflowClient
    from sqlalchemy import URL

    uri = URL.create("sqlite", database=str(database)).render_as_string()
    MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments(max_results=1)


def move_artifacts(database: Path, here: str) -> bool:
    """Correct the artifact addresses in a database that was moved together with its artifacts.

    MLflow stores absolute addresses. The artifacts of this project are next to the database. After
    a copy or under another mount they are therefore at `here`, even if the old folder still exists.

    Returns:
        Whether an address was corrected.
    """
    query = (
        "SELECT e.artifact_location, r.run_uuid FROM experiments e"
        " LEFT JOIN runs r ON r.experiment_id = e.experiment_id"
        " WHERE e.artifact_location LIKE 'file://%/' || ? AND e.artifact_location != ?"
    )
    with closing(sqlite3.connect(database, timeout=20.0)) as connection, connection:
        # an address is stale if a run's artifacts are here, or if its folder is missing
        stale = set()
        for location, run_id in connection.execute(query, (ARTIFACTS, here)):
            is_here = (database.parent / ARTIFACTS / str(run_id)).is_dir()
            if is_here or not _is_folder(location):
                stale.add(location)
        for location in stale:
            connection.execute(
                "UPDATE experiments SET artifact_location = ? WHERE artifact_location = ?",
                (here, location),
            )
            connection.execute(
                "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?)"
                " WHERE substr(artifact_uri, 1, ?) = ?",
                (here, len(location) + 1, len(location) + 1, f"{location}/"),
            )
    return bool(stale)


def _is_folder(uri: str) -> bool:
    return Path(unquote(urlsplit(uri).path)).is_dir()
