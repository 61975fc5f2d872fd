"""The `eval` section: what is evaluated every eval_interval and by scripts/eval.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llmfoundry.recipe.schema import (
    ANY_TEXT,
    CHAT_TEMPLATES,
    LENGTH,
    PATH,
    Only,
    Range,
    Unless,
    check_fields,
    choice,
)

PROMPTS = ("native", "harness", "foundry")
WEIGHTS = ("trained", "ema")
EMA = WEIGHTS[1]
_GAUNTLET = Only("gauntlet")


@dataclass
class EvalConfig:
    """Validation text and the in-context-learning gauntlet."""

    weights: Annotated[str | None, choice(WEIGHTS)] = None
    """Which weights are evaluated. trained: those that the optimizer updates. ema: their
    exponential moving average, of a run with ema.decay. Unset: trained in a run, and in
    scripts/eval.py those that the run evaluated. As the only key of eval there, it changes nothing
    else of what the run evaluated."""
    validation: bool = True
    """Measure loss and bits per byte on the held-out documents."""
    validation_rows: Annotated[int | None, Range(1), Only("validation")] = None
    """Number of held-out sequences to evaluate, from the first; unset: all."""
    gauntlet: Annotated[str | None, PATH] = None
    """A gauntlet file, such as eval/gauntlets/generated.yaml; unset: none."""
    icl_rows: Annotated[int | None, Range(1), _GAUNTLET] = None
    """Number of rows of each task, chosen by their content so that the choice never changes, with
    each category in proportion to its size; unset: all rows."""
    icl_seq_len: Annotated[int | None, Range(2, 2**24, LENGTH), _GAUNTLET] = None
    """Longest input of a task in tokens; unset: max_seq_len, or the most that the model accepts."""
    icl_prompts: Annotated[str | None, choice(PROMPTS), _GAUNTLET] = None
    """How rows become tokens. native: question and answer as one text, with the same worked
    examples for all rows, after the token that begins documents in training. harness: the same
    texts, tokenized as lm-evaluation-harness does. foundry: LLM Foundry's rules, to reproduce its
    numbers. Unset: native for models trained here and their exports, harness for other models."""
    icl_generate: Annotated[bool | None, _GAUNTLET] = None
    """Generate the answers of generation tasks. False: test whether each token of the right answer
    is the most likely one, at a hundredth of the cost. Unset: true in scripts/eval.py, else
    false."""
    icl_allow_missing: Annotated[bool | None, _GAUNTLET] = None
    """Continue if the rows of a task are missing: its categories and their averages are then n/a.
    Unset: false, a task without rows is an error."""
    icl_max_fraction: Annotated[float | None, _GAUNTLET] = None
    """Share of a training run's wall time that tasks may take, such as 0.02. The first evaluation
    determines how many rows that allows, and all later evaluations use the same rows. Unset: all
    rows."""

    icl_chat_template: Annotated[
        str | None,
        PATH,
        choice(("none", "tokenizer", *CHAT_TEMPLATES), "a Jinja file", ANY_TEXT),
        _GAUNTLET,
    ] = None
    """The chat template for questions. tokenizer: the tokenizer's template for every question. One
    of the names of tokenizer.chat_template, or a Jinja file: that template. none: no template.
    Unset: the tokenizer's template for tasks whose rows are conversations, plain text for all other
    tasks, so that scores are comparable with those of the base model."""
    icl_fewshot_as_multiturn: Annotated[bool | None, _GAUNTLET, Only("icl_chat_template")] = None
    """Present worked examples as turns of the conversation. False: in one message with the
    question. Default true."""
    icl_system_instruction: Annotated[
        str | None, _GAUNTLET, Unless("icl_chat_template", "none")
    ] = None
    """System message of conversations, before the task's own; unset: none."""
    icl_gen_prefix: Annotated[str | None, _GAUNTLET, Unless("icl_chat_template", "none")] = None
    """Beginning of every answer in a conversation, which the model continues; unset: none."""

    @property
    def chooses_weights_only(self) -> bool:
        """Whether `weights` is the only key that is set."""
        return self.weights is not None and self == EvalConfig(weights=self.weights)

    def check(self, key: str = "eval.") -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)
        if self.icl_max_fraction is not None and not 0 < self.icl_max_fraction < 1:
            yield (
                f"{key}icl_max_fraction: {self.icl_max_fraction}; write a share of the wall time"
                " between 0 and 1, such as 0.02"
            )
        if self.icl_chat_template not in (None, "none") and self.icl_prompts == "foundry":
            yield (
                f"{key}icl_chat_template: has no effect with icl_prompts: foundry, which has no"
                " conversations; write native or harness"
            )
        for name in ("icl_system_instruction", "icl_gen_prefix"):
            if getattr(self, name) is not None and not getattr(self, name).strip():
                yield f"{key}{name}: is empty; write a text, or remove it"
