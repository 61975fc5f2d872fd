"""`PromptSettings`: how tasks become prompts: length, mode, special tokens, chat template.

The callers of `Gauntlet` make one; the prompt modes read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmfoundry.data.text.chat_template import ChatTemplate
from llmfoundry.data.text.tokenizer import SpecialTokens, Tokenizer, special_tokens

RAW = "{% for message in messages %}{{ message.content or '' }}\n{% endfor %}"
"""For models behind a server that has the template: what is sent is messages."""


@dataclass(frozen=True)
class Chat:
    """How conversations are put to a model.

    Attributes:
        template: the model's.
        every_task: questions that are plain texts become conversations too.
        multiturn: worked examples are turns of their own; else they stand in the user's message.
        system: the system's message; "": none but a row's or a task's own.
        prefix: what every answer begins with, put there for the model.
    """

    template: ChatTemplate
    every_task: bool = False
    multiturn: bool = True
    system: str = ""
    prefix: str = ""

    @property
    def end_of_turn(self) -> str:
        """What ends an answer; "": a server knows."""
        return "" if self.template.text == RAW else self.template.end_of_turn

    def describe(self) -> str:
        """In words."""
        which = "every question" if self.every_task else "conversations"
        more = ", a system message" if self.system else ""
        more += f", answers begin with {self.prefix!r}" if self.prefix else ""
        shots = ", worked examples as turns" if self.every_task and self.multiturn else ""
        return f"{which} by the chat template{shots}{more}"

    def facts(self) -> dict[str, Any]:
        """All that decides the text of a prompt."""
        return {
            "template": self.template.fingerprint,
            "multiturn": self.multiturn,
            "system": self.system,
            "prefix": self.prefix,
        }


@dataclass(frozen=True)
class PromptSettings:
    """How tasks become prompts of a model.

    Attributes:
        tokenizer: the model's.
        seq_len: longest input in tokens; a task may have a smaller one.
        prompts: native, harness or foundry; see recipe/eval.py.
        special: tokens around every text; None: the tokenizer's own.
        rows: rows of each task; None: all.
        generate: write the answers of generation tasks.
        allow_missing: tasks without rows are left out, and said to be.
        unit: what a token of `tokenizer` is: the model's own, or bytes of a model behind a server.
        can_score: the model gives log-probabilities; one that does not writes answers in any case.
        chat: how conversations are put, and whether all tasks are; None: there is no template.
    """

    tokenizer: Tokenizer
    seq_len: int
    prompts: str = "native"
    special: SpecialTokens | None = None
    rows: int | None = None
    generate: bool = True
    allow_missing: bool = False
    unit: str = "tokens"
    can_score: bool = True
    chat: Chat | None = None

    @classmethod
    def by_training(
        cls, tokenizer: Tokenizer, seq_len: int, start: Sequence[int] | None
    ) -> PromptSettings:
        """As a model was trained here, or else as lm-evaluation-harness asks it.

        Args:
            tokenizer: the model's.
            seq_len: longest input in tokens.
            start: what documents began with in its training; None: it was not trained here.
        """
        mode = "harness" if start is None else "native"
        return cls(tokenizer, seq_len, mode, special_tokens(tokenizer, start=start))

    def describe(self) -> str:
        """How questions become tokens, in words."""
        special = self.special or special_tokens(self.tokenizer)
        before = special.start if self.prompts == "native" else special.before
        text = self.tokenizer.decode(before) if before else "nothing"
        if self.unit == "bytes":  # it takes text, and begins documents as it will
            text = "what its server puts"
        said = f"{self.prompts} prompts, {text} before each text"
        return said if self.chat is None else f"{said}; {self.chat.describe()}"
