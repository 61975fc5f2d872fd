"""What is learned of supervised rows: characters, tokens and labels, beside others' and by hand.

The goldens lie in golden/chats; their line `made` says by what. The conversations were written by
hand; what is learned of each was put together from its answers by a formula for each template (the
answer, its calls, the end of the turn), without the code that is tested here.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from llmfoundry.data.supervised.formats import example_of
from llmfoundry.data.supervised.loss_mask import EncodedDocument, Encoder, ExampleOptions, Segment
from llmfoundry.data.supervised.reader import RowReader
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.recipe.data import SupervisedConfig
from llmfoundry.recipe.source import SourceConfig

GOLDEN = Path(__file__).parent / "golden" / "chats"
TEMPLATES = ("chatml", "llama3", "zephyr", "mpt", "qwen2_5")


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


@cache
def tokenizer_with(template: str | None, *, bos: bool = False) -> Tokenizer:
    tokenizer = Tokenizer.load(GOLDEN / "tokenizer")
    backend, config = tokenizer._backend, dict(tokenizer._config)
    if bos:
        start = [("<s>", backend.token_to_id("<s>"))]
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=start)
    tokenizer = Tokenizer(backend, "<|endoftext|>", config)
    if template is not None:
        file = GOLDEN / f"{template}.jinja"
        tokenizer.use_chat_template(str(file) if file.is_file() else template)
    return tokenizer


def pieces_of(
    row: dict[str, Any], form: str, tokenizer: Tokenizer, **options: Any
) -> list[Segment]:
    chat = tokenizer.chat if tokenizer.has_chat else None
    (document,) = example_of(row, form, ExampleOptions(chat, **options)).documents
    return list(document.pieces)


def encoded(
    row: dict[str, Any],
    form: str,
    tokenizer: Tokenizer,
    prompts: str,
    responses: str,
    *,
    always_eos: bool = False,
) -> EncodedDocument:
    shortest = SupervisedConfig(target_prompts=prompts).shortest_target_prompt
    chat = tokenizer.chat if tokenizer.has_chat else None
    options = ExampleOptions(chat, responses == "last", bool(np.isfinite(shortest)))
    encoder = Encoder(tokenizer, shortest, always_eos=always_eos)
    (found,) = encoder(example_of(row, form, options).documents)
    return found


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_characters_learned_of_twenty_conversations(template):
    conversations = golden("conversations.json")
    assert len(conversations) == 20
    tokenizer = tokenizer_with(template)
    for conversation in conversations:
        row = {name: conversation[name] for name in ("messages", "tools") if name in conversation}
        pieces = pieces_of(row, "chat", tokenizer)
        answers = [piece.text for piece in pieces if piece.answer]
        assert answers == conversation["learned"][template], conversation["about"]
        whole = tokenizer.chat.render(row["messages"], tools=row.get("tools"))
        assert "".join(piece.text for piece in pieces) == whole


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_end_of_each_turn_is_learned(template):
    tokenizer = tokenizer_with(template)
    (end,) = tokenizer.encode_chat(tokenizer.chat.end_of_turn)
    for conversation in golden("conversations.json"):
        row = {name: conversation[name] for name in ("messages", "tools") if name in conversation}
        found = encoded(row, "chat", tokenizer, "none", "all")
        answers = sum(m["role"] == "assistant" for m in conversation["messages"])
        ends = [n for n, i in enumerate(found.ids) if i == end and found.weights[n]]
        last = found.ids[-1] == tokenizer.eos_id and end == tokenizer.eos_id
        assert len(ends) == answers + (last and template == "zephyr")  # whose end ends rows too
        assert found.weights[-1] == 1


def test_labels_are_llm_foundrys():
    cases, conversations = golden("llm_foundry.json")["cases"], golden("conversations.json")
    assert len(cases) == 101
    for case in cases:
        tokenizer = tokenizer_with(case["template"], bos=case["bos"])
        row, form = case["row"], "prompt_response"
        if case["template"] is not None:
            row, form = {"messages": conversations[row]["messages"]}, "chat"
        for setting, spans in case["learned"].items():
            found = encoded(row, form, tokenizer, *setting.split(), always_eos=True)
            assert found.ids.tolist() == case["ids"], case
            learned = np.zeros(len(found.ids))
            for begin, end in spans:
                learned[begin:end] = 1
            # Its first label is dropped when labels are shifted, as nothing is before it.
            assert found.weights[1:].tolist() == learned[1:].tolist(), (setting, case)
            assert found.weights[0] == 0


def test_published_formats_are_cut_where_llm_foundry_cuts_them():
    for case in golden("llm_foundry_mappings.json")["cases"]:
        reader = RowReader("data", SourceConfig(name="files", format=case["format"]))
        made = reader("row", case["row"])
        assert {k: v for k, v in made.items() if v is not None} == case["made"], case
        if case["format"] == "alpaca":  # the same where the set has no text of all three
            parts = {k: v for k, v in case["row"].items() if k != "text"}
            assert reader("row", parts) == case["made"]
            text = {"text": case["row"]["text"]}
            assert reader("row", text) == case["made"]


@pytest.mark.parametrize("template", ["llama3", "phi3", "qwen2_5"])
def test_labels_are_those_of_trls_assistant_mask(template):
    cases = [case for case in golden("trl.json")["cases"] if case["template"] == template]
    assert len(cases) > 8
    conversations = golden("conversations.json")
    tokenizer = tokenizer_with(template)
    for case in cases:
        conversation = conversations[case["conversation"]]
        row = {name: conversation[name] for name in ("messages", "tools") if name in conversation}
        pieces = pieces_of(row, "chat", tokenizer)
        assert "".join(piece.text for piece in pieces) == case["text"]
        found = encoded(row, "chat", tokenizer, "none", "all")
        mask = np.array([c == "1" for c in case["mask"]])
        ids = case["ids"]
        if template == "qwen2_5" and conversation["about"] == "white space around an answer":
            # One token of two line breaks lies across the prompt's end: no prompted model sees it.
            assert tokenizer.encode_chat("\n\n")[0] in ids
            continue
        if template == "qwen2_5":  # TRL marks the line break that a generation prompt ends with
            begins = mask & ~np.concatenate([[False], mask[:-1]])
            assert all(tokenizer.decode([ids[n]]).startswith("\n") for n in np.flatnonzero(begins))
            mask &= ~begins
        assert found.ids.tolist() == ids  # no end of text behind the end of the last turn
        assert (found.weights > 0).tolist() == mask.tolist(), conversation["about"]
        always = encoded(row, "chat", tokenizer, "none", "all", always_eos=True)  # LLM Foundry's
        assert always.ids.tolist() == ids + [tokenizer.eos_id] * (ids[-1] != tokenizer.eos_id)


def test_a_template_that_renders_earlier_answers_otherwise_is_split():
    """Phi-3's puts the end of text behind the last message only."""
    tokenizer = tokenizer_with("phi3")
    first = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    row = {
        "messages": [*first, {"role": "user", "content": "3"}, says("4"), first[0], says("5", 0)]
    }
    options = ExampleOptions(tokenizer.chat)
    made = example_of(row, "chat", options).documents  # of an answer that weighs nothing none
    assert [[piece.text for piece in document.pieces] for document in made] == [
        ["<|user|>\n1<|end|>\n<|assistant|>\n", "2<|end|>\n<|endoftext|>"],
        ["<|user|>\n1<|end|>\n<|assistant|>\n2<|end|>\n<|user|>\n3<|end|>\n<|assistant|>\n",
         "4<|end|>\n<|endoftext|>"],
    ]  # fmt: skip
    turns = {"messages": first * 2}
    pieces = pieces_of(turns, "chat", tokenizer, last_only=True)
    assert [piece.text for piece in pieces if piece.answer] == ["2<|end|>\n<|endoftext|>"]
    assert pieces[0].text.count("<|user|>") == 2
    with pytest.raises(ValueError, match="one row for each, which repeat its prompts"):
        pieces_of(turns, "chat", tokenizer, prompts=True)


def says(content: str, weight: float = 1) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "weight": weight}


def test_messages_weigh_what_they_say():
    tokenizer = tokenizer_with("chatml")
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bad", "weight": 0},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "good", "weight": 0.5},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "plain"},
    ]
    found = encoded({"messages": turns}, "chat", tokenizer, "none", "all")
    decode = lambda value: tokenizer.decode(found.ids[found.weights == value].tolist())  # noqa: E731
    assert decode(0.5) == "good<|im_end|>\n"
    assert decode(1) == "plain<|im_end|>\n"
    assert "bad" in decode(0)


@pytest.mark.parametrize(
    ("turn", "auto", "always"),
    [
        ("{{ m.content }}{{ eos_token }}", "b<|endoftext|>", "b<|endoftext|>"),
        ("{{ m.content }}{{ eos_token }}\n", "b<|endoftext|>\n", "b<|endoftext|>\n<|endoftext|>"),
        ("{{ m.content }}<|im_end|> \n", "b<|im_end|> \n", "b<|im_end|> \n<|endoftext|>"),
        ("{{ m.content }}\n", "b\n<|endoftext|>", "b\n<|endoftext|>"),
    ],
)
def test_an_end_of_text_is_put_behind_a_conversation_that_nothing_ends(
    tmp_path, turn, auto, always
):
    file = tmp_path / "turns.jinja"
    file.write_text(f"{{% for m in messages -%}} {turn} {{%- endfor %}}".replace(" {%-", "{%"))
    tokenizer = tokenizer_with.__wrapped__("chatml")
    tokenizer.use_chat_template(str(file))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for is_always, expected in ((False, auto), (True, always)):
        row = {"messages": turns}
        found = encoded(row, "chat", tokenizer, "none", "all", always_eos=is_always)
        assert tokenizer.decode(found.ids[found.weights > 0].tolist()) == expected


def test_a_vocabulary_of_words_is_cut_where_pieces_end():
    """SentencePiece's way writes a space before each text: a document is encoded as one."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(byte_fallback=True))
    words = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "isolated"), words])
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    conversations = [c for c in golden("conversations.json") if c["about"] != "angle brackets"]
    texts = [m["content"] or "" for c in conversations for m in c["messages"]] * 2
    special = [AddedToken(t, special=True) for t in ("</s>", "<|im_start|>", "<|im_end|>")]
    marks = "".join(chr(n) for n in range(32, 127)) + "\n"
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    backend.train_from_iterator([*texts, *marks], trainer)
    tokenizer = Tokenizer(backend, "</s>")
    tokenizer.use_chat_template("chatml")
    assert not tokenizer.byte_level
    for conversation in conversations:
        row = {name: conversation[name] for name in ("messages", "tools") if name in conversation}
        found = encoded(row, "chat", tokenizer, "none", "all")
        whole = tokenizer.chat.render(row["messages"], tools=row.get("tools"))
        if conversation["about"] != "white space around an answer":  # a token lies across an end
            assert found.ids.tolist() == tokenizer.encode_chat(whole)
        assert tokenizer.decode(found.ids.tolist()) == whole
        answers = "".join(conversation["learned"]["chatml"])
        learned = tokenizer.decode(found.ids[found.weights > 0].tolist())
        assert learned.removesuffix("</s>").split() == answers.split(), conversation["about"]


@pytest.mark.parametrize("kind", ["metaspace", "normalizer", "unigram"])
def test_a_prompt_and_its_answer_have_the_ids_of_their_whole_text(kind):
    """As SentencePiece encodes it, and as TRL cuts it; a token across the end is cut in two."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    backend = Backend(models.Unigram() if kind == "unigram" else models.BPE(byte_fallback=True))
    if kind == "normalizer":  # as Llama 2's tokenizer.json
        space = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        backend.normalizer = normalizers.Sequence(space)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    replace, fuse = decoders.Replace("\u2581", " "), decoders.Fuse()
    steps = [replace, decoders.ByteFallback(), fuse, decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    texts = ["What is two and two?", "four", "Answer:", "yes", "A: me"] * 20
    letters = sorted({*"".join(texts), "\n", "\u2581"})
    more: dict[str, Any] = {"special_tokens": ["</s>"], "show_progress": False}
    if kind == "unigram":
        trainer: Any = trainers.UnigramTrainer(initial_alphabet=letters, unk_token="</s>", **more)
    else:
        trainer = trainers.BpeTrainer(vocab_size=200, initial_alphabet=letters, **more)
    backend.train_from_iterator(texts, trainer)
    tokenizer = Tokenizer(backend, "</s>")
    assert not tokenizer.byte_level
    rows = [("What is two and two?", "four"), ("Answer:", "yes"), ("Answer:", " yes"),
            ("What is two?\n", "A: me"), ("two", "four"), ("W", "hat is two?")]  # fmt: skip
    n_across = 0
    for prompt, response in rows:
        row = {"prompt": prompt, "response": response}
        found = encoded(row, "prompt_response", tokenizer, "none", "all")
        whole = backend.encode(prompt + response, add_special_tokens=False)
        assert tokenizer.decode(found.ids.tolist()) == f"{prompt}{response}</s>"
        assert found.ids[found.weights == 0].tolist() == tokenizer.encode(prompt)
        is_across = any(begin < len(prompt) < end for begin, end in whole.offsets)
        assert is_across or found.ids.tolist() == [*whole.ids, tokenizer.eos_id]
        n_across += is_across
    assert n_across < 3
