"""Peak memory of full fine-tuning, LoRA and QLoRA on one model, beside the estimate.

    python -m benchmarks.finetune.memory [--width 1024] [--layers 12] [--precision fp32]

Each is a run of its own process, a few steps on the same rows from the same random Llama. What
counts is the peak of resident memory above what the process has once everything is imported, beside
what the estimate said before the model was there, without its share for what is imported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.finetune.compare import write_llama
from benchmarks.record import table, write
from benchmarks.turns import environment
from llmfoundry.recipe.front.paths import ROOT

MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"adapter": {"name": "lora", "r": 16}},
    "QLoRA": {"adapter": {"name": "lora", "r": 16}, "quantize": "nf4"},
}
ROW, STEPS, SMALL_VOCAB = 512, 3, 2048


@dataclass(frozen=True)
class Peak:
    """Of one run, in bytes.

    Attributes:
        parameters: of the model.
        measured: peak of resident memory above the start.
        estimated: by the estimate, for what comes on top of what is imported.
    """

    parameters: int
    measured: int
    estimated: int


def _prepare(folder: Path, width: int, layers: int) -> None:
    """A model's folder and a text."""
    texts = [" ".join(f"{i} times {n} is {i * n}" for i in range(400)) for n in range(40)]
    (folder / "corpus").mkdir()
    for n, text in enumerate(texts):
        (folder / "corpus" / f"{n}.txt").write_text(text)
    shape: dict[str, Any] = {"hidden_size": width, "intermediate_size": 8 * width // 3 // 64 * 64}
    shape |= {"num_hidden_layers": layers, "num_attention_heads": width // 64}
    write_llama(folder / "model", texts, SMALL_VOCAB, shape)


def _measure(folder: Path, mode: str, precision: str) -> Peak:
    changes = dict(MODES[mode])
    quantize = changes.pop("quantize", "none")
    recipe = {
        "run_name": mode,
        "max_seq_len": ROW,
        "max_duration": f"{STEPS}ba",
        "global_train_batch_size": 1,
        "device_train_microbatch_size": 1,
        "precision": precision,
        "eval_interval": "0ba",
        "save_interval": "0ba",
        "save_async": False,
        "model": {"pretrained": str(folder / "model"), "quantize": quantize},
        "data": {
            "name": "files",
            "paths": [str(folder / "corpus")],
            "cache_folder": str(folder / "cache"),
            "validation_fraction": 0,
        },
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "eval": {"validation": False},
        "logger": {"mlflow": False},
        **changes,
    }
    file = folder / f"{mode}.yaml"
    file.write_text(json.dumps(recipe))  # which is YAML
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.finetune.memory", "--run", str(file)],
        cwd=folder,
        env=environment() | {"TQDM_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return Peak(**json.loads(done.stdout.strip().splitlines()[-1]))


def run(file: str) -> None:
    """In a process of its own: estimate, train, and print a `Peak` as JSON."""
    import resource
    import runpy

    import psutil

    from llmfoundry.builders import trainer
    from llmfoundry.plan.fit import Fit, choose_fit
    from llmfoundry.plan.memory import FRAMEWORK

    found: list[tuple[int, int]] = []

    def listen(recipe: Any, **memory: Any) -> Fit:
        fit = choose_fit(recipe, **memory)
        found.append((fit.need.parameters, fit.need.total(fit.microbatch) - FRAMEWORK))
        return fit

    trainer.choose_fit = listen
    _import_all()
    before = psutil.Process().memory_info().rss
    sys.argv = ["finetune.py", file]
    runpy.run_path(str(ROOT / "scripts" / "finetune.py"), run_name="__main__")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    parameters, estimated = found[-1]
    print(json.dumps({"parameters": parameters, "measured": peak - before, "estimated": estimated}))


def _import_all() -> None:
    """What a run imports later: optimizers' kernels, checkpoints, the reader of models."""
    import torch
    import torch.distributed.checkpoint
    import transformers  # noqa: F401

    weight = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = torch.optim.AdamW([weight], fused=True)
    (weight @ weight).sum().backward()
    optimizer.step()


MEMORY_COLUMNS = {
    "mode": "{}",
    "measured MiB": "{:.0f}",
    "estimated MiB": "{:.0f}",
    "of measured, estimate": "{:.2f}",
    "of full, measured": "{:.2f}",
}


def memory() -> None:
    """Measure every mode on a random Llama of that width and depth, print, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--precision", choices=["fp32", "amp_bf16", "bf16"], default="fp32")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        run(given.run)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _prepare(folder, given.width, given.layers)
        peaks = {mode: _measure(folder, mode, given.precision) for mode in MODES}
    rows = [
        {
            "mode": mode,
            "measured MiB": peak.measured / 2**20,
            "estimated MiB": peak.estimated / 2**20,
            "of measured, estimate": peak.estimated / peak.measured,
            "of full, measured": peak.measured / peaks["full"].measured,
        }
        for mode, peak in peaks.items()
    ]
    size = f"{peaks['full'].parameters / 1e6:.0f}M parameters"
    print("\n".join([f"{size}, {given.precision}: peak of a process", *table(rows, MEMORY_COLUMNS)]))
    settings = {"model": size, "precision": given.precision, "tokens": ROW}
    print(f"\nwritten to {write('finetune-memory', rows, settings)}")


if __name__ == "__main__":
    memory()
