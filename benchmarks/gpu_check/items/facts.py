"""What is here: the device, the libraries, and the packages that are not.

Needs nothing but torch, so that it can say what else is lacking.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import torch

from benchmarks.gpu_check.items.measure import Here, Row
from benchmarks.gpu_check.wheels import NEEDED
from llmfoundry.recipe.front.paths import ROOT

GIB = 2**30
OPTIONAL = (
    "pytest",
    "triton",
    "flash_attn",
    "flash_attn_interface",
    "megablocks",
    "grouped_gemm",
)


def facts(here: Here) -> Iterator[Row]:
    """One row.

    Raises:
        SystemExit: CUDA was asked for and has no device; says why.
    """
    if here.device.type == "cuda" and (reason := _no_cuda()):
        raise SystemExit(reason)
    row: Row = {"device": here.device.type}
    row["lacking"] = [wheel for n, wheel in NEEDED.items() if importlib.util.find_spec(n) is None]
    row["modules"] = [n for n in OPTIONAL if importlib.util.find_spec(n) is not None]
    if row["lacking"]:
        yield row
        return
    from benchmarks.harness import libraries, machine
    from llmfoundry.models.counts import peak_flops

    os.chdir(ROOT)  # whose commit is asked for
    row |= {**machine(), "libraries": libraries()}
    if here.device.type == "cuda":
        found = torch.cuda.get_device_properties(here.device)
        row["free GiB"], row["memory GiB"] = (n / GIB for n in torch.cuda.mem_get_info(here.device))
        row["gpus"] = torch.cuda.device_count()
        row["capability"] = f"{found.major}.{found.minor}"
        row["multiprocessors"] = found.multi_processor_count
        row["cuda"] = torch.version.cuda or f"HIP {torch.version.hip}"
        row["peak TFLOP/s"] = (peak_flops(here.device) or 0) / 1e12 or None
    else:
        row["memory GiB"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    yield row


def _no_cuda() -> str:
    """Why CUDA cannot be used; empty: it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA; write device=cpu"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU (nvidia-smi?); write device=cpu"
    try:
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError as error:
        return f"the GPU does not compute: {str(error).splitlines()[0]}"
    return ""
