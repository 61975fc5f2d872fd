"""Prompts, worked examples, and which tokens are scored."""

from __future__ import annotations

import pytest
from gauntlet_stand_ins import ByteTokenizer, MergingTokenizer

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.prompts import prompt, questions
from llmfoundry.gauntlet.rows import Row
from llmfoundry.gauntlet.tasks import TaskConfig


def task(**keys: object) -> TaskConfig:
    return TaskConfig("sums", "sums.jsonl", "language_modeling", [0], **keys)


def rows(n: int) -> list[Row]:
    return [Row(f"q{i}", (f"a{i}",), 0, f"sums.jsonl:{i + 1}") for i in range(n)]


def test_prompt_without_examples_is_the_question_and_the_delimiter() -> None:
    assert prompt(rows(1), 0, task(), 0) == "q0 "


def test_prompt_with_examples_is_llm_foundrys_form() -> None:
    config = task(
        prompt_string="Answer these.",
        example_delimiter="\n\n",
        continuation_delimiter="\nA: ",
        question_prelimiter="Q: ",
    )
    # Random(1234).sample(range(4), 3) is [3, 0, 2]: examples of row 1 are 3 and 0, in that order
    assert prompt(rows(4), 1, config, 2) == (
        "Answer these.\n\nQ: q3\nA: a3\n\nQ: q0\nA: a0\n\nQ: q1\nA: "
    )


def test_no_delimiter_goes_before_the_first_example_without_a_prompt_string() -> None:
    assert prompt(rows(4), 1, task(), 2) == "q3 a3\nq0 a0\nq1 "


def test_a_row_never_is_its_own_example_and_a_spare_takes_its_place() -> None:
    assert prompt(rows(4), 3, task(), 2) == "q0 a0\nq2 a2\nq3 "
    assert prompt(rows(4), 0, task(), 2) == "q3 a3\nq2 a2\nq0 "
    for i in range(4):
        assert prompt(rows(4), i, task(), 3).count(f"a{i}") == 0


def test_examples_do_not_depend_on_how_many_rows_are_asked() -> None:
    everything = questions(rows(9), task(), 3, ByteTokenizer(), seq_len=99)
    assert questions(rows(9), task(), 3, ByteTokenizer(), seq_len=99, max_rows=2) == everything[:2]


def test_too_few_rows_for_the_examples_is_an_error_that_says_how_many_are_possible() -> None:
    with pytest.raises(UserError, match=r"sums: num_fewshot: 4, but there are 4 rows.*write 3"):
        questions(rows(4), task(), 4, ByteTokenizer(), seq_len=99)


def test_the_answer_is_tokenised_together_with_its_context() -> None:
    tokenizer = MergingTokenizer(" 7", "=")
    row = Row("3+4=", ("7",), 0, "f:1")
    (question,) = questions([row], task(), 0, tokenizer, seq_len=99)
    (request,) = question.requests
    whole = tokenizer.encode("3+4= 7")
    assert len(whole) == 5
    assert request.tokens == (0, *whole[:4])
    assert request.targets == (whole[4],)  # the delimiter's space belongs to the answer's token


def test_all_choices_of_a_question_are_scored_after_the_same_tokens() -> None:
    tokenizer = MergingTokenizer(" ab")
    row = Row("q", ("ab", "cd"), 0, "f:1")
    (question,) = questions([row], task(), 0, tokenizer, seq_len=99)
    merged, split = question.requests
    assert merged.targets == (tokenizer.encode(" ab")[0],)
    assert split.targets == tuple(tokenizer.encode(" cd"))  # with the space, as for " ab"
    assert split.tokens[: -len(split.targets) + 1] == merged.tokens


def test_long_contexts_lose_their_start_by_as_much_for_every_choice() -> None:
    row = Row("0123456789", ("x", "yyy"), 0, "f:1")
    (question,) = questions([row], task(), 0, ByteTokenizer(), seq_len=8)
    assert question.truncated
    encode = ByteTokenizer().encode
    assert question.requests[0].tokens == (0, *encode("6789 "))
    assert question.requests[1].tokens == (0, *encode("6789 yy"))
    assert len(question.requests[1].tokens) == 8


def test_a_context_that_just_fits_is_not_cut() -> None:
    row = Row("0123", ("xy",), 0, "f:1")
    (question,) = questions([row], task(), 0, ByteTokenizer(), seq_len=7)
    assert not question.truncated
    (question,) = questions([row], task(), 0, ByteTokenizer(), seq_len=6)
    assert question.truncated


def test_an_answer_longer_than_the_window_is_an_error_that_names_the_row() -> None:
    row = Row("q", ("12345678",), 0, "f.jsonl:3")
    with pytest.raises(
        UserError, match=r"f\.jsonl:3: an answer has 8 tokens, but max_seq_len is 7"
    ):
        questions([row], task(), 0, ByteTokenizer(), seq_len=7)
