"""`open_model`: every name that a model can have, and what it then writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmfoundry.api.generation import Drawer
from llmfoundry.builders.open_model import LoadedModel, OpenedModel, check_model, open_model
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.inference.engine import draw_all
from llmfoundry.inference.requests import SequenceRequest
from llmfoundry.models import kv_cache
from llmfoundry.recipe.after_training import GenerateRecipe
from tests.gauntlet.hugging_face_models import plain_continuation, random_model, save_model


def opened(name: object, **options: Any) -> OpenedModel:
    return open_model(str(name), ALONE, note=lambda line: None, **options)


def greedy(model: LoadedModel, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    requests = [SequenceRequest(prompt, 8, stop_ids=model.end_ids) for prompt in prompts]
    return draw_all(model.engine(slots=2, length=30), requests)


PROMPTS: list[tuple[int, ...]] = [(5, 6, 7), (9,), (100, 101, 102, 103, 104)]


@pytest.mark.parametrize("kind", ["llama", "mpt", "gpt_neox"])
def test_a_hugging_face_folder_writes_what_transformers_writes(kind: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / kind, kind, eos_token_id=[0, 17])
    model = opened(folder)
    loaded = model.load()
    assert (loaded.root is None) == (kind == "gpt_neox") == bool(loaded.notes)
    ends = {0, 17, model.tokenizer.eos_id}
    assert loaded.end_ids == ends
    expected = [plain_continuation(random_model(kind), prompt, 8, ends) for prompt in PROMPTS]
    assert greedy(loaded, PROMPTS) == expected
    assert opened(f"hf:{folder}").prompt_ids("A man") == model.tokenizer.encode("A man")
    assert model.prompt_ids("") == [model.tokenizer.eos_id]


def test_a_prompt_begins_with_what_the_tokenizer_puts_there(tmp_path: Path) -> None:
    model = opened(save_model(tmp_path, "llama", bos=True))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for text in ("A man", f"A{theirs.eos_token} man", f"{theirs.bos_token}A man"):
        assert model.prompt_ids(text) == theirs(text).input_ids
        alone = theirs(text, add_special_tokens=False).input_ids
        assert model.prompt_ids(text, add_special_tokens=False) == alone
    assert model.prompt_ids("") == [theirs.bos_token_id]


def test_reading_all_anew_keeps_the_precision(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "gpt_neox")
    loaded, seen = opened(folder, precision="amp_bf16").load(), list[bool]()
    loaded.hugging_face.register_forward_pre_hook(
        lambda *_: seen.append(torch.is_autocast_enabled("cpu"))
    )
    recipe = GenerateRecipe(str(folder), kv_cache=False, max_new_tokens=2)
    assert [*Drawer(recipe, loaded).draw([5, 6, 7], 2)]
    assert seen == [True, True]


def test_an_answer_that_memory_cannot_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = opened(save_model(tmp_path, "llama")).load()
    monkeypatch.setattr(kv_cache, "available_host_memory", lambda: 2**20)
    recipe = GenerateRecipe(str(tmp_path), max_new_tokens=9_000)
    with pytest.raises(UserError, match="values of 9003 tokens do not fit; write fewer"):
        Drawer(recipe, loaded).draw([5, 6, 7], 9_000)


def save_adapter(folder: Path, base: Any, name: str, **more: Any) -> Any:
    """A random LoRA of peft's on a model; the model with it."""
    from peft import LoraConfig, get_peft_model

    modules = ["query_key_value"] if base.config.model_type == "gpt_neox" else ["q_proj", "v_proj"]
    config = LoraConfig(r=4, target_modules=modules, base_model_name_or_path=name, **more)
    adapted = get_peft_model(base, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.normal_()
    adapted.peft_config["default"].base_model_name_or_path = name
    adapted.save_pretrained(folder)
    return adapted


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_an_adapter_writes_what_peft_writes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "base", kind)
    adapted = save_adapter(tmp_path / "mine", random_model(kind), "base")
    loaded = opened("mine").load()
    expected = [plain_continuation(adapted, prompt, 8, {*loaded.end_ids}) for prompt in PROMPTS]
    assert greedy(loaded, PROMPTS) == expected
    plain = greedy(opened("base").load(), PROMPTS)
    assert plain != expected, "the adapter changes something"


def test_an_adapter_that_the_decoder_cannot_hold_is_computed_by_peft(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "llama")
    adapted = save_adapter(tmp_path / "mine", random_model("llama"), str(base), bias="all")
    loaded = opened(tmp_path / "mine").load()
    assert loaded.root is None and "bias all" in loaded.notes[0]
    expected = [plain_continuation(adapted, prompt, 8, {*loaded.end_ids}) for prompt in PROMPTS]
    assert greedy(loaded, PROMPTS) == expected


def test_the_end_of_text_of_an_adapters_own_tokenizer_ends_its_answers(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "llama")
    save_adapter(tmp_path / "mine", random_model("llama"), str(base))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(base))
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(40)
    tokenizer.save_pretrained(tmp_path / "mine")
    assert opened(tmp_path / "mine").load().end_ids == opened(base).load().end_ids | {40}


def test_an_adapter_and_its_base_may_be_moved_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "old" / "models" / "base", "llama")
    save_adapter(tmp_path / "old" / "mine", random_model("llama"), "models/base")
    shutil.move(tmp_path / "old", tmp_path / "new")
    monkeypatch.chdir("/")
    assert greedy(opened(tmp_path / "new" / "mine").load(), PROMPTS)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "names no base model; write it as base_model_name_or_path"),
        ({"base_model_name_or_path": 3}, "names no base model"),
        ({"base_model_name_or_path": "/nowhere/at/all"}, "nothing at /nowhere/at/all"),
        ({"base_model_name_or_path": "mine"}, "an adapter on 4 adapters"),
        ({"base_model_name_or_path": "http://localhost:1/v1#m"}, "is a server's address"),
    ],
)
def test_an_adapter_without_a_base_is_refused(
    config: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=problem):
        opened("mine")


def test_a_name_that_is_nothing_says_how_a_hub_id_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="model on the Hugging Face hub is hf:owner/model"):
        opened("owner/model")
    with pytest.raises(UserError, match="nothing at"):
        opened(tmp_path / "none")
    with pytest.raises(UserError, match="server's address"):
        opened("http://localhost:1/v1#m")
    with pytest.raises(UserError, match=r"config\.json"):
        check_model("hf:" + str(tmp_path))
