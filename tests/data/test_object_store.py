"""What is written to a store, through a proxy that fails; and what is said of one that stays so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from llmfoundry.data import store as store_module
from llmfoundry.data import store_clients
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.store import ExistsError, Store
from llmfoundry.errors import UserError
from tests.data.s3_server import BUCKET, FaultyS3, s3_server

LARGE = 11 << 20  # of parts of 5 MiB, S3's least


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyS3]:
    with s3_server() as (faulty, _):
        yield faulty


@pytest.fixture
def s3(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    server.reset()
    monkeypatch.setattr(store_module, "_BACKOFF_S", 0.001)
    monkeypatch.setattr(store_clients, "_FIRST_PAUSE", timedelta(milliseconds=1))
    monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return server


def open_store(url: str, retry: int = 3) -> Store:
    return Store(url, FetchOptions(retry=retry, timeout=20), key="save_folder")


@pytest.fixture(params=["s3", "memory", "file"])
def store(request: pytest.FixtureRequest, s3: FaultyS3, tmp_path: Path) -> Store:
    places = {"s3": f"s3://{BUCKET}/{tmp_path.name}", "memory": f"memory://{tmp_path.name}"}
    return open_store(places.get(request.param, f"file://{tmp_path}/bucket"))


def test_what_is_written_is_listed_read_and_removed(store: Store, tmp_path: Path) -> None:
    assert store.files() == {} and store.folders("checkpoints") == [] and store.size("a") is None
    contents = {
        "a": b"1",
        "empty": b"",
        "checkpoints/ba0000001/x": b"22",
        "checkpoints/ba0000001/deep/y z": b"3",
        "checkpoints/ba0000002/x": b"4",
        "eval/ba1.json": b"{}",
    }
    for name, data in contents.items():
        (tmp_path / "one").write_bytes(data)
        store.upload(name, tmp_path / "one")
    assert store.files() == {name: len(data) for name, data in contents.items()}
    assert store.folders("checkpoints") == ["ba0000001", "ba0000002"]
    below = {n: len(d) for n, d in contents.items() if n.startswith("checkpoints/ba0000001/")}
    assert store.files("checkpoints/ba0000001") == below
    assert store.files(skip=("checkpoints",)).keys() == {"a", "empty", "eval/ba1.json"}
    for name, data in contents.items():
        assert store.read(name) == data and store.size(name) == len(data)
        store.download(name, tmp_path / "down" / name, len(data))
        assert (tmp_path / "down" / name).read_bytes() == data
    store.write("a", b"new")
    assert store.read("a") == b"new"
    store.delete([*below, "never there"])
    assert store.files("checkpoints") == {"checkpoints/ba0000002/x": 1}
    assert store.folders("checkpoints") == ["ba0000002"]


def test_of_two_who_make_an_object_one_does(store: Store) -> None:
    store.write("run.lock", b"first", new=True)
    with pytest.raises(ExistsError):
        store.write("run.lock", b"second", new=True)
    assert store.read("run.lock") == b"first"


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store_module, "_PART", 5 << 20)
    path = tmp_path / "large"
    path.write_bytes(os.urandom(LARGE))
    return path


@pytest.mark.parametrize("fault", ["internal", "slow down", "reset", "slow"])
def test_a_part_that_fails_is_sent_again_and_not_the_file(
    fault: str, s3: FaultyS3, large: Path, tmp_path: Path
) -> None:
    store = open_store(f"s3://{BUCKET}/{fault.replace(' ', '-')}")
    s3.faults["PUT *"] = (fault, 2)
    store.upload("large", large)
    assert s3.methods["PUT"] == (3 if fault == "slow" else 5)
    s3.faults["GET *"] = (fault, 2)
    store.download("large", tmp_path / "down", LARGE)
    assert (tmp_path / "down").read_bytes() == large.read_bytes()


def test_the_lost_answer_to_the_last_request_is_no_failure(s3: FaultyS3, large: Path) -> None:
    """The store has put the parts together; asked again it knows of no such upload."""
    store = open_store(f"s3://{BUCKET}/lost-answer")
    s3.faults["POST large"] = ("", 1)  # the first makes the upload
    passed = s3.next_fault

    def fault(key: str, method: str) -> str | None:
        found = passed(key, method)
        return "unanswered" if method == "POST" and s3.methods["POST"] == 2 else found

    s3.next_fault = fault  # type: ignore[method-assign]
    try:
        store.upload("large", large)
    finally:
        s3.next_fault = passed  # type: ignore[method-assign]
    assert store.read("large") == large.read_bytes()


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("internal", r"InternalError.*after 2 attempts; check the network"),
        ("slow down", r"asks for fewer requests .*after 2 attempts"),
        ("reset", r"after 2 attempts; check the network"),
        ("forbidden", r"access is refused \(.*to PutObject"),
        ("half sent", r"(has \d+ bytes after \d+ were sent|smaller than the minimum)"),
    ],
)
@pytest.mark.parametrize("size", ["small", "large"])
def test_what_lasts_is_a_line_and_leaves_no_file(
    fault: str, line: str, size: str, s3: FaultyS3, large: Path, tmp_path: Path
) -> None:
    store = open_store(f"s3://{BUCKET}/{fault.replace(' ', '-')}-{size}", retry=1)
    (tmp_path / "small").write_bytes(b"12345678")
    s3.faults["PUT *"] = (fault, -1)
    with pytest.raises(UserError, match=rf"^save_folder: s3://.*/file: .*{line}") as caught:
        store.upload("file", tmp_path / size)
    assert len(str(caught.value).splitlines()) == 1
    s3.faults.clear()
    assert fault == "half sent" or store.size("file") is None


def test_what_cannot_be_written_or_reached_is_said(
    s3: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"^save_folder: https://x/y cannot be written; write an"):
        open_store("https://x/y").check_writable()
    with pytest.raises(UserError, match=r"^save_folder: .*nope://x/y.*check save_folder$"):
        open_store("nope://x/y")
    with pytest.raises(UserError, match=r"there is no bucket nobody; check its name in save_fol"):
        open_store("s3://nobody/x").files()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setattr("llmfoundry.data.store_clients._made", {})
    with pytest.raises(UserError, match=r"^save_folder: .*AWS_ACCESS_KEY_ID and AWS_SECRET_ACC"):
        open_store(f"s3://{BUCKET}/x").write("a", b"")
