"""scripts/convert.py: what it refuses, and what the card says of a run; by numbers made here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from llmfoundry.api.conversion import _card, _precision, _published, convert
from llmfoundry.builders.open_model import open_model
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.hf.read_folder import open_hf
from llmfoundry.recipe.after_training import ConvertRecipe
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.hf.random_models import CARD, EOS, decoder, settings, to_hf, write_tokenizer
from tests.tiny import RECIPE, write_recipe


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Hugging Face folder in fp32."""
    folder = tmp_path_factory.mktemp("convert")
    tokenizer = write_tokenizer(folder / "tokenizer")
    to_hf(decoder(settings()), tokenizer, folder / "hf", dtype="fp32", card=CARD)
    return folder / "hf"


def test_an_import_leaves_a_folder_alone_that_holds_something(
    exported: Path, tmp_path: Path
) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    words = [f"checkpoint={exported}", "from=hf", f"output={tmp_path}"]
    recipe = checked(ConvertRecipe, None, words)
    with pytest.raises(UserError, match=r"output: .* is not empty; write another folder"):
        convert(recipe)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


@pytest.mark.parametrize(("in_bf16", "expected"), [(0, "fp32"), (1, "fp32"), (99, "amp_bf16")])
def test_a_run_of_an_import_computes_in_what_most_numbers_are_stored_in(
    in_bf16: int, expected: str, exported: Path, tmp_path: Path
) -> None:
    tensors = load_file(exported / "model.safetensors")
    largest = sorted(tensors, key=lambda name: -tensors[name].numel())
    for name in largest[-in_bf16:] if in_bf16 == 1 else largest[:in_bf16]:
        tensors[name] = tensors[name].to(torch.bfloat16)
    n_bf16 = sum(t.numel() for t in tensors.values() if t.dtype == torch.bfloat16)
    assert (2 * n_bf16 > sum(t.numel() for t in tensors.values())) == (expected != "fp32")
    (tmp_path / "config.json").write_bytes((exported / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with open_hf(tmp_path) as opened:
        assert _precision(opened) == expected


def import_of(folder: Path, run: Path) -> Path:
    convert(checked(ConvertRecipe, None, [f"checkpoint={folder}", "from=hf", f"output={run}"]))
    return run


def test_companions_of_a_model_go_through_import_and_export(exported: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "hf", tmp_path / "out"
    shutil.copytree(exported, folder)
    sampling = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True}
    companion = {**sampling, "eos_token_id": [5, EOS], "bos_token_id": 3, "pad_token_id": 4}
    (folder / "generation_config.json").write_text(json.dumps(companion))
    others = folder / "additional_chat_templates"
    others.mkdir()
    for place, name in ((folder, "chat_template"), (others, "tool_use"), (others, "rag")):
        (place / f"{name}.jinja").write_text(f"{{# {name} #}}{{{{ messages[0].content }}}} w7")
    run = import_of(folder, tmp_path / "run")
    convert(checked(ConvertRecipe, None, [f"checkpoint={run}", "to=hf", f"output={out}"]))
    written = json.loads((out / "generation_config.json").read_text())
    assert sorted(written.pop("eos_token_id")) == companion.pop("eos_token_id")
    assert written == companion
    theirs, ours = (AutoTokenizer.from_pretrained(place).chat_template for place in (folder, out))
    assert theirs == ours and len(ours) == 3
    # What generates: the folder and its import end at both, and draw the same ids.
    models = [open_model(str(place), ALONE, note=print).load() for place in (folder, run)]
    assert [model.end_ids for model in models] == [{5, EOS}] * 2
    assert models[0].n_tokens == models[1].n_tokens > models[1].tokenizer.vocab_size


def test_a_model_with_fewer_rows_than_tokens_is_not_imported(
    exported: Path, tmp_path: Path
) -> None:
    shutil.copytree(exported, tmp_path / "hf")
    file = str(tmp_path / "hf" / "tokenizer.json")
    backend = Backend.from_file(file)
    backend.add_tokens([f"<{n}>" for n in range(400)])
    backend.save(file)
    with pytest.raises(UserError, match=r"the tokenizer has 491 tokens, and the model \d+ rows"):
        import_of(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ends_that_are_no_token_ids_are_one_line(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [0, "</s>"]}')
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id: '</s>' is no"):
        import_of(tmp_path / "hf", tmp_path / "run")


def test_the_card_counts_tokens_and_shows_no_secret(tmp_path: Path) -> None:
    words = ["data.paths=[s3://me:hunter2@host/rows.jsonl]", "run_name=small"]
    path = write_recipe(tmp_path)
    written = yaml.safe_load(path.read_text())
    del written["data"]["paths"]
    path.write_text(yaml.safe_dump(written))
    model = checked(TrainRecipe, path, words).resolve().model
    model.fill(vocab_size=64)
    base = "s3://me:hunter2@host/base"
    path.write_text(yaml.safe_dump({**written, "model": {"pretrained": base}}))
    recipe = checked(FinetuneRecipe, path, words).resolve()
    recipe.model = model
    folder = tmp_path / "run" / "checkpoints" / "ba0000300"
    folder.mkdir(parents=True)
    loaded: Any = SimpleNamespace(
        recipe=recipe,
        folder=folder,
        score_name=folder.name,
        checkpoint=Checkpoint(Storage(tmp_path / "run"), folder),
        state={"batch": 300},
        tokenizer=SimpleNamespace(has_chat=True),  # which text alone does not teach to talk
    )
    card = _card(loaded)
    assert not card.is_chat and card.base.endswith("host/base") and "hunter2" not in card.base
    assert card.name == "small"
    assert card.trained == f"300 batches, {300 * 4 * 64:,} tokens"  # of 4 rows of 64
    assert "rows.jsonl" in card.data and "hunter2" not in card.data
    assert card.settings["optimizer.lr"] == str(RECIPE["optimizer"]["lr"])  # type: ignore[index]
    assert card.settings["max_seq_len"] == "64" and list(card.scores) == []


@pytest.mark.parametrize(
    ("place", "published"),
    [
        ("/home/me/secret-project/llama", "llama"),
        ("~/models/base", "base"),
        ("./rows/chats.jsonl", "chats.jsonl"),
        ("runs/base", "base"),
        ("data/mine/chats.jsonl", "chats.jsonl"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("s3://bucket/chats.jsonl", "s3://bucket/chats.jsonl"),
        ("gpt2", "gpt2"),
        ("", ""),
    ],
)
def test_a_card_reports_no_path_of_this_machine(place: str, published: str) -> None:
    assert _published(place) == published
