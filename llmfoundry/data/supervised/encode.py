"""`Encoder`: documents of pieces to ids, and what each of them counts as a label.

Called by `prepare` for some rows at a time. Prompts and answers are encoded apart, because that is
what the model meets when it answers: a prompt's ids are there before its own first one.
Vocabularies that are not of bytes write a space before each text; there, a whole document is
encoded, and cut where its pieces end, unless a token lies across such an end. Where a template
marks answers, too, and there a token across an end is the answer's, as transformers has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from llmfoundry.data.supervised.turns import SegmentedText
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError


@dataclass(frozen=True)
class Encoded:
    """A document's tokens.

    Attributes:
        ids: (n,) uint32.
        weights: (n,) fp32, what each counts as a label; 0: it is not learned.
        is_empty: it has no answer, or one without a token.
    """

    ids: np.ndarray
    weights: np.ndarray
    is_empty: bool


class Encoder:
    """Encodes with a tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, shortest_prompt: float, *, always_eos: bool = False
    ) -> None:
        """Encode with `tokenizer`.

        Args:
            tokenizer: with its chat template.
            shortest_prompt: a prompt of so many tokens is learned too.
            always_eos: the end of text is put behind conversations that end with a turn, too.
        """
        self._tokenizer, self._shortest_prompt = tokenizer, shortest_prompt
        self._always_eos = always_eos
        self.special_tokens = tokenizer.special_tokens

    def __call__(self, documents: Sequence[SegmentedText]) -> list[Encoded]:
        """Each document; the end of text is put behind it where nothing ends it.

        What a template marks itself, it ends itself.
        """
        plain = [n for n, d in enumerate(documents) if not d.rendered]
        rendered = [n for n, d in enumerate(documents) if d.rendered]
        found: dict[int, list[list[int]]] = {}
        found |= zip(plain, self._plain([documents[n] for n in plain]), strict=True)
        found |= zip(rendered, self._rendered([documents[n] for n in rendered]), strict=True)
        return [self._weighed(document, found[n]) for n, document in enumerate(documents)]

    def _plain(self, documents: Sequence[SegmentedText]) -> list[list[list[int]]]:
        """Ids of each piece; what the tokenizer puts before a text is before the first alone."""
        texts = [piece.text for document in documents for piece in document.pieces]
        ids = iter(self._tokenizer.encode_batch(texts))
        pieces = [[next(ids) for _ in document.pieces] for document in documents]
        return [[[*self._tokenizer.bos_ids, *first], *others] for first, *others in pieces]

    def _rendered(self, documents: Sequence[SegmentedText]) -> list[list[list[int]]]:
        apart = [d for d in documents if self._tokenizer.byte_level and not d.marked]
        ids = iter(self._tokenizer.encode_chat_batch([p.text for d in apart for p in d.pieces]))
        found = []
        for document in documents:
            if document.marked:
                found.append(self._cut_at_answers(document))
            elif self._tokenizer.byte_level:
                found.append([next(ids) for _ in document.pieces])
            else:
                found.append(self._cut(document))
        return found

    def _cut_at_answers(self, document: SegmentedText) -> list[list[int]]:
        """The ids of each piece of a text that is encoded as one; answers have what they touch."""
        texts = [piece.text for piece in document.pieces]
        ends = list(accumulate(map(len, texts), initial=0))
        ids, spans = self._tokenizer.encode_chat_spans("".join(texts))
        begins, stops = (np.array([span[n] for span in spans]) for n in (0, 1))
        cuts = [0]
        for n, piece in enumerate(document.pieces[1:]):
            edge = ends[n + 1]
            found = np.searchsorted(*((stops, edge, "right") if piece.answer else (begins, edge)))
            cuts.append(max(cuts[-1], int(found)))
        return [ids[begin:end] for begin, end in pairwise([*cuts, len(ids)])]

    def _cut(self, document: SegmentedText) -> list[list[int]]:
        texts = [piece.text for piece in document.pieces]
        ends = list(accumulate(map(len, texts), initial=0))
        ids, spans = self._tokenizer.encode_chat_spans("".join(texts))
        inner = ends[1:-1]
        if any(begin < end < stop for begin, stop in spans for end in inner):
            return [self._tokenizer.encode_chat(texts[0]), *map(self._continued, texts[1:])]
        stops = np.array([stop for _, stop in spans])
        places = [0, *np.searchsorted(stops, inner, side="right").tolist(), len(ids)]
        return [ids[begin:end] for begin, end in pairwise(places)]

    def _continued(self, text: str) -> list[int]:
        """The ids of a text that stands behind another: no space is written before it."""
        before = self._tokenizer.encode_chat("\n")
        ids = self._tokenizer.encode_chat(f"\n{text}")
        is_apart = ids[: len(before)] == before
        return ids[len(before) :] if is_apart else self._tokenizer.encode_chat(text)

    def _weighed(self, document: SegmentedText, pieces: list[list[int]]) -> Encoded:
        answers = [ids for piece, ids in zip(document.pieces, pieces, strict=True) if piece.answer]
        is_empty = not answers or not answers[-1]
        if not is_empty and self._lacks_eos(document, pieces[-1]):
            pieces[-1] = [*pieces[-1], self._tokenizer.eos_id]
        weights = []
        for piece, ids in zip(document.pieces, pieces, strict=True):
            is_learned = piece.answer or (not document.side and len(ids) >= self._shortest_prompt)
            weights.append(np.full(len(ids), piece.weight * is_learned, np.float32))
        joined = np.concatenate(weights)
        joined[:1] = 0  # nothing is before it
        return Encoded(
            np.concatenate([np.array(ids, np.uint32) for ids in pieces]), joined, is_empty
        )

    def _lacks_eos(self, document: SegmentedText, last: list[int]) -> bool:
        if document.marked or last[-1] == self._tokenizer.eos_id:
            return False
        is_open = not document.pieces[-1].text.rstrip().endswith(self._turn_ends)
        return not document.rendered or self._always_eos or is_open

    @cached_property
    def _turn_ends(self) -> tuple[str, ...]:
        """What a turn may end with: what is behind the template's answers, or a special token."""
        try:
            end = self._tokenizer.chat.end_of_turn
        except UserError:  # there is no template, or nothing ends a turn in it
            return (self._tokenizer.eos,)
        return (self._tokenizer.eos, end, *filter(None, self.special_tokens))
