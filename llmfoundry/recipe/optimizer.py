"""The `optimizer` and `gradient_clipping` sections."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from llmfoundry.recipe.checks import inert
from llmfoundry.recipe.choice_table import ChoiceRecord, ChoiceTable, check_settings
from llmfoundry.recipe.schema import POSITIVE, Range, choice, out_of_bounds

MOMENTS = ("bf16", "int8")
LEAST_BLOCKED = 4096  # values of a matrix whose moments are worth int8, as bitsandbytes has it
MOST_BLOCK = 256  # values that share a scale; torchao has the same
CLIPPING_TYPES = ("norm", "value", "adaptive")


@dataclass(frozen=True)
class OptimizerType(ChoiceRecord):
    """A kind of optimizer: `make(parameters or groups, **values)`, as torch.optim's classes."""

    moments: int = field(default=2, kw_only=True)
    """Numbers that it keeps of a weight, for the estimate of memory."""
    title: str = field(default="", kw_only=True)
    """In the metric lr-<title>/group0; unset: the entry's name."""
    change: Callable[[OptimizerConfig], dict[str, Any]] = field(default=lambda _: {}, kw_only=True)
    """Arguments of a group that are not the settings as they are written."""
    split: str = field(default="", kw_only=True)
    """What splits a group for it, "package.module:function"; unset: nothing does."""
    narrow: str = field(default="", kw_only=True)
    """What is made in its place where the section names `moments`, "package.module:function"."""
    multiplies: bool = field(default=False, kw_only=True)
    """Its update has matrix products: it takes their `dtype`, that of the recipe's precision."""

    def values(self, config: OptimizerConfig) -> dict[str, Any]:
        """The arguments of a group whose settings, filled, are `config`."""
        names = ["lr", *(key for key in self.keys if hasattr(config, key)), "weight_decay"]
        values = {name: getattr(config, name) for name in names} | config.kwargs
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return values | lists | self.change(config)


def _by_first_lr(config: OptimizerConfig) -> dict[str, Any]:
    """Composer's decay, which is AdamW's divided by the first learning rate."""
    return {"weight_decay": config.weight_decay / config.lr}


_BUILT = "llmfoundry.train.optim"
_NARROW = f"{_BUILT}.low_precision:LowPrecisionAdamW"
_ADAM = {"betas": [0.9, 0.95], "eps": 1e-8}
OPTIMIZERS = ChoiceTable(
    "optimizer.name",
    OptimizerType,
    {
        "decoupled_adamw": OptimizerType(
            f"{_BUILT}.optimizers:fused_adamw",
            meaning="weights shrink by weight_decay * lr / (first lr) (Composer).",
            keys=_ADAM,
            change=_by_first_lr,
            narrow=_NARROW,
            title="DecoupledAdamW",
        ),
        "adamw": OptimizerType(
            f"{_BUILT}.optimizers:fused_adamw",
            meaning="weights shrink by weight_decay * lr (Loshchilov and Hutter, 2019).",
            keys=_ADAM,
            narrow=_NARROW,
            title="AdamW",
        ),
        "decoupled_lionw": OptimizerType(
            f"{_BUILT}.optimizers:DecoupledLionW",
            meaning="the sign of a running mean (Chen et al., 2023), decay as decoupled_adamw.",
            keys={"betas": [0.9, 0.99]},
            moments=1,
            change=lambda config: {"initial_lr": config.lr},
            title="DecoupledLionW",
        ),
        "muon": OptimizerType(
            f"{_BUILT}.muon:Muon",
            meaning="orthogonal updates (Jordan et al., 2024) for the blocks' matrices, scaled to"
            " AdamW's size (Liu et al., 2025) so that one lr serves both; AdamW for embeddings,"
            " head, norms and biases.",
            keys={**_ADAM, "momentum": 0.95},
            split=f"{_BUILT}.optimizers:muon_parts",
            multiplies=True,
            title="Muon",
        ),
    },
)


@dataclass
class ParamGroupConfig:
    """Parameters that the optimizer treats otherwise; unset: as in the optimizer section."""

    param_str_match: str = ""
    """A regular expression that is found in the parameters' names; the first group that matches
    takes a parameter."""
    lr: Annotated[float | None, POSITIVE] = None
    """Peak learning rate; the schedule is the same."""
    weight_decay: Annotated[float | None, Range(0)] = None
    """Shrinkage each step."""
    betas: list[float] | None = None
    """Decay of the running means."""
    eps: Annotated[float | None, POSITIVE] = None
    """Added to the root of the running square."""

    def check(self, key: str, optimizer: str) -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from check_regex(f"{key}param_str_match", self.param_str_match)
        values = (self.lr, self.weight_decay, self.betas, self.eps)
        if all(value is None for value in values):
            yield f"{key}param_str_match: the group changes nothing; remove it, or give it an lr"
        yield from out_of_bounds(key, self)
        yield from check_betas(f"{key}betas", self.betas)
        if optimizer in OPTIMIZERS:
            unused = [name for name in ("betas", "eps") if name not in OPTIMIZERS[optimizer].keys]
            yield from inert(key, self, unused, f"with optimizer.name: {optimizer}")


@dataclass
class OptimizerConfig:
    """How gradients become updates."""

    name: Annotated[str, choice(OPTIMIZERS)] = "decoupled_adamw"
    """The rule of the update; both kinds of AdamW run PyTorch's fused kernel."""
    lr: Annotated[float, POSITIVE] = 6e-4
    """Peak learning rate."""
    betas: list[float] | None = None
    """Decay of the running mean and of the running square, [0.9, 0.95]; for decoupled_lionw of
    the mean that steps and of the mean that is kept, [0.9, 0.99]; for muon of its AdamW."""
    eps: Annotated[float | None, POSITIVE] = None
    """Not for decoupled_lionw: added to the root of the running square; default 1e-8."""
    momentum: float | None = None
    """Only for muon: decay of the running gradient that is made orthogonal, 0.95."""
    weight_decay: Annotated[float, Range(0)] = 0.0
    """Shrinkage each step; times lr for adamw and muon, times lr / (first lr) for decoupled_*."""
    moments: Annotated[str | None, choice(MOMENTS)] = None
    """Only for adamw and decoupled_adamw: what their moments are kept in between steps. bf16, with
    stochastic rounding: half of fp32. int8: a quarter, in blocks of 256 with a scale each (Dettmers
    et al., 2022; extra lowp); vectors, and matrices of less than 4,096 values, stay fp32. Unset:
    the dtype of the weights, by PyTorch's fused kernel, which is the fastest."""
    param_groups: list[ParamGroupConfig] = field(default_factory=list)
    """Parameters, by regular expression, with values of their own."""
    disable_grad: list[str] = field(default_factory=list)
    """Regular expressions of parameters that do not train."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Only for a plugin's optimizer: its own settings."""

    def check(self, key: str = "optimizer.") -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from out_of_bounds(key, self)
        yield from check_betas(f"{key}betas", self.betas)
        if self.name in OPTIMIZERS:
            kind = OPTIMIZERS[self.name]
            unused = [name for name in ("betas", "eps") if name not in kind.keys]
            yield from inert(key, self, unused, f"with name: {self.name}")
            if "momentum" not in kind.keys:
                yield from inert(key, self, ["momentum"], "without name: muon")
            elif self.momentum is not None and not 0 <= self.momentum < 1:
                yield f"{key}momentum: {self.momentum}; write a number in [0, 1)"
            if not kind.narrow:
                others = [name for name, other in OPTIMIZERS.items() if other.narrow]
                yield from inert(key, self, ["moments"], f"without name: {' or '.join(others)}")
            yield from check_settings(f"{key}kwargs.", self.kwargs, kind.own_keys(self))
        for index, group in enumerate(self.param_groups):
            yield from group.check(f"{key}param_groups[{index}].", self.name)
        for index, pattern in enumerate(self.disable_grad):
            yield from check_regex(f"{key}disable_grad[{index}]", pattern)

    def fill(self) -> None:
        """Write derived values in place."""
        if self.name in OPTIMIZERS:  # of a run with a plugin that is not here, who knows
            OPTIMIZERS[self.name].fill(self)

    def moment_bytes(self, weight: int) -> float:
        """Bytes of all moments of a weight of `weight` bytes, for the estimate of memory."""
        each = {None: float(weight), "bf16": 2.0, "int8": 1 + 4 / MOST_BLOCK}[self.moments]
        return OPTIMIZERS[self.name].moments * each


def check_betas(key: str, betas: list[float] | None) -> Iterator[str]:
    """Two numbers in [0, 1)."""
    if betas is not None and (len(betas) != 2 or not all(0 <= beta < 1 for beta in betas)):
        yield f"{key}: {list(betas)}; write two numbers in [0, 1), such as [0.9, 0.95]"


def check_regex(key: str, pattern: str) -> Iterator[str]:
    """A regular expression that matches something."""
    if not pattern:
        yield f"{key}: is empty; write a regular expression, such as norm"
    try:
        re.compile(pattern)
    except re.error as error:
        yield f"{key}: {pattern!r} is not a regular expression: {error}"


@dataclass
class GradientClippingConfig:
    """A bound on the gradient, applied once for all parameters before the optimizer."""

    clipping_type: Annotated[str, choice(CLIPPING_TYPES)] = "norm"
    """norm: scale the gradient so that its global L2 norm is at most clipping_threshold. value:
    clamp each of its elements to [-clipping_threshold, clipping_threshold]. adaptive: scale each
    row of a gradient so that its norm is at most clipping_threshold times its weights' norm (Brock
    et al., 2021)."""
    clipping_threshold: Annotated[float, Range(above=0, infinite=True)] = 1.0
    """The bound; infinity (.inf) bounds nothing."""

    def check(self, key: str = "gradient_clipping.") -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from out_of_bounds(key, self)
