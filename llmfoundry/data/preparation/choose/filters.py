"""`build_filter`: the recipe's `data.filter` as one function of a document's text.

Called by the preparation, once in each process that reads documents. The one idea: a filter only
decides, so that a document is in the output exactly as it was read, or not at all. The published
rules are datatrove's own classes, with the words of spaCy's English tokenizer, which needs no model
and no network; its decisions are those of a datatrove pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llmfoundry.errors import import_optional
from llmfoundry.recipe.filter import FilterConfig

Filter = Callable[[str], str | None]

# By their key: datatrove's class. Cheap ones first, since one reason is enough: 2.8, 1.4, 0.6 and
# 0.5 MB of English technical text a second of one core.
_PUBLISHED = {
    "c4": "C4QualityFilter",
    "fineweb": "FineWebQualityFilter",
    "gopher_quality": "GopherQualityFilter",
    "gopher_repetition": "GopherRepetitionFilter",
}


def build_filter(config: FilterConfig) -> Filter:
    """The reason why a text is left out, or None: it stays.

    The reason begins with the key of the rule. What is returned is not picklable; the config is.

    Raises:
        UserError: a library is missing.
    """
    rules = [*_own_rules(config), *_published_rules(config)]

    def reason(text: str) -> str | None:
        return next((found for rule in rules if (found := rule(text)) is not None), None)

    return reason


def _own_rules(config: FilterConfig) -> Iterator[Filter]:
    if config.min_chars is not None or config.max_chars is not None:
        yield _between("chars", len, config.min_chars, config.max_chars)
    if config.min_words is not None or config.max_words is not None:
        yield _between("words", lambda text: len(text.split()), config.min_words, config.max_words)


def _between(unit: str, count: Callable[[str], int], least: int | None, most: int | None) -> Filter:
    def rule(text: str) -> str | None:
        n = count(text)
        if least is not None and n < least:
            return f"min_{unit}"
        return f"max_{unit}" if most is not None and n > most else None

    return rule


def _published_rules(config: FilterConfig) -> Iterator[Filter]:
    chosen = [key for key in _PUBLISHED if getattr(config, key)]
    if not chosen:
        return
    # datatrove imports spacy at the first document only
    modules = ("spacy", "datatrove.pipeline.filters", "datatrove.data")
    where = f"data.filter.{chosen[0]}:"
    _, filters, data = (import_optional(module, where, extra="filters") for module in modules)
    for key in chosen:
        yield _published(key, getattr(filters, _PUBLISHED[key])(), data.Document)


def _published(key: str, rules: Any, document: Any) -> Filter:
    def rule(text: str) -> str | None:
        # A document of its own: C4's class writes its good lines into it.
        result = rules.filter(document(text=text, id=""))
        kept, why = result if isinstance(result, tuple) else (result, "")
        return None if kept else f"{key}: {why}"

    return rule
