"""LLM Foundry's prompts, token for token, for numbers that compare with published ones.

`prompts.questions` calls `foundry_questions` in mode `foundry`. The rules (R1 to R7, of
llmfoundry/eval/datasets/in_context_learning_evaluation.py at 8c8dd48f), R1 being that the file's
texts, but not the members of its lists, were stripped when it was read:

R2 one random stream per task (per category, with categories), consumed in row order, so that each
   row's examples depend on all rows before it; they are emitted in the order of a Python set.
R3 an example is prelimiter + context + continuation_delimiter + answer, example_delimiter before it
   if there is text before it.
R4 the question likewise, without its answer and without white space at its end.
R5 special tokens and examples, question, and answer are tokenized apart, in three calls. Of the
   special tokens behind the examples only `<eos>` is dropped, and not where it stands alone.
R6 the answer begins with a space iff the tokenizer has " a" as one token.
R7 what is too long loses the start, the first special token included, of each option on its own.

Not followed: where a task's longest answer fills max_seq_len, LLM Foundry generates after whole
prompts, however long (its slice [-0:] cuts nothing off), in batches of which only those of equal
lengths can be stacked; `max_new_tokens` refuses that task by name.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llmfoundry.data.text.tokenizer import SpecialTokens
from llmfoundry.gauntlet.prompts.encode import (
    answer_problem,
    families,
    max_new_tokens,
    reasons,
    right_answer,
    right_context,
)
from llmfoundry.gauntlet.questions import (
    GenerationPrompt,
    PromptSettings,
    Question,
    ScoreRequest,
    TaskConfig,
    TaskRow,
)
from llmfoundry.gauntlet.task_types import type_of

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer


def foundry_questions(
    rows: Sequence[TaskRow],
    task: TaskConfig,
    shots: int,
    settings: PromptSettings,
    keep: Sequence[int],
) -> list[Question]:
    r"""`prompts.questions` by LLM Foundry's rules.

    `2 + 2 is 4\n3 + 3 is| 6`; `is|6` with a tokenizer that has no token for " a" (R6).

    Where a question is empty and nothing precedes it, LLM Foundry reads the first answer token's
    probability at the end of the padding; here `<eos>` comes first. With fewer rows than shots all
    other rows are examples, as there.
    """
    tokenizer, seq_len, special = settings.tokenizer, settings.seq_len, settings.around

    # texts of the tokenizer calls: worked examples, contexts, answer options
    examples = _examples(rows, task, shots)
    reasoned = reasons(rows)
    spaced = len(tokenizer.encode(" a")) == 1  # R6
    preambles = [_preamble([rows[j] for j in examples[i]], task, reasoned) for i in keep]
    contexts = [_contexts(rows[i], task, p) for i, p in zip(keep, preambles, strict=True)]
    options = [type_of(task).write(rows[i], task, reasoned) for i in keep]

    # encode each text once
    ids = _encode({*preambles, *_flat(contexts)}, tokenizer)
    answer_ids = _encode({_spaced(text, spaced) for text in _flat(options)}, tokenizer)

    # tokens to leave free for generated answers
    n_new = 0
    if type_of(task).generates and settings.writes:
        n_special = len(special.before) + len(special.after)
        n_new = max_new_tokens(rows, task, tokenizer, room=seq_len, n_special=n_special)

    # join the tokens of each question
    result = []
    for i, preamble, texts, its in zip(keep, preambles, contexts, options, strict=True):
        first = _first(ids[preamble], special, tokenizer)
        before = [[*first, *ids[text]] or [tokenizer.eos_id] for text in texts]
        after = [answer_ids[_spaced(text, spaced)] for text in its]
        if problem := answer_problem(map(len, after), seq_len - 1):
            result.append(Question(rows[i], (), problem=problem))
            continue
        pairs = [(b, a, text) for b in before for a, text in zip(after, its, strict=True)]
        requests = tuple(_request(b, a, text, seq_len) for b, a, text in pairs)
        too_long = any(len(b) + len(a) > seq_len for b, a, _ in pairs)
        prompt = None
        if n_new:
            prompt = _prompt(preamble + texts[0], before[0], task, tokenizer, seq_len, n_new)
            too_long = too_long or len(before[0]) + n_new > seq_len
        result.append(Question(rows[i], requests, prompt, 0, too_long))
    return result


def sample_examples(n_rows: int, shots: int, index: int, rng: random.Random) -> set[int]:
    """Other rows than `index`, as LLM Foundry's get_fewshot_sample_idxs draws them (R2).

    Iterating over the set, whose order is that of CPython's hash table, is part of the rule.
    """
    chosen = set(rng.sample(range(n_rows), min(n_rows - 1, shots)))
    if index in chosen:
        chosen.remove(index)
        spare = rng.choice(range(n_rows))
        while spare in chosen or spare == index:
            spare = rng.choice(range(n_rows))
        chosen.add(spare)
    return chosen


def _examples(rows: Sequence[TaskRow], task: TaskConfig, shots: int) -> list[list[int]]:
    """Return the worked examples of each row.

    The examples of all rows are sampled together, because all rows of a family share a random
    generator.
    """
    result: list[list[int]] = [[] for _ in rows]
    for family in families(rows, task) if shots else []:
        rng = random.Random(task.fewshot_random_seed)
        for place, i in enumerate(family):
            chosen = sample_examples(len(family), shots, place, rng)
            result[i] = [family[j] for j in chosen]
    return result


def _preamble(examples: Iterable[TaskRow], task: TaskConfig, reasoned: bool) -> str:
    """The text of the first tokenizer call (R3)."""
    text = task.prompt_string
    for row in examples:
        text += _opened(right_context(row), task, text) + task.continuation_delimiter
        text += right_answer(row, task, reasoned=reasoned)
    return text


def _first(ids: Sequence[int], special: SpecialTokens, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of the first tokenizer call without an `<eos>` at the end.

    An `<eos>` that is the only token stays.
    """
    first = [*special.before, *ids, *special.after]
    return first[:-1] if len(first) > 1 and first[-1] == tokenizer.eos_id else first


def _opened(context: str, task: TaskConfig, before: str) -> str:
    delimiter = task.example_delimiter if before else ""
    if type_of(task).options_are_contexts:  # its own code there, with the two the other way round
        return task.question_prelimiter + delimiter + context
    return delimiter + task.question_prelimiter + context


def _contexts(row: TaskRow, task: TaskConfig, before: str) -> list[str]:
    """The texts of the second tokenizer call (R4).

    A schema's contexts keep their white space: there only the delimiter loses it, and where nothing
    precedes that is not added.
    """
    delimiter = task.continuation_delimiter
    if type_of(task).options_are_contexts:
        if not before:
            return [task.question_prelimiter + context for context in row.contexts]
        delimiter = delimiter.rstrip() if task.strip_dataset else delimiter
        return [_opened(context, task, before) + delimiter for context in row.contexts]
    text = _opened(row.contexts[0], task, before) + delimiter
    return [text.rstrip() if task.strip_dataset else text]


def _spaced(text: str, spaced: bool) -> str:
    return f" {text}" if spaced and not text.startswith(" ") else text


def _encode(texts: Iterable[str], tokenizer: Tokenizer) -> dict[str, list[int]]:
    unique = list(texts)
    return dict(zip(unique, tokenizer.encode_batch(unique), strict=True))


def _flat(lists: Iterable[Iterable[str]]) -> Iterable[str]:
    return (text for texts in lists for text in texts)


def _request(before: list[int], after: list[int], text: str, seq_len: int) -> ScoreRequest:
    """R7; there the last answer token takes a place in the window too, though it is not read."""
    kept = before[-(seq_len - len(after)) :]
    return ScoreRequest((*kept, *after[:-1]), tuple(after), text)


def _prompt(
    text: str, tokens: list[int], task: TaskConfig, tokenizer: Tokenizer, seq_len: int, n_new: int
) -> GenerationPrompt:
    kept = tokens[-(seq_len - n_new) :]
    if len(kept) < len(tokens):
        text = tokenizer.decode(kept)
    return GenerationPrompt(tuple(kept), text, tuple(task.early_stopping_criteria), n_new)
