"""Speeds of a GPU: its data sheet's, or those that a gpu-check.json measured.

`commands/plan.py` asks it. `make gpu-check` writes the file (`benchmarks/gpu_check/`), of which the
device's name and the rates of products and of copies in memory are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.files import read_json
from llmfoundry.plan.seconds import Speeds, speeds
from llmfoundry.recipe.front.hardware import Hardware
from llmfoundry.recipe.front.paths import find_file
from llmfoundry.recipe.hardware import GPUS, known_gpu, short_name
from llmfoundry.recipe.scripts.train import TrainRecipe

DEFAULT = Path("gpu-check/gpu-check.json")
KEY = "gpu_check"


def measured_speeds(
    hardware: Hardware, recipe: TrainRecipe, path: str | None
) -> tuple[Speeds, str]:
    """What such a GPU reaches, and where that is from, for people.

    Args:
        hardware: the GPUs; of a file of the user's, whatever was measured counts.
        recipe: filled.
        path: the value of gpu_check; None: DEFAULT, where it is there and of such a GPU.

    Raises:
        UserError: the file that is asked for cannot be read, or measured another device.
    """
    by_sheet = speeds(hardware.gpu, recipe), "speeds by the data sheet"
    if path is None and not DEFAULT.is_file():
        return by_sheet
    file = DEFAULT if path is None else find_file(path, KEY)
    try:
        device, products, copies = _read(file)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if path is None:
            return by_sheet
        raise UserError(f"{KEY}: {file} is no report of make gpu-check; write another") from error
    if not _is_same(device, hardware):
        if path is None:
            return by_sheet
        raise UserError(
            f"{KEY}: {file} measured {device or 'no GPU'}, but hardware is {hardware.name}; write"
            " the report of such a GPU, or remove it"
        )
    gpu = dataclasses.replace(hardware.gpu, reached=min(1.0, products / hardware.gpu.tflops))
    found = dataclasses.replace(speeds(gpu, recipe), memory=copies * 1e9)
    return found, f"products {products:.0f} TFLOP/s, memory {copies:.0f} GB/s by {file}"


def _is_same(device: str, hardware: Hardware) -> bool:
    key = known_gpu(device)
    if key is None:
        return bool(device) and hardware.name not in _NAMES
    return short_name(key) == hardware.name or hardware.name not in _NAMES


_NAMES = {short_name(key) for key in GPUS}


def _read(file: Path) -> tuple[str, float, float]:
    """The device's name, best TFLOP/s of products, GB/s of copies."""
    content = read_json(file)
    rows = [row for row in _rows(content) if "product" in row]
    products = max(float(row["TFLOP/s"]) for row in rows if "TFLOP/s" in row)
    copies = max(float(row["GB/s"]) for row in rows if "GB/s" in row)
    if not (0 < products < 1e6 and 0 < copies < 1e6):
        raise ValueError("no rates")
    return str(content["facts"].get("gpu", "")), products, copies


def _rows(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for step in content["steps"]:
        for item in step["items"]:
            yield from item["rows"]
