"""The `eval` section: what is measured at every eval_interval and by scripts/eval.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmfoundry.recipe.checks import at_least


@dataclass
class EvalConfig:
    """Validation text and the in-context-learning gauntlet."""

    validation: bool = True
    """Measure loss and bits per byte on the held-out documents."""
    validation_rows: int | None = None
    """Held-out rows to read, from the first; unset: all of them."""
    gauntlet: str | None = None
    """A gauntlet file, such as eval/gauntlets/generated.yaml; unset: none."""
    icl_rows: int | None = None
    """Rows of each task, from the first; unset: all of them."""

    def check(self, key: str = "eval.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from at_least(f"{key}validation_rows", self.validation_rows, 1)
        yield from at_least(f"{key}icl_rows", self.icl_rows, 1)
        if not self.validation and self.validation_rows is not None:
            yield f"{key}validation_rows: has no effect with validation: false; remove it"
        if self.gauntlet is None and self.icl_rows is not None:
            yield f"{key}icl_rows: has no effect without a gauntlet; remove it"
