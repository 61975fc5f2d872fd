"""A grid of tiny runs: planned, run, resumed, refused where it changed; the held-out one's test."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmfoundry.cli.commands import scaling as command
from llmfoundry.cli.commands import scaling_runs
from llmfoundry.cli.commands.plan import costs, measured_speeds
from llmfoundry.cli.commands.scaling import scaling
from llmfoundry.cli.commands.scaling_grid import grid, shape_near
from llmfoundry.cli.commands.scaling_runs import is_done, refuse_changed, run_all
from llmfoundry.cli.commands.train import train
from llmfoundry.cli.dry_run import print_plan
from llmfoundry.errors import RunFailure, UserError
from llmfoundry.files import try_lock
from llmfoundry.launch import record
from llmfoundry.launch import runs as api
from llmfoundry.launch.job import Job
from llmfoundry.launch.states import UNDER_WAY
from llmfoundry.loggers.console import Console
from llmfoundry.models.counts import parameter_count
from llmfoundry.plan.fit import with_guessed_vocabulary
from llmfoundry.plan.layouts import Cluster, own_layout
from llmfoundry.recipe.before_training import PlanRecipe
from llmfoundry.recipe.hardware import Hardware
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.scaling import ScalingRecipe
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.scaling.analysis import FamilyFit, fit_families
from llmfoundry.scaling.law import Law
from llmfoundry.scaling.points import Point
from tests.tiny import ROOT, write_recipe

GRID: dict[str, Any] = {
    "sizes": [16, 32, 48],
    "tokens": [512, 1024, 2048],
    "held_out": {"size": 64, "tokens": 3072},
    "rules": {"aspect_ratio": 16, "head_dim": 16, "batch_tokens": {"exponent": 0}},
    "bootstrap": 20,
}


def write_grid(folder: Path, **changes: Any) -> Path:
    """scaling.yaml in `folder`, over tiny.yaml, whose points are made in this process."""
    if not (folder / "tiny.yaml").exists():
        write_recipe(folder)
    path = folder / "scaling.yaml"
    values = GRID | {"base": str(folder / "tiny.yaml"), "output": str(folder / "out")} | changes
    path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
    return path


class Here:
    """In place of a process: the run itself, at once."""

    def __init__(self, *words: str, status: int = 0, **options: Any) -> None:
        self.returncode = status
        if status == 0:
            train(checked(TrainRecipe, words[2], words[3:]).resolve())

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs, in the order in which they began."""
    names: list[str] = []

    def start(*words: str, **options: Any) -> Here:
        names.append(next(w for w in words if w.startswith("save_folder=")).rpartition("/")[2])
        return Here(*words)

    monkeypatch.setattr(scaling_runs, "start_module", start)
    monkeypatch.setattr(scaling_runs, "_LOOK_S", 0.0)
    return names


def test_grid_is_run_fitted_tested_and_not_run_again(
    tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = checked(ScalingRecipe, write_grid(tmp_path))
    print_plan("scaling", recipe)
    assert "10 of 10 runs" in capsys.readouterr().out and not (tmp_path / "out").exists()
    scaling(recipe)
    assert len(started) == 10 and started[-1] == "size=64,tokens=3072"
    found = json.loads((tmp_path / "out" / "scaling.json").read_text())
    (test,) = found["families"][""]["held_out"]
    assert test["before"] is True and test["measured"] > 0
    assert "size=64,tokens=3072" not in found["families"][""]["residuals"]
    told = json.loads((tmp_path / "out" / "held_out.json").read_text())[""]
    run = tmp_path / "out" / "points" / "size=64,tokens=3072" / "recipe.yaml"
    assert told["written"] < run.stat().st_mtime and told["predicted"] == test["predicted"]
    page = (tmp_path / "out" / "scaling.html").read_text()
    assert f"{test['predicted']:.4f}" in page or f"{test['predicted']:.4g}" in page
    scaling(recipe)
    assert len(started) == 10
    again = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert again == found
    (tmp_path / "out" / "held_out.json").unlink()  # what is told now was seen
    scaling(recipe)
    again = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert again["families"][""]["held_out"][0]["before"] is False
    table = tmp_path / "out" / "points.csv"
    law = tmp_path / "law"
    scaling(checked(ScalingRecipe, None, [f"fit={table}", f"output={law}", "bootstrap=20"]))
    alone = json.loads((law / "scaling.json").read_text())["families"][""]
    assert alone["law"] == pytest.approx(found["families"][""]["law"])


def test_changed_point_is_refused_by_its_key(tmp_path: Path, started: list[str]) -> None:
    path = write_grid(tmp_path, held_out=None)
    run_all(checked(ScalingRecipe, path), grid(checked(ScalingRecipe, path))[:1], Console())
    changed = checked(ScalingRecipe, path, ["overrides=['optimizer.weight_decay=0.1']"])
    with pytest.raises(UserError, match=r"optimizer.weight_decay: was 0.0 when size=16,tokens=512"):
        scaling(changed)
    kept = checked(ScalingRecipe, path, ["overrides=['log_interval=2ba']"])  # not what is learnt
    refuse_changed(grid(kept))
    assert len(started) == 1


def test_failed_run_is_named_and_the_others_are_run(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*words: str, stdout: io.BufferedWriter, **options: Any) -> Here:
        started.append(words[0])
        stdout.write(b"out of luck\n")
        return Here(status=1) if len(started) == 1 else Here(*words)

    monkeypatch.setattr(scaling_runs, "start_module", start)
    recipe = checked(ScalingRecipe, write_grid(tmp_path, held_out=None))
    made = grid(recipe)[:2]
    with pytest.raises(RunFailure, match=r"exit status 1: out of luck; see ") as caught:
        run_all(recipe, made, Console())
    assert str(caught.value).count("exit status") == 1
    assert [is_done(one.folder) for one in made] == [False, True]


def test_launched_point_outlives_the_command_and_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(run: scaling_runs.LaunchedRun) -> None:
        raise KeyboardInterrupt

    slow = [f"plugins=[{ROOT / 'tests/resilience/slow_steps.py'}]", "callbacks.plugins.slow={}"]
    path = write_grid(tmp_path, held_out=None, overrides=slow)
    recipe = checked(ScalingRecipe, path, ["launch=local", "launch.env.OMP_NUM_THREADS=1"])
    one, environment = grid(recipe)[1], dict(os.environ)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(scaling_runs.LaunchedRun, "ended", interrupt)
        run_all(recipe, [one], Console())
    assert "launched runs that go on: 1 (python scripts/runs.py list" in capsys.readouterr().out
    assert os.environ == environment  # nothing by which the run would end with this process
    first = record.read(one.folder)
    assert first is not None and first.target == "local" and first.recipe.endswith("tiny.yaml")
    (seen,) = api.list_runs(tmp_path)
    assert seen.name == "out/points/size=16,tokens=1024" and seen.state in UNDER_WAY
    monkeypatch.setattr(scaling_runs, "_ASK_S", 0.1)
    run_all(checked(ScalingRecipe, path), [one], Console())  # also without launch
    assert record.read(one.folder) == first and is_done(one.folder)
    refuse_changed([one])


def test_launched_point_that_died_is_a_failure_and_is_launched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = checked(ScalingRecipe, write_grid(tmp_path, held_out=None), ["launch=local"])
    one, jobs = grid(recipe)[0], list[Job]()
    record.write(one.folder, record.LaunchRecord("x", "local", f"{2**22 - 1}@1"))
    monkeypatch.setattr(scaling_runs, "submit", jobs.append)
    why = r"failed: it was killed, or its machine .*; see python scripts/runs.py logs .*; nothing"
    with pytest.raises(RunFailure, match=why):
        run_all(recipe, [one], Console())
    (job,) = jobs
    assert job.folder == one.folder and f"save_folder: {one.folder}" in job.text


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    recipe = checked(ScalingRecipe, write_grid(tmp_path))
    (tmp_path / "out").mkdir()
    lock = try_lock(tmp_path / "out/scaling.lock", mode=0o644)
    assert lock is not None
    with lock, pytest.raises(UserError, match="another process is at work there"):
        scaling(recipe)


def test_rules_decide_the_points(tmp_path: Path) -> None:
    rules = {"aspect_ratio": 16, "head_dim": 16, "lr": {"by": "width", "exponent": -1}}
    rules["batch_tokens"] = {"by": "tokens", "exponent": 1}
    made = grid(checked(ScalingRecipe, write_grid(tmp_path, rules=rules)))
    by_name = {one.point.name: one for one in made}
    small, large = (by_name[f"size={size},tokens=1024"] for size in (16, 32))
    assert small.point.lr == pytest.approx(3e-3) and large.point.lr == pytest.approx(1.5e-3)
    assert [by_name[f"size=16,tokens={n}"].point.batch_tokens for n in (512, 1024, 2048)] == [
        256,
        512,
        1024,
    ]
    one = checked(TrainRecipe, tmp_path / "tiny.yaml", large.words)
    assert (one.model.d_model, one.model.n_layers, one.model.n_heads) == (32, 2, 2)
    assert large.point.flops > 6 * 1024 * large.point.non_embedding
    assert large.point.tokens % large.point.batch_tokens == 0


def test_equal_compute_gives_larger_models_fewer_tokens(tmp_path: Path) -> None:
    path = write_grid(tmp_path, tokens=None, held_out=None, compute=[3e9, 6e9])
    points = [one.point for one in grid(checked(ScalingRecipe, path))]
    for point in points:
        assert point.flops == pytest.approx(point.target, rel=0.2)


def test_mixture_and_dense_have_the_same_active_blocks() -> None:
    few = ["sizes=[64]", "tokens=[0.4e6]"]
    recipe = checked(ScalingRecipe, YAMLS / "scaling" / "dense-vs-moe.yaml", few)
    points = [one.point for one in grid(recipe)]
    dense, moe = (next(p for p in points if p.family == family) for family in ("dense", "moe"))
    assert moe.active == pytest.approx(dense.active, rel=0.05) and moe.total > 2 * dense.total


def test_shape_near_a_size_is_the_nearest_there_is(tmp_path: Path) -> None:
    recipe = checked(ScalingRecipe, write_grid(tmp_path))
    recipe.fill()
    found = shape_near(recipe, "", 1e6)
    assert found.counts["total"] == parameter_count(found.recipe.model)
    assert 0.8 < found.counts["active"] / 1e6 < 1.25 and found.width % 16 == 0


def law_of(recipe: ScalingRecipe) -> tuple[FamilyFit, list[Point]]:
    """Of a grid's points with made-up losses, each trained for a second."""
    law = Law(1.5, 50.0, 200.0, 0.3, 0.35)
    points = [one.point for one in grid(recipe) if not one.point.held_out]
    losses = [float(law.loss(point.parameters, point.tokens)) for point in points]
    done = [replace(p, loss=loss, seconds=1.0) for p, loss in zip(points, losses, strict=True)]
    return fit_families(done, rounds=20)[0], done


def test_hours_of_a_budget_are_those_that_the_plan_of_its_model_takes(tmp_path: Path) -> None:
    words = ["hardware=2xh100", "price=3", "budget=0.0005h", "extrapolate=true"]
    recipe = checked(ScalingRecipe, write_grid(tmp_path, flops_per_second=1e9), words)
    fit, points = law_of(recipe)
    found = command._budget(recipe, fit, points)
    plan = checked(PlanRecipe, recipe.base, [*found["words"], "run_name=x", "hardware=2xh100"])
    hardware = Hardware.parse("2xh100", "hardware")
    filled = with_guessed_vocabulary(plan.resolve())
    setting = Cluster(2, measured_speeds(hardware, filled, None)[0], hardware.memory)
    seconds = costs(own_layout(filled, setting), plan, setting).seconds
    assert seconds == pytest.approx(found["seconds"])
    assert 2 * found["seconds"] / 3600 == pytest.approx(0.0005, rel=0.05)
    assert found["cost"] == "0.9s on 2xh100, 5.01e-04 GPU-hours, 0.00 at 3 an hour"


def test_budget_without_hardware_takes_as_long_as_the_run_of_the_nearest_size(
    tmp_path: Path,
) -> None:
    words = ["price=3600", "budget=1e10"]
    recipe = checked(ScalingRecipe, write_grid(tmp_path), words)
    fit, points = law_of(recipe)
    found = command._budget(recipe, fit, points)
    near = min(points, key=lambda point: abs(point.parameters - found["parameters"]))
    assert found["seconds"] == pytest.approx(1e10 / near.flops, rel=0.05)
    assert found["cost"] == "5m18s, 318.00 at 3600 an hour"


@pytest.mark.slow
def test_plan_is_told_where_no_layout_fits(tmp_path: Path) -> None:
    rules = {"aspect_ratio": 128, "head_dim": 128}
    path = write_grid(tmp_path, sizes=[8192, 16384, 32768], held_out=None, rules=rules)
    recipe = checked(ScalingRecipe, path, ["hardware=1xt4"])
    with pytest.raises(UserError, match="hardware: no layout of 1xt4 holds size=8192,tokens=512"):
        command.print_plan(recipe, grid(recipe), Console())
    with pytest.raises(UserError, match=r"sizes: its runs have 2 sizes, . numbers of tokens"):
        command.print_plan(recipe, grid(recipe)[:6], Console())


@pytest.mark.parametrize(
    "word, why",
    [
        ("sizes=[16,20]", "sizes: 20 is no multiple of rules.head_dim 16; write 16"),
        ("overrides=['max_duration=1ep']", "overrides: max_duration is decided by tokens"),
        ("tokens=[]", "tokens: write tokens="),
        ("budget=lots", "budget: 'lots'; write FLOPs"),
        ("fit=x.csv", "base: write base=RECIPE"),
        ("budget=1000h", "budget: hours are of a base's GPUs; write hardware=8xh100"),
        ("hardware=8x80gb", "hardware: 8x80gb has no speed to plan with; write 8xh100"),
        ("families={a: ['data.validation_fraction=0.3'], b: []}", "losses do not compare"),
        ("families={../x: []}", "cannot name a folder"),
        ("tokens=[512,513]", "two points are the same run"),
        ("launch=ssh", "launch.hosts: is required with target: ssh"),
        ("launch=skypilot", "launch.target: skypilot is only printed; write slurm"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, word: str, why: str) -> None:
    with pytest.raises(UserError, match=why.replace("[", r"\[")):
        grid(checked(ScalingRecipe, write_grid(tmp_path), [word]))
