"""How a written answer is judged, as LLM Foundry's generation metric does it.

`generation` and `endpoint` end texts by `cut`; `metrics` calls `is_right` on what a model wrote. A
text is cut before a stop, its part after the last `cot_delimiter` is cleaned, and it is right if it
*begins* with a cleaned alias: models go on writing after the answer. That has two known holes. An
alias of which cleaning leaves nothing would accept every text: here it accepts none, and
`empty_aliases` names it. And "3" accepts "30": LLM Foundry's numbers count that as right, so it
stays, and `runs_on` tells such answers apart.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence

from llmfoundry.data.instructions import checks
from llmfoundry.gauntlet.questions import TaskRow
from llmfoundry.gauntlet.tasks.gauntlet_file import TaskConfig

_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "\u2018\u2019\u00b4", " "))
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_GOES_ON = re.compile(r"\w|[.,]\d")  # of a word or a number: 3|0, 3|.5, 2|,125


def cut(text: str, stops: Sequence[str]) -> str:
    """What is before the first of `stops`, plain strings; all of `text` where there is none.

    First is the one that is complete first, so that more text after it changes nothing. (LLM
    Foundry reads them as regular expressions, and takes the one that begins first.)
    """
    assert all(stops), "an empty stop would end every text"
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)[1]] if found else text


def normalize(text: str) -> str:
    """Lower case, without punctuation, articles and repeated white space.

    TriviaQA's (mandarjoshi90/triviaqa, evaluation/triviaqa_evaluation.py), as LLM Foundry has it.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def final_answer(text: str, task: TaskConfig) -> str:
    """What is compared with the aliases: what follows the chain of thought, cleaned."""
    text = cut(text, task.early_stopping_criteria)
    if task.cot_delimiter:
        text = text.split(task.cot_delimiter)[-1]
    return _clean(text, task)


def is_right(text: str, row: TaskRow, task: TaskConfig) -> bool:
    """Whether a text answers the row's question: it begins with an alias that is not empty.

    A row with checks of its own must meet all of them instead, to its last character.
    """
    if row.checks:
        return checks.is_right(cut(text, task.early_stopping_criteria), row.checks)
    return bool(_matches(final_answer(text, task), row, task))


def runs_on(text: str, row: TaskRow, task: TaskConfig) -> bool:
    """Whether a text is right only as the start of a longer word or number: "30" where 3 is."""
    if row.checks:
        return False
    answer = final_answer(text, task)
    matches = _matches(answer, row, task)
    return bool(matches) and all(_GOES_ON.match(answer, len(alias)) for alias in matches)


def empty_aliases(rows: Iterable[TaskRow], task: TaskConfig) -> list[str]:
    """A note for each row with aliases that cleaning leaves nothing of, and that never match."""
    notes = []
    for row in rows:
        empty = [alias for alias in _aliases(row) if not _clean(alias, task)]
        if not empty or row.checks:
            continue
        names = ", ".join(map(repr, empty))
        only = "" if len(empty) < len(_aliases(row)) else "; it has no other, so none is right"
        notes.append(f"{row.place}: of {names} normalisation leaves nothing: never matched{only}")
    return notes


def _matches(answer: str, row: TaskRow, task: TaskConfig) -> list[str]:
    """The cleaned aliases that a cleaned answer begins with."""
    cleaned = {_clean(alias, task) for alias in _aliases(row)} - {""}
    return [alias for alias in cleaned if answer.startswith(alias)]


def _aliases(row: TaskRow) -> tuple[str, ...]:
    return row.aliases or row.choices


def _clean(text: str, task: TaskConfig) -> str:
    return normalize(text) if task.do_normalization else text.strip()
