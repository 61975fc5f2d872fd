"""The incumbent of mixtures: transformers' DBRX under Hugging Face's Trainer.

    python -m benchmarks.moe.hf_dbrx --size large --precision fp32 --steps 20

It loops over experts, and has the load-balancing loss as ours has. bf16 are its weights, too: its
loop fails under autocast (index_add_ of two types). Needs `accelerate` (extra `bench`). Prints its
number of parameters, then `step N` lines.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, DbrxConfig

from benchmarks.moe.mixtures import BALANCE, CLIP, EXPERTS, INIT_STD, SIZES, THETA, TOP_K, Size
from benchmarks.training.bare import SEQ, VOCAB
from benchmarks.training.hf_trainer import arguments, train_by_hf

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def dbrx(size: Size) -> DbrxConfig:
    """The settings of transformers' model of this size."""
    return DbrxConfig(
        d_model=size.d,
        n_heads=size.heads,
        n_layers=size.layers,
        vocab_size=VOCAB,
        max_seq_len=SEQ,
        initializer_range=INIT_STD,
        output_router_logits=True,  # without it there is no balancing loss
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        # it fails without this rope_theta, which it does not use
        attn_config={"clip_qkv": CLIP, "kv_n_heads": size.kv_heads, "rope_theta": THETA},
        ffn_config={
            "ffn_act_fn": {"name": "silu"},
            "ffn_hidden_size": size.f,
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
            "moe_normalize_expert_weights": 1.0,
            "moe_loss_weight": BALANCE / TOP_K,  # theirs is TOP_K where loads are equal
        },
        use_cache=False,
    )


def hf_dbrx() -> None:
    """Train DBRX."""
    parser = arguments(list(DTYPES))
    parser.add_argument("--size", choices=list(SIZES), required=True)
    given = parser.parse_args()
    config, dtype = dbrx(SIZES[given.size]), DTYPES[given.precision]
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train_by_hf(model, precision=given.precision, steps=given.steps)


if __name__ == "__main__":
    hf_dbrx()
