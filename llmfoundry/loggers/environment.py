"""Where a run ran: versions and the commit of the working folder. No host or user name.

The tracker asks once, after the first step, for the report and MLflow's tags.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from llmfoundry.processes import cores

PACKAGES = ("llmfoundry-recipes", "torch", "numpy", "transformers", "tokenizers", "mlflow-skinny")


def environment() -> dict[str, str]:
    """Versions by package, the system, and the git commit if the current folder has one."""
    facts = {"python": platform.python_version()}
    facts |= package_versions(PACKAGES)
    facts |= {"processor": processor(), "cores": str(cores())}
    facts["system"] = f"{platform.system()} {platform.release()} ({platform.machine()})"
    commit = _git("rev-parse", "HEAD")
    if commit:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        facts["git commit"] = commit + (" with uncommitted changes" if changed else "")
    return facts


def processor() -> str:
    """The processor's name without marks and clock; the architecture where it has none."""
    name = platform.processor()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        name = next(re.finditer(r"^model name\s*:\s*(.+)$", text, re.MULTILINE))[1]
    except (OSError, StopIteration):
        pass
    name = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@.*", "", name)
    return " ".join(name.split()) or platform.machine()


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """By package, of those that are installed."""
    found = dict[str, str]()
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _git(*arguments: str) -> str | None:
    """What git prints; None without git, a repository, or an answer within two seconds."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=2, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
