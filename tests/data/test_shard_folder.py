"""Folders of files that are read in place, and what a folder does for its readers."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from queue import Empty, Queue
from threading import Event

import pytest

from llmfoundry.data.file_spec import in_words
from llmfoundry.data.shard_cache import download
from llmfoundry.data.shard_cache.download import N_THREADS, Prefetcher
from llmfoundry.data.shard_cache.shard_folder import (
    CompressedFile,
    FetchOptions,
    FileSpec,
    ShardFolder,
)
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig, n_bytes


@pytest.fixture
def options(tmp_path: Path) -> FetchOptions:
    return FetchOptions(cache_folder=str(tmp_path / "cache"), retry=0, timeout=10.0)


def spec_of(name: str, data: bytes, *, algorithm: str = "sha256") -> FileSpec:
    return FileSpec(name, len(data), ((algorithm, hashlib.new(algorithm, data).hexdigest()),))


def in_child(do: Callable[[], object]) -> bool:
    """Whether `do` succeeds in a forked process."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            do()
            code = 0
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("how", ["local", "remote path", "file url"])
def test_files_on_this_machine_are_read_where_they_are(
    how: str, tmp_path: Path, options: FetchOptions
) -> None:
    (tmp_path / "data/sub").mkdir(parents=True)
    path = tmp_path / "data/sub/a"
    path.write_bytes(b"abc")
    place = str(tmp_path / "data")
    remote = {"local": None, "remote path": place, "file url": f"file://{place}"}[how]
    folder = ShardFolder.open(remote, place if remote is None else None, options)
    assert folder.read("sub/a") == b"abc"
    assert folder.get(spec_of("sub/a", b"abc")) == path
    with folder.pin(FileSpec("sub/a", None)) as pinned:
        assert pinned == path
    folder.prefetch(iter([spec_of("sub/a", b"abc")]))
    assert not (tmp_path / "cache").exists()


def test_a_path_with_a_local_folder_is_copied_there(tmp_path: Path, options: FetchOptions) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far/a").write_bytes(b"abc")
    folder = ShardFolder.open(str(tmp_path / "far"), str(tmp_path / "near"), options)
    path = folder.get(spec_of("a", b"abc"))
    assert path == tmp_path / "near/a" and path.read_bytes() == b"abc"
    (tmp_path / "far/a").unlink()
    assert folder.get(spec_of("a", b"abc")) == path


def test_a_compressed_file_in_place_is_unpacked_once_into_the_cache(
    tmp_path: Path, options: FetchOptions
) -> None:
    raw = b"words " * 1000
    packed = gzip.compress(raw)
    (tmp_path / "a.gz").write_bytes(packed)
    sha = (("sha1", hashlib.sha1(packed).hexdigest()),)
    spec = FileSpec(
        "a", len(raw), spec_of("a", raw).hashes, CompressedFile("a.gz", len(packed), sha, "gz")
    )
    path = ShardFolder.open(None, str(tmp_path), options).get(spec)
    assert path.is_relative_to(tmp_path / "cache") and path.read_bytes() == raw
    (tmp_path / "a.gz").unlink()
    assert ShardFolder.open(None, str(tmp_path), options).get(spec) == path
    assert sorted(p.name for p in path.parent.iterdir()) == ["a"]
    (tmp_path / "a").write_bytes(raw)  # unpacked by its owner: read there
    assert ShardFolder.open(None, str(tmp_path), options).get(spec) == tmp_path / "a"


def test_a_damaged_compressed_file_is_an_error(tmp_path: Path, options: FetchOptions) -> None:
    packed = gzip.compress(b"words " * 1000)
    (tmp_path / "a.gz").write_bytes(packed[:-9])
    spec = FileSpec("a", None, (), CompressedFile("a.gz", None, (), "gz"))
    with pytest.raises(UserError, match=r"a\.gz: cannot be unpacked \(gz\).*fetched again"):
        ShardFolder.open(None, str(tmp_path), options).get(spec)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.name.startswith("a")]


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda path: path.unlink(), "a: cannot be read: No such file or directory; check"),
        (lambda path: path.write_bytes(b"ab"), "a: has 2 bytes, its index specifies 3; the file"),
        (
            lambda path: path.write_bytes(b"abd"),
            "a: its md5 is 4911e516.*, its index specifies 900150",
        ),
    ],
)
def test_what_is_wrong_with_a_local_file_is_reported(
    damage: Callable[[Path], object], line: str, tmp_path: Path, options: FetchOptions
) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    spec = spec_of("a", b"abc", algorithm="md5")
    damage(tmp_path / "a")
    with pytest.raises(UserError, match=line) as caught:
        ShardFolder.open(None, str(tmp_path), options).get(spec)
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)


def test_hashes_are_compared_when_a_file_is_first_opened(
    tmp_path: Path, options: FetchOptions
) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    folder = ShardFolder.open(None, str(tmp_path), options)
    folder.get(spec_of("a", b"abc"))
    (tmp_path / "a").write_bytes(b"abd")
    folder.get(spec_of("a", b"abc"))
    with pytest.raises(UserError, match="sha256"):
        pickle.loads(pickle.dumps(folder)).get(spec_of("a", b"abc"))
    trusting = FetchOptions(cache_folder=options.cache_folder, validate_hash=False)
    ShardFolder.open(None, str(tmp_path), trusting).get(spec_of("a", b"abc"))


def test_a_used_folder_is_pickled_and_forked(tmp_path: Path, options: FetchOptions) -> None:
    (tmp_path / "far").mkdir()
    for name in "abc":
        (tmp_path / f"far/{name}").write_bytes(name.encode())
    folder = ShardFolder.open(str(tmp_path / "far"), str(tmp_path / "near"), options)
    folder.prefetch(iter([spec_of("a", b"a")]))
    folder.get(spec_of("a", b"a"))
    with folder.pin(spec_of("b", b"b")):
        assert in_child(lambda: folder.get(spec_of("c", b"c")))
        assert in_child(lambda: folder.prefetch(iter([spec_of("a", b"a")])))
    assert (tmp_path / "near/c").read_bytes() == b"c"
    assert pickle.loads(pickle.dumps(folder)).get(spec_of("a", b"a")).read_bytes() == b"a"
    folder.close()


def test_folders_in_a_loop_leave_no_open_files(tmp_path: Path, options: FetchOptions) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far/a").write_bytes(b"abc")

    def use() -> None:
        folder = ShardFolder.open(str(tmp_path / "far"), str(tmp_path / "near"), options)
        folder.get(spec_of("a", b"abc"))
        folder.close()

    for _ in range(20):
        use()
    assert open_below(tmp_path) == []  # by name: threads of other tests open and close theirs
    with (tmp_path / "far/a").open():
        assert open_below(tmp_path) == [str(tmp_path / "far/a")], "what is open is seen"


def open_below(folder: Path) -> list[str]:
    """What this process has open in a folder, deleted files too."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in found if name.startswith(f"{folder}/")]


def test_options_are_a_recipes() -> None:
    config = DataConfig(cache_limit="1.5gb", prefetch="20mb", download_retry=2)
    options = FetchOptions.from_config(config)
    assert (options.cache_limit, options.prefetch, options.retry) == (1_500_000_000, 20_000_000, 2)


@pytest.mark.parametrize("size", [0, 999, 1000, 1_234_567, 999_999_999, 3 * 10**12 + 1])
def test_sizes_in_errors_can_be_written_in_a_recipe(size: int) -> None:
    assert size <= n_bytes(in_words(size)) <= size * 1.01 + 1


def fetched(queue: Queue[str], n: int) -> set[str]:
    return {queue.get(timeout=10) for _ in range(n)}


def specs_of(names: str) -> list[FileSpec]:
    return [FileSpec(name, 10) for name in names]


def test_prefetch_is_ahead_by_its_budget_and_no_more() -> None:
    queue: Queue[str] = Queue()

    def fetch(spec: FileSpec, cancelled: Event) -> int:
        queue.put(spec.name)
        return 10

    ahead = Prefetcher(fetch, budget=25)
    ahead.prefetch(iter(specs_of("abcdefgh")))
    assert fetched(queue, 3) == set("abc")  # the third begins within the budget
    with pytest.raises(Empty):
        queue.get(timeout=0.05)
    ahead.use("b")
    assert fetched(queue, 1) == {"d"}
    ahead.ask("f")  # before the queue came to it: it is left out
    ahead.use("f")
    ahead.use("a")
    ahead.use("c")
    assert fetched(queue, 2) == set("eg")
    ahead.prefetch(iter(specs_of("xy")))
    assert fetched(queue, 2) == set("xy")
    ahead.close()


def test_an_endless_queue_within_the_budget_goes_round_with_its_use() -> None:
    queue: Queue[str] = Queue()

    def endless() -> object:
        while True:
            yield from specs_of("ab")

    def fetch(spec: FileSpec, cancelled: Event) -> int:
        queue.put(spec.name)
        return 10

    ahead = Prefetcher(fetch, budget=1000)
    ahead.prefetch(endless())
    assert fetched(queue, 2) == set("ab")
    for name in "abab":
        ahead.use(name)
        assert fetched(queue, 1) == {name}
    ahead.close()


def test_a_failure_waits_for_who_asks_for_the_file() -> None:
    failed = Event()

    def fetch(spec: FileSpec, cancelled: Event) -> int:
        if spec.name == "b":
            failed.set()
            raise UserError("b: is not there")
        return 10

    ahead = Prefetcher(fetch, budget=100)
    for ask in (lambda: ahead.ask("b"), lambda: ahead.prefetch(iter([]))):
        failed.clear()
        ahead.prefetch(iter(specs_of("ab")))
        assert failed.wait(10)
        ahead.ask("a")
        with pytest.raises(UserError, match="b: is not there"):
            while True:  # the thread notes it a moment after it failed
                ask()
    ahead.ask("b")
    ahead.close()


def test_a_queue_that_fails_is_reported_at_the_next_use() -> None:
    def broken() -> object:
        yield from specs_of("a")
        raise ZeroDivisionError

    reached = Event()

    def fetch(spec: FileSpec, cancelled: Event) -> int:
        reached.set()
        return 10

    ahead = Prefetcher(fetch, budget=100)
    ahead.prefetch(broken())
    assert reached.wait(10)
    with pytest.raises(ZeroDivisionError):
        while True:
            ahead.ask("a")
    ahead.close()


def test_a_folder_that_is_closed_ends_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_RETRY_S", 0.001)
    entered: Queue[Event] = Queue()

    def fetch(spec: FileSpec, cancelled: Event) -> None:
        entered.put(cancelled)

    ahead = Prefetcher(fetch, budget=100)
    ahead.prefetch(iter(specs_of("abcdefg")))
    for _ in range(N_THREADS):
        entered.get(timeout=10)
    ahead.close()
    for thread in ahead._threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
