"""Saves that fail: reported at once, tried again, known to all processes; and what saves remove."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from llmfoundry.checkpoint.save import Checkpointer, Contents, Reports, SavePolicy
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.checkpoint.verify import find_checkpoint, find_damage
from llmfoundry.cli.script import run as run_script
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.recipe.train import TrainRecipe
from tests.disk import Disk
from tests.tiny import losses, write_recipe
from tests.train.here import train_here
from tests.warm_scripts import on_ranks

ALONE = World(0, 1, 0, torch.device("cpu"))
BRIEF = ("max_duration=6ba", "save_interval=2ba", "eval=off")
FULL = "No space left on device"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a run that was never disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("saving")
        write_recipe(folder)
        patch.chdir(folder)
        train_here("whole", *BRIEF)
        yield folder


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the disk full for files that match, as the kernel reports it."""
    return partial(fill_disk, monkeypatch)


def fill_disk(
    patch: pytest.MonkeyPatch,
    pattern: str,
    *,
    times: int = 1000,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Writing a file whose path matches fails the first `times`, and `then` is called."""
    real, failed = Path.open, []

    def opened(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        matches = re.search(pattern, str(self)) and set(mode) & set("wa")
        if not matches or len(failed) == times:
            return real(self, mode, *args, **kwargs)
        failed.append(self)
        then()
        return real(Path("/dev/full"), mode, buffering=0)

    patch.setattr(Path, "open", opened)


def names(run: Path) -> list[str]:
    return sorted(f.name for f in (run / "checkpoints").iterdir())


def test_a_checkpoint_counts_once_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the power cut takes, a folder with COMMIT is whole; also what libraries wrote."""

    def add_files(folder: Path) -> None:
        (folder / "adapter").mkdir()
        (folder / "adapter/weights").write_bytes(b"of a library that does not sync")

    run = tmp_path / "exp__1_3e-4"  # as a file of tensors may be called
    run.mkdir()
    checkpointer = Checkpointer(
        Storage(run),
        ALONE,
        Contents({}, {}, add_files),
        SavePolicy(keep=-1, background=False, max_failures=1),
        Reports(print),
    )
    disk = Disk(monkeypatch)
    model: Any = nn.Linear(2, 3)
    folder = checkpointer.save(0, model, None, {"batch": 0}, last=True)
    counts = disk.place("named", folder / "COMMIT")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "COMMIT"]
    assert {"state.json", "weights", ".metadata"} < {path.name for path in files}
    for path in [*files, folder / "adapter", folder.parent, run]:
        assert disk.place("synced", path) < counts
    assert counts < disk.place("synced", folder)


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_save_that_fails_is_reported_and_the_next_one_tried(
    place: Path,
    full_disk: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    background: str,
) -> None:
    name = f"failed-{background}"
    full_disk(f"{name}/.*ba0000002/.*distcp")
    run = train_here(name, *BRIEF, f"save_async={background}")
    said = capsys.readouterr()
    [line] = [line for line in said.out.splitlines() if FULL in line]
    assert "save_folder: the checkpoint of batch 2 was not saved: " in line
    assert "Traceback" not in said.out + said.err
    assert names(run) == ["ba0000004", "ba0000006"]
    assert losses(run) == losses(Path("runs/whole"))


@pytest.mark.parametrize("background", ["false", "true"])
def test_too_many_failures_in_a_row_end_the_run(
    place: Path, full_disk: Callable[..., None], background: str
) -> None:
    name = f"ended-{background}"
    full_disk(f"{name}/.*ba0*[2-9]/")
    arguments = (f"save_async={background}", "save_interval=1ba", "save_max_failures=2")
    wanted = rf"batch 3 was not saved: {FULL} \(2 saves in a row\); the newest is ba0000001"
    with pytest.raises(UserError, match=wanted) as caught:
        train_here(name, *BRIEF, *arguments)
    assert len(str(caught.value).splitlines()) == 1
    run = Path("runs") / name
    assert names(run) == ["ba0000001"]
    assert max(losses(run)) == 3 if background == "false" else max(losses(run)) in (3, 4)
    assert json.loads((run / "run.json").read_text())["summary"]["status"] == "failed"


def test_failures_that_are_not_in_a_row_do_not_end_it(
    place: Path, full_disk: Callable[..., None]
) -> None:
    full_disk("apart/.*ba000000[135]/")
    run = train_here("apart", *BRIEF, "save_interval=1ba", "save_max_failures=2")
    assert names(run) == ["ba0000002", "ba0000004", "ba0000006"]


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_last_save_that_fails_is_an_error_and_the_same_command_resumes(
    place: Path, background: str
) -> None:
    name = f"last-{background}"
    arguments = (name, *BRIEF, f"save_async={background}")
    with pytest.MonkeyPatch.context() as patch:
        fill_disk(patch, f"{name}/.*ba0000006/")
        with pytest.raises(UserError, match=f"batch 6 was not saved: {FULL}; the newest is ba000"):
            train_here(*arguments)
    run = train_here(*arguments)
    assert losses(run) == losses(Path("runs/whole"))
    assert names(run) == ["ba0000002", "ba0000004", "ba0000006"]


@pytest.mark.parametrize("times", [1, 1000])
def test_a_signal_while_a_save_fails(place: Path, times: int) -> None:
    """The save that the signal asks for is tried; if it fails too, the run says what is left."""
    run = Path("runs") / f"signal-{times}"

    asked: list[int] = []

    def stop() -> None:
        if not asked:  # a second one would kill
            asked.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        fill_disk(patch, f"{run.name}/.*ba0000004/.*distcp", times=times, then=stop)
        if times == 1:
            with pytest.raises(SystemExit, match="75"):  # saved: run it again
                train_here(run.name, *BRIEF)
        else:
            with pytest.raises(UserError, match=f"batch 4 was not saved: {FULL}.*ba0000002; make"):
                train_here(run.name, *BRIEF)
    assert names(run) == ["ba0000002", "ba0000004"][: 2 if times == 1 else 1]
    train_here(run.name, *BRIEF)
    assert losses(run) == losses(Path("runs/whole"))


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("recipe.yaml", "save_folder: .* cannot be written: "),
        ("tokenizer.json", "save_folder: .* cannot be written: "),
        ("metrics.jsonl", "lacks 9 lines: "),
        ("run.json", "was not written: "),
        ("report.html", "report.html was not written: .*"),
    ],
)
def test_a_full_disk_is_one_line_whichever_file_it_hits(
    place: Path,
    full_disk: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    file: str,
    says: str,
) -> None:
    full_disk(f"runs/full-{file}/(tokenizer/)?{re.escape(file)}")
    try:
        train_here(f"full-{file}", *BRIEF)
        lines = capsys.readouterr().out.splitlines()
    except UserError as error:
        lines = str(error).splitlines()
    found = [line for line in lines if re.search(f"{says}.*{FULL}", line)]
    assert found and len(set(found)) == 1, lines
    assert not any("Traceback" in line for line in lines)


def fail_as_a_full_disk(recipe: TrainRecipe) -> None:
    Path("/dev/full").write_text("x" * 10)


def test_a_full_disk_is_one_line_in_every_script(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_script(TrainRecipe, f"{__name__}:fail_as_a_full_disk", ["tiny.yaml"])
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(FULL)


def make_saver(folder: Path, world: World, **settings: Any) -> tuple[Checkpointer, list[str]]:
    """A writer of checkpoints of any module, and what it warns of."""
    said: list[str] = []

    given = {"keep": -1, "background": False, "max_failures": 2} | settings
    contents = Contents({"recipe.yaml": ""}, {})
    policy, reports = SavePolicy(**given), Reports(said.append)
    return Checkpointer(Storage(folder), world, contents, policy, reports), said


def parts() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


FILES = ("__0_0.distcp", ".metadata", "state.json", "recipe.yaml", "COMMIT")


@pytest.mark.parametrize("file", FILES)
def test_a_full_disk_is_one_line_whichever_file_of_a_checkpoint_it_hits(
    tmp_path: Path, full_disk: Callable[..., None], file: str
) -> None:
    full_disk(f"ba0000001/.*{re.escape(file)}")
    saver, said = make_saver(tmp_path, ALONE)
    saver.save(1, *parts(), {"batch": 1})
    assert [line.split(": ")[2].split(" (")[0].split(";")[0] for line in said] == [FULL]
    assert not names(tmp_path), "what is there of it takes the room that is needed"
    saver.save(2, *parts(), {"batch": 2})
    whole = Checkpoint.at(tmp_path / "checkpoints" / "ba0000002")
    assert find_checkpoint(Storage(tmp_path), note=print) == whole


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=20),
    )
    world = World(rank, 2, rank, torch.device("cpu"))
    reported: list[Any] = []
    for background in (False, True):
        run = folder / f"run-{background}"
        saver, said = make_saver(run, world, background=background)
        for batch, (where, file) in enumerate(
            [(1, "__1_"), (None, ""), (0, ".metadata"), (1, "__1_")], start=1
        ):
            with pytest.MonkeyPatch.context() as patch:
                if rank == where:
                    fill_disk(patch, f"ba000000{batch}/.*{re.escape(file)}")
                try:
                    saver.save(batch, *parts(), {"batch": batch})
                    saver.wait()
                    saver.check()
                except UserError as error:
                    said.append(str(error))
        reported.append(said)
    (folder / f"rank{rank}").write_text(json.dumps(reported))
    dist.barrier()
    dist.destroy_process_group()


def test_one_process_that_cannot_write_is_known_to_all(tmp_path: Path) -> None:
    on_ranks(work, (tmp_path,), 2)
    said = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert said[0] == said[1]
    for background, lines in zip((False, True), said[0], strict=True):
        assert [re.findall(r"batch (\d) was not saved: (.*?)[;(]", line) for line in lines] == [
            [("1", FULL)],
            [("3", f"{FULL} ")],
            [("4", f"{FULL} ")],
        ]
        run = tmp_path / f"run-{background}"
        assert names(run) == ["ba0000002"]
        assert find_damage(Checkpoint.at(run / "checkpoints" / "ba0000002")) is None


def test_a_checkpoint_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    """A signal after a step that was saved by its interval must not put the newest at risk."""
    saver, said = make_saver(tmp_path, ALONE, background=True)
    commit = saver.save(1, *parts(), {"batch": 1}) / "COMMIT"
    saver.wait()
    before = commit.stat().st_ino, commit.stat().st_mtime_ns
    saver.save(1, *parts(), {"batch": 1}, last=True)
    assert (commit.stat().st_ino, commit.stat().st_mtime_ns) == before and not said


def test_what_is_torn_goes_once_there_is_a_newer_checkpoint(tmp_path: Path) -> None:
    saver, _ = make_saver(tmp_path, ALONE)
    for batch in (1, 2, 3, 5):
        saver.save(batch, *parts(), {"batch": batch})
    places = {n: tmp_path / "checkpoints" / f"ba000000{n}" for n in (1, 2, 3, 5)}
    (places[2] / "COMMIT").unlink()  # half-pruned
    (places[3] / "COMMIT").unlink()
    next(places[3].glob("*.distcp")).unlink()  # torn
    (places[5] / "COMMIT").unlink()
    assert find_checkpoint(Storage(tmp_path), note=print) == Checkpoint.at(places[1])
    saver, _ = make_saver(tmp_path, ALONE)
    writing = tmp_path / "checkpoints" / "ba0000000"  # by another process, since this one began
    shutil.copytree(places[2], writing, copy_function=shutil.copyfile)
    assert names(tmp_path) == [f"ba000000{n}" for n in (0, 1, 2, 3, 5)]
    saver.save(4, *parts(), {"batch": 4})
    assert names(tmp_path) == ["ba0000000", "ba0000001", "ba0000004", "ba0000005"]


def test_a_damaged_checkpoint_is_not_counted_among_those_that_are_kept(tmp_path: Path) -> None:
    """Neither a later one, of a run that was refused, nor an earlier one."""
    saver, _ = make_saver(tmp_path, ALONE)
    for batch in (1, 2, 3, 9):
        saver.save(batch, *parts(), {"batch": batch})
    for batch in (3, 9):
        next((tmp_path / "checkpoints" / f"ba000000{batch}").glob("*.distcp")).unlink()
    saver, _ = make_saver(tmp_path, ALONE, keep=2)
    saver.save(4, *parts(), {"batch": 4})
    assert {"ba0000002", "ba0000004"} <= set(names(tmp_path))
    assert "ba0000001" not in names(tmp_path)


def test_a_lowered_number_to_keep_removes_the_oldest_checkpoints(tmp_path: Path) -> None:
    """Those of the runs before, too: at the next save, and the newest of them stay."""
    saver, _ = make_saver(tmp_path, ALONE)
    for batch in (1, 2, 3, 4, 5):
        saver.save(batch, *parts(), {"batch": batch})
    assert names(tmp_path) == [f"ba000000{n}" for n in (1, 2, 3, 4, 5)]
    saver, _ = make_saver(tmp_path, ALONE, keep=3)
    saver.save(6, *parts(), {"batch": 6})
    assert names(tmp_path) == [f"ba000000{n}" for n in (4, 5, 6)]


def test_a_resumed_run_with_a_lowered_number_to_keep_removes_the_oldest(place: Path) -> None:
    """The key may change from one start to the next, and what it removes is gone at the end."""
    shutil.copytree("runs/whole", "runs/lowered")
    assert names(Path("runs/lowered")) == ["ba0000002", "ba0000004", "ba0000006"]
    longer = (*BRIEF, "max_duration=8ba", "save_num_checkpoints_to_keep=2")
    assert names(train_here("lowered", *longer)) == ["ba0000006", "ba0000008"]
