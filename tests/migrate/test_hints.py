"""What users of other tools type, and the hint that each gets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmfoundry.migrate.other_tools import OTHERS
from llmfoundry.recipe.checks import VALUES, nearest_option
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.paths import ROOT, YAMLS, group_options, search_folders
from llmfoundry.recipe.schema import Choice, Schema
from llmfoundry.recipe.train import TrainRecipe
from tests.front import Front
from tests.recipe.mutations import SCRIPTS

QUICKSTART = YAMLS / "quickstart.yaml"
SFT = YAMLS / "finetune" / "quickstart-sft.yaml"

# script: what is typed, and the setting, key or words that the hint must name.
TYPED = {
    "train": {
        # Hugging Face's Trainer and TRL
        "max_steps=500": "max_duration=500ba",
        "num_train_epochs=3": "max_duration=3ep",
        "per_device_train_batch_size=4": "device_train_microbatch_size=4",
        "per_device_eval_batch_size=4": "device_eval_batch_size=4",
        "gradient_accumulation_steps=4": "follows from global_train_batch_size",
        "learning_rate=1e-3": "optimizer.lr=0.001",
        "warmup_steps=100": "schedule.t_warmup=100ba",
        "warmup_ratio=0.03": "schedule.t_warmup=0.03dur",
        "lr_scheduler_type=cosine": "schedule=cosine",
        "adam_beta2=0.95": "optimizer.betas=[0.9,0.95]",
        "max_grad_norm=1.0": "gradient_clipping.clipping_threshold=1.0",
        "weight_decay=0.1": "optimizer.weight_decay=0.1",
        "bf16=true": "precision=amp_bf16",
        "torch_compile=true": "compile=true",
        "output_dir=out": "save_folder=out",
        "logging_steps=10": "log_interval=10ba",
        "save_steps=200": "save_interval=200ba",
        "save_total_limit=2": "save_num_checkpoints_to_keep=2",
        "eval_steps=200": "eval_interval=200ba",
        "report_to=wandb": "logger=wandb",
        "gradient_checkpointing=true": "parallel.activation_checkpointing=true",
        "dataloader_num_workers=4": "data.loader_workers=4",
        "dataset_name=wikitext": "data.dataset=wikitext",
        "max_seq_length=1024": "max_seq_len=1024",
        "model_name_or_path=gpt2": "model.pretrained=gpt2 with scripts/finetune.py",
        "peft_config.r=8": "adapter.r=8 with scripts/finetune.py",
        "--max_steps 500": "max_duration=500ba",
        "--learning-rate=1e-3": "optimizer.lr=1e-3",
        "--model mpt-125m": "model=mpt-125m",
        "--seed 3": "seed=3",
        "--do_train": "scripts/train.py trains",
        "--push_to_hub": "scripts/convert.py",
        # axolotl
        "micro_batch_size=2": "device_train_microbatch_size=2",
        "num_epochs=2": "max_duration=2ep",
        "sequence_len=4096": "max_seq_len=4096",
        "val_set_size=0.05": "data.validation_fraction=0.05",
        "base_model=gpt2": "model.pretrained=gpt2 with scripts/finetune.py",
        "load_in_4bit=true": "model.quantize=nf4 with scripts/finetune.py",
        "flash_attention=true": "model.attn_config.attn_impl=auto",
        # litgpt
        "train.global_batch_size=512": "global_train_batch_size=512",
        "train.max_tokens=3e9": "max_duration=3000000000.0tok",
        "out_dir=out/mine": "save_folder=out/mine",
        "--devices 8": "parallel.nproc_per_node=8",
        "--config my.yaml": "write the recipe's path by itself",
        # torchtitan, nanoGPT
        "training.local_batch_size=8": "device_train_microbatch_size=8",
        "training.steps=1000": "max_duration=1000ba",
        "training.seq_len=4096": "max_seq_len=4096",
        "optimizer.learning_rate=3e-4": "optimizer.lr=0.0003",
        "job.dump_folder=out": "save_folder=out",
        "block_size=256": "max_seq_len=256",
        "n_embd=384": "model.d_model=384",
        "n_layer=6": "model.n_layers=6",
        "--recipe quickstart": "write the recipe's path by itself",
        "batch_size=64": "global_train_batch_size=64",
        # LLM Foundry and Composer
        "train_loader.dataset.max_seq_len=2048": "max_seq_len=2048",
        "train_loader.dataset.remote=s3://b": "data.remote=s3://b",
        "fsdp_config.sharding_strategy=FULL_SHARD": "parallel.data_parallel_shard_degree=-1",
        "fsdp_config.mixed_precision=PURE": "numbers are those of precision",
        "model.load_in_8bit=true": "there are no 8-bit weights",
        "scheduler.t_warmup=100ba": "schedule.t_warmup=100ba",
        "model.init_device=meta": "remove it",
        "icl_tasks=tasks.yaml": "eval.gauntlet=eval/gauntlets/v0.3.yaml",
        "loggers.wandb={}": "logger=wandb",
        "n_layers=4": "'model.n_layers'",
        "fsdp_config.activation_checkpointing=false": "parallel.activation_checkpointing=false",
        "fsdp_config.limit_all_gathers=true": "remove it",
        "eval_subset_num_batches=-1": "remove it: -1 is no value here",
        "eval_subset_num_batches=5": "rows, not batches: times device_eval_batch_size",
        "train_loader.dataset.shuffle=false": "data.shuffle=false",
        "eval_loader.dataset.shuffle=false": "data.validation (shards or rows)",
        "eval_loader.dataset.remote=s3://b": "data.validation.remote=s3://b",
        "eval_loader.dataset.local=x": "data.validation.local=x",
        "eval_loader.num_workers=8": "data.validation (shards or rows)",
        "eval_loader.dataset.hf_name=me/x": "data.validation.dataset=me/x",
        "train_loader.dataset.hf_name=me/x": "data.dataset=me/x",
        "variables.max_seq_len=512": "max_seq_len=512, and ${max_seq_len} where",
        "variables.global_seed=3": "seed=3, and ${seed} where ${variables.global_seed} stands",
        "variables.data_root=x": "its value where ${variables.data_root} stands",
        "callbacks.lr_monitor={}": "{} is not true or false; write true",
        "callbacks.hf_checkpointer={save_interval:1ep}": "scripts/convert.py",
        # what is off, unset or a choice
        "torch_compile=false": "compile=false",
        "gradient_checkpointing=false": "parallel.activation_checkpointing=false",
        "max_steps=-1": "remove it: -1 is no value here, and max_duration has its default",
        "eval_strategy=no": "eval=off",
        "eval_strategy=epoch": "eval_interval=500ba",
        "lr_scheduler_type=linear": "schedule=linear",
        "lr_scheduler_type=constant_with_warmup": "schedule=constant",
        "report_to=tensorboard": "logger=tensorboard",
        "report_to=none": "logger=none",
        "adam_beta2=0.999": "optimizer.betas=[0.9,0.999]",
        "min_lr=1e-5": "as a fraction of optimizer.lr",
        "vocab_size_multiple=128": "a multiple of 64 unless written",
        "optim=adamw_8bit": "optimizer=adamw",
        "optim=lion": "optimizer=decoupled_lionw",
        "mixed_precision=no": "precision=fp32",
        "torch_dtype=float32": "precision=fp32",
        "attn_implementation=eager": "attn_impl=torch",
        "use_wandb=false": "logger.wandb=false",
        "lr=1e-3": "'optimizer.lr'",
        "modle=tiny": "'model'",
        "precision=bf16-mixed": "'amp_bf16'",
        # what is not supported
        "parallelism.pipeline_parallel_degree=2": "not supported: pipeline parallelism",
        "parallel.pipeline_parallel_degree=2": "not supported: pipeline parallelism",
        "--pipeline-model-parallel-size 2": "not supported: pipeline parallelism",
        "optimizer=galore_adamw": "not supported: optimizers on low-rank gradients",
        "optimizer=adamw_torch": "'adamw'",
    },
    "finetune": {
        "lora_r=8": "adapter.r=8",
        "model_name_or_path=gpt2": "model.pretrained=gpt2",
        "load_in_4bit=true": "model.quantize=nf4",
        "train_on_inputs=true": "data.supervised.target_prompts=all",
        "dpo_beta=0.1": "preference.beta=0.1",
        "use_peft=true": "adapter=lora",
        "lora_target_modules=[q_proj,v_proj]": "adapter.target_modules=[q_proj,v_proj]",
        "train_on_inputs=false": "data.supervised.target_prompts=none",
        "sample_packing=false": "data.supervised.packing=off",
        "load_in_4bit=false": "remove it: off unless",
        "use_peft=false": "adapter=none",
        "neftune_noise_alpha=5": "not supported: noise on embeddings (NEFTune)",
        "neftune-noise-alpha=5": "not supported: noise on embeddings (NEFTune)",
        "training.neftune_noise_alpha=5": "not supported: noise on embeddings (NEFTune)",
        "trl.reward_model=x": "not supported: reward models",
        "additional_special_tokens=['<a>']": "tokenizer.add_tokens=[TOKEN] adds tokens",
        "tokenizer.special_tokens=['<a>']": "tokenizer.add_tokens=[TOKEN] adds tokens",
        "special_tokens.pad_token=x": "tokenizer.add_tokens=[TOKEN] adds tokens",
        "rope_scaling=yarn": "attn_config.rope_hf_config",
        "overrides_of_model_config.rope_scaling.factor=4": "attn_config.rope_hf_config",
        "ema_decay=0.99": "ema.decay=0.99",
        "ema.beta=0.99": "ema.decay=0.99",
        "use_ema=true": "ema.decay=0.999",
        "swa=true": "scripts/average.py RUN last=5",
        "z_loss_multiplier=1e-5": "loss.z_loss_weight=1e-05",
        "loss.z_loss=1e-5": "loss.z_loss_weight=1e-05",
        "interleave_probs=[0.5,0.5]": "data.streams.NAME.proportion",
        "data.streams.a.weight=2": "data.streams.NAME.proportion",
        "stage=rm": "reward models and PPO are not supported",
        "finetuning_type=full": "adapter=none all parameters",
        "adapter=oft": "not supported: adapters other than LoRA",
        "unsloth=true": "kernels are chosen by device and settings",
        "loraplus_lr_ratio=16": "adapter.lora_plus_ratio=16",
        "teacher_model_name_or_path=gpt2": "scripts/prepare_data.py teacher=MODEL",
        "kd_trainer=true": "loss=distill",
        "kd_alpha=0.9": "loss.kl_weight=0.9",
        "kd_ce_alpha=0.1": "loss.cross_entropy_weight=0.1",
        "kd_temperature=2.0": "loss.temperature=2.0",
        "kd_ratio=0.7": "loss.kl_weight=0.7",
        "loss.name=kd": "write loss=distill",
        "loss.name=gkd": "not supported: on-policy distillation",
        "seq_kd=true": "not supported: on-policy distillation",
        "rl=grpo": "not supported: online reinforcement learning",
        "preference=grpo": "not supported: online reinforcement learning",
        "preference=reward": "not supported: reward models; preference=dpo",
        "trl.reward_funcs=[f]": "not supported: online reinforcement learning",
        "reward_model=x": "not supported: reward models",
        "adapter=ia3": "not supported: adapters other than LoRA",
        "adapter=dora": "write adapter=lora adapter.use_dora=true",
    },
    "eval": {
        "--model gpt2": "models=[hf:gpt2]",
        "--tasks arc_easy": "eval.gauntlet=eval/gauntlets/v0.3.yaml",
        "--limit 100": "eval.icl_rows=100",
        "batch_size=8": "device_eval_batch_size=8",
        "--device cuda": "CUDA_VISIBLE_DEVICES",
    },
    "generate": {
        "max_length=50": "max_new_tokens=50",
        "--checkpoint_dir runs/x": "checkpoint=runs/x",
        "do_sample=false": "temperature=0",
        "do_sample=true": "temperature=1",
    },
    "serve": {"--lora-modules a=b": "not supported: several adapters in one server"},
    "convert": {"output_dir=out": "output=out", "--output_format peft": "to=peft"},
}
SETTING = re.compile(r"write ([\w.]+)=")
CASES = [(script, words, hint) for script, said in TYPED.items() for words, hint in said.items()]
RECIPE = {"train": [QUICKSTART], "finetune": [SFT]}


def test_there_are_at_least_sixty() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize(("script", "words", "hint"), CASES)
def test_what_others_type_gets_the_hint_that_helps(
    front: Front, script: str, words: str, hint: str
) -> None:
    got = front(*RECIPE.get(script, []), *words.split(), schema=SCRIPTS[script])
    assert (got.status, got.out, got.recipe) == (2, "", None)
    (line,) = got.errors
    assert hint in line
    named = SETTING.search(line)
    if named is not None:  # a setting that exists, in this script or the one that is named
        other = re.search(r"with scripts/(\w+)\.py", line)
        schema = Schema.of(SCRIPTS[other[1] if other else script])
        assert schema.find(named[1]) is not None


def test_every_setting_of_the_table_exists_and_is_one_that_a_recipe_may_have() -> None:
    for other in OTHERS:
        assert bool(other.write or other.why or other.take) and other.words
        if not other.write or other.key.startswith("gauntlet."):  # of a gauntlet's own file
            continue
        key = other.key.removesuffix(".*")
        having = [s for s in SCRIPTS if Schema.of(SCRIPTS[s]).find(key) is not None]
        assert having, f"{other.write}: no script has this key"
        assert not other.script or other.script in having


def test_groups_that_the_table_names_have_that_choice() -> None:
    for other in OTHERS:
        schema = Schema.of(SCRIPTS[other.script or "train"])
        groups = group_options(search_folders(None), schema)
        option = other.write.partition("=")[2].strip("<>")
        if other.key in groups and schema.find(other.key) is not None:
            assert option in groups[other.key], other.write


def test_values_of_others_become_choices_that_exist() -> None:
    known = {name for schema in SCRIPTS.values() for name in all_choices(schema)}
    for value, meant in VALUES.items():
        assert {*meant.split()} <= known, value


def all_choices(schema: type) -> set[str]:
    found: set[str] = set()
    for _, key in Schema.of(schema).walk():
        choice = key.rule(Choice)
        found |= {*choice.options} if choice is not None else set()
    return found


def test_only_what_is_really_near_is_guessed() -> None:
    own = list(Schema.of(SCRIPTS["train"]).keys)
    near = {"max_durration": "max_duration", "modle": "model", "sed": "seed", "sede": "seed"}
    near |= {"seq_len": "max_seq_len", "loger": "logger", "eval_intervall": "eval_interval"}
    assert {word: nearest_option(word, own) for word in near} == near
    far = ["max_steps", "batch", "learning_rate", "peft_config", "lr", "x", "", "foo_bar", "size"]
    assert [nearest_option(word, own) for word in far] == [None] * len(far)
    assert nearest_option("--model", ["--help", "--cfg", "-m"]) is None
    assert nearest_option("gpt2", ["dbrx", "gpt2-124m", "llama-1b"]) == "gpt2-124m"
    assert nearest_option("mpt", ["mpt-1b", "mpt-7b"]) is None
    assert nearest_option("none", ["core_v1", "off", "validation"]) == "off"
    assert nearest_option("off", ["mlflow", "none", "wandb"]) == "none"
    assert nearest_option("x" * 10_000, own) is None


def test_a_whole_section_of_anothers_recipe_is_reported_key_by_key(
    front: Front, tmp_path: Path
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("train_loader:\n  dataset:\n    local: x\n    shuffle: true\nsed: 1\n")
    errors = [line.removeprefix(f"{recipe}:") for line in front(recipe).errors]
    assert errors == [
        "3: unknown key 'train_loader.dataset.local'; write data.local=x (with data=mds)",
        "4: unknown key 'train_loader.dataset.shuffle'; write data.shuffle=true",
        "5: unknown key 'sed'; did you mean 'seed'?",
    ]


@pytest.mark.parametrize("script", ["eval", "generate", "chat", "convert", "track"])
def test_a_folder_in_place_of_a_recipe_is_what_the_script_works_on(
    front: Front, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/a=1").mkdir(parents=True)
    key = "run" if script == "track" else "checkpoint"
    more = ["to=hf", "output=y"] if script == "convert" else []
    for folder in ("runs/x", "runs/a=1", "hf:gpt2"):
        got = front(folder, *more, schema=SCRIPTS[script])
        assert got.status == 0, got.errors
        assert getattr(got.recipe, key) == folder
    (line,) = front("runs/x", f"{key}=runs/y", *more, schema=SCRIPTS[script]).errors
    assert line == f"runs/x: is {key}, which is given a second time; remove one of the two"
    (line,) = front("runs/x", "runs/y", schema=SCRIPTS[script]).errors
    assert line.startswith("two words without a key, runs/x and runs/y")


@pytest.mark.parametrize(
    ("script", "words", "line"),
    [
        ("finetune", ["quickstart"], "trains a new model; write `python scripts/train.py"),
        ("train", ["yamls/model/mpt-125m.yaml"], "such as `yamls/quickstart.yaml model=mpt-125m`"),
        ("scaling", ["scaling/quickstart", "sizes=[0]"], "sizes[0]: 0 is too small; write 1"),
        (
            "eval",
            ["yamls/quickstart.yaml"],
            "is the recipe of a training run; write `python scripts/train.py",
        ),
        (
            "generate",
            ["yamls/finetune/quickstart-sft.yaml"],
            "training run; write `python scripts/finetune.py",
        ),
        (
            "track",
            ["yamls/quickstart.yaml"],
            "folder of the run in place of the recipe, such as runs/quickst",
        ),
        (
            "train",
            [f"{ROOT}/README.md"],
            "README.md is no recipe; to train on it, write RECIPE.yaml",
        ),
        ("train", ["quickstart", "datasets=[a]"], "write data.paths=[a] (with data=files"),
        ("train", ["quickstart", "data.path=a"], "write data.paths=[a] (with data=files"),
        ("train", ["quickstart", "flash_attention_2=true"], "model.attn_config.attn_impl=auto"),
    ],
)
def test_a_first_mistake_is_one_line_with_the_way(
    front: Front, script: str, words: list[str], line: str
) -> None:
    got = front(*words, schema=SCRIPTS[script])
    (error,) = got.errors
    assert got.status == 2 and line in error


@pytest.mark.parametrize("off", ["false", "null"])
def test_every_callback_section_can_be_switched_off(off: str) -> None:
    words = [f"callbacks.{name}={off}" for name in ("generate", "early_stopper", "watch")]
    callbacks = checked(TrainRecipe, "quickstart", words).callbacks
    assert not callbacks.generate.is_on and callbacks.early_stopper.metric is None
    assert not callbacks.watch.has_rounds and callbacks.watch.loss_spike == "off"


def test_held_out_rows_are_named_as_rows_to_train_on_are(tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    words = [f"data.paths=[{tmp_path}/mine.jsonl]", "model.pretrained=runs/any"]
    words += [f"data.validation.paths=[{tmp_path}/theirs.jsonl]"]
    data = checked(FinetuneRecipe, "quickstart-sft", words).data
    data.fill()
    assert data.validation is not None and data.validation.name == "files"
    assert data.format == data.validation.format == "prompt_response"


def test_a_reader_that_leaves_ends_nothing_with_a_traceback() -> None:
    for words in ("--help", f"{QUICKSTART} --cfg job", "--nonsense"):
        command = f"{sys.executable} scripts/train.py {words} 2>&1 | true; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, env=os.environ
        )
        assert done.stdout == ("2\n" if words == "--nonsense" else "0\n")
        assert done.stderr == ""


def test_the_version_names_what_decides_a_run(front: Front) -> None:
    lines = front("--version").out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("llmfoundry-recipes", "torch", "transformers", "Python"),
    ]
    assert lines[3].split()[1] == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize("script", ["train", "plan", "launch", "finetune", "scaling"])
def test_a_recipe_of_one_run_and_one_of_many_are_told_apart(front: Front, script: str) -> None:
    takes_many = script == "scaling"
    wrong = QUICKSTART if takes_many else YAMLS / "scaling" / "quickstart.yaml"
    got = front(str(wrong), schema=SCRIPTS[script])
    (line,) = got.errors
    assert got.status == 2 and ("base: " in line if takes_many else "scaling.py" in line)
