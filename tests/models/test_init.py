"""Every scheme against torch.nn.init on the same shapes, and what a scheme does besides."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.model import InitConfig, ModelConfig
from tests.models.test_decoder import CHAIN, make_config

SHAPE = {
    "d_model": 128,
    "n_heads": 4,
    "n_layers": 6,
    "max_seq_len": 512,
    "tie_word_embeddings": False,
}
SCHEMES: dict[str, tuple[dict[str, object], Callable[[Tensor], Tensor]]] = {
    "default_": ({}, partial(nn.init.kaiming_uniform_, a=math.sqrt(5))),
    "baseline_": ({"init_std": 0.05}, partial(nn.init.normal_, std=0.05)),
    "small_init_": ({}, partial(nn.init.normal_, std=math.sqrt(2 / (5 * 128)))),
    "neox_init_": ({}, partial(nn.init.normal_, std=math.sqrt(2 / (5 * 128)))),
    "kaiming_normal_": ({}, partial(nn.init.kaiming_normal_, nonlinearity="relu")),
    "kaiming_uniform_": (
        {"fan_mode": "fan_out", "init_nonlinearity": "leaky_relu", "init_gain": 0.3},
        partial(nn.init.kaiming_uniform_, a=0.3, mode="fan_out"),
    ),
    "xavier_normal_": ({}, nn.init.xavier_normal_),
    "xavier_uniform_": ({"init_gain": 1.7}, partial(nn.init.xavier_uniform_, gain=1.7)),
}
DIVISORS = {"default_": 1.0, "neox_init_": 6 / math.sqrt(10)}  # elsewhere sqrt(2 * 6)


def make(init: InitConfig, **settings: object) -> Decoder:
    config = make_config(**(SHAPE | settings), init_config=init)
    config.vocab_size = 512
    model = Decoder(config)
    model.init_weights(17)
    return model


def moments(x: Tensor) -> dict[str, float]:
    """Mean, standard deviation, extremes and kurtosis (3 of a normal, 1.8 of a uniform)."""
    x = x.detach().double()
    std = x.std().item()
    return {
        "mean": x.mean().item() / std,
        "std": std,
        "kurtosis": ((x - x.mean()) ** 4).mean().item() / std**4,
    }


def assert_alike(found: Tensor, expected: Tensor, *, bounded: bool) -> None:
    ours, theirs = moments(found), moments(expected)
    assert ours["mean"] == pytest.approx(theirs["mean"], abs=0.03)
    assert ours["std"] == pytest.approx(theirs["std"], rel=0.02)
    assert ours["kurtosis"] == pytest.approx(theirs["kurtosis"], rel=0.05)
    if bounded:
        assert found.abs().max().item() == pytest.approx(expected.abs().max().item(), rel=2e-3)


@pytest.mark.parametrize("name", SCHEMES)
def test_matrices_follow_torch_nn_init(name: str) -> None:
    settings, reference = SCHEMES[name]
    model = make(InitConfig(name=name, **settings))
    generator = torch.Generator().manual_seed(1)
    divisor = DIVISORS.get(name, math.sqrt(12))
    for path, weight in model.named_parameters():
        if weight.ndim < 2 or (name == "default_" and path in ("wte.weight", "wpe.weight")):
            continue
        expected = torch.empty_like(weight)
        # LLM Foundry draws each head's queries, keys and values by themselves
        heads = weight.shape[0] // 32 if "Wqkv" in path else 1
        for part in expected.data.chunk(heads):
            reference(part, generator=generator)
        if "out_proj" in path or "down_proj" in path:
            expected /= divisor
        assert_alike(weight, expected, bounded="uniform" in name or name == "default_")


@pytest.mark.parametrize("nonlinearity", ["linear", "sigmoid", "tanh", "relu", "selu"])
def test_kaiming_takes_the_gain_of_its_nonlinearity(nonlinearity: str) -> None:
    model = make(InitConfig(init_nonlinearity=nonlinearity))
    expected = nn.init.kaiming_normal_(
        torch.empty(512, 128),
        nonlinearity=nonlinearity,
        generator=torch.Generator().manual_seed(1),
    )
    assert_alike(model.blocks[0].ffn.up_proj.weight, expected, bounded=False)


def test_default_is_what_the_layers_do_by_themselves() -> None:
    model = make(InitConfig(name="default_"))
    torch.manual_seed(1)
    linear, embedding = nn.Linear(128, 512), nn.Embedding(512, 128)
    up = model.blocks[2].ffn.up_proj
    assert_alike(up.weight, linear.weight, bounded=True)
    assert up.bias.abs().max().item() == pytest.approx(linear.bias.abs().max().item(), rel=0.01)
    assert up.bias.std().item() == pytest.approx(linear.bias.std().item(), rel=0.1)
    assert_alike(model.wte.weight, embedding.weight, bounded=False)
    down = model.blocks[2].ffn.down_proj.bias
    assert 0 < down.abs().max().item() < 512**-0.5
    assert (model.norm_f.bias == 0).all() and (model.norm_f.weight == 1).all()


@pytest.mark.parametrize(
    ("init", "divisor"),
    [
        (InitConfig(name="baseline_", init_div_is_residual=True), math.sqrt(12)),
        (InitConfig(name="baseline_", init_div_is_residual=False), 1.0),
        (InitConfig(name="baseline_", init_div_is_residual=4), 4.0),
        (InitConfig(name="xavier_normal_", init_div_is_residual=2.5), 2.5),
    ],
)
def test_residual_projections_are_divided(init: InitConfig, divisor: float) -> None:
    ffn = make(init).blocks[1].ffn  # up and down have the same fans, the other way round
    ratio = ffn.up_proj.weight.std() / ffn.down_proj.weight.std()
    assert ratio.item() == pytest.approx(divisor, rel=0.02)


def test_embeddings_may_have_a_law_of_their_own() -> None:
    model = make(InitConfig(emb_init_std=0.3), learned_pos_emb=True)
    for embedding in (model.wte, model.wpe):
        assert embedding.weight.std().item() == pytest.approx(0.3, rel=0.02)
    assert model.lm_head.weight.std().item() == pytest.approx(math.sqrt(2 / 128), rel=0.02)
    for limits, (low, high) in ((0.2, (-0.2, 0.2)), ([-0.1, 0.4], (-0.1, 0.4))):
        weight = make(InitConfig(emb_init_uniform_lim=limits)).wte.weight
        assert weight.min().item() == pytest.approx(low, abs=1e-3) and weight.min() >= low - 1e-7
        assert weight.max().item() == pytest.approx(high, abs=1e-3) and weight.max() <= high + 1e-7
        assert weight.mean().item() == pytest.approx((low + high) / 2, abs=2e-3)


def test_routers_may_have_a_law_of_their_own() -> None:
    experts = {"ffn_type": "dmoe", "mlp_type": "glu", "moe_num_experts": 16, "moe_top_k": 4}
    for init, std in ((InitConfig(), math.sqrt(2 / 128)), (InitConfig(router_init_std=0.01), 0.01)):
        ffn = make(init, ffn_config=experts).blocks[1].ffn
        assert ffn.router.weight.std().item() == pytest.approx(std, rel=0.05)
        assert ffn.experts.w1.std().item() == pytest.approx(math.sqrt(2 / 128), rel=0.02)


def test_queries_of_a_layer_without_keys_are_drawn_as_others_are() -> None:
    init = InitConfig(name="xavier_normal_")
    model = make(init, n_layers=3, block_overrides=CHAIN, attn_config={"qk_ln": True})
    whole, queries = model.blocks[0].attn.Wqkv.weight, model.blocks[2].attn.Wq.weight
    for weight in (whole, queries):  # one head has 32 outputs
        assert weight.std().item() == pytest.approx(math.sqrt(2 / (128 + 32)), rel=0.02)
    attn = model.blocks[0].attn
    assert all((norm.weight == 1).all() for norm in (attn.q_ln, attn.k_ln))


def test_bf16_weights_are_the_fp32_ones_rounded() -> None:
    init = InitConfig(name="xavier_uniform_")
    config = make_config(**SHAPE, init_config=init)
    wide, narrow = Decoder(config), Decoder(config).bfloat16()
    wide.init_weights(17)
    narrow.init_weights(17)
    for ours, theirs in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, theirs.bfloat16())


def test_the_default_schemes_numbers_stay() -> None:
    """Drawn once on a CPU; results that are quoted elsewhere rest on them."""
    config: ModelConfig = make_config()
    model = Decoder(config)
    model.init_weights(3)
    golden = {
        "wte.weight": (-0.14656156, 0.42871463),
        "blocks.0.attn.Wqkv.weight": (0.20929928, -0.64200002),
        "blocks.1.attn.out_proj.weight": (0.11303386, 0.38695154),
        "blocks.1.ffn.down_proj.weight": (0.04372997, -0.10074312),
    }
    weights = dict(model.named_parameters())
    for name, values in golden.items():
        assert weights[name].flatten()[:2].tolist() == pytest.approx(values, rel=1e-6)
