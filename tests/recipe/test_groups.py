"""A group on the command line takes the place of all that a recipe says of its section."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from llmfoundry.errors import UserError
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked, read
from llmfoundry.recipe.paths import YAMLS, group_options
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import as_written, to_yaml
from tests.front import Front

SFT = YAMLS / "finetune" / "quickstart-sft.yaml"
LORA = YAMLS / "finetune" / "llama-8b-lora.yaml"
MPT = YAMLS / "finetune" / "mpt-7b-sft.yaml"
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
ROWS = {
    "chat": CHAT,
    "prompt_response": {"prompt": "hi", "response": "ho"},
    "preference": {"prompt": "hi", "chosen": "ho", "rejected": "no"},
    "unpaired": {"prompt": "hi", "completion": "ho", "label": True},
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}]},
    "alpaca": {"instruction": "hi", "input": "", "output": "ho"},
    "text": {"text": "hi", "url": "x"},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in a folder with some rows."""
    monkeypatch.chdir(tmp_path)
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


OWN_ROWS = {  # the commands that the YAMLs and scripts/finetune.py document, and their like
    (LORA, "data.paths=[chat.jsonl]"): ("files", "chat", None),
    (MPT, "data=jsonl data.paths=[prompt_response.jsonl]"): ("files", "prompt_response", None),
    (MPT, "data=jsonl data.paths=[text.jsonl]"): ("files", "text", None),
    (SFT, "data=chat data.paths=[chat.jsonl]"): ("files", "chat", None),
    (SFT, "data.paths=alpaca.jsonl"): ("files", "alpaca", None),
    (SFT, "data.paths=[x] data=prompt_response"): ("files", "prompt_response", None),
    (LORA, "data.dataset=null data=chat data.paths=[x]"): ("files", "chat", None),
    (LORA, "data.dataset=me/mine data.format=chat"): ("huggingface", "chat", "me/mine"),
    (SFT, "data.dataset=me/mine data.format=chat"): ("huggingface", "chat", "me/mine"),
    (LORA, "data=huggingface data.dataset=me/mine"): ("huggingface", "text", "me/mine"),
    (LORA, "data.remote=s3://bucket/set"): ("shards", "text", None),
}


@pytest.mark.parametrize(("recipe", "words"), OWN_ROWS)
def test_own_rows_take_the_place_of_the_recipes(recipe: Path, words: str) -> None:
    data = checked(FinetuneRecipe, recipe, words.split()).data
    assert (data.name, data.format, data.dataset) == OWN_ROWS[recipe, words]
    assert (data.tasks, data.rows) == ([], None)


def test_paths_alone_keep_a_recipe_of_files(front: Front) -> None:
    Path("mine.yaml").write_text("data: {name: files, paths: [a], format: chat, shuffle: false}\n")
    data = front("mine.yaml", "data.paths=[b]").recipe.data
    assert (data.paths, data.format, data.shuffle) == (["b"], "chat", False)


@pytest.mark.parametrize("script", [TrainRecipe, FinetuneRecipe])
def test_a_saved_recipe_and_its_file_take_a_group_alike(script: type, here: Path) -> None:
    """A run's recipe.yaml is flat: what is chosen beside it must give the same."""
    recipe = YAMLS / "dbrx-mini.yaml" if script is TrainRecipe else SFT
    flat = here / "recipe.yaml"
    flat.write_text(to_yaml(read(script, recipe, ["run_name=same"])[0]))
    options = group_options([YAMLS], Schema.of(script))
    words = [f"{group}={name}" for group, names in options.items() for name in names[::6]]
    assert len(words) > 12
    for word in words:
        both = [
            as_written(read(script, path, ["run_name=same", word])[0]) for path in (recipe, flat)
        ]
        assert both[0] == both[1], word


def test_keys_win_over_a_group_wherever_they_stand(front: Front) -> None:
    Path("mine.yaml").write_text("defaults: [optimizer: muon]\noptimizer: {lr: 1, eps: 1e-5}\n")
    for words in (["optimizer=adamw", "optimizer.lr=3"], ["optimizer.lr=3", "optimizer=adamw"]):
        optimizer = front("mine.yaml", *words).recipe.optimizer
        assert (optimizer.name, optimizer.lr, optimizer.eps) == ("adamw", 3, 1e-8)


def test_what_a_group_replaces_is_said(front: Front, here: Path) -> None:
    Path("mine.yaml").write_text("seed: 1\noptimizer: {lr: 2, eps: 1.0e-5}\n")
    got = front("mine.yaml", "optimizer=adamw", "optimizer.eps=1e-5")
    assert got.errors == ["optimizer=adamw replaces what mine.yaml:2 says: optimizer.lr: 2"]
    assert front("mine.yaml", "optimizer=adamw", "optimizer={lr: 2, eps: 1e-5}").errors == []


def test_an_override_of_a_defaults_list_replaces_what_lies_below_it(front: Front) -> None:
    Path("base.yaml").write_text(
        "defaults: [quickstart, data: instructions]\n".replace("quickstart, ", "")
        + "data: {rows: 9, tasks: [sort]}\noptimizer: {lr: 1}\n"
    )
    Path("mine.yaml").write_text(
        "defaults: [base, override data: chat]\ndata: {paths: [chat.jsonl]}\n"
    )
    Path("top.yaml").write_text("defaults: [mine]\nseed: 4\n")
    for name in ("mine.yaml", "top.yaml"):
        recipe = front(name).recipe
        data = recipe.data
        assert (data.name, data.format, data.paths) == ("files", "chat", ["chat.jsonl"])
        assert (data.rows, data.tasks, recipe.optimizer.lr) == (None, [], 1)
    data = front("top.yaml", "data=instructions").recipe.data
    assert (data.rows, data.tasks, data.paths) == (None, [], [])


def test_a_recipe_builds_on_one_for_fine_tuning(front: Front) -> None:
    Path("mine.yaml").write_text(
        "defaults: [finetune/quickstart-sft, override data: chat]\ndata: {paths: [chat.jsonl]}\n"
    )
    recipe = front("mine.yaml", schema=FinetuneRecipe).recipe
    assert (recipe.data.format, recipe.data.tasks, recipe.data.rows) == ("chat", [], None)
    assert (recipe.optimizer.name, recipe.model.pretrained) == ("muon", "runs/quickstart")
    assert front("mine.yaml", "logger=none", schema=FinetuneRecipe).recipe.logger.mlflow is False


def test_a_secret_that_a_group_replaces_is_not_said(front: Front) -> None:
    Path("mine.yaml").write_text(
        "data: {name: shards, remote: 'https://u:passw0rd99@x/y',\n"
        "  storage_options: {s3: {secret: hunter2}}}\n"
    )
    (line,) = front("mine.yaml", "data=stdlib").errors
    assert "data.remote: https://u:***@x/y" in line and "passw0rd99" not in line
    assert "secret: ***" in line


def test_a_choice_may_build_on_another_of_its_group(front: Front) -> None:
    Path("data").mkdir()
    Path("data/mine.yaml").write_text("defaults: [chat]\npaths: [chat.jsonl]\n")
    Path("mine.yaml").write_text("defaults: [data: instructions]\ndata: {rows: 9}\n")
    data = front("mine.yaml", "data=mine").recipe.data
    assert (data.name, data.format, data.paths) == ("files", "chat", ["chat.jsonl"])


def test_what_stands_in_a_recipe_is_removed_by_what_the_message_says(front: Front) -> None:
    words = [SFT, "data.name=files", "data.paths=[chat.jsonl]"]
    errors = front(*words, schema=FinetuneRecipe).errors
    assert len(errors) == 2
    added = [line.split("add '")[1].rstrip("'") for line in errors]
    assert added == ["~data.tasks", "~data.rows"]
    assert all(line.startswith(f"{SFT}:") for line in errors)
    assert front(*words, *added, schema=FinetuneRecipe).status == 0
    line = front(SFT, "data.text_column=x", schema=FinetuneRecipe).errors[0]
    assert line.endswith("remove it"), "which the user has just typed"
    Path("mine.yaml").write_text("data: {name: shards, remote: x, eos_token_id: 1}\n")
    words = ["mine.yaml", "eval.validation=false", "data.bos_token_id=2"]
    (line,) = front(*words).errors
    assert line.endswith("remove one, or add '~data.eos_token_id'")
    assert front(*words, "~data.eos_token_id").status == 0


def test_what_is_refused_later_names_the_file_too(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmfoundry.errors import UserError

    def refuse(recipe: object) -> None:
        raise UserError("data.rows: has no effect today; remove it", "data.rows: is odd")

    front(SFT, schema=FinetuneRecipe)
    monkeypatch.setattr(sys.modules["remembering_target"], "remember", refuse)
    first, second = front(SFT, schema=FinetuneRecipe).errors
    assert first.startswith(f"{SFT}:") and first.endswith("; remove it, or add '~data.rows'")
    assert second == "data.rows: is odd"


def test_tilde_removes_items_and_mappings_whole(front: Front) -> None:
    Path("mine.yaml").write_text(
        "data: {name: mixture, streams: {a: {remote: x, repeat: 2}, b: {remote: y}}}\n"
    )
    words = ["eval.validation=false", "~data.streams.b", "~data.streams.a.repeat"]
    streams = front("mine.yaml", *words).recipe.data.streams
    assert {*streams} == {"a"} and streams["a"].repeat is None
    assert front("mine.yaml", "~data.streams", "data=stdlib").recipe.data.streams == {}
    assert front("mine.yaml", "~data.streems").errors[0].startswith("unknown key 'data.streems'")
    (line,) = front("mine.yaml", "~data.streams.c").errors
    assert line == "~data.streams.c: the recipe has no such item to remove; remove the word"


def test_tilde_removes_what_a_mapping_of_any_content_has() -> None:
    path, key = YAMLS / "finetune/quickstart-2k.yaml", "model.config_overrides"
    removed = checked(FinetuneRecipe, path, [f"~{key}.attn_config"])
    assert removed.model.config_overrides == {"max_seq_len": 2048}
    with pytest.raises(UserError, match=r"~.*\.rope: the recipe has no such item to remove"):
        checked(FinetuneRecipe, path, [f"~{key}.attn_config.rope"])


def test_a_text_is_a_list_of_one(front: Front) -> None:
    for word in ("data.paths=my/chats (1).jsonl", "data.paths=['my/chats (1).jsonl']"):
        assert front("run_name=x", word).recipe.data.paths == ["my/chats (1).jsonl"]
    Path("mine.yaml").write_text("data: {name: files, paths: a.txt}\n")
    assert front("mine.yaml").recipe.data.paths == ["a.txt"]
    assert front("run_name=x", "data.paths=a,b").errors[0].endswith("or write a list, [a,b]")
    assert front("run_name=x", "data.paths=3").errors[0].startswith("data.paths: 3 is not a list")


@pytest.mark.parametrize("kind", ROWS)
def test_the_format_of_rows_is_that_of_the_first(kind: str, here: Path) -> None:
    def found(*words: str) -> str:
        data = read(TrainRecipe, None, ["run_name=x", "data=files", *words])[0].data
        return str(data.format)

    row = ROWS[kind]
    (here / "rows.json").write_text(json.dumps([row, row], indent=1))
    (here / "rows.csv").write_text(",".join(row) + "\n1,2,3\n")
    (here / "below").mkdir()
    (here / "below" / "rows.jsonl").write_text(json.dumps(row))
    for name in (f"{kind}.jsonl", "rows.json", "rows.csv", "below", f"{kind[:-1]}*.jsonl"):
        assert found(f"data.paths=[{name}]") == kind, name
    (here / "packed.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    (here / "packed.jsonl.zst").write_bytes(zstandard.compress(json.dumps(row).encode()))
    (here / "damaged.jsonl").write_text('{"a": \nnull\n[]\n' + json.dumps(row))
    (here / "blank.csv").write_text("\n\n" + ",".join(row) + "\n1,2,3\n")
    for name in ("packed.jsonl.gz", "packed.jsonl.zst", "damaged.jsonl", "blank.csv"):
        assert found(f"data.paths=[{name}]") == kind, name
    (here / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode())[:-9])
    assert found("data.paths=[cut.jsonl.gz]") == "text", "reported when it is read"
    assert found("data.paths=[below]", "data.text_column=x") == "text"
    (here / "below" / ".chats.jsonl").write_text('{"odd": 1}')
    (here / "below" / "__pycache__").mkdir()
    (here / "below" / "__pycache__" / "notes.md").write_text("a text")
    assert found("data.paths=[below]") == kind, "hidden files decide nothing"
    (here / "below" / "notes.md").write_text("a text")
    assert found("data.paths=[below]") == "text", "documents beside rows: all of it is text"


def test_streams_find_their_formats_as_a_single_source_does(front: Front, here: Path) -> None:
    rows = {"a": ROWS["chat"], "b": {"text": "t"}, "odd": {"q": 1, "a": 2}}
    for name, row in rows.items():
        (here / f"{name}.jsonl").write_text(json.dumps(row))

    def found(*words: str) -> Any:
        streams = (f"data.streams.{n}={{name: files, paths: [{n}.jsonl]}}" for n in ("a", "b"))
        return front("run_name=x", "data.name=mixture", *streams, *words)

    data = found("data.validation={name: files, paths: [a.jsonl]}").recipe.data
    formats = [s.format for s in (*data.streams.values(), data.validation)]
    assert formats == ["chat", "text", "chat"]
    assert found("data.streams.a.format=text").recipe.data.streams["a"].format == "text"
    stream = "data.streams.odd={name: files, paths: [odd.jsonl]}"
    (line,) = found(stream).errors
    assert "data.streams.odd.format: auto finds none for rows that have q, a; write data.st" in line
    (line,) = found("data.streams.data={name: files, paths: [a.jsonl]}").errors
    assert "data.streams: a stream is called 'data'; write another name" in line
    shards = found("data.streams.c={name: shards, remote: s3://b/c}").recipe.data.streams["c"]
    assert shards.format == "text"
    words = ("data.columns={prompt: q, response: a}", "data.paths=[odd.jsonl]", "data=files")
    held_out = "data.validation={name: files, paths: [odd.jsonl]}"
    alone = front("run_name=x", *words, held_out).recipe.data
    alone.fill()
    assert alone.format == alone.validation.format == "prompt_response"


def test_a_format_that_nothing_decides_is_said_or_left_open(front: Front, here: Path) -> None:
    (here / "odd.jsonl").write_text('{"q": 1, "a": 2}\n')
    words = ["run_name=x", "data=files"]
    (line,) = front(*words, "data.paths=[odd.jsonl]").errors
    assert ": data.format: auto finds none for rows that have q, a; write" in line
    renamed = front(*words, "data.paths=[odd.jsonl]", "data.columns={prompt: q, response: a}")
    assert renamed.recipe.data.format == "prompt_response"
    assert front(*words, "data.paths=[not-yet.jsonl]").recipe.data.format == "auto"
    assert front(*words, "data.paths=[s3://bucket/rows.jsonl]").recipe.data.format == "text"
    (line,) = front("run_name=x", "data.format=auto").errors
    assert line.startswith("data.format: auto looks at rows of files")
    for text in ("", "{", "[" * 100_000, "\0", "[]", "3"):
        (here / "odd.jsonl").write_text(text)
        assert front(*words, "data.paths=[odd.jsonl]").recipe.data.format == "text"


def test_help_names_the_tilde(front: Front) -> None:
    assert "\n  ~key  " in front("--help").out
