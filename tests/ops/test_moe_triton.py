"""The Triton kernels without a GPU: by the interpreter, and compiled ahead of time for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ops.ahead import compile_for

pytest.importorskip("triton", reason="Triton is not installed")

TENSORS = {  # pointers to other than the rows' type
    "order": "*i32",
    "inverse": "*i32",
    "weights": "*fp32",
    "inner": "*fp32",
    "experts": "*i64",
    "ends": "*i32",
    "values": "*fp8e4nv",
    "scales": "*fp32",
    "tiles": "*u8",
    "n_experts": "i32",
    "n_pairs": "i32",
    "n_chunks": "i32",
}
GLU = {"F": 10752, "GATED": True}
COMBINE = {"D": 6144, "K": 4}
KERNELS: dict[str, dict[str, Any]] = {  # DBRX's sizes
    "route_kernel": {"PAIRS": 4096},
    "gather_kernel": {"D": 6144, "K": 4},
    "quantize_kernel": {"D": 6144, "LARGEST": 448.0, "SMALLEST": 1e-12, "EXPONENT": 0x7F800000},
    "quantize_mx_kernel": {"D": 10752, "K": 0, "EXPERTS": 16},
    "quantize_mx_kernel of tokens": {"D": 6144, "K": 4, "EXPERTS": 16},
    "quantize_mx_kernel of many experts": {"D": 7168, "K": 8, "EXPERTS": 256},
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


def test_interpreted_routing_is_pytorchs_sort(interpreted: dict[str, Any]) -> None:
    assert len(interpreted["routes"]) == 7
    assert [name for name, is_equal in interpreted["routes"].items() if not is_equal] == []


def test_interpreted_rows_in_fp8_are_pytorchs(interpreted: dict[str, Any]) -> None:
    assert len(interpreted["quantized"]) == 7
    assert [name for name, is_equal in interpreted["quantized"].items() if not is_equal] == []


def test_interpreted_rows_in_mxfp8_are_pytorchs(interpreted: dict[str, Any]) -> None:
    assert len(interpreted["quantized to mxfp8"]) == 11
    cases = interpreted["quantized to mxfp8"].items()
    assert [name for name, is_equal in cases if not is_equal] == []


@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "*bf16"), (90, "*bf16"), (90, "*fp32"), (100, "*bf16")]
)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_without_spills(
    name: str, capability: int, dtype: str, tmp_path: Path
) -> None:
    from llmfoundry.ops.moe import triton_kernels as moe_triton

    if name.startswith("quantize") and capability < 90:
        pytest.skip("A100 has no e4m3")
    kernel = getattr(moe_triton, name.split()[0])
    arguments = getattr(kernel, "arg_names", ())  # none in the interpreter
    constants = {"WIDTH": moe_triton.WIDTH, **KERNELS[name]}
    constants = {key: value for key, value in constants.items() if key in arguments}
    pointers = dict.fromkeys(arguments, dtype) | TENSORS
    warps = moe_triton.WARPS * (2 if name == "route_kernel" else 1)
    spilled = compile_for(capability, kernel, constants, pointers, tmp_path, warps)
    assert spilled == ["0", "0"]
