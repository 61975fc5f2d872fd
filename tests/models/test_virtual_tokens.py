"""Tuned prompts and prefixes, compared with peft's own of each document alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from llmfoundry.distributed.activation_checkpoint import wrap_blocks
from llmfoundry.errors import UserError
from llmfoundry.hf.peft.virtual import write_virtual
from llmfoundry.hf.transformers_models.layouts import visible
from llmfoundry.hf.transformers_models.prefix import check_prefix
from llmfoundry.hf.write import to_hf
from llmfoundry.models.adapters.adapt import switched_off
from llmfoundry.models.decoder import Root
from llmfoundry.models.virtual_tokens import VirtualTokens, add_virtual
from llmfoundry.ops.packed_layout import Layout
from llmfoundry.ops.virtual import in_front
from tests.hf.random_models import CARD, CASES, decoder, rows, settings, write_tokenizer
from tests.models.test_hf_causal_lm import LAYOUT, ROWS, held, save_class, tokens

peft = pytest.importorskip("peft")
CPU = torch.device("cpu")
COUNT = 3
OTHERS = ("llama", "qwen3", "mistral", "gpt2", "mixtral")
SERVED = ["gpt_neox", "mpt", "gemma2"]
SERVED += [pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS]  # type: ignore[misc]
DECODED = ["LlamaForCausalLM", "MptForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM"]
DECODED += [pytest.param("VaultGemmaForCausalLM", marks=pytest.mark.slow)]  # type: ignore[list-item]


def tune(model: Any, kind: str) -> Any:
    """The model with random virtual tokens, large enough to matter."""
    add_virtual(model, VirtualTokens(kind, COUNT), dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        model.prompt_embeddings.normal_(0, 0.7, generator=generator)
    return model


def by_peft(theirs: Any, ours: Any, folder: Path) -> Any:
    """The class under peft, with the virtual tokens of ours as they are written."""
    folder.mkdir()
    values = ours.prompt_embeddings.detach()
    write_virtual(folder, ours.config, ours.virtual, values, "base")
    return peft.PeftModel.from_pretrained(theirs, folder).eval()


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("tuning", ["prompt_tuning", "prefix_tuning"])
@pytest.mark.parametrize("kind", SERVED)
def test_every_packed_document_has_its_own(kind: str, tuning: str, tmp_path: Path) -> None:
    theirs, x = save_class(kind, tmp_path / "base"), tokens()
    ours = held(tmp_path / "base")
    check_prefix(ours)
    tune(ours, tuning)
    tuned = by_peft(theirs, ours, tmp_path / "adapter")
    close(ours.head(ours(x)), tuned(x).logits[:, -x.shape[1] :])
    layout = Layout.from_lengths(LAYOUT)
    packed = ours.head(ours(x, layout))
    for row, lengths in enumerate(LAYOUT):
        for part, logits in zip(x[row].split(lengths), packed[row].split(lengths), strict=True):
            close(logits, tuned(part[None]).logits[0, -len(part) :])
    changed = x.clone()
    changed[:, :7] = (x[:, :7] + 1) % ROWS
    others = ours.head(ours(changed, layout))
    close(others[0, 7:], packed[0, 7:])
    close(others[1, 13:], packed[1, 13:])
    with switched_off(ours), tuned.disable_adapter():
        close(ours.head(ours(x, layout))[0, :7], tuned(x[:1, :7]).logits[0])


@torch.no_grad()
@pytest.mark.parametrize("name", DECODED)
def test_the_decoder_s_prompt_is_peft_s(name: str, tmp_path: Path) -> None:
    """Packed, in trees, token by token from a cache, and in rows of different numbers."""
    ours = decoder(settings(**CASES[name][0])).eval()
    tokenizer, x = write_tokenizer(tmp_path / "tokenizer"), rows(20)
    to_hf(ours, tokenizer, tmp_path / "base", dtype="fp32", card=CARD, architecture=name)
    tune(ours, "prompt_tuning")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    tuned = by_peft(theirs.eval(), ours, tmp_path / "adapter")
    layout = Layout.from_lengths([[7, 13], [3, 9, 2, 6]], (0, 6))
    packed = ours.head(ours(x, layout))
    for row, lengths in enumerate([[7, 13], [3, 9, 2]]):
        at = 0
        for n in lengths:
            alone = tuned(x[row : row + 1, at : at + n]).logits[0, -n:]
            close(packed[row, at : at + n], alone)
            at += n
    tree = Layout.from_ends([[15] * 4 + [10] * 6 + [15] * 5 + [20] * 5])
    found = ours.head(ours(x[:1], tree))[0]
    for token in (3, 9, 14, 19):
        path = visible(tree)[0, token].nonzero()[:, 0]
        close(found[path], tuned(x[:1, path]).logits[0, -len(path) :])
    cache = ours.new_cache(batch=2, max_len=20, device=CPU, dtype=torch.float32)
    parts = [ours.head(ours(part, None, cache)) for part in x.split([9, 1, 10], dim=1)]
    close(torch.cat(parts, 1), tuned(x).logits[:, COUNT:])
    assert cache.length == 20


def test_only_the_virtual_tokens_have_gradients_and_checkpointing_changes_none(
    tmp_path: Path,
) -> None:
    save_class("llama", tmp_path)
    for kind in ("prompt_tuning", "prefix_tuning"):
        gradients = []
        for checkpointing in (False, True):
            model = tune(held(tmp_path), kind)
            root = Root(model).train()
            wrap_blocks(root, checkpointing=checkpointing, compile_mode=None)
            hidden = root(tokens(), Layout.from_lengths(LAYOUT), lambda _, hidden: hidden)
            hidden.square().sum().backward()
            gradients.append(model.prompt_embeddings.grad)
            assert all(p.grad is None for p in model.hf.parameters())
        assert gradients[0].abs().min() > 0
        torch.testing.assert_close(*gradients)


def test_a_class_without_keys_and_values_is_refused(tmp_path: Path) -> None:
    save_class("mamba", tmp_path)
    with pytest.raises(UserError, match=r"prefix_tuning needs .* MambaForCausalLM does"):
        check_prefix(held(tmp_path))


def test_wider_rows_by_hand() -> None:
    layout = Layout.from_lengths([[2, 1, 2], [5]], (2, 0))
    wide = in_front(layout, torch.Size((2, 5)), 2, CPU)
    assert wide.virtual.tolist() == [[0, 1, -1, -1, 0, 1, -1, -1, -1], [0, 1, *[-1] * 7]]
    assert wide.places.tolist() == [[2, 3, 6, 7, 8], [2, 3, 4, 5, 6]]
    assert wide.layout is not None
    assert wide.layout.lengths == ((4, 3, 2), (7, 2)) and wide.layout.padding == (2, 2)
    expected = Layout.from_lengths(wide.layout.lengths)
    assert torch.equal(wide.layout.positions, expected.positions)
    assert torch.equal(wide.layout.documents, expected.documents)
