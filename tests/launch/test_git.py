"""The code that a launched run ran with is known, without secrets: its commit and its changes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from llmfoundry.launch import git
from llmfoundry.launch.git import git_state


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(git, "_CODE", tmp_path)
    (tmp_path / "__init__.py").touch()
    ask("init", "-q", "-b", "main")
    (tmp_path / "model.py").write_text("width = 1\n")
    ask("add", ".")
    ask("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    return tmp_path


def ask(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def test_changes_lead_from_the_commit_to_the_code_that_ran(repository: Path) -> None:
    clean = {"commit": ask("rev-parse", "HEAD").strip(), "branch": "main", "dirty": False}
    assert git_state() == (clean, "")
    (repository / "model.py").write_text("width = 2\n")
    (repository / "new.py").touch()
    state, changes = git_state()
    assert state == {**clean, "dirty": True, "diff": "launch.diff"}
    assert changes.startswith("# not in git: new.py\ndiff --git ")
    ask("checkout", "-q", "model.py")
    (repository / "launch.diff").write_text(changes)
    ask("apply", "launch.diff")
    assert (repository / "model.py").read_text() == "width = 2\n"


def test_the_commit_is_the_codes_and_not_the_current_folders(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    commit = ask("rev-parse", "HEAD").strip()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert git_state()[0]["commit"] == commit
    installed = repository / ".venv/llmfoundry"  # of a repository that does not follow it
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    monkeypatch.setattr(git, "_CODE", installed)
    assert git_state() == ({}, "")


def test_secrets_in_changes_are_masked_and_code_is_not(repository: Path) -> None:
    code = (
        "tokens = batch.tokens_of_rows\nkey = self.attention.key_of(x)\nn_tokens=len(row_of_it)\n"
    )
    secret = (
        'api_key = "kanarie-0123456789"\n'
        "export HF_TOKEN=kanarie-0123456789\n"
        'settings = {"password": "kanarie-0123456789"}\n'
        'login("hf_kanarieKANARIEkanarieKANARIE")\n'
        "postgresql://me:kanarie-0123456789@host/db\n"
    )
    (repository / "model.py").write_text(code + secret)
    _, changes = git_state()
    assert "kanarie" not in changes and changes.count("***") == 5
    assert all(f"+{line}\n" in changes for line in code.splitlines())


def test_changes_are_bounded_and_no_repository_has_none(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (repository / "model.py").write_text("x\n" * 2_000_000)
    _, changes = git_state()
    assert changes.startswith("# cut off after 1,000,000 bytes\n") and len(changes) < 1_000_100
    monkeypatch.setattr(git, "_CODE", tmp_path_factory.mktemp("none"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", "/")
    assert git_state() == ({}, "")
