"""What is kept of a launch is whole, names no secret, and starts nothing when another wrote it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmfoundry.errors import UserError
from llmfoundry.launch.record import RECORD, LaunchRecord, read, write

LAUNCHED = LaunchRecord(
    "a", "ssh", "me@n1:12@1700000000,n2:7@1700000000", {"options": "-p\n2222", "log": "/r/node-*"}
)


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "a", LAUNCHED)
    found = read(tmp_path / "a")
    assert found is not None and found.where.pop("here") == str(tmp_path / "a")
    assert found == LAUNCHED
    assert read(tmp_path) is None


def test_a_copy_of_a_folder_has_launched_nothing_and_a_moved_one_has(tmp_path: Path) -> None:
    write(tmp_path / "a", LAUNCHED)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert read(tmp_path / "b") is None
    shutil.rmtree(tmp_path / "a")
    assert read(tmp_path / "b") is not None


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"job": "-oProxyCommand=touch${IFS}x:1@1"}, "job: .* is no job of ssh"),
        ({"where": {"options": "-o\nProxyCommand=touch x"}}, "where.options: .*ProxyCommand"),
        ({"where": {"options": "-F\nevil"}}, "where.options: '-F' is not passed on"),
        ({"where": {"log": "/a\nb"}}, "where.log: .* cannot be"),
        ({"where": {"context": "--kubeconfig=x"}}, "where.context: .* cannot be"),
        ({"target": "kubernetes"}, "job: .* is no job of kubernetes"),
        ({"target": "skypilot"}, "target: 'skypilot' is none"),
        ({"nodes": "many"}, "nodes: 'many' is not an integer"),
        ({"jobs": "x"}, "unknown key 'jobs'"),
    ],
)
def test_what_another_wrote_is_refused(tmp_path: Path, changed: object, says: str) -> None:
    write(tmp_path / "a", LAUNCHED)
    path = tmp_path / "a" / RECORD
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))  # type: ignore[operator]
    with pytest.raises(UserError, match=rf"launch\.json: {says}.*; remove the file"):
        read(tmp_path / "a")


@pytest.mark.parametrize("text", ["", '{"name": "a"', "[1]", "[" * 100_000, "\xff"])
def test_a_torn_one_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD).write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"launch\.json: .*; remove it"):
        read(tmp_path)
