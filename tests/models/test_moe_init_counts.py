"""Where experts start, and how many parameters and FLOPs a mixture has."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from llmfoundry.models.counts import (
    active_parameter_count,
    expert_parameter_count,
    flops_per_token,
    parameter_count,
)
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.moe import MoE
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.model import InitConfig, ModelConfig
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.train import TrainRecipe
from tests.models.test_decoder import make_config
from tests.models.test_init import DIVISORS, SCHEMES, SHAPE, assert_alike
from tests.models.test_moe import DMOE

N, HIDDEN = 8, 96
EXPERTS = {"mlp_type": "glu", "moe_num_experts": N, "moe_top_k": 2, "ffn_hidden_size": HIDDEN}


def make(init: InitConfig, seed: int = 17, **settings: Any) -> Decoder:
    model = Decoder(make_config(**SHAPE, ffn_config=DMOE | EXPERTS, init_config=init, **settings))
    model.init_weights(seed)
    return model


@pytest.mark.parametrize("name", SCHEMES)
def test_every_expert_starts_as_a_layer_of_its_own_would(name: str) -> None:
    """Against torch.nn.init on (outputs, inputs): w2 is stored the other way round."""
    settings, reference = SCHEMES[name]
    model = make(InitConfig(name=name, **settings))
    divisor = DIVISORS.get(name, math.sqrt(12))
    generator = torch.Generator().manual_seed(1)
    d, bounded = model.config.d_model, "uniform" in name or name == "default_"
    shapes = {"w1": (HIDDEN, d), "v1": (HIDDEN, d), "w2": (d, HIDDEN)}
    for weight, shape in shapes.items():
        stacks = [getattr(block.ffn.experts, weight).detach() for block in model.blocks]
        expected = torch.stack(
            [reference(torch.empty(shape), generator=generator) for _ in range(4 * N)]
        )
        expected /= divisor if weight == "w2" else 1
        assert_alike(torch.stack(stacks), expected, bounded=bounded)
        for expert in stacks[0].chunk(N):  # not only all of them together
            assert expert.std().item() == pytest.approx(expected.std().item(), rel=0.05)
    router = torch.stack([block.ffn.router.weight for block in model.blocks])
    expected = torch.stack(
        [reference(torch.empty(N, d), generator=generator) for _ in range(len(router))]
    )
    assert router.std().item() == pytest.approx(expected.std().item(), rel=0.05)


def test_biases_of_experts_start_as_those_of_linear_layers() -> None:
    experts = make(InitConfig(name="default_")).blocks[0].ffn.experts
    for name, fan_in in (("w1_bias", 128), ("v1_bias", 128), ("w2_bias", HIDDEN)):
        bias = getattr(experts, name)
        assert bias.std().item() == pytest.approx((3 * fan_in) ** -0.5, rel=0.1)
        assert bias.abs().max().item() <= fan_in**-0.5
    assert not make(InitConfig()).blocks[0].ffn.experts.w1_bias.any()


def test_experts_are_a_function_of_seed_and_name() -> None:
    def weights(seed: int, n_layers: int) -> dict[str, Tensor]:
        config = make_config(ffn_config=DMOE | EXPERTS, n_layers=n_layers)
        model = Decoder(config)
        nn.init.constant_(model.blocks[0].ffn.experts.w1, 9.0)
        model.init_weights(seed)
        return {n: p for n, p in model.named_parameters() if ".experts." in n and p.ndim == 2}

    first, again, other = weights(3, 2), weights(3, 2), weights(4, 2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    flat = [w[0, 0].item() for w in first.values()]
    assert len(set(flat)) == len(flat) == 6


def dbrx(d: int, layers: int, heads: int, f: int, experts: int) -> int:
    """Parameters of a DBRX with so many experts, 8 key-value heads, an untied head, no biases."""
    attention = d * (d + 2 * 8 * (d // heads)) + d * d
    layer = attention + 16 * d + 2 * d + experts * 3 * d * f
    return layers * layer + 2 * 100352 * d + d


RECIPES = {  # d_model, layers, heads, inner width
    "dbrx": (6144, 40, 48, 10752),
    "dbrx-9b": (2048, 24, 16, 3584),
    "dbrx-18b": (3072, 22, 24, 5376),
    "dbrx-35b": (4096, 24, 32, 7168),
    "dbrx-73b": (5120, 32, 40, 8960),
}


@pytest.mark.parametrize("name", RECIPES)
def test_parameters_and_active_parameters_are_the_closed_formulas(name: str) -> None:
    config = checked(TrainRecipe, YAMLS / f"{name}.yaml").model
    config = config.resolve(max_seq_len=2048)
    shape = RECIPES[name]
    assert parameter_count(config) == dbrx(*shape, experts=16)
    assert active_parameter_count(config) == dbrx(*shape, experts=4)
    experts = shape[1] * 16 * 3 * shape[0] * shape[3]
    assert expert_parameter_count(config) == experts


def test_dbrx_has_the_published_sizes() -> None:
    """132B and 36B (Databricks, 2024); to the digit, 131.6 and 36.5."""
    assert dbrx(6144, 40, 48, 10752, experts=16) == 131_596_523_520
    assert dbrx(6144, 40, 48, 10752, experts=4) == 36_469_708_800


@pytest.mark.parametrize("impl", ["grouped_mm", "torch"])
@pytest.mark.parametrize("kind", ["mlp", "glu"])
def test_flops_are_the_counted_matrix_products(kind: str, impl: str) -> None:
    more = {"mlp_type": kind, "moe_impl": impl, "shared_expert_hidden_size": 24}
    config: ModelConfig = make_config(
        d_model=48, max_seq_len=32, ffn_config=DMOE | more, attn_config={"attn_impl": "torch"}
    )
    model = Decoder(config)
    model.init_weights(1)
    tokens = torch.randint(0, 64, (2, 32))
    with FlopCounterMode(display=False) as counter:
        model.head(model(tokens)).sum().backward()
    counted = counter.get_total_flops() / tokens.numel()
    assert flops_per_token(config, 32) == pytest.approx(counted, rel=0.02)


def test_a_dense_model_is_active_as_a_whole() -> None:
    config = make_config()
    assert active_parameter_count(config) == parameter_count(config)
    assert expert_parameter_count(config) == 0


def kept_bytes(layer: MoE, dtype: torch.dtype) -> float:
    """What the layer's backward pass keeps of one token, weights left out."""
    sizes: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return saved

    weights = {p.untyped_storage().data_ptr() for p in layer.to(dtype).parameters()}
    x = torch.randn(2, 256, layer.experts.d, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        layer(x)
    return sum(size for place, size in sizes.items() if place not in weights) / 512


def test_a_token_of_dbrx_keeps_35_d_in_bf16() -> None:
    """The input and the pre-activations of 4 experts; plain autograd keeps 80 d."""
    shape = {"d_model": 256, "ffn_config": DMOE | EXPERTS | {"moe_top_k": 4}, "no_bias": True}
    config = make_config(**shape)
    config.ffn_config.ffn_hidden_size = 448
    assert kept_bytes(MoE(config), torch.bfloat16) < 35 * 256
