"""A GLU under autocast casts its input once: the same bits as two casts, and one copy kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from llmfoundry.models.layers import FFN
from tests.models.test_decoder import make_config

D, TOKENS = 64, 50


def make_ffn(*, gated: bool = True) -> FFN:
    ffn = FFN(make_config(d_model=D, n_heads=4), gated=gated, hidden=96)
    for parameter in ffn.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return ffn


def two_casts(ffn: FFN, x: Tensor) -> Tensor:
    """The formula, in which autocast casts for each layer."""
    assert ffn.gate_proj is not None
    gate = ffn.act.function(ffn.gate_proj(x))
    return ffn.down_proj(gate * ffn.act.up(ffn.up_proj(x)))


@pytest.mark.parametrize("compiled", [False, True])
def test_every_bit_is_as_with_two_casts_and_one_copy_less_is_kept(compiled: bool) -> None:
    torch.manual_seed(3)
    ffn, start = make_ffn(), torch.randn(TOKENS, D)
    module = torch.compile(ffn, backend="aot_eager", fullgraph=True) if compiled else ffn
    found, kept = [], []
    for function in (module, lambda x: two_casts(ffn, x)):
        x, sizes = start.clone().requires_grad_(), {}

        def keep(t: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", dtype=torch.bfloat16):
            y = function(x * 1.0)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *ffn.parameters()])])
        kept.append(sum(sizes.values()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    if not compiled:  # compiled code keeps one copy in any case
        assert kept[1] - kept[0] == 2 * TOKENS * D


def test_without_autocast_nothing_is_cast() -> None:
    ffn, x = make_ffn(), torch.randn(TOKENS, D)
    assert torch.equal(ffn(x), two_casts(ffn, x))
