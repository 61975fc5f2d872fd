"""Makes preference_goldens.json: what TRL computes on a tiny Llama with weights of a formula.

    python -m tests.train.preference_goldens   (with trl==1.16.0; the tests run without it)

Of each method: the loss and the metrics of TRL's own trainer on the documents below, the gradient's
norm, and the gradient of the output head summed over its columns.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

GOLDENS = Path(__file__).with_suffix(".json")
VOCAB = 24
KEPT = ("rewards", "logps", "kl")  # of TRL's metrics
REFERENCE = 3.36  # shift of the reference model: one from which the model has moved

# prompt, chosen, rejected. The chosen ones have one length: TRL's cross-entropy beside the loss is
# a mean over tokens, ours over pairs.
PAIRS = [
    ([5, 3, 9], [1, 12, 2], [7, 2]),
    ([4], [6, 6, 2], [8, 11, 3, 14, 2]),
    ([10, 1, 15, 9], [13, 4, 2], [2]),
    ([20, 3], [22, 5, 2], [9, 21, 4, 2]),
]
SINGLES = [  # prompt, answer, whether it is desirable
    ([5, 3, 9], [1, 12, 2], True),
    ([4], [8, 11, 3, 14, 2], False),
    ([10, 1, 15, 9], [13, 2], True),
    ([20, 3], [2], True),
    ([7, 7, 18], [9, 21, 4, 2], False),
]
CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {"name": "dpo", "loss": "sigmoid", "beta": 0.3},
    "ipo": {"name": "dpo", "loss": "ipo", "beta": 0.4},
    "hinge": {"name": "dpo", "loss": "hinge", "beta": 0.2},
    "smoothed": {"name": "dpo", "loss": "sigmoid", "beta": 0.3, "label_smoothing": 0.2},
    "with-sft": {"name": "dpo", "loss": "sigmoid", "beta": 0.3, "sft_weight": 0.7},
    "orpo": {"name": "orpo", "beta": 0.25},
    "simpo": {"name": "simpo", "beta": 2.5, "gamma": 0.6},
    "simpo-with-sft": {"name": "simpo", "beta": 2.5, "gamma": 0.6, "sft_weight": 0.4},
    "kto": {"name": "kto", "beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8},
}


def llama(shift: float) -> Any:
    """A transformers Llama in fp32 whose weights are a formula's; `shift` makes another one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for n, parameter in enumerate(model.parameters()):
            wave = torch.sin(
                torch.arange(parameter.numel(), dtype=torch.float64) * (1.3 + n) + shift
            )
            base = 1.0 if parameter.ndim == 1 else 0.0
            size = 0.1 if parameter.ndim == 1 else 0.45
            parameter.copy_((base + size * wave).view(parameter.shape))
    return model


def pairs_of(case: str) -> list[tuple[list[int], list[int], list[int]]]:
    """ORPO's cross-entropy counts the prompt in TRL: with one token there is nothing to count."""
    return [(p[:1], c, r) for p, c, r in PAIRS] if case == "orpo" else PAIRS


def _padded(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def _sequences(documents: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    ids = [prompt + answer for prompt, answer in documents]
    mask = [[0] * len(prompt) + [1] * len(answer) for prompt, answer in documents]
    return {
        "input_ids": _padded(ids, 0),
        "attention_mask": _padded([[1] * len(row) for row in ids], 0),
        "completion_mask": _padded(mask, 0),
    }


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, **{f"w{n}": n for n in range(1, VOCAB)}}
    backend = Tokenizer(WordLevel(words, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")


def _settings(extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_dir": mkdtemp(),
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": len(SINGLES),
        **extra,
    }


def _dpo(case: dict[str, Any], model: Any) -> tuple[torch.Tensor, dict[str, float]]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    kind: dict[str, Any] = {"loss_type": [case["loss"]]}
    if "label_smoothing" in case:  # aot is cDPO where a batch is one pair
        kind = {"loss_type": ["aot"], "label_smoothing": case["label_smoothing"]}
    if "sft_weight" in case:
        kind = {"loss_type": [case["loss"], "sft"], "loss_weights": [1.0, case["sft_weight"]]}
    rows = Dataset.from_list([{"prompt": "w1", "chosen": "w2", "rejected": "w3"}])
    trainer = DPOTrainer(
        model,
        ref_model=llama(REFERENCE),
        args=DPOConfig(**_settings({"beta": case["beta"], **kind})),
        train_dataset=rows,
        processing_class=_tokenizer(),
    )
    groups = [[pair] for pair in PAIRS] if "label_smoothing" in case else [PAIRS]
    loss: Any = 0.0
    for group in groups:
        documents = [(p, c) for p, c, _ in group] + [(p, r) for p, _, r in group]
        loss = loss + trainer._compute_loss(model, _sequences(documents), False) / len(groups)
    values = trainer._metrics["train"].items()
    return loss, {key: sum(found) / len(found) for key, found in values}


def _by_logits(case: dict[str, Any], model: Any) -> tuple[torch.Tensor, dict[str, float]]:
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    rows = Dataset.from_list([{"prompt": "w1", "chosen": "w2", "rejected": "w3"}])
    settings: dict[str, Any] = {"beta": case["beta"]}
    if case["name"] == "simpo":
        alpha = case.get("sft_weight", 0.0)
        settings |= {"loss_type": "simpo", "simpo_gamma": case["gamma"], "cpo_alpha": alpha}
    kind, config = {"orpo": (ORPOTrainer, ORPOConfig), "simpo": (CPOTrainer, CPOConfig)}[
        case["name"]
    ]
    trainer = kind(
        model,
        args=config(**_settings(settings)),
        train_dataset=rows,
        processing_class=_tokenizer(),
    )
    batch = {}
    for side, place in (("chosen", 1), ("rejected", 2)):
        found = _sequences([(pair[0], pair[place]) for pair in pairs_of(case["name"])])
        batch[f"{side}_input_ids"] = found["input_ids"]
        batch[f"{side}_attention_mask"] = found["attention_mask"]
        masked = found["input_ids"].masked_fill(found["completion_mask"] == 0, -100)
        batch[f"{side}_labels"] = masked
    return trainer.get_batch_loss_metrics(model, batch)


def _kto(case: dict[str, Any], model: Any) -> tuple[torch.Tensor, dict[str, float]]:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    weights = {key: case[key] for key in ("beta", "desirable_weight", "undesirable_weight")}
    rows = [{"prompt": "w1", "completion": "w2", "label": label} for label in (True, False)]
    trainer = KTOTrainer(
        model,
        ref_model=llama(REFERENCE),
        args=KTOConfig(**_settings(weights)),
        train_dataset=Dataset.from_list(rows),
        processing_class=_tokenizer(),
    )
    answers = [answer for _, answer, _ in SINGLES]
    others = [answers[-1], *answers[:-1]]  # as its add_kl_completion_ids does
    inputs: dict[str, Any] = _sequences([(p, a) for p, a, _ in SINGLES])
    mixed = _sequences([(p, other) for (p, *_), other in zip(SINGLES, others, strict=True)])
    inputs |= {f"KL_{key}": value for key, value in mixed.items()}
    inputs["label"] = torch.tensor([label for *_, label in SINGLES])
    loss = trainer._compute_loss(model, inputs, False)
    return loss, {key: found[-1] for key, found in trainer._metrics["train"].items()}


def main() -> None:
    goldens = {}
    for name, case in CASES.items():
        model = llama(0.0)
        make = {"dpo": _dpo, "kto": _kto}.get(case["name"], _by_logits)
        loss, metrics = make(case, model)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        goldens[name] = {
            "loss": loss.item(),
            "metrics": {
                k: float(v) for k, v in metrics.items() if k[:5] in ("rewar", "logps", "kl")
            },
            "norm": norm.item(),
            "head": model.lm_head.weight.grad.sum(1).tolist(),
        }
        print(name, goldens[name]["loss"], goldens[name]["metrics"])
    made = "python -m tests.train.preference_goldens with trl 1.16.0, transformers 5.23, torch 2.13"
    GOLDENS.write_text(json.dumps({"made_by": made, "cases": goldens}, indent=1) + "\n")


if __name__ == "__main__":
    main()
