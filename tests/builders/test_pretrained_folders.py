"""Folders that a run begins with: who holds them, what is overridden or added, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmfoundry.builders.model import build_root
from llmfoundry.builders.pretrained import (
    MODEL,
    TRUST,
    fit_vocabulary,
    model_yaml,
    open_folder,
    open_pretrained,
    read_model,
)
from llmfoundry.checkpoint.storage import Checkpoint
from llmfoundry.data.text.bpe import END_OF_TEXT, bytes_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.recipe.adapter import PretrainedConfig
from llmfoundry.recipe.attention import drop_former_scaling
from llmfoundry.recipe.model import HFModelConfig
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import finetune_recipe, run, write_recipe
from tests.train.matrix import ROWS, write_model

FILE = "model.safetensors"


def change(folder: Path, **values: Any) -> None:
    """Rewrite keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def opened(folder: Path, **asked: Any) -> Any:
    said: list[str] = []
    found = open_folder(folder, PretrainedConfig(pretrained=str(folder), **asked), said.append)
    return found, said


def test_the_decoder_takes_what_it_expresses_and_the_class_the_rest(tmp_path: Path) -> None:
    llama = write_model("llama", tmp_path / "llama")
    assert "LlamaForCausalLM loaded into the native decoder" in opened(llama)[0].summary
    found = opened(llama, name="hf_causal_lm")[0]
    assert isinstance(found.config, HFModelConfig)
    assert "transformers' class (model.name asks for it)" in found.summary
    change(llama, hidden_act="laplace")  # which the decoder has not
    found = opened(llama)[0]
    assert isinstance(found.config, HFModelConfig) and "hidden_act" in found.summary
    with pytest.raises(UserError, match="hidden_act"):
        opened(llama, name="mpt_causal_lm")
    neox = write_model("gpt_neox", tmp_path / "neox")
    assert "transformers' class (config.json: model_type 'gpt_neox'" in opened(neox)[0].summary


def test_a_class_that_fails_with_its_settings_is_refused(tmp_path: Path) -> None:
    llama = write_model("llama", tmp_path / "llama")
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    partial = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}  # which its layers do not know
    change(llama, rope_parameters=yarn | partial)
    found = opened(llama, name="hf_causal_lm")[0]
    model = build_root(TrainRecipe(model=found.config, precision="fp32")).model
    model.to_empty(device="cpu")
    found.fill(model)
    with pytest.raises(UserError, match=r"LlamaForCausalLM of transformers fails with this config"):
        model._try(torch.device("cpu"))


def test_another_scaling_takes_no_key_of_the_former_one() -> None:
    yarn = {"type": "yarn", "factor": 4, "beta_fast": 32}
    for overrides, left in (
        ({"attn_config": {"rope_hf_config": {"type": "linear", "factor": 2}}}, {}),
        ({"attn_config": {"rope_hf_config": {"type": "yarn", "factor": 2}}}, yarn),
        ({"attn_config": {"rope_hf_config": {"factor": 2}}}, yarn),
        ({"attn_config": 3, "d_model": 8}, yarn),
    ):
        model = {"attn_config": {"rope_hf_config": dict(yarn)}}
        drop_former_scaling(model, overrides)
        assert model["attn_config"]["rope_hf_config"] == left


@pytest.mark.parametrize("name", ["auto", "hf_causal_lm"])
def test_overrides_are_checked_key_by_key(name: str, tmp_path: Path) -> None:
    folder = write_model("dbrx", tmp_path / "dbrx")
    overrides = {"attn_config": {"clip_qkv": 4.0}, "ffn_config.moe_top_k": 1}
    config = opened(folder, name=name, config_overrides=overrides)[0].config
    if name == "auto":
        assert (config.attn_config.clip_qkv, config.ffn_config.moe_top_k) == (4.0, 1)
        assert config.attn_config.kv_n_heads == 2, "the section's other keys stay"
    else:
        assert config.hf_config["attn_config"]["clip_qkv"] == 4.0
        assert config.hf_config["attn_config"]["kv_n_heads"] == 2
        assert config.hf_config["ffn_config"]["moe_top_k"] == 1
    for key, said in {
        "n_layer": "model.config_overrides.n_layer: .* did you mean 'n_layers'",
        "attn_config.clip_qk": r"model.config_overrides.attn_config.clip_qk: .*'clip_qkv'",
    }.items():
        with pytest.raises(UserError, match=said):
            opened(folder, name=name, config_overrides={key: 3})


@torch.no_grad()
@pytest.mark.parametrize("name", ["mpt_causal_lm", "hf_causal_lm"])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_for_new_tokens_begin_as_the_mean_of_the_others(
    name: str, tied: bool, tmp_path: Path
) -> None:
    folder = write_model("llama", tmp_path / "llama", tie_word_embeddings=tied)
    backend = bytes_backend()
    backend.add_special_tokens([f"<{n}>" for n in range(100)])
    tokenizer = Tokenizer(backend, END_OF_TEXT)
    found = opened(folder, name=name)[0]
    plain, asked = (PretrainedConfig(resize_embeddings=ask) for ask in (False, True))
    with pytest.raises(UserError, match=rf"resize_embeddings: .* {tokenizer.vocab_size} tokens"):
        fit_vocabulary(found.config, tokenizer, plain)
    with pytest.raises(UserError, match="has no effect"):
        fit_vocabulary(found.config, found.tokenizer, asked)
    fit_vocabulary(found.config, tokenizer, asked)
    root = build_root(TrainRecipe(model=found.config, precision="fp32"))
    root.to_empty(device="cpu")
    found.fill(root.model)
    state = load_file(folder / FILE)
    own = "wte.weight" if name == "mpt_causal_lm" else "hf.model.embed_tokens.weight"
    heads = {} if tied else {"lm_head.weight": root.model.head_weight}
    grown = {"model.embed_tokens.weight": root.model.get_parameter(own), **heads}
    for key, rows in grown.items():
        old = state[key]
        assert rows.shape[0] == 384 and torch.equal(rows[:ROWS], old)
        torch.testing.assert_close(rows[ROWS:], old.double().mean(0).float().expand(64, -1))
    assert (root.model.head_weight is grown["model.embed_tokens.weight"]) == tied


def test_code_of_a_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = write_model("llama", tmp_path / "own")
    (folder / "own_decoder.py").write_text("import os\nos.mkdir('ran')\n")
    auto = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    change(folder, auto_map=auto)
    found, said = opened(folder)  # transformers has the class, and the decoder too
    assert "loaded into the native decoder" in found.summary and "is not run" in said[0]
    change(folder, model_type="own")
    with pytest.raises(UserError, match=r"^model\.trust_remote_code: .*auto_map"):
        opened(folder)
    assert not Path("ran").exists()
    plain = write_model("llama", tmp_path / "plain")
    with pytest.raises(UserError, match="trust_remote_code: has no effect"):
        opened(plain, trust_remote_code=True)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_folders_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    """By the script, whose exit status is 2 and which leaves nothing."""
    write_recipe(tmp_path)
    recipe = finetune_recipe(tmp_path, model={"pretrained": "nothing"})
    for number, (kind, (spoil, said)) in enumerate(
        (kind, case) for kind in ("llama", "gpt_neox") for case in SPOILT.items()
    ):
        folder = write_model(kind, tmp_path / f"model{number}")
        spoil(folder)
        with pytest.raises(UserError) as caught:
            asked = PretrainedConfig(pretrained=str(folder))
            open_pretrained(asked, ALONE, note=lambda _: None)
        (line,) = caught.value.problems
        assert said in line, line
    words = (f"model.pretrained={folder}",)
    result = run("finetune.py", recipe, *words, cwd=tmp_path, status=2)
    assert len(result.stderr.splitlines()) == 1 and said in result.stderr
    assert not (tmp_path / "runs").exists() and not (tmp_path / "ran").exists()
    folder = write_model("llama", tmp_path / "damaged")
    state = load_file(folder / FILE)
    state["model.norm.weight"][0] = torch.nan
    save_file(state, folder / FILE)
    result = run("finetune.py", recipe, f"model.pretrained={folder}", cwd=tmp_path, status=2)
    said = "norm_f.weight: the weights that the run began with are damaged"
    assert said in result.stderr and "Traceback" not in result.stderr


def without_weights(folder: Path) -> None:
    (folder / FILE).unlink()


def with_a_missing_shard(folder: Path) -> None:
    state = load_file(folder / FILE)
    index = {name: f"model-{i % 2 + 1}.safetensors" for i, name in enumerate(state)}
    (folder / FILE).unlink()
    save_file({n: t for n, t in state.items() if "-1" in index[n]}, folder / "model-1.safetensors")
    (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": index}))


def with_a_pipe_for_weights(folder: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


def with_a_pipe_for_its_shape(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def with_a_larger_vocabulary(folder: Path) -> None:
    change(folder, vocab_size=2 * ROWS)


def of_absurdly_many_layers(folder: Path) -> None:
    change(folder, num_hidden_layers=10**8)


def of_integers(folder: Path) -> None:
    state = load_file(folder / FILE)
    for name in [name for name in state if "mlp" in name]:
        state[name] = state[name].to(torch.int8)
    save_file(state, folder / FILE)


def cut_short(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-100])


def of_another_architecture(folder: Path) -> None:
    change(folder, model_type="t5", architectures=["T5ForConditionalGeneration"])


def quantised(folder: Path) -> None:
    change(folder, quantization_config={"quant_method": "gptq"})


def without_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def with_a_pickle_that_acts(folder: Path) -> None:
    (folder / FILE).unlink()
    torch.save({"a": Bomb()}, folder / "pytorch_model.bin")


SPOILT = {
    without_weights: "has no model.safetensors",
    with_a_missing_shard: "model-2.safetensors: is missing, but",
    with_a_pipe_for_weights: "has no model.safetensors",
    with_a_pipe_for_its_shape: "config.json: is not a file",
    with_a_larger_vocabulary: "the two belong to different models",
    of_absurdly_many_layers: "num_hidden_layers 1e+08, and no model has more",
    of_integers: "torch.int8, and the model computes with it",
    cut_short: "model.safetensors: cannot be read",
    of_another_architecture: "'t5'",
    quantised: "quant_method: gptq; only mxfp4 and fp8 are read; write a folder that is not",
    without_json: "config.json: is not JSON",
    with_a_pickle_that_acts: "holds more than tensors",
}


def test_a_checkpoint_does_not_run_code_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model.yaml may name a folder of code: an untrusted one is not run."""
    config = HFModelConfig(hf_config={"model_type": "own"}, code=str(tmp_path))
    (tmp_path / MODEL).write_text(model_yaml(config))
    monkeypatch.delenv(TRUST, raising=False)
    with pytest.raises(UserError, match=f"which is not run; set {TRUST}=1"):
        read_model(Checkpoint.at(tmp_path))
    monkeypatch.setenv(TRUST, "1")
    assert read_model(Checkpoint.at(tmp_path)).name == "hf_causal_lm"
