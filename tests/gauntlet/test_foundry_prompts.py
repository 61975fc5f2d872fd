"""Foundry prompts: the published rules, row by row, against a slow rendering of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from gauntlet_stand_ins import questions
from prompt_tokenizers import (
    byte_tokenizer,
    marking_tokenizer,
    merging_tokenizer,
    trained_tokenizer,
)

from llmfoundry.data.text.tokenizer import SpecialTokens, Tokenizer
from llmfoundry.gauntlet.prompts.foundry import sample_examples
from llmfoundry.gauntlet.questions import Question, ScoreRequest, TaskConfig, TaskRow

BYTES = byte_tokenizer()
BOS = SpecialTokens(start=(), before=(300,), after=(), prefix=300)
LM, CHOICE, SCHEMA = "language_modeling", "multiple_choice", "schema"
GENERATION = "generation_task_with_answers"
KINDS = (LM, CHOICE, SCHEMA, GENERATION)

PLAIN: dict[str, Any] = {}
LETTERS = {"continuation_delimiter": "\nAnswer: ", "question_prelimiter": "Q: "}
LINES = {"continuation_delimiter": "\n", "example_delimiter": "\n\n", "prompt_string": "Sums: "}
SVAMP = {
    "continuation_delimiter": "\n\nA:",
    "question_prelimiter": "Question: ",
    "cot_delimiter": "The answer is ",
    "early_stopping_criteria": ["\n\n", "Question:"],
}


def task(kind: str, **keys: Any) -> TaskConfig:
    return TaskConfig("sums", "sums.jsonl", kind, [0], **keys)


def ask(
    rows: list[TaskRow],
    config: TaskConfig,
    shots: int = 0,
    tokenizer: Tokenizer = BYTES,
    seq_len: int = 9999,
    **keys: Any,
) -> list[Question]:
    return questions(rows, config, shots, tokenizer, mode="foundry", seq_len=seq_len, **keys)


def random_rows(kind: str, n: int, *, reasons: bool = False) -> list[TaskRow]:
    draw = random.Random(kind)
    words = ["the", "answer", "is", "12", "4444", "didn't", "(x)", "water", "7.", "book?"]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    rows = []
    for i in range(n):
        n_choices, n_contexts = {CHOICE: (3, 1), SCHEMA: (1, 2)}.get(kind, (1, 1))
        choices = tuple(text(4) for _ in range(n_choices))
        rows.append(
            TaskRow(
                contexts=tuple(f"{text(9)} {i}" for _ in range(n_contexts)),
                choices=choices,
                gold=draw.randrange(max(n_choices, n_contexts)),
                place=f"f.jsonl:{i + 1}",
                category=draw.choice("mn"),
                aliases=(*choices, text(6)) if kind == GENERATION else (),
                chain_of_thought=text(9) if reasons else "",
            )
        )
    return rows


# --- the rules, as slowly as they can be followed ----------------------------------------------


def rule_examples(n: int, shots: int, index: int, seed: int) -> list[int]:
    """R2: the stream from its start, through all rows before the one in question."""
    rng = random.Random(seed)
    for i in range(index + 1):
        k = min(n - 1, shots)
        chosen = set(rng.sample(range(0, n), k))
        if i in chosen:
            chosen.remove(i)
            while len(chosen) < k:
                new = rng.choice(range(0, n))
                if new != i:
                    chosen.add(new)
    return list(chosen)


def rule_texts(rows: list[TaskRow], index: int, config: TaskConfig, shots: int) -> dict[str, Any]:
    """R3, R4, R6: preamble, contexts, answers (without their spaces), of one row as strings."""
    if config.has_categories:
        own = [i for i, row in enumerate(rows) if row.category == rows[index].category]
        return rule_texts(
            [rows[i] for i in own],
            own.index(index),
            TaskConfig(**{**vars(config), "has_categories": False}),
            shots,
        )
    thinks = any(row.chain_of_thought for row in rows)

    def written(row: TaskRow, answer: str) -> str:
        return row.chain_of_thought + config.cot_delimiter + answer if thinks else answer

    text = config.prompt_string
    chosen = rule_examples(len(rows), shots, index, config.fewshot_random_seed) if shots else []
    for row in [rows[j] for j in chosen]:
        if config.icl_task_type == SCHEMA:
            text += config.question_prelimiter + (config.example_delimiter if text else "")
            text += row.contexts[row.gold] + config.continuation_delimiter + row.choices[0]
            continue
        text += config.example_delimiter if text else ""
        text += config.question_prelimiter + row.contexts[0] + config.continuation_delimiter
        text += {
            LM: row.choices[0],
            CHOICE: row.choices[row.gold],
            GENERATION: written(row, row.choices[0]),
        }[config.icl_task_type]
    row = rows[index]
    if config.icl_task_type == SCHEMA:
        contexts = list(row.contexts)
        if text:
            before = config.question_prelimiter + config.example_delimiter
            contexts = [before + c + config.continuation_delimiter.rstrip() for c in contexts]
        else:
            contexts = [config.question_prelimiter + c for c in contexts]
    else:
        context = config.question_prelimiter + row.contexts[0] + config.continuation_delimiter
        contexts = [((config.example_delimiter if text else "") + context).rstrip()]
    generates = config.icl_task_type == GENERATION
    answers = [written(row, row.choices[0])] if generates else list(row.choices)
    return {"preamble": text, "contexts": contexts, "answers": answers}


def rule_request(
    preamble: str, context: str, answer: str, tokenizer: Tokenizer, seq_len: int
) -> ScoreRequest:
    """R5, R6, R7."""
    space = " " if len(tokenizer.encode(" a")) == 1 and answer[0] != " " else ""
    after = tokenizer.encode(space + answer)
    before = rule_first(preamble, tokenizer) + tokenizer.encode(context)
    while len(before) + len(after) > seq_len:
        before = before[1:]
    whole = before + after
    return ScoreRequest(tuple(whole[:-1]), tuple(after), answer)


def rule_first(preamble: str, tokenizer: Tokenizer) -> list[int]:
    """The call with special tokens, and what _fix_eos_on_preamble makes of it."""
    ids = tokenizer._backend.encode(preamble).ids
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_id else ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [PLAIN, LETTERS, LINES], ids=["plain", "letters", "lines"])
@pytest.mark.parametrize("tokenizer", ["ours", "gpt2", "metaspace"])
def test_every_row_follows_the_published_rules(
    kind: str, keys: dict[str, Any], tokenizer: str
) -> None:
    encoder = trained_tokenizer(tokenizer)
    rows = random_rows(kind, 25)
    for shots, categories, seq_len in [(0, False, 9999), (4, False, 60), (3, True, 9999)]:
        config = task(kind, has_categories=categories, fewshot_random_seed=7, **keys)
        asked = ask(rows, config, shots, encoder, seq_len)
        for i, question in enumerate(asked):
            texts = rule_texts(rows, i, config, shots)
            expected = [
                rule_request(texts["preamble"], context, answer, encoder, seq_len)
                for context in texts["contexts"]
                for answer in texts["answers"]
            ]
            assert list(question.requests) == expected
            assert question.row is rows[i] and question.dropped == 0
        if shots == 4:
            assert any(question.truncated for question in asked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("before", "after"), [("", "</s>"), ("<s>", "</s>"), ("</s>", ""), ("<s>", "<sep>")]
)
@pytest.mark.parametrize("shots", [0, 2])
def test_tokens_that_a_tokenizer_puts_around_a_text_are_where_llm_foundry_leaves_them(
    kind: str, before: str, after: str, shots: int
) -> None:
    encoder = marking_tokenizer("gpt2", before, after)
    rows = random_rows(kind, 9)
    config = task(kind, **LETTERS)
    for i, question in enumerate(ask(rows, config, shots, encoder)):
        texts = rule_texts(rows, i, config, shots)
        expected = [
            rule_request(texts["preamble"], context, answer, encoder, 9999)
            for context in texts["contexts"]
            for answer in texts["answers"]
        ]
        assert list(question.requests) == expected
        if question.prompt is not None:
            context = encoder.encode(texts["contexts"][0])
            assert [*question.prompt.tokens] == rule_first(texts["preamble"], encoder) + context
            aliases = [alias for row in rows for alias in row.aliases]
            whole = [len(encoder._backend.encode(alias).ids) for alias in aliases]
            assert question.prompt.max_new_tokens == max(whole)


def test_an_end_of_text_behind_the_examples_is_dropped_unless_it_is_all_there_is() -> None:
    """Goldens of llmfoundry/eval/datasets at 8c8dd48f, run with this tokenizer."""
    encoder = marking_tokenizer("gpt2", "", "</s>")
    rows = [TaskRow((f"q{i}",), ("12",), 0, "f:1", aliases=("12",)) for i in range(2)]
    for shots, tokens in ((0, [406, 81, 16]), (1, [81, 17, 294, 199, 81, 16])):
        prompt = ask(rows, task(GENERATION), shots, encoder)[0].prompt
        assert prompt is not None
        assert (list(prompt.tokens), prompt.max_new_tokens) == (tokens, 2)


@pytest.mark.parametrize("reasons", [False, True])
def test_generation_prompts_follow_the_published_rules(reasons: bool) -> None:
    encoder = trained_tokenizer("gpt2")
    rows = random_rows(GENERATION, 20, reasons=reasons)
    config = task(GENERATION, **SVAMP)
    thoughts = [r.chain_of_thought + "The answer is " if reasons else "" for r in rows]
    longest = 10 + max(
        len(encoder.encode(thought + alias))
        for thought, row in zip(thoughts, rows, strict=True)
        for alias in row.aliases
    )
    for seq_len in (9999, longest + 40):
        for i, question in enumerate(ask(rows, config, 3, encoder, seq_len)):
            texts = rule_texts(rows, i, config, 3)
            tokens = encoder.encode(texts["preamble"]) + encoder.encode(texts["contexts"][0])
            prompt = question.prompt
            assert prompt is not None
            assert prompt.tokens == tuple(tokens[-(seq_len - longest) :])
            assert prompt.stops == ("\n\n", "Question:")
            assert prompt.max_new_tokens == longest
            if seq_len == 9999:
                assert prompt.text == texts["preamble"] + texts["contexts"][0]
            else:
                assert question.truncated and prompt.text == encoder.decode(prompt.tokens)


# --- by hand -----------------------------------------------------------------------------------


def numbered(n: int) -> list[TaskRow]:
    return [TaskRow((f"q{i}",), (f"a{i}",), 0, f"f:{i + 1}") for i in range(n)]


def spelled(question: Question, option: int = 0) -> str:
    request = question.requests[option]
    n = len(request.tokens) - len(request.targets) + 1
    return BYTES.decode(request.tokens[:n]) + "|" + BYTES.decode(request.targets)


def test_examples_are_sampled_anew_for_each_row_and_come_in_set_order() -> None:
    rng = random.Random(1234)
    assert rng.sample(range(100), 3) == [99, 56, 14]
    assert rng.sample(range(100), 3) == [0, 11, 74]
    # a set of three has eight places: 56 at 0, 99 at 3, 14 at 6; then 0 at 0, 74 at 2, 11 at 3
    first, second, *_ = ask(numbered(100), task(LM), 3)
    assert spelled(first) == "q56 a56\nq99 a99\nq14 a14\nq0|a0"
    assert spelled(second) == "q0 a0\nq74 a74\nq11 a11\nq1|a1"


def test_a_row_in_its_own_sample_is_replaced_by_a_later_draw() -> None:
    class Scripted(random.Random):
        def sample(self, population: Any, k: int, **_: Any) -> list[Any]:
            assert (list(population), k) == ([0, 1, 2, 3, 4], 2)
            return [2, 4]

        def choice(self, seq: Any) -> Any:
            return next(choices)

    choices = iter([2, 4, 2, 0])  # itself, one that is there, itself, another
    assert sample_examples(5, 2, 2, Scripted()) == {0, 4}
    assert next(choices, None) is None
    assert sample_examples(5, 2, 3, Scripted()) == {2, 4}


def test_more_shots_than_rows_show_all_other_rows() -> None:
    assert sorted(sample_examples(3, 9, 1, random.Random(0))) == [0, 2]
    assert spelled(ask(numbered(1), task(LM), 5)[0]) == "q0|a0"


def test_a_delimiter_of_white_space_is_in_the_examples_but_not_in_the_question() -> None:
    config = task(LM, continuation_delimiter="\n", example_delimiter="\n\n")
    assert spelled(ask(numbered(2), config, 1)[0]) == "q1\na1\n\nq0|a0"
    kept = task(LM, continuation_delimiter="\n", strip_dataset=False)
    assert spelled(ask(numbered(2), kept, 1)[0]) == "q1\na1\nq0\n|a0"


def test_an_answer_begins_with_a_space_iff_the_tokenizer_has_one_before_a_letter() -> None:
    spaced = merging_tokenizer(" a")
    row = TaskRow(("q",), ("b", " c"), 0, "f:1")
    first, second = ask([row], task(CHOICE), 0, spaced)[0].requests
    assert first.targets == tuple(spaced.encode(" b"))
    assert second.targets == tuple(spaced.encode(" c"))
    assert (first.text, second.text) == ("b", " c")
    assert ask([row], task(CHOICE))[0].requests[0].targets == tuple(BYTES.encode("b"))


def test_schema_has_its_own_order_of_delimiters_and_none_without_examples() -> None:
    rows = [TaskRow((f"x{i} ", f"y{i} "), ("went.",), i, "f:1") for i in range(2)]
    config = task(SCHEMA, question_prelimiter="S: ", continuation_delimiter="...\n")
    (question, _) = ask(rows, config)
    assert [spelled(question, i) for i in (0, 1)] == ["S: x0 |went.", "S: y0 |went."]
    (question, _) = ask(rows, config, 1)
    assert spelled(question, 0) == "S: y1 ...\nwent.S: \nx0 ...|went."
    assert spelled(question, 1) == "S: y1 ...\nwent.S: \ny0 ...|went."


def test_each_option_keeps_as_much_context_as_fits_and_the_answers_last_token_takes_a_place() -> (
    None
):
    row = TaskRow(("0123456789",), ("x", "yyy"), 0, "f:1")
    (question,) = ask([row], task(CHOICE), seq_len=8, special=BOS)
    assert question.truncated
    assert spelled(question, 0) == "3456789|x"  # the special token is the first to go
    assert spelled(question, 1) == "56789|yyy"
    (question,) = ask([row], task(CHOICE), seq_len=14, special=BOS)
    assert not question.truncated
    assert question.requests[1].tokens == (300, *BYTES.encode("0123456789yy"))


def test_special_tokens_count_in_a_generated_answers_length() -> None:
    rows = [TaskRow(("q",), ("abc",), 0, "f:1", aliases=("abc",))]
    (question,) = ask(rows, task(GENERATION), special=BOS)
    assert question.prompt is not None
    assert question.prompt.max_new_tokens == 4
    assert question.prompt.tokens == (300, *BYTES.encode("q"))


def test_an_empty_question_is_scored_after_the_end_of_text() -> None:
    (question,) = ask([TaskRow(("",), ("abc",), 0, "f:1")], task(LM))
    assert question.requests[0].tokens == (BYTES.eos_id, *BYTES.encode("ab"))


@pytest.mark.parametrize("categories", [False, True])
def test_examples_do_not_depend_on_which_rows_are_asked(categories: bool) -> None:
    rows = random_rows(CHOICE, 30)
    config = task(CHOICE, has_categories=categories)
    everything = ask(rows, config, 4)
    assert ask(rows, config, 4, keep=[29, 3, 11]) == [everything[i] for i in (29, 3, 11)]


def test_an_answer_that_fills_the_window_is_a_problem_of_its_row() -> None:
    rows = [TaskRow(("q",), ("12345678",), 0, "f.jsonl:3")]
    assert spelled(ask(rows, task(LM), seq_len=9)[0]) == "q|12345678"
    (question,) = ask(rows, task(LM), seq_len=8)
    assert question.problem.startswith("an answer has 8 tokens, but max_seq_len leaves 7")
