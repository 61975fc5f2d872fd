"""Data types shared by all parts of the gauntlet: tasks, rows, questions, requests and scores.

A task's file becomes rows (`task_rows`), rows become questions (`prompts`), an `EvaluatedModel`
answers the questions (`models`), `answer_metrics` judges the answers, and `aggregate` combines the
results. `PromptSettings` defines how tasks become prompts: callers of `Gauntlet` construct it, and
`prompts` reads it.
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
    """One entry of `icl_tasks`: LLM Foundry's keys, followed by the keys of this project."""

    label: str
    """Name in tables, metric names and categories."""
    dataset_uri: str
    """A .jsonl file or a glob of them, relative to the gauntlet file or to the repository; an
    address that fsspec reads (s3://..., https://...); hf://owner/name, a data set on the Hugging
    Face hub; generated://NAME?level=2&rows=100&seed=1, generated rows;
    instructions://NAME?rows=50&seed=1, generated conversations;
    heldout://continuations, pieces of the run's held-out text."""
    icl_task_type: str
    """language_modeling, multiple_choice, schema or generation_task_with_answers."""
    num_fewshot: list[int]
    """Numbers of few-shot examples before the question; each number has a result of its own."""
    metric_names: list[str] = field(default_factory=list)
    """If set, must include the metric of the task type. All metrics are computed in any case."""
    max_seq_len: int | None = None
    """Longest input in tokens; unset: the model's limit."""
    prompt_string: str = ""
    """Text before everything else."""
    example_delimiter: str = "\n"
    """Text between few-shot examples, and between the last example and the question."""
    continuation_delimiter: str = " "
    """Text between a question and its answer."""
    question_prelimiter: str = ""
    """Text before each question; also written prelimiter."""
    has_categories: bool = False
    """Rows have a `category`. Accuracy is the mean over categories, and few-shot examples are of
    the question's category."""
    fewshot_random_seed: int = 1234
    """Seed of the choice of few-shot examples."""
    strip_dataset: bool = True
    """Remove white space around each text of a row; false if white space matters, as in code."""
    cot_delimiter: str = ""
    """Generation: text between a chain of thought and the answer."""
    early_stopping_criteria: list[str] = field(default_factory=list)
    """Generation: stop strings; an answer ends before the first one."""
    do_normalization: bool = True
    """Generation: ignore case, articles, punctuation and white space, as TriviaQA does."""
    hf_loading_vars: dict[str, Any] = field(default_factory=dict)
    """hf://: arguments of datasets.load_dataset, such as name and split."""
    hf_parsing_map: dict[str, list[str]] = field(default_factory=dict)
    """hf://: the columns of each field of a row; several columns are joined by a space."""
    choice_by: str = "token"
    """Normalization of log-probabilities before choices are compared: per token (LLM Foundry), per
    char (the harness's acc_norm), per byte, or sum (none)."""
    max_new_tokens: int | None = None
    """Generation: longest answer in tokens; unset: the longest answer of the rows."""


@dataclass(frozen=True)
class TaskRow:
    """One line of a task's file, in one form for all task types.

    Attributes:
        contexts: the question's text: one for each option in `schema`, one in all other types.
        choices: the possible answers in multiple_choice; the one right answer in all other types.
        gold: index of the right choice, or of the right context in `schema`; 0 in other types.
        place: file and line, for messages.
        category: the row's category in a task with has_categories.
        aliases: all right answers in generation; the first one is choices[0].
        chain_of_thought: reasoning before the answer in few-shot examples of generation.
        messages: a conversation up to the answer; empty: the question is a text.
        reply: the right answer as a message; empty: not specified.
        tools: functions that the model may call in a conversation.
        checks: conditions of a right answer, for `answer_metrics.meets_checks`; empty: a right
            answer begins with an alias.
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
        """Number of options to choose from; 1 for a free-form answer."""
        return max(len(self.contexts), len(self.choices))


@dataclass(frozen=True)
class ScoreRequest:
    """A query for the log-probability of target tokens after a context.

    Attributes:
        tokens: the model's input: the context, then all targets except the last one.
        targets: predicted at the last len(targets) positions of `tokens`.
        text: the text of the targets without the delimiter before it. Scores per character and per
            byte are normalized by its length.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class GenerationPrompt:
    """A generation prompt.

    Attributes:
        tokens: the tokens of the prompt.
        text: the prompt as text, for endpoints that take text.
        stops: stop strings; the continuation ends before the first one.
        max_new_tokens: longest continuation in tokens.
        messages: the conversation that `text` renders, for servers that apply a chat template;
            empty: the prompt is not a conversation.
        tools: functions that the model may call in the conversation.
    """

    tokens: tuple[int, ...]
    text: str
    stops: tuple[str, ...]
    max_new_tokens: int
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Question:
    """A tokenized row with its few-shot examples.

    Attributes:
        row: the row.
        requests: one for each option; one in language_modeling; one in generation, for the gold
            answer (with its chain of thought), scored if generation is disabled.
        prompt: the generation prompt; None in other task types.
        dropped: number of few-shot examples removed to fit into the model's context window.
        truncated: whether the start of the remaining context was truncated as well.
        problem: why the row cannot be evaluated. Such a row has no requests and is excluded from
            the score.
    """

    row: TaskRow
    requests: tuple[ScoreRequest, ...]
    prompt: GenerationPrompt | None = None
    dropped: int = 0
    truncated: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Score:
    """Log-probabilities of one request.

    Attributes:
        logprob: sum of the targets' log-probabilities (natural logarithm).
        greedy: whether every target is strictly more probable than all other tokens.
        tied: whether every target is among the most probable tokens and at least one is tied.
        best_logprob: sum of the log-probabilities of the most probable token at each position.
        mean_probability: mean probability of the targets; None: unknown. Composer's calibration
            errors are computed from this attribute and `least_best`.
        least_best: minimum over the positions of the most probable token's probability; None:
            unknown.
        n_tokens: number of targets in the model's own tokenization; None: as in the request.
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
    """Placeholder for the missing score or text of one question. The result counts them.

    Attributes:
        reason: one line; the model's error message if the model rejected the question.
        left_out: True: the score cannot be determined, and the row is excluded. False: the
            question is too long for the model, or not allowed, and counts as wrong.
    """

    reason: str
    left_out: bool = False


class RefusedError(Exception):
    """A model rejected a question, and the rejection cannot be counted as a wrong answer."""


class Once(Protocol):
    """Runs a function on one rank and returns its result on all ranks."""

    def __call__(self, make: Callable[[], Made]) -> Made:
        """Return the result of `make`. All ranks must call it."""


def here(make: Callable[[], Made]) -> Made:
    """Call `make`: the `Once` of a single process."""
    return make()


class EvaluatedModel(Protocol):
    """A model under evaluation.

    All ranks call `score` and `generate` with the same arguments and get all results.

    Attributes:
        can_score: whether the model reports log-probabilities; if not, `score` raises a UserError
            with the reason.
        tokens_computed: number of positions computed so far, with padding. Generated tokens are
            not counted.
    """

    tokens_computed: int

    @property
    def can_score(self) -> bool:
        """See above."""
        ...

    def score(self, requests: Sequence[ScoreRequest]) -> Sequence[Score | Refusal]:
        """Return a score for each request, in order."""
        ...

    def generate(self, prompts: Sequence[GenerationPrompt]) -> Sequence[str | Refusal]:
        """Return the greedy continuation of each prompt, in order, up to its first stop string."""
        ...


RAW = "{% for message in messages %}{{ message.content or '' }}\n{% endfor %}"
"""Template for servers that apply their own chat template: the request contains the messages."""


@dataclass(frozen=True)
class Chat:
    """How conversations are rendered for a model.

    Attributes:
        template: the model's chat template.
        every_task: render plain-text questions as conversations too.
        multiturn: few-shot examples are separate turns; False: they are part of the user's message.
        system: the system message; "": none, apart from the system message of a row or a task.
        prefix: text that is prefilled at the start of every answer.
    """

    template: ChatTemplate
    every_task: bool = False
    multiturn: bool = True
    system: str = ""
    prefix: str = ""

    @property
    def end_of_turn(self) -> str:
        """The end-of-turn text of the template; "": the server detects the end of a turn."""
        return "" if self.template.text == RAW else self.template.end_of_turn

    def describe(self) -> str:
        """Return the settings as a phrase for tables."""
        which = "every question" if self.every_task else "conversations"
        more = ", a system message" if self.system else ""
        more += f", answers begin with {self.prefix!r}" if self.prefix else ""
        shots = ", worked examples as turns" if self.every_task and self.multiturn else ""
        return f"{which} by the chat template{shots}{more}"

    def facts(self) -> dict[str, Any]:
        """Return all settings that affect the text of a prompt, as a cache key."""
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
        tokenizer: the model's tokenizer.
        seq_len: longest input in tokens; a task may set a smaller limit.
        prompts: prompt style: native, harness or foundry; see recipe/eval.py.
        special: special tokens around every text; None: those of the tokenizer.
        rows: maximum number of rows of each task; None: all.
        generate: generate the answers of generation tasks.
        allow_missing: skip tasks without rows and report them as problems.
        unit: unit of `tokenizer`: tokens, or bytes for a model behind a server.
        can_score: whether the model reports log-probabilities; if not, answers are always
            generated.
        chat: how conversations are rendered; None: there is no chat template.
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
        """Return native prompts for a model trained here, harness prompts for any other model.

        Args:
            tokenizer: the model's tokenizer.
            seq_len: longest input in tokens.
            start: tokens at the start of each training document; None: not trained here.
        """
        mode = "harness" if start is None else "native"
        return cls(tokenizer, seq_len, mode, special_tokens(tokenizer, start=start))

    @property
    def around(self) -> SpecialTokens:
        """Tokens around every text."""
        return self.special or special_tokens(self.tokenizer)

    @property
    def writes(self) -> bool:
        """Whether answers are generated; if not, no prompts and no space for answers are needed."""
        return self.generate or not self.can_score

    def of(self, task: TaskConfig) -> PromptSettings:
        """Return the same settings with the task's max_seq_len applied."""
        return replace(self, seq_len=min(self.seq_len, task.max_seq_len or self.seq_len))

    def describe(self) -> str:
        """Return a phrase for tables about how questions become tokens."""
        special = self.around
        before = special.start if self.prompts == "native" else special.before
        text = self.tokenizer.decode(before) if before else "nothing"
        if self.unit == "bytes":  # the server takes text and adds special tokens itself
            text = "what its server puts"
        description = f"{self.prompts} prompts, {text} before each text"
        return description if self.chat is None else f"{description}; {self.chat.describe()}"
