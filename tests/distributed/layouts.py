"""Layouts of processes, and the models that `test_matrix.py` trains on each.

ROUTINE has each kind of layout once, and each way with one of them. SLOW has all of them with every
model, with and without accumulation, recomputation and documents, and beside that product what else
a layout may have: adapters, compilation, bfloat16, other mixtures, more processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from llmfoundry.recipe.parallel import ParallelConfig

DBRX: dict[str, Any] = {  # with both losses of its routers
    "no_bias": True,
    "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2, "rope": True},
    "ffn_config": {
        "ffn_type": "dmoe",
        "mlp_type": "glu",
        "ffn_act_fn": "silu",
        "ffn_hidden_size": 16,
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "moe_loss_weight": 0.05,
        "moe_zloss_weight": 0.01,
    },
}


def dbrx(**ffn: Any) -> dict[str, Any]:
    """DBRX's settings, some of its feed-forward layer's changed."""
    return DBRX | {"ffn_config": DBRX["ffn_config"] | ffn}


MODELS: dict[str, dict[str, Any]] = {
    "learned": {},  # MPT's with learned positions, and biases
    "mpt": {"no_bias": True, "attn_config": {"alibi": True, "clip_qkv": 6}},
    "gqa": {"no_bias": True, "norm_type": "rmsnorm", "attn_config": DBRX["attn_config"]},
    "untied": {  # neither 2 nor 4 processes divide the vocabulary
        "vocab_size": 67,
        "tie_word_embeddings": False,
        "attn_config": {"qk_gn": True},
    },
    "dbrx": DBRX,
    "dbrx-shared": dbrx(shared_expert_hidden_size=24, moe_normalize_expert_weights=1),
    "dbrx-biases": DBRX | {"no_bias": False},
    "dbrx-bias": dbrx(
        moe_balancing="bias",
        moe_loss_weight=None,
        moe_bias_update_rate=0.1,
        moe_normalize_expert_weights=2,
    ),
    "dbrx-deepseek": dbrx(  # as DeepSeek-V3: the names of mixtures begin with dbrx
        moe_scoring_func="sigmoid",
        moe_n_group=4,
        moe_topk_group=2,
        moe_routed_scaling_factor=2.5,
        moe_normalize_expert_weights=1,
        shared_expert_hidden_size=24,
        first_k_dense_replace=1,
        dense_hidden_size=24,
        moe_balancing="bias",
        moe_loss_weight=None,
        moe_bias_update_rate=0.1,
    )
    | {
        "norm_type": "rmsnorm",
        "attn_config": {
            "attn_type": "multihead_latent_attention",
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "rope": True,
        },
    },
    "dbrx-reference": dbrx(moe_impl="torch", mlp_type="mlp", moe_top_k=3),
}

Z_LOSSES = {"learned": 0.01, "untied": 0.01}
"""Weights of the z-loss of the logits, by model; the others have none."""


@dataclass(frozen=True)
class Entry:
    """A layout of processes, the model that they train, and how.

    Attributes:
        replicate, shard, context, tensor, expert: degrees.
        method: of context parallelism.
        model: of MODELS.
        adapter: low-rank factors train, and nothing else.
        taught: a teacher's divergence is minimized, too.
        accumulated: gradients of several microbatches are added up; else there is one.
        packed: rows hold two documents.
        checkpointing: the recipe's `parallel.activation_checkpointing`.
        target, compression: its `activation_checkpointing_target`, `activation_compression`.
        once: gradients are reduce-scattered once a step, not after every microbatch.
        capacity, halves: the recipe's `parallel.expert_capacity` and `parallel.expert_halves`.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    method: str | None = None
    model: str = "learned"
    adapter: bool = False
    taught: bool = False
    accumulated: bool = True
    packed: bool = True
    checkpointing: str = "none"
    target: Any = None
    compression: str = "none"
    compiled: bool = False
    once: bool = False
    capacity: float | None = None
    halves: bool = False
    precision: str = "fp32"

    @property
    def processes(self) -> int:
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def is_mixture(self) -> bool:
        return self.model.startswith("dbrx")

    @property
    def counts_bytes(self) -> bool:
        """Whether the gradients that it holds between microbatches are counted.

        They can be computed in advance; six and eight processes pad their shards. Counting takes as
        long as all else, and finds the same whatever a block computes again.
        """
        odd = self.compiled or self.adapter or self.precision != "fp32" or self.processes > 4
        odd = odd or self.compression != "none"
        odd = odd or (self.capacity is not None and self.capacity < self.expert)  # repeats passes
        alone = self.packed and self.checkpointing != "whole"
        return self.shard > 1 and self.accumulated and alone and not odd

    @property
    def config(self) -> ParallelConfig:
        """What a recipe says, filled."""
        config = ParallelConfig(
            data_parallel_replicate_degree=self.replicate,
            data_parallel_shard_degree=self.shard,
            expert_parallel_degree=self.expert,
            expert_capacity=self.capacity,
            expert_halves=self.halves,
            context_parallel_degree=self.context,
            context_parallel_method=self.method,
            tensor_parallel_degree=self.tensor,
            activation_checkpointing=self.checkpointing,
            activation_checkpointing_target=self.target,
            activation_compression=self.compression,
        )
        config.fill()
        return config


ULYSSES, GATHER = Entry(context=2, method="ulysses"), Entry(context=2, method="all_gather")
DENSE = {  # layouts of every model
    "ddp": Entry(replicate=2),
    "fsdp": Entry(shard=2),
    "hsdp": Entry(replicate=2, shard=2),
    "tensor": Entry(tensor=2),
    "tensor-fsdp": Entry(tensor=2, shard=2),
    "ulysses": ULYSSES,
    "gather": GATHER,
}
MIXED = {  # of mixtures alone
    "expert": Entry(shard=2, expert=2, model="dbrx"),
    "expert-fsdp": Entry(shard=4, expert=2, model="dbrx"),
    "expert-hsdp": Entry(replicate=2, shard=2, expert=2, model="dbrx"),
    "expert-ulysses-fsdp": replace(ULYSSES, shard=2, expert=2, model="dbrx"),
    "expert-gather-fsdp": replace(GATHER, shard=2, expert=2, model="dbrx"),
}
LAYOUTS = DENSE | MIXED

PARTS = {"attention": "first-1", "norm": [1], "feed_forward": "last-1"}
ROUTINE = {
    "one": Entry(),
    "ddp": LAYOUTS["ddp"],
    "fsdp": LAYOUTS["fsdp"],
    "fsdp-once-checkpointing": Entry(shard=2, once=True, checkpointing="whole", target=PARTS),
    "hsdp-at-once": Entry(replicate=2, shard=2, accumulated=False, packed=False),
    "hsdp-once": Entry(replicate=2, shard=2, once=True, model="gqa"),
    "tensor": Entry(tensor=2, model="mpt"),
    "tensor-expert": Entry(tensor=2, expert=2, model="dbrx-shared", checkpointing="whole"),
    "tensor-fsdp": Entry(tensor=2, shard=2, model="untied", checkpointing="selective"),
    "taught-ddp": Entry(replicate=2, taught=True),
    "taught-fsdp": Entry(shard=2, taught=True, model="gqa", checkpointing="whole"),
    "taught-tensor-fsdp": Entry(tensor=2, shard=2, taught=True, model="untied"),
    "taught-gather": replace(GATHER, taught=True, packed=False),
    "expert": replace(LAYOUTS["expert"], model="dbrx-shared", checkpointing="selective"),
    "expert-compressed": replace(LAYOUTS["expert"], checkpointing="whole", compression="int8"),
    "expert-capacity": replace(LAYOUTS["expert"], capacity=2.0, checkpointing="whole"),
    "expert-halves": replace(LAYOUTS["expert-fsdp"], halves=True),
    "expert-adapter": replace(LAYOUTS["expert"], adapter=True),
    "expert-fsdp": LAYOUTS["expert-fsdp"],
    "expert-hsdp": replace(LAYOUTS["expert-hsdp"], model="dbrx-bias"),
    "gather": replace(GATHER, model="gqa", checkpointing="whole"),
    "expert-ulysses-fsdp": LAYOUTS["expert-ulysses-fsdp"],
    "tensor-fsdp-latent": Entry(tensor=2, shard=2, model="dbrx-deepseek"),
    "ulysses-latent": replace(ULYSSES, model="dbrx-deepseek", checkpointing="selective"),
    "one-bf16": Entry(precision="bf16"),
    "fsdp-bf16": Entry(shard=2, precision="bf16"),
}

ON_MODELS = {
    (layout, model): replace(entry, model=model)
    for layout, entry in LAYOUTS.items()
    for model in (("mpt", "gqa", "dbrx") if layout in DENSE else ("dbrx",))
}


def every(layout: str) -> dict[str, Entry]:
    """One layout's part of the product; selective recomputation with all else alone."""
    found = {}
    ways = [*product((True, False), ("none", "whole"), (True, False)), (True, "selective", True)]
    for (name, model), entry in ON_MODELS.items():
        for accumulated, level, packed in ways if name == layout else ():
            words = [layout, model, "accumulated" if accumulated else "at-once", level]
            found["-".join([*words, "packed" if packed else "rows"])] = replace(
                entry, accumulated=accumulated, checkpointing=level, packed=packed
            )
    return found


def changed(what: str, **changes: Any) -> dict[str, Entry]:
    """Every layout and model, changed in the same way."""
    return {
        f"{what}-{layout}-{model}": replace(entry, **changes)
        for (layout, model), entry in ON_MODELS.items()
    }


SLOW: dict[str, dict[str, Entry]] = {layout: every(layout) for layout in LAYOUTS} | {
    # matrices that tensor ranks share have no adapters; elsewhere on every layout
    "adapter": {
        name: entry for name, entry in changed("adapter", adapter=True).items() if entry.tensor == 1
    },
    "target": {
        f"target-{parts}-{layout}-{model}": replace(entry, checkpointing="whole", target=parts)
        for (layout, model), entry in ON_MODELS.items()
        for parts in ("attention", "feed_forward", "norm", "experts")
        if parts != "experts" or entry.is_mixture
    },
    **{
        f"compressed-{level}": changed(f"{level}-int8", checkpointing=level, compression="int8")
        for level in ("none", "selective", "whole")
    },
    "once": {name: entry for name, entry in changed("once", once=True).items() if entry.shard > 1},
    "learned": {
        f"learned-{name}-{model}": replace(entry, model=model)
        for name, entry in DENSE.items()
        for model in ("learned", "untied")
    },
    "bf16": {
        "bf16-hsdp": Entry(replicate=2, shard=2, precision="bf16"),
        "bf16-tensor": Entry(tensor=2, precision="bf16"),
        "bf16-ulysses": replace(ULYSSES, precision="bf16"),
    },
    "mixture": {
        f"mixture-{layout}-{model}": replace(LAYOUTS[layout], model=model, checkpointing=level)
        for model in MODELS
        if model.startswith("dbrx-")
        for layout, level in (("expert", "none"), ("expert-fsdp", "selective"), ("tensor", "none"))
    }
    | {
        f"mixture-{layout}-deepseek": replace(LAYOUTS[layout], model="dbrx-deepseek")
        for layout in (*("tensor-fsdp", "ulysses", "gather", "hsdp"), "expert-ulysses-fsdp")
    },
    "capacity": {  # of which 1 is too little, and some steps are repeated
        f"capacity-{capacity}-{name}": replace(entry, capacity=capacity)
        for capacity in (1.0, 1.5, 4.0)
        for name, entry in {
            "expert-fsdp": LAYOUTS["expert-fsdp"],
            "expert-hsdp": replace(LAYOUTS["expert-hsdp"], checkpointing="selective"),
            "ulysses": LAYOUTS["expert-ulysses-fsdp"],
            "expert-4": Entry(shard=4, expert=4, model="dbrx-biases"),
            "tensor": Entry(tensor=2, shard=2, expert=4, model="dbrx-shared"),
        }.items()
    },
    "halves": {
        "halves-compiled-capacity": replace(
            LAYOUTS["expert"], halves=True, capacity=1.0, compiled=True
        ),
        "halves-expert-whole": replace(LAYOUTS["expert"], halves=True, checkpointing="whole"),
        "halves-expert-selective": replace(
            LAYOUTS["expert"], halves=True, checkpointing="selective", model="dbrx-shared"
        ),
        "halves-expert-hsdp": replace(LAYOUTS["expert-hsdp"], halves=True, model="dbrx-biases"),
        "halves-capacity": replace(LAYOUTS["expert"], halves=True, capacity=1.25),
        "halves-compressed": replace(LAYOUTS["expert"], halves=True, compression="int8"),
        "halves-tensor": Entry(
            tensor=2, shard=2, expert=4, model="dbrx-shared", halves=True, capacity=4.0
        ),
        "halves-reference": Entry(shard=2, expert=2, model="dbrx-reference", halves=True),
        "halves-adapter": replace(LAYOUTS["expert"], halves=True, adapter=True),
    },
    "four": {
        "four-expert-4": Entry(shard=4, expert=4, model="dbrx"),
        "four-tensor-4-mpt": Entry(tensor=4, model="mpt"),
        "four-tensor-4-untied": Entry(tensor=4, model="untied", checkpointing="selective"),
        "four-tensor-2-replicas-2": Entry(tensor=2, replicate=2, model="untied"),
        "four-ulysses-4": replace(ULYSSES, context=4, model="gqa"),
        "four-gather-4": replace(GATHER, context=4, model="mpt"),
        "four-ulysses-2-replicas-2": replace(ULYSSES, replicate=2, model="mpt"),
        "four-gather-2-fsdp-2": replace(GATHER, shard=2, model="gqa", checkpointing="selective"),
        "four-gather-4-expert-4": replace(GATHER, context=4, expert=4, model="dbrx"),
        "four-ulysses-2-tensor-2": replace(ULYSSES, tensor=2, model="gqa"),
        "four-gather-2-tensor-2": replace(GATHER, tensor=2, model="mpt"),
        "four-tensor-2-fsdp-2-expert-4": Entry(shard=2, tensor=2, expert=4, model="dbrx"),
        "four-tensor-2-fsdp-2-expert-2": Entry(
            shard=2, tensor=2, expert=2, model="dbrx-bias", checkpointing="selective"
        ),
    },
    "six": {  # 64 rows of experts' matrices over 3 processes: shards are uneven
        "six-fsdp-6": Entry(shard=6, model="dbrx"),
        "six-expert-2-fsdp-6": Entry(shard=6, expert=2, model="dbrx-biases"),
        "six-expert-2-hsdp-3x2": Entry(replicate=3, shard=2, expert=2, model="dbrx-shared"),
    },
    "eight": {
        "eight-gather-2-expert-2-hsdp-2x2": replace(
            GATHER, replicate=2, shard=2, expert=2, model="dbrx"
        ),
        "eight-ulysses-2-expert-2-fsdp-4": replace(ULYSSES, shard=4, expert=2, model="dbrx"),
        "eight-gather-2-expert-2-fsdp-4": replace(
            GATHER, shard=4, expert=2, model="dbrx", checkpointing="whole"
        ),
        "eight-ulysses-4-expert-8-fsdp-2": replace(
            ULYSSES, context=4, shard=2, expert=8, model="dbrx"
        ),
        "eight-gather-4-expert-4-replicas-2": replace(
            GATHER, context=4, replicate=2, expert=4, model="dbrx"
        ),
        "eight-gather-2-expert-4-hsdp-2x2": replace(
            GATHER, replicate=2, shard=2, expert=4, model="dbrx", checkpointing="selective"
        ),
        "eight-default-8": Entry(context=8, model="gqa"),  # more than heads: keys are gathered
        "eight-ulysses-2-tensor-2-fsdp-2": replace(
            ULYSSES, shard=2, tensor=2, model="mpt", checkpointing="whole"
        ),
        "eight-tensor-2-ulysses-2-fsdp-2": replace(ULYSSES, shard=2, tensor=2, model="dbrx"),
        "eight-tensor-2-gather-2-expert-8": replace(
            GATHER, shard=2, tensor=2, expert=8, model="dbrx"
        ),
        "eight-tensor-2-hsdp-2x2-expert-2": Entry(
            replicate=2, shard=2, tensor=2, expert=2, model="dbrx-biases", once=True
        ),
    },
}
for layout in LAYOUTS:  # each takes as long as ten others: a group of its own
    SLOW[f"compiled-{layout}"] = {
        f"compiled-{layout}-{model}": replace(entry, compiled=True, checkpointing="whole")
        for (name, model), entry in ON_MODELS.items()
        if name == layout and model != "mpt"
    }
