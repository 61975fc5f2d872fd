"""Ray runs the same tasks as one process: results, errors, and nothing left running."""

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.data.preparation.filters import deduplicate, signatures
from llmfoundry.data.preparation.ray_engine import ray_engine
from llmfoundry.errors import UserError


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ray on this machine with two workers."""
    pytest.importorskip("ray", reason="extra: ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # workers import this file
    with ray_engine(2) as engine:
        yield engine


def _keys(folder: Path, number: int) -> int:
    texts = [f"text {n % 7} of many" for n in range(number, number + 5)]
    return signatures(texts, folder / f"{number}.npy", method="exact")


def _fail(number: int) -> int:
    if number == 3:
        raise UserError("corpus.jsonl:3: not JSON")
    return number


def _crash(number: int) -> int:
    return 1 // number


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_files_are_those_of_one_process(run: Any, tmp_path: Path) -> None:
    """Both passes of deduplication: each a job of many tasks."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, engine in ((here, map), (there, run)):
        folder.mkdir()
        counts = list(engine(partial(_keys, folder), range(20)))
        assert counts == [5] * 20
        deduplicate(folder, [folder / f"{n}.npy" for n in range(20)], engine)
    assert _files(here) == _files(there)
    assert len(_files(there)) == 40


def test_errors_come_out_as_they_went_in(run: Any) -> None:
    with pytest.raises(UserError, match=r"^corpus\.jsonl:3: not JSON$"):
        list(run(_fail, range(6)))
    with pytest.raises(ZeroDivisionError):  # a defect keeps its own type and traceback
        list(run(_crash, range(2)))
    assert sorted(run(_fail, [0, 1, 2])) == [0, 1, 2]


def test_a_cluster_that_does_not_answer_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="extra: ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    line = r"RAY_ADDRESS: cannot connect to Ray at 127\.0\.0\.1:1"
    with pytest.raises(UserError, match=line), ray_engine(None):
        pass


def test_missing_ray_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"llmfoundry-recipes\[ray\]"), ray_engine(None):
        pass
