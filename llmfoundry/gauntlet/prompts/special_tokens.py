"""`SpecialTokens`: what stands around a text that is put to a model, by who wants it there.

`Asking` holds one; the prompt modes read it. Three programs mean three things by "the text": our
training puts tokens before a document, a tokenizer may put some around any text, and
lm-evaluation-harness needs one where there is no text at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer


DOCUMENT_START = "llmfoundry_document_start"
"""Key of an exported model's config.json: ids that documents began with in its training."""


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids around a text.

    Attributes:
        start: before every text of native prompts.
        before: what the tokenizer itself puts in front of every text, such as Llama's <s>.
        after: and what it puts behind, such as T5's </s>.
        prefix: what stands for an empty text in lm-evaluation-harness.
    """

    start: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    prefix: int


def special_tokens(tokenizer: Tokenizer, *, start: Sequence[int] | None = None) -> SpecialTokens:
    """Those of a tokenizer.

    Args:
        tokenizer: the model's.
        start: what documents began with in the model's training; None: not known, taken to be what
            the tokenizer puts there itself, or the end of text where that is nothing.
    """
    first = tokenizer.document_start if start is None else tuple(start)
    prefix = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    return SpecialTokens(first, tokenizer.bos_ids, tokenizer.eos_ids, prefix)
