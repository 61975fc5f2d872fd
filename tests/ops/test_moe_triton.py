"""The Triton kernels without a GPU: by the interpreter, and compiled ahead of time for Hopper."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

SHARED = 227 * 1024  # bytes a block of threads has on Hopper
TENSORS = {  # pointers to other than the rows' type
    "order": "*i32",
    "inverse": "*i32",
    "weights": "*fp32",
    "inner": "*fp32",
}
GLU = {"F": 10752, "GATED": True}
COMBINE = {"D": 6144, "K": 4}
KERNELS: dict[str, dict[str, Any]] = {  # DBRX's sizes
    "gather_kernel": {"D": 6144, "K": 4},
    "glu_kernel": {**GLU, "ACT": "silu"},
    "glu_kernel gelu": {**GLU, "ACT": "gelu"},
    "glu_backward_kernel": {**GLU, "ACT": "silu"},
    "glu_backward_kernel gelu": {**GLU, "ACT": "gelu"},
    "glu_backward_kernel gelu_tanh": {**GLU, "ACT": "gelu_tanh"},
    "glu_backward_kernel relu of an MLP": {**GLU, "ACT": "relu", "GATED": False},
    "combine_kernel weighted": {**COMBINE, "WEIGHTED": True, "MORE": False},
    "combine_kernel of two": {**COMBINE, "WEIGHTED": False, "MORE": True},
    "combine_backward_kernel": COMBINE,
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What `moe_triton_interpreted` prints."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.moe_triton_interpreted"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_interpreted_kernels_give_pytorchs_steps(interpreted: dict[str, Any]) -> None:
    bounds = {"float32": 1e-6, "bfloat16": 8e-3}
    steps = interpreted["distances"]
    assert len(steps) == 32
    assert [name for name, d in steps.items() if d > bounds[name.split()[-1]]] == []


def test_interpreted_kernels_keep_nan_where_pytorchs_steps_do(interpreted: dict[str, Any]) -> None:
    assert interpreted["nan lost"] == []


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_hopper_without_spills(name: str, dtype: str, tmp_path: Path) -> None:
    from llmfoundry.ops.moe import triton_kernels as moe_triton

    kernel = getattr(moe_triton, name.split()[0])
    constants = {"WIDTH": moe_triton.WIDTH, **KERNELS[name]}
    pointers = dict.fromkeys(getattr(kernel, "arg_names", ()), dtype) | TENSORS
    spilled = compile_for_hopper(kernel, constants, pointers, tmp_path, moe_triton.WARPS)
    assert spilled == ["0", "0"]


def compile_for_hopper(
    kernel: Any, constants: dict[str, Any], types: dict[str, str], folder: Path, warps: int
) -> list[str]:
    """Bytes that a kernel's registers spill, as Hopper's assembler says; its memory fits."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not hasattr(kernel, "arg_names") or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    signature = {a: "constexpr" if a in constants else types[a] for a in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared < SHARED
    ptx, cubin = folder / "kernel.ptx", folder / "cubin"
    ptx.write_text(compiled.asm["ptx"])
    assemble = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "-o"]
    said = subprocess.run(
        [*assemble, str(cubin), str(ptx)], capture_output=True, text=True, check=True
    ).stderr
    return re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
