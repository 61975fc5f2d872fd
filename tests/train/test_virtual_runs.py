"""Runs that train virtual tokens: what they save, how they go on, and what is made of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmfoundry.builders.start import load_checkpoint
from llmfoundry.commands.convert import ALONE
from llmfoundry.commands.generate import generate
from llmfoundry.errors import UserError
from llmfoundry.recipe.front.load import checked
from llmfoundry.recipe.scripts.after_training import GenerateRecipe
from tests.tiny import finetune_recipe, losses, run, write_recipe
from tests.train.here import dtypes, train_here
from tests.train.test_adapter_runs import finetune_here, to
from tests.train.test_finetune_class import write_class

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
TOKENS = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(4))
ADAPTER = "checkpoints/ba0000004/adapter"
CLASS = ("model.pretrained=neox", "model.name=hf_causal_lm")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with runs/base, and neox, a class with its tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("virtual")
        write_recipe(folder)
        patch.chdir(folder)
        base = train_here("base", "max_duration=2ba", "eval=off")
        write_class(
            folder / "neox", next((base / "checkpoints").iterdir()) / "tokenizer", "gpt_neox"
        )
        finetune_recipe(
            folder,
            max_duration="4ba",
            save_interval="2ba",
            model={"pretrained": "runs/base"},
            adapter={"name": "prompt_tuning"},
            optimizer={"lr": 0.05},
            eval={"validation": False},
        )
        yield folder


@pytest.mark.parametrize(
    "name", ["prompt", "class-prefix", pytest.param("class-prompt", marks=pytest.mark.slow)]
)
def test_a_run_is_saved_resumed_and_loaded_by_peft(place: Path, name: str) -> None:
    kind = "prefix_tuning" if name.endswith("prefix") else "prompt_tuning"
    words = (f"adapter.name={kind}", *(CLASS if name.startswith("class") else ()))
    whole = finetune_here(name, *words)
    model = [n for n in dtypes(whole / "checkpoints/ba0000004") if n.startswith("model.")]
    assert model == ["model.prompt_embeddings"]
    shutil.copytree(whole, f"runs/{name}-2")
    shutil.rmtree(f"runs/{name}-2/checkpoints/ba0000004")
    assert losses(finetune_here(f"{name}-2", *words, "autoresume=true")) == losses(whole)
    one, other = (load_file(f"runs/{n}/{ADAPTER}/adapter_model.safetensors")["prompt_embeddings"]
                  for n in (name, f"{name}-2"))  # fmt: skip
    assert torch.equal(one, other) and len(one) == 20
    base = Path("neox") if name.startswith("class") else to("hf", "plain", "runs/base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    tuned = peft.PeftModel.from_pretrained(theirs, to("peft", f"{name}-alone", str(whole)))
    found = load_checkpoint(str(whole), ALONE, note=print).root.model
    with torch.no_grad():
        expected = tuned(TOKENS).logits[:, -20:]
        torch.testing.assert_close(found.head(found(TOKENS)), expected, rtol=0, atol=1e-4)
        with tuned.disable_adapter():
            assert (tuned(TOKENS).logits - expected).abs().max() > 1e-3
    with pytest.raises(UserError, match=r"cannot be merged into weights; write to=peft"):
        to("hf", "merged", str(whole))
    on = finetune_here(f"{name}-on", *words, f"adapter.pretrained={whole / ADAPTER}",
                       "max_duration=1ba", "optimizer.lr=1e-12")  # fmt: skip
    again = load_file(on / "checkpoints/ba0000001/adapter/adapter_model.safetensors")
    torch.testing.assert_close(again["prompt_embeddings"], one)


def test_they_begin_as_embeddings_of_tokens(place: Path) -> None:
    still = ("max_duration=1ba", "optimizer.lr=1e-12", "adapter.num_virtual_tokens=5")
    text = ("adapter.prompt_tuning_init=text", "adapter.prompt_tuning_init_text=abc")
    table = load_checkpoint("runs/base", ALONE, note=print).root.model.wte.weight
    found = {}
    for name, words in {"text": text, "vocab": ()}.items():
        run_folder = finetune_here(f"begin-{name}", *still, *words)
        file = run_folder / "checkpoints/ba0000001/adapter/adapter_model.safetensors"
        found[name] = load_file(file)["prompt_embeddings"]
    torch.testing.assert_close(found["text"], table[[97, 98, 99, 97, 98]].detach())
    assert all((table - row).abs().sum(1).min() < 1e-6 for row in found["vocab"])


def test_what_cannot_be_is_one_line(place: Path) -> None:
    learned = ("model.attn_config.rope=false", "max_duration=1ba", "eval=off")
    train_here("learned", *learned, "model.learned_pos_emb=true")
    Path("lora").mkdir()
    Path("lora/adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    for words, said in {
        ("adapter.name=prefix_tuning",): "the decoder has lora and prompt_tuning; write one of",
        ("model.pretrained=runs/learned",): "max_seq_len: 64, but .* positions for 64 tokens, of",
        ("adapter.r=4",): "adapter.r: has no effect with name: prompt_tuning; remove it",
        ("adapter.pretrained=lora",): "peft_type LORA, .* write adapter.name: lora",
        ("adapter.prompt_tuning_init=text",): "text needs prompt_tuning_init_text; write it",
    }.items():
        with pytest.raises(UserError, match=said):
            finetune_here("wrong", *words)
    finetune_here("mine", "max_duration=1ba")
    with pytest.raises(UserError, match=r"virtual tokens, which cannot be merged .*write runs/bas"):
        finetune_here("wrong", "model.pretrained=runs/mine")
    assert not Path("runs/wrong").exists()


@pytest.mark.parametrize("name", ["prompt_tuning", "prefix_tuning"])
def test_what_is_written_is_the_same_with_a_cache_and_without(
    place: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = CLASS if name == "prefix_tuning" else ()
    run_folder = finetune_here(f"asked-{name}", "max_duration=1ba", f"adapter.name={name}", *more)
    said = []
    for cache in ("true", "false"):
        words = [f"checkpoint={run_folder}", "prompt=line", "max_new_tokens=6", f"kv_cache={cache}"]
        capsys.readouterr()
        generate(checked(GenerateRecipe, None, [*words, "temperature=0"]))
        said.append(capsys.readouterr().out)
    assert len(said[0]) > len("line\n") and said[0] == said[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompt_tuning", "prefix_tuning"])
def test_two_processes_train_them_as_one_does(place: Path, name: str) -> None:
    words = ("finetune.yaml", f"adapter.name={name}", "global_train_batch_size=8")
    words += CLASS if name == "prefix_tuning" else ()
    run("finetune.py", *words, f"run_name={name}-1", cwd=place)
    expected = losses(Path(f"runs/{name}-1"))
    checkpointed = "parallel.activation_checkpointing=true"
    for kind, more in {
        "ddp": ["parallel.data_parallel_replicate_degree=2"],
        "fsdp": ["parallel.data_parallel_shard_degree=2", checkpointed],
    }.items():
        run("finetune.py", *words, f"run_name={name}-{kind}", *more, cwd=place, processes=2)
        assert losses(Path(f"runs/{name}-{kind}")) == pytest.approx(expected, abs=1e-5)
