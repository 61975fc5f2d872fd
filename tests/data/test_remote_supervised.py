"""Supervised rows in shards in a store: a real S3 server, behind a proxy that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.data.mds.shard import MDSWriter
from llmfoundry.errors import UserError
from tests.data.s3_server import BUCKET, FaultyS3, s3_server
from tests.data.test_supervised import chats, opened, rows_of

LOCAL: dict[str, Any] = {"name": "shards", "format": "chat"}
REMOTE = {**LOCAL, "remote": f"s3://{BUCKET}/rows", "download_retry": 3}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FaultyS3, Path]]:
    """The proxy, and the folder whose files the store has as rows/…: two shards of chats."""
    folder = tmp_path_factory.mktemp("rows") / "shards"
    with MDSWriter(
        folder, columns={"messages": "json"}, size_limit=4096, hashes=["sha1"]
    ) as shards:
        for row in chats():
            shards.write(row)
    with s3_server() as (server, put):
        for file in folder.iterdir():
            put(f"rows/{file.name}", file.read_bytes())
        yield server, folder


@pytest.fixture
def store(place: tuple[FaultyS3, Path], monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    place[0].reset()
    monkeypatch.setattr("llmfoundry.data.store._BACKOFF_S", 0.001)
    monkeypatch.setenv("S3_ENDPOINT_URL", place[0].url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return place[0]


ALSO = [pytest.param(fault, marks=pytest.mark.slow) for fault in ("", "slow down", "cut")]


@pytest.mark.parametrize("fault", ["damaged", *ALSO])
def test_rows_of_a_store_are_those_of_its_folder(
    place: tuple[FaultyS3, Path], store: FaultyS3, fault: str, tmp_path: Path
) -> None:
    """In the same order, packed alike; and once they are prepared the store is not asked again."""
    store.faults["rows/shard.00001.mds"] = (fault, 1)
    found = rows_of(opened(tmp_path / "one", dict(REMOTE)))
    expected = rows_of(opened(tmp_path / "two", {**LOCAL, "local": str(place[1])}))
    assert len(found) == len(expected) > 1 and store.requests["rows/shard.00001.mds"] >= 1
    for one, other in zip(found, expected, strict=True):
        assert one.ids.tolist() == other.ids.tolist() and one.lengths == other.lengths
        assert one.weights is not None and other.weights is not None
        assert one.weights.tolist() == other.weights.tolist()
    asked = store.requests["rows/shard.00001.mds"]
    again = rows_of(opened(tmp_path / "one", dict(REMOTE)))
    assert [row.ids.tolist() for row in again] == [row.ids.tolist() for row in found]
    assert store.requests["rows/shard.00001.mds"] == asked


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("missing", r"shard\.00001\.mds: is not there; check data\.remote"),
        ("forbidden", r"refused .* a store .* AWS_ACCESS_KEY_ID"),
        ("slow down", r"asks for fewer requests .* after 4 attempts"),
    ],
)
def test_a_store_that_fails_for_good_is_a_line_and_nothing_counts(
    store: FaultyS3, fault: str, line: str, tmp_path: Path
) -> None:
    store.faults["rows/shard.00001.mds"] = (fault, -1)
    with pytest.raises(UserError, match=line):
        opened(tmp_path, dict(REMOTE))
    store.reset()
    assert rows_of(opened(tmp_path, dict(REMOTE)))
