"""Rows of data sets, in the columns that their cards publish, become LLM Foundry's rows.

All texts are made up. Where a file of LLM Foundry was seen, what is expected here is its wording.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.gauntlet.fetch import hub_mappings
from llmfoundry.gauntlet.questions import TaskConfig
from llmfoundry.gauntlet.task_rows import load_rows
from llmfoundry.gauntlet.task_types import TASK_TYPES

Row = dict[str, Any]

MAPS = hub_mappings()
ABC = {"label": ["A", "B", "C"], "text": ["x", "y", "z"]}
STORY = "Tim has a red cat."
STORY_HEAD = (
    "Below is a story followed by a series of related questions. Please answer the final question"
    " by referring to the story and the previous questions.\nStory: Tim has a red cat.\n\n"
)
BIGBENCH = {"idx": 0, "inputs": "Q: 1 + 1\nA:", "targets": ["2", "two"]}
NO_CHOICES = {"multiple_choice_targets": [], "multiple_choice_scores": []}
WSC = {"quote": "", "quote_loc": 0, "source": "", "label": 1}

SAMPLES: list[tuple[str, Row, list[Row]]] = [
    (
        "agieval",
        {"query": "Q: which?", "choices": ["(A)x", "(B)y"], "gold": [1]},
        [{"query": "Q: which?", "choices": ["(A)x", "(B)y"], "gold": 1}],
    ),
    (
        "agieval_free",
        {
            "query": "Q: 6 x 7? Answer Choices: (A)41 (B)42 \nA: Among A through B, it is",
            "choices": ["(A)41", "(B)42"],
            "gold": [1],
        },
        [{"context": "Q: 6 x 7?", "answer": "42"}],
    ),
    (
        "ai2_arc",
        {
            "id": "1",
            "question": "Why?",
            "choices": {"text": ["x", "y", "z", "w"], "label": ["1", "2", "3", "4"]},
            "answerKey": "3",
        },
        [{"query": "Question: Why?", "choices": ["x", "y", "z", "w"], "gold": 2}],
    ),
    (
        "ai2_arc",
        {"id": "1", "question": "Why?", "choices": ABC, "answerKey": "A"},
        [],
    ),
    (
        "bbq",
        {
            "category": "Age",
            "context": "Two met.",
            "question": "Who?",
            "ans0": "one",
            "ans1": "other",
            "ans2": "unknown",
            "label": 2,
        },
        [
            {
                "query": "Context: Two met.\nQuestion: Who?",
                "choices": ["one", "other", "unknown"],
                "gold": 2,
                "category": "Age",
            }
        ],
    ),
    (
        "bigbench_choice",
        BIGBENCH | {"multiple_choice_targets": ["1", "2"], "multiple_choice_scores": [0, 1]},
        [{"query": "Q: 1 + 1\nA:", "choices": ["1", "2"], "gold": 1}],
    ),
    (
        "bigbench_lm",
        BIGBENCH | NO_CHOICES,
        [{"context": "Q: 1 + 1\nA:", "continuation": "2"}],
    ),
    (
        "boolq",
        {"passage": "Ice -- Ice is cold.", "question": "is ice cold", "idx": 0, "label": 1},
        [
            {
                "query": "Passage: Ice -- Ice is cold.\nQuestion: is ice cold?",
                "choices": ["no", "yes"],
                "gold": 1,
            }
        ],
    ),
    (
        "commonsense_qa",
        {"question": "Where?", "question_concept": "c", "choices": ABC, "answerKey": "C"},
        [
            {
                "query": "Question: Where?\nChoices:\nA. x\nB. y\nC. z\nAnswer:",
                "choices": ["A", "B", "C"],
                "gold": 2,
            }
        ],
    ),
    (
        "copa",
        {
            "premise": "The cup fell.",
            "choice1": "It broke.",
            "choice2": "I sang.",
            "question": "effect",
            "idx": 0,
            "label": 0,
        },
        [{"query": "The cup fell, therefore", "choices": ["it broke.", "i sang."], "gold": 0}],
    ),
    (
        "coqa",
        {
            "source": "s",
            "story": STORY,
            "questions": ["Who?", "What color?"],
            "answers": {"input_text": ["Tim", "red"], "answer_start": [0, 10]},
        },
        [
            {
                "context": STORY_HEAD + "Final question:\nQuestion: Who?\nAnswer:",
                "continuation": "Tim",
            },
            {
                "context": STORY_HEAD
                + "Preceding questions:\nQuestion: Who?\nAnswer: Tim\n\n"
                + "Final question:\nQuestion: What color?\nAnswer:",
                "continuation": "red",
            },
        ],
    ),
    (
        "gsm8k",
        {"question": "How many?", "answer": "2 + 3 = <<2+3=5>>5.\nSo 5.\n#### 5"},
        [
            {
                "context": "How many?",
                "chain_of_thought": "2 + 3 = <<2+3=5>>5.\nSo 5.",
                "answer": "5",
            }
        ],
    ),
    (
        "hellaswag",
        {
            "activity_label": "Baking",
            "ctx_a": "[header] A man stirs. [step] He waits.",
            "ctx_b": "he",
            "endings": ["eats  it.", "sings [title] Loudly.", "c", "d"],
            "label": "1",
        },
        [
            {
                "query": "Baking: A man stirs. He waits. He",
                "choices": ["eats it.", "sings. Loudly.", "c", "d"],
                "gold": 1,
            }
        ],
    ),
    (
        "jeopardy",
        {"context": "RIVERS: It is long", "continuation": "the Nile", "category": "science"},
        [{"context": "RIVERS: It is long", "continuation": "the Nile", "category": "science"}],
    ),
    (
        "lambada",
        {"text": "He went\n\nto  the door"},
        [{"context": "He went\n\nto  the", "continuation": "door"}],
    ),
    (
        "logi_qa",
        {"label": "b", "context": "All are.", "question": "Which?", "options": ["x", "y"]},
        [
            {
                "query": "Passage: All are.\nQuestion: Which?\nChoices: A. x\nB. y\n",
                "choices": ["A", "B"],
                "gold": 1,
            }
        ],
    ),
    (
        "math_qa",
        {
            "Problem": "how much ?",
            "Rationale": "r",
            "options": "a ) 1 , 000 , b ) rs . 400 , c ) 3 a , d ) none of these , e ) 5",
            "correct": "b",
        },
        [
            {
                "query": "Question: how much ?\nA. 1 , 000\nB. rs . 400\nC. 3 a\nD. none of these"
                "\nE. 5\nAnswer: ",
                "choices": ["A", "B", "C", "D", "E"],
                "gold": 1,
            }
        ],
    ),
    (
        "mmlu",
        {"question": "Which?", "subject": "anatomy", "choices": ["w", "x", "y", "z"], "answer": 3},
        [
            {
                "query": "Question: Which?\nA. w\nB. x\nC. y\nD. z\n",
                "choices": ["A", "B", "C", "D"],
                "gold": 3,
                "category": "anatomy",
            }
        ],
    ),
    (
        "openbook_qa",
        {"id": "1", "question_stem": "Ice is", "choices": ABC, "answerKey": "B "},
        [{"query": "Ice is", "choices": ["x", "y", "z"], "gold": 1}],
    ),
    (
        "piqa",
        {"goal": "open a jar", "sol1": "turn", "sol2": "kick", "label": 0},
        [{"query": "Question: open a jar\n", "choices": ["turn", "kick"], "gold": 0}],
    ),
    (
        "pubmed_qa",
        {
            "pubid": 1,
            "question": "Does it?",
            "context": {"contexts": ["One.", "Two."], "labels": [], "meshes": []},
            "long_answer": "",
            "final_decision": "maybe",
        },
        [{"context": "Abstract: One.\nTwo.\nQuestion: Does it?\nAnswer:", "continuation": "maybe"}],
    ),
    (
        "siqa",
        {
            "context": "Jan ran.",
            "question": "Why?",
            "answerA": "x",
            "answerB": "y",
            "answerC": "z",
            "label": "3",
        },
        [
            {
                "query": "Context: Jan ran.\nQuestion: Why?\nChoices:\nA. x\nB. y\nC. z\nAnswer:",
                "choices": ["A", "B", "C"],
                "gold": 2,
            }
        ],
    ),
    (
        "squad",
        {
            "id": "1",
            "title": "t",
            "context": "It is red.",
            "question": "What color?",
            "answers": {"text": ["red", "It is red"], "answer_start": [6, 0]},
        },
        [
            {
                "context": "Context: It is red.\nQuestion: What color?\nAnswer:",
                "continuation": "red",
            }
        ],
    ),
    (
        "svamp",
        {
            "ID": "1",
            "Body": "Ann has 8 pens and gives 3 away",
            "Question": "How many are left?",
            "Equation": "( 8.0 - 3.0 )",
            "Answer": "5.0",
            "Type": "Subtraction",
        },
        [
            {
                "context": "Ann has 8 pens and gives 3 away How many are left?",
                "chain_of_thought": "( 8.0 - 3.0 )",
                "answer": "5",
            }
        ],
    ),
    (
        "trivia_qa",
        {"question": "Which?", "answer": {"value": "Rome", "aliases": ["Roma", "Rome"]}},
        [
            {
                "context": "Question: Which?\nAnswer:",
                "answer": "Rome",
                "aliases": ["Rome", "Roma"],
            }
        ],
    ),
    (
        "trivia_qa",
        {"question": "Which?", "answer": {"value": "a b c d e f g h i j k", "aliases": []}},
        [],
    ),
    (
        "winogender",
        {
            "sentence": "The cook paid because she was late.",
            "pronoun": "she",
            "occupation": "cook",
            "participant": "someone",
            "label": 0,
        },
        [
            {
                "query": 'Sentence: "The cook paid because she was late."\nQ: Who does the pronoun'
                ' "she" refer to in the previous sentence? A:',
                "choices": ["the cook", "someone"],
                "gold": 0,
            }
        ],
    ),
    (
        "winograd",
        WSC
        | {
            "text": "A boy fed a cow because it was hungry.",
            "pronoun": "it",
            "pronoun_loc": 24,
            "options": ["The boy", "The cow"],
        },
        [
            {
                "context_options": [
                    "A boy fed a cow because the boy",
                    "A boy fed a cow because the cow",
                ],
                "continuation": "was hungry.",
                "gold": 1,
            }
        ],
    ),
    (
        "winograd",
        WSC
        | {
            "text": "Tom met Ann. His hat fell.",
            "pronoun": "His",
            "pronoun_loc": 13,
            "options": ["Tom", "The girl"],
        },
        [
            {
                "context_options": ["Tom met Ann. Tom's", "Tom met Ann. The girl's"],
                "continuation": "hat fell.",
                "gold": 1,
            }
        ],
    ),
    (
        "winogrande",
        {"sentence": "The box did not fit, so _ was cut.", "option1": "it", "option2": "Bo",
         "answer": "2"},
        [
            {
                "context_options": ["The box did not fit, so it", "The box did not fit, so Bo"],
                "continuation": "was cut.",
                "gold": 1,
            }
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mapping", "source", "expected"), SAMPLES, ids=[f"{i}-{s[0]}" for i, s in enumerate(SAMPLES)]
)
def test_a_published_row_becomes_llm_foundrys(
    mapping: str, source: Row, expected: list[Row]
) -> None:
    assert MAPS[mapping](source) == expected


def test_a_null_stays_one_and_becomes_no_text() -> None:
    (row,) = MAPS["jeopardy"]({"context": "c", "continuation": None, "category": 3})
    assert row == {"context": "c", "continuation": None, "category": "3"}
    contexts = {"contexts": ["One.", None]}
    with pytest.raises(TypeError):
        MAPS["pubmed_qa"]({"question": "q", "context": contexts, "final_decision": "yes"})
    with pytest.raises(TypeError):
        MAPS["winogrande"]({"sentence": "a _ b", "option1": None, "option2": "x", "answer": "1"})


def test_choices_of_gpqa_are_shuffled_by_the_question_alone() -> None:
    def source(question: str) -> Row:
        wrong = {f"Incorrect Answer {i}": f"wrong {i}\n" for i in (1, 2, 3)}
        return {"Question": question, "Correct Answer": " right", **wrong}

    golds = set()
    for number in range(40):
        (row,) = MAPS["gpqa"](source(f"Question {number}?"))
        lines = row["query"].splitlines()
        assert lines[0] == f"Question: Question {number}?"
        assert lines[1 + row["gold"]] == f"{'ABCD'[row['gold']]}. right"
        assert sorted(line[3:] for line in lines[1:]) == ["right", "wrong 1", "wrong 2", "wrong 3"]
        assert MAPS["gpqa"](source(f"Question {number}?")) == [row]
        golds.add(row["gold"])
    assert golds == {0, 1, 2, 3}


def test_every_mapping_has_a_sample_and_its_rows_are_of_a_task_type(tmp_path: Path) -> None:
    assert {name for name, _, _ in SAMPLES} | {"gpqa"} == set(MAPS)
    for number, (name, source, _) in enumerate(SAMPLES):
        rows = MAPS[name](source)
        if not rows:
            continue
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (kind,) = [kind for kind, of in TASK_TYPES.items() if set(of.fields) <= set(rows[0])]
        task = TaskConfig(label=name, dataset_uri=str(path), icl_task_type=kind, num_fewshot=[0])
        read = load_rows(task, gauntlet_path=tmp_path / "gauntlet.yaml")
        assert [row.gold for row in read] == [row.get("gold", 0) for row in rows]
