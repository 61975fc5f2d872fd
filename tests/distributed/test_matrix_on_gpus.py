"""The layouts of `test_matrix.py` on GPUs: a process on each over NCCL, and two on one over gloo.

Losses, gradient norms and weights are compared with the plain loop on a GPU. `scripts/gpu_check.py`
runs this file, and shows the largest differences; the same code runs on CPUs in `test_matrix.py`,
and here on tensors that are said to be a GPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distributed.layouts import ROUTINE
from tests.distributed.matrix import OWN_GPUS, SHARED_GPU, Found, compare, run_all
from tests.fake_cuda import run_on_fake_cuda
from tests.tiny import losses, run, write_recipe

GPUS = torch.cuda.device_count()
ON_ONE = [name for name, entry in ROUTINE.items() if entry.processes <= 2]
ON_SEVERAL = [name for name, entry in ROUTINE.items() if entry.processes > 1]
Note = Callable[[str, object], None]

# DDP's reducer asks for values, and varlen attention, of bf16, for a GPU's capability
FAKED = [
    name
    for name, entry in ROUTINE.items()
    if entry.precision == "fp32" and (entry.processes == 1 or entry.processes > entry.replicate)
]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(
            ["hsdp-once", "tensor-fsdp", "expert-ulysses-fsdp", "expert-capacity"], id="some"
        ),
        pytest.param(FAKED, id="all", marks=pytest.mark.slow),
    ],
)
def test_a_layouts_step_on_a_gpu_meets_no_tensor_of_another_device(names: list[str]) -> None:
    """Nor does it read a value, but for the row counts of experts without a capacity."""
    reported = run_on_fake_cuda(
        f"from tests.distributed.fake_gpu_matrix import main\nmain({names!r})"
    )
    counted = [" cuda:0" if ROUTINE[name].capacity else "" for name in names]
    expected = [f"{name} cuda:0 cuda:0{more}" for name, more in zip(names, counted, strict=True)]
    assert reported.splitlines() == expected


@pytest.fixture(scope="module")
def found_on_one(tmp_path_factory: pytest.TempPathFactory) -> Found:
    entries = {name: ROUTINE[name] for name in ON_ONE}
    return run_all(entries, tmp_path_factory.mktemp("one"), SHARED_GPU)


@pytest.fixture(scope="module")
def found_on_several(tmp_path_factory: pytest.TempPathFactory) -> Found:
    entries = {name: ROUTINE[name] for name in ON_SEVERAL if ROUTINE[name].processes <= GPUS}
    return run_all(entries, tmp_path_factory.mktemp("several"), OWN_GPUS)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.timeout(600)  # all are computed before the first
@pytest.mark.parametrize("name", ON_ONE)
def test_two_processes_on_one_gpu_over_gloo(
    found_on_one: Found, name: str, record_property: Note
) -> None:
    for what, apart in compare(ROUTINE[name], found_on_one[name], SHARED_GPU).items():
        record_property(what, apart)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ON_SEVERAL)
def test_a_gpu_for_each_process_over_nccl(
    request: pytest.FixtureRequest, name: str, record_property: Note
) -> None:
    if ROUTINE[name].processes > GPUS:
        pytest.skip(f"needs {ROUTINE[name].processes} GPUs, {GPUS} here")
    found = request.getfixturevalue("found_on_several")
    for what, apart in compare(ROUTINE[name], found[name], OWN_GPUS).items():
        record_property(what, apart)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_run_of_two_processes_has_the_losses_of_one(tmp_path: Path, backend: str) -> None:
    """By scripts/train.py, which starts them: on one GPU over gloo, on two over nccl."""
    if backend == "nccl" and GPUS < 2:
        pytest.skip(f"needs 2 GPUs, {GPUS} here")
    write_recipe(tmp_path)
    steps = ("max_duration=4ba", "schedule.t_warmup=1ba", "eval=off", "precision=fp32")
    run("train.py", "tiny.yaml", "run_name=alone", "parallel=single", *steps, cwd=tmp_path)
    spread = ("parallel=fsdp", "parallel.nproc_per_node=2", f"parallel.dist_backend={backend}")
    run("train.py", "tiny.yaml", "run_name=spread", *spread, *steps, cwd=tmp_path)
    expected = losses(tmp_path / "runs" / "alone")
    assert losses(tmp_path / "runs" / "spread") == pytest.approx(expected, rel=1e-5)
