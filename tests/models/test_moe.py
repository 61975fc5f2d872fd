"""The mixture-of-experts layer against one written out token by token in float64."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from llmfoundry.gauntlet.models.own_decoder import score_requests
from llmfoundry.gauntlet.questions import ScoreRequest
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.moe import MoE
from llmfoundry.models.router import move_biases
from llmfoundry.ops.packed_layout import PackedLayout
from llmfoundry.recipe.model import ModelConfig
from tests.models.plain_decoder import activation
from tests.models.plain_moe import balancing_loss, choice, mixture
from tests.models.test_decoder import make_config

E, K = 6, 3
DMOE = {
    "ffn_type": "dmoe",
    "moe_num_experts": E,
    "moe_top_k": K,
    "ffn_hidden_size": 16,
    "ffn_act_fn": "silu",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "glu": {"mlp_type": "glu"},
    "glu-sum": {"mlp_type": "glu", "moe_normalize_expert_weights": 1},
    "mlp-norm": {"moe_normalize_expert_weights": 2, "ffn_act_fn": "gelu"},
    "max-of-8": {"mlp_type": "glu", "moe_num_experts": 8, "moe_top_k": 1},
    "all": {"moe_top_k": E, "ffn_act_fn": {"name": "leaky_relu", "negative_slope": 0.2}},
    "one": {"moe_num_experts": 1, "moe_top_k": 1},
    "shared": {"mlp_type": "glu", "shared_expert_hidden_size": 10},
    "sigmoid": {"mlp_type": "glu", "moe_scoring_func": "sigmoid", "moe_top_k": 3},
    "sigmoid-groups": {  # as DeepSeek-V3
        "mlp_type": "glu",
        "moe_num_experts": 12,
        "moe_top_k": 4,
        "moe_scoring_func": "sigmoid",
        "moe_n_group": 4,
        "moe_topk_group": 2,
        "moe_normalize_expert_weights": 1,
        "moe_routed_scaling_factor": 2.5,
        "shared_expert_hidden_size": 10,
    },
    "groups": {  # as DeepSeek-V2
        "moe_num_experts": 9,
        "moe_n_group": 3,
        "moe_topk_group": 2,
        "moe_routed_scaling_factor": 16.0,
    },
    "shared-mlp": {"shared_expert_hidden_size": 10, "moe_normalize_expert_weights": 1},
}


def make(*, no_bias: bool = False, **settings: Any) -> MoE:
    """Every parameter random, biases too, in float64."""
    config = make_config(ffn_config=DMOE | settings, no_bias=no_bias)
    layer, generator = MoE(config), torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).double() * 0.3
    return layer


def random(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def plain_layer(x: Tensor, weights: dict[str, Tensor], layer: MoE) -> Tensor:
    act = partial(activation, written=layer.config.ffn_act_fn)
    return mixture(x.flatten(0, 1), weights, "", layer.config, act).view_as(x)


@pytest.mark.parametrize("impl", ["torch", "grouped_mm"])
@pytest.mark.parametrize("no_bias", [True, False], ids=["no-bias", "bias"])
@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_and_gradients_are_the_definitions(name: str, no_bias: bool, impl: str) -> None:
    layer = make(no_bias=no_bias, **SETTINGS[name], moe_impl=impl)
    x = random(2, 7, 24).requires_grad_()
    leaves = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
    y, expected = layer(x)[0], plain_layer(x, leaves, layer)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    weight = random(2, 7, 24, seed=3)
    ours = torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])
    theirs = torch.autograd.grad((expected * weight).sum(), [x, *leaves.values()])
    for key, a, b in zip(["x", *leaves], ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda m, k=key: k + m)


@pytest.mark.parametrize("scope", ["row", "microbatch"])
def test_balancing_loss_is_megablocks_formula_over_its_scope(scope: str) -> None:
    layer, x = make(moe_lbl_scope=scope), random(5, 11, 24).requires_grad_()
    router = layer.router.weight.detach().clone().requires_grad_()
    balance = layer(x)[1].balance
    if scope == "row":
        expected = sum(balancing_loss(row, router, K) for row in x)
    else:
        expected = 5 * balancing_loss(x.flatten(0, 1), router, K)
    torch.testing.assert_close(balance, expected, rtol=1e-12, atol=0)
    assert balance.item() / 5 > 1.01, "the router must not be balanced"
    ours = torch.autograd.grad(balance, [x, layer.router.weight])
    theirs = torch.autograd.grad(expected, [x, router])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_balancing_loss_of_a_balanced_router_is_its_weight() -> None:
    config = make_config(ffn_config=DMOE | {"moe_loss_weight": 0.07, "moe_force_balance": True})
    model = Decoder(config)
    model.init_weights(1)
    for block in model.blocks:
        block.ffn.router.weight.data.zero_()  # every probability is 1 / E
    _, routing = model.run(torch.randint(0, 64, (3, 16)))
    assert routing is not None
    assert routing.losses["lbl"].item() / 3 == pytest.approx(0.07, rel=1e-6)


def test_losses_are_weighted_and_averaged_over_layers() -> None:
    weights = {"moe_loss_weight": 0.3, "moe_zloss_weight": 0.02}
    model = Decoder(make_config(ffn_config=DMOE | weights, n_layers=3))
    model.init_weights(1)
    seen: list[tuple[Tensor, Tensor]] = []
    for block in model.blocks:
        block.ffn.router.register_forward_hook(lambda m, i, out: seen.append((i[0], m.weight)))
    _, routing = model.run(torch.randint(0, 64, (2, 16)))
    assert routing is not None
    rows = [(row, w) for x, w in seen for row in x.view(2, 16, -1)]
    lbl = sum(balancing_loss(row, w, K).item() for row, w in rows) / 3
    z = sum(((x @ w.T).exp().sum(-1).log() ** 2).mean().item() * 2 for x, w in seen) / 3
    assert routing.losses["lbl"].item() == pytest.approx(0.3 * lbl, rel=1e-5)
    assert routing.losses["z"].item() == pytest.approx(0.02 * z, rel=1e-5)


def test_load_and_probability_are_counted() -> None:
    layer, x = make(), random(2, 7, 24)
    routed = layer(x)[1]
    scores = (x.flatten(0, 1) @ layer.router.weight.T).softmax(-1)
    load = [sum(e in choice(row, K) for row in scores) for e in range(E)]
    assert routed.load.tolist() == load and sum(load) == 2 * 7 * K
    torch.testing.assert_close(routed.probability, scores.sum(0))
    assert not (routed.load.requires_grad or routed.probability.requires_grad)


def test_padding_is_left_out_of_what_is_logged_of_the_routing() -> None:
    layer, x = make(), random(2, 7, 24)
    real = torch.tensor([*range(7), *range(7, 12)])  # the second row ends with two of padding
    y, routed = layer(x, real)
    alone = [layer(x[:1]), layer(x[1:, :5])]
    assert routed.tokens.item() == 12 and not y[1, 5:].any()
    torch.testing.assert_close(y[0], alone[0][0][0])
    torch.testing.assert_close(y[1, :5], alone[1][0][0])
    for name in ("balance", "load", "probability", "tokens"):
        parts = [getattr(how, name) for _, how in alone]
        torch.testing.assert_close(getattr(routed, name), parts[0] + parts[1])


def test_evaluation_has_no_losses() -> None:
    layer, model = make().eval(), Decoder(make_config(ffn_config=DMOE)).eval()
    assert layer(random(2, 7, 24))[1] is None
    model.init_weights(1)
    assert model.run(torch.randint(0, 64, (1, 4)))[1] is None


def test_padding_is_not_routed() -> None:
    layer, x = make(shared_expert_hidden_size=8).eval(), random(2, 5, 24)
    real = torch.tensor([0, 1, 2, 5, 9])
    seen: list[int] = []
    layer.router.register_forward_hook(lambda m, i, out: seen.append(len(out)))
    y, whole = layer(x, real)[0].flatten(0, 1), layer(x)[0].flatten(0, 1)
    assert seen == [5, 10]
    torch.testing.assert_close(y[real], whole[real])
    others = [i for i in range(10) if i not in real]
    assert (y[others] == 0).all() and (whole[others] != 0).any()


@pytest.mark.parametrize("padding", [(3, 0), (0, 8), (8, 8)])
def test_the_padding_of_a_layout_reaches_no_router(padding: tuple[int, int]) -> None:
    model = Decoder(make_config(ffn_config=DMOE)).eval()
    model.init_weights(1)
    seen: list[int] = []
    for block in model.blocks:
        block.ffn.router.register_forward_hook(lambda m, i, out: seen.append(len(out)))
    tokens = torch.randint(0, 64, (2, 8))
    lengths = [[8 - pad, pad] if 0 < pad < 8 else [8] for pad in padding]
    found = model(tokens, PackedLayout.from_lengths(lengths, padding))
    assert seen == [16 - sum(padding)] * 2
    expected = model(tokens, PackedLayout.from_lengths(lengths))
    for row, pad in enumerate(padding):
        torch.testing.assert_close(found[row, : 8 - pad], expected[row, : 8 - pad])


def test_what_fills_a_row_of_the_gauntlet_reaches_no_router() -> None:
    model = Decoder(make_config(ffn_config=DMOE)).eval()
    model.init_weights(1)
    seen: list[int] = []
    router = model.blocks[0].ffn.router
    router.register_forward_hook(lambda m, i, out: seen.append(len(out)))
    requests = [ScoreRequest(tuple(range(n, 2 * n - 1)), (n,), "") for n in (4, 7, 12, 5)]
    scores = score_requests(
        Root(model),
        requests,
        seq_len=16,
        eos_id=0,
        device=torch.device("cpu"),
        batch_tokens=64,
        autocast=nullcontext,
    )
    assert sum(seen) == 3 + 6 + 11 + 4
    for request, score in zip(requests, scores, strict=True):
        logits = model.head(model(torch.tensor([request.tokens])))[0, -1]
        expected = logits.log_softmax(0)[request.targets[0]].item()
        assert score.logprob == pytest.approx(expected, abs=1e-5)


def test_jitter_reaches_the_router_alone() -> None:
    layer, x = make(moe_jitter_eps=0.2), random(4, 50, 24)
    flat = x.flatten(0, 1)
    torch.manual_seed(3)
    noisy, plain = layer.router(flat), layer.router.eval()(flat)
    torch.testing.assert_close(plain, flat @ layer.router.weight.T)
    torch.manual_seed(3)
    factors = 0.8 + 0.4 * torch.rand_like(flat)
    torch.testing.assert_close(noisy, (flat * factors) @ layer.router.weight.T)
    assert (noisy - plain).abs().max() > 0.1
    alone = make(moe_jitter_eps=0.5, moe_num_experts=1, moe_top_k=1)  # its weight is 1 always
    assert torch.equal(alone.train()(x)[0], alone.eval()(x)[0])


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_the_router_computes_in_fp32(weights: torch.dtype) -> None:
    layer, x = make().to(weights), random(2, 64, 24).float()
    with torch.autocast("cpu", torch.bfloat16):
        logits = layer.router(x)
        y = layer(x)[0]
    assert logits.dtype == torch.float32 and y.dtype == torch.bfloat16
    expected = x.double() @ layer.router.weight.double().T
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    layer, x = make(moe_balancing="bias", moe_bias_update_rate=0.25).eval(), random(1, 9, 24)
    steps = torch.tensor([4, 0, 0, 0, 0, -4])  # scores below 1: the first always, the last never
    layer.router.bias_steps += steps.int()
    scores = (x.flatten(0, 1) @ layer.router.weight.T).softmax(-1)
    weights, experts = layer.router.choose(scores)
    assert (experts == 0).any(1).all() and not (experts == 5).any()
    torch.testing.assert_close(weights, scores.gather(1, experts))


def test_an_imported_bias_is_kept_whatever_the_precision_of_the_weights() -> None:
    layer = make(moe_balancing="bias", moe_scoring_func="sigmoid", moe_bias_update_rate=0.25)
    start = torch.randn(E, generator=torch.Generator().manual_seed(6))
    layer.router.bias_start.copy_(start.view(torch.int32))
    layer.router.bias_steps[1] = 3
    start[1] += 0.75
    assert torch.equal(layer.to(torch.bfloat16).router.biases(), start)


def test_probabilities_of_sigmoid_scores_add_up_to_one() -> None:
    routed = make(moe_scoring_func="sigmoid").train()(random(2, 7, 24))[1]
    assert routed is not None and routed.probability.sum().item() == pytest.approx(14)


def test_biases_move_by_one_step_towards_equal_loads() -> None:
    """b_e += u * sign(mean load - load_e) (Wang et al., 2024), unless the step was not taken."""
    model = Decoder(make_config(ffn_config=DMOE | {"moe_balancing": "bias"}, n_layers=2))
    model.init_weights(1)
    load = torch.tensor([[9.0, 1, 2, 3, 3, 0], [3, 3, 3, 3, 3, 3]])
    for held in (0.0, 1.0, 0.0):
        move_biases(model, load, torch.tensor(held))
    steps = [block.ffn.router.bias_steps.tolist() for block in model.blocks]
    assert steps == [[-2, 2, 2, 0, 0, 2], [0] * E]
    assert "blocks.1.ffn.router.bias_steps" in model.state_dict()
    model.init_weights(1)
    assert not any(block.ffn.router.bias_steps.any() for block in model.blocks)
    plain = Decoder(make_config(ffn_config=DMOE))
    move_biases(plain, load, torch.tensor(0.0))
    assert not list(plain.buffers())


def test_biases_balance_a_skewed_router() -> None:
    """Wang et al.'s claim in miniature: one expert is wanted by all tokens, and then is not."""
    layer = make(moe_balancing="bias", moe_bias_update_rate=0.002)
    weight = layer.router.weight.data.mul_(0.2)
    weight[0] = weight[1:].mean(0) + 0.06
    x = random(8, 64, 24) + 1
    first = layer(x)[1].load
    for _ in range(400):
        move_biases(layer, layer(x)[1].load[None], torch.tensor(0.0))
    last = layer(x)[1].load
    assert first.max() / first.mean() > 1.7
    assert last.max() / last.mean() < 1.15


@pytest.mark.parametrize("key", ["uniform_expert_assignment", "moe_force_balance"])
def test_benchmarks_can_have_equal_loads(key: str) -> None:
    layer, x = make(**{key: True}), random(2, 6, 24)
    assert layer(x)[1].load.tolist() == [2 * 6 * K / E] * E
    scores = (x.flatten(0, 1) @ layer.router.weight.T).softmax(-1)
    weights, experts = layer.router.choose(scores)
    assert experts.tolist() == [[(K * t + i) % E for i in range(K)] for t in range(12)]
    if key == "moe_force_balance":
        assert torch.equal(weights, scores.gather(1, experts))
    else:
        assert torch.equal(weights, scores.topk(K).values)


def test_a_compiled_block_takes_the_layer_whole() -> None:
    model = Decoder(make_config(ffn_config=DMOE | {"mlp_type": "glu"}))
    model.init_weights(4)
    layer, x = model.blocks[0].ffn, torch.randn(2, 8, 24)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)

    def gradients(layer: Any) -> list[Tensor]:
        y, routed = layer(x)
        return list(
            torch.autograd.grad(y.square().sum() + routed.balance, model.blocks[0].ffn.parameters())
        )

    for a, b in zip(gradients(compiled), gradients(layer), strict=True):
        torch.testing.assert_close(a, b)


def test_weights_are_stacked_as_megablocks_stacks_them() -> None:
    config: ModelConfig = make_config(ffn_config=DMOE | {"mlp_type": "glu"}, no_bias=True)
    shapes = {name: tuple(p.shape) for name, p in MoE(config).named_parameters()}
    stacked = (E * 16, 24)
    names = ("experts.w1", "experts.v1", "experts.w2")
    assert shapes == {"router.weight": (E, 24), **dict.fromkeys(names, stacked)}


def test_one_expert_is_the_dense_layer() -> None:
    dense = make_config(ffn_config={"ffn_type": "mptglu", "ffn_hidden_size": 16}, no_bias=True)
    one = {"moe_num_experts": 1, "moe_top_k": 1, "mlp_type": "glu", "ffn_act_fn": "gelu"}
    layer, block = make(no_bias=True, **one), Decoder(dense).blocks[0].ffn.double()
    for name, w in {"gate": "w1", "up": "v1"}.items():
        getattr(block, f"{name}_proj").weight.data = getattr(layer.experts, w).data
    block.down_proj.weight.data = layer.experts.w2.data.T
    x = random(1, 9, 24)
    torch.testing.assert_close(layer(x)[0], block(x))
