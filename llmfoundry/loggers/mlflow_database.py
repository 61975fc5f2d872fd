"""The SQLite file of a local MLflow store: created whole, repaired, moved.

`mlflow_logger.open_client` calls it before MLflow opens the file. MLflow creates its tables one by
one, in the file itself, so that a process which is killed meanwhile leaves a file that no later
process can open. Here the file is created under another name and moved when it is complete.
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
_MAGIC = b"SQLite format 3\0"  # with which a database begins
QUIET_SECONDS = 10.0  # MLflow creates its tables within a few seconds, without a pause


def sqlite_path(uri: str) -> Path | None:
    """The database's file in `sqlite:///relative` or `sqlite:////absolute`; None elsewhere."""
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", uri)
    return Path(unquote(match[1])) if match and match[1] != ":memory:" else None  # as SQLAlchemy


def prepare_database(database: Path, say: Callable[[str], None]) -> None:
    """Create a database file that is missing or empty; set a broken one aside and create another.

    Args:
        database: the file; its folder is created.
        say: prints that a broken file was replaced.

    Raises:
        RuntimeError: another process is creating its tables in the file.
        OSError: the file is not a database.
    """
    database = Path(os.path.realpath(database))  # a link stays one
    database.parent.mkdir(parents=True, exist_ok=True)
    if _problem(database) is None:
        return
    # The lock is on the file that the new one replaces: whoever waits for it looks again.
    with lock(database, mode=0o644):
        problem = _problem(database)
        if problem is None:
            return
        if problem:
            _set_aside(database, problem, say)
        with atomic_path(database) as new:
            _create(new)


def _problem(database: Path) -> str | None:
    """Why MLflow could not use a file: "" if it is missing or empty; None if it can be used.

    MLflow's last step of creating a store is its experiment "Default": without any experiment the
    tables are incomplete, and nothing is lost with them. Tables of another program are left to
    MLflow, which adds its own.

    Raises:
        OSError: there is something else than a database, which is left alone.
    """
    if not database.exists():
        return ""
    with open_guarded(database) as file:
        head = file.read(len(_MAGIC))
    if not head:
        return ""
    if head != _MAGIC and head.strip(b"\0"):  # zeros are what a power cut leaves
        raise OSError(errno.EEXIST, "is not an SQLite database; write another file", str(database))
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
    """Keep a broken file under another name as well."""
    quiet = time.time() - database.stat().st_mtime
    if quiet < QUIET_SECONDS:
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
    """Correct addresses of artifacts in a database that was moved with them; whether any was.

    MLflow keeps absolute ones. Ours are beside the database, so after a copy, or under another
    mount, they are `here`, whatever is still at the old place.
    """
    with closing(sqlite3.connect(database, timeout=20.0)) as connection, connection:
        moved = [
            (before, run_id)
            for before, run_id in connection.execute(
                "SELECT e.artifact_location, r.run_uuid FROM experiments e"
                " LEFT JOIN runs r ON r.experiment_id = e.experiment_id"
                " WHERE e.artifact_location LIKE 'file://%/' || ? AND e.artifact_location != ?",
                (ARTIFACTS, here),
            )
            if (database.parent / ARTIFACTS / str(run_id)).is_dir() or not _is_folder(before)
        ]
        for before in {before for before, _ in moved}:
            connection.execute(
                "UPDATE experiments SET artifact_location = ? WHERE artifact_location = ?",
                (here, before),
            )
            connection.execute(
                "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?)"
                " WHERE substr(artifact_uri, 1, ?) = ?",
                (here, len(before) + 1, len(before) + 1, f"{before}/"),
            )
    return bool(moved)


def _is_folder(uri: str) -> bool:
    return Path(unquote(urlsplit(uri).path)).is_dir()
