"""Templates with {% generation %} marks: ids and masks beside transformers', on TRL's templates.

The referee is `apply_chat_template(..., return_assistant_tokens_mask=True)` of transformers with
the files that TRL ships. Where a conversation is split, each part is compared with the
conversation up to its answer, of which the last run of the mask counts.
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from llmfoundry.data.supervised.formats import Example, example_of, example_or_error
from llmfoundry.data.supervised.loss_mask import Encoder, ExampleOptions, SegmentedText
from llmfoundry.data.text.chat_template import template_of
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig

TRL = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
GOLDEN = Path(__file__).parent / "golden" / "chats" / "tokenizer"
BAR = "\uff5c"

CHATML = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
GEMMA = ("<start_of_turn>", "<end_of_turn>")
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>")
DEEPSEEK = tuple(f"<{BAR}{name}{BAR}>" for name in (
    "User", "Assistant", "end\u2581of\u2581sentence", "begin\u2581of\u2581sentence",
    "tool\u2581calls\u2581begin", "tool\u2581calls\u2581end", "tool\u2581call\u2581begin",
    "tool\u2581call\u2581end", "tool\u2581sep", "tool\u2581outputs\u2581begin",
    "tool\u2581outputs\u2581end", "tool\u2581output\u2581begin",
    "tool\u2581output\u2581end"))  # fmt: skip
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
       "<think>", "</think>", "<tool_call>", "</tool_call>")  # fmt: skip
GPT_OSS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
COHERE = ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
          "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>")  # fmt: skip
FAMILIES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "llama3": (None, LLAMA),
    "qwen2_5": ("qwen2.5", CHATML),
    "qwen3": ("qwen3", CHATML),
    "qwen3_instruct_2507": (None, CHATML),
    "qwen3_5_think": (None, CHATML),
    "qwen3_8": (None, CHATML),
    "phi3": ("phi3", PHI),
    "phi3_5": ("phi3.5", PHI),
    "gemma": ("gemma", GEMMA),
    "gemma3": ("gemma3", GEMMA),
    "deepseekv3": ("deepseek-v3", DEEPSEEK),
    "deepseek_r1_distill": ("deepseek-r1", DEEPSEEK),
    "glm4moe": ("glm4", GLM),
    "gptoss": ("gpt-oss", GPT_OSS),
    "cohere": (None, COHERE),
    "lfm2_v2": (None, CHATML),
    "nemotron_3_nano": (None, CHATML),
}
"""TRL's files by their stem: our named template with the same text, and special tokens."""


@cache
def backend(tokens: tuple[str, ...]) -> str:
    """A byte-level vocabulary with a family's special tokens."""
    made = Backend.from_file(str(GOLDEN / "tokenizer.json"))
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
    return made.to_str()


@cache
def ours(tokens: tuple[str, ...], text: str) -> Tokenizer:
    config = {"chat_template": text, "bos_token": "<s>"}
    made = Tokenizer(Backend.from_str(backend(tokens)), "<|endoftext|>", config)
    made.trusts_template = True  # rendering in a child has tests of its own
    return made


@cache
def theirs(tokens: tuple[str, ...], text: str) -> PreTrainedTokenizerFast:
    made = Backend.from_str(backend(tokens))
    special = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=text, **special)


def template(stem: str) -> str:
    return (TRL / f"{stem}.jinja").read_text()


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = [{"type": "function", "function": {"name": "sum", "arguments": {"a": [1, 2], "b": "é<"}}}]
TOOLS = [{"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "array", "items": {"type": "number"},
    "description": "numbers"}, "b": {"type": "string"}}, "required": ["a"]}}}]  # fmt: skip
TEXTS = [
    ("What is 2+2?", "4"),
    ("Hi", "Hello there, how may I help?\n"),
    (" leading and trailing ", "  two spaces, then two\n\n"),
    ("naïve café Ω", "日本語 🎉 emoji, combining e\u0301"),
    ("line\nbreaks\n\n", "\n\nfirst lines are empty"),
    ("code", "```python\ndef f(x):\n    return x\n```"),
    ("tabs\t\tand\r\nmore", "a\t- b\n\t- c"),
    ("<b>html</b> & {braces} {{ jinja }} {% raw %}", "I see {% generation %} & <i>marks</i>"),
    ("nbsp\u00a0zero\u200bwidth", "‏עברית‏ ok"),
    ("a", "."),
]


def rows() -> list[dict[str, Any]]:
    """40 conversations: turns, system messages, thoughts of both kinds, tools, odd white space."""
    found: list[dict[str, Any]] = []
    single = [[says("user", a), says("assistant", b)] for a, b in TEXTS]
    found += [{"messages": turns} for turns in single]
    found += [{"messages": [says("system", "Be brief."), *turns]} for turns in single[:4]]
    found += [{"messages": [says("system", " "), *single[0]]}]
    found += [{"messages": single[n] + single[n + 1]} for n in range(8)]
    found += [{"messages": [says("system", "Count.\n"), *single[0], *single[1], *single[5]]}]
    found += [{"messages": [turn for turns in single[:6] for turn in turns]}]
    thought = [says("user", "Think."), says("assistant", "4", reasoning_content="2 and 2 is 4.\n")]
    inline = [says("user", "Think."), says("assistant", "<think>\n2 and 2\n</think>\n\n4")]
    found += [{"messages": thought}, {"messages": inline}, {"messages": thought + single[1]}]
    found += [{"messages": thought * 2}, {"messages": inline * 2}, {"messages": inline + thought}]
    found += [{"messages": [says("system", "Be brief."), *inline, *single[2], *thought]}]
    found += [{"messages": single[3] + thought}]
    called = [says("user", "Add."), says("assistant", "", tool_calls=CALL)]
    said = [says("tool", "sum = 3", name="sum", tool_call_id="1")]
    found += [{"messages": called, "tools": TOOLS}]
    found += [{"messages": [*called, *said, says("assistant", "It is 3.")], "tools": TOOLS}]
    found += [{"messages": [*single[0], *called, *said, says("assistant", "3")], "tools": TOOLS}]
    found += [{"messages": single[0], "tools": TOOLS}]
    found += [{"messages": single[0], "chat_template_kwargs": {"enable_thinking": False}}]
    found += [{"messages": single[0] + thought, "chat_template_kwargs": {"enable_thinking": True}}]
    found += [{"messages": [says("user", ""), says("assistant", "an answer to nothing")]}]
    assert len(found) == 40
    return found


def documents(row: dict[str, Any], tokenizer: Tokenizer) -> tuple[SegmentedText, ...]:
    options = ExampleOptions.of(tokenizer.chat, last_only=False, prompts=False)
    return example_of(row, "chat", options).documents


def referee(
    row: dict[str, Any], n: int, tokenizer: PreTrainedTokenizerFast, *, last: bool
) -> tuple[list[int], np.ndarray]:
    """Ids and mask of the first `n` messages; `last`: of the mask only the last run."""
    asked = {"tools": row.get("tools"), **row.get("chat_template_kwargs", {})}
    made = tokenizer.apply_chat_template(
        row["messages"][:n], return_dict=True, return_assistant_tokens_mask=True, **asked
    )
    mask = np.array(made["assistant_masks"])
    if last:
        mask[: np.flatnonzero(np.diff(mask, prepend=0) == 1)[-1]] = 0
    return made["input_ids"], mask


def differing(row: dict[str, Any], tokens: tuple[str, ...], text: str) -> tuple[int, int] | None:
    """Documents of a row, and tokens that differ from transformers'; None: both refuse it."""
    mine, other = ours(tokens, text), theirs(tokens, text)
    try:
        made = documents(row, mine)
    except (UserError, ValueError) as error:
        assert "the chat template" in str(error)
        with pytest.raises(Exception):  # noqa: B017 - of Jinja, or what the template raises
            referee(row, len(row["messages"]), other, last=False)
        return None
    for piece in (piece for document in made for piece in document.pieces if piece.answer):
        assert piece.text.rstrip().endswith((*tokens, "<|endoftext|>"))  # so that it stops
    ends = [n + 1 for n, m in enumerate(row["messages"]) if m["role"] == "assistant"]
    ends = ends if len(made) > 1 else [len(row["messages"])]
    wrong = 0
    for end, found in zip(ends, Encoder(mine, float("inf"))(made), strict=True):
        ids, mask = referee(row, end, other, last=len(made) > 1)
        assert found.ids.tolist() == ids
        wrong += int(((found.weights[1:] > 0) != mask[1:].astype(bool)).sum())
    return len(made), wrong


@pytest.mark.parametrize("stem", FAMILIES)
def test_ids_and_masks_are_those_of_transformers(stem):
    tokens = FAMILIES[stem][1]
    found = [differing(row, tokens, template(f"{stem}_training")) for row in rows()]
    kept = [counts for counts in found if counts is not None]
    assert len(kept) == {"gemma": 31, "gemma3": 38, "cohere": 38}.get(stem, 40)
    assert not sum(wrong for _, wrong in kept)
    split = {"glm4moe": 5, "gptoss": 18, "nemotron_3_nano": 5}  # which drop earlier thoughts
    assert sum(parts > 1 for parts, _ in kept) == split.get(stem, 0)


NAMED_HERE = {named: stem for stem, (named, _) in FAMILIES.items() if named is not None}


@pytest.mark.parametrize("name", NAMED_HERE)
def test_a_named_template_writes_a_models_own_text_and_marks_what_is_asked_for(name):
    stem = NAMED_HERE[name]
    tokens, text = FAMILIES[stem][1], template_of(name)
    mine, trained = ours(tokens, text), theirs(tokens, template(f"{stem}_training"))
    published = theirs(tokens, template(stem))
    mine.chat.check_marks()
    for n, row in enumerate(rows()):
        counts, messages = differing(row, tokens, text), row["messages"]
        if counts is None:
            assert "tools" in row or name.startswith("gemma")  # which others leave out
            continue
        assert counts[1] == 0, n
        asked = {"tools": row.get("tools"), **row.get("chat_template_kwargs", {})}
        own = mine.chat.rendered(messages, tools=row.get("tools"), variables=asked)
        more = any("reasoning_content" in m or "tool_calls" in m for m in messages)
        if not (name == "deepseek-r1" and more):  # where TRL's leaves them out
            assert own.text == trained.apply_chat_template(messages, tokenize=False, **asked), n
        if len(messages) == 2 and "</think>" not in messages[1]["content"] and len(messages[1]) < 3:
            plain = published.apply_chat_template(messages, tokenize=False, **asked)
            assert own.text == plain + "<|user|>" * (name == "glm4"), n
            if name != "deepseek-r1" and asked.get("enable_thinking", True):
                prompt = mine.chat.render(
                    messages[:1], add_generation_prompt=True, tools=asked["tools"]
                )
                assert own.answers[0][0] == len(prompt)  # what is learned is what is asked for


@pytest.mark.parametrize(
    ("stem", "split"),
    [("qwen3", 19), ("phi3", 19), ("phi3_5", 19), ("gptoss", 18), ("glm4moe", 19), ("llama3", 0)],
)
def test_published_templates_are_split_where_they_change_earlier_answers(stem, split):
    tokens = FAMILIES[stem][1]
    mine, other = ours(tokens, template(stem)), theirs(tokens, template(stem))
    found = [documents(row, mine) for row in rows()]
    assert sum(len(made) > 1 for made in found) == split
    for row, made in zip(rows(), found, strict=True):
        ends = [n + 1 for n, m in enumerate(row["messages"]) if m["role"] == "assistant"]
        ends = ends if len(made) > 1 else ends[-1:]
        asked = {"tools": row.get("tools"), **row.get("chat_template_kwargs", {})}
        for end, document in zip(ends, made, strict=True):
            text = "".join(piece.text for piece in document.pieces)
            said = row["messages"][:end]
            assert text == other.apply_chat_template(said, tokenize=False, **asked)
            learned = "".join(piece.text for piece in document.pieces if piece.answer)
            thoughts = said[-1].get("reasoning_content", "").strip()
            if stem not in ("phi3", "phi3_5", "llama3"):  # which know of no thoughts
                assert thoughts in learned  # none is lost, as each answer is the last once
            (encoded,) = Encoder(mine, float("inf"))([document])
            assert encoded.weights[-1] == 1
            end = mine.eos * (stem == "glm4moe")  # which ends no turn; the others do it themselves
            assert mine.decode(encoded.ids.tolist()) == text + end


STRICT = {"type": "object", "required": ["city", "unit"], "properties": {
    "city": {"type": "string"}, "unit": {"type": ["string", "null"], "default": None}}}  # fmt: skip
CALLING = [f"{s}_training" for s in FAMILIES if s not in ("gemma", "gemma3", "cohere")]


def calling(arguments: Any) -> dict[str, Any]:
    """A row as OpenAI's strict mode writes it, where an argument that is null is written."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [says("user", "Oslo?"), says("assistant", "", tool_calls=[call])]
    messages += [says("tool", "3"), says("assistant", "3 degrees.")]
    tool = {"name": "f", "description": "Weather", "strict": None, "parameters": STRICT}
    return {"tools": [{"type": "function", "function": tool}], "messages": messages}


@pytest.mark.parametrize("stem", [*CALLING, "llama3_1", "qwen3_6", "gemma4_v5"])
def test_calls_are_transformers_with_null_arguments_and_with_arguments_as_a_json_text(stem):
    tokens, text = FAMILIES.get(stem.removesuffix("_training"), (None, ()))[1], template(stem)
    mine, other = ours(tokens, text), theirs(tokens, text)
    arguments = {"city": "Oslo", "unit": None, "in": [{"é": None}, None]}
    objects = calling(arguments)
    said, tools = objects["messages"], objects["tools"]
    rendered = other.apply_chat_template(said, tools=tools, tokenize=False)
    for row in (objects, calling(json.dumps(arguments, separators=(",", ":")))):
        made = documents(row, mine)[-1]
        assert "".join(piece.text for piece in made.pieces) == rendered


@pytest.mark.parametrize("stem", ["deepseekv3", None])
def test_a_template_that_takes_arguments_as_text_alone_gets_it(stem):
    text = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
    text += "{{ c.function.name ~ c.function.arguments }}{% endfor %}{% endfor %}"
    text = text if stem is None else template(stem)
    mine, other = ours(DEEPSEEK, text), theirs(DEEPSEEK, text)
    row = calling('{"city":"Oslo", "unit": null}')
    rendered = other.apply_chat_template(row["messages"], tokenize=False)
    assert '{"city":"Oslo", "unit": null}' in rendered
    assert mine.chat.render(row["messages"]) == rendered
    row = calling({"city": "Oslo", "unit": None})
    assert mine.chat.render(row["messages"]) == rendered.replace(':"O', ': "O')


ORDERS = (
    ("assistant", "user", "assistant"),
    ("system", "assistant", "user", "assistant"),
    ("user", "user", "assistant"),
    ("user", "assistant", "assistant"),
    ("developer", "user", "assistant"),
    ("user", "system", "assistant"),
)

TAKEN = {"llama3": 6, "qwen2_5": 6, "qwen3": 5, "qwen3_instruct_2507": 6, "qwen3_5_think": 3,
    "qwen3_8": 3, "phi3": 6, "phi3_5": 6, "gemma": 0, "gemma3": 1, "deepseekv3": 0,
    "deepseek_r1_distill": 0, "glm4moe": 6, "gptoss": 5, "cohere": 1, "lfm2_v2": 6,
    "nemotron_3_nano": 0}  # fmt: skip


@pytest.mark.parametrize("stem", FAMILIES)
def test_orders_are_accepted_where_transformers_renders_all_of_them(stem):
    """But where a template without marks does not begin an answer as it renders it."""
    tokens, accepted = FAMILIES[stem][1], 0
    mine, other = ours(tokens, template(stem)), theirs(tokens, template(stem))
    for roles in ORDERS:
        turns = [says(role, f"{role} says {n}.") for n, role in enumerate(roles)]
        known = "developer" in template(stem)
        shown = [
            t if known else t | {"role": t["role"].replace("developer", "system")} for t in turns
        ]
        try:
            text = other.apply_chat_template(shown, tokenize=False)
            beginnings = [
                other.apply_chat_template(shown[: n + 1], tokenize=False)
                for n, turn in enumerate(shown)
                if turn["role"] == "assistant"
            ]
        except Exception:
            text, beginnings = "", []
        is_whole = all(turn["content"] in text for turn in turns)
        if "{% generation" not in template(stem) and not beginnings:
            is_whole = False
        try:
            made = documents({"messages": turns}, mine)
        except (UserError, ValueError) as error:
            assert not is_whole or "does not begin an answer" in str(error), (roles, error)
            continue
        assert is_whole, roles
        accepted += 1
        found = "".join(piece.text for piece in made[-1].pieces)
        assert found == text
        learned = [p.text for document in made for p in document.pieces if p.answer and p.weight]
        answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        assert all(a in part for a, part in zip(answers, learned, strict=True)), roles
        assert not any(role in "".join(learned) for role in ("user says", "system says"))
    assert accepted == TAKEN[stem]


@pytest.mark.parametrize(
    ("stem", "variant"), [("deepseekv3", "deepseek-r1"), ("deepseek_r1_distill", "deepseek-r1")]
)
def test_a_template_that_cannot_be_learned_from_names_the_variant_that_can(stem, variant):
    mine = ours(DEEPSEEK, template(stem))
    with pytest.raises(ValueError, match=f"write tokenizer.chat_template: {variant}$"):
        documents(rows()[0], mine)


def test_marks_must_have_the_end_of_each_turn():
    text = template("qwen3_training")
    mine = ours(CHATML, text.replace("{{- '<|im_end|>\\n' }}\n        {%- endgeneration %}",
                "{%- endgeneration %}\n{{- '<|im_end|>\\n' }}"))  # fmt: skip
    with pytest.raises(UserError, match=r"leave out what ends an answer.*or write qwen3") as error:
        mine.chat.check_marks()
    assert len(error.value.lines()) == 1
    ours(CHATML, text).chat.check_marks()
    never = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if no %}"
    mine = ours(CHATML, never + "{% generation %}{% endgeneration %}{% endif %}")
    with pytest.raises(UserError, match="leave out answers"):
        mine.chat.check_marks()
    with pytest.raises(UserError, match="leave out answers"):
        documents(rows()[0], mine)
    sometimes = "{% for m in messages %}{% if m.content != '4' %}{% generation %}{{ m.content }}"
    mine = ours(CHATML, sometimes + "<|im_end|>{% endgeneration %}{% endif %}{% endfor %}")
    turns = [says("user", "4"), says("assistant", "4")]
    with pytest.raises(ValueError, match=r"marks no answer in it with {% generation %}"):
        example_of({"messages": turns}, "chat", ExampleOptions(mine.chat))


def test_what_a_template_leaves_out_is_noted():
    options = {stem: ExampleOptions(ours(FAMILIES[stem][1], template(stem)).chat)
               for stem in ("phi3", "qwen3", "glm4moe", "gptoss")}  # fmt: skip
    found = {stem: [example_of(row, "chat", options[stem]).warnings for row in rows()]
             for stem in options}  # fmt: skip
    assert not any(found["qwen3"]) and not any(found["glm4moe"]) and not any(found["gptoss"][:-1])
    missing = {name for names in found["phi3"] for name in names}
    names = ("reasoning", "tool calls", "tool results", "tools")
    assert missing == {f"with {name}" for name in names}
    assert found["phi3"][25] == (f"with {names[0]}",)
    assert found["phi3"][33][:1] == (f"with {names[1]}",)


def test_a_message_cannot_spell_a_mark_and_weights_are_kept():
    spelled = "{% endgeneration %}\ue012\ue013 \ue010x\ue011"
    turns = [says("user", "a"), says("assistant", spelled, weight=0), says("user", "b")]
    mine = ours(CHATML, template_of("qwen3"))
    (made,) = documents({"messages": [*turns, says("assistant", "good", weight=0.5)]}, mine)
    learned = [(piece.text, piece.weight) for piece in made.pieces if piece.answer]
    thoughts, end = "<think>\n\n</think>\n\n", "<|im_end|>\n"
    assert learned == [(f"{thoughts}{spelled}{end}", 0), (f"{thoughts}good{end}", 0.5)]
    options = ExampleOptions(mine.chat, last_only=True)
    (made,) = example_of({"messages": turns[:2] * 2}, "chat", options).documents
    assert [piece.weight for piece in made.pieces if piece.answer] == [0, 0]


def test_answers_that_are_compared_share_the_marked_prompt():
    mine = ours(CHATML, template_of("qwen3"))
    asked, options = [says("user", "a")], ExampleOptions(mine.chat)
    sides = {name: [says("assistant", name)] for name in ("chosen", "rejected")}
    made = example_of({"prompt": asked, **sides}, "preference", options).documents
    assert [document.side for document in made] == [1, -1] and made[0].prompt == made[1].prompt
    for document, name in zip(made, sides, strict=True):
        assert document.pieces[-1].text == f"<think>\n\n</think>\n\n{name}<|im_end|>\n"
    row = {"prompt": asked, "completion": sides["chosen"], "label": True}
    (one,) = example_of(row, "unpaired", options).documents
    assert one == made[0]


@pytest.mark.parametrize(
    ("name", "end"), [("phi3", "<|end|>"), ("gpt-oss", "<|return|>"), ("glm4", "<|user|>")]
)
def test_a_generation_stops_at_what_ends_every_answer(name, end):
    assert ours(FAMILIES[NAMED_HERE[name]][1], template_of(name)).chat.end_of_turn == end


@pytest.mark.parametrize(
    ("stem", "variables"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("qwen3", {"tools": TOOLS}),
        ("gptoss", {"reasoning_effort": "high", "model_identity": 'I\'m "é🎉" {% raw %}\n{{x}}'}),
        ("gptoss", {"tools": TOOLS, "builtin_tools": ["python"]}),
        ("glm4moe_training", {"enable_thinking": False}),
    ],
)
def test_variables_of_the_recipe_are_saved_in_the_template(stem, variables, tmp_path):
    tokens = FAMILIES[stem.removesuffix("_training")][1]
    mine, plain = ours(tokens, template(stem)), theirs(tokens, template(stem))
    mine = Tokenizer(Backend.from_str(backend(tokens)), mine.eos, dict(mine._config))
    before = mine.chat.fingerprint
    mine.set_chat_variables(variables, key="data.chat_template_kwargs")
    assert mine.chat.fingerprint != before
    mine.save(tmp_path)
    saved = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    for row in rows():
        for prompt in (False, True):
            messages = row["messages"][:-1] if prompt else row["messages"]
            asked = {"add_generation_prompt": prompt, "tools": None, **variables}
            expected = plain.apply_chat_template(messages, tokenize=False, **asked)
            text = loaded.chat.render(messages, add_generation_prompt=prompt)
            assert text == expected
            asked = {"add_generation_prompt": prompt, "tokenize": False}
            assert saved.apply_chat_template(messages, **asked) == expected
    with pytest.raises(UserError, match=r"kwargs.enable_thinkin: the chat template does not read"):
        mine.set_chat_variables({"enable_thinkin": True}, key="data.chat_template_kwargs")


def test_a_rows_own_variables_and_tools_come_first():
    mine = ours(CHATML, template("qwen3"))
    mine = Tokenizer(Backend.from_str(backend(CHATML)), mine.eos, dict(mine._config))
    mine.set_chat_variables({"enable_thinking": False, "tools": TOOLS}, key="k")
    other = [{"type": "function", "function": {"name": "mine", "parameters": {}}}]
    asked = [says("user", "a")]
    text = mine.chat.render(
        asked, add_generation_prompt=True, tools=other, variables={"enable_thinking": True}
    )
    assert '"mine"' in text and '"sum"' not in text and "<think>" not in text
    row = {"messages": [*asked, says("assistant", "b")]}
    for column in ({"enable_thinking": True, "tools": other}, '{"tools": [{"name": "mine"}]}'):
        (made,) = documents({**row, "chat_template_kwargs": column}, mine)
        assert "mine" in made.pieces[0].text and '"sum"' not in made.pieces[0].text
    for column in ({"messages": []}, "enable_thinking", ["a"]):
        with pytest.raises(ValueError, match="chat_template_kwargs"):
            documents({**row, "chat_template_kwargs": column}, mine)


def test_rows_are_the_same_from_the_bounded_child():
    for stem in ("qwen3_training", "qwen3", "deepseekv3"):
        family = stem.removesuffix("_training")
        inside = ours(FAMILIES[family][1], template(stem))
        outside = Tokenizer(Backend.from_str(inside._backend.to_str()), inside.eos, inside._config)
        assert inside.chat.is_trusted and not outside.chat.is_trusted
        found = []
        for tokenizer in (inside, outside):
            options = ExampleOptions.of(tokenizer.chat, last_only=False, prompts=False)
            made = tokenizer.chat.run(partial(example_or_error, "chat", options), rows()[:30])
            found.append([m if isinstance(m, Example) else str(m) for m in made])
        assert found[0] == found[1]
        assert all(isinstance(m, Example) for m in found[0]) == (family == "qwen3")


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"messages": []}, "'messages' is no variable of a template"),
        ({"a b": 1}, "'a b' is no variable of a template"),
        ({"tools": "sum"}, "tools: is not a list of JSON schemas"),
    ],
)
def test_variables_that_cannot_be_are_one_line(variables, line):
    config = DataConfig(name="files", paths=["a"], format="chat", chat_template_kwargs=variables)
    (found,) = config.check("data.")
    assert found.startswith("data.chat_template_kwargs") and line in found
