"""Chat templates: the text that transformers gives, special tokens, hostile templates."""

from __future__ import annotations

import json
import pickle

import jinja2
import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models

from llmfoundry import bounded
from llmfoundry.data.preparation.build_tokenizer import build_tokenizer
from llmfoundry.data.text import chat_template
from llmfoundry.data.text.chat_template import NAMED, ChatTemplate
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig, TokenizerConfig
from llmfoundry.recipe.schema import CHAT_TEMPLATES
from tests.data.hostile_templates import HOSTILE, REFUSED

TOOLS = [{"type": "function", "function": {"name": "f", "description": "it's", "parameters": {}}}]
CALLS = [
    {"type": "function", "function": {"name": "f", "arguments": {"a": "é<"}}},
    {"function": {"name": "g", "arguments": '{"b": 1}'}},
]
OBJECTS = [CALLS[0], {"function": {"name": "g", "arguments": {"b": 1}}}]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi, <|im_end|>"}
ANSWER = {"role": "assistant", "content": " Hello. "}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER, ANSWER],
    [USER, ANSWER, USER, {"role": "assistant", "content": None, "tool_calls": CALLS}],
    [USER, {"role": "assistant", "content": "", "tool_calls": CALLS},
     {"role": "tool", "content": "3"}, ANSWER],
]  # fmt: skip

GOLDEN = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "zephyr": "<|system|>\nBe brief.<|endoftext|>\n<|user|>\nHi<|endoftext|>\n"
    "<|assistant|>\nHello<|endoftext|>\n<|assistant|>\n",
}
GOLDEN["mpt"] = GOLDEN["chatml"]


def test_the_recipe_lists_the_named_templates():
    assert tuple(NAMED) == CHAT_TEMPLATES


def bytes_tokenizer(template: str) -> Tokenizer:
    config = TokenizerConfig(name="bytes", chat_template=template)
    return build_tokenizer(config, DataConfig(), progress=False)


@pytest.mark.parametrize("name", NAMED)
def test_a_saved_tokenizer_gives_the_same_text_and_ids_in_transformers(name, tmp_path):
    tokenizer = bytes_tokenizer(name)
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    again = pickle.loads(pickle.dumps(Tokenizer.load(tmp_path)))
    for messages in CONVERSATIONS:
        objects = [m | {"tool_calls": OBJECTS} if m.get("tool_calls") else m for m in messages]
        for tools in (None, TOOLS):
            for prompt in (False, True):
                asked = {"add_generation_prompt": prompt, "tools": tools}
                try:
                    text = tokenizer.chat.render(messages, **asked)
                except UserError:
                    with pytest.raises(jinja2.TemplateError):
                        theirs.apply_chat_template(objects, tokenize=False, **asked)
                    continue
                assert text == theirs.apply_chat_template(objects, tokenize=False, **asked)
                assert text == again.chat.render(messages, **asked)
                ids = theirs.apply_chat_template(objects, return_dict=False, **asked)
                assert tokenizer.encode_chat(text) == ids == again.encode_chat(text)


@pytest.mark.parametrize("name", GOLDEN)
def test_named_templates_write_what_they_always_wrote(name):
    turns = [SYSTEM, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    special = {"eos_token": "<|endoftext|>", "bos_token": "<|begin_of_text|>"}
    template = ChatTemplate(bytes_tokenizer(name).chat.text, special)
    assert template.render(turns, add_generation_prompt=True) == GOLDEN[name]
    without = template.render(turns[1:2])
    assert ("system" in without) == (name == "mpt")  # which has a system message of its own


@pytest.mark.parametrize(
    ("name", "end"),
    [("chatml", "<|im_end|>"), ("mpt", "<|im_end|>"), ("llama3", "<|eot_id|>"),
     ("zephyr", "<|endoftext|>")],
)  # fmt: skip
def test_the_end_of_a_turn_is_one_special_token(name, end):
    tokenizer = bytes_tokenizer(name)
    assert tokenizer.chat.end_of_turn == end
    (only,) = tokenizer.encode_chat(end)
    assert tokenizer.decode([only]) == end
    assert tokenizer.encode(end) == list(end.encode())  # a text that spells it has no token


def test_tokens_are_added_only_where_there_is_room():
    tokenizer = bytes_tokenizer("zephyr")
    assert tokenizer.vocab_size == 257
    with pytest.raises(UserError, match=r"chatml needs the tokens <\|im_start\|> <\|im_end\|>"):
        tokenizer.use_chat_template("chatml", room=1)
    assert tokenizer.vocab_size == 257 and "im_start" not in tokenizer.chat.text
    before = tokenizer.fingerprint
    assert tokenizer.use_chat_template("chatml", room=2) == ["<|im_start|>", "<|im_end|>"]
    assert tokenizer.vocab_size == 259 and tokenizer.fingerprint != before
    assert tokenizer.use_chat_template("mpt", room=0) == []


def test_tokens_of_a_recipe_are_special_and_known_elsewhere(tmp_path):
    tokenizer = bytes_tokenizer("zephyr")
    before = tokenizer.fingerprint
    tokenizer.add_tokens(["<|call|>", "<|result|>"], room=2)
    assert tokenizer.encode_chat("a<|result|>b<|call|>") == [97, 258, 98, 257]
    assert tokenizer.encode("<|call|>") == list(b"<|call|>")  # a text that spells it has no token
    assert (tokenizer.vocab_size, tokenizer.new_tokens) == (259, ("<|call|>", "<|result|>"))
    assert tokenizer.fingerprint != before
    with pytest.raises(
        UserError, match=r"add_tokens: <\|call\|> is a token .* \(id 257\); remove it"
    ):
        tokenizer.add_tokens(["<|new|>", "<|call|>"])
    with pytest.raises(
        UserError, match=r"2 tokens need as many rows, and the model has 1 free; wri"
    ):
        tokenizer.add_tokens(["<|new|>", "<|newer|>"], room=1)
    assert tokenizer.vocab_size == 259
    tokenizer.use_chat_template("chatml", room=2)
    assert tokenizer.new_tokens[2:] == ("<|im_start|>", "<|im_end|>")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("a<|result|>b<|call|>").input_ids == [97, 258, 98, 257]
    assert theirs.decode([97, 258], skip_special_tokens=True) == "a"
    assert Tokenizer.load(tmp_path).encode_chat("<|result|>") == [258]


def test_a_new_token_takes_no_id_of_another():
    """The library numbers new tokens from the size of a vocabulary, although ids may be larger."""
    backend = Backend(models.WordLevel({"a": 0, "<|endoftext|>": 1, "b": 4}, unk_token="a"))
    tokenizer = Tokenizer(backend, "<|endoftext|>")
    with pytest.raises(UserError, match="ids have gaps, and <y> would get the id 4 of another"):
        tokenizer.add_tokens(["<x>", "<y>"])


def test_templates_of_other_tokenizers_are_found_where_they_lie(tmp_path):
    bytes_tokenizer("zephyr").save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    file.write_text(json.dumps({**config, "chat_template": named}))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.chat.render([]), tokenizer.chat.render([], tools=TOOLS)) == ("A", "B")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.apply_chat_template([USER], tools=TOOLS, tokenize=False) == "B"
    (tmp_path / "chat_template.jinja").write_text("C")
    assert Tokenizer.load(tmp_path).chat.render([]) == "C"
    file.write_text(json.dumps({**config, "chat_template": [{"name": "rag", "template": "A"}]}))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"several templates \(rag\), and no default"):
        _ = Tokenizer.load(tmp_path).chat


def test_what_is_not_a_template_is_one_line(tmp_path):
    for content, message in [
        ("{% for m in messages %}", r"line 1: Unexpected end of template"),
        ("", "is empty"),
        (None, r"cannot read .*No such file.*write chatml, llama3, .*gpt-oss, or a Jinja file"),
    ]:
        file = tmp_path / "t.jinja"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        with pytest.raises(UserError, match=message) as error:
            bytes_tokenizer(str(file))
        assert (
            str(error.value).startswith("tokenizer.chat_template") and len(error.value.lines()) == 1
        )
    plain = build_tokenizer(TokenizerConfig(name="bytes"), DataConfig(), progress=False)
    assert not plain.has_chat
    with pytest.raises(UserError, match="the tokenizer has none; write zephyr"):
        _ = plain.chat


QUICK = ["squares", "slice", "tojson of nested lists", "sum of ranges", "padded by format",
         "padded by percent", "indent", "batch", "text doubles", "deep expression"]  # fmt: skip


def assert_stopped(text: str) -> None:
    with pytest.raises(UserError, match=r"^f: |the chat template|^tokenizer\.") as error:
        ChatTemplate(text, {}, file="f").render([USER])
    assert len(error.value.lines()) == 1


@pytest.mark.parametrize("name", QUICK)
def test_hostile_templates_end_soon_with_a_line(name, monkeypatch):
    monkeypatch.setattr(bounded, "CPU_SECONDS", 0.3)
    assert_stopped(HOSTILE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE.keys() - {*QUICK})
def test_all_hostile_templates_end_soon_with_a_line(name):
    assert_stopped(HOSTILE[name])


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_reach_out_are_refused(name):
    assert_stopped(REFUSED[name])


def test_own_templates_may_be_trusted(tmp_path):
    """A file of the recipe runs without bounds where the recipe says so, and in no other place."""
    file = tmp_path / "t.jinja"
    file.write_text("{% for i in range(3000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}A")
    ours = TokenizerConfig(name="bytes", chat_template=str(file), trust_chat_template=True)
    trusted = build_tokenizer(ours, DataConfig(), progress=False)
    trusted.save(tmp_path / "saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded, "CPU_SECONDS", 0.02)
        assert trusted.chat.render([USER]) == pickle.loads(pickle.dumps(trusted.chat)).render([])
        again = Tokenizer.load(tmp_path / "saved")
        with pytest.raises(UserError, match=rf"^{again.template_file}: took more than 0.02\d* s"):
            again.chat.render([USER])
        template_file = str(tmp_path / "saved" / "tokenizer_config.json")
        assert again.template_file.startswith(template_file)
    (problem,) = TokenizerConfig(name="bytes", trust_chat_template=True).check()
    assert problem.startswith("tokenizer.trust_chat_template: has no effect without a file")


def test_templates_of_this_package_need_no_child(monkeypatch):
    monkeypatch.setattr(chat_template, "run_bounded", None)
    for name in NAMED:
        assert bytes_tokenizer(name).chat.render([USER])
    with pytest.raises(TypeError):
        ChatTemplate("A", {})
