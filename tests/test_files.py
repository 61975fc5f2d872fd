"""Files written whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from llmfoundry.files import open_to_all, whole_file, write_json, write_whole


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_litter(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_json(target, {"old": 1})
    with pytest.raises(OSError, match="No space"), whole_file(target) as file:
        file.write(b"half of the new on")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert target.read_text() == '{\n "old": 1\n}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "ä.txt"
    write_whole(target, "old")
    with whole_file(target, sync=True) as file:
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
