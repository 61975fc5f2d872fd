"""Compiles Triton kernels for GPUs that are not here, as a run on them would."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory of a block of threads, by compute capability: A100, H100, B200."""
HOPPER = 90


def compile_for(
    capability: int,
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str],
    folder: Path,
    warps: int,
) -> list[str]:
    """Compile a kernel and check its shared memory.

    Returns:
        Bytes that its registers spill, stores and loads, as the GPU's assembler reports them.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not hasattr(kernel, "arg_names") or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    signature = {a: "constexpr" if a in constants else types[a] for a in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared < SHARED[capability]
    ptx, cubin = folder / "kernel.ptx", folder / "cubin"
    ptx.write_text(compiled.asm["ptx"])
    tools = triton.knobs.nvidia
    assembler = tools.ptxas_blackwell if capability >= 100 else tools.ptxas
    suffix = "" if capability < HOPPER else "a"
    assemble = [assembler.path, "-v", f"--gpu-name=sm_{capability}{suffix}", "-o"]
    report = subprocess.run(
        [*assemble, str(cubin), str(ptx)], capture_output=True, text=True, check=True
    ).stderr
    return re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
