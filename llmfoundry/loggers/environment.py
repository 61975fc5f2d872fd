"""Environment of a run: package versions, processor, system and git commit; no host or user name.

The tracker calls `environment` once, after the first step, for the report and the loggers' tags.
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
    """Return versions, processor, system, and the git commit if the current folder has one."""
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
    """Return the name of the processor without trademarks and clock; else its architecture."""
    name = platform.processor()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        name = next(re.finditer(r"^model name\s*:\s*(.+)$", text, re.MULTILINE))[1]
    except (OSError, StopIteration):
        pass
    name = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@.*", "", name)
    return " ".join(name.split()) or platform.machine()


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed, by name."""
    versions = dict[str, str]()
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _git(*arguments: str) -> str | None:
    """Return the output of git; None without git or a repository, or after two seconds."""
    try:
        process = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=2, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()
