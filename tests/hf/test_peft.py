"""Adapters in peft's folders: written here and loaded by peft, and the other way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llmfoundry.errors import UserError
from llmfoundry.hf.peft.names import CONFIG, splits_qkv
from llmfoundry.hf.peft.read import read_adapter
from llmfoundry.hf.peft.write import target_matrices, write_adapter
from llmfoundry.models.adapter import (
    adapted_layers,
    add_adapter,
    base_token_rows,
    fill_adapter_from,
    init_adapter,
    is_added,
    merge_into,
)
from llmfoundry.models.adapter_targets import plan_adapter
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.adapter import AdapterConfig
from tests.hf.random_models import (
    CARD,
    CASES,
    decoder,
    logits,
    rows,
    settings,
    to_hf,
    write_tokenizer,
)
from tests.selection import slow_but

peft = pytest.importorskip("peft")
EXACT = {"rtol": 0, "atol": 2e-5}
LORA = {"name": "lora", "r": 3, "lora_alpha": 7.0}
MIXTURES = ("DbrxForCausalLM", "OlmoeForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM",
            "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM",
            "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")  # fmt: skip
DENSE = [name for name in CASES if name not in MIXTURES]
STACKED = [name for name in MIXTURES if not name.startswith(("Dbrx", "Deepseek"))]


def adapted(name: str, **adapter: Any) -> tuple[Decoder, Decoder]:
    """A small model of an architecture, and the same with an adapter that has trained."""
    case = next(c for c in CASES[name] if name not in MIXTURES or is_mixture(c))
    untied = "lm_head" in str(adapter) or adapter.pop("untied", False)
    case = case | ({"tie_word_embeddings": False} if untied else {})
    base, model = decoder(settings(**case)), decoder(settings(**case))
    config = AdapterConfig(**(LORA | adapter))
    assert not list(config.check()), list(config.check())
    config.fill()
    plan = plan_adapter(model, config, split_qkv=splits_qkv(model.config))
    add_adapter(model, plan, modules_to_save=config.modules_to_save)
    init_adapter(model, 5)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return base, model


def is_mixture(case: dict[str, Any]) -> bool:
    return case.get("ffn", {}).get("ffn_type") == "dmoe"


def save(model: Decoder, folder: Path, **how: Any) -> str:
    folder.mkdir(parents=True)
    parameters = dict(model.named_parameters())
    plan = {name: lora for name, _, _, lora in adapted_layers(model)}
    whole = {n: p for n, p in parameters.items() if p.requires_grad and not is_added(n)}
    experts = model.config.ffn_config.moe_num_experts or 1
    return write_adapter(
        folder,
        model.config,
        target_matrices(plan, parameters, experts, base_token_rows(model)),
        whole=whole,
        base="base",
        **how,
    )


def exported(model: Decoder, folder: Path) -> Any:
    """What transformers loads of a model's export."""
    tokenizer = write_tokenizer(folder.parent / "tokenizer")
    to_hf(model, tokenizer, folder, dtype="fp32", card=CARD, note=lambda _: None)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def check_in_peft(base: Decoder, model: Decoder, tmp_path: Path) -> None:
    """Peft on the exported base, and the merged export, both give the adapted model's logits."""
    save(model, tmp_path / "adapter")
    expected = logits(model, rows())
    assert not torch.allclose(expected, logits(base, rows()), rtol=0, atol=1e-2)
    theirs = peft.PeftModel.from_pretrained(exported(base, tmp_path / "base"), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(theirs(rows()).logits, expected, **EXACT)
        merged = exported(model, tmp_path / "merged")
        torch.testing.assert_close(merged(rows()).logits, expected, **EXACT)


def check_read_back(base: Decoder, model: Decoder, folder: Path) -> Decoder:
    """The folder in a fresh base gives the adapted model's logits."""
    read = read_adapter(folder, base, dropout=0.0)
    add_adapter(base, read.plan, modules_to_save=read.modules_to_save)
    fill_adapter_from(base, read.tensors)
    torch.testing.assert_close(logits(base, rows()), logits(model, rows()), **EXACT)
    return base


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["LlamaForCausalLM", "MptForCausalLM", "GPT2LMHeadModel"],
        [n for n in DENSE if n != "llmfoundry"],
    ),
)
def test_peft_loads_the_folder_on_the_exported_base(name: str, tmp_path: Path) -> None:
    base, model = adapted(name)
    check_in_peft(base, model, tmp_path)
    check_read_back(base, model, tmp_path / "adapter")


@pytest.mark.parametrize(
    "adapter",
    [
        {"use_dora": True},
        {"use_rslora": True},
        {"init_lora_weights": "pissa"},
        {"use_dora": True, "init_lora_weights": "pissa"},
        {"target_modules": ["q_proj", "v_proj", "blocks.1.ffn"]},
        {"target_modules": ["wte", "lm_head", "Wqkv"]},
        {"target_modules": ["Wqkv"], "modules_to_save": ["lm_head", "norm_f"]},
    ],
    ids=str,
)
def test_every_kind_of_adapter_in_peft(adapter: dict[str, Any], tmp_path: Path) -> None:
    base, model = adapted("LlamaForCausalLM", **adapter)
    check_in_peft(base, model, tmp_path)
    check_read_back(base, model, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("name", "untied"),
    [
        ("LlamaForCausalLM", True),
        ("LlamaForCausalLM", False),
        ("GPT2LMHeadModel", False),
        ("VaultGemmaForCausalLM", True),  # scales its embeddings
    ],
)
def test_rows_of_tokens_train_in_peft_and_back(name: str, untied: bool, tmp_path: Path) -> None:
    ids = [41, 3, 17]
    base, model = adapted(name, untied=untied, trainable_token_indices=ids)
    assert base.config.tie_word_embeddings != untied
    check_in_peft(base, model, tmp_path)
    # Who goes on, in peft or here, trains the same rows.
    theirs = peft.PeftModel.from_pretrained(
        exported(base, tmp_path / "again"), tmp_path / "adapter", is_trainable=True
    )
    tables = {n for n, p in theirs.named_parameters() if p.requires_grad and "lora" not in n}
    assert len(tables) == 2 if untied else len(tables) == 1
    assert all("trainable_tokens_delta" in name for name in tables)
    ours = check_read_back(base, model, tmp_path / "adapter")
    trained = {n for n, p in ours.named_parameters() if p.requires_grad and "blocks" not in n}
    assert trained == ({"wte.lora_B", "lm_head.lora_A"} if untied else {"wte.lora_B"})
    tokens = {lora.tokens for name, _, _, lora in adapted_layers(ours) if "blocks" not in name}
    assert tokens == {tuple(ids)}
    # Merged into a base, without the factors.
    plain, _ = adapted(name, untied=untied)
    read = read_adapter(tmp_path / "adapter", plain, dropout=0.0)
    merge_into(plain, read.plan, read.tensors)
    torch.testing.assert_close(logits(plain, rows()), logits(model, rows()), **EXACT)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "VaultGemmaForCausalLM"])  # not tied
def test_an_embedding_that_trains_whole_takes_its_tied_head_to_peft(
    name: str, is_known: bool, tmp_path: Path
) -> None:
    # `is_known`: of `ensure_weight_tying`, which older versions of peft leave out.
    base, model = adapted(name, target_modules=["Wqkv"], modules_to_save=["wte"])
    save(model, tmp_path / "adapter")
    file = tmp_path / "adapter" / CONFIG
    config = json.loads(file.read_text())
    assert config.pop("ensure_weight_tying") == base.config.tie_word_embeddings
    if not is_known:
        file.write_text(json.dumps(config))
    expected = logits(model, rows())
    theirs = peft.PeftModel.from_pretrained(exported(base, tmp_path / "base"), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(theirs(rows()).logits, expected, **EXACT)
    theirs.save_pretrained(tmp_path / "again")
    check_read_back(base, model, tmp_path / "again")


def test_a_tied_head_that_differs_and_a_low_rank_tied_embedding_are_refused(tmp_path: Path) -> None:
    base, model = adapted("LlamaForCausalLM", target_modules=["Wqkv"], modules_to_save=["wte"])
    save(model, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.weight"] += 1
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"lm_head\.weight is not its embedding, and the base"):
        read_adapter(file.parent, base, dropout=0.0)
    with pytest.raises(UserError, match=r"wte is the head as well .*modules_to_save: \[wte\]"):
        adapted("LlamaForCausalLM", target_modules=["Wqkv", "wte"])


@pytest.mark.parametrize("experts", ["independent", "shared"])
@pytest.mark.parametrize("name", STACKED)
def test_stacked_experts_in_peft(name: str, experts: str, tmp_path: Path) -> None:
    base, model = adapted(name, experts=experts, train_router=True)
    check_in_peft(base, model, tmp_path)
    check_read_back(base, model, tmp_path / "adapter")


def test_experts_apart_are_those_of_the_merged_files(tmp_path: Path) -> None:
    base, model = adapted("MixtralForCausalLM", target_modules=["experts"])
    save(model, tmp_path / "adapter", experts="separate")
    low = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    exported(base, tmp_path / "base"), exported(model, tmp_path / "merged")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("base", "merged"))
    assert config["r"] == 3 and config["target_parameters"] is None
    modules = {name.partition(".lora_")[0] for name in low}
    assert len(modules) == 2 * 3 * model.config.ffn_config.moe_num_experts
    for module in modules:
        name = module.removeprefix("base_model.model.") + ".weight"
        a, b = (low[f"{module}.lora_{side}.weight"] for side in "AB")
        expected = before[name] + 7 / 3 * b @ a
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-5)
    check_read_back(base, model, tmp_path / "adapter")


def test_peft_serves_dbrx_but_for_its_experts(tmp_path: Path) -> None:
    base, model = adapted("DbrxForCausalLM", exclude_modules=["experts"], train_router=True)
    check_in_peft(base, model, tmp_path)
    base, model = adapted("DbrxForCausalLM")
    save(model, tmp_path / "experts")
    with pytest.raises((KeyError, ValueError), match="LLMFOUNDRY_LORA"):
        peft.PeftModel.from_pretrained(exported(base, tmp_path / "again"), tmp_path / "experts")
    check_read_back(base, model, tmp_path / "experts")


@pytest.mark.parametrize("name", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_peft_serves_deepseek_but_for_plain_feed_forward_layers(name: str, tmp_path: Path) -> None:
    targets = ["attn", "experts"]
    base, model = adapted(name, target_modules=targets, train_router=True)
    check_in_peft(base, model, tmp_path)
    check_read_back(base, model, tmp_path / "adapter")
    base, model = adapted(name)
    save(model, tmp_path / "all")
    with pytest.raises((KeyError, ValueError), match="LLMFOUNDRY_LORA"):
        peft.PeftModel.from_pretrained(exported(base, tmp_path / "again"), tmp_path / "all")
    check_read_back(base, model, tmp_path / "all")


def test_our_own_class_keeps_our_names(tmp_path: Path) -> None:
    base, model = adapted("llmfoundry")
    save(model, tmp_path / "adapter")
    check_read_back(base, model, tmp_path / "adapter")


def test_an_adapter_of_another_shape_is_refused(tmp_path: Path) -> None:
    _, model = adapted("LlamaForCausalLM")
    save(model, tmp_path / "adapter")
    other = decoder(settings(**(CASES["LlamaForCausalLM"][0] | {"d_model": 64})))
    with pytest.raises(UserError, match="made for another base model"):
        read_adapter(tmp_path / "adapter", other, dropout=0.0)
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    for change, said in (
        ({"r": 3 * config["r"]}, "has rank .*, which adapter_config.json does not say"),
        ({"r": -1}, "r -1; write a number above 0"),
        ({"lora_alpha": 0}, "lora_alpha 0; write a number above 0"),
        ({"alpha_pattern": {"q_proj": "2"}}, "lora_alpha '2'; write a number above 0"),
        ({"use_dora": True}, "use_dora True in adapter_config.json, and adapter_model.*otherwise"),
        ({"rank_pattern": [1]}, "rank_pattern is not a section"),
    ):
        file.write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=said):
            read_adapter(tmp_path / "adapter", model, dropout=0.0)
    file.write_text('{"r":' * 100_000)
    with pytest.raises(UserError, match="is not JSON: nested more than 64 deep"):
        read_adapter(tmp_path / "adapter", model, dropout=0.0)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match="is not a file; write a folder that peft saved"):
        read_adapter(tmp_path / "adapter", model, dropout=0.0)
    file.unlink()
    with pytest.raises(UserError, match="is missing; write a folder that peft saved"):
        read_adapter(tmp_path / "adapter", model, dropout=0.0)
    file.write_text(json.dumps(config))
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="is missing; save the adapter"):
        read_adapter(tmp_path / "adapter", other, dropout=0.0)
