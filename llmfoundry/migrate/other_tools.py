"""Hints for users of other tools: keys and flags of these tools, and the equivalent keys here.

Entry point: `register_other_tools`, with which `script.py` passes the table `OTHERS` to the loader
of recipes. The table has names of Hugging Face's Trainer, TRL, peft, accelerate, axolotl, litgpt,
torchtitan and nanoGPT. Names of LLM Foundry are in `migrate/`. A hint is only given if the recipe
has its key. `tests/migrate/test_hints.py` compares every line with the schemas.
"""

from __future__ import annotations

from llmfoundry.migrate.detect import file_hint
from llmfoundry.migrate.llm_foundry import LLM_FOUNDRY
from llmfoundry.recipe.not_supported import (
    LOW_RANK_OPTIMIZERS,
    NEFTUNE,
    ON_POLICY_DISTILLATION,
    ONLINE_RL,
    OTHER_ADAPTERS,
    PIPELINE,
    REWARD_MODELS,
    SERVED_ADAPTERS,
    SPECULATIVE,
)
from llmfoundry.recipe.unknown_keys import OtherToolKey, register

TRAINERS = (
    # How long, how much
    OtherToolKey(
        "max_steps max_iters train_iters num_steps total_steps num_train_steps training.steps"
        " trainer.max_steps train.max_steps max_train_steps steps n_steps",
        "max_duration=<1000>ba",
    ),
    OtherToolKey(
        "num_train_epochs num_epochs n_epochs epochs max_epochs train.epochs trainer.max_epochs",
        "max_duration=<1>ep",
    ),
    OtherToolKey(
        "max_tokens total_tokens train_tokens train.max_tokens", "max_duration=<1000000000>tok"
    ),
    OtherToolKey(
        "batch_size train_batch_size total_batch_size global_batch_size train.global_batch_size"
        " training.global_batch_size effective_batch_size",
        "global_train_batch_size=<64>",
        "rows of a step, over all processes",
    ),
    OtherToolKey(
        "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches grad_accum"
        " grad_accum_steps grad_accumulation_steps",
        why="follows from global_train_batch_size, the rows of a step over all processes, and"
        " device_train_microbatch_size, those at a time; remove it",
    ),
    OtherToolKey(
        "per_device_train_batch_size per_device_batch_size micro_batch_size microbatch_size"
        " train.micro_batch_size local_batch_size training.local_batch_size device_batch_size"
        " train_micro_batch_size_per_gpu",
        "device_train_microbatch_size=<8>",
        "rows at a time; those of a step are global_train_batch_size",
    ),
    OtherToolKey(
        "per_device_eval_batch_size eval_batch_size batch_size", "device_eval_batch_size=<8>"
    ),
    OtherToolKey(
        "max_length max_tokens max_gen_len max_new_token max_generated_tokens num_tokens n_predict",
        "max_new_tokens=<128>",
    ),
    OtherToolKey(
        "max_length max_seq_length max_sequence_length sequence_len sequence_length"
        " seq_length block_size context_length ctx_len n_ctx cutoff_len model_max_length"
        " max_position_embeddings train.max_seq_length training.seq_len max_prompt_length",
        "max_seq_len=<2048>",
    ),
    OtherToolKey("random_seed global_seed", "seed=<17>"),
    OtherToolKey(
        "data_seed shuffle_seed",
        why="the order of rows follows from seed; remove it",
    ),
    # How it learns
    OtherToolKey(
        "learning_rate max_lr peak_lr base_lr train.learning_rate optimizer.learning_rate"
        " optimizer.args.lr",
        "optimizer.lr=<6e-4>",
    ),
    OtherToolKey("weight_decay wd optimizer.args.weight_decay", "optimizer.weight_decay=<0.1>"),
    OtherToolKey("adam_beta1 beta1 train.beta1", "optimizer.betas=[<0.9>,0.95]"),
    OtherToolKey("adam_beta2 beta2 train.beta2", "optimizer.betas=[0.9,<0.95>]"),
    OtherToolKey("adam_epsilon epsilon", "optimizer.eps=<1e-8>"),
    OtherToolKey(
        "optim optimizer_type optimizer_name", "optimizer=<adamw>", "--help lists the others"
    ),
    OtherToolKey(
        "max_grad_norm grad_clip gradient_clip_val max_norm clip_grad_norm train.max_norm"
        " training.max_norm",
        "gradient_clipping.clipping_threshold=<1.0>",
    ),
    OtherToolKey(
        "warmup_steps num_warmup_steps lr_warmup_steps warmup_iters train.lr_warmup_steps"
        " lr_scheduler.warmup_steps warmup",
        "schedule.t_warmup=<100>ba",
    ),
    OtherToolKey(
        "warmup_ratio warmup_fraction train.lr_warmup_fraction",
        "schedule.t_warmup=<0.05>dur",
    ),
    OtherToolKey(
        "lr_scheduler_type lr_scheduler lr_schedule lr_decay_style",
        "schedule=<cosine>",
        "--help lists the others",
    ),
    OtherToolKey(
        "min_lr_ratio cosine_min_lr_ratio lr_scheduler.min_lr_factor",
        "schedule.alpha_f=<0.1>",
        "a fraction of the peak",
    ),
    OtherToolKey(
        "min_lr train.min_lr end_lr",
        why="schedule.alpha_f is the end as a fraction of optimizer.lr: write this rate over that",
    ),
    OtherToolKey(
        "bf16 fp16 mixed_precision torch_dtype dtype amp train.precision amp_dtype"
        " training.mixed_precision_param",
        "precision=<amp_bf16>",
        off="precision=fp32",
    ),
    OtherToolKey("torch_compile use_compile training.compile compile.enable", "compile=<true>"),
    # The model
    OtherToolKey(
        "model_name_or_path pretrained_model_name_or_path base_model model_name model_id hf_model"
        " checkpoint checkpoint_dir init_from model.pretrained model.pretrained_model_name_or_path"
        " model_type model.name_or_path load_from",
        "model.pretrained=<runs/quickstart>",
        "a run, a folder with config.json, or a hub id",
        script="finetune",
    ),
    OtherToolKey(
        "model model_name_or_path model_args pretrained model_name model_id hf_model base_model"
        " pretrained_model_name_or_path",
        "models=[hf:<OWNER/NAME>]",
        "a run's folder stands without hf:",
        script="eval",
    ),
    OtherToolKey(
        "model model_name_or_path model_path checkpoint_dir ckpt checkpoint_path composer_path"
        " ckpt_path base_model load_path load_from",
        "checkpoint=<runs/quickstart>",
    ),
    OtherToolKey(
        "hidden_size n_embd dim d_embed model.hidden_size model.n_embd", "model.d_model=<768>"
    ),
    OtherToolKey("num_hidden_layers num_layers n_layer model.num_layers", "model.n_layers=<12>"),
    OtherToolKey("num_attention_heads n_head model.n_head num_heads", "model.n_heads=<12>"),
    OtherToolKey(
        "num_key_value_heads n_kv_heads n_query_groups",
        "model.attn_config.kv_n_heads=<4>",
        "with model.attn_config.attn_type=grouped_query_attention",
    ),
    OtherToolKey("intermediate_size ffn_dim", "model.ffn_config.ffn_hidden_size=<3072>"),
    OtherToolKey("rms_norm_eps layer_norm_eps", "model.norm_eps=<1e-5>"),
    OtherToolKey(
        "num_experts num_local_experts n_experts", "model.ffn_config.moe_num_experts=<16>"
    ),
    OtherToolKey("num_experts_per_tok top_k_experts", "model.ffn_config.moe_top_k=<4>"),
    OtherToolKey(
        "attn_implementation use_flash_attention use_flash_attention_2 flash_attention"
        " flash_attention_2 model.attn_implementation flash_attn use_flash_attn",
        "model.attn_impl=<auto>",
        off="model.attn_impl=torch",
    ),
    OtherToolKey(
        "attn_implementation use_flash_attention use_flash_attention_2 flash_attention attn_impl"
        " flash_attention_2 flash_attn use_flash_attn",
        "model.attn_config.attn_impl=<auto>",
        "auto is the fastest of the device",
        off="model.attn_config.attn_impl=torch",
    ),
    OtherToolKey(
        "vocab_size_multiple padded_vocab_size_multiple",
        why="model.vocab_size is a multiple of 64 unless written; remove it",
    ),
    OtherToolKey(
        "tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_type",
        "tokenizer.path=<OWNER/NAME>",
        "with tokenizer=huggingface",
    ),
    OtherToolKey("trust_remote_code", "model.trust_remote_code=<true>", script="finetune"),
    OtherToolKey(
        "xformers_attention flex_attention sdp_attention eager_attention plugins liger_rope"
        " liger liger_kernel use_liger_kernel enable_liger_kernel unsloth use_unsloth"
        " liger_rms_norm liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy"
        " cut_cross_entropy use_sonicmoe use_scattermoe",
        why="kernels are chosen by device and settings; remove it",
    ),
    # Adapters, 4 bits, preferences
    OtherToolKey(
        "finetuning_type train_type",
        why="adapter=lora trains an adapter, adapter=none all parameters, and freeze=[NAMES]"
        " leaves parts of them out",
    ),
    OtherToolKey(
        "stage",
        why="the rows decide (data.format), and preference=dpo, kto, orpo or simpo compares"
        " answers; reward models and PPO are not supported",
    ),
    OtherToolKey(
        "use_peft use_lora lora peft",
        "adapter=lora",
        "with adapter.r, adapter.lora_alpha …",
        off="adapter=none",
        script="finetune",
    ),
    OtherToolKey("lora_r lora_rank rank", "adapter.r=<16>", script="finetune"),
    OtherToolKey("lora_alpha", "adapter.lora_alpha=<32>", script="finetune"),
    OtherToolKey("lora_dropout", "adapter.lora_dropout=<0.05>", script="finetune"),
    OtherToolKey(
        "lora_target_modules lora_target_linear lora_target",
        "adapter.target_modules=<all-linear>",
        script="finetune",
    ),
    OtherToolKey("peft_use_dora", "adapter.use_dora=<true>", script="finetune"),
    OtherToolKey("pissa_init", "adapter.init_lora_weights=pissa", script="finetune"),
    OtherToolKey(
        "loraplus_lr_ratio lora_plus_lr_ratio", "adapter.lora_plus_ratio=<16>", script="finetune"
    ),
    OtherToolKey(
        "lora_trainable_token_indices fix_untrained_tokens lora_fix_untrained_tokens",
        "adapter.trainable_token_indices=<new>",
        script="finetune",
    ),
    OtherToolKey(
        "lora_modules_to_save additional_target",
        "adapter.modules_to_save=<[lm_head]>",
        script="finetune",
    ),
    OtherToolKey(
        "load_in_4bit quantization_config quantization bnb_4bit_quant_type qlora quantize bnb"
        " quantization_bit",
        "model.quantize=nf4",
        "4 bits, with adapter=lora",
        script="finetune",
    ),
    OtherToolKey("loss_type dpo_loss", "preference.loss=<sigmoid>", script="finetune"),
    OtherToolKey("rl rlhf dpo trainer_type pref_loss", "preference=<dpo>", script="finetune"),
    OtherToolKey("dpo_beta rl_beta pref_beta", "preference.beta=<0.1>", script="finetune"),
    OtherToolKey(
        "ref_model ref_model_name_or_path", "preference.reference=precompute", script="finetune"
    ),
    # Tokens, long contexts, averages, z-loss
    OtherToolKey(
        "tokens special_tokens special_tokens.* new_special_tokens add_special_tokens"
        " additional_special_tokens added_tokens_overrides added_tokens_overrides.* resize_vocab"
        " tokenizer.additional_special_tokens tokenizer.special_tokens"
        " tokenizer.add_special_tokens resize_token_embeddings resize_token_embeddings_to_32x"
        " mean_resizing_embeddings",
        why="tokenizer.add_tokens=[TOKEN] adds tokens, and model.resize_embeddings=true the rows"
        " of a pretrained model for them",
    ),
    OtherToolKey(
        "rope_scaling rope_scaling.* model.rope_scaling model.rope_scaling.* yarn yarn_factor"
        " overrides_of_model_config.rope_scaling overrides_of_model_config.rope_scaling.*",
        why="write {type: yarn, factor: 4, original_max_position_embeddings: 2048} as"
        " attn_config.rope_hf_config in model, or for a run in model.config_overrides"
        " (docs/long-context.md)",
    ),
    OtherToolKey("ema_decay use_ema ema.beta ema.alpha", "ema.decay=<0.999>"),
    OtherToolKey(
        "swa swa_start lawa averaging",
        why="ema.decay=0.999 keeps a moving average of the weights, and scripts/average.py RUN"
        " last=5 writes the mean of checkpoints",
    ),
    OtherToolKey(
        "z_loss zloss z_loss_multiplier logits_z_loss loss.z_loss softmax_auxiliary_loss"
        " auxiliary_loss_multiplier train_module.z_loss_multiplier",
        "loss.z_loss_weight=<1e-4>",
    ),
    # The text
    OtherToolKey(
        "interleave_probs mix_strategy dataset_mixer dataset_mixer.* data.proportions data.weights"
        " data.streams.*.weight data.streams.*.ratio",
        why="data.streams.NAME.proportion is the share of a stream (docs/finetune-chats.md)",
    ),
    OtherToolKey(
        "data.streams.*.path data.streams.*.file", why="data.streams.NAME.paths has the files"
    ),
    OtherToolKey(
        "dataset_name dataset_name_or_path hf_dataset dataset_id training.dataset",
        "data.dataset=<OWNER/NAME>",
        "with data=huggingface",
    ),
    OtherToolKey("dataset_config_name dataset_config", "data.subset=<en>"),
    OtherToolKey(
        "train_file train_files data_dir dataset_path datasets train_data data_path dataset_dir"
        " train_dataset validation_file data.path data.file data.files",
        "data.paths=[<my/*.jsonl>]",
        "with data=files or data=jsonl",
    ),
    OtherToolKey("dataset_text_field text_field text_key", "data.text_column=<text>"),
    OtherToolKey("dataset_split train_split", "data.split=<train>"),
    OtherToolKey(
        "val_split_fraction val_set_size validation_split_percentage test_size val_size",
        "data.validation_fraction=<0.02>",
    ),
    OtherToolKey("dataset_num_proc num_proc preprocessing_num_workers", "data.num_workers=<8>"),
    OtherToolKey(
        "dataloader_num_workers num_dataloader_workers",
        "data.loader_workers=<2>",
    ),
    OtherToolKey("cache_dir", "data.cache_folder=<~/.cache/llmfoundry>"),
    OtherToolKey("predownload", "data.prefetch=2gb", "in bytes"),
    OtherToolKey(
        "sample_packing",
        "data.supervised.packing=best_fit",
        off="data.supervised.packing=off",
    ),
    OtherToolKey(
        "train_on_inputs",
        "data.supervised.target_prompts=all",
        off="data.supervised.target_prompts=none",
    ),
    OtherToolKey(
        "completion_only_loss assistant_only_loss train_on_responses_only mask_prompt",
        "data.supervised.target_prompts=none",
        "the default: only answers are learned",
        off="data.supervised.target_prompts=all",
    ),
    OtherToolKey("excess_length_strategy", "data.supervised.too_long=<drop>"),
    # What is measured
    OtherToolKey(
        "tasks",
        "eval.gauntlet=eval/gauntlets/v0.3.yaml",
        "a file that names tasks; eval=v0.3 is the same",
    ),
    OtherToolKey("limit num_samples", "eval.icl_rows=<100>", "rows of each task"),
    OtherToolKey("num_fewshot num_fewshots", why="is a key of each task in the gauntlet's file"),
    OtherToolKey(
        "eval_steps eval_every eval_freq eval.interval validation.freq eval_strategy"
        " evaluation_strategy val_check_interval",
        "eval_interval=<500>ba",
        off="eval=off",
    ),
    OtherToolKey("early_stopping_patience", "callbacks.early_stopper.patience=<3>"),
    # What is kept
    OtherToolKey("output_dir out_dir out output_path save_path hf_output_path", "output=<folder>"),
    OtherToolKey(
        "output_dir out_dir out save_dir save_path checkpoint.folder job.dump_folder dump_folder"
        " default_root_dir checkpoint_dir",
        "save_folder=<runs/my-run>",
        "or run_name=my-run",
    ),
    OtherToolKey(
        "out_root output_dir out_dir output", "prepare.output=<folder>", script="prepare_data"
    ),
    OtherToolKey(
        "save_steps save_every save_freq save_strategy train.save_interval checkpoint.interval"
        " checkpointing_steps ckpt_interval",
        "save_interval=<500>ba",
    ),
    OtherToolKey(
        "save_total_limit keep_latest_k checkpoint.keep_latest_k",
        "save_num_checkpoints_to_keep=<3>",
    ),
    OtherToolKey("overwrite_output_dir", "save_overwrite=<true>"),
    OtherToolKey(
        "resume_from_checkpoint resume auto_resume checkpoint.load_step load_checkpoint",
        "load_path=<runs/other>",
        "of another run; the same command resumes its own",
    ),
    OtherToolKey("run_id exp_name wandb_run_name run_title job.name", "run_name=<my-run>"),
    OtherToolKey(
        "logging_steps log_freq log_every log_every_n_steps train.log_interval metrics.log_freq",
        "log_interval=<10>ba",
    ),
    OtherToolKey("report_to log_with", "logger=<wandb>", off="logger=none"),
    OtherToolKey("use_wandb enable_wandb", "logger=wandb", off="logger.wandb=false"),
    OtherToolKey(
        "profiling.enable_memory_snapshot enable_memory_snapshot torch_prof_memory_filename",
        "profile.memory_snapshot=<true>",
    ),
    OtherToolKey(
        "torch_profiler profiling.enable_profiling enable_profiling use_profiler",
        "profile.trace=<true>",
        "its skip_first, wait, warmup, active and repeat are beside it",
    ),
    OtherToolKey("mlflow_experiment_name", "logger.experiment_name=<llmfoundry>"),
    OtherToolKey(
        "disable_tqdm progress_bar verbose quiet logging_level",
        why="the console has a line each log_interval; remove it",
    ),
    # Distillation
    OtherToolKey(
        "teacher teacher_model teacher_model_name_or_path teacher_checkpointer.checkpoint_dir",
        why="scripts/prepare_data.py teacher=MODEL top_k=64 stores its probabilities next to the"
        " data; then train with loss=distill",
    ),
    OtherToolKey("kd_trainer distill distillation kd", "loss=distill", off="loss=cross_entropy"),
    OtherToolKey("kd_alpha", "loss.kl_weight=<0.5>"),
    OtherToolKey("kd_ce_alpha", "loss.cross_entropy_weight=<0.5>"),
    OtherToolKey("kd_temperature distillation.temperature", "loss.temperature=<1.0>"),
    OtherToolKey(
        "kd_ratio", "loss.kl_weight=<0.5>", "and loss.cross_entropy_weight is 1 minus this"
    ),
    OtherToolKey(
        "kd_loss kd_loss._component_ kd_loss.*",
        why="loss.divergence is forward (ForwardKLLoss), reverse or symmetric",
    ),
    OtherToolKey(
        "kd_top_k_before_softmax kd_zscore_base_temp kd_normalize_topk",
        why="the stored log-probabilities are of temperature 1, and renormalized over the top_k"
        " tokens; remove it",
    ),
    OtherToolKey("topk top_k kd_topk", "top_k=<64>", script="prepare_data"),
    # Where it runs
    OtherToolKey(
        "nproc_per_node num_processes gpus num_gpus n_gpu ngpu devices world_size trainer.devices"
        " num_gpus_per_node",
        "parallel.nproc_per_node=<8>",
        "unset: one for each GPU",
    ),
    OtherToolKey(
        "fsdp deepspeed deepspeed_config zero_stage parallelism.data_parallel_shard_degree"
        " training.data_parallel_shard_degree fsdp_transformer_layer_cls_to_wrap strategy"
        " use_fsdp",
        "parallel=fsdp",
        "FSDP2; parallel=ddp copies the model",
        off="parallel=ddp",
    ),
    OtherToolKey(
        "gradient_checkpointing use_gradient_checkpointing activation_checkpoint.mode"
        " activation_checkpoint",
        "parallel.activation_checkpointing=<true>",
    ),
    OtherToolKey("activation_memory_budget", "parallel.activation_memory_budget=<0.5>"),
    OtherToolKey("moe_compress_activations", "parallel.activation_compression=int8"),
    OtherToolKey(
        "sync_each_batch gradient_accumulation_kwargs.sync_each_batch",
        "parallel.reduce_scatter_each_microbatch=<true>",
        "true unless written, with parallel=fsdp",
    ),
    OtherToolKey("ddp_timeout", "parallel.dist_timeout=<600>"),
    OtherToolKey("tensor_parallel_size tensor_parallel_dim", "parallel.tensor_parallel_degree=<2>"),
    OtherToolKey(
        "expert_parallel_size expert_model_parallel_size", "parallel.expert_parallel_degree=<8>"
    ),
    OtherToolKey(
        "context_parallel_size sequence_parallel_degree sequence_parallel_size"
        " ulysses_parallel_degree",
        "parallel.context_parallel_degree=<2>",
    ),
    OtherToolKey("local_rank", why="the launcher sets LOCAL_RANK; remove it"),
    OtherToolKey(
        "device device_map no_cuda use_cpu accelerator",
        why="a GPU is used where there is one, and CUDA_VISIBLE_DEVICES= hides it; remove it",
    ),
    OtherToolKey(
        "tf32 allow_tf32", why="products are bf16 (precision), so it has no effect; remove it"
    ),
    # Calls
    OtherToolKey(
        "config config_file config_path recipe recipe_path yaml yaml_path job.config_file"
        " config_name cfg_path",
        why="write the recipe's path by itself, without a flag",
    ),
    OtherToolKey("do_train", why="scripts/train.py trains; remove it"),
    OtherToolKey("do_eval do_predict", why="scripts/eval.py measures a run; remove it"),
    OtherToolKey(
        "push_to_hub hub_model_id hub_token",
        why="scripts/convert.py writes a folder (to=hf) that `hf upload` sends",
    ),
    OtherToolKey("input text input_text prompts query", "prompt=<text>"),
    OtherToolKey(
        "do_sample", "temperature=1", "draws; 0 takes the likeliest token", off="temperature=0"
    ),
    OtherToolKey("greedy", "temperature=0", "takes the likeliest token", off="temperature=1"),
    OtherToolKey("outdtype output_precision torch_dtype", "dtype=<bf16>"),
    OtherToolKey("output_format export_format target_format", "to=<hf>"),
)


MISSING_HERE = (
    OtherToolKey(
        "neftune_noise_alpha neftune_alpha noisy_embedding_alpha neftune noise_alpha", why=NEFTUNE
    ),
    OtherToolKey(
        "reward_model reward_model_path reward_model_name_or_path reward_adapter rm_path"
        " train_reward_model center_rewards_coefficient process_reward_model",
        why=REWARD_MODELS,
    ),
    OtherToolKey(
        "grpo grpo.* grpo_config grpo_config.* ppo ppo.* ppo_config rollout rollout.* reward_funcs"
        " trl.reward_funcs reward_weights num_generations num_ppo_epochs kl_coef"
        " vllm_mode use_vllm",
        why=ONLINE_RL,
    ),
    OtherToolKey(
        "pipeline_parallel_degree pipeline_parallel_size pipeline_model_parallel_size pp pp_size"
        " pp_degree pipeline_parallel pipeline_parallel_schedule num_stages"
        " parallelism.pipeline_parallel_degree parallel.pipeline_parallel_degree"
        " virtual_pipeline_model_parallel_size pipeline_parallel_microbatch_size"
        " num_layers_per_virtual_pipeline_stage",
        why=PIPELINE,
    ),
    OtherToolKey(
        "gkd gkd.* gkd_config lmbda seq_kd on_policy kd_online_server kd_online_server_base_url"
        " kd_online_topk minillm",
        why=ON_POLICY_DISTILLATION,
    ),
    OtherToolKey("num_virtual_tokens prompt_tuning prefix_tuning ia3", why=OTHER_ADAPTERS),
    OtherToolKey(
        "use_galore galore_rank galore_target_modules optim_target_modules use_apollo",
        why=LOW_RANK_OPTIMIZERS,
    ),
    OtherToolKey(
        "lora_modules enable_lora max_loras max_lora_rank lora_paths lora_adapters",
        why=SERVED_ADAPTERS,
    ),
    OtherToolKey(
        "speculative_model speculative_config draft_model num_speculative_tokens", why=SPECULATIVE
    ),
)
"""What is not supported here; `recipe/not_supported.py` has the values of that kind."""

OTHERS = (*LLM_FOUNDRY, *TRAINERS, *MISSING_HERE)


def register_other_tools() -> None:
    """Register the table for hints about unknown keys."""
    register(OTHERS, file_hint)
