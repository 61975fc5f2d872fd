"""Git state of the launched code: commit, branch and uncommitted changes.

`job.py` stores it in the launch record, and `cli/commands/launch.py` writes the diff next to it.
The commit and the diff together are the code that ran. Secrets are masked, the size is limited.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from llmfoundry.redaction import public_code

DIFF = "launch.diff"
"""File of the diff in the run's folder, for `git apply` on the commit in `launch.json`."""
_MOST = 1_000_000  # bytes of the diff
_SECONDS = 20.0  # timeout of a git command
_CODE = Path(__file__).resolve().parents[1]  # folder of this package
_DIFF = (
    f"git --no-optional-locks diff --no-color --no-ext-diff --no-textconv HEAD | head -c {_MOST}"
)


def git_state() -> tuple[dict[str, Any], str]:
    """Return the git state of this package's code, and its diff.

    Returns:
        `commit`, `branch`, `dirty` and `diff` (the name of the diff's file), and the diff itself.
        The first lines of the diff list untracked files. Both are empty if git does not track the
        package, for example in a virtual environment.
    """
    is_followed = _ask("git ls-files --error-unmatch __init__.py", _CODE)
    commit = _ask("git rev-parse HEAD", _CODE).strip() if is_followed else ""
    if not commit:
        return {}, ""
    top = Path(_ask("git rev-parse --show-toplevel", _CODE).strip())
    branch = _ask("git rev-parse --abbrev-ref HEAD", top).strip()
    changes = _ask(_DIFF, top)
    new = _ask("git ls-files --others --exclude-standard | head -n 100", top).splitlines()
    state = {"commit": commit, "branch": branch, "dirty": bool(changes)}
    if not changes and not new:
        return state, ""
    head = [f"# not in git: {name}" for name in new]
    head += [f"# cut off after {_MOST:,} bytes"] * (len(changes.encode()) >= _MOST)
    text = "".join(f"{line}\n" for line in head) + changes
    return {**state, "diff": DIFF}, public_code(text)


def _ask(command: str, folder: Path) -> str:
    """Return the output of a shell command run in a folder; empty if it fails."""
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
