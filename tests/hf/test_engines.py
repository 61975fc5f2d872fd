"""What the model card says of engines, of which transformers' continuous batching is asked here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmfoundry.hf.card import BATCHES, BATCHES_WRONGLY, BATCHING
from tests.hf.gguf_models import GGUF_CASES, SHAPE, save, trained
from tests.hf.random_models import CARD, decoder, settings, to_hf
from tests.hf.test_hf_class import batched, decoded

NEW = 8
ONE_EACH = dict(GGUF_CASES.values())


@pytest.mark.parametrize("name", ONE_EACH)
def test_the_card_says_whether_continuous_batching_is_right(name: str, tmp_path: Path) -> None:
    model, folder = decoder(settings(**{**SHAPE, **ONE_EACH[name]})), tmp_path / "tokenizer"
    save(trained(), folder)
    to_hf(model, folder, tmp_path / "hf", dtype="fp32", card=CARD, architecture=name)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(500, (n,), generator=generator).tolist() for n in (48, 20)]
    wanted = [decoded(model, prompt, NEW) for prompt in prompts]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    found = batched(theirs, prompts, NEW)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert (found == wanted) == (f"- {BATCHING}" in card) == (name in BATCHES)
    assert (f"**not** {BATCHING}: wrong tokens" in card) == (name in BATCHES_WRONGLY)
    assert "to=gguf" in card and ("- vLLM" in card)


def test_the_card_of_our_own_class_promises_no_engine_that_refuses_it(tmp_path: Path) -> None:
    save(trained(), tmp_path / "tokenizer")
    for name, attn in {"alibi": {"alibi": True}, "rope": {"rope": True}}.items():
        model = decoder(settings(**{**SHAPE, "attn": attn, "learned_pos_emb": False}))
        out = tmp_path / name
        to_hf(
            model, tmp_path / "tokenizer", out, dtype="fp32", card=CARD, architecture="llmfoundry"
        )
        card = (out / "README.md").read_text()
        assert ("cannot attend with ALiBi and is refused" in card) == (name == "alibi")
        assert "vLLM" not in card and "to=gguf" not in card
