"""The router of a mixture: it chooses each token's experts, and reports what balances them.

`moe.py` calls `Router.choose` and makes `Statistics` of each layer, the decoder `Routing` of all:
the balancing losses, and how loaded each expert was. What a router did comes back as a result,
never through a list that layers write to: so it is right when a checkpointed block runs twice, when
blocks are compiled, and when FSDP shards them. All of it is sums over rows, which microbatches and
processes can add up. `train/step.py` calls `move_biases`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from llmfoundry.models.layers import Linear
from llmfoundry.models.low_rank import adapted
from llmfoundry.ops.devices import without_autocast
from llmfoundry.ops.torch_private import start_all_reduce, wait
from llmfoundry.recipe.model import FFNConfig, ModelConfig


class Router(Linear):
    """Logits (N, E) of tokens (N, D), in fp32 whatever autocast or the weights' precision.

    bfloat16's 8 bits would send some per cent of the tokens to other experts.

    Attributes:
        bias_steps: (E,), what moe_balancing: bias has added to each score so far, in steps of
            moe_bias_update_rate. An integer: it stays exact where weights are kept in bfloat16.
    """

    bias_steps: Tensor

    def __init__(self, config: ModelConfig) -> None:
        ffn = config.ffn_config
        assert ffn.moe_num_experts is not None
        super().__init__(config.d_model, ffn.moe_num_experts, bias=False)
        self.config, self.jitter = ffn, ffn.moe_jitter_eps
        if ffn.moe_balancing == "bias":
            self.register_buffer("bias_steps", torch.zeros(ffn.moe_num_experts, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of x (N, D), while training of x times random numbers from 1 - eps to 1 + eps."""
        if self.jitter and self.training:
            noise = torch.rand(x.shape, dtype=_wide(x), device=x.device)
            x = x * (1 - self.jitter + 2 * self.jitter * noise)
        logits = self.base(x)
        if self.lora is None or not self.lora.on:
            return logits
        with without_autocast(x.device.type):
            return adapted(self, x.to(logits.dtype), logits, self.lora)

    def base(self, x: Tensor) -> Tensor:
        """Logits without an adapter."""
        return WideLinear.apply(x, self.weight)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts (N, k) of tokens by their scores (N, E).

        The k experts of the highest scores; with `moe_balancing: bias` of the highest sums of score
        and bias, which does not weigh what they give.
        """
        ffn = self.config
        assert ffn.moe_top_k is not None
        preferred = scores.detach()  # (N, E)
        if ffn.moe_balancing == "bias":
            assert ffn.moe_bias_update_rate is not None
            preferred = preferred + ffn.moe_bias_update_rate * self.bias_steps
        chosen = preferred.topk(ffn.moe_top_k).indices  # (N, k)
        experts = _in_turn(chosen, scores.shape[1]) if ffn.moe_force_balance else chosen
        weights = scores.gather(1, experts)  # (N, k)
        if ffn.moe_normalize_expert_weights is not None:
            p = ffn.moe_normalize_expert_weights
            weights = weights / torch.linalg.vector_norm(weights, ord=p, dim=1, keepdim=True)
        if ffn.uniform_expert_assignment:
            experts = _in_turn(chosen, scores.shape[1])
        return weights, experts


def _in_turn(chosen: Tensor, n_experts: int) -> Tensor:
    """Experts 0, 1, 2, ... in place of those chosen, in the shape of `chosen`."""
    return (torch.arange(chosen.numel(), device=chosen.device) % n_experts).view_as(chosen)


@torch.no_grad()
def move_biases(module: nn.Module, load: Tensor, held: Tensor) -> None:
    """One step of every router's bias, towards experts of less than mean load (Wang et al., 2024).

    Args:
        module: whose blocks have routers with biases; others are left alone, and so are those
            of frozen routers.
        load: (L, E), of the global batch: the same on every process.
        held: 1: leave all as it is (the step was not taken); else 0.
    """
    routers = [m for m in module.modules() if isinstance(m, Router) and hasattr(m, "bias_steps")]
    if routers:
        taken = (load.mean(1, keepdim=True) - load).sign() * (1 - held)
        for router, steps in zip(routers, taken, strict=True):
            if router.weight.requires_grad:
                router.bias_steps += steps.to(router.bias_steps.dtype)


class WideLinear(torch.autograd.Function):
    """x W^T in fp32 or wider, of x (N, D) and W (E, D) in any dtype.

    They wait for the backward pass as they came: an fp32 copy of every token would be a tenth more
    memory than the experts keep.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Logits (N, E)."""
        ctx.save_for_backward(x, weight)
        with without_autocast(x.device.type):
            return F.linear(x.to(_wide(x)), weight.to(_wide(x)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and W, in their dtypes."""
        (x, weight), (grad,) = ctx.saved_tensors, grads
        with without_autocast(x.device.type):
            dx = (grad @ weight.to(grad.dtype)).to(x.dtype)
            return dx, (grad.T @ x.to(grad.dtype)).to(weight.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class Routed(NamedTuple):
    """What one layer's router did with a microbatch of B rows, while training.

    Attributes:
        balance: (), the load-balancing loss at weight 1, times B: B at perfect balance.
        z: (), the mean squared logsumexp of the logits, times B.
        load: (E,), choices that fell on each expert; B * T * k in all.
        probability: (E,), the router's probabilities, summed over tokens; B * T in all.
        tokens: (), how many were routed: B * T less padding, which is left out of all of this.
    """

    balance: Tensor
    z: Tensor
    load: Tensor
    probability: Tensor
    tokens: Tensor


class Routing(NamedTuple):
    """The same of all L layers.

    Attributes:
        losses: what is added to the loss, times B: `lbl` and `z`, those that the recipe asks for,
            weighted and averaged over layers.
        load: (L, E).
        probability: (L, E).
        tokens: (L,).
    """

    losses: dict[str, Tensor]
    load: Tensor
    probability: Tensor
    tokens: Tensor


def over_layers(layers: list[Routed], ffn: FFNConfig) -> Routing:
    """What all layers' routers did, the losses weighted as the recipe sets.

    With the mean over layers the balancing loss is megablocks' batched_load_balancing_loss, its
    weight at perfect balance; tests/models/test_moe.py has the formula.
    """
    parts = (torch.stack(part) for part in zip(*layers, strict=True))
    balance, z, load, probability, tokens = parts
    losses = {}
    if ffn.moe_loss_weight is not None:
        losses["lbl"] = ffn.moe_loss_weight * balance.mean()
    if ffn.moe_zloss_weight is not None:
        losses["z"] = ffn.moe_zloss_weight * z.mean()
    return Routing(losses, load, probability, tokens)


class OtherTokens(NamedTuple):
    """Whose tokens count in a layer's statistics beside this process's.

    Balance and z are those of all tokens that count. The gradient of each process is that of its
    own tokens, exactly: gradients are summed over processes later, and nothing travels backward.

    Attributes:
        tensor: processes with other tokens of the same rows, over which `Routed` is not added up
            later: what it says is theirs together, the same on each of them.
        added: processes over which `Routed` and rows are added up later, and whose tokens count
            all the same: those with other tokens of the same rows (context parallelism; each then
            counts its rows), or with other rows too (moe_lbl_scope: global). All have as many rows.
    """

    tensor: dist.ProcessGroup | None = None
    added: dist.ProcessGroup | None = None


class Places(NamedTuple):
    """Where the tokens that were routed stand.

    Attributes:
        rows: B.
        length: T, on this process.
        real: (N,) flat places b * T + t of those that are no padding; None: all are.
    """

    rows: int
    length: int
    real: Tensor | None


class Statistics(NamedTuple):
    """What a router's losses are made of, by groups of tokens: rows, or all of them.

    Attributes:
        load: (groups, E), choices that fell on each expert.
        scores: (groups, E), summed over tokens.
        tokens: (groups, 1).
        squares: (), squared logsumexp of the logits, summed over tokens.
    """

    load: Tensor
    scores: Tensor
    tokens: Tensor
    squares: Tensor

    @staticmethod
    def of(
        logits: Tensor, scores: Tensor, experts: Tensor, places: Places, *, by_row: bool
    ) -> Statistics:
        """Of logits and scores (N, E) and the experts chosen (N, k)."""
        groups = places.rows if by_row else 1
        n_experts, top_k, real = scores.shape[1], experts.shape[1], places.real
        number = torch.arange(n_experts, device=experts.device)
        # compared and summed: one_hot and bincount would wait for the device
        chosen = (experts[:, :, None] == number).sum(1).to(scores.dtype)
        if real is None:
            load = chosen.view(groups, -1, n_experts).sum(1)  # (groups, E)
            sums = scores.view(groups, -1, n_experts).sum(1)
            tokens = load.new_full((groups, 1), len(scores) / groups)
        else:
            group = real // places.length if by_row else torch.zeros_like(real)
            empty = scores.new_zeros(groups, n_experts)
            load, sums = (empty.index_add(0, group, part) for part in (chosen, scores))
            tokens = load.sum(1, keepdim=True) / top_k
        return Statistics(load, sums, tokens, logits.logsumexp(-1).square().sum())

    def routed(self, others: OtherTokens, *, top_k: int, rows: int) -> Routed:
        """What is reported of them; tokens of other processes count where `others` names some.

        Balance is E / (T k) * sum over e of load_e * mean score_e, over the T tokens of each group:
        a row or, as in megablocks, the microbatch, of this process or of all (Qiu et al., 2025,
        "Demons in the detail"). Loads have no gradient.
        """
        own = self if others.tensor is None else self._over(others.tensor)
        every = own
        if others.added is not None:
            every = own._over(others.added, times=others.added.size())
        tokens = every.tokens.clamp(min=1)
        balance = (every.load / (tokens * top_k) * (every.scores / tokens)).sum()
        balance = balance * (self.load.shape[1] * rows / len(self.load))
        z = every.squares / every.tokens.sum().clamp(min=1) * rows
        probability = own.scores.detach().sum(0)
        return Routed(balance, z, own.load.sum(0), probability, own.tokens.sum())

    def _over(self, group: dist.ProcessGroup, *, times: int = 1) -> Statistics:
        """Added up over processes; gradients of this one's part, `times` as large."""
        flat = torch.cat([part.flatten() for part in self])
        parts = _Added.apply(flat, group, times).split([part.numel() for part in self])
        return Statistics(*(p.view_as(own) for p, own in zip(parts, self, strict=True)))


class _Added(torch.autograd.Function):
    """A sum over processes, each of which finds the gradient of its own summand."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup, times: int) -> Tensor:
        ctx.times = times
        return wait(start_all_reduce(values, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.times, None, None
