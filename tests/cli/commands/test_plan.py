"""scripts/plan.py: what it prints, computes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.cli.commands.plan import measured_speeds
from llmfoundry.cli.recipe_types import planned
from llmfoundry.cli.script import run
from llmfoundry.errors import UserError
from llmfoundry.plan import fit
from llmfoundry.plan.seconds import speeds
from llmfoundry.recipe.hardware import GPUS, Hardware
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import ROOT

SMALL = ["mpt-125m", "hardware=8xh100", "max_seq_len=1024", "global_train_batch_size=64"]


def plan(*words: str) -> None:
    """Run scripts/plan.py in this process."""
    run(planned, "llmfoundry.cli.commands.plan:plan", [*SMALL, *words])


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    plan("format=json", *words)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_days_hours_and_money_follow_from_the_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    own = as_json(capsys, "tokens=1e9", "price=2.5", "layouts=0")["own"]
    steps = 15259  # of 65,536 tokens, the last begun one too
    assert own["run_seconds"] == pytest.approx(steps * own["seconds"])
    assert own["gpu_hours"] == pytest.approx(own["run_seconds"] * 8 / 3600)
    assert own["money"] == pytest.approx(2.5 * own["gpu_hours"])
    assert own["tokens_per_second_per_gpu"] == pytest.approx(65_536 / own["seconds"] / 8)
    assert sum(own["parts"].values()) == pytest.approx(own["seconds"])
    assert own["checkpoint_bytes"] == 12 * 125_311_488 - 12 * 1024 * 768  # 1,024 positions fewer


def test_price_and_energy_are_those_of_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a price the table's, of the hours and the power limit of its entry."""
    words = ["tokens=1e9", "layouts=0"]
    own = as_json(capsys, *words)["own"]
    assert own["money"] == pytest.approx(GPUS["H100"].price * own["gpu_hours"])
    assert own["kwh"] == pytest.approx(0.7 * own["gpu_hours"])
    plan(*words)
    out = " ".join(capsys.readouterr().out.split())
    hours = own["gpu_hours"]
    price = GPUS["H100"].price
    assert f", {price * hours:,.0f} US dollars at a typical {price:g} an hour" in out
    assert f"at most {0.7 * hours:,.0f} kWh at 700 W a GPU" in out
    unknown = as_json(capsys, *words, "hardware=8xl4")["own"]
    assert unknown["money"] is None and unknown["kwh"] == pytest.approx(
        0.072 * unknown["gpu_hours"]
    )


def test_failures_cost_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tokens=1e9", "layouts=0", "save_interval=100ba"]
    without = as_json(capsys, *words)["own"]
    own = as_json(capsys, *words, "failures=80")["own"]  # every 10 hours
    lost = 600 + 50 * own["seconds"]
    assert own["gpu_hours"] / without["gpu_hours"] == pytest.approx(1 + lost / 36_000)


def test_a_ranking_is_printed_with_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    plan("layouts=3")
    out = capsys.readouterr().out
    flat = " ".join(out.split())
    for part in ("parameters", "MFU", "GPU-hours", "fastest", "why", "looked at", "memory about"):
        assert part in flat
    assert len(re.findall(r"^\d  ", out, re.M)) == 3


def test_the_page_has_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Word by word, with numbers within 3 %: the page shows the start and the head of a table."""
    page = (ROOT / "docs" / "many-gpus.md").read_text()
    run(planned, "llmfoundry.cli.commands.plan:plan", ["mpt-1b", "hardware=8xh100"])
    printed = " ".join(capsys.readouterr().out.split())
    number = re.compile(r"[0-9.,]*[0-9]")
    for part in page.split("```text\n")[1].split("```")[0].split("\n\n"):
        shown = " ".join(part.split())
        texts = map(re.escape, number.split(shown))
        found = re.search(f"({number.pattern})".join(texts), printed)
        assert found, shown
        pairs = zip(number.findall(shown), found.groups(), strict=True)
        for before, now in pairs:
            value = float(before.replace(",", ""))
            assert float(now.replace(",", "")) == pytest.approx(value, rel=0.03), shown


@pytest.mark.parametrize(
    "words",
    [
        ["parallel.context_parallel_degree=2", "parallel.context_parallel_method=ulysses"],
        [
            "parallel.data_parallel_shard_degree=4",
            "parallel.reduce_scatter_each_microbatch=false",
            "parallel.activation_checkpointing=whole",
            "parallel.activation_checkpointing_target={block: first-2}",
            "parallel.activation_compression=auto",
        ],
    ],
)
def test_what_is_printed_to_write_has_the_same_prediction(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for best in as_json(capsys, *words, "layouts=3")["best"]:
        own = as_json(capsys, *words, *best["overrides"], "layouts=0")["own"]
        assert own["overrides"] == [] and own["layout"] == best["layout"]
        assert (own["seconds"], own["bytes"]) == (best["seconds"], best["bytes"])


def test_json_has_what_the_text_has(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "layouts=0", "parallel.data_parallel_shard_degree=8")
    own = found["own"]
    assert sum(own["bytes_by_kind"].values()) == pytest.approx(own["bytes"], abs=8)
    assert {"weights", "gradients"} == {one["what"] for one in own["sends"]}
    assert found["refused"] == [] and found["active_parameters"] == found["parameters"]


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("hardware=8xh101", "hardware: '8xh101' is no hardware"),
        ("hardware=128x80gb", "names no GPU, whose speed a plan needs"),
        ("price=0", "price: 0"),
        ("tokens=0", "tokens: 0"),
        ("layouts=-1", "layouts: -1"),
        ("format=xml", "format: 'xml' is not a choice"),
        ("gpu_check=no-such.json", "gpu_check: nothing at no-such.json"),
    ],
)
def test_a_bad_value_is_one_line(word: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        plan(word)
    lines = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2 and len(lines) == 1 and why in lines[0]


def test_what_fits_nowhere_says_by_how_much(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "largest_fitting_recipe", lambda *args: None)  # it reads all recipes
    words = ["mpt-70b", "hardware=1xl4", "global_train_batch_size=8"]
    with pytest.raises(SystemExit) as refused:
        run(planned, "llmfoundry.cli.commands.plan:plan", words)
    said = capsys.readouterr().err
    assert refused.value.code == 2 and "needs about" in said and "too many" in said


def report(path: Path, gpu: str, tflops: float = 650.0) -> None:
    """A gpu-check.json with the two measurements that matter."""
    rows = [
        {"product": "8192 x 8192 x 8192", "TFLOP/s": tflops},
        {"product": "2048 x 2048 x 2048", "TFLOP/s": 300.0},
        {"product": "copy in memory", "GB/s": 2900.0},
    ]
    content = {"facts": {"gpu": gpu}, "steps": [{"items": [{"rows": rows}]}]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_a_gpu_check_calibrates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, hardware = TrainRecipe(), Hardware.parse("8xh100", "hardware")
    sheet = speeds(hardware.gpu, recipe)
    assert measured_speeds(hardware, recipe, None)[0] == sheet
    report(tmp_path / "gpu-check" / "gpu-check.json", "NVIDIA H100 80GB HBM3")
    found, source = measured_speeds(hardware, recipe, None)
    assert found.memory == 2900e9 and "650 TFLOP/s" in source
    assert found.products / sheet.products == pytest.approx(650 / (0.803 * 989.5))
    report(tmp_path / "other.json", "NVIDIA A100-SXM4-80GB")
    with pytest.raises(UserError, match=r"gpu_check: .* measured NVIDIA A100-SXM4-80GB, but"):
        measured_speeds(hardware, recipe, "other.json")
    (tmp_path / "broken.json").write_text('{"steps": 3}')
    with pytest.raises(UserError, match="is no report of make gpu-check"):
        measured_speeds(hardware, recipe, "broken.json")


def test_a_dry_run_for_a_known_gpu_has_its_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("like: l40s\nnode: 2\n")
    words = [*SMALL[:1], *SMALL[2:]]
    target = "llmfoundry.cli.commands.train:train"
    run(TrainRecipe, target, [*words, "--dry-run=8xh100"])
    timed = capsys.readouterr().out
    assert "tokens/s a GPU" in timed and "8 x h100 of 80 GB, which are not here" in timed
    spanning = ["parallel.data_parallel_shard_degree=1", "parallel.tensor_parallel_degree=4"]
    run(TrainRecipe, target, [*words, *spanning, "--dry-run=4xmy.yaml"])
    assert "at 32 GB/s inside, 12.5 GB/s" in " ".join(capsys.readouterr().out.split())
    run(TrainRecipe, target, [*words, "--dry-run=8x80gb"])
    assert "tokens/s a GPU" not in capsys.readouterr().out


def test_fp8_is_refused_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run(planned, "llmfoundry.cli.commands.plan:plan",
            ["mpt-125m", "hardware=8xa100", "precision=amp_fp8"])  # fmt: skip
    assert refused.value.code == 2 and "a100 has no fp8" in capsys.readouterr().err


def test_fine_tuning_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(YAMLS / "finetune" / "mpt-7b-sft.yaml"), "hardware=8xh100"]
    with pytest.raises(SystemExit) as refused:
        run(planned, "llmfoundry.cli.commands.plan:plan", words)
    assert refused.value.code == 2 and "fine-tuning is not timed" in capsys.readouterr().err


def inference(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run `plan.py eval` and return its output in one line."""
    run(planned, "llmfoundry.cli.commands.plan:plan", ["eval", *words])
    return " ".join(capsys.readouterr().out.split())


def test_a_plan_of_inference_counts_the_bytes_of_weights_and_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """mpt-70b has 80 blocks of 64 heads of 128 values, and two bytes for each weight."""
    text = inference(capsys, "mpt-70b", "hardware=8x80gb")
    cache = 2 * 2 * 80 * 64 * 128
    assert f"{cache // 1024:,} KiB a token" in text
    weights = 2 * 64_862e6 / 2**30  # of 64,862M parameters
    total = re.search(r"a process of ([0-9.]+) GiB", text)
    assert total and float(total[1]) == pytest.approx(weights, rel=0.01)
    assert "data_parallel_shard 8" in text and "sequences of 2,048 tokens at a time" in text


def test_a_plan_of_inference_names_a_layout_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        inference(capsys, "mpt-70b", "hardware=1x80gb")
    line = capsys.readouterr().err
    assert "4 such processes suffice: parallel.data_parallel_shard_degree=4" in line
    with pytest.raises(SystemExit):
        inference(capsys)
    assert capsys.readouterr().err.startswith("eval: of which recipe?")
