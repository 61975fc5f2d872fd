"""The mixtures of `make bench-moe`: both contenders train the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DbrxForCausalLM

from benchmarks.contenders import SIZES, dbrx
from benchmarks.harness import RECIPE
from llmfoundry.hf.config_keys import write_settings
from llmfoundry.models.counts import parameter_count
from llmfoundry.recipe.load import load
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.train import TrainRecipe


def model_of(size: str, folder: Path) -> ModelConfig:
    """Of the benchmark's recipe, filled as the trainer fills it."""
    path = folder / "bench.yaml"
    path.write_text(RECIPE + SIZES[size].recipe)
    recipe = load(TrainRecipe, path)
    vocab_size = recipe.tokenizer.vocab_size
    return recipe.model.resolve(max_seq_len=recipe.max_seq_len, vocab_size=vocab_size)


@pytest.mark.parametrize("size", SIZES)
def test_both_have_as_many_parameters(size: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        theirs = DbrxForCausalLM(dbrx(SIZES[size]))
    count = sum(p.numel() for p in theirs.parameters())
    assert parameter_count(model_of(size, tmp_path)) == count


@pytest.mark.parametrize("size", SIZES)
def test_the_export_of_ours_has_the_settings_of_theirs(size: str, tmp_path: Path) -> None:
    """The balancing loss too: the export divides its weight as the benchmark does."""
    theirs = dbrx(SIZES[size]).to_dict()
    written = write_settings(model_of(size, tmp_path), "DbrxForCausalLM")
    del written["architectures"], written["rope_theta"]  # the rotary base is in rope_parameters too
    differ = {key: (mine, found) for key, mine, found in compared(written, theirs) if mine != found}
    assert not differ


def compared(mine: dict[str, Any], theirs: dict[str, Any], at: str = "") -> list[tuple]:
    """Every key of `mine` in sections: its dotted name, its value, theirs."""
    rows = []
    for key, value in mine.items():
        other = theirs.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            rows += compared(value, other, f"{at}{key}.")
        else:
            rows.append((f"{at}{key}", value, other))
    return rows
