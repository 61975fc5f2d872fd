"""The incumbent: Hugging Face's MPT under Hugging Face's Trainer, at the benchmark's size.

    python -m benchmarks.training.hf_trainer --precision fp32 --steps 20

transformers' MPT has ALiBi in place of learned positions (6.82M parameters) and its own eager
attention. Needs `accelerate` (extra `bench`). Prints `step N` lines. `moe/hf_dbrx.py` trains
its model by the same `train_by_hf`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.training.bare import HEADS, LAYERS, ROWS, SEQ, VOCAB, D


class Stopwatch(TrainerCallback):
    """Prints each step's time."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Start the watch."""
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop it."""
        print(f"step {state.global_step} {time.perf_counter() - self.started:.6f}", flush=True)


def arguments(precisions: Sequence[str]) -> argparse.ArgumentParser:
    """What a contender of the Hugging Face Trainer is asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=precisions, required=True)
    parser.add_argument("--steps", type=int, required=True)
    return parser


def train_by_hf(model: Any, *, precision: str, steps: int) -> None:
    """Train on random tokens, with amp_bf16 under autocast."""
    rows = torch.randint(0, VOCAB, (ROWS * steps, SEQ))
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=ROWS,
            max_steps=steps,
            bf16=precision == "amp_bf16",
            use_cpu=True,
            optim="adamw_torch_fused",
            learning_rate=6e-4,
            max_grad_norm=1.0,
            logging_steps=10**6,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(model, settings, train_dataset=data, callbacks=[Stopwatch()]).train()


def hf_trainer() -> None:
    """Train MPT."""
    given = arguments(["fp32", "amp_bf16"]).parse_args()
    config = transformers.MptConfig(
        d_model=D,
        n_heads=HEADS,
        n_layers=LAYERS,
        vocab_size=VOCAB,
        max_seq_len=SEQ,
        use_cache=False,
    )
    model = transformers.MptForCausalLM(config)
    train_by_hf(model, precision=given.precision, steps=given.steps)


if __name__ == "__main__":
    hf_trainer()
