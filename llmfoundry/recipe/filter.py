"""The `data.filter` section: which documents of a corpus are left out, each counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llmfoundry.recipe.values.bounds import Range, out_of_bounds
from llmfoundry.recipe.values.checks import at_least


@dataclass
class FilterConfig:
    """Rules that a document must pass; unset ones let everything through.

    The four published sets are for English web pages, as datatrove implements them (extra:
    filters). They decide on whole documents and change no text.
    """

    min_chars: Annotated[int | None, Range(2)] = None
    """Leave out documents of fewer characters; one is what every document has."""
    max_chars: Annotated[int | None, Range(1)] = None
    """Leave out documents of more characters."""
    min_words: Annotated[int | None, Range(2)] = None
    """Leave out documents of fewer words; words are what white space separates."""
    max_words: Annotated[int | None, Range(1)] = None
    """Leave out documents of more words."""
    gopher_quality: bool = False
    """Gopher's rules of quality (arXiv:2112.11446, A.1.1): 50 to 100,000 words of 3 to 10 letters
    on average, few symbols, bullets and ellipses, at least two stop words."""
    gopher_repetition: bool = False
    """Gopher's rules of repetition (its table A1): lines, paragraphs and n-grams that repeat."""
    c4: bool = False
    """C4's rules for pages (arXiv:1910.10683, 2.2): at least five sentences in its good lines, no
    curly bracket, no lorem ipsum. Its bad lines stay in the text, its list of bad words is out."""
    fineweb: bool = False
    """FineWeb's rules (arXiv:2406.17557, 3.6): lines that end in punctuation, few short ones, few
    repeated ones."""

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be, contradict each other, or have no effect."""
        if (yield from out_of_bounds(key, self)):
            return
        yield from at_least(f"{key}max_chars", self.max_chars, self.min_chars or 1)
        yield from at_least(f"{key}max_words", self.max_words, self.min_words or 1)
        if self.min_words is not None:
            yield from self._check_min_words(key, 2 * self.min_words - 1)
        if self.max_words is not None and self.max_chars is not None:
            most = (self.max_chars + 1) // 2
            if most <= self.max_words:
                yield (
                    f"{key}max_words: has no effect with max_chars: {self.max_chars}, in which"
                    f" {most} words fit at most; remove it or write less"
                )

    def _check_min_words(self, key: str, chars: int) -> Iterator[str]:
        """`chars` is what so many words and the spaces between them take at least."""
        if self.max_chars is not None and chars > self.max_chars:
            yield (
                f"{key}min_words: {self.min_words} words take {chars} characters, more than"
                f" max_chars: {self.max_chars}; no document would be left; write less"
            )
        if self.min_chars is not None and self.min_chars <= chars:
            yield (
                f"{key}min_chars: has no effect with min_words: {self.min_words}, which take"
                f" {chars} characters; remove it or write more"
            )
