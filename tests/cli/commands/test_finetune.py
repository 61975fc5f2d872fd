"""Fine-tuning from end to end: from one of our runs, and from its export, as users start it."""

from __future__ import annotations

from pathlib import Path

from tests.tiny import RECIPE, finetune_recipe, losses, run, write_recipe


def test_a_run_resumes_from_another_and_from_its_export(tmp_path: Path) -> None:
    assert RECIPE["precision"] == "fp32"
    run("train.py", write_recipe(tmp_path), "max_duration=4ba", "run_name=base", cwd=tmp_path)
    run("convert.py", "checkpoint=runs/base", "to=hf", "output=hf", cwd=tmp_path)
    recipe = finetune_recipe(tmp_path, model={"pretrained": "runs/base"}, max_duration="6ba")
    run("finetune.py", recipe, cwd=tmp_path)
    run("finetune.py", recipe, "run_name=hf", "model.pretrained=hf", cwd=tmp_path)
    words = ("load_path=runs/base", "load_weights_only=true", "max_duration=6ba", "run_name=same")
    run("train.py", tmp_path / "tiny.yaml", *words, cwd=tmp_path)
    expected = losses(tmp_path / "runs/same")
    assert losses(tmp_path / "runs/finetune") == expected
    assert losses(tmp_path / "runs/hf") == expected
    # killed runs and longer ones resume; the base is not needed for what has a checkpoint
    (tmp_path / "runs/base").rename(tmp_path / "runs/moved")
    run("finetune.py", recipe, "model.pretrained=runs/moved", "max_duration=8ba", cwd=tmp_path)
    assert len(losses(tmp_path / "runs/finetune")) == 8
    run("generate.py", "checkpoint=runs/finetune", "prompt=line", cwd=tmp_path)


def test_what_cannot_be_begun_with_is_one_line(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    recipe = finetune_recipe(tmp_path, model={"pretrained": "runs/none"})
    (tmp_path / "empty").mkdir()
    for pretrained, said in {
        "runs/none": "model.pretrained: nothing at runs/none",
        "empty": "config.json",
    }.items():
        result = run(
            "finetune.py", recipe, f"model.pretrained={pretrained}", cwd=tmp_path, status=2
        )
        assert said in result.stderr and len(result.stderr.splitlines()) == 1
    words = ("tokenizer.name=pretrained",)
    result = run("train.py", tmp_path / "tiny.yaml", *words, cwd=tmp_path, status=2)
    assert "tokenizer.name: pretrained is for scripts/finetune.py" in result.stderr
    assert not (tmp_path / "runs").exists()
