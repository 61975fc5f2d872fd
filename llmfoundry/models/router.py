"""Router of a mixture of experts: top-k choice, balancing losses and routing statistics.

`moe.py` calls `Router.choose` and computes `LayerStatistics` of each layer; the decoder merges them
into a `Routing`, with the balancing losses and the number of tokens of each expert. `train/step.py`
calls `move_biases` after each step.

Statistics are return values, never a list that layers append to. They therefore stay correct when a
checkpointed block runs twice, when blocks are compiled and when FSDP shards them. All statistics
are sums over sequences, so that microbatches and ranks can be added up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from llmfoundry.models.layers import Linear
from llmfoundry.models.low_rank import adapted
from llmfoundry.ops import wide_matmul
from llmfoundry.ops.devices import kind_of, without_autocast
from llmfoundry.ops.torch_private import start_all_reduce, wait
from llmfoundry.recipe.model import ResolvedFFNConfig, ResolvedModelConfig


class Router(Linear):
    """Router logits in fp32, whatever the precision of autocast and weights.

    In bfloat16, some per cent of the tokens would be routed to other experts.

    Attributes:
        bias_steps: (E,) int32, the balancing bias of each expert in units of
            moe_bias_update_rate. Integers stay exact when weights are kept in bfloat16.
        bias_start: (E,) int32, the bits of the fp32 biases at step 0, which an imported model has.
            Only with sigmoid scores; else they are 0.
    """

    bias_steps: Tensor
    bias_start: Tensor

    def __init__(self, config: ResolvedModelConfig) -> None:
        ffn = config.ffn_config
        super().__init__(config.d_model, ffn.moe_num_experts, bias=bool(ffn.moe_router_bias))
        self.config, self.jitter = ffn, ffn.moe_jitter_eps
        if ffn.moe_balancing == "bias":
            zeros = torch.zeros(ffn.moe_num_experts, dtype=torch.int32)
            self.register_buffer("bias_steps", zeros)
            if ffn.moe_scoring_func == "sigmoid":
                self.register_buffer("bias_start", zeros.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, E) of tokens x (N, D).

        In training, x is multiplied by uniform noise in [1 - eps, 1 + eps] (moe_jitter_eps).
        """
        if self.jitter and self.training:
            noise = torch.rand(x.shape, dtype=_wide(x), device=x.device)
            x = x * (1 - self.jitter + 2 * self.jitter * noise)
        logits = self.base(x)
        if self.lora is None or not self.lora.on:
            return logits
        with without_autocast(x.device.type):
            return adapted(self, x.to(logits.dtype), logits, self.lora)

    def base(self, x: Tensor) -> Tensor:
        """Return logits without an adapter."""
        logits = WideLinear.apply(x, self.weight)
        return logits if self.bias is None else logits + self.bias

    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores of experts, in the shape of the logits (N, E)."""
        return logits.sigmoid() if self.config.moe_scoring_func == "sigmoid" else logits.softmax(-1)

    def biases(self) -> Tensor:
        """Return the balancing bias of each expert, (E,) in fp32."""
        biases = self.config.moe_bias_update_rate * self.bias_steps
        if self.config.moe_scoring_func == "sigmoid":
            biases = biases + self.bias_start.view(torch.float32)
        return biases

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the k experts with the highest scores for each token.

        With `moe_balancing: bias` the choice is by score + bias, and the weights are the scores
        without the bias.

        Args:
            scores: (N, E), of `scores`.

        Returns:
            Weights and indices of the experts, (N, k) each.
        """
        ffn = self.config
        n_experts = scores.shape[1]

        # choose k experts per token, without a gradient
        biased_scores = scores.detach()  # (N, E)
        if ffn.moe_balancing == "bias":
            biased_scores = biased_scores + self.biases()
        if ffn.moe_n_group is not None:
            biased_scores = self._of_best_groups(biased_scores)
        chosen = biased_scores.topk(ffn.moe_top_k).indices  # (N, k)
        experts = _round_robin(chosen, n_experts) if ffn.moe_force_balance else chosen

        # weight their outputs
        weights = scores.gather(1, experts)  # (N, k)
        if ffn.moe_normalize_expert_weights is not None:
            p = ffn.moe_normalize_expert_weights
            weights = weights / torch.linalg.vector_norm(weights, ord=p, dim=1, keepdim=True)
        if ffn.moe_routed_scaling_factor is not None:
            weights = weights * ffn.moe_routed_scaling_factor
        if ffn.uniform_expert_assignment:  # the weights stay those of the chosen experts
            experts = _round_robin(chosen, n_experts)
        return weights, experts

    def _of_best_groups(self, scores: Tensor) -> Tensor:
        """Return scores (N, E) with minus infinity outside of the best groups of each token."""
        ffn = self.config
        by_group = scores.unflatten(1, (ffn.moe_n_group or 1, -1))  # (N, groups, experts of one)
        n_best = 2 if ffn.moe_scoring_func == "sigmoid" else 1
        group_scores = by_group.topk(n_best, dim=2).values.sum(2)
        best = group_scores.topk(ffn.moe_topk_group).indices  # (N, moe_topk_group)
        is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best, False)
        return by_group.masked_fill(is_out[:, :, None], float("-inf")).flatten(1)


def _round_robin(experts: Tensor, n_experts: int) -> Tensor:
    """Return experts 0, 1, 2, … repeated, in the shape of `experts`."""
    return (torch.arange(experts.numel(), device=experts.device) % n_experts).view_as(experts)


@torch.no_grad()
def move_biases(module: nn.Module, load: Tensor, held: Tensor) -> None:
    """Move every router's bias one step towards experts with less than the mean expert load.

    Loss-free balancing (Wang et al., 2024). Frozen routers and routers without a bias are not
    changed.

    Args:
        module: model whose blocks have routers.
        load: (L, E), tokens per expert of the global batch, the same on every rank.
        held: 1 if the optimizer step was skipped, which leaves the biases unchanged; else 0.
    """
    routers = [m for m in module.modules() if isinstance(m, Router) and hasattr(m, "bias_steps")]
    if not routers:
        return
    directions = (load.mean(1, keepdim=True) - load).sign() * (1 - held)  # (L, E)
    for router, direction in zip(routers, directions, strict=True):
        if router.weight.requires_grad:
            router.bias_steps += direction.to(router.bias_steps.dtype)


class WideLinear(torch.autograd.Function):
    """x W^T in fp32 or wider, for x (N, D) and W (E, D) of any dtype.

    Inputs are saved for the backward pass in their own dtype. An fp32 copy of every token would add
    a tenth to the activation memory of the experts. On CUDA bf16 tokens are never copied to fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return logits (N, E)."""
        ctx.save_for_backward(x, weight)
        with without_autocast(x.device.type):
            if _is_split(x):
                return wide_matmul.logits(x, wide_matmul.split(weight.float()))
            return F.linear(x.to(_wide(x)), weight.to(_wide(x)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and W in their dtypes."""
        (x, weight), (grad,) = ctx.saved_tensors, grads
        with without_autocast(x.device.type):
            if _is_split(x):
                parts = wide_matmul.split(weight.float())
                dx, dweight = wide_matmul.gradients(grad, x, parts)
                return dx, dweight.to(weight.dtype)
            dx = (grad @ weight.to(grad.dtype)).to(x.dtype)
            return dx, (grad.T @ x.to(grad.dtype)).to(weight.dtype)


def _is_split(x: Tensor) -> bool:
    """Return whether products with x are computed by `wide_matmul`."""
    return x.dtype == torch.bfloat16 and kind_of(x.device) == "cuda"


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class Routed(NamedTuple):
    """Routing of one layer and a microbatch of B sequences, in training. Padding is excluded.

    Attributes:
        balance: (), the load-balancing loss at weight 1, times B; equal to B at perfect balance.
        z: (), the mean squared logsumexp of the logits, times B.
        load: (E,), number of times that each expert was chosen; the sum is k * tokens.
        probability: (E,), router probabilities summed over tokens; the sum is `tokens`.
        tokens: (), number of routed tokens: B * T without padding.
        overflow: (), rows of this rank that exceed parallel.expert_capacity, whose tokens are NaN;
            None: no capacity.
    """

    balance: Tensor
    z: Tensor
    load: Tensor
    probability: Tensor
    tokens: Tensor
    overflow: Tensor | None = None


class Routing(NamedTuple):
    """Routing of all L layers.

    Attributes:
        losses: auxiliary losses `lbl` and `z`, as far as the recipe enables them: weighted,
            averaged over layers and multiplied by B.
        load: (L, E).
        probability: (L, E).
        tokens: (L,).
        overflow: (), rows of all layers on this rank that exceed parallel.expert_capacity; None: no
            capacity.
    """

    losses: dict[str, Tensor]
    load: Tensor
    probability: Tensor
    tokens: Tensor
    overflow: Tensor | None = None


def over_layers(layers: list[Routed], ffn: ResolvedFFNConfig) -> Routing:
    """Merge the statistics of all layers and weight the losses.

    Averaged over layers, the balancing loss is megablocks' batched_load_balancing_loss. At perfect
    balance it equals its weight. tests/models/test_moe.py has the formula.
    """
    *fields, overflows = zip(*layers, strict=True)
    balance, z, load, probability, tokens = (torch.stack(field) for field in fields)
    overflow = None if overflows[0] is None else torch.stack(overflows).sum()
    losses = {}
    if ffn.moe_loss_weight is not None:
        losses["lbl"] = ffn.moe_loss_weight * balance.mean()
    if ffn.moe_zloss_weight is not None:
        losses["z"] = ffn.moe_zloss_weight * z.mean()
    return Routing(losses, load, probability, tokens, overflow)


class StatisticsGroups(NamedTuple):
    """Process groups over which a layer's balancing losses are computed.

    The losses are those of all tokens of the groups. The gradient of each rank is exact for its own
    tokens: gradients are summed over ranks later, so the backward pass needs no communication.

    Attributes:
        tensor: ranks with other tokens of the same sequences (tensor parallelism). `Routed` is
            computed over the group and is the same on each rank; it is not summed again later.
        summed: ranks over which `Routed` and sequence counts are summed later, and which share
            statistics all the same: context-parallel ranks (each counts its sequences), or all data
            ranks (moe_lbl_scope: global). All ranks have the same number of sequences.
    """

    tensor: dist.ProcessGroup | None = None
    summed: dist.ProcessGroup | None = None


class TokenIndices(NamedTuple):
    """Locations of the routed tokens in a microbatch.

    Attributes:
        batch_size: B.
        length: T, on this rank.
        indices: (N,) flat indices b * T + t of the tokens that are not padding; None: no padding.
    """

    batch_size: int
    length: int
    indices: Tensor | None


class LayerStatistics(NamedTuple):
    """Sums that the balancing losses of a layer are computed from.

    A group is one sequence or the whole microbatch, depending on moe_lbl_scope.

    Attributes:
        load: (groups, E), number of times that each expert was chosen.
        scores: (groups, E), scores summed over tokens.
        tokens: (groups, 1), number of tokens.
        squares: (), squared logsumexp of the logits, summed over tokens.
    """

    load: Tensor
    scores: Tensor
    tokens: Tensor
    squares: Tensor

    @staticmethod
    def compute(
        logits: Tensor, scores: Tensor, experts: Tensor, where: TokenIndices, *, by_sequence: bool
    ) -> LayerStatistics:
        """Sum over the tokens of each group.

        Args:
            logits: (N, E).
            scores: (N, E).
            experts: (N, k), the chosen experts.
            where: locations of the N tokens.
            by_sequence: one group per sequence; else one for the microbatch.
        """
        groups = where.batch_size if by_sequence else 1
        n_experts, top_k = scores.shape[1], experts.shape[1]
        # one_hot and bincount would synchronize with the device; a token's experts are different
        is_chosen = torch.zeros_like(scores).scatter_(1, experts, 1)  # (N, E)
        if where.indices is None:
            load = is_chosen.view(groups, -1, n_experts).sum(1)  # (groups, E)
            score_sums = scores.view(groups, -1, n_experts).sum(1)
            tokens = load.new_full((groups, 1), len(scores) / groups)
        else:
            indices = where.indices
            group = indices // where.length if by_sequence else torch.zeros_like(indices)
            zeros = scores.new_zeros(groups, n_experts)
            load = zeros.index_add(0, group, is_chosen)
            score_sums = zeros.index_add(0, group, scores)
            tokens = load.sum(1, keepdim=True) / top_k
        squares = logits.logsumexp(-1).square().sum()
        return LayerStatistics(load, score_sums, tokens, squares)

    def routed(self, groups: StatisticsGroups, *, top_k: int, batch_size: int) -> Routed:
        """Compute the losses and the reported statistics, over the process groups if there are any.

        The balancing loss is E / (T k) * sum over e of load_e * mean score_e, over the T tokens of
        each group of tokens: a sequence or, as in megablocks, the microbatch, on this rank or on
        all (Qiu et al., 2025, "Demons in the detail"). The loads have no gradient.
        """
        local = self if groups.tensor is None else self._all_reduce(groups.tensor)
        total = local
        if groups.summed is not None:
            total = local._all_reduce(groups.summed, gradient_scale=groups.summed.size())
        tokens = total.tokens.clamp(min=1)
        balance = (total.load / (tokens * top_k) * (total.scores / tokens)).sum()
        balance = balance * (self.load.shape[1] * batch_size / len(self.load))
        z = total.squares / total.tokens.sum().clamp(min=1) * batch_size
        probability = local.scores.detach().sum(0)
        return Routed(balance, z, local.load.sum(0), probability, local.tokens.sum())

    def _all_reduce(self, group: dist.ProcessGroup, *, gradient_scale: int = 1) -> LayerStatistics:
        """Sum over the ranks of a group, in one all-reduce."""
        flat = torch.cat([field.flatten() for field in self])
        summed = _AllReduce.apply(flat, group, gradient_scale)
        fields = summed.split([field.numel() for field in self])
        shaped = [new.view_as(old) for new, old in zip(fields, self, strict=True)]
        return LayerStatistics(*shaped)


class _AllReduce(torch.autograd.Function):
    """Sum over ranks whose backward pass is the gradient of this rank's summand, times a factor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup, gradient_scale: int) -> Tensor:
        ctx.gradient_scale = gradient_scale
        return wait(start_all_reduce(values, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.gradient_scale, None, None
