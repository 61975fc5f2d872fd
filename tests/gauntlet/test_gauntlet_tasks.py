"""What a gauntlet file and its rows may say, and how mistakes are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from gauntlet_stand_ins import ByteTokenizer, write_gauntlet

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.gauntlet import Gauntlet
from llmfoundry.gauntlet.rows import chance, majority, read_rows
from llmfoundry.gauntlet.tasks import TaskConfig, read_gauntlet

TASK = {
    "label": "copa",
    "dataset_uri": "copa.jsonl",
    "icl_task_type": "multiple_choice",
    "num_fewshot": [0],
}
CHOICE = {"query": "q", "choices": ["a", "b"], "gold": 1}


def problems_of(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "gauntlet.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(UserError) as error:
        read_gauntlet(path)
    return str(error.value).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_fewshots": [1]}, "icl_tasks[0] (copa): unknown key 'num_fewshots'; did you mean"),
        ({"num_fewshot": 3}, "num_fewshot: 3 will not do; write a list of one or more whole"),
        ({"num_fewshot": [-1]}, "copa: num_fewshot: -1 is below 0; write 0 or more"),
        ({"num_fewshot": [2, 2]}, "copa: num_fewshot: 2 is there more than once"),
        ({"icl_task_type": "multiple_choise"}, "did you mean 'multiple_choice'?"),
        ({"strip_dataset": "no"}, "strip_dataset: 'no' will not do; write true or false"),
        ({"label": "a/b"}, "label: 'a/b' cannot name a metric"),
    ],
)
def test_a_mistake_in_a_task_names_file_task_key_and_what_to_write(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    told = problems_of(tmp_path, {"icl_tasks": [{**TASK, **change}]})
    assert message in told
    assert told.startswith("gauntlet.yaml: icl_tasks")


@pytest.mark.parametrize(
    ("gauntlet", "message"),
    [
        ({"weightings": "EQUAL"}, "unknown key 'weightings'; did you mean 'weighting'?"),
        ({"weighting": "EQUALS"}, "weighting: 'EQUALS' is not a choice; did you mean 'EQUAL'?"),
        ({"subtract_random_baseline": False}, "rescale_accuracy: true needs subtract_random"),
        ({"categories": [{"name": "x"}]}, "categories[0] (x): benchmarks: is missing"),
        (
            {"categories": [{"name": "average", "benchmarks": [{"name": "c", "num_fewshot": 0}]}]},
            "categories: name: 'average' is there more than once",
        ),
    ],
)
def test_a_mistake_in_the_categories_is_told(
    tmp_path: Path, gauntlet: dict[str, Any], message: str
) -> None:
    assert message in problems_of(tmp_path, {"icl_tasks": [TASK], "eval_gauntlet": gauntlet})


def test_every_mistake_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    told = problems_of(tmp_path, {"icl_tasks": [{"label": "x"}, {**TASK, "k": 1}], "icl_task": 1})
    assert len(told.splitlines()) == 5  # three missing keys, two unknown ones


def test_files_that_are_no_gauntlet_are_told(tmp_path: Path) -> None:
    assert "is not YAML" in problems_of(tmp_path, "a: [")
    assert "is not a gauntlet" in problems_of(tmp_path, "- 1")
    assert "icl_tasks: is missing or empty" in problems_of(tmp_path, {"icl_tasks": []})
    assert "icl_tasks: nothing at tasks.yam" in problems_of(tmp_path, {"icl_tasks": "tasks.yam"})
    assert "icl_tasks: . is a folder" in problems_of(tmp_path, {"icl_tasks": "."})
    assert "label: 'copa' is there more" in problems_of(tmp_path, {"icl_tasks": [TASK, TASK]})


def test_tasks_may_be_in_a_file_of_their_own_and_their_rows_are_found_beside_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "copa.jsonl").write_text(json.dumps(CHOICE))
    (tmp_path / "tasks" / "all.yaml").write_text(yaml.safe_dump({"icl_tasks": [TASK]}))
    path = tmp_path / "gauntlet.yaml"
    path.write_text("icl_tasks: tasks/all.yaml")
    gauntlet = Gauntlet(path, ByteTokenizer(), seq_len=64, validation_texts=list)
    assert gauntlet.n_tokens == len("\0q ")


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("language_modeling", {"context": "a"}, "has no field 'continuation'"),
        ("language_modeling", {"contxt": "a"}, "no field 'context'; did you mean 'contxt'?"),
        ("language_modeling", {"context": 1, "continuation": "b"}, "field 'context' is 1"),
        ("language_modeling", {"context": "a", "continuation": " "}, "'continuation' is empty"),
        ("multiple_choice", {"query": "q", "gold": 0}, "has no field 'choices'"),
        ("multiple_choice", {**CHOICE, "gold": 2}, "'gold' is 2; write an index from 0 to 1"),
        ("multiple_choice", {**CHOICE, "gold": True}, "'gold' is True"),
        ("multiple_choice", {**CHOICE, "choices": ["a"]}, "not a list of two texts or more"),
        ("multiple_choice", {**CHOICE, "choices": ["a", ""]}, "is not a text, or is empty"),
    ],
)
def test_a_row_without_what_it_needs_is_told_with_file_and_line(
    tmp_path: Path, kind: str, row: dict[str, Any], message: str
) -> None:
    good = {**CHOICE, "context": "a", "continuation": "b"}
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError) as error:
        read_rows(path, TaskConfig("t", "t.jsonl", kind, [0]))
    (line,) = error.value.problems
    assert line.startswith(f"{path}:2: ")
    assert message in line


def test_lines_that_are_no_rows_are_told_and_many_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("{\n\n[]\n" + "{}\n" * 20)
    with pytest.raises(UserError) as error:
        read_rows(path, TaskConfig("t", "t.jsonl", "language_modeling", [0]))
    told = [line.removeprefix(str(path)) for line in error.value.problems]
    assert told[0].startswith(":1: is not JSON")
    assert told[1].startswith(":2: is empty")
    assert told[2].startswith(":3: is not a row")
    assert told[10:] == [": 13 more rows are not language_modeling rows either"]


def test_line_separators_inside_a_text_do_not_end_a_row(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = {"context": "a\u2028b\x0cc", "continuation": "d"}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    (read,) = read_rows(path, TaskConfig("t", "t.jsonl", "language_modeling", [0]))
    assert read.context == "a\u2028b\x0cc"


def test_an_empty_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("")
    with pytest.raises(UserError, match="has no rows; task t needs at least one"):
        read_rows(tmp_path / "t.jsonl", TaskConfig("t", "t.jsonl", "multiple_choice", [0]))


def test_texts_are_stripped_unless_the_task_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"context": "q\n", "continuation": "  x"}))
    (row,) = read_rows(path, TaskConfig("t", "", "language_modeling", [0]))
    assert (row.context, row.answer) == ("q", "x")
    (row,) = read_rows(path, TaskConfig("t", "", "language_modeling", [0], strip_dataset=False))
    assert (row.context, row.answer) == ("q\n", "  x")


def test_chance_and_majority_come_from_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    choices = [["a", "b"], ["a", "b", "c", "d"], ["a", "b"], ["a", "b"]]
    golds = [1, 1, 0, 1]
    entries = [{"query": "q", "choices": c, "gold": g} for c, g in zip(choices, golds, strict=True)]
    path.write_text("\n".join(map(json.dumps, entries)))
    rows = read_rows(path, TaskConfig("t", "", "multiple_choice", [0]))
    assert chance(rows) == (0.5 + 0.25 + 0.5 + 0.5) / 4
    assert majority(rows) == 3 / 4

    answers = [{"context": str(i), "continuation": c} for i, c in enumerate("xyxxz")]
    path.write_text("\n".join(map(json.dumps, answers)))
    rows = read_rows(path, TaskConfig("t", "", "language_modeling", [0]))
    assert chance(rows) == 0
    assert majority(rows) == 3 / 5


def test_remote_rows_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = write_gauntlet(tmp_path, {"t": [CHOICE]}, task_keys={"dataset_uri": "s3://b/t.jsonl"})
    with pytest.raises(UserError, match=r"t: dataset_uri: s3://b/t\.jsonl: only files on this"):
        Gauntlet(path, ByteTokenizer(), seq_len=64, validation_texts=list)
