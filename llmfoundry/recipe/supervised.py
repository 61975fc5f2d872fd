"""The `data.supervised` section: how rows of prompts and answers become tokens and labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llmfoundry.recipe.values.bounds import Range, choice, out_of_bounds

RESPONSES = ("last", "all")
PACKINGS = ("best_fit", "off")
LOSSES = ("tokens", "sequences")
TOO_LONG = ("truncate", "drop", "error")
NOTHING_LEARNED = ("error", "drop")
CHAT_EOS = ("auto", "always")
BAD_ROWS = ("error", "drop")
_AT_LEAST = re.compile(r"length>=([1-9]\d{0,8})")


@dataclass
class SupervisedConfig:
    """Only matters for sources whose format is not text."""

    target_prompts: Annotated[str, choice(("none", "all"), "length>=N", _AT_LEAST)] = "none"
    """Prompts that are learned too: none, all, or length>=N (those of N tokens or more)."""
    target_responses: Annotated[str, choice(RESPONSES)] = "all"
    """Answers of a conversation that are learned: all, or the last alone. LLM Foundry's default is
    last; a conversation then teaches a fraction of what it costs."""
    chat_eos: Annotated[str, choice(CHAT_EOS)] = "auto"
    """The end-of-text token behind a conversation. auto: only where its last turn does not end as
    the template ends turns, or with another special token; white space is left out. always: where
    its last token is another, as LLM Foundry does: <|im_end|>, a line break and <|endoftext|> may
    follow each other. Templates that mark their answers end them themselves."""
    packing: Annotated[str, choice(PACKINGS)] = "best_fit"
    """best_fit: several rows share one of max_seq_len, apart from each other. off: each is padded
    to max_seq_len; for kto the row before it stands in the padding, not learned: its answer is what
    a prompt is compared with."""
    packing_window: Annotated[int, Range(1, 2**24, "their lengths are sorted in memory")] = 8192
    """Rows, in a seeded order, that are packed with each other."""
    loss: Annotated[str, choice(LOSSES)] = "tokens"
    """tokens: the mean over all learned tokens of a step. sequences: the mean over its rows of each
    row's mean, so that a short answer weighs as much as a long one."""
    too_long: Annotated[str, choice(TOO_LONG)] = "truncate"
    """Rows of more than max_seq_len tokens, which of preference are both answers, each with the
    prompt: truncate (the end is cut), drop, or error."""
    nothing_learned: Annotated[str, choice(NOTHING_LEARNED)] = "error"
    """Rows in which no token is learned, also because of truncation: error, or drop."""
    bad_rows: Annotated[str, choice(BAD_ROWS)] = "error"
    """Rows that cannot be used: not JSON, not of the format, refused by the chat template. All are
    counted by what is wrong with them in one pass. error: the run ends with a line for each reason
    and the first places of each. drop: they are left out, with a line and an event for each
    reason."""
    drop_duplicates: bool = False
    """Leave out rows that repeat another exactly; they are counted either way."""

    def check(self, key: str = "data.supervised.") -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from out_of_bounds(key, self)

    @property
    def shortest_target_prompt(self) -> float:
        """Tokens from which on a prompt is learned; infinity: never."""
        match = _AT_LEAST.fullmatch(self.target_prompts)
        if match:
            return int(match[1])
        return 0 if self.target_prompts == "all" else float("inf")
