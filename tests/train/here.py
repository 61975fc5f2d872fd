"""Runs of tests/tiny.py's recipe inside the test's process.

What `scripts/train.py` does after it has read the command line, without the seconds that a process
takes to start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from llmfoundry.cli.commands.train import train
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe


def train_here(name: str, *overrides: str) -> Path:
    """Train runs/<name> of tiny.yaml in the working directory; its folder."""
    train(checked(TrainRecipe, "tiny.yaml", [f"run_name={name}", *overrides]).resolve())
    return Path("runs") / name


def rows(run_folder: Path, metric: str) -> dict[int, dict[str, Any]]:
    """The rows of metrics.jsonl that have a metric, by batch."""
    found = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return {row["time/batch"]: row for row in found if metric in row}


def dtypes(checkpoint: Path) -> dict[str, str]:
    """The dtype of every tensor in a checkpoint, as it lies on the disk."""
    found = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    return {
        name: str(item.properties.dtype)
        for name, item in found.items()
        if hasattr(item, "properties")
    }


def tensors(checkpoint: Path, file: Path) -> dict[str, Any]:
    """All that a checkpoint holds, written to `file` by PyTorch's own converter and read again."""
    dcp_to_torch_save(str(checkpoint), str(file))
    return torch.load(file, weights_only=False)
