"""The incumbent: Hugging Face's MPT under Hugging Face's Trainer, at the benchmark's size.

    python -m llmfoundry.bench.hf_trainer --precision fp32 --steps 20

transformers' MPT has ALiBi in place of learned positions (6.82M parameters) and its own eager
attention. Needs `accelerate` (extra `bench`). Prints `step N` lines.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from transformers import MptConfig, MptForCausalLM, Trainer, TrainerCallback, TrainingArguments

from llmfoundry.bench.bare import HEADS, LAYERS, ROWS, SEQ, VOCAB, D


class Stopwatch(TrainerCallback):
    """Prints each step's time."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Start the watch."""
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop it."""
        print(f"step {state.global_step} {time.perf_counter() - self.started:.6f}", flush=True)


def main() -> None:
    """Train on random tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=["fp32", "amp_bf16"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    config = MptConfig(
        d_model=D,
        n_heads=HEADS,
        n_layers=LAYERS,
        vocab_size=VOCAB,
        max_seq_len=SEQ,
        use_cache=False,
    )
    rows = torch.randint(0, VOCAB, (ROWS * options.steps, SEQ))
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=ROWS,
            max_steps=options.steps,
            bf16=options.precision == "amp_bf16",
            use_cpu=True,
            optim="adamw_torch_fused",
            learning_rate=6e-4,
            max_grad_norm=1.0,
            logging_steps=10**6,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            MptForCausalLM(config), arguments, train_dataset=data, callbacks=[Stopwatch()]
        )
        trainer.train()


if __name__ == "__main__":
    main()
