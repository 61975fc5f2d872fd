"""The reader of run.json rejects values that no run writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.errors import UserError
from llmfoundry.loggers.pages.report import write_report
from llmfoundry.loggers.run_record import read_run_record


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("summary", []),
        ("facts", {"a": {}}),
        ("facts", [["a"]]),
        ("facts", [["a", 1]]),
        ("environment", [1]),
        ("environment", {"git commit": None}),
    ],
)
def test_a_value_of_the_wrong_type_is_one_line(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / "run.json").write_text(json.dumps({name: value}))
    for read in (read_run_record, write_report):
        with pytest.raises(UserError, match=rf"run\.json: {name} is not what a run writes there"):
            read(tmp_path)


def test_a_record_of_a_run_is_read_and_a_missing_one_is_empty(tmp_path: Path) -> None:
    assert read_run_record(tmp_path) == {}
    record = {"name": "r", "facts": [["device", "cpu"]], "environment": {"cores": "4"}}
    record["summary"] = {"status": "finished", "loss": 1.5}
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert read_run_record(tmp_path) == record
