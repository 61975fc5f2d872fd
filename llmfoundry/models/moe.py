"""Mixture-of-experts layer: a router and stacked experts, on one rank or expert-parallel.

Entry point: `MoE`, which replaces the feed-forward layer of a block. `ops.moe.mixture` computes the
experts, `router.py` the routing statistics. With expert parallelism, `ops/moe/dispatch.py` sends
tokens to the ranks of their experts and back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from llmfoundry.models.layers import FFN
from llmfoundry.models.low_rank import LowRank
from llmfoundry.models.router import (
    LayerStatistics,
    Routed,
    Router,
    StatisticsGroups,
    TokenIndices,
)
from llmfoundry.ops.activations import to_text
from llmfoundry.ops.devices import kind_of, to_autocast_dtype
from llmfoundry.ops.moe.dispatch import TokenExchange
from llmfoundry.ops.moe.experts import Experts, LowRankExperts
from llmfoundry.ops.moe.fp8 import METHODS
from llmfoundry.ops.moe.gpu import steps_of
from llmfoundry.ops.moe.mixture import mixture
from llmfoundry.ops.nf4 import Nf4Layout, dequantize
from llmfoundry.ops.shard_layout import full_tensor
from llmfoundry.recipe.model import ResolvedModelConfig


class ExpertWeights(nn.Module):
    """Stacked weights of all experts, in the shapes of DBRX and megablocks.

    w1 (gate, or up projection of an MLP), v1 (up projection of a GLU) and w2 (down projection, not
    transposed) are (E * f, D), so that FSDP shards them evenly whatever the number of experts.
    Biases are (E * f,), and (E * D,) of w2.

    Adapters are stacked in the same way: `w1_lora_A` (E * r, in) and `w1_lora_B` (E * out, r). A
    pair that all experts share has no factor E.

    With expert parallelism (`distributed/experts.py`), parameters are DTensors sharded by expert,
    and parameters without a factor E are replicated. Computation uses the local shard.

    Attributes:
        n: E, the number of experts on all ranks.
        lora: adapters by weight name.
        packing: byte layout of one expert's quantized matrix (`models/quantized.py`). Each weight
            is then uint8 (E * packing.nbytes,). None: not quantized.
        is_cast_once: whether `cast_experts` casts the matrices; set by `distributed/experts.py`.
        copies: inside `cast_experts`, the matrices in bf16 by name.
        fp8: `Experts.fp8`; set by `models/float8.py`.
        quantized: inside `cast_experts`, `Experts.quantized`.
    """

    MATRICES = ("w1", "v1", "w2")
    w1: nn.Parameter
    packing: Nf4Layout | None = None
    is_cast_once = False
    copies: dict[str, Tensor] | None = None
    fp8: str | None = None
    quantized: tuple[Tensor, ...] = ()

    def __init__(self, config: ResolvedModelConfig) -> None:
        super().__init__()
        ffn, self.d = config.ffn_config, config.d_model
        self.n, self.f = ffn.moe_num_experts, ffn.ffn_hidden_size
        self.activation = to_text(*ffn.glu_activation)
        self.lora: dict[str, LowRank] = {}
        outputs = {"w1": self.f, "v1": self.f, "w2": self.d}
        for name, width in outputs.items():
            if name == "v1" and ffn.mlp_type != "glu":
                continue
            self.register_parameter(name, nn.Parameter(torch.empty(self.n * self.f, self.d)))
            if not config.no_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(self.n * width)))

    def forward(
        self, *tensors: Tensor, impl: str, exchanges: Sequence[TokenExchange] = ()
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute the local experts. It is a module call because FSDP's hooks surround it.

        Args:
            tensors: x (T, D), weights (T, k) and experts (T, k); or what `TokenExchange.started`
                returns for each of several exchanges, so that FSDP finds the inputs.
            impl: a backend of `mixture`.
            exchanges: the exchanges. The outputs are sent back, each as soon as it is computed, and
                the rows of the next exchange are waited for afterwards.

        Returns:
            (T, D); or the tensors to receive of all exchanges.
        """
        if not exchanges:
            x, weights, experts = tensors
            return mixture(x, weights, experts, self.experts(), impl=impl)
        local, returned = self.experts(), []
        for number, exchange in enumerate(exchanges):
            exchange.replace_started(*tensors[2 * number : 2 * number + 2])
            y = mixture(*exchange.arrived(), local, impl=impl)
            returned.append(exchange.send_back(y))
        return tuple(returned)

    def experts(self) -> Experts:
        """Return the local weights in the form of `mixture`, with a dimension of experts."""

        def view(name: str, *shape: int) -> Tensor | None:
            if not hasattr(self, name):
                return None
            weight = _local(getattr(self, name))
            if self.copies is not None and name in self.copies:
                weight = _Cast.apply(weight, self.copies[name])
            return weight.view(-1, *shape)

        shape = (self.f, self.d) if self.packing is None else (self.packing.nbytes,)
        w1, v1, w2 = (view(name, *shape) for name in self.MATRICES)
        assert w1 is not None and w2 is not None
        b1, bv, b2 = view("w1_bias", self.f), view("v1_bias", self.f), view("w2_bias", self.d)
        low_rank = LowRankExperts(*(f for name in self.MATRICES for f in self.factors(name)))
        return Experts(
            w1,
            v1,
            w2,
            b1,
            bv,
            b2,
            self.activation,
            low_rank,
            self.packing,
            self.fp8,
            self.quantized,
        )

    def cast_once(self) -> None:
        """Make the copies of the matrices that forward and backward passes of a step share."""
        weights = {n: w for n, w in self.named_parameters() if n in self.MATRICES}
        self.copies = {name: w.detach().bfloat16() for name, w in weights.items()}
        if self.fp8 is not None:
            steps, scales = steps_of(self.w1.device), METHODS[self.fp8].scales
            copies = [_local(copy).view(-1, self.f, self.d) for copy in self.copies.values()]
            self.quantized = tuple(
                tensor
                for copy in copies
                for matrices in (copy, copy.transpose(1, 2).contiguous())
                for tensor in scales.matrices(matrices, steps)
            )

    def forget_casts(self) -> None:
        """Free the copies."""
        self.copies, self.quantized = None, ()

    def dense(self, name: str) -> Tensor | None:
        """Return the weight `name` (E, f, D) of all experts, without adapters.

        A quantized weight is dequantized to fp32, without a gradient. None if the layer has no
        weight of this name.
        """
        weight = getattr(self, name, None)
        if weight is None:
            return None
        if self.packing is None:
            return full_tensor(weight).view(self.n, self.f, self.d)
        matrices = []
        for data in full_tensor(weight).view(self.n, -1):
            shape, double = (self.f, self.d), self.packing.double
            matrices.append(dequantize(data, shape, torch.float32, double=double))
        return torch.stack(matrices)

    def factors(self, name: str) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return the LoRA factors of `name`: a (E, R, in) and b (E, out, R), b scaled."""
        lora = self.lora.get(name)
        if lora is None or not lora.on:
            return None, None
        b = self._by_expert(f"{name}_lora_B", lora)
        return self._by_expert(f"{name}_lora_A", lora), b * lora.scaling

    def _by_expert(self, name: str, lora: LowRank) -> Tensor:
        """Return the factor `name` of the local experts, (E, rows, columns)."""
        factor = _local(getattr(self, name))
        rows_of_expert = self.f if self.packing is None else self.packing.nbytes
        local_experts = len(_local(self.w1)) // rows_of_expert
        count = 1 if lora.shared else local_experts
        return factor.view(count, -1, factor.shape[1]).expand(local_experts, -1, -1)


def _local(parameter: Tensor) -> Tensor:
    """Return the local shard. Gradients of a replicated parameter are partial sums."""
    if not isinstance(parameter, DTensor):
        return parameter
    placements = [Partial() if p.is_replicate() else p for p in parameter.placements]
    return parameter.to_local(grad_placements=placements)


class _Cast(torch.autograd.Function):
    """A cast of a weight that was computed before; the gradient is cast back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


@contextmanager
def cast_experts(model: nn.Module) -> Iterator[None]:
    """Context in which passes under bf16 autocast share one bf16 (and fp8) copy of the experts.

    For the microbatches of a step, during which weights do not change. On a CPU each expert is cast
    when it is used.
    """
    modules = [m for m in model.modules() if isinstance(m, ExpertWeights) and m.is_cast_once]
    for module in modules:
        if module.packing is None and kind_of(module.w1.device) != "cpu":
            module.cast_once()
    try:
        yield
    finally:
        for module in modules:
            module.forget_casts()


class MoE(nn.Module):
    """Dropless mixture of experts: each token is routed to k of E experts.

    Scores are the softmax over all experts, or the sigmoid of each. The k experts with the highest
    scores are chosen, and their outputs are summed with the scores as weights, normalized by their
    p-norm if the recipe sets moe_normalize_expert_weights.

    Args:
        config: resolved model configuration.

    Attributes:
        group: the expert-parallel ranks; None: all experts are local.
        capacity: in training, rows that a rank sends to each rank of `group`, in multiples of the
            even share; None: exact numbers of rows.
        n_parts: parts of the tokens whose communication overlaps with the experts of the others.
        statistics_groups: ranks whose tokens count in `Routed`; set by `distributed/experts.py`.
    """

    group: dist.ProcessGroup | None = None
    capacity: float | None = None
    n_parts = 1
    statistics_groups = StatisticsGroups()

    def __init__(self, config: ResolvedModelConfig) -> None:
        super().__init__()
        self.config = ffn = config.ffn_config
        self.router, self.experts = Router(config), ExpertWeights(config)
        self.shared = None
        if ffn.shared_expert_hidden_size is not None:
            gated = ffn.mlp_type == "glu"
            self.shared = FFN(config, gated=gated, hidden=ffn.shared_expert_hidden_size)

    def forward(self, x: Tensor, indices: Tensor | None = None) -> tuple[Tensor, Routed | None]:
        """Transform x token by token.

        Args:
            x: (B, T, D).
            indices: (N,) int64, flat indices b * T + t of the tokens that are not padding. The
                output of padding is zero and no expert computes it. None: there is no padding.

        Returns:
            (B, T, D), and the routing statistics in training.
        """
        batch_size, length, width = x.shape
        tokens = x.flatten(0, 1)  # (B * T, D)
        if indices is not None:
            tokens = tokens.index_select(0, indices)  # (N, D)
        # cast once, so that router and experts save the same tensor for the backward pass
        tokens = to_autocast_dtype(tokens)

        # route, and compute the chosen experts
        logits = self.router(tokens)  # (N, E)
        scores = self.router.scores(logits)
        weights, experts = self.router.choose(scores)  # (N, k) each
        capacity = self._rows_per_rank(batch_size * length)
        y, overflow = self.combine(tokens, weights, experts, capacity)  # (N, D)
        if indices is not None:
            y = y.new_zeros(batch_size * length, width).index_copy(0, indices, y)
        if not self.training:
            return y.view(x.shape), None

        # balancing losses and statistics
        if self.config.moe_scoring_func == "sigmoid":  # as probabilities (DeepSeek-V3, eq. 19)
            scores = scores / scores.sum(-1, keepdim=True)
        by_sequence = self.config.moe_lbl_scope in (None, "row")
        where = TokenIndices(batch_size, length, indices)
        statistics = LayerStatistics.compute(
            logits, scores, experts, where, by_sequence=by_sequence
        )
        routed = statistics.routed(
            self.statistics_groups, top_k=experts.shape[1], batch_size=batch_size
        )
        return y.view(x.shape), routed._replace(overflow=overflow)

    def _rows_per_rank(self, tokens: int) -> int | None:
        """Return the capacity in rows for `tokens` tokens, padding included; None: exact.

        All ranks have the same number of sequences and the same length, but not the same padding.
        """
        if self.group is None or self.capacity is None or not self.training:
            return None
        share = -(-tokens // self.n_parts) * self.config.moe_top_k / self.group.size()
        return math.ceil(min(self.capacity, self.group.size()) * share)

    def combine(
        self, x: Tensor, weights: Tensor, experts: Tensor, capacity: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sum of the chosen experts, plus the shared expert, for x (N, D).

        The second result is `TokenExchange.overflow`.
        """
        compute_experts = partial(self.experts, impl=self.config.moe_impl)
        if self.group is None:
            y = compute_experts(x, weights, experts)
            return y if self.shared is None else y + self.shared(x), None
        # expert parallelism: the shared expert overlaps with the all-to-all
        parts = zip(*(split_evenly(t, self.n_parts) for t in (x, weights, experts)), strict=True)
        exchanges = [
            TokenExchange(*part, n_experts=self.experts.n, group=self.group, capacity=capacity)
            for part in parts
        ]
        shared = None if self.shared is None else self.shared(x)
        if len(exchanges) == 1:
            (exchange,) = exchanges
            returned = [exchange.send_back(compute_experts(*exchange.arrived()))]
        else:
            started = [tensor for exchange in exchanges for tensor in exchange.started()]
            returned = compute_experts(*started, exchanges=exchanges)
        outputs = [e.combined(rows) for e, rows in zip(exchanges, returned, strict=True)]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        overflows = [e.overflow for e in exchanges if e.overflow is not None]
        overflow = torch.stack(overflows).sum() if overflows else None
        return y if shared is None else y + shared, overflow


def split_evenly(tokens: Tensor, n_parts: int) -> tuple[Tensor, ...]:
    """Return `n_parts` consecutive parts of tokens (N, …), of at most N / n_parts, rounded up."""
    if n_parts == 1:
        return (tokens,)
    return torch.tensor_split(tokens, n_parts)


@contextmanager
def exact_exchanges(model: nn.Module) -> Iterator[None]:
    """Context in which ranks send exact numbers of rows, whatever `MoE.capacity` is."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    capacities = [layer.capacity for layer in layers]
    for layer in layers:
        layer.capacity = None
    try:
        yield
    finally:
        for layer, capacity in zip(layers, capacities, strict=True):
            layer.capacity = capacity
