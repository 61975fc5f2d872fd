"""The `eval` section: what is measured at every eval_interval and by scripts/eval.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llmfoundry.recipe.bounds import LENGTH, PATH, Range, out_of_bounds
from llmfoundry.recipe.checks import inert, one_of

PROMPTS = ("native", "harness", "foundry")
ICL_KEYS = (
    "icl_rows",
    "icl_seq_len",
    "icl_prompts",
    "icl_generate",
    "icl_allow_missing",
    "icl_max_fraction",
)


@dataclass
class EvalConfig:
    """Validation text and the in-context-learning gauntlet."""

    validation: bool = True
    """Measure loss and bits per byte on the held-out documents."""
    validation_rows: Annotated[int | None, Range(1)] = None
    """Held-out rows to read, from the first; unset: all of them."""
    gauntlet: Annotated[str | None, PATH] = None
    """A gauntlet file, such as eval/gauntlets/generated.yaml; unset: none."""
    icl_rows: Annotated[int | None, Range(1)] = None
    """Rows of each task: always the same, chosen by their content, and as many of each category as
    it has its share of; unset: all of them."""
    icl_seq_len: Annotated[int | None, Range(2, 2**24, LENGTH)] = None
    """Longest input of a task in tokens; unset: max_seq_len, or what the model reads at most."""
    icl_prompts: str | None = None
    """How rows become tokens. native: question and answer as one text, the same worked examples
    for all rows, after what documents begin with in training. harness: the same texts, as
    lm-evaluation-harness makes tokens of them. foundry: LLM Foundry's rules, for its numbers;
    unset: native for a model that was trained here, and its export, harness for others."""
    icl_generate: bool | None = None
    """Write the answers of generation tasks. False: ask whether each token of the right answer is
    the likeliest one, for a hundredth of the cost; unset: true in scripts/eval.py, else false."""
    icl_allow_missing: bool | None = None
    """Go on where the rows of a task are not there: its categories, and the averages over them, are
    n/a; unset: false, a task without rows is a mistake."""
    icl_max_fraction: float | None = None
    """Share of a training run's wall time that tasks may take, such as 0.02: the first evaluation
    finds how many rows that allows, and all later ones ask the same; unset: all rows."""

    def check(self, key: str = "eval.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        if self.icl_prompts is not None:
            yield from one_of(f"{key}icl_prompts", self.icl_prompts, PROMPTS)
        if self.icl_max_fraction is not None and not 0 < self.icl_max_fraction < 1:
            yield (
                f"{key}icl_max_fraction: {self.icl_max_fraction}; write a share of the wall time"
                " between 0 and 1, such as 0.02"
            )
        if not self.validation and self.validation_rows is not None:
            yield f"{key}validation_rows: has no effect with validation: false; remove it"
        if self.gauntlet is None:
            yield from inert(key, self, list(ICL_KEYS), "without a gauntlet")
