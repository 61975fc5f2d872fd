"""What `to_hf` writes, as transformers understands it, and as `from_hf` reads it back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import llmfoundry.hf  # noqa: F401  (registers the project's own class)
from llmfoundry.errors import UserError
from llmfoundry.hf.architecture import ACTIVATIONS
from llmfoundry.hf.choose_architecture import choose_architecture
from llmfoundry.hf.config_keys import write_settings
from llmfoundry.hf.read_folder import from_hf
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.model import ACTIVATIONS as OURS
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.typed import to_dict
from tests.hf.random_models import (
    ALIBI,
    ASKED_FOR,
    CARD,
    CASES,
    EOS,
    GLU,
    HEADS,
    LENGTH,
    LLAMA,
    ROPE,
    ROWS,
    WIDTH,
    decoder,
    logits,
    rows,
    settings,
    to_hf,
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
    assert (transformers_logits(out) - ours).abs().max() < 2e-5

    config, state = from_hf(str(out))
    assert said(config) == said(model.config)
    back = Decoder(config)
    back.load_state_dict(state)
    for key, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], weight), key
    assert torch.equal(logits(back, rows()), ours)


def said(config: ModelConfig) -> dict[str, Any]:
    """What matters of a model, whichever way it is written; not how its weights once started."""
    written = to_dict(config)
    for key in ("expansion_ratio", "init_config", "block_overrides", "logit_scale"):
        del written[key]
    for key in ("sliding_window_size", "rope", "nope", "attn_impl"):  # layers() lists them
        del written["attn_config"][key]
    if not any(layer.rotary for layer in config.layers()):
        written["attn_config"]["rope_theta"] = None
    name, arguments = config.ffn_config.activation
    if (name, arguments) == ("gelu", {"approximate": "tanh"}):
        written["ffn_config"]["ffn_act_fn"] = "gelu_tanh"
    scale = Decoder(config).logit_scale
    return written | {"layers": config.layers(), "logit_scale": pytest.approx(scale)}


def test_a_refusal_without_a_wish_lists_what_is_in_the_nearest_ones_way(
    tokenizer: Path, tmp_path: Path
) -> None:
    config = settings(attn=ALIBI | {"qk_ln": True, "alibi_bias_max": 4}, no_bias=True)
    with pytest.raises(UserError) as caught:
        to_hf(decoder(config), tokenizer, tmp_path / "out", dtype="fp32", card=CARD)
    assert list(caught.value.problems[1:]) == [
        "model.attn_config.alibi_bias_max: 4; MptForCausalLM needs 8",
        "model.attn_config.qk_ln: true; MptForCausalLM needs false",
    ]
    assert caught.value.problems[0].startswith("architecture: no transformers architecture is")
    assert "write architecture=llmfoundry for" in caught.value.problems[0]
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


def test_large_models_are_cut_into_files_with_an_index(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out, limit = decoder(settings(attn=ROPE)), tmp_path / "out", 40_000
    monkeypatch.setattr("llmfoundry.hf.write_folder.SHARD_BYTES", limit)
    to_hf(model, tokenizer, out, dtype="fp32", card=CARD)
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


@pytest.mark.parametrize(
    ("ends_with", "stops"), [("<end>", [EOS, 5]), ("{{ eos_token }}", EOS), ("w7", EOS)]
)
def test_transformers_stops_at_the_end_of_a_turn(
    tokenizer: Path, tmp_path: Path, ends_with: str, stops: int | list[int]
) -> None:
    """What chats are trained to end with; the end of text need not be behind it."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer, folder)
    backend = json.loads((folder / "tokenizer.json").read_text().replace("w5", "<end>"))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    backend["added_tokens"].append({"id": 5, "content": "<end>", "special": True, **plain})
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    turns = f"{{% for m in messages %}}{{{{ m.content }}}} {ends_with} {{% endfor %}}"
    (folder / "chat_template.jinja").write_text(turns)
    to_hf(decoder(settings()), folder, tmp_path / "out", dtype="fp32", card=CARD)
    assert load(tmp_path / "out").generation_config.eos_token_id == stops


@pytest.mark.parametrize(("form", "start"), [("", EOS), ("w5 $A", 5), ("$A w5", EOS)])
def test_the_beginning_of_text_is_what_training_documents_begin_with(
    tokenizer: Path, tmp_path: Path, form: str, start: int
) -> None:
    """A token that is named and not put before texts was never read in training."""
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    if form:
        backend.post_processor = processors.TemplateProcessing(
            single=form, pair=f"{form} $B", special_tokens=[("w5", 5)]
        )
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "w5"}))
    to_hf(decoder(settings()), folder, tmp_path / "out", dtype="fp32", card=CARD)
    assert json.loads((tmp_path / "out/config.json").read_text())["bos_token_id"] == start
    if form.startswith("w5"):
        assert AutoTokenizer.from_pretrained(tmp_path / "out")("w3").input_ids == [5, 3]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        to_hf(decoder(settings()), tmp_path, tmp_path / "out", dtype="fp32", card=CARD)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "case", [3, 4, 5, 7, 8], ids=["linear", "dynamic", "llama3", "yarn", "mscale"]
)
def test_rows_longer_than_max_seq_len_are_stretched_alike(
    case: int, tokenizer: Path, tmp_path: Path
) -> None:
    """Only there dynamic does anything: theta grows with the row."""
    model, out = decoder(settings(**CASES["LlamaForCausalLM"][case])), tmp_path / "out"
    to_hf(model, tokenizer, out, dtype="fp32", card=CARD)
    for length in (LENGTH + 1, 3 * LENGTH):
        with torch.no_grad():
            theirs = load(out)(rows(length)).logits  # loaded anew: it remembers the longest row
        assert (theirs - logits(model, rows(length))).abs().max() < 2e-5


PRECISE = ("LlamaForCausalLM", "VaultGemmaForCausalLM")  # the second is all that computes anything


@pytest.mark.parametrize("name", PRECISE)
def test_a_model_trained_in_bf16_comes_back_bit_for_bit(
    name: str, tokenizer: Path, tmp_path: Path
) -> None:
    model, out = decoder(settings(**CASES[name][1])).to(torch.bfloat16), tmp_path / "out"
    with torch.no_grad():  # norms near one, as training leaves them, where bf16 is coarse
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.copy_(1 + torch.arange(-4, 4).repeat(len(weight) // 8) / 128)
    to_hf(model, tokenizer, out, dtype="bf16", card=CARD, architecture=name)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert load(out).dtype == torch.bfloat16
    config, state = from_hf(str(out))
    back = Decoder(config).to(torch.bfloat16)
    back.load_state_dict(state)
    for key, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], weight), key
    with torch.no_grad():  # the same weights, so in fp32 transformers gives the same logits
        theirs = load(out, dtype=torch.float32)(rows()).logits
    assert (theirs - logits(model.float(), rows())).abs().max() < 2e-5


@pytest.mark.parametrize("name", OURS)
def test_an_activation_is_kept_exactly_or_refused(
    name: str, tokenizer: Path, tmp_path: Path
) -> None:
    config = settings(**LLAMA | {"ffn": GLU | {"ffn_act_fn": name}})
    if name in ACTIVATIONS.values():
        model = decoder(config)
        to_hf(model, tokenizer, tmp_path / "out", dtype="fp32", card=CARD)
        theirs = transformers_logits(tmp_path / "out")
        assert (theirs - logits(model, rows())).abs().max() < 2e-5
    else:
        with pytest.raises(UserError, match=rf"(?m)^model\.ffn_config\.ffn_act_fn: {name}; Llama"):
            choose_architecture(config, "LlamaForCausalLM")


@pytest.mark.parametrize("arguments", [{"negative_slope": 0.01}, {"negative_slope": 0.1}])
def test_arguments_of_an_activation_must_be_its_defaults(arguments: dict[str, float]) -> None:
    case = {"ffn": {"ffn_act_fn": {"name": "leaky_relu", **arguments}}}
    if arguments["negative_slope"] == 0.01:
        assert write_settings(settings(**case), "GPT2LMHeadModel")["activation_function"] == (
            "leaky_relu"
        )
    else:
        with pytest.raises(UserError, match=r"\{name: leaky_relu, negative_slope: 0\.1\}; GPT2"):
            choose_architecture(settings(**case), "GPT2LMHeadModel")
