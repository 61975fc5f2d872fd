"""Conversations: what the model reads, where an answer ends, commands of the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import pytest

from llmfoundry.cli.commands import chat as commands
from llmfoundry.data.text.bpe import END_OF_TEXT, bytes_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.inference.text import Conversation, stream_text


class Model:
    """Writes what it is asked to, a byte at a time; keeps what it read."""

    def __init__(self, *texts: str, template: str = "zephyr") -> None:
        self.tokenizer = Tokenizer(bytes_backend(), END_OF_TEXT)
        self.tokenizer.use_chat_template(template)
        self.texts, self.read, self.rooms = list(texts), list[str](), list[int]()

    def draw(self, ids: list[int], room: int) -> Iterator[int]:
        self.read.append(self.tokenizer.decode(ids))
        self.rooms.append(room)
        yield from self.tokenizer.encode_chat(self.texts.pop(0))[:room]

    def conversation(self, window: int = 1000, new: int = 100, **more: str) -> Conversation:
        return Conversation(self.tokenizer, self.draw, window=window, max_new_tokens=new, **more)  # type: ignore[arg-type]


def until(pieces: list[str], stop: str) -> list[str]:
    """What is shown of a text whose tokens are these pieces."""

    def decode(ids: Sequence[int]) -> str:
        return "".join(pieces[i] for i in ids)

    return list(stream_text(range(len(pieces)), decode, stops=[stop]))


@pytest.mark.parametrize("cuts", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("text", ["a<|im_end|>\nb", "<|im_end|>", "a<|im_<|im_end|>", "a<|im_en"])
def test_an_answer_ends_before_the_end_of_its_turn_however_it_comes(text: str, cuts: int) -> None:
    pieces = [text[i : i + cuts] for i in range(0, len(text), cuts)]
    assert "".join(until(pieces, "<|im_end|>")) == text.partition("<|im_end|>")[0]


def test_text_is_not_held_back_where_no_end_can_begin() -> None:
    assert until(["ab", "c<", "d"], "<|") == ["ab", "c", "<d"]


@pytest.mark.parametrize("template", ["zephyr", "chatml"])
def test_the_model_reads_every_turn_by_the_template(template: str) -> None:
    end = {"zephyr": "<|endoftext|>", "chatml": "<|im_end|>"}[template]
    model = Model(f"one{end}\nrest", "two", template=template)
    conversation = model.conversation(system="Be brief.")
    assert "".join(conversation.ask("first?")) == "one"
    assert "".join(conversation.ask("second?")) == "two"
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first?"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "second?"},
    ]
    assert model.read[1] == model.tokenizer.chat.render(said, add_generation_prompt=True)
    assert conversation.messages == [*said, {"role": "assistant", "content": "two"}]


def test_an_answer_that_is_broken_off_was_said_as_far_as_it_was() -> None:
    conversation = Model("abcdef").conversation()
    pieces = conversation.ask("x")
    assert next(pieces) + next(pieces) == "ab"
    pieces.close()  # type: ignore[attr-defined]
    assert conversation.messages[-1] == {"role": "assistant", "content": "ab"}


def test_a_full_window_is_reported_and_reset_empties_it() -> None:
    model = Model("a" * 500, "b")
    conversation = model.conversation(window=120, new=500)
    assert len("".join(conversation.ask("x"))) == model.rooms[0] < 120
    with pytest.raises(UserError, match="the model reads 120 with its answer; write /reset"):
        conversation.ask("y" * 60)
    assert len(conversation.messages) == 2, "what was refused is not kept"
    conversation.reset()
    assert "".join(conversation.ask("x")) == "b"


def test_bytes_that_are_no_text_are_refused_and_forgotten() -> None:
    model = Model("b")
    conversation = model.conversation()
    with pytest.raises(UserError, match="is not UTF-8 text"):
        conversation.ask("a\udcff")
    assert conversation.messages == []
    assert "".join(conversation.ask("x")) == "b"


def test_a_tokenizer_without_a_template_is_one_line() -> None:
    tokenizer = Tokenizer(bytes_backend(), END_OF_TEXT)
    with pytest.raises(UserError, match="tokenizer has none; write zephyr"):
        Conversation(tokenizer, lambda ids, n: [], window=9, max_new_tokens=9)


def test_lines_of_a_pipe_are_messages_and_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model("one", "two", "three")
    conversation = model.conversation(system="S")
    typed = "a\n\nb\n/rest\n/reset\n/history\n/system\nc\n/exit\nd\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    commands.converse(commands.ChatRecipe(checkpoint="x"), conversation)
    shown = capsys.readouterr()
    assert shown.out == "one\ntwo\nthree\n"
    assert "/rest is not a command" in shown.err
    assert "did you mean '/reset'" in shown.err
    assert "system: S" in shown.err
    assert [("S" in read, "one" in read) for read in model.read] == [
        (True, False),
        (True, True),
        (False, False),
    ]
