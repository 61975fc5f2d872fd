"""Converters of LLM Foundry values whose meaning differs here: run, model, optimizer, parallelism.

`llm_foundry.py` names them as `take` of its entries. A converter gets the value and the whole file,
and returns a `MigratedSetting`. Semantics are those of LLM Foundry 0.22 and Composer 0.32.
"""

from __future__ import annotations

import re
from typing import Any

from llmfoundry.migrate.entry import (
    CHANGED,
    MISSING,
    ForeignConfig,
    MigratedSetting,
    Take,
    changed,
    idle,
    refused,
)

OFF = "is off there too"
UNITS = ("ba", "sp", "tok", "ep", "dur")
SERVERS = {
    "openai_chat": "chat:",
    "fmapi_chat": "chat:",
    "openai_causal_lm": "",
    "fmapi_causal_lm": "",
}
_PLACE = re.compile(r"(?<!\$)\{(\w+)\}")


def as_is(key: str, why: str = "") -> Take:
    """Return a converter that keeps the value under another key; `why` marks a changed meaning."""
    return lambda value, theirs: (
        idle("has no value")
        if value is None
        else MigratedSetting({key: value}, why, CHANGED if why else None)
    )


def only(same: Any, why: str, otherwise: str, **values: Any) -> Take:
    """Return a converter that ignores the value (or values) `same` and refuses all others."""
    allowed = same if isinstance(same, tuple) else (same,)
    return lambda value, theirs: (
        idle(why) if value in allowed or value is None else refused(otherwise, **values)
    )


def of_text(key: str, otherwise: str) -> Take:
    """Return a converter to `key` for pretraining on text; supervised runs ignore the value."""

    def take(value: Any, t: ForeignConfig) -> MigratedSetting:
        return MigratedSetting({key: value}) if is_text(t) else idle(otherwise)

    return take


def unknown(section: str, why: str) -> Take:
    """Return a converter of the unknown keys in a section; an empty section is ignored."""

    def take(value: Any, t: ForeignConfig) -> MigratedSetting:
        return idle("is empty") if t.name == section and not value else refused(why)

    return take


def never(why: str) -> Take:
    """Return a converter that refuses every value."""
    return lambda value, theirs: refused(why)


def duration(key: str) -> Take:
    """Return a converter of durations; Composer reads a bare number as epochs."""

    def take(value: Any, theirs: ForeignConfig) -> MigratedSetting:
        if value is None:
            return idle("has no value")
        text = str(value).strip()
        if re.fullmatch(r"\d+", text) and key.startswith("schedule."):
            why = f"{text}: a number without a unit stops LLM Foundry; write {text}ba, or another"
            return refused(why, **{keyword(key): MISSING})
        if re.fullmatch(r"\d+", text):
            if int(text) == 0 and key != "max_duration":
                return changed("0 is never; here the end of the run", **{keyword(key): "0ba"})
            why = "a bare number is epochs there"
            return MigratedSetting({key: f"{text}ep"}, why)
        if not text.endswith(UNITS):
            why = f"{text}: the unit is none of {', '.join(UNITS)}; write {key} in one of them"
            return refused(why, **{keyword(key): MISSING})
        return MigratedSetting({key: text})

    return take


def keyword(key: str) -> str:
    """Return a dotted key as the name of a keyword argument of `changed` and `refused`."""
    return key.replace(".", "__")


def is_supervised(theirs: ForeignConfig) -> bool:
    """Return whether the train loader reads prompts and answers."""
    return theirs.get("train_loader.name") == "finetuning"


def is_text(theirs: ForeignConfig) -> bool:
    """Return whether the train loader reads documents."""
    return theirs.get("train_loader.name") == "text"


# run


def trains(theirs: ForeignConfig) -> bool:
    """Return whether the migrated recipe is for train.py or finetune.py."""
    return theirs.trains


def precision(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert precision; amp_fp16 does not exist here."""
    if value == "amp_fp16":
        return changed("there is no fp16 here; bf16 has its range of fp32", precision="amp_bf16")
    if value == "amp_fp8":
        why = "fp8 by torchao in place of Transformer Engine; with compile"
        return changed(why, precision="amp_fp8", compile=True)
    return MigratedSetting({"precision": value})


def save_folder(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert save_folder: it contains checkpoints there, and the whole run here."""
    if value is None:
        return idle("has no value: runs/ and the run's name are taken; nothing is saved there")
    path = _PLACE.sub(r"${\1}", str(value)).removesuffix("/").removesuffix("/checkpoints")
    if re.findall(r"\$\{(?!run_name\})", path):
        why = "names what only Composer fills in; write the folder out, ${run_name} may stand in it"
        return refused(why, save_folder=MISSING)
    return changed(
        "is the run's folder here; checkpoints are in checkpoints/ there", save_folder=path
    )


def load_path(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert load_path: a Composer checkpoint has to be converted first."""
    if value is None:
        return idle("has no value")
    why = (
        f"{value} is Composer's checkpoint; make it one of ours first: LLM Foundry's"
        " scripts/inference/convert_composer_to_hf.py, then `python scripts/convert.py from=hf"
        " checkpoint=FOLDER output=runs/imported`; this key then says runs/imported"
    )
    if theirs.kind == "finetune":
        return refused(f"{why}, as model.pretrained")
    return changed(why, load_path=str(value))


def rows_of_batches(key: str, batch: str) -> Take:
    """Return a converter of a number of batches to a number of examples.

    Args:
        key: recipe key of the number of examples.
        batch: LLM Foundry key of the batch size.
    """

    def take(value: Any, theirs: ForeignConfig) -> MigratedSetting:
        if value is None or value == -1:
            return idle("all rows, which is what is taken unless written")
        size = theirs.get(batch)
        size = size if isinstance(size, int) else 1
        return changed(
            f"counts rows, not batches of {size} for each process", **{keyword(key): value * size}
        )

    return take


def compiled(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert compile_config; an empty section already enables compilation."""
    return idle("has no value") if value is None else MigratedSetting({"compile": True})


# model


def model_name(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert the class of a model."""
    if value == "mpt_causal_lm":
        if theirs.kind == "eval":
            return idle("the checkpoint knows its own shape")
        return MigratedSetting({"model.name": value})
    if theirs.kind == "eval" and value in SERVERS:
        return idle("the address in models says it")
    if value != "hf_causal_lm":
        return refused(
            f"{value}: such a model is neither trained nor evaluated here; keep LLM Foundry for it"
        )
    if theirs.kind == "eval":
        return idle("models without a folder of ours are opened by transformers")
    return idle("scripts/finetune.py opens it, in our decoder where that is exactly the model")


SHAPES = {
    "gpt2": "gpt2-124m",
    "openai-community/gpt2": "gpt2-124m",
    "meta-llama/Meta-Llama-3-8B": "llama-8b",
    "meta-llama/Meta-Llama-3.1-8B": "llama-8b",
    "meta-llama/Llama-3.1-8B": "llama-8b",
    "meta-llama/Llama-3.2-1B": "llama-1b",
    "bigcode/starcoder2-3b": "starcoder2-3b",
}
"""Published models whose shape is a preset in yamls/model/, for runs from random weights."""
_STRETCHED = {
    **{"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
_DROPOUT = dict.fromkeys(("emb_pdrop", "resid_pdrop", "attn_config.attn_pdrop"), 0.1)


def _beside_shape(name: str) -> dict[str, Any]:
    """Return settings in a published config.json that our model preset does not have."""
    if "3.1" in name:
        return {f"attn_config.rope_hf_config.{key}": value for key, value in _STRETCHED.items()}
    return _DROPOUT if "llama" not in name else {}


def pretrained_name(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert the source of the weights or, with pretrained: false, of the shape."""
    if theirs.kind == "finetune":
        return MigratedSetting({"model.pretrained": value})
    if value in SHAPES:
        why = "pretrained: false takes the shape alone, which is a choice of model/ here"
        more = {f"model.{key}": number for key, number in _beside_shape(value).items()}
        return MigratedSetting({"defaults.model": SHAPES[value], **more}, why, CHANGED)
    why = (
        f"pretrained: false takes only the shape of {value}, which is not a choice of model/; copy"
        " d_model, n_layers, n_heads and the rest from its config.json below model, choose a near"
        " shape (model=gpt2-124m), or train its weights:"
        f" scripts/finetune.py model.pretrained={value}"
    )
    return refused(why, model__d_model=MISSING)


def of_mpt(why: str) -> Take:
    """Return a converter of MPT keys in `config_overrides`; other models do not have them."""

    def take(value: Any, theirs: ForeignConfig) -> MigratedSetting:
        if "mpt" not in str(theirs.get("model.pretrained_model_name_or_path")).lower():
            return refused("is MPT's key: the model has none, and LLM Foundry refuses the file")
        return idle(why) if why else MigratedSetting({theirs.key: value})

    return take


def overridden(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert overrides of config.json; a run from random weights only takes the length."""
    if theirs.kind == "finetune":
        return MigratedSetting({theirs.key: value})
    if theirs.name in ("max_position_embeddings", "n_positions", "n_ctx"):
        return MigratedSetting({"model.max_seq_len": value})
    return refused(f"is a key of config.json; write model's own for {theirs.name}")


def norm_type(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert norm_type; triton_rmsnorm is RMSNorm with another kernel."""
    if value == "triton_rmsnorm":
        return MigratedSetting({"model.norm_type": "rmsnorm"}, "the same norm by another kernel")
    return MigratedSetting({"model.norm_type": value})


def attn_impl(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert attn_impl: the fastest kernel is always chosen here, with the same results."""
    if theirs.kind == "finetune":
        return MigratedSetting({"model.attn_impl": "auto"}, "the fastest of the device")
    return MigratedSetting({"model.attn_config.attn_impl": "auto"}, "the fastest of the device")


def sequence_id(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert attn_uses_sequence_id: whether packed documents attend to each other."""
    if is_supervised(theirs):
        if value or not theirs.get("train_loader.dataset.packing_ratio"):
            return idle("rows that are packed together never see each other here")
        return changed("rows that are packed together see each other there, and never here")
    return MigratedSetting({"data.attend_across_documents": not value})


def ffn_type(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert ffn_type: there are several mixture-of-experts layers there and one here."""
    key = "model__ffn_config__ffn_type"
    if value == "torch_dmoe":
        why = "has no balancing loss there, so that experts may collapse; none is added"
        return changed(why, **{key: "dmoe", "model__ffn_config__moe_balancing": "none"})
    if value == "mb_dmoe":
        return MigratedSetting(
            {"model.ffn_config.ffn_type": "dmoe"}, "megablocks' mixture, by grouped_mm"
        )
    if value == "mb_moe":
        return changed("drops tokens over the capacity there, and none here", **{key: "dmoe"})
    if value == "te_ln_mlp":
        why = "Transformer Engine's kernel of the same layer; its norm is the block's"
        return changed(why, **{key: "mptmlp"})
    return MigratedSetting({"model.ffn_config.ffn_type": value})


def jitter(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert moe_jitter_eps; 0 means no noise."""
    if not value:
        return idle("no noise")
    return MigratedSetting({"model.ffn_config.moe_jitter_eps": value})


def lbl_scope(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert lbl_process_group: the tokens over which the expert load is counted."""
    key = "model.ffn_config.moe_lbl_scope"
    if value is None:
        return MigratedSetting({key: "microbatch"})
    if value == "global_group":
        return MigratedSetting({key: "global"})
    return changed(
        f"{value}: there is no group of some processes; global is all", **{keyword(key): "global"}
    )


def loss_weight(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert moe_loss_weight; torch_dmoe ignores it."""
    if theirs.get("model.ffn_config.ffn_type") == "torch_dmoe":
        return idle("torch_dmoe has no balancing loss")
    return MigratedSetting({"model.ffn_config.moe_loss_weight": value})


def kept_positions(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert learned_pos_emb; ALiBi and RoPE disable it silently in LLM Foundry."""
    if value and any(theirs.get(f"model.attn_config.{name}") for name in ("alibi", "rope")):
        return MigratedSetting(
            {"model.learned_pos_emb": False}, "as LLM Foundry takes it with alibi or rope"
        )
    return MigratedSetting({"model.learned_pos_emb": value})


def master_dtype(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert the dtype of weights, gradients and optimizer state."""
    if value in (None, "float32", "fp32"):
        return idle("fp32, as here")
    if value in ("bfloat16", "bf16"):
        return MigratedSetting({"precision": "bf16"}, "weights, gradients and optimizer in bf16")
    return refused("there are no fp16 weights; bf16 are precision: bf16")


def rope_factor(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert the factor of RoPE scaling; no_scaling ignores it."""
    if theirs.get("model.attn_config.rope_hf_config.type", "no_scaling") == "no_scaling":
        return idle("no_scaling stretches nothing")
    return MigratedSetting({"model.attn_config.rope_hf_config.factor": value})


def eight_bit(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert load_in_8bit; only 4-bit weights below an adapter exist here."""
    if not value:
        return idle(OFF)
    if theirs.kind == "eval":
        why = "models are evaluated in 16 or 32 bits here, which needs more memory and is exact"
        return MigratedSetting({}, why, CHANGED)
    return refused("there are no 8-bit weights; model.quantize: nf4 with an adapter is 4 bits")


# adapters


def peft_type(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert the type of an adapter; only LoRA exists."""
    if str(value).upper() == "LORA":
        return MigratedSetting({"adapter.name": "lora"})
    return refused(f"{value}: adapters are lora here", adapter__name="lora")


def adapter_pretrained(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert the adapter that a run starts from, or that is evaluated."""
    if value is None:
        return idle("has no value")
    if theirs.kind == "eval":
        why = f"an adapter's folder is a model here; one of the hub first: `hf download {value}`"
        return changed(f"{why}, and the folder that it prints", models=[str(value)])
    return MigratedSetting({"adapter.pretrained": value, "adapter.name": "lora"})


# optimizer


def optimizer_name(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert the name of an optimizer; some are replaced by a similar one."""
    near = {"adalr_lion": "decoupled_lionw", "clip_lion": "decoupled_lionw"}
    if value in near:
        why = f"{value} is not here; lion without what it does about outliers"
        return changed(why, optimizer__name=near[value])
    if value == "no_op":
        return refused("no_op: nothing would train; remove the run", optimizer__name=MISSING)
    return MigratedSetting({"optimizer.name": value})


def by_name(what: str) -> Take:
    """Return a converter of regular expressions of parameter names, which differ here."""
    return lambda value, theirs: (
        MigratedSetting(
            {what: [value] if isinstance(value, str) else value},
            "names are ours, blocks.0.attn.Wqkv.weight, without model.transformer in front",
            CHANGED,
        )
        if value
        else idle("is empty")
    )


# parallelism


def sharding(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert an FSDP sharding strategy to parallel degrees."""
    shard, copies = (
        "parallel__data_parallel_shard_degree",
        "parallel__data_parallel_replicate_degree",
    )
    written = theirs.get("fsdp_config.data_parallel_shard_degree")
    replicas = theirs.get("fsdp_config.data_parallel_replicate_degree", -1)
    if theirs.kind == "eval":
        return idle("a model is evaluated by the layout that its run names")
    if value == "NO_SHARD":
        return MigratedSetting({"parallel.data_parallel_shard_degree": 1})
    if str(value).startswith(("HYBRID", "_HYBRID")):
        why = "a copy of the model in every 8 processes; write the GPUs of your nodes"
        keeps = {"parallel__reshard_after_forward": False} if "ZERO2" in str(value) else {}
        return changed(why, **{shard: written or 8, copies: replicas}, **keeps)
    degrees = {} if written else {shard: -1, copies: 1}
    values = {key.replace("__", "."): number for key, number in degrees.items()}
    if value == "SHARD_GRAD_OP":
        values["parallel.reshard_after_forward"] = False
    return MigratedSetting(values, "FSDP2")


def shard_degree(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert data_parallel_shard_degree; the remaining processes are replicas."""
    if value is None or theirs.kind == "eval":
        return idle(
            "a model is evaluated by the layout that its run names" if value else "no value"
        )
    return MigratedSetting(
        {
            "parallel.data_parallel_shard_degree": value,
            "parallel.data_parallel_replicate_degree": theirs.get(
                "fsdp_config.data_parallel_replicate_degree", 1 if value == -1 else -1
            ),
        }
    )


def reduced(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert mixed_precision: the dtypes of FSDP's computation and reduction."""
    if theirs.kind == "eval" or theirs.get("precision") == "fp32":
        return idle("numbers are those of precision")
    if value == "PURE":
        return changed("gradients are added up over processes in fp32 here, in bf16 there")
    if value == "FULL":
        return idle("weights and sums are fp32, products those of precision")
    return idle("weights and sums are fp32, products bf16, as here")


def recomputed(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert activation_checkpointing: full activation checkpointing, or none."""
    if theirs.kind == "eval":
        return idle("nothing is trained")
    return MigratedSetting({"parallel.activation_checkpointing": "whole" if value else "none"})


def recomputed_parts(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert activation_checkpointing_target, which needs activation checkpointing."""
    if not value or not theirs.get("fsdp_config.activation_checkpointing"):
        return idle("without fsdp_config.activation_checkpointing: true")
    ours = theirs.key.removeprefix("model.") or "activation_checkpointing_target"
    return MigratedSetting({f"parallel.{ours}": value})
