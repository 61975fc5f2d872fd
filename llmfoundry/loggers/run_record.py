"""Guarded reader of a run's run.json, which the tracker writes and the report and loggers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.files import AGAIN, read_object_if_there


def read_run_record(folder: Path) -> dict[str, Any]:
    """Return the contents of run.json in a run's folder; empty if there is no such file.

    Raises:
        UserError: the file cannot be read, or one of its values has the wrong type.
    """
    path = folder / "run.json"
    record = read_object_if_there(path)
    checks = {"facts": _is_pairs, "environment": _is_texts, "summary": _is_object}
    for name, is_valid in checks.items():
        if name in record and not is_valid(record[name]):
            raise UserError(f"{path}: {name} is not what a run writes there; {AGAIN}")
    return record


def _is_pairs(value: Any) -> bool:
    """Return whether `value` is a list of (label, text)."""
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in value
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
