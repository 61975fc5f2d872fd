"""Runs whose base is in 4 bits: what their checkpoints hold, how they resume, what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from llmfoundry.api.conversion import convert
from llmfoundry.builders.checkpoint import load_checkpoint
from llmfoundry.builders.pretrained import fill_model, open_pretrained
from llmfoundry.cli.commands.train import train
from llmfoundry.distributed.process_group import ALONE, World
from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.quantized import quantize_frozen
from llmfoundry.recipe.adapter import PretrainedConfig
from llmfoundry.recipe.after_training import ConvertRecipe
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from tests.models.test_decoder import make_config, make_model
from tests.models.test_quantized import GLU
from tests.tiny import losses, write_finetune, write_recipe
from tests.train.here import dtypes, tensors, train_here

Finetune = Callable[..., Path]


@pytest.fixture(scope="module")
def finetune(tmp_path_factory: pytest.TempPathFactory) -> Finetune:
    """Trains runs/NAME from runs/base, a mixture of experts, in 4 bits."""
    folder = tmp_path_factory.mktemp("quantized")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_recipe(folder)
        path = write_finetune(folder, train_here)

    def run(name: str, *words: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            train(checked(FinetuneRecipe, str(path), [f"run_name={name}", *words]).resolve())
        return folder / "runs" / name

    return run


@pytest.mark.parametrize("precision", ["amp_bf16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_run_that_resumes_has_the_losses_of_one_that_was_not_stopped(
    finetune: Finetune, precision: str
) -> None:
    how = (f"precision={precision}", "max_duration=4ba", "save_interval=2ba")
    whole = finetune(f"whole-{precision}", *how)
    parts = whole.with_name(f"parts-{precision}")
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "ba0000004")
    (parts / "metrics.jsonl").unlink()
    assert finetune(parts.name, *how) == parts
    after = {batch: loss for batch, loss in losses(whole).items() if batch > 2}
    assert losses(parts) == after and len(after) == 2
    states = [folder / "checkpoints" / "ba0000004" for folder in (whole, parts)]
    first, second = (tensors(state, state.with_suffix(".pt")) for state in states)
    assert first["model"].keys() == second["model"].keys()
    for name, tensor in first["model"].items():
        assert torch.equal(tensor, second["model"][name]), name


def test_a_checkpoint_holds_the_adapter_and_nothing_of_the_base(finetune: Finetune) -> None:
    run = finetune("held", "max_duration=2ba", "precision=amp_bf16")
    found = dtypes(run / "checkpoints" / "ba0000002")
    assert found and all("lora_" in name for name in found if name.startswith("model."))
    assert set(found.values()) == {"torch.float32"}


@pytest.mark.slow
def test_what_is_loaded_computes_with_the_quantised_base(finetune: Finetune) -> None:
    run = finetune("loaded", "max_duration=2ba")
    alone = World(0, 1, 0, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run.parents[1])
        found = load_checkpoint(str(run), alone, note=print).root.model
        plain = load_checkpoint("runs/base", alone, note=print).root.model
    attn, theirs = found.blocks[0].attn.Wqkv, plain.blocks[0].attn.Wqkv.weight
    assert attn.weight.dtype == torch.uint8
    error = (attn.dense() - theirs).norm() / theirs.norm()
    assert 0.05 < error < 0.13  # of 4 bits


NF4 = (  # of the paper (Dettmers et al., 2023, appendix E)
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def nearest(weight: Tensor) -> Tensor:
    """Each value the nearest of the paper's sixteen, times the largest of its 64; all compared."""
    blocks = weight.float().reshape(-1, 64)
    scales, table = blocks.abs().amax(1, keepdim=True), torch.tensor(NF4)
    each = (blocks.double() / scales)[..., None] - table.double()
    return (table[each.abs().argmin(-1)] * scales).view(weight.shape)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("amp_bf16", marks=pytest.mark.slow)])
def test_weights_are_quantised_from_fp32_and_not_from_their_bf16_rounding(
    finetune: Finetune, precision: str
) -> None:
    words = ("model.double_quantize=false", f"precision={precision}", "max_duration=1ba")
    run = finetune(f"exact-{precision}", *words)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run.parents[1])
        held = load_checkpoint(str(run), ALONE, note=print).root.model
        plain = load_checkpoint("runs/base", ALONE, note=print).root.model
    for block, source in zip(held.blocks, plain.blocks, strict=True):
        for name in ("Wqkv", "out_proj"):
            weight = getattr(source.attn, name).weight.detach()
            assert torch.equal(getattr(block.attn, name).dense(), nearest(weight))
            assert not torch.equal(nearest(weight), nearest(weight.bfloat16()))


@pytest.mark.parametrize(
    "how",
    [
        ("precision=fp32",),
        ("precision=amp_bf16", "model.quantize=none"),
        pytest.param(("precision=amp_bf16",), marks=pytest.mark.slow),
    ],
)
def test_a_run_that_begins_with_an_adapter_s_has_what_convert_merges(
    finetune: Finetune, how: tuple[str, ...]
) -> None:
    """The base as it was trained, dequantised or rounded, not as its own run has it."""
    name = "-".join(word.partition("=")[2] for word in how)
    run = finetune(name, *how, "max_duration=2ba", "optimizer.lr=0.1")
    words = [f"checkpoint={run}", "to=hf", f"output={run}-hf", "dtype=fp32"]
    states = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run.parents[1])
        convert(checked(ConvertRecipe, None, [*words, "architecture=llmfoundry"]))
        for pretrained in (run, f"{run}-hf"):
            asked = PretrainedConfig(pretrained=str(pretrained))
            found = open_pretrained(asked, ALONE, note=print)
            model = Decoder(found.config)
            found.fill(model)
            states.append(model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=0, atol=1e-6)


def test_another_quantisation_than_the_checkpoints_is_refused(finetune: Finetune) -> None:
    finetune("mine", "max_duration=1ba")
    for words, said in {
        ("model.quantize=none",): "model.quantize: none, but checkpoint .* was trained with nf4",
        ("model.double_quantize=false",): "model.double_quantize: False, but checkpoint",
    }.items():
        with pytest.raises(UserError, match=said):
            finetune("mine", "max_duration=2ba", *words)


def test_a_quantised_base_under_full_fine_tuning_is_refused(finetune: Finetune) -> None:
    with pytest.raises(UserError, match=r"model.quantize: nf4 keeps matrices that cannot train"):
        finetune("full", "adapter={name: none}")
    with pytest.raises(UserError, match=r"model.double_quantize: has no effect with model.q"):
        finetune("none", "model.quantize=none", "model.double_quantize=true")


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    source = make_model(make_config(**GLU))
    model = Decoder(source.config).requires_grad_(False)
    quantize_frozen(model, double=True)
    with torch.no_grad():
        source.blocks[1].ffn.down_proj.weight[3, 5] = torch.inf
    with pytest.raises(UserError, match=r"blocks\.1\.ffn\.down_proj\.weight holds values that"):
        fill_model(model, source.state_dict().items())


@pytest.mark.slow
def test_the_recipe_that_the_fixture_writes_is_quantised(finetune: Finetune) -> None:
    run = finetune("recipe", "max_duration=1ba")
    written = yaml.safe_load((run / "checkpoints" / "ba0000001" / "recipe.yaml").read_text())
    assert written["model"]["quantize"] == "nf4"
