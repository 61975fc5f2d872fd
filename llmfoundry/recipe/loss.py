"""The `loss` section: what training minimizes.

`LOSSES` is the table that plugins extend; `train/own_loss.py` calls their functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from llmfoundry.recipe.choice_table import SHIPPED, ChoiceRecord, ChoiceTable, check_settings
from llmfoundry.recipe.schema import POSITIVE, Only, Range, check_fields, choice

CROSS_ENTROPY, DISTILL = "cross_entropy", "distill"
DIVERGENCES = ("forward", "reverse", "symmetric")


@dataclass(frozen=True)
class LossType(ChoiceRecord):
    """A loss.

    `make(model, batch, **settings)` returns the losses of a microbatch in one of the forms that
    `train/own_loss.py` describes. The settings are the record's keys.
    """


LOSSES = ChoiceTable(
    "loss.name",
    LossType,
    {
        CROSS_ENTROPY: LossType(SHIPPED, meaning="nats per labeled token."),
        DISTILL: LossType(
            SHIPPED,
            meaning="cross-entropy and the divergence from a teacher's stored probabilities"
            " (docs/distillation.md).",
            keys={
                "divergence": "forward",
                "temperature": 1.0,
                "kl_weight": 0.5,
                "cross_entropy_weight": 0.5,
            },
        ),
    },
)


@dataclass
class LossConfig:
    """What training minimizes. Validation always measures the cross-entropy."""

    name: Annotated[str, choice(LOSSES)] = CROSS_ENTROPY
    """The loss. Plugins add others; preference tuning has its own (preference.name)."""
    divergence: Annotated[str | None, choice(DIVERGENCES), Only("name", DISTILL)] = None
    """forward: KL(teacher || student), the usual one. reverse: KL(student || teacher), which gives
    less probability to what the teacher would not write. symmetric: their mean. The teacher is
    renormalized over the stored top_k tokens. Default forward."""
    temperature: Annotated[float | None, POSITIVE, Only("name", DISTILL)] = None
    """Divides the logits of teacher and student in the divergence, which is multiplied by its
    square. Above 1, improbable tokens count more. Default 1."""
    kl_weight: Annotated[float | None, POSITIVE, Only("name", DISTILL)] = None
    """Weight of the divergence; default 0.5."""
    cross_entropy_weight: Annotated[float | None, Range(0), Only("name", DISTILL)] = None
    """Weight of the cross-entropy of the data; default 0.5."""
    z_loss_weight: Annotated[float | None, POSITIVE, Only("name", (CROSS_ENTROPY, DISTILL))] = None
    """Weight of the z-loss of the logits, the mean squared logsumexp over labeled tokens. It keeps
    logits small in long runs; 1e-4 in PaLM and 1e-5 in OLMo 2; unset: no z-loss. The metric
    loss/train/z_loss has it. (The router's: model.ffn_config.moe_zloss_weight.)"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of a loss that a plugin adds."""

    def check(self, key: str = "loss.") -> Iterator[str]:
        """Yield an error line for each invalid value."""
        yield from check_fields(key, self)
        if self.name in LOSSES:
            yield from check_settings(f"{key}kwargs.", self.kwargs, LOSSES[self.name].keys)

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.name in LOSSES:  # unknown if the plugin of a run is not imported
            LOSSES[self.name].fill(self)

    @property
    def is_own(self) -> bool:
        """Whether a plugin or a program has the loss, which may hold all logits at once."""
        return self.name not in (CROSS_ENTROPY, DISTILL)


class ResolvedLossConfig(LossConfig):
    """`LossConfig` with defaults resolved; the weights of name: distill."""

    divergence: str
    temperature: float
    kl_weight: float
    cross_entropy_weight: float
