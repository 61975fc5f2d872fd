"""A decoder whose frozen matrices are in 4 bits equals one that holds their dequantised values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llmfoundry.distributed.activation_checkpoint import wrap_blocks
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.layers import Linear
from llmfoundry.models.moe import ExpertWeights
from llmfoundry.models.quantized import matrices, place, quantize_frozen
from llmfoundry.ops import nf4
from llmfoundry.ops.loss import linear_cross_entropy
from tests.models.test_decoder import make_config, make_model, random_tokens
from tests.tiny import activations

GLU: dict[str, Any] = {
    "d_model": 64,
    "ffn_config": {"ffn_type": "mptglu", "ffn_act_fn": "silu"},
    "attn_config": {"rope": True},
    "tie_word_embeddings": False,
}
MIXTURE: dict[str, Any] = GLU | {
    "ffn_config": {
        "ffn_type": "dmoe",
        "mlp_type": "glu",
        "ffn_act_fn": "silu",
        "ffn_hidden_size": 20,
        "moe_num_experts": 5,
        "moe_top_k": 2,
        "shared_expert_hidden_size": 12,
    }
}
SLOW = pytest.mark.slow  # the compiler takes a minute
KINDS = {"glu": GLU, "mlp": {"d_model": 48}, "mixture": MIXTURE}


def pair(settings: dict[str, Any], *, double: bool = True) -> tuple[Root, Root]:
    """Quantised, and the same with the dequantised values; norms train in both."""
    config = make_config(**settings)
    source = make_model(config)
    with torch.device("meta"):
        model = Decoder(config)
    freeze(model)
    quantize_frozen(model, double=double)
    model.to_empty(device="cpu")
    for name, value in source.state_dict().items():
        place(model, name, value)
    plain = Decoder(config)
    freeze(plain)
    plain.load_state_dict(source.state_dict())
    for path, module in model.named_modules():
        for name in matrices(module) if path.startswith("blocks.") else []:
            assert isinstance(module, Linear | ExpertWeights)
            with torch.no_grad():
                weight = module.dense(name) if isinstance(module, ExpertWeights) else module.dense()
                plain.get_parameter(f"{path}.{name}").copy_(weight.reshape(-1, weight.shape[-1]))
    return Root(model), Root(plain)


def freeze(model: Decoder) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)


def gradients(root: Root, *, low: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and what it gives every trained parameter."""
    tokens = random_tokens(3, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = root(tokens, None, lambda m, h: linear_cross_entropy(h, m.head_weight, tokens))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in root.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_dequantised_weights(
    kind: str, low: bool, double: bool
) -> None:
    ours, plain = pair(KINDS[kind], double=double)
    (loss, mine), (expected, theirs) = gradients(ours, low=low), gradients(plain, low=low)
    # in bfloat16 the sum of a product and a bias is rounded once more
    assert torch.allclose(loss, expected, rtol=1e-3 if low else 1e-6)
    assert mine.keys() == theirs.keys() and len(mine) > 4
    for name, gradient in mine.items():
        error = (gradient - theirs[name]).norm() / theirs[name].norm()
        assert error < (2e-2 if low else 1e-5), name


def test_every_frozen_matrix_of_the_blocks_is_bytes_and_nothing_else_is() -> None:
    ours, _ = pair(MIXTURE)
    found = {n: p.dtype for n, p in ours.model.named_parameters() if n.startswith("blocks.0.")}
    low = {name.removeprefix("blocks.0.") for name, t in found.items() if t == torch.uint8}
    assert low == {
        *(f"attn.{name}.weight" for name in ("Wqkv", "out_proj")),
        *(f"ffn.experts.{name}" for name in ("w1", "v1", "w2")),
        *(f"ffn.shared.{name}_proj.weight" for name in ("up", "gate", "down")),
    }
    rest = [p.dtype for n, p in ours.model.named_parameters() if not n.startswith("blocks.")]
    assert len(rest) >= 3 and set(rest) == {torch.float32}


def test_what_trains_is_not_quantised() -> None:
    model = Decoder(make_config(**GLU))
    freeze(model)
    model.blocks[0].attn.Wqkv.weight.requires_grad_()
    assert quantize_frozen(model, double=True) == 2 * 5 - 1
    assert model.blocks[0].attn.Wqkv.weight.dtype == torch.float32


@pytest.mark.parametrize("kind", ["glu", "mixture"])
def test_what_waits_for_the_backward_pass_is_no_weight_in_full_precision(kind: str) -> None:
    root, _ = pair(KINDS[kind] | {"d_model": 128, "n_heads": 8})
    own = {p.untyped_storage().data_ptr() for p in root.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tokens = random_tokens(1, 2)
        root(tokens, None, lambda m, h: linear_cross_entropy(h, m.head_weight, tokens))
    smallest = min(m.packing.values for m in root.modules() if getattr(m, "packing", None))
    assert kept and max(kept.values()) < 4 * smallest


@pytest.mark.parametrize("kind", ["glu", "mixture"])
@pytest.mark.parametrize(
    ("checkpointing", "mode"), [(True, None), pytest.param(False, "default", marks=SLOW)]
)
def test_compiled_and_checkpointed_blocks_give_the_same(
    kind: str, checkpointing: bool, mode: str | None
) -> None:
    (wrapped, _), (plain, _) = pair(KINDS[kind]), pair(KINDS[kind])
    wrap_blocks(wrapped, activations(wrapped, checkpointing), compile_mode=mode)
    (loss, mine), (expected, theirs) = gradients(wrapped), gradients(plain)
    assert torch.allclose(loss, expected, rtol=1e-6)
    for name, gradient in mine.items():
        assert torch.allclose(gradient, theirs[name], rtol=1e-4, atol=1e-5), name


def test_experts_may_come_one_by_one() -> None:
    whole, _ = pair(MIXTURE)
    source = make_model(whole.model.config).state_dict()["blocks.1.ffn.experts.v1"]
    with torch.no_grad():
        parameter = whole.model.get_parameter("blocks.1.ffn.experts.v1")
        before = parameter.clone()
        parameter.zero_()
    for expert, matrix in reversed([*enumerate(source.chunk(5))]):
        place(whole.model, "blocks.1.ffn.experts.v1", matrix, expert=expert)
    assert torch.equal(parameter, before)
    packing = whole.model.blocks[1].ffn.experts.packing
    each = [nf4.quantize(matrix, double=packing.double) for matrix in source.chunk(5)]
    assert torch.equal(before, torch.cat(each))
