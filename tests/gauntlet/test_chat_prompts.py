"""Questions by a chat template: lm-evaluation-harness's own requests, token for token."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from gauntlet_stand_ins import questions
from hugging_face_models import save_model
from test_harness import CPU, Recorder, write_tasks

from llmfoundry.data.text.chat_template import template_of
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.models.harness import HarnessModel
from llmfoundry.gauntlet.prompts.chat import chat_messages, prompt_text
from llmfoundry.gauntlet.questions import Chat, TaskConfig, TaskRow
from llmfoundry.gauntlet.task_rows import load_rows
from tests.gauntlet.hugging_face_models import load_hugging_face

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed: pip install 'llmfoundry-recipes[eval]'",
)
WAYS = [
    {"multiturn": True, "system": "", "prefix": ""},
    {"multiturn": False, "system": "Be brief.", "prefix": ""},
    {"multiturn": True, "system": "Be brief. ", "prefix": "The answer:"},
    {"multiturn": False, "system": "", "prefix": "It is "},
]


@pytest.fixture(scope="module", params=["gpt_neox", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer has a chat template; one of them puts <s> before texts."""
    path = tmp_path_factory.mktemp(request.param)
    save_model(path, request.param, bos=request.param == "llama")
    (path / "chat_template.jinja").write_text(template_of("zephyr"))
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("chat_tasks"))


class TemplateRecorder(Recorder):
    """Passes templates on unrecorded."""

    tokenizer_name = ""

    def apply_chat_template(self, messages: Any, **how: Any) -> str:
        return self.model.apply_chat_template(messages, **how)


def load_tasks(tasks: Path, names: Sequence[str]) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    loaded = TaskManager(include_path=str(tasks), include_defaults=False).load(list(names))
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(1234)
    return loaded


@needs_harness
@pytest.mark.parametrize("multiturn", [True, False])
def test_tasks_of_the_harness_give_its_own_numbers_by_a_template(
    multiturn: bool, folder: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    names = ["local_choices", "local_schema", "local_written"]
    subject, own = load_hugging_face(str(folder), device=CPU, precision="fp32", batch_tokens=2000)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = TemplateRecorder(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=5, device="cpu")
    )
    asked: dict[str, Any] = {"apply_chat_template": True, "fewshot_as_multiturn": multiturn}
    asked["system_instruction"] = "Answer."
    expected = evaluator.evaluate(
        lm=theirs, task_dict=load_tasks(tasks, names), bootstrap_iters=10, limit=8, **asked
    )["results"]

    chat = Chat(own.chat, every_task=True, multiturn=multiturn, system="Answer.")
    ours = HarnessModel(subject, own, seq_len=subject.seq_len, chat=chat)
    recorded = TemplateRecorder(ours)
    assert ours.chat_arguments() == asked
    found = evaluator.evaluate(
        lm=recorded,
        task_dict=load_tasks(tasks, names),
        bootstrap_iters=10,
        limit=8,
        **ours.chat_arguments(),
    )["results"]
    assert recorded.answers.keys() == theirs.answers.keys(), "the same texts are asked"
    for (call, args), answer in theirs.answers.items():
        if call == "loglikelihood":
            assert recorded.answers[call, args][0] == pytest.approx(answer[0], abs=1e-3)
        else:
            assert recorded.answers[call, args] == answer
    assert found["local_choices"]["acc,none"] == expected["local_choices"]["acc,none"]


@needs_harness
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shots", [0, 2])
def test_rows_become_the_requests_of_the_harness_token_for_token(
    way: dict[str, Any], shots: int, folder: Path, tasks: Path
) -> None:
    from lm_eval.models.huggingface import HFLM

    own = Tokenizer.load(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    hflm = HFLM(
        pretrained=model,
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        batch_size=1,
        device="cpu",
    )
    chat = Chat(own.chat, every_task=True, **way)
    for name, kind in (("choices", "multiple_choice"), ("schema", "schema")):
        config = TaskConfig(
            "t",
            str(tasks / "rows.jsonl"),
            kind,
            [shots],
            prompt_string="Choose.",
            continuation_delimiter=" ",
            example_delimiter="\n\n",
            strip_dataset=False,
        )
        rows = [r for r in load_rows(config, gauntlet_path=tasks / "x.yaml") if r.contexts[0]][:6]
        task = _loaded_task(tasks, name, shots, way["prefix"])
        docs = [d for d in task.test_docs() if d["query"] or name == "schema"][:6]
        ours = questions(rows, config, shots, own, mode="harness", seq_len=2000, chat=chat)
        native = questions(rows, config, shots, own, mode="native", seq_len=2000, chat=chat)
        for question, doc, same in zip(ours, docs, native, strict=True):
            examples = _examples_in(question.row, rows, docs, config, shots)
            task.sampler.sample = lambda n, eval_doc=None, its=examples: its
            context = task.fewshot_context(
                doc,
                shots,
                way["system"] or None,
                True,
                way["multiturn"],
                hflm.apply_chat_template,
                way["prefix"] or None,
            )
            instances = task.construct_requests(
                doc=doc, ctx=context, apply_chat_template=True, metadata=("t", 0, 1)
            )
            for request, instance in zip(question.requests, instances, strict=True):
                head, continuation = hflm._encode_pair(*instance.args)
                assert [*request.tokens, request.targets[-1]] == head + continuation
                assert list(request.targets) == continuation
            assert len(same.requests) == len(question.requests)


def _loaded_task(tasks: Path, name: str, shots: int, prefix: str) -> Any:
    task = load_tasks(tasks, [f"local_{name}"])["tasks"][f"local_{name}"]
    task.set_config("num_fewshot", shots)
    task.config.description = "Choose."
    task.config.gen_prefix = task.fewshot_cfg.gen_prefix = prefix or None
    return task


def _examples_in(
    row: TaskRow, rows: list[TaskRow], docs: list[Any], config: TaskConfig, shots: int
) -> list[Any]:
    """The harness's documents of our worked examples."""
    from llmfoundry.gauntlet.prompts.native import _examples

    return [docs[j] for j in _examples(rows, config, shots)[rows.index(row)]]


CONVERSATION = TaskRow(
    ("and b?",),
    ("2",),
    0,
    "file:1",
    aliases=("2",),
    messages=(
        {"role": "system", "content": "a is 1, b is 2."},
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "and b?"},
    ),
    checks=({"check": "exact", "text": "2"},),
)


def test_a_conversation_is_put_as_it_stands_and_ends_with_its_turn(folder: Path) -> None:
    own = Tokenizer.load(folder)
    task = TaskConfig("t", "x", "generation_task_with_answers", [0])
    (question,) = questions(
        [CONVERSATION], task, 0, own, mode="native", seq_len=500, chat=Chat(own.chat)
    )
    prompt = question.prompt
    expected = own.chat.render(CONVERSATION.messages, add_generation_prompt=True)
    assert prompt is not None
    assert prompt.text == expected
    assert list(prompt.tokens) == own.encode_chat(expected)
    assert prompt.stops == (own.chat.end_of_turn,)
    assert prompt.messages == CONVERSATION.messages
    assert prompt.max_new_tokens > len(own.encode("2")) + len(own.encode_chat(prompt.stops[0]))
    (request,) = question.requests
    assert own.decode([*request.tokens, request.targets[-1]]) == expected + "2"


def test_a_system_instruction_leaves_a_conversation_s_own_alone(folder: Path) -> None:
    own = Tokenizer.load(folder)
    task = TaskConfig("t", "x", "generation_task_with_answers", [0])
    chat = Chat(own.chat, system="Be brief.")
    said = chat_messages(CONVERSATION, "and b?", [], task, chat, reasoned=False)
    assert [message["content"] for message in said][:1] == ["a is 1, b is 2."]
    without = TaskRow(("a?",), ("1",), 0, "x", messages=({"role": "user", "content": "a?"},))
    said = chat_messages(without, "a?", [], task, chat, reasoned=False)
    assert [message["content"] for message in said] == ["Be brief.", "a?"]


def test_a_prefix_is_what_transformers_continues(folder: Path) -> None:
    own = Tokenizer.load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    row = TaskRow(("a?",), ("1",), 0, "x")
    for prefix in ("It is", "It is ", " It", "user"):
        text = prompt_text(
            [{"role": "user", "content": "user a?"}], row, Chat(own.chat, prefix=prefix)
        )
        assert text == theirs.apply_chat_template(
            [{"role": "user", "content": "user a?"}, {"role": "assistant", "content": prefix}],
            tokenize=False,
            continue_final_message=True,
        )


def test_what_cannot_be_asked_is_one_line(folder: Path) -> None:
    own = Tokenizer.load(folder)
    task = TaskConfig("t", "x", "generation_task_with_answers", [0])
    how: dict[str, Any] = {"seq_len": 500}
    with pytest.raises(UserError, match=r"eval.icl_chat_template: rows of t are conversations"):
        questions([CONVERSATION], task, 0, own, mode="native", **how)
    with pytest.raises(UserError, match=r"eval.icl_prompts: foundry knows no conversations"):
        questions([CONVERSATION], task, 0, own, mode="foundry", chat=Chat(own.chat), **how)
    with pytest.raises(UserError, match=r"t: num_fewshot: 1, but its rows are whole"):
        questions([CONVERSATION] * 2, task, 1, own, mode="native", chat=Chat(own.chat), **how)


def test_rows_of_conversations_are_read_and_their_mistakes_named(tmp_path: Path) -> None:
    task = TaskConfig("t", "rows.jsonl", "generation_task_with_answers", [0])
    good = {
        "messages": [{"role": "user", "content": "a?"}],
        "answer": "1",
        "checks": [{"check": "exact", "text": "1"}],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(good))
    (row,) = load_rows(task, gauntlet_path=tmp_path / "g.yaml")
    assert (row.contexts, row.messages) == (("a?",), tuple(good["messages"]))
    for change, line in (
        ({"messages": [{"role": "user"}]}, "write role and content"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "is not a text of the user"),
        ({"checks": [{"check": "word", "n": 1}]}, "'word' is not a check"),
        ({"context": "a"}, "has 'messages' and 'context'"),
        ({"tools": "x"}, "field 'tools' is 'x'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "holds half a surrogate pair"),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps({**good, **change}))
        with pytest.raises(UserError, match=line):
            load_rows(task, gauntlet_path=tmp_path / "g.yaml")
