"""What each shipped model is exported as."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmfoundry.errors import UserError
from llmfoundry.hf.choose_architecture import choose_architecture
from llmfoundry.hf.read_folder import from_hf
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.typed import build
from llmfoundry.recipe.yaml_file import read_yaml
from tests.hf.random_models import CARD, ROWS, decoder, logits, rows, to_hf, write_tokenizer

MODELS = Path(__file__).resolve().parents[2] / "yamls" / "model"
EXPORTED = {  # the longest beginning of the file's name that is here
    "dbrx": "DbrxForCausalLM",
    "deepseek": "DeepseekV3ForCausalLM",
    "deepseek-v2-lite": "DeepseekV2ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mpt": "GPT2LMHeadModel",
    "mpt-7b-alibi": "MptForCausalLM",
    "quickstart": "LlamaForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
NONE = "mpt-7b-storywriter"  # transformers' MPT has ALiBi of exponent 8 alone


def shipped(name: str, vocab_size: int) -> ModelConfig:
    config = build(ModelConfig, read_yaml(MODELS / f"{name}.yaml"), [])
    config = config.resolve(max_seq_len=64, vocab_size=vocab_size)
    return config


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.yaml")))
def test_every_shipped_model_but_one_can_be_exported(name: str) -> None:
    if name == NONE:
        with pytest.raises(UserError) as caught:
            choose_architecture(shipped(name, 512), None)
        assert "write architecture=llmfoundry " in caught.value.problems[0]
        assert caught.value.problems[1].startswith("model.attn_config.alibi_bias_max: 16; Mpt")
        return
    expected = max((key for key in EXPORTED if name.startswith(key)), key=len)
    assert choose_architecture(shipped(name, 512), None) == EXPORTED[expected]


@pytest.mark.parametrize("name", ["dbrx-tiny", "dbrx-tiny-dense", "quickstart"])
def test_the_small_ones_give_the_same_logits_there(name: str, tmp_path: Path) -> None:
    model, said = decoder(shipped(name, ROWS)), []
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 0.3 if weight.ndim > 1 else 1  # as wide as these are
    tokenizer, out = write_tokenizer(tmp_path / "tokenizer"), tmp_path / "out"
    to_hf(model, tokenizer, out, dtype="fp32", card=CARD, note=said.append)
    theirs = AutoModelForCausalLM.from_pretrained(out).eval()
    ours = logits(model, rows())
    assert ours.std() > 0.05
    with torch.no_grad():
        assert (theirs(rows()).logits - ours).abs().max() < 2e-5
    copied = [line for line in said if line.startswith("model.tie_word_embeddings: true is left")]
    assert len(copied) == name.startswith("dbrx")
    config, state = from_hf(str(out))
    assert config.tie_word_embeddings == (not copied)
    assert torch.equal(state.get("lm_head.weight", model.wte.weight), model.wte.weight)
