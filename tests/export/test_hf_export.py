"""What `to_hf` writes, as transformers understands it, and as `from_hf` reads it back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import llmfoundry.hf  # noqa: F401  (registers the project's own class)
from llmfoundry.errors import UserError
from llmfoundry.export.architectures import ARCHITECTURES
from llmfoundry.export.hf import from_hf, to_hf
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.model import ModelConfig
from tests.export.random_models import (
    ALIBI,
    ASKED_FOR,
    CARD,
    CASES,
    EOS,
    HEADS,
    ROPE,
    ROWS,
    WIDTH,
    decoder,
    logits,
    rows,
    settings,
    write_tokenizer,
)

ALL = [(name, case) for name, cases in CASES.items() for case in cases]
IDS = [f"{name}-{i}" for name, cases in CASES.items() for i in range(len(cases))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def load(folder: Path, **options: Any) -> Any:
    """Transformers' model, after making sure that it found each weight and no other."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


def transformers_logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load(folder)(rows()).logits


@pytest.mark.parametrize(("name", "case"), ALL, ids=IDS)
def test_transformers_gives_the_same_logits_and_reading_back_the_same_model(
    name: str, case: dict[str, Any], tokenizer: Path, tmp_path: Path
) -> None:
    model = decoder(settings(**case))
    wanted = name if name in ASKED_FOR else None
    out = tmp_path / "out"
    used = to_hf(model, tokenizer, out, dtype="fp32", card=CARD, architecture=wanted)
    assert used == name
    ours = logits(model, rows())
    assert (transformers_logits(out) - ours).abs().max() < 1e-5

    config, state = from_hf(str(out))
    assert same_shape(config, model.config)
    back = Decoder(config)
    back.load_state_dict(state)
    for key, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], weight), key
    assert torch.equal(logits(back, rows()), ours)


def same_shape(one: ModelConfig, two: ModelConfig) -> bool:
    """Equal but for the ways of writing the feed-forward width, and how weights once started."""
    either = {"expansion_ratio": None, "init_config": one.init_config}
    return dataclasses.replace(one, **either) == dataclasses.replace(two, **either)


def changed(config: ModelConfig, key: str, value: Any) -> ModelConfig:
    """`config` with dotted `key` set and what is derived from it derived anew."""
    section, _, name = key.rpartition(".")
    parts = {part: getattr(config, part) for part in ("attn_config", "ffn_config")}
    if section:
        new = {section: dataclasses.replace(parts[section], **{name: value})}
    else:
        new = {name: value}
    return dataclasses.replace(config, **{**parts, **new})


def _other_positions(config: ModelConfig, positions: dict[str, Any]) -> ModelConfig:
    none = {"alibi": False, "alibi_bias_max": None, "rope": False, "rope_theta": None}
    attn = dataclasses.replace(config.attn_config, **{**none, **positions})
    new = dataclasses.replace(config, attn_config=attn, learned_pos_emb=None)
    new.fill()
    return new


CHANGES: dict[str, Any] = {  # every setting that logits depend on, changed alone
    "model.attn_config.alibi": lambda c: _other_positions(c, {"rope": True}),
    "model.attn_config.rope": lambda c: _other_positions(c, {"alibi": True}),
    "model.learned_pos_emb": lambda c: _other_positions(
        c, {"alibi": True} if c.learned_pos_emb else {}
    ),
    "model.attn_config.alibi_bias_max": lambda c: changed(c, "attn_config.alibi_bias_max", 4),
    "model.attn_config.rope_theta": lambda c: changed(c, "attn_config.rope_theta", 77.0),
    "model.attn_config.attn_type": lambda c: changed(
        c, "attn_config.kv_n_heads", 2 if c.attn_config.kv_n_heads == HEADS else HEADS
    ),
    "model.attn_config.clip_qkv": lambda c: changed(c, "attn_config.clip_qkv", 0.4),
    "model.attn_config.softmax_scale": lambda c: changed(c, "attn_config.softmax_scale", 0.7),
    "model.attn_config.qk_ln": lambda c: changed(c, "attn_config.qk_ln", not c.attn_config.qk_ln),
    "model.norm_type": lambda c: changed(
        c, "norm_type", "layernorm" if c.norm_type == "rmsnorm" else "rmsnorm"
    ),
    "model.norm_eps": lambda c: changed(c, "norm_eps", 0.3),
    "model.no_bias": lambda c: changed(c, "no_bias", not c.no_bias),
    "model.tie_word_embeddings": lambda c: changed(
        c, "tie_word_embeddings", not c.tie_word_embeddings
    ),
    "model.ffn_config.ffn_type": lambda c: changed(
        c, "ffn_config.ffn_type", "mptmlp" if c.ffn_config.ffn_type == "mptglu" else "mptglu"
    ),
    "model.ffn_config.ffn_act_fn": lambda c: changed(c, "ffn_config.ffn_act_fn", "relu"),
    "model.ffn_config.ffn_hidden_size": lambda c: changed(c, "ffn_config.ffn_hidden_size", 40),
    "model.head_dim": lambda c: changed(c, "head_dim", 2 * c.head_dim),
    "model.n_heads": lambda c: dataclasses.replace(
        changed(c, "attn_config.kv_n_heads", 3), n_heads=3, head_dim=12
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_setting_is_either_kept_exactly_or_refused_by_its_key(
    name: str, tokenizer: Path, tmp_path: Path
) -> None:
    """No setting is dropped in silence, as transformers itself would with several of them."""
    base = settings(**CASES[name][0])
    refused = set()
    for number, (key, change) in enumerate(CHANGES.items()):
        config = change(base)
        model, out = decoder(config), tmp_path / str(number)
        try:
            to_hf(model, tokenizer, out, dtype="fp32", card=CARD, architecture=name)
        except UserError as error:
            refused.add(key)
            blamed = [line.split(":")[0] for line in error.problems]
            assert alike(key) & set(blamed), (key, error.problems)
            assert all(name in line for line in error.problems)
            assert "architecture=llmfoundry" in error.problems[-1]
        else:
            theirs = transformers_logits(out)
            assert (theirs - logits(model, rows())).abs().max() < 1e-5, key
    needs = {f"model.{need.key}" for need in ARCHITECTURES[name].needs}
    assert needs <= refused, "a need that no change offends"


def alike(key: str) -> set[str]:
    """Keys that a refusal may name for a change of `key`: it offends what excludes it."""
    positions = {"model.attn_config.alibi", "model.attn_config.rope", "model.learned_pos_emb"}
    groups = (positions, {"model.n_heads", "model.head_dim"}, {key})
    return next(group for group in groups if key in group)


def test_a_refusal_without_a_wish_lists_what_is_in_the_nearest_ones_way(
    tokenizer: Path, tmp_path: Path
) -> None:
    config = settings(attn=ALIBI | {"qk_ln": True, "alibi_bias_max": 4}, no_bias=True)
    with pytest.raises(UserError) as caught:
        to_hf(decoder(config), tokenizer, tmp_path / "out", dtype="fp32", card=CARD)
    assert list(caught.value.problems[:-1]) == [
        "model.attn_config.alibi_bias_max: 4; MptForCausalLM needs 8",
        "model.attn_config.qk_ln: true; MptForCausalLM needs false",
    ]
    assert caught.value.problems[-1].startswith("architecture: ")
    assert not any(tmp_path.iterdir())


def test_an_architecture_that_does_not_exist_is_refused_with_the_nearest(
    tokenizer: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="did you mean 'LlamaForCausalLM'"):
        to_hf(
            decoder(settings()),
            tokenizer,
            tmp_path / "out",
            dtype="fp32",
            card=CARD,
            architecture="LlamaForCausal",
        )


def test_a_softmax_scale_that_says_the_default_is_no_obstacle(
    tokenizer: Path, tmp_path: Path
) -> None:
    model = decoder(settings(attn={"softmax_scale": (WIDTH // HEADS) ** -0.5}))
    assert to_hf(model, tokenizer, tmp_path / "o", dtype="fp32", card=CARD) == "GPT2LMHeadModel"


def test_large_models_are_cut_into_files_with_an_index(tokenizer: Path, tmp_path: Path) -> None:
    model, out, limit = decoder(settings(attn=ROPE)), tmp_path / "out", 40_000
    to_hf(model, tokenizer, out, dtype="fp32", card=CARD, shard_bytes=limit)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and not (out / "model.safetensors").exists()
    assert all(file.stat().st_size < limit + 5000 for file in files)  # 5000: their headers
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert {out / name for name in index["weight_map"].values()} == set(files)
    assert (transformers_logits(out) - logits(model, rows())).abs().max() < 1e-5
    assert torch.equal(from_hf(str(out))[1]["wte.weight"], model.wte.weight)


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_are_rounded_to_the_dtype_and_loaded_in_it(
    dtype: str, kind: torch.dtype, tokenizer: Path, tmp_path: Path
) -> None:
    model, out = decoder(settings(attn=ROPE)), tmp_path / "out"
    to_hf(model, tokenizer, out, dtype=dtype, card=CARD)
    theirs = load(out)
    assert theirs.dtype == kind
    assert torch.equal(theirs.model.embed_tokens.weight, model.wte.weight.to(kind))


def test_values_beyond_the_dtype_are_refused_by_the_weights_name(
    tokenizer: Path, tmp_path: Path
) -> None:
    model = decoder(settings())
    with torch.no_grad():
        model.blocks[1].ffn.up_proj.weight[0, 0] = 1e5
    with pytest.raises(UserError, match=r"h\.1\.mlp\.c_fc\.weight: .*float16 cannot hold.*bf16"):
        to_hf(model, tokenizer, tmp_path / "out", dtype="fp16", card=CARD)
    with torch.no_grad():
        model.wte.weight[5] = float("nan")
    with pytest.raises(UserError, match=r"wte\.weight: .*not finite"):
        to_hf(model, tokenizer, tmp_path / "out", dtype="fp32", card=CARD)
    assert not any(tmp_path.iterdir()), "half a folder was left"


def test_the_output_must_be_new_or_empty(tokenizer: Path, tmp_path: Path) -> None:
    model, out = decoder(settings()), tmp_path / "out"
    out.mkdir()
    to_hf(model, tokenizer, out, dtype="fp32", card=CARD)
    assert (out / "config.json").is_file()
    with pytest.raises(UserError, match=r"^output: .*not empty"):
        to_hf(model, tokenizer, out, dtype="fp32", card=CARD)


def test_the_tokenizer_goes_along_and_its_special_tokens_are_the_models(
    tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    to_hf(decoder(settings()), tokenizer, out, dtype="fp32", card=CARD)
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs("w3 w17").input_ids == [3, 17]
    model = load(out)
    assert model.config.eos_token_id == theirs.eos_token_id == EOS
    assert model.config.bos_token_id == EOS, "documents begin with end-of-text in training"
    assert model.generation_config.pad_token_id == EOS
    assert model.config.vocab_size == ROWS, "padded rows stay"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        to_hf(decoder(settings()), tmp_path, tmp_path / "out", dtype="fp32", card=CARD)
    assert not any(tmp_path.iterdir())
