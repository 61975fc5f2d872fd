"""The `eval` section: what is measured at every eval_interval and by scripts/eval.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llmfoundry.recipe.checks import inert
from llmfoundry.recipe.schema import (
    ANY_TEXT,
    CHAT_TEMPLATES,
    LENGTH,
    PATH,
    Range,
    choice,
    out_of_bounds,
)

PROMPTS = ("native", "harness", "foundry")
ICL_KEYS = (
    "icl_rows",
    "icl_seq_len",
    "icl_prompts",
    "icl_generate",
    "icl_allow_missing",
    "icl_max_fraction",
    "icl_chat_template",
    "icl_fewshot_as_multiturn",
    "icl_system_instruction",
    "icl_gen_prefix",
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
    """Rows of each task: always the same, chosen by their content, each category in proportion to
    its size; unset: all of them."""
    icl_seq_len: Annotated[int | None, Range(2, 2**24, LENGTH)] = None
    """Longest input of a task in tokens; unset: max_seq_len, or what the model reads at most."""
    icl_prompts: Annotated[str | None, choice(PROMPTS)] = None
    """How rows become tokens. native: question and answer as one text, the same worked examples
    for all rows, after what documents begin with in training. harness: the same texts, as
    lm-evaluation-harness makes tokens of them. foundry: LLM Foundry's rules, for its numbers;
    unset: native for a model that was trained here, and its export, harness for others."""
    icl_generate: bool | None = None
    """Write the answers of generation tasks. False: ask whether each token of the right answer is
    the likeliest one, for a hundredth of the cost; unset: true in scripts/eval.py, else false."""
    icl_allow_missing: bool | None = None
    """Continue where a task's rows are missing: its categories, and the averages over them, are
    n/a; unset: false, a task without rows is an error."""
    icl_max_fraction: float | None = None
    """Share of a training run's wall time that tasks may take, such as 0.02: the first evaluation
    finds how many rows that allows, and all later ones ask the same; unset: all rows."""

    icl_chat_template: Annotated[
        str | None, PATH, choice(("none", "tokenizer", *CHAT_TEMPLATES), "a Jinja file", ANY_TEXT)
    ] = None
    """The chat template that questions are put by. tokenizer: every question, by the tokenizer's
    own; one of tokenizer.chat_template's names, or a Jinja file: by that one. none: no question.
    Unset: tasks whose rows are conversations by the tokenizer's own, all others as plain text, so
    that a model's scores compare with those of the base model that it came from."""
    icl_fewshot_as_multiturn: bool | None = None
    """Only with icl_chat_template: worked examples are turns of the conversation. False: they stand
    in one message with the question; default true."""
    icl_system_instruction: str | None = None
    """Only in conversations: the system's message, before a task's own; unset: none."""
    icl_gen_prefix: str | None = None
    """Only in conversations: what every answer begins with, written for the model; unset: none."""

    def check(self, key: str = "eval.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        if self.icl_max_fraction is not None and not 0 < self.icl_max_fraction < 1:
            yield (
                f"{key}icl_max_fraction: {self.icl_max_fraction}; write a share of the wall time"
                " between 0 and 1, such as 0.02"
            )
        if not self.validation and self.validation_rows is not None:
            yield f"{key}validation_rows: has no effect with validation: false; remove it"
        if self.icl_chat_template == "none":
            spoken = ["icl_system_instruction", "icl_gen_prefix", "icl_fewshot_as_multiturn"]
            yield from inert(key, self, spoken, "with icl_chat_template: none")
        elif self.icl_chat_template is None:
            alone = ["icl_fewshot_as_multiturn"]
            yield from inert(key, self, alone, "without icl_chat_template")
        elif self.icl_prompts == "foundry":
            yield (
                f"{key}icl_chat_template: has no effect with icl_prompts: foundry, which has no"
                " conversations; write native or harness"
            )
        for name in ("icl_system_instruction", "icl_gen_prefix"):
            if getattr(self, name) is not None and not getattr(self, name).strip():
                yield f"{key}{name}: is empty; write a text, or remove it"
        if self.gauntlet is None:
            yield from inert(key, self, list(ICL_KEYS), "without a gauntlet")
