"""Task types: fields of a row, texts of a prompt, judgment of an answer, and metrics.

Everything that depends on `icl_task_type` reads the table `TASK_TYPES`: the checks of a gauntlet
file, the reader of rows, the prompts and the metrics. A new type needs one entry in the table and
one function that reads its rows. Its other functions can be existing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmfoundry.gauntlet.answer_metrics import (
    CHOICE_CALIBRATION,
    LM_CALIBRATION,
    AnsweredQuestion,
    Estimate,
    Judgment,
    check_problems,
    choice_metrics,
    generation_metrics,
    greedy_metrics,
    judge_choice,
    judge_greedy,
    judge_written,
)
from llmfoundry.gauntlet.questions import TaskConfig, TaskRow
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.choice_table import ChoiceTable


@dataclass(frozen=True)
class TaskType:
    """One task type.

    Attributes:
        fields: required fields of a row.
        read: converts a raw row and its location (file and line) to a TaskRow; raises ValueError
            with the mistake in the row.
        write: returns the continuations to be scored after each context of the row.
        judge: decides whether an answer counts as right.
        metrics: computes all metrics except the accuracy, from the scored answers and the number
            of refused questions.
        metric: Composer's name of the accuracy; benchmark scores are computed from it.
        calibration: Composer's name of the calibration error; allowed in metric_names.
        generates: whether answers are generated, if generation is enabled.
        chooses: whether the model chooses one of several options.
        options_are_contexts: whether the options precede a shared continuation; False: they are
            continuations of a shared context.
    """

    fields: tuple[str, ...]
    read: Callable[[Mapping[str, Any], str], TaskRow]
    write: Callable[[TaskRow, TaskConfig, bool], tuple[str, ...]]
    judge: Callable[[TaskConfig, AnsweredQuestion], Judgment]
    metrics: Callable[[Sequence[AnsweredQuestion], int], dict[str, Estimate]]
    metric: str
    calibration: str | None = None
    generates: bool = False
    chooses: bool = False
    options_are_contexts: bool = False

    def guess(self, row: TaskRow) -> float:
        """Return the accuracy of guessing on this row; 0 for a free-form answer."""
        return 1 / row.n_options if self.chooses else 0.0

    def constant(self, row: TaskRow) -> int | str:
        """Return the right answer of this row, for finding the best constant answer."""
        return row.gold if self.chooses else row.choices[0]


def type_of(task: TaskConfig) -> TaskType:
    """Return the type of a checked task that lm-evaluation-harness does not run."""
    return TASK_TYPES[task.icl_task_type]


def judge_answer(task: TaskConfig, answer: AnsweredQuestion) -> Judgment:
    """Judge an answer by the task's accuracy. Refusals and non-finite scores are wrong."""
    if not answer.is_finite or answer.refusal is not None:
        return Judgment(None, False)
    return type_of(task).judge(task, answer)


def read_language_modeling(row: Mapping[str, Any], place: str) -> TaskRow:
    """`{"context": "The cat sat on the", "continuation": "mat"}`."""
    context = _text(row, "context")
    return TaskRow((context,), (filled_text(row, "continuation", "the text to predict"),), 0, place)


def read_multiple_choice(row: Mapping[str, Any], place: str) -> TaskRow:
    """`{"query": "2 + 2 is", "choices": ["4", "5"], "gold": 0}`."""
    query, choices = _text(row, "query"), _options(row, "choices")
    if "" in choices:
        raise ValueError("field 'choices' holds an empty text; write what it is to say")
    return TaskRow((query,), choices, _gold(row, len(choices)), place)


def read_schema(row: Mapping[str, Any], place: str) -> TaskRow:
    """`{"context_options": ["… the cup", "… the jug"], "continuation": "was full", "gold": 0}`."""
    contexts = _options(row, "context_options")
    answer = filled_text(row, "continuation", "the text that follows each context")
    return TaskRow(contexts, (answer,), _gold(row, len(contexts)), place)


def read_generation(row: Mapping[str, Any], place: str) -> TaskRow:
    """`{"context": "2 + 2 is", "answer": "4", "aliases": ["four"]}`, or `messages` for context."""
    messages = _messages(row)
    context = str(messages[-1]["content"]) if messages else _text(row, "context")
    answer = filled_text(row, "answer", "the text to generate")
    given = _texts(row, "aliases") if row.get("aliases") is not None else ()
    thought = _text(row, "chain_of_thought") if row.get("chain_of_thought") is not None else ""
    aliases = tuple(dict.fromkeys([answer, *given]))
    if "checks" in row:
        for problem in check_problems(row["checks"]):
            raise ValueError(problem)
    return TaskRow(
        (context,),
        (answer,),
        0,
        place,
        aliases=aliases,
        chain_of_thought=thought,
        messages=messages,
        reply=_mapping(row, "reply"),
        tools=tuple(_mappings(row, "tools")),
        checks=tuple(row.get("checks", ())),
    )


def write_continuations(row: TaskRow, task: TaskConfig, reasoned: bool) -> tuple[str, ...]:
    r"""Return the text to predict, or all choices.

    language_modeling: `The cat sat on the| mat`. multiple_choice: `Question: 2 + 2?\nAnswer:| 4`
    and `Question: 2 + 2?\nAnswer:| 5`. schema: `Tea went from the pot to the cup until the cup| was
    full` and `Tea went from the pot to the cup until the pot| was full`.
    """
    return row.choices


def write_answer(row: TaskRow, task: TaskConfig, reasoned: bool) -> tuple[str, ...]:
    r"""Return the right answer, after its chain of thought if the task's rows have one.

    `Question: 2 + 2?\nAnswer:| 4`; with a cot_delimiter of ` So: `, `Question: Two twos?\nAnswer:|
    2 and 2 are 4. So: 4`.
    """
    return (with_reasoning(row, row.choices[0], task, reasoned),)


def with_reasoning(row: TaskRow, answer: str, task: TaskConfig, reasoned: bool) -> str:
    """Return an answer, after the row's chain of thought if `reasoned`."""
    return f"{row.chain_of_thought}{task.cot_delimiter}{answer}" if reasoned else answer


def _messages(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the conversation that replaces a context; empty: the row has a context."""
    messages = _mappings(row, "messages")
    for message in messages:
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(
                f"field 'messages' holds {short_repr(message)}; write role and content of each"
            )
    if messages and (
        messages[-1]["role"] != "user" or not isinstance(messages[-1]["content"], str)
    ):
        raise ValueError("field 'messages': the last is not a text of the user, which is answered")
    if messages and "context" in row:
        raise ValueError("has 'messages' and 'context'; write one of them")
    return tuple(messages)


def _mappings(row: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = row.get(name, [])
    if not isinstance(value, list) or not all(isinstance(part, Mapping) for part in value):
        raise ValueError(f"field '{name}' is {short_repr(value)}; write a list of mappings")
    return value


def _mapping(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"field '{name}' is {short_repr(value)}; write a mapping")
    return value


def _gold(row: Mapping[str, Any], n_options: int) -> int:
    gold = _field(row, "gold")
    if type(gold) is not int or not 0 <= gold < n_options:
        raise ValueError(f"field 'gold' is {gold!r}; write an index from 0 to {n_options - 1}")
    return gold


def _options(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    texts = _texts(row, name)
    if len(texts) < 2:
        raise ValueError(f"field '{name}' has {len(texts)} texts; write two or more")
    return texts


def _texts(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = _field(row, name)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"field '{name}' is {short_repr(value)}; write a list of texts")
    return tuple(value)


def filled_text(row: Mapping[str, Any], name: str, what: str) -> str:
    """Return a field's text. A ValueError says `what` to write if the text is empty."""
    text = _text(row, name)
    if not text:
        raise ValueError(f"field '{name}' is empty; write {what}")
    return text


def _text(row: Mapping[str, Any], name: str) -> str:
    value = _field(row, name)
    if not isinstance(value, str):
        raise ValueError(f"field '{name}' is {short_repr(value)}; write a text")
    return value


def _field(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        other = [n for n, of in TASK_TYPES.items() if row.keys() >= set(of.fields)]
        other = [] if name == "category" else other
        hint = f"; these are fields of {other[0]}" if other else nearest(name, row)
        raise ValueError(f"has no field '{name}'{hint} (fields: {', '.join(row)})")
    return row[name]


def short_repr(value: Any) -> str:
    """Return the repr of a value, truncated to 60 characters, for messages."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


TASK_TYPES = ChoiceTable(
    "icl_task_type",
    TaskType,
    {
        "language_modeling": TaskType(
            fields=("context", "continuation"),
            read=read_language_modeling,
            write=write_continuations,
            judge=judge_greedy,
            metrics=greedy_metrics,
            metric="InContextLearningLMAccuracy",
            calibration=LM_CALIBRATION,
        ),
        "multiple_choice": TaskType(
            fields=("query", "choices", "gold"),
            read=read_multiple_choice,
            write=write_continuations,
            judge=judge_choice,
            metrics=choice_metrics,
            metric="InContextLearningMultipleChoiceAccuracy",
            calibration=CHOICE_CALIBRATION,
            chooses=True,
        ),
        "schema": TaskType(
            fields=("context_options", "continuation", "gold"),
            read=read_schema,
            write=write_continuations,
            judge=judge_choice,
            metrics=choice_metrics,
            metric="InContextLearningMultipleChoiceAccuracy",
            calibration=CHOICE_CALIBRATION,
            chooses=True,
            options_are_contexts=True,
        ),
        "generation_task_with_answers": TaskType(
            fields=("context", "answer"),
            read=read_generation,
            write=write_answer,
            judge=judge_written,
            metrics=generation_metrics,
            metric="InContextLearningGenerationExactMatchAccuracy",
            generates=True,
        ),
    },
)
"""Task types by `icl_task_type`."""
