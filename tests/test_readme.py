"""README and Makefile: what they name exists, and the commands they print parse."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import ENV, ROOT

README = (ROOT / "README.md").read_text()
PAGES = README + (ROOT / "llmfoundry/data/README.md").read_text()
COMMANDS = sorted(set(re.findall(r"^\s*(python scripts/\w+\.py[^#\n|`]*)", PAGES, re.MULTILINE)))
MAKE = sorted(set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE)))


def test_the_readme_names_commands_and_targets() -> None:
    assert len(COMMANDS) >= 5 and {"train", "test"} <= set(MAKE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_is_understood(command: str, tmp_path: Path) -> None:
    for name in ("scripts", "yamls", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "yamls" / "quickstart.yaml", tmp_path / "my.yaml")
    words = shlex.split(command)[1:]
    if "-m" in words:  # a sweep: its first point
        words = [re.sub(r"(=[^,\[]+),.*", r"\1", word) for word in words if word != "-m"]
    done = subprocess.run(
        [sys.executable, *words, "--cfg", "job"],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", MAKE)
def test_a_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"help", "install", "train", "test", "check", "bench", "ui", "clean"} <= listed


def test_every_path_in_the_readmes_tree_exists() -> None:
    tree = README.split("## The tree", 1)[1].split("```text\n", 1)[1].split("```", 1)[0]
    folders: list[str] = []
    for line in filter(str.strip, tree.splitlines()):
        name = line.strip().split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], name]
        assert (ROOT / "/".join(folders)).exists(), line
