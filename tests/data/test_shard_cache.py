"""One cache for several processes and users: who downloads, who waits, what is deleted."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmfoundry.data.shard_cache import download
from llmfoundry.data.shard_cache.limits import PART, ShardCache
from llmfoundry.data.shard_cache.shard_folder import FetchOptions, FileSpec, ShardFolder
from llmfoundry.errors import UserError
from llmfoundry.files import lock, try_lock
from tests.data.s3_server import BUCKET, FaultyS3, s3_server
from tests.tiny import ROOT

N_FILES, N_BYTES = 20, 10_000


def content(n: int) -> bytes:
    return bytes([n]) * N_BYTES


def spec(n: int) -> FileSpec:
    return FileSpec(f"s/{n}", N_BYTES, (("md5", hashlib.md5(content(n)).hexdigest()),))


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyS3]:
    with s3_server() as (faulty, put):
        for n in range(N_FILES):
            put(f"data/s/{n}", content(n))
        yield faulty


@pytest.fixture
def s3(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    server.reset()
    monkeypatch.setattr("llmfoundry.data.store._BACKOFF_S", 0.001)
    monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return server


@pytest.fixture
def far(tmp_path: Path) -> str:
    """The same files in a folder, for what is no matter of the network."""
    (tmp_path / "far/s").mkdir(parents=True)
    for n in range(N_FILES):
        (tmp_path / f"far/s/{n}").write_bytes(content(n))
    return str(tmp_path / "far")


def opened(
    tmp_path: Path,
    *,
    remote: str = f"s3://{BUCKET}/data",
    local: str | None = None,
    limit: int | None = None,
    prefetch: int = 0,
) -> ShardFolder:
    options = FetchOptions(
        cache_folder=str(tmp_path / "cache"),
        cache_limit=limit,
        prefetch=prefetch,
        retry=1,
        timeout=60.0,
    )
    if "://" not in remote and local is None:
        local = str(tmp_path / "near")  # a path alone would be read in place
    return ShardFolder.open(remote, local, options)


def start(do: Callable[[], object]) -> int:
    """Do it in a forked process; its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(Exception):
            do()
            code = 0
        os._exit(code)
    return child


def start_anew(work: str, *arguments: object) -> int:
    """Do it in a process that shares nothing, as buckets ask of one; its process id."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import *"
    code += f"; from tests.data.test_shard_cache import *; {work}{arguments!r}"
    return os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)


@contextlib.contextmanager
def killed_after(child: int) -> Iterator[Callable[[], None]]:
    """Kill it at the end, or earlier by what is yielded."""
    alive = [child]

    def kill() -> None:
        while alive:
            os.kill(alive[0], signal.SIGKILL)
            os.waitpid(alive.pop(), 0)

    try:
        yield kill
    finally:
        kill()


def succeeded(child: int) -> bool:
    return os.waitpid(child, 0)[1] == 0


def kept(folder: Path) -> set[str]:
    return {p.name for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")}


def taken(folder: Path) -> int:
    """Bytes of what is kept there and of what is being fetched."""
    n_bytes = 0
    for path in folder.rglob("s/*"):
        with contextlib.suppress(FileNotFoundError):
            n_bytes += path.stat().st_size
    return n_bytes


def read_all(tmp_path: Path, first: int) -> None:
    folder = opened(tmp_path)
    for n in range(N_FILES):
        n = (first + n) % N_FILES
        assert folder.get(spec(n)).read_bytes() == content(n)


def read_one(tmp_path: Path) -> None:
    opened(tmp_path).get(spec(0))


def test_four_processes_download_each_file_once(s3: FaultyS3, tmp_path: Path) -> None:
    # Two in the same order, which meet at every file; two from elsewhere.
    children = [start_anew("read_all", tmp_path, first) for first in (0, 0, 7, 15)]
    assert all([succeeded(child) for child in children])
    assert s3.requests == {f"data/s/{n}": 1 for n in range(N_FILES)}


def test_what_a_killed_process_began_is_done_by_the_next(s3: FaultyS3, tmp_path: Path) -> None:
    s3.faults["data/s/0"] = ("trickle", 1)
    with killed_after(start_anew("read_one", tmp_path)) as kill:
        assert s3.started.wait(240)  # a busy machine starts slowly
        folder = opened(tmp_path)
        part = next((tmp_path / "cache").rglob(f"0{PART}"))
        assert try_lock(part) is None
        kill()
        assert folder.get(spec(0)).read_bytes() == content(0)
    assert kept(tmp_path) == {"0"}


def test_a_process_that_is_stuck_is_named(far: str, tmp_path: Path) -> None:
    folder = opened(tmp_path, remote=far)
    folder.get(spec(1))
    part = tmp_path / f"near/s/0{PART}"
    with lock(part, mode=0o600):
        patience = download._Patience(0.01)
        while patience.wait(part):
            pass
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(download, "_Patience", lambda seconds: patience)
            with pytest.raises(UserError, match=r"s/0: another process .* end the one that has"):
                folder.get(spec(0))
    assert folder.get(spec(0)).read_bytes() == content(0)


def test_a_damaged_copy_is_fetched_again(s3: FaultyS3, tmp_path: Path) -> None:
    path = opened(tmp_path).get(spec(0))
    for wrong in (content(1), content(0)[:-1], b""):
        path.write_bytes(wrong)
        assert opened(tmp_path).get(spec(0)).read_bytes() == content(0)
    assert s3.requests["data/s/0"] == 4


def test_the_least_recently_used_goes_first(far: str, tmp_path: Path) -> None:
    folder = opened(tmp_path, remote=far, limit=5 * N_BYTES)
    paths = {}
    for n in range(4):
        paths[n] = folder.get(spec(n))
        os.utime(paths[n], (n + 1, n + 1))
    folder.get(spec(0))  # used again: now 1 is the oldest
    folder.get(spec(4))
    assert kept(tmp_path / "near") == {"0", "1", "2", "3", "4"}
    folder.get(spec(5))
    assert not paths[1].exists() and paths[0].exists()
    for n in range(N_FILES):
        folder.get(spec(n))
        assert len(kept(tmp_path / "near")) <= 5


def test_the_limit_holds_for_all_folders_and_leaves_other_files_alone(
    far: str, tmp_path: Path
) -> None:
    (tmp_path / "near").mkdir()
    (tmp_path / "near/mine").write_bytes(b"x" * 10 * N_BYTES)
    one = opened(tmp_path, remote=far, limit=4 * N_BYTES)
    other = opened(tmp_path, remote=far, local=str(tmp_path / "other"), limit=4 * N_BYTES)
    for n in range(10):
        one.get(spec(n))
        other.get(spec(n + 10))
    copies = kept(tmp_path / "other") | kept(tmp_path / "near") - {"mine"}
    assert {"9", "19"} <= copies and len(copies) <= 4
    assert (tmp_path / "near/mine").exists()


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("how", ["moved", "copied"])
def test_a_cache_folder_that_was_moved_or_copied_keeps_its_limit(
    s3: FaultyS3, tmp_path: Path, how: str, is_old: bool
) -> None:
    first, other = tmp_path / "cache", tmp_path / "new"
    for n in range(4):
        opened(tmp_path, limit=4 * N_BYTES).get(spec(n))
    accounts = first / "remote" / ".files"
    if is_old:  # with whole paths, as they were written once
        lines = accounts.read_text().splitlines()
        accounts.write_text("".join(f"{first / 'remote' / line}\n" for line in lines))
    other.mkdir()
    (shutil.move if how == "moved" else shutil.copytree)(str(first), str(other / "cache"))
    folder = opened(other, limit=4 * N_BYTES)
    for n in range(4, 8):
        folder.get(spec(n))
        assert len(kept(other / "cache/remote")) <= 4
    assert "7" in kept(other / "cache/remote")
    if how == "copied":
        assert kept(first / "remote") == {"0", "1", "2", "3"}


def test_files_in_use_stay_until_their_user_dies(far: str, tmp_path: Path) -> None:
    limit = 3 * N_BYTES
    folder = opened(tmp_path, remote=far, limit=limit)
    ready, go = os.pipe(), os.pipe()

    def hold() -> None:
        with opened(tmp_path, remote=far, limit=limit).pin(spec(0)):
            os.write(ready[1], b"x")
            os.read(go[0], 1)

    with killed_after(start(hold)) as kill, folder.pin(spec(1)) as mine:
        os.read(ready[0], 1)
        for n in range(2, 8):
            folder.get(spec(n))
        assert mine.read_bytes() == content(1)
        assert {"0", "1"} <= kept(tmp_path / "near")
        kill()
        for n in range(2, 8):
            folder.get(spec(n))
        assert "0" not in kept(tmp_path / "near")


def test_a_limit_below_what_is_in_use_is_an_error_with_the_number(far: str, tmp_path: Path) -> None:
    folder = opened(tmp_path, remote=far, limit=2 * N_BYTES)
    with folder.pin(spec(0)), folder.pin(spec(1)):
        with pytest.raises(UserError, match=r"data\.cache_limit: 20kb .* write 30kb or more") as e:
            folder.get(spec(2))
        assert "\n" not in str(e.value)
        assert folder.get(spec(0)).read_bytes() == content(0)
    folder.get(spec(2))
    enough = opened(tmp_path, remote=far, limit=3 * N_BYTES)
    with enough.pin(spec(0)), enough.pin(spec(1)), enough.pin(spec(3)):
        pass


def test_prefetch_waits_for_room_and_hardly_drops_what_it_fetched(
    s3: FaultyS3, tmp_path: Path
) -> None:
    folder = opened(tmp_path, limit=4 * N_BYTES, prefetch=100 * N_BYTES)
    folder.prefetch(spec(n) for n in range(N_FILES))
    for n in range(N_FILES):
        with folder.pin(spec(n)) as path:
            assert path.read_bytes() == content(n)
            # Others write and delete while a listing is made: it may hold both.
            n_kept = min(taken(tmp_path / "cache") for _ in range(3)) / N_BYTES
            assert n_kept <= 4 + 1
    # A file that is read before its turn may take the room of one fetched ahead of it: some are
    # fetched twice on a busy machine. Were those fetched ahead dropped for others, 33 to 37 were.
    assert set(s3.requests) == {f"data/s/{n}" for n in range(N_FILES)}
    assert sum(s3.requests.values()) <= N_FILES * 3 // 2
    folder.close()


def test_a_file_that_another_fetches_is_waited_for_by_get_and_left_by_prefetch(
    s3: FaultyS3, tmp_path: Path
) -> None:
    folder = opened(tmp_path, local=str(tmp_path / "near"), prefetch=2 * N_BYTES)
    folder.get(spec(5))
    part = tmp_path / f"near/s/0{PART}"
    with lock(part, mode=0o600):
        folder.prefetch(iter([spec(0), spec(1)]))
        deadline = time.monotonic() + 120
        while not (tmp_path / "near/s/1").exists():
            assert time.monotonic() < deadline
            time.sleep(0.002)
        part.write_bytes(content(0))
        part.rename(tmp_path / "near/s/0")
    assert folder.get(spec(0)).read_bytes() == content(0)
    assert s3.requests["data/s/0"] == 0
    folder.close()


def test_a_full_disk_says_what_is_needed_and_where(far: str, tmp_path: Path) -> None:
    report = tmp_path / "report"

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (N_BYTES // 2, N_BYTES // 2))
        try:
            opened(tmp_path, remote=far).get(spec(0))
        except UserError as error:
            report.write_text(str(error))

    assert succeeded(start(fill))
    line = report.read_text()
    assert line.startswith(f"file://{far}/s/0: cannot write it to {tmp_path}/near: File too large")
    assert "it needs 10kb, " in line and "data.cache_folder" in line and "\n" not in line
    assert kept(tmp_path / "near") == set()


def test_a_cache_that_cannot_be_written_is_reported(far: str, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(UserError, match=r"data\.cache_folder: cannot write .*Not a directory"):
        opened(tmp_path, remote=far).get(spec(0))


def test_a_cache_that_a_group_may_write_stays_so(far: str, tmp_path: Path) -> None:
    shared = tmp_path / "cache/remote"
    shared.mkdir(parents=True)
    shared.chmod(0o2770)
    before = os.umask(0o077)
    try:
        folder = opened(tmp_path, remote=far, local=str(shared / "own"), limit=2 * N_BYTES)
        for n in range(3):
            folder.get(spec(n))
    finally:
        os.umask(before)
    made = [shared / "own/s", shared / "own/s/2", shared / ".files", shared / ".used"]
    for path in made:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o2770 if path.is_dir() else 0o660), path


def test_a_folder_of_a_shared_cache_has_its_permissions_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or another user may find it closed."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o2777)
    cache = ShardCache(tmp_path / "cache", limit=None)
    rename, named = Path.rename, []

    def noted(self: Path, target: Path) -> Path:
        named.append((target.name, stat.S_IMODE(self.stat().st_mode)))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", noted)
    for _ in range(2):
        cache.make_folder(tmp_path / "cache/a/b")
    assert named == [("a", 0o2777), ("b", 0o2777)]
    assert sorted(p.name for p in (tmp_path / "cache").rglob("*")) == ["a", "b"]


def test_a_file_that_is_named_while_room_is_made_stays_in_the_accounts(
    far: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would be kept for good, beyond the limit."""
    folder = opened(tmp_path, remote=far, limit=2 * N_BYTES)
    folder.get(spec(0))
    near, stat_of, looked = tmp_path / "near/s", os.stat, []
    (near / "0").rename(near / f"0{PART}")

    def named_after_the_first_look(path: Path | str, **how: bool) -> os.stat_result:
        if str(path).removesuffix(PART) == str(near / "0"):
            looked.append(path)
            if len(looked) == 2:
                (near / f"0{PART}").rename(near / "0")
        return stat_of(path, **how)

    monkeypatch.setattr(os, "stat", named_after_the_first_look)
    for n in (1, 2, 3, 4):
        folder.get(spec(n))
    assert len(looked) > 2 and "0" not in kept(tmp_path / "near")


GARBAGE = [b"", b"\0" * 30, b"-5", b"9" * 5000, b"\xff\xfe garbage\n\x1b" * 9, b"nan", b"1e30"]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_accounts_that_are_garbage_are_made_anew(
    far: str, tmp_path: Path, garbage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_bytes(b"x")
    folder = opened(tmp_path, remote=far, limit=3 * N_BYTES)
    accounts = tmp_path / "cache/remote"
    for n in range(10):
        folder.get(spec(n))
        (accounts / ".used").write_bytes(garbage)
        (accounts / ".lock").write_bytes(garbage)
        with (accounts / ".files").open("ab") as journal:
            journal.write(garbage + b"\nmine\n")
        assert len(kept(tmp_path / "near")) <= 3
    assert (tmp_path / "mine").exists()
    folder.get(spec(10))
    used = (accounts / ".used").read_bytes()
    assert len(used) == 20 and 0 < int(used) <= 3 * N_BYTES


@pytest.mark.parametrize("name", [".used", ".files", ".lock"])
def test_accounts_that_are_folders_are_reported(far: str, tmp_path: Path, name: str) -> None:
    (tmp_path / "cache/remote" / name).mkdir(parents=True)
    with pytest.raises(
        UserError, match=rf"/cache/remote/{name}: Is a directory; .* in the way"
    ) as e:
        opened(tmp_path, remote=far).get(spec(0))
    assert "\n" not in str(e.value)


def test_a_forked_child_does_not_keep_its_parents_locks(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    held = try_lock(tmp_path / "a")
    assert held is not None and try_lock(tmp_path / "a", shared=True) is None
    wait, go = os.pipe()
    child = start(lambda: (held.release(), os.read(wait, 1)))
    held.release()
    with try_lock(tmp_path / "a", shared=True) or pytest.fail("still locked"):
        os.write(go, b"x")
    assert succeeded(child)


def test_a_lock_of_a_file_that_was_replaced_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a"
    held = lock(path, mode=0o600)
    path.rename(tmp_path / "b")
    assert not held.is_current()
    with pytest.raises(FileNotFoundError):
        try_lock(path)
    assert try_lock(tmp_path / "b") is None
    held.release()
    held.release()
