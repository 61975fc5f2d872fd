"""Fine-tuning: ours, packed, beside TRL's SFTTrainer, packed and padded, by turns, as ratios.

    python -m benchmarks.finetune.compare [--rounds 3] [--rows 128] [--precision fp32]

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
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.record import over_rounds, table, write
from benchmarks.turns import Timed, by_turns, ratio, timed
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


def speed() -> None:
    """Run everything, print a table for full and one for LoRA, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--precision", choices=["fp32", "amp_bf16"], default="fp32")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        learned = prepare(folder, given.rows)
        print(f"{given.rows} rows, {learned:,} learned tokens, rows up to {LENGTH}")
        for trained in ("all", "LoRA"):
            results = by_turns(
                partial(_commands, folder, given.precision, trained == "LoRA"),
                partial(timed, folder=folder, least=WARM_UP + 2),
                rounds=given.rounds,
            )
            found = _measured(results, learned)
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


def _commands(folder: Path, precision: str, lora: bool, turn: int) -> dict[str, list[str]]:
    kind = "lora" if lora else "full"
    ours = [sys.executable, str(ROOT / "scripts" / "finetune.py"), str(folder / "sft.yaml")]
    ours += [f"run_name={kind}-{turn}", f"precision={precision}", "model.pretrained=model"]
    ours += [f"data.paths=[{folder / 'rows.jsonl'}]", f"data.cache_folder={folder / 'cache'}"]
    if lora:
        ours += ["adapter.name=lora", f"adapter.r={RANK}"]
    trl = [sys.executable, "-m", "benchmarks.finetune.trl_sft", "--model", str(folder / "model")]
    trl += ["--rows", str(folder / "rows.jsonl"), "--length", str(LENGTH), "--rank", str(RANK)]
    trl += ["--precision", precision, *(["--lora"] if lora else [])]
    return {
        "ours, packed": ours,
        TRL: [*trl, "--packed", "--batch", str(PACKED_BATCH)],
        "TRL, padded": [*trl, "--batch", str(BATCH)],
    }


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


if __name__ == "__main__":
    speed()
