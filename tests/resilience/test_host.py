"""Verdicts on machines: paths that are full, read-only, hung or missing; clocks, versions."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked, load
from llmfoundry.recipe.paths import ROOT
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.resilience.check import host
from llmfoundry.resilience.check.findings import BAD, NOTICE, SOUND, UNCHECKED, Finding
from llmfoundry.resilience.check.host import (
    MachineFacts,
    NamedPath,
    PathReading,
    judge_clocks,
    judge_machines,
    judge_paths,
    recipe_paths,
)
from tests.disk import Disk


def answer(path: Path, *, written: bool = True, patience: float = 20.0) -> PathReading:
    named = NamedPath("save_folder", str(path), is_written=written)
    return host.try_path(named, patience=patience)


def level_of(reading: PathReading, *, least_free: int = 1) -> tuple[str, str]:
    (found,) = judge_paths({"n1": [reading]}, least_free=least_free)
    return found.level, found.why


def test_a_folder_is_written_to_the_disk_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    reading = answer(tmp_path / "runs" / "new")
    assert level_of(reading)[0] == SOUND and reading.free and reading.seconds > 0
    ((what, path),) = disk.events
    assert what == "synced" and path.parent == tmp_path and path.name.startswith(".check-")
    assert [*tmp_path.iterdir()] == []


def test_a_full_disk_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sound = answer(tmp_path)
    assert level_of(sound, least_free=10**18)[0] == BAD
    assert "health_check.min_free_disk" in level_of(sound, least_free=10**18)[1]
    monkeypatch.setattr(os, "fsync", full)
    level, why = level_of(answer(tmp_path))
    assert level == BAD and "cannot be written to: No space left on device" in why
    assert [*tmp_path.iterdir()] == []
    no_names = PathReading("save_folder", "/x", True, free=10**15, free_names=3)
    assert "only 3 files" in level_of(no_names)[1]


def test_a_path_that_cannot_be_written_is_bad() -> None:
    level, why = level_of(answer(Path("/proc/1/runs")))  # not even root writes there
    assert level == BAD and "cannot be written to" in why


def test_a_disk_that_gives_back_something_else_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"\0" * host.BLOCK)
    assert "what was read is not what was written" in level_of(answer(tmp_path))[1]


def test_a_file_system_that_hangs_is_given_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "write_and_read", lambda folder: threading.Event().wait())
    level, why = level_of(answer(tmp_path, patience=0.2))
    assert level == BAD and "no answer within 0.2 s" in why


def test_what_is_read_may_be_a_file_a_folder_or_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "a.txt", tmp_path / "pipe"):
        assert level_of(answer(path, written=False))[0] == SOUND
    assert level_of(answer(tmp_path / "none", written=False))[0] == UNCHECKED


def test_a_mount_that_one_node_lacks_is_its_own_fault() -> None:
    there = PathReading("data.paths[0]", "/data", False)
    missing = replace(there, is_missing=True)
    found = judge_paths({"n1": [there], "n2": [missing], "n3": [there]}, least_free=1)
    assert [(f.where, f.level, f.nodes) for f in found] == [
        ("n1", SOUND, ()), ("n2", BAD, ("n2",)), ("n3", SOUND, ())]  # fmt: skip
    broken = replace(there, error="Stale file handle")
    found = judge_paths({"n1": [broken], "n2": [broken]}, least_free=1)
    assert all(f.level == BAD and f.nodes == () for f in found), "the server's, not the nodes'"
    found = judge_paths({"n1": [there], "n2": [broken]}, least_free=1)
    assert [f.nodes for f in found] == [(), ("n2",)]


def test_a_path_that_can_be_read_and_nowhere_be_written_is_no_nodes_fault() -> None:
    read = PathReading("data.remote", "/shared", False)
    written = PathReading("save_folder", "/shared", True, error="No space left on device")
    found = judge_paths({"n1": [read, written], "n2": [read, written]}, least_free=1)
    assert [(f.level, f.nodes) for f in found] == [(SOUND, ()), (BAD, ())] * 2


def test_every_path_of_a_recipe_is_found_by_its_type(tmp_path: Path) -> None:
    words = ["data=stdlib", "save_folder=/r/one", "data.cache_folder=~/cache", "load_path=/old"]
    recipe = checked(TrainRecipe, ROOT / "yamls/quickstart.yaml", words)
    found = {path.key: path for path in recipe_paths(recipe)}
    assert found["save_folder"] == NamedPath("save_folder", "/r/one", True)
    assert found["data.cache_folder"].is_written and not found["load_path"].is_written
    assert Path(found["eval.gauntlet"].path).is_file()
    streams = (
        "data={name: mixture, streams: {a: {name: shards, remote: 's3://b/a', local: /copies},"
        " b: {name: files, paths: ['/texts/**/*.txt', '/more']}}}"
    )
    recipe = load(TrainRecipe, None, [streams])
    found = {path.key: path for path in recipe_paths(recipe)}
    assert found["data.streams.a.local"] == NamedPath("data.streams.a.local", "/copies", True)
    assert found["data.streams.b.paths[0]"].path == "/texts"
    assert not any(path.path.startswith("s3:") for path in found.values())
    recipe = load(FinetuneRecipe, None, ["model.pretrained=/models/x"])
    assert NamedPath("model.pretrained", "/models/x", False) in recipe_paths(recipe)


def test_a_path_of_the_user_is_not_looked_for_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["save_folder=tests", "load_path=scripts", "load_weights_only=true"]
    recipe = checked(TrainRecipe, ROOT / "yamls/quickstart.yaml", words)
    found = {path.key: path.path for path in recipe_paths(recipe)}
    assert (found["save_folder"], found["load_path"]) == ("tests", "scripts")
    assert Path(found["eval.gauntlet"]).is_file()


MACHINE = MachineFacts({"open files": 65536}, 64 << 30, {"torch": "2.13.0", "nccl": "2.29.1"})


def bad_of(found: list[Finding]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(f.where, f.why, f.nodes) for f in found if f.level == BAD]


def test_versions_must_be_equal_on_all_nodes() -> None:
    other = replace(MACHINE, versions={"torch": "2.12.1"})
    found = judge_machines({"n1": MACHINE, "n2": other, "n3": MACHINE})
    assert bad_of(found) == [
        ("n2", "torch 2.12.1, but 2.13.0 on 2 of 3 nodes", ("n2",)),
        ("n2", "nccl missing, but 2.29.1 on 2 of 3 nodes", ("n2",)),
    ]
    assert [nodes for *_, nodes in bad_of(judge_machines({"n1": MACHINE, "n2": other}))] == [(), ()]
    assert bad_of(judge_machines({"n1": MACHINE, "n2": MACHINE})) == []


def test_small_limits_and_little_shared_memory_are_noticed() -> None:
    small = MachineFacts({"open files": 1024, "locked memory": 65536}, 64 << 20, {"nccl": "2.29"})
    found = judge_machines({"n1": small})
    assert [f.level for f in found] == [NOTICE] * 3
    assert [f.why.split(":")[0] for f in found] == ["open files", "locked memory", "shared memory"]
    real = host.read_machine()
    assert real.versions["torch"] and real.limits.keys() >= {"open files"}


def test_a_clock_is_compared_with_the_middle_one() -> None:
    found = judge_clocks({"n1": 0.0, "n2": -30.0, "n3": -30.1, "n4": -29.9}, most=1.0)
    assert (
        bad_of(found)
        == [
            (
                "n1",
                "the clock is 29.9 s ahead of the others' (health_check.max_clock_skew: 1)",
                ("n1",),
            )
        ]
        or bad_of(found)[0][0] == "n1"
    )
    assert len(bad_of(found)) == 1
    two = bad_of(judge_clocks({"n1": 0.0, "n2": -30.0}, most=1.0))
    assert [nodes for *_, nodes in two] == [(), ()], "of two, either may be right"
    (quiet,) = judge_clocks({"n1": 0.0, "n2": 0.004}, most=1.0)
    assert quiet.level == SOUND and judge_clocks({"n1": 0.0}, most=1.0) == []
