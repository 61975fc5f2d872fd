"""The console command, and the wheel that carries it: both work outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from llmfoundry.command_text import as_called, mark_console
from tests.tiny import ENV, ROOT, write_recipe

SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))
PARSED = [name for name in SCRIPTS if name != "bench"]  # bench reads its flags by itself


def call(
    *words: object, cwd: Path, status: int = 0, package: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """`llmfoundry WORD…` with `package`'s llmfoundry, in a folder that is a home too."""
    done = subprocess.run(
        [sys.executable, "-m", "llmfoundry", *map(str, words)],
        cwd=cwd,
        env=ENV | {"PYTHONPATH": str(package), "HOME": str(cwd)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def completions(*words: str, cwd: Path) -> list[str]:
    return call("--complete", *words, cwd=cwd).stdout.split()


def test_help_lists_every_script_and_each_explains_itself(tmp_path: Path) -> None:
    listed = {line.split()[0] for line in call("--help", cwd=tmp_path).stdout.splitlines() if line}
    assert {*SCRIPTS, "ls", "cp", "completion"} <= listed
    for name in ("train", "eval", "convert"):
        text = call(name, "--help", cwd=tmp_path).stdout
        assert f"llmfoundry {name} " in text and "python scripts/" not in text


def test_a_command_answers_as_its_script_does(tmp_path: Path) -> None:
    words = ["yamls/quickstart.yaml", "optimizer.lr=1e-3", "--cfg", "job"]
    script = subprocess.run(
        [sys.executable, str(ROOT / "scripts/train.py"), *words],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        check=True,
    )
    assert call("train", *words, cwd=tmp_path).stdout == script.stdout
    assert call("train", "quickstart", *words[1:], cwd=tmp_path).stdout == script.stdout


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for words, line in (
        (["trian"], "unknown command 'trian'; did you mean 'train'? "),
        (["train", "quikstart"], "no recipe at quikstart; did you mean quickstart?"),
        (["train", "../yamls/quickstart"], "no recipe at ../yamls/quickstart; did you mean "),
        (["cp", "quikstart"], "cp: no recipe quikstart; did you mean quickstart?"),
        (["cp"], "cp: write llmfoundry cp NAME [FILE]"),
        (["ls", "modle"], "ls: 'modle' is not a group; did you mean 'model'?"),
        (["completion", "tcsh"], "completion: write one of bash, zsh, fish"),
    ):
        done = call(*words, cwd=tmp_path, status=2)
        assert done.stderr.startswith(line) and done.stderr.count("\n") == 1, done.stderr
    assert not [path for path in tmp_path.iterdir() if path.name != ".cache"]


def test_a_copied_recipe_is_the_same_run_under_another_name(tmp_path: Path) -> None:
    call("cp", "quickstart", "mine/my", cwd=tmp_path)
    copy = tmp_path / "mine" / "my.yaml"
    assert copy.read_bytes() == (ROOT / "yamls" / "quickstart.yaml").read_bytes()
    shipped = call("train", "quickstart", "--cfg", "job", cwd=tmp_path).stdout
    assert call("train", "mine/my.yaml", "--cfg", "job", cwd=tmp_path).stdout == shipped
    copy.write_text(copy.read_text() + "seed: 5\n")
    assert "is there already" in call("cp", "quickstart", copy, cwd=tmp_path, status=2).stderr
    assert copy.read_text().endswith("seed: 5\n")


def test_a_copied_group_is_a_choice_of_the_recipe_beside_it(tmp_path: Path) -> None:
    call("cp", "quickstart-sft", "my.yaml", cwd=tmp_path)
    call("cp", "optimizer/adamw", "optimizer/mine", cwd=tmp_path)
    group = tmp_path / "optimizer" / "mine.yaml"
    group.write_text(f"{group.read_text()}weight_decay: 0.125\n".replace("weight_decay: 0.1\n", ""))
    printed = call("finetune", "my.yaml", "optimizer=mine", "--cfg", "job", cwd=tmp_path).stdout
    assert yaml.safe_load(printed)["optimizer"]["weight_decay"] == 0.125


def test_a_name_that_means_two_recipes_is_refused(tmp_path: Path) -> None:
    call("cp", "quickstart", cwd=tmp_path)
    reported = call("train", "quickstart", "--cfg", "job", cwd=tmp_path, status=2).stderr
    assert "write quickstart.yaml or yamls/quickstart.yaml" in reported


def test_ls_lists_every_recipe_and_a_groups_choices(tmp_path: Path) -> None:
    listed = {line.split()[0] for line in call("ls", cwd=tmp_path).stdout.splitlines() if line}
    recipes = [*(ROOT / "yamls").glob("*.yaml"), *(ROOT / "yamls/finetune").glob("*.yaml")]
    assert {path.stem for path in recipes} <= listed
    lines = call("ls", "optimizer", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines] == sorted(
        path.stem for path in (ROOT / "yamls/optimizer").glob("*.yaml")
    )


def test_completion_knows_commands_recipes_keys_and_choices(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    assert completions("fi", cwd=tmp_path) == ["finetune"]
    assert completions("train", "ti", cwd=tmp_path) == ["tiny.yaml"]
    assert completions("train", "quick", cwd=tmp_path) == [
        "quickstart",
        "quickstart-distill",
        "quickstart-ema",
    ]
    words = ("train", "quickstart")
    assert completions(*words, "optimi", cwd=tmp_path) == ["optimizer.", "optimizer="]
    assert completions(*words, "optimizer=mu", cwd=tmp_path) == ["optimizer=muon"]
    assert completions(*words, "optimizer.l", cwd=tmp_path) == ["optimizer.lr="]
    assert completions(*words, "eval.validation=", cwd=tmp_path) == [
        "eval.validation=false",
        "eval.validation=true",
    ]
    assert completions(*words, "optimizer.name=mu", cwd=tmp_path) == ["optimizer.name=muon"]
    assert completions("eval", "cor", cwd=tmp_path) == ["corpus/"]
    assert completions("eval", "checkpoint=cor", cwd=tmp_path) == ["checkpoint=corpus/"]
    assert completions("cp", "optimizer/m", cwd=tmp_path) == ["optimizer/muon"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSED)
def test_every_script_completes(name: str, tmp_path: Path) -> None:
    assert "--help" in completions(name, "--", cwd=tmp_path)
    assert completions(name, "", cwd=tmp_path)


def test_bash_completes_at_equals_signs(tmp_path: Path) -> None:
    """A real bash asks, as for a Tab: COMP_WORDS are cut at `=`, only the rest is replaced."""
    command = tmp_path / "bin" / "llmfoundry"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m llmfoundry "$@"\n')
    command.chmod(0o755)
    asked = "llmfoundry train quickstart optimizer=mu"
    script = f"""
        eval "$(llmfoundry completion bash)"
        COMP_LINE='{asked}' COMP_POINT={len(asked)}
        _llmfoundry; echo "${{COMPREPLY[@]}}"
        complete -p llmfoundry
    """
    path = f"{command.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=ENV | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["muon", "complete -F _llmfoundry llmfoundry"]
    assert done.stderr == ""


def test_commands_in_texts_are_spelled_as_the_caller_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "python scripts/eval.py a=1; is for scripts/finetune.py; scripts/eval/local_data\n"
        "torchrun --nproc-per-node 8 scripts/train.py yamls/mpt-125m.yaml\n"
        "srun --nodes 4 python scripts/train.py yamls/mpt-125m.yaml"
    )
    assert as_called(text) == text
    mark_console_in(monkeypatch)
    assert as_called(text) == (
        "llmfoundry eval a=1; is for llmfoundry finetune; scripts/eval/local_data\n"
        "torchrun --nproc-per-node 8 -m llmfoundry train yamls/mpt-125m.yaml\n"
        "srun --nodes 4 llmfoundry train yamls/mpt-125m.yaml"
    )


def mark_console_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    mark_console()


@pytest.mark.slow
def test_hints_of_a_run_are_commands_of_the_caller(tmp_path: Path) -> None:
    """Torchrun's processes and a sweep's know it as well."""
    write_recipe(tmp_path)
    words = ["train", "tiny.yaml", "max_duration=1ba", "-m", "seed=1,2"]
    reported = call(*words, cwd=tmp_path).stdout
    assert "llmfoundry eval runs/tiny/seed=1" in reported and "scripts/" not in reported


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from the files that git has and are here."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in names:
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    rows = folder / "source" / "eval" / "local_data" / "rows.jsonl"  # as fetch_eval_data.py does
    rows.parent.mkdir(exist_ok=True)
    rows.write_text("{}\n")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    build = subprocess.run(
        [*pip, "-w", str(folder), str(folder / "source")], capture_output=True, text=True
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_carries_licence_recipes_and_gauntlets(wheel: Path) -> None:
    (facts,) = wheel.glob("*.dist-info")
    metadata = (facts / "METADATA").read_text()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    for name in ("LICENSE", "NOTICE"):
        assert (facts / "licenses" / name).read_bytes() == (ROOT / name).read_bytes()
    assert "llmfoundry = llmfoundry.cli:main" in (facts / "entry_points.txt").read_text()
    shipped = wheel / "llmfoundry" / "shipped"
    for folder in ("yamls", "eval", "scripts"):
        for file in (ROOT / folder).rglob("*.*"):
            name = file.relative_to(ROOT)
            elsewhere = {"local_data", "__pycache__", "gpu_check.py"}
            if file.is_file() and not elsewhere & {*name.parts}:
                assert (shipped / name).read_bytes() == file.read_bytes()
    assert not list(shipped.rglob("local_data")), "rows of benchmarks have licences of their own"


def test_the_wheel_lists_no_command_that_needs_the_repository(wheel: Path, tmp_path: Path) -> None:
    listed = call(cwd=tmp_path, package=wheel).stdout
    assert "train" in listed and "gpu_check" not in listed
    reported = call("gpu_check", cwd=tmp_path, status=2, package=wheel)
    assert "benchmarks" not in reported.stderr and "Traceback" not in reported.stderr
    for script in (wheel / "llmfoundry" / "shipped" / "scripts").glob("*.py"):
        assert script.stem in listed
        call(script.stem, "--help", cwd=tmp_path, package=wheel)


def test_the_wheel_works_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    printed = call("train", "quickstart", "--cfg", "job", cwd=tmp_path, package=wheel).stdout
    assert yaml.safe_load(printed)["eval"]["gauntlet"] == "eval/gauntlets/generated_easy.yaml"
    call("cp", "quickstart", "my.yaml", cwd=tmp_path, package=wheel)
    mine = call("train", "my.yaml", "--cfg", "job", cwd=tmp_path, package=wheel).stdout
    assert mine == printed


@pytest.mark.slow
def test_the_wheel_trains_and_evaluates(wheel: Path, tmp_path: Path) -> None:
    small = ["model.d_model=64", "model.n_layers=1", "model.n_heads=2", "tokenizer.vocab_size=512"]
    words = [*small, "max_duration=1ba", "eval.icl_rows=2", "eval.validation_rows=2"]
    reported = call("train", "quickstart", *words, cwd=tmp_path, package=wheel).stdout
    assert "llmfoundry eval runs/quickstart" in reported
    call("eval", "checkpoint=runs/quickstart", cwd=tmp_path, package=wheel)
    assert list((tmp_path / "runs/quickstart/eval").rglob("results.json"))


def test_fetched_rows_do_not_go_into_the_installation(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "scripts/eval/local_data/world_knowledge").mkdir(parents=True)
    reported = call(
        *("fetch_eval_data", "tasks=[arc_easy]", f"from_foundry={tmp_path}"),
        cwd=tmp_path,
        status=2,
        package=wheel,
    )
    assert " files are in eval/local_data;" in reported.stdout
    assert not (wheel / "llmfoundry/shipped/eval/local_data").exists()


def test_a_copy_of_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert "9. Accepting Warranty or Additional Liability" in text
