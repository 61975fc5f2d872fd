"""The project's own class inside transformers: loading, generating, padding, saving."""

from __future__ import annotations

import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.cache_utils import DynamicCache
from transformers.generation import ContinuousBatchingConfig

from llmfoundry.errors import UserError
from llmfoundry.hf import LlmfoundryConfig, LlmfoundryForCausalLM
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.typed import to_dict
from tests.hf.random_models import (
    BARE,
    CARD,
    CASES,
    CLIP,
    DYNAMIC,
    EOS,
    GLU,
    GQA,
    LATENTS,
    LENGTH,
    MLP,
    RMS,
    ROPE,
    ROWS,
    SCALE,
    SUM,
    WINDOW,
    decoder,
    logits,
    rows,
    settings,
    to_hf,
    write_tokenizer,
)

MODELS = range(len(CASES["llmfoundry"]))
PROMPT = [EOS, 3, 4, 5]


@pytest.fixture(params=MODELS)
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return export(request.param, tmp_path)


def export(case: int, tmp_path: Path) -> LlmfoundryForCausalLM:
    model = decoder(settings(**CASES["llmfoundry"][case]))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    out = tmp_path / "out"
    to_hf(model, tokenizer, out, dtype="fp32", card=CARD, architecture="llmfoundry")
    return AutoModelForCausalLM.from_pretrained(out).eval()


def continued(model: Any, prompt: list[int], new: int, **options: Any) -> list[int]:
    options = {"do_sample": False, **options}
    row = model.generate(torch.tensor([prompt]), max_new_tokens=new, min_new_tokens=new, **options)
    return row[0, len(prompt) :].tolist()


def test_generation_does_not_depend_on_the_cache(theirs: Any) -> None:
    greedy = continued(theirs, PROMPT, 20)
    assert len(set(greedy)) > 1
    assert greedy == continued(theirs, PROMPT, 20, use_cache=False)
    beams = continued(theirs, PROMPT, 20, num_beams=3)
    assert beams == continued(theirs, PROMPT, 20, num_beams=3, use_cache=False)


def test_rows_that_outgrow_max_seq_len_do_not_depend_on_the_cache(tmp_path: Path) -> None:
    """Dynamic frequencies change with every token, and with them all keys of the cache."""
    (case,) = (i for i, c in enumerate(CASES["llmfoundry"]) if c.get("attn") == DYNAMIC | WINDOW)
    model = export(case, tmp_path)
    greedy = continued(model, PROMPT, 2 * LENGTH)
    assert greedy == continued(model, PROMPT, 2 * LENGTH, use_cache=False)


def test_dropout_is_for_training_alone(tmp_path: Path) -> None:
    (case,) = (i for i, c in enumerate(CASES["llmfoundry"]) if "resid_pdrop" in c)
    model = export(case, tmp_path)
    with torch.no_grad():
        assert torch.equal(model(rows()).logits, model(rows()).logits)
        model.train()
        assert not torch.equal(model(rows()).logits, model(rows()).logits)


def test_padding_on_the_left_changes_nothing(theirs: Any) -> None:
    """Short rows beside long ones are continued as they are alone."""
    short, long = [EOS, 7], [EOS, 3, 4, 5, 6]
    batch = torch.tensor([[EOS] * 3 + short, long])
    mask = torch.tensor([[0] * 3 + [1] * 2, [1] * 5])
    out = theirs.generate(
        batch, attention_mask=mask, do_sample=False, max_new_tokens=12, min_new_tokens=12
    )
    assert out[0, 5:].tolist() == continued(theirs, short, 12)
    assert out[1, 5:].tolist() == continued(theirs, long, 12)


def test_padding_on_the_right_changes_nothing(theirs: Any) -> None:
    row = rows()[:1, :10]
    mask = torch.tensor([[1] * 7 + [0] * 3])
    with torch.no_grad():
        padded = theirs(row, attention_mask=mask).logits[:, :7]
        assert torch.allclose(padded, theirs(row[:, :7]).logits, atol=1e-5)


def test_positions_that_begin_again_are_documents_of_their_own(theirs: Any) -> None:
    one, other = rows()[0, :5], rows()[1, :7]
    packed = torch.cat([one, other])[None]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        both = theirs(packed, position_ids=positions).logits[0]
        apart = [theirs(row[None]).logits[0] for row in (one, other)]
    assert (both - torch.cat(apart)).abs().max() < 2e-5


ENGINE_CASES = {
    "rope": {"attn": ROPE | GQA, "ffn": GLU, **RMS},
    "learned": {"ffn": MLP},
    "nope": {"attn": {"nope": True}, "learned_pos_emb": False, "ffn": GLU},
    "scaled": {"attn": ROPE | {"qk_ln": True} | SCALE, "ffn": GLU, "logit_scale": 0.5},
    "experts": {"attn": ROPE | CLIP, "ffn": SUM, **BARE},
}
NAMES = signature(ContinuousBatchingConfig).parameters
PAGE = "page_size" if "page_size" in NAMES else "block_size"  # of older transformers
BATCHING = ContinuousBatchingConfig(
    num_blocks=16, max_batch_tokens=32, use_cuda_graph=False, **{PAGE: 8}
)


def batched(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy tokens by transformers' continuous batching."""
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    found = model.generate_batch(
        prompts, greedy, continuous_batching_config=BATCHING, progress_bar=False
    )
    return [request.generated_tokens for request in found.values()]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ENGINE_CASES)
def test_continuous_batching_writes_what_the_decoder_alone_does(case: str, attention: str) -> None:
    model = own_class(ENGINE_CASES[case], attention)
    prompts = [row[:length].tolist() for row, length in zip(rows(), (9, 3), strict=True)]
    assert batched(model, prompts, 6) == [decoded(model.model, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize(
    "attn", [{"alibi": True}, ROPE | WINDOW, DYNAMIC, LATENTS, ROPE | {"sinks": True}], ids=str
)
def test_what_an_engine_would_leave_out_is_refused_before_a_token(attn: dict[str, Any]) -> None:
    model = own_class({"attn": attn, "learned_pos_emb": False, "ffn": GLU}, "sdpa")
    with pytest.raises(ValueError, match=r"^attn_config\..*engines"):
        batched(model, [PROMPT], 2)
    with pytest.raises(ValueError, match=r"^attn_config\..*engines"):
        model(torch.tensor([PROMPT]), cache=object())
    with pytest.raises(ValueError, match=r"^attn_config\..*engines"):
        own_class({"attn": attn, "learned_pos_emb": False, "ffn": GLU}, "paged|eager")


def own_class(case: dict[str, Any], attention: str) -> LlmfoundryForCausalLM:
    plain = decoder(settings(**case))
    config = LlmfoundryConfig(to_dict(plain.config), attn_implementation=attention)
    model = LlmfoundryForCausalLM(config)
    model.model.load_state_dict(plain.state_dict())
    return model.eval()


def decoded(model: Decoder, prompt: list[int], new: int) -> list[int]:
    """Greedy tokens, each from the whole row."""
    row = list(prompt)
    for _ in range(new):
        row.append(int(logits(model, torch.tensor([row]))[0, -1].argmax()))
    return row[len(prompt) :]


def test_the_loss_is_the_shifted_cross_entropy(theirs: Any) -> None:
    labels = rows().clone()
    labels[0, :9] = -100
    with torch.no_grad():
        output = theirs(rows(), labels=labels)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert output.loss == pytest.approx(float(expected))


def test_saving_and_loading_again_gives_the_same_model(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(again(rows()).logits, theirs(rows()).logits)
    assert again.config.settings == theirs.config.settings


def test_weights_that_do_not_fit_are_an_error_not_random_numbers(tmp_path: Path) -> None:
    """By itself transformers would draw the one anew, and leave the other out."""
    export(1, tmp_path)
    file, name = tmp_path / "out" / "model.safetensors", "model.blocks.1.ffn.gate_proj.weight"
    whole = load_file(file)
    save_file({k: v for k, v in whole.items() if k != name}, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"^{name}: is not in the file"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    save_file(whole | {f"{name}_scale": torch.ones(3)}, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"^{name}_scale: has no place in the model"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_more_rows_in_the_embedding_keep_the_old_tokens_logits(theirs: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        before = theirs(rows()).logits
        theirs.resize_token_embeddings(ROWS + 64)
        assert torch.equal(theirs(rows()).logits[..., :ROWS], before)
        theirs.save_pretrained(tmp_path / "more")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "more")
        assert again.config.vocab_size == ROWS + 64
        assert torch.equal(again(rows()).logits, theirs(rows()).logits)


def test_the_config_answers_by_transformers_names(tmp_path: Path) -> None:
    export(0, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (32, 2, 8)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.vocab_size, config.max_position_embeddings) == (ROWS, LENGTH)
    assert config.eos_token_id == EOS and config.tie_word_embeddings is True


def test_what_the_decoder_cannot_do_is_an_error_not_a_wrong_answer(tmp_path: Path) -> None:
    model = export(0, tmp_path)
    row = rows()[:1, :6]
    with pytest.raises(ValueError, match=r"^position_ids: "):
        model(row, position_ids=torch.tensor([[0, 1, 2, 2, 3, 4]]))
    with pytest.raises(ValueError, match="packed rows have no key-value cache"):
        packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
        model(row, position_ids=packed, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=r"^attention_mask: .*in pieces"):
        model(row, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]]))
    with pytest.raises(ValueError, match=r"^inputs_embeds: "):
        model(row, inputs_embeds=torch.zeros(1, 6, 32))
    with pytest.raises(ValueError, match="use_cache=False"):
        past = model(row, use_cache=True).past_key_values
        model(row[:, :1], attention_mask=torch.tensor([[0] + [1] * 6]), past_key_values=past)
    with pytest.raises(ValueError, match=r"^cache: StaticCache"):
        continued(model, PROMPT, 4, cache_implementation="static")


def test_a_model_from_its_config_alone_is_initialized(tmp_path: Path) -> None:
    fresh = AutoModelForCausalLM.from_config(export(1, tmp_path).config)
    for name, parameter in fresh.named_parameters():
        kind = name.split(".")[-2:]
        if parameter.ndim == 1:
            expected = 0.0 if kind[-1] == "bias" else 1.0
            assert (parameter == expected).all(), name
        else:
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.15), name


def test_importing_the_module_is_all_that_a_script_needs(tmp_path: Path) -> None:
    """In a process of its own, where nothing else has registered the class."""
    export(0, tmp_path)
    code = (
        "import llmfoundry.hf, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r})\n"
        "print(type(model).__name__, model(torch.tensor([[1, 2]])).logits.sum().item())\n"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    name, total = out.stdout.split()
    ours = decoder(settings(**CASES["llmfoundry"][0]))
    assert name == "LlmfoundryForCausalLM"
    assert float(total) == pytest.approx(
        float(logits(ours, torch.tensor([[1, 2]])).sum()), abs=1e-4
    )
