"""The repository of the code that is launched, as a launched run's record keeps it.

`job.py` asks for its state, and `cli/commands/launch.py` writes the changes beside the record. The
idea: a commit and what differs from it are the code that ran. Secrets are masked, and the size is
bounded.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from llmfoundry.redaction import public_code

DIFF = "launch.diff"
"""In the run's folder: what `git apply` takes to the commit in `launch.json`."""
_MOST = 1_000_000  # bytes of it
_SECONDS = 20.0  # for an answer
_CODE = Path(__file__).resolve().parents[1]  # of this package
_DIFF = (
    f"git --no-optional-locks diff --no-color --no-ext-diff --no-textconv HEAD | head -c {_MOST}"
)


def git_state() -> tuple[dict[str, Any], str]:
    """commit, branch, dirty and diff (the file's name), and the changes; empty: no repository.

    Of this package's code, from whatever folder it is launched. A package that a repository around
    it does not follow, as in a virtual environment, has none. Files that git does not follow are
    named in the first lines of the changes.
    """
    is_followed = _ask("git ls-files --error-unmatch __init__.py", _CODE)
    commit = _ask("git rev-parse HEAD", _CODE).strip() if is_followed else ""
    if not commit:
        return {}, ""
    top = Path(_ask("git rev-parse --show-toplevel", _CODE).strip())
    branch = _ask("git rev-parse --abbrev-ref HEAD", top).strip()
    changes = _ask(_DIFF, top)
    new = _ask("git ls-files --others --exclude-standard | head -n 100", top).splitlines()
    found = {"commit": commit, "branch": branch, "dirty": bool(changes)}
    if not changes and not new:
        return found, ""
    head = [f"# not in git: {name}" for name in new]
    head += [f"# cut off after {_MOST:,} bytes"] * (len(changes.encode()) >= _MOST)
    text = "".join(f"{line}\n" for line in head) + changes
    return {**found, "diff": DIFF}, public_code(text)


def _ask(command: str, folder: Path) -> str:
    """What a command of the shell prints in a folder; empty where it fails."""
    try:
        done = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
