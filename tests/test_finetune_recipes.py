"""Every recipe of yamls/finetune/: sound, counted; of each kind one trains a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from llmfoundry.cli.commands.train import train
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.paths import YAMLS, find_shipped
from tests.tiny import losses, write_recipe

RECIPES = sorted((YAMLS / "finetune").glob("*.yaml"))
QUICK = [path for path in RECIPES if path.stem.startswith("quickstart")]
HUB = [path for path in RECIPES if path not in QUICK]
ALIKE = ("llama-8b-lora", "qwen3-lora", "mpt-7b-32k", "llama-8b-128k", "qwen3-128k")
"""Others train their choices: qLoRA's with 4 bits beside, domain adaptation's with fewer tokens."""
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|end_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GLU = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16}
MPT = {"d_model": 32, "n_layers": 2, "n_heads": 2, "no_bias": True}
FFN = {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}
DBRX = {"d_model": 32, "n_layers": 2, "n_heads": 2, "ffn_config": FFN}
DBRX |= {"attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4}}
OSS = GLU | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "mosaicml/mpt-7b": (transformers.MptConfig, transformers.MptForCausalLM, MPT),
    "databricks/dbrx-instruct": (transformers.DbrxConfig, transformers.DbrxForCausalLM, DBRX),
    "meta-llama/Llama-3.1-8B": (transformers.LlamaConfig, transformers.LlamaForCausalLM, GLU),
    "meta-llama/Llama-3.1-8B-Instruct": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        GLU,
    ),
    "openai/gpt-oss-20b": (transformers.GptOssConfig, transformers.GptOssForCausalLM, OSS),
    "Qwen/Qwen3-8B": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, GLU),
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = {
    "prompt_response": lambda n: {"prompt": f"What is {n}?", "response": f"It is {n}, or {n * n}."},
    "openhermes": lambda n: {
        "conversations": [
            {"from": "human", "value": f"What is {n}?"},
            {"from": "gpt", "value": f"It is {n}, or {n * n}."},
        ]
    },
    "preference": lambda n: {
        "prompt": f"What is {n}?",
        "chosen": [{"role": "assistant", "content": f"It is {n}."}],
        "rejected": [{"role": "assistant", "content": f"It is {n + 1}, I think."}],
    },
}


def tiny_model(name: str, folder: Path) -> Path:
    """A folder as the hub has it: the architecture of `name`, two layers, a byte tokenizer."""
    make_config, make_model, settings = MODELS[name]
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    config = make_config(vocab_size=backend.get_vocab_size(), **settings)
    make_model(config).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    written = {"eos_token": "<|endoftext|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    return folder


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_sound_and_says_how_to_run_it(path: Path) -> None:
    recipe = checked(FinetuneRecipe, path)
    text = path.read_text()
    assert f"python scripts/finetune.py yamls/finetune/{path.name}\n" in text
    assert len(text.splitlines()) <= 26
    if recipe.eval.gauntlet is not None:
        assert find_shipped(recipe.eval.gauntlet, "eval.gauntlet").is_file()


@pytest.mark.parametrize("name", ["chat", "instructions", "preference", "prompt_response"])
def test_rows_of_ones_own_fit_the_recipes(name: str) -> None:
    words = [f"data={name}", "preference=dpo"] if name == "preference" else [f"data={name}"]
    words += [] if name == "instructions" else ["data.paths=[rows.jsonl]"]
    for recipe in ("mpt-7b-sft", "llama-8b-lora"):
        found = checked(FinetuneRecipe, YAMLS / f"finetune/{recipe}.yaml", words).data
        assert (found.format, found.dataset) == ("chat" if name == "instructions" else name, None)


def test_all_recipes_of_the_table_are_there() -> None:
    named = "mpt-7b-sft mpt-7b-domain-adapt dbrx-full dbrx-lora llama-8b-sft llama-8b-lora"
    named += (
        " llama-8b-qlora qwen3-lora gpt-oss-lora llama-8b-dpo mpt-7b-32k llama-8b-128k qwen3-128k"
    )
    assert {path.stem for path in HUB} == set(named.split())


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.slow) if p.stem in ALIKE else p for p in HUB],
    ids=lambda path: path.stem,
)
def test_a_recipe_takes_two_steps_with_a_tiny_model(path: Path, tmp_path: Path) -> None:
    written = checked(FinetuneRecipe, path)
    assert written.model.pretrained is not None
    tiny_model(written.model.pretrained, tmp_path / "model")
    words = ["eval=off", "logger=none", "max_duration=2ba", "global_train_batch_size=2"]
    words += ["parallel.context_parallel_degree=1"]  # more are in tests/distributed
    length = 512 if written.tokenizer.chat_template == "gpt-oss" else 128  # it has a long preamble
    words += [f"max_seq_len={length}", f"save_folder={tmp_path / 'run'}", "log_interval=1ba"]
    words += [f"model.pretrained={tmp_path / 'model'}", f"data.cache_folder={tmp_path / 'cache'}"]
    if written.data.is_supervised:
        row = ROWS[written.data.format]
        rows = "".join(json.dumps(row(n)) + "\n" for n in range(40))
        (tmp_path / "rows.jsonl").write_text(rows)
        words += [f"data.paths=[{tmp_path / 'rows.jsonl'}]"]  # as scripts/finetune.py shows it
    else:
        write_recipe(tmp_path / "text")
        words += ["data=files", f"data.paths=[{tmp_path / 'text' / 'corpus'}]"]
    train(checked(FinetuneRecipe, path, words).resolve())
    found = losses(tmp_path / "run")
    assert sorted(found) == [1, 2]
    if written.preference.name == "dpo":  # the model is its own reference until it has learned
        assert found[1] == pytest.approx(math.log(2), abs=1e-3)
