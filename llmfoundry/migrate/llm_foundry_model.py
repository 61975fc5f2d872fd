"""Part of the table in `llm_foundry.py`: settings of the model, the tokenizer and the data."""

from __future__ import annotations

from llmfoundry.migrate import text_values as text
from llmfoundry.migrate import values as v
from llmfoundry.migrate.entry import ForeignConfig, FoundryKey, MigratedSetting, idle


def _is_mpt(theirs: ForeignConfig) -> bool:
    return theirs.kind == "train" and theirs.get("model.name") == "mpt_causal_lm"


def _has_mixture(theirs: ForeignConfig) -> bool:
    return str(theirs.get("model.ffn_config.ffn_type")).startswith("mb_")


def _has_adapter(theirs: ForeignConfig) -> bool:
    return bool(theirs.get("model.peft_config"))


def _is_text(theirs: ForeignConfig) -> bool:
    return v.is_text(theirs) and theirs.trains


_NOT_HERE = "is not here; keep LLM Foundry for it"

_MODEL = (
    FoundryKey("model.name", take=v.model_name),
    FoundryKey(
        "model.init_device init_device", why="weights always begin on the meta device; remove it"
    ),
    FoundryKey(
        "model.loss_fn model.use_train_metrics model.additional_train_metrics"
        "  model.additional_eval_metrics model.use_auth_token use_auth_token"
        " model.use_logits model.shift_labels"
        "  model.fuse_norm_attn_norm model.use_pad_tok_in_ffn model.use_cache"
        " model.should_save_peft_only"
        " model.attn_config.fused_qkv model.attn_config.rope_impl model.verbose",
        why="there is nothing to choose here; remove it",
    ),
    FoundryKey(
        "model.param_init_fn model.init_nonlinearity model.init_std model.init_gain",
        why="LLM Foundry reads it below init_config alone, and ignores it here without a word",
    ),
    FoundryKey(
        "model.fc_type.*",
        take=v.only(
            "torch",
            "PyTorch's, as here",
            (
                "Transformer Engine's layers are not here; precision: amp_fp8 computes"
                " in fp8 by torchao"
            ),
        ),
    ),
    FoundryKey(
        "model.norm_type", take=v.norm_type, default="low_precision_layernorm", when=_is_mpt
    ),
    FoundryKey("model.vocab_size", "model.vocab_size=<50368>", default=50368, when=_is_mpt),
    FoundryKey("model.learned_pos_emb", take=v.kept_positions),
    FoundryKey("model.master_weights_dtype", take=v.master_dtype),
    FoundryKey("model.attn_config.attn_impl", take=v.attn_impl),
    FoundryKey(
        "model.attn_config.attn_uses_sequence_id attn_uses_sequence_id",
        "data.attend_across_documents=false",
        "which it is",
        off="data.attend_across_documents=true",
        take=v.sequence_id,
        default=False,
        when=_is_text,
    ),
    FoundryKey(
        "model.attn_config.norm_eps",
        default=1e-5,
        when=_is_mpt,
        take=lambda value, t: MigratedSetting({"model.attn_config.norm_eps": value}),
    ),
    FoundryKey(
        "model.attn_config.norm_type",
        default="low_precision_layernorm",
        when=_is_mpt,
        take=lambda value, t: MigratedSetting({"model.attn_config.norm_type": value}),
    ),
    FoundryKey("model.attn_config.rope_hf_config.factor", take=v.rope_factor),
    FoundryKey(
        "model.attn_config.rope_dail_config.type",
        take=v.only("original", "RoPE, as here", "xPos is not here; rope alone has other numbers"),
    ),
    FoundryKey(
        "model.attn_config.rope_dail_config.*", why="positions are fp32, and xPos is not here"
    ),
    FoundryKey(
        "model.attn_config.kv_dim model.attn_config.reuse_kv_x_layer_idx",
        take=v.only(None, "has no value", "keys and values come from the same width here"),
    ),
    FoundryKey("model.ffn_config.ffn_type", take=v.ffn_type),
    FoundryKey("model.ffn_config.moe_jitter_eps", take=v.jitter),
    FoundryKey(
        "model.ffn_config.moe_loss_weight", take=v.loss_weight, default=0.1, when=_has_mixture
    ),
    FoundryKey(
        "model.ffn_config.lbl_process_group", take=v.lbl_scope, default=None, when=_has_mixture
    ),
    FoundryKey("model.ffn_config.moe_world_size", "parallel.expert_parallel_degree=<8>"),
    FoundryKey(
        "model.ffn_config.moe_capacity_factor",
        why="no token is dropped here, whatever an expert's load; remove it",
    ),
    FoundryKey(
        "model.ffn_config.mlp_impl model.ffn_config.memory_optimized_mlp"
        " model.ffn_config.moe_lbl_in_fp32 model.ffn_config.fp16 model.ffn_config.bf16"
        " model.ffn_config.device_mesh model.ffn_config.bias",
        why="megablocks' ways to compute the same; moe_impl says by which kernel",
    ),
    FoundryKey(
        "model.ffn_config.fc_type",
        take=v.only("torch", "PyTorch's, as here", "Transformer Engine's layers are not here"),
    ),
    FoundryKey(
        "model.activation_checkpointing_target activation_checkpointing_target"
        " model.activation_checkpointing_target.* activation_checkpointing_target.*",
        "parallel.activation_checkpointing_target=<block>",
        "with parallel.activation_checkpointing: whole",
        take=v.recomputed_parts,
    ),
    FoundryKey(
        "model.pretrained_model_name_or_path",
        "model.pretrained=<runs/quickstart>",
        "a run, a folder with config.json, or a hub id",
        script="finetune",
        take=v.pretrained_name,
    ),
    FoundryKey(
        "model.pretrained",
        take=lambda value, t: (
            idle(
                "scripts/finetune.py begins with them"
                if value
                else "scripts/train.py begins at random"
            )
            if t.kind != "eval"
            else idle("trained models are evaluated")
        ),
    ),
    FoundryKey(
        "model.use_flash_attention_2",
        why="the fastest kernel that the class has is taken; remove it",
    ),
    FoundryKey("model.attn_implementation", "model.attn_impl=<sdpa>"),
    FoundryKey(
        "model.load_in_8bit load_in_8bit",
        "model.quantize=nf4",
        "4 bits, with adapter=lora; there are no 8-bit weights",
        script="finetune",
        take=v.eight_bit,
    ),
    FoundryKey("model.allow_embedding_resizing", "model.resize_embeddings=<true>"),
    FoundryKey(
        "model.pretrained_lora_id_or_path",
        "adapter.pretrained=<FOLDER>",
        script="finetune",
        take=v.adapter_pretrained,
    ),
    FoundryKey(
        "model.peft_config peft_config",
        "adapter=lora",
        "with adapter.r, adapter.lora_alpha …",
        off="adapter=none",
        script="finetune",
    ),
    FoundryKey("model.peft_config.peft_type", take=v.peft_type, default="LORA", when=_has_adapter),
    FoundryKey(
        "model.peft_config.r peft_config.r",
        "adapter.r=<16>",
        script="finetune",
        default=8,
        when=_has_adapter,
    ),
    FoundryKey(
        "model.peft_config.lora_alpha peft_config.lora_alpha",
        "adapter.lora_alpha=<32>",
        script="finetune",
        default=8,
        when=_has_adapter,
    ),
    FoundryKey(
        "model.peft_config.lora_dropout peft_config.lora_dropout",
        "adapter.lora_dropout=<0.05>",
        script="finetune",
    ),
    FoundryKey(
        "model.peft_config.target_modules peft_config.target_modules",
        "adapter.target_modules=<all-linear>",
        script="finetune",
    ),
    FoundryKey(
        "model.peft_config.target_modules",
        "adapter.target_modules=<all-linear>",
        "peft chooses by the class, q_proj and v_proj of Llama; write those for its numbers",
        default="all-linear",
        when=_has_adapter,
        is_changed=True,
    ),
    FoundryKey(
        "model.peft_config.task_type model.peft_config.inference_mode",
        why="adapters are of causal language models, and train; remove it",
    ),
    FoundryKey(
        "model.peft_config.bias",
        take=v.only(
            "none",
            "biases stay, as here",
            "an adapter trains no bias; modules_to_save trains modules whole",
        ),
    ),
    FoundryKey("model.peft_config.*", "adapter.*=<x>", "", script="finetune"),
    FoundryKey("model.config_overrides", why="is empty"),
    FoundryKey("model.config_overrides.*", take=v.overridden),
    FoundryKey("model.config_overrides.max_seq_len", take=v.of_mpt("")),
    FoundryKey("model.config_overrides.attn_config.*", take=v.of_mpt("")),
    FoundryKey(
        "model.config_overrides.attn_config.attn_impl"
        " model.config_overrides.attn_config.attn_uses_sequence_id",
        take=v.of_mpt(
            "the fastest kernel of the device is taken, and packed rows never see each other"
        ),
    ),
)

_TOKENIZER = (
    FoundryKey("tokenizer.name", take=text.tokenizer_name),
    FoundryKey("tokenizer.kwargs.model_max_length", "max_seq_len=<2048>", take=text.row_length),
    FoundryKey(
        "tokenizer.kwargs.encoding_name tokenizer.kwargs.model_name",
        "tokenizer.encoding=<gpt-4>",
        take=text.encoding,
    ),
    FoundryKey("tokenizer.kwargs.chat_template", take=text.template),
    FoundryKey(
        "tokenizer.kwargs.trust_remote_code",
        take=v.only(
            False,
            v.OFF,
            "a tokenizer's own Python code is never run here; its tokenizer.json is read",
        ),
    ),
    FoundryKey(
        "tokenizer.kwargs.add_bos_token tokenizer.kwargs.add_eos_token",
        take=v.only(
            False,
            v.OFF,
            "documents begin and end as tokenizer.json says; write that into its post_processor",
        ),
    ),
    FoundryKey(
        "tokenizer.kwargs tokenizer.kwargs.padding_side tokenizer.kwargs.truncation_side"
        " tokenizer.kwargs.pad_token tokenizer.kwargs.unk_token tokenizer.kwargs.use_fast"
        " tokenizer.kwargs.legacy tokenizer.kwargs.clean_up_tokenization_spaces"
        " tokenizer.kwargs.errors tokenizer.kwargs.token tokenizer.kwargs.use_auth_token",
        why="padding and special tokens are the loader's here; remove it",
    ),
    FoundryKey(
        "tokenizer.kwargs.*",
        take=v.only(
            (None, False, {}, []),
            v.OFF,
            "a tokenizer is read as its folder has it; save it with this setting, by transformers'"
            " save_pretrained, and write the folder as tokenizer.path",
        ),
    ),
)


def _of_loader(loader: str, data: str) -> tuple[FoundryKey, ...]:
    """Return the entries that both loaders have; keys of `eval_loader` move to data.validation."""
    return (*_rows_of_loader(loader, data), *_shards_of_loader(loader, data), *_idle(loader))


def _rows_of_loader(loader: str, data: str) -> tuple[FoundryKey, ...]:
    """Return the entries for examples of Hugging Face data sets and files."""
    # hf_name, which prepare_data's command line has without a section
    d = f"{loader}.dataset"
    hf_name = f"{d}.hf_name"
    remark = "with data.validation.name=huggingface; unset: a part of the rows is held out"
    if loader == "train_loader":
        hf_name += " hf_name"
        remark = "with data=huggingface; files of your own: data.paths=[my/*.jsonl]"
    return (
        FoundryKey(hf_name, f"{data}.dataset=<OWNER/NAME>", remark, take=text.hf_name(loader)),
        # files and subsets
        FoundryKey(
            f"{d}.hf_kwargs.data_dir hf_kwargs.data_dir",
            f"{data}.paths=[<my/rows>]",
            "with data=files",
            take=text.data_dir(loader),
        ),
        FoundryKey(
            f"{d}.hf_kwargs.data_files hf_kwargs.data_files",
            f"{data}.paths=[<my/*.jsonl>]",
            "with data=files",
            take=text.data_files(loader),
        ),
        FoundryKey(f"{d}.hf_kwargs.name", f"{data}.subset=<en>"),
        FoundryKey(
            f"{d}.hf_kwargs.*",
            take=v.never("is not asked of `datasets` here; write a folder that it loads"),
        ),
        FoundryKey(f"{d}.hf_kwargs.data_files.*", take=text.files_of_split(loader)),
        # preprocessing
        FoundryKey(
            f"{d}.preprocessing_fn preprocessing_fn",
            f"{data}.preprocess=<module:function>",
            take=text.preprocess(loader),
        ),
        FoundryKey(f"{d}.preprocessing_fn.*", f"{data}.columns.*=<x>", "ours: theirs"),
        FoundryKey(
            f"{d}.preprocessing_kwargs {d}.preprocessing_kwargs.*",
            take=v.only(
                {}, "is empty", "a preprocessing function gets the row alone; write them into it"
            ),
        ),
    )


def _shards_of_loader(loader: str, data: str) -> tuple[FoundryKey, ...]:
    """Return the entries for the locations of MDS shards."""
    d, is_train = f"{loader}.dataset", loader == "train_loader"
    stream = f"{data}.streams.*" if is_train else data
    remark = "with data=mds" if is_train else "of shards"
    return (
        FoundryKey(f"{d}.remote", f"{data}.remote=<s3://bucket>", remark),
        FoundryKey(f"{d}.local", f"{data}.local=<folder>", remark),
        FoundryKey(f"{d}.split", f"{data}.split=<train>", take=text.split(loader)),
        FoundryKey(f"{d}.streams.*.remote", f"{stream}.remote=<s3://bucket>"),
        FoundryKey(f"{d}.streams.*.local", f"{stream}.local=<folder>"),
        FoundryKey(f"{d}.streams.*.split", f"{stream}.split=<train>"),
        FoundryKey(f"{d}.streams.*.proportion", f"{stream}.proportion=<1>"),
        FoundryKey(f"{d}.streams.*.repeat", f"{stream}.repeat=<1>"),
        FoundryKey(f"{d}.streams.*.choose", f"{stream}.choose=<1000>"),
        FoundryKey(
            f"{d}.streams.*.*",
            why="is one for all streams here: data.download_retry, data.validate_hash",
        ),
    )


def _idle(loader: str) -> tuple[FoundryKey, ...]:
    """Return entries that follow from other settings, have a fixed value or are unsupported."""
    d = f"{loader}.dataset"
    return (
        # keys that follow from other settings, or must have one value
        FoundryKey(f"{d}.max_seq_len", "max_seq_len=<2048>", take=text.row_length),
        FoundryKey(
            f"{d}.hf_kwargs {d}.streams", take=v.only((None, {}, []), "is empty", "is no section")
        ),
        FoundryKey(
            f"{d}.decoder_only_format",
            take=v.only(True, "answers follow their prompts, as here", f"an encoder {_NOT_HERE}"),
        ),
        # keys of LLM Foundry's loader without a counterpart here
        FoundryKey(
            f"{d}.safe_load {d}.allow_pad_trimming {d}.pad_to_longest {loader}.pin_memory"
            f" {loader}.persistent_workers {loader}.timeout {d}.num_canonical_nodes {d}.keep_zip"
            f" {d}.sampling_method {d}.sampling_granularity {d}.partition_algo {d}.stream_name"
            f" {d}.auto_packing_replication {d}.max_leftover_bins_to_keep {d}.allow_unsafe_types",
            why="there is nothing to choose here; remove it",
        ),
        FoundryKey(
            f"{d}.replication {d}.seq_parallel_replication",
            why=(
                "processes that share rows follow from parallel.context_parallel_degree"
                " and tensor_parallel_degree"
            ),
        ),
        FoundryKey(
            f"{d}.predownload",
            why="rows are prefetched by bytes here, data.prefetch; 2gb unless written",
        ),
        FoundryKey(
            f"{d}.mlm_probability",
            take=v.only((0, 0.0), v.OFF, "masked language models are not here"),
        ),
        FoundryKey(
            f"{d}.*",
            take=v.never(
                "is no setting of LLM Foundry's loader either, which ignores or refuses it"
            ),
        ),
    )


_DATA = (
    FoundryKey("train_loader.name", take=text.loader_name),
    *_of_loader("train_loader", "data"),
    FoundryKey("train_loader.dataset.shuffle", "data.shuffle=<true>", default=False),
    FoundryKey(
        "train_loader.dataset.shuffle_seed shuffle_seed",
        why="the order of rows follows from seed; remove it",
        take=text.shuffle_seed,
    ),
    FoundryKey(
        "train_loader.dataset.shuffle_algo",
        take=v.only(
            ("py1e", "py1s", "py2s", "py1br", "py1b", "naive"),
            "shards in random order, rows shuffled in blocks of shuffle_block_size",
            _NOT_HERE,
        ),
    ),
    FoundryKey(
        "train_loader.dataset.shuffle_block_size",
        "data.shuffle_block_size=<262144>",
        take=lambda value, t: (
            idle("has no value")
            if value is None
            else MigratedSetting({"data.shuffle_block_size": int(value)})
        ),
    ),
    FoundryKey(
        "train_loader.dataset.batching_method",
        take=text.batching,
        default="random",
        when=lambda t: t.trains and len(t.get("train_loader.dataset.streams", {})) > 1,
    ),
    FoundryKey(
        "train_loader.dataset.epoch_size",
        take=v.only(
            None,
            "all rows",
            (
                "an epoch is all rows; write max_duration in samples (sp), or repeat"
                " and choose of streams"
            ),
        ),
    ),
    FoundryKey(
        "train_loader.dataset.cache_limit",
        "data.cache_limit=<500gb>",
        take=text.size("data.cache_limit"),
    ),
    FoundryKey("train_loader.dataset.download_retry", "data.download_retry=<5>"),
    FoundryKey("train_loader.dataset.download_timeout", "data.download_timeout=<60>"),
    FoundryKey("train_loader.dataset.validate_hash", take=text.validates),
    FoundryKey("train_loader.dataset.token_encoding_type", "data.token_encoding_type=<int64>"),
    FoundryKey(
        "train_loader.dataset.eos_token_id",
        "data.eos_token_id=<0>",
        take=v.of_text("data.eos_token_id", "rows of answers end with the tokenizer's own"),
    ),
    FoundryKey(
        "train_loader.dataset.bos_token_id",
        "data.bos_token_id=<0>",
        take=v.of_text("data.bos_token_id", "rows of answers begin as the tokenizer has it"),
    ),
    FoundryKey(
        "train_loader.dataset.packing_ratio",
        "data.supervised.packing=best_fit",
        off="data.supervised.packing=off",
        take=text.packing,
        default=None,
        when=v.is_supervised,
    ),
    FoundryKey("train_loader.dataset.target_prompts", "data.supervised.target_prompts=<none>"),
    FoundryKey(
        "train_loader.dataset.target_responses",
        "data.supervised.target_responses=<all>",
        default="last",
        when=v.is_supervised,
    ),
    FoundryKey(
        "data.supervised.chat_eos",
        "data.supervised.chat_eos=<auto>",
        default="always",
        when=v.is_supervised,
    ),
    FoundryKey(
        "data.supervised.nothing_learned",
        "data.supervised.nothing_learned=<error>",
        default="drop",
        when=v.is_supervised,
    ),
    FoundryKey(
        "train_loader.drop_last",
        why="a last step that is not whole is left out; remove it",
        take=text.drops_last,
    ),
    FoundryKey("train_loader.num_workers", "data.loader_workers=<2>"),
    FoundryKey("train_loader.prefetch_factor", "data.prefetch_factor=<2>"),
    FoundryKey("train_loader train_loader.dataset", "data=mds", "keys below data"),
    FoundryKey("eval_loader.name", take=text.eval_loader_name),
    *_of_loader("eval_loader", "data.validation"),
    FoundryKey("eval_loader.label", why="metrics of held-out text are metrics/eval/…; remove it"),
    FoundryKey(
        "eval_loader eval_loaders eval_loader.dataset",
        "data.validation.split=<val>",
        "shards; a corpus holds out data.validation_fraction",
        take=text.held_out,
        default=None,
        when=v.trains,
    ),
    FoundryKey(
        "eval_loader.dataset.shuffle eval_loader.dataset.shuffle_seed"
        " eval_loader.dataset.packing_ratio eval_loader.dataset.shuffle_algo"
        "  eval_loader.dataset.target_prompts eval_loader.dataset.target_responses"
        " eval_loader.dataset.eos_token_id"
        "  eval_loader.dataset.shuffle_block_size eval_loader.dataset.batching_method"
        " eval_loader.dataset.cache_limit"
        " eval_loader.*",
        why="held-out text is read in order and whole, with the settings of data: data.validation"
        " (shards or rows), or data.validation_fraction of a corpus; remove it",
    ),
    FoundryKey(
        "eval_subset_num_batches",
        "eval.validation_rows=<100>",
        "rows, not batches: times device_eval_batch_size",
        take=v.rows_of_batches("eval.validation_rows", "device_eval_batch_size"),
    ),
)

MODEL_AND_DATA = (*_MODEL, *_TOKENIZER, *_DATA)
