"""The parts of a run that stand alone: precisions, and the model before it has memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmfoundry.builders.evaluation import MOST_ROWS, evaluation_rows
from llmfoundry.builders.model import (
    attention_refusal,
    build_autocast,
    build_root,
    experts_refusal,
    loaded_precision,
    matmul_dtype,
    served_precision,
    weight_dtype,
)
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.ops import devices
from llmfoundry.plan import microbatch_sizes
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import write_recipe

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DTYPES = {  # of the weights, and of what a matrix product gives
    "fp32": (torch.float32, torch.float32),
    "amp_bf16": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, torch.bfloat16),
}
EXPERTS = (
    "model.ffn_config={ffn_type: dmoe, mlp_type: glu, ffn_act_fn: silu, ffn_hidden_size: 16,"
    " moe_num_experts: 4, moe_top_k: 2}"
)


@pytest.fixture
def recipe(tmp_path: Path) -> TrainRecipe:
    found = checked(TrainRecipe, write_recipe(tmp_path), ["model.vocab_size=257"])
    assert isinstance(found, TrainRecipe)
    return found.resolve()


@pytest.mark.parametrize("precision", DTYPES)
def test_weights_and_products_have_the_precisions_dtypes(
    precision: str, recipe: TrainRecipe
) -> None:
    weights, products = DTYPES[precision]
    recipe.precision = precision
    root = build_root(recipe)
    assert {p.dtype for p in root.parameters()} == {weights} == {weight_dtype(precision)}
    x = torch.ones(2, 2, dtype=weights)
    with build_autocast(precision, CPU)():
        assert (x @ x).dtype == products == matmul_dtype(precision)


def test_a_model_of_any_size_is_built_without_memory(tmp_path: Path) -> None:
    words = ["model.d_model=65536", "model.n_layers=1", "model.vocab_size=257"]
    root = build_root(checked(TrainRecipe, write_recipe(tmp_path), words).resolve())
    assert {p.device.type for p in root.parameters()} == {"meta"}
    assert max(p.numel() for p in root.parameters()) == 4 * 65536**2  # 64 GiB in one matrix


def test_defaults_are_written_into_a_copy(tmp_path: Path) -> None:
    written = checked(TrainRecipe, write_recipe(tmp_path))
    filled = written.resolve()
    assert written.optimizer.betas is None or filled.optimizer == written.optimizer
    assert written.model.ffn_config.ffn_hidden_size is None
    assert filled.model.ffn_config.ffn_hidden_size == 4 * 32  # LLM Foundry's expansion ratio


@pytest.mark.parametrize(
    ("precision", "device", "has_bf16", "served"),
    [
        ("amp_bf16", CPU, False, "fp32"),
        ("amp_bf16", CPU, True, "amp_bf16"),
        ("amp_bf16", GPU, False, "amp_bf16"),
        ("fp32", CPU, False, "fp32"),
        ("bf16", CPU, False, "bf16"),  # its weights are bfloat16: fp32 would be another run
    ],
)
def test_a_processor_that_would_emulate_bfloat16_computes_in_fp32_and_says_so(
    precision: str,
    device: torch.device,
    has_bf16: bool,
    served: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "HAS_BF16", has_bf16)
    reported: list[str] = []
    assert served_precision(precision, World(0, 1, 0, device), reported.append) == served
    assert len(reported) == (served != precision)
    assert all(line.startswith("precision: fp32 in place of amp_bf16") for line in reported)


@pytest.mark.parametrize(
    ("written", "trained", "device", "loaded"),
    [
        (None, "amp_bf16", GPU, "bf16"),
        (None, "fp32", GPU, "bf16"),
        (None, "bf16", GPU, "bf16"),
        (None, "fp32", CPU, "fp32"),
        (None, "bf16", CPU, "bf16"),
        ("fp32", "bf16", GPU, "fp32"),
        ("fp16", "amp_bf16", CPU, "fp16"),
    ],
)
def test_a_gpu_loads_weights_in_bf16_unless_another_precision_is_written(
    written: str | None, trained: str, device: torch.device, loaded: str
) -> None:
    reported: list[str] = []
    world = World(0, 1, 0, device)
    assert loaded_precision(written, trained, world, reported.append) == loaded
    assert len(reported) == (written is None and loaded != trained)


def test_backends_that_need_a_gpu_are_refused_on_a_cpu(tmp_path: Path, recipe: TrainRecipe) -> None:
    assert attention_refusal(recipe, CPU) is None
    recipe.model.attn_config.attn_impl = "flash"
    assert attention_refusal(recipe, CPU)
    assert experts_refusal(recipe, CPU) is None  # there are none
    words = [EXPERTS, "model.vocab_size=257"]
    mixture = checked(TrainRecipe, tmp_path / "tiny.yaml", words).resolve()
    assert experts_refusal(mixture, CPU) is None
    mixture.model.ffn_config.moe_impl = "megablocks"
    assert experts_refusal(mixture, CPU)


def test_an_evaluation_takes_the_rows_whose_forward_pass_fits(
    recipe: TrainRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that training would fit with, which may have been spread over many machines."""
    recipe.max_seq_len, recipe.device_train_microbatch_size = 64, "auto"
    root, world = build_root(recipe), World(0, 1, 0, CPU)
    held = sum(p.nbytes for p in root.parameters())
    found = []
    for available in (held * 1.2, held * 1.2 + 2**28, 2**40):
        monkeypatch.setattr(
            microbatch_sizes, "available_memory", lambda device, n=available: int(n)
        )
        found.append(evaluation_rows(recipe, root, world))
    assert found[0] == 1 and found == sorted(found) and found[-1] == MOST_ROWS
    recipe.device_train_microbatch_size = 2
    assert evaluation_rows(recipe, root, world) == 2
    monkeypatch.setattr(microbatch_sizes, "available_memory", lambda device: held)
    with pytest.raises(UserError, match="checkpoint: the weights"):
        evaluation_rows(recipe, root, world)
