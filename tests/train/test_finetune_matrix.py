"""Ten steps of fine-tuning equal a plain loop over transformers and peft, padded rows and all."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.tiny import ENV, ROOT
from tests.train import matrix
from tests.train.matrix import KINDS, METHODS, Cell

FEW = [
    Cell("llama", "full", "best_fit"),
    Cell("gpt_neox", "full", "best_fit"),
    Cell("llama", "lora", "best_fit"),
]
EVERY = [Cell(*cell) for cell in product(KINDS, METHODS, ("off", "best_fit"))]


def prepared(cell: Cell, folder: Path) -> tuple[Path, Path | None]:
    """The model and, for adapters, peft's folder that both sides begin with."""
    base = matrix.write_model(cell.kind, folder / "base")
    if cell.method == "full":
        return base, None
    return base, matrix.write_adapter(cell.kind, cell.method, base, folder / "adapter")


def compare(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    """Both losses and norms to 1e-5, norms of more than 1 in proportion."""
    assert len(found) == len(expected) == matrix.STEPS
    for (loss, norm), (true_loss, true_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(true_loss, abs=1e-5)
        assert norm == pytest.approx(true_norm, abs=1e-5, rel=1e-5)


def one_process(cell: Cell, folder: Path) -> None:
    base, adapter = prepared(cell, folder)
    matrix.run_steps(matrix.write_cell(cell, folder, base, adapter))
    compare(matrix.steps_of(folder / cell.name), matrix.plain_steps(cell, base, adapter))


@pytest.mark.parametrize("cell", FEW, ids=lambda cell: cell.name)
def test_ten_steps_are_the_plain_loop_s(cell: Cell, tmp_path: Path) -> None:
    one_process(cell, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cell", EVERY, ids=lambda cell: cell.name)
def test_every_cell_is_the_plain_loop_s(cell: Cell, tmp_path: Path) -> None:
    one_process(cell, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_the_plain_loop(kind: str, layout: str, tmp_path: Path) -> None:
    """All of a kind's cells in one start of two processes."""
    shard = {"data_parallel_shard_degree": 2} if layout == "fsdp" else {}
    cells = [cell for cell in EVERY if cell.kind == kind]
    places, recipes = {}, []
    for cell in cells:
        folder = tmp_path / cell.name
        folder.mkdir()
        places[cell] = prepared(cell, folder)
        recipes.append(matrix.write_cell(cell, folder, *places[cell], **shard))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*start, "-m", "tests.train.matrix", *map(str, recipes)]
    done = subprocess.run(words, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    for cell in cells:
        found = matrix.steps_of(tmp_path / cell.name / cell.name)
        compare(found, matrix.plain_steps(cell, *places[cell]))
