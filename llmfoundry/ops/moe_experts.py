"""The experts of a layer: what every backend of the mixture is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from llmfoundry.ops.activations import Activation, from_text


@dataclass(frozen=True)
class Experts:
    """E feed-forward layers: act(x w1^T) w2, or with a gate (act(x w1^T) * x v1^T) w2.

    Weights are stacked as megablocks and DBRX store them, w2 not transposed.

    Attributes:
        w1: (E, f, d), the gate; of an MLP the up projection.
        v1: (E, f, d), the up projection beside a gate; None: an MLP.
        w2: (E, f, d), the down projection.
        b1: (E, f) or None.
        bv: (E, f) or None.
        b2: (E, d) or None.
        activation: name and arguments, as `activations.to_text` writes them.
    """

    w1: Tensor
    v1: Tensor | None
    w2: Tensor
    b1: Tensor | None = None
    bv: Tensor | None = None
    b2: Tensor | None = None
    activation: str = "silu"

    @property
    def act(self) -> Activation:
        """The activation and its derivative."""
        return from_text(self.activation)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Weights and biases in the order of the fields."""
        return self.w1, self.v1, self.w2, self.b1, self.bv, self.b2

    def map(self, change: Callable[[Tensor], Tensor]) -> Experts:
        """The same experts with every tensor changed."""

        def maybe(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        biases = (maybe(self.b1), maybe(self.bv), maybe(self.b2))
        return Experts(
            change(self.w1), maybe(self.v1), change(self.w2), *biases, activation=self.activation
        )


class Kept(NamedTuple):
    """Pre-activations of all N = T * k rows, for the backward pass; on a CPU padded behind them.

    Attributes:
        gate: (N, f), x w1^T + b1; int8 (N, packed_width(f)) where compressed; (N, 0) where no
            backward pass is to come.
        up: the same of v1; no rows for an MLP.
    """

    gate: Tensor
    up: Tensor


class Gradients(NamedTuple):
    """What a backward pass gives.

    Attributes:
        x: (T, d).
        weights: (T, k).
        experts: in the order of `Experts.tensors`; None where a weight is absent or frozen.
    """

    x: Tensor
    weights: Tensor
    experts: tuple[Tensor | None, ...]
