"""What other tools have and this project has not: the words for it, and what to use instead.

`NOT_SUPPORTED` is for values (`preference=grpo`); `llmfoundry/migrate/other_tools.py` has the keys
with the same texts. A value or key of that kind gets this text in place of a similar spelling.
"""

from __future__ import annotations

ONLINE_RL = (
    "not supported: online reinforcement learning; preference=dpo, kto, orpo or simpo learns from"
    " stored answers, and a folder of scripts/convert.py (to=hf) is read by TRL and verl"
)
REWARD_MODELS = (
    "not supported: reward models; preference=dpo, kto, orpo or simpo learns from the same pairs"
    " without one"
)
PIPELINE = (
    "not supported: pipeline parallelism; divide the model with"
    " parallel.data_parallel_shard_degree, tensor_parallel_degree or"
    " expert_parallel_degree (scripts/plan.py chooses)"
)
NEFTUNE = (
    "not supported: noise on embeddings (NEFTune); adapter.lora_dropout or a shorter max_duration"
    " also works against overfitting"
)
ON_POLICY_DISTILLATION = (
    "not supported: on-policy distillation, in which a teacher rates the student's own texts;"
    " loss=distill learns from the teacher's probabilities of the data's texts"
    " (scripts/prepare_data.py teacher=MODEL)"
)
DISTILL = "write loss=distill, after scripts/prepare_data.py teacher=MODEL"
OTHER_ADAPTERS = "not supported: adapters other than LoRA, DoRA and rsLoRA; write adapter=lora"
LOW_RANK_OPTIMIZERS = (
    "not supported: optimizers on low-rank gradients; adapter=lora needs even less memory,"
    " and optimizer=muon half of AdamW's state"
)
SERVED_ADAPTERS = (
    "not supported: several adapters in one server; serve a run or a merged folder"
    " (scripts/convert.py), or the adapter's folder with vLLM"
)
SPECULATIVE = (
    "not supported: speculative decoding; serve a folder of scripts/convert.py (to=hf) with vLLM"
)

NOT_SUPPORTED = {
    **dict.fromkeys(
        ("grpo", "ppo", "rloo", "reinforce", "dapo", "gspo", "online_dpo", "xpo"), ONLINE_RL
    ),
    **dict.fromkeys(("reward", "rm", "reward_model", "prm", "process_reward"), REWARD_MODELS),
    **dict.fromkeys(("pp", "pipeline", "1f1b", "interleaved1f1b", "zero_bubble"), PIPELINE),
    "neftune": NEFTUNE,
    **dict.fromkeys(("distill", "distillation", "kd", "forward_kl", "reverse_kl"), DISTILL),
    **dict.fromkeys(("gkd", "minillm", "gold", "on_policy", "opd"), ON_POLICY_DISTILLATION),
    **dict.fromkeys(
        (
            "ia3",
            "prefix",
            "prefix_tuning",
            "prompt_tuning",
            "p_tuning",
            "llama_adapter",
            "vera",
            "oft",
            "boft",
            "loha",
            "lokr",
            "adalora",
        ),
        OTHER_ADAPTERS,
    ),
    **dict.fromkeys(
        ("galore", "galore_adamw", "galore_adamw_8bit", "apollo", "apollo_adamw", "q_galore"),
        LOW_RANK_OPTIMIZERS,
    ),
    "dora": "write adapter=lora adapter.use_dora=true",
    "rslora": "write adapter=lora adapter.use_rslora=true",
    "qlora": "write adapter=lora model.quantize=nf4",
}
"""The text for a value, by the value in lower case."""
