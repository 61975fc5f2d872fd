"""Fine-tuning: ours, packed, beside TRL's SFTTrainer, packed and padded, by turns, as ratios.

    python -m benchmarks.finetune [--rounds 3] [--rows 128] [--precision fp32]

One epoch of the same rows from the same weights, all parameters or LoRA. What counts is tokens that
are learned (those with a label) in a CPU-second, after the first steps. TRL's packed rows see each
other on a CPU, where it has no attention that keeps them apart; ours never do. Needs `trl` (extra
`bench`) and `peft` (extra `peft`).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Timed, timed
from llmfoundry.data.preparation.read.corpus import Corpus
from llmfoundry.data.text.bpe import END_OF_TEXT, train_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.front.paths import ROOT

LENGTH, BATCH, PACKED_BATCH, RANK, VOCAB = 1024, 8, 2, 16, 8192
"""Tokens of a row at most; padded rows, and packed rows of about as many tokens, of a step."""
SHAPE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 3, "num_key_value_heads": 3}  # 4.9M parameters
WARM_UP = 2
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


def compare(*, rounds: int, n_rows: int, precision: str) -> Iterator[str]:
    """Run everything; lines of a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        learned = prepare(folder, n_rows)
        yield (
            f"{n_rows} rows, {learned:,} learned tokens, rows up to {LENGTH}; {precision};"
            f" {rounds} rounds"
        )
        for lora in (False, True):
            results: dict[str, list[Timed]] = {}
            for turn in range(rounds):
                for contender, command in _commands(folder, precision, lora, turn).items():
                    run = timed(command, folder, least=WARM_UP + 2)
                    results.setdefault(contender, []).append(run)
                    print(".", end="", flush=True, file=sys.stderr)
            yield from _table("LoRA" if lora else "full", results, learned)
    print(file=sys.stderr)


def prepare(folder: Path, n_rows: int) -> int:
    """Weights, tokenizer, rows and recipe in `folder`; tokens of all answers, ends included."""
    from transformers import LlamaConfig, LlamaForCausalLM

    texts = [document.text for document in Corpus(DataConfig()) if len(document.text) > 4000]
    tokenizer = Tokenizer(train_backend(texts[:200], VOCAB, progress=False), END_OF_TEXT)
    tokenizer.save(folder / "model")
    ends: dict[str, Any] = {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **SHAPE, **ends))
    model.save_pretrained(folder / "model")
    draw, learned = random.Random(17), 0
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(n_rows):
            prompt, answer = (_cut(draw, texts, median) for median in (300, 500))
            learned += len(tokenizer.encode(answer)) + 1
            file.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")
    (folder / "sft.yaml").write_text(RECIPE)
    return learned


def _cut(draw: random.Random, texts: list[str], median: int) -> str:
    """A piece of some text, of log-normal length in characters, as chats have."""
    text = draw.choice(texts)
    length = min(1500, max(8, int(draw.lognormvariate(0, 0.8) * median)))
    begin = draw.randrange(len(text) - length)
    return text[begin : begin + length]


def _commands(folder: Path, precision: str, lora: bool, turn: int) -> dict[str, list[str]]:
    kind = "lora" if lora else "full"
    ours = [sys.executable, str(ROOT / "scripts" / "finetune.py"), str(folder / "sft.yaml")]
    ours += [f"run_name={kind}-{turn}", f"precision={precision}", "model.pretrained=model"]
    ours += [f"data.paths=[{folder / 'rows.jsonl'}]", f"data.cache_folder={folder / 'cache'}"]
    if lora:
        ours += ["adapter.name=lora", f"adapter.r={RANK}"]
    trl = [sys.executable, "-m", "benchmarks.trl_sft", "--model", str(folder / "model")]
    trl += ["--rows", str(folder / "rows.jsonl"), "--length", str(LENGTH), "--rank", str(RANK)]
    trl += ["--precision", precision, *(["--lora"] if lora else [])]
    return {
        "ours, packed": ours,
        "TRL, packed": [*trl, "--packed", "--batch", str(PACKED_BATCH)],
        "TRL, padded": [*trl, "--batch", str(BATCH)],
    }


def _table(kind: str, results: dict[str, list[Timed]], learned: int) -> Iterator[str]:
    """Medians of each contender, and of the rounds' ratios of ours to it."""
    from statistics import median

    def rate(run: Timed) -> float:
        steps = len(run.ends)
        share = (steps - WARM_UP) / steps
        return learned * share / (run.cpu_ends[-1] - run.cpu_ends[WARM_UP - 1])

    head = f"{'learned tok/CPU-s':>18}{'ours is':>9}{'memory':>11}{'of ours':>9}"
    yield f"{kind:13}{head}"
    ours = results["ours, packed"]
    for contender, runs in results.items():
        ratio = median(rate(a) / rate(b) for a, b in zip(ours, runs, strict=True))
        memory = median(b.memory / a.memory for a, b in zip(ours, runs, strict=True))
        yield (
            f"{contender:13}{median(map(rate, runs)):18.0f}{ratio:8.2f}x"
            f"{median(r.memory for r in runs) / 2**30:7.2f} GiB{memory:8.2f}x"
        )


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--precision", choices=["fp32", "amp_bf16"], default="fp32")
    given = parser.parse_args()
    for line in compare(rounds=given.rounds, n_rows=given.rows, precision=given.precision):
        print(line, flush=True)


if __name__ == "__main__":
    main()
