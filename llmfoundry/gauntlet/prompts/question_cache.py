"""Questions kept on disk, so that a task is tokenized once for many runs, processes and users.

`Gauntlet` calls `cached_questions`. A file is found by what determines its content, and holds each
sequence of tokens as what it adds to the one before, as adjacent ones share most of their prompts.
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

_VERSION = 3  # raised when `questions` gives others for the same rows, or the file's form changes
_FILE = "questions.npz"

# Fields of a task without influence on its prompts; a new field counts until it is named here.
_WITHOUT_EFFECT = (
    "label",
    "dataset_uri",
    "num_fewshot",
    "metric_names",
    "max_seq_len",  # seq_len stands for it
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
    folder: Path,
    say: Callable[[str], None],
    keep: Sequence[int] | None = None,
) -> list[Question]:
    """What `questions` gives, from `folder` if it is there, else made and put there.

    Several processes may call this at the same time: one makes the file, the others wait.

    Args:
        rows: all rows of the task; their places do not matter.
        task: its label, scoring and source do not matter: equal prompts are shared.
        shots: number of worked examples.
        settings: how tasks become prompts; the tokenizer is known by its fingerprint.
        folder: where all prompts are kept.
        say: called when a file is damaged; it is made again.
        keep: indices of the rows to ask; unset: all.

    Raises:
        UserError: as `questions`, or `folder` cannot be written.
    """
    settings = settings.of(task)
    chat = settings.chat
    spoken: dict[str, Any] = (
        {"chat": chat.facts()} if chat is not None and uses_chat(rows, chat) else {}
    )
    if code := TASK_TYPES.origins[task.icl_task_type].code:  # of a plugin, which may change
        spoken["code"] = code
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
        **spoken,
    )
    place = folder / key
    asked = list(rows) if keep is None else [rows[i] for i in keep]

    def make() -> list[Question]:
        return questions(rows, task, shots, settings, keep=keep)

    if place.is_dir():
        found = _load_or_remove(place, asked, say)
        if found is not None:
            return found
    return _make_once(place, asked, make)


def pack_questions(asked: Sequence[Question]) -> bytes:
    """Questions without their rows, for another process."""
    file = io.BytesIO()
    save_questions(file, asked)
    return file.getvalue()


def unpack_questions(packed: bytes, rows: Sequence[TaskRow]) -> list[Question]:
    """What `pack_questions` packed, about the same rows."""
    return load_questions(io.BytesIO(packed), rows)


def save_questions(file: Path | IO[bytes], asked: Sequence[Question]) -> None:
    """Write questions, but not their rows."""
    shared: list[int] = []
    added: list[int] = []
    ids: list[int] = []
    before: tuple[int, ...] = ()
    for tokens in _sequences(asked):
        n = common_prefix(before, tokens)
        shared.append(n)
        added.append(len(tokens) - n)
        ids.extend(tokens[n:])
        before = tokens
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
    """Questions that `save_questions` wrote, about the same rows.

    Raises:
        Exception: of many unrelated kinds, from zipfile, zlib, numpy and json: it is damaged. What
            can be read is right, as every array of the file has a checksum.
    """
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
    result = []
    for row, n_requests, n_new, dropped, truncated, problem in facts:
        requests = []
        for _ in range(n_requests):
            tokens, (n_targets, last, text) = next(sequences), next(per_request)
            targets = (*tokens[len(tokens) - n_targets + 1 :], last)
            requests.append(ScoreRequest(tokens, targets, text))
        prompt = None
        if n_new:
            text, stops, *spoken = next(prompts)
            said = (tuple(part) for part in spoken)
            prompt = GenerationPrompt(next(sequences), text, tuple(stops), n_new, *said)
        result.append(Question(row, tuple(requests), prompt, dropped, bool(truncated), problem))
    return result


def _load_or_remove(
    place: Path, rows: Sequence[TaskRow], say: Callable[[str], None]
) -> list[Question] | None:
    """The questions in a folder; None where they cannot be read: then the folder is removed."""
    try:
        return load_questions(place / _FILE, rows)
    except Exception as error:  # see load_questions
        say(f"{place / _FILE}: cannot be read ({error}); the prompts are made again")
    try:
        with lock_build(place):
            try:
                return load_questions(place / _FILE, rows)  # another process was quicker
            except Exception:
                shutil.rmtree(place)
    except OSError:
        pass  # another user's: `_make_once` does without
    return None


def _make_once(
    place: Path, rows: Sequence[TaskRow], make: Callable[[], list[Question]]
) -> list[Question]:
    made: list[list[Question]] = []

    def build(temporary: Path) -> None:
        made.append(make())
        with (temporary / _FILE).open("wb") as file:
            save_questions(file, made[0])

    build_once(place, build)
    if made:
        return made[0]
    try:
        return load_questions(place / _FILE, rows)
    except Exception:  # damaged, said so, and not ours to remove
        return make()


def _sequences(asked: Sequence[Question]) -> Iterator[tuple[int, ...]]:
    """Every list of tokens, in the order of the file."""
    for question in asked:
        yield from (request.tokens for request in question.requests)
        if question.prompt is not None:
            yield question.prompt.tokens


def _joined(
    shared: Sequence[int], added: Sequence[int], ids: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """`_sequences` back from what each adds to the one before."""
    before: tuple[int, ...] = ()
    at = 0
    for n, more in zip(shared, added, strict=True):
        before = (*before[:n], *ids[at : at + more])
        at += more
        yield before
