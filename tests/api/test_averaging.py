"""`scripts/average.py` and `lf.average` beside a mean by hand; what takes the result; refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import llmfoundry as lf
from llmfoundry.api.averaging import average_checkpoints
from llmfoundry.api.conversion import convert
from llmfoundry.checkpoint import streamed
from llmfoundry.cli.commands.evaluate import evaluate
from llmfoundry.cli.commands.train import train
from llmfoundry.errors import UserError
from llmfoundry.recipe.after_training import AverageRecipe, ConvertRecipe, EvalRecipe
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from tests.tiny import finetune_recipe, run, write_recipe
from tests.train.here import rows, tensors, train_here

Part = tuple[dict[str, torch.Tensor], float]
BITS = "metrics/eval/bits_per_byte"
EXPERTS = (
    "model.ffn_config={ffn_type: dmoe, mlp_type: glu, ffn_act_fn: silu, ffn_hidden_size: 16,"
    " moe_num_experts: 4, moe_top_k: 2, moe_balancing: bias}"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with runs/a, saved after steps 2, 4 and 6, and the seed's runs/b."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("averaging")
        write_recipe(folder)
        patch.chdir(folder)
        brief = ("max_duration=6ba", "save_interval=2ba", "ema.decay=0.5", "eval.weights=ema")
        train_here("a", *brief)
        train_here("b", *brief, "seed=3", "save_interval=0ba")
        yield folder


def average(*words: str) -> None:
    average_checkpoints(checked(AverageRecipe, None, list(words)))


def saved(run_name: str, step: int, file: Path, kind: str = "model") -> dict[str, torch.Tensor]:
    checkpoint = Path(f"runs/{run_name}/checkpoints/ba{step:07d}")
    return tensors(checkpoint, file / "tensors.pt")[kind]


def check_average(output: str, parts: list[Part], file: Path) -> None:
    """Compare a result with sums in double precision."""
    found = saved(output, 6, file)
    assert found.keys() == parts[0][0].keys()
    for name, value in found.items():
        expected = sum(part[name].double() * share for part, share in parts)
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-7)


def test_the_mean_of_the_last_checkpoints(place: Path, tmp_path: Path) -> None:
    average("checkpoints=runs/a", "last=2", "output=runs/mean")
    check_average("mean", [(saved("a", step, tmp_path), 1 / 2) for step in (4, 6)], tmp_path)
    state = json.loads(Path("runs/mean/checkpoints/ba0000006/state.json").read_text())
    names = [f"runs/a/checkpoints/ba000000{step}" for step in (4, 6)]
    assert state["averaged"] == dict.fromkeys(names, 0.5)


def test_named_checkpoints_in_proportions_of_averaged_weights(place: Path, tmp_path: Path) -> None:
    lf.average(
        ["runs/a/checkpoints/ba0000002", "runs/b"],
        "runs/mixed",
        proportions=[3, 1],
        weights="ema",
    )
    parts = [(saved("a", 2, tmp_path, "ema"), 0.75), (saved("b", 6, tmp_path, "ema"), 0.25)]
    check_average("mixed", parts, tmp_path)


def test_integers_are_those_of_the_newest_and_other_tensors_are_averaged(
    place: Path, tmp_path: Path
) -> None:
    """The biases of routers are counted in steps."""
    train_here("experts", "max_duration=6ba", "save_interval=3ba", "eval=off", EXPERTS)
    average("checkpoints=runs/experts", "last=2", "output=runs/experts-mean")
    found, newest = saved("experts-mean", 6, tmp_path), saved("experts", 6, tmp_path)
    before = saved("experts", 3, tmp_path)
    counted = {name for name, value in newest.items() if not value.is_floating_point()}
    assert counted and all(torch.equal(found[name], newest[name]) for name in counted)
    for name in newest.keys() - counted:
        expected = (before[name].double() + newest[name].double()) / 2
        torch.testing.assert_close(found[name].double(), expected, rtol=0, atol=1e-7)


def test_eval_convert_load_and_load_path_take_the_result(place: Path, tmp_path: Path) -> None:
    average("checkpoints=runs/a", "last=3", "output=runs/used")
    values = saved("used", 6, tmp_path)
    evaluate(checked(EvalRecipe, None, ["checkpoint=runs/used", "output=scores"]))
    bits = json.loads(Path("scores/results.json").read_text())["metrics"][BITS]
    words = ["checkpoint=runs/used", "to=hf", f"output={tmp_path / 'hf'}"]
    convert(checked(ConvertRecipe, None, [*words, "architecture=llmfoundry"]))
    written = load_file(tmp_path / "hf" / "model.safetensors")
    [embedding] = [value for name, value in written.items() if name.endswith("wte.weight")]
    assert torch.equal(embedding, values["wte.weight"])
    assert torch.equal(lf.load("runs/used").module.wte.weight, values["wte.weight"])
    begin = ("load_path=runs/used", "load_weights_only=true", "eval_first=true")
    begun = train_here("begun", *begin, "max_duration=1ba", "save_interval=0ba")
    assert rows(begun, BITS)[0][BITS] == bits
    assert bits not in [row[BITS] for row in rows(Path("runs/a"), BITS).values()]
    with pytest.raises(UserError, match=r"load_weights_only: .* holds weights alone"):
        train_here("refused", "load_path=runs/used")


def test_an_interrupted_average_continues(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "FILE_BYTES", 1 << 13)
    words = ("checkpoints=runs/a", "last=2")
    average(*words, "output=runs/whole")
    write, written = streamed._write_file, list[str]()

    def stop(file: Path, group: list) -> dict:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(file.name)
        return write(file, group)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(streamed, "_write_file", stop)
        average(*words, "output=runs/continued")
    assert not Path("runs/continued").exists()
    average(*words, "output=runs/continued")
    whole, continued = saved("whole", 6, tmp_path), saved("continued", 6, tmp_path)
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_the_command_line(place: Path) -> None:
    words = ("runs/a", "last=2", "output=runs/printed")
    planned = run("average.py", *words, "--dry-run", cwd=place).stdout
    assert "runs/a/checkpoints/ba0000004, 0.5 of the average" in planned
    assert not Path("runs/printed").exists()
    assert "last: 2" in run("average.py", *words, "--cfg", "job", cwd=place).stdout
    done = run("average.py", *words, cwd=place).stdout
    assert "is runs/printed/checkpoints/ba0000006" in done
    again = run("average.py", *words, cwd=place, status=2)
    assert "runs/printed" in again.stderr and "Traceback" not in again.stderr


def test_what_cannot_be_averaged_is_refused_in_one_line(place: Path) -> None:
    train_here("wide", "model.d_model=64", "max_duration=1ba", "save_interval=0ba", "eval=off")
    adapter = {"name": "lora", "r": 4}
    finetune_recipe(place, model={"pretrained": "runs/a"}, adapter=adapter)
    brief = ["max_duration=2ba", "save_interval=1ba", "run_name=adapted", "eval=off"]
    train(checked(FinetuneRecipe, "finetune.yaml", brief).resolve())
    both = "checkpoints=[runs/a,runs/b]"
    refused = {
        "checkpoints=[runs/a,runs/wide]": r"runs/wide.* has model\.d_model: 64, but .* has 32",
        "checkpoints=runs/adapted last=2": r"is an adapter, .*; train with ema\.decay",
        "checkpoints=runs/a last=5": r"last: 5, but runs/a holds 3 complete checkpoints",
        "checkpoints=runs/a/checkpoints/ba0000002 last=2": r"last: .* is one checkpoint",
        "checkpoints=runs/a": r"checkpoints: write two or more, or one run and last=5",
        f"{both} last=2": r"last: is of one run, and checkpoints has 2",
        f"{both} proportions=[1]": r"proportions: 1 of 2 checkpoints",
        f"{both} proportions=[1,-1]": r"proportions: .*; write numbers of 0 or more, not all 0",
        f"{both} proportions=[0,0]": r"proportions: .*; write numbers of 0 or more, not all 0",
        "checkpoints=[runs/a,runs/a]": r"checkpoints: runs/a is there more than once",
        "checkpoints=[runs/a,./runs/a]": r"checkpoints: .*ba0000006 is there more than once",
        "checkpoints=[runs/a,runs/b] output=runs/a/checkpoints/mean": "lies among the checkpoints",
        "checkpoints=[runs/wide,runs/a] weights=ema": r"holds no averaged weights",
        "checkpoints=[runs/a,runs/gone]": r"checkpoints: nothing at runs/gone",
        f"{both} output=s3://bucket/mean": r"output: .* is an address",
    }
    for words, message in refused.items():
        output = [] if "output=" in words else ["output=runs/none"]
        with pytest.raises(UserError, match=message) as error:
            average(*words.split(), *output)
        assert all("\n" not in line for line in error.value.problems), words
    with pytest.raises(UserError, match=r"output: is required; write output=runs/NAME"):
        average(*both.split())
    assert not Path("runs/none").exists()
