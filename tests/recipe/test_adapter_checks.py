"""Keys of the adapter section that have no effect with the others: a line for each."""

from __future__ import annotations

import pytest

from llmfoundry.errors import UserError
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked

LORA = {
    "r": "8",
    "lora_alpha": "8",
    "target_modules": "Wqkv",
    "exclude_modules": "[Wqkv]",
    "train_router": "true",
    "experts": "shared",
    "use_rslora": "true",
    "use_dora": "false",
    "init_lora_weights": "pissa",
    "modules_to_save": "[wte]",
}


def problems(*words: str) -> list[str]:
    """The lines about a recipe of these words."""
    try:
        checked(FinetuneRecipe, None, ["run_name=x", "model.pretrained=base", *words])
    except UserError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(("key", "value"), LORA.items())
def test_what_the_folder_decides_is_not_written_beside_it(key: str, value: str) -> None:
    words = ("adapter.name=lora", f"adapter.{key}={value}")
    assert problems(*words) == []
    why = "has no effect with adapter.pretrained, whose folder decides it; remove it"
    assert problems(*words, "adapter.pretrained=there") == [f"adapter.{key}: {why}"]


def test_what_training_decides_may_be() -> None:
    key = "adapter.pretrained=there"
    both = ("adapter.lora_dropout=0.1", "adapter.lora_plus_ratio=4")
    assert problems("adapter.name=lora", *both, key) == []
    assert problems("adapter=lora", key) == []


def test_keys_of_lora_without_it() -> None:
    found = problems(*[f"adapter.{key}={value}" for key, value in LORA.items()])
    assert set(found) == {
        f"adapter.{key}: has no effect with adapter.name: none, only with lora; remove it"
        for key in LORA
    }


@pytest.mark.parametrize("name", ["prompt_tuning", "prefix_tuning"])
def test_tuned_prompts_are_refused(name: str) -> None:
    (problem,) = problems(f"adapter.name={name}")
    assert problem.startswith(f"adapter.name: {name} ") and problem.endswith("; write lora")


REMOVED = ("num_virtual_tokens", "prompt_tuning_init", "prompt_tuning_init_text")


def test_unset_keys_of_tuned_prompts_are_dropped() -> None:
    """Recipes that earlier versions saved beside an adapter list all its keys."""
    assert problems("adapter.name=lora", *[f"adapter.{key}=null" for key in REMOVED]) == []


@pytest.mark.parametrize("key", REMOVED)
def test_keys_of_tuned_prompts_are_refused(key: str) -> None:
    (problem,) = problems("adapter.name=lora", f"adapter.{key}=8")
    assert problem.startswith(f"adapter.{key}: ") and problem.endswith("; write lora")
