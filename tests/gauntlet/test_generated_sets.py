"""Generators: answers right by independent solvers, balanced, reproducible; addresses; mistakes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from generated_solvers import SOLVERS, gold, options, parsed, question

from llmfoundry.data.generators import TASKS, load_generator
from llmfoundry.errors import UserError

SCRIPT = load_generator(TASKS)
GENERATORS, SetConfig, generated_rows = SCRIPT.GENERATORS, SCRIPT.SetConfig, SCRIPT.generated_rows
make_rows, make_set = SCRIPT.make_rows, SCRIPT.make_set

LEVELS = (1, 2, 3, 4, 5)
CHOOSING = [name for name, g in GENERATORS.items() if g.task_type in ("multiple_choice", "schema")]
FIELDS = {
    "language_modeling": {"context", "continuation"},
    "multiple_choice": {"query", "choices", "gold"},
    "schema": {"context_options", "continuation", "gold"},
    "generation_task_with_answers": {"context", "answer", "chain_of_thought"},
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", GENERATORS)
def test_exactly_the_gold_answer_is_right_by_an_independent_solver(name: str, level: int) -> None:
    rows = make_rows(SetConfig(name, 7, 40, level), "test")
    assert len({question(row) + gold(row) for row in rows}) == 40
    for row in rows:
        assert set(row) == FIELDS[GENERATORS[name].task_type]
        assert len(set(options(row))) == len(options(row)) == len(options(rows[0]))
        assert all(text == text.strip() and text for text in [question(row), *options(row)])
        assert SOLVERS[name](row) == [gold(row)]


@pytest.mark.parametrize("rows", [60, 61])
@pytest.mark.parametrize("name", CHOOSING)
def test_every_place_is_right_equally_often(name: str, rows: int) -> None:
    made = make_rows(SetConfig(name, 3, rows, 2), "test")
    counts = Counter(row["gold"] for row in made)
    assert len(counts) == len(options(made[0])) > 1
    assert max(counts.values()) - min(counts.values()) <= 1


def test_counting_brackets_does_not_show_which_words_are_valid() -> None:
    for row in generated_rows("generated://dyck_validity?level=3&rows=200"):
        for pair in ("()", "[]", "{}", "<>"):
            assert row["query"].count(pair[0]) == row["query"].count(pair[1])


def test_neither_mention_nor_subject_shows_whom_a_sentence_is_about() -> None:
    for level in LEVELS:
        first = 0
        for row in generated_rows(f"generated://pronouns?level={level}&rows=400"):
            sentence, name = gold(row).split(" because ")
            other = row["context_options"][1 - row["gold"]].split(" because ")[1]
            first += sentence.lower().index(name.lower()) < sentence.lower().index(other.lower())
        assert abs(first / 400 - 0.5) < 0.1  # four standard errors


def test_no_clue_of_a_deduction_is_needless_and_level_two_does_not_name_the_answer() -> None:
    for row in generated_rows("generated://deduction?level=2&rows=60"):
        head, *clues, asked = re.findall(r"[^.?]+[.?]", row["query"])
        for i in range(len(clues)):
            less = {**row, "query": "".join([head, *clues[:i], *clues[i + 1 :], asked])}
            with pytest.raises(AssertionError):
                SOLVERS["deduction"](less)
        place = asked.removesuffix("?").split(" is ")[-1].split(" finished ")[-1]
        assert f"{gold(row)} finished {place}." not in row["query"]
        assert not re.search(rf"{gold(row)}( book)? is {place}\.", row["query"])


def test_levels_mean_what_is_written_of_them() -> None:
    for level in LEVELS:
        rows = {name: make_rows(SetConfig(name, 5, 50, level), "test") for name in GENERATORS}
        operators, digits = {1: (1, 1), 2: (1, 2), 3: (2, 2), 4: (3, 3), 5: (4, 3)}[level]
        for row in rows["arithmetic"]:
            numbers = re.findall(r"\d+", question(row))
            assert len(numbers) == operators + 1 and max(map(len, numbers)) <= digits
        for row in rows["dyck"]:
            assert 1 <= len(gold(row).split()) <= level
        for row in rows["deduction"]:
            assert len(row["choices"]) == {1: 3, 2: 3, 3: 5, 4: 5, 5: 7}[level]
        assert {row["query"].count("\n") for row in rows["key_value"]} == {level + 3}
        assert {len(eval(gold(row))) for row in rows["reversing"]} == {level + 1}
        assert {len(eval(gold(row))) for row in rows["sorting"]} == {level + 1}
        assert {row["query"].count("The ") for row in rows["colour_letters"]} == {level - 1}
        assert {len(q) for q in map(question, rows["lcs_length"])} == {2 * (4 * level + 5) + 1}


# ------------------------------------------------------------------ the same bytes everywhere


def digest() -> str:
    """Of rows of every generator at every level, and of every option."""
    settings = [(name, level, {}) for name in GENERATORS for level in LEVELS]
    settings += [
        ("key_value", 1, {"pairs": 30, "position": "middle"}),
        ("key_value", 1, {"chars": 900}),
    ]
    settings += [("arithmetic", 3, {"spaces": False})]
    texts = [make_set(SetConfig(n, 11, 20, level, o), "test") for n, level, o in settings]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


DIGEST = "6ed4f38f2cf39fe9cd912e5d5a0a334f5279ffc6a75d7926461d920b8d1ac8ed"


def test_rows_are_those_of_every_earlier_version_and_machine() -> None:
    assert digest() == DIGEST


def test_rows_do_not_depend_on_the_order_of_sets_in_memory() -> None:
    code = "import test_generated_sets; print(test_generated_sets.digest())"
    here = Path(__file__).parent
    paths = f"{here}{os.pathsep}{here.parents[1]}"
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == DIGEST


def test_other_seeds_give_other_rows() -> None:
    for name in GENERATORS:
        first, second = (make_set(SetConfig(name, seed, 20, 3), "test") for seed in (1, 2))
        assert first != second


# ------------------------------------------------------------------ addresses


def test_an_address_gives_the_rows_of_its_settings() -> None:
    made = list(generated_rows("generated://dyck?level=2&rows=7&seed=9"))
    assert made == parsed(make_set(SetConfig("dyck", 9, 7, 2), "test"))
    assert len(list(generated_rows("generated://dyck"))) == 100
    for row in generated_rows("generated://arithmetic_choice?spaces=false&rows=9"):
        assert " " not in row["query"]


@pytest.mark.parametrize("chars", [200, 2048, 32768])
def test_key_value_contexts_are_as_long_as_asked_for(chars: int) -> None:
    for row in generated_rows(f"generated://key_value?chars={chars}&rows=8"):
        assert chars - 40 < len(row["query"]) <= chars
        assert SOLVERS["key_value"](row) == [gold(row)]


@pytest.mark.parametrize(("position", "third"), [("begin", 0), ("middle", 1), ("end", 2)])
def test_key_value_asks_for_the_third_that_is_wanted(position: str, third: int) -> None:
    uri = f"generated://key_value?pairs=900&position={position}&rows=40"
    places = set()
    for row in generated_rows(uri):
        *lines, asked = row["query"].split("\n")
        assert len(lines) == 900
        name = asked.split()[1]
        places.add([line.split(" = ")[0] for line in lines].index(name))
    assert {place // 300 for place in places} == {third} and len(places) > 30


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("generated://dick", "'dick' is no generator; did you mean 'dyck'? (arithmetic, "),
        ("generated://", "'' is no generator"),
        ("generated://dyck/?level=2", "'dyck/' is no generator; did you mean 'dyck'?"),
        ("generated://dyck?levle=2", "unknown key 'levle'; did you mean 'level'? (keys of dyck: "),
        ("generated://dyck?pairs=9", "unknown key 'pairs'"),
        ("generated://dyck?level=6", "level: 6; write 5 or less"),
        ("generated://dyck?level=", "level: ''; write a whole number above 0"),
        ("generated://dyck?rows=-1", "rows: '-1'; write a whole number above 0"),
        ("generated://dyck?rows=true", "rows: True; write a whole number above 0"),
        ("generated://dyck?name=sorting", "unknown key 'name'"),
        ("generated://dyck?rows=3&rows=4", "has a setting twice; write each once"),
        ("generated://arithmetic?rows=900", "rows: 900, but level 1 of arithmetic gave only 155"),
        ("generated://arithmetic?spaces=no", "spaces: 'no'; write true or false"),
        ("generated://key_value?pairs=3", "pairs: 3; write a whole number from 4 to 20000"),
        ("generated://key_value?chars=100", "chars: 100; write a whole number from 200 to"),
        ("generated://key_value?position=top", "position: 'top'; write any, begin, middle or end"),
        ("generated://key_value?pairs=9&level=2", "pairs and level: each decides the length"),
    ],
)
def test_a_wrong_address_is_one_line_that_says_what_to_write(uri: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        generated_rows(uri, key="my.yaml: icl_tasks: recall: dataset_uri")
    (line,) = error.value.problems
    assert line.startswith(f"my.yaml: icl_tasks: recall: dataset_uri: {uri}: {message}")


def test_all_mistakes_of_an_address_are_reported_at_once() -> None:
    with pytest.raises(UserError) as error:
        generated_rows("generated://sorting?rows=0&sed=1")
    wrong_rows, unknown_key = error.value.problems
    assert "rows: 0" in wrong_rows and "'sed'; did you mean 'seed'?" in unknown_key


def test_every_generator_has_a_solver() -> None:
    assert set(SOLVERS) == set(GENERATORS)
