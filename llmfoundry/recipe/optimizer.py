"""The `optimizer` and `gradient_clipping` sections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from llmfoundry.recipe.checks import above, at_least, one_of

OPTIMIZERS = ("decoupled_adamw", "adamw")


@dataclass
class OptimizerConfig:
    """How gradients become updates."""

    name: str = "decoupled_adamw"
    """decoupled_adamw: weights shrink by weight_decay * lr / (first lr) (Composer). adamw: by
    weight_decay * lr (Loshchilov and Hutter, 2019). Both run PyTorch's fused kernel."""
    lr: float = 6e-4
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of the running mean and of the running square of the gradient."""
    eps: float = 1e-8
    """Added to the root of the running square."""
    weight_decay: float = 0.0
    """Shrinkage each step; the two optimizers scale it differently."""

    def check(self, key: str = "optimizer.") -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from one_of(f"{key}name", self.name, OPTIMIZERS)
        yield from above(f"{key}lr", self.lr, 0)
        yield from above(f"{key}eps", self.eps, 0)
        yield from at_least(f"{key}weight_decay", self.weight_decay, 0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            given = list(self.betas)
            yield f"{key}betas: {given}; write two numbers in [0, 1), such as [0.9, 0.95]"


@dataclass
class GradientClippingConfig:
    """A bound on the gradient, applied once for all parameters before the optimizer."""

    clipping_type: str = "norm"
    """norm: scale the gradient so that its global L2 norm is at most clipping_threshold."""
    clipping_threshold: float = 1.0
    """The largest norm; infinity (.inf) only measures it."""

    def check(self, key: str = "gradient_clipping.") -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from one_of(f"{key}clipping_type", self.clipping_type, ("norm",))
        yield from above(f"{key}clipping_threshold", self.clipping_threshold, 0)
