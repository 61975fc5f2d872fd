"""Native prompts: worked examples, which tokens are scored, what gives way in a short window."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from gauntlet_stand_ins import questions
from prompt_tokenizers import (
    KINDS,
    CountingTokenizer,
    byte_tokenizer,
    marking_tokenizer,
    merging_tokenizer,
    trained_tokenizer,
)
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from llmfoundry.data.text.tokenizer import SpecialTokens, Tokenizer, special_tokens
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.models.harness import HarnessModel
from llmfoundry.gauntlet.questions import (
    GenerationPrompt,
    Question,
    Score,
    ScoreRequest,
    TaskConfig,
    TaskRow,
)

BYTES = byte_tokenizer()
EOS = BYTES.eos_id
CHOICE, SCHEMA = "multiple_choice", "schema"
GENERATION = "generation_task_with_answers"


def task(kind: str = "language_modeling", **keys: Any) -> TaskConfig:
    return TaskConfig("sums", "sums.jsonl", kind, [0], **keys)


def rows(n: int) -> list[TaskRow]:
    return [TaskRow((f"q{i}",), (f"a{i}",), 0, f"sums.jsonl:{i + 1}") for i in range(n)]


def ask(
    rows: list[TaskRow],
    config: TaskConfig,
    shots: int = 0,
    tokenizer: Tokenizer = BYTES,
    seq_len: int = 999,
    **keys: Any,
) -> list[Question]:
    return questions(rows, config, shots, tokenizer, mode="native", seq_len=seq_len, **keys)


def choice_rows(n: int) -> list[TaskRow]:
    """Questions that end in signs which join with answers, or do not."""
    signs = ("?", ":", " (", "/", "")
    words = ["the author", ") water", "12", "\nWhy?", "flowed."]
    return [
        TaskRow(
            (f"Question: What is {i} + the man{signs[i % 5]}",),
            tuple(words[(i + j) % 5].strip() for j in range(3)),
            i % 3,
            f"f:{i}",
        )
        for i in range(n)
    ]


def requests_of(asked: list[Question]) -> list[ScoreRequest]:
    return [request for question in asked for request in question.requests]


def shown(request: ScoreRequest) -> tuple[str, str]:
    """A byte request as (what precedes the targets after <eos>, the targets)."""
    assert request.tokens[0] == EOS
    n = len(request.targets)
    assert request.tokens[len(request.tokens) - n + 1 :] == request.targets[:-1]
    return BYTES.decode(request.tokens[1 : len(request.tokens) - n + 1]), BYTES.decode(
        request.targets
    )


def texts(asked: list[Question]) -> list[str]:
    return ["|".join(shown(question.requests[0])) for question in asked]


# --- worked examples ---------------------------------------------------------------------------


def test_a_prompt_without_examples_is_the_question() -> None:
    assert texts(ask(rows(1), task())) == ["q0| a0"]


def test_a_prompt_with_examples_is_llm_foundrys_form() -> None:
    config = task(
        prompt_string="Answer these.",
        example_delimiter="\n\n",
        continuation_delimiter="\nA: ",
        question_prelimiter="Q: ",
    )
    # Random(1234).sample(range(4), 3) is [3, 0, 2]: row 1 gets 3 and 0, in that order
    assert texts(ask(rows(4), config, 2))[1] == (
        "Answer these.\n\nQ: q3\nA: a3\n\nQ: q0\nA: a0\n\nQ: q1\nA:| a1"
    )


def test_a_row_never_is_its_own_example_and_a_spare_takes_its_place() -> None:
    asked = texts(ask(rows(4), task(), 2))
    assert asked[1] == "q3 a3\nq0 a0\nq1| a1"
    assert asked[3] == "q0 a0\nq2 a2\nq3| a3"
    assert asked[0] == "q3 a3\nq2 a2\nq0| a0"
    for i, text in enumerate(texts(ask(rows(4), task(), 3))):
        assert text.count(f"a{i}") == 1


def test_a_row_that_stands_twice_is_not_among_its_own_examples() -> None:
    for i, text in enumerate(texts(ask([*rows(6), *rows(6)], task(), 5))):
        assert text.count(f"a{i % 6}") == 1
        assert len(text.split("\n")) == 6
    # the other questions' examples are what they were
    asked = texts(ask([*rows(4), *rows(1)], task(), 2))
    drawn = random.Random(1234).sample(range(5), 3)
    usual = "".join(f"q{j % 4} a{j % 4}\n" for j in drawn[:2])
    assert [text for i, text in enumerate(asked) if i not in drawn[:2] and i % 4] == [
        f"{usual}q{i}| a{i}" for i in range(1, 4) if i not in drawn[:2]
    ]
    with pytest.raises(UserError, match=r"num_fewshot: 11, but 10 rows differ from .*; write 10"):
        ask([*rows(6), *rows(6)], task(), 11)


def test_examples_of_a_task_with_categories_are_of_the_rows_own_and_fixed_in_each() -> None:
    both = [TaskRow((f"{c}{i}",), ("x",), 0, "f:1", category=c) for i in range(9) for c in "mn"]
    asked = texts(ask(both, task(has_categories=True), 3))
    prefixes: dict[str, list[str]] = {"m": [], "n": []}
    for row, text in zip(both, asked, strict=True):
        examples = text.rsplit("\n", 1)[0]
        assert row.category is not None
        assert [line[0] for line in text.split("\n")] == [row.category] * 4
        prefixes[row.category].append(examples)
    for used in prefixes.values():  # all but the three that are examples themselves
        assert sum(prefix == max(used, key=used.count) for prefix in used) == 6


def test_examples_do_not_depend_on_which_rows_are_asked() -> None:
    everything = ask(rows(9), task(), 3)
    assert ask(rows(9), task(), 3, keep=[7, 0, 4]) == [everything[i] for i in (7, 0, 4)]
    assert ask(rows(9), task(), 3, keep=[]) == []


def test_too_few_rows_for_the_examples_is_an_error_that_says_how_many_are_possible() -> None:
    with pytest.raises(UserError, match=r"sums: num_fewshot: 4, but there are 4 rows,.*write 3"):
        ask(rows(4), task(), 4)
    lonely = [
        TaskRow((q,), ("a",), 0, "f:1", category=c) for q, c in zip("abc", "mmn", strict=True)
    ]
    with pytest.raises(UserError, match=r"there are 1 rows of category n,.*write 0"):
        ask(lonely, task(has_categories=True), 1)


# --- which tokens are scored -------------------------------------------------------------------


def harness_pair(
    encode: Callable[[str], list[int]], context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """lm-evaluation-harness 0.4.13, TemplateLM._encode_pair, for decoders."""
    n_spaces = len(context) - len(context.rstrip())
    if n_spaces > 0:
        continuation = context[-n_spaces:] + continuation
        context = context[:-n_spaces]
    whole = encode(context + continuation)
    before = encode(context)
    return before, whole[len(before) :]


def joint_pair(
    encode: Callable[[str], list[int]], context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """The same border in the tokens of the whole text, which the harness does not read."""
    border = len(harness_pair(encode, context, continuation)[0])
    whole = encode(context + continuation)
    return whole[:border], whole[border:]


def random_rows(n: int, n_choices: int, seed: int = 0) -> list[TaskRow]:
    """Rows of words, numbers and punctuation; borders between question and answer are words'."""
    draw = random.Random(seed)
    words = ["the", "answer", "Is", "12", "4444", "+", "didn't", "(x)", "/", "water", "été", "7."]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    return [
        TaskRow((f"Question: {text(9)}?",), tuple(text(4) for _ in range(n_choices)), 0, f"f:{i}")
        for i in range(n)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delimiter", [" ", "\nAnswer: ", "\nAnswer:\n"])
def test_spans_are_the_harnesss_on_the_same_text(kind: str, delimiter: str) -> None:
    tokenizer = trained_tokenizer(kind)
    config = task(CHOICE, continuation_delimiter=delimiter)
    some = random_rows(40, 3)
    drawn = random.Random(1234).sample(range(40), 5)
    for i, question in enumerate(ask(some, config, 4, tokenizer)):
        examples = [some[j] for j in drawn if j != i][:4]
        before = "".join(r.contexts[0] + delimiter + r.choices[0] + "\n" for r in examples)
        for choice, request in zip(some[i].choices, question.requests, strict=True):
            context, scored = joint_pair(
                tokenizer.encode, before + some[i].contexts[0] + delimiter, choice
            )
            assert request.tokens == (tokenizer.eos_id, *context, *scored[:-1])
            assert request.targets == tuple(scored)
            assert request.text == choice


@pytest.mark.parametrize("kind", ["ours", "gpt2", "o200k"])
@pytest.mark.parametrize("example_delimiter", ["\n", "\n\n", "\n/", " "])
def test_sharing_the_examples_tokens_gives_those_of_the_whole_text(
    kind: str, example_delimiter: str
) -> None:
    tokenizer = trained_tokenizer(kind)
    config = task(CHOICE, example_delimiter=example_delimiter, prompt_string="Some (odd) sums.")
    for seed in range(5):
        for question in ask(random_rows(20, 2, seed), config, 3, tokenizer):
            for request in question.requests:
                whole = [*request.tokens[1:], request.targets[-1]]
                assert tokenizer.encode(tokenizer.decode(whole)) == whole


def test_sharing_the_examples_tokens_leaves_room_for_words_that_look_ahead() -> None:
    # A word may be all up to the next "!", if that is near: the question changes words before it.
    tokenizer = merging_tokenizer(" w", words=r"[^!]{1,20}!|\w+|\W")
    some = [
        TaskRow((f"! q{i} with a word",), ("some more words with w",), 0, "f:1") for i in range(5)
    ]
    for question in ask(some, task(), 3, tokenizer):
        whole = [*question.requests[0].tokens[1:], question.requests[0].targets[-1]]
        assert tokenizer.encode(tokenizer.decode(whole)) == whole


def test_examples_are_tokenized_once_for_all_questions() -> None:
    many = random_rows(200, 4)
    tokenizer = CountingTokenizer(trained_tokenizer("ours"))
    asked = ask(many, task(CHOICE), 10, tokenizer)
    n_whole = sum(len(tokenizer.decode(r.tokens)) for q in asked for r in q.requests)
    assert tokenizer.characters < n_whole / 3
    # and it shows: questions that are no examples begin with the same tokens
    drawn = random.Random(1234).sample(range(200), 11)
    others = [q for i, q in enumerate(asked) if i not in drawn]
    examples = "\n".join(f"{many[j].contexts[0]} {many[j].choices[0]}" for j in drawn[:10])
    n = len(tokenizer.encode(examples))
    assert len({r.tokens[:n] for q in others for r in q.requests}) == 1


def test_a_token_over_the_border_is_scored_for_all_choices_of_the_question() -> None:
    tokenizer = merging_tokenizer(":)", ": ")
    config = task(CHOICE, continuation_delimiter="")
    (question,) = ask([TaskRow(("q:",), (")", "x"), 0, "f:1")], config, 0, tokenizer)
    smile, colon = tokenizer.encode(":)")[0], tokenizer.encode(":")[0]
    merged, split = question.requests
    assert merged.targets == (smile,)  # the harness would score nothing here
    assert split.targets == (colon, *tokenizer.encode("x"))
    assert merged.tokens == split.tokens[: len(merged.tokens)]


def test_white_space_that_joins_the_question_in_a_token_stays_there() -> None:
    tokenizer = merging_tokenizer(":\n")
    config = task(GENERATION, continuation_delimiter=":\n")
    (question,) = ask([TaskRow(("q",), ("x",), 0, "f:1", aliases=("x",))], config, 0, tokenizer)
    context, scored = joint_pair(tokenizer.encode, "q:\n", "x")
    assert question.requests[0].tokens == (tokenizer.eos_id, *context)
    assert question.requests[0].targets == tuple(scored) == tuple(tokenizer.encode("x"))
    assert question.prompt is not None
    assert question.prompt.text == "q:\n"
    assert question.prompt.tokens == (tokenizer.eos_id, *tokenizer.encode("q:\n"))


def test_a_token_of_question_white_space_and_answer_is_the_answers() -> None:
    tokenizer = merging_tokenizer(": x")
    config = task(GENERATION, continuation_delimiter=": ")
    (question,) = ask([TaskRow(("q",), ("x",), 0, "f:1", aliases=("x",))], config, 0, tokenizer)
    assert question.requests[0].targets == tuple(tokenizer.encode(": x"))
    assert len(question.requests[0].targets) == 1
    assert question.prompt is not None and question.prompt.text == "q:"


@pytest.mark.parametrize("mode", ["native", "harness"])
def test_white_space_before_an_empty_question_is_the_answers(mode: str) -> None:
    settings: dict[str, Any] = {"example_delimiter": " ", "continuation_delimiter": ""}
    apart, joined = task(prompt_string="Answer.\n", **settings), task(**settings)
    empty, full = (TaskRow((text,), ("abc",), 0, "f:1") for text in ("", "Answer.\n "))
    (found,) = questions([empty], apart, 0, BYTES, mode=mode, seq_len=999)
    (expected,) = questions([full], joined, 0, BYTES, mode=mode, seq_len=999)
    assert found.requests == expected.requests
    assert BYTES.decode(found.requests[0].targets) == "\n abc"


def test_an_empty_question_leaves_the_answer_after_the_end_of_text() -> None:
    assert texts(ask([TaskRow(("",), ("abc",), 0, "f:1")], task())) == ["| abc"]


@pytest.mark.parametrize("mode", ["native", "harness", "foundry"])
def test_a_row_whose_answer_has_no_token_is_a_problem_of_its_own(mode: str) -> None:
    config = task(continuation_delimiter="")
    some = [TaskRow(("q",), (text,), 0, "f:1") for text in ("", "x")]
    empty, usual = questions(some, config, 0, BYTES, mode=mode, seq_len=99)
    assert empty.problem == "an answer adds no token to the question; write a text"
    assert empty.requests == () and empty.prompt is None
    assert usual.problem == "" and len(usual.requests) == 1


@pytest.mark.parametrize("mode", ["native", "harness", "foundry"])
@pytest.mark.parametrize("start", [None, ()])
def test_the_prefix_token_goes_in_front_where_the_first_token_joins_question_and_answer(
    mode: str, start: tuple[int, ...] | None
) -> None:
    tokenizer = merging_tokenizer("in")
    config = task(CHOICE, continuation_delimiter="")
    row = TaskRow(("i",), ("n", "?"), 0, "f:1")
    special = special_tokens(tokenizer, start=start)
    (question,) = questions([row], config, 0, tokenizer, mode=mode, seq_len=9, special=special)
    merged, split = question.requests
    prefix = tokenizer.eos_id
    if (
        mode == "foundry"
    ):  # which tokenizes question and answer apart, after what the tokenizer puts
        prefix = tokenizer.encode("i")[0]
        assert merged.tokens == split.tokens == (prefix,)
    else:
        assert (merged.tokens, merged.targets) == ((prefix,), tuple(tokenizer.encode("in")))
        assert (split.tokens, split.targets) == (
            (prefix, *tokenizer.encode("i")),
            tuple(tokenizer.encode("i?")),
        )


@pytest.mark.parametrize("mode", ["native", "harness", "foundry"])
def test_every_request_can_be_asked_whatever_the_window_and_the_border(mode: str) -> None:
    tokenizer = merging_tokenizer("in", "it__", "n__", "??", "ab")
    draw = random.Random(3)
    texts = ["i", "n", "it", "__", "?", "a", "b", "in it", "n__ab", ""]
    some = [
        TaskRow(
            ("".join(draw.choices(texts, k=draw.randint(0, 3))),),
            tuple("".join(draw.choices(texts[:-1], k=draw.randint(1, 5))) for _ in range(2)),
            0,
            f"f:{i}",
        )
        for i in range(60)
    ]
    for seq_len in (3, 5, 40):
        for start in (None, ()):
            special = special_tokens(tokenizer, start=start)
            config = task(CHOICE, continuation_delimiter="")
            how: dict[str, Any] = {"mode": mode, "seq_len": seq_len, "special": special}
            asked = questions(some, config, 1, tokenizer, **how)
            assert any(question.requests for question in asked)
            for question in asked:
                assert bool(question.problem) != bool(question.requests)
                for request in question.requests:
                    assert 1 <= len(request.targets) <= len(request.tokens) <= seq_len


def test_a_tokenizers_own_start_replaces_the_end_of_text() -> None:
    (question,) = ask(rows(1), task(), special=SpecialTokens((300, 301), (), (), 300))
    assert question.requests[0].tokens == (300, 301, *BYTES.encode("q0 a"))


# --- as lm-evaluation-harness asks ---------------------------------------------------------------


class Listener:
    """A subject that keeps what it is asked."""

    can_score, tokens_computed = True, 0
    heard: Sequence[ScoreRequest]

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        self.heard = requests
        return [Score(0.0, True, False, 0.0) for _ in requests]

    def generate(self, prompts: Sequence[GenerationPrompt]) -> list[str]:
        raise NotImplementedError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [("", ""), ("<s>", ""), ("<s>", "</s>")])
@pytest.mark.parametrize(("delimiter", "seq_len"), [("\nAnswer: ", 999), (":", 999), (" ", 30)])
def test_harness_prompts_are_the_native_texts_in_the_tokens_of_the_harness(
    kind: str, before: str, after: str, delimiter: str, seq_len: int
) -> None:
    tokenizer = marking_tokenizer(kind, before, after)
    asked = choice_rows(12)
    config = task(CHOICE, continuation_delimiter=delimiter)
    texts = ask(asked, config, 2)  # bytes after <eos>: what native asks, to be read
    pairs = [BYTES.decode(r.tokens[1:]) + BYTES.decode(r.targets[-1:]) for r in requests_of(texts)]
    answers = [choice for row in asked for choice in row.choices]
    listener = Listener()
    HarnessModel(listener, tokenizer, seq_len=seq_len).loglikelihood(
        [
            SimpleNamespace(args=(pair.removesuffix(answer), answer), task_name="t", doc_id=0)
            for pair, answer in zip(pairs, answers, strict=True)
        ]
    )
    found = questions(asked, config, 2, tokenizer, mode="harness", seq_len=seq_len)
    assert [(r.tokens, r.targets) for r in requests_of(found)] == [
        (r.tokens, r.targets) for r in listener.heard
    ]
    assert any(question.truncated for question in found) == (seq_len == 30)
    assert not any(question.dropped for question in found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", ["", "<s>"])
def test_harness_tokens_are_the_harnesss_where_words_and_special_tokens_cross_the_border(
    kind: str, before: str
) -> None:
    tokenizer = marking_tokenizer(kind, before)
    theirs = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(tokenizer._backend.to_str()))
    words = ["the", " aut", "hor", "wa", "ter", "flow", "ed", "<s>", "<sep>", " ", "12", ":"]
    draw = random.Random(7)

    def text(most: int) -> str:
        return "".join(draw.choices(words, k=draw.randint(1, most)))

    def encode(text: str) -> list[int]:
        return theirs(text, add_special_tokens=not text.startswith("<s>")).input_ids

    some = [TaskRow((text(5),), (text(3), text(3)), 0, f"f:{i}") for i in range(80)]
    config = task(CHOICE, continuation_delimiter="")
    compared = crossed = 0
    how: dict[str, Any] = {"mode": "harness", "seq_len": 99}
    for row, question in zip(some, questions(some, config, 0, tokenizer, **how), strict=True):
        pairs = [harness_pair(encode, row.contexts[0], choice) for choice in row.choices]
        if not all(context and scored for context, scored in pairs):
            continue  # stops the harness
        for request, (context, scored) in zip(question.requests, pairs, strict=True):
            assert request.tokens == (*context, *scored[:-1])
            assert request.targets == tuple(scored)
            compared += 1
            whole = encode(row.contexts[0] + request.text)
            crossed += [*context, *scored] != whole
    assert compared > 60 and crossed


def test_harness_prompts_begin_with_the_prefix_token_only_where_there_is_no_context() -> None:
    for before, first in (("", "</s>"), ("<s>", "<s>")):
        tokenizer = marking_tokenizer("gpt2", before)
        ids = tokenizer.encode(" the")
        empty, full = questions(
            [TaskRow((text,), ("the",), 0, "f:1") for text in ("", "x")],
            task(),
            0,
            tokenizer,
            mode="harness",
            seq_len=99,
        )
        place = tokenizer._backend.token_to_id(first)
        assert (empty.requests[0].tokens, empty.requests[0].targets) == ((place,), tuple(ids))
        assert full.requests[0].tokens == (*[place] * bool(before), *tokenizer.encode("x"))


def test_a_harness_prompt_too_long_loses_its_start_and_leaves_room_for_the_answer() -> None:
    tokenizer = marking_tokenizer("gpt2", "<s>")
    row = TaskRow(("the answer is the author " * 9,), ("book",), 0, "f:1", aliases=("book",))
    config = task(GENERATION, max_new_tokens=5)
    how = {"mode": "harness", "seq_len": 20}
    (question,) = questions([row], config, 0, tokenizer, **how)  # type: ignore[arg-type]
    whole = tokenizer._backend.encode(row.contexts[0].rstrip()).ids
    assert question.prompt is not None and question.truncated
    assert list(question.prompt.tokens) == whole[-15:]


def test_where_nothing_is_written_no_room_is_kept_for_it() -> None:
    row = TaskRow(("0123456789",), ("12345678",), 0, "f:1", aliases=("12345678",))
    for mode in ("native", "harness", "foundry"):
        config = task(GENERATION, max_new_tokens=40)
        with pytest.raises(UserError, match=r"sums: an answer may take 40 tokens .*icl_generate=f"):
            questions([row], config, 0, BYTES, mode=mode, seq_len=20)
        (question,) = questions([row], config, 0, BYTES, mode=mode, seq_len=20, generate=False)
        assert question.prompt is None and not question.truncated


# --- schema ------------------------------------------------------------------------------------


def test_schema_scores_the_continuation_after_each_context() -> None:
    pairs = [
        TaskRow((f"A{i} fed B{i} as A{i}", f"A{i} fed B{i} as B{i}"), ("ate.",), i % 2, "f:1")
        for i in range(3)
    ]
    # Random(1234).sample(range(3), 2) is [1, 0]; the right context of row 1 is its second
    question = ask(pairs, task(SCHEMA), 1)[2]
    assert [shown(request) for request in question.requests] == [
        ("A1 fed B1 as B1 ate.\nA2 fed B2 as A2", " ate."),
        ("A1 fed B1 as B1 ate.\nA2 fed B2 as B2", " ate."),
    ]
    assert [request.text for request in question.requests] == ["ate.", "ate."]


def test_contexts_of_a_schema_are_cut_each_to_what_fits() -> None:
    row = TaskRow(("0123456789", "ab"), ("xy",), 0, "f:1")
    (question,) = ask([row], task(SCHEMA), seq_len=7)
    assert question.truncated
    assert [shown(r) for r in question.requests] == [("6789", " xy"), ("ab", " xy")]


# --- windows -----------------------------------------------------------------------------------


def test_whole_examples_are_dropped_from_the_first_and_no_more_than_needed() -> None:
    config = task()
    long = [TaskRow((f"q{i}" + "x" * i,), (f"a{i}",), 0, f"f:{i}") for i in range(9)]
    full = ask(long, config, 4)
    for seq_len in range(12, 70, 3):
        for whole, question in zip(full, ask(long, config, 4, seq_len=seq_len), strict=True):
            kept = "|".join(shown(question.requests[0]))
            parts = "|".join(shown(whole.requests[0])).split("\n")
            expected = next(
                d for d in range(5) if len("\n".join(parts[d:])) - 1 <= seq_len or d == 4
            )
            assert question.dropped == expected
            if not question.truncated:
                assert kept == "\n".join(parts[expected:])
            assert len(question.requests[0].tokens) <= seq_len


def test_a_prompt_string_stays_when_examples_are_dropped() -> None:
    config = task(prompt_string="Sums.")
    (question,) = ask(rows(3), config, 2, keep=[1], seq_len=20)
    assert (question.dropped, question.truncated) == (1, False)
    assert texts([question]) == ["Sums.\nq2 a2\nq1| a1"]


def test_the_longest_choice_decides_how_many_examples_stay() -> None:
    pairs = [TaskRow((f"q{i}",), ("x", "y" * 9), 0, "f:1") for i in range(3)]
    (question,) = ask(pairs, task(CHOICE), 1, keep=[1], seq_len=14)
    assert question.dropped == 1
    assert [shown(r)[0] for r in question.requests] == ["q1", "q1"]


def test_what_is_too_long_without_examples_loses_its_start_equally_for_every_choice() -> None:
    row = TaskRow(("0123456789",), ("x", "yyy"), 0, "f:1")
    (question,) = ask([row], task(CHOICE), seq_len=8)
    assert question.truncated
    assert [shown(r) for r in question.requests] == [("6789", " x"), ("6789", " yyy")]
    assert len(question.requests[1].tokens) == 8


def test_a_question_that_just_fits_is_not_cut() -> None:
    row = TaskRow(("0123",), ("xy",), 0, "f:1")
    assert not ask([row], task(), seq_len=7)[0].truncated
    assert ask([row], task(), seq_len=6)[0].truncated


def test_an_answer_longer_than_the_window_is_a_problem_of_its_row() -> None:
    row = TaskRow(("q",), ("1234567",), 0, "f.jsonl:3")
    assert ask([row], task(), seq_len=8)[0].truncated
    (question,) = ask([row], task(), seq_len=7)
    assert question.problem.startswith("an answer has 8 tokens, but max_seq_len leaves 7")


# --- generation --------------------------------------------------------------------------------


def word_problems() -> list[TaskRow]:
    return [
        TaskRow(
            (f"q{i}",),
            (str(i),),
            0,
            f"f:{i}",
            aliases=(str(i), f"+{i}"),
            chain_of_thought=f"{i} is {i}.",
        )
        for i in range(4)
    ]


SVAMP = {
    "continuation_delimiter": "\n\nA:",
    "question_prelimiter": "Question: ",
    "cot_delimiter": "The answer is ",
    "early_stopping_criteria": ["\n\n", "Question:"],
}


def test_generation_shows_reasoning_in_examples_and_stops_before_it_in_the_question() -> None:
    question = ask(word_problems(), task(GENERATION, **SVAMP), 1)[1]
    expected = "Question: q3\n\nA:3 is 3.The answer is 3\nQuestion: q1\n\nA:"
    assert question.prompt is not None
    assert question.prompt.text == expected
    assert question.prompt.tokens == (EOS, *BYTES.encode(expected))
    assert question.prompt.stops == ("\n\n", "Question:")
    (gold,) = question.requests
    assert shown(gold) == (expected, "1 is 1.The answer is 1")
    assert gold.text == "1 is 1.The answer is 1"


def test_an_answer_may_be_as_long_as_the_longest_of_all_rows_and_ten_more_after_reasoning() -> None:
    longest = len("3 is 3.The answer is +3") + 10
    some = ask(word_problems(), task(GENERATION, **SVAMP), 1, keep=[0])
    assert some[0].prompt is not None and some[0].prompt.max_new_tokens == longest
    plain = [TaskRow(("q",), (t,), 0, "f:1", aliases=(t, t + "!")) for t in ("a", "bcd", "ef")]
    (question, *_) = ask(plain, task(GENERATION))
    assert question.prompt is not None
    # the space of the delimiter is left to be written
    assert (question.prompt.text, question.prompt.max_new_tokens) == ("q", len(" bcd!"))
    (question, *_) = ask(plain, task(GENERATION, max_new_tokens=2))
    assert question.prompt is not None and question.prompt.max_new_tokens == 2


def test_a_prompt_leaves_room_for_the_answer() -> None:
    config = task(GENERATION, max_new_tokens=10)
    for seq_len in range(12, 50):
        (question,) = ask(word_problems(), config, 2, keep=[1], seq_len=seq_len)
        assert question.prompt is not None
        assert len(question.prompt.tokens) + 10 <= seq_len
        (gold,) = question.requests
        assert len(gold.tokens) <= seq_len
        n = len(question.prompt.tokens)  # the same question stands before the gold answer
        assert gold.tokens[:n] == question.prompt.tokens
        # as LLM Foundry, whose file has a chain_of_thought: written whatever the delimiter
        full = ["q3 3 is 3.3", "q0 0 is 0.0", "q1"]
        assert question.prompt.text == "\n".join(full[question.dropped :])[-(seq_len - 11) :]
        assert question.truncated == (question.dropped == 2 and seq_len < 1 + 2 + 10)


def test_generation_without_room_for_a_question_is_an_error_that_names_the_task() -> None:
    with pytest.raises(
        UserError, match=r"sums: an answer may take 34 tokens .* 34 are left.*a smaller max_new_"
    ):
        ask(word_problems(), task(GENERATION, **(SVAMP | {"max_new_tokens": 34})), seq_len=35)


def test_a_shortened_prompts_text_is_what_its_tokens_spell() -> None:
    row = TaskRow(("0123456789",), ("x",), 0, "f:1")
    (question,) = ask([row], task(GENERATION, max_new_tokens=3), seq_len=8)
    assert question.prompt is not None and question.truncated
    assert question.prompt.text == "6789"
    assert question.prompt.tokens == (EOS, *BYTES.encode("6789"))
