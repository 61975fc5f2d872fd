"""`data.filter`: what stays, why the rest goes, and that it is what datatrove's own filters say."""

import sys

import pytest

from llmfoundry.data.preparation.filters import build_filter
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import FilterConfig

_SENTENCES = [
    "The committee met again on Tuesday, and the members had much to discuss about the harbour.",
    "Nobody in the village could remember a winter with so little snow and so many birds.",
    "She opened the letter, read it twice, and put it back to where it had always been kept.",
    "Most of the trains were late that morning because of the fog that came up from the river.",
    "It is easy to forget that every bridge of the old town was built with stone from one hill.",
    "When the music stopped, the children ran across the square to see what had happened there.",
]
_GOOD = "\n".join(_SENTENCES)
_PAGES = [
    _GOOD,
    " ".join(_SENTENCES),
    _GOOD + "\n" + _GOOD,
    "\n".join(s.removesuffix(".") for s in _SENTENCES),
    "\n".join("- " + s for s in _SENTENCES),
    _GOOD + "\nconst f = function() { return 1; }",
    _GOOD.replace("snow", "lorem ipsum"),
    _GOOD + "\nPlease enable JavaScript to see this page.",
    "\n".join(s[:40] + "..." for s in _SENTENCES * 3),
    "# " * 40 + _GOOD,
    "\n".join(["Home", "News", "Contact", "About"] * 20),
    "1 2 3 4 5 6 7 8 9 " * 20,
    "buy now " * 100,
    "\u200b",
    "\u4e2d\u6587\u7f51\u9875\u3002" * 30,
]


def test_own_rules_name_their_key_and_keep_the_bounds() -> None:
    reason = build_filter(FilterConfig(min_chars=5, max_chars=10, max_words=3))
    assert [reason(t) for t in ("1234", "12345", "1234567890", "12345678901", "a b c d", "a b c")] \
        == ["min_chars", None, None, "max_chars", "max_words", None]  # fmt: skip
    assert build_filter(FilterConfig(min_words=2))("one\u00a0\n") == "min_words"


def test_a_section_without_rules_keeps_everything() -> None:
    assert build_filter(FilterConfig())("x") is None


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"min_chars": 1}, "min_chars: 1 is too small"),
        ({"min_chars": 9, "max_chars": 8}, "max_chars: 8 is too small"),
        ({"min_words": 9, "max_words": 8}, "max_words: 8 is too small"),
        ({"min_words": 5, "max_chars": 8}, "min_words: 5 words take 9 characters"),
        ({"min_words": 5, "min_chars": 9}, "min_chars: has no effect with min_words: 5"),
        ({"max_words": 5, "max_chars": 10}, "max_words: has no effect with max_chars: 10"),
    ],
)
def test_contradictory_and_inert_rules_are_refused(values: dict[str, int], line: str) -> None:
    (found,) = FilterConfig(**values).check("data.filter.")
    assert found.startswith(f"data.filter.{line}")


@pytest.mark.parametrize(
    "values",
    [
        {"min_words": 5, "max_chars": 9},
        {"min_words": 5, "min_chars": 10},
        {"max_words": 5, "max_chars": 11},
    ],
)
def test_rules_that_just_have_an_effect_pass(values: dict[str, int]) -> None:
    assert not list(FilterConfig(**values).check("data.filter."))


def test_a_missing_library_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spacy", None)
    line = r"data\.filter\.c4: needs the package spacy; .*llmfoundry-recipes\[filters\]"
    with pytest.raises(UserError, match=line):
        build_filter(FilterConfig(c4=True))


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("gopher_quality", "GopherQualityFilter"),
        ("gopher_repetition", "GopherRepetitionFilter"),
        ("c4", "C4QualityFilter"),
        ("fineweb", "FineWebQualityFilter"),
    ],
)
def test_published_rules_keep_what_a_datatrove_pipeline_keeps(key: str, name: str) -> None:
    pytest.importorskip("spacy", reason="extra: filters")
    filters = pytest.importorskip("datatrove.pipeline.filters", reason="extra: filters")
    from datatrove.data import Document

    pages = [Document(text=text, id=str(n)) for n, text in enumerate(_PAGES)]
    theirs = {document.id for document in getattr(filters, name)().run(pages)}
    reason = build_filter(FilterConfig(**{key: True}))
    reasons = [reason(text) for text in _PAGES]
    assert {str(n) for n, why in enumerate(reasons) if why is None} == theirs
    assert 0 < len(theirs) < len(_PAGES)  # says something about both sides
    assert all(why is None or why.startswith(f"{key}: ") for why in reasons)
