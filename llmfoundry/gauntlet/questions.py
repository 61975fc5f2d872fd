"""The words that all parts of the gauntlet share: rows, what is asked of a model, what it answers.

A task's file becomes rows (`task_rows`), rows become questions (`prompts`), an `EvaluatedModel`
answers them (`models`), `answer_metrics` judges the answers, and `aggregate` sums up. How tasks
become prompts of a model is one record too, `PromptSettings`, which callers of `Gauntlet` make and
the prompts read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from llmfoundry.data.text.chat_template import ChatTemplate
from llmfoundry.data.text.tokenizer import SpecialTokens, Tokenizer, special_tokens

Made = TypeVar("Made")


@dataclass(frozen=True)
class TaskConfig:
    """One entry of `icl_tasks`: LLM Foundry's keys, and ours after them."""

    label: str
    """Name in tables, metric names and categories."""
    dataset_uri: str
    """A .jsonl file or a glob of them, relative to the gauntlet file or to the repository; an
    address that fsspec reads (s3://..., https://...); hf://owner/name, a data set on the Hugging
    Face hub; generated://NAME?level=2&rows=100&seed=1, rows that are made here;
    instructions://NAME?rows=50&seed=1, likewise, conversations;
    heldout://continuations, pieces of the run's own held-out text."""
    icl_task_type: str
    """language_modeling, multiple_choice, schema or generation_task_with_answers."""
    num_fewshot: list[int]
    """Numbers of worked examples before the question; each is evaluated and reported apart."""
    metric_names: list[str] = field(default_factory=list)
    """Must hold the type's own metric, if given; every metric is always computed."""
    max_seq_len: int | None = None
    """Longest input in tokens; unset: the model's."""
    prompt_string: str = ""
    """Text before everything else."""
    example_delimiter: str = "\n"
    """Text between worked examples, and between the last of them and the question."""
    continuation_delimiter: str = " "
    """Text between a question and its answer."""
    question_prelimiter: str = ""
    """Text before each question; also written prelimiter."""
    has_categories: bool = False
    """Rows carry a `category`; accuracy is the mean over them, and examples are of the same."""
    fewshot_random_seed: int = 1234
    """Decides which rows are the worked examples."""
    strip_dataset: bool = True
    """Remove white space around each text of a row; false where it matters, as in code."""
    cot_delimiter: str = ""
    """Generation: text between a chain of thought and the answer."""
    early_stopping_criteria: list[str] = field(default_factory=list)
    """Generation: texts before which an answer ends."""
    do_normalization: bool = True
    """Generation: compare without case, articles, punctuation and white space, as TriviaQA does."""
    hf_loading_vars: dict[str, Any] = field(default_factory=dict)
    """hf://: arguments of datasets.load_dataset, such as name and split."""
    hf_parsing_map: dict[str, list[str]] = field(default_factory=dict)
    """hf://: for each field of a row the columns that make it, joined by a space."""
    choice_by: str = "token"
    """What a choice's log-probability is divided by before choices are compared: token (LLM
    Foundry), sum (nothing), char (the harness's acc_norm) or byte."""
    max_new_tokens: int | None = None
    """Generation: longest answer; unset: the longest answer of the rows."""


@dataclass(frozen=True)
class TaskRow:
    """One line of a task's file, in one form for all task types.

    Attributes:
        contexts: the question's text; in `schema` one for each option, elsewhere exactly one.
        choices: possible answers in multiple_choice; elsewhere exactly one, what is to be written.
        gold: index of the right choice, in `schema` of the right context; elsewhere 0.
        place: file and line, for messages.
        category: of a task with has_categories.
        aliases: all answers that count as right in generation, the first of which is choices[0].
        chain_of_thought: reasoning before the answer, in worked examples of generation.
        messages: a conversation up to the answer; empty: the question is a text.
        reply: the right answer as a message; empty: not given.
        tools: functions that the model may call, in a conversation.
        checks: conditions of a right answer, for `answer_metrics.meets_checks`; empty: the answer
            begins with an alias.
    """

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int
    place: str
    category: str | None = None
    aliases: tuple[str, ...] = ()
    chain_of_thought: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    reply: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    checks: tuple[Mapping[str, Any], ...] = ()

    @property
    def n_options(self) -> int:
        """Contexts or choices to choose among; 1 where the answer is written freely."""
        return max(len(self.contexts), len(self.choices))


@dataclass(frozen=True)
class Request:
    """Tokens whose probability after other tokens is asked for.

    Attributes:
        tokens: what the model reads: context, then the targets without the last of them.
        targets: the last len(targets) places of `tokens` predict them.
        text: what the targets spell, without the delimiter before it: its characters and bytes are
            what scores are normalized by.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Prompt:
    """A text to be continued.

    Attributes:
        tokens: what the model reads first.
        text: the same, for models behind an endpoint that takes text.
        stops: the continuation ends before the first of these texts.
        max_new_tokens: and after so many tokens.
        messages: the conversation that `text` renders, for models behind a server of their own
            template; empty: none.
        tools: what may be called there.
    """

    tokens: tuple[int, ...]
    text: str
    stops: tuple[str, ...]
    max_new_tokens: int
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Question:
    """A row as a model meets it.

    Attributes:
        row: where it is from.
        requests: one for each option; in language_modeling one; in generation one, the gold answer
            (with its chain of thought), which is scored where generating would take too long.
        prompt: what to continue, in generation; elsewhere None.
        dropped: worked examples left out to fit into the model's window.
        truncated: the start of what is left was cut off all the same.
        problem: why the row cannot be asked; then it has no requests, and is left out of the score.
    """

    row: TaskRow
    requests: tuple[Request, ...]
    prompt: Prompt | None = None
    dropped: int = 0
    truncated: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Score:
    """What a model says about one request.

    Attributes:
        logprob: natural log of the probability of all targets, in order.
        greedy: every target is strictly likelier than all other tokens.
        tied: every target is among the likeliest tokens, but for at least one it is not alone.
        best_logprob: the same sum for the likeliest token at each place, whatever the target.
        mean_probability: mean over the targets of their probabilities; None: not known. It and the
            next are what Composer's calibration errors are made of, no function of the sums.
        least_best: the least probability, over the places, of the likeliest token; None: not known.
        n_tokens: the targets in the model's own tokens; None: as many as the request has.
    """

    logprob: float
    greedy: bool
    tied: bool
    best_logprob: float
    mean_probability: float | None = None
    least_best: float | None = None
    n_tokens: int | None = None


@dataclass(frozen=True)
class Refusal:
    """Said in place of a score or a text where there is none for one question.

    The result says how many there are.

    Attributes:
        reason: in one line; the model's words where it will not take the question.
        left_out: nobody can tell the score, and the row is left out; else the question is too long
            for the model, or not allowed, and counts as wrong.
    """

    reason: str
    left_out: bool = False


class RefusedError(Exception):
    """A model would not take a question, where that cannot be counted as a wrong answer."""


class Once(Protocol):
    """Calls a function on one process of several, and gives what it gives to all."""

    def __call__(self, make: Callable[[], Made]) -> Made:
        """Every process calls it."""


def here(make: Callable[[], Made]) -> Made:
    """`Once` of a process that is alone."""
    return make()


class EvaluatedModel(Protocol):
    """A model that is evaluated. Every process calls both with the same arguments, and gets all.

    Attributes:
        can_score: it gives log-probabilities; else `score` raises a UserError that says why not.
        tokens_computed: places that it was run on so far, padding among them; what is written by
            generation is not counted.
    """

    tokens_computed: int

    @property
    def can_score(self) -> bool:
        """See above."""
        ...

    def score(self, requests: Sequence[Request]) -> Sequence[Score | Refusal]:
        """A score for each request, in order."""
        ...

    def generate(self, prompts: Sequence[Prompt]) -> Sequence[str | Refusal]:
        """The greedy continuation of each prompt, in order, cut before its first stop."""
        ...


RAW = "{% for message in messages %}{{ message.content or '' }}\n{% endfor %}"
"""For models behind a server that has the template: what is sent is messages."""


@dataclass(frozen=True)
class Chat:
    """How conversations are put to a model.

    Attributes:
        template: the model's.
        every_task: questions that are plain texts become conversations too.
        multiturn: worked examples are turns of their own; else they stand in the user's message.
        system: the system's message; "": none but a row's or a task's own.
        prefix: what every answer begins with, put there for the model.
    """

    template: ChatTemplate
    every_task: bool = False
    multiturn: bool = True
    system: str = ""
    prefix: str = ""

    @property
    def end_of_turn(self) -> str:
        """What ends an answer; "": a server knows."""
        return "" if self.template.text == RAW else self.template.end_of_turn

    def describe(self) -> str:
        """In words."""
        which = "every question" if self.every_task else "conversations"
        more = ", a system message" if self.system else ""
        more += f", answers begin with {self.prefix!r}" if self.prefix else ""
        shots = ", worked examples as turns" if self.every_task and self.multiturn else ""
        return f"{which} by the chat template{shots}{more}"

    def facts(self) -> dict[str, Any]:
        """All that decides the text of a prompt."""
        return {
            "template": self.template.fingerprint,
            "multiturn": self.multiturn,
            "system": self.system,
            "prefix": self.prefix,
        }


@dataclass(frozen=True)
class PromptSettings:
    """How tasks become prompts of a model.

    Attributes:
        tokenizer: the model's.
        seq_len: longest input in tokens; a task may have a smaller one.
        prompts: native, harness or foundry; see recipe/eval.py.
        special: tokens around every text; None: the tokenizer's own.
        rows: rows of each task; None: all.
        generate: write the answers of generation tasks.
        allow_missing: tasks without rows are left out, and said to be.
        unit: what a token of `tokenizer` is: the model's own, or bytes of a model behind a server.
        can_score: the model gives log-probabilities; one that does not writes answers in any case.
        chat: how conversations are put, and whether all tasks are; None: there is no template.
    """

    tokenizer: Tokenizer
    seq_len: int
    prompts: str = "native"
    special: SpecialTokens | None = None
    rows: int | None = None
    generate: bool = True
    allow_missing: bool = False
    unit: str = "tokens"
    can_score: bool = True
    chat: Chat | None = None

    @classmethod
    def by_training(
        cls, tokenizer: Tokenizer, seq_len: int, start: Sequence[int] | None
    ) -> PromptSettings:
        """As a model was trained here, or else as lm-evaluation-harness asks it.

        Args:
            tokenizer: the model's.
            seq_len: longest input in tokens.
            start: what documents began with in its training; None: it was not trained here.
        """
        mode = "harness" if start is None else "native"
        return cls(tokenizer, seq_len, mode, special_tokens(tokenizer, start=start))

    @property
    def around(self) -> SpecialTokens:
        """Tokens around every text."""
        return self.special or special_tokens(self.tokenizer)

    @property
    def writes(self) -> bool:
        """Whether answers are to be written: no prompts, and no room for these, if not."""
        return self.generate or not self.can_score

    def of(self, task: TaskConfig) -> PromptSettings:
        """The same in the task's own window."""
        return replace(self, seq_len=min(self.seq_len, task.max_seq_len or self.seq_len))

    def describe(self) -> str:
        """How questions become tokens, in words."""
        special = self.around
        before = special.start if self.prompts == "native" else special.before
        text = self.tokenizer.decode(before) if before else "nothing"
        if self.unit == "bytes":  # it takes text, and begins documents as it will
            text = "what its server puts"
        said = f"{self.prompts} prompts, {text} before each text"
        return said if self.chat is None else f"{said}; {self.chat.describe()}"
