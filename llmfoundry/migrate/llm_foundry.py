"""Table of LLM Foundry settings (0.22) whose name, meaning or default differs from ours.

Keys with the same name and meaning, such as model.d_model, need no entry. `default` is LLM
Foundry's default where ours is different. A migrated recipe then states it explicitly, so that it
keeps the meaning of the file.
"""

from __future__ import annotations

from llmfoundry.migrate import text_values as text
from llmfoundry.migrate import values as v
from llmfoundry.migrate.entry import (
    CHANGED,
    ForeignConfig,
    FoundryKey,
    MigratedSetting,
    changed,
    idle,
)
from llmfoundry.migrate.llm_foundry_model import MODEL_AND_DATA


def _has_tasks(theirs: ForeignConfig) -> bool:
    return theirs.has("icl_tasks")


_NOT_HERE = "is not here; keep LLM Foundry for it"

_RUN = (
    FoundryKey(
        "seed",
        take=lambda value, t: (
            MigratedSetting({"seed": value})
            if t.trains
            else idle(
                "nothing is drawn: worked examples follow from each task's fewshot_random_seed"
            )
        ),
    ),
    FoundryKey(
        "max_seq_len",
        take=lambda value, t: MigratedSetting(
            {"max_seq_len" if t.trains else "eval.icl_seq_len": value}
        ),
    ),
    FoundryKey("precision", take=v.precision, default="amp_bf16", when=lambda t: not t.trains),
    FoundryKey("max_duration", take=v.duration("max_duration")),
    FoundryKey("eval_interval", take=v.duration("eval_interval"), default=1, when=v.trains),
    FoundryKey("save_interval", take=v.duration("save_interval")),
    FoundryKey("save_folder", take=v.save_folder),
    FoundryKey("load_path", take=v.load_path),
    FoundryKey("autoresume", take=v.as_is("autoresume"), default=False, when=v.trains),
    FoundryKey("run_name", take=v.as_is("run_name")),
    FoundryKey(
        "save_weights_only",
        take=v.only(
            False,
            v.OFF,
            "checkpoints hold all that a run resumes from; convert.py takes the weights out",
        ),
    ),
    FoundryKey(
        "save_filename save_latest_filename", why="checkpoints are named by their batch; remove it"
    ),
    FoundryKey(
        "save_ignore_keys load_ignore_keys load_strict_model_weights",
        take=v.only(
            (True, []),
            "all of it, as here",
            "a checkpoint is loaded whole, or its weights alone by load_weights_only: true",
        ),
    ),
    FoundryKey(
        "only_hf_checkpoint only_composer_checkpoint",
        take=v.only(
            False,
            v.OFF,
            "scripts/convert.py RUN to=hf writes Hugging Face's format of any checkpoint",
        ),
    ),
    FoundryKey(
        "train_subset_num_batches",
        take=v.only(-1, "all rows", "an epoch is all rows; write max_duration in batches"),
    ),
    FoundryKey("spin_dataloaders", why="resuming takes constant time here; remove it"),
    FoundryKey(
        "accumulate_train_batch_on_tokens",
        take=v.only(
            True,
            "the loss is always the mean over all tokens of a step",
            (
                "the loss is the mean over tokens; data.supervised.loss: sequences"
                " weighs rows of answers alike"
            ),
        ),
    ),
    FoundryKey(
        "device_train_batch_size device_train_grad_accum n_gpus",
        why="follows from global_train_batch_size, the rows of a step over all processes, and"
        " device_train_microbatch_size, those at a time; remove it",
    ),
    FoundryKey(
        "code_paths",
        take=v.only(
            [],
            "is empty",
            (
                "registers in LLM Foundry's tables; plugins: [my_file.py] adds to ours,"
                " llmfoundry/README.md says how"
            ),
        ),
    ),
    FoundryKey(
        "max_split_size_mb expandable_segments cuda_load_lazy",
        why="there is nothing to choose here; remove it",
    ),
    FoundryKey(
        "dist_timeout",
        "parallel.dist_timeout=<600>",
        take=lambda value, t: (
            MigratedSetting({"parallel.dist_timeout": int(value)})
            if t.trains
            else idle("of training runs")
        ),
    ),
    FoundryKey(
        "metadata.* flatten_metadata log_config",
        why="the run's folder and MLflow have the whole recipe; run_name names it",
    ),
    FoundryKey(
        "progress_bar log_to_console python_log_level",
        why="the console has a line each log_interval; remove it",
    ),
    FoundryKey("console_log_interval", take=text.log_interval),
    FoundryKey("compile_config", take=v.compiled),
    FoundryKey(
        "compile_config.mode",
        "compile_mode=<default>",
        take=lambda value, t: MigratedSetting({"compile": True, "compile_mode": value}),
    ),
    FoundryKey("compile_config.*", why="blocks are compiled whole by inductor; remove it"),
    FoundryKey("device_eval_batch_size", take=v.as_is("device_eval_batch_size")),
    FoundryKey(
        "profiler.schedule",
        "profile.trace=<true>",
        "its skip_first, wait, warmup, active and repeat are beside it",
    ),
    FoundryKey(
        "profiler.schedule.*",
        why="its numbers are keys of profile here; write profile.trace: true and them",
    ),
    FoundryKey("profiler.torch_prof_record_shapes", "profile.record_shapes=<true>"),
    FoundryKey("profiler.torch_prof_profile_memory", "profile.profile_memory=<true>"),
    FoundryKey("profiler.torch_prof_with_stack", "profile.with_stack=<true>"),
    FoundryKey("profiler.torch_prof_with_flops", "profile.with_flops=<true>"),
    FoundryKey(
        "profiler.*", why="a trace is in the run's folder, for Perfetto; profile.trace: true"
    ),
)


_LEARNING = (
    FoundryKey("optimizer.name", take=v.optimizer_name),
    FoundryKey(
        "optimizer.lr",
        "optimizer.lr=<6e-4>",
        default=1e-3,
        when=lambda t: t.trains and t.get("optimizer.name") == "decoupled_adamw",
    ),
    FoundryKey(
        "optimizer.lr",
        "optimizer.lr=<1e-4>",
        default=1e-4,
        when=lambda t: t.trains and "lion" in t.get("optimizer.name", ""),
    ),
    FoundryKey(
        "optimizer.weight_decay",
        "optimizer.weight_decay=<0.0>",
        default=1e-5,
        when=lambda t: t.trains and t.get("optimizer.name") == "decoupled_adamw",
    ),
    FoundryKey("optimizer.disable_grad", take=v.by_name("optimizer.disable_grad")),
    FoundryKey(
        "optimizer.outlier_threshold optimizer.timeout optimizer.lr_penalty optimizer.min_scale",
        take=v.never("is of adalr_lion and clip_lion; callbacks.watch sees spikes here"),
    ),
    FoundryKey(
        "scheduler scheduler.name",
        "schedule=<cosine>",
        "--help lists the others",
        take=lambda value, t: MigratedSetting({"schedule.name": value}),
    ),
    FoundryKey(
        "scheduler.t_warmup", "schedule.t_warmup=<100ba>", take=v.duration("schedule.t_warmup")
    ),
    FoundryKey("scheduler.t_max", "schedule.t_max=<1dur>", take=v.duration("schedule.t_max")),
    FoundryKey(
        "scheduler.t_scale", "schedule.t_scale=<100ba>", take=v.duration("schedule.t_scale")
    ),
    FoundryKey(
        "scheduler.t_cooldown",
        "schedule.t_cooldown=<0.2dur>",
        take=v.duration("schedule.t_cooldown"),
    ),
    FoundryKey("scheduler.alpha_f", "schedule.alpha_f=<0.1>", default=0.0, when=v.trains),
    FoundryKey("scheduler.alpha_f_decay", "schedule.alpha_f_decay=<0.0>"),
    FoundryKey("scheduler.alpha_f_cooldown", "schedule.alpha_f_cooldown=<0.0>"),
    FoundryKey(
        "scheduler.alpha",
        take=v.only((1, 1.0), "the peak, as here", "the peak is optimizer.lr; multiply it"),
    ),
    FoundryKey(
        "scheduler.alpha_i",
        take=v.only((1, 1.0), "the peak, as here", "the peak is optimizer.lr; multiply it"),
    ),
    FoundryKey(
        "scheduler.scale_warmup", take=v.only(False, v.OFF, "warm-up has its length as written")
    ),
    FoundryKey(
        "algorithms.gradient_clipping.clipping_type", "gradient_clipping.clipping_type=<norm>"
    ),
    FoundryKey(
        "algorithms.gradient_clipping.clipping_threshold",
        "gradient_clipping.clipping_threshold=<1.0>",
        default=float("inf"),
        when=v.trains,
    ),
    FoundryKey(
        "algorithms.alibi.*",
        take=v.never(
            "has no effect on MPT models there (llm-foundry issue 1289);"
            " model.attn_config.alibi: true is what counts"
        ),
    ),
    FoundryKey(
        "algorithms.gated_linear_units.*",
        take=v.never("model.ffn_config.ffn_type: mptglu is what has them"),
    ),
    FoundryKey(
        "algorithms.low_precision_layernorm.*",
        take=lambda value, t: (
            MigratedSetting(
                {"model.norm_type": "low_precision_layernorm"}, "by the model's own key"
            )
            if t.get("model.name") == "mpt_causal_lm"
            else idle("the class of transformers has its own norms")
        ),
    ),
    FoundryKey(
        "algorithms", "gradient_clipping.clipping_threshold=1.0", "LLM Foundry's one algorithm"
    ),
)

_PLACES = (
    FoundryKey(
        "fsdp_config", "parallel=fsdp", "FSDP2; parallel=ddp copies the model", off="parallel=ddp"
    ),
    FoundryKey(
        "fsdp_config.sharding_strategy",
        "parallel.data_parallel_shard_degree=-1",
        "all processes; NO_SHARD: 1, HYBRID_SHARD: those of a node;"
        " data_parallel_replicate_degree is then 1, or -1",
        take=v.sharding,
        default="FULL_SHARD",
        when=lambda t: t.trains and isinstance(t.get("fsdp_config"), dict),
    ),
    FoundryKey(
        "fsdp_config.mixed_precision",
        why="numbers are those of precision: products in bf16, weights and sums in fp32; remove it",
        take=v.reduced,
    ),
    FoundryKey(
        "fsdp_config.activation_checkpointing",
        "parallel.activation_checkpointing=<true>",
        take=v.recomputed,
    ),
    FoundryKey(
        "fsdp_config.activation_cpu_offload",
        take=v.only(
            False,
            v.OFF,
            (
                "activations stay on the GPU; parallel.activation_compression: int8, or"
                " activation_checkpointing: whole"
            ),
        ),
    ),
    FoundryKey(
        "fsdp_config.cpu_offload",
        take=v.only(
            False, v.OFF, "weights stay on the GPU; more shards, or optimizer.moments: int8"
        ),
    ),
    FoundryKey(
        "fsdp_config.data_parallel_shard_degree",
        "parallel.data_parallel_shard_degree=<-1>",
        take=v.shard_degree,
    ),
    FoundryKey(
        "fsdp_config.data_parallel_replicate_degree", "parallel.data_parallel_replicate_degree=<-1>"
    ),
    FoundryKey(
        "fsdp_config.mixed_precision.*",
        take=lambda value, t: changed("products are in bf16 here, weights and sums in fp32"),
    ),
    FoundryKey("fsdp_config.*", why="FSDP2 has no such setting; remove it"),
    FoundryKey(
        "tp_config.tensor_parallel_degree",
        "parallel.tensor_parallel_degree=<1>",
        "of attention, embedding and head too",
        is_changed=True,
    ),
    FoundryKey(
        "tp_config.*",
        why="every matrix is shared, not those of feed-forward layers alone",
    ),
)

_HF_CHECKPOINTER = "scripts/convert.py RUN to=hf writes such a folder of any checkpoint; remove it"

_OBSERVED = (
    *(
        FoundryKey(
            key,
            "eval.gauntlet=eval/gauntlets/v0.3.yaml",
            "a file of tasks and categories; LLM Foundry's own files are read too",
            take=text.gauntlet_file(key),
        )
        for key in ("icl_tasks", "eval_gauntlet")
    ),
    FoundryKey("icl_tasks.*.dataset_uri", take=text.rows_of_task),
    FoundryKey(
        "icl_tasks.*.batch_size icl_tasks.*.pad_tok_id icl_tasks.*.destination_path",
        why="batches are made by tokens, and scores do not depend on them",
    ),
    FoundryKey("icl_tasks.*", "gauntlet.icl_tasks.*=<x>"),
    FoundryKey("eval_gauntlet.destination_dir", why="rows are not copied before they are read"),
    FoundryKey("eval_gauntlet.*", "gauntlet.eval_gauntlet.*=<x>"),
    FoundryKey("models.*.model_name", why="results are by the name in models; remove it"),
    FoundryKey("models.*.model.pretrained_model_name_or_path", take=text.evaluated),
    FoundryKey("models.*.model.pretrained_lora_id_or_path", take=v.adapter_pretrained),
    FoundryKey("models.*.model.load_in_8bit", take=v.eight_bit),
    FoundryKey("models.*.model.version", take=text.evaluated_server),
    FoundryKey("models.*.load_path", take=text.evaluated_checkpoint),
    FoundryKey("models.*.model.name", take=v.model_name),
    FoundryKey(
        "models.*.model.revision models.*.model.config_overrides.*"
        " models.*.model.sampling_params.*",
        take=v.only(
            (None, False, {}),
            v.OFF,
            "a model is evaluated as its folder or server has it; download that revision, or write"
            " it into the folder's config.json, and name the folder in models",
        ),
    ),
    FoundryKey(
        "models.*.model.*",
        why="the checkpoint, or the folder, knows its own shape; a server its own model",
    ),
    FoundryKey("models.*.tokenizer.*", why="a model is evaluated with its own tokenizer"),
    FoundryKey("mcli.command", take=text.command),
    FoundryKey(
        "mcli.name mcli.run_name",
        take=lambda value, t: (
            MigratedSetting({"run_name": value}) if t.trains else idle("results lie beside the run")
        ),
    ),
    FoundryKey(
        "mcli.integrations.* mcli.image",
        why="the platform's; here the machines have the project installed",
    ),
    FoundryKey(
        (
            "mcli.compute.* mcli.gpu_num mcli.gpu_type mcli.cluster"
            " mcli.scheduling.* mcli.env_variables.* mcli.*"
        ),
        why=(
            "the platform's; here torchrun, or scripts/launch.py, says how many machines and GPUs"
        ),
    ),
    FoundryKey("icl_seq_len max_icl_seq_len", "eval.icl_seq_len=<1024>"),
    FoundryKey(
        "icl_subset_num_batches",
        "eval.icl_rows=<100>",
        "rows of each task, not batches",
        take=v.rows_of_batches("eval.icl_rows", "device_eval_batch_size"),
    ),
    FoundryKey(
        "eval.icl_prompts",
        default="foundry",
        when=_has_tasks,
        take=lambda value, t: MigratedSetting({"eval.icl_prompts": value}),
    ),
    FoundryKey(
        "eval.icl_generate",
        default=True,
        when=lambda t: _has_tasks(t) and t.trains,
        take=lambda value, t: MigratedSetting({"eval.icl_generate": value}),
    ),
    FoundryKey(
        "loggers.wandb.*",
        why="wandb takes its project and entity here; run_name names the run",
    ),
    FoundryKey(
        "loggers.wandb",
        "logger=wandb",
        off="logger.wandb=false",
        take=text.switched_on("logger.wandb"),
    ),
    FoundryKey(
        "loggers.wandb.project",
        "logger.wandb_project=<llmfoundry>",
        take=lambda value, t: MigratedSetting(
            {"logger.wandb": True, "logger.wandb_project": value}
        ),
    ),
    FoundryKey(
        "loggers.wandb.entity",
        "logger.wandb_entity=<team>",
        take=lambda value, t: MigratedSetting({"logger.wandb": True, "logger.wandb_entity": value}),
    ),
    FoundryKey(
        "loggers.mlflow",
        take=lambda value, t: MigratedSetting({"logger.mlflow": value is not False}),
        default=False,
        when=lambda t: t.trains and not t.has("loggers.mlflow"),
    ),
    FoundryKey(
        "loggers.mlflow.experiment_name",
        "logger.experiment_name=<llmfoundry>",
        take=lambda value, t: MigratedSetting(
            {"logger.mlflow": True, "logger.experiment_name": value}
        ),
    ),
    FoundryKey(
        "loggers.mlflow.tracking_uri",
        "logger.tracking_uri=<sqlite:///runs/mlflow.db>",
        take=lambda value, t: MigratedSetting(
            {"logger.mlflow": True, "logger.tracking_uri": value}
        ),
    ),
    FoundryKey(
        "loggers.mlflow.*",
        why="the recipe, metrics and tags are recorded; models are not registered",
    ),
    FoundryKey(
        "loggers.tensorboard.*",
        take=text.switched_on("logger.tensorboard"),
        why="files are in the run's folder",
    ),
    FoundryKey(
        "loggers.in_memory_logger loggers.inmemory.*",
        take=text.switched_on("logger.in_memory"),
    ),
    FoundryKey(
        "loggers.*",
        take=v.unknown(
            "loggers", "there is no such logger here; logger.plugins takes one of your own"
        ),
    ),
    FoundryKey("callbacks.speed_monitor", take=text.switched_on("callbacks.speed_monitor")),
    FoundryKey(
        "callbacks.speed_monitor.window_size",
        "callbacks.speed_window=<10>",
        "logged steps, not batches",
    ),
    FoundryKey(
        "callbacks.speed_monitor.*",
        why="the device's peak is known by recipe/hardware.py; remove it",
    ),
    FoundryKey("callbacks.lr_monitor", take=text.switched_on("callbacks.lr_monitor")),
    FoundryKey("callbacks.memory_monitor", take=text.switched_on("callbacks.memory_monitor")),
    FoundryKey("callbacks.runtime_estimator", take=text.switched_on("callbacks.runtime_estimator")),
    FoundryKey(
        "callbacks.optimizer_monitor.*",
        take=text.switched_on("callbacks.optimizer_monitor"),
    ),
    FoundryKey(
        "callbacks.memory_monitor.* callbacks.lr_monitor.* callbacks.runtime_estimator.*",
        why="there is nothing to choose here; remove it",
    ),
    FoundryKey(
        ("callbacks.hf_checkpointer.* callbacks.mono_checkpoint_saver.*"),
        why=_HF_CHECKPOINTER,
    ),
    FoundryKey(
        "callbacks.oom_observer callbacks.memory_snapshot",
        "profile.memory_snapshot=<true>",
        take=text.switched_on("profile.memory_snapshot"),
    ),
    FoundryKey(
        "callbacks.oom_observer.* callbacks.memory_snapshot.*",
        why="one file a process, in the run's folder: profile.memory_snapshot: true",
    ),
    FoundryKey("callbacks.scheduled_gc.batch_interval", "callbacks.gc_interval=<1000>"),
    FoundryKey(
        "callbacks.health_checker.* callbacks.scheduled_gc.* callbacks.nan_monitor.*"
        " callbacks.system_metrics_monitor.*"
        " callbacks.run_timeout.* callbacks.env_logger.* callbacks.env_logging.*"
        " callbacks.kill_loss_spike.* callbacks.mbmoe_tok_per_expert.*",
        why="no callback: what a run watches is below callbacks.watch, health_check and hang",
    ),
    FoundryKey(
        "callbacks.kill_loss_spike.log_only",
        take=lambda value, t: (
            idle("spikes are logged here too, callbacks.watch.loss_spike")
            if value
            else changed(
                "by one step's loss, not by a window's share", callbacks__watch__loss_spike="stop"
            )
        ),
    ),
    FoundryKey(
        "callbacks.early_stopper.monitor",
        "callbacks.early_stopper.metric=<metrics/eval/LanguageCrossEntropy>",
        take=text.early_metric,
    ),
    FoundryKey(
        "callbacks.early_stopper.patience",
        "callbacks.early_stopper.patience=<3>",
        take=lambda value, t: (
            MigratedSetting(
                {"callbacks.early_stopper.patience": int(value)}, "measurements", CHANGED
            )
            if str(value).isdecimal()
            else MigratedSetting({}, "is a number of measurements here; 3 unless written", CHANGED)
        ),
        default=1,
    ),
    FoundryKey(
        "callbacks.early_stopper.comp", "callbacks.early_stopper.mode=<min>", take=text.early_mode
    ),
    FoundryKey("callbacks.early_stopper.min_delta", "callbacks.early_stopper.min_delta=<0.0>"),
    FoundryKey(
        "callbacks.early_stopper.dataloader_label callbacks.early_stopper.*",
        why="is in the metric's name; remove it",
    ),
    FoundryKey("callbacks.generate_callback", "callbacks.generate.prompts=[<text>]"),
    FoundryKey("callbacks.generate_callback.prompts", "callbacks.generate.prompts=[<text>]"),
    FoundryKey(
        "callbacks.generate_callback.interval",
        "callbacks.generate.interval=<100ba>",
        take=v.duration("callbacks.generate.interval"),
    ),
    FoundryKey(
        "callbacks.generate_callback.max_new_tokens callbacks.generate_callback.max_length",
        "callbacks.generate.max_new_tokens=<64>",
    ),
    FoundryKey("callbacks.generate_callback.temperature", "callbacks.generate.temperature=<0.8>"),
    FoundryKey("callbacks.generate_callback.top_p", "callbacks.generate.top_p=<0.9>"),
    FoundryKey(
        "callbacks.generate_callback.*", why="samples are drawn by temperature and top_p; remove it"
    ),
    FoundryKey(
        "callbacks.layer_freezing.layer_names",
        take=v.never(
            "names are other here; write freeze (fine-tuning) or"
            " optimizer.disable_grad with names such as blocks.0.attn.Wqkv.weight"
        ),
    ),
    FoundryKey(
        "callbacks.curriculum_learning.*",
        take=v.never(
            "a curriculum is data.phases here: other proportions of data.streams from some point on"
        ),
    ),
    FoundryKey(
        "callbacks.global_lr_scaling.*",
        take=v.never("multiply optimizer.lr, and write optimizer.weight_decay"),
    ),
    FoundryKey(
        "callbacks.*",
        take=v.unknown(
            "callbacks", "there is no such callback here; callbacks.plugins takes one of your own"
        ),
    ),
)

LLM_FOUNDRY = (*_RUN, *MODEL_AND_DATA, *_LEARNING, *_PLACES, *_OBSERVED)
