"""Gloo ranks that are cheap to start: one new process imports PyTorch once, and forks them all.

`ranks("tests.parallel.test_groups:target", 4)` gives what `target(rank, size)` returns on each.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.tiny import ENV, ROOT


def ranks(target: str, size: int, *, seconds: float = 170) -> list[Any]:
    """The results of all ranks, through JSON."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        subprocess.run(
            [sys.executable, "-m", "tests.parallel.forked", target, str(size), folder],
            env=ENV | {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            timeout=seconds,
            check=True,
        )
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(size)]


def _fork(target: str, size: int, folder: Path) -> int:
    """Run all ranks; how many failed."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    children = []
    for rank in range(size):
        child = os.fork()
        if child:
            children.append(child)
            continue
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        (folder / str(rank)).write_text(json.dumps(function(rank, size)))
        sys.stdout.flush()
        os._exit(0)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(_fork(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
