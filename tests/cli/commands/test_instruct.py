"""Instruction tuning from end to end, as users start it: chats, before and after, answers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmfoundry.cli.commands.chat import chat
from llmfoundry.cli.commands.evaluate import evaluate
from llmfoundry.cli.commands.generate import generate
from llmfoundry.cli.commands.train import train
from llmfoundry.data.text.bpe import END_OF_TEXT
from llmfoundry.errors import UserError
from llmfoundry.recipe.after_training import ChatRecipe, EvalRecipe, GenerateRecipe
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import finetune_recipe, run, write_recipe

COMMANDS: dict[str, tuple[type[Any], Callable[[Any], None]]] = {
    "finetune.py": (FinetuneRecipe, train),
    "eval.py": (EvalRecipe, evaluate),
    "chat.py": (ChatRecipe, chat),
    "generate.py": (GenerateRecipe, generate),
}
GAUNTLET = {
    "icl_tasks": [
        {
            "label": "count",
            "dataset_uri": "instructions://count?rows=6",
            "icl_task_type": "generation_task_with_answers",
            "num_fewshot": [0],
        },
        {
            "label": "call",
            "dataset_uri": "instructions://tool_call?rows=2",
            "icl_task_type": "generation_task_with_answers",
            "num_fewshot": [0],
        },
    ]
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was trained on text, and the recipe of its fine-tuning."""
    folder = tmp_path_factory.mktemp("instruct")
    write_recipe(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = ["max_duration=1ba", "run_name=base"]
        train(checked(TrainRecipe, "tiny.yaml", words).resolve())
    data = {"name": "instructions", "format": "chat", "tasks": ["count"], "rows": 200}
    data |= {"cache_folder": str(folder / "cache"), "validation_fraction": 0.1}
    finetune_recipe(
        folder,
        name="sft.yaml",
        model={"pretrained": "runs/base"},
        tokenizer={"chat_template": "zephyr"},
        data=data,
        max_seq_len=256,
        max_duration="2ba",
        eval_first=True,
        eval_interval="2ba",
        eval={"gauntlet": "gauntlet.yaml", "icl_generate": True},
        callbacks={"generate": {"from_validation": 1, "temperature": 0, "max_new_tokens": 8}},
    )
    (folder / "gauntlet.yaml").write_text(yaml.safe_dump(GAUNTLET))
    return folder


def test_a_run_is_measured_before_and_after_and_answers(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(base)
    train(checked(FinetuneRecipe, "sft.yaml").resolve())
    said = capsys.readouterr().out
    assert "conversations by the chat template" in said
    assert "validation loss" in said and " → " in said
    folder = base / "runs/sft"
    evaluations = sorted(path.name for path in (folder / "eval").glob("*.json"))
    assert evaluations == ["ba0000000.json", "ba0000002.json"]
    page = (folder / "report.html").read_text()
    assert "Before and after" in page and "count, 0-shot" in page
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    asked = rows[-1]["prompt"].split("How many words: ")[1].split(END_OF_TEXT)[0]
    assert rows[-1]["expected"] == str(len(asked.split()))

    monkeypatch.setattr("sys.stdin", io.StringIO("a\n/reset\nb\n"))
    words = ["checkpoint=runs/sft", "max_new_tokens=4"]
    chat(checked(ChatRecipe, None, words))
    assert "a new conversation" in capsys.readouterr().err
    generate(checked(GenerateRecipe, None, [*words, "message=How many words: key"]))
    words = ["eval.gauntlet=gauntlet.yaml", "eval.validation=false", "checkpoint=runs/sft"]
    evaluate(checked(EvalRecipe, None, [*words, "eval.icl_chat_template=tokenizer"]))
    said = capsys.readouterr().out
    assert "every question by the chat template, worked examples as turns" in said


def test_the_scripts_name_these_commands(base: Path) -> None:
    words = ("checkpoint=runs/base", "chat_template=zephyr", "max_new_tokens=2")
    result = run("chat.py", *words, "message=x", cwd=base, status=2)
    assert "unknown key 'message'" in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("script", "words", "line"),
    [
        ("finetune.py", ["data.tasks=[cuont]"], "data.tasks: 'cuont' is not a task"),
        ("finetune.py", ["tokenizer.chat_template=zefyr"], "chat_template: cannot read zefyr"),
        (
            "eval.py",
            ["eval.icl_fewshot_as_multiturn=true"],
            "eval.icl_fewshot_as_multiturn: has no effect without eval.icl_chat_template",
        ),
        (
            "eval.py",
            ["eval.icl_chat_template=none", "eval.icl_gen_prefix=A"],
            "eval.icl_gen_prefix: has no effect with eval.icl_chat_template: none",
        ),
        ("eval.py", [], "eval.icl_chat_template: rows of count are conversations"),
        ("eval.py", ["eval.icl_chat_template=tokenizer"], "chat_template: the tokenizer has none"),
        ("eval.py", ["eval.icl_chat_template=zefyr"], "eval.icl_chat_template: cannot read zefyr"),
        ("eval.py", ["eval.icl_chat_template=chatml"], "eval.icl_chat_template: chatml needs the"),
        ("chat.py", [], "chat_template: the tokenizer has none"),
        ("generate.py", ["message=x"], "chat_template: the tokenizer has none"),
        ("generate.py", ["message=x", "prompt=y"], "prompt: has no effect with message"),
        ("generate.py", ["system=x"], "system: has no effect without message"),
    ],
)
def test_what_cannot_be_is_one_line(
    base: Path, script: str, words: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base)
    path, given = None, ["checkpoint=runs/base"]
    if script == "finetune.py":
        path, given = "sft.yaml", ["run_name=never"]
    if script == "eval.py":
        given += ["eval.validation=false", "eval.gauntlet=gauntlet.yaml"]
    recipe_type, call = COMMANDS[script]
    with pytest.raises(UserError) as error:
        recipe = checked(recipe_type, path, [*given, *words])
        call(recipe.resolve() if isinstance(recipe, FinetuneRecipe) else recipe)
    assert line in str(error.value)
    assert len(error.value.problems) == 1
    assert not (base / "runs/never").exists()
