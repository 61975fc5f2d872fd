"""Whose copies a folder holds: other data's are refused, a silent store is done without."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmfoundry.data import store_errors
from llmfoundry.data.mds.shard import MDSWriter
from llmfoundry.data.order import Order
from llmfoundry.data.shard_cache import shard_folder
from llmfoundry.data.shard_cache.shard_folder import COPIES, FetchOptions, ShardFolder, some_of
from llmfoundry.data.shard_index import read_index, with_sample
from llmfoundry.data.sources import MDSTokens, OrderedStream, SequenceOptions, open_source
from llmfoundry.data.store_address import without_secrets
from llmfoundry.errors import UserError
from tests.data.s3_server import BUCKET, FaultyS3, s3_server

LENGTH, ROWS = 16, 40


def write(
    folder: Path, value: int, *, rows: int = ROWS, hashes: tuple[str, ...] = (), packed: str = ""
) -> Path:
    """Rows that all are `value`: of any two the names and sizes agree, and so the indexes."""
    columns = {"tokens": f"ndarray:int32:{LENGTH}"}
    shutil.rmtree(folder, ignore_errors=True)
    with MDSWriter(
        folder, columns=columns, size_limit=1000, hashes=hashes, compression=packed or None
    ) as writer:
        for _ in range(rows):
            writer.write({"tokens": np.full(LENGTH, value, np.int32)})
    return folder


def opened(
    remote: object, local: Path | None, *, cache: Path, **how: Any
) -> tuple[ShardFolder, MDSTokens]:
    """As a run opens a stream."""
    options = FetchOptions(cache_folder=str(cache), **{"retry": 0, "timeout": 5.0, **how})
    folder = ShardFolder.open(str(remote), None if local is None else str(local), options)
    index = with_sample(folder, read_index(folder, str(cache)))
    source = open_source("data", "data", folder, index, SequenceOptions(LENGTH, ""))
    assert isinstance(source, MDSTokens)
    return folder, source


def values(source: MDSTokens) -> set[int]:
    return {int(source.ids(row)[0]) for row in range(source.n_rows)}


def test_copies_of_another_remote_are_refused(tmp_path: Path) -> None:
    one, other, near = write(tmp_path / "one", 1), write(tmp_path / "other", 2), tmp_path / "near"
    assert (one / "index.json").read_bytes() == (other / "index.json").read_bytes()
    assert values(opened(one, near, cache=tmp_path / "c")[1]) == {1}
    with pytest.raises(
        UserError, match=r"near: holds copies of .*one, not of .*other; write a"
    ) as e:
        opened(other, near, cache=tmp_path / "c")
    assert len(e.value.problems) == 1 and "\n" not in str(e.value)
    assert values(opened(f"{one}/", near, cache=tmp_path / "c")[1]) == {1}


def test_copies_from_before_an_index_was_written_anew_are_refused(tmp_path: Path) -> None:
    one, near = write(tmp_path / "one", 1), tmp_path / "near"
    opened(one, near, cache=tmp_path / "c")
    write(one, 2, rows=ROWS + 1)
    with pytest.raises(UserError, match=r"near: holds copies of .*one from before its index was"):
        opened(one, near, cache=tmp_path / "c")


def test_hashes_decide_where_all_shards_have_them(tmp_path: Path) -> None:
    one, near = write(tmp_path / "one", 1, hashes=("sha1",)), tmp_path / "near"
    assert values(opened(one, near, cache=tmp_path / "c")[1]) == {1}
    write(one, 2, rows=ROWS + 1, hashes=("sha1",))
    assert values(opened(one, near, cache=tmp_path / "c")[1]) == {2}
    moved = shutil.copytree(one, tmp_path / "moved")
    assert values(opened(moved, near, cache=tmp_path / "c")[1]) == {2}
    another = write(tmp_path / "another", 3, hashes=("sha1",))
    with pytest.raises(UserError, match=r"near: holds copies of .*moved, not of .*another"):
        opened(another, near, cache=tmp_path / "c")
    write(one, 4, rows=ROWS + 1, hashes=("sha1",))
    opened(one, tmp_path / "trusted", cache=tmp_path / "c")
    write(one, 5, rows=ROWS + 1, hashes=("sha1",))
    with pytest.raises(UserError, match="without hashes nobody can know"):
        opened(one, tmp_path / "trusted", cache=tmp_path / "c", validate_hash=False)


@pytest.mark.parametrize("packed", ["", "gz"])
def test_copies_without_a_record_are_compared_with_the_remote(tmp_path: Path, packed: str) -> None:
    """As mosaicml-streaming leaves them, an earlier version of us, or who copied by hand."""
    one, near = write(tmp_path / "one", 1, packed=packed), tmp_path / "near"
    assert values(opened(one, near, cache=tmp_path / "c")[1]) == {1}
    for record in (None, b"", b"\xff garbage", b"[1]", b'{"remote": 5}', b"[" * 100_000):
        (near / COPIES).unlink() if record is None else (near / COPIES).write_bytes(record)
        assert values(opened(one, near, cache=tmp_path / "c")[1]) == {1}
        assert json.loads((near / COPIES).read_bytes())["remote"] == f"file://{one}"
    assert not [path for path in near.iterdir() if "part" in path.name]
    (near / COPIES).unlink()
    write(one, 2, packed=packed)
    (near / "index.json").unlink()
    with pytest.raises(UserError, match=r"shard.00000.mds: is not what .*one has by that name; "):
        opened(one, near, cache=tmp_path / "c")


def test_a_folder_of_other_data_is_never_written_into(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one", 1), write(tmp_path / "other", 2, rows=9)
    before = {path: path.read_bytes() for path in other.iterdir()}
    with pytest.raises(UserError, match=r"other/index\.json: is the index of other data than"):
        opened(one, other, cache=tmp_path / "c")
    (other / COPIES).unlink()
    assert {path: path.read_bytes() for path in other.iterdir()} == before


def test_unpacked_shards_of_a_folder_that_was_written_anew_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "one", 1, packed="gz")
    assert values(opened(one, None, cache=tmp_path / "c")[1]) == {1}
    write(one, 2, rows=ROWS + 1, packed="gz")
    with pytest.raises(UserError, match="from before its index was"):
        opened(one, None, cache=tmp_path / "c")


def test_of_two_that_begin_at_once_in_one_folder_one_is_refused(tmp_path: Path) -> None:
    far = [write(tmp_path / str(n), n) for n in range(4)]
    refused, found = [], []

    def begin(place: Path) -> None:
        try:
            found.append(values(opened(place, tmp_path / "near", cache=tmp_path / "c")[1]))
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=begin, args=(place,)) for place in far]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1 and len(refused) == 3
    assert all("holds copies of" in line for line in refused)


def test_a_resume_on_rows_that_changed_is_refused_without_hashes_too(tmp_path: Path) -> None:
    def stream() -> OrderedStream:
        source = opened(tmp_path / "one", None, cache=tmp_path / "c")[1]
        return OrderedStream(source, Order(source.sizes, seed=1, shuffle=True, block_size=1 << 18))

    write(tmp_path / "one", 1)
    state = stream().state()
    write(tmp_path / "one", 1)
    stream().resume(state, allow_changed=False)
    write(tmp_path / "one", 2)
    with pytest.raises(UserError, match="its rows are not those of the checkpoint"):
        stream().resume(state, allow_changed=False)
    stream().resume(state, allow_changed=True)
    write(tmp_path / "one", 1, hashes=("sha1",))
    assert ":" not in stream().state()["fingerprint"]


def test_the_sample_is_of_the_first_the_middle_and_the_last() -> None:
    assert [some_of(range(n)) for n in (0, 1, 2, 3, 8)] == [[], [0], [0, 1], [0, 1, 2], [0, 4, 7]]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FaultyS3, Any]]:
    with s3_server() as found:
        yield found


@pytest.fixture
def s3(server: tuple[FaultyS3, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FaultyS3:
    faulty, put = server
    faulty.reset()
    for path in write(tmp_path / "far", 1).iterdir():
        put(f"data/{path.name}", path.read_bytes())
    monkeypatch.setattr("llmfoundry.data.store._BACKOFF_S", 0.001)
    monkeypatch.setenv("S3_ENDPOINT_URL", faulty.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    return faulty


@pytest.mark.parametrize("fault", ["internal", "slow down", "forbidden", "cut"])
def test_a_run_whose_shards_are_all_here_starts_while_the_store_is_silent(
    s3: FaultyS3, tmp_path: Path, fault: str
) -> None:
    where: dict[str, Any] = {"cache": tmp_path / "c", "retry": 1}
    first = opened(f"s3://{BUCKET}/data", None, **where)[1]
    assert values(first) == {1}
    s3.reset()
    s3.faults["*"] = (fault, -1)
    folder, again = opened(f"s3://{BUCKET}/data/", None, **where)
    assert s3.requests == {"data/index.json": 1}
    assert values(again) == {1} and again.fingerprint == first.fingerprint
    assert folder.silence.startswith(f"s3://{BUCKET}/data/index.json: ")
    assert folder.silence.endswith(", which has all shards")
    next((tmp_path / "c").rglob("shard.00001.mds")).unlink()
    with pytest.raises(UserError, match=r"data/index\.json: "):
        opened(f"s3://{BUCKET}/data", None, **where)


def test_an_index_that_is_gone_is_not_done_without(s3: FaultyS3, tmp_path: Path) -> None:
    values(opened(f"s3://{BUCKET}/data", None, cache=tmp_path / "c")[1])
    s3.faults["*"] = ("missing", -1)
    with pytest.raises(UserError, match="is not there"):
        opened(f"s3://{BUCKET}/data", None, cache=tmp_path / "c")


def test_a_kept_index_that_is_garbage_is_not_used(s3: FaultyS3, tmp_path: Path) -> None:
    values(opened(f"s3://{BUCKET}/data", tmp_path / "near", cache=tmp_path / "c")[1])
    whole = (tmp_path / "near/index.json").read_bytes()
    for garbage in (b"", b"\xff", whole.replace(b"shard.00001", b"other.00001")):
        (tmp_path / "near/index.json").write_bytes(garbage)
        s3.faults["*"] = ("internal", -1)
        with pytest.raises(UserError, match=r"data/index\.json: InternalError"):
            opened(f"s3://{BUCKET}/data", tmp_path / "near", cache=tmp_path / "c")
        s3.reset()
        assert values(opened(f"s3://{BUCKET}/data", tmp_path / "near", cache=tmp_path / "c")[1])


def test_copies_that_may_only_be_read_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **how: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    one, near = write(tmp_path / "one", 1), tmp_path / "near"
    shutil.copytree(one, near)
    monkeypatch.setattr(shard_folder, "lock", refuse)
    monkeypatch.setattr(shard_folder, "atomic_file", refuse)
    assert values(opened(one, near, cache=tmp_path / "c")[1]) == {1}
    assert not (near / COPIES).exists()
    (near / COPIES).write_text(json.dumps({"remote": "file:///elsewhere", "index": ""}))
    with pytest.raises(UserError, match="holds copies of file:///elsewhere"):
        opened(one, near, cache=tmp_path / "c")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:canary@host/a/b", "https://host/a/b"),
        ("https://host/a?sig=canary", "https://host/a"),
        ("s3://key:canary@bucket/a?b", "s3://bucket/a?b"),
        ("az://container/a?sv=canary", "az://container/a"),
        ("oci://bucket@namespace/a", "oci://bucket@namespace/a"),
        (
            "abfss://box@account.dfs.core.windows.net/a",
            "abfss://box@account.dfs.core.windows.net/a",
        ),
        ("s3://bucket/a@b:c", "s3://bucket/a@b:c"),
        ("https://host", "https://host"),
    ],
)
def test_what_is_secret_in_a_url_is_not_shown(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def test_what_is_secret_in_a_librarys_error_is_not_shown() -> None:
    text = "500, message='Why? a=b', url='https://user:canary@host/a?sig=canary&b=c/index.json'"
    shown = "ValueError: 500, message='Why? a=b', url='https://host/a?…'"
    assert store_errors.in_one_line(ValueError(text)) == shown
    plain = "oci://bucket@namespace:443/a is no s3://b/c@d?e"
    assert store_errors.in_one_line(ValueError(plain)) == f"ValueError: {plain}"


def test_a_password_in_a_url_is_written_nowhere(tmp_path: Path) -> None:
    where: dict[str, Any] = {"cache": tmp_path / "c", "timeout": 0.5}
    with pytest.raises(UserError) as error:
        opened("http://user:canary@127.0.0.1:9/a?token=canary", None, **where)
    assert "canary" not in str(error.value)
    written = [
        str(path) + path.read_text() for path in (tmp_path / "c").rglob("*") if path.is_file()
    ]
    names = [str(path) for path in (tmp_path / "c").rglob("*")]
    assert names and not [text for text in written + names if "canary" in text]
