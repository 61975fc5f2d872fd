"""Judgements of written answers, against tables made by hand and LLM Foundry's rules."""

from __future__ import annotations

from typing import Any

import pytest

from llmfoundry.gauntlet.answer_metrics import (
    empty_aliases,
    final_answer,
    is_right,
    normalize,
    runs_on,
    until_stop,
)
from llmfoundry.gauntlet.questions import TaskConfig, TaskRow


def task(**keys: Any) -> TaskConfig:
    return TaskConfig("t", "t.jsonl", "generation_task_with_answers", [0], **keys)


def row(*aliases: str, place: str = "t.jsonl:1") -> TaskRow:
    return TaskRow(("Q",), (aliases[0],), 0, place, aliases=aliases)


GSM8K: dict[str, Any] = {
    "cot_delimiter": "The answer is ",
    "early_stopping_criteria": ["\n\n", "Question:"],
    "do_normalization": False,
}


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("12\n\nQuestion: 3", ["\n\n", "Question:"], "12"),
        ("12 Question: 3\n\n", ["\n\n", "Question:"], "12 "),
        ("no stop", ["\n\n"], "no stop"),
        ("no stop", [], "no stop"),
        ("\n\nrest", ["\n\n"], ""),
        ("a.b|c (d)", ["(d)"], "a.b|c "),  # plain, where LLM Foundry reads regular expressions
        ("a.b|c", ["."], "a"),
        ("x stop stop", ["stop"], "x "),
        ("one\n\nQ: two", ["Q:", "\n\nQ:"], "one"),  # complete at the same place
        ("abcd", ["abcd", "c"], "ab"),  # c is complete first, whatever comes after it
    ],
)
def test_a_text_is_cut_before_the_first_complete_stop(
    text: str, stops: list[str], expected: str
) -> None:
    assert until_stop(text, stops) == expected


@pytest.mark.parametrize("stops", [["ab", "b"], ["b", "ab"], ["bc", "abcd"], ["\n", "\n\n"]])
def test_text_after_the_first_stop_changes_nothing(stops: list[str]) -> None:
    """So that it does not matter when a generator looks for stops."""
    whole = "xyabcd\n\nab"
    first = next(n for n in range(len(whole)) if any(stop in whole[:n] for stop in stops))
    assert len({until_stop(whole[:n], stops) for n in range(first, len(whole) + 1)}) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Beatles", "beatles"),
        ("the_beatles!", "beatles"),
        (" An apple, a day ", "apple day"),
        ("Theatre of THE absurd", "theatre of absurd"),
        ("rock'n'roll", "rock n roll"),
        ("\u2018Salem\u2019s Lot\u00b4`", "salem s lot"),
        ("\u201cquoted\u201d", "\u201cquoted\u201d"),  # double ones are not in TriviaQA's list
        ("U.S.A.", "u s"),  # its last letter is left alone, and then an article
        ("2,125", "2 125"),
        ("\tan\n\u00c9clair\u00a0x ", "\u00e9clair x"),
        ("The", ""),
        ("?!", ""),
        ("", ""),
    ],
)
def test_normalization_is_triviaqas(text: str, expected: str) -> None:
    assert normalize(text) == expected


@pytest.mark.parametrize(
    ("text", "keys", "expected"),
    [
        ("6 - 2 = 4. The answer is 4\n\nQuestion: ... The answer is 9", GSM8K, "4"),
        ("The answer is 3, no: The answer is 4", GSM8K, "4"),  # the last part
        ("4 apples", GSM8K, "4 apples"),  # without the delimiter all of it
        ("  The Answer  ", {"do_normalization": False}, "The Answer"),
        ("  The Answer  ", {}, "answer"),
        ("so #### The 4", {"cot_delimiter": " #### "}, "4"),
    ],
)
def test_the_final_answer_follows_the_chain_of_thought(
    text: str, keys: dict[str, Any], expected: str
) -> None:
    assert final_answer(text, task(**keys)) == expected


@pytest.mark.parametrize(
    ("text", "aliases", "keys", "right"),
    [
        (" Paris, France", ("paris",), {}, True),
        ("It is Paris", ("Paris",), {}, False),  # begins with, not contains
        ("Par", ("Paris",), {}, False),
        ("the UK", ("Great Britain", "UK"), {}, True),
        ("uk", ("UK",), {"do_normalization": False}, False),
        ("The answer is 30", ("3",), GSM8K, True),  # LLM Foundry's hole, kept
        ("The answer is 2125", ("2,125",), GSM8K, False),
        ("The answer is  18 \n\nQuestion:", (" 18 ",), GSM8K, True),
        ("anything", ("The", "Who"), {}, False),  # LLM Foundry: right, for The becomes ''
        ("who", ("The", "Who"), {}, True),
        ("", ("The",), {}, False),
    ],
)
def test_an_answer_is_right_if_it_begins_with_an_alias(
    text: str, aliases: tuple[str, ...], keys: dict[str, Any], right: bool
) -> None:
    assert is_right(text, row(*aliases), task(**keys)) is right


@pytest.mark.parametrize(
    ("text", "aliases", "more"),
    [
        ("The answer is 30", ("3",), True),
        ("The answer is 3.5", ("3",), True),
        ("The answer is 2,125", ("2",), True),
        ("The answer is 3.", ("3",), False),
        ("The answer is 3, so", ("3",), False),
        ("The answer is 3 apples", ("3",), False),
        ("The answer is 3", ("3",), False),
        ("The answer is 30", ("3", "30"), False),
        ("The answer is 4", ("3",), False),
    ],
)
def test_answers_that_only_begin_like_an_alias_are_distinguished(
    text: str, aliases: tuple[str, ...], more: bool
) -> None:
    assert runs_on(text, row(*aliases), task(**GSM8K)) is more


def test_empty_aliases_are_named_by_row() -> None:
    rows = [
        row("Paris"),
        row("The Who", "The", "!", place="t.jsonl:2"),
        row("The", place="t.jsonl:3"),
    ]
    several, only = empty_aliases(rows, task())
    assert several.startswith("t.jsonl:2: of 'The', '!' normalization") and "other" not in several
    assert only.startswith("t.jsonl:3: of 'The'") and only.endswith("so none is right")
    assert empty_aliases(rows, task(do_normalization=False)) == []
