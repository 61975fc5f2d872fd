"""Runs a script in which tensors without data may lie on a CUDA device, in a process of its own.

Forward and backward passes and optimizers run as they would on a GPU, operation by operation, but
on shapes alone; whatever asks a tensor for a value raises DataDependentOutputException. PyTorch's
build for CPUs needs a device to be registered for it, which a small library does (fake_cuda.cpp);
a build with CUDA has one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).with_suffix(".cpp")
ROOT = SOURCE.parents[1]
PREFACE = """
import ctypes, sys
if sys.argv[1]:
    ctypes.CDLL(sys.argv[1])  # before torch, which looks for devices once
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
"""
END = """
import os
sys.stdout.flush()
os._exit(0)  # autograd's threads for a device that is not there may abort an ordinary exit
"""


def run_on_fake_cuda(script: str, *, seconds: float = 300) -> str:
    """What a script prints; it finds `torch` and `FakeTensorMode` imported.

    Skips the test where the library is needed and there is no compiler, or no driver for CUDA.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PREFACE + script + END, _library()],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@functools.cache
def _library() -> str:
    """Path of the compiled library; empty where PyTorch has CUDA itself, and a GPU."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        if not torch.cuda.is_available():
            pytest.skip("PyTorch's build for CUDA asks a driver that is not there")
        return ""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    # kept for the tests of this machine; whoever comes first makes it
    which = hashlib.sha256(f"{folder} {torch.__version__} {SOURCE.read_text()}".encode())
    name = f"llmfoundry-fake-cuda-{os.getuid()}-{which.hexdigest()[:16]}.so"
    made = Path(tempfile.gettempdir()) / name
    if not made.exists():
        own = made.with_suffix(f".{os.getpid()}")
        libraries = [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{folder / 'lib'}"]
        build = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{folder / 'include'}"]
        subprocess.run([*build, "-o", str(own), str(SOURCE), *libraries], check=True)
        own.replace(made)
    return str(made)
