"""How lines become rows, how wrong ones are reported, and what is computed from rows."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.questions import TaskConfig, TaskRow
from llmfoundry.gauntlet.task_rows import chance, heldout_rows, load_rows, majority, rows_hash
from llmfoundry.gauntlet.task_types import TASK_TYPES

LM = {"context": "a", "continuation": "b"}
CHOICE = {"query": "q", "choices": ["a", "b"], "gold": 1}
SCHEMA = {"context_options": ["x", "y"], "continuation": "z", "gold": 0}
ANSWER = {"context": "a", "answer": "b"}
GENERATION = "generation_task_with_answers"


def load(folder: Path, kind: str, *rows: dict[str, Any], **keys: Any) -> list[TaskRow]:
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TaskConfig("t", "t.jsonl", kind, [0], **keys)
    return load_rows(task, gauntlet_path=folder / "g.yaml")


def problems_of(folder: Path, kind: str, *rows: dict[str, Any], **keys: Any) -> list[str]:
    with pytest.raises(UserError) as error:
        load(folder, kind, *rows, **keys)
    return [line.split("t.jsonl")[-1] for line in error.value.problems]


def test_the_four_schemas_become_one_form(tmp_path: Path) -> None:
    (lm,) = load(tmp_path, "language_modeling", LM)
    assert (lm.contexts, lm.choices, lm.gold, lm.n_options) == (("a",), ("b",), 0, 1)
    (choice,) = load(tmp_path, "multiple_choice", CHOICE)
    assert (choice.contexts, choice.choices, choice.gold) == (("q",), ("a", "b"), 1)
    (schema,) = load(tmp_path, "schema", SCHEMA)
    assert (schema.contexts, schema.choices, schema.gold) == (("x", "y"), ("z",), 0)
    full = {**ANSWER, "aliases": ["c", "b", "c"], "chain_of_thought": "since"}
    (answer,) = load(tmp_path, GENERATION, full)
    assert (answer.contexts, answer.choices, answer.gold) == (("a",), ("b",), 0)
    assert (answer.aliases, answer.chain_of_thought) == (("b", "c"), "since")
    (plain,) = load(tmp_path, GENERATION, {**ANSWER, "aliases": None})
    assert (plain.aliases, plain.chain_of_thought) == (("b",), "")


def test_half_a_character_is_reported_with_its_row_and_field_where_it_is_read(
    tmp_path: Path,
) -> None:
    half = "a\ud83d"  # which json.dumps writes, and the standard's readers take
    reported = problems_of(
        tmp_path,
        "multiple_choice",
        {**CHOICE, "choices": ["a", half]},
        CHOICE,
        {**CHOICE, "query": half, "elsewhere": half},
    )
    assert reported[0].startswith(
        r":1: field 'choices' is 'a\ud83d': it holds half a surrogate pair"
    )
    assert reported[1].startswith(r":3: field 'query' is 'a\ud83d': it holds half a surrogate pair")
    assert len(reported) == 2
    whole = {**CHOICE, "query": "\U0001f600", "elsewhere": half}
    assert load(tmp_path, "multiple_choice", whole)[0].contexts == ("\U0001f600",)
    for name in ("aliases", "chain_of_thought"):
        value = [half] if name == "aliases" else half
        assert name in problems_of(tmp_path, GENERATION, {**ANSWER, name: value})[0]


def test_stripping_takes_a_rows_own_texts_and_leaves_those_in_lists(tmp_path: Path) -> None:
    """LLM Foundry's strip_data, whose rule is: every field of the row that is a str."""
    (choice,) = load(
        tmp_path, "multiple_choice", {**CHOICE, "query": " q\n", "choices": [" a", "b "]}
    )
    assert (choice.contexts, choice.choices) == (("q",), (" a", "b "))
    schema = {**SCHEMA, "context_options": ["x ", "y "], "continuation": " z "}
    (row,) = load(tmp_path, "schema", schema)
    assert (row.contexts, row.choices) == (("x ", "y "), ("z",))
    answer = {"context": "a\n", "answer": " b ", "aliases": [" c "], "chain_of_thought": "d "}
    (row,) = load(tmp_path, GENERATION, answer)
    assert (row.contexts, row.aliases, row.chain_of_thought) == (("a",), ("b", " c "), "d")
    (row,) = load(tmp_path, GENERATION, answer, strip_dataset=False)
    assert (row.contexts, row.aliases, row.chain_of_thought) == (("a\n",), (" b ", " c "), "d ")


def test_categories_are_read_where_the_task_has_them(tmp_path: Path) -> None:
    row = {**LM, "category": "history "}
    assert load(tmp_path, "language_modeling", row)[0].category is None
    assert load(tmp_path, "language_modeling", row, has_categories=True)[0].category == "history"
    reported = problems_of(tmp_path, "language_modeling", row, LM, has_categories=True)
    assert reported == [":2: has no field 'category' (fields: context, continuation)"]


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("language_modeling", {"context": "a"}, "has no field 'continuation' (fields: context)"),
        ("language_modeling", {"contxt": "a"}, "no field 'context'; did you mean 'contxt'?"),
        ("language_modeling", {**LM, "context": 1}, "field 'context' is 1; write a text"),
        ("language_modeling", {**LM, "continuation": " "}, "'continuation' is empty; write the te"),
        ("language_modeling", CHOICE, "'context'; these are fields of multiple_choice"),
        ("multiple_choice", {"query": "q", "gold": 0}, "has no field 'choices'"),
        ("multiple_choice", {**CHOICE, "gold": 2}, "'gold' is 2; write an index from 0 to 1"),
        ("multiple_choice", {**CHOICE, "gold": -1}, "'gold' is -1; write an index from 0 to 1"),
        ("multiple_choice", {**CHOICE, "gold": True}, "'gold' is True"),
        ("multiple_choice", {**CHOICE, "gold": "1"}, "'gold' is '1'"),
        ("multiple_choice", {**CHOICE, "choices": ["a"]}, "'choices' has 1 texts; write two or"),
        ("multiple_choice", {**CHOICE, "choices": "ab"}, "'choices' is 'ab'; write a list of text"),
        ("multiple_choice", {**CHOICE, "choices": ["a", 2]}, "is ['a', 2]; write a list of texts"),
        ("multiple_choice", {**CHOICE, "choices": ["a", ""]}, "holds an empty text"),
        ("schema", {**SCHEMA, "context_options": ["x"]}, "has 1 texts; write two or more"),
        ("schema", {**SCHEMA, "gold": 2}, "'gold' is 2; write an index from 0 to 1"),
        ("schema", {**SCHEMA, "continuation": ""}, "'continuation' is empty; write the text that"),
        (GENERATION, {"context": "a"}, "has no field 'answer'"),
        (GENERATION, {**ANSWER, "answer": 18}, "field 'answer' is 18; write a text"),
        (GENERATION, {**ANSWER, "answer": ""}, "'answer' is empty; write the text to generate"),
        (GENERATION, {**ANSWER, "aliases": "b"}, "'aliases' is 'b'; write a list of texts"),
        (GENERATION, {**ANSWER, "chain_of_thought": []}, "'chain_of_thought' is []; write a text"),
        (GENERATION, LM, "these are fields of language_modeling"),
    ],
)
def test_a_wrong_row_is_reported_with_line_field_and_what_to_write(
    tmp_path: Path, kind: str, row: dict[str, Any], message: str
) -> None:
    good = {**CHOICE, **SCHEMA, **LM, **ANSWER}
    (line,) = problems_of(tmp_path, kind, good, row)
    assert line.startswith(":2: ")
    assert message in line


def test_lines_that_are_no_rows_are_reported_and_many_are_counted(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("{\n[]\n" + "{}\n" * 20)
    task = TaskConfig("t", "t.jsonl", "language_modeling", [0])
    with pytest.raises(UserError) as error:
        load_rows(task, gauntlet_path=tmp_path / "g.yaml")
    reported = [line.split("t.jsonl")[-1] for line in error.value.problems]
    assert reported[0].startswith(":1: is not JSON")
    assert reported[1].startswith(":2: is not a row")
    assert reported[10:] == [": 12 more rows are not language_modeling rows either"]


def test_a_file_without_rows_is_reported(tmp_path: Path) -> None:
    (reported,) = problems_of(tmp_path, "multiple_choice")
    assert reported == ": has no rows; task t needs at least one"


def test_chance_and_majority_come_from_the_rows(tmp_path: Path) -> None:
    choices = [["a", "b"], ["a", "b", "c", "d"], ["a", "b"], ["a", "b"]]
    golds = [1, 1, 0, 1]
    entries = [{"query": "q", "choices": c, "gold": g} for c, g in zip(choices, golds, strict=True)]
    rows, kind = load(tmp_path, "multiple_choice", *entries), TASK_TYPES["multiple_choice"]
    assert chance(rows, kind) == (0.5 + 0.25 + 0.5 + 0.5) / 4
    assert majority(rows, kind) == 3 / 4

    rows, kind = (
        load(tmp_path, "schema", SCHEMA, SCHEMA, {**SCHEMA, "gold": 1}),
        TASK_TYPES["schema"],
    )
    assert (chance(rows, kind), majority(rows, kind)) == (0.5, 2 / 3)

    answers = [{"context": str(i), "continuation": c} for i, c in enumerate("xyxxz")]
    rows, kind = load(tmp_path, "language_modeling", *answers), TASK_TYPES["language_modeling"]
    assert (chance(rows, kind), majority(rows, kind)) == (0, 3 / 5)


def test_the_hash_is_of_content_and_order_and_not_of_the_place(tmp_path: Path) -> None:
    rows = load(tmp_path, "multiple_choice", CHOICE, {**CHOICE, "query": "\u2028é"})
    moved = [replace(row, place="elsewhere") for row in rows]
    assert rows_hash(moved) == rows_hash(rows)
    others = [
        rows[::-1],
        rows[:1],
        [replace(rows[0], gold=0), rows[1]],
        [replace(rows[0], choices=("a,b",)), rows[1]],
        [replace(rows[0], category="c"), rows[1]],
        [replace(rows[0], aliases=("a",)), rows[1]],
    ]
    assert len({rows_hash(rows), *map(rows_hash, others)}) == 1 + len(others)


def test_the_hash_is_the_same_in_every_process_and_version() -> None:
    """Results of different runs are compared by it: changing it must be a decision."""
    row = TaskRow(("a",), ("b", "c"), 1, "x:1", category="k", aliases=("b",), chain_of_thought="d")
    canonical = (
        '{"aliases":["b"],"category":"k","chain_of_thought":"d","choices":["b","c"],'
        '"contexts":["a"],"gold":1}\n'
    )
    assert rows_hash([row]) == hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def test_heldout_text_gives_rows_of_the_same_form() -> None:
    texts = [f"document {i} " + " ".join(f"word{i * 100 + j}" for j in range(90)) for i in range(6)]
    task = TaskConfig("next", "heldout://continuations?rows=8", "multiple_choice", [0])
    rows = heldout_rows(task, texts)
    assert len(rows) == 8
    for row in rows:
        (context,) = row.contexts
        assert sum(context + row.choices[row.gold] in text for text in texts) == 1
        assert row.n_options == 4
