"""Whether checkpoints are still there before a restart: judged, and seen in folders and stores."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from llmfoundry.builders.resume import find_start
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.store import Store
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import NoRestart
from llmfoundry.exit_status import FAILED, GIVE_UP, ResumeLimits
from llmfoundry.recipe.resilience import SuperviseConfig
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.resilience.supervise.checkpoints import (
    START,
    WAIT,
    expected_newest,
    judge_listing,
    list_in_folder,
    list_in_store,
)
from llmfoundry.resilience.supervise.checkpoints import CheckpointListing as Listing
from llmfoundry.resilience.supervise.decide import STOP, Decision
from tests.data.s3_server import s3_server

GONE = Listing(missing="runs/x/checkpoints")
AWAY = Listing(problem="s3://b/x: no answer", may_pass=True)
REFUSED = Listing(problem="s3://b/x: access is refused")


def judge(expected: int, look: Listing, waited: float = 0.0, looks: int = 1) -> Decision:
    limits = SuperviseConfig(vanished_seconds=60.0, store_seconds=3600.0)
    return judge_listing(expected, look, limits, where="runs/x", waited=waited, tries=looks)


def test_an_attempt_begins_where_nothing_is_lost() -> None:
    for expected, look in (
        (-1, GONE),
        (-1, AWAY),
        (20, Listing((20, 10))),
        (20, Listing((30,))),
    ):
        assert judge(expected, look).action == START


def test_what_is_missing_is_looked_for_again_and_then_named() -> None:
    for look in (GONE, Listing((10,)), REFUSED):
        assert [judge(20, look, waited).action for waited in (0, 59, 60)] == [WAIT, WAIT, STOP]
        assert judge(20, look, 60).status == GIVE_UP
    assert judge(20, GONE, 59, looks=6).wait == 1.0  # not beyond the limit
    assert "runs/x/checkpoints is not there" in judge(20, GONE, 60).why
    older = judge(20, Listing((10,)), 60).why
    assert "checkpoint ba0000020 in runs/x has vanished" in older
    assert "the newest there is ba0000010" in older and "repeat all after step 10" in older


def test_a_store_that_does_not_answer_is_waited_for_longer_with_growing_pauses() -> None:
    waits = [judge(20, AWAY, 0, looks=n).wait for n in range(1, 12)]
    assert waits == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert judge(20, AWAY, 3599).action == WAIT
    late = judge(20, AWAY, 3600)
    assert (late.action, late.status) == (STOP, FAILED) and "no answer" in late.why


def test_what_has_to_be_there_is_the_most_that_anybody_has_seen() -> None:
    assert expected_newest(10, 30, Listing((30, 20))) == 30
    assert expected_newest(10, 20, Listing((30, 20))) == 30  # committed as the run was killed
    assert expected_newest(10, 30, GONE) == 30  # renamed while the run was under way
    assert expected_newest(10, -1, Listing((30,))) == 30  # its processes are on other machines
    assert expected_newest(10, -1, AWAY) == 10
    assert expected_newest(90, 40, Listing((40,)), went_back=True) == 40  # after a spike
    assert expected_newest(90, -1, AWAY, went_back=True) == -1


def make(run: Path, *batches: int) -> None:
    for batch in batches:
        folder = run / f"checkpoints/ba{batch:07d}"
        folder.mkdir(parents=True)
        (folder / "COMMIT").touch()


def test_a_folder_shows_what_counts_and_where_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/x"
    assert list_in_folder(run) == Listing(missing="runs")
    make(run, 10, 20)
    (run / "checkpoints/ba0000030").mkdir()  # cut short
    (run / "checkpoints/notes").touch()
    assert list_in_folder(run) == Listing((20, 10))
    (run / "checkpoints").rename(run / "old")
    assert list_in_folder(run) == Listing(missing="runs/x/checkpoints")

    def stale(path: Path) -> list[str]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(os, "listdir", stale)
    found = list_in_folder(run)
    assert found.may_pass and found.problem.startswith("Stale file handle")


def test_a_store_that_is_empty_is_distinguished_from_one_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with s3_server() as (server, put):
        for name, value in (("ACCESS_KEY_ID", "id"), ("SECRET_ACCESS_KEY", "secret")):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
        url, options = "s3://shards/runs/x", FetchOptions(retry=1, timeout=2.0)
        assert list_in_store(url, options) == Listing()
        put("runs/x/checkpoints/ba0000010/COMMIT", b"{}")
        put("runs/x/checkpoints/ba0000020/COMMIT", b"{}")
        put("runs/x/checkpoints/ba0000030/state.json", b"{}")
        assert list_in_store(url, options) == Listing((20, 10))
        no_bucket = list_in_store("s3://nosuchbucket/runs/x", options)
        assert "there is no bucket nosuchbucket" in no_bucket.problem and not no_bucket.may_pass
        assert judge(20, no_bucket, 60).status == GIVE_UP
        monkeypatch.setattr(server, "next_fault", lambda key, method: "slow down")
        busy = list_in_store(url, options)
        assert busy.may_pass and judge(20, busy, 60).action == WAIT
        monkeypatch.setattr(server, "next_fault", lambda key, method: None)
        store = Store(url, options, key="save_folder")
        store.delete([f"checkpoints/ba00000{n}0/COMMIT" for n in (1, 2)])
        emptied = list_in_store(url, options)
        assert emptied == Listing() and judge(20, emptied, 60).status == GIVE_UP
    gone = list_in_store(url, options)  # nobody listens there any more
    assert gone.may_pass and "retry" in gone.problem


def test_a_run_that_finds_less_than_its_supervisor_knows_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine where the file system is not mounted, as the supervisor's own has it."""
    recipe, run = TrainRecipe(save_folder=str(tmp_path / "run")), Storage(tmp_path / "run")
    for name, value in ResumeLimits(saved=20).environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NoRestart, match=r"ba0000020 of this run has vanished .*: there is none"):
        find_start(recipe, run, ALONE, print)
    make(tmp_path / "run", 10)
    with pytest.raises(NoRestart, match="its newest is ba0000010"):
        find_start(recipe, run, ALONE, print)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # the run may have gone back meanwhile
    for name, value in ResumeLimits(saved=20, before=10).environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    make(tmp_path / "run", 20)
    with pytest.raises(NoRestart, match="no complete checkpoint from before batch 10"):
        find_start(recipe, run, ALONE, print)
