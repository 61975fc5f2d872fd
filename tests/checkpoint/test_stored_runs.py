"""Runs whose folder is a URL: what they leave there, and what they resume from after any end."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from llmfoundry.api.conversion import convert
from llmfoundry.checkpoint import run_lock
from llmfoundry.checkpoint.object_storage import find_run
from llmfoundry.checkpoint.open_run import run_storage
from llmfoundry.checkpoint.storage import Checkpoint
from llmfoundry.cli.commands.evaluate import evaluate
from llmfoundry.cli.commands.generate import generate
from llmfoundry.cli.commands.track import track
from llmfoundry.cli.commands.train import train
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.store import Store
from llmfoundry.errors import UserError
from llmfoundry.events import add_event
from llmfoundry.recipe.after_training import ConvertRecipe, EvalRecipe, GenerateRecipe, TrackRecipe
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import finetune_recipe, losses, write_recipe
from tests.train.here import train_here

SHORT = ("save_interval=2ba", "eval=off", "optimizer.lr=1e-3")
WHOLE = ("max_duration=6ba", *SHORT)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a run in a folder, to which others are compared."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("stored")
        write_recipe(folder)
        patch.chdir(folder)
        patch.setattr(run_lock, "_DEAD_S", 1.0)
        patch.setattr(run_lock, "_LOOK_S", 0.1)
        patch.setattr(run_lock, "_SETTLE_S", 0.01)
        train_here("local", *WHOLE)
        yield folder


def store_of(url: str) -> Store:
    return Store(url, FetchOptions(), key="save_folder")


def train_at(url: str, *overrides: str) -> None:
    train_here(url.rpartition("/")[2], f"save_folder={url}", *overrides)


def losses_at(url: str, folder: Path) -> dict[int, float]:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(store_of(url).read("metrics.jsonl"))
    return losses(folder)


def forget(place: Path) -> None:
    """Another machine, on which nothing is left."""
    for name in ("runs", "runs-read"):
        shutil.rmtree(place / "cache" / name, ignore_errors=True)


@pytest.mark.parametrize("kind", ["memory://bucket", pytest.param("file", marks=pytest.mark.slow)])
def test_a_run_at_a_url_leaves_there_what_one_in_a_folder_does(
    kind: str, place: Path, tmp_path: Path
) -> None:
    url = (f"file://{tmp_path}" if kind == "file" else kind) + "/runs/mine"
    train_at(url, *WHOLE)
    local = Path("runs/local")
    wanted = {p.relative_to(local).as_posix() for p in local.rglob("*") if p.is_file()}
    assert store_of(url).files().keys() == wanted
    assert losses_at(url, tmp_path / "read") == losses(local)
    for name in ("checkpoints/ba0000004/COMMIT", "checkpoints/ba0000006/COMMIT"):
        mine, theirs = json.loads(store_of(url).read(name)), json.loads((local / name).read_text())
        same = {key for key in mine["files"] if "recipe" not in key and "state" not in key}
        assert {k: mine["files"][k] for k in same} == {k: theirs["files"][k] for k in same}
    assert not list((place / "cache/runs").glob("*/checkpoints/*")), "files that were sent are gone"


@pytest.mark.slow
def test_what_is_written_between_two_attempts_is_sent_with_the_next(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/runs/struck"
    monkeypatch.setenv("LLMFOUNDRY_ENDS", str(tmp_path / "ends"))
    recipe = checked(TrainRecipe, Path("tiny.yaml"), [f"save_folder={url}"])
    folder = run_storage(recipe).folder
    start = add_event(folder, "start", "attempt 1", action="start", attempt=1)
    train_at(url, *SHORT, "max_duration=2ba")
    store = store_of(url)
    assert events_of(store) == [start]
    hang = add_event(folder, "hang", "rank 1 hangs", action="end")  # and all were killed
    (folder / "hangs/step-3").mkdir(parents=True)
    (folder / "hangs/step-3/rank-1.txt").write_text("stacks")
    for supervised in (True, False):  # without a supervisor: the same run, as its metrics say
        if not supervised:
            monkeypatch.delenv("LLMFOUNDRY_ENDS")
            add_event(folder, "hang", "again", action="end")
        train_at(url, *SHORT, f"max_duration={4 if supervised else 6}ba")
        reported = events_of(store)
        assert reported[:2] == [start, hang] and len(reported) == (2 if supervised else 3)
    assert store.read("hangs/step-3/rank-1.txt") == b"stacks"

    stale = tmp_path / "stale"  # another run was at this URL when this machine worked on it
    shutil.copytree(folder, stale)
    train_at(url, *SHORT, "max_duration=2ba", "save_overwrite=true")
    assert events_of(store) == []
    for name in ("metrics.jsonl", "events.jsonl", "hangs/step-3/rank-1.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(stale / name, folder / name)
    train_at(url, *SHORT, "max_duration=4ba")
    assert events_of(store) == [] and "hangs/step-3/rank-1.txt" not in store.files()


def events_of(store: Store) -> list[dict[str, Any]]:
    if "events.jsonl" not in store.files():
        return []
    return [json.loads(line) for line in store.read("events.jsonl").splitlines()]


def test_another_machine_resumes_where_it_was(place: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/runs/moved"
    train_at(url, *WHOLE, "save_async=true")
    whole = losses_at(url, tmp_path / "whole")
    store = store_of(url)
    store.delete([n for n in store.files("checkpoints") if "ba0000002" not in n])
    forget(place)
    train_at(url, *WHOLE)
    assert losses_at(url, tmp_path / "again") == whole == losses(Path("runs/local"))
    assert "resuming" not in store.read("metrics.jsonl").decode()


def test_of_old_checkpoints_the_newest_stay_and_torn_ones_go(place: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/runs/pruned"
    store = store_of(url)
    train_at(url, *SHORT, "max_duration=2ba")
    store.write("checkpoints/ba0000001/__0_0.distcp", b"of a save that was killed")
    train_at(url, *WHOLE, "max_duration=6ba", "save_num_checkpoints_to_keep=2")
    assert store.folders("checkpoints") == ["ba0000004", "ba0000006"]


def test_a_damaged_checkpoint_is_refused_and_the_one_before_used(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/runs/damaged"
    train_at(url, *WHOLE)
    store = store_of(url)
    name = "checkpoints/ba0000006/__0_0.distcp"
    data = bytearray(store.read(name))
    data[len(data) // 2] ^= 1
    store.write(name, bytes(data))
    forget(place)
    capsys.readouterr()
    train_at(url, *WHOLE)
    said = capsys.readouterr().out
    assert (
        f"checkpoint {url}/checkpoints/ba0000006 is refused: its file __0_0.distcp is dam" in said
    )
    assert f"resuming from {url}/checkpoints/ba0000004" in said
    assert losses_at(url, tmp_path / "again") == losses(Path("runs/local"))


class FailingStore:
    """Calls of a store's methods that fail as long as `times` is not used up."""

    def __init__(self, patch: pytest.MonkeyPatch, pattern: str, times: int = 1000) -> None:
        self.left = times
        for method in ("write", "upload"):
            patch.setattr(Store, method, self._failing(getattr(Store, method), pattern))

    def _failing(self, real: Callable[..., Any], pattern: str) -> Callable[..., Any]:
        def call(store: Store, name: str, *args: Any, **kwargs: Any) -> Any:
            if re.search(pattern, name) and self.left:
                self.left -= 1
                raise UserError(f"save_folder: {store.url}/{name}: the store is ill")
            return real(store, name, *args, **kwargs)

        return call


@pytest.mark.parametrize(
    ("file", "background"),
    [
        ("optimizer__0_0.distcp", "true"),
        pytest.param("COMMIT", "false", marks=pytest.mark.slow),
    ],
)
def test_a_store_that_fails_costs_a_save_and_not_the_run(
    file: str, background: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/runs/ill"
    with pytest.MonkeyPatch.context() as patch:
        FailingStore(patch, f"ba0000002/{file}")
        train_at(url, *WHOLE, f"save_async={background}")
    said = capsys.readouterr().out
    where = f"{url}/checkpoints/ba0000002/{file}: the store is ill"
    assert f"save_folder: the checkpoint of batch 2 was not saved: {where}; training" in said
    assert store_of(url).folders("checkpoints") == ["ba0000004", "ba0000006"]
    assert losses_at(url, tmp_path / "read") == losses(Path("runs/local"))


@pytest.mark.slow
def test_a_last_save_that_fails_is_an_error_and_the_same_command_resumes(
    place: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/runs/late"
    with pytest.MonkeyPatch.context() as patch:
        FailingStore(patch, "ba0000006")
        with pytest.raises(UserError, match=r"batch 6 was not saved: .*; the newest is ba0000004"):
            train_at(url, *WHOLE)
    train_at(url, *WHOLE)
    assert losses_at(url, tmp_path / "read") == losses(Path("runs/local"))


def test_two_runs_at_one_url_the_second_is_refused(place: Path, tmp_path: Path) -> None:
    """Of another machine: another working folder, and a lock that somebody renews."""
    url = f"file://{tmp_path}/runs/held"
    store = store_of(url)
    facts = {"owner": "x", "who": "process 7 on far, since noon", "place": "far 1 2"}
    ended = threading.Event()

    def live() -> None:
        while not ended.is_set():
            store.write("run.lock", run_lock.encoded({**facts, "beat": time.monotonic()}))
            time.sleep(0.05)

    holder = threading.Thread(target=live)
    holder.start()
    try:
        time.sleep(0.2)
        with pytest.raises(UserError, match=r"is in use by process 7 on far, since noon; wait"):
            train_at(url, *WHOLE)
        assert store.files().keys() == {"run.lock"}
    finally:
        ended.set()
        holder.join()
    train_at(url, *WHOLE)  # which waits until it is sure
    assert "run.lock" not in store.files()


def test_one_that_was_taken_over_saves_nothing_more(place: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/runs/lost"
    store, real = store_of(url), Store.upload
    other = {"owner": "y", "who": "process 8 on near", "place": "near", "beat": 0}

    def upload(self: Store, name: str, path: Path) -> None:
        real(self, name, path)
        if name.endswith("ba0000004/__0_0.distcp"):
            store.write("run.lock", run_lock.encoded(other))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "upload", upload)
        with pytest.raises(UserError, match=r"in use by process 8 on near.*newest is ba0000002"):
            train_at(url, *WHOLE)
    committed = [name for name in store.files("checkpoints") if name.endswith("COMMIT")]
    assert committed == ["checkpoints/ba0000002/COMMIT"]
    assert json.loads(store.read("run.lock"))["owner"] == "y"


@pytest.mark.slow
def test_every_script_reads_a_run_or_a_checkpoint_at_a_url(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/runs/read"
    overrides = ("max_duration=6ba", "save_interval=2ba", "optimizer.lr=1e-3")
    train_at(url, *overrides)
    train_here("beside", *overrides)
    forget(place)
    for where in ("runs/beside", url):
        evaluate(checked(EvalRecipe, None, [f"checkpoint={where}"]))
    theirs = json.loads(Path("runs/beside/eval/ba0000006/results.json").read_text())
    mine = json.loads(store_of(url).read("eval/ba0000006/results.json"))
    assert (
        mine["metrics"]["metrics/eval/bits_per_byte"]
        == theirs["metrics"]["metrics/eval/bits_per_byte"]
    )
    assert mine["checkpoint"] == f"{url}/checkpoints/ba0000006"
    for where, name in (("runs/beside", "theirs"), (f"{url}/checkpoints/ba0000006", "mine")):
        output = str(tmp_path / name)
        convert(checked(ConvertRecipe, None, [f"checkpoint={where}", "to=hf", f"output={output}"]))
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("theirs", "mine")]
    assert weights[0] == weights[1]
    texts = []
    for where in ("runs/beside", f"{url}/checkpoints/ba0000006"):
        capsys.readouterr()
        short = ["max_new_tokens=8", "temperature=0", "prompt=line"]
        generate(checked(GenerateRecipe, None, [f"checkpoint={where}", *short]))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    pytest.importorskip("tensorboard")
    sent = ["logger.tensorboard=true", "logger.mlflow=false"]
    track(checked(TrackRecipe, None, [f"run={url}", *sent]))
    assert any(name.startswith("tensorboard/") for name in store_of(url).files())


@pytest.mark.slow
def test_training_begins_with_what_a_url_has(place: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/runs/base"
    train_at(url, *SHORT, "max_duration=4ba")
    train_here("from-local", *SHORT, "max_duration=4ba")
    forget(place)
    for name, where in (("on-url", url), ("on-folder", "runs/from-local")):
        train_here(name, *SHORT, "max_duration=8ba", f"load_path={where}", "schedule.t_warmup=2ba")
        weights = (f"load_path={where}", "load_weights_only=true")
        train_here(f"{name}-weights", *SHORT, "max_duration=2ba", *weights)
        model = {"pretrained": where}
        finetune_recipe(place, name=f"{name}.yaml", model=model)
        train(
            checked(
                FinetuneRecipe,
                f"{name}.yaml",
                [f"run_name={name}-tuned", "max_duration=2ba", *SHORT],
            ).resolve()
        )
    for kind in ("", "-weights", "-tuned"):
        assert losses(Path(f"runs/on-url{kind}")) == losses(Path(f"runs/on-folder{kind}"))


def test_beginning_anew_leaves_nothing_of_the_run_before(place: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/runs/anew"
    store = store_of(url)
    train_at(url, *SHORT, "max_duration=3ba", "save_interval=1ba")
    store.write("eval/ba0000001.json", b'{"time/batch": 1}')
    forget(place)
    with pytest.raises(UserError, match=f"^save_folder: {url} holds checkpoints of an earlier run"):
        train_at(url, *SHORT, "autoresume=false")
    train_at(url, *SHORT, "max_duration=2ba", "save_overwrite=true")
    assert store.folders("checkpoints") == ["ba0000002"] and not store.files("eval")
    assert max(losses_at(url, tmp_path / "read")) == 2


def test_only_names_that_saves_give_are_checkpoints(tmp_path: Path) -> None:
    assert str(find_run(f"file://{tmp_path}/runs/ba12", "load_path")).endswith("/runs/ba12")
    found = find_run(f"file://{tmp_path}/runs/x/checkpoints/ba0000012", "load_path")
    assert isinstance(found, Checkpoint) and str(found.storage).endswith("/runs/x")
    assert not isinstance(find_run(f"file://{tmp_path}/runs/ba12", "load_path"), Checkpoint)


def test_what_leads_out_of_the_folder_is_refused(place: Path, tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file("/strange/runs/x/a/../../../escaped", b"")
    fsspec.filesystem("memory").pipe_file("/strange/runs/x/checkpoints/ba0000001/COMMIT", b"{}")
    with pytest.raises(UserError, match=r"'[a-z/.]*escaped' cannot be the name of a run's"):
        train_at("memory://strange/runs/x", *SHORT)


def test_what_says_nothing_without_a_url_is_refused() -> None:
    for key, value in (("save_local_folder", "x"), ("save_local_copies", "1")):
        with pytest.raises(
            UserError, match=rf"^{key}: has no effect where save_folder is a folder"
        ):
            checked(TrainRecipe, None, [f"{key}={value}"])
    for recipe in (EvalRecipe, ConvertRecipe):
        with pytest.raises(UserError, match=r"output: s3://b/x is an address; write a folder"):
            checked(recipe, None, ["checkpoint=runs/x", "output=s3://b/x"])
    with pytest.raises(UserError, match=r"^save_folder: s3:// names no bucket; write s3://BUCKET"):
        checked(TrainRecipe, None, ["save_folder=s3://"])
