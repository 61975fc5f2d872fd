"""Every tensor of a file is read or refused by its name, and all of the model is filled."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import llmfoundry.hf  # noqa: F401  (registers the project's own class)
from llmfoundry.errors import UserError
from llmfoundry.hf import read_folder
from llmfoundry.hf.architectures import ARCHITECTURES
from llmfoundry.hf.tensor_names import MAPS, to_theirs
from llmfoundry.models.decoder import Decoder
from tests.hf.random_models import (
    CARD,
    LLAMA,
    UNTIED,
    decoder,
    logits,
    rewrite,
    rows,
    settings,
    to_hf,
    write_tokenizer,
    written,
)

EVERY = [*ARCHITECTURES, "llmfoundry"]
FILE = "model.safetensors"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What `from_hf` finds in place of a folder's weights."""
    tensors: dict[str, Tensor] = {}

    class Held:
        notes = ()
        names = property(lambda _: set(tensors))
        get = sketch = staticmethod(tensors.__getitem__)

    monkeypatch.setattr(read_folder, "open_weights", lambda _: nullcontext(Held()))
    return tensors


def few(names: Any) -> list[str]:
    """One of each kind: of layers the last, of experts the first."""
    return [name for name in names if ".0." not in name.replace("experts.0.", "")]


@pytest.mark.parametrize("name", EVERY)
def test_a_tensor_more_or_less_is_refused_by_its_name(
    name: str, held: dict[str, Tensor], tmp_path: Path
) -> None:
    folder, _ = written(name, tmp_path)
    whole = load_file(folder / FILE)

    def refuses(key: str, tensor: Tensor | None) -> None:
        held.clear()
        held.update({**whole, key: tensor} if tensor is not None else whole)
        if tensor is None:
            del held[key]
        with pytest.raises(UserError) as caught:
            read_folder.from_hf(str(folder))
        assert caught.value.problems[0].startswith(key), caught.value.problems

    for key in (key for key in few(whole) if "experts.1" not in key):
        refuses(key, None)
        refuses(f"{key}_scale", torch.zeros(3))
        bias = key.removesuffix("weight") + "bias"
        if key.endswith("weight") and bias not in whole:
            refuses(bias, torch.full(whole[key].shape[:1], 0.1))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_biases_of_zeros_are_no_obstacle(
    name: str, held: dict[str, Tensor], tmp_path: Path
) -> None:
    folder, _ = written(name, tmp_path)
    held |= load_file(folder / FILE)
    before = read_folder.from_hf(str(folder))[1]
    for key, weight in list(held.items()):
        if key.endswith(".weight"):
            held.setdefault(key.removesuffix("weight") + "bias", weight.new_zeros(len(weight)))
    after = read_folder.from_hf(str(folder))[1]
    assert all(torch.equal(after[key], weight) for key, weight in before.items())


def test_weights_of_layers_that_the_settings_do_not_have_are_refused(
    held: dict[str, Tensor], tmp_path: Path
) -> None:
    """Their names are known, and it is the settings that have no use for them."""
    folder, config = written("Qwen3ForCausalLM", tmp_path)
    held |= load_file(folder / FILE)
    rewrite(folder, {**config, "model_type": "llama"}, "attention_bias", False)
    with pytest.raises(UserError, match=r"k_norm\.weight and 3 more: the decoder has no"):
        read_folder.from_hf(str(folder))


def test_a_weight_of_ours_that_has_no_name_there_is_not_left_out() -> None:
    state = decoder(settings(**LLAMA)).state_dict() | {"blocks.1.ffn.scale": torch.ones(3)}
    with pytest.raises(UserError, match=r"^blocks\.1\.ffn\.scale: has no place there"):
        list(to_theirs(MAPS["LlamaForCausalLM"], settings(**LLAMA), state, state.__getitem__))


TIED = {  # architectures, the embedding's name there, and settings of models with a head
    "LlamaForCausalLM": ("model.embed_tokens.weight", {**LLAMA, **UNTIED}),
    "GPT2LMHeadModel": ("transformer.wte.weight", UNTIED),
    "VaultGemmaForCausalLM": (
        "model.embed_tokens.weight",
        {**LLAMA, "d_model": 64, "final_logit_softcapping": 2.0, **UNTIED},
    ),
}


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("name", TIED)
def test_a_head_beside_the_embedding_is_read_as_transformers_reads_it(
    name: str, said: bool, tmp_path: Path
) -> None:
    """Whatever tie_word_embeddings says: different, equal, or one of the two alone."""
    embedding, case = TIED[name]
    folder, tokenizer = tmp_path / "out", write_tokenizer(tmp_path / "tokenizer")
    to_hf(decoder(settings(**case)), tokenizer, folder, dtype="fp32", card=CARD, architecture=name)
    written_config = json.loads((folder / "config.json").read_text())
    rewrite(folder, written_config, "tie_word_embeddings", said)
    own = load_file(folder / FILE)
    equal: dict[str, Tensor | None] = {read_folder.HEAD: own[embedding].clone()}
    for changes in ({}, equal, {embedding: None}, {read_folder.HEAD: None}):
        tensors = {key: w for key, w in {**own, **changes}.items() if w is not None}
        save_file(tensors, folder / FILE, {"format": "pt"})
        notes: list[str] = []
        if None in changes.values() and not said:  # transformers would draw it at random
            (missing,) = changes
            with pytest.raises(UserError, match=f"^{missing}: the tensor is missing"):
                read_folder.from_hf(str(folder))
            continue
        config, state = read_folder.from_hf(str(folder), note=notes.append)
        ours = Decoder(config)
        ours.load_state_dict(state)
        theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            assert (logits(ours, rows()) - theirs(rows()).logits).abs().max() < 2e-5
        assert len(notes) == (said and not changes)
