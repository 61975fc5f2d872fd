"""Cache of tokenized questions on disk, shared by runs, processes and users.

Entry point: `cached_questions`, which `Gauntlet` calls. The name of a file is a hash of everything
that determines its content. Adjacent prompts share most of their tokens, so each sequence is stored
as its difference from the previous one.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from llmfoundry.data.preparation.prepared_folder import build_once, cache_key, lock_build
from llmfoundry.gauntlet.prompts.native import questions, uses_chat
from llmfoundry.gauntlet.questions import (
    GenerationPrompt,
    PromptSettings,
    Question,
    ScoreRequest,
    TaskConfig,
    TaskRow,
)
from llmfoundry.gauntlet.task_rows import rows_hash
from llmfoundry.gauntlet.task_types import TASK_TYPES, type_of
from llmfoundry.inference.requests import common_prefix

_VERSION = 3  # to be raised when `questions` or the format of the file changes
_FILE = "questions.npz"

# Fields of a task that do not influence its prompts. All other fields are part of the key.
_WITHOUT_EFFECT = (
    "label",
    "dataset_uri",
    "num_fewshot",
    "metric_names",
    "max_seq_len",  # seq_len is part of the key instead
    "do_normalization",
    "hf_loading_vars",
    "hf_parsing_map",
    "choice_by",
)


def cached_questions(
    rows: Sequence[TaskRow],
    task: TaskConfig,
    shots: int,
    settings: PromptSettings,
    *,
    folder: Path | None,
    say: Callable[[str], None],
    keep: Sequence[int] | None = None,
) -> list[Question]:
    """Return the result of `questions` from the cache; compute and store it if it is missing.

    If several processes call this at the same time, one computes the file and the others wait.

    Args:
        rows: all rows of the task; their locations do not matter.
        task: its label, scoring and source do not matter, so tasks with equal prompts share a file.
        shots: number of few-shot examples.
        settings: prompt mode, tokenizer (identified by its fingerprint) and lengths.
        folder: folder of the cache; None: nothing is read or written.
        say: called with a warning if a file is damaged; the file is computed again.
        keep: indices of the rows; None: all rows.

    Raises:
        UserError: as `questions`, or `folder` cannot be written.
    """
    settings = settings.of(task)
    if folder is None:
        return questions(rows, task, shots, settings, keep=keep)

    # the key: everything that determines the questions
    chat = settings.chat
    optional_facts: dict[str, Any] = {}
    if chat is not None and uses_chat(rows, chat):
        optional_facts["chat"] = chat.facts()
    if code := TASK_TYPES.origins[task.icl_task_type].code:  # the code of a plugin may change
        optional_facts["code"] = code
    fields = dataclasses.asdict(task)
    key = cache_key(
        version=_VERSION,
        rows=rows_hash(rows),
        task={name: value for name, value in fields.items() if name not in _WITHOUT_EFFECT},
        shots=shots,
        keep=None if keep is None else list(keep),
        special=dataclasses.asdict(settings.around),
        tokenizer=settings.tokenizer.fingerprint,
        mode=settings.prompts,
        seq_len=settings.seq_len,
        generate=settings.writes and type_of(task).generates,
        **optional_facts,
    )

    # load the file, or compute it
    place = folder / key
    selected_rows = list(rows) if keep is None else [rows[i] for i in keep]

    def compute() -> list[Question]:
        return questions(rows, task, shots, settings, keep=keep)

    if place.is_dir():
        cached = _load_or_remove(place, selected_rows, say)
        if cached is not None:
            return cached
    return _make_once(place, selected_rows, compute)


def pack_questions(asked: Sequence[Question]) -> bytes:
    """Serialize questions without their rows, for another process."""
    file = io.BytesIO()
    save_questions(file, asked)
    return file.getvalue()


def unpack_questions(packed: bytes, rows: Sequence[TaskRow]) -> list[Question]:
    """Return the questions that `pack_questions` serialized, with the same rows."""
    return load_questions(io.BytesIO(packed), rows)


def save_questions(file: Path | IO[bytes], asked: Sequence[Question]) -> None:
    """Write questions without their rows."""
    # all token sequences, each as its difference from the previous one
    shared: list[int] = []
    added: list[int] = []
    ids: list[int] = []
    previous: tuple[int, ...] = ()
    for tokens in _sequences(asked):
        n = common_prefix(previous, tokens)
        shared.append(n)
        added.append(len(tokens) - n)
        ids.extend(tokens[n:])
        previous = tokens

    # texts as JSON, numbers as arrays
    requests = [request for question in asked for request in question.requests]
    prompts = [question.prompt for question in asked if question.prompt is not None]
    texts = {
        "requests": [request.text for request in requests],
        "prompts": [
            [prompt.text, prompt.stops, prompt.messages, prompt.tools] for prompt in prompts
        ],
        "problems": [question.problem for question in asked],
    }
    arrays = {
        "n_requests": [len(question.requests) for question in asked],
        "max_new_tokens": [q.prompt.max_new_tokens if q.prompt else 0 for q in asked],
        "dropped": [question.dropped for question in asked],
        "truncated": [int(question.truncated) for question in asked],
        "n_targets": [len(request.targets) for request in requests],
        "last_target": [request.targets[-1] for request in requests],
        "shared": shared,
        "added": added,
        "ids": ids,
    }
    content: dict[str, Any] = {name: np.array(values, np.int32) for name, values in arrays.items()}
    content["texts"] = np.frombuffer(json.dumps(texts).encode(), np.uint8)
    np.savez_compressed(file, **content)


def load_questions(file: Path | IO[bytes], rows: Sequence[TaskRow]) -> list[Question]:
    """Read the questions that `save_questions` wrote, with the same rows.

    Raises:
        Exception: the file is damaged. The type may be any of zipfile, zlib, numpy and json. Data
            that can be read is correct, because every array has a checksum.
    """
    # read the arrays and texts
    with np.load(file) as content:
        texts = json.loads(content["texts"].tobytes())
        arrays = {name: content[name].tolist() for name in content.files if name != "texts"}
    if len(arrays["n_requests"]) != len(rows):
        raise ValueError(f"holds {len(arrays['n_requests'])} questions, not {len(rows)}")
    sequences = _joined(arrays["shared"], arrays["added"], arrays["ids"])
    per_request = zip(arrays["n_targets"], arrays["last_target"], texts["requests"], strict=True)
    prompts = iter(texts["prompts"])
    names = ("n_requests", "max_new_tokens", "dropped", "truncated")
    facts = zip(rows, *(arrays[name] for name in names), texts["problems"], strict=True)

    # rebuild the questions in the order in which they were written
    result = []
    for row, n_requests, n_new, dropped, truncated, problem in facts:
        requests = []
        for _ in range(n_requests):
            tokens, (n_targets, last, text) = next(sequences), next(per_request)
            targets = (*tokens[len(tokens) - n_targets + 1 :], last)
            requests.append(ScoreRequest(tokens, targets, text))
        prompt = None
        if n_new:
            text, stops, *messages_and_tools = next(prompts)
            chat_fields = (tuple(part) for part in messages_and_tools)
            prompt = GenerationPrompt(next(sequences), text, tuple(stops), n_new, *chat_fields)
        result.append(Question(row, tuple(requests), prompt, dropped, bool(truncated), problem))
    return result


def _load_or_remove(
    place: Path, rows: Sequence[TaskRow], say: Callable[[str], None]
) -> list[Question] | None:
    """Return the questions in a folder; if they cannot be read, remove it and return None."""
    try:
        return load_questions(place / _FILE, rows)
    except Exception as error:  # see load_questions
        say(f"{place / _FILE}: cannot be read ({error}); the prompts are made again")
    try:
        with lock_build(place):
            try:
                return load_questions(place / _FILE, rows)  # another process has replaced it
            except Exception:
                shutil.rmtree(place)
    except OSError:
        pass  # the file of another user; `_make_once` then works without the cache
    return None


def _make_once(
    place: Path, rows: Sequence[TaskRow], compute: Callable[[], list[Question]]
) -> list[Question]:
    """Compute and store questions, or wait for another process that does and load them."""
    computed: list[list[Question]] = []

    def build(temporary: Path) -> None:
        computed.append(compute())
        with (temporary / _FILE).open("wb") as file:
            save_questions(file, computed[0])

    build_once(place, build)
    if computed:
        return computed[0]
    try:
        return load_questions(place / _FILE, rows)
    except Exception:  # damaged (reported before), and not removable by this user
        return compute()


def _sequences(asked: Sequence[Question]) -> Iterator[tuple[int, ...]]:
    """Yield every token sequence of the questions, in the order of the file."""
    for question in asked:
        yield from (request.tokens for request in question.requests)
        if question.prompt is not None:
            yield question.prompt.tokens


def _joined(
    shared: Sequence[int], added: Sequence[int], ids: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Rebuild the sequences of `_sequences` from their differences.

    Args:
        shared: number of first tokens that each sequence shares with the previous one.
        added: number of its other tokens.
        ids: the other tokens of all sequences.
    """
    sequence: tuple[int, ...] = ()
    start = 0
    for n_shared, n_added in zip(shared, added, strict=True):
        sequence = (*sequence[:n_shared], *ids[start : start + n_added])
        start += n_added
        yield sequence
