"""Cells of the fine-tuning matrix: the recipe of each, and the plain loop that it must equal.

`test_finetune_matrix.py` runs cells; started by torchrun, this file trains several one by one.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from llmfoundry.cli.commands.train import train
from llmfoundry.data.text.bpe import END_OF_TEXT, bytes_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import load

ROWS, STEPS, LR, EOS = 320, 10, 1e-3, 256
EPS = 1e-4  # with less, AdamW makes a whole step of what rounding leaves of a gradient of 0
SMALL = {"vocab_size": ROWS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SMALL, "intermediate_size": 64, "max_position_embeddings": 128}
GQA = {**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": False}
MOSAIC = {"vocab_size": ROWS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "llama": GQA,
    "gpt_neox": LLAMA,
    "qwen3": {**GQA, "head_dim": 8},
    "mpt": {**MOSAIC, "tie_word_embeddings": True},
    "dbrx": {
        **MOSAIC,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {
            **{"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
            **{"moe_loss_weight": 0.0, "ffn_act_fn": {"name": "silu"}},
        },
    },
    "mixtral": {**GQA, **EXPERTS, "sliding_window": None},
}
METHODS = ("full", "lora", "dora")
LENGTHS = [(20, 12), (18, 14), (24, 8), (10, 22)]  # of examples: two of them fill a row of 32
TARGETS = {  # peft's names of the linear layers of attention and dense layers
    "llama": "all-linear",
    "gpt_neox": "all-linear",
    "qwen3": "all-linear",
    "mpt": "all-linear",
    "dbrx": ["Wqkv", "out_proj"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
# What peft reaches as parameters, for LoRA alone, and trains as we do: it shares A between gates
# and up projections where they are one tensor, and takes DBRX's flat stacks for single matrices.
EXPERT_TARGETS = {"mixtral": ["experts.down_proj"]}


@dataclass(frozen=True)
class Cell:
    """One combination of the matrix."""

    kind: str
    method: str
    packing: str

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.method}-{self.packing}"


def texts() -> list[dict[str, str]]:
    """Prompts and answers of LENGTHS tokens together, the end of text counted."""
    found = []
    for number, length in enumerate(n for pair in LENGTHS for n in pair):
        text = "".join(chr(97 + (number * 7 + i * i) % 26) for i in range(length - 1))
        cut = length // 3 + 1
        found.append({"prompt": text[:cut], "response": text[cut:]})
    return found


def write_model(kind: str, folder: Path, **changes: Any) -> Path:
    """The class with random weights, and a tokenizer of bytes."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(kind, **{**KINDS[kind], "eos_token_id": EOS, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    Tokenizer(bytes_backend(), END_OF_TEXT).save(folder)
    return folder


def peft_config(kind: str, method: str) -> Any:
    """What the plain loop gives to peft."""
    from peft import LoraConfig

    experts = {"target_parameters": EXPERT_TARGETS.get(kind)} if method == "lora" else {}
    return LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=TARGETS[kind],
        use_dora=method == "dora",
        bias="none",
        task_type="CAUSAL_LM",
        **experts,
    )


def write_adapter(kind: str, method: str, base: Path, folder: Path) -> Path:
    """An adapter that peft made, both of its matrices random."""
    from peft import get_peft_model

    torch.manual_seed(5)
    model = get_peft_model(plain_model(base), peft_config(kind, method))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder


def plain_model(base: Path) -> Any:
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **how)
    return model.train()


def plain_steps(cell: Cell, base: Path, adapter: Path | None) -> list[tuple[float, float]]:
    """Losses and gradient norms of ten steps on all examples, each a padded row."""
    model = plain_model(base)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    ids, labels, mask = padded()
    found = []
    for _ in range(STEPS):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, math.inf)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def padded() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels and mask, each (examples, longest); answers and their end are learned."""
    rows = texts()
    width = max(len(row["prompt"] + row["response"]) + 1 for row in rows)
    ids, labels = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((8, width), -100)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        prompt, response = ([*row[key].encode()] for key in ("prompt", "response"))
        whole = [*prompt, *response, EOS]
        ids[i, : len(whole)] = torch.tensor(whole)
        labels[i, len(prompt) : len(whole)] = torch.tensor(whole[len(prompt) :])
        mask[i, : len(whole)] = 1
    return ids, labels, mask


def write_cell(cell: Cell, folder: Path, base: Path, adapter: Path | None, **parallel: int) -> Path:
    """The cell's recipe: every step sees all examples, so the order means nothing."""
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in texts()) + "\n")
    packed = cell.packing == "best_fit"
    recipe: dict[str, Any] = {
        "run_name": cell.name,
        "save_folder": str(folder / cell.name),
        "model": {"pretrained": str(base)},
        "max_seq_len": 32,
        "max_duration": f"{STEPS}ba",
        "global_train_batch_size": 4 if packed else 8,
        "device_train_microbatch_size": 2,
        "precision": "fp32",
        "eval_interval": "0ba",
        "save_interval": "0ba",
        "data": {
            **{"name": "files", "paths": [str(folder / "rows.jsonl")], "validation_fraction": 0.0},
            **{"format": "prompt_response", "cache_folder": str(folder / "cache")},
            "supervised": {"packing": cell.packing},
        },
        "optimizer": {"name": "adamw", "lr": LR, "betas": [0.9, 0.95], "eps": EPS},
        "gradient_clipping": {"clipping_threshold": math.inf},
        "schedule": {"name": "constant_with_warmup", "t_warmup": "0ba"},
        "logger": {"mlflow": False},
        "parallel": parallel,
    }
    if adapter is not None:
        recipe["adapter"] = {"name": "lora", "pretrained": str(adapter)}
    path = folder / f"{cell.name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def run_steps(recipe: Path) -> None:
    """Train a recipe in this process."""
    train(load(FinetuneRecipe, recipe).resolve())


def steps_of(run: Path) -> list[tuple[float, float]]:
    """Losses and gradient norms of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [row for row in rows if "loss/train/total" in row]
    return [(row["loss/train/total"], row["l2_norm/grad/global"]) for row in kept]


if __name__ == "__main__":
    for number, path in enumerate(sys.argv[1:], start=1):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # a group of processes for each
        run_steps(Path(path))
