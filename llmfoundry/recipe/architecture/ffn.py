"""The `model.ffn_config` section: the feed-forward layer, its activation, its experts.

The keys of a mixture of experts have LLM Foundry's and megablocks' names where the meaning is
theirs, and stand flat beside the other keys of the layer, as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

from llmfoundry.recipe.values.bounds import POSITIVE, WIDTH, Range, choice, out_of_bounds
from llmfoundry.recipe.values.checks import inert, one_of, set_defaults

FFN_TYPES = ("mptmlp", "mptglu", "dmoe")
OTHER_MOE_NAMES = {  # LLM Foundry's, of which each is something else
    "torch_dmoe": "is LLM Foundry's name of a mixture without a balancing loss; write dmoe",
    "mb_dmoe": "is LLM Foundry's name of megablocks' mixture; write dmoe",
    "mb_moe": "is LLM Foundry's name of a mixture that drops tokens, which dmoe never does; write"
    " dmoe",
}
MLP_TYPES = ("mlp", "glu")
BALANCING = ("loss", "bias", "none")
LBL_SCOPES = ("row", "microbatch", "global")
MOE_IMPLS = ("grouped_mm", "torch", "megablocks")

ACTIVATIONS: dict[str, tuple[str, ...]] = {  # element by element, and the arguments each takes
    "gelu": ("approximate",),
    "gelu_tanh": (),
    "quick_gelu": (),
    "silu": (),
    "relu": (),
    "relu2": (),
    "relu6": (),
    "leaky_relu": ("negative_slope",),
    "elu": ("alpha",),
    "celu": ("alpha",),
    "selu": (),
    "mish": (),
    "softplus": ("beta", "threshold"),
    "softsign": (),
    "sigmoid": (),
    "logsigmoid": (),
    "tanh": (),
    "tanhshrink": (),
    "softshrink": ("lambd",),
    "hardshrink": ("lambd",),
    "hardsigmoid": (),
    "hardswish": (),
    "hardtanh": ("min_val", "max_val"),
}


@dataclass
class FFNConfig:
    """The feed-forward layer."""

    REMOVED: ClassVar[dict[str, str]] = {
        "moe_compress_activations": "experts are compressed with all else of their blocks; remove"
        " it, and write parallel.activation_compression: int8"
    }
    ffn_type: Annotated[str, choice(FFN_TYPES, reasons=OTHER_MOE_NAMES)] = "mptmlp"
    """mptmlp: down(act(up x)). mptglu: down(act(gate x) * up x) (Shazeer, 2020). dmoe: a dropless
    mixture of such layers (Gale et al., 2022), of which a router chooses a few for each token."""
    ffn_act_fn: Annotated[str | dict[str, Any], choice(ACTIVATIONS)] = "gelu"
    """An elementwise function of torch.nn.functional, gelu_tanh, quick_gelu or relu2 (squared);
    with arguments as {name: leaky_relu, negative_slope: 0.1}."""
    ffn_hidden_size: Annotated[int | None, WIDTH] = None
    """Inner width, of one expert where there are several; unset: d_model * expansion_ratio."""
    moe_num_experts: Annotated[int | None, Range(1, 2**16)] = None
    """Only for dmoe, which requires it: number of experts of a layer."""
    moe_top_k: Annotated[int | None, Range(1, 2**16)] = None
    """Only for dmoe: experts that a token visits; default 1."""
    mlp_type: Annotated[str | None, choice(MLP_TYPES)] = None
    """Only for dmoe: the kind of each expert, mlp (as mptmlp; the default) or glu."""
    moe_normalize_expert_weights: Annotated[float | None, POSITIVE] = None
    """Only for dmoe: divide a token's expert weights by their p-norm, for this p; 1 makes their sum
    1, as DBRX does. Unset: they stay probabilities among all experts."""
    moe_jitter_eps: float | None = None
    """Only for dmoe: while training the router's input is multiplied by random numbers from
    1 - this to 1 + this (Fedus et al., 2021); unset: no noise."""
    moe_balancing: Annotated[str | None, choice(BALANCING)] = None
    """Only for dmoe: what keeps experts equally loaded. loss: the load-balancing loss (Shazeer et
    al., 2017; the default). bias: a number added to each expert's score where experts are
    chosen, moved after every step (Wang et al., 2024). none: nothing."""
    moe_loss_weight: Annotated[float | None, POSITIVE] = None
    """Only with moe_balancing: loss, its weight (its value at perfect balance); default 0.01."""
    moe_lbl_scope: Annotated[str | None, choice(LBL_SCOPES)] = None
    """Only with moe_balancing: loss, over which tokens loads are counted: of each row (the
    default: the same whatever the microbatch), of each microbatch, as megablocks does, or global:
    of the microbatches of all processes together (Qiu et al., 2025), which lets experts specialise
    in kinds of text; a message of a few hundred numbers a layer more."""
    moe_bias_update_rate: Annotated[float | None, POSITIVE] = None
    """Only with moe_balancing: bias, how far a step moves a bias; default 0.001."""
    moe_zloss_weight: Annotated[float | None, POSITIVE] = None
    """Only for dmoe: weight of the router z-loss, the mean squared logsumexp of the router's logits
    (Zoph et al., 2022, take 0.001); unset: no such loss."""
    shared_expert_hidden_size: Annotated[int | None, WIDTH] = None
    """Only for dmoe: inner width of an expert that every token visits beside those chosen, with
    weight 1; unset: none."""
    uniform_expert_assignment: bool | None = None
    """Only for dmoe, to measure speed: experts in turn, with the weights of those chosen."""
    moe_force_balance: bool | None = None
    """Only for dmoe, to measure speed: experts in turn, each with its own weight."""
    moe_impl: Annotated[str | None, choice(MOE_IMPLS)] = None
    """Only for dmoe: who multiplies. grouped_mm (the default): one operator for all experts.
    torch: one expert after another, the slow reference. megablocks: that package, on CUDA."""

    @property
    def active_share(self) -> float:
        """Share of the experts that a token visits; 1 where there are none to choose from."""
        if self.ffn_type != "dmoe":
            return 1.0
        assert self.moe_top_k and self.moe_num_experts, "the recipe was not filled"
        return self.moe_top_k / self.moe_num_experts

    @property
    def activation(self) -> tuple[str, dict[str, Any]]:
        """Name and arguments of the activation, however it was written."""
        if isinstance(self.ffn_act_fn, str):
            return self.ffn_act_fn, {}
        arguments = dict(self.ffn_act_fn)
        return str(arguments.pop("name", "")), arguments

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be."""
        if (yield from out_of_bounds(key, self)):
            return
        yield from self._check_moe(key)
        yield from self._check_activation(f"{key}ffn_act_fn")

    def _check_moe(self, key: str) -> Iterator[str]:
        """Of the mixture's keys."""
        if self.ffn_type != "dmoe":
            yield from inert(key, self, MOE_KEYS, "without ffn_type: dmoe")
            return
        yield from self._check_router(key)
        yield from self._check_balancing(key)

    def _check_router(self, key: str) -> Iterator[str]:
        if self.moe_num_experts is None:
            yield f"{key}moe_num_experts: ffn_type: dmoe needs it; write a number of experts"
        elif self.moe_top_k is not None and self.moe_top_k > self.moe_num_experts:
            yield (
                f"{key}moe_top_k: {self.moe_top_k} is more than moe_num_experts"
                f" ({self.moe_num_experts}); write at most that"
            )
        eps = self.moe_jitter_eps
        if eps is not None and not 0 < eps < 1:
            yield f"{key}moe_jitter_eps: {eps}; write a number between 0 and 1, or remove it"
        if self.uniform_expert_assignment and self.moe_force_balance:
            why = "and uniform_expert_assignment exclude each other; set one of them to false"
            yield f"{key}moe_force_balance: {why}"

    def _check_balancing(self, key: str) -> Iterator[str]:
        chosen = self.moe_balancing or "loss"
        if chosen != "loss":
            why = f"with moe_balancing: {chosen}"
            yield from inert(key, self, ["moe_loss_weight", "moe_lbl_scope"], why)
        if chosen != "bias":
            why = "without moe_balancing: bias"
            yield from inert(key, self, ["moe_bias_update_rate"], why)

    def _check_activation(self, key: str) -> Iterator[str]:
        name, arguments = self.activation
        if not name:
            yield f"{key}: has no name; write {{name: gelu}}"
            return
        yield from one_of(key, name, ACTIVATIONS)
        for argument, value in arguments.items():
            if argument not in ACTIVATIONS.get(name, (argument,)):
                takes = ", ".join(ACTIVATIONS[name]) or "no arguments"
                yield f"{key}.{argument}: {name} takes {takes}; remove it"
            elif argument == "approximate":
                yield from one_of(f"{key}.{argument}", value, ("none", "tanh"))
            elif isinstance(value, bool) or not isinstance(value, int | float):
                yield f"{key}.{argument}: {value!r} is not a number"

    def fill(self) -> None:
        """Write derived values in place."""
        if self.ffn_type != "dmoe":
            return
        set_defaults(self, moe_top_k=1, mlp_type="mlp", moe_balancing="loss", moe_impl="grouped_mm")
        set_defaults(self, uniform_expert_assignment=False, moe_force_balance=False)
        if self.moe_balancing == "loss":
            set_defaults(self, moe_loss_weight=0.01, moe_lbl_scope="row")
        if self.moe_balancing == "bias":
            set_defaults(self, moe_bias_update_rate=1e-3)


OF_EVERY_LAYER = ("ffn_type", "ffn_act_fn", "ffn_hidden_size")
MOE_KEYS = [field.name for field in fields(FFNConfig) if field.name not in OF_EVERY_LAYER]
"""Those that have no effect without experts."""
