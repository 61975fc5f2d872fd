"""Machines that are suspected: check them, take them out, start without them.

Slurm's commands are used where they are there. Nothing is decided here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from llmfoundry.ends import BAD_MACHINE
from llmfoundry.events import names_in
from llmfoundry.files import read_json
from llmfoundry.operate.check.probes import kernel_log
from llmfoundry.operate.check.xids import events
from llmfoundry.recipe.operate.supervise import EXCLUDE

_PATIENCE = 1800.0  # seconds, of a check
_COMMAND = 60.0  # of scontrol


def kernel_events(
    path: str | None, node: str, *, seconds: float, start: int
) -> list[tuple[str, str, bool]]:
    """Machine, why, and whether it takes the machine out, of the kernel's latest lines.

    Args:
        path: health_check.kernel_log.
        node: this machine.
        seconds: how far back; counted, not the difference of two times of a clock that is set.
        start: bytes of the file of that path to pass over.
    """
    lines, _ = kernel_log.read(path, hours=max(1.0, seconds) / 3600, start=start)
    return [(node, f"{e.code} {e.why}".strip(), e.is_bad) for e in events(lines)]


def check(command: Sequence[str], output: Path) -> tuple[tuple[str, ...], str]:
    """Run scripts/check.py; the machines that it finds bad, and its verdict in words.

    Args:
        command: its words, which write to `output`.
        output: where check.json lands.
    """
    try:
        done = subprocess.run(list(command), timeout=_PATIENCE, stdout=sys.stderr)
    except (OSError, subprocess.SubprocessError) as error:
        return (), f"the check itself failed: {error}"
    if done.returncode == 0:
        return (), "nothing is bad"
    if done.returncode != BAD_MACHINE:
        return (), f"the check itself ended with status {done.returncode}"
    try:
        found = names_in(read_json(output / "check.json"), "bad_nodes")
    except (OSError, ValueError, AttributeError) as error:
        return (), f"the check's report cannot be read: {error}"
    return found, f"bad: {', '.join(found) or 'no machine alone is to blame'}"


def take_out(nodes: Iterable[str], why: str) -> str:
    """Drain machines of a Slurm cluster; what came of it."""
    program = shutil.which("scontrol")
    if program is None or "SLURM_JOB_ID" not in os.environ:
        return "left out of the next start"
    names = ",".join(nodes)
    command = [program, "update", f"nodename={names}", "state=drain"]
    try:
        done = subprocess.run(
            [*command, f"reason=llmfoundry: {why[:120]}"],
            capture_output=True,
            text=True,
            timeout=_COMMAND,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"not drained ({error}), but left out of the next start"
    if done.returncode:
        return f"not drained ({done.stderr.strip()}), but left out of the next start"
    return "drained, and left out of the next start"


def launch_words(launch: Sequence[str], excluded: Iterable[str]) -> list[str]:
    """The words of `supervise.launch`, without machines that are to be left out."""
    names = ",".join(sorted(excluded))
    words = [word for word in launch if names or EXCLUDE not in word]
    return [word.replace(EXCLUDE, names) for word in words]
