"""The `data.filter` section: which documents of a corpus are left out, each counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmfoundry.recipe.checks import at_least


@dataclass
class FilterConfig:
    """Rules that a document must pass; unset ones let everything through."""

    min_chars: int | None = None
    """Leave out documents of fewer characters."""
    max_chars: int | None = None
    """Leave out documents of more characters."""

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from at_least(f"{key}min_chars", self.min_chars, 1)
        yield from at_least(f"{key}max_chars", self.max_chars, self.min_chars or 1)
