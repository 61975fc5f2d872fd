"""The incumbent of fine-tuning: TRL's SFTTrainer on a folder of weights and a file of rows.

    python -m benchmarks.finetune.trl_sft --model DIR --rows FILE --packed --lora --rank 16

Needs `trl` (extra `bench`) and, for --lora, `peft`. Prints `step N` lines. Its defaults, but for
gradient checkpointing, which ours does not do either.
"""

from __future__ import annotations

import argparse
import tempfile

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from benchmarks.training.hf_trainer import Stopwatch


def trl_sft() -> None:
    """Train one epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--precision", choices=["fp32", "amp_bf16"], required=True)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--rank", type=int, default=16)
    given = parser.parse_args()
    adapter = None
    if given.lora:
        from peft import LoraConfig

        adapter = LoraConfig(r=given.rank, lora_alpha=2 * given.rank, target_modules="all-linear")
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=given.batch,
            max_length=given.length,
            packing=given.packed,
            bf16=given.precision == "amp_bf16",
            use_cpu=True,
            optim="adamw_torch_fused",
            learning_rate=1e-4,
            gradient_checkpointing=False,
            logging_steps=10**6,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        )
        SFTTrainer(
            given.model,
            args=settings,
            train_dataset=load_dataset("json", data_files=given.rows, split="train"),
            peft_config=adapter,
            callbacks=[Stopwatch()],
        ).train()


if __name__ == "__main__":
    trl_sft()
