"""The `optimizer` and `gradient_clipping` sections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmfoundry.recipe.checks import above, at_least, fill, inert, one_of

OPTIMIZERS = ("decoupled_adamw", "adamw", "decoupled_lionw")
CLIPPING_TYPES = ("norm", "value")


@dataclass
class OptimizerConfig:
    """How gradients become updates."""

    name: str = "decoupled_adamw"
    """decoupled_adamw: weights shrink by weight_decay * lr / (first lr) (Composer). adamw: by
    weight_decay * lr (Loshchilov and Hutter, 2019). Both run PyTorch's fused kernel.
    decoupled_lionw: the sign of a running mean (Chen et al., 2023), decay as decoupled_adamw."""
    lr: float = 6e-4
    """Peak learning rate."""
    betas: list[float] | None = None
    """Decay of the running mean and of the running square, [0.9, 0.95]; for decoupled_lionw of
    the mean that steps and of the mean that is kept, [0.9, 0.99]."""
    eps: float | None = None
    """Not for decoupled_lionw: added to the root of the running square; 1e-8."""
    weight_decay: float = 0.0
    """Shrinkage each step; the two optimizers scale it differently."""

    def check(self, key: str = "optimizer.") -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from one_of(f"{key}name", self.name, OPTIMIZERS)
        yield from above(f"{key}lr", self.lr, 0)
        yield from above(f"{key}eps", self.eps, 0)
        yield from at_least(f"{key}weight_decay", self.weight_decay, 0)
        betas = self.betas
        if betas is not None and (len(betas) != 2 or not all(0 <= beta < 1 for beta in betas)):
            yield f"{key}betas: {list(betas)}; write two numbers in [0, 1), such as [0.9, 0.95]"
        if self.name == "decoupled_lionw":
            yield from inert(key, self, ["eps"], f"with name: {self.name}")

    def fill(self) -> None:
        """Write derived values in place."""
        if self.name == "decoupled_lionw":
            fill(self, betas=[0.9, 0.99])
        else:
            fill(self, betas=[0.9, 0.95], eps=1e-8)


@dataclass
class GradientClippingConfig:
    """A bound on the gradient, applied once for all parameters before the optimizer."""

    clipping_type: str = "norm"
    """norm: scale the gradient so that its global L2 norm is at most clipping_threshold. value:
    clamp each of its elements to [-clipping_threshold, clipping_threshold]."""
    clipping_threshold: float = 1.0
    """The bound; infinity (.inf) bounds nothing."""

    def check(self, key: str = "gradient_clipping.") -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from one_of(f"{key}clipping_type", self.clipping_type, CLIPPING_TYPES)
        yield from above(f"{key}clipping_threshold", self.clipping_threshold, 0)
