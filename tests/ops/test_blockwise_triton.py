"""The Triton kernels of 8-bit formats without a GPU: interpreted, and compiled for Hopper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.ahead import HOPPER, compile_for

pytest.importorskip("triton", reason="Triton is not installed")

VALUES = {"int8": "*i8", "fp8": "*fp8e4nv"}


def test_interpreted_kernels_keep_the_formats_definition() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.blockwise_triton_interpreted"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found) == 4
    for name, far in found.items():
        # a bf16 scale that is cut, not rounded; half a step; a bf16 result that is cut
        assert far["scale"] <= 2**-7 and far["value"] <= 1 + 1e-6, name
        assert far["restored"] <= (2**-7 if "bfloat16" in name else 0) and far["lost"] == 0, name


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", ["quantize_kernel", "dequantize_kernel"])
def test_kernels_compile_for_hopper_without_spills(
    name: str, kind: str, dtype: str, tmp_path: Path
) -> None:
    from llmfoundry.ops import blockwise_triton
    from llmfoundry.ops.blockwise import BLOCK, FORMATS, LARGEST

    kernel = getattr(blockwise_triton, name)
    constants = {"WIDTH": blockwise_triton.WIDTH, "BLOCK": BLOCK}
    if name == "quantize_kernel":
        constants["LARGEST"] = LARGEST[FORMATS[kind]]
    pointers = {"x": dtype, "out": dtype, "values": VALUES[kind], "scales": "*bf16", "n": "i64"}
    warps = blockwise_triton.WARPS
    spilled = compile_for(HOPPER, kernel, constants, pointers, tmp_path, warps)
    assert spilled == ["0", "0"]
