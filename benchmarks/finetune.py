"""Fine-tuning: ours next to TRL's SFTTrainer, packed and padded; memory next to the estimate.

    python -m benchmarks.finetune speed [--rounds 3] [--rows 128] [--precision fp32]
    python -m benchmarks.finetune memory [--width 1024] [--layers 12] [--precision fp32]

`speed`: one epoch of the same rows from the same weights, all parameters or LoRA, interleaved. What
counts is labelled tokens in a CPU-second, after the first steps. In TRL's packed rows documents
attend to each other on a CPU, where it has no attention that separates them; in ours they never do.
`memory`: peak memory of full fine-tuning, LoRA and QLoRA, each in a process of its own, above what
the process has once everything is imported, next to what the estimate says in advance for the same.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    Timed,
    child_environment,
    contender,
    interleaved,
    over_rounds,
    ratio,
    table,
    timed,
    write,
)  # fmt: skip
from llmfoundry.data.preparation.corpus import Corpus
from llmfoundry.data.text.bpe import END_OF_TEXT, train_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.paths import ROOT

LENGTH, BATCH, PACKED_BATCH, RANK, VOCAB = 1024, 8, 2, 16, 8192
"""Tokens of a row at most; padded rows, and packed rows of about as many tokens, of a step."""
SHAPE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 3, "num_key_value_heads": 3}  # 4.9M parameters
WARM_UP = 2
TRL = "TRL, packed"
RECIPE = f"""
max_seq_len: {LENGTH}
max_duration: 1ep
global_train_batch_size: {PACKED_BATCH}
device_train_microbatch_size: {PACKED_BATCH}
eval_interval: 0ba
save_interval: 0ba
data: {{name: files, format: prompt_response, validation_fraction: 0}}
optimizer: {{name: adamw, lr: 1e-4}}
eval: {{validation: false}}
logger: {{mlflow: false}}
"""


def speed(words: list[str]) -> None:
    """Run everything, print a table for full and one for LoRA, write the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.finetune speed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--precision", choices=["fp32", "amp_bf16"], default="fp32")
    given = parser.parse_args(words)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        learned = prepare(folder, given.rows)
        print(f"{given.rows} rows, {learned:,} learned tokens, rows up to {LENGTH}")
        for trained in ("all", "LoRA"):
            contenders = partial(_contenders, folder, given.precision, trained == "LoRA")
            found = _measured(interleaved(contenders, rounds=given.rounds), learned)
            print("\n".join(["", f"trained: {trained}", *table(found, COLUMNS)]), flush=True)
            rows += [{"trained": trained} | row for row in found]
    print(f"\nwritten to {write('finetune', rows, vars(given) | {'learned tokens': learned})}")


def prepare(folder: Path, n_rows: int) -> int:
    """Weights, tokenizer, rows and recipe in `folder`; tokens of all answers, ends included."""
    texts = [document.text for document in Corpus(DataConfig()) if len(document.text) > 4000]
    tokenizer = write_llama(folder / "model", texts[:200], VOCAB, SHAPE)
    draw, learned = random.Random(17), 0
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(n_rows):
            prompt, answer = (_cut(draw, texts, median) for median in (300, 500))
            learned += len(tokenizer.encode(answer)) + 1
            file.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")
    (folder / "sft.yaml").write_text(RECIPE)
    return learned


def write_llama(folder: Path, texts: list[str], vocab: int, shape: dict[str, Any]) -> Tokenizer:
    """A random model with a tokenizer of these texts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer(train_backend(texts, vocab, progress=False), END_OF_TEXT)
    tokenizer.save(folder)
    ends: dict[str, Any] = {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **shape, **ends)).save_pretrained(folder)
    return tokenizer


def _cut(draw: random.Random, texts: list[str], median: int) -> str:
    """A piece of some text, of log-normal length in characters, as chats have."""
    text = draw.choice(texts)
    length = min(1500, max(8, int(draw.lognormvariate(0, 0.8) * median)))
    begin = draw.randrange(len(text) - length)
    return text[begin : begin + length]


def _contenders(
    folder: Path, precision: str, lora: bool, turn: int
) -> dict[str, Callable[[], Timed]]:
    kind, data = "lora" if lora else "full", str(folder / "rows.jsonl")
    ours = [sys.executable, str(ROOT / "scripts" / "finetune.py"), str(folder / "sft.yaml")]
    ours += [f"run_name={kind}-{turn}", f"precision={precision}", "model.pretrained=model"]
    ours += [f"data.paths=[{data}]", f"data.cache_folder={folder / 'cache'}"]
    if lora:
        ours += ["adapter.name=lora", f"adapter.r={RANK}"]
    settings: dict[str, Any] = {"model": str(folder / "model"), "rows": data, "length": LENGTH}
    settings |= {"precision": precision, "lora_rank": RANK if lora else None}
    commands = {
        "ours, packed": ours,
        TRL: contender("trl_sft", **settings, packed=True, batch=PACKED_BATCH),
        "TRL, padded": contender("trl_sft", **settings, batch=BATCH),
    }
    run = partial(timed, folder=folder, least=WARM_UP + 2)
    return {who: partial(run, words) for who, words in commands.items()}


COLUMNS = {
    "contender": "{}",
    "learned tok/CPU-s": "{:.0f}",
    "of TRL, packed": "{:.2f}",
    "GiB": "{:.2f}",
    "GiB, of TRL, packed": "{:.2f}",
}


def _measured(results: dict[str, list[Timed]], learned: int) -> list[dict[str, Any]]:
    """A row for each contender: its speed and memory, also of packed TRL's."""

    def rate(run: Timed) -> float:
        steps = len(run.ends)
        share = (steps - WARM_UP) / steps
        return learned * share / (run.cpu_ends[-1] - run.cpu_ends[WARM_UP - 1])

    theirs = results[TRL]
    return [
        {
            "contender": contender,
            "learned tok/CPU-s": over_rounds(map(rate, runs)),
            "of TRL, packed": ratio(runs, theirs, rate),
            "GiB": over_rounds(run.memory / 2**30 for run in runs),
            "GiB, of TRL, packed": ratio(runs, theirs, lambda run: run.memory),
        }
        for contender, runs in results.items()
    ]


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
        [sys.executable, "-m", "benchmarks.finetune", "run", str(file)],
        cwd=folder,
        env=child_environment() | {"TQDM_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return Peak(**json.loads(done.stdout.strip().splitlines()[-1]))


def run(words: list[str]) -> None:
    """In a process of its own: estimate, train the recipe, and print a `Peak` as JSON."""
    import resource
    import runpy

    import psutil

    from llmfoundry.builders import trainer
    from llmfoundry.plan.fit import choose_fit
    from llmfoundry.plan.microbatch_sizes import FRAMEWORK
    from llmfoundry.plan.search import Fit

    found: list[tuple[int, int]] = []

    def listen(recipe: Any, **memory: Any) -> Fit:
        fit = choose_fit(recipe, **memory)
        found.append((fit.need.parameters, fit.need.total(fit.microbatch) - FRAMEWORK))
        return fit

    trainer.choose_fit = listen
    _import_all()
    before = psutil.Process().memory_info().rss
    sys.argv = ["finetune.py", *words]
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


def memory(words: list[str]) -> None:
    """Measure every mode on a random Llama of that width and depth, print, write the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.finetune memory")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--precision", choices=["fp32", "amp_bf16", "bf16"], default="fp32")
    given = parser.parse_args(words)
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
    print(
        "\n".join([f"{size}, {given.precision}: peak of a process", *table(rows, MEMORY_COLUMNS)])
    )
    settings = {"model": size, "precision": given.precision, "tokens": ROW}
    print(f"\nwritten to {write('finetune-memory', rows, settings)}")


if __name__ == "__main__":
    {"speed": speed, "memory": memory, "run": run}[sys.argv[1]](sys.argv[2:])
