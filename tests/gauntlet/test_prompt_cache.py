"""The cache of prompts: equal questions, found by content, safe to share, mended when damaged."""

from __future__ import annotations

import dataclasses
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gauntlet_stand_ins import questions
from prompt_tokenizers import CountingTokenizer, byte_tokenizer, trained_tokenizer

from llmfoundry.data.text.tokenizer import SpecialTokens, Tokenizer
from llmfoundry.gauntlet.prompts.question_cache import (
    cached_questions,
    load_questions,
    save_questions,
)
from llmfoundry.gauntlet.questions import (
    GenerationPrompt,
    PromptSettings,
    Question,
    ScoreRequest,
    TaskConfig,
    TaskRow,
)

CHOICE, GENERATION = "multiple_choice", "generation_task_with_answers"
TOKENIZER = byte_tokenizer()


def task(kind: str = CHOICE, **keys: Any) -> TaskConfig:
    return TaskConfig("sums", "sums.jsonl", kind, [0], **keys)


def rows(n: int = 6, kind: str = CHOICE) -> list[TaskRow]:
    if kind == CHOICE:
        return [TaskRow((f"q{i} é",), (f"a{i}", "bb"), i % 2, f"f:{i}") for i in range(n)]
    return [
        TaskRow((f"q{i}",), (f"a{i}",), 0, f"f:{i}", aliases=(f"a{i}",), chain_of_thought="as é")
        for i in range(n)
    ]


def ask(
    folder: Path,
    some: list[TaskRow],
    config: TaskConfig | None = None,
    shots: int = 2,
    **keys: Any,
) -> list[Question]:
    said = keys.pop("said", [])
    keep, mode = keys.pop("keep", None), keys.pop("mode", "native")
    settings = PromptSettings(**{"tokenizer": TOKENIZER, "seq_len": 99, "prompts": mode, **keys})
    return cached_questions(
        some, config or task(), shots, settings, folder=folder, say=said.append, keep=keep
    )


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.npz"))


def no_tokenizer() -> Tokenizer:
    class Refusing(CountingTokenizer):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            raise AssertionError("tokenized again")

    return Refusing(TOKENIZER)


@pytest.mark.parametrize("mode", ["native", "foundry"])
@pytest.mark.parametrize("kind", [CHOICE, GENERATION])
@pytest.mark.parametrize("seq_len", [24, 99])
def test_the_second_call_gives_equal_questions_without_tokenizing(
    tmp_path: Path, mode: str, kind: str, seq_len: int
) -> None:
    some, config = rows(kind=kind), task(kind, early_stopping_criteria=["\n\n", "Q:"])
    keys: dict[str, Any] = {"mode": mode, "seq_len": seq_len, "keep": [4, 1, 2]}
    expected = questions(some, config, 2, TOKENIZER, **keys)
    assert ask(tmp_path, some, config, **keys) == expected
    again = ask(tmp_path, some, config, tokenizer=no_tokenizer(), **keys)
    assert again == expected
    assert all(q.row is some[i] for q, i in zip(again, [4, 1, 2], strict=True))


def test_what_is_saved_is_loaded_whatever_the_tokens(tmp_path: Path) -> None:
    draw = random.Random(0)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(draw.choice([0, 7, 200_000, 2**31 - 1]) for _ in range(n))

    asked = []
    for i in range(50):
        requests = []
        for n in draw.choices([1, 2, 9], k=draw.randint(1, 4)):
            targets = tokens(n)
            requests.append(
                ScoreRequest((*tokens(draw.randint(1, 30)), *targets[:-1]), targets, "\u00e9\n")
            )
        prompt = GenerationPrompt(tokens(5), "p\ud83d", ("\n",), 3) if i % 3 else None
        row = TaskRow((str(i),), ("a",), 0, "f:1")
        asked.append(Question(row, tuple(requests), prompt, i % 5, bool(i % 2)))
    save_questions(tmp_path / "q.npz", asked)
    assert load_questions(tmp_path / "q.npz", [q.row for q in asked]) == asked
    with pytest.raises(ValueError, match="holds 50 questions, not 49"):
        load_questions(tmp_path / "q.npz", [q.row for q in asked][:49])


def test_all_that_decides_the_prompts_is_distinguished(tmp_path: Path) -> None:
    some = rows()
    changed_row = [*some[:-1], dataclasses.replace(some[-1], choices=("a5", "cc"))]
    variants: list[dict[str, Any]] = [
        {},
        {"some": changed_row},
        {"config": task(example_delimiter="\n\n")},
        {"config": task(fewshot_random_seed=1)},
        {"shots": 1},
        {"mode": "foundry"},
        {"seq_len": 98},
        {"keep": [0, 1]},
        {"keep": [1, 0]},
        {"special": SpecialTokens((7,), (), (), 256)},
        {"tokenizer": trained_tokenizer("ours")},
    ]
    for i, variant in enumerate(variants, start=1):
        ask(tmp_path, **({"some": some} | variant))
        assert len(files(tmp_path)) == i


def test_what_does_not_decide_the_prompts_shares_them(tmp_path: Path) -> None:
    first = ask(tmp_path, rows())
    moved = [dataclasses.replace(row, place="other:1") for row in rows()]
    other = dataclasses.replace(
        task(), label="others", dataset_uri="x", num_fewshot=[2, 5], choice_by="sum"
    )
    again = ask(tmp_path, moved, other, tokenizer=no_tokenizer())
    assert [q.requests for q in again] == [q.requests for q in first]
    assert again[0].row.place == "other:1"


def test_a_damaged_file_is_made_again_and_said(tmp_path: Path) -> None:
    expected = ask(tmp_path, rows())
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    damaged = [b"", whole[:100], whole[:-30], b"not a file of ours", None]
    for content in damaged:
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        said: list[str] = []
        assert ask(tmp_path, rows(), said=said) == expected
        (line,) = said
        assert line.startswith(f"{file}: cannot be read") and "made again" in line
        assert ask(tmp_path, rows(), tokenizer=no_tokenizer()) == expected


def test_no_changed_byte_changes_a_question(tmp_path: Path) -> None:
    expected = ask(tmp_path, rows())
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    n_said = 0
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x15]) + whole[place + 1 :])
        said: list[str] = []
        assert ask(tmp_path, rows(), said=said) == expected
        n_said += len(said)
    assert n_said > len(whole) / 7 / 3  # the rest is zip's dates, names' copies and the like


def test_a_damaged_file_that_cannot_be_removed_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(tmp_path, rows())
    (file,) = files(tmp_path)
    file.write_bytes(b"")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    said: list[str] = []
    assert ask(tmp_path, rows(), said=said) == expected
    assert len(said) == 1 and file.read_bytes() == b""


def test_of_several_at_once_one_tokenizes(tmp_path: Path) -> None:
    some = rows(200)
    counters = [CountingTokenizer(TOKENIZER) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda c: ask(tmp_path, some, tokenizer=c), counters))
    assert all(result == results[0] for result in results)
    assert sum(counter.characters > 1 for counter in counters) == 1
    assert len(files(tmp_path)) == 1
