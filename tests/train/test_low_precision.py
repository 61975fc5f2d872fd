"""Moments in 2 bytes and 1, and products in fp8: beside torchao's own, formulas and fp32."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.float8 import float8_refusal, use_float8, use_float8_experts
from llmfoundry.models.moe import MoE
from llmfoundry.ops.moe import fp8
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.optimizer import OptimizerConfig
from llmfoundry.recipe.typed import build
from llmfoundry.train.optim import low_precision
from llmfoundry.train.optim.low_precision import LowPrecisionAdamW
from llmfoundry.train.optim.optimizers import new_optimizer
from tests.tiny import write_recipe
from tests.train.here import dtypes, rows, train_here

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.yaml."""
    folder = tmp_path_factory.mktemp("low")
    write_recipe(folder)
    return folder


def _weights(make: Any, *, steps: int, width: int = 256) -> list[Tensor]:
    """Weights after some steps on random gradients, a long vector among them."""
    draws = torch.Generator().manual_seed(5)
    weights = [torch.randn(24, width, generator=draws), torch.randn(64, generator=draws)]
    parameters = [nn.Parameter(weight) for weight in weights]
    optimizer = make(parameters)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draws)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def test_int8_moments_are_torchao_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its AdamW8bit without the compiler: rows of one block are its blocks too."""
    optim = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    theirs = _weights(lambda p: optim.AdamW8bit(p, **SETTINGS), steps=12)
    ours = _weights(lambda p: LowPrecisionAdamW(p, moments="int8", **SETTINGS), steps=12)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moments, far", [("bf16", 2e-3), ("int8", 2e-2)])
def test_weights_stay_near_those_of_fp32_moments(moments: str, far: float) -> None:
    exact = _weights(lambda p: torch.optim.AdamW(p, **SETTINGS), steps=30, width=512)
    settings = SETTINGS | {"moments": moments}
    near = _weights(lambda p: LowPrecisionAdamW(p, **settings), steps=30, width=512)
    moved = 30 * SETTINGS["lr"]  # at most
    for own, other in zip(near, exact, strict=True):
        assert 0 < (own - other).abs().mean() / moved < far


def test_rounding_by_chance_is_right_on_average_and_the_same_again() -> None:
    between = torch.full((200_000,), 1 + 2**-7 / 4)  # a quarter of the way to the next bfloat16
    step = torch.tensor(3.0)
    rounded = low_precision._to_bfloat16(between, step, 7)
    share = (rounded.float() - 1).mean() / 2**-7
    assert share.item() == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / 200_000) ** 0.5)
    assert torch.equal(rounded, low_precision._to_bfloat16(between, step, 7))
    for other in (low_precision._to_bfloat16(between, step + 1, 7), rounded.roll(1)):
        same = (rounded == other).float().mean().item()  # of independent draws: 0.25² + 0.75²
        assert same == pytest.approx(0.625, abs=0.01)


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_a_step_that_is_not_finite_changes_nothing(moments: str) -> None:
    config = OptimizerConfig(name="adamw", moments=moments)
    config.fill()
    weight = nn.Parameter(torch.randn(16, 256))
    optimizer = new_optimizer([weight], config)
    for stop in (0.0, 1.0):
        before = [weight.detach().clone(), *(t.clone() for t in optimizer.state[weight].values())]
        weight.grad = torch.full_like(weight, float("nan") if stop else 1.0)
        optimizer.found_inf = torch.tensor(stop)  # type: ignore[attr-defined]
        optimizer.step()
    after = [weight.detach(), *optimizer.state[weight].values()]
    assert len(before) == len(after) > 2
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("moments", [None, "bf16", "int8"])
def test_the_estimate_is_what_the_optimizer_holds(moments: str | None) -> None:
    config = OptimizerConfig(moments=moments)
    config.fill()
    weight = nn.Parameter(torch.randn(64, 512))
    optimizer = new_optimizer([weight], config)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    held = sum(t.nbytes for t in optimizer.state[weight].values() if t.numel() > 1)
    assert held == config.moment_bytes(4) * weight.numel()


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_a_resumed_run_repeats_the_whole_one(
    place: Path, monkeypatch: pytest.MonkeyPatch, moments: str
) -> None:
    monkeypatch.chdir(place)
    settings = (f"optimizer.moments={moments}", "eval=off", "max_duration=6ba")
    settings += ("model.d_model=64", "callbacks.lr_monitor=false")
    whole = train_here(f"whole-{moments}", *settings)
    part = Path("runs") / f"part-{moments}"
    (part / "checkpoints").mkdir(parents=True)
    shutil.copytree(whole / "checkpoints" / "ba0000004", part / "checkpoints" / "ba0000004")
    train_here(part.name, *settings)
    saved = dtypes(whole / "checkpoints" / "ba0000006")
    kinds = {kind for name, kind in saved.items() if name.startswith("optimizer.")}
    assert kinds == {"torch.float32", {"bf16": "torch.bfloat16", "int8": "torch.uint8"}[moments]}
    for batch in (5, 6):
        found = [rows(run, "loss/train/total")[batch] for run in (whole, part)]
        for name in ("loss/train/total", "l2_norm/grad/global"):
            assert found[0][name] == found[1][name]


def test_moments_of_another_kind_are_refused_in_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    run = train_here("kind", "eval=off", "max_duration=4ba", "model.d_model=64")
    settings = ("load_path=" + str(run), "eval=off", "max_duration=6ba", "model.d_model=64")
    with pytest.raises(UserError, match=r"^optimizer.moments: int8, but checkpoint .* was"):
        train_here("other", *settings, "optimizer.moments=int8")


def _decoder(**settings: Any) -> Decoder:
    config = ModelConfig(
        **{"d_model": 64, "n_layers": 2, "n_heads": 2, "vocab_size": 250} | settings
    )
    config = config.resolve(max_seq_len=64)
    model = Decoder(config)
    model.init_weights(3)
    return model


def _rounded(x: Tensor, dim: int | None) -> Tensor:
    """To e4m3 and back; a scale has its greatest number for the largest of all, or of a row."""
    most = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = 448.0 / most.clamp(min=1e-12)
    scale = scale if dim is None else scale.log2().floor().exp2()  # torchao's, of rows
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


@pytest.mark.parametrize("recipe, dim", [("rowwise", -1), ("tensorwise", None)])
def test_a_product_is_that_of_rounded_values(recipe: str, dim: int | None) -> None:
    pytest.importorskip("torchao.float8")
    model = _decoder()
    before = {name: p for name, p in model.named_parameters()}
    names = use_float8(model, recipe, emulate=True)
    assert len(names) == 2 * 4 and all(".attn." in name or ".ffn." in name for name in names)
    assert {name: p for name, p in model.named_parameters()} == before  # the same objects
    layer = model.get_submodule("blocks.0.attn.out_proj")
    x, weight = torch.randn(5, 64), layer.weight.detach()
    found = layer(x).detach() - (0 if layer.bias is None else layer.bias.detach())
    wanted = _rounded(x, dim) @ _rounded(weight, dim).T
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
    assert (found - x @ weight.T).abs().max() > 1e-3, "not computed in full precision"


MIXTURE = {"ffn_type": "dmoe", "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}


def test_router_and_head_stay_as_they_are_and_experts_are_told() -> None:
    pytest.importorskip("torchao.float8")
    model = _mixture(MIXTURE | {"shared_expert_hidden_size": 32})
    names = use_float8(model, "rowwise", emulate=True)
    assert len(names) == 4 and all(".attn." in name or ".ffn.shared." in name for name in names)
    (layer,) = (module for module in model.modules() if isinstance(module, MoE))
    assert "Hopper" in str(use_float8_experts(model, torch.device("cpu"), emulate=False))
    assert layer.experts.experts().fp8 is None
    assert use_float8_experts(model, torch.device("cpu"), emulate=True) is None
    assert layer.experts.experts().fp8 == "rowwise_emulated"


@pytest.mark.parametrize(
    ("capability", "width", "emulate", "method", "reason"),
    [
        ((9, 0), 48, False, "rowwise", None),
        ((10, 0), 64, False, "mxfp8", None),
        ((10, 3), 64, True, "mxfp8_emulated", None),
        (
            (10, 0),
            48,
            False,
            None,
            r"^blocks\.0\.ffn\.experts is 48 x 64, and mxfp8 .* of 32$",
        ),
        ((12, 0), 64, False, None, r"capability 9 .* and 10 .*, and this is 12\.0$"),
    ],
)
def test_a_gpu_chooses_how_experts_multiply(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    width: int,
    emulate: bool,
    method: str | None,
    reason: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(fp8, "fault", lambda device, steps: None)
    model = _mixture(MIXTURE | {"ffn_hidden_size": width})
    found = use_float8_experts(model, torch.device("cuda"), emulate=emulate)
    assert found is None if reason is None else re.search(reason, str(found))
    (layer,) = (module for module in model.modules() if isinstance(module, MoE))
    assert layer.experts.fp8 == method


def test_experts_stay_bf16_where_the_mxfp8_of_a_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no CUDA here, which is as good as a PyTorch without the kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    model = _mixture(MIXTURE)
    with torch.device("meta"):  # where the trainer builds models
        found = use_float8_experts(model, torch.device("cuda"), emulate=False)
    if not torch.cuda.is_available():
        assert str(found).startswith("PyTorch's MXFP8 matmul failed: ")
    (layer,) = (module for module in model.modules() if isinstance(module, MoE))
    assert layer.experts.fp8 == (None if found else "mxfp8")


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"moe_impl": "torch"}, "moe_impl: grouped_mm, not torch"), ({"ffn_hidden_size": 40}, None)],
)
def test_experts_that_fp8_does_not_take(changed: dict[str, Any], said: str | None) -> None:
    model, cpu = _mixture(MIXTURE | changed), torch.device("cpu")
    if said is not None:
        assert said in str(use_float8_experts(model, cpu, emulate=True))
        return
    with pytest.raises(UserError, match=r"^precision: amp_fp8: blocks\.0\.ffn\.experts is 40 x 64"):
        use_float8_experts(model, cpu, emulate=True)


def _mixture(ffn: dict[str, Any]) -> Decoder:
    problems: list[Any] = []
    values = {"d_model": 64, "n_layers": 1, "n_heads": 2, "vocab_size": 250, "no_bias": True}
    config = build(ModelConfig, values | {"ffn_config": ffn}, problems)
    assert not problems
    config = config.resolve(max_seq_len=64)
    return Decoder(config)


def test_fp8_is_refused_where_it_cannot_be(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the device, by a layer's size, and beside what it does not know."""
    monkeypatch.chdir(place)
    with pytest.raises(UserError, match="precision: amp_fp8: a CPU has no fp8 matmuls; write"):
        train_here("cpu", "precision=amp_fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert "compute capability 8.0" in str(float8_refusal(torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert float8_refusal(torch.device("cuda")) is None
    with pytest.raises(UserError, match=r"blocks\.0\.attn\.Wqkv is 120 x 40"):
        train_here("odd", "precision=amp_fp8", "fp8_emulate=true", "model.d_model=40")
    for override, said in (
        ("fp8_recipe=rowwise", "has no effect with precision: fp32, only with amp_fp8"),
        ("precision=amp_fp8 parallel.tensor_parallel_degree=2", "tensor_parallel_degree: 2"),
        ("optimizer.name=muon optimizer.moments=int8", "only with decoupled_adamw or adamw"),
    ):
        with pytest.raises(UserError, match=said):
            train_here("refused", *override.split())


def test_a_run_in_fp8_keeps_fp32_weights_and_learns(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao.float8")
    monkeypatch.chdir(place)
    settings = ("eval_interval=4ba", "max_duration=8ba")
    low = train_here("fp8", "precision=amp_fp8", "fp8_emulate=true", *settings)
    full = train_here("fp32", *settings)
    losses = [
        {batch: row["loss/train/total"] for batch, row in rows(run, "loss/train/total").items()}
        for run in (low, full)
    ]
    assert losses[0] != losses[1]
    assert losses[0][8] == pytest.approx(losses[1][8], rel=0.02)
    kinds = dtypes(low / "checkpoints" / "ba0000008")
    assert {kinds[name] for name in kinds if name.startswith("model.")} == {"torch.float32"}
