"""Where a run begins: after damage of any kind, and with a recipe that has changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmfoundry.checkpoint.storage import Storage
from llmfoundry.checkpoint.verify import find_checkpoint
from llmfoundry.errors import UserError
from llmfoundry.events import add_event, read_events
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import losses, write_recipe
from tests.train.here import train_here

BRIEF = ("max_duration=4ba", "save_interval=2ba", "eval=off")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with runs/whole, saved after batches 2 and 4."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("resuming")
        write_recipe(folder)
        patch.chdir(folder)
        train_here("whole", *BRIEF)
        yield folder


def copy(name: str) -> Path:
    run = Path("runs") / name
    shutil.copytree("runs/whole", run)
    return run


def edit(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """A change of a COMMIT's content."""

    def spoil(commit: Path) -> None:
        content = json.loads(commit.read_text())
        change(content)
        commit.write_text(json.dumps(content))

    return spoil


def rewrite(content: bytes) -> Callable[[Path], object]:
    return lambda commit: commit.write_bytes(content)


def as_folder(commit: Path) -> None:
    commit.unlink()
    commit.mkdir()


def as_pipe(commit: Path) -> None:
    commit.unlink()
    os.mkfifo(commit)


def as_link_to_itself(commit: Path) -> None:
    commit.unlink()
    commit.symlink_to(commit.name)


def huge(commit: Path) -> None:
    with commit.open("r+b") as file:
        file.truncate(1 << 40)  # sparse


ENTRY = {"bytes": 1, "crc32": 1}
COMMITS: dict[str, Callable[[Path], object]] = {
    "gone": lambda commit: commit.unlink(),
    "empty": rewrite(b""),
    "cut": lambda commit: commit.write_bytes(commit.read_bytes()[:-20]),
    "not UTF-8": rewrite(b'{"files": {"\xff": 1}}'),
    "a list": rewrite(b"[]"),
    "deep": rewrite(b"[" * 100_000),
    "a number": rewrite(b"9" * 5000),
    "no files": edit(lambda content: content.pop("files")),
    "files as a list": edit(lambda content: content.update(files=["state.json"])),
    "nothing listed": edit(lambda content: content.update(files={})),
    "no state listed": edit(lambda content: content["files"].pop("state.json")),
    "no recipe listed": edit(lambda content: content["files"].pop("recipe.yaml")),
    "no tensors listed": edit(lambda content: content["files"].pop(".metadata")),
    "no checksum": edit(lambda content: content["files"]["state.json"].pop("crc32")),
    "entry as text": edit(lambda content: content["files"].update({"state.json": "x"})),
    "size as text": edit(lambda content: content["files"]["state.json"].update(bytes="1")),
    "size as truth": edit(lambda content: content["files"]["state.json"].update(bytes=True)),
    "negative": edit(lambda content: content["files"]["state.json"].update(bytes=-1)),
    "infinite": edit(lambda content: content["files"]["state.json"].update(bytes=float("inf"))),
    "outside": edit(lambda content: content["files"].update({"../../../../x": ENTRY})),
    "absolute": edit(lambda content: content["files"].update({"/dev/zero": ENTRY})),
    "NUL": edit(lambda content: content["files"].update({"a\0b": ENTRY})),
    "surrogate": edit(lambda content: content["files"].update({"\ud800": ENTRY})),
    "two lines": edit(lambda content: content["files"].update({"a\nb": ENTRY})),
    "long name": edit(lambda content: content["files"].update({"n" * 5000: ENTRY})),
    "itself a folder": edit(lambda content: content["files"].update({".": ENTRY, "": ENTRY})),
    "a folder": as_folder,
    "a pipe": as_pipe,
    "a link to itself": as_link_to_itself,
    "huge": huge,
}


@pytest.mark.parametrize("kind", COMMITS)
def test_a_damaged_commit_falls_back_to_the_checkpoint_before(
    place: Path, tmp_path: Path, kind: str
) -> None:
    shutil.copytree("runs/whole/checkpoints", tmp_path / "checkpoints")
    (tmp_path / "x").write_text("x")
    COMMITS[kind](tmp_path / "checkpoints/ba0000004/COMMIT")
    said, run = list[str](), Storage(tmp_path)
    assert find_checkpoint(run, note=said.append) == run.checkpoint("ba0000002")
    [line] = said
    assert "ba0000004 is refused: " in line and "\n" not in line and len(line) < 6000


def test_a_file_in_place_of_a_checkpoint_is_passed_over(place: Path, tmp_path: Path) -> None:
    shutil.copytree("runs/whole/checkpoints", tmp_path / "checkpoints")
    (tmp_path / "checkpoints/ba0000009").write_text("")
    run = Storage(tmp_path)
    assert find_checkpoint(run, note=print) == run.checkpoint("ba0000004")


@pytest.mark.parametrize("kind", ["torn", "short", "commits"])
def test_a_run_without_a_whole_checkpoint_is_refused_and_keeps_its_record(
    place: Path, kind: str
) -> None:
    run = copy(f"refused-{kind}")
    for folder in (run / "checkpoints").iterdir():
        if kind == "torn":
            (folder / "COMMIT").unlink()
        elif kind == "commits":
            (folder / "COMMIT").write_text("[]")
        else:
            (folder / "state.json").write_text("{}")
    before = {f: f.read_bytes() for f in run.rglob("*") if f.is_file()}
    wanted = "save_folder: no checkpoint in .* can be used .*write save_overwrite=true .* run_name"
    with pytest.raises(UserError, match=wanted) as caught:
        train_here(run.name, *BRIEF)
    assert len(str(caught.value).splitlines()) == 1
    assert {f: f.read_bytes() for f in run.rglob("*") if f.is_file()} == before
    if kind == "torn":
        add_event(run, "loss_spike", "of the run before")
        train_here(run.name, *BRIEF, "save_overwrite=true")
        assert not list(read_events(run))
        assert losses(run) == losses(Path("runs/whole"))


def test_a_run_killed_in_its_first_save_begins_anew(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There never was anything to resume from, so nobody is asked."""
    run = copy("first")
    shutil.rmtree(run / "checkpoints/ba0000004")
    (run / "checkpoints/ba0000002/COMMIT").unlink()
    train_here(run.name, *BRIEF)
    assert "its first save was interrupted" in capsys.readouterr().out
    assert losses(run) == losses(Path("runs/whole"))


def test_a_shorter_run_than_what_is_done_is_refused(place: Path) -> None:
    run = copy("shorter")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"^max_duration: 3ba is 3 batches, but .* has done 4 alre"):
        train_here("shorter", *BRIEF, "max_duration=3ba")
    assert (run / "metrics.jsonl").read_bytes() == before
    train_here("shorter", *BRIEF)  # as long as what is done: complete already


@pytest.mark.parametrize("length", ["0ba", "0tok", "0ep", "0.0ep", "0e5sp"])
def test_a_run_of_no_length_is_refused(place: Path, length: str) -> None:
    with pytest.raises(UserError, match=f"^max_duration: '{length}' is zero"):
        checked(TrainRecipe, "tiny.yaml", ["run_name=none", f"max_duration={length}"])
    inverse = ["schedule.name=inv_sqrt_with_warmup", f"schedule.t_scale={length}"]
    with pytest.raises(UserError, match=rf"^schedule\.t_scale: '{length}' is zero"):
        checked(TrainRecipe, "tiny.yaml", ["run_name=none", *inverse])


CHANGES = {
    "max_duration=5ba": "max_duration: 4ba until ba0000004, 5ba from here on",
    "precision=amp_bf16": "precision: fp32 until ba0000004, amp_bf16 from here on",
    "optimizer.lr=1e-3": "optimizer.lr: 0.003 until ba0000004, 0.001 from here on",
    "optimizer.betas=[0.8,0.9]": "optimizer.betas: [0.9, 0.95] until ba0000004, [0.8, 0.9] from",
    "optimizer.eps=1e-6": "optimizer.eps: 1e-08 until ba0000004, 1e-06 from here on",
    "optimizer.weight_decay=0.1": "optimizer.weight_decay: 0.0 until ba0000004, 0.1 from here on",
    "gradient_clipping.clipping_threshold=2": "gradient_clipping.clipping_threshold: 1.0 until",
    "schedule.t_warmup=3ba": "schedule.t_warmup: 0.05dur until ba0000004, 3ba from here on",
    "schedule.alpha_f=0.5": "schedule.alpha_f: 0.1 until ba0000004, 0.5 from here on",
}
OF_NO_EFFECT = (
    "save_interval=1ba",
    "save_num_checkpoints_to_keep=7",
    "eval_interval=3ba",
    "log_interval=2ba",
    "device_train_microbatch_size=2",
    "logger.in_memory=true",
    "callbacks.speed_window=3",
    "data.prefetch=1gb",
    "data.storage_options={anon: true}",
    "parallel.dist_timeout=60",
)


def test_what_a_resume_changes_is_reported_line_by_line(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmfoundry.ops.devices.HAS_BF16", True)  # or precision would be fp32
    run = copy("changed")
    capsys.readouterr()
    train_here(run.name, *BRIEF, *OF_NO_EFFECT, *CHANGES)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if "until ba" in line]
    assert len(lines) == len(CHANGES)
    for wanted in CHANGES.values():
        assert sum(line.startswith(wanted) for line in lines) == 1, wanted


def test_a_resume_with_the_same_recipe_reports_no_change(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy("same")
    shutil.rmtree(run / "checkpoints/ba0000004")
    capsys.readouterr()
    train_here(run.name, *BRIEF, *OF_NO_EFFECT)
    said = capsys.readouterr().out
    assert "resuming from" in said and "until ba" not in said


def test_an_environment_variable_that_has_changed_is_reported(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe in the checkpoint may name the variable; its value then is in state.json."""
    arguments = ("from-outside", *BRIEF, "optimizer.lr=${oc.env:RATE}")
    monkeypatch.setenv("RATE", "0.002")
    run = train_here(*arguments)
    shutil.rmtree(run / "checkpoints/ba0000004")
    monkeypatch.setenv("RATE", "0.001")
    train_here(*arguments)
    wanted = "optimizer.lr: 0.002 until ba0000002, 0.001 from here on"
    assert wanted in capsys.readouterr().out
