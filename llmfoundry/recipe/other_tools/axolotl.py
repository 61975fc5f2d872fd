"""axolotl's settings for SFT, LoRA and preferences that need more than a name; see `table.py`.

Words that it shares with Hugging Face's Trainer (learning_rate, lora_r …) are in `table.py`.
"""

from __future__ import annotations

from typing import Any

from llmfoundry.recipe.other_tools.entry import (
    CHANGED,
    MISSING,
    Other,
    Taken,
    Theirs,
    changed,
    idle,
    refused,
)
from llmfoundry.recipe.other_tools.values import OFF, only, sharding
from llmfoundry.recipe.schema import CHAT_TEMPLATES

FORMATS = {
    "alpaca": "alpaca",
    "chat_template": "chat",
    "completion": "text",
    "sharegpt": "sharegpt",
}
METHODS = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}
OPTIMIZERS = {"adamw": "adamw", "lion": "decoupled_lionw", "muon": "muon", "paged_adamw": "adamw"}
SCHEDULES = {
    "cosine": "cosine_with_warmup",
    "linear": "linear_decay_with_warmup",
    "constant": "constant_with_warmup",
    "constant_with_warmup": "constant_with_warmup",
}
PROJECTIONS = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}


def _adapter(value: Any, theirs: Theirs) -> Taken:
    if value == "qlora":
        return Taken({"adapter.name": "lora", "model.quantize": "nf4"})
    return Taken({"adapter.name": "lora"}) if value == "lora" else refused(f"{value} is not here")


def _base_bits(value: Any, theirs: Theirs) -> Taken:
    if not value:
        return idle("is off there too")
    if theirs.name == "load_in_8bit":
        return changed("there are no 8-bit weights; they stay whole, or write model.quantize: nf4")
    return Taken({"model.quantize": "nf4"})


def _rows_of_step(value: Any, theirs: Theirs) -> Taken:
    rows = int(theirs.get("micro_batch_size", 1)) * int(value)
    why = "rows of a step over all processes: times their number, which axolotl's command says"
    return changed(why, global_train_batch_size=rows)


def _optimizer(value: Any, theirs: Theirs) -> Taken:
    known = [name for name in OPTIMIZERS if str(value).startswith(name)]
    if not known:
        return refused(f"{value} is not here; --help lists ours", optimizer__name=MISSING)
    ours: dict[str, Any] = {"optimizer.name": OPTIMIZERS[known[0]]}
    if "8bit" in str(value) and ours["optimizer.name"] == "adamw":
        ours["optimizer.moments"] = "int8"
    exact = not str(value).endswith(("4bit", "fp8")) and ours["optimizer.name"] == "adamw"
    return Taken(ours, "" if exact else f"the nearest to {value}", None if exact else CHANGED)


def _decay(value: Any, theirs: Theirs) -> Taken:
    """Ours of lion does not go down by the learning rate."""
    if not str(theirs.get("optimizer")).startswith("lion"):
        return Taken({"optimizer.weight_decay": value})
    why = "times learning_rate, which lion's is not multiplied by here"
    rate = float(theirs.get("learning_rate", 1.0))
    return changed(why, optimizer__weight_decay=float(value) * rate)


def _epochs(value: Any, theirs: Theirs) -> Taken:
    if theirs.get("max_steps", -1) > 0:
        return idle("max_steps goes before it")
    return Taken({"max_duration": f"{value}ep"})


def _strategy(value: Any, theirs: Theirs) -> Taken:
    """When to measure or save: by steps, whose number is another key, each epoch, or never."""
    is_save = theirs.name.startswith("save")
    if value == "epoch":
        return Taken({"save_interval" if is_save else "eval_interval": "1ep"})
    if value not in ("no", False):
        return idle("the number of steps says it")
    if is_save:
        return changed("nothing is saved there; here the end of the run", save_interval="0ba")
    return Taken({"eval.validation": False})


def _patience(value: Any, theirs: Theirs) -> Taken:
    metric = {"callbacks.early_stopper.metric": "metrics/eval/LanguageCrossEntropy"}
    return (
        Taken({"callbacks.early_stopper.patience": int(value), **metric}) if value else idle("off")
    )


def _too_long(value: Any, theirs: Theirs) -> Taken:
    return Taken({"data.supervised.too_long": "error" if value == "raise" else value})


def _is_rows(theirs: Theirs) -> bool:
    """Whether rows are answers, and no documents, which are cut into pieces."""
    kinds = [str(each.get("type")) for each in theirs.get("datasets", [])]
    return not all(kind.startswith("completion") for kind in kinds)


def _scheduler(value: Any, theirs: Theirs) -> Taken:
    if value not in SCHEDULES:
        return refused(f"{value} is not here; --help lists ours", schedule__name=MISSING)
    return Taken({"schedule.name": SCHEDULES[value]})


def _warmup(value: Any, theirs: Theirs) -> Taken:
    unit = "dur" if float(value) < 1 else "ba"
    return Taken({"schedule.t_warmup": f"{value}{unit}"})


def _per_epoch(value: Any, theirs: Theirs) -> Taken:
    key = "eval_interval" if theirs.name.startswith("eval") else "save_interval"
    return Taken({key: f"{1 / value:g}ep"}) if value else idle("never, but at the end")


def _held_out(value: Any, theirs: Theirs) -> Taken:
    if not value:
        return Taken({"data.validation_fraction": 0.0, "eval.validation": False})
    if value >= 1:
        return refused("counts rows; write data.validation_fraction, their share")
    return Taken({"data.validation_fraction": value})


def _stream(theirs: Theirs) -> str:
    """Where the settings of the list's entry are: the section, or a stream of a mixture."""
    several = len(theirs.get("datasets")) > 1
    return f"data.streams.d{theirs.index}" if several else "data"


def _path(value: Any, theirs: Theirs) -> Taken:
    at, is_file = _stream(theirs), "." in str(value).rpartition("/")[2] or value[:1] in "./~"
    files = theirs.here.get("data_files") or (str(value) if is_file else None)
    own = {f"{at}.name": "files", f"{at}.paths": files if isinstance(files, list) else [files]}
    hub = {f"{at}.name": "huggingface", f"{at}.dataset": value}
    mixture = {} if at == "data" else {"data.name": "mixture"}
    return Taken((own if files else hub) | mixture)


def _format(value: Any, theirs: Theirs) -> Taken:
    at, method = _stream(theirs), METHODS.get(str(theirs.get("rl")))
    if method is not None:
        form = "unpaired" if method == "kto" else "preference"
        why = f"rows are read as {form}: write {at}.columns where theirs have other names"
        return Taken({f"{at}.format": form}, why, CHANGED)
    form = FORMATS.get(str(value).partition(".")[0].partition(":")[0], "")
    if not form:
        why = f"{value}: such rows need a function of yours, {at}.preprocess"
        return Taken({f"{at}.format": "prompt_response", f"{at}.preprocess": MISSING}, why,
                     refused("").verdict)  # fmt: skip
    plain = value in FORMATS
    return Taken({f"{at}.format": form}, "" if plain else f"the nearest to {value}",
                 None if plain else CHANGED)  # fmt: skip


def _in_stream(ours: str) -> Any:
    return lambda value, theirs: Taken({f"{_stream(theirs)}.{ours}": value})


def _template(value: Any, theirs: Theirs) -> Taken:
    if value in CHAT_TEMPLATES:
        return Taken({"tokenizer.chat_template": value})
    if value == "tokenizer_default":
        return idle("the tokenizer's own is taken unless one is written")
    return changed(f"{value}: the tokenizer's own is taken; write a Jinja file for another")


def _targets(value: Any, theirs: Theirs) -> Taken:
    key = "adapter.target_modules"
    if isinstance(value, list) and {*value} == PROJECTIONS:
        return Taken({key: "all-linear"}, "every linear layer of the blocks")
    if isinstance(value, list):
        why = "names are those of the model as it is opened: Wqkv for q, k and v in our decoder"
        return Taken({key: value}, why, CHANGED)
    return Taken({key: "all-linear"}, f"the pattern {value} is not one of ours", CHANGED)


def _project(value: Any, theirs: Theirs) -> Taken:
    key = "logger.wandb_project" if theirs.name == "wandb_project" else "logger.wandb_entity"
    return Taken({"logger.wandb": True, key: value})


def _method(value: Any, theirs: Theirs) -> Taken:
    if value not in METHODS:
        return refused(f"{value} is not here; keep axolotl for it", preference__name=MISSING)
    loss = {"preference.loss": "ipo"} if value == "ipo" else {}
    return Taken({"preference.name": METHODS[value], **loss})


def _sharded(value: Any, theirs: Theirs) -> Taken:
    return Taken({"parallel.data_parallel_shard_degree": -1,
                  "parallel.data_parallel_replicate_degree": 1}, "FSDP2")  # fmt: skip


def _packed(value: Any, theirs: Theirs) -> Taken:
    datasets = theirs.get("datasets", [])
    if datasets and all(str(each.get("type")).startswith("completion") for each in datasets):
        return idle("documents are packed in any case")
    return Taken({"data.supervised.packing": "best_fit" if value else "off"})


def _messages(value: Any, theirs: Theirs) -> Taken:
    ours = "messages" if theirs.get("rl") is None else "prompt"
    return Taken({f"{_stream(theirs)}.columns.{ours}": value})


def _recomputed(value: Any, theirs: Theirs) -> Taken:
    why = "" if isinstance(value, bool) else f"{value}: nothing is moved to the host's memory"
    level = "whole" if value else "none"
    return Taken({"parallel.activation_checkpointing": level}, why, CHANGED if why else None)


def _offloaded(value: Any, theirs: Theirs) -> Taken:
    if not value:
        return idle("is off there too")
    return changed(
        "activations stay on the GPU, in 8 bits", parallel__activation_compression="int8"
    )


AXOLOTL = (
    Other("processor_type", take=lambda value, t: refused(
        "images and sound are not trained on here; the text of a model is, if it opens alone")),
    Other("reward_model process_reward_model num_labels", take=lambda value, t: refused(
        "models that grade are not trained here", model__pretrained=MISSING)
        if value else idle("is off there too")),
    Other("sequence_len", "max_seq_len=<2048>", default=512),
    Other("warmup_ratio", "schedule.t_warmup=<0.05>dur", default=0.03,
          when=lambda t: t.get("warmup_steps") is None),
    Other("weight_decay", "optimizer.weight_decay=<0.0>", take=_decay),
    Other("num_epochs", "max_duration=<1>ep", take=_epochs),
    Other("eval_strategy evaluation_strategy save_strategy", "eval_interval=<100ba>",
          "save_interval is another", take=_strategy),
    Other("early_stopping_patience", "callbacks.early_stopper.patience=<3>", take=_patience),
    Other("excess_length_strategy", "data.supervised.too_long=<drop>", take=_too_long,
          default="drop", when=_is_rows),
    Other("loss_watchdog_threshold loss_watchdog_patience", "callbacks.watch.loss_spike=stop",
          "by the mean of its own losses", take=lambda value, t: refused(
        "callbacks.watch.loss_spike: stop ends a run by the mean of its own losses")),
    Other("gradient_checkpointing", take=_recomputed),
    Other("activation_offloading", take=_offloaded),
    Other("tensor_parallel_size", "parallel.tensor_parallel_degree=<1>"),
    Other("expert_parallel_size", "parallel.expert_parallel_degree=<1>"),
    Other("pretraining_dataset.*", take=lambda value, t: refused(
        "is read without end there; write data.dataset, and max_duration in batches")),
    Other("datasets.*.field_chosen", take=_in_stream("columns.chosen")),
    Other("datasets.*.field_rejected", take=_in_stream("columns.rejected")),
    Other("adapter", take=_adapter),
    Other("load_in_4bit load_in_8bit", take=_base_bits),
    Other("gradient_accumulation_steps", take=_rows_of_step, default=1),
    Other("optimizer", take=_optimizer, default="adamw_torch_fused"),
    Other("lr_scheduler", take=_scheduler),
    Other("warmup_steps", take=_warmup),
    Other("evals_per_epoch saves_per_epoch", take=_per_epoch),
    Other("val_set_size", take=_held_out, default=0),
    Other("datasets.*.path", take=_path),
    Other("datasets.*.type datasets.*.type.type", take=_format),
    Other("datasets.*.split", take=_in_stream("split")),
    Other("datasets.*.name", take=_in_stream("subset")),
    Other("datasets.*.field_messages", take=_messages),
    Other("datasets.*.field", take=_in_stream("text_column")),
    Other("datasets.*.data_files datasets.*.ds_type", why="files are in data.paths, by suffix"),
    Other(
        "datasets.*.*",
        take=lambda value, t: refused(f"write {_stream(t)}.columns, or {_stream(t)}.preprocess"),
    ),
    Other("chat_template", take=_template),
    Other("lora_target_modules", take=_targets),
    Other(
        "lora_target_linear",
        take=lambda value, t: (
            Taken({"adapter.target_modules": "all-linear"}) if value else idle("is off")
        ),
    ),
    Other("wandb_project wandb_entity", take=_project),
    Other("rl", take=_method),
    Other("deepspeed fsdp.*", take=_sharded),
    Other("fsdp_version fsdp_config.fsdp_version", "parallel.data_parallel_shard_degree=-1",
          "FSDP2", take=_sharded),
    Other("fsdp_config.activation_checkpointing fsdp_config.fsdp_activation_checkpointing",
          take=_recomputed),
    Other("fsdp_config.reshard_after_forward fsdp_config.fsdp_reshard_after_forward",
          "parallel.reshard_after_forward=<true>"),
    Other("fsdp_config.offload_params fsdp_config.fsdp_offload_params", take=only(
        False, OFF, "weights stay on the GPU; more shards, or optimizer.moments: int8")),
    Other("fsdp_config.sharding_strategy fsdp_config.fsdp_sharding_strategy",
          take=sharding),
    Other("dp_shard_size", take=lambda value, t: Taken(
        {"parallel.data_parallel_shard_degree": value,
         "parallel.data_parallel_replicate_degree": 1 if value == -1 else -1})),
    Other("context_parallel_size", "parallel.context_parallel_degree=<1>"),
    Other("sample_packing", take=_packed, default=False),
    Other("train_on_inputs", take=lambda value, t: Taken(
        {"data.supervised.target_prompts": "all" if value else "none"})),
    Other("trust_remote_code", "model.trust_remote_code=<false>"),
    Other("adam_beta2", take=lambda value, t: Taken(
        {"optimizer.betas": [t.get("adam_beta1", 0.9), value]})),
    Other("bf16", take=lambda value, t: Taken({"precision": "amp_bf16" if value else "fp32"},
          "weights stay fp32 unless they are frozen in 4 bits", CHANGED if value else None)),
    Other("fp16", take=lambda value, t: changed("there is no fp16 here", precision="amp_bf16")
          if value else idle("is off there too")),
    Other("optimizer.betas", default=[0.9, 0.999], when=lambda t: not t.get("adam_beta2"),
          take=lambda value, t: Taken({"optimizer.betas": value})),
    Other("schedule.alpha_f", "schedule.alpha_f=<0.1>", default=0.0, when=lambda t: True),
    Other("seed", take=lambda value, t: Taken({"seed": value}), default=42),
    Other("logger.mlflow", default=False, take=lambda value, t: Taken({"logger.mlflow": value}),
          when=lambda t: not t.get("mlflow_experiment_name")),
    Other("special_tokens.pad_token special_tokens", why="nothing is padded with a token"),
    Other("special_tokens.* tokens", take=lambda value, t: refused(
        "tokens are those of tokenizer.json; add them there, and model.resize_embeddings: true")),
    Other("plugins liger_rms_norm liger_glu_activation liger_layer_norm liger_rope"
          " liger_fused_linear_cross_entropy liger_rms_norm_gated use_kernels"
          " lora_mlp_kernel lora_qkv_kernel lora_o_kernel xformers_attention"
          " cut_cross_entropy sdp_attention eager_attention flash_attn_cross_entropy"
          " attn_implementation"
          " flash_attention flex_attention flash_attn_rms_norm flash_attn_fuse_mlp"
          " use_sonicmoe use_scattermoe",
          why="kernels are chosen by device and settings"),
    Other("dataset_prepared_path eval_sample_packing pad_to_sequence_len strict"
          " gradient_checkpointing_kwargs.*"
          " remove_unused_columns group_by_length ddp_find_unused_parameters"
          " torchdistx_path gptq_groupsize"
          " gptq_model_v1 tokenizer_type model_type"
          " is_llama_derived_model is_mistral_derived_model"
          " is_falcon_derived_model wandb_watch wandb_log_model wandb_name wandb_run_id"
          " save_safetensors max_packed_sequence_len"
          " skip_prepare_dataset fsdp_config.*"
          " low_cpu_mem_usage debug eot_tokens quantize_moe_experts",
          why="there is nothing to choose here"),
)  # fmt: skip
