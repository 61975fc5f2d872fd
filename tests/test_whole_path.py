"""Train, kill, resume, evaluate, export, reload: by the scripts, as a user would."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.tiny import ENV, command, losses, run, write_recipe

LONG = "max_duration=40ba"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.yaml and one uninterrupted run, runs/whole."""
    folder = tmp_path_factory.mktemp("whole")
    write_recipe(folder)
    run("train.py", "tiny.yaml", "run_name=whole", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def long(whole: Path) -> dict[int, float]:
    """Losses of an uninterrupted run with enough steps that another can be hit in its midst."""
    run("train.py", "tiny.yaml", "run_name=long", LONG, cwd=whole)
    return losses(whole / "runs" / "long")


def test_a_run_leaves_what_it_promises(whole: Path) -> None:
    folder = whole / "runs" / "whole"
    names = {path.name for path in folder.iterdir()}
    assert {"recipe.yaml", "metrics.jsonl", "report.html", "tokenizer", "checkpoints"} <= names
    assert sorted(losses(folder)) == list(range(1, 13))
    assert [f.name for f in sorted((folder / "checkpoints").iterdir())] == [
        "ba0000004",
        "ba0000008",
        "ba0000012",
    ]


def test_the_same_command_again_finds_the_run_complete(whole: Path) -> None:
    before = (whole / "runs" / "whole" / "metrics.jsonl").read_text()
    done = run("train.py", "tiny.yaml", "run_name=whole", cwd=whole)
    assert "complete" in done.stdout
    assert (whole / "runs" / "whole" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    "background",
    [False, pytest.param(True, marks=pytest.mark.slow)],  # checkpoint/test_kills.py has dozens
)
def test_after_kill_9_the_losses_are_bit_for_bit_those_of_the_whole_run(
    whole: Path, long: dict[int, float], background: bool
) -> None:
    name = f"killed-{background}"
    arguments = ("train.py", "tiny.yaml", f"run_name={name}", f"save_async={background}", LONG)
    folder = whole / "runs" / name
    process = subprocess.Popen(command(*arguments), cwd=whole, env=ENV, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "ba0000004" / "COMMIT").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "checkpoints" / "ba0000040" / "COMMIT").exists(), "killed too late"
    done = run(*arguments, cwd=whole)
    assert "resuming from" in done.stdout
    assert losses(folder) == long


@pytest.mark.slow
def test_a_line_shows_the_mean_loss_since_the_last_also_across_a_resume(whole: Path) -> None:
    every = losses(whole / "runs" / "whole")
    arguments = ("train.py", "tiny.yaml", "run_name=sparse", "log_interval=5ba")
    run(*arguments, cwd=whole)
    sparse = losses(whole / "runs" / "sparse")
    spans = {5: range(1, 6), 10: range(6, 11), 12: range(11, 13)}
    means = {last: sum(every[n] for n in span) / len(span) for last, span in spans.items()}
    assert sparse == pytest.approx(means, rel=1e-6)
    for name in ("ba0000008", "ba0000012"):
        shutil.rmtree(whole / "runs" / "sparse" / "checkpoints" / name)
    run(*arguments, cwd=whole)  # resumes from batch 4, in the middle of a span
    assert losses(whole / "runs" / "sparse") == sparse


def damage(run_folder: Path, kind: str) -> str:
    """Spoil the newest checkpoint; what the user should be shown of it."""
    newest = run_folder / "checkpoints" / "ba0000012"
    weights = next(newest.glob("*.distcp"))
    if kind == "torn":
        (newest / "COMMIT").unlink()
        return "it has no COMMIT"
    if kind == "short":
        weights.write_bytes(weights.read_bytes()[:-1])
        return f"its file {weights.name} has"
    if kind == "flipped":
        content = bytearray(weights.read_bytes())
        content[len(content) // 2] ^= 1
        weights.write_bytes(bytes(content))
        return f"its file {weights.name} is damaged"
    weights.unlink()
    return f"its file {weights.name} is missing"


SLOW = pytest.mark.slow  # thirty kinds of damage are in tests/train/test_resuming.py


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=SLOW) for k in ("short", "missing", "torn")] + ["flipped"]
)
def test_a_damaged_newest_checkpoint_is_refused_by_name_and_the_one_before_used(
    whole: Path, kind: str
) -> None:
    name = f"damaged-{kind}"
    folder = whole / "runs" / name
    shutil.copytree(whole / "runs" / "whole", folder)
    expected = damage(folder, kind)
    done = run("train.py", "tiny.yaml", f"run_name={name}", cwd=whole)
    refused = next(line for line in done.stdout.splitlines() if "is refused" in line)
    assert "ba0000012" in refused and expected in refused
    assert "resuming from" in done.stdout and "ba0000008" in done.stdout
    assert losses(folder) == losses(whole / "runs" / "whole")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_the_same_command_resumes(
    whole: Path, long: dict[int, float], number: signal.Signals
) -> None:
    name = f"stopped-{number.name}"
    arguments = ("train.py", "tiny.yaml", f"run_name={name}", "save_interval=0ba", LONG)
    folder = whole / "runs" / name
    process = subprocess.Popen(
        command(*arguments), cwd=whole, env=ENV, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "/40" in line:  # the first step's line
            process.send_signal(number)
            break
    rest = process.stdout.read()
    assert process.wait() == 75, rest
    assert f"stopped by {number.name}" in rest
    assert 0 < len(losses(folder)) < 40, "the signal came too late"
    run(*arguments, cwd=whole)
    assert losses(folder) == long


@pytest.mark.slow
def test_a_folder_of_another_run_is_not_overwritten(whole: Path) -> None:
    done = run("train.py", "tiny.yaml", "run_name=whole", "autoresume=false", cwd=whole, status=2)
    assert done.stderr.startswith("save_folder: runs/whole holds checkpoints")
    assert len(done.stderr.splitlines()) == 1
    done = run("train.py", "tiny.yaml", "run_name=whole", "model.d_model=64", cwd=whole, status=2)
    assert "model.d_model: 64, but checkpoint" in done.stderr


@pytest.mark.slow
def test_a_refused_recipe_with_save_overwrite_deletes_nothing(whole: Path) -> None:
    shutil.copytree(whole / "runs" / "whole", whole / "runs" / "precious")
    arguments = ("run_name=precious", "save_overwrite=true")
    run("train.py", "tiny.yaml", *arguments, "eval.gauntlet=no.yaml", cwd=whole, status=2)
    names = ["ba0000004", "ba0000008", "ba0000012"]
    folder = whole / "runs" / "precious" / "checkpoints"
    assert sorted(f.name for f in folder.iterdir()) == names
    run("train.py", "tiny.yaml", *arguments, "max_duration=2ba", cwd=whole)
    assert sorted(f.name for f in folder.iterdir()) == ["ba0000002"]


@pytest.mark.slow
def test_weights_alone_start_another_run(whole: Path) -> None:
    arguments = ("load_path=runs/whole", "load_weights_only=true", "run_name=tuned")
    run("train.py", "tiny.yaml", *arguments, "max_duration=2ba", cwd=whole)
    tuned, first = losses(whole / "runs" / "tuned"), losses(whole / "runs" / "whole")
    assert sorted(tuned) == [1, 2]
    assert tuned[1] < first[1] - 0.1  # the same rows, seen by trained weights


@pytest.mark.slow
def test_only_the_newest_checkpoints_are_kept(whole: Path) -> None:
    arguments = ("run_name=kept", "save_interval=2ba", "save_num_checkpoints_to_keep=2")
    run("train.py", "tiny.yaml", *arguments, cwd=whole)
    kept = sorted(f.name for f in (whole / "runs" / "kept" / "checkpoints").iterdir())
    assert kept == ["ba0000010", "ba0000012"]


def test_a_loss_that_is_not_finite_stops_before_the_optimizer_sees_it(whole: Path) -> None:
    arguments = ("run_name=nan", "optimizer.lr=1e30", "schedule.t_warmup=0ba")
    done = run("train.py", "tiny.yaml", *arguments, cwd=whole, status=2)
    assert done.stderr.startswith("optimizer.lr: the loss or its gradient was not finite in step")
    assert len(done.stderr.splitlines()) == 1


def test_evaluation_of_a_checkpoint_repeats_the_runs_own(whole: Path) -> None:
    run("eval.py", "checkpoint=runs/whole", cwd=whole)
    results = json.loads((whole / "runs/whole/eval/ba0000012/results.json").read_text())
    rows = (whole / "runs/whole/metrics.jsonl").read_text().splitlines()
    inside = next(r for r in map(json.loads, rows) if "metrics/eval/bits_per_byte" in r)
    for name in ("metrics/eval/bits_per_byte", "metrics/eval/LanguageCrossEntropy"):
        assert results["metrics"][name] == pytest.approx(inside[name], rel=1e-6)


def test_export_reloads_with_the_same_logits_and_generates_the_same_text(whole: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llmfoundry.builders.checkpoint import load_checkpoint
    from llmfoundry.distributed.process_group import World

    run("convert.py", "checkpoint=runs/whole", "to=hf", "output=hf", cwd=whole)
    theirs = AutoModelForCausalLM.from_pretrained(whole / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(whole / "hf")
    world = World(0, 1, 0, torch.device("cpu"))
    loaded = load_checkpoint(str(whole / "runs" / "whole"), world, note=print)
    ids = [loaded.tokenizer.eos_id, *loaded.tokenizer.encode("line 3 of document")]
    assert tokenizer("line 3 of document", add_special_tokens=False).input_ids == ids[1:]
    tokens = torch.tensor([ids])
    with torch.no_grad():
        ours = loaded.root(tokens, None, lambda model, hidden: model.head(hidden))
        expected = theirs(tokens).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    greedy = theirs.generate(tokens, max_new_tokens=20, do_sample=False)[0, tokens.shape[1] :]
    done = run(
        "generate.py",
        "checkpoint=runs/whole",
        "prompt=line 3 of document",
        "max_new_tokens=20",
        "temperature=0",
        cwd=whole,
    )
    assert tokenizer.decode(greedy, skip_special_tokens=True).strip() in done.stdout


def test_import_from_hugging_face_gives_back_the_weights(whole: Path) -> None:
    if not (whole / "hf").exists():
        run("convert.py", "checkpoint=runs/whole", "to=hf", "output=hf", cwd=whole)
    run("convert.py", "from=hf", "checkpoint=hf", "output=runs/imported", cwd=whole)
    run("convert.py", "checkpoint=runs/imported", "to=hf", "output=hf2", cwd=whole)
    arguments = ("load_path=runs/imported", "run_name=onward")
    done = run("train.py", "tiny.yaml", *arguments, cwd=whole, status=2)
    assert "write load_weights_only=true" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    first, second = (whole / name / "model.safetensors" for name in ("hf", "hf2"))
    from safetensors.torch import load_file

    before, after = load_file(first), load_file(second)
    assert before.keys() == after.keys()
    assert all((before[key] == after[key]).all() for key in before)


def test_a_recipe_that_cannot_fit_says_what_does(whole: Path) -> None:
    big = ("model.d_model=65536", "model.n_layers=96", "model.n_heads=512")
    done = run("train.py", "tiny.yaml", "run_name=big", *big, cwd=whole, status=2)
    assert "needs about" in done.stderr and "GiB are free" in done.stderr
    assert re.search(r"the largest shipped recipe that fits is \w+-\w+", done.stderr)
    assert not (whole / "runs" / "big").exists() or not os.listdir(whole / "runs" / "big")
