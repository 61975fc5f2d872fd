"""Text as tokens come, against the whole answer decoded at once and cut by `str.partition`."""

from __future__ import annotations

import codecs
import itertools
import random

import pytest

from llmfoundry.data.text.bpe import END_OF_TEXT, bytes_backend, train_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.inference.text import TextStream

WORDS = ["stop", "ST", "OP", " ", "\n", "é", "☃", "𝄞", "a", "aab", "END", "EN", "\n\n", "👩‍🚀"]


@pytest.fixture(scope="module")
def tokenizers() -> list[Tokenizer]:
    corpus = ["".join(random.Random(n).choices(WORDS, k=60)) for n in range(50)]
    learned = train_backend(corpus, 320, progress=False)
    return [Tokenizer(bytes_backend(), END_OF_TEXT), Tokenizer(learned, END_OF_TEXT)]


def read_again(tokenizer: Tokenizer, tokens: list[int], stops: list[str]) -> tuple[str, bool]:
    """The answer, from all its tokens decoded anew after each: up to the first complete stop."""
    for n in range(len(tokens) + 1):
        text = tokenizer.decode(tokens[:n]).rstrip("\ufffd")
        if found := [text.find(stop) for stop in stops if stop in text]:
            return text[: min(found)], True
    return tokenizer.decode(tokens), False


@pytest.mark.parametrize("seed", range(60))
def test_the_text_ends_before_the_first_stop_string(tokenizers: list[Tokenizer], seed: int) -> None:
    draw = random.Random(seed)
    tokenizer = tokenizers[seed % 2]
    prompt = tokenizer.encode("".join(draw.choices(WORDS, k=5)))
    tokens = tokenizer.encode("".join(draw.choices(WORDS, k=25)))
    stops = draw.sample(["STOP", "END", "aa", "\n\n\n", "☃☃", "never", "aaba"], k=draw.randrange(4))
    stream = TextStream(tokenizer.decode, stops=stops, prompt=prompt)
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    text, stopped = read_again(tokenizer, tokens, stops)
    assert ("".join([*pieces, stream.close()]), stream.stopped) == (text, stopped)
    assert not any("\ufffd" in piece for piece in pieces)


def test_what_may_become_a_stop_string_waits(tokenizers: list[Tokenizer]) -> None:
    stream = TextStream(tokenizers[0].decode, stops=["STOP", "OPERA"])
    assert [stream.push(token) for token in b"a SOP"] == ["a", " ", "", "S", ""]
    assert [stream.push(token) for token in b"EN"] == ["", "OPEN"]


def test_half_a_character_waits_and_ends_as_a_replacement(tokenizers: list[Tokenizer]) -> None:
    stream = TextStream(tokenizers[0].decode)
    assert [stream.push(token) for token in "☃".encode()] == ["", "", "☃"]
    assert stream.push("☃".encode()[0]) == ""
    assert stream.close() == "\ufffd"


def test_a_character_begun_by_the_prompt_is_completed(tokenizers: list[Tokenizer]) -> None:
    snowman = "☃".encode()
    stream = TextStream(tokenizers[0].decode, prompt=[*b"a ", *snowman[:2]])
    assert stream.push(snowman[2]) + stream.push(ord("!")) + stream.close() == "☃!"


def characters_of(data: bytes) -> list[int]:
    """Of each byte, which character of `data.decode(errors="replace")` it is in."""
    broken: list[tuple[int, int]] = []

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        broken.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("noted", note)
    text, ends = data.decode(errors="noted"), dict(broken)
    places: list[int] = []
    for place, character in enumerate(text):
        start = len(places)
        end = ends.get(start, start + len(character.encode()))
        places += [place] * (end - start)
    return places


@pytest.mark.parametrize("seed", range(40))
def test_each_tokens_start_is_exact_whatever_is_broken(
    tokenizers: list[Tokenizer], seed: int
) -> None:
    draw = random.Random(seed)
    tokenizer = tokenizers[seed % 2]
    data = bytes("".join(draw.choices([*WORDS, "\ufffd"], k=8)), "utf-8")
    byte_ids = [next(iter(ids)) for ids in map(tokenizer.encode, map(chr, range(128)))]
    ids = tokenizer.encode(data.decode())
    for _ in range(seed % 4):  # tokens left out, doubled, moved
        ids[draw.randrange(len(ids))] = draw.choice([*ids, *byte_ids])
    ids = ids[draw.randrange(3) : len(ids) - draw.randrange(3)]
    spelled = [tokenizer.spelled(token) for token in ids]
    places = [*characters_of(b"".join(spelled)), -1]
    firsts = itertools.accumulate(map(len, spelled), initial=0)
    stream = TextStream(tokenizer.decode)
    text = "".join(map(stream.push, ids)) + stream.close()
    assert text == tokenizer.decode(ids)
    assert stream.starts == [places[first] for first in firsts][: len(ids)]
