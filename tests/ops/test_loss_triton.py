"""The loss kernel without a GPU: interpreted, compiled for three GPUs, and its bytes counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ops.ahead import compile_for

pytest.importorskip("triton", reason="Triton is not installed")

BOUNDS = {"float32": 3e-6, "bfloat16": 2**-7, "float16": 2**-11}  # the interpreter truncates bf16
MODES = {
    "loss": {"STATISTICS": True, "GRADIENT": False},
    "loss and gradient": {"STATISTICS": True, "GRADIENT": True},
    "gradient of a shard": {"STATISTICS": False, "GRADIENT": True},
}


FLAGS = {"IGNORED": -100, "WEIGHTED": True, "CAPPED": True, "SHARDED": True}
TYPES = {
    "logits": "*fp32",
    "labels": "*i64",
    "factors": "*fp32",
    "log_sums": "*fp32",
    "targets": "*fp32",
    "V": "i32",
    "first": "i32",
    "scale": "fp32",
    "softcap": "fp32",
    "z_weight": "fp32",
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What `loss_triton_interpreted` prints."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.loss_triton_interpreted"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_the_interpreted_kernel_is_autograd_of_the_plain_formula(
    interpreted: dict[str, Any],
) -> None:
    found = interpreted["distances"]
    assert len(found) == 20
    for name, (nats, grad) in found.items():
        assert nats < BOUNDS["float32"] and grad < BOUNDS[name.split()[-1]], name


def test_two_ranks_with_a_sharded_head_give_the_plain_formula(interpreted: dict[str, Any]) -> None:
    assert interpreted["sharded"] < 1e-5


def test_a_row_with_nan_inf_or_a_wrong_label_has_no_finite_loss(
    interpreted: dict[str, Any],
) -> None:
    assert interpreted["finite"] == []


def test_the_kernel_moves_at_most_12_bytes_a_logit(interpreted: dict[str, Any]) -> None:
    from torch import bfloat16, float16, float32

    from llmfoundry.ops.loss import logit_traffic

    for dtype, name in (
        (bfloat16, "in bfloat16"),
        (float16, "in float16"),
        (float32, "in float32"),
        (None, "without gradient"),
    ):
        counted = interpreted[f"bytes {name}"]
        assert counted == pytest.approx(logit_traffic(dtype), abs=0.1) and counted < 12.1


@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "*bf16"), (90, "*bf16"), (90, "*fp32"), (100, "*bf16")]
)
@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_compiles_without_spills(
    mode: str, capability: int, dtype: str, tmp_path: Path
) -> None:
    from llmfoundry.ops import loss_triton

    constants = {**FLAGS, **MODES[mode], "WIDTH": loss_triton.WIDTH}
    types = {**TYPES, "grads": dtype}
    kernel, warps = loss_triton.logit_kernel, loss_triton.WARPS
    assert compile_for(capability, kernel, constants, types, tmp_path, warps) == ["0", "0"]
    if mode == "loss":
        return
    # in place: a barrier between the loads of a tile and the store over it, in the same loop
    body = (tmp_path / "kernel.ptx").read_text().rpartition("st.global")[0]
    loop = body[body.rindex("\n$L__BB") :]
    order = re.findall(r"ld\.global|bar\.sync", loop)
    assert "ld.global" in order and order[-1] == "bar.sync"
