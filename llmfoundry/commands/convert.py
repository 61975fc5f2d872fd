"""`scripts/convert.py`: a checkpoint to a Hugging Face folder, or the other way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from llmfoundry.build.job import build_root, filled
from llmfoundry.build.start import Loaded, load_checkpoint, model_identity
from llmfoundry.data.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.export.card import CardInfo
from llmfoundry.export.hf import from_hf, hf_folder, to_hf
from llmfoundry.gauntlet.special_tokens import DOCUMENT_START
from llmfoundry.masking import public
from llmfoundry.parallel.launch import World
from llmfoundry.recipe.paths import show
from llmfoundry.recipe.tasks import ConvertRecipe
from llmfoundry.recipe.tokenizer import TokenizerConfig
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import as_written, to_yaml
from llmfoundry.track.metrics import read_metrics
from llmfoundry.train.checkpointer import Checkpointer

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def convert(recipe: ConvertRecipe) -> None:
    """Convert a checked recipe's checkpoint, on the CPU."""
    recipe.fill()
    if recipe.to is not None:
        _export(recipe)
    else:
        _import(recipe)


def _export(recipe: ConvertRecipe) -> None:
    assert recipe.checkpoint and recipe.output and recipe.dtype
    loaded = load_checkpoint(recipe.checkpoint, ALONE, note=print)
    output = Path(recipe.output).expanduser()
    architecture = to_hf(
        loaded.root.model,
        loaded.folder / "tokenizer",
        output,
        dtype=recipe.dtype,
        card=_card(loaded),
        architecture=recipe.architecture,
        start=loaded.tokenizer.document_start if loaded.is_trained else None,
    )
    print(f"{show(loaded.folder)} is {architecture} in {show(output)}")


def _card(loaded: Loaded) -> CardInfo:
    """What the model card says of the run."""
    recipe, batch = loaded.recipe, int(loaded.state["batch"])
    data = as_written(recipe)["data"]
    tokens = batch * recipe.global_train_batch_size * recipe.max_seq_len
    return CardInfo(
        name=str(recipe.run_name),
        recipe=public((loaded.folder / "recipe.yaml").read_text()),
        data=", ".join([data["dataset"] or data["name"], *data["paths"]]),
        trained=f"{batch:,} batches, {tokens:,} tokens",
        scores=_scores(loaded, batch),
    )


def _scores(loaded: Loaded, batch: int) -> dict[str, float]:
    """The run's last measurements of these weights, or scripts/eval.py's."""
    run_folder = loaded.folder.parents[1]
    results = run_folder / "eval" / loaded.folder.name / "results.json"
    if results.exists():
        return json.loads(results.read_text())["metrics"]
    metrics = run_folder / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    here = [row for row in rows if row["time/batch"] == batch]
    return {
        key: value
        for row in here
        for key, value in row.items()
        if key.startswith(("metrics/eval/", "icl/")) or "-shot" in key
    }


def _import(recipe: ConvertRecipe) -> None:
    assert recipe.checkpoint and recipe.output
    output = Path(recipe.output).expanduser()
    if output.exists() and any(output.iterdir()):
        raise UserError(f"output: {output} is not empty; write another folder")
    config, weights = from_hf(recipe.checkpoint)
    folder = hf_folder(recipe.checkpoint)
    tokenizer = Tokenizer.load(folder)
    is_trained = DOCUMENT_START in json.loads((folder / "config.json").read_text())
    written = TrainRecipe(
        run_name=output.name,
        save_folder=str(output),
        max_seq_len=config.max_seq_len or 2048,
        precision=_precision(weights),
        model=config,
        tokenizer=TokenizerConfig(name="huggingface", path=str(output / "tokenizer")),
    )
    root = build_root(filled(written))
    root.to_empty(device=ALONE.device)
    root.model.load_state_dict(weights)

    def extras(folder: Path) -> None:
        (folder / "recipe.yaml").write_text(to_yaml(written))
        tokenizer.save(folder / "tokenizer")

    output.mkdir(parents=True, exist_ok=True)
    extras(output)
    print(f"precision: {written.precision}, as the weights are stored")
    writer = Checkpointer(
        output, ALONE, extras=extras, keep=-1, background=False, max_failures=1, warn=print
    )
    state = {"batch": 0, "identity": model_identity(config), "is_trained": is_trained}
    print(f"{public(recipe.checkpoint)} is {show(writer.save_weights(root.model, state))}")


def _precision(weights: Mapping[str, Tensor]) -> str:
    """amp_bf16 where most of the numbers are stored in bf16; otherwise fp32, which keeps them."""
    total = sum(weight.numel() for weight in weights.values())
    rounded = sum(w.numel() for w in weights.values() if w.dtype == torch.bfloat16)
    return "amp_bf16" if 2 * rounded > total else "fp32"
