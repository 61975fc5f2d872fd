"""Every line that the sections' checks can yield, from recipes as users write them."""

from __future__ import annotations

import pytest

from llmfoundry.errors import UserError
from llmfoundry.recipe.after_training import ConvertRecipe, EvalRecipe, GenerateRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.logger import GenerateConfig
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.train import TrainRecipe

GQA = "model.attn_config.attn_type=grouped_query_attention"
LINES = {
    "precision=fp16": "precision: 'fp16' is not a choice; did you mean 'amp_bf16'?",
    "max_duration=0.5dur": "max_duration: '0.5dur' is a fraction of itself; write ba, sp, tok",
    "max_duration=10": "max_duration: '10' is not a duration; write a number and a unit: 10ba",
    "save_interval=1.5ba": "save_interval: '1.5ba' is not a whole number of batches",
    "log_interval=1e999ba": "log_interval: '1e999ba' is too long; write 1e+18 or less",
    "max_seq_len=1": "max_seq_len: 1 is too small; write 2 or more",
    "device_eval_batch_size=many": "device_eval_batch_size: 'many' is not a choice (choices:",
    "device_train_microbatch_size=257": "device_train_microbatch_size: 257 rows, but a step has",
    "save_num_checkpoints_to_keep=0": "save_num_checkpoints_to_keep: 0; write -1 (all) or at",
    "load_weights_only=true": "load_weights_only: has no effect without load_path; remove it",
    "data.validation_fraction=0": "eval.validation: true, but nothing is held out; write eval.v",
    "model.max_seq_len=9": "model.max_seq_len: 9 is shorter than the recipe's rows (max_seq_len:",
    "model.name=gpt": "model.name: 'gpt' is not a choice (choices: mpt_causal_lm)",
    "model.norm_type=layernrm": "model.norm_type: 'layernrm' is not a choice; did you mean 'lay",
    "model.n_heads=0": "model.n_heads: 0 is too small; write 1 or more",
    "model.n_heads=7": "model.n_heads: 7 does not divide model.d_model (2048); the nearest that",
    "model.norm_eps=0": "model.norm_eps: 0.0 must be greater than 0",
    "model.expansion_ratio=0.0001": "model.expansion_ratio: 0.0001 * d_model (2048) is not a w",
    "model.expansion_ratio=3 model.ffn_config.ffn_hidden_size=9": "model.expansion_ratio: has no",
    "model.attn_config.attn_impl=flesh": "model.attn_config.attn_impl: 'flesh' is not a choice",
    GQA: "model.attn_config.kv_n_heads: grouped_query_attention needs it; write a divisor of",
    f"{GQA} model.attn_config.kv_n_heads=5": "model.attn_config.kv_n_heads: 5 does not divide",
    "model.attn_config.kv_n_heads=4": "model.attn_config.kv_n_heads: has no effect without gro",
    "model.attn_config={alibi: true, rope: true}": "model.attn_config.alibi: and rope exclude",
    "model.attn_config.alibi_bias_max=8": "model.attn_config.alibi_bias_max: has no effect with",
    "model.attn_config.rope_theta=1e4": "model.attn_config.rope_theta: has no effect with model",
    "model.attn_config.clip_qkv=0": "model.attn_config.clip_qkv: 0.0 must be greater than 0",
    "model.attn_config.rope=true model.learned_pos_emb=true": "model.learned_pos_emb: true, with",
    "model.attn_config.rope=true model.head_dim=3": "model.attn_config.rope: needs an even head",
    "model.ffn_config.ffn_type=glu": "model.ffn_config.ffn_type: 'glu' is not a choice; did you",
    "model.init_config.init_std=0.1": "model.init_config.init_std: has no effect with model.in",
    "tokenizer.name=byte": "tokenizer.name: 'byte' is not a choice; did you mean 'bytes'? (choi",
    "tokenizer.name=huggingface": "tokenizer.path: huggingface needs it; write a folder with tok",
    "tokenizer=bytes tokenizer.vocab_size=300": "tokenizer.vocab_size: has no effect with token",
    "tokenizer.vocab_size=256": "tokenizer.vocab_size: 256 is too small; write 257 or more",
    "data.name=c4": "data.name: 'c4' is not a choice (choices: python_stdlib, files, ",
    "data.name=files": "data.paths: files needs it; write a list of files, folders or globs",
    "data.name=python_stdlib data.paths=[a]": "data.paths: has no effect with data.name: python_std"
    "lib, only with files; remove it",
    "data.split=train": "data.split: has no effect with data.name: python_stdlib, only with hu",
    "data.name=huggingface": "data.dataset: huggingface needs it; write a hub id or a local fol",
    "data.name=files data.paths=[a] data.validation.paths=[b]": "data.validation: has no effect w",
    "data.name=shards data.remote=a data.validation.paths=[b]": "data.validation.name: files can",
    "data.validation_fraction=1": "data.validation_fraction: 1.0 is not a fraction; write a num",
    "loss.name=entropy": "loss.name: 'entropy' is not a choice; did you mean 'cross_entropy'? (cho",
    "residual_dtype=bf16 precision=fp32": "residual_dtype: has no effect with precision: fp32",
    "loss.z_loss_weight=0": "loss.z_loss_weight: 0.0 must be greater than 0",
    "optimizer.name=adam": "optimizer.name: 'adam' is not a choice; did you mean 'adamw'? (choi",
    "optimizer.lr=0": "optimizer.lr: 0.0 must be greater than 0",
    "optimizer.lr=nan": "optimizer.lr: nan is not a finite number",
    "optimizer.betas=[0.9]": "optimizer.betas: [0.9]; write two numbers in [0, 1), such as [0.9,",
    "ema.decay=1": "ema.decay: 1.0 must be less than 1",
    "eval.weights=ema": "eval.weights: ema, but no average is kept; write ema.decay",
    "gradient_clipping.clipping_type=valve": "gradient_clipping.clipping_type: 'valve' is not a",
    "optimizer={name: decoupled_lionw, eps: 0.1}": "optimizer.eps: has no effect with optimiz",
    "schedule.t_warmup=soon": "schedule.t_warmup: 'soon' is not a duration; write a number and a",
    "schedule.alpha_f=2": "schedule.alpha_f: 2.0 is not a fraction; write a number from 0 up to,",
    "parallel.nproc_per_node=0": "parallel.nproc_per_node: 0 is too small; write 1 or more",
    "parallel.data_parallel_shard_degree=0": "parallel.data_parallel_shard_degree: 0; write -1",
    "parallel.data_parallel_shard_degree=-1": "parallel.data_parallel_replicate_degree: and data",
    "parallel.reshard_after_forward=true": "parallel.reshard_after_forward: has no effect with",
    "parallel.reduce_scatter_each_microbatch=false": "parallel.reduce_scatter_each_microbatch: h",
    "eval.icl_rows=5": "eval.icl_rows: has no effect without eval.gauntlet; remove it",
    "eval=off eval.validation_rows=5": "eval.validation_rows: has no effect with eval.validation",
    "logger=none logger.tracking_uri=x": "logger.tracking_uri: has no effect with logger.mlflow: f",
    "callbacks.speed_window=0": "callbacks.speed_window: 0 is too small; write 1 or more",
    "callbacks.generate.interval=no": "callbacks.generate.interval: 'no' is not a duration; wri",
    "profile={trace: true, active: 0}": "profile.active: 0 is too small; write 1 or more",
    "health_check.before_run=maybe": "health_check.before_run: 'maybe' is not a choice (choices: ",
    "hang={monitor: off, data_seconds: 9}": "hang.data_seconds: has no effect with hang.monitor: ",
    "supervise.max_restarts=-1": "supervise.max_restarts: -1 is too small; write 0 or more",
    "launch.queue=x": "launch.queue: has no effect with launch.target: local, only with slurm or k",
    "registry.best.metric=x": "registry.best.metric: has no effect without registry.name",
}


def problems(schema: type, *words: str) -> tuple[str, ...]:
    """What `check` finds in the schema's defaults with these settings."""
    try:
        checked(schema, None, words)
    except UserError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("words", LINES)
def test_training_recipe(words: str) -> None:
    # A space separates settings, except inside {...}.
    settings = [words] if "{" in words else words.split(" ")
    found = problems(TrainRecipe, "run_name=x", *settings)
    assert len(found) == 1 and found[0].startswith(LINES[words])


def test_the_defaults_are_sound() -> None:
    assert problems(TrainRecipe, "run_name=x") == ()


def test_every_section_is_checked() -> None:
    sections = {
        name for name, key in Schema.of(TrainRecipe).keys.items() if key.section is not None
    }
    assert sections <= {line.split(".")[0] for line in LINES.values()}


def test_all_problems_are_found_at_once() -> None:
    words = ["run_name=x", "model.n_layers=0", "optimizer.lr=0", "eval_interval=often"]
    assert len(problems(TrainRecipe, *words)) == 3


@pytest.mark.parametrize("schema", [EvalRecipe, GenerateRecipe])
def test_a_checkpoint_is_required(schema: type) -> None:
    line = "checkpoint: is required; write checkpoint=runs/NAME, a run's folder"
    assert problems(schema) == (line,)
    assert problems(schema, "checkpoint=runs/x") == ()


def test_convert_recipe() -> None:
    base = ("checkpoint=a", "output=b")
    assert (
        problems(ConvertRecipe, *base, "to=hf") == problems(ConvertRecipe, *base, "from=hf") == ()
    )
    either = "to: write either to=hf, to=gguf or to=peft (export), or from=hf (import)"
    assert problems(ConvertRecipe, *base) == (either,)
    assert problems(ConvertRecipe, *base, "to=hf", "from=hf") == (either,)
    assert problems(ConvertRecipe, *base, "from=gguf") == (
        "from: 'gguf' is not a choice (choices: hf)",
    )
    assert problems(ConvertRecipe, "checkpoint=a", "to=hf", "dtype=f32") == (
        "dtype: 'f32' is not a choice; did you mean 'fp32'? (choices: fp32, bf16, fp16, q8_0)",
        "output: is required; write output=DIR, the folder to write",
    )
    gguf = ("checkpoint=a", "to=gguf", "dtype=q8_0")
    for source in ((), ("from=hf",)):
        assert problems(ConvertRecipe, *gguf, *source, "output=b.gguf") == ()
    assert problems(ConvertRecipe, *gguf, "output=b") == (
        "output: b is one file with to=gguf; write output=NAME.gguf",
    )
    assert problems(ConvertRecipe, *base, "to=hf", "dtype=q8_0") == (
        "dtype: q8_0 is a format of GGUF; write to=gguf, or dtype=bf16",
    )


def test_generate_recipe() -> None:
    def found(*words: str) -> tuple[str, ...]:
        return problems(GenerateRecipe, "checkpoint=a", *words)

    assert found("temperature=0", "top_k=3") == (
        "top_k: has no effect with temperature: 0; remove it",
    )
    assert found("top_p=0") == ("top_p: 0.0 must be greater than 0",)
    assert found("max_new_tokens=0") == ("max_new_tokens: 0 is too small; write 1 or more",)


def test_the_tail_of_a_distribution_is_left_out_where_tokens_are_drawn() -> None:
    def generate(*words: str) -> GenerateConfig:
        recipe = checked(TrainRecipe, None, words)
        recipe = recipe.resolve()
        return recipe.callbacks.generate

    assert generate().top_p == 0.9
    assert generate("callbacks.generate.top_p=1").top_p == 1
    assert generate("callbacks.generate.temperature=0").top_p is None
    asked = checked(GenerateRecipe, None, ["checkpoint=a"])
    asked.fill()
    assert asked.top_p == 0.9
    words = ("callbacks.generate.temperature=0", "callbacks.generate.top_p=0.5")
    assert problems(TrainRecipe, *words) == (
        "callbacks.generate.top_p: has no effect with callbacks.generate.temperature: 0; remove it",
    )


def test_derived_values() -> None:
    words = ["run_name=x", "model.d_model=96", "model.n_heads=6", "model.attn_config.alibi=true"]
    recipe = checked(TrainRecipe, None, words)
    recipe = recipe.resolve()
    recipe.model.fill(vocab_size=257)
    model = recipe.model
    assert (model.head_dim, model.attn_config.kv_n_heads) == (16, 6)
    assert (model.ffn_config.ffn_hidden_size, model.max_seq_len) == (384, 2048)
    assert (model.learned_pos_emb, model.attn_config.alibi_bias_max) == (False, 8)
    assert (model.attn_config.rope_theta, model.vocab_size) == (None, 320)
    assert list(recipe.check()) == []
