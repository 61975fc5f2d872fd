"""Runs that train transformers' own class: from end to end, as users start them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmfoundry.builders.model import build_root
from llmfoundry.builders.pretrained import open_pretrained
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.recipe.adapter import PretrainedConfig
from llmfoundry.recipe.model import HFModelConfig
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import finetune_recipe, losses, run, write_recipe

RUN = "runs/cut/checkpoints"
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {"intermediate_size": 64, "max_position_embeddings": 128}


def write_class(folder: Path, tokenizer: Path, kind: str, **settings: Any) -> Path:
    """A folder of transformers' class `kind`, random, with the tokenizer of a run of ours."""
    rows = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    size = {"vocab_size": -(-(len(rows) + 1) // 64) * 64}
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **{**SHAPE, **WIDE, **size, **settings})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_class_is_trained_resumed_asked_and_written_back(tmp_path: Path) -> None:
    run("train.py", write_recipe(tmp_path), "max_duration=1ba", "run_name=base", cwd=tmp_path)
    tokenizer = next((tmp_path / "runs/base/checkpoints").iterdir()) / "tokenizer"
    write_class(tmp_path / "neox", tokenizer, "gpt_neox", tie_word_embeddings=True)
    recipe = finetune_recipe(tmp_path, model={"pretrained": "neox"}, max_duration="6ba")
    done = run("finetune.py", recipe, "run_name=whole", cwd=tmp_path)
    assert "GPTNeoXForCausalLM loaded into transformers' class" in done.stdout + done.stderr
    shutil.copytree(tmp_path / "runs/whole/checkpoints/ba0000004", tmp_path / RUN / "ba0000004")
    run("finetune.py", recipe, "run_name=cut", cwd=tmp_path)
    whole = losses(tmp_path / "runs/whole")
    assert losses(tmp_path / "runs/cut") == {5: whole[5], 6: whole[6]}
    said = run("generate.py", "checkpoint=runs/cut", "prompt=line", cwd=tmp_path).stdout
    assert said.strip()
    run("convert.py", "checkpoint=runs/cut", "to=hf", "output=out", cwd=tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.lm_head.weight is back.gpt_neox.embed_in.weight
    run("finetune.py", recipe, "run_name=on", "model.pretrained=out", cwd=tmp_path)
    assert losses(tmp_path / "runs/on")[1] < whole[1]
    _check_more_rows(tmp_path / "runs/whole")


@torch.no_grad()
def _check_more_rows(run_folder: Path) -> None:
    """A run of a class is begun with by a tokenizer of more tokens."""
    asked = PretrainedConfig(pretrained=str(run_folder), resize_embeddings=True)
    tables = []
    for more in (0, 64):
        found = open_pretrained(asked, ALONE, note=print)
        rows = found.config.vocab_size = (found.config.vocab_size or 0) + more
        assert isinstance(found.config, HFModelConfig)
        found.config.hf_config["vocab_size"] = rows  # as `fit_vocabulary` changes it
        root = build_root(TrainRecipe(model=found.config, precision="fp32"))
        root.to_empty(device="cpu")
        found.fill(root.model)
        tables.append(root.model.embedding_weight)
        assert root.model.head_weight is tables[-1]
    own, grown = tables
    assert torch.equal(grown[: len(own)], own) and len(grown) == len(own) + 64
    torch.testing.assert_close(grown[len(own) :], own.double().mean(0).float().expand(64, -1))


@pytest.mark.slow
def test_two_processes_train_a_class_as_one_does(tmp_path: Path) -> None:
    """DDP, FSDP2 with checkpointing: losses of a single process, to rounding."""
    run("train.py", write_recipe(tmp_path), "max_duration=1ba", "run_name=base", cwd=tmp_path)
    tokenizer = next((tmp_path / "runs/base/checkpoints").iterdir()) / "tokenizer"
    write_class(tmp_path / "neox", tokenizer, "gpt_neox", tie_word_embeddings=True)
    recipe = finetune_recipe(tmp_path, model={"pretrained": "neox"}, max_duration="4ba")
    run("finetune.py", recipe, "run_name=one", cwd=tmp_path)
    expected = losses(tmp_path / "runs/one")
    for name, words in {
        "ddp": ["parallel.data_parallel_replicate_degree=2"],
        "fsdp": ["parallel.data_parallel_shard_degree=2", "parallel.activation_checkpointing=true"],
    }.items():
        run("finetune.py", recipe, f"run_name={name}", *words, cwd=tmp_path, processes=2)
        found = losses(tmp_path / f"runs/{name}")
        assert found == pytest.approx(expected, abs=1e-5)
