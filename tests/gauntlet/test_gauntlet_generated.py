"""The shipped generated sets and gauntlets, and what is cut from held-out text."""

from __future__ import annotations

import itertools
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from gauntlet_stand_ins import questions
from generated_solvers import SOLVERS, gold, options, parsed, question

from llmfoundry.data.generators import TASKS, load_generator
from llmfoundry.data.text.bpe import END_OF_TEXT, train_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.gauntlet_file import read_gauntlet
from llmfoundry.gauntlet.questions import TaskConfig, TaskRow
from llmfoundry.gauntlet.task_rows import (
    NoHeldOutText,
    chance,
    heldout_rows,
    load_rows,
    majority,
)
from llmfoundry.gauntlet.task_types import type_of

SCRIPT = load_generator(TASKS)
GENERATORS, generated_rows, make_set = SCRIPT.GENERATORS, SCRIPT.generated_rows, SCRIPT.make_set
read_recipe = SCRIPT.read_recipe
EVAL = Path(__file__).resolve().parents[2] / "eval"
SETS = read_recipe(EVAL / "generated.yaml")
GAUNTLETS = ("generated", "generated_hard", "generated_long_context")


def stdlib_texts(n: int) -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))[:n]]


# ------------------------------------------------------------------ the recipe and its files


@pytest.mark.parametrize("name", SETS)
def test_the_recipe_gives_the_committed_file_byte_for_byte(name: str) -> None:
    committed = (EVAL / "generated" / f"{name}.jsonl").read_bytes()
    assert make_set(SETS[name], "test").encode() == committed


@pytest.mark.parametrize("name", SETS)
def test_committed_rows_are_right_and_a_constant_answer_is_at_chance(name: str) -> None:
    rows = parsed((EVAL / "generated" / f"{name}.jsonl").read_text(encoding="utf-8"))
    for row in rows:
        assert SOLVERS[SETS[name].name](row) == [gold(row)]
    n_options = len(options(rows[0]))
    if n_options > 1:
        counts = [sum(row["gold"] == i for row in rows) for i in range(n_options)]
        assert max(counts) - min(counts) <= 1


def test_every_committed_file_is_in_the_recipe_and_every_generator_has_one() -> None:
    assert {path.stem for path in (EVAL / "generated").iterdir()} == set(SETS)
    assert {config.name for config in SETS.values()} == set(GENERATORS)


def test_bracket_choices_are_equally_long() -> None:
    for row in parsed(make_set(SETS["brackets"], "test")):
        assert len({len(choice) for choice in row["choices"]}) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sets: 1", "sets: is missing"),
        ("sets: [", "cannot be read as YAML"),
        ("sets: [3]", "sets[0]: is not a mapping"),
        (
            "sets: [{nam: brackets, rows: 1}]",
            "sets[0]: name: is missing; write one of arithmetic, ",
        ),
        ("sets: [{name: [1]}]", "sets[0]: [1] is no generator"),
        ("sets: [{name: brackets, row: 1}]", "sets[0]: unknown key 'row'; did you mean 'rows'?"),
        ("sets: [{name: bracket}]", "'bracket' is no generator; did you mean 'brackets'?"),
        ("sets: [{name: copying, rows: 0}]", "rows: 0; write a whole number"),
        ("sets: [{name: copying, rows: yes}]", "rows: True; write a whole number"),
        ("sets: [{name: copying, level: 9}]", "level: 9; write 5 or less"),
        ("sets: [{name: dyck, file: a/b}]", "file: 'a/b'; write a name"),
        ("sets: [{name: dyck}, {name: sorting, file: dyck}]", "file: dyck is there already"),
        ("sets: [{name: dyck}, {name: 1}, {name: 2}]", "sets[2]: 2 is no generator"),
    ],
)
def test_mistakes_in_the_recipe_are_reported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "sets.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        read_recipe(tmp_path / "sets.yaml")
    assert message in str(error.value)


def test_the_command_writes_a_file_for_each_set_and_reports_mistakes_in_one_line(
    tmp_path: Path,
) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text("sets: [{name: dyck, rows: 3}, {name: dyck, file: hard, rows: 4, level: 5}]")
    command = [sys.executable, str(EVAL / "generated.py"), str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EVAL.parent)
    assert done.returncode == 0
    rows = [parsed(Path(line).read_text()) for line in done.stdout.splitlines()]
    assert [len(r) for r in rows] == [3, 4]
    recipe.write_text("sets: [{name: arithmetic, rows: 900}]")
    done = subprocess.run(command, capture_output=True, text=True, cwd=EVAL.parent)
    assert done.returncode == 2
    assert done.stderr == (
        f"{recipe}: arithmetic: rows: 900, but level 1 of arithmetic gave only 155 different"
        " questions; write less, or a higher level\n"
    )


# ------------------------------------------------------------------ continuations


def continuations(texts: list[str], query: str = "") -> list[Any]:
    uri = f"heldout://continuations{query}"
    return heldout_rows(TaskConfig("next", uri, "multiple_choice", [0]), texts)


def test_the_gold_piece_follows_its_context_and_the_others_are_from_other_documents() -> None:
    texts = stdlib_texts(12)
    rows = continuations(texts, "?rows=40&context_chars=200&piece_chars=50")
    assert len(rows) == 40
    for row in rows:
        (context,), answer = row.contexts, row.choices[row.gold]
        (source,) = [text for text in texts if context + answer in text]
        start = source.index(context + answer)
        assert 0 < len(context) <= 200
        assert source[start - 1] == "\n" or len(context) == 200
        assert not context[-1].isspace() and answer[0] != "\n"
        assert {len(choice) for choice in row.choices} == {50}
        wrong = [choice for choice in row.choices if choice != answer]
        assert len(set(wrong)) == 3
        for choice in wrong:
            assert any(choice in text for text in texts if text is not source)
    assert [sum(row.gold == i for row in rows) for i in range(4)] == [10] * 4


def test_rows_depend_on_the_documents_content_and_not_on_their_order() -> None:
    texts = stdlib_texts(12)
    expected = continuations(texts)
    assert continuations(texts[::-1]) == expected
    assert continuations([*texts, texts[3]]) == expected
    assert continuations(texts[1:]) != expected


def test_questions_of_one_document_do_not_overlap() -> None:
    numbered = ["".join(f"{name} {i}\n" for i in range(200)) for name in ("a", "b")]
    rows = continuations(numbered, "?context_chars=40&piece_chars=20&rows=1000")
    assert len(rows) > 20
    places = []
    for row in rows:
        whole = row.contexts[0] + row.choices[row.gold]
        (source,) = [text for text in numbered if whole in text]
        start = source.index(whole)
        places.append((source[0], start, start + len(whole)))
    for (a, _, end), (b, start, _) in itertools.pairwise(sorted(places)):
        assert a != b or end <= start


def test_short_held_out_text_gives_fewer_rows_or_none() -> None:
    texts = ["".join(f"line {i} of {n}\n" for i in range(200)) for n in "ab"]
    assert 0 < len(continuations(texts)) < 100
    for too_little in ([], texts[:1], ["a\n", "b\n", "c\n"]):
        with pytest.raises(NoHeldOutText, match=r"icl_tasks: next: left out: .* of more than 232"):
            continuations(too_little)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?row=3", "unknown setting 'row'; did you mean 'rows'?"),
        ("?rows=0", "rows is '0'; write a whole number above 0"),
        ("/x", "is unknown; write heldout://continuations"),
    ],
)
def test_a_wrong_address_is_reported(query: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        continuations(stdlib_texts(3), query)
    assert message in str(error.value)


# ------------------------------------------------------------------ the shipped gauntlets


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A BPE of 4,096 tokens, of which the recipes' own are not smaller; words are GPT-4's."""
    bpe = train_backend(stdlib_texts(40), 4096, progress=False)

    return Tokenizer(bpe, END_OF_TEXT)


def rows_of(task: TaskConfig) -> list[TaskRow]:
    if task.dataset_uri.startswith("heldout://"):
        return heldout_rows(task, stdlib_texts(10))
    return load_rows(task, gauntlet_path=EVAL / "gauntlets" / "generated.yaml")


@pytest.mark.parametrize("name", GAUNTLETS)
def test_every_task_is_in_one_category_with_its_number_of_examples(name: str) -> None:
    file = read_gauntlet(EVAL / "gauntlets" / f"{name}.yaml")
    members = [
        (benchmark.name, benchmark.num_fewshot)
        for category in file.gauntlet.categories
        for benchmark in category.benchmarks
    ]
    assert sorted(members) == sorted((t.label, n) for t in file.tasks for n in t.num_fewshot)


def test_the_easy_gauntlet_has_every_set_all_types_and_baselines_at_chance() -> None:
    file = read_gauntlet(EVAL / "gauntlets" / "generated.yaml")
    assert {t.label for t in file.tasks} == {*SETS, "continuations"}
    assert len({t.icl_task_type for t in file.tasks}) == 4
    baselines = {
        benchmark.name: benchmark.random_baseline
        for category in file.gauntlet.categories
        for benchmark in category.benchmarks
    }
    for task in file.tasks:
        rows = rows_of(task)
        assert len(rows) in (100, 180)
        assert baselines[task.label] == pytest.approx(chance(rows, type_of(task)), abs=5e-4)
        if chance(rows, type_of(task)):
            assert majority(rows, type_of(task)) - chance(rows, type_of(task)) < 1.5 / len(rows)


def test_the_hard_gauntlet_asks_as_the_easy_one_does_at_levels_3_to_5() -> None:
    easy = {t.label: t for t in read_gauntlet(EVAL / "gauntlets" / "generated.yaml").tasks}
    easy["arithmetic_nospaces"] = easy["arithmetic"]
    hard = read_gauntlet(EVAL / "gauntlets" / "generated_hard.yaml").tasks
    for task in hard:
        name, _, level = task.label.rpartition("_")
        generator = name.removesuffix("_nospaces")
        assert task.dataset_uri.startswith(f"generated://{generator}?level={level}")
        assert ("spaces=false" in task.dataset_uri) == name.endswith("_nospaces")
        same = {**vars(easy[name]), "label": task.label, "dataset_uri": task.dataset_uri}
        if name.endswith("_nospaces"):
            same["continuation_delimiter"] = ""
        assert vars(task) == same
    assert len(hard) == 3 * (len(easy) - 1)  # all but continuations


def test_long_context_tasks_are_as_long_as_their_names_say() -> None:
    for task in read_gauntlet(EVAL / "gauntlets" / "generated_long_context.yaml").tasks:
        _, length, _ = task.label.split("_")
        chars = 1024 * int(length.removesuffix("k"))
        rows = list(generated_rows(task.dataset_uri.replace("rows=50", "rows=5")))
        assert len(rows) == 5
        assert all(chars - 40 < len(row["query"]) <= chars for row in rows)


def test_the_easy_gauntlet_is_cheap_and_short_enough_for_any_model(
    tokenizer: Tokenizer,
) -> None:
    """Tokens with what questions share run once, and without."""
    alone = shared = 0
    for task in read_gauntlet(EVAL / "gauntlets" / "generated.yaml").tasks:
        (shots,) = task.num_fewshot
        asked = questions(rows_of(task), task, shots, tokenizer, mode="native", seq_len=512)
        assert not any(question.dropped or question.truncated for question in asked)
        texts = {request.tokens for question in asked for request in question.requests}
        assert max(map(len, texts)) < 256
        alone += sum(map(len, texts))
        shared += len({text[:end] for text in texts for end in range(1, len(text) + 1)})
    assert shared < 50_000
    assert alone < 180_000


def test_answers_have_the_tokens_in_worked_examples_that_they_are_scored_with(
    tokenizer: Tokenizer,
) -> None:
    """A bracket at a line's end has not: it makes one token with the line end."""
    assert len(tokenizer.encode("x = [1]\n")) == len(tokenizer.encode("x = [1]")), "what it is for"
    tried = 0
    for name in ("generated", "generated_hard"):
        for task in read_gauntlet(EVAL / "gauntlets" / f"{name}.yaml").tasks:
            if task.num_fewshot == [0]:
                continue
            for row in list(generated_rows(address(task)))[:20]:
                text = f"{question(row)}{task.continuation_delimiter}{gold(row)}"
                alone = tokenizer.encode(text)
                among = tokenizer.encode(text + task.example_delimiter + question(row))
                assert among[: len(alone)] == alone, (task.label, text)
                tried += 1
    assert tried > 1000


def address(task: TaskConfig) -> str:
    """Where the rows of a task are made, be they in a file or not."""
    in_file = task.dataset_uri.endswith(".jsonl")
    return f"generated://{task.label}" if in_file else task.dataset_uri
