"""A run that takes seconds: a small model on a few documents, started as users start it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from llmfoundry.models.decoder import Root
from llmfoundry.recipe.parallel import ActivationMemory, ParallelConfig
from tests.warm_scripts import ENV as ENV
from tests.warm_scripts import run_script

ROOT = Path(__file__).resolve().parents[1]

RECIPE = {
    "max_seq_len": 64,
    "max_duration": "12ba",
    "global_train_batch_size": 4,
    "device_train_microbatch_size": 1,
    "precision": "fp32",
    "eval_interval": "0ba",
    "save_interval": "4ba",
    "save_async": False,
    "model": {"d_model": 32, "n_layers": 2, "n_heads": 2, "attn_config": {"rope": True}},
    "tokenizer": {"name": "bytes"},
    "data": {"name": "files", "validation_fraction": 0.2},
    "optimizer": {"lr": 3e-3},
    "eval": {"validation_rows": 2},
    "logger": {"mlflow": False},
    "callbacks": {"speed_window": 2},
}


def activations(root: Root, checkpointing: bool | str = False, **settings: Any) -> ActivationMemory:
    """How the activations of a model are kept, with these settings of `parallel`."""
    config = ParallelConfig(activation_checkpointing=checkpointing, **settings)
    return config.activation_memory(len(root.model.blocks))


def write_recipe(folder: Path) -> Path:
    """tiny.yaml in `folder`, with its corpus and cache beside it."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for n in range(24):  # documents shorter and longer than a row
        lines = [f"line {i} of document {n}: {i * n} is {i} times {n}\n" for i in range(1 + n)]
        (corpus / f"{n:02d}.txt").write_text("".join(lines))
    recipe = RECIPE | {
        "data": RECIPE["data"] | {"paths": [str(corpus)], "cache_folder": str(folder / "cache")}
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def write_finetune(folder: Path, train_base: Callable[..., object]) -> Path:
    """finetune.yaml in `folder`, beside tiny.yaml: low-rank adapters on runs/base in 4 bits.

    `train_base` gets the run's name and overrides, and trains it: a small mixture of experts.
    """
    train_base(
        "base",
        "max_duration=1ba",
        "model.ffn_config={ffn_type: dmoe, mlp_type: glu, ffn_act_fn: silu, ffn_hidden_size: 16,"
        " moe_num_experts: 4, moe_top_k: 2}",
    )
    model = {"pretrained": "runs/base", "quantize": "nf4"}
    return finetune_recipe(folder, model=model, adapter={"name": "lora", "r": 4})


def finetune_recipe(folder: Path, *, name: str = "finetune.yaml", **changes: object) -> Path:
    """A recipe of scripts/finetune.py in `folder`: tiny.yaml's sections, but for `changes`."""
    trained = yaml.safe_load((folder / "tiny.yaml").read_text())
    kept = {key: value for key, value in trained.items() if key not in ("model", "tokenizer")}
    path = folder / name
    path.write_text(yaml.safe_dump(kept | changes))
    return path


def command(script: str, *arguments: object, processes: int = 1) -> list[str]:
    """The command line of a script, under torchrun for more than one process."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*start, str(ROOT / "scripts" / script), *map(str, arguments)]


def run(
    script: str, *arguments: object, cwd: Path, processes: int = 1, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end; fails unless it exits with `status`."""
    words = [str(argument) for argument in arguments]
    if processes == 1 or not status:
        done = run_script(script, words, cwd=cwd, processes=processes)
    else:  # what torchrun makes of it
        started = command(script, *words, processes=processes)
        done = subprocess.run(
            started, cwd=cwd, env=ENV, capture_output=True, text=True, timeout=240
        )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def losses(run_folder: Path) -> dict[int, float]:
    """Training loss by batch."""
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return {r["time/batch"]: r["loss/train/total"] for r in rows if "loss/train/total" in r}
