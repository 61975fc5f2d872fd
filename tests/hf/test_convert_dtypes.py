"""`convert.py from=hf` keeps what a file's dtype means; `generate.py` can be given another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmfoundry.api.conversion import convert
from llmfoundry.builders import open_model
from llmfoundry.cli.commands.generate import generate
from llmfoundry.recipe.after_training import ConvertRecipe, GenerateRecipe
from tests.hf.random_models import CARD, LLAMA, decoder, settings, to_hf, write_tokenizer


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The precisions that text was generated in."""
    seen: list[str] = []
    real = open_model.build_autocast

    def recorded(precision: str, device: torch.device) -> object:
        seen.append(precision)
        return real(precision, device)

    monkeypatch.setattr(open_model, "build_autocast", recorded)
    return seen


def imported(dtype: str, tmp_path: Path) -> str:
    """A run's folder made of an export in `dtype`."""
    tokenizer, out = write_tokenizer(tmp_path / "tokenizer"), tmp_path / "hf"
    to_hf(decoder(settings(**LLAMA)), tokenizer, out, dtype=dtype, card=CARD)
    recipe = ConvertRecipe(checkpoint=str(out), from_="hf", output=str(tmp_path / "run"))
    convert(recipe)
    return str(recipe.output)


@pytest.mark.parametrize(
    ("dtype", "precision"), [("fp32", "fp32"), ("bf16", "amp_bf16"), ("fp16", "fp32")]
)
def test_the_precision_is_what_the_weights_were_stored_in(
    dtype: str, precision: str, tmp_path: Path, reported: list[str]
) -> None:
    run = imported(dtype, tmp_path)
    assert f"\nprecision: {precision}\n" in (Path(run) / "recipe.yaml").read_text()
    for wanted in (None, "amp_bf16", "fp32"):
        generate(GenerateRecipe(checkpoint=run, precision=wanted, max_new_tokens=2))
    assert reported == [precision, "amp_bf16", "fp32"]


def test_a_precision_that_does_not_exist_is_refused() -> None:
    (line,) = GenerateRecipe(checkpoint="x", precision="fp8").check()
    assert line.startswith("precision: 'fp8' is not a choice")
