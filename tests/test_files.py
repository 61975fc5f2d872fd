"""Files written whole or not at all."""

import errno
from pathlib import Path

import pytest

from llmfoundry.files import whole_file, write_json, write_whole


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
