"""Files written whole or not at all."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.errors import UserError
from llmfoundry.files import (
    atomic_file,
    atomic_path,
    atomic_write,
    lock,
    one_at_a_time,
    open_to_all,
    parse_json,
    publish,
    read_json,
    read_object,
    refuse_used,
    resumable_folder,
    sync,
    write_json,
)
from llmfoundry.hf.write_folder import whole_or_nothing
from tests.disk import Disk


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_litter(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_json(target, {"old": 1})
    with pytest.raises(OSError, match="No space"), atomic_file(target) as file:
        file.write(b"half of the new on")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert target.read_text() == '{\n "old": 1\n}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="is a device, a pipe or a socket"):
        atomic_write(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo() and [*tmp_path.iterdir()] == [tmp_path / "pipe"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_foreign_json_is_read_in_every_encoding_of_json(tmp_path: Path, encoding: str) -> None:
    value = {"name": "n\u00e4me \U0001f600", "list": [1, None, {"deep": [[]]}]}
    (tmp_path / "a.json").write_bytes(json.dumps(value, ensure_ascii=False).encode(encoding))
    assert read_object(tmp_path / "a.json") == value


DEEP = 64
FOREIGN = {
    b"": "is not JSON: it is empty",
    b"{": "is not JSON: Expecting property name",
    b"[1]": "holds no settings by name",
    b'{"a": "\xff"}': "is not JSON: 'utf-8' codec",
    b'{"a": "\xed\xa0\x80"}': "is not JSON: 'utf-8' codec",  # half a pair
    b'{"a": ["\\uD800"]}': "is not JSON: 'utf-8' codec",
    b'{"a": ' + b"9" * 5000 + b"}": "is not JSON: Exceeds the limit (4300 digits)",
    b'{"a":' * (DEEP + 1) + b"1" + b"}" * (DEEP + 1): "is not JSON: nested more than 64 deep",
    b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}": "is not JSON: nested more than 64 deep",
    b" " * 1001 + b"{}": "has more than 1,000 bytes",
}


@pytest.mark.parametrize("content", FOREIGN, ids=range(len(FOREIGN)))
def test_foreign_json_that_cannot_be_used_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    most = 1000 if content.startswith(b"  ") else 10**6
    with pytest.raises(UserError) as caught:
        read_object(path, instead="copy it again", most=most)
    (line,) = caught.value.lines()
    assert line.startswith(f"{path}: {FOREIGN[content]}") and line.endswith("; copy it again")


def test_json_may_be_as_deep_as_the_bound() -> None:
    text = "[" * DEEP + "]" * DEEP
    assert parse_json(text) == json.loads(text)
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        parse_json(f'{{"a": 1, "b": {text}}}')


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "device"):
        with pytest.raises(UserError, match=f"{name}: cannot be read: is not a file; copy or"):
            read_object(tmp_path / name)
        with pytest.raises(OSError, match="is not a file"):
            read_json(tmp_path / name)
    with pytest.raises(UserError, match="none: is missing; copy or download it again"):
        read_object(tmp_path / "none")


KILLED = """
import os, sys
from pathlib import Path
from llmfoundry.files import atomic_path
with atomic_path(Path(sys.argv[1])) as partial:
    partial.mkdir() if partial.name.startswith("folder") else partial.touch()
    print("begun", flush=True)
    sys.stdin.read()  # until it is killed
"""


def begin_to_write(path: Path) -> subprocess.Popen[str]:
    """A process that is writing a file or a folder."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], **pipes)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    killed = [begin_to_write(tmp_path / name) for name in ("a.gguf", "folder")]
    for process in killed:
        process.kill()
        process.communicate()
    living = begin_to_write(tmp_path / "b.gguf")
    (tmp_path / "film.mkv.partial").touch()  # of somebody's browser
    assert len([*tmp_path.iterdir()]) == 2  # the living process has removed the others' already
    atomic_write(tmp_path / "a.gguf", "done")
    names = sorted(path.name.split(".")[0] for path in tmp_path.iterdir())
    assert names == ["a", "b", "film"] and (tmp_path / "a.gguf").read_text() == "done"
    living.communicate()
    assert (tmp_path / "b.gguf").is_file() and not [*tmp_path.glob("b.gguf.*")]


def test_two_writers_of_a_folder_give_one_of_them_whole(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="out exists and is not empty: it holds an adapter"),
        whole_or_nothing(tmp_path / "out") as slower,
    ):
        with whole_or_nothing(tmp_path / "out") as faster:
            (faster / "adapter_config.json").touch()
        (slower / "other").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "adapter_config.json"]


def test_the_same_command_on_a_complete_folder_is_told_what_it_is(tmp_path: Path) -> None:
    """Also where a kill left the journal: between the folder's last rename and its end."""
    with resumable_folder(tmp_path / "out", "same", note=print) as (folder, journal):
        (folder / "sub").mkdir()
        left = begin_to_write(folder / "sub" / "config.json")
        left.kill()
        left.communicate()
        journal.add({"a": 1})
        kept = (tmp_path / "out.unfinished.journal").read_bytes()
        shutil.copytree(folder, tmp_path / "copy.unfinished")
        (folder / "config.json").touch()
    (tmp_path / "out.unfinished.journal").write_bytes(kept)
    (tmp_path / "copy.unfinished.journal").write_bytes(kept)
    with pytest.raises(UserError, match="out exists and is not empty: it holds a Hugging Face"):
        refuse_used(tmp_path / "out")
    assert not (tmp_path / "out.unfinished.journal").exists()
    with resumable_folder(tmp_path / "copy", "same", note=print) as (folder, journal):
        assert journal.done == {"a": 1} and [*folder.rglob("*")] == [folder / "sub"]


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "ä.txt"
    atomic_write(target, "old")
    with atomic_file(target) as file:
        file.write("näw".encode())
        assert target.read_text(encoding="utf-8") == "old"
    assert target.read_text(encoding="utf-8") == "näw"


def test_files_that_a_library_made_private_get_the_rights_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    before = os.umask(0o022)
    try:
        (tmp_path / "usual").touch()
        usual = (tmp_path / "usual").stat().st_mode
        for name in ("one", "below/two", "other"):
            (tmp_path / name).touch(mode=0o600)
        open_to_all(tmp_path / "one")
        assert (tmp_path / "one").stat().st_mode == usual != (tmp_path / "other").stat().st_mode
        open_to_all(tmp_path / "below")
        assert (tmp_path / "below" / "two").stat().st_mode == usual
    finally:
        os.umask(before)


def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a power cut leaves an empty file of that name, or the old one that was to be gone."""
    disk = Disk(monkeypatch)
    atomic_write(tmp_path / "a", "content")
    (written, first), named, folder = disk.events
    assert written == "synced" and first.name.startswith("a.") and first.suffix == ".partial"
    assert (named, folder) == (("named", tmp_path / "a"), ("synced", tmp_path))


def test_a_folder_gets_its_name_when_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    (tmp_path / "out").mkdir()  # empty: it is replaced
    with atomic_path(tmp_path / "out") as folder:
        (folder / "below").mkdir(parents=True)
        (folder / "below/b").write_text("b")
        (folder / "a").write_text("a")
        (folder / "nowhere").symlink_to("missing")
    assert (tmp_path / "out/below/b").read_text() == "b"
    *synced, named, last = disk.events
    below = {str(path.relative_to(folder)) for _, path in synced}
    assert below == {".", "a", "below", "below/b"}
    assert (named, last) == (("named", tmp_path / "out"), ("synced", tmp_path))
    with pytest.raises(OSError, match="not empty"), atomic_path(tmp_path / "out") as folder:
        folder.mkdir()
    with pytest.raises(KeyboardInterrupt), atomic_path(tmp_path / "new") as folder:
        folder.mkdir()
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_to_a_file_that_is_still_to_be_made_is_locked_as_that_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with lock(tmp_path / "link", mode=0o644):
        assert (tmp_path / "file").is_file() and (tmp_path / "link").is_symlink()
    (tmp_path / "nowhere").symlink_to(tmp_path / "folder" / "file")
    with pytest.raises(FileNotFoundError):
        lock(tmp_path / "nowhere", mode=0o644)


def test_one_process_at_a_time_is_in_a_folder_and_the_other_is_told_what_to_do(
    tmp_path: Path,
) -> None:
    words = {"key": "output", "busy": "it is written; wait", "instead": "write another"}
    path = tmp_path / "new/folder/x.lock"
    with one_at_a_time(path, **words):
        code = (
            "import sys, pathlib; from llmfoundry.files import one_at_a_time\n"
            f"with one_at_a_time(pathlib.Path(sys.argv[1]), **{words}): pass"
        )
        done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
        assert done.stderr.endswith(f"UserError: output: {path.parent}: it is written; wait\n")
    with one_at_a_time(path, **words):  # it was released
        pass
    (tmp_path / "file").touch()
    why = r"^output: \S+/file cannot be written: .*exists.*; write another$"
    with (
        pytest.raises(UserError, match=why),
        one_at_a_time(tmp_path / "file/x.lock", **words),
    ):
        raise AssertionError("it was entered")


def test_a_mount_that_cannot_sync_folders_is_no_error_and_a_failing_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}")
        raise OSError(*(said if is_folder else (errno.EIO, "Input/output error")))

    (tmp_path / "a").write_text("old")
    (tmp_path / "b").write_text("new")
    monkeypatch.setattr(os, "fsync", fsync)
    said = (errno.EINVAL, "Invalid argument")
    sync(tmp_path)
    for action in (lambda: atomic_write(tmp_path / "a", "new"),
                   lambda: publish(tmp_path / "b", tmp_path / "a")):  # fmt: skip
        with pytest.raises(OSError, match="Input/output"):
            action()
    assert (tmp_path / "a").read_text() == "old"
    said = (errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output"):
        sync(tmp_path)


def test_a_full_disk_is_reported_with_the_file_that_was_written(tmp_path: Path) -> None:
    target, full = tmp_path / "model.gguf", OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match=r": '.*model\.gguf'"), atomic_path(target):
        raise full
    assert not [*tmp_path.iterdir()]
