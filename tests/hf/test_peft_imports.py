"""Adapters that peft trained and saved: read into the decoder exactly, or left to peft itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from llmfoundry.errors import UserError
from llmfoundry.hf.peft.class_adapter import merge_folder
from llmfoundry.hf.peft.names import saved_tables
from llmfoundry.hf.peft.read import PeftNeeded, read_adapter
from llmfoundry.models.adapter import merge_into
from tests.hf.random_models import ROWS, logits
from tests.hf.test_hf_import import FEW, LLAMA_SHAPE, LOCAL_FEW, QWEN_MOE, make, read

peft = pytest.importorskip("peft")
EXACT = {"rtol": 0, "atol": 1e-3}
TIED = {**LLAMA_SHAPE, "tie_word_embeddings": True}
TOKENS = torch.randint(0, ROWS, (2, 20), generator=torch.Generator().manual_seed(1))


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def saved(tmp_path: Path, kind: str, options: dict[str, Any], lora: dict[str, Any]) -> Tensor:
    """Save a base and a trained adapter of it; return the logits of both in peft."""
    make(kind, options).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **lora)
    model = peft.get_peft_model(loaded(tmp_path / "base"), config)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "adapter")
    with torch.no_grad():
        return theirs.eval()(TOKENS).logits


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Mixtral", {**LLAMA_SHAPE, **LOCAL_FEW}),
        ("Qwen3Moe", QWEN_MOE),
        ("Olmoe", {**LLAMA_SHAPE, **FEW, "num_experts": 5}),
    ],
)
def test_all_linear_of_a_mixture_reads_router_and_experts(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    # peft names their parameters without a module: gate.weight, gate_up_proj, down_proj
    expected = saved(tmp_path, kind, options, {"target_modules": "all-linear"})
    model = read(tmp_path / "base")
    found = read_adapter(tmp_path / "adapter", model, dropout=0.0)
    with torch.no_grad():
        merge_into(model, found.plan, found.tensors)
    torch.testing.assert_close(logits(model, TOKENS), expected, **EXACT)


@pytest.mark.parametrize(
    ("options", "lora", "why"),
    [
        (LLAMA_SHAPE, {"init_lora_weights": "pissa"}, "'pissa' changes the base model as well"),
        (LLAMA_SHAPE, {"init_lora_weights": "olora"}, "'olora' changes the base model as well"),
        (TIED, {"modules_to_save": ["embed_tokens"]}, "the embedding without the head"),
        (TIED, {"target_modules": ["embed_tokens"]}, "wte is the head as well"),
        (LLAMA_SHAPE, {"target_modules": ["q_proj", "lm_head"]}, "save_embedding_layers=False"),
        (LLAMA_SHAPE, {"bias": "all"}, "bias all; the decoder reads none"),
        (LLAMA_SHAPE, {"modules_to_save": ["k_proj"]}, "no place for .*k_proj.weight; if it was"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_what_the_decoder_cannot_hold_is_refused_and_computed_by_peft(
    options: dict[str, Any], lora: dict[str, Any], why: str, tmp_path: Path
) -> None:
    expected = saved(tmp_path, "Llama", options, {"target_modules": ["q_proj"]} | lora)
    with pytest.raises(PeftNeeded, match=why) as error:
        read_adapter(tmp_path / "adapter", read(tmp_path / "base"), dropout=0.0)
    assert len(error.value.lines()) == 1
    merged = merge_folder(loaded(tmp_path / "base"), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, expected, **EXACT)


def test_a_tied_embedding_that_peft_ties_again_is_read(tmp_path: Path) -> None:
    lora = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    expected = saved(tmp_path, "Llama", TIED, {"target_modules": ["q_proj"]} | lora)
    model = read(tmp_path / "base")
    found = read_adapter(tmp_path / "adapter", model, dropout=0.0)
    with torch.no_grad():
        merge_into(model, found.plan, found.tensors)
    torch.testing.assert_close(logits(model, TOKENS), expected, **EXACT)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        (TIED, [7, 1]),
        (LLAMA_SHAPE, [7, 1]),  # of the embedding alone
        (LLAMA_SHAPE, {"embed_tokens": [7, 1], "lm_head": [3]}),
    ],
    ids=["tied", "embedding", "both"],
)
def test_rows_of_tokens_are_read(options: dict[str, Any], tokens: Any, tmp_path: Path) -> None:
    lora = {"target_modules": ["q_proj"], "trainable_token_indices": tokens}
    expected = saved(tmp_path, "Llama", options, lora)
    model = read(tmp_path / "base")
    found = read_adapter(tmp_path / "adapter", model, dropout=0.0)
    with torch.no_grad():
        merge_into(model, found.plan, found.tensors)
    torch.testing.assert_close(logits(model, TOKENS), expected, **EXACT)
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    for wrong in ([7, 1, 2], None):
        file.write_text(json.dumps(config | {"trainable_token_indices": wrong}))
        with pytest.raises(UserError, match=r"does not name the \d rows of"):
            read_adapter(file.parent, model, dropout=0.0)
    for odd in ([7, 7], 5, "ab", [{}], [[7]], ["7", "1"], [-1, 7], [True, False], {"lm_head": None},
                {"lm_head": 3}, {"lm_head": []}):  # fmt: skip
        file.write_text(json.dumps(config | {"trainable_token_indices": odd}))
        with pytest.raises(UserError, match="trainable_token_indices is not a list of ids"):
            read_adapter(file.parent, model, dropout=0.0)
    more = {"embed_tokens": [7, 1], "lm_head": [3], "other": [1]}
    file.write_text(json.dumps(config | {"trainable_token_indices": more}))
    with pytest.raises(UserError, match=r"names (other|lm_head), of which .* has no rows"):
        read_adapter(file.parent, model, dropout=0.0)
    far = {"embed_tokens": [7, 10**6]} | ({"lm_head": [3]} if isinstance(tokens, dict) else {})
    file.write_text(json.dumps(config | {"trainable_token_indices": far}))
    with pytest.raises(PeftNeeded, match="was made for another base model: wte is"):
        read_adapter(file.parent, model, dropout=0.0)


def test_the_tables_that_an_adapter_trains_in_full_are_known(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", LLAMA_SHAPE, {"target_modules": ["q_proj"]})
    config = read(tmp_path / "base").config
    for names, tables in (
        (None, set()),
        (["norm"], set()),
        (["lm_head"], {"lm_head"}),
        (["embed_tokens", "lm_head"], {"wte", "lm_head"}),
        (["model.wte"], {"wte"}),
    ):
        assert saved_tables({"modules_to_save": names}, config) == tables


def test_an_adapter_of_another_model_is_not_computed_by_peft_either(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", LLAMA_SHAPE, {"target_modules": ["q_proj"], "bias": "all"})
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "layers.1" in name and "lora_A" in name)
    for change in ({name.replace(".1.", ".7."): tensors[name].clone()}, None):
        changed = {**tensors, **change} if change else tensors
        save_file({n: t for n, t in changed.items() if change or n != name}, file)
        with pytest.raises(UserError, match=r"was made for another base model: .*lora_A"):
            merge_folder(loaded(tmp_path / "base"), tmp_path / "adapter")
