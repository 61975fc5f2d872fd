"""The `optimizer`, `gradient_clipping` and `ema` sections.

`OPTIMIZERS` is the table of optimizers; the checks, `--help`, the memory estimate and
`train/optim/optimizers.py` read the same record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from llmfoundry.recipe.checks import inert
from llmfoundry.recipe.choice_table import SHIPPED, ChoiceRecord, ChoiceTable, Code, check_settings
from llmfoundry.recipe.schema import POSITIVE, Only, Range, check_fields, choice

MOMENTS = ("bf16", "int8")
LEAST_BLOCKED = 4096  # smallest matrix with int8 optimizer state, in elements; as in bitsandbytes
MOST_BLOCK = 256  # values that share a scale; as in torchao
CLIPPING_TYPES = ("norm", "value", "adaptive")


@dataclass(frozen=True)
class OptimizerType(ChoiceRecord):
    """A kind of optimizer.

    Its constructor is called as `make(parameters or groups, **values)`, like the classes of
    torch.optim.
    """

    moments: int = field(default=2, kw_only=True)
    """Number of optimizer-state values per weight, for the memory estimate."""
    title: str = field(default="", kw_only=True)
    """Name in the metric lr-<title>/group0; unset: the name of the entry."""
    change: Callable[[OptimizerConfig], dict[str, Any]] = field(default=lambda _: {}, kw_only=True)
    """Function that returns the arguments of a group that differ from the section's settings."""
    split: Code | None = field(default=None, kw_only=True)
    """Function that splits the parameters of a group; unset: no split."""
    narrow: Code | None = field(default=None, kw_only=True)
    """Constructor that is used if the section sets `moments`."""
    multiplies: bool = field(default=False, kw_only=True)
    """Whether the update computes matrix multiplications. It then takes a `dtype` for them, which
    follows the recipe's precision."""

    def values(self, config: OptimizerConfig) -> dict[str, Any]:
        """Return the arguments of a group with the resolved settings `config`."""
        names = ["lr", *(key for key in self.keys if hasattr(config, key)), "weight_decay"]
        values = {name: getattr(config, name) for name in names} | config.kwargs
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return values | lists | self.change(config)


def _by_first_lr(config: OptimizerConfig) -> dict[str, Any]:
    """Return Composer's weight decay: AdamW's, divided by the initial learning rate."""
    return {"weight_decay": config.weight_decay / config.lr}


_ADAM = {"betas": [0.9, 0.95], "eps": 1e-8}
OPTIMIZERS = ChoiceTable(
    "optimizer.name",
    OptimizerType,
    {
        "decoupled_adamw": OptimizerType(
            SHIPPED,
            meaning="AdamW with weight decay weight_decay * lr / optimizer.lr (Composer).",
            keys=_ADAM,
            change=_by_first_lr,
            narrow=SHIPPED,
            title="DecoupledAdamW",
        ),
        "adamw": OptimizerType(
            SHIPPED,
            meaning="AdamW with weight decay weight_decay * lr (Loshchilov and Hutter, 2019).",
            keys=_ADAM,
            narrow=SHIPPED,
            title="AdamW",
        ),
        "decoupled_lionw": OptimizerType(
            SHIPPED,
            meaning="Lion (Chen et al., 2023), with the weight decay of decoupled_adamw.",
            keys={"betas": [0.9, 0.99]},
            moments=1,
            change=lambda config: {"initial_lr": config.lr},
            title="DecoupledLionW",
        ),
        "muon": OptimizerType(
            SHIPPED,
            meaning="orthogonalized updates (Jordan et al., 2024) for the matrices of the blocks,"
            " scaled to the size of AdamW's updates (Liu et al., 2025) so that one lr serves both;"
            " AdamW for embeddings, head, norms and biases.",
            keys={**_ADAM, "momentum": 0.95},
            split=SHIPPED,
            multiplies=True,
            title="Muon",
        ),
    },
)


@dataclass
class ParamGroupConfig:
    """A group of parameters with other settings; unset keys have the values of the section."""

    param_str_match: str = ""
    """A regular expression that is searched for in parameter names. A parameter belongs to the
    first group that matches it."""
    lr: Annotated[float | None, POSITIVE] = None
    """Peak learning rate of the group. The schedule stays the same."""
    weight_decay: Annotated[float | None, Range(0)] = None
    """Weight decay of the group."""
    betas: list[float] | None = None
    """beta1 and beta2 of the group."""
    eps: Annotated[float | None, POSITIVE] = None
    """The eps of the group."""

    def check(self, key: str, optimizer: str) -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_regex(f"{key}param_str_match", self.param_str_match)
        values = (self.lr, self.weight_decay, self.betas, self.eps)
        if all(value is None for value in values):
            yield f"{key}param_str_match: the group changes nothing; remove it, or give it an lr"
        yield from check_fields(key, self)
        yield from check_betas(f"{key}betas", self.betas)
        if optimizer in OPTIMIZERS:
            unused = [name for name in ("betas", "eps") if name not in OPTIMIZERS[optimizer].keys]
            yield from inert(key, self, unused, f"with optimizer.name: {optimizer}")


@dataclass
class OptimizerConfig:
    """How gradients become weight updates."""

    name: Annotated[str, choice(OPTIMIZERS)] = "decoupled_adamw"
    """The update rule. Both kinds of AdamW run PyTorch's fused kernel."""
    lr: Annotated[float, POSITIVE] = 6e-4
    """Peak learning rate."""
    betas: Annotated[list[float] | None, Only("name", OPTIMIZERS.taking("betas"))] = None
    """beta1 and beta2. AdamW: decay rates of the running mean of the gradient and of its square,
    [0.9, 0.95]; muon uses them for the parameters that AdamW updates. decoupled_lionw: beta1 of the
    update and beta2 of the momentum, [0.9, 0.99]."""
    eps: Annotated[float | None, POSITIVE, Only("name", OPTIMIZERS.taking("eps"))] = None
    """Added to the denominator of AdamW's update; default 1e-8."""
    momentum: Annotated[float | None, Only("name", OPTIMIZERS.taking("momentum"))] = None
    """Momentum of the gradient before it is orthogonalized; default 0.95."""
    weight_decay: Annotated[float, Range(0)] = 0.0
    """Weight decay. Each step shrinks the weights by weight_decay * lr with adamw and muon, and by
    weight_decay * lr / optimizer.lr with decoupled_adamw and decoupled_lionw."""
    moments: Annotated[
        str | None, choice(MOMENTS), Only("name", OPTIMIZERS.names(lambda kind: bool(kind.narrow)))
    ] = None
    """dtype of the optimizer state between steps. bf16: half the memory of fp32, with stochastic
    rounding. int8: a quarter of it, in blocks of 256 values with one scale each (Dettmers et al.,
    2022; extra lowp); vectors, and matrices of less than 4,096 values, stay fp32. Unset: the dtype
    of the weights, with PyTorch's fused kernel, which is the fastest."""
    param_groups: list[ParamGroupConfig] = field(default_factory=list)
    """Groups of parameters with other settings, selected by a regular expression."""
    disable_grad: list[str] = field(default_factory=list)
    """Regular expressions of the names of parameters that do not train."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of an optimizer that a plugin adds."""

    def check(self, key: str = "optimizer.") -> Iterator[str]:
        """Yield an error line for each invalid value."""
        yield from check_fields(key, self)
        yield from check_betas(f"{key}betas", self.betas)
        if self.momentum is not None and not 0 <= self.momentum < 1:
            yield f"{key}momentum: {self.momentum}; write a number in [0, 1)"
        if self.name in OPTIMIZERS:
            own_keys = OPTIMIZERS[self.name].own_keys(self)
            yield from check_settings(f"{key}kwargs.", self.kwargs, own_keys)
        for index, group in enumerate(self.param_groups):
            yield from group.check(f"{key}param_groups[{index}].", self.name)
        for index, pattern in enumerate(self.disable_grad):
            yield from check_regex(f"{key}disable_grad[{index}]", pattern)

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.name in OPTIMIZERS:  # unknown if the plugin of a run is not imported
            OPTIMIZERS[self.name].fill(self)

    def moment_bytes(self, weight: int) -> float:
        """Return the bytes of optimizer state per weight of `weight` bytes."""
        each = {None: float(weight), "bf16": 2.0, "int8": 1 + 4 / MOST_BLOCK}[self.moments]
        return OPTIMIZERS[self.name].moments * each


class ResolvedOptimizerConfig(OptimizerConfig):
    """`OptimizerConfig` with defaults resolved."""

    betas: list[float]
    eps: float
    momentum: float


def check_betas(key: str, betas: list[float] | None) -> Iterator[str]:
    """Check that betas are two numbers in [0, 1)."""
    if betas is not None and (len(betas) != 2 or not all(0 <= beta < 1 for beta in betas)):
        yield f"{key}: {list(betas)}; write two numbers in [0, 1), such as [0.9, 0.95]"


def check_regex(key: str, pattern: str) -> Iterator[str]:
    """Check that a regular expression is valid and not empty."""
    if not pattern:
        yield f"{key}: is empty; write a regular expression, such as norm"
    try:
        re.compile(pattern)
    except re.error as error:
        yield f"{key}: {pattern!r} is not a regular expression: {error}"


@dataclass
class GradientClippingConfig:
    """Gradient clipping, applied once to all parameters before the optimizer step."""

    clipping_type: Annotated[str, choice(CLIPPING_TYPES)] = "norm"
    """norm: scale the gradient so that its global L2 norm is at most clipping_threshold. value:
    clamp each element of the gradient to [-clipping_threshold, clipping_threshold]. adaptive: scale
    each row of a gradient so that its norm is at most clipping_threshold times the norm of the
    weights in that row (Brock et al., 2021)."""
    clipping_threshold: Annotated[float, Range(above=0, infinite=True)] = 1.0
    """The limit. Infinity (.inf) turns clipping off."""

    def check(self, key: str = "gradient_clipping.") -> Iterator[str]:
        """Yield an error line for each invalid value."""
        yield from check_fields(key, self)


AVERAGE_BYTES = 4  # of an averaged weight, which is fp32


@dataclass
class EmaConfig:
    """An exponential moving average (EMA) of the trained weights, kept next to them in fp32.

    It is sharded like the weights, and saved in every checkpoint. `eval.weights: ema` evaluates it.
    """

    decay: Annotated[float | None, Range(above=0, below=1)] = None
    """The average keeps min(decay, (1 + n) / (10 + n)) of its value in step n, and takes the rest
    from the weights after that step. The second term shortens the average of a young run, which
    would otherwise consist of its initial weights. Such as 0.999; unset: no average."""

    def check(self, key: str = "ema.") -> Iterator[str]:
        """Yield an error line for each invalid value."""
        yield from check_fields(key, self)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the average per trained weight."""
        return 0 if self.decay is None else AVERAGE_BYTES
