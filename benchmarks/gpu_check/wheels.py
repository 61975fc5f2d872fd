"""Where a GPU check begins: on a machine that has only torch, the wheels of a folder come first.

`scripts/gpu_check.py` calls it. Until the wheels are on Python's path only the standard library can
be imported, so that everything else of the check is imported after that.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check import WANTED
from llmfoundry.errors import UserError

KEY = "wheels="


def start(words: Sequence[str], help_text: str) -> int:
    """Run the check of a command's words; the exit status."""
    try:
        for word in words:
            if word.startswith(KEY) and word != KEY:
                _add(Path(word.removeprefix(KEY)).expanduser().absolute())
        from benchmarks.gpu_check.check import main
    except UserError as error:
        print(*error.lines(), sep="\n", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"wheels: {error.name} cannot be imported; {WANTED}", file=sys.stderr)
        return 2
    return main(words, help_text)


def _add(folder: Path) -> None:
    """Put the wheels of a folder on the path of this process, and of those that it starts."""
    into = Path(tempfile.mkdtemp(prefix="gpu-check-wheels-"))
    atexit.register(shutil.rmtree, into, ignore_errors=True)
    unpack(folder, into)
    sys.path.insert(0, str(into))
    given = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(into), *given])


def unpack(folder: Path, into: Path) -> None:
    """Install the wheels of a folder on a machine without a network.

    Raises:
        UserError: there is none, or pip refuses one.
    """
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if not wheels:
        raise UserError(f"wheels: {folder} holds no .whl file; --help says which to put there")
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
    words = [*pip, "--target", str(into), *map(str, wheels)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UserError(f"wheels: {(reasons or [done.stderr.strip()])[0].removeprefix('ERROR: ')}")
