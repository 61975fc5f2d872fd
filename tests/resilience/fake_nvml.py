"""NVIDIA's management library without a GPU: a library of its name, compiled from fake_nvml.cpp.

What loads it by name finds it with `environment`, in a process of its own.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".cpp")


def environment(states: str, **more: str) -> dict[str, str]:
    """What a process needs to see GPUs in these states, such as `healthy,lost`."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed; make install brings it")
    found = {"LD_LIBRARY_PATH": str(_library().parent), "PYTHONPATH": os.pathsep.join(sys.path)}
    return found | {"FAKE_NVML": states, **more}


@functools.cache
def _library() -> Path:
    """Compiled once for the tests of this machine; whoever comes first makes it."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    which = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"llmfoundry-fake-nvml-{os.getuid()}-{which}"
    made = folder / "libnvidia-ml.so.1"
    if not made.exists():
        folder.mkdir(exist_ok=True)
        own = folder / f"{os.getpid()}.so"
        build = [compiler, "-std=c++17", "-O0", "-shared", "-fPIC", "-o", str(own), str(SOURCE)]
        subprocess.run(build, check=True)
        own.replace(made)
    return made
