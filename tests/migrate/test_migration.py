"""LLM Foundry's files become recipes: every setting has a line, and the result loads."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmfoundry.cli.commands.migrate import migrate_file
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.gauntlet_file import read_gauntlet
from llmfoundry.migrate.entry import MigrationStatus
from llmfoundry.migrate.migration import RECIPES, leaves_of, migrate, put, read_theirs
from llmfoundry.migrate.written import report
from llmfoundry.recipe.before_training import MigrateRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.typed import flat, to_dict

PRETRAIN = """
variables: {data_local: ./my-copy-c4, data_remote: , max_seq_len: 2048, global_seed: 17, run_name: }
max_seq_len: ${variables.max_seq_len}
run_name: ${variables.run_name}
model:
  name: mpt_causal_lm
  init_device: meta
  d_model: 768
  n_heads: 12
  n_layers: 12
  expansion_ratio: 4
  max_seq_len: ${variables.max_seq_len}
  vocab_size: 50368
  attn_config: {attn_impl: flash, alibi: true, rope_theta: 500000}
tokenizer: {name: EleutherAI/gpt-neox-20b, kwargs: {model_max_length: "${variables.max_seq_len}"}}
train_loader: &train
  name: text
  dataset:
    local: ${variables.data_local}
    remote: ${variables.data_remote}
    split: train
    max_seq_len: ${variables.max_seq_len}
    shuffle_seed: 9
  drop_last: true
  num_workers: 8
eval_loader:
  <<: *train
  dataset: {local: "${variables.data_local}", split: val}
scheduler: {name: cosine_with_warmup, t_warmup: 100ba}
optimizer: {name: decoupled_adamw, lr: 6.0e-4, betas: [0.9, 0.95]}
max_duration: 4800ba
eval_interval: 1
eval_subset_num_batches: 3
global_train_batch_size: 256
seed: ${variables.global_seed}
device_eval_batch_size: 16
device_train_microbatch_size: 16
precision: amp_fp16
fsdp_config: {sharding_strategy: SHARD_GRAD_OP, mixed_precision: PURE,
  activation_checkpointing: true}
callbacks: {speed_monitor: {window_size: 10}, lr_monitor: {}, no_such_callback: {every: 3}}
loggers: {wandb: {project: mine, tags: [a, b]}}
save_folder: ./{run_name}/checkpoints
"""
FINETUNE = """
max_seq_len: 512
model:
  name: hf_causal_lm
  pretrained_model_name_or_path: gpt2
  peft_config: {r: 64, peft_type: LORA, task_type: CAUSAL_LM, target_modules: [Wqkv]}
  config_overrides: {attn_pdrop: 0.1}
tokenizer: {name: gpt2, kwargs: {model_max_length: 512}}
train_loader:
  name: finetuning
  dataset:
    hf_name: json
    hf_kwargs: {data_dir: my_rows}
    preprocessing_fn: my.module:fn
    split: train
    shuffle: true
    packing_ratio: 3
    decoder_only_format: true
  drop_last: true
  num_workers: 0
scheduler: {name: linear_decay_with_warmup, t_warmup: 0ba, alpha_f: 0}
optimizer: {name: decoupled_lionw, lr: 1.0e-5, betas: [0.9, 0.95], weight_decay: 1.0e-06}
algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}}
max_duration: 2ep
seed: ${global_seed}
global_train_batch_size: 8
precision: fp32
variables: {global_seed: 5}
"""
EVAL = """
max_seq_len: 1024
precision: fp32
models:
- model_name: a
  model: {name: hf_causal_lm, pretrained_model_name_or_path: gpt2}
  tokenizer: {name: gpt2}
- {model_name: b, model: {name: openai_chat, version: gpt-4}, tokenizer: {name: tiktoken}}
device_eval_batch_size: 4
icl_tasks: eval/yamls/tasks_v0.3.yaml
eval_gauntlet: eval/yamls/eval_gauntlet_v0.3.yaml
"""
TASKS = """
icl_tasks:
- label: piqa
  dataset_uri:
  num_fewshot: [0]
  batch_size: 4
  icl_task_type: multiple_choice
  continuation_delimiter: " "
eval_gauntlet:
  weighting: EQUAL
  categories:
  - {name: one, benchmarks: [{name: piqa, num_fewshot: 0, random_baseline: 0.5}]}
"""
MCLI = """
name: my-run
image: mosaicml/llm-foundry:latest
compute: {gpus: 8}
integrations: [{integration_type: git_repo, git_repo: mosaicml/llm-foundry}]
command: |
  cd llm-foundry/scripts
  python data_prep/convert_dataset_hf.py --dataset allenai/c4 --out_root ./c4 --concat_tokens 8
  composer train/train.py train/yamls/mine.yaml max_duration=10ba optimizer.lr=1e-3
parameters: {}
"""
FILES = {
    "pretrain": PRETRAIN,
    "finetune": FINETUNE,
    "eval": EVAL,
    "tasks": TASKS,
}


def migrated(folder: Path, text: str, **settings: Any) -> dict[str, Any]:
    """The values of the recipe that a file becomes, filled, by dotted key."""
    theirs, ours = folder / "theirs.yaml", folder / "ours.yaml"
    theirs.write_text(text)
    migrate_file(MigrateRecipe(theirs=str(theirs), output=str(ours), **settings))
    launch = ours.read_text().splitlines()[1]
    kind = launch.partition("scripts/")[2].partition(".py")[0]
    recipe = checked(RECIPES[kind], ours)
    recipe.fill()  # type: ignore[attr-defined]
    return dict(flat(to_dict(recipe)))


@pytest.mark.parametrize("name", FILES)
def test_every_leaf_of_a_file_is_in_exactly_one_line(tmp_path: Path, name: str) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(FILES[name])
    result = migrate(read_theirs(file), "g.yaml")
    written = yaml.safe_load(FILES[name])  # another reader than the one that migrates
    leaves = [shown for shown, _, _ in leaves_of(written)]
    assert sorted(line.key for line in result.lines if line.leaf is not None) == sorted(leaves)
    *lines, _ = report(result)
    assert len(lines) == len(result.lines)
    for line in result.lines:  # nothing goes without a reason
        assert line.taken.values or line.taken.why, line.key


def test_a_pretraining_file_keeps_its_meaning(tmp_path: Path) -> None:
    got = migrated(tmp_path, PRETRAIN)
    theirs = {  # by hand, from LLM Foundry's and Composer's documentation
        "max_seq_len": 2048,
        "seed": 17,
        "precision": "amp_bf16",
        "model.d_model": 768,
        "model.vocab_size": 50368,
        "model.norm_type": "low_precision_layernorm",
        "model.attn_config.alibi": True,
        "model.attn_config.attn_impl": "auto",
        "model.attn_config.rope_theta": None,  # without effect beside alibi
        "model.learned_pos_emb": False,
        "tokenizer.name": "huggingface",
        "tokenizer.path": "EleutherAI/gpt-neox-20b",
        "data.name": "shards",
        "data.local": "./my-copy-c4",
        "data.remote": None,
        "data.split": "train",
        "data.shuffle": False,  # Streaming's default
        "data.attend_across_documents": True,
        "data.loader_workers": 8,
        "data.validation.split": "val",
        "optimizer.lr": 6e-4,
        "optimizer.weight_decay": 1e-5,  # DecoupledAdamW's default
        "schedule.t_warmup": "100ba",
        "schedule.alpha_f": 0.0,  # Composer's default
        "gradient_clipping.clipping_threshold": float("inf"),
        "eval_interval": "1ep",
        "eval.validation_rows": 3 * 16,
        "save_folder": "./ours",
        "parallel.data_parallel_shard_degree": -1,
        "parallel.reshard_after_forward": False,
        "parallel.activation_checkpointing": "whole",
        "logger.wandb_project": "mine",
        "logger.mlflow": False,
        "callbacks.speed_window": 10,
    }
    assert {key: got[key] for key in theirs} == theirs


def test_a_fine_tuning_file_keeps_its_meaning(tmp_path: Path) -> None:
    got = migrated(tmp_path, FINETUNE)
    theirs = {
        "model.pretrained": "gpt2",
        "model.config_overrides.attn_pdrop": 0.1,
        "tokenizer.name": "pretrained",
        "adapter.name": "lora",
        "adapter.r": 64,
        "adapter.lora_alpha": 8,  # peft's default
        "adapter.target_modules": ["Wqkv"],
        "data.name": "files",
        "data.paths": ["my_rows/train*"],
        "data.preprocess": "my.module:fn",
        "data.format": "prompt_response",
        "data.supervised.packing": "best_fit",
        "data.supervised.target_responses": "last",
        "data.supervised.nothing_learned": "drop",
        "data.validation_fraction": 0.0,
        "eval.validation": False,
        "seed": 5,  # ${global_seed}, of which variables has one
        "optimizer.betas": [0.9, 0.95],
        "gradient_clipping.clipping_threshold": 1.0,
        "eval_interval": "1ep",
    }
    assert {key: got[key] for key in theirs} == theirs


def test_an_evaluation_file_names_models_and_our_gauntlet_of_the_same_tasks(tmp_path: Path) -> None:
    got = migrated(tmp_path, EVAL)
    assert got["models"] == ["hf:gpt2", "chat:https://api.openai.com/v1#gpt-4"]
    assert got["eval.gauntlet"] == "eval/gauntlets/v0.3.yaml"
    assert (got["eval.icl_seq_len"], got["eval.icl_prompts"]) == (1024, "foundry")


def test_an_adapter_is_evaluated_by_its_own_folder(tmp_path: Path) -> None:
    model = "{name: hf_causal_lm, pretrained_model_name_or_path: gpt2"
    text = EVAL.replace(model, f"{model}, pretrained_lora_id_or_path: ./my-lora")
    assert migrated(tmp_path, text)["models"][0] == "./my-lora"


def test_tasks_of_the_file_s_own_become_a_gauntlet_s_file(tmp_path: Path) -> None:
    own = EVAL.partition("icl_tasks:")[0] + TASKS
    got = migrated(tmp_path, own)
    gauntlet = read_gauntlet(Path(got["eval.gauntlet"]))
    (task,) = gauntlet.tasks
    assert (task.label, task.num_fewshot, task.continuation_delimiter) == ("piqa", [0], " ")
    assert task.dataset_uri.endswith("piqa.jsonl")  # theirs names none: that of the label
    assert [category.name for category in gauntlet.gauntlet.categories] == ["one"]


def test_an_mcli_file_brings_the_recipe_that_its_command_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scripts/train/yamls").mkdir(parents=True)
    (tmp_path / "scripts/train/yamls/mine.yaml").write_text(PRETRAIN)
    (tmp_path / "mcli").mkdir()
    (tmp_path / "mcli/theirs.yaml").write_text(MCLI)
    ours = tmp_path / "ours.yaml"
    migrate_file(MigrateRecipe(theirs=str(tmp_path / "mcli/theirs.yaml"), output=str(ours)))
    recipe = checked(RECIPES["train"], ours)
    assert (recipe.max_duration, recipe.optimizer.lr) == ("10ba", 1e-3)
    assert recipe.run_name == "my-run"
    out = capsys.readouterr().out
    scripts = "`python scripts/prepare_data.py`, then `python scripts/train.py`"
    assert scripts in " ".join(out.split())
    assert out.count("compute.gpus: 8") == 1
    (tmp_path / "mcli/theirs.yaml").write_text(MCLI.replace("lr=1e-3", "lr=[1"))
    with pytest.raises(UserError, match=r"command: .*lr=\[1 cannot be read"):
        read_theirs(tmp_path / "mcli/theirs.yaml")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("model: {name: hf_t5}", "model.name: hf_t5: such a model is neither trained"),
        ("train_loader: {name: contrastive_pairs}", None),
    ],
)
def test_what_is_not_here_is_refused_with_what_to_do(
    tmp_path: Path, change: str, line: str | None
) -> None:
    theirs = tmp_path / "theirs.yaml"
    values = yaml.safe_load(FINETUNE) | yaml.safe_load(change)
    theirs.write_text(yaml.safe_dump(values))
    if line is not None:
        with pytest.raises(UserError, match=line):
            migrate_file(MigrateRecipe(theirs=str(theirs), output=str(tmp_path / "o.yaml")))
        assert not (tmp_path / "o.yaml").exists()
    refused = [
        li for li in migrate(read_theirs(theirs)).lines if li.verdict is MigrationStatus.REFUSED
    ]
    assert refused and all(li.taken.why for li in refused)


def test_a_shape_that_is_not_known_has_to_be_filled_in(tmp_path: Path) -> None:
    text = FINETUNE.replace("pretrained_model_name_or_path: gpt2", "pretrained: false\n"
                            "  pretrained_model_name_or_path: somebody/else")  # fmt: skip
    with pytest.raises(UserError, match=r"model\.d_model: .*copy d_model.*model=gpt2-124m"):
        migrated(tmp_path, text.replace("  peft_config", "  # ").replace("  config_ov", "  # "))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed: 1\n", "is not an LLM Foundry file"),
        ("[1, 2]\n", "holds no keys"),
        ("train_loader: {a: *x}\n", "undefined alias"),
        ("image: x\ncommand: composer train/train.py a.yaml\n", "a.yaml is not there"),
        ("image: x\ncommand: ls\n", "starts neither training nor evaluation"),
    ],
)
def test_what_is_no_recipe_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(text)
    with pytest.raises(UserError, match=line):
        migrate_file(MigrateRecipe(theirs=str(theirs), output=str(tmp_path / "o.yaml")))
    assert not (tmp_path / "o.yaml").exists()


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        (
            {"model": {"block_overrides": {
                "order": [{"name": "default", "repeat": 11}, {"name": "local"}],
                "overrides": {"local": {"attn_config": {"sliding_window_size": 16}}}}}},
            {"model.block_overrides.overrides.local.attn_config.sliding_window_size": 16},
        ),
        ({"optimizer": {"param_groups": [{"param_str_match": "norm", "weight_decay": 0.0}]}},
         {"optimizer.weight_decay": 1e-5}),
        ({"eval_loader": [{"label": "a", "name": "text", "dataset": {"local": "x", "split": "a"}},
                          {"label": "b", "name": "text", "dataset": {"local": "x", "split": "b"}}]},
         {"data.validation.split": "a"}),
        ({"model": {"ffn_config": {"ffn_type": "torch_dmoe", "moe_num_experts": 4,
                                   "moe_jitter_eps": 0, "moe_top_k": 2}}},
         {"model.ffn_config.moe_balancing": "none", "model.ffn_config.moe_jitter_eps": None}),
        ({"model": {"ffn_config": {"ffn_type": "mb_dmoe", "moe_num_experts": 4,
                                   "moe_world_size": 2, "mlp_impl": "sparse"}}},
         {"model.ffn_config.moe_loss_weight": 0.1,  # megablocks' default
          "model.ffn_config.moe_lbl_scope": "microbatch", "parallel.expert_parallel_degree": 2}),
        ({"fsdp_config": {"sharding_strategy": "HYBRID_SHARD"}},
         {"parallel.data_parallel_shard_degree": 8, "parallel.data_parallel_replicate_degree": -1}),
        ({"train_loader": {"dataset": {"local": None, "streams": {
            "a": {"local": "/a", "proportion": 0.3}, "b": {"local": "/b", "proportion": 0.7}}}}},
         {"data.name": "mixture", "data.streams.b.local": "/b", "data.streams.a.split": "train"}),
        ({"compile_config": {}, "max_duration": 3}, {"compile": True, "max_duration": "3ep"}),
    ],
)  # fmt: skip
def test_sections_of_every_kind_find_their_place(
    tmp_path: Path, changes: dict[str, Any], ours: dict[str, Any]
) -> None:
    values = yaml.safe_load(PRETRAIN)
    for name, change in changes.items():
        nested = isinstance(change, dict) and name != "compile_config"
        values[name] = merged(values.get(name, {}), change) if nested else change
    got = migrated(tmp_path, yaml.safe_dump(values))
    assert {key: got[key] for key in ours} == ours


def merged(into: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Two nested sections in one."""
    pairs = {k: merged(into.get(k, {}), v) if isinstance(v, dict) else v for k, v in values.items()}
    return {**into, **pairs}


@pytest.mark.parametrize("key", ["max_duration", "global_train_batch_size", "tokenizer"])
def test_what_llm_foundry_cannot_do_without_is_not_made_up(tmp_path: Path, key: str) -> None:
    values = yaml.safe_load(PRETRAIN)
    del values[key]
    with pytest.raises(UserError, match=rf"{key}.*: is required"):
        migrated(tmp_path, yaml.safe_dump(values))


def test_a_variable_of_the_environment_stays_one(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(PRETRAIN.replace("run_name: ${variables", "run_name: ${oc.env:HOME} #"))
    migrate_file(MigrateRecipe(theirs=str(theirs), output=str(ours)))
    assert yaml.safe_load(ours.read_text())["run_name"] == "${oc.env:HOME}"


ODD = [None, True, -1, 1e400, "x", "${nope}", "=", [], {}, [1], {"a": 1}, [{"a": 1}], [[1]], "???"]


@pytest.mark.parametrize("seed", range(4))
def test_odd_values_anywhere_are_a_line_and_never_a_traceback(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(15):
        values = yaml.safe_load(draw.choice([*FILES.values(), MCLI]))
        _, place, _ = draw.choice([*leaves_of(values)])
        put(values, place[: draw.randint(1, len(place))], draw.choice(ODD))
        theirs = tmp_path / "theirs.yaml"
        theirs.write_text(yaml.safe_dump(values))
        with contextlib.suppress(UserError):
            lines = migrate(read_theirs(theirs)).lines
            assert all(line.taken.values or line.taken.why for line in lines)
            migrate_file(
                MigrateRecipe(theirs=str(theirs), output=str(tmp_path / "o.yaml"), overwrite=True)
            )


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (PRETRAIN, "train_loader.dataset.streams", 3),
        (EVAL, "icl_tasks", "theirs.txt"),
    ],
)
def test_what_another_value_decides_is_no_traceback_where_that_is_odd(
    tmp_path: Path, text: str, key: str, value: Any
) -> None:
    (tmp_path / "theirs.txt").write_text(": : [")
    lines = with_value(tmp_path, text, key, value).lines
    assert any(
        line.key.startswith(key) and line.verdict is MigrationStatus.REFUSED for line in lines
    )


def test_a_file_that_is_there_stays_unless_it_may_go(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        migrated(tmp_path, PRETRAIN)
    assert (tmp_path / "ours.yaml").read_text() == "mine"
    assert migrated(tmp_path, PRETRAIN, overwrite=True)["seed"] == 17
    assert migrated(tmp_path, PRETRAIN)["seed"] == 17  # as after the same command
    with pytest.raises(UserError, match="is there already"):
        migrated(tmp_path, PRETRAIN.replace("seed: 17", "seed: 18"))


DIFFERENT = [  # file, its key, a value: ours (LLM Foundry's, Composer's, peft's source)
    (FINETUNE, "model.config_overrides.rope_scaling.factor", 2.0,
     {"model.config_overrides.rope_scaling.factor": 2.0}),
    (FINETUNE, "train_loader.dataset.hf_kwargs.data_files", {"val": "b.json", "train": "a.json"},
     {"data.paths": ["a.json"]}),
    (FINETUNE, "train_loader.dataset.hf_name", "tatsu-lab/alpaca",
     {"data.format": "prompt_response", "data.supervised.nothing_learned": "drop"}),
    (PRETRAIN, "train_loader.dataset.streams", {"a": {"local": "a"}, "b": {"local": "b"}},
     {"data.batching_method": "stratified"}),
    (PRETRAIN, "seed", 3, {"autoresume": False}),
    (PRETRAIN, "model", {"name": "hf_causal_lm", "pretrained": False,
                         "pretrained_model_name_or_path": "meta-llama/Llama-3.1-8B"},
     {"defaults.model": "llama-8b", "model.attn_config.rope_hf_config.factor": 8.0}),
    (PRETRAIN, "model", {"name": "hf_causal_lm", "pretrained": False,
                         "pretrained_model_name_or_path": "gpt2"},
     {"defaults.model": "gpt2-124m", "model.attn_config.attn_pdrop": 0.1}),
    (PRETRAIN, "optimizer", {"name": "decoupled_lionw"}, {"optimizer.lr": 1e-4}),
    (PRETRAIN, "optimizer", {"name": "clip_lion"}, {"optimizer.lr": 1e-4}),
    (FINETUNE, "model.peft_config", {"r": 4}, {"adapter.target_modules": "all-linear"}),
    (PRETRAIN, "scheduler.t_warmup", 100, {"schedule.t_warmup": "???"}),
    (PRETRAIN, "fsdp_config.data_parallel_replicate_degree", 2,
     {"parallel.data_parallel_replicate_degree": 2}),
    (PRETRAIN, "fsdp_config.sharding_strategy", "_HYBRID_SHARD_ZERO2",
     {"parallel.reshard_after_forward": False}),
    (PRETRAIN, "model.activation_checkpointing_target", {"attention": "first-2"},
     {"parallel.activation_checkpointing_target.attention": "first-2"}),
    (PRETRAIN, "callbacks.early_stopper", {"monitor": "LanguageCrossEntropy", "comp": "less"},
     {"callbacks.early_stopper.patience": 1, "callbacks.early_stopper.mode": "min"}),
    (PRETRAIN, "callbacks.kill_loss_spike", {"log_only": False},
     {"callbacks.watch.loss_spike": "stop"}),
    (EVAL, "models", [{"model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": "gpt2"},
                       "load_path": "a.pt"}], {"models": ["a.pt"]}),
]  # fmt: skip


def with_value(folder: Path, text: str, key: str, value: Any) -> Any:
    """The migration of a file with one value more, or another."""
    values = yaml.safe_load(text)
    put(values, tuple(key.split(".")), value)
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return migrate(read_theirs(file))


@pytest.mark.parametrize(("text", "key", "value", "ours"), DIFFERENT)
def test_what_a_setting_or_its_absence_means_there_is_written_here(
    tmp_path: Path, text: str, key: str, value: Any, ours: dict[str, Any]
) -> None:
    values = with_value(tmp_path, text, key, value).values
    assert {key: values.get(key) for key in ours} == {
        key: pytest.approx(one) if isinstance(one, float) else one for key, one in ours.items()
    }


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (PRETRAIN, "train_loader.drop_last", False),
        (PRETRAIN, "fsdp_config.mixed_precision", {"reduce_dtype": "bf16"}),
        (PRETRAIN, "callbacks.async_eval", {}),  # which is on there, without a setting
        (PRETRAIN, "loggers.slack", {}),
        (PRETRAIN, "callbacks.loss_perp_v_len.log_batch_interval", 3),
        (FINETUNE, "model.peft_config.layers_to_transform", [1]),
        (FINETUNE, "tokenizer.kwargs.revision", "abc"),
        (FINETUNE, "tokenizer.kwargs.use_default_system_prompt", True),
        (FINETUNE, "train_loader.dataset.hf_kwargs", {"data_dir": "part"}),
        (EVAL, "eval_loader.dataset.local", "c4"),
    ],
)
def test_a_setting_that_is_lost_is_never_said_to_be_without_effect(
    tmp_path: Path, text: str, key: str, value: Any
) -> None:
    if key.endswith("hf_kwargs"):
        text = text.replace("hf_name: json", "hf_name: my/rows")
    found = with_value(tmp_path, text, key, value).lines
    lines = [line for line in found if line.key.startswith(key)]
    assert lines
    assert {line.verdict for line in lines} <= {MigrationStatus.REFUSED, MigrationStatus.CHANGED}


@pytest.mark.parametrize("script", ["train", "finetune", "eval"])
@pytest.mark.parametrize("text", [PRETRAIN, FINETUNE, EVAL, MCLI])
def test_scripts_name_the_migration_in_one_line(tmp_path: Path, script: str, text: str) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(text)
    with pytest.raises(UserError) as error:
        checked(RECIPES[script], theirs)
    (line,) = error.value.problems
    assert f"python scripts/migrate.py {theirs}" in line
