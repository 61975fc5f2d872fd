"""--dry-run: what a command would do or refuse, with nothing written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from llmfoundry.builders.trainer import check_precision
from llmfoundry.cli import dry_run as plans
from llmfoundry.cli.script import run
from llmfoundry.errors import UserError
from llmfoundry.loggers.console import format_gib, short_count
from llmfoundry.models.counts import parameter_count
from llmfoundry.plan import fit
from llmfoundry.recipe.after_training import ConvertRecipe, EvalRecipe, GenerateRecipe, TrackRecipe
from llmfoundry.recipe.before_training import FetchRecipe
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.paths import ROOT, YAMLS
from llmfoundry.recipe.train import TrainRecipe

QUICKSTART = YAMLS / "quickstart.yaml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)


def dry(schema: type, target: str, *words: object) -> int:
    try:
        run(schema, f"llmfoundry.cli.commands.{target}", [*map(str, words), "--dry-run"])
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def test_a_training_run_is_planned_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("max_duration=100ba", "model.vocab_size=2048")
    assert dry(TrainRecipe, "train:train", QUICKSTART, *words) == 0
    out = capsys.readouterr().out
    recipe = checked(TrainRecipe, QUICKSTART, words)
    recipe = recipe.resolve()
    assert f"about {short_count(parameter_count(recipe.model))} parameters" in out
    assert "100 steps of 2 rows of 512 tokens (1,024)" in out and "runs/quickstart" in out
    assert [*tmp_path.iterdir()] == []


def test_what_processes_send_to_each_other_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["model.vocab_size=2048", "parallel=ddp", "global_train_batch_size=4"]
    assert dry(TrainRecipe, "train:train", QUICKSTART, *words) == 0
    assert "sends" not in capsys.readouterr().out
    assert dry(TrainRecipe, "train:train", QUICKSTART, *words, "parallel.nproc_per_node=2") == 0
    recipe = checked(TrainRecipe, QUICKSTART, words)
    recipe = recipe.resolve()
    gradients = format_gib(4 * parameter_count(recipe.model) / 2**30)  # half of them, to and fro
    said = f"sends about {gradients} a process and step: gradients {gradients}"
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_degree_that_spans_nodes_is_reported_with_its_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 16, "LOCAL_WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    tiny, key = YAMLS / "dbrx-tiny.yaml", "parallel.expert_parallel_degree"
    words = ["model.vocab_size=2048", "parallel=fsdp", "global_train_batch_size=16"]
    assert dry(TrainRecipe, "train:train", tiny, *words, f"{key}=16") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{key}: 16 spans nodes of 8 processes: " in out and "at most 8 stays inside" in out
    assert re.search(r"sends about \S+ \S+ a process and step, \S+ \S+ of it to other nodes: ", out)
    for degree in (-1, 8):
        assert dry(TrainRecipe, "train:train", tiny, *words, f"{key}={degree}") == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "spans" not in out and "of it to other nodes" in out  # gradients and weights


@pytest.mark.parametrize("rank", [0, 9])
def test_under_slurm_the_plan_is_of_the_steps_tasks_and_printed_once(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plans.os, "environ", dict(os.environ))  # which a plan adds to
    for name, value in {
        "STEP_NUM_TASKS": 16,
        "PROCID": rank,
        "LOCALID": rank % 8,
        "STEP_NODELIST": "n[1-2]",
        "JOB_ID": 11,
        "STEP_TASKS_PER_NODE": "8(x2)",
        "NODEID": rank // 8,
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    words = ["model.vocab_size=2048", "parallel=fsdp", "global_train_batch_size=16"]
    degree = "parallel.expert_parallel_degree=16"
    assert dry(TrainRecipe, "train:train", YAMLS / "dbrx-tiny.yaml", *words, degree) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ("16 x" in out and "16 spans nodes of 8 processes" in out) == (rank == 0)
    assert bool(out) == (rank == 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU serves amp_bf16")
@pytest.mark.parametrize(("has_bf16", "served"), [(True, "amp_bf16"), (False, "fp32")])
def test_the_plan_names_the_precision_that_is_computed_in(
    has_bf16: bool, served: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llmfoundry.ops.devices.HAS_BF16", has_bf16)
    assert dry(TrainRecipe, "train:train", QUICKSTART) == 0
    assert f"x CPU, {served}, microbatch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["global_train_batch_size=1000000", "max_seq_len=100000"], "GiB are free"),
        (["parallel.nproc_per_node=1000"], "parallel.nproc_per_node: 1000 processes"),
        (["parallel.nproc_per_node=3"], "global_train_batch_size: 2 rows cannot be shared"),
        (["data=files", "data.paths=[nowhere]"], "nowhere"),
        (["eval.gauntlet=nowhere.yaml"], "eval.gauntlet: nothing at nowhere.yaml"),
        (["parallel.data_parallel_shard_degree=2"], "does not fit 1 process;"),
        (["model.n_heads=5"], "does not divide"),
    ],
)
def test_what_a_run_refuses_its_dry_run_refuses(
    words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available() and "nproc" in words[0]:
        pytest.skip("says how many GPUs there are")
    if "max_seq_len=100000" in words:
        words = [*words, "device_train_microbatch_size=1000000"]
    assert dry(TrainRecipe, "train:train", QUICKSTART, *words) == 2
    got = capsys.readouterr()
    assert why in got.err and got.out == ""
    assert [*tmp_path.iterdir()] == []


def test_a_tokenizer_that_would_learn_from_chats_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(row))
    words = ["data=files", f"data.paths=[{tmp_path}/chats.jsonl]", "eval=off"]
    assert dry(TrainRecipe, "train:train", QUICKSTART, *words) == 2
    assert "tokenizer.name: train learns from documents" in capsys.readouterr().err


def test_models_that_are_not_there_are_refused_and_hub_ids_are_not_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry(GenerateRecipe, "generate:generate", "runs/x") == 2
    assert dry(EvalRecipe, "evaluate:evaluate", "runs/x") == 2
    assert dry(ConvertRecipe, "convert:convert", "runs/x", "to=hf", "output=y") == 2
    assert dry(TrackRecipe, "track:track", "runs/x") == 2
    assert capsys.readouterr().err.count("nothing at runs/x") == 4
    assert dry(FetchRecipe, "fetch_eval_data:fetch_eval_data", "from_hub=true") == 0
    assert "the Hugging Face hub" in capsys.readouterr().out
    recipe = YAMLS / "finetune" / "llama-8b-lora.yaml"
    assert dry(FinetuneRecipe, "train:train", recipe) == 0
    assert "of the hub, fetched when the run begins" in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == []


def test_a_sweep_is_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert dry(TrainRecipe, "train:train", QUICKSTART, "-m", "seed=1,2") == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "runs/quickstart/seed=1",
        "runs/quickstart/seed=2",
    ]
    assert [*tmp_path.iterdir()] == []


def test_every_script_has_a_plan() -> None:
    found = set()
    for script in (ROOT / "scripts").glob("*.py"):
        found |= {*re.findall(r'"llmfoundry\.[\w.]+:(\w+)"', script.read_text())}
    assert found == set(plans.PLANS)


@pytest.mark.parametrize(("name", "hardware"), [("mpt-7b", "8x80gb"), ("dbrx", "128x80GB")])
def test_a_run_is_planned_for_gpus_that_are_not_here(
    name: str,
    hardware: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit, "largest_fitting_recipe", lambda *_: None)  # reads all recipes
    with pytest.raises(SystemExit) as refused:  # 8 of 8 GB hold neither
        run(TrainRecipe, "llmfoundry.cli.commands.train:train", [name, "--dry-run=8x8gb"])
    assert refused.value.code == 2 and "needs about" in capsys.readouterr().err
    run(TrainRecipe, "llmfoundry.cli.commands.train:train", [name, f"--dry-run={hardware}"])
    out = " ".join(capsys.readouterr().out.split())
    assert f"{hardware.split('x')[0]} x GPU of 80 GB, which are not here" in out
    total, parts = re.findall(r"memory about (.*?) a process: (.*?); 78.7 GiB are free", out)[0]
    sizes = [in_mib(text) for text in re.findall(r"[\d.]+ [GM]iB", parts)]
    assert len(sizes) >= 4 and sum(sizes) == pytest.approx(in_mib(total), rel=0.01)


def in_mib(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"MiB": 1, "GiB": 1024}[unit]


def test_other_hardware_is_for_training_and_inference(capsys: pytest.CaptureFixture[str]) -> None:
    for words, why in {
        ("quickstart", "--dry-run=64"): "'64' is no hardware; write how many GPUs",
        ("quickstart", "--dry-run=0x80gb"): "is no hardware",
    }.items():
        with pytest.raises(SystemExit):
            run(TrainRecipe, "llmfoundry.cli.commands.train:train", words)
        assert why in capsys.readouterr().err
    with pytest.raises(SystemExit):
        words = ["from=hf", "checkpoint=x", "output=y", "--dry-run=8x80gb"]
        run(ConvertRecipe, "llmfoundry.api.conversion:convert", words)
    assert "only training, evaluation and generation are estimated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("precision=amp_fp8", "precision: amp_fp8, but a100 has no fp8; write amp_bf16"),
        ("parallel.activation_compression=fp8", "fp8, but a100 has no fp8; write int8"),
    ],
)
def test_other_hardware_refuses_what_a_run_on_it_refuses(
    word: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quickstart", word, "--dry-run=2xa100"]
    with pytest.raises(SystemExit) as refused:
        run(TrainRecipe, "llmfoundry.cli.commands.train:train", words)
    assert refused.value.code == 2 and why in capsys.readouterr().err
    run(TrainRecipe, "llmfoundry.cli.commands.train:train", [*words[:2], "--dry-run=2xl40s"])


def test_fp8_with_an_adapter_is_refused_on_any_hardware() -> None:
    path = YAMLS / "finetune" / "llama-8b-lora.yaml"
    recipe = checked(FinetuneRecipe, path, ["precision=amp_fp8"]).resolve()
    with pytest.raises(UserError, match="no effect on adapters"):
        check_precision(recipe)


@pytest.mark.parametrize(
    "path",
    [p for p in sorted(YAMLS.glob("*.yaml")) if p.stem != "pretrain"],  # what others begin with
    ids=lambda path: path.stem,
)
def test_a_recipe_that_asks_for_more_of_c4_than_there_is_says_how_many_passes(path: Path) -> None:
    """In its header, and in the plan of any command that trains by it."""
    recipe = checked(TrainRecipe, path, [])
    recipe = recipe.resolve()
    header = " ".join(re.findall(r"^# (\S.*)$", path.read_text(), re.MULTILINE))
    batches = int(recipe.max_duration.removesuffix("ba"))
    tokens = batches * recipe.global_train_batch_size * recipe.max_seq_len
    said = plans.passes_over(recipe.data, tokens)
    if recipe.data.dataset != "allenai/c4" or tokens <= 156e9:
        assert said == "" and "passes over" not in header
        return
    times = float(said.split()[1])
    assert times == pytest.approx(tokens / 156e9, abs=0.05 if tokens < 1.5e12 else 0.5)
    assert f"about {said.split()[1]} passes over C4's 156e9)" in header
    assert plans._length(recipe).endswith(f"in all, {said}")
    assert plans.passes_over(recipe.data, 156 * 10**9) == ""
    recipe.data.subset = "realnewslike"
    assert plans.passes_over(recipe.data, tokens) == "", "of another data set nothing is known"
