"""The mixture-of-experts layer: a router and stacked experts, here or on several processes.

`decoder.py` puts it where a feed-forward layer stands; the products are `ops.moe.mixture`'s,
what the router did is reported by `router.py`. Where processes share the experts, tokens travel to
them and back (`ops/moe/dispatch.py`).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from llmfoundry.models.layers import FFN
from llmfoundry.models.low_rank import LowRank
from llmfoundry.models.router import OtherTokens, Places, Routed, Router, Statistics
from llmfoundry.ops.activations import to_text
from llmfoundry.ops.devices import to_autocast_dtype
from llmfoundry.ops.moe.dispatch import TokenExchange
from llmfoundry.ops.moe.experts import Experts, LowRankExperts
from llmfoundry.ops.moe.mixture import mixture
from llmfoundry.ops.nf4 import Nf4Layout, dequantize
from llmfoundry.ops.shard_layout import full_tensor
from llmfoundry.recipe.model import ModelConfig


class ExpertWeights(nn.Module):
    """The weights of all experts, in the shapes of DBRX and megablocks: expert after expert.

    w1 (the gate; of an MLP the up projection), v1 (the up projection beside a gate) and w2 (the
    down projection, not transposed) are (E * f, D), so that FSDP cuts them into even rows whatever
    the number of experts. Biases are vectors: (E * f,), and w2's (E * D,).

    Adapters stand beside them, stacked alike: `w1_lora_A` (E * r, in), `w1_lora_B` (E * out, r); a
    pair that all experts share has no E.

    Under expert parallelism (`distributed/experts.py`) parameters are DTensors cut into whole
    experts, those without E the same on every process; what computes takes this process's part.

    Attributes:
        n: E, of all processes together.
        lora: the adapters by the weight's name.
        packing: how one expert's frozen matrix lies in bytes (`models/quantized.py`): each weight
            then is uint8 (E * packing.nbytes,); None: they are not quantized.
    """

    MATRICES = ("w1", "v1", "w2")
    w1: nn.Parameter
    packing: Nf4Layout | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        ffn, self.d = config.ffn_config, config.d_model
        assert ffn.ffn_hidden_size and ffn.moe_num_experts, "the recipe was not filled"
        self.n, self.f = ffn.moe_num_experts, ffn.ffn_hidden_size
        self.activation = to_text(*ffn.activation)
        self.lora: dict[str, LowRank] = {}
        outputs = {"w1": self.f, "v1": self.f, "w2": self.d}
        for name, width in outputs.items():
            if name == "v1" and ffn.mlp_type != "glu":
                continue
            self.register_parameter(name, nn.Parameter(torch.empty(self.n * self.f, self.d)))
            if not config.no_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(self.n * width)))

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, *, impl: str) -> Tensor:
        """`mixture` of the experts that are here: a call, for FSDP's hooks around it."""
        return mixture(x, weights, experts, self.experts(), impl=impl)

    def experts(self) -> Experts:
        """This process's weights as `mixture` takes them, with a dimension of experts."""

        def view(name: str, *shape: int) -> Tensor | None:
            return _here(getattr(self, name)).view(-1, *shape) if hasattr(self, name) else None

        shape = (self.f, self.d) if self.packing is None else (self.packing.nbytes,)
        w1, v1, w2 = (view(name, *shape) for name in self.MATRICES)
        assert w1 is not None and w2 is not None
        b1, bv, b2 = view("w1_bias", self.f), view("v1_bias", self.f), view("w2_bias", self.d)
        low = LowRankExperts(*(f for name in self.MATRICES for f in self.factors(name)))
        return Experts(w1, v1, w2, b1, bv, b2, self.activation, low, self.packing)

    def dense(self, name: str) -> Tensor | None:
        """The frozen or trained weight `name` (E, f, D), without adapters; None: there is none.

        A quantized one in fp32, without gradient.
        """
        weight = getattr(self, name, None)
        if weight is None or self.packing is None:
            return None if weight is None else full_tensor(weight).view(self.n, self.f, self.d)
        shape, parts = (self.f, self.d), full_tensor(weight).view(self.n, -1)
        each = (dequantize(p, shape, torch.float32, double=self.packing.double) for p in parts)
        return torch.stack(list(each))

    def factors(self, name: str) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """What is added to `name`: a (E, R, in) and b (E, out, R), the scale in b."""
        lora = self.lora.get(name)
        if lora is None or not lora.on:
            return None, None
        b = self._by_expert(f"{name}_lora_B", lora)
        return self._by_expert(f"{name}_lora_A", lora), b * lora.scaling

    def _by_expert(self, name: str, lora: LowRank) -> Tensor:
        """(E, rows, columns) of the factor `name`, E the experts here: a shared one is repeated."""
        factor = _here(getattr(self, name))
        rows = self.f if self.packing is None else self.packing.nbytes
        here = len(_here(self.w1)) // rows
        count = 1 if lora.shared else here
        return factor.view(count, -1, factor.shape[1]).expand(here, -1, -1)


def _here(parameter: Tensor) -> Tensor:
    """This process's part; of what all have alike each finds another share of the gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    kinds = [Partial() if place.is_replicate() else place for place in parameter.placements]
    return parameter.to_local(grad_placements=kinds)


class MoE(nn.Module):
    """A router sends each token to k of E experts, whatever their load; all give is added up.

    Scores are the softmax over all experts; the k highest are chosen, and weigh what their experts
    give, divided by their p-norm where the recipe says so.

    Args:
        config: filled.

    Attributes:
        group: the processes that share the experts; None: all are here.
        others: whose tokens count in `Routed`, as `distributed/experts.py` sets it.
    """

    group: dist.ProcessGroup | None = None
    others = OtherTokens()

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = ffn = config.ffn_config
        self.router, self.experts = Router(config), ExpertWeights(config)
        self.shared = None
        if ffn.shared_expert_hidden_size is not None:
            gated = ffn.mlp_type == "glu"
            self.shared = FFN(config, gated=gated, hidden=ffn.shared_expert_hidden_size)

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Routed | None]:
        """Transform x (B, T, D) token by token.

        Args:
            x: tokens of B rows.
            real: (N,) int64, flat places b * T + t of tokens that are no padding; the others come
                back as zeros, and no expert sees them. None: all.
        """
        tokens = x.flatten(0, 1)  # (B * T, D)
        if real is not None:
            tokens = tokens.index_select(0, real)  # (N, D)
        tokens = to_autocast_dtype(tokens)  # once: the router and the experts keep the same copy
        logits = self.router(tokens)  # (N, E)
        scores = logits.softmax(-1)
        weights, experts = self.router.choose(scores)  # (N, k) each
        y = self.mixed(tokens, weights, experts)  # (N, D)
        if real is not None:
            y = y.new_zeros(x.shape[0] * x.shape[1], x.shape[2]).index_copy(0, real, y)
        if not self.training:
            return y.view(x.shape), None
        by_row = self.config.moe_lbl_scope in (None, "row")
        places = Places(x.shape[0], x.shape[1], real)
        found = Statistics.of(logits, scores, experts, places, by_row=by_row)
        return y.view(x.shape), found.routed(self.others, top_k=experts.shape[1], rows=x.shape[0])

    def mixed(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """What the experts chosen, here or elsewhere, and the shared one give for x (N, D)."""
        assert self.config.moe_impl is not None, "the recipe was not filled"
        multiply = partial(self.experts, impl=self.config.moe_impl)
        if self.group is None:
            y = multiply(x, weights, experts)
            return y if self.shared is None else y + self.shared(x)
        exchange = TokenExchange(x, experts, n_experts=self.experts.n, group=self.group)
        shared = None if self.shared is None else self.shared(x)  # while rows travel
        rows, here = exchange.arrived()  # (M, D) and (M, 1)
        exchange.send_back(multiply(rows, weights.new_ones(here.shape), here))
        y = exchange.combined(weights)
        return y if shared is None else y + shared
