"""Deduplication: against comparing every pair, whatever the tasks, and the same in years."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmfoundry.data.preparation.filters import (
    deduplicate,
    find_repeats,
    read_drops,
    searches,
    signatures,
    words,
)
from llmfoundry.errors import UserError

_VOCABULARY = [f"{a}{b}{c}" for a in "bdfklmnprst" for b in "aeiou" for c in "lmnrst"]


def _near() -> None:
    for name in ("datasketch", "xxhash"):
        pytest.importorskip(name, reason="extra: filters")


def _run(work: Any, tasks: Any) -> Iterator[Any]:
    """An engine whose tasks end in another order."""
    yield from map(work, reversed(tasks))


def _dropped(
    folder: Path, texts: list[str], method: str, n_tasks: int, max_bytes: int | None = None
) -> list[int]:
    """Numbers of the texts that are left out, the corpus being cut into so many tasks."""
    folder.mkdir()
    cuts = [len(texts) * n // n_tasks for n in range(n_tasks + 1)]
    sources = [folder / f"keys-{n:05}.npy" for n in range(n_tasks)]
    for n, source in enumerate(sources):
        part = texts[cuts[n] : cuts[n + 1]]
        assert signatures(iter(part), source, method=method) == len(part)
    drops = [read_drops(file) for file in deduplicate(folder, sources, _run)]
    assert [len(d) for d in drops] == list(np.diff(cuts))
    return np.flatnonzero(np.concatenate(drops)).tolist()


def _corpus(seed: int, n: int, n_words: int = 120) -> list[str]:
    """Documents of which a third repeats another: equal, or with a few words changed."""
    rng = random.Random(seed)
    texts: list[list[str]] = []
    for _ in range(n):
        if texts and rng.random() < 0.35:
            text = list(rng.choice(texts))
            for _ in range(rng.choice((0, 0, 1, 2, 4, 8, 16))):
                text[rng.randrange(len(text))] = rng.choice(_VOCABULARY)
        else:
            text = rng.choices(_VOCABULARY, k=n_words)
        texts.append(text)
    return [" ".join(text) for text in texts]


def _first_of_each(texts: list[str]) -> list[int]:
    return [n for n, text in enumerate(texts) if text in texts[:n]]


def _similarities(texts: list[str]) -> np.ndarray:
    """Jaccard similarity of the sets of 5 words, of every pair, from the sets themselves."""
    split = [text.lower().split() for text in texts]
    sets = [{tuple(w[i : i + 5]) for i in range(len(w) - 4)} for w in split]
    return np.array([[len(a & b) / len(a | b) for b in sets] for a in sets])


def _groups_after_the_first(linked: np.ndarray) -> list[int]:
    """Documents that are linked to an earlier one, through others too; slow and plain."""
    label = list(range(len(linked)))
    changed = True
    while changed:
        changed = False
        for a, b in zip(*np.nonzero(linked), strict=True):
            if label[a] != label[b]:
                label[a] = label[b] = min(label[a], label[b])
                changed = True
    return [n for n, first in enumerate(label) if first != n]


@pytest.mark.parametrize("n_tasks", [1, 3, 7])
def test_exact_keeps_the_first_of_equal_texts(tmp_path: Path, n_tasks: int) -> None:
    texts = [*_corpus(1, 200), "a", "a ", "A", "a", "", "", "é", "e\u0301"]
    assert _dropped(tmp_path / "x", texts, "exact", n_tasks) == _first_of_each(texts)


def test_minhash_finds_near_repeats_and_nothing_else(tmp_path: Path) -> None:
    _near()
    texts = _corpus(2, 300)
    similar = _similarities(texts)
    dropped = set(_dropped(tmp_path / "x", texts, "minhash", 4))
    # Pairs of 0.9 share a band with 0.9995; pairs below 0.3 with 0.001.
    assert set(_groups_after_the_first(similar >= 0.9)) <= dropped
    assert dropped <= set(_groups_after_the_first(similar >= 0.3))
    assert len(dropped) > 60


def test_minhash_compares_words_alone(tmp_path: Path) -> None:
    _near()
    text = "One two, three (four) five SIX seven."
    same = "one  two three\nfour five six seven"
    other = "one two three four five six eight"
    texts = [text, same, other, "...", "...", "!", "a", "A"]
    assert _dropped(tmp_path / "x", texts, "minhash", 2) == [1, 4, 7]
    assert words("Größe 3\u4e2d\u6587b_c") == ["größe", "3", "\u4e2d", "\u6587", "b", "c"]
    ascii = "".join(map(chr, range(128)))
    assert words(ascii + " é") == [*words(ascii), "é"]


@pytest.mark.parametrize("method", ["exact", "minhash"])
def test_tasks_and_ranges_do_not_change_what_is_dropped(tmp_path: Path, method: str) -> None:
    if method == "minhash":
        _near()
    texts = _corpus(3, 60)
    found = {tuple(_dropped(tmp_path / str(n), texts, method, n)) for n in (1, 2, 5, 70)}
    sources = [tmp_path / "5" / f"keys-{n:05}.npy" for n in range(5)]
    whole, cut = searches(sources), searches(sources, max_bytes=1000)
    assert len(cut) == 4 * len(whole)
    pairs = []
    for number, tasks in enumerate((whole, cut)):
        files = [tmp_path / f"{number}-{task.key}-{task.part}.npy" for task in tasks]
        for task, file in zip(tasks, files, strict=True):
            find_repeats(sources, file, search=task)
        pairs.append({tuple(pair) for file in files for pair in np.load(file).tolist()})
    assert len(found) == 1 and pairs[0] == pairs[1]


def test_chains_of_repeats_are_one_group(tmp_path: Path) -> None:
    """Each is near the next only: all go but the first, as in the slow reference."""
    _near()
    rng = random.Random(4)
    text = rng.choices(_VOCABULARY, k=300)
    texts = []
    for n in range(40):
        text[7 * n] = "changed"
        texts.append(" ".join(text))
    rng.shuffle(texts)
    assert _similarities(texts).min() < 0.3
    assert _dropped(tmp_path / "x", texts, "minhash", 3) == list(range(1, 40))


def test_what_was_finished_before_a_kill_is_used(tmp_path: Path) -> None:
    texts = _corpus(5, 60)
    assert _dropped(tmp_path / "x", texts, "exact", 3)
    sources = sorted((tmp_path / "x").glob("keys-*"))

    def no_engine(work: Any, tasks: Any) -> Iterator[Any]:
        raise AssertionError("nothing is left to do")

    before = {file: file.read_bytes() for file in (tmp_path / "x").iterdir()}
    deduplicate(tmp_path / "x", sources, no_engine)
    (tmp_path / "x" / "drops-00001.npy").unlink()
    deduplicate(tmp_path / "x", sources, _run)
    assert {file: file.read_bytes() for file in (tmp_path / "x").iterdir()} == before


def test_keys_stay_the_same_over_versions_and_machines(tmp_path: Path) -> None:
    """Two runs years apart leave out the same documents: hashes are part of the format."""
    _near()
    text = "The quick brown fox jumps over the lazy dog, and then it sleeps."
    signatures([text], tmp_path / "near", method="minhash")
    signatures([text], tmp_path / "same", method="exact")
    near = np.load(tmp_path / "near")["key"][:, 0]
    same = np.load(tmp_path / "same")[0, 0]
    assert near[:3].tolist() == [0x3B38A2F3D9074EA9, 0x5DF7D781190D5946, 0x9268C81703041A5B]
    assert same.tolist() == (0x8A20D129C54B6955, 0xC1EA52FD733B5771, 0)


def test_a_missing_library_is_a_user_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    line = r"minhash needs the package datasketch; .*llmfoundry-recipes\[filters\]"
    with pytest.raises(UserError, match=line):
        signatures(["text"], tmp_path / "x", method="minhash")
