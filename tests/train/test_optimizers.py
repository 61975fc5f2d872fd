"""Parameter groups, frozen parameters and Muon, each against PyTorch's own optimizers."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import _muon

from llmfoundry.builders.model import matmul_dtype
from llmfoundry.checkpoint.load import load_training_state
from llmfoundry.checkpoint.save import Checkpointer, Contents, Reports, SavePolicy
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.packed_layout import Batch, PackedLayout
from llmfoundry.recipe.optimizer import (
    OPTIMIZERS,
    GradientClippingConfig,
    OptimizerConfig,
    ParamGroupConfig,
)
from llmfoundry.train.optim import muon
from llmfoundry.train.optim.optimizers import build_optimizer, freeze
from llmfoundry.train.step import Guard, StepSettings, clip_adaptive, train_step
from tests.models.test_decoder import CHAIN, make_config
from tests.selection import slow_but

CPU = torch.device("cpu")
GQA = {"attn_type": "grouped_query_attention", "kv_n_heads": 2, "qk_ln": True, "rope": True}
GROUPS = [
    ParamGroupConfig(r"norm|bias$|_ln\.", lr=0.02, weight_decay=0.0),
    ParamGroupConfig(r"^blocks\.0\.", lr=0.004, weight_decay=0.3),
]


def make_optimizer_config(name: str, **settings: Any) -> OptimizerConfig:
    config = OptimizerConfig(**({"name": name, "lr": 0.01, "weight_decay": 0.1} | settings))
    assert list(config.check()) == []
    config.fill()
    return config


def make_model(**settings: object) -> Decoder:
    model = Decoder(make_config(attn_config=GQA, **settings))
    model.init_weights(3)
    return model


def make_gradients(model: Decoder, steps: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
        for _ in range(steps)
    ]


def run(model: Decoder, optimizer: torch.optim.Optimizer, gradients: list[Any]) -> None:
    """Steps with a warm-up of two, as the trainer does it."""
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step, gradient in enumerate(gradients):
        for name, parameter in model.named_parameters():
            parameter.grad = gradient[name].clone() if parameter.requires_grad else None
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * (0.5 if step == 0 else 1.0)
        optimizer.step()


def lion_steps(weight: Tensor, gradients: list[Tensor], lr: float, decay: float) -> Tensor:
    """Lion written out, with run's warm-up."""
    weight, mean = weight.clone(), torch.zeros_like(weight)
    for step, g in enumerate(gradients):
        factor = 0.5 if step == 0 else 1.0
        weight *= 1 - decay * factor
        weight -= lr * factor * torch.sign(0.9 * mean + 0.1 * g)
        mean = 0.99 * mean + 0.01 * g
    return weight


@pytest.mark.parametrize("name", ["adamw", "decoupled_adamw", "decoupled_lionw"])
def test_every_group_has_its_own_values(name: str) -> None:
    """As if each parameter had an optimizer by itself; the first group that matches takes it."""
    model = make_model(n_layers=3)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients = make_gradients(model, 3)
    config = make_optimizer_config(name, param_groups=GROUPS)
    optimizer = build_optimizer(model, config)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    assert sum(sizes) == len(before) and len(sizes) == 3
    run(model, optimizer, gradients)
    for path, parameter in model.named_parameters():
        lr, decay = 0.01, 0.1
        if "norm" in path or path.endswith("bias") or "_ln." in path:
            lr, decay = 0.02, 0.0
        elif path.startswith("blocks.0."):
            lr, decay = 0.004, 0.3
        own = [gradient[path] for gradient in gradients]
        if name == "decoupled_lionw":
            expected = lion_steps(before[path], own, lr, decay)
        else:
            expected = before[path].clone().requires_grad_()
            scaled = decay / lr if name == "decoupled_adamw" else decay
            alone = torch.optim.AdamW([expected], betas=(0.9, 0.95), weight_decay=scaled)
            for step, g in enumerate(own):
                alone.param_groups[0]["lr"] = lr * (0.5 if step == 0 else 1.0)
                expected.grad = g
                alone.step()
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6, msg=path)


def test_the_rest_comes_first_and_is_left_out_where_nothing_is_left() -> None:
    model = make_model()
    config = make_optimizer_config(
        "adamw", param_groups=[ParamGroupConfig("wte", betas=[0.8, 0.9])]
    )
    rest, wte = build_optimizer(model, config).param_groups
    assert [p is model.wte.weight for p in wte["params"]] == [True]
    assert (wte["betas"], rest["betas"]) == ((0.8, 0.9), (0.9, 0.95))
    config.param_groups = [ParamGroupConfig(".", lr=0.5)]
    (only,) = build_optimizer(model, config).param_groups
    assert only["lr"] == 0.5 and len(only["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"param_groups": [ParamGroupConfig("Wqvk", lr=1.0)]},
            r"^optimizer.param_groups\[0\].param_str_match: 'Wqvk' is found in no parameter's name;"
            r" the nearest are blocks.0.attn.Wqkv.(weight|bias), ",
        ),
        (
            {"param_groups": [GROUPS[0], ParamGroupConfig("norm_f", lr=1.0)]},
            r"^optimizer.param_groups\[1\].param_str_match: all that 'norm_f' matches is frozen or",
        ),
        (
            {"param_groups": [ParamGroupConfig("out_proj.weight", eps=1e-6)]},
            r"^optimizer.param_groups\[0\].eps: has no effect, as all of the group is Muon's",
        ),
    ],
)
def test_a_group_without_effect_is_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        build_optimizer(make_model(), make_optimizer_config("muon", **settings))


def test_what_is_frozen_must_exist_and_leave_something() -> None:
    config = make_optimizer_config("adamw", disable_grad=["wte", "transformer"])
    with pytest.raises(UserError, match=r"^optimizer.disable_grad\[1\]: 'transformer' is found in"):
        freeze(make_model(), config)
    with pytest.raises(UserError, match=r"^optimizer.disable_grad: matches every parameter"):
        freeze(make_model(), make_optimizer_config("adamw", disable_grad=["blocks", "wte|norm_f"]))


def make_batch() -> Batch:
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    return Batch(
        tokens, tokens.roll(-1, 1), PackedLayout.from_lengths([[16], [5, 11], [16], [8, 8]])
    )


def step(
    root: Root, optimizer: torch.optim.Optimizer, number: int, guard: Guard | None = None
) -> None:
    train_step(
        root,
        optimizer,
        make_batch(),
        StepSettings(microbatch=3, autocast=nullcontext, clipping=GradientClippingConfig()),
        number=number,
        guard=guard or Guard(CPU),
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_parameters_stay_and_the_others_get_the_same_gradients(name: str) -> None:
    free, model = make_model(), make_model()
    config = make_optimizer_config(name, disable_grad=["wte", r"blocks\.0\.attn", "norm_1"])
    freeze(model, config)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    assert len(frozen) == 1 + 8 + 4  # wte; Wqkv, out_proj, q_ln, k_ln; both layers' norm_1
    batch, found = make_batch(), []
    for one in (free, model):
        one.loss(one(batch.tokens, batch.layout), batch.labels).backward()
        found.append({n: p.grad for n, p in one.named_parameters()})
    for path, gradient in found[1].items():
        if path in frozen:
            assert gradient is None
        else:
            torch.testing.assert_close(gradient, found[0][path], rtol=1e-5, atol=1e-6, msg=path)
    optimizer = build_optimizer(model, config)
    step(Root(model), optimizer, 1)
    for path, parameter in model.named_parameters():
        assert (parameter in optimizer.state) == (path not in frozen)
        if path in frozen:
            assert torch.equal(parameter, frozen[path])


@pytest.mark.parametrize(
    ("settings", "n_matrices"),
    [
        ({"ffn_config": {"ffn_type": "mptglu"}, "tie_word_embeddings": False}, 2 * 5),
        ({"n_layers": 3, "block_overrides": CHAIN}, 3 * 4),  # with layers that have Wq alone
    ],
)
def test_muon_is_pytorchs_muon_on_each_matrix_and_adamw_elsewhere(
    settings: dict[str, object], n_matrices: int
) -> None:
    model = make_model(**settings)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients = make_gradients(model, 4)
    optimizer = build_optimizer(model, make_optimizer_config("muon"), matmul_dtype=torch.bfloat16)
    run(model, optimizer, gradients)
    found = 0
    for path, parameter in model.named_parameters():
        heights = [parameter.shape[0]]
        if path.endswith("Wqkv.weight"):
            heights = [24, 12, 12]  # 4 query heads and 2 of keys and values, each of 6
        is_muon = path.startswith("blocks.") and parameter.ndim == 2
        parts = [part.clone().requires_grad_() for part in before[path].split(heights)]
        if is_muon:
            alone: Any = torch.optim.Muon(parts, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        else:
            alone = torch.optim.AdamW(parts, betas=(0.9, 0.95), weight_decay=0.1)
        for number, gradient in enumerate(gradients):
            alone.param_groups[0]["lr"] = 0.01 * (0.5 if number == 0 else 1.0)
            for part, g in zip(parts, gradient[path].split(heights), strict=True):
                part.grad = g.clone()
            alone.step()
        expected = torch.cat(parts).detach()
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-7, msg=path)
        found += is_muon
    assert found == n_matrices


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("amp_bf16", torch.bfloat16), ("bf16", torch.bfloat16)],
)
def test_muon_multiplies_in_the_recipes_precision(
    precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = set()

    newton_schulz = muon.orthogonal

    def spy(matrices: Tensor) -> Tensor:
        computed.add(matrices.dtype)
        return newton_schulz(matrices)

    monkeypatch.setattr(muon, "orthogonal", spy)
    model, config = make_model(), make_optimizer_config("muon")
    optimizer = build_optimizer(model, config, matmul_dtype=matmul_dtype(precision))
    run(model, optimizer, make_gradients(model, 1))
    assert computed == {dtype}


def orthogonal(matrix: Tensor) -> Tensor:
    return muon.orthogonal(matrix[None])[0]


def error(found: Tensor, expected: Tensor) -> float:
    """The relative distance of two matrices."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 32)])
def test_orthogonalization_is_pytorchs_in_bf16_and_exact_in_fp32(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    settings = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "eps": 1e-7}
    theirs = _muon._zeropower_via_newtonschulz(matrix, **settings)
    exact = orthogonal(matrix.double())
    assert torch.equal(orthogonal(matrix.bfloat16()), theirs)
    assert error(theirs, exact) < 0.03
    assert error(orthogonal(matrix), exact) < 3e-6


def test_orthogonalization_amplifies_rounding_of_gradients_in_bf16_alone() -> None:
    """Sums in another order, as on another layout, differ in their last bit."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(192, 192, generator=generator)
    nudged = matrix * (1 + 6e-8 * torch.randn(matrix.shape, generator=generator))
    assert 1e-8 < error(nudged, matrix) < 2e-7
    assert error(orthogonal(nudged), orthogonal(matrix)) < 5e-6
    assert error(orthogonal(nudged.bfloat16()), orthogonal(matrix.bfloat16())) > 1e-3


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 32)])
def test_an_orthogonal_update_has_the_directions_of_the_svd(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix).float()
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.25 and values[: len(values) * 9 // 10].min() > 0.6
    cosine = (found * (u @ vh)).sum() / found.norm() / (u @ vh).norm()
    assert cosine > 0.97


def test_an_update_of_muon_is_as_large_as_one_of_adamw() -> None:
    """Root mean square 0.2 (Liu et al., 2025), whatever the shape."""
    model = make_model(d_model=64)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(model, make_optimizer_config("muon", weight_decay=0.0))
    run(model, optimizer, make_gradients(model, 1))
    for path in ("blocks.0.ffn.up_proj.weight", "blocks.1.attn.out_proj.weight"):
        moved = model.get_parameter(path) - before[path]
        assert moved.square().mean().sqrt().item() == pytest.approx(0.2 * 0.005, rel=0.15)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_not_finite_changes_nothing(name: str) -> None:
    model = make_model()
    root, guard = Root(model), Guard(CPU)
    config = make_optimizer_config(name, param_groups=GROUPS, disable_grad=["wte"])
    freeze(model, config)
    optimizer = build_optimizer(model, config)
    step(root, optimizer, 0, guard)

    def everything() -> list[Tensor]:
        states = [s for p in model.parameters() for s in optimizer.state.get(p, {}).values()]
        return [t.detach().clone() for t in [*model.parameters(), *states]]

    before = everything()
    handle = model.norm_f.register_forward_hook(lambda m, i, out: out * float("inf"))
    step(root, optimizer, 1, guard)
    handle.remove()
    assert guard.first_bad() == 1
    after = everything()
    assert len(after) == len(before) > 2 * len(list(model.parameters())) - 3
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("name", slow_but(["muon"], OPTIMIZERS))
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = make_optimizer_config(name, param_groups=GROUPS, disable_grad=["out_proj", "norm_f"])

    def start(seed: int) -> tuple[Root, torch.optim.Optimizer]:
        model = make_model()
        model.init_weights(seed)
        freeze(model, config)
        return Root(model), build_optimizer(model, config)

    root, optimizer = start(3)
    for number in range(4):
        step(root, optimizer, number)
    lrs = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # as a schedule leaves it
    saver = Checkpointer(
        Storage(tmp_path),
        World(0, 1, 0, CPU),
        Contents({}, {}),
        SavePolicy(keep=-1, background=False, max_failures=1),
        Reports(print),
    )
    folder = saver.save(4, root.model, optimizer, {})
    other, resumed = start(4)
    load_training_state(Checkpoint.at(folder), other.model, resumed, world=World(0, 1, 0, CPU))
    assert [group["lr"] for group in resumed.param_groups] == lrs
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr
    for number in range(4, 8):
        step(root, optimizer, number)
        step(other, resumed, number)
    for ours, theirs in zip(other.parameters(), root.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        mine, their = resumed.state.get(ours, {}), optimizer.state.get(theirs, {})
        assert mine.keys() == their.keys() and bool(mine) == ours.requires_grad
        assert all(torch.equal(mine[key], their[key]) for key in mine)


@pytest.mark.parametrize("then", ["plain", "grouped"])
def test_a_resume_takes_all_but_moments_from_the_recipe(then: str, tmp_path: Path) -> None:
    """Groups may come and go between a checkpoint and its continuation, and values change."""
    grouped = make_optimizer_config("decoupled_lionw", param_groups=GROUPS)
    plain = make_optimizer_config("decoupled_lionw", lr=0.03, betas=[0.5, 0.6])
    first, second = (grouped, plain) if then == "plain" else (plain, grouped)
    root, other = Root(make_model()), Root(make_model())
    optimizer = build_optimizer(root.model, first)
    step(root, optimizer, 0)
    saver = Checkpointer(
        Storage(tmp_path),
        World(0, 1, 0, CPU),
        Contents({}, {}),
        SavePolicy(keep=-1, background=False, max_failures=1),
        Reports(print),
    )
    folder = saver.save(1, root.model, optimizer, {})
    resumed, fresh = build_optimizer(other.model, second), build_optimizer(other.model, second)
    load_training_state(Checkpoint.at(folder), other.model, resumed, world=World(0, 1, 0, CPU))
    for ours, theirs in zip(resumed.param_groups, fresh.param_groups, strict=True):
        assert ours == theirs
    for ours, theirs in zip(other.parameters(), root.parameters(), strict=True):
        mean = resumed.state[ours]["exp_avg"]
        assert mean.any() and torch.equal(mean, optimizer.state[theirs]["exp_avg"])


def test_adaptive_clipping_is_the_papers_loop() -> None:
    """max(|W_i|, 1e-3) threshold / |G_i| where that is below 1 (Brock et al., 2021, equation 3)."""
    model = make_model()
    gradients = make_gradients(model, 1)[0]
    for index, (name, parameter) in enumerate(model.named_parameters()):
        parameter.grad = gradients[name] * 10.0 ** (-index % 5)
    model.norm_f.bias.grad = torch.zeros(24)  # as of an unused parameter
    given = {name: p.grad.clone() for name, p in model.named_parameters()}
    clip_adaptive(list(model.parameters()), 0.3, torch.tensor(1.0))
    clipped = 0
    for name, parameter in model.named_parameters():
        rows = range(parameter.shape[0]) if parameter.ndim == 2 else [slice(None)]
        for row in rows:
            w, g = parameter.detach()[row].double(), given[name][row].double()
            bound = 0.3 * max(math.sqrt(sum(x * x for x in w.tolist())), 1e-3)
            norm = math.sqrt(sum(x * x for x in g.tolist()))
            expected = g * bound / norm if norm > bound else g
            clipped += norm > bound
            torch.testing.assert_close(
                parameter.grad[row].double(), expected, rtol=1e-5, atol=1e-9, msg=name
            )
    assert 0 < clipped < sum(p.shape[0] if p.ndim == 2 else 1 for p in model.parameters())
