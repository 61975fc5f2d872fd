"""The shipped generated sets: reproducible, right, cheap; and what is cut from held-out text."""

from __future__ import annotations

import ast
import itertools
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gauntlet_stand_ins import ByteTokenizer, random_root

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.continuations import heldout_rows
from llmfoundry.gauntlet.gauntlet import Gauntlet
from llmfoundry.gauntlet.generate import GENERATORS, SetConfig, make_set, read_recipe
from llmfoundry.gauntlet.tasks import TaskConfig

EVAL = Path(__file__).resolve().parents[2] / "eval"
SETS = {config.name: config for config in read_recipe(EVAL / "generated.yaml")}


def stdlib_texts(n: int) -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))[:n]]


def question(row: dict[str, Any]) -> str:
    return row.get("query", row.get("context"))


def choices(row: dict[str, Any]) -> list[str]:
    return row.get("choices", [row.get("continuation")])


def gold(row: dict[str, Any]) -> str:
    return choices(row)[row.get("gold", 0)]


def by_arithmetic(row: dict[str, Any]) -> list[str]:
    value = str(eval(question(row).removesuffix("=")))
    return [choice for choice in choices(row) if choice == value]


def by_parsing(row: dict[str, Any]) -> list[str]:
    """The closings that make the line Python, or begin to: one more bracket may be missing."""

    def is_python(text: str) -> bool:
        try:
            ast.parse(text)
        except SyntaxError:
            return False
        return True

    return [
        choice
        for choice in choices(row)
        if any(is_python(question(row) + choice + more) for more in ("", ")", "]", "}"))
    ]


def by_first_line(row: dict[str, Any]) -> list[str]:
    first, second, third = question(row).split("\n")
    assert first == second
    return [choice for choice in choices(row) if f"{third} {choice}" == first]


def by_execution(row: dict[str, Any]) -> list[str]:
    *lines, last = question(row).split("\n")
    variables: dict[str, Any] = {}
    exec("\n".join(lines), variables)
    name = last.removeprefix("assert ").removesuffix(" ==")
    return [choice for choice in choices(row) if int(choice) == variables[name]]


SOLVERS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "arithmetic": by_arithmetic,
    "arithmetic_choice": by_arithmetic,
    "brackets": by_parsing,
    "brackets_completion": by_parsing,
    "copying": by_first_line,
    "key_value": by_execution,
}


@pytest.mark.parametrize("name", SETS)
def test_the_recipe_gives_the_committed_file_byte_for_byte(name: str) -> None:
    committed = (EVAL / "generated" / f"{name}.jsonl").read_bytes()
    assert make_set(SETS[name]).encode() == committed


def test_every_committed_file_is_in_the_recipe_and_every_generator_has_a_solver() -> None:
    assert {path.stem for path in (EVAL / "generated").iterdir()} == set(SETS)
    assert set(SOLVERS) == set(GENERATORS)


@pytest.mark.parametrize("level", [1, 2, 3, 5])
@pytest.mark.parametrize("name", GENERATORS)
def test_exactly_the_gold_answer_is_right_by_an_independent_solver(name: str, level: int) -> None:
    rows = [json.loads(line) for line in make_set(SetConfig(name, 7, 80, level)).splitlines()]
    assert len({question(row) for row in rows}) == 80
    for row in rows:
        assert SOLVERS[name](row) == [gold(row)]
        if "choices" in row:
            assert len(set(row["choices"])) == len(row["choices"]) in (3, 4)
    if "choices" in rows[0]:
        n = len(rows[0]["choices"])
        counts = [sum(row["gold"] == i for row in rows) for i in range(n)]
        assert max(counts) - min(counts) <= 1


def test_bracket_choices_are_equally_long() -> None:
    for line in make_set(SETS["brackets"]).splitlines():
        assert len({len(choice) for choice in json.loads(line)["choices"]}) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sets: 1", "sets: is missing"),
        ("sets: [{nam: brackets, seed: 1, rows: 1, level: 1}]", "unknown key 'nam'; did you mean"),
        ("sets: [{name: bracket, seed: 1, rows: 1, level: 1}]", "did you mean 'brackets'?"),
        ("sets: [{name: copying, seed: 1, rows: 0, level: 1}]", "rows: 0; write a whole number"),
        ("sets: [{name: copying, seed: 1, rows: 1, level: 9}]", "level: 9; write 5 or less"),
    ],
)
def test_mistakes_in_the_recipe_are_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "sets.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        read_recipe(tmp_path / "sets.yaml")
    assert message in str(error.value)


def test_more_rows_than_a_level_has_are_refused() -> None:
    with pytest.raises(UserError, match="rows: 900, but level 1 gave only"):
        make_set(SetConfig("arithmetic", 1, 900, 1))


# ------------------------------------------------------------------ continuations


def continuations(texts: list[str], query: str = "") -> list[Any]:
    uri = f"heldout://continuations{query}"
    return heldout_rows(TaskConfig("next", uri, "multiple_choice", [0]), texts)


def test_the_gold_piece_follows_its_context_and_the_others_are_from_other_documents() -> None:
    texts = stdlib_texts(12)
    rows = continuations(texts, "?rows=40&context_chars=200&piece_chars=50")
    assert len(rows) == 40
    for row in rows:
        (source,) = [text for text in texts if row.context + row.answer in text]
        start = source.index(row.context + row.answer)
        assert 0 < len(row.context) <= 200
        assert source[start - 1] == "\n" or len(row.context) == 200
        assert not row.context[-1].isspace() and row.answer[0] != "\n"
        assert {len(choice) for choice in row.choices} == {50}
        wrong = [choice for choice in row.choices if choice != row.answer]
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
        (source,) = [text for text in numbered if row.context + row.answer in text]
        start = source.index(row.context + row.answer)
        places.append((source[0], start, start + len(row.context + row.answer)))
    for (a, _, end), (b, start, _) in itertools.pairwise(sorted(places)):
        assert a != b or end <= start


def test_short_held_out_text_gives_fewer_rows_and_none_is_an_error() -> None:
    texts = ["".join(f"line {i} of {n}\n" for i in range(200)) for n in "ab"]
    assert 0 < len(continuations(texts)) < 100
    for too_little in ([], texts[:1], ["a\n", "b\n", "c\n"]):
        with pytest.raises(UserError, match=r"next: dataset_uri: heldout.*gives no question"):
            continuations(too_little)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?row=3", "unknown setting 'row'; did you mean 'rows'?"),
        ("?rows=0", "rows is '0'; write a whole number above 0"),
        ("/x", "is unknown; write heldout://continuations"),
    ],
)
def test_a_wrong_address_is_told(query: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        continuations(stdlib_texts(3), query)
    assert message in str(error.value)


# ------------------------------------------------------------------ the shipped gauntlet


def test_the_shipped_gauntlet_runs_whole_and_is_cheap() -> None:
    texts = stdlib_texts(40)
    tokenizer = trained_tokenizer(texts)
    gauntlet = Gauntlet(
        EVAL / "gauntlets" / "generated.yaml",
        tokenizer,
        seq_len=512,
        validation_texts=lambda: texts[:10],
    )
    assert gauntlet.problems == []
    assert gauntlet.n_tokens < 60_000
    result = gauntlet.run(
        random_root(tokenizer.vocab_size), device=torch.device("cpu"), batch_rows=2
    )
    assert all(task.accuracy is not None for task in result.tasks)
    assert result.average is not None
    assert set(result.categories) == {
        "symbolic_problem_solving",
        "in_context_copying",
        "language_modeling",
    }
    assert [task.n for task in result.tasks] == [100, 100, 180, 100, 100, 100, 100]
    assert not any(task.truncated for task in result.tasks)


def trained_tokenizer(texts: list[str]) -> ByteTokenizer:
    """A byte-level BPE of 4,096 tokens; the recipes' own are not smaller."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)

    class Trained(ByteTokenizer):
        vocab_size = bpe.get_vocab_size()

        def encode(self, text: str) -> list[int]:
            return bpe.encode(text, add_special_tokens=False).ids

    return Trained()
